"""Smoothing of scores along positions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .options import text

if TYPE_CHECKING:
    from ..observed import ObservedPrompt

_SPEC = re.compile(
    r"(?P<none>none)|reach(?P<radius>\d+):(?P<reach>\d*\.?\d+)|sentence:(?P<sentence>\d*\.?\d+)"
    r"|(?P<kind>avg|max)?(?P<kernel>\d+)"
)

_MOST_AVG, _MOST_MAX = 1023, (1 << 31) - 1  # as the library


@dataclass(frozen=True)
class Pool:
    """A parsed `pool`: `kind` is none, reach, sentence, avg or max; s_i is the score of candidate i of a head.

    reach<size>:<decay>   max(s_i, decay * max of s over the positions at most `size` away)
    sentence:<decay>      the same over the token's own sentence or line
    avg<size>             mean over `size` positions, zeros beyond the ends, the divisor always `size`
    max<size>             maximum over `size` positions
    """

    kind: str
    size: int = 0
    decay: float = 0.0

    @classmethod
    def parse(cls, spec: str) -> Pool:
        """Parse `reach12:0.3`, `sentence:0.25`, `avg7` or `7`, `max7`, `none` or `1`. Raises ValueError."""
        m = _SPEC.fullmatch(text("pool", spec))
        if m is None:
            raise ValueError(
                f"pool is {spec!r}, expected 'reach<radius>:<decay>', 'sentence:<decay>', 'avg<kernel>', "
                "'max<kernel>' or 'none'"
            )
        if m["kernel"] is None:
            decay = float(m["reach"] or m["sentence"] or 0)
            if int(m["radius"] or 0) > _MOST_MAX:
                raise ValueError(f"pool is {spec!r}: the radius must be at most {_MOST_MAX}")
            if decay > 1:
                raise ValueError(f"pool is {spec!r}: the decay must be in [0, 1]")
            return cls("none" if m["none"] else "reach" if m["reach"] else "sentence", int(m["radius"] or 0), decay)
        size, most = int(m["kernel"]), _MOST_MAX if m["kind"] == "max" else _MOST_AVG
        if size % 2 == 0 or size > most:
            raise ValueError(f"pool is {spec!r}: the kernel must be odd and at most {most}")
        return cls("none") if m["kind"] is None and size == 1 else cls(m["kind"] or "avg", size)

    def apply(self, prompt: ObservedPrompt, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Pooled `scores`, [rows, n_cand] both."""
        if self.kind == "sentence":
            starts = prompt.sentence_starts()
            best = np.maximum.reduceat(scores, starts, axis=1) if starts.size else scores
            lengths = np.diff(np.append(starts, scores.shape[1]))
            out: npt.NDArray[np.float32] = np.maximum(scores, np.float32(self.decay) * np.repeat(best, lengths, axis=1))
            return out
        return scores if self.kind == "none" else prompt.rank(scores, pool=self)
