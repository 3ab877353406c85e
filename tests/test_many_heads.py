"""Scores of a layer whose W_O has more columns than one chunk of it holds (1024), against float64; on a device, too."""

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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": D,
    }
    shapes = {
        "attn_norm": (N_EMBD,), "attn_q": (N_HEAD * D, N_EMBD), "attn_k": (N_HEAD_KV * D, N_EMBD),
        "attn_v": (N_HEAD_KV * D, N_EMBD), "attn_output": (N_EMBD, N_HEAD * D), "ffn_norm": (N_EMBD,),
        "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF),
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {**EMBED, **{f"blk.0.{k}.weight": v for k, v in shapes.items()}}
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", fields, tensors)


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
