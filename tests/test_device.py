"""A KV cache in device memory, on a device that no test machine lacks: device/guard.cpp.

Its memory is out of reach of the host, so a test that ends at all has shown that no row was touched from there. It
computes with the CPU's kernels: what it keeps and decodes must be the CPU's to the bit.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guard import Guard, build
from lowlevel import Context, W, golden, run_child
from test_refused import EMBED, write_model
from test_sinks import write_gpt_oss

from laprox_llamacpp import LaproxError, Llama, _native

import llama_cpp as lib  # isort: skip

IDS = golden("smollm2-135m")["ids"]
N = 280  # more than the first buffer holds
N_NEXT = 120  # of the second prompt

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("guard")))


def child(function: Callable[..., Any], *args: Any, deny: str = "", no_copy: str = "", name: str = "") -> Any:
    env = {**os.environ, "GUARD_DENY": deny, "GUARD_NO_COPY": no_copy, "GUARD_NAME": name}
    return run_child(function, *args, env=env)


# ---- what one context goes through


def story(path: str, guard: str, options: dict[str, Any]) -> dict[str, Any]:
    """In a child: a prompt, its eviction tried and taken back, decoding with all that can happen on the way, another
    prompt. `guard` is the device's library or "", `options` go to the context, "composed" to the scores."""
    device = Guard(guard) if guard else None
    composed = options.pop("composed", False)
    out: dict[str, Any] = {"logits": [], "tokens": []}

    def note(logits: Any) -> int:
        assert np.isfinite(logits).all() and logits.std() > 0.1
        out["logits"].append(hashlib.sha1(logits.tobytes()).hexdigest())
        out["tokens"].append(int(logits.argmax()))
        return out["tokens"][-1]

    def evict(budget: float, store: int) -> None:
        _native.score(ctx.ptr, _native.score_params(composed=composed))
        _native.evict(ctx.ptr, ctx.plan(budget, n_prompt=N), store)

    with Context(path, n_ctx=768, n_reserve=24, **options) as ctx:
        out["devices"] = _native.devices(ctx.ptr)
        token = note(ctx.prefill(IDS[:N]))
        ctx.score()  # the Gram matrices are made once
        if device:
            device.reset()
        evict(0.3, _native.STORE_ASIDE)
        out["crossing"] = device.report() if device else []
        out["kept"] = [[int(p) for p in head] for head in _native.kept(ctx.ptr)]
        out["rows_full"], out["n_kept"] = int(ctx.stats().rows_full), int(ctx.stats().rows_kept)
        out["paths"] = [int(ctx.stats().n_layer_composed), int(ctx.stats().n_layer_ragged_op)]
        for _ in range(4):
            token = note(ctx.decode([token]))
        note(ctx.decode(IDS[40:43]))
        note(ctx.decode(IDS[50:63]))  # more tokens than a decode step, and the reserve grows
        assert ctx.cut(ctx.pos - 5)
        note(ctx.decode(IDS[3:6]))
        note(ctx.decode(IDS[70:80]))
        out["n_grown"] = int(ctx.stats().n_grown)
        assert ctx.cut(N)
        _native.restore(ctx.ptr)
        note(ctx.decode([7]))  # on the full cache
        assert ctx.cut(N)
        evict(0.6, _native.STORE_RAGGED)
        note(ctx.decode([7]))
        ctx.clear()
        note(ctx.prefill(IDS[100 : 100 + N_NEXT]))
        if device:
            out["all"] = device.report()
    return out


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["kept"] == b["kept"]
    assert a["tokens"] == b["tokens"]
    assert a["logits"] == b["logits"]
    assert a["n_grown"] == b["n_grown"] >= 1


def by_name(report: list[Any], what: str) -> dict[str, int]:
    return {name: n_bytes for kind, _, n_bytes, name in report if kind == what}


def assert_rows_stay(result: dict[str, Any]) -> None:
    """No row of the cache went from or to the host, all the way."""
    for what in ("get", "set"):
        assert not [name for name in by_name(result["all"], what) if "cache_" in name]
    assert any("cache_" in name for name in by_name(result["all"], "copy"))  # growth, on the device


def ops(report: list[Any]) -> dict[str, int]:
    return {name: n for kind, n, _, name in report if kind == "op"}


