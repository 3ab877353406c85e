"""H2O's sums over every prompt query: the same to the bit, whatever way the prompt came into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, golden

from laprox_llamacpp import Llama, _native, models
from laprox_llamacpp.errors import LaproxError
from laprox_llamacpp.observed import ObservedPrompt

Result = tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.float32]]

N, W = 106, 32  # 64 + 10 + the window
LONG = 234  # 192 + 10 + the window: 1, 2 or 3 ubatches before the rest
KEEP = 60  # tokens: what comes before is no prompt
MODEL = "smollm2-135m"


def ids(n: int = N, start: int = 0) -> list[int]:
    return [int(t) for t in golden(MODEL)["ids"][start : start + n]]


def make(spec: str = "h2o", **kwargs: Any) -> Llama:
    options = {"budget": KEEP, "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **kwargs}
    return Llama(str(models.fetch(MODEL)), kv_evict=spec, **options)


def result(llm: Llama) -> Result:
    """Kept positions of each head, and the sums, [heads, N - w]."""
    stats = llm.kv_stats()
    assert stats.evicted and stats.fallback is None
    return list(llm.kv_kept().values()), np.concatenate(list(llm.kv_scores().values()))


def same(a: Result, b: Result) -> bool:
    return np.array_equal(a[1], b[1]) and all(np.array_equal(x, y) for x, y in zip(a[0], b[0]))


@cache
def at_once(n: int = N) -> Result:
    """The prompt in one eval of a new Llama."""
    llm = make()
    try:
        llm.eval(ids(n))
        return result(llm)
    finally:
        llm.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    llm = make()
    yield llm
    llm.close()


@pytest.fixture
def llm(shared: Llama) -> Llama:
    shared.reset()
    return shared


@pytest.mark.parametrize(
    ("n_batch", "n_ubatch"), [(512, 64), (512, 128), (150, 512), pytest.param(64, 234, marks=pytest.mark.slow)]
)
def test_batches_do_not_matter(n_batch: int, n_ubatch: int) -> None:
    llm = make(n_batch=n_batch, n_ubatch=n_ubatch)
    try:
        llm.eval(ids(LONG))
        assert same(result(llm), at_once(LONG))
    finally:
        llm.close()


def one_by_one(llm: Llama) -> None:
    """A first prompt that fits, tokens as if generated, and a second turn that evicts."""
    llm.eval(ids(40))
    for token in ids(5, 40):
        llm.eval([token])
    assert not llm.kv_stats().evicted
    llm.eval(ids(N - 45, 45))


def in_turns(llm: Llama) -> None:
    """Two prompts that fit, and a third that is shorter than the window."""
    llm.eval(ids(40))
    llm.eval(ids(16, 40))
    llm._budget = type(llm._budget).parse(N - 1)
    llm.eval(ids(N - 56 - 10, 56))
    llm._budget = type(llm._budget).parse(KEEP)
    assert not llm.kv_stats().evicted
    llm.eval(ids(10, N - 10))


def after_a_cut(llm: Llama) -> None:
    """Other tokens were cut off before they were evicted."""
    llm.eval(ids(30) + ids(25, 200))
    llm.n_tokens = 30
    llm.eval(ids(N - 30, 30))


def after_an_eviction(llm: Llama) -> None:
    """Another prompt was evicted, gone on with, and cleared."""
    llm.eval(ids(100, 200))
    llm.eval(ids(3, 300))
    assert llm.kv_stats().evicted
    llm.reset()
    llm.eval(ids())


def after_a_refusal(llm: Llama) -> None:
    """The sums were there, but nothing could be evicted; what is added is shorter than the window."""
    with mock.patch.object(type(llm._policy), "keep", refuse), pytest.warns(RuntimeWarning, match="no memory"):
        llm.eval(ids(N - 10))
    llm.eval(ids(10, N - 10))


def refuse(*_: Any) -> Any:
    raise MemoryError("no memory")


@pytest.mark.parametrize("way", [one_by_one, in_turns, after_a_cut, after_an_eviction, after_a_refusal])
def test_the_way_into_the_cache_does_not_matter(llm: Llama, way: Callable[[Llama], None]) -> None:
    way(llm)
    assert llm.kv_stats().n_prompt == N
    assert same(result(llm), at_once())


def test_a_cut_in_the_window_and_a_second_turn_keep_the_set(llm: Llama) -> None:
    llm.eval(ids())
    before = result(llm)[0]
    llm.n_tokens = N - 5
    llm.eval(ids(12, 300))
    assert [pos[pos < N - 5].tolist() for pos in llm.kv_kept().values()] == [
        pos[pos < N - 5].tolist() for pos in before
    ]


def test_sums_outlive_a_refused_eviction(llm: Llama) -> None:
    """No query is lost or counted twice. Not to the bit: the ubatches are others."""
    with mock.patch.object(type(llm._policy), "keep", refuse), pytest.warns(RuntimeWarning, match="no memory"):
        llm.eval(ids(70))
    llm.eval(ids(N - 70, 70))
    (_, got), (_, want) = result(llm), at_once()
    np.testing.assert_allclose(got.sum(axis=1), want.sum(axis=1), rtol=1e-2)
    assert np.median(np.abs(got - want) / want) < 5e-2


def test_statistics_show_what_the_sums_cost(llm: Llama) -> None:
    llm.eval(ids(100))
    assert llm.kv_stats().evicted and llm.kv_stats().all_queries_ms > 0
    llm.reset()
    llm.eval(ids(20))
    assert not llm.kv_stats().evicted and llm.kv_stats().all_queries_ms == 0
    other = make("snapkv")
    try:
        other.eval(ids(100))
        assert other.kv_stats().evicted and other.kv_stats().all_queries_ms == 0
    finally:
        other.close()


# ---- the sums alone


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    with Context(models.fetch(MODEL), n_ctx=256) as ctx:
        yield ctx


def observe(ctx: Context, tokens: list[int], accumulate: bool = True) -> None:
    _native.observe(ctx.ptr, len(tokens))
    ctx.decode(tokens)
    if accumulate:
        _native.accumulate(ctx.ptr)


def test_a_query_counts_once(context: Context) -> None:
    """Each query's attention sums to 1: those before the window see candidates alone, the window's a part of 1."""
    context.clear()
    for chunk in (ids(64), ids(20, 64), ids(16, 84)):
        observe(context, chunk)
    assert _native.accumulated(context.ptr) == 100
    prompt = ObservedPrompt(context.ptr, 100, 16)
    total, window = prompt.score("total"), prompt.score("sum")
    np.testing.assert_allclose(total.sum(axis=1), 84 + window.sum(axis=1), rtol=1e-5)
    assert (total >= window).all()
    assert (total[:, 0] > 1).all()  # the first query sees position 0 alone


def test_sums_that_miss_a_query_are_refused(context: Context) -> None:
    context.clear()
    observe(context, ids(64))
    observe(context, ids(16, 64), accumulate=False)
    with pytest.raises(LaproxError):
        ObservedPrompt(context.ptr, 80, 16).score("total")
    context.clear()
    context.decode(ids(64))  # not observed
    observe(context, ids(16, 64), accumulate=False)
    with pytest.raises(LaproxError):
        _native.accumulate(context.ptr)
        ObservedPrompt(context.ptr, 80, 16).score("total")


def test_an_observation_is_not_added_twice(context: Context) -> None:
    context.clear()
    observe(context, ids(64))
    observe(context, ids(16, 64))
    once = ObservedPrompt(context.ptr, 80, 16).score("total")
    with pytest.raises(LaproxError):
        _native.accumulate(context.ptr)
    assert np.array_equal(ObservedPrompt(context.ptr, 80, 16).score("total"), once)


def test_a_cut_drops_the_sums(context: Context) -> None:
    context.clear()
    observe(context, ids(64))
    assert context.cut(60)
    assert _native.accumulated(context.ptr) == 0
    observe(context, ids(16, 60), accumulate=False)
    with pytest.raises(LaproxError):
        _native.accumulate(context.ptr)
        ObservedPrompt(context.ptr, 76, 16).score("total")
