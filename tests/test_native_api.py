"""laprox.h on a real model: exact totals, struct sizes, order of calls, bad arguments, removal."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lowlevel import Context, W, golden, plan_params

from laprox_llamacpp import ArgumentError, Llama, StateError, _native
from laprox_llamacpp.methods.laprox import LaProx

import llama_cpp as lib  # isort: skip

N = 96
IDS = golden("smollm2-135m")["ids"]
N_HEADS = 90  # SmolLM2-135M: 30 layers of 3 KV heads


@pytest.fixture(scope="module")
def shared(smol_path: Path) -> Iterator[Context]:
    with Context(smol_path) as made:
        yield made


@pytest.fixture
def ctx(shared: Context) -> Context:
    """One context for the file, cleared before each test."""
    _native.observe(shared.ptr, 0)
    shared.clear()
    return shared


@pytest.fixture
def ready(ctx: Context) -> Context:
    """A prompt of N tokens, observed and scored."""
    ctx.prefill(IDS[:N])
    ctx.score()
    return ctx


def plan(n_keep: int) -> _native.PlanParams:
    return plan_params(n_keep)


def same_as_untouched(ctx: Context) -> bool:
    """Whether the next token's logits are those of a cache that nothing was tried on."""
    here = ctx.pos
    got = ctx.decode([5])
    with Context(ctx.path) as other:
        other.prefill(IDS[:here])
        return bool(np.array_equal(got, other.decode([5])))


def fields(ctx: Context) -> dict[str, Any]:
    stats = ctx.stats()
    return {name: getattr(stats, name) for name, _ in stats._fields_}


# ---- what is kept


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(W + 1, 90), budget=st.floats(0.01, 0.999), alloc=st.sampled_from(["model", "layer", "head"]))
def test_kept_total_is_exact(model: Llama, n: int, budget: float, alloc: str) -> None:
    model.reset()
    model._ctx.kv_cache_clear()
    model._policy = LaProx(alloc=alloc)
    model._budget = type(model._budget).parse(budget)
    model.eval(IDS[:n].tolist())
    k = max(0, int(np.floor(budget * n + 0.5)) - W)
    stats = model.kv_stats()
    if k + W >= n:
        assert not stats.evicted
    else:
        assert stats.rows_kept == N_HEADS * (k + W) == sum(len(p) for p in model.kv_kept().values())


