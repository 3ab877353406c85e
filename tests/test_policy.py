"""EvictionPolicy and Budget: specs in, exact numbers out. No native library."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

from laprox_llamacpp.budget import Budget
from laprox_llamacpp.methods.criticalkv import CriticalKV
from laprox_llamacpp.methods.h2o import H2O
from laprox_llamacpp.methods.laprox import LaProx
from laprox_llamacpp.methods.snapkv import SnapKV
from laprox_llamacpp.parts.alloc import Alloc, apportion, pyramid
from laprox_llamacpp.parts.pool import Pool
from laprox_llamacpp.policy import EvictionPolicy, methods

REACH = {"attention": "max", "pool": "reach12:0.3", "normalize": "residual", "alloc": "model", "protect_sinks": 4}
PAPER = {"attention": "l2", "pool": "avg7", "normalize": "layer_sum", "alloc": "model", "protect_sinks": 0}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("laprox", REACH),
        ("laprox:preset=reach", REACH),
        ("laprox:preset=l2", {**REACH, "attention": "l2"}),
        ("laprox:preset=paper", PAPER),
        ("laprox:preset=paper:window=16:pool=none", {**PAPER, "pool": "none", "window": 16}),
        ("laprox:pool=reach8:0.5:protect_sinks=0", {**REACH, "pool": "reach8:0.5", "protect_sinks": 0}),
        ("laprox:protect_sinks=2:pool=reach8:0.5", {**REACH, "pool": "reach8:0.5", "protect_sinks": 2}),
        ("laprox:value=none:alloc=head", {**REACH, "value": "none", "alloc": "head"}),
        ("laprox:score=output_norm", {**REACH, "score": "output_norm", "attention": "sum"}),
        ("laprox:score=output_norm:attention=max", {**REACH, "score": "output_norm"}),
        ("laprox:preset=paper:gqa=attention:pool_on=attention", {**PAPER, "gqa": "attention", "pool_on": "attention"}),
        ("laprox:alloc=layer:pool=1", {**REACH, "alloc": "layer", "pool": "1"}),
        ("laprox:pool=sentence:0.25:granularity=cell", {**REACH, "pool": "sentence:0.25", "granularity": "cell"}),
        (" laprox : normalize = zscore ".replace(" : ", ":"), {**REACH, "normalize": "zscore"}),
    ],
)
def test_spec_sets_these_fields(spec: str, expected: dict[str, object]) -> None:
    policy = EvictionPolicy.parse(spec)
    defaults = {
        "window": 32, "value": "l2", "gqa": "mean", "pool_on": "score", "granularity": "head", "score": "product",
    }  # fmt: skip
    got = {k: v for k, v in dataclasses.asdict(policy).items() if k != "preset"}
    assert got == {**defaults, **expected}


@pytest.mark.parametrize(
    "policy",
    [
        LaProx(),
        LaProx(preset="paper"),
        LaProx(preset="paper", protect_sinks=4, pool="max5"),
        LaProx(pool="reach3:.25", window=7, value="none"),
        LaProx(preset="l2", normalize="none", alloc="layer", attention="sum"),
        LaProx(score="output_norm"),
        LaProx(score="output_norm", attention="max"),
        SnapKV(window=64, pool="max7"),
        CriticalKV(alloc="adakv0.3", first=0.25),
        H2O(recent=0.75),
    ],
)
def test_str_parses_back(policy: EvictionPolicy) -> None:
    assert EvictionPolicy.parse(str(policy)) == policy


def test_str_is_short() -> None:
    assert str(LaProx()) == "laprox"
    assert str(LaProx(preset="paper", window=16)) == "laprox:window=16:preset=paper"


def test_policy_is_frozen_and_passes_through_parse() -> None:
    policy = LaProx()
    assert EvictionPolicy.parse(policy) is policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.window = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("streaming:pool=avg7", "unknown option 'pool'"),
        ("snapkv:preset=paper", "unknown option 'preset'"),
        ("h2o:recent=2", "recent is 2"),
        ("criticalkv:first=nan", "first is nan"),
        ("random:seed=-1", "seed is -1"),
        ("snapkv:gqa=none", "unknown gqa"),
        ("snapkv:granularity=token", "unknown granularity"),
        ("adakv:alloc=adakv1.5", "alpha must be in"),
        ("pyramidkv:alloc=pyramid0.5", "beta must be at least 1"),
        ("laprox:pool=sentence:2", r"\[0, 1\]"),
        ("laprox:score=sum", "unknown score"),
        ("laprox:score=output_norm:pool_on=attention", "no place in it"),
        ("laprox:score=output_norm:value=l1", "no place in it"),
        ("laprox:granularity=cell:alloc=adakv0.2", "one set"),
        ("laprox:granularity=layer:alloc=guard0.2", "one set"),
        ("pyramidkv:granularity=cell", "one set"),
        ("keydiff:pool=avg7", "may be negative"),
        ("keydiff:pool=reach12:0.3", "may be negative"),
        ("keydiff:normalize=layer_sum", "may be negative"),
        ("criticalkv:normalize=zscore", "unknown normalize"),
        ("laprox:pool=avg1025", "at most 1023"),
        ("laprox:pool=avg4294967303", "at most 1023"),
        ("laprox:pool=reach4294967303:0.3", "at most"),
        ("laprox:protect_sinks=4294967296", "at most"),
        ("duo:profile=a+snapkv", "'snapkv' cannot follow"),
        ("lapro", "unknown eviction method 'lapro'"),
        ("", "unknown eviction method"),
        ("laprox:preset=papers", "unknown preset"),
        ("laprox:paper", "is not an option"),
        ("laprox:windows=3", "unknown option 'windows'"),
        ("laprox:method=laprox", "unknown option 'method'"),
        ("laprox:window=0", "window is 0"),
        ("laprox:window=-1", "window is -1"),
        ("laprox:window=1.5", "window is '1.5'"),
        ("laprox:window=8:window=9", "twice"),
        ("laprox:protect_sinks=-2", "protect_sinks is -2"),
        ("laprox:value=2", "unknown value"),
        ("laprox:attention=mean", "unknown attention"),
        ("laprox:normalize=sum", "unknown normalize"),
        ("laprox:alloc=all", "alloc is .all., expected"),
        ("laprox:pool=avg6", "odd"),
        ("laprox:pool=reach12", "pool is"),
        ("laprox:pool=reach12:1.5", r"\[0, 1\]"),
        ("laprox:pool=avg", "pool is"),
        ("laprox:pool=", "pool is"),
        (7, "kv_evict is 7"),
    ],
)
def test_bad_spec_is_one_line(spec: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as e:
        EvictionPolicy.parse(spec)  # type: ignore[arg-type]
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("field", "value"), [("window", True), ("window", 2.0), ("protect_sinks", -2), ("value", True)]
)
def test_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        LaProx(**{field: value})  # type: ignore[arg-type]


def test_pool() -> None:
    assert Pool.parse("none") == Pool("none", 0, 0.0)
    assert Pool.parse("reach12:0.3") == Pool("reach", 12, 0.3)
    assert Pool.parse("avg7") == Pool("avg", 7)
    assert Pool.parse("max1") == Pool("max", 1)
    assert Pool.parse("7") == Pool.parse("avg7")
    assert Pool.parse("1") == Pool.parse("none")
    assert Pool.parse("sentence:0.25") == Pool("sentence", 0, 0.25)


def test_alloc() -> None:
    assert Alloc.parse("model") == Alloc("model")
    assert Alloc.parse("adakv0.2") == Alloc("adakv", 0.2)
    assert Alloc.parse("guard.5") == Alloc("guard", 0.5)
    assert Alloc.parse("pyramid20") == Alloc("pyramid", 20.0)


def test_every_method_has_a_name_of_its_own_and_parses_back() -> None:
    known = methods()
    for name in (
        "adakv",
        "criticalkv",
        "h2o",
        "keydiff",
        "laprox",
        "pyramidkv",
        "random",
        "snapkv",
        "streaming",
        "tova",
    ):
        assert name in known
    for name, method in known.items():
        assert isinstance(EvictionPolicy.parse(name), method)
        assert str(EvictionPolicy.parse(name)) == name


@pytest.mark.parametrize("field", ["pool", "alloc"])
def test_a_spec_that_is_no_string(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 1, expected a string"):
        SnapKV(**{field: 1})  # type: ignore[arg-type]


def test_a_path_with_a_plus_is_no_second_method() -> None:
    policy = EvictionPolicy.parse("duo:profile=/tmp/a+b.json")
    assert str(policy) == "duo:profile=/tmp/a+b.json" and EvictionPolicy.parse(str(policy)) == policy


def test_names_are_not_taken_twice() -> None:
    with pytest.raises(ValueError, match="there is a method 'snapkv' already"):

        class Mine(SnapKV, name="snapkv"):
            pass

    with pytest.raises(ValueError, match="letters, digits"):

        class Odd(SnapKV, name="a:b"):
            pass

    assert methods()["snapkv"] is SnapKV


def test_no_method_of_its_own() -> None:
    with pytest.raises(TypeError, match="EvictionPolicy is no method"):
        EvictionPolicy()


@pytest.mark.parametrize(
    ("due", "total", "limit", "want"),
    [
        ([1, 1, 1], 7, 9, [3, 2, 2]),  # equal remainders: lower index
        ([0.5, 2.5, 1.0], 4, 9, [1, 2, 1]),  # .5 and .5: lower index
        ([0.8 * n + 0.4 for n in (0, 1, 5)], 6, 9, [1, 1, 4]),  # .4, .2, .4, which floats do not hold
        ([0, 0], 3, 9, [2, 1]),
        ([9, 1], 10, 6, [6, 4]),  # what the limit cuts goes to the others
        ([5, 5], 0, 9, [0, 0]),
    ],
)
def test_apportion(due: list[float], total: int, limit: int, want: list[int]) -> None:
    assert apportion(due, total, limit) == want


@pytest.mark.parametrize("k", [0, 1, 10, 100, 255, 256])
@pytest.mark.parametrize("rows", [[3] * 30, [2] * 24, [1, 4, 2], [1]])
def test_pyramid_is_exact_and_falls(rows: list[int], k: int) -> None:
    counts = pyramid(rows, k, 256, 20.0)
    assert sum(counts) == k * sum(rows)
    assert max(counts) <= 256 and min(counts) >= 0
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    means = [sum(counts[e - r : e]) / r for e, r in zip(ends, rows)]
    assert all(a >= b - 1 for a, b in zip(means, means[1:]))
    if len(set(rows)) == 1 < len(rows) and k == 100:
        assert abs(means[0] - 195) <= 1 and abs(means[-1] - 5) <= 1  # 2k - k/20 and k/20


@pytest.mark.parametrize(
    ("spec", "kind", "value"),
    [
        (0.05, "fraction", 0.05),
        (1.0, "fraction", 1.0),
        ("0.05", "fraction", 0.05),
        ("5%", "fraction", 0.05),
        ("100%", "fraction", 1.0),
        (1, "tokens", 1),
        (1024, "tokens", 1024),
        ("1024", "tokens", 1024),
        ("64MiB", "bytes", 64 * 1024 * 1024),
        ("512KB", "bytes", 512_000),
        ("1.5 GiB", "bytes", 3 * 2**29),
        ("1B", "bytes", 1),
    ],
)
def test_budget(spec: object, kind: str, value: float) -> None:
    budget = Budget.parse(spec)  # type: ignore[arg-type]
    assert (budget.kind, budget.value) == (kind, value)
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    "spec",
    [0, 0.0, -1, -0.1, math.nan, math.inf, -math.inf, 1.0001, 2.0, True, False, None, [], "", "x", "0", "0%", "101%",
     "-5%", "nan", "inf", "1.5", "-3", "64 MB/s", "64mib", "64M", "64TiB", "0MiB", "-1KiB", "0.5B"],
)  # fmt: skip
def test_bad_budget_is_one_line(spec: object) -> None:
    with pytest.raises(ValueError, match="budget is ") as e:
        Budget.parse(spec)  # type: ignore[arg-type]
    assert "\n" not in str(e.value)


def rounded(fraction: str, n: int) -> int:
    """floor(b*N + 1/2) in exact arithmetic."""
    return (Fraction(fraction) * n + Fraction(1, 2)).__floor__()


@pytest.mark.parametrize("fraction", ["0.05", "0.1", "0.2", "0.5", "1.0"])
@pytest.mark.parametrize("n", [1, 33, 64, 639, 640, 650, 2047, 4096, 32768])
def test_fraction_counts_the_window(fraction: str, n: int) -> None:
    total = rounded(fraction, n)
    k = Budget.parse(float(fraction)).kept(n, 32, 1)
    assert k == (total - 32 if total > 32 else 0)


def test_tokens_and_bytes() -> None:
    assert Budget.parse(100).kept(4096, 32, 1) == 68
    assert Budget.parse(8).kept(4096, 32, 1) == 0  # the window stays, whatever the budget
    assert Budget.parse(5000).kept(4096, 32, 1) == 4064  # everything: k + w = N
    row = 90 * 256  # 90 heads, 256 bytes each
    assert Budget.parse(f"{100 * row}B").kept(4096, 32, row) == 68
    assert Budget.parse(f"{101 * row - 1}B").kept(4096, 32, row) == 68
    assert Budget.parse("1GiB").kept(4096, 32, row) == 4064


def test_n_keep_is_exact_over_heads() -> None:
    assert Budget.parse(0.1).n_keep(2000, 32, 90, 1) == 90 * 168
