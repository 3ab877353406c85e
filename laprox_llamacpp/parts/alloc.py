"""Who gets how many of the kept candidates.

`k` is the budget of a row on average: a row is a KV head, or what stands for several heads that share one set. The
total is exact for every kind: the number of rows times k.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .options import text

if TYPE_CHECKING:
    from ..observed import ObservedPrompt

Scores = npt.NDArray[np.float32]
Kept = list[npt.NDArray[np.int32]]

_SPEC = re.compile(r"(?P<plain>model|layer|head)|(?P<kind>adakv|guard|pyramid)(?P<value>\d*\.?\d+)")


@dataclass(frozen=True)
class Alloc:
    """A parsed `alloc`; f_g counts the entries of row g among the best of its layer.

    model          one top-K over the model (LaProx, Algorithm 2)
    layer          one top-K in each layer
    head           k in each head (SnapKV, H2O)
    adakv<alpha>   (1 - alpha) f_g + alpha k in row g, rounded by largest remainder (AdaKV, arXiv 2407.11550)
    guard<alpha>   one top-K in each layer, after each row has kept its own best alpha k (kvpress's rule for AdaKV; it
                   counts the window in that floor)
    pyramid<beta>  k falls linearly from layer 0 to k / beta in the last (PyramidKV, arXiv 2406.02069)
    """

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, spec: str) -> Alloc:
        """Parse `model`, `layer`, `head`, `adakv0.2`, `guard0.2` or `pyramid20`. Raises ValueError."""
        m = _SPEC.fullmatch(text("alloc", spec))
        if m is None:
            raise ValueError(
                f"alloc is {spec!r}, expected 'model', 'layer', 'head', 'adakv<alpha>', 'guard<alpha>' or "
                "'pyramid<beta>'"
            )
        if m["plain"]:
            return cls(m["plain"])
        value = float(m["value"])
        if m["kind"] == "pyramid" and value < 1:
            raise ValueError(f"alloc is {spec!r}: beta must be at least 1")
        if m["kind"] != "pyramid" and value > 1:
            raise ValueError(f"alloc is {spec!r}: alpha must be in [0, 1]")
        return cls(m["kind"], value)

    def select(self, prompt: ObservedPrompt, scores: Scores, rows: Sequence[int], k: int, sinks: int = 0) -> Kept:
        """Kept candidates of each row, ascending.

        Args:
            prompt: gives the top-K.
            scores: [sum of rows, n_cand], higher is better.
            rows: of each layer.
            k: kept candidates of a row on average, at most n_cand.
            sinks: first positions that every row keeps, inside its share.
        """
        if self.kind in ("model", "layer", "head"):
            return prompt.top(scores, rows, k * len(scores), self.kind, sinks)
        if self.kind == "guard":
            own = prompt.top(scores, rows, self.floor(k) * len(scores), "head", sinks)
            return prompt.top(promote(scores, own), rows, k * len(scores), "layer", sinks)
        return prompt.top_of_each(scores, self._counts(prompt, scores, rows, k, sinks), sinks)

    def floor(self, k: int) -> int:
        """Best entries of each row that are safe, whatever the others have."""
        return int(self.value * k) if self.kind == "guard" else 0

    def counts(self, prompt: ObservedPrompt, scores: Scores, rows: Sequence[int], k: int, sinks: int = 0) -> list[int]:
        """Kept candidates of each row; arguments as `select`."""
        if self.kind in ("adakv", "pyramid"):
            return self._counts(prompt, scores, rows, k, sinks)
        return [len(kept) for kept in self.select(prompt, scores, rows, k, sinks)]

    def _counts(self, prompt: ObservedPrompt, scores: Scores, rows: Sequence[int], k: int, sinks: int) -> list[int]:
        if self.kind == "pyramid":
            return pyramid(rows, k, scores.shape[1], self.value)
        best = np.array([len(kept) for kept in prompt.top(scores, rows, k * len(scores), "layer", sinks)])
        due = (1 - self.value) * best + self.value * k
        ends = np.cumsum(rows)
        return [n for end, r in zip(ends, rows) for n in apportion(due[end - r : end], r * k, scores.shape[1])]


def promote(scores: Scores, kept: Kept) -> Scores:
    """A copy in which the `kept` entries of each row stand above all others."""
    out: Scores = scores.copy()
    for row, positions in zip(out, kept):
        row[positions] = np.finfo(np.float32).max
    return out


def pyramid(rows: Sequence[int], k: int, n_cand: int, beta: float) -> list[int]:
    """Counts of each row, falling linearly over the layers and k on average."""
    low, high = k / beta, 2 * k - k / beta
    if high > n_cand:
        low, high = 2 * k - n_cand, float(n_cand)
    per_layer = apportion(np.linspace(high, low, len(rows)) * rows, sum(rows) * k, n_cand * np.asarray(rows))
    return [n for r, total in zip(rows, per_layer) for n in apportion(np.ones(r), total, n_cand)]


def apportion(due: npt.ArrayLike, total: int, limit: npt.ArrayLike) -> list[int]:
    """Integers in proportion to `due` that sum to `total`, none above `limit`; largest remainder, then lower index."""
    share = np.asarray(due, np.float64)
    cap = np.broadcast_to(np.asarray(limit, np.int64), share.shape)
    share = share * (total / share.sum()) if share.sum() > 0 else np.full(share.shape, total / share.size)
    counts = np.minimum(np.floor(share + 1e-9).astype(np.int64), cap)
    while counts.sum() < total:
        open_ = np.flatnonzero(counts < cap)
        left = np.round(share - counts, 9)  # equal remainders are equal, whatever the arithmetic made of them
        first = open_[np.argsort(-left[open_], kind="stable")]
        counts[first[: total - counts.sum()]] += 1
    return [int(n) for n in counts]