def peek(guard: str) -> int:
    return Guard(guard).peek()


def test_the_guard_is_on_duty(guard: str) -> None:
    with pytest.raises(AssertionError, match="exit status -11"):
        child(peek, guard)


# ---- the same as on the CPU


def test_one_attention_node_a_layer_and_what_crosses(smol_path: Path, guard: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 99})
    assert_same(got, child(story, smol_path, "", {"attention_path": "ragged_op"}))
    assert_rows_stay(got)
    assert set(got["devices"]) == {"GUARD0"} and got["paths"] == [0, 30]

    # score, plan and commit
    n_layers, n_heads = 30, 90
    crossing = got["crossing"]
    up, down = by_name(crossing, "get"), by_name(crossing, "set")
    assert all(re.fullmatch(r"laprox_(score-|r_l)\d+", name) for name in up)
    assert sum(up.values()) == (n_heads * N + n_layers * W) * 4  # scores, residual norms
    assert all(re.fullmatch(r"laprox_(mask|rows_l\d+|regions_l\d+)", name) for name in down)
    mask, regions = N * W * 4, n_heads * 2 * 4
    rows = sum(down.values()) - mask - regions
    assert 4 * got["n_kept"] < rows < 4 * (got["n_kept"] + n_heads * 2 * 24 + n_layers * 256)  # and the reserve
    assert ops(crossing)["LAPROX_SCORE"] == n_layers and ops(crossing)["GET_ROWS"] == 2 * n_layers
    assert by_name(crossing, "copy") == {}
    assert ops(got["all"])["LAPROX_ATTN"] == n_layers * 7  # ubatches of up to 8 tokens on the evicted cache


def test_a_device_without_our_ops(smol_path: Path, guard: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 99}, deny="LAPROX_SCORE,LAPROX_ATTN")
    assert_same(got, child(story, smol_path, "", {"composed": True}))
    assert_rows_stay(got)
    assert got["paths"] == [30, 0]
    assert all(re.fullmatch(r"laprox_(score-|norm-|r_l)\d+", name) for name in by_name(got["crossing"], "get"))
    assert "LAPROX_SCORE" not in ops(got["all"]) and "LAPROX_ATTN" not in ops(got["all"])


def test_a_device_whose_buffers_do_not_copy(smol_path: Path, guard: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 99}, no_copy="1")
    assert_same(got, child(story, smol_path, "", {"attention_path": "ragged_op"}))
    for what in ("get", "set", "copy"):
        assert not [name for name in by_name(got["all"], what) if "cache_" in name]
    assert ops(got["all"])["CPY"] > 2 * 30  # growth


@slow
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f32", "bf16"])
def test_other_types(smol_path: Path, guard: str, kind: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 99, "type_k": kind})
    assert_same(got, child(story, smol_path, "", {"attention_path": "ragged_op", "type_k": kind}))
    assert_rows_stay(got)


@slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_layers_on_both(smol_path: Path, guard: str, kind: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 12, "type_k": kind}, deny="LAPROX_ATTN")
    assert_same(got, child(story, smol_path, "", {"type_k": kind}))
    assert_rows_stay(got)
    assert sorted(set(got["devices"])) == ["CPU", "GUARD0"]


@slow
def test_rows_in_host_memory_by_request(smol_path: Path, guard: str) -> None:
    got = child(story, smol_path, guard, {"n_gpu_layers": 99, "offload_kqv": False})
    assert set(got["devices"]) == {"CPU"} and got["paths"] == [0, 0]
    assert got["kept"] == child(story, smol_path, "", {})["kept"]


@slow
def test_qwen(qwen_path: Path, guard: str) -> None:
    got = child(story, qwen_path, guard, {"n_gpu_layers": 99})
    # the CPU takes a layout of its own for this model's weights, and rounds differently
    assert_rows_stay(got)
    assert got["tokens"][0] == child(story, qwen_path, "", {"attention_path": "ragged_op"})["tokens"][0]


@slow
def test_sliding_window_model(gemma_path: Path, guard: str) -> None:
    got = child(story, gemma_path, guard, {"n_gpu_layers": 99})
    assert [name for what, _, _, name in got["all"] if what in ("get", "set") and "cache_" in name] == []


