"""EvictionPolicy and Budget: specs in, exact numbers out. No native library."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

from laprox_llamacpp.policy import Budget, EvictionPolicy, Pool

REACH = {"attention": "max", "pool": "reach12:0.3", "normalize": "residual", "alloc": "model", "sinks": 4}
PAPER = {"attention": "l2", "pool": "avg7", "normalize": "layer_sum", "alloc": "model", "sinks": 0}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("laprox", REACH),
        ("laprox:preset=reach", REACH),
        ("laprox:preset=l2", {**REACH, "attention": "l2"}),
        ("laprox:preset=paper", PAPER),
        ("laprox:preset=paper:window=16:pool=none", {**PAPER, "pool": "none", "window": 16}),
        ("laprox:pool=reach8:0.5:sinks=0", {**REACH, "pool": "reach8:0.5", "sinks": 0}),
        ("laprox:sinks=2:pool=reach8:0.5", {**REACH, "pool": "reach8:0.5", "sinks": 2}),
        ("laprox:value_norm=false:alloc=head", {**REACH, "value_norm": False, "alloc": "head"}),
        (" laprox : normalize = zscore ".replace(" : ", ":"), {**REACH, "normalize": "zscore"}),
    ],
)
def test_spec_sets_these_fields(spec: str, expected: dict[str, object]) -> None:
    policy = EvictionPolicy.parse(spec)
    defaults = {"method": "laprox", "window": 32, "value_norm": True}
    got = {k: v for k, v in dataclasses.asdict(policy).items() if k != "preset"}
    assert got == {**defaults, **expected}


@pytest.mark.parametrize(
    "policy",
    [
        EvictionPolicy(),
        EvictionPolicy(preset="paper"),
        EvictionPolicy(preset="paper", sinks=4, pool="max5"),
        EvictionPolicy(pool="reach3:.25", window=7, value_norm=False),
        EvictionPolicy(preset="l2", normalize="none", alloc="layer", attention="sum"),
    ],
)
def test_str_parses_back(policy: EvictionPolicy) -> None:
    assert EvictionPolicy.parse(str(policy)) == policy


def test_str_is_short() -> None:
    assert str(EvictionPolicy()) == "laprox"
    assert str(EvictionPolicy(preset="paper", window=16)) == "laprox:preset=paper:window=16"


def test_policy_is_frozen_and_passes_through_parse() -> None:
    policy = EvictionPolicy()
    assert EvictionPolicy.parse(policy) is policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.window = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("snapkv", "not available yet; available: laprox"),
        ("h2o:window=4", "not available yet"),
        ("lapro", "unknown eviction method 'lapro'"),
        ("", "unknown eviction method"),
        ("laprox:preset=papers", "unknown preset"),
        ("laprox:paper", "is not an option"),
        ("laprox:windows=3", "unknown option 'windows'"),
        ("laprox:method=laprox", "unknown option 'method'"),
        ("laprox:window=0", "window is 0"),
        ("laprox:window=-1", "window is '-1'"),
        ("laprox:window=1.5", "window is '1.5'"),
        ("laprox:window=8:window=9", "twice"),
        ("laprox:sinks=-1", "sinks is '-1'"),
        ("laprox:value_norm=2", "value_norm"),
        ("laprox:attention=mean", "unknown attention"),
        ("laprox:normalize=sum", "unknown normalize"),
        ("laprox:alloc=all", "unknown alloc"),
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


@pytest.mark.parametrize(("field", "value"), [("window", True), ("window", 2.0), ("sinks", -2), ("value_norm", 1)])
def test_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EvictionPolicy(**{field: value})  # type: ignore[arg-type]


def test_pool() -> None:
    assert Pool.parse("none") == Pool("none", 0, 0.0)
    assert Pool.parse("reach12:0.3") == Pool("reach", 12, 0.3)
    assert Pool.parse("avg7") == Pool("avg", 7)
    assert Pool.parse("max1") == Pool("max", 1)


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
