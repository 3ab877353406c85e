"""LAPROX_STORE_ASIDE: one prefill, many kept sets; each as if it were the only one, and the full cache comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import Context, W, golden

from laprox_llamacpp import StateError, _native

import llama_cpp as lib  # isort: skip

IDS = golden("smollm2-135m")["ids"]
N = 260
NEXT = [42, 7, 99, 1234, 5]


@pytest.fixture
def ctx(smol_path: Path) -> Iterator[Context]:
    with Context(smol_path, n_ctx=512) as made:
        made.prefill(IDS[:N])
        yield made


def logits(ctx: Context) -> list[Any]:
    return [ctx.decode([t]) for t in NEXT]


def evict(ctx: Context, budget: float, spec: str = "laprox") -> list[Any]:
    ctx.score(spec)
    _native.evict(ctx.ptr, ctx.plan(budget, spec), _native.STORE_ASIDE)
    return _native.kept(ctx.ptr)


def back(ctx: Context) -> None:
    assert ctx.cut(N)
    _native.restore(ctx.ptr)


@pytest.mark.parametrize(("kind", "n"), [("f16", N), ("q8_0", 200)])  # 200: the first buffers, one for all layers
def test_each_kept_set_is_as_if_it_were_the_only_one(smol_path: Path, kind: str, n: int) -> None:
    cells = [("laprox", 0.2), ("laprox:preset=paper", 0.6)]
    alone = []
    for spec, budget in cells:
        with Context(smol_path, n_ctx=512, type_k=kind) as one:
            one.prefill(IDS[:n])
            kept = one.evict(budget, spec)
            alone.append((kept, logits(one)))
    with Context(smol_path, n_ctx=512, type_k=kind) as full:
        full.prefill(IDS[:n])
        want_full = logits(full)
    with Context(smol_path, n_ctx=512, type_k=kind) as many:
        many.prefill(IDS[:n])
        for (spec, budget), (want_kept, want) in zip(cells, alone):
            kept = evict(many, budget, spec)
            assert all(np.array_equal(a, b) for a, b in zip(kept, want_kept))
            assert all(np.array_equal(a, b) for a, b in zip(logits(many), want))
            assert many.cut(n)
            _native.restore(many.ptr)
            assert not many.stats().evicted
        assert all(np.array_equal(a, b) for a, b in zip(logits(many), want_full))


def test_growth_of_the_reserve_does_not_touch_what_is_aside(smol_path: Path) -> None:
    with Context(smol_path, n_ctx=512, n_reserve=4) as ctx:
        ctx.prefill(IDS[:N])
        want = logits(ctx)
        assert ctx.cut(N)
        evict(ctx, 0.3)
        for token in IDS[:20]:
            ctx.decode([token])
        assert ctx.stats().n_grown > 0
        back(ctx)
        assert all(np.array_equal(a, b) for a, b in zip(logits(ctx), want))


def test_bytes_are_told_apart(ctx: Context) -> None:
    full = ctx.stats().bytes_now
    evict(ctx, 0.2)
    stats = ctx.stats()
    assert stats.bytes_aside == full and stats.bytes_now < full
    assert stats.bytes_peak >= full + stats.bytes_now
    back(ctx)
    assert (ctx.stats().bytes_now, ctx.stats().bytes_aside) == (full, 0)
    evict(ctx, 0.2)
    ctx.clear()
    assert ctx.stats().bytes_aside == 0


def test_restore_in_the_wrong_state(ctx: Context) -> None:
    with pytest.raises(StateError, match="no prompt aside"):
        _native.restore(ctx.ptr)
    evict(ctx, 0.3)
    ctx.decode([1])
    with pytest.raises(StateError, match=f"ends at position {N}, .* remove the later tokens first"):
        _native.restore(ctx.ptr)
    with pytest.raises(StateError, match="already evicted"):
        ctx.score()
    back(ctx)
    with pytest.raises(StateError, match="no prompt aside"):
        _native.restore(ctx.ptr)
    ctx.evict(0.3)  # for good
    assert ctx.cut(N)
    with pytest.raises(StateError, match="no prompt aside"):
        _native.restore(ctx.ptr)


@pytest.mark.parametrize("hole", [(N - 5, -1), (N - 9, N - 4)])
def test_tokens_that_were_replaced_do_not_come_back(ctx: Context, hole: tuple[int, int]) -> None:
    """As many tokens as before, but not the same: what is aside is not theirs."""
    evict(ctx, 0.3)
    assert lib.llama_memory_seq_rm(ctx.memory, 0, *hole)
    if hole[1] < 0:
        ctx.pos = hole[0]
        ctx.decode(NEXT)
    with pytest.raises(StateError, match="what is aside is not theirs"):
        _native.restore(ctx.ptr)
    ctx.clear()
    ctx.prefill(IDS[:N])
    evict(ctx, 0.3)
    back(ctx)  # of the next prompt it does


def test_a_sliding_window_that_has_moved_on(gemma_path: Path) -> None:
    tokens = (IDS.tolist() * 3)[:1200]
    with Context(gemma_path, n_ctx=2048) as ctx:
        ctx.prefill(tokens[:600])
        evict(ctx, 0.3)
        ctx.decode(tokens[600:640])
        assert ctx.cut(600)
        _native.restore(ctx.ptr)  # 40 tokens on, the window still reaches back
        evict(ctx, 0.3)
        for i in range(600, 1200, 200):
            ctx.decode(tokens[i : i + 200])
        if ctx.cut(600):
            with pytest.raises(StateError, match="sliding window has passed"):
                _native.restore(ctx.ptr)


def test_a_refused_cut_leaves_the_column_sums(smol_path: Path) -> None:
    with Context(smol_path, n_ctx=512) as ctx:
        for chunk in (IDS[:192], IDS[192 : 192 + W]):
            _native.observe(ctx.ptr, len(chunk))
            ctx.decode(chunk)
            _native.accumulate(ctx.ptr)
        _native.score(ctx.ptr, _native.score_params("total", "none"))
        want = _native.scores(ctx.ptr)
        evict(ctx, 0.4)
        assert not ctx.cut(50)  # refused: evicted rows are before it
        _native.restore(ctx.ptr)
        _native.score(ctx.ptr, _native.score_params("total", "none"))
        assert np.array_equal(_native.scores(ctx.ptr), want)


def test_cut_into_the_window_cannot_come_back(ctx: Context) -> None:
    evict(ctx, 0.3)
    assert ctx.cut(N - W + 3)
    with pytest.raises(StateError, match="what is aside is not theirs"):
        _native.restore(ctx.ptr)
