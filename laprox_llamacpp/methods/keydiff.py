"""KeyDiff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..observed import ObservedPrompt
from ..ranked import Ranked, Scores


@dataclass(frozen=True)
class KeyDiff(Ranked, name="keydiff"):
    """KeyDiff (arXiv 2504.15364): keys that point away from the mean direction of all keys; no query is looked at."""

    signed: ClassVar[bool] = True

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """Minus the cosine of a key and the mean of the unit keys, [n_heads, n_cand]."""
        out = []
        for layer in range(len(prompt.n_head_kv)):
            unit = _unit(prompt.keys(layer))
            anchor = _unit(unit.mean(axis=1, keepdims=True))
            out.append(-(unit * anchor).sum(axis=2)[:, : prompt.n_cand])
        return np.concatenate(out)


def _unit(x: Scores) -> Scores:
    unit: Scores = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))
    return unit
