"""SnapKV."""

from __future__ import annotations

from dataclasses import dataclass

from ..ranked import Attended


@dataclass(frozen=True)
class SnapKV(Attended, name="snapkv"):
    """SnapKV (arXiv 2404.14469): the attention that the window gave, summed, averaged over neighbours, per head.

    Window 32 and pooling 7 as in the LaProx paper's comparison; other code bases take 64 and avg5, or 8 and max7.
    """

    pool: str = "avg7"
