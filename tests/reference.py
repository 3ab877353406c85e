"""Every method once more: NumPy float64, written from docs/method.md and the papers, with no code of the package.

`Reference` holds what a real model computed for a prompt, captured where the stock attention op reads it: Q of every
prompt token, K, V, the scale, the residual stream. W_O comes out of the GGUF file, products v W_O^h are explicit, the
attention is a plain softmax. Scores are lists over layers of [G, M]; a kept set is a mask [heads, M] of candidates,
heads numbered by layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import gguf
import numpy as np
import numpy.typing as npt
from tensors import Tensor, read
from test_score_real import reader

import llama_cpp as lib  # isort: skip

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Scores = list[F64]
Pool = Optional[Callable[[F64], F64]]


class Capture:
    """A scheduler callback (`callback`, for cb_eval) that copies what attention and scoring ops read.

    Attributes:
        q: queries of each model layer, an array [H, T, d] for each ubatch.
        k, v: of each model layer at the last ubatch, [G, n_kv, d].
        resid: residual stream that enters each model layer at the last ubatch, [T, D].
        score_ops: "q", "k", "v", "mask" of the last scoring op of each model layer.
        scale: of the attention.
    """

    def __init__(self) -> None:
        self.q: dict[int, list[F64]] = {}
        self.k: dict[int, F64] = {}
        self.v: dict[int, F64] = {}
        self.resid: dict[int, F64] = {}
        self.score_ops: dict[int, dict[str, F64]] = {}
        self.scale = 0.0
        self.on = True
        self.callback = lib.ggml_backend_sched_eval_callback(self._see)

    def _see(self, address: int, ask: bool, _: Any) -> bool:
        t = Tensor.from_address(address)
        name, _, il = t.name.decode().partition("-")
        names = [Tensor.from_address(s).name.decode() if s else "" for s in t.src[:3]]
        scores = name == "laprox_score"
        attends = not scores and names[1].startswith("cache_k_l") and names[2].startswith("cache_v_l")
        enters = name == "norm" and il.isdigit() and not names[0].startswith("ffn_inp")
        if not self.on or not (scores or attends or enters):
            return not ask
        if not ask:
            if scores:
                sources = zip(("q", "k", "v", "mask"), t.src)
                self.score_ops[int(il)] = {key: read(source) for key, source in sources if source}
            elif enters:
                self.resid[int(il)] = read(t.src[0])[0]
            else:
                layer = int(re.findall(r"\d+", names[1])[0])
                self.q.setdefault(layer, []).append(read(t.src[0]))
                self.k[layer], self.v[layer] = read(t.src[1]), read(t.src[2])
                self.scale = float(np.int32(t.op_params[0]).view(np.float32))
        return True


def w_o(path: Path, layers: Sequence[int], n_head: int) -> list[F64]:
    """Output projection of each of the model `layers` by query head, [H, d, D], dequantised by the gguf package."""
    tensors = {t.name: t for t in reader(path).tensors}
    out = []
    for il in layers:
        t = tensors[f"blk.{il}.attn_output.weight"]
        weight = gguf.dequantize(t.data, t.tensor_type).astype(np.float64)  # [D, H*d]
        out.append(np.ascontiguousarray(weight.T).reshape(n_head, -1, len(weight)))
    return out


def attention(q: F64, k: F64, scale: float) -> F64:
    """Causal softmax of queries that are the last ones of k, [T, N]."""
    t, n = len(q), len(k)
    logits = scale * (q @ k.T)
    logits[np.arange(n)[None, :] > np.arange(n - t, n)[:, None]] = -np.inf
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    out: F64 = e / e.sum(axis=1, keepdims=True)
    return out


# ---- pools, of any [.., M]


def _neighbours(x: F64, radius: int, outside: float) -> F64:
    """[2 * radius + 1, .., M]."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(radius, radius)], constant_values=outside)
    return np.stack([padded[..., d : d + x.shape[-1]] for d in range(2 * radius + 1)])


