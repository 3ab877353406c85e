"""PyramidKV."""

from __future__ import annotations

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV, name="pyramidkv"):
    """PyramidKV (arXiv 2406.02069): SnapKV's score, budgets that fall linearly from the lowest layer to the highest."""

    alloc: str = "pyramid20"
