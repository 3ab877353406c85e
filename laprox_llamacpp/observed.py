"""`ObservedPrompt`: what a method may ask of a prompt whose window has just been decoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .parts.pool import Pool

F32 = npt.NDArray[np.float32]
# a line break, .!? before white space, and the marks of scripts that put none after them
_SENTENCE_END = re.compile("\\n|[.!?](?=\\s)|\u3002|\uff01|\uff1f".encode())


class ObservedPrompt:
    """A prompt in the cache, scored by its last w tokens; made by `Llama`, used by `EvictionPolicy.keep`.

    Heads are numbered by layer, then by KV head; query heads likewise. Layers are the evictable ones, in order.

    Attributes:
        n_prompt: N, tokens in the cache.
        window: w, the observed last tokens.
        n_cand: N - w; candidates are the positions 0 .. n_cand-1.
        n_head_kv: KV heads of each layer; `n_heads` is their sum.
        n_head: query heads of each layer.
        model_path: the GGUF file.
        raw: scores of the method, [n_heads, n_cand], when it has any: not pooled yet, unless the attention was.
        note: what the method could not do as its options say, in one line, for the statistics and a warning.
    """

    def __init__(
        self,
        ctx: Any,
        n_prompt: int,
        window: int,
        model_path: str = "",
        pieces: Callable[[], Sequence[bytes]] | None = None,
        known: dict[tuple[str, str, str], tuple[F32, float]] | None = None,
    ) -> None:
        from . import _native

        self._lib = _native
        self._ctx = ctx
        self._pieces = pieces
        self._known = {} if known is None else known  # scores and their ms, while the prompt is the same
        self.model_path = model_path
        self.n_prompt, self.window, self.n_cand = n_prompt, window, n_prompt - window
        self.n_head_kv = [n for _, n in _native.layers(ctx)]
        self.n_heads = sum(self.n_head_kv)
        self.n_head = [_native.rows_shape(ctx, "q", i)[0] for i in range(len(self.n_head_kv))]
        self.raw: F32 | None = None
        self.note: str | None = None
        self.score_ms = 0.0
        self.scoring_s = 0.0  # the same with what is made once for a context

    def score(self, attention: str, value: str = "none", gqa: str = "mean") -> F32:
        """Scores from the window's queries and the cache, [n_heads, n_cand].

        Args:
            attention: column statistic a_h(i): "max", "l2", "sum", "last" (query alone), "total" (sum over every query
                of the prompt, for a policy with `all_queries`) or "none" (1).
            value: factor n_h(i): "l2" or "l1" norm of v_i W_O^h, "none" (1), or "output": no product but
                ||sum_h a_h(i) v_i W_O^h||_2 over the layer, the same for all its heads.
            gqa: over the query heads of a KV head: "mean" of a_h n_h, "attention" (mean of the attention, then its
                statistic, times the mean of n_h), or "none": one row per query head, [sum of n_head, n_cand].
        """
        key = (attention, value, gqa)
        if key not in self._known:
            start = perf_counter()
            self._lib.score(self._ctx, self._lib.score_params(*key))
            self.scoring_s += perf_counter() - start
            scores = self._lib.scores(self._ctx)
            scores.setflags(write=False)
            self._known[key] = scores, self._lib.stats(self._ctx).t_score_ms
        scores, ms = self._known[key]
        self.score_ms += ms
        return scores

    def add_scoring(self, seconds: float) -> None:
        """Count time that a method took for scores of its own."""
        self.score_ms += 1000 * seconds
        self.scoring_s += seconds

    def forget(self) -> None:
        """Free what only `keep` needed."""
        self._known = {}

    def residual(self) -> F32:
        """R_l, [n_layer]: mean over the window of the norm of the residual stream that enters the layer."""
        return self._lib.residual(self._ctx)

    def queries(self, layer: int) -> F32:
        """The window's queries, rotated by position, [n_head, w, d_k]."""
        return self._lib.rows(self._ctx, "q", layer)

    def keys(self, layer: int) -> F32:
        """Keys of every position, rotated by position, [n_head_kv, N, d_k]."""
        return self._lib.rows(self._ctx, "k", layer)

    def values(self, layer: int) -> F32:
        """Values of every position, [n_head_kv, N, d_v]."""
        return self._lib.rows(self._ctx, "v", layer)

    def group_mean(self, per_query_head: F32) -> F32:
        """Means over the query heads of each KV head, [sum of n_head, n] -> [n_heads, n]."""
        layers = np.split(per_query_head, np.cumsum(self.n_head)[:-1])
        means = [x.reshape(g, -1, x.shape[1]).mean(axis=1) for x, g in zip(layers, self.n_head_kv)]
        return np.concatenate(means).astype(np.float32)

    def sentence_starts(self) -> npt.NDArray[np.intp]:
        """First candidate of each sentence or line of the prompt's text, ascending from 0.

        Raises ValueError when the prompt came without its text.
        """
        if self._pieces is None:
            raise ValueError("the sentences of a prompt need its text, which was not given")
        pieces = list(self._pieces())[: self.n_cand]
        begins = np.cumsum([0, *map(len, pieces)])[:-1]
        ends = [m.end() for m in _SENTENCE_END.finditer(b"".join(pieces))]
        sentence = np.searchsorted(ends, begins, side="right")
        return np.flatnonzero(np.diff(sentence, prepend=-1))

    def rank(self, scores: F32, pool: Pool | None = None, normalize: str = "none") -> F32:
        """Pooled and normalised scores; [n_heads, n_cand], or any number of rows when nothing is normalised."""
        if (pool is None or pool.kind == "none") and normalize == "none":
            return scores
        rows = self.n_head_kv if normalize != "none" else [len(scores)]
        params = self._lib.plan_params(0, pool=pool, normalize=normalize)
        return self._lib.rank(params, rows, scores, self.residual() if normalize == "residual" else None)

    def top(
        self, scores: F32, rows: Sequence[int], n_keep: int, alloc: str = "head", sinks: int = 0
    ) -> list[npt.NDArray[np.int32]]:
        """The best `n_keep` entries of `scores` [sum of rows, n_cand]: positions of each row, ascending.

        `rows` are those of each layer; `alloc` is "model" (one top-K), "layer" (n_keep split evenly) or "head". Ties:
        lower layer, row, position.
        """
        return self._lib.plan(self._lib.plan_params(n_keep, alloc=alloc, sinks=sinks), rows, scores)

    def top_of_each(self, scores: F32, counts: Sequence[int], sinks: int = 0) -> list[npt.NDArray[np.int32]]:
        """The best `counts` entries of each row of `scores`, ascending."""
        return [self.top(row[None], [1], n, "head", sinks)[0] for row, n in zip(scores, counts)]
