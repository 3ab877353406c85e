"""Memory that the system really refuses: an error, and a cache that goes on as if nothing had been tried.

Each case runs in a process of its own, whose address space is limited for the one call that is to fail (Linux).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import Context, W, golden, run_child

from laprox_llamacpp import AllocError, _native

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")

IDS = golden("smollm2-135m")["ids"]
N = 160
MIB = 1 << 20


@contextlib.contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """At most `extra` more bytes of address space."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def refused(call: Any, extra: int = 2 * MIB) -> str:
    """The library's text when `call` is refused memory; fails when it is not. More `extra` lets it get further."""
    with memory_limit(extra), pytest.raises(AllocError) as error:
        call()
    return str(error.value)


def child_commit(path: str) -> dict[str, Any]:
    # a reserve of 8192 rows is 189 MB over all heads
    with Context(path, n_reserve=8192) as ctx, Context(path) as untouched:
        ctx.prefill(IDS[:N])
        untouched.prefill(IDS[:N])
        ctx.score()
        kept = [np.arange(5, dtype=np.int32)] * _native.shape(ctx.ptr).n_head_kv
        before = ctx.stats().bytes_now
        text = [
            refused(lambda: _native.evict(ctx.ptr, ctx.plan(0.5))),
            refused(lambda: _native.set_kept(ctx.ptr, kept), 50 * MIB),
        ]
        stats = ctx.stats()
        intact = not stats.evicted and stats.bytes_now == before
        same = [bool(np.array_equal(ctx.decode([t]), untouched.decode([t]))) for t in (5, 6)]
        assert ctx.cut(N)
        _native.evict(ctx.ptr, ctx.plan(0.5))  # with memory it works, from the same scores
        ctx.decode([5])
        return {"text": text, "intact": intact, "same": same, "rows": ctx.stats().rows_kept}


def test_commit(smol_path: Path) -> None:
    got = run_child(child_commit, smol_path)
    assert all("KV memory were refused" in text for text in got["text"])
    assert got["intact"] and got["same"] == [True, True]
    assert got["rows"] == 90 * N // 2


def child_prompt_buffer(path: str) -> dict[str, Any]:
    with Context(path, n_ctx=16384) as ctx, Context(path, n_ctx=16384) as untouched:
        for x in (ctx, untouched):
            x.decode(IDS[:W])
            x.decode(IDS[W:N])
        text = refused(lambda: _native.reserve(ctx.ptr, 10_000), 50 * MIB)
        with memory_limit(2 * MIB):
            status = ctx.try_decode(IDS[:200])  # 360 rows, of 256
        there = bool(_native.last_error())
        tokens = IDS[300:500]
        same = [bool(np.array_equal(ctx.decode(t), untouched.decode(t))) for t in (tokens, tokens[:1])]
        return {"text": text, "status": status, "there": there, "same": same}


def test_growth_of_the_prompt_buffer(smol_path: Path) -> None:
    got = run_child(child_prompt_buffer, smol_path)
    assert "KV memory were refused" in got["text"]
    assert got["status"] < 0 and got["there"]
    assert got["same"] == [True, True]


def child_reserve(path: str) -> dict[str, Any]:
    with Context(path, n_ctx=16384, n_reserve=10) as ctx, Context(path, n_ctx=16384, n_reserve=10) as untouched:
        for x in (ctx, untouched):
            x.prefill(IDS[:N])
            x.evict(0.5)
        text = refused(lambda: _native.reserve(ctx.ptr, 10_000), 50 * MIB)
        with memory_limit(2 * MIB):
            status = ctx.try_decode(IDS[:400])
        grown = ctx.stats().n_grown
        same = [bool(np.array_equal(ctx.decode(t), untouched.decode(t))) for t in ([5], IDS[30:80], [6])]
        return {"text": text, "status": status, "grown": grown, "same": same}


def test_growth_of_the_reserve(smol_path: Path) -> None:
    got = run_child(child_reserve, smol_path)
    assert "KV memory were refused" in got["text"]
    assert got["status"] < 0 and got["grown"] == 0
    assert got["same"] == [True, True, True]


def child_clear(path: str) -> dict[str, Any]:
    with Context(path, n_reserve=1) as ctx, Context(path) as untouched:
        ctx.prefill(IDS[:N])
        ctx.evict(0.01)
        with memory_limit(0):
            ctx.clear()  # an empty prompt buffer is larger than the window alone
            status = ctx.try_decode(IDS[:40])
        return {"status": status, "same": bool(np.array_equal(ctx.decode(IDS[:40]), untouched.decode(IDS[:40])))}


def test_clearing(smol_path: Path) -> None:
    got = run_child(child_clear, smol_path)
    assert got["same"]
    assert got["status"] < 0


def child_score(path: str) -> dict[str, Any]:
    with Context(path) as ctx, Context(path) as untouched:
        for x in (ctx, untouched):
            x.prefill(IDS[:N])
        with memory_limit(0):
            try:
                ctx.score()
                text = ""
            except AllocError as error:
                text = str(error)
        same = bool(np.array_equal(ctx.score(), untouched.score()))
        return {"text": text, "same": same, "decode": bool(np.array_equal(ctx.decode([5]), untouched.decode([5])))}


def test_scoring(smol_path: Path) -> None:
    got = run_child(child_score, smol_path)
    assert "refused" in got["text"]
    assert got["same"] and got["decode"]
