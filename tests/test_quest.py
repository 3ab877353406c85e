"""kv_evict="quest": through `Llama`; what the pages are and hold is in test_pages.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import golden

from laprox_llamacpp import EvictionPolicy, Llama

import llama_cpp  # isort: skip

IDS = golden("smollm2-135m")["ids"].tolist()
N = 200
LAYERS, HEADS = 30, 3


@pytest.fixture
def make(smol_path: Path) -> Iterator[Any]:
    made: list[Llama] = []

    def one(spec: str | None, budget: Any = 0.2) -> Llama:
        options = {} if spec is None else {"kv_evict": spec, "budget": budget}
        made.append(
            Llama(str(smol_path), n_ctx=512, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False, **options)
        )
        return made[-1]

    yield one
    for llm in made:
        llm.close()


def last(llm: Llama) -> Any:
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


def logits(llm: Llama, token: int) -> Any:
    llm.eval([token])
    return last(llm)


def apart(a: Any, b: Any) -> float:
    """Root mean square of the difference in units of the logits' spread; other orders of sums give up to 0.1."""
    assert a.std() > 1
    return float(np.sqrt(np.mean((a - b) ** 2)) / a.std())


def test_nothing_is_evicted_and_a_step_reads_its_share(make: Any) -> None:
    llm = make("quest", 0.4)
    llm.eval(IDS[:N])
    before = llm.kv_stats()
    assert not before.evicted and before.rows_dense == 0
    llm.eval([IDS[N]])
    stats = llm.kv_stats()
    assert stats.bytes_now == before.bytes_now
    assert stats.rows_dense == LAYERS * HEADS * (N + 1)
    # 80 rows, 5 pages, a query head; three query heads share a KV head; two layers are dense
    least, most = 4 * 16 + 1, 3 * 5 * 16
    dense = 2 * HEADS * (N + 1)
    assert dense + (LAYERS - 2) * HEADS * least <= stats.rows_read <= dense + (LAYERS - 2) * HEADS * most
    assert "rows in the last step" in repr(stats)


def test_the_prompt_is_prefilled_dense(make: Any) -> None:
    """Also one whose steps before the window end with a single token, and one after pages were on."""
    full, quest = make(None), make("quest")
    for n in (N, 64 * 2 + 1 + 32):
        for llm in (full, quest):
            llm.reset()
            llm.eval(IDS[: n - 32])
            llm.eval(IDS[n - 32 : n])
        assert apart(last(full), last(quest)) <= 0.1
        assert quest.kv_stats().rows_dense == 0  # no step read pages
        assert apart(logits(full, 7), logits(quest, 7)) > 0.1  # this one does


def test_all_rows_are_the_dense_step(make: Any) -> None:
    full, quest = make(None), make("quest:dense=0:min_pages=99")
    for llm in (full, quest):
        llm.eval(IDS[:N])
    a, b = logits(full, 7), logits(quest, 7)
    stats = quest.kv_stats()
    assert stats.rows_read == stats.rows_dense
    assert apart(a, b) <= 0.1


def test_on_top_of_an_evicted_cache(make: Any) -> None:
    plain, both = make("snapkv", 0.5), make("snapkv+quest:read=64", 0.5)
    for llm in (plain, both):
        llm.eval(IDS[:N])
        llm.eval([7])
    assert all(np.array_equal(a, b) for a, b in zip(plain.kv_kept().values(), both.kv_kept().values()))
    stats = both.kv_stats()
    assert stats.policy == "snapkv+quest:read=64"
    assert stats.rows_kept == plain.kv_stats().rows_kept
    assert stats.rows_dense == LAYERS * HEADS * (N // 2 + 1) > stats.rows_read


def test_a_prompt_within_the_budget_selects_once_the_cache_outgrows_it(make: Any) -> None:
    for spec, budget in (("quest", 64), ("laprox+quest:read=64", 256)):
        llm = make(spec, budget)
        llm.eval(IDS[:50])
        llm.eval([7])
        stats = llm.kv_stats()
        assert stats.rows_read == stats.rows_dense == LAYERS * HEADS * 51
        for token in IDS[51:200]:
            llm.eval([token])
        stats = llm.kv_stats()
        assert not stats.evicted and stats.rows_read < stats.rows_dense == LAYERS * HEADS * 200


def test_another_conversation_starts_dense(make: Any) -> None:
    """Also when its first tokens come one at a time."""
    llm = make("quest", 0.2)
    llm.eval(IDS[:N])
    llm.eval([7])
    llm.reset()
    for token in IDS[:100]:
        llm.eval([token])
    assert llm.kv_stats().rows_dense == 0


def test_a_later_turn_is_dense_whatever_its_length(smol_path: Path) -> None:
    """Its last token is no decode step, even where n_batch leaves it alone."""
    got = {}
    for n_batch in (64, 128):
        llm = Llama(
            str(smol_path), n_ctx=512, n_batch=n_batch, n_ubatch=64, n_threads=1, n_threads_batch=1, verbose=False,
            kv_evict="laprox+quest:read=48:dense=0", budget=0.5,
        )  # fmt: skip
        llm.eval(IDS[:N])
        llm.eval([7])  # a step, which selects
        read = llm.kv_stats().rows_read
        assert read < llm.kv_stats().rows_dense
        llm.eval(IDS[N : N + 65])
        assert llm.kv_stats().rows_read == read  # no step since
        got[n_batch] = last(llm)
        llm.close()
    assert apart(got[64], got[128]) <= 0.1


def test_specs() -> None:
    for spec in ("quest", "quest:page=8:read=5%", "laprox:preset=paper+quest:read=128", "h2o+quest:read=64"):
        policy = EvictionPolicy.parse(spec)
        assert str(policy) == spec and EvictionPolicy.parse(str(policy)) == policy
    assert EvictionPolicy.parse("laprox:window=16+quest:read=9").window == 16
    assert EvictionPolicy.parse("h2o+quest:read=9").all_queries and not EvictionPolicy.parse("quest").all_queries


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("laprox+quest", "lacks the rows to read"),
        ("quest+quest:read=3", "selects pages already"),
        ("laprox+snapkv", "'snapkv' cannot follow '\\+'"),
        ("lapro+quest:read=3", "unknown eviction method 'lapro'"),
        ("quest:read=0", "budget is '0'"),
        ("quest:page=0", "page is 0"),
        ("quest:page=2000", "at most 1024"),
        ("laprox+quest:read=64:window=16", "belongs before the '\\+'"),
        ("laprox+quest:base=snapkv:read=64", "base is given twice"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EvictionPolicy.parse(spec)
