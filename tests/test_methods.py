"""Every method and variant keeps what its definition keeps: against `reference`, on real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, golden
from reference import (
    Capture,
    Mask,
    Reference,
    adakv,
    avg,
    by_head,
    by_layer,
    by_model,
    by_sentence,
    guard,
    peak,
    pyramid,
    reach,
    sentences,
)

from laprox_llamacpp import Llama, _native, models
from laprox_llamacpp.observed import ObservedPrompt
from laprox_llamacpp.policy import EvictionPolicy, methods

N, W = 300, 32
BUDGETS = (0.15, 0.3, 0.6)
SAME = 0.99  # Jaccard; float32 moves a few entries at the border
QWEN = pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow)


class Engine:
    """A context whose cache holds a model's prompt, every query of it observed and captured."""

    def __init__(self, name: str, window: int) -> None:
        self.path, self.window = models.fetch(name), window
        self.ids = [int(t) for t in golden(name)["ids"][:N]]
        self.capture = Capture()
        self.ctx = Context(self.path, n_ctx=512, cb_eval=self.capture.callback)
        n = N - window
        for chunk in (self.ids[: n // 64 * 64], self.ids[n // 64 * 64 : n], self.ids[n:]):  # as Llama does
            if chunk:
                _native.observe(self.ctx.ptr, len(chunk))
                self.ctx.decode(chunk)
                _native.accumulate(self.ctx.ptr)
        self.reference = Reference(self.capture, self.path, N, window, self.pieces())
        self.capture.on = False
        self.prompt = ObservedPrompt(self.ctx.ptr, N, window, str(self.path), self.pieces)
        self.score = self.prompt.score
        self.prompt.score = cache(self._read_only)  # type: ignore[method-assign]

    def pieces(self) -> list[bytes]:
        llm = Llama(str(self.path), vocab_only=True, verbose=False)
        try:
            return [llm.detokenize([t], special=True) for t in self.ids]
        finally:
            llm.close()

    def _read_only(self, *args: str) -> Any:
        """A score, made once for all specs; nobody may write into it."""
        out = self.score(*args)
        out.flags.writeable = False
        return out

    def keep(self, spec: str, k: int) -> Mask:
        kept = EvictionPolicy.parse(spec).keep(self.prompt, k)
        assert kept is not None
        return as_mask(kept, N - self.window)


@lru_cache(maxsize=2)
def engine(name: str, window: int = W) -> Engine:
    return Engine(name, window)


def as_mask(kept: list[npt.NDArray[np.int32]], m: int) -> Mask:
    """[heads, m]; the candidates before the window."""
    out = np.zeros((len(kept), m), bool)
    for row, positions in zip(out, kept):
        row[positions[positions < m]] = True
    return out


def per_head(budget: float, window: int = W) -> int:
    return max(0, int(np.floor(budget * N + 0.5)) - window)


def jaccard(a: Mask, b: Mask) -> float:
    return float((a & b).sum() / (a | b).sum())


# ---- one line a variant: spec, kept set of the definition for k candidates a head

Row = Callable[[Reference, int], Mask]
LAPROX: dict[str, Row] = {
    "laprox": lambda r, k: by_model(r.residual(r.laprox()), k, 4),
    "laprox:preset=l2": lambda r, k: by_model(r.residual(r.laprox("l2")), k, 4),
    "laprox:preset=paper": lambda r, k: by_model(r.paper(), k),
    "laprox:preset=paper:protect_sinks=4": lambda r, k: by_model(r.paper(), k, 4),
    "laprox:preset=paper:alloc=layer": lambda r, k: by_layer(r.paper(), k),
    "laprox:preset=paper:alloc=head": lambda r, k: by_head(r.paper(), k),
    "laprox:preset=paper:granularity=cell": lambda r, k: r.one_per_model(r.paper(), k),
    "laprox:gqa=attention:preset=paper": lambda r, k: by_model(r.paper(gqa="attention"), k),
    "laprox:attention=sum": lambda r, k: by_model(r.residual(r.laprox("sum")), k, 4),
    "laprox:attention=last": lambda r, k: by_model(r.residual(r.laprox("last")), k, 4),
    "laprox:gqa=attention": lambda r, k: by_model(
        r.residual([reach(12, 0.3)(x) for x in r.product("max", "l2", "attention")]), k, 4),
    "laprox:value=l1": lambda r, k: by_model(
        r.residual([reach(12, 0.3)(x) for x in r.product("max", "l1")]), k, 4),
    "laprox:value=none": lambda r, k: by_model(r.residual([reach(12, 0.3)(x) for x in r.product("max")]), k, 4),
    "laprox:pool_on=attention": lambda r, k: by_model(
        r.residual(r.product("max", "l2", pool=reach(12, 0.3))), k, 4),
    "laprox:pool_on=attention:gqa=attention": lambda r, k: by_model(
        r.residual(r.product("max", "l2", "attention", reach(12, 0.3))), k, 4),
    "laprox:pool_on=attention:preset=paper": lambda r, k: by_model(
        r.layer_sum(r.product("l2", "l2", pool=avg(7))), k),
    "laprox:score=output_norm": lambda r, k: by_model(
        r.residual([reach(12, 0.3)(x) for x in r.output_norm()]), k, 4),
    "laprox:score=output_norm:attention=max:pool=none:protect_sinks=0": lambda r, k: by_model(
        r.residual(r.output_norm("max")), k),
    "laprox:pool=none": lambda r, k: by_model(r.residual(r.product("max", "l2")), k, 4),
    "laprox:pool=max7": lambda r, k: by_model(r.residual(r.laprox(pool=peak(7))), k, 4),
    "laprox:pool=reach3:0.6": lambda r, k: by_model(r.residual(r.laprox(pool=reach(3, 0.6))), k, 4),
    "laprox:pool=sentence:0.25": lambda r, k: by_model(
        r.residual(r.laprox(pool=by_sentence(0.25, sentences(r.pieces)))), k, 4),
    "laprox:pool=sentence:0.25:pool_on=attention": lambda r, k: by_model(
        r.residual(r.product("max", "l2", pool=by_sentence(0.25, sentences(r.pieces)))), k, 4),
    "laprox:normalize=none": lambda r, k: by_model(r.laprox(), k, 4),
    "laprox:normalize=layer_sum": lambda r, k: by_model(r.layer_sum(r.laprox()), k, 4),
    "laprox:normalize=zscore": lambda r, k: by_model(r.zscore(r.laprox()), k, 4),
    "laprox:alloc=layer:pool=1": lambda r, k: by_layer(r.residual(r.product("max", "l2")), k, 4),
    "laprox:alloc=head:protect_sinks=0": lambda r, k: by_head(r.laprox(), k),
    "laprox:alloc=adakv0.5:protect_sinks=0": lambda r, k: adakv(r.laprox(), k, 0.5),
    "laprox:alloc=guard0.5:protect_sinks=0": lambda r, k: guard(r.laprox(), k, 0.5),
    "laprox:alloc=pyramid2:protect_sinks=0": lambda r, k: pyramid(r.laprox(), k, 2),
    "laprox:granularity=layer": lambda r, k: r.one_per_layer(r.residual(r.laprox()), by_model, k, 4),
    "laprox:granularity=layer:alloc=layer": lambda r, k: r.one_per_layer(r.residual(r.laprox()), by_layer, k, 4),
    "laprox:granularity=cell": lambda r, k: r.one_per_model(r.residual(r.laprox()), k, 4),
}  # fmt: skip
OTHERS: dict[str, Row] = {
    "snapkv": lambda r, k: by_head(r.snapkv(), k),
    "snapkv:pool=max7": lambda r, k: by_head(r.snapkv(peak(7)), k),
    "snapkv:pool=avg5:attention=l2": lambda r, k: by_head(r.snapkv(avg(5), "l2"), k),
    "snapkv:protect_sinks=4": lambda r, k: by_head(r.snapkv(), k, 4),
    "snapkv:alloc=model": lambda r, k: by_model(r.snapkv(), k),
    "snapkv:granularity=cell": lambda r, k: r.one_per_model(r.snapkv(), k),
    "adakv": lambda r, k: adakv(r.snapkv(), k),
    "adakv:alloc=adakv0": lambda r, k: by_layer(r.snapkv(), k),
    "adakv:alloc=adakv1": lambda r, k: by_head(r.snapkv(), k),
    "adakv:alloc=guard0.2": lambda r, k: guard(r.snapkv(), k),
    "adakv:pool=reach12:0.3": lambda r, k: adakv(r.snapkv(reach(12, 0.3)), k),
    "pyramidkv": lambda r, k: pyramid(r.snapkv(), k),
    "criticalkv": lambda r, k: r.criticalkv(k),
    "criticalkv:pool=reach12:0.3": lambda r, k: r.criticalkv(k, reach(12, 0.3)),
    "criticalkv:alloc=adakv0.2": lambda r, k: r.criticalkv(k, counts=adakv),
    "criticalkv:alloc=guard0.2": lambda r, k: r.criticalkv(k, counts=guard, safe=0.2),
    "criticalkv:alloc=guard0.8": lambda r, k: r.criticalkv(k, counts=lambda s, k: guard(s, k, 0.8), safe=0.8),
    "h2o": lambda r, k: r.h2o(k),
    "h2o:recent=0": lambda r, k: r.h2o(k, 0),
    "tova": lambda r, k: r.tova(k),
    "keydiff": lambda r, k: r.keydiff(k),
    "streaming": lambda r, k: r.streaming(k),
    "streaming:protect_sinks=0": lambda r, k: r.streaming(k, 0),
    "random": lambda r, k: r.random(k),
    "random:seed=3": lambda r, k: r.random(k, 3),
}
WINDOWS: dict[str, Row] = {  # all with the same window
    "laprox:window=16": LAPROX["laprox"],
    "snapkv:window=16:pool=max7": OTHERS["snapkv:pool=max7"],
    "criticalkv:window=16": OTHERS["criticalkv"],
    "tova:window=16": OTHERS["tova"],
}
ELSEWHERE = {"duo", "quest"}  # evict nothing, or by a profile: tests of their own


@pytest.fixture(scope="module", params=["smollm2-135m", QWEN])
def model(request: Any) -> Iterator[str]:
    yield request.param


def compare(at: Engine, spec: str, row: Row) -> None:
    values = []
    for budget in BUDGETS:
        k = per_head(budget, at.window)
        got, want = at.keep(spec, k), row(at.reference, k)
        assert got.sum() == want.sum() == k * len(want)
        values.append(jaccard(got, want))
    print(f"{spec}: Jaccard " + ", ".join(f"{value:.4f}" for value in values))
    assert min(values) >= SAME


@pytest.mark.parametrize("spec", [*LAPROX, *OTHERS])
def test_kept_set_is_the_definitions(model: str, spec: str) -> None:
    compare(engine(model), spec, {**LAPROX, **OTHERS}[spec])


@pytest.mark.parametrize(
    "spec", ["snapkv", "adakv", "pyramidkv", "criticalkv", "laprox:alloc=pyramid2:protect_sinks=0"]
)
def test_heads_have_the_definitions_counts(model: str, spec: str) -> None:
    """To the entry: where the counts do not hang on the scores."""
    at = engine(model)
    for k in (*map(per_head, BUDGETS), 1, 5, at.reference.m - 1):
        want = {**LAPROX, **OTHERS}[spec](at.reference, k).sum(axis=1)
        assert np.array_equal(at.keep(spec, k).sum(axis=1), want), k


@pytest.mark.parametrize("spec", WINDOWS)
def test_kept_set_for_another_window(model: str, spec: str) -> None:
    compare(engine(model, 16), spec, WINDOWS[spec])


def test_every_method_has_a_definition() -> None:
    assert set(methods()) - ELSEWHERE <= {spec.partition(":")[0] for spec in (*LAPROX, *OTHERS)}


@pytest.mark.parametrize("spec", ["laprox", "criticalkv:alloc=adakv0.2:pool=reach12:0.3", "h2o"])
def test_llama_keeps_the_definitions_set(model: str, spec: str) -> None:
    """And, to the entry, what the policy chose from the same prompt."""
    at, budget = engine(model), 0.3
    row = {**LAPROX, **OTHERS}.get(spec, lambda r, k: r.criticalkv(k, reach(12, 0.3), adakv))
    llm = Llama(str(at.path), kv_evict=spec, budget=budget, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        llm.eval(at.ids)
        got = as_mask(list(llm.kv_kept().values()), N - W)
    finally:
        llm.close()
    print(f"{spec}: Jaccard {jaccard(got, row(at.reference, per_head(budget))):.4f}")
    assert np.array_equal(got, at.keep(spec, per_head(budget)))
    assert jaccard(got, row(at.reference, per_head(budget))) >= SAME


# ---- what the definitions start from


def test_rows_are_what_the_ops_read(model: str) -> None:
    """Of the scoring op, and of the stock attention op."""
    at = engine(model)
    at.capture.on = True
    prompt = at.prompt
    prompt._known.clear()
    at.score("max", "l2")
    at.capture.on = False
    assert sorted(at.capture.score_ops) == at.reference.layers
    for layer, op in at.capture.score_ops.items():
        got = {"q": prompt.queries(layer), "k": prompt.keys(layer), "v": prompt.values(layer)}
        ref = at.reference
        attends = {"q": ref.q[layer][:, -W:], "k": ref.k[layer], "v": ref.v[layer]}
        for key in ("q", "k", "v"):
            assert got[key].shape == attends[key].shape
            assert np.array_equal(got[key], op[key][:, : got[key].shape[1]]), (layer, key)
            assert np.array_equal(got[key], attends[key]), (layer, key)
        rows = np.arange(N - W, N)[:, None]
        assert np.array_equal(np.isneginf(op["mask"][0][:, :N]), np.arange(N)[None, :] > rows)


def test_residual_is_the_mean_norm_of_what_enters_a_layer(model: str) -> None:
    at = engine(model)
    np.testing.assert_allclose(at.prompt.residual(), at.reference.resid, rtol=1e-5)


def test_sums_over_every_query(model: str) -> None:
    at = engine(model)
    want = np.concatenate(at.reference.total)
    rel = np.abs(at.prompt.score("total") - want) / want
    print(f"largest relative difference {rel.max():.2e}")
    assert rel.max() <= 1e-3


def test_definitions_differ(model: str) -> None:
    """A method that kept another one's set would be noticed: no two of them agree as closely as is asked for."""
    ref, k = engine(model).reference, per_head(0.3)
    plain = {spec: row(ref, k) for spec, row in OTHERS.items() if ":" not in spec} | {
        spec: LAPROX[spec](ref, k) for spec in ("laprox", "laprox:preset=l2", "laprox:preset=paper")}  # fmt: skip
    for a in plain:
        for b in plain:
            assert a == b or jaccard(plain[a], plain[b]) < SAME, (a, b)


@pytest.mark.parametrize(
    "text",
    [
        "One |two|.| Three| is| 3|.|14|!| Yes|?| No|\n|next| line|.\n|  x|\n\n|\n|y|.",
        "A|.|\n| B|...| c|!?|\t|d|.)| e|.| f",
        "no| end",
        "a|.",
        "a|\n",
        "x|.\n\n|y|\n| z",
        "a|. |B|? |c| .|d",
        "你好|。|我|很好|！|你|呢|？|x",
    ],
)
def test_sentences_start_where_the_text_says(text: str) -> None:
    pieces = [piece.encode() for piece in text.split("|")]
    prompt = SimpleNamespace(_pieces=lambda: pieces, n_cand=len(pieces))
    starts = ObservedPrompt.sentence_starts(prompt)  # type: ignore[arg-type]
    assert starts.tolist() == [group[0] for group in sentences(pieces)]
