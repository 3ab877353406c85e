"""What cannot be evicted is refused when the context is made, with its reason; the same model runs without eviction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from lowlevel import Context

from laprox_llamacpp import _native


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flash_attn": False}, "flash attention"),
        ({"n_seq_max": 2}, "one sequence, n_seq_max is 2"),
        ({"type_k": "iq4_nl"}, "cache type iq4_nl"),
    ],
    ids=str,
)
def test_refused_contexts(smol_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        Context(smol_path, **options)
    with Context(smol_path) as ctx:  # and the refusal leaves nothing behind
        assert _native.enabled(ctx.ptr)


def write_model(path: Path, arch: str, fields: dict[str, Any], tensors: dict[str, Any], n_layer: int = 1) -> Path:
    """A GGUF with a vocabulary of 32 tokens, the given ones or, of a shape (reversed), random ones."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(n_layer)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    for key, value in fields.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_uint32(f"{arch}.vocab_size", 32)
    for name, value in tensors.items():
        data = value if isinstance(value, np.ndarray) else rng.normal(0, 0.1, value).astype(np.float32)
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EMBED = {"token_embd.weight": (32, 32), "output_norm.weight": (32,)}


def test_recurrent_memory_is_refused(tmp_path: Path) -> None:
    fields = {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    block = {
        "attn_norm.weight": (32,),
        "ssm_in.weight": (128, 32),
        "ssm_conv1d.weight": (64, 4),
        "ssm_conv1d.bias": (64,),
        "ssm_x.weight": (34, 64),
        "ssm_dt.weight": (64, 2),
        "ssm_dt.bias": (64,),
        "ssm_a": (64, 16),
        "ssm_d": (64,),
        "ssm_out.weight": (32, 64),
    }
    tensors = {**EMBED, **{f"blk.0.{k}": v for k, v in block.items()}}
    path = write_model(tmp_path / "mamba.gguf", "mamba", fields, tensors)
    with pytest.raises(RuntimeError, match="no plain KV cache"):
        Context(path, n_ctx=256)
    with Context(path, n_ctx=256, evict=False) as ctx:
        assert np.isfinite(ctx.decode([1, 2, 3])).all()


def test_alibi_is_refused(tmp_path: Path) -> None:
    fields = {"attention.head_count": 4, "feed_forward_length": 64, "attention.layer_norm_epsilon": 1e-5}
    block = {
        "attn_norm.weight": (32,),
        "attn_norm.bias": (32,),
        "attn_qkv.weight": (96, 32),
        "attn_qkv.bias": (96,),
        "attn_output.weight": (32, 32),
        "attn_output.bias": (32,),
        "ffn_norm.weight": (32,),
        "ffn_norm.bias": (32,),
        "ffn_up.weight": (64, 32),
        "ffn_up.bias": (64,),
        "ffn_down.weight": (32, 64),
        "ffn_down.bias": (32,),
    }
    tensors = {
        **EMBED,
        "token_embd_norm.weight": (32,),
        "token_embd_norm.bias": (32,),
        "output_norm.bias": (32,),
        **{f"blk.0.{k}": v for k, v in block.items()},
    }
    path = write_model(tmp_path / "bloom.gguf", "bloom", fields, tensors)
    with pytest.raises(RuntimeError, match="ALiBi"):
        Context(path, n_ctx=256)
    with Context(path, n_ctx=256, evict=False) as ctx:
        assert np.isfinite(ctx.decode([1, 2, 3])).all()