@pytest.fixture(scope="module")
def model(smol_path: Path) -> Iterator[Llama]:
    llm = Llama(str(smol_path), kv_evict="laprox", n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    yield llm
    llm.close()


def test_scoring_may_be_repeated_and_leaves_the_cache_alone(ready: Context) -> None:
    first = _native.scores(ready.ptr)
    assert not np.array_equal(ready.score("laprox:preset=paper"), first)
    assert np.array_equal(ready.score("laprox"), first)
    assert same_as_untouched(ready)


def test_mask_store_evicts_again_and_ragged_store_after_it(ready: Context) -> None:
    for n_keep in (900, 450):
        _native.evict(ready.ptr, plan(n_keep), _native.STORE_MASK)
        assert sum(map(len, _native.kept(ready.ptr))) == n_keep
    _native.evict(ready.ptr, plan(700))
    assert sum(map(len, _native.kept(ready.ptr))) == 700
    assert ready.stats().rows_kept == 700 + N_HEADS * W


# ---- struct sizes


class Longer(ctypes.Structure):
    _fields_ = [("known", _native.PlanParams), ("new", ctypes.c_uint64)]


def test_an_older_shorter_struct_keeps_the_defaults_of_what_it_lacks(ready: Context) -> None:
    params = plan(1)
    params.struct_size = _native.PlanParams.n_keep.offset  # without n_keep, which defaults to 0
    params.n_keep = 900
    _native.evict(ready.ptr, params, _native.STORE_MASK)
    assert ready.stats().rows_kept == N_HEADS * W
    out = _native.Stats(struct_size=_native.Stats.rows_full.offset, rows_full=123)
    assert _native._get_stats(ready.ptr, ctypes.byref(out)) == 0
    assert out.evicted and out.n_prompt == N and out.rows_full == 123  # nothing beyond is written


def test_defaults_write_no_more_than_the_struct(ctx: Context) -> None:
    params = _native.PlanParams(struct_size=_native.PlanParams.n_keep.offset, n_keep=77)
    assert _native._plan_default_params(ctypes.byref(params)) == 0
    assert params.n_keep == 77 and params.pool == _native.POOL["reach"] and params.n_sink == 4


def test_longer_structs_and_impossible_sizes_are_refused(ready: Context) -> None:
    for longer in (0, 1, 2, 1 << 40):
        params, context = Longer(plan(0)), _native.context_params()
        stats, shape = _native.Stats(), _native.Shape()
        for out in (params.known, context, stats, shape):
            out.struct_size = longer if longer < 2 else ctypes.sizeof(out) + longer
        with pytest.raises(ArgumentError, match="struct_size"):
            _native.evict(ready.ptr, params.known)
        with pytest.raises(ArgumentError, match="struct_size"):
            _native.set_next(context)
        assert _native._get_stats(ready.ptr, ctypes.byref(stats)) == -1
        assert _native._get_shape(ready.ptr, ctypes.byref(shape)) == -1
        assert (stats.n_prompt, shape.n_layer) == (0, 0)
    assert not ready.stats().evicted


# ---- bad arguments, each with a reason and without a change


def test_null_pointers(ready: Context) -> None:
    n = 1 << 20
    assert not _native.enabled(None)
    assert _native._reserve(None, 1) == _native._observe(None, W) == -3
    assert "eviction is off" in _native.last_error()
    for status in (
        _native._score(ready.ptr, None),
        _native._evict(ready.ptr, None, 0),
        _native._set_kept(ready.ptr, None, None, 0),
        _native._get_shape(ready.ptr, None),
        _native._get_stats(ready.ptr, None),
        _native._get_layers(ready.ptr, None, None, 30),
        _native._get_scores(ready.ptr, None, n),
        _native._get_residual(ready.ptr, None, 30),
        _native._plan(None, 0, None, 0, None, None, None, None),
        _native._plan_default_params(None),
    ):
        assert status == -1 and _native.last_error()
    _native.evict(ready.ptr, plan(90))
    assert _native._get_kept(ready.ptr, None, None, 0) == -1
    assert _native._lib.laprox_sizeof(None) == 0


def test_buffers_of_another_size(ready: Context) -> None:
    out = np.zeros(N_HEADS * (N - W) + 1, np.float32)
    for n in (out.size, out.size - 2, 0):
        assert _native._get_scores(ready.ptr, _native._ptr(out, ctypes.c_float), n) == -1
    assert _native._get_residual(ready.ptr, _native._ptr(out, ctypes.c_float), 29) == -1
    assert not out.any()


@pytest.mark.parametrize("n_keep", [N_HEADS * (N - W) + 1, 2**64 - 1])
def test_n_keep_beyond_the_candidates(ready: Context, n_keep: int) -> None:
    with pytest.raises(ArgumentError, match=f"n_keep is {n_keep}, there are {N_HEADS * (N - W)} candidates"):
        _native.evict(ready.ptr, plan(n_keep))
    assert same_as_untouched(ready)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [([3, 2], "ascend"), ([2, 2], "ascend"), ([-1], "within"), ([N - W], "within"), (range(N), "cannot keep 96 of 64")],
)
def test_kept_positions_are_checked_before_anything_moves(ready: Context, bad: Any, reason: str) -> None:
    kept = [np.arange(5, dtype=np.int32) for _ in range(N_HEADS)]
    kept[50] = np.array(bad, np.int32)
    for store in (_native.STORE_RAGGED, _native.STORE_MASK):
        with pytest.raises(ArgumentError, match=reason):
            _native.set_kept(ready.ptr, kept, store)
    assert not ready.stats().evicted
    with pytest.raises(StateError, match="not evicted"):
        _native.kept(ready.ptr)
    assert same_as_untouched(ready)


def test_unknown_numbers(ready: Context) -> None:
    with pytest.raises(ArgumentError, match="unknown store 7"):
        _native.evict(ready.ptr, plan(90), 7)
    params = _native.score_params()
    params.attention = 9
    with pytest.raises(ArgumentError, match="unknown attention statistic 9"):
        _native.score(ready.ptr, params)
    for field in ("value", "gqa"):
        params = _native.score_params()
        setattr(params, field, 9)
        with pytest.raises(ArgumentError, match=f"unknown {field} .* 9"):
            _native.score(ready.ptr, params)
    for field in ("pool", "normalize", "alloc"):
        wrong = plan(90)
        setattr(wrong, field, 9)
        with pytest.raises(ArgumentError, match=field):
            _native.evict(ready.ptr, wrong)
    for n_reserve in (0, 1 << 21):
        with pytest.raises(ArgumentError, match="n_reserve"):
            _native.set_next(_native.context_params(n_reserve))
    params = _native.context_params()
    params.attention_path = 3
    with pytest.raises(ArgumentError, match="unknown attention_path 3"):
        _native.set_next(params)
    assert not ready.stats().evicted


