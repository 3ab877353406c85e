"""laprox.h in ctypes: mirrors of its structs and checked wrappers of its functions, NumPy arrays in and out.

A wrapper raises the `LaproxError` of the status that it gets, with the library's own text. `ctx` is a
`llama_context_p` of llama-cpp-python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from ._lib import load
from .errors import ArgumentError, from_status
from .parts.pool import Pool

ATTENTION = {"max": 0, "l2": 1, "sum": 2, "last": 3, "total": 4, "none": 5}
VALUE = {"none": 0, "l2": 1, "l1": 2, "output": 3}
GQA = {"mean": 0, "attention": 1, "none": 2}
ROWS = {"q": 0, "k": 1, "v": 2}
POOL = {"none": 0, "reach": 1, "avg": 2, "max": 3}
NORMALIZE = {"none": 0, "residual": 1, "layer_sum": 2, "zscore": 3}
ALLOC = {"model": 0, "layer": 1, "head": 2}
ATTENTION_PATH = {"auto": 0, "per_head": 1, "ragged_op": 2}
STORE_RAGGED = 0
STORE_MASK = 1  # oracle for tests: the full cache stays, evicted rows are masked
STORE_ASIDE = 2  # the full prompt waits for `restore`


class ContextParams(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("n_reserve", c_uint32), ("attention_path", c_int32)]


class ScoreParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("attention", c_int32),
        ("value", c_int32),
        ("gqa", c_int32),
        ("composed", c_bool),
    ]


class PlanParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("pool", c_int32),
        ("pool_size", c_uint32),
        ("pool_decay", c_float),
        ("normalize", c_int32),
        ("alloc", c_int32),
        ("n_sink", c_uint32),
        ("n_keep", c_uint64),
    ]


class PagesParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("page_size", c_uint32),
        ("n_pages_min", c_uint32),
        ("n_layer_dense", c_uint32),
        ("n_rows", c_uint32),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("n_layer", c_uint32),
        ("n_head_kv", c_uint32),
        ("n_window", c_uint32),
        ("n_cand", c_uint32),
        ("n_head", c_uint32),
        ("n_score", c_uint32),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("evicted", c_bool),
        ("n_prompt", c_uint32),
        ("n_window", c_uint32),
        ("rows_full", c_uint64),
        ("rows_kept", c_uint64),
        ("n_appended", c_uint32),
        ("n_grown", c_uint32),
        ("bytes_full", c_uint64),
        ("bytes_peak", c_uint64),
        ("bytes_now", c_uint64),
        ("bytes_other", c_uint64),
        ("t_gram_ms", c_double),
        ("t_score_ms", c_double),
        ("t_plan_ms", c_double),
        ("t_commit_ms", c_double),
        ("t_total_ms", c_double),
        ("bytes_aside", c_uint64),
        ("rows_read", c_uint64),
        ("rows_dense", c_uint64),
        ("bytes_pages", c_uint64),
        ("n_layer_device", c_uint32),
        ("n_layer_composed", c_uint32),
        ("n_layer_ragged_op", c_uint32),
    ]


_lib = load()


def _declare(name: str, restype: Any, *argtypes: Any) -> Any:
    f = getattr(_lib, name)
    f.restype, f.argtypes = restype, list(argtypes)
    return f


_build_info = _declare("laprox_build_info", c_char_p)
_last_error = _declare("laprox_last_error", c_char_p)
_context_default_params = _declare("laprox_context_default_params", c_int32, POINTER(ContextParams))
_score_default_params = _declare("laprox_score_default_params", c_int32, POINTER(ScoreParams))
_plan_default_params = _declare("laprox_plan_default_params", c_int32, POINTER(PlanParams))
_pages_default_params = _declare("laprox_pages_default_params", c_int32, POINTER(PagesParams))
_set_next = _declare("laprox_set_next", c_int32, POINTER(ContextParams))
_enabled = _declare("laprox_enabled", c_bool, c_void_p)
_reserve = _declare("laprox_reserve", c_int32, c_void_p, c_uint32)
_observe = _declare("laprox_observe", c_int32, c_void_p, c_uint32)
_score = _declare("laprox_score", c_int32, c_void_p, POINTER(ScoreParams))
_accumulate = _declare("laprox_accumulate", c_int32, c_void_p)
_get_accumulated = _declare("laprox_get_accumulated", c_int32, c_void_p, POINTER(c_uint32))
_get_shape = _declare("laprox_get_shape", c_int32, c_void_p, POINTER(Shape))
_get_layers = _declare("laprox_get_layers", c_int32, c_void_p, POINTER(c_int32), POINTER(c_uint32), c_size_t)
_get_device = _declare("laprox_get_device", c_int32, c_void_p, c_uint32, c_char_p, c_size_t)
_get_scores = _declare("laprox_get_scores", c_int32, c_void_p, POINTER(c_float), c_size_t)
_get_residual = _declare("laprox_get_residual", c_int32, c_void_p, POINTER(c_float), c_size_t)
_evict = _declare("laprox_evict", c_int32, c_void_p, POINTER(PlanParams), c_int32)
_set_kept = _declare("laprox_set_kept", c_int32, c_void_p, POINTER(c_uint32), POINTER(c_int32), c_int32)
_restore = _declare("laprox_restore", c_int32, c_void_p)
_get_kept = _declare("laprox_get_kept", c_int32, c_void_p, POINTER(c_uint32), POINTER(c_int32), c_size_t)
_get_rows = _declare(
    "laprox_get_rows", c_int32, c_void_p, c_int32, c_uint32, POINTER(c_uint32), POINTER(c_float), c_size_t
)
_get_stats = _declare("laprox_get_stats", c_int32, c_void_p, POINTER(Stats))
_set_pages = _declare("laprox_set_pages", c_int32, c_void_p, POINTER(PagesParams))
_set_reference_kernels = _declare("laprox_set_reference_kernels", c_int32, c_void_p, c_bool)
_plan_args = (POINTER(PlanParams), c_uint32, POINTER(c_uint32), c_uint32, POINTER(c_float), POINTER(c_float))
_plan = _declare("laprox_plan", c_int32, *_plan_args, POINTER(c_uint32), POINTER(c_int32))
_rank = _declare("laprox_rank", c_int32, *_plan_args, POINTER(c_float))


def last_error() -> str:
    """The library's last line of error text on this thread, "" when there is none."""
    text: bytes | None = _last_error()
    return (text or b"").decode("utf-8", errors="replace")


