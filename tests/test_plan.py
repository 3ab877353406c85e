"""laprox_plan() of the installed library against NumPy, written from the definitions of docs/method.md."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laprox_llamacpp import ArgumentError, _native
from laprox_llamacpp.parts.pool import Pool

Kept = list[npt.NDArray[Any]]

POOLS = [("none", 0), ("reach", 12), ("reach", 1), ("avg", 7), ("max", 7)]
NORMALIZE = ["none", "residual", "layer_sum", "zscore"]
ALLOC = ["model", "layer", "head"]


def plan(
    scores: npt.NDArray[Any],
    n_head_kv: Sequence[int],
    n_keep: int,
    pool: tuple[str, int] = ("none", 0),
    normalize: str = "none",
    alloc: str = "model",
    n_sink: int = 0,
    residual: npt.NDArray[Any] | None = None,
) -> Kept:
    params = _native.PlanParams(ctypes.sizeof(_native.PlanParams))
    params.pool, params.pool_size, params.pool_decay = _native.POOL[pool[0]], pool[1], 0.3
    params.normalize, params.alloc = _native.NORMALIZE[normalize], _native.ALLOC[alloc]
    params.n_sink, params.n_keep = n_sink, n_keep
    return _native.plan(params, n_head_kv, scores.astype(np.float32), residual)


#
# the definitions, in float64 with one rounding to float32 after each step
#


def pooled(r: npt.NDArray[np.float64], pool: tuple[str, int]) -> npt.NDArray[np.float64]:
    """r [heads, n_cand]."""
    kind, size = pool
    if kind == "none":
        return r
    radius = size if kind == "reach" else size // 2
    edge = 0.0 if kind == "avg" else -np.inf
    padded = np.pad(r, ((0, 0), (radius, radius)), constant_values=edge)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis=1)
    if kind == "avg":
        return windows.sum(axis=2) / size
    if kind == "max":
        return windows.max(axis=2)
    return np.maximum(r, float(np.float32(0.3)) * windows.max(axis=2))


def normalized(s: npt.NDArray[np.float64], how: str, residual: float) -> npt.NDArray[np.float64]:
    """s [heads of one layer, n_cand]."""
    if how == "residual":
        return s / residual
    if how == "layer_sum":
        return s / s.sum()
    if how == "zscore":
        centred, std = s - s.mean(axis=1, keepdims=True), s.std(axis=1, ddof=1, keepdims=True)
        return np.divide(centred, std, out=np.zeros_like(s), where=std > 0)  # a constant head is 0
    return s


def ranked(
    scores: npt.NDArray[Any],
    n_head_kv: Sequence[int],
    pool: tuple[str, int],
    normalize: str,
    residual: npt.NDArray[Any],
) -> npt.NDArray[np.float32]:
    final = np.empty(scores.shape, np.float32)
    layer_of = np.repeat(np.arange(len(n_head_kv)), n_head_kv)
    for layer in range(len(n_head_kv)):
        raw = scores[layer_of == layer].astype(np.float32).astype(np.float64)
        s = pooled(raw, pool).astype(np.float32).astype(np.float64)
        final[layer_of == layer] = normalized(s, normalize, float(np.float32(residual[layer])))
    return final


def expected(
    scores: npt.NDArray[Any],
    n_head_kv: Sequence[int],
    n_keep: int,
    pool: tuple[str, int],
    normalize: str,
    alloc: str,
    n_sink: int,
    residual: npt.NDArray[Any],
) -> Kept:
    n_heads, n_cand = scores.shape
    final = ranked(scores, n_head_kv, pool, normalize, residual)
    layer_of = np.repeat(np.arange(len(n_head_kv)), n_head_kv)

    if alloc == "model":
        units, share = np.zeros(n_heads, int), [n_keep]
    elif alloc == "layer":
        due = [n_keep * n / n_heads for n in n_head_kv]
        share = [math.floor(d + 1e-9) for d in due]
        for layer in sorted(range(len(due)), key=lambda i: (-round(due[i] - share[i], 9), i))[: n_keep - sum(share)]:
            share[layer] += 1
        units = layer_of
    else:
        units, share = np.arange(n_heads), [n_keep // n_heads + (h < n_keep % n_heads) for h in range(n_heads)]

    kept = np.zeros((n_heads, n_cand), bool)
    for unit, n in enumerate(share):
        rows = [
            # sinks first, lower position first; then higher score, lower head, lower position
            ((0, i, h, 0) if i < n_sink else (1, -float(final[h, i]), h, i), (h, i))
            for h in np.flatnonzero(units == unit)
            for i in range(n_cand)
        ]
        for _, (h, i) in sorted(rows)[:n]:
            kept[h, i] = True
    return [np.flatnonzero(row).astype(np.int32) for row in kept]


def assert_same(got: Kept, want: Kept) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("alloc", ALLOC)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("pool", POOLS, ids=lambda p: f"{p[0]}{p[1]}")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_against_numpy(pool: tuple[str, int], normalize: str, alloc: str, ties: bool) -> None:
    rng = np.random.default_rng([pool[1], NORMALIZE.index(normalize), ALLOC.index(alloc), ties])
    for n_head_kv, n_cand, n_sink in [((2, 2, 2), 80, 4), ((1, 3, 2, 1), 41, 0), ((2,), 9, 4)]:
        shape = (sum(n_head_kv), n_cand)
        scores = rng.integers(0, 4, shape).astype(float) if ties else rng.lognormal(0, 3, shape)
        residual = 2.0 ** rng.integers(0, 3, len(n_head_kv)) if ties else rng.uniform(0.5, 500, len(n_head_kv))
        for n_keep in (0, 1, scores.size // 10, scores.size // 3, scores.size - 1, scores.size):
            norm = residual if normalize == "residual" else None
            got = plan(scores, n_head_kv, n_keep, pool, normalize, alloc, n_sink, norm)
            assert_same(got, expected(scores, n_head_kv, n_keep, pool, normalize, alloc, n_sink, residual))


@settings(max_examples=200, deadline=None)
@given(
    n_layer=st.integers(1, 4),
    n_head=st.integers(1, 4),
    n_prompt=st.integers(1, 300),
    window=st.integers(1, 40),
    budget=st.floats(0.001, 1.0),
    alloc=st.sampled_from(ALLOC),
    n_sink=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_kept_total_is_exact(
    n_layer: int, n_head: int, n_prompt: int, window: int, budget: float, alloc: str, n_sink: int, seed: int
) -> None:
    n_cand = max(0, n_prompt - window)
    k = max(0, math.floor(budget * n_prompt + 0.5) - window)
    scores = np.random.default_rng(seed).integers(0, 5, (n_layer * n_head, n_cand))
    kept = plan(scores, [n_head] * n_layer, n_layer * n_head * k, ("reach", 2), alloc=alloc, n_sink=n_sink)
    counts = [len(p) for p in kept]
    assert sum(counts) == n_layer * n_head * k
    if alloc == "layer":
        assert {sum(counts[i : i + n_head]) for i in range(0, len(counts), n_head)} == {n_head * k}
    if alloc == "head" or k <= min(n_sink, n_cand):
        assert set(counts) == {k}
    for positions in kept:
        assert np.all(np.diff(positions) > 0)
        assert np.all((positions >= 0) & (positions < n_cand))
        assert positions.tolist()[: min(k, n_sink)] == list(range(min(k, n_sink)))


def test_ties_go_to_the_lower_layer_head_position() -> None:
    kept = plan(np.ones((4, 5)), (2, 2), 7)
    assert_same(kept, [np.arange(5), np.arange(2), np.arange(0), np.arange(0)])
    kept = plan(np.ones((4, 5)), (2, 2), 7, alloc="layer")
    assert_same(kept, [np.arange(4), np.arange(0), np.arange(3), np.arange(0)])
    kept = plan(np.ones((4, 5)), (2, 2), 7, alloc="head")
    assert_same(kept, [np.arange(2), np.arange(2), np.arange(2), np.arange(1)])


def test_sinks_that_do_not_fit_are_spread_over_the_heads() -> None:
    scores = np.zeros((3, 10))
    scores[2, 9] = 100
    assert_same(plan(scores, (3,), 4, n_sink=4), [np.arange(2), np.arange(1), np.arange(1)])


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("pool", POOLS, ids=lambda p: f"{p[0]}{p[1]}")
def test_rank_is_the_first_half(pool: tuple[str, int], normalize: str) -> None:
    rng = np.random.default_rng(8)
    for n_head_kv, n_cand in (((2, 2, 2), 80), ((1, 3, 2), 41), ((3,), 2)):
        scores = rng.lognormal(0, 3, (sum(n_head_kv), n_cand)).astype(np.float32)
        residual = rng.uniform(0.5, 500, len(n_head_kv))
        params = _native.plan_params(0, Pool(pool[0], pool[1], 0.3), normalize)
        before = scores.copy()
        got = _native.rank(params, n_head_kv, scores, residual if normalize == "residual" else None)
        np.testing.assert_allclose(got, ranked(scores, n_head_kv, pool, normalize, residual), rtol=1e-6, atol=1e-7)
        assert np.array_equal(scores, before)


def test_two_runs_agree() -> None:
    scores = np.random.default_rng(5).integers(0, 50, (16, 4000))
    first = plan(scores, (4,) * 4, 7777, ("reach", 12), "zscore", n_sink=4)
    for _ in range(3):
        assert_same(plan(scores, (4,) * 4, 7777, ("reach", 12), "zscore", n_sink=4), first)


def test_scale_does_not_matter() -> None:
    """Scaling all scores by a power of two changes no bit but the exponent, and no kept set."""
    scores = np.random.default_rng(6).lognormal(0, 2, (6, 500))
    for pool in POOLS:
        assert_same(plan(scores * 2.0**-20, (2,) * 3, 300, pool), plan(scores, (2,) * 3, 300, pool))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_must_be_finite(bad: float) -> None:
    scores = np.ones((4, 50))
    scores[3, 17] = bad
    with pytest.raises(ArgumentError, match="layer 1, KV head 1"):
        plan(scores, (2, 2), 10)


def test_arguments_out_of_range() -> None:
    scores = np.ones((4, 50))
    with pytest.raises(ArgumentError, match="n_keep is 201, expected at most 200"):
        plan(scores, (2, 2), 201)
    with pytest.raises(ArgumentError, match="odd"):
        plan(scores, (2, 2), 10, ("avg", 6))
    with pytest.raises(ArgumentError, match="residual"):
        plan(scores, (2, 2), 10, normalize="residual")
    with pytest.raises(ArgumentError, match="residual of layer 1 is 0"):
        plan(scores, (2, 2), 10, normalize="residual", residual=np.array([1.0, 0.0]))
    with pytest.raises(ArgumentError, match="no KV heads"):
        plan(scores, (4, 0), 10)