def avg(kernel: int) -> Callable[[F64], F64]:
    """Zeros beyond the ends, the divisor always the kernel."""
    return lambda x: _neighbours(x, kernel // 2, 0.0).sum(axis=0) / kernel


def peak(kernel: int) -> Callable[[F64], F64]:
    """Maximum over `kernel` positions."""
    return lambda x: _neighbours(x, kernel // 2, -np.inf).max(axis=0)


def reach(radius: int, decay: float) -> Callable[[F64], F64]:
    """Own score, or the decayed best within `radius`."""
    return lambda x: np.maximum(x, decay * _neighbours(x, radius, -np.inf).max(axis=0))


def sentences(pieces: Sequence[bytes]) -> list[list[int]]:
    """Tokens of each sentence or line of the text: it ends with a line break, .!? before white space, or 。！？."""
    text = b"".join(pieces)
    ends = [m.end() for m in re.finditer("\n|[.!?](?=[ \t\n\r])|。|！|？".encode(), text)]
    groups: dict[int, list[int]] = {}
    begin = 0
    for i, piece in enumerate(pieces):
        groups.setdefault(sum(end <= begin for end in ends), []).append(i)
        begin += len(piece)
    return list(groups.values())


def by_sentence(decay: float, groups: Sequence[Sequence[int]]) -> Callable[[F64], F64]:
    """Own score, or the decayed best of the sentence's candidates."""

    def pool(x: F64) -> F64:
        out: F64 = x.copy()
        for group in groups:
            tokens = [i for i in group if i < x.shape[-1]]
            if tokens:
                out[..., tokens] = np.maximum(x[..., tokens], decay * x[..., tokens].max(axis=-1, keepdims=True))
        return out

    return pool


# ---- selection


def best(scores: F64, n: int, sinks: int = 0) -> Mask:
    """The n best of [rows, M]: sinks before all others, then by score; ties to the lower position (sinks) or row."""
    row, pos = np.indices(scores.shape)
    sink = pos < sinks
    keys = (pos, row, np.where(sink, pos, -scores), ~sink)  # the last one counts most
    order = np.lexsort([key.ravel() for key in keys])
    kept = np.zeros(scores.size, bool)
    kept[order[:n]] = True
    return kept.reshape(scores.shape)


def each(scores: F64, counts: Sequence[int], sinks: int = 0) -> Mask:
    """The best of each row."""
    return np.stack([best(row[None], n, sinks)[0] for row, n in zip(scores, counts)])


def rounded(due: F64, total: int) -> list[int]:
    """Integers that sum to `total`, by largest remainder, the lower index first."""
    counts = [int(np.floor(round(float(x), 9))) for x in due]
    for i in sorted(range(len(counts)), key=lambda i: (round(counts[i] - float(due[i]), 9), i))[: total - sum(counts)]:
        counts[i] += 1
    assert sum(counts) == total
    return counts


def by_model(scores: Scores, k: int, sinks: int = 0) -> Mask:
    """One selection over all layers, heads and positions."""
    flat = np.concatenate(scores)
    return best(flat, k * len(flat), sinks)


def by_layer(scores: Scores, k: int, sinks: int = 0) -> Mask:
    """One selection in each layer."""
    return np.concatenate([best(x, k * len(x), sinks) for x in scores])


def by_head(scores: Scores, k: int, sinks: int = 0) -> Mask:
    """One selection in each head."""
    return np.concatenate([each(x, [k] * len(x), sinks) for x in scores])


def adakv(scores: Scores, k: int, alpha: float = 0.2) -> Mask:
    """(1 - alpha) f_g + alpha k entries of head g, f_g of its entries being among the best of the layer."""
    out = []
    for x in scores:
        f = best(x, k * len(x)).sum(axis=1)
        out.append(each(x, rounded((1 - alpha) * f + alpha * k, k * len(x))))
    return np.concatenate(out)


def guard(scores: Scores, k: int, alpha: float = 0.2) -> Mask:
    """Each head's own best int(alpha k) first, then the best of the layer."""
    out = []
    for x in scores:
        own = each(x, [int(alpha * k)] * len(x))
        rest = best(np.where(own, -np.inf, x), k * len(x) - int(own.sum()))
        out.append(own | rest)
    return np.concatenate(out)


def pyramid(scores: Scores, k: int, beta: float = 20) -> Mask:
    """Heads of the last layer keep k / beta and those of the first 2 k - k / beta (at most all), linearly between."""
    n_layer, (g, m) = len(scores), scores[0].shape
    top = min(2 * k - k / beta, m)
    bottom = 2 * k - top
    line = np.array([top + (bottom - top) * i / (n_layer - 1) for i in range(n_layer)])
    out = []
    for x, n in zip(scores, rounded(g * line, g * n_layer * k)):
        out.append(each(x, [n // g + (h < n % g) for h in range(g)]))
    return np.concatenate(out)


class Reference:
    """A captured prompt; see the module.

    Args:
        capture: of a context that decoded the prompt and nothing else.
        path: GGUF file.
        n: N, prompt tokens.
        window: w.
        pieces: text of each token.
        layers: model layers that count, in order; default all.
    """

    def __init__(
        self, capture: Capture, path: Path, n: int, window: int, pieces: Sequence[bytes], layers: Sequence[int] = ()
    ) -> None:
        self.layers = list(layers) or sorted(capture.q)
        self.q = [np.concatenate(capture.q[il], axis=1) for il in self.layers]  # [H, N, d]
        self.k = [capture.k[il][:, :n] for il in self.layers]  # [G, N, d]
        self.v = [capture.v[il][:, :n] for il in self.layers]
        assert all(x.shape[1] == n for x in (*self.q, *self.k, *self.v))
        self.n, self.window, self.m = n, window, n - window
        self.scale = capture.scale
        self.pieces = pieces
        self.n_head, self.n_head_kv = len(self.q[0]), len(self.k[0])
        self.group = self.n_head // self.n_head_kv
        self.w_o = w_o(path, self.layers, self.n_head)
        self.resid = [float(np.linalg.norm(capture.resid[il][-window:], axis=1).mean()) for il in self.layers]

    @cached_property
    def window_attention(self) -> list[F64]:
        """Of the window's queries for every candidate, [H, w, M] a layer."""
        return [
            np.stack([attention(q[h, -self.window :], k[h // self.group], self.scale) for h in range(self.n_head)])[
                ..., : self.m
            ]
            for q, k in zip(self.q, self.k)
        ]

    @cached_property
    def total(self) -> Scores:
        """Column sums over every query of the prompt, mean over the group."""
        out = []
        for q, k in zip(self.q, self.k):
            sums = [attention(q[h], k[h // self.group], self.scale).sum(axis=0)[: self.m] for h in range(self.n_head)]
            out.append(self.mean(np.stack(sums)))
        return out

    @cached_property
    def _outputs(self) -> list[tuple[F64, F64]]:
        """L1 and L2 norms of v_i W_O^h, [H, M] each, a layer."""
        out = []
        for v, w in zip(self.v, self.w_o):
            terms = [v[h // self.group, : self.m] @ w[h] for h in range(self.n_head)]  # [M, D]
            l1 = np.stack([np.abs(x).sum(axis=1) for x in terms])
            out.append((l1, np.stack([np.sqrt((x * x).sum(axis=1)) for x in terms])))
        return out

    def norms(self, value: str) -> list[F64]:
        """Value factor of each query head: "l1", "l2" or "none", [H, M] a layer."""
        if value == "none":
            return [np.ones((self.n_head, self.m))] * len(self.layers)
        return [x[{"l1": 0, "l2": 1}[value]] for x in self._outputs]

    def mean(self, x: F64) -> F64:
        """Over the query heads of each KV head, [H, ..] -> [G, ..]."""
        return np.stack([x[g * self.group : (g + 1) * self.group].mean(axis=0) for g in range(self.n_head_kv)])

    def product(self, column: str, value: str = "none", gqa: str = "mean", pool: Pool = None) -> Scores:
        """Column statistic times value norm, as a KV head's score; `pool` is what precedes the value factor."""
        out = []
        for a, norm in zip(self.window_attention, self.norms(value)):
            c = _column(self.mean(a) if gqa == "attention" else a, column)
            c = pool(c) if pool else c
            out.append(c * self.mean(norm) if gqa == "attention" else self.mean(c * norm))
        return out

    def output_norm(self, column: str = "sum") -> Scores:
        """||sum_h sum_j A_h[j, i] v_i W_O^h||_2: signed, one score for all heads of a layer."""
        out = []
        for a, v, w in zip(self.window_attention, self.v, self.w_o):
            c = _column(a, column)
            total = sum(c[h][:, None] * (v[h // self.group, : self.m] @ w[h]) for h in range(self.n_head))
            out.append(np.tile(np.linalg.norm(total, axis=1), (self.n_head_kv, 1)))
        return out

    # ---- normalisers

    def residual(self, scores: Scores) -> Scores:
        """By the mean norm of the residual stream that enters the layer."""
        return [x / r for x, r in zip(scores, self.resid)]

    @staticmethod
    def layer_sum(scores: Scores) -> Scores:
        """By the sum over the layer."""
        return [x / x.sum() for x in scores]

    @staticmethod
    def zscore(scores: Scores) -> Scores:
        """Per head, unbiased."""
        return [(x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, ddof=1, keepdims=True) for x in scores]

    # ---- granularity

    def one_per_layer(self, scores: Scores, select: Callable[..., Mask], *args: Any) -> Mask:
        """The heads of a layer share one set."""
        return np.repeat(select([x.sum(axis=0, keepdims=True) for x in scores], *args), self.n_head_kv, axis=0)

    def one_per_model(self, scores: Scores, k: int, sinks: int = 0) -> Mask:
        """One set for all."""
        kept = best(np.concatenate(scores).sum(axis=0, keepdims=True), k, sinks)
        return np.repeat(kept, len(self.layers) * self.n_head_kv, axis=0)

    # ---- whole methods that are not a score with an allocation

    def snapkv(self, pool: Pool = None, column: str = "sum") -> Scores:
        """Window sums, mean over the group, then pooled (avg 7 unless told otherwise)."""
        return [(pool or avg(7))(x) for x in self.product(column)]

    def laprox(self, column: str = "max", pool: Pool = None) -> Scores:
        """The default's scores before they are made comparable."""
        return [(pool or reach(12, 0.3))(x) for x in self.product(column, "l2")]

    def paper(self, **kwargs: Any) -> Scores:
        """Algorithm 1, normalised as in Algorithm 2."""
        return self.layer_sum([avg(7)(x) for x in self.product("l2", "l2", **kwargs)])

    def criticalkv(
        self, k: int, pool: Pool = None, counts: Callable[[Scores, int], Mask] = by_head, safe: float = 0
    ) -> Mask:
        """int(n / 2) of a head's n entries by s, the rest by (s + 1e-4) times the mean L1 norm of v W_O^h.

        A head's own best int(safe * k), which its count provides for, are never left to the second stage.
        """
        s = [x / self.window for x in self.snapkv(pool)]
        n = counts(s, k).sum(axis=1)
        out = []
        for i, x in enumerate(np.concatenate(s)):
            layer, g = divmod(i, self.n_head_kv)
            first = best(x[None], max(int(n[i]) // 2, int(safe * k)))[0]
            late = (x + 1e-4) * self.mean(self.norms("l1")[layer])[g]
            out.append(first | best(np.where(first, -np.inf, late)[None], int(n[i]) - int(first.sum()))[0])
        return np.stack(out)

    def h2o(self, k: int, recent: float = 0.5) -> Mask:
        """Half of the budget, window included, for recent positions (never less than the window), half for the rest."""
        old = self.n - max(int((k + self.window) * recent), self.window)  # candidates before the recent ones
        kept = by_head([x[:, :old] for x in self.total], k - (self.m - old))
        return np.concatenate([kept, np.ones((len(kept), self.m - old), bool)], axis=1)

    def streaming(self, k: int, sinks: int = 4) -> Mask:
        """The first and the last."""
        kept = [i < sinks or i >= self.m - (k - sinks) for i in range(self.m)]
        return np.tile(kept, (len(self.layers) * self.n_head_kv, 1))

    def tova(self, k: int) -> Mask:
        """The last query's attention, one set a layer."""
        return self.one_per_layer([a[:, -1] for a in self.window_attention], by_head, k)

    def keydiff(self, k: int) -> Mask:
        """Minus the cosine of a key and the mean direction of all N keys."""
        out = []
        for keys in self.k:
            unit = np.stack([[x / np.sqrt(x @ x) for x in head] for head in keys])
            anchor = unit.mean(axis=1)
            cos = np.stack([u @ a / np.sqrt(a @ a) for u, a in zip(unit, anchor)])
            out.append(-cos[:, : self.m])
        return by_head(out, k)

    def random(self, k: int, seed: int = 0) -> Mask:
        """Uniform float32 of NumPy's default generator."""
        shape = (len(self.layers) * self.n_head_kv, self.m)
        return by_head([np.random.default_rng(seed).random(shape, np.float32).astype(np.float64)], k)


def _column(a: F64, statistic: str) -> F64:
    """[.., w, M] -> [.., M]."""
    out: F64 = {
        "max": lambda: a.max(axis=-2),
        "l2": lambda: np.sqrt((a * a).sum(axis=-2)),
        "sum": lambda: a.sum(axis=-2),
        "last": lambda: a[..., -1, :],
    }[statistic]()
    return out
