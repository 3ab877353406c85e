"""Faults that a review of the native code found, each with the call sequence that showed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lowlevel import Context, W, golden

from laprox_llamacpp import ArgumentError, LaproxError, _native

import llama_cpp as lib  # isort: skip

N = 96
IDS = golden("smollm2-135m")["ids"]


@pytest.mark.parametrize("store", [None, _native.STORE_MASK])
def test_scores_of_removed_tokens_are_not_used(smol_path: Path, store: int | None) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:N])
        ctx.score()
        plan = ctx.plan(0.5)
        if store is not None:
            _native.evict(ctx.ptr, plan, store)
        assert ctx.cut(N - 8)
        ctx.decode(IDS[200:208])  # other tokens in the places of the window's
        with pytest.raises(LaproxError, match="observ"):
            _native.score(ctx.ptr, _native.score_params())
        with pytest.raises(LaproxError, match="score"):
            _native.evict(ctx.ptr, plan)


def test_a_window_that_failed_to_decode_does_not_count(smol_path: Path) -> None:
    abort = lib.ggml_abort_callback(lambda _: True)
    go_on = lib.ggml_abort_callback(lambda _: False)
    with Context(smol_path) as ctx:
        ctx.decode(IDS[: N - W])
        _native.observe(ctx.ptr, W)
        lib.llama_set_abort_callback(ctx.ptr, abort, None)
        assert ctx.try_decode(IDS[N - W : N]) == 2
        lib.llama_set_abort_callback(ctx.ptr, go_on, None)
        ctx.decode(IDS[N - W : N])  # again, without a word of observing it
        with pytest.raises(LaproxError, match="observ"):
            ctx.score()


def test_a_refused_cut_leaves_the_sliding_window_alone(gemma_path: Path) -> None:
    ids = np.arange(200, 200 + N)
    with Context(gemma_path, type_k="q8_0") as ctx, Context(gemma_path, type_k="q8_0") as other:
        for c in (ctx, other):
            c.prefill(ids)
            c.evict(0.5)
        assert not ctx.cut(N // 2)
        _shift(ctx)
        assert lib.llama_memory_seq_pos_max(ctx.memory, 0) == N - 1
        assert np.array_equal(ctx.decode([7]), other.decode([7]))


def _shift(ctx: Context) -> None:
    lib.llama_memory_seq_add(ctx.memory, 0, 0, -1, 3)
    lib.llama_memory_seq_div(ctx.memory, 0, 0, -1, 2)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("n", [1 << 31, (1 << 32) - 1])
def test_room_beyond_the_context_is_refused(smol_path: Path, n: int, evicted: bool) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:N])
        if evicted:
            ctx.evict(0.5)
        with pytest.raises(ArgumentError, match="n_ctx"):
            _native.reserve(ctx.ptr, n)
        ctx.decode([5])


def test_the_peak_counts_old_and_new_rows_while_both_live(smol_path: Path) -> None:
    with Context(smol_path) as ctx:
        start = ctx.stats().bytes_now
        ctx.decode(IDS[:300])
        assert ctx.stats().bytes_peak >= start + ctx.stats().bytes_now
        ctx.clear()
    with Context(smol_path, n_reserve=8) as ctx:
        ctx.prefill(IDS[:N])
        ctx.evict(0.5)
        small = ctx.stats().bytes_now
        ctx.decode(IDS[:500])
        assert ctx.stats().n_grown == 1
        assert ctx.stats().bytes_peak >= small + ctx.stats().bytes_now