METHODS = ["laprox:preset=paper", "h2o", "criticalkv", "keydiff", "tova"]


def methods(path: str, guard: str) -> list[Any]:
    """In a child: what each method keeps."""
    if guard:
        Guard(guard)
    out = []
    for method in METHODS:
        llm = Llama(path, n_ctx=512, n_threads=1, n_gpu_layers=99, kv_evict=method, budget=0.3, verbose=False)
        assert llm.kv_stats().devices == (("GUARD0",) if guard else ("CPU",))
        llm.eval(IDS[:200].tolist())
        out.append([head.tolist() for head in llm.kv_kept().values()])
        llm.close()
    return out


@slow
@pytest.mark.parametrize("deny", ["", "LAPROX_SCORE"])
def test_methods(smol_path: Path, guard: str, deny: str) -> None:
    got, want = child(methods, smol_path, guard, deny=deny), child(methods, smol_path, "")
    for method, a, b in zip(METHODS, got, want):
        pairs = [{(h, p) for h, head in enumerate(kept) for p in head} for kept in (a, b)]
        # a composed score rounds in another order: a few of those at the border
        assert len(pairs[0] ^ pairs[1]) <= (0.01 * len(pairs[1]) if deny else 0), method


# ---- rows that are no whole number of words


def short_story(path: str, guard: str, options: dict[str, Any]) -> dict[str, Any]:
    """In a child, on a model of 32 tokens: an eviction, and what is decoded after it."""
    device = Guard(guard) if guard else None
    ids = np.random.default_rng(7).integers(0, 32, 120)
    with Context(path, n_ctx=256, n_reserve=8, **options) as ctx:
        assert set(_native.devices(ctx.ptr)) == {"GUARD0" if guard else "CPU"}
        ctx.prefill(ids[:90])
        kept = ctx.evict(0.6)
        moved = device.report() if device else []
        logits = [ctx.decode([t]) for t in ids[90:93]] + [ctx.decode(ids[93:110])]
        assert all(np.isfinite(x).all() and x.std() > 0 for x in logits)
        return {
            "kept": [[int(p) for p in head] for head in kept],
            "logits": [hashlib.sha1(x.tobytes()).hexdigest() for x in logits],
            "moved": moved,
            "all": device.report() if device else [],
        }


def write_wide(path: Path, d: int) -> Path:
    """One layer, two query heads per KV head, of width d."""
    n_head, n_head_kv, n_embd, n_ff = 4, 2, 32, 64
    fields = {
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": d,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,), "attn_q": (n_head * d, n_embd), "attn_k": (n_head_kv * d, n_embd),
        "attn_v": (n_head_kv * d, n_embd), "attn_output": (n_embd, n_head * d), "ffn_norm": (n_embd,),
        "ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff),
    }  # fmt: skip
    return write_model(path, "llama", fields, {**EMBED, **{f"blk.0.{k}.weight": v for k, v in shapes.items()}})


def test_rows_of_102_bytes(tmp_path: Path, guard: str) -> None:
    path = write_wide(tmp_path / "tiny.gguf", 96)
    got = child(short_story, path, guard, {"n_gpu_layers": 99, "type_k": "q8_0"})
    want = child(short_story, path, "", {"attention_path": "ragged_op", "type_k": "q8_0"})
    assert (got["kept"], got["logits"]) == (want["kept"], want["logits"])
    assert_rows_stay(got)
    n_rows = sum(len(head) + W for head in got["kept"])
    copies = [(n, n_bytes) for what, n, n_bytes, name in got["moved"] if what == "copy"]
    assert copies == [(n_rows, 102 * n_rows)] * 2  # K and V


def test_sinks_on_a_device(tmp_path: Path, guard: str) -> None:
    path = write_gpt_oss(tmp_path / "gpt-oss.gguf")
    got = child(short_story, path, guard, {"n_gpu_layers": 99})
    want = child(short_story, path, "", {"attention_path": "ragged_op"})
    assert (got["kept"], got["logits"]) == (want["kept"], want["logits"])
    assert_rows_stay(got)


# ---- the package


