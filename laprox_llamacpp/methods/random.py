"""Chance: the floor of every table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..observed import ObservedPrompt
from ..parts.options import int_at_least
from ..ranked import Ranked, Scores


@dataclass(frozen=True)
class Random(Ranked, name="random"):
    """Uniform scores.

    Args:
        seed: of the generator; the same seed and shape keep the same set.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        int_at_least("seed", self.seed, 0)

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """[n_heads, n_cand] in [0, 1)."""
        return np.random.default_rng(self.seed).random((prompt.n_heads, prompt.n_cand), np.float32)
