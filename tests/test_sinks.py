"""Learned attention sinks (gpt-oss): one more logit per query head in the sum of every softmax, of no column.

A column's weight is the attention as the model computes it, the sink in its denominator. The model is a tiny random one
with large sinks and two layers, of which the second attends to everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, W
from test_refused import EMBED, write_model

from laprox_llamacpp import LaproxError, _native

N_EMBD, N_HEAD, N_HEAD_KV, D, N_FF, N_EXPERT = 32, 4, 2, 64, 32, 2
N = 90
IDS = np.random.default_rng(5).integers(0, 32, 200)
SINKS = np.array([4.0, -1.0, 5.5, 2.0], np.float32)


def write_gpt_oss(path: Path) -> Path:
    """Two layers, the first with a sliding window; every layer has the sinks `SINKS`."""
    fields = {
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.dimension_count": D,
        "feed_forward_length": N_FF,
        "expert_count": N_EXPERT,
        "expert_used_count": 1,
        "expert_feed_forward_length": N_FF,
    }
    rng = np.random.default_rng(2)
    block: dict[str, Any] = {
        "attn_norm.weight": (N_EMBD,),
        "post_attention_norm.weight": (N_EMBD,),
        "attn_q.weight": rng.normal(0, 1, (N_HEAD * D, N_EMBD)).astype(
            np.float32
        ),  # attention that is not the same for all
        "attn_q.bias": (N_HEAD * D,),
        "attn_k.weight": rng.normal(0, 1, (N_HEAD_KV * D, N_EMBD)).astype(np.float32),
        "attn_k.bias": (N_HEAD_KV * D,),
        "attn_v.weight": (N_HEAD_KV * D, N_EMBD),
        "attn_v.bias": (N_HEAD_KV * D,),
        "attn_output.weight": W_O,
        "attn_output.bias": (N_EMBD,),
        "attn_sinks.weight": SINKS,
        "ffn_gate_inp.weight": (N_EXPERT, N_EMBD),
        "ffn_gate_inp.bias": (N_EXPERT,),
        "ffn_gate_exps.weight": (N_EXPERT, N_FF, N_EMBD),
        "ffn_gate_exps.bias": (N_EXPERT, N_FF),
        "ffn_up_exps.weight": (N_EXPERT, N_FF, N_EMBD),
        "ffn_up_exps.bias": (N_EXPERT, N_FF),
        "ffn_down_exps.weight": (N_EXPERT, N_EMBD, N_FF),
        "ffn_down_exps.bias": (N_EXPERT, N_EMBD),
    }
    layers = {f"blk.{il}.{name}": value for il in range(2) for name, value in block.items()}
    return write_model(path, "gpt-oss", fields, {**EMBED, "output.weight": (32, N_EMBD), **layers}, n_layer=2)


W_O = np.random.default_rng(3).normal(0, 0.1, (N_EMBD, N_HEAD * D)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("sinks") / "gpt-oss.gguf")


def attention(ctx: Context, sinks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of the window, [n_head, w, N]."""
    q, k = (_native.rows(ctx.ptr, kind, 0).astype(np.float64) for kind in "qk")
    logits = np.einsum("hwd,hnd->hwn", q, np.repeat(k, N_HEAD // N_HEAD_KV, axis=0)) / np.sqrt(D)
    logits[:, np.arange(N) > N - W + np.arange(W)[:, None]] = -np.inf
    weights = np.exp(logits)
    out: npt.NDArray[np.float64] = (
        weights / (weights.sum(axis=2) + np.exp(sinks.astype(np.float64))[:, None])[:, :, None]
    )
    return out


def score(ctx: Context, value: str, gqa: str, composed: bool) -> npt.NDArray[np.float32]:
    _native.score(ctx.ptr, _native.score_params("max", value, gqa, composed))
    return _native.scores(ctx.ptr)


@pytest.mark.parametrize("composed", [False, True])
def test_scores_are_the_definition(path: Path, composed: bool) -> None:
    with Context(path, n_ctx=256, type_k="f32") as ctx:
        ctx.prefill(IDS[:N])
        assert _native.layers(ctx.ptr) == [(1, N_HEAD_KV)]
        a = attention(ctx, SINKS).max(axis=1)[:, : N - W]  # [n_head, n_cand]
        v = np.repeat(_native.rows(ctx.ptr, "v", 0).astype(np.float64), N_HEAD // N_HEAD_KV, axis=0)
        norm = np.linalg.norm(np.einsum("hnd,ehd->hne", v, W_O.reshape(N_EMBD, N_HEAD, D).astype(np.float64)), axis=2)
        product = (a * norm[:, : N - W]).reshape(N_HEAD_KV, -1, N - W).mean(axis=1)
        np.testing.assert_allclose(score(ctx, "l2", "mean", composed), product, rtol=1e-3)
        np.testing.assert_allclose(score(ctx, "none", "none", composed), a, rtol=1e-3)
        mean = attention(ctx, SINKS).reshape(N_HEAD_KV, -1, W, N).mean(axis=1).max(axis=1)[:, : N - W]
        np.testing.assert_allclose(score(ctx, "none", "attention", composed), mean, rtol=1e-3)
        without = attention(ctx, np.full(N_HEAD, -np.inf)).max(axis=1)[:, : N - W]
        assert (without > 1.01 * a).all(axis=1).sum() >= 2  # the sinks do count


@pytest.mark.parametrize("attention_path", ["per_head", "ragged_op"])
def test_decoding_is_the_masked_models(path: Path, attention_path: str) -> None:
    """Against llama.cpp's own attention under a mask."""
    options = {"n_ctx": 256, "reference": True}
    with Context(path, attention_path=attention_path, **options) as ragged, Context(path, **options) as masked:
        for ctx, store in ((ragged, _native.STORE_RAGGED), (masked, _native.STORE_MASK)):
            ctx.prefill(IDS[:N])
            ctx.evict(0.6, store=store)
        assert ragged.stats().n_layer_ragged_op == (attention_path == "ragged_op")
        for step in (IDS[N : N + 1], IDS[N + 1 : N + 2], IDS[N + 2 : N + 22]):
            x, y = ragged.decode(step), masked.decode(step)
            assert np.isfinite(y).all() and y.std() > 0
            if attention_path == "per_head":
                assert np.array_equal(x, y)
            else:
                assert np.abs(x - y).max() <= 0.02 * y.std()


def test_page_selection_is_refused(path: Path) -> None:
    with Context(path, n_ctx=256) as ctx, pytest.raises(LaproxError, match="sinks"):
        _native.set_pages(ctx.ptr, _native.pages_params(64))
