"""AdaKV."""

from __future__ import annotations

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV, name="adakv"):
    """AdaKV (arXiv 2407.11550): SnapKV's score, the budget of a layer shared among its heads by their best entries.

    `alloc=guard0.2` is kvpress's rule: each head's own best 20 % are safe, the rest is one top-K of the layer.
    """

    alloc: str = "adakv0.2"