# ---- the order of calls


def test_nothing_observed(ctx: Context) -> None:
    ctx.decode(IDS[:N])
    for call in (lambda: ctx.score(), lambda: _native.evict(ctx.ptr, plan(0)), lambda: _native.residual(ctx.ptr)):
        with pytest.raises(StateError):
            call()
    kept = [np.arange(5, dtype=np.int32)] * N_HEADS
    with pytest.raises(StateError, match="no observation window"):
        _native.set_kept(ctx.ptr, kept)
    assert not ctx.stats().evicted


@pytest.mark.parametrize("n", [W - 1, W + 1, 1])
def test_a_window_of_another_size_is_not_decoded(ctx: Context, n: int) -> None:
    ctx.decode(IDS[: N - W])
    _native.observe(ctx.ptr, W)
    assert ctx.try_decode(IDS[N - W : N - W + n]) < 0
    assert f"exactly {W} tokens, this batch has {n}" in _native.last_error()
    assert lib.llama_memory_seq_pos_max(ctx.memory, 0) == N - W - 1
    got = ctx.decode(IDS[N - W : N])  # no longer observing
    with Context(ctx.path) as other:
        other.decode(IDS[: N - W])
        assert np.array_equal(got, other.decode(IDS[N - W : N]))
    with pytest.raises(StateError):
        ctx.score()


