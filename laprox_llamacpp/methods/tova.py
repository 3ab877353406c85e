"""TOVA."""

from __future__ import annotations

from dataclasses import dataclass

from ..ranked import Attended


@dataclass(frozen=True)
class TOVA(Attended, name="tova"):
    """TOVA (arXiv 2401.06104): the attention of the last query, mean over the heads of a layer, which share one set.

    The window stays for comparison's sake; `window=1` is TOVA itself.
    """

    attention: str = "last"
    granularity: str = "layer"