def _check(status: int) -> None:
    if status != 0:
        raise from_status(status, last_error())


def _ptr(array: npt.NDArray[Any], ctype: Any) -> Any:
    return array.ctypes.data_as(POINTER(ctype))


def build_info() -> dict[str, str]:
    """Compiler, flags and patches of the library, by key."""
    lines = _build_info().decode("utf-8", errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def context_params(n_reserve: int | None = None, attention_path: str = "auto") -> ContextParams:
    """Defaults; `n_reserve` rows per head held ready for new tokens, `attention_path` to force how they are read."""
    params = ContextParams(ctypes.sizeof(ContextParams))
    _check(_context_default_params(ctypes.byref(params)))
    if n_reserve is not None:
        params.n_reserve = n_reserve
    params.attention_path = ATTENTION_PATH[attention_path]
    return params


def score_params(attention: str = "max", value: str = "l2", gqa: str = "mean", composed: bool = False) -> ScoreParams:
    """How to score (names of the header's enums); `composed` builds it from stock ops (slow cross-check)."""
    params = ScoreParams(ctypes.sizeof(ScoreParams))
    _check(_score_default_params(ctypes.byref(params)))
    params.attention, params.value, params.gqa = ATTENTION[attention], VALUE[value], GQA[gqa]
    params.composed = composed
    return params


def plan_params(
    n_keep: int, pool: Pool | None = None, normalize: str = "none", alloc: str = "head", sinks: int = 0
) -> PlanParams:
    """How to choose `n_keep` candidates (over all heads, the window excluded) from scores."""
    params = PlanParams(ctypes.sizeof(PlanParams))
    _check(_plan_default_params(ctypes.byref(params)))
    pool = pool or Pool("none")
    params.pool, params.pool_size, params.pool_decay = POOL[pool.kind], pool.size, pool.decay
    params.normalize = NORMALIZE[normalize]
    params.alloc = ALLOC[alloc]
    params.n_sink = sinks
    params.n_keep = n_keep
    return params


def pages_params(n_rows: int) -> PagesParams:
    """Defaults; each query head attends to `n_rows` rows, rounded down to pages, per step."""
    params = PagesParams(ctypes.sizeof(PagesParams))
    _check(_pages_default_params(ctypes.byref(params)))
    params.n_rows = n_rows
    return params


def set_next(params: ContextParams | None) -> None:
    """Turn eviction on for the next context made on this thread; None clears."""
    _check(_set_next(None if params is None else ctypes.byref(params)))


def enabled(ctx: Any) -> bool:
    """Whether this context can evict."""
    return bool(_enabled(ctx))


def reserve(ctx: Any, n_tokens: int) -> None:
    """Make room for `n_tokens` more tokens at once."""
    _check(_reserve(ctx, n_tokens))


def observe(ctx: Any, n_window: int) -> None:
    """The next decode is the observation window of exactly `n_window` tokens; 0 cancels."""
    _check(_observe(ctx, n_window))


def score(ctx: Any, params: ScoreParams) -> None:
    """Score every cached position for the observed queries. The cache stays as it is; may be repeated."""
    _check(_score(ctx, ctypes.byref(params)))


def accumulate(ctx: Any) -> None:
    """Add the observed queries to the running column sums ("total")."""
    _check(_accumulate(ctx))


def accumulated(ctx: Any) -> int:
    """Tokens, from the first on, whose queries the column sums hold."""
    out = c_uint32()
    _check(_get_accumulated(ctx, ctypes.byref(out)))
    return out.value


def shape(ctx: Any) -> Shape:
    """Evictable layers, their KV heads, and the size of the last scores."""
    out = Shape(struct_size=ctypes.sizeof(Shape))
    _check(_get_shape(ctx, ctypes.byref(out)))
    return out


def layers(ctx: Any) -> list[tuple[int, int]]:
    """(model layer, number of KV heads) of each evictable layer."""
    n = int(shape(ctx).n_layer)
    il, n_head_kv = np.zeros(n, np.int32), np.zeros(n, np.uint32)
    _check(_get_layers(ctx, _ptr(il, c_int32), _ptr(n_head_kv, c_uint32), n))
    return [(int(a), int(b)) for a, b in zip(il, n_head_kv)]


def devices(ctx: Any) -> list[str]:
    """Name of the device that holds the rows of each evictable layer, and computes with them."""
    name = ctypes.create_string_buffer(256)
    out = []
    for layer in range(shape(ctx).n_layer):
        _check(_get_device(ctx, layer, name, len(name)))
        out.append(name.value.decode("utf-8", errors="replace"))
    return out


def scores(ctx: Any) -> npt.NDArray[np.float32]:
    """The last raw scores, [n_head_kv over all layers, n_cand]; with gqa "none" a row for each query head."""
    s = shape(ctx)
    out = np.zeros((s.n_score, s.n_cand), np.float32)
    _check(_get_scores(ctx, _ptr(out, c_float), out.size))
    return out


def residual(ctx: Any) -> npt.NDArray[np.float32]:
    """R_l of the last observation, [n_layer]: mean norm of the residual stream that enters the layer."""
    out = np.zeros(shape(ctx).n_layer, np.float32)
    _check(_get_residual(ctx, _ptr(out, c_float), out.size))
    return out


def rows_shape(ctx: Any, kind: str, layer: int) -> tuple[int, int, int]:
    """Shape of `rows`."""
    dims = np.zeros(3, np.uint32)
    _check(_get_rows(ctx, ROWS[kind], layer, _ptr(dims, c_uint32), None, 0))
    a, b, c = dims.tolist()
    return a, b, c


def rows(ctx: Any, kind: str, layer: int) -> npt.NDArray[np.float32]:
    """Rows of an observed prompt in the model's basis: "q" [n_head, w, d], "k" or "v" [n_head_kv, N, d]."""
    out = np.zeros(rows_shape(ctx, kind, layer), np.float32)
    dims = np.zeros(3, np.uint32)
    _check(_get_rows(ctx, ROWS[kind], layer, _ptr(dims, c_uint32), _ptr(out, c_float), out.size))
    return out


def evict(ctx: Any, params: PlanParams, store: int = STORE_RAGGED) -> None:
    """Plan from the last scores, and commit."""
    _check(_evict(ctx, ctypes.byref(params), store))


def set_kept(ctx: Any, kept: Sequence[npt.NDArray[np.int32]], store: int = STORE_RAGGED) -> None:
    """Commit a kept set made elsewhere: ascending candidate positions of each head, window excluded."""
    n_heads = int(shape(ctx).n_head_kv)
    if len(kept) != n_heads:
        raise ArgumentError(f"a kept set of {len(kept)} heads, expected one array of positions for each of {n_heads}")
    if any(not np.issubdtype(np.asarray(k).dtype, np.integer) for k in kept if len(k)):
        raise ArgumentError("a kept set holds positions that are no integers, expected ascending int32 positions")
    n_kept = np.array([len(k) for k in kept], np.uint32)
    pos = np.concatenate([np.asarray(k, np.int32) for k in kept])
    _check(_set_kept(ctx, _ptr(n_kept, c_uint32), _ptr(pos, c_int32), store))


def restore(ctx: Any) -> None:
    """Back to the full prompt of a cache that was evicted with STORE_ASIDE; later tokens removed first."""
    _check(_restore(ctx))


def kept(ctx: Any) -> list[npt.NDArray[np.int32]]:
    """Kept candidate positions of each head of an evicted cache, window excluded."""
    n_kept = np.zeros(shape(ctx).n_head_kv, np.uint32)
    _check(_get_kept(ctx, _ptr(n_kept, c_uint32), None, 0))
    pos = np.zeros(int(n_kept.sum()), np.int32)
    _check(_get_kept(ctx, _ptr(n_kept, c_uint32), _ptr(pos, c_int32), pos.size))
    return np.split(pos, np.cumsum(n_kept)[:-1].astype(np.intp))


def stats(ctx: Any) -> Stats:
    """Counters, bytes and times of the context."""
    out = Stats(struct_size=ctypes.sizeof(Stats))
    _check(_get_stats(ctx, ctypes.byref(out)))
    return out


def set_pages(ctx: Any, params: PagesParams | None) -> None:
    """Select pages (Quest, arXiv 2406.10774) for every later single token; None: attend to all rows again."""
    _check(_set_pages(ctx, None if params is None else ctypes.byref(params)))


def set_reference_kernels(ctx: Any, enable: bool) -> None:
    """Slow, order-exact CPU kernels, for tests that compare bits."""
    _check(_set_reference_kernels(ctx, enable))


def plan(
    params: PlanParams,
    n_head_kv: Sequence[int],
    scores: npt.NDArray[np.float32],
    residual: npt.NDArray[np.float32] | None = None,
) -> list[npt.NDArray[np.int32]]:
    """The plan alone: kept candidate positions of each head, from `scores` [sum of n_head_kv, n_cand]."""
    heads, raw, norm = _plan_arrays(n_head_kv, scores, residual)
    n_kept = np.zeros(raw.shape[0], np.uint32)
    pos = np.zeros(int(params.n_keep), np.int32)
    _check(_plan(*_plan_call(params, heads, raw, norm), _ptr(n_kept, c_uint32), _ptr(pos, c_int32)))
    return np.split(pos, np.cumsum(n_kept)[:-1].astype(np.intp))


def rank(
    params: PlanParams,
    n_head_kv: Sequence[int],
    scores: npt.NDArray[np.float32],
    residual: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """The first half of the plan: pooled and normalised scores, [sum of n_head_kv, n_cand]."""
    heads, raw, norm = _plan_arrays(n_head_kv, scores, residual)
    out: npt.NDArray[np.float32] = np.empty_like(raw)
    _check(_rank(*_plan_call(params, heads, raw, norm), _ptr(out, c_float)))
    return out


def _plan_arrays(n_head_kv: Sequence[int], scores: Any, residual: Any) -> tuple[Any, Any, Any]:
    heads = np.asarray(n_head_kv, np.uint32)
    raw = np.ascontiguousarray(scores, np.float32)
    if raw.ndim != 2 or raw.shape[0] != int(heads.sum()):
        raise ValueError(f"scores have shape {raw.shape}, expected [{int(heads.sum())}, n_cand]")
    norm = None if residual is None else np.ascontiguousarray(residual, np.float32)
    if norm is not None and norm.shape != heads.shape:
        raise ValueError(f"residual has shape {norm.shape}, expected [{heads.size}]")
    return heads, raw, norm


def _plan_call(params: PlanParams, heads: Any, raw: Any, norm: Any) -> tuple[Any, ...]:
    return (
        ctypes.byref(params),
        heads.size,
        _ptr(heads, c_uint32),
        raw.shape[1],
        _ptr(raw, c_float),
        None if norm is None else _ptr(norm, c_float),
    )
