"""CriticalKV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..observed import ObservedPrompt
from ..parts.alloc import Alloc, Kept, promote
from ..parts.options import fraction, one_of
from ..ranked import Scores
from .snapkv import SnapKV

_EPSILON = np.float32(1e-4)


@dataclass(frozen=True)
class CriticalKV(SnapKV, name="criticalkv"):
    """CriticalKV (arXiv 2502.03805): half of a head's budget by SnapKV's score s, the rest by (s + 1e-4) ||v W_O||_1.

    s is the mean over the window's queries. `alloc=adakv0.2` or `alloc=guard0.2` give the counts of each head.

    Args:
        first: share of a head's budget that the first stage takes, 0.5.
    """

    first: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("first", self.first)
        one_of("normalize", self.normalize, ("none",))  # the second stage adds 1e-4 to the score as it is

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """SnapKV's, a mean instead of a sum."""
        n: int = prompt.window if self.attention == "sum" else 1
        mean: Scores = super().scores(prompt) / np.float32(n)
        return mean

    def select(self, prompt: ObservedPrompt, scores: Scores, k: int) -> Kept:
        """In two stages."""
        alloc = Alloc.parse(self.alloc)
        counts = alloc.counts(prompt, scores, self.rows(prompt), k, self.protect_sinks)
        early = prompt.top_of_each(
            scores, [max(int(self.first * n), alloc.floor(k)) for n in counts], self.protect_sinks
        )  # what the allocation made safe stays safe
        late = (scores + _EPSILON) * self.shared(prompt, prompt.score("none", "l1"))
        return prompt.top_of_each(promote(late, early), counts, self.protect_sinks)
