"""Bytes: what the library counts, and what the system says (Linux)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lowlevel import Context, W, golden, run_child

IDS = golden("smollm2-135m")["ids"]
N_HEADS = 90  # SmolLM2-135M: 30 layers of 3 KV heads
ROW = {"f16": 2 * 128, "q8_0": 2 * 2 * 34, "f32": 2 * 256}  # bytes of K and V of one head at one position
MIB = 1 << 20

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.mark.parametrize("kind", ["f16", pytest.param("q8_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("n", "budget", "n_reserve"), [(300, 0.2, 1), (300, 0.5, 100)])
def test_bytes_after_eviction(smol_path: Path, kind: str, n: int, budget: float, n_reserve: int) -> None:
    with Context(smol_path, type_k=kind, n_reserve=n_reserve) as ctx:
        ctx.prefill(IDS[:n])
        ctx.evict(budget)
        stats = ctx.stats()
        full = n * N_HEADS * ROW[kind]
        assert stats.bytes_full == full
        assert stats.bytes_other == 0
        assert stats.bytes_now <= budget * full * 1.02 + n_reserve * N_HEADS * ROW[kind]
        assert stats.bytes_now >= budget * full  # and nothing is hidden
        ctx.decode(IDS[: n_reserve + 7])  # one growth of the reserve, by what is needed and as much again
        grown = ctx.stats()
        assert grown.n_grown == 1
        rows = n_reserve + 7 + n_reserve
        assert grown.bytes_now <= budget * full * 1.02 + rows * N_HEADS * ROW[kind]


def test_prompt_buffer_follows_the_prompt(smol_path: Path) -> None:
    from laprox_llamacpp import _native

    row = N_HEADS * ROW["f16"]
    with Context(smol_path, n_ctx=8192) as ctx:
        first = ctx.stats().bytes_now
        assert first <= 256 * row * 1.01
        ctx.decode(IDS[:100])
        assert ctx.stats().bytes_now == first
        _native.reserve(ctx.ptr, 1900)
        assert 2000 * row <= ctx.stats().bytes_now <= 2048 * row * 1.01
        ctx.decode(IDS[:50])
        assert ctx.stats().bytes_now <= 2048 * row * 1.01
    with Context(smol_path, n_ctx=8192) as ctx:  # step by step: a half more each time
        for _ in range(4):
            ctx.decode(IDS[:90])
        assert 360 * row <= ctx.stats().bytes_now <= 512 * row * 1.01
        assert ctx.stats().bytes_peak >= ctx.stats().bytes_now + 256 * row  # the first rows, until they are copied


def rss() -> int:
    """Resident bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def child_eviction(path: str, n: int, budget: float) -> dict[str, int]:
    with Context(path, n_ctx=n + 64, n_reserve=64) as ctx:
        ctx.prefill([*IDS.tolist() * 3][:n])
        ctx.score()
        out = {"rss_full": rss(), "kv_full": ctx.stats().bytes_now}
        ctx.evict(budget)
        out.update(rss_evicted=rss(), kv_evicted=ctx.stats().bytes_now)
        ctx.decode([5])
        out.update(rss_decoded=rss())
        ctx.clear()
        out.update(rss_cleared=rss(), kv_cleared=ctx.stats().bytes_now)
    return out


@linux
def test_resident_memory_falls_with_the_eviction(smol_path: Path) -> None:
    n = 800
    got = run_child(child_eviction, smol_path, n, 0.1)
    print({k: f"{v / MIB:.1f}" for k, v in got.items()})
    row = N_HEADS * ROW["f16"]
    assert got["kv_full"] >= n * row
    assert got["kv_evicted"] <= (0.1 * n * 1.02 + 64) * row
    freed = got["kv_full"] - got["kv_evicted"]
    assert freed > 12 * MIB
    assert got["rss_full"] - got["rss_evicted"] >= 0.8 * freed
    assert got["rss_full"] - got["rss_decoded"] >= 0.5 * freed  # graphs of the new layout are laid out
    assert got["kv_cleared"] <= 256 * row * 1.01


def child_creation(path: str, evict: bool, n_ctx: int) -> dict[str, int]:
    Context(path, n_ctx=256, evict=False).close()  # what the first context of a process loads
    before = rss()
    with Context(path, n_ctx=n_ctx, evict=evict) as ctx:
        after = rss()
        return {"grown": after - before, "kv": ctx.stats().bytes_now if evict else 0}


@linux
def test_a_large_context_costs_nothing_before_it_is_used(smol_path: Path) -> None:
    n_ctx = 32768
    ours, plain = (run_child(child_creation, smol_path, evict, n_ctx) for evict in (True, False))
    print(f"RSS: {ours['grown'] / MIB:.1f} MiB, without eviction {plain['grown'] / MIB:.1f} MiB")
    uncut: Any = n_ctx * N_HEADS * ROW["f16"]
    assert plain["grown"] > 0.9 * uncut  # so that the next two lines mean something
    assert ours["kv"] <= 6 * MIB
    assert ours["grown"] <= 32 * MIB


def test_window_alone(smol_path: Path) -> None:
    """The smallest an evicted cache gets: the window of every head, and the reserve."""
    with Context(smol_path, n_reserve=1) as ctx:
        ctx.prefill(IDS[:200])
        ctx.evict(0.01)
        assert ctx.stats().rows_kept == N_HEADS * W
        assert ctx.stats().bytes_now <= N_HEADS * (W + 1) * ROW["f16"] * 1.02
