"""H2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..observed import ObservedPrompt
from ..parts.alloc import Kept, promote
from ..parts.options import fraction
from ..ranked import Ranked, Scores


@dataclass(frozen=True)
class H2O(Ranked, name="h2o"):
    """H2O (arXiv 2306.14048): heavy hitters by the attention that every query of the prompt gave them, and recent ones.

    Args:
        recent: share of the budget (window included) for the most recent positions, 0.5; never less than the window.
    """

    recent: float = 0.5

    all_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("recent", self.recent)

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """Column sums over all queries, mean over the query group."""
        return prompt.score("total")

    def select(self, prompt: ObservedPrompt, scores: Scores, k: int) -> Kept:
        """Recent positions first, then the heaviest."""
        n = max(0, min(k - self.protect_sinks, int(self.recent * (k + self.window)) - self.window))
        recent = np.arange(prompt.n_cand - n, prompt.n_cand, dtype=np.int32)
        return super().select(prompt, promote(scores, [recent] * len(scores)), k)
