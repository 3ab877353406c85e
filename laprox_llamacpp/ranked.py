"""Methods that give every candidate a score, and keep the best: the parts that they share."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .observed import ObservedPrompt
from .parts.alloc import Alloc, Kept
from .parts.options import int_at_least, one_of
from .parts.pool import Pool
from .policy import EvictionPolicy

ATTENTION = ("max", "l2", "sum", "last")
VALUE = ("l2", "l1", "none")
GQA = ("mean", "attention")
NORMALIZE = ("residual", "layer_sum", "zscore", "none")
GRANULARITY = ("head", "layer", "cell")

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Ranked(EvictionPolicy):
    """Score, pool, normalise, share among heads, allocate, select; a method gives the score and other defaults.

    Args:
        pool: smoothing along positions: "reach<radius>:<decay>", "sentence:<decay>", "avg<kernel>", "max<kernel>" or
            "none"; see `parts.pool`.
        normalize: across layers and heads: "residual" (by the norm of the residual stream that enters the layer),
            "layer_sum", "zscore" (per head) or "none".
        granularity: a set of positions for each "head", for all heads of a "layer", or one for the model ("cell").
        alloc: "model", "layer", "head", "adakv<alpha>", "guard<alpha>" or "pyramid<beta>"; see `parts.alloc`.
        protect_sinks: first positions that every head keeps, inside the budget.
    """

    pool: str = "none"
    normalize: str = "none"
    granularity: str = "head"
    alloc: str = "head"
    protect_sinks: int = 0

    signed: ClassVar[bool] = False  # scores may be negative: sums and decays of them say nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("normalize", self.normalize, NORMALIZE)
        one_of("granularity", self.granularity, GRANULARITY)
        Alloc.parse(self.alloc)
        int_at_least("protect_sinks", self.protect_sinks, 0)
        alloc = Alloc.parse(self.alloc).kind
        if self.granularity != "head" and alloc in ("adakv", "guard"):
            raise ValueError(
                f"alloc={self.alloc} shares a layer among its heads, granularity={self.granularity} gives them one set"
            )
        if self.granularity == "cell" and alloc == "pyramid":
            raise ValueError(
                f"alloc={self.alloc} shares the model among its layers, granularity=cell gives them one set"
            )
        pool = Pool.parse(self.pool).kind
        if self.signed and (pool not in ("none", "max") or self.normalize == "layer_sum"):
            raise ValueError(
                f"{self.name}'s scores may be negative: pool={self.pool} with normalize={self.normalize} makes no "
                "sense of them, expected pool none or max<kernel>, and normalize none, zscore or residual"
            )

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """Scores, [n_heads, n_cand]; higher is better."""
        raise NotImplementedError

    def keep(self, prompt: ObservedPrompt, k: int) -> Kept:
        """The best candidates by score; see `EvictionPolicy.keep`."""
        start = perf_counter()
        before = prompt.scoring_s
        prompt.raw = self.scores(prompt)
        prompt.add_scoring(perf_counter() - start - (prompt.scoring_s - before))
        kept = self.select(prompt, self.shared(prompt, self.ranked(prompt, prompt.raw)), k)
        copies = {"head": [1] * prompt.n_heads, "layer": prompt.n_head_kv, "cell": [prompt.n_heads]}[self.granularity]
        return [positions for positions, n in zip(kept, copies) for _ in range(n)]

    def ranked(self, prompt: ObservedPrompt, raw: Scores) -> Scores:
        """Pooled and normalised scores, [n_heads, n_cand]."""
        pool = Pool.parse(self.pool)
        if pool.kind == "sentence":
            raw, pool = pool.apply(prompt, raw), Pool("none")
        return prompt.rank(raw, pool, self.normalize)

    def rows(self, prompt: ObservedPrompt) -> list[int]:
        """Sets of positions to choose in each layer; one in all with granularity "cell"."""
        if self.granularity == "head":
            return list(prompt.n_head_kv)
        return [1] * (len(prompt.n_head_kv) if self.granularity == "layer" else 1)

    def shared(self, prompt: ObservedPrompt, scores: Scores) -> Scores:
        """Means over the heads that share a set, [sum of rows, n_cand]."""
        if self.granularity == "head":
            return scores
        ends: list[int] = np.cumsum(prompt.n_head_kv)[:-1].tolist() if self.granularity == "layer" else []
        return np.stack([part.mean(axis=0, dtype=np.float64) for part in np.split(scores, ends)]).astype(np.float32)

    def select(self, prompt: ObservedPrompt, scores: Scores, k: int) -> Kept:
        """Kept candidates of each row."""
        rows, alloc = self.rows(prompt), Alloc.parse(self.alloc)
        if self.granularity == "layer" and len(set(prompt.n_head_kv)) > 1 and alloc.kind in ("model", "pyramid"):
            raise ValueError(
                f"alloc={self.alloc} with granularity=layer needs layers of equally many KV heads, this model has "
                f"{min(prompt.n_head_kv)} to {max(prompt.n_head_kv)}; use alloc=layer"
            )
        return alloc.select(prompt, scores, rows, k, self.protect_sinks)


@dataclass(frozen=True)
class Attended(Ranked):
    """`Ranked` by the attention of the window's queries; h are the query heads of a KV head, i the candidates.

    Args:
        attention: statistic a_h(i) of a column of the attention: "max", "l2", "sum" or "last" (the last query alone).
        value: factor n_h(i): ||v_i W_O^h|| by its norm "l2" or "l1", or "none".
        gqa: "mean" of the products over h, or the group's mean "attention" first, times the mean of n_h.
        pool_on: smooth the "score", or the "attention" before the value factor.
    """

    attention: str = "sum"
    value: str = "none"
    gqa: str = "mean"
    pool_on: str = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("attention", self.attention, ATTENTION)
        one_of("value", self.value, VALUE)
        one_of("gqa", self.gqa, GQA)
        one_of("pool_on", self.pool_on, ("score", "attention"))

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """As the options say, [n_heads, n_cand]."""
        if self.pool_on == "score":
            return prompt.score(self.attention, self.value, self.gqa)
        per_group = self.gqa == "attention"
        pooled = Pool.parse(self.pool).apply(
            prompt, prompt.score(self.attention, "none", "attention" if per_group else "none")
        )
        if self.value == "none":
            return pooled if per_group else prompt.group_mean(pooled)
        norms = prompt.score("none", self.value, "none")
        return pooled * prompt.group_mean(norms) if per_group else prompt.group_mean(pooled * norms)

    def ranked(self, prompt: ObservedPrompt, raw: Scores) -> Scores:
        """As `Ranked`; what was pooled before the value factor is not pooled again."""
        if self.pool_on == "score":
            return super().ranked(prompt, raw)
        return prompt.rank(raw, normalize=self.normalize)