def ask(path: str, guard: str, n_gpu_layers: int, method: str = "laprox") -> dict[str, Any]:
    if guard:
        Guard(guard)
    llm = Llama(path, n_ctx=512, n_threads=1, n_gpu_layers=n_gpu_layers, kv_evict=method, budget=0.3, verbose=False)
    try:
        tokens = []
        for token in llm.generate(IDS[:200].tolist(), temp=0.0):
            tokens.append(token)
            if len(tokens) == 6:
                break
        stats = llm.kv_stats()
        kept = [head.tolist() for head in llm.kv_kept().values()]
        pages = ""
        try:
            _native.set_pages(llm.ctx, _native.pages_params(64))
        except LaproxError as e:
            pages = str(e)
        return {"tokens": tokens, "kept": kept, "stats": str(stats), "devices": stats.devices, "pages": pages,
                "paths": [stats.score_path, stats.attention_path]}  # fmt: skip
    finally:
        llm.close()


def test_the_package_with_layers_on_both(smol_path: Path, guard: str) -> None:
    got = child(ask, smol_path, guard, 12, deny="LAPROX_SCORE,LAPROX_ATTN")
    cpu = child(ask, smol_path, "", 0)
    assert (got["tokens"], got["kept"]) == (cpu["tokens"], cpu["kept"])
    assert (got["devices"], got["paths"]) == (["CPU", "GUARD0"], ["mixed", "per_head"])
    assert "device   CPU, GUARD0: scores mixed, attention of decode steps per_head" in got["stats"]
    assert (cpu["devices"], cpu["paths"]) == (["CPU"], ["fused", "per_head"]) and "device " not in cpu["stats"]
    assert "page selection runs on the CPU" in got["pages"] and cpu["pages"] == ""


@pytest.mark.parametrize("deny, path", [("", "fused"), ("LAPROX_SCORE", "composed")])
def test_sums_over_every_query_say_what_ran(smol_path: Path, guard: str, deny: str, path: str) -> None:
    got = child(ask, smol_path, guard, 99, "h2o", deny=deny)
    assert got["paths"][0] == path and len(got["tokens"]) == 6


def test_rpc_is_not_asked_for_our_ops(smol_path: Path, guard: str) -> None:
    """It says yes to every op, whatever the other side knows."""
    got = child(ask, smol_path, guard, 99, name="RPC")
    assert (got["devices"], got["paths"]) == (["GUARD0"], ["composed", "per_head"])
    cpu = child(ask, smol_path, "", 0)
    assert got["tokens"] == cpu["tokens"]


# ---- refusals


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("FLASH_ATTN_EXT", {}, "GUARD0 does not run FLASH_ATTN_EXT for a f16/f16 cache with heads of 64/64"),
    ("LAPROX_SCORE,POOL_2D", {}, "runs neither LAPROX_SCORE nor POOL_2D"),
    ("LAPROX_ATTN", {"attention_path": "ragged_op"}, "does not run LAPROX_ATTN, which"),
    ("GET_ROWS", {}, "does not run GET_ROWS on rows of the cache"),
    ("CPY", {"no_copy": "1"}, "does not run CPY on rows of the cache"),
    ("", {}, "the mask store is for a KV cache in host memory"),
]


def refusals(path: str, guard: str) -> list[str]:
    Guard(guard)
    out = []
    for deny, options, _ in REFUSALS:
        options = dict(options)
        os.environ.update(GUARD_DENY=deny, GUARD_NO_COPY=options.pop("no_copy", ""))
        try:
            with Context(path, n_gpu_layers=99, **options) as ctx:
                ctx.prefill(IDS[:80])
                ctx.evict(0.8, store=_native.STORE_MASK)
                out.append("")
        except (RuntimeError, LaproxError) as e:
            out.append(str(e))
    return out


def failure(path: str, guard: str, at: int, store: int) -> dict[str, Any]:
    Guard(guard)
    with Context(path, n_gpu_layers=99) as ctx:
        assert set(_native.devices(ctx.ptr)) == {"GUARD0"}
        ctx.prefill(IDS[:80])
        ctx.score()
        plan = ctx.plan(0.8)
        os.environ.update(GUARD_FAIL="GET_ROWS", GUARD_FAIL_AT=str(at))
        try:
            _native.evict(ctx.ptr, plan, store)
            text = ""
        except LaproxError as e:
            text = str(e)
        os.environ["GUARD_FAIL"] = ""
        evicted, ctx.pos = bool(ctx.stats().evicted), 0
        logits = ctx.prefill(IDS[:80])
        return {"text": text, "evicted": evicted, "kept": len(ctx.evict(0.8)), "token": int(logits.argmax())}


