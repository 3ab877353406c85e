"""Models with many heads: scores of a layer whose W_O has more columns than one chunk of it holds (1024), against
float64, on a device, too; and graphs with a node for each of many KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from guard import Guard, build
from lowlevel import Context, W, run_child
from test_refused import EMBED, write_model

from laprox_llamacpp import _native

D, N_HEAD, N_HEAD_KV, N_EMBD, N_FF = 128, 20, 4, 32, 64  # 2560 columns: two whole chunks and half a one
N = 90
CASES = [
    {"attention": attention, "value": value, "composed": composed}
    for attention, value, composed in [
        ("max", "l2", False), ("max", "l2", True), ("sum", "l1", False), ("sum", "output", False), ("l2", "l2", False),
    ]
]  # fmt: skip


def tiny(path: Path, n_layer: int, n_head: int, n_head_kv: int, d: int) -> Path:
    fields = {
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": d,
    }
    shapes = {
        "attn_norm": (N_EMBD,), "attn_q": (n_head * d, N_EMBD), "attn_k": (n_head_kv * d, N_EMBD),
        "attn_v": (n_head_kv * d, N_EMBD), "attn_output": (N_EMBD, n_head * d), "ffn_norm": (N_EMBD,),
        "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF),
    }  # fmt: skip
    layers = {f"blk.{i}.{k}.weight": v for i in range(n_layer) for k, v in shapes.items()}
    return write_model(path, "llama", fields, {**EMBED, **layers}, n_layer)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", 1, N_HEAD, N_HEAD_KV, D)


def scores(path: str, guard: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """In a child: what the scores are made of, and the scores."""
    if guard:
        Guard(guard)
    ids = np.random.default_rng(7).integers(0, 32, N)
    with Context(path, type_k="f32", n_ctx=256, n_gpu_layers=99 if guard else 0) as ctx:
        ctx.prefill(ids)
        out: dict[str, Any] = {"devices": _native.devices(ctx.ptr), "scores": []}
        for kind in "qkv":
            out[kind] = _native.rows(ctx.ptr, kind, 0).tolist()
        for case in cases:
            _native.score(ctx.ptr, _native.score_params(**case))
            out["scores"].append(_native.scores(ctx.ptr).tolist())
        return out


def definition(path: Path, got: dict[str, Any], attention: str, value: str) -> npt.NDArray[np.float64]:
    """[n_head_kv, N - W]"""
    q, k, v = (np.asarray(got[kind], np.float64) for kind in "qkv")
    k, v = (np.repeat(rows, N_HEAD // N_HEAD_KV, axis=0) for rows in (k, v))
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(D)
    logits[:, np.arange(N) > np.arange(N - W, N)[:, None]] = -np.inf
    a = np.exp(logits - logits.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    a = a[:, :, : N - W]
    column = {"max": a.max(1), "sum": a.sum(1), "l2": np.sqrt((a * a).sum(1))}[attention]
    w_o = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_output.weight").data
    w_o = np.asarray(w_o, np.float64).T.reshape(N_HEAD, D, N_EMBD)
    projected = v[:, : N - W] @ w_o  # [n_head, N - W, n_embd]
    if value == "output":
        return np.tile(np.linalg.norm(np.einsum("hn,hne->ne", column, projected), axis=-1), (N_HEAD_KV, 1))
    norm = {"l2": np.linalg.norm(projected, axis=-1), "l1": np.abs(projected).sum(-1)}
    score: npt.NDArray[np.float64] = (column * norm[value]).reshape(N_HEAD_KV, -1, N - W).mean(1)
    return score


def test_scores_are_the_definition(path: Path, tmp_path: Path) -> None:
    guard = str(build(tmp_path))
    on_cpu, on_device = run_child(scores, path, "", CASES), run_child(scores, path, guard, CASES)
    assert (on_cpu["devices"], on_device["devices"]) == (["CPU"], ["GUARD0"])
    for got in (on_cpu, on_device):
        for case, made in zip(CASES, got["scores"]):
            want = definition(path, got, case["attention"], case["value"])
            assert want.min() > 0 and want.std() > 0.01 * want.mean()
            np.testing.assert_allclose(made, want, rtol=2e-5, err_msg=str(case))


def logits(path: str, evict: bool, attention_path: str) -> list[list[float]]:
    """In a child: of three steps that follow a prompt, all of whose rows were moved to the ragged store or none."""
    ids = np.random.default_rng(7).integers(0, 32, N + 3)
    with Context(path, type_k="f32", n_ctx=256, evict=evict, attention_path=attention_path) as ctx:
        if not evict:
            ctx.decode(ids[: N - W])
            ctx.decode(ids[N - W : N])
        else:
            ctx.prefill(ids[:N])
            ctx.evict(1.0)
            assert ctx.stats().evicted and ctx.stats().rows_kept == ctx.stats().rows_full
            assert (ctx.stats().n_layer_ragged_op > 0) == (attention_path == "ragged_op")
        return [ctx.decode([token]).tolist() for token in ids[N:]]


def test_a_graph_with_a_node_for_each_of_512_heads(tmp_path: Path) -> None:
    """llama.cpp makes room for 1024 nodes here, and aborts beyond."""
    path = tiny(tmp_path / "heads.gguf", 16, 32, 32, 64)
    full, per_head, ragged_op = (
        np.asarray(run_child(logits, path, *args))
        for args in [(False, "auto"), (True, "per_head"), (True, "ragged_op")]
    )
    assert np.array_equal(per_head, full)
    np.testing.assert_allclose(ragged_op, full, atol=0.01 * np.abs(full).max())