def test_observe_twice_and_cancel(ctx: Context) -> None:
    ctx.decode(IDS[: N - W])
    _native.observe(ctx.ptr, W // 2)
    _native.observe(ctx.ptr, W)
    ctx.decode(IDS[N - W : N])
    assert ctx.score().shape == (N_HEADS, N - W)
    ctx.clear()
    _native.observe(ctx.ptr, W)
    _native.observe(ctx.ptr, 0)
    ctx.decode(IDS[:9])
    with pytest.raises(StateError):
        ctx.score()
    with pytest.raises(ArgumentError, match="does not fit into one ubatch of 512"):
        _native.observe(ctx.ptr, 513)


def test_tokens_between_window_and_eviction(ready: Context) -> None:
    ready.decode([7])
    for call in (lambda: _native.evict(ready.ptr, plan(900)), lambda: ready.score()):
        with pytest.raises(StateError, match="prompt"):
            call()
    assert ready.cut(N)
    _native.evict(ready.ptr, plan(900))


def test_only_once(ready: Context) -> None:
    _native.evict(ready.ptr, plan(900))
    before = [p.tolist() for p in _native.kept(ready.ptr)]
    for call in (
        lambda: _native.evict(ready.ptr, plan(100)),
        lambda: ready.score(),
        lambda: _native.observe(ready.ptr, W),
        lambda: _native.set_kept(ready.ptr, _native.kept(ready.ptr)),
    ):
        with pytest.raises(StateError, match="already evicted"):
            call()
    assert [p.tolist() for p in _native.kept(ready.ptr)] == before
    ready.clear()
    ready.prefill(IDS[:N])
    assert len(ready.evict(0.5)) == N_HEADS


def test_scores_go_with_the_cache(ready: Context) -> None:
    ready.clear()
    assert _native.shape(ready.ptr).n_cand == 0
    with pytest.raises(StateError):
        _native.evict(ready.ptr, plan(10))


# ---- removal


def test_cuts_into_the_evicted_part_are_refused(ready: Context) -> None:
    _native.evict(ready.ptr, plan(900))
    ready.decode([7, 8])
    before = fields(ready)
    for p0, p1 in ((1, -1), (N - W - 1, -1), (5, 9), (0, 9), (0, N)):
        assert not lib.llama_memory_seq_rm(ready.memory, 0, p0, p1)
        assert f"before {N - W}" in _native.last_error()
    assert fields(ready) == before
    assert lib.llama_memory_seq_pos_max(ready.memory, 0) == N + 1
    ready.decode([9])


def test_cut_inside_the_window_decodes_as_if_never_seen(ready: Context) -> None:
    _native.evict(ready.ptr, plan(900))
    kept = _native.kept(ready.ptr)
    ready.decode([7, 8, 9])
    assert ready.cut(N - 10)
    got = ready.decode(IDS[3:7])
    with Context(ready.path) as other:
        other.prefill(IDS[:N])
        _native.set_kept(other.ptr, kept)
        assert other.cut(N - 10)
        assert np.array_equal(got, other.decode(IDS[3:7]))
    assert [p.tolist() for p in _native.kept(ready.ptr)] == [p.tolist() for p in kept]


@pytest.mark.parametrize("how", ["cut", "clear", "whole range", "keep another"])
def test_removing_everything_gives_the_bytes_back(ctx: Context, how: str) -> None:
    empty = ctx.stats().bytes_now
    ctx.prefill(IDS[:N])
    ctx.evict(0.9)  # with the reserve more rows than an empty cache has
    assert ctx.stats().bytes_now > empty
    if how == "cut":
        assert ctx.cut(0)
    elif how == "clear":
        ctx.clear()
    elif how == "whole range":
        assert lib.llama_memory_seq_rm(ctx.memory, -1, 0, 10_000)
    else:
        lib.llama_memory_seq_keep(ctx.memory, 1)
    ctx.pos = 0
    stats = ctx.stats()
    assert stats.bytes_now == empty and not stats.evicted
    got = ctx.decode(IDS[:N])
    with Context(ctx.path) as other:
        assert np.array_equal(got, other.decode(IDS[:N]))


def test_positions_stay_the_true_ones(ready: Context) -> None:
    _native.evict(ready.ptr, plan(900))
    assert not lib.llama_memory_can_shift(ready.memory)
    lib.llama_memory_seq_add(ready.memory, 0, 0, -1, 5)
    assert "cannot be shifted" in _native.last_error()
    lib.llama_memory_seq_div(ready.memory, 0, 0, -1, 2)
    assert lib.llama_memory_seq_pos_max(ready.memory, 0) == N - 1
    ready.decode([5])


def test_state_is_not_saved(ready: Context) -> None:
    buffer = (ctypes.c_uint8 * 4096)()
    for evict in (False, True):
        if evict:
            _native.evict(ready.ptr, plan(900))
        assert lib.llama_state_get_size(ready.ptr) == 0
        assert lib.llama_state_get_data(ready.ptr, buffer, len(buffer)) == 0
        assert lib.llama_state_set_data(ready.ptr, buffer, len(buffer)) == 0
        assert lib.llama_state_seq_get_size(ready.ptr, 0) == 0
        assert lib.llama_state_seq_get_data(ready.ptr, buffer, len(buffer), 0) == 0
        assert lib.llama_state_seq_set_data(ready.ptr, buffer, len(buffer), 0) == 0
    ready.decode([5])


# ---- several contexts, several threads


def test_two_contexts_do_not_mix(smol_path: Path) -> None:
    a_ids, b_ids = IDS[:N], IDS[100 : 100 + N]

    def alone(ids: npt.NDArray[Any], budget: float) -> tuple[Any, Any]:
        with Context(smol_path) as ctx:
            ctx.prefill(ids)
            ctx.evict(budget)
            return ctx.decode([5]), ctx.decode([6])

    want_a, want_b = alone(a_ids, 0.5), alone(b_ids, 0.6)
    with Context(smol_path) as a, Context(smol_path) as b:
        a.decode(a_ids[:-W])
        b.decode(b_ids[:-W])
        _native.observe(a.ptr, W)
        _native.observe(b.ptr, W)
        b.decode(b_ids[-W:])
        a.decode(a_ids[-W:])
        a.evict(0.5)
        b.evict(0.6)
        got = [(a.decode([t]), b.decode([t])) for t in (5, 6)]
    for i in range(2):
        assert np.array_equal(got[i][0], want_a[i]) and np.array_equal(got[i][1], want_b[i])


def test_a_context_is_plain_unless_asked_for(smol_path: Path) -> None:
    with Context(smol_path, evict=False) as ctx:
        assert not _native.enabled(ctx.ptr)
        for call in (
            lambda: _native.observe(ctx.ptr, W),
            lambda: _native.stats(ctx.ptr),
            lambda: ctx.score(),
            lambda: _native.set_reference_kernels(ctx.ptr, True),
        ):
            with pytest.raises(StateError, match="eviction is off"):
                call()
        assert lib.llama_state_get_size(ctx.ptr) > 0


def test_next_context_is_of_this_thread_and_used_up(smol_path: Path) -> None:
    def make() -> bool:
        params = lib.llama_context_default_params()
        params.n_ctx, params.flash_attn_type = 256, 1
        ctx = lib.llama_init_from_model(shared_model, params)
        on = _native.enabled(ctx)
        lib.llama_free(ctx)
        return on

    with Context(smol_path) as ctx:
        shared_model = ctx.model
    seen: list[bool] = []
    _native.set_next(_native.context_params())
    thread = threading.Thread(target=lambda: seen.append(make()))
    thread.start()
    thread.join()
    assert seen == [False]
    assert [make(), make()] == [True, False]
    _native.set_next(_native.context_params())
    _native.set_next(None)
    assert not make()