@pytest.mark.parametrize(
    "at, store", [(0, _native.STORE_RAGGED), (31, _native.STORE_RAGGED), (31, _native.STORE_ASIDE)]
)
def test_a_device_that_fails_halfway(smol_path: Path, guard: str, at: int, store: int) -> None:
    got = child(failure, smol_path, guard, at, store)  # 31: V of the 16th of 30 layers
    assert "failed to move rows; the cache was cleared" in got["text"] and "\n" not in got["text"]
    assert not got["evicted"] and got["kept"] == 90  # and it works again


def digest(logits: Any) -> str:
    return hashlib.sha1(logits.tobytes()).hexdigest()


def failed_growth(path: str, guard: str, evicted: bool) -> dict[str, Any]:
    Guard(guard)
    with Context(path, n_ctx=768, n_gpu_layers=99, n_reserve=8) as ctx:
        ctx.prefill(IDS[:N])
        if evicted:
            ctx.evict(0.8)
        n_more = 12 if evicted else 300  # more than there is room for
        at = 31 if not evicted else 31 * 3  # K of the 16th layer: whole, or each of its heads
        os.environ.update(GUARD_FAIL="CPY", GUARD_FAIL_AT=str(at))
        status, text = ctx.try_decode(IDS[:n_more]), _native.last_error()
        os.environ["GUARD_FAIL"] = ""
        n_left = lib.llama_memory_seq_pos_max(ctx.memory, 0) + 1
        still, ctx.pos = bool(ctx.stats().evicted), 0
        logits = ctx.prefill(IDS[:N])
        kept = ctx.evict(0.8)
        more = ctx.decode(IDS[:n_more])
        return {
            "status": status,
            "text": text,
            "left": n_left,
            "evicted": still,
            "logits": [digest(logits), digest(more)],
            "kept": [[int(p) for p in head] for head in kept],
        }


@pytest.mark.parametrize("evicted", [False, True])
def test_growth_that_fails_halfway_leaves_nothing_mixed(smol_path: Path, guard: str, evicted: bool) -> None:
    got = child(failed_growth, smol_path, guard, evicted, no_copy="1")
    assert got["status"] < 0
    assert "failed to copy rows; the cache was cleared, decode the prompt again" in got["text"]
    assert got["left"] == 0 and not got["evicted"]
    again = child(failed_growth_reference, smol_path, guard, 12 if evicted else 300)
    assert (got["kept"], got["logits"]) == (again["kept"], again["logits"])


def failed_growth_reference(path: str, guard: str, n_more: int) -> dict[str, Any]:
    """The same prompt where nothing failed."""
    Guard(guard)
    with Context(path, n_ctx=768, n_gpu_layers=99, n_reserve=8) as ctx:
        logits, kept = ctx.prefill(IDS[:N]), ctx.evict(0.8)
        return {
            "kept": [[int(p) for p in head] for head in kept],
            "logits": [digest(logits), digest(ctx.decode(IDS[:n_more]))],
        }


def test_refused_in_one_line(smol_path: Path, guard: str) -> None:
    for text, (_, _, why) in zip(child(refusals, smol_path, guard), REFUSALS):
        assert why in text and "\n" not in text and "offload_kqv=False" in text


def refusal(path: str, guard: str) -> str:
    Guard(guard)
    with pytest.raises(RuntimeError) as e, Context(path, n_ctx=256, n_gpu_layers=99):
        pass
    return str(e.value)


@pytest.mark.parametrize("d", [160, 192])
def test_widths_that_flash_attention_lacks(tmp_path: Path, guard: str, d: int) -> None:
    """The stand-in has those of ggml-cuda."""
    text = child(refusal, write_wide(tmp_path / "tiny.gguf", d), guard)
    assert f"does not run FLASH_ATTN_EXT for a f16/f16 cache with heads of {d}/{d}" in text
    assert "\n" not in text and "offload_kqv=False" in text
