"""StreamingLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..observed import ObservedPrompt
from ..parts.alloc import Kept
from ..parts.options import int_at_least
from ..policy import EvictionPolicy


@dataclass(frozen=True)
class Streaming(EvictionPolicy, name="streaming"):
    """StreamingLLM (arXiv 2309.17453): the first positions and the most recent ones, in every head.

    Positions stay the true ones: the paper numbers them anew inside the cache.

    Args:
        protect_sinks: first positions that are kept, 4.
    """

    protect_sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        int_at_least("protect_sinks", self.protect_sinks, 0)

    def keep(self, prompt: ObservedPrompt, k: int) -> Kept:
        """Sinks and the k - protect_sinks last candidates."""
        sinks = min(self.protect_sinks, k)
        last = np.arange(prompt.n_cand - (k - sinks), prompt.n_cand)
        return [np.concatenate([np.arange(sinks), last]).astype(np.int32)] * prompt.n_heads
