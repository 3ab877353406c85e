"""Every method keeps exactly what the budget says, in entries and in bytes, and the same every time."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, golden

from laprox_llamacpp import Llama, _native, duo_profile, models
from laprox_llamacpp.budget import Budget
from laprox_llamacpp.observed import ObservedPrompt
from laprox_llamacpp.policy import EvictionPolicy, methods
from laprox_llamacpp.stats import KVStats

Kept = dict[tuple[int, int], npt.NDArray[np.int32]]

N, W = 24, 8
APART = {"quest": "evicts nothing"}
METHODS = sorted(set(methods()) - set(APART))
HEADS = {  # evictable layers, KV heads of each
    "smollm2-135m": (range(30), 3),
    "qwen2.5-coder-0.5b": (range(24), 2),
    "gemma-3-270m": ((5, 11, 17), 1),
}
ROWS = {
    "smollm2-135m": (30 * 3, 2 * 64 * 2),
    "qwen2.5-coder-0.5b": (24 * 2, 2 * 64 * 2),
    "gemma-3-270m": (3, 2 * 256 * 2),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name != "smollm2-135m"]
BUDGETS = [("fraction", 0.6, 14), ("tokens", 17, 17), ("bytes", "", 12)]  # 0.6 * 24 is 14.4


@pytest.fixture(scope="module", params=["smollm2-135m", *SLOW])
def model(request: Any) -> Iterator[str]:
    yield request.param


def prompt_ids(model: str, n: int = N) -> list[int]:
    known = model if model != "gemma-3-270m" else "qwen2.5-coder-0.5b"  # any tokens do
    return [int(t) for t in golden(known)["ids"][:n]]


@cache
def profile(model: str) -> str:
    """Of duo: scores that rank the heads at random."""
    file = Path(tempfile.mkdtemp()) / f"{model}.json"
    rng = np.random.default_rng(0)
    layers, n_head_kv = HEADS[model]
    heads = tuple((il, h, float(rng.random())) for il in layers for h in range(n_head_kv))
    fingerprint = duo_profile.fingerprint(models.fetch(model))
    duo_profile.save(duo_profile.Profile(fingerprint, model, max(layers) + 1, heads), file)
    return str(file)


def spec(model: str, method: str) -> str:
    options = f":protect_sinks=2:recent=8:profile={profile(model)}" if method == "duo" else ""
    return f"{method}:window={W}{options}"


def make(model: str, method: str, budget: Any) -> Llama:
    return Llama(
        str(models.fetch(model)), kv_evict=spec(model, method), budget=budget, n_ctx=256, n_threads=1,
        n_threads_batch=1, verbose=False,
    )  # fmt: skip


def amount(model: str, kind: str, value: Any) -> Any:
    """A budget; the one in bytes is a byte short of 13 tokens a head."""
    n_heads, row = ROWS[model]
    return f"{13 * n_heads * row - 1}B" if kind == "bytes" else value


@dataclass
class Run:
    kept: Kept
    chosen: list[npt.NDArray[np.int32]]  # what the policy returned
    stats: KVStats


@cache
def runs(model: str, method: str) -> dict[str, Run]:
    """One prompt evicted to each budget, by one Llama; "again" is the first budget once more."""
    amounts = {kind: amount(model, kind, value) for kind, value, _ in BUDGETS}
    llm = make(model, method, 1.0)
    chosen: list[Any] = []
    keep = type(llm._policy).keep

    def spy(*args: Any) -> Any:
        chosen.append(keep(*args))
        return chosen[-1]

    out = {}
    try:
        with mock.patch.object(type(llm._policy), "keep", spy):
            for kind, value in (*amounts.items(), ("again", amounts["fraction"])):
                llm._budget = Budget.parse(value)
                llm.reset()
                llm.eval(prompt_ids(model))
                out[kind] = Run(llm.kv_kept(), chosen[-1], llm.kv_stats())
    finally:
        llm.close()
    assert len(chosen) == len(out)
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "total"), [(kind, total) for kind, _, total in BUDGETS])
def test_the_kept_total_is_exact(model: str, method: str, kind: str, total: int) -> None:
    got, (n_heads, row) = runs(model, method)[kind], ROWS[model]
    assert len(got.kept) == n_heads
    assert sum(len(pos) for pos in got.kept.values()) == n_heads * total == got.stats.rows_kept
    assert got.stats.kept_per_head.sum() == n_heads * total
    assert got.stats.evicted and got.stats.fallback is None and got.stats.note is None
    held = got.stats.bytes_now - got.stats.bytes_reserve - got.stats.bytes_other
    assert held == n_heads * total * row


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [kind for kind, _, _ in BUDGETS])
def test_positions_are_ascending_and_unique_and_hold_the_window(model: str, method: str, kind: str) -> None:
    for pos in runs(model, method)[kind].kept.values():
        assert (np.diff(pos) > 0).all() and pos[0] >= 0
        assert pos[-W:].tolist() == list(range(N - W, N))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_prompt_keeps_the_same_set(model: str, method: str) -> None:
    once, again = runs(model, method)["fraction"].kept, runs(model, method)["again"].kept
    assert all(np.array_equal(pos, again[head]) for head, pos in once.items())


@pytest.mark.parametrize("method", METHODS)
def test_the_cache_holds_what_the_policy_chose(model: str, method: str) -> None:
    for run in runs(model, method).values():
        assert all(np.array_equal(pos[:-W], chosen) for pos, chosen in zip(run.kept.values(), run.chosen))


@pytest.mark.parametrize("kind", [kind for kind, _, _ in BUDGETS])
def test_every_method_holds_as_many_bytes(model: str, kind: str) -> None:
    stats = {method: runs(model, method)[kind].stats for method in METHODS}
    assert len({s.bytes_now for s in stats.values()}) == 1, {method: s.bytes_now for method, s in stats.items()}
    assert len({s.bytes_full for s in stats.values()}) == 1
    any_ = stats["random"]
    assert (
        any_.bytes_full == N * ROWS[model][0] * ROWS[model][1] > any_.bytes_now - any_.bytes_reserve - any_.bytes_other
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_below_the_window_keeps_the_window(model: str, method: str) -> None:
    llm = make(model, method, W // 2)
    try:
        with pytest.warns(RuntimeWarning, match="less than the window"):
            llm.eval(prompt_ids(model, W + 9))
        assert all(pos.tolist() == list(range(9, W + 9)) for pos in llm.kv_kept().values())
        assert llm.kv_stats().note is not None
    finally:
        llm.close()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_evicted_of_short_prompts_or_with_the_whole_budget(model: str, method: str) -> None:
    llm = make(model, method, 1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for n in (W + 5, W, 2):  # the last two not even with a small budget
                llm.reset()
                llm.eval(prompt_ids(model, n))
                assert not llm.kv_stats().evicted
                assert all(pos.tolist() == list(range(n)) for pos in llm.kv_kept().values())
                llm._budget = Budget.parse(1)
    finally:
        llm.close()


# ---- policies alone


@lru_cache(maxsize=1)
def observed(model: str) -> ObservedPrompt:
    """Every query of a prompt; each score is made once, and nobody may write into it."""
    ctx, ids = Context(models.fetch(model), n_ctx=256), prompt_ids(model, 40)
    for chunk in (ids[:-W], ids[-W:]):
        _native.observe(ctx.ptr, len(chunk))
        ctx.decode(chunk)
        _native.accumulate(ctx.ptr)
    prompt = ObservedPrompt(ctx.ptr, len(ids), W, str(models.fetch(model)))
    score = prompt.score

    @cache
    def read_only(*args: str) -> Any:
        out = score(*args)
        out.flags.writeable = False
        return out

    prompt.score = read_only  # type: ignore[method-assign]
    prompt.context = ctx  # type: ignore[attr-defined]  # lives as long
    return prompt


SPECS = [
    *METHODS,
    *(f"laprox:{x}" for x in (
        "alloc=layer", "alloc=head", "alloc=adakv0.2", "alloc=guard0.2", "alloc=pyramid20", "granularity=layer",
        "granularity=cell", "preset=paper", "granularity=layer:alloc=pyramid20",
        "protect_sinks=100", "protect_sinks=9:alloc=adakv0.2", "protect_sinks=9:alloc=guard1",
    )),
    *(f"criticalkv:{x}" for x in (
        "alloc=adakv0.2", "alloc=guard0.2", "alloc=model", "first=0", "first=1", "protect_sinks=9",
    )),
    "h2o:recent=0", "h2o:recent=1", "h2o:granularity=cell", "h2o:alloc=model", "pyramidkv:alloc=pyramid1",
    "pyramidkv:alloc=pyramid1000", "adakv:alloc=adakv0", "adakv:alloc=adakv1", "streaming:protect_sinks=100",
]  # fmt: skip


@pytest.mark.parametrize("method", SPECS)
def test_a_policy_keeps_exactly_k_a_head(model: str, method: str) -> None:
    """For every k, from nothing to all."""
    prompt, policy = observed(model), EvictionPolicy.parse(spec(model, method))
    m = prompt.n_cand
    for k in (0, 1, 2, 3, 7, 20, m - 1, m):
        kept = policy.keep(prompt, k)
        assert kept is not None and len(kept) == ROWS[model][0]
        assert sum(len(pos) for pos in kept) == ROWS[model][0] * k, k
        for pos in kept:
            assert pos.dtype == np.int32
            assert (np.diff(pos) > 0).all() and (len(pos) == 0 or (pos[0] >= 0 and pos[-1] < m)), k
