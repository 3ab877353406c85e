"""Faults that a review of the methods found, each with the calls that showed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import Context, golden, run_child

from laprox_llamacpp import AllocError, ArgumentError, EvictionPolicy, Llama, _native, policy
from laprox_llamacpp.observed import ObservedPrompt

IDS = golden("smollm2-135m")["ids"]


@pytest.fixture
def wrong() -> Iterator[Any]:
    """A method that keeps what `made` says."""

    class Wrong(EvictionPolicy, name="wrong"):
        made: Any = None

        def keep(self, prompt: ObservedPrompt, k: int) -> Any:
            return type(self).made(prompt, k)

    yield Wrong
    del policy._METHODS["wrong"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda p, k: [np.arange(k, dtype=np.int32)] * (p.n_heads - 3), "kept .* candidates, expected exactly"),
        (lambda p, k: [np.arange(k * p.n_heads // 3, dtype=np.int32)] * 3, "3 heads, expected one array"),
        (lambda p, k: [np.arange(p.n_cand, dtype=np.int32)] * p.n_heads, "kept .* candidates, expected exactly"),
        (lambda p, k: [np.arange(k) + 0.5] * p.n_heads, "no integers"),
    ],
)
def test_a_method_that_keeps_something_else(smol_path: Path, wrong: Any, made: Any, says: str) -> None:
    wrong.made = staticmethod(made)
    llm = Llama(str(smol_path), n_ctx=256, kv_evict=wrong(), budget=0.5, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        with pytest.raises(ArgumentError, match=says):
            llm.eval(IDS[:90].tolist())
        assert not llm.kv_stats().evicted
    finally:
        llm.close()


def test_residual_needs_no_scores(smol_path: Path) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:90])
        before = _native.residual(ctx.ptr)
        ctx.score()
        assert np.array_equal(_native.residual(ctx.ptr), before) and (before > 0).all()
    for spec in ("random:normalize=residual", "keydiff:normalize=residual"):
        llm = Llama(str(smol_path), n_ctx=256, kv_evict=spec, budget=0.5, n_threads=1, n_threads_batch=1, verbose=False)
        llm.eval(IDS[:90].tolist())
        assert llm.kv_stats().evicted
        llm.close()


def test_recent_positions_stay_whole_beside_sinks(smol_path: Path) -> None:
    llm = Llama(
        str(smol_path),
        n_ctx=512,
        kv_evict="h2o:recent=1:protect_sinks=4",
        budget=0.3,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    try:
        llm.eval(IDS[:300].tolist())
        for pos in llm.kv_kept().values():
            assert pos.tolist() == [0, 1, 2, 3, *range(300 - 86, 300)]
    finally:
        llm.close()


def test_pooling_the_attention_is_not_pooling_its_mean(smol_path: Path) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:200])
        prompt = ObservedPrompt(ctx.ptr, 200, 32)
        kept = [
            EvictionPolicy.parse(f"snapkv:pool=max7{x}").keep(prompt, 20) for x in ("", ":pool_on=attention")
        ]  # fmt: skip
        heads = prompt.score("sum", "none", "none").astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(heads, ((0, 0), (3, 3))), 7, axis=1).max(axis=2)
        want = windows.reshape(prompt.n_heads, 3, -1).mean(axis=1)
        for b, row in zip(kept[1], want):
            assert row[b].min() >= np.delete(row, b).max() * (1 - 1e-6)
        assert any(not np.array_equal(a, b) for a, b in zip(*kept))


def peak_growth(path: str) -> int:
    """KiB of resident memory that the sums of a short prompt add to the peak, in a context that could be long."""
    import resource

    llm = Llama(path, n_ctx=131072, kv_evict="h2o", budget=200, n_threads=1, n_threads_batch=1, verbose=False)
    llm.eval(IDS[:64].tolist())  # buffers of the graph; within the budget, so nothing is summed up yet
    llm.reset()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.eval(IDS[:300].tolist())
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_column_sums_take_the_room_of_the_prompt(smol_path: Path) -> None:
    """Not of the context: 90 heads of 131072 float64 would be 90 MiB. Alone, so that no earlier peak hides it."""
    pytest.importorskip("resource")
    assert run_child(peak_growth, smol_path) < 60 << 10


def test_refused_page_tables_are_not_a_refused_eviction(smol_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AllocError("cannot allocate 1 byte", -5)

    llm = Llama(
        str(smol_path),
        n_ctx=256,
        kv_evict="laprox+quest:read=48",
        budget=0.5,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    try:
        monkeypatch.setattr(_native, "set_pages", refused)
        with pytest.warns(RuntimeWarning, match="read everything.* cannot allocate 1 byte"):
            llm.eval(IDS[:90].tolist())
        stats = llm.kv_stats()
        assert stats.evicted and stats.fallback is None and "read everything" in str(stats.note)
    finally:
        llm.close()


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_rows_of_a_rotated_cache_are_the_models_own(smol_path: Path, kind: str) -> None:
    """Of a quantised cache against those of an F32 one, in the first layer, which sees the same input."""
    rows = {}
    for name in (kind, "f32"):
        with Context(smol_path, type_k=name) as ctx:
            ctx.prefill(IDS[:90])
            rows[name] = [_native.rows(ctx.ptr, what, 0) for what in ("q", "k", "v")]
    for a, b in zip(rows[kind], rows["f32"]):
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()
