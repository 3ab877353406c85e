"""How many bytes the KV cache of a model takes, whole and evicted: arithmetic only, no native library.

>>> from laprox_llamacpp import memory
>>> memory.full_bytes(memory.KNOWN["Llama-3.1-8B"], 32768) >> 20
4096
>>> memory.evicted_bytes(memory.KNOWN["Llama-3.1-8B"], 32768, 0.05) >> 20
236
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import gguf_meta
from .budget import Budget

# elements and bytes of a block of ggml's cache types
CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
}


@dataclass(frozen=True)
class KVShape:
    """What decides the size of a model's KV cache.

    Args:
        n_head_kv: KV heads of each layer; 0 for a layer without attention.
        head_dim_k: width of a key, in elements.
        head_dim_v: width of a value.
        n_ctx: longest context of the model, in tokens; 0 when unknown.

    Raises:
        ValueError: no heads at all, or a number out of range.
    """

    n_head_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ctx: int = 0

    def __post_init__(self) -> None:
        if not self.n_head_kv or min(self.n_head_kv) < 0 or sum(self.n_head_kv) == 0:
            raise ValueError(f"n_head_kv is {self.n_head_kv}, expected the KV heads of each layer, at least one in all")
        if self.head_dim_k < 1 or self.head_dim_v < 1 or self.n_ctx < 0:
            raise ValueError(
                f"head widths are {self.head_dim_k} and {self.head_dim_v} and n_ctx is {self.n_ctx}, "
                "expected widths of 1 or more and n_ctx of 0 or more"
            )

    @classmethod
    def uniform(cls, n_layer: int, n_head_kv: int, head_dim: int, n_ctx: int = 0) -> KVShape:
        """All layers alike, keys as wide as values. Raises ValueError like the class."""
        return cls((n_head_kv,) * n_layer, head_dim, head_dim, n_ctx)

    @property
    def n_head(self) -> int:
        """KV heads over all layers."""
        return sum(self.n_head_kv)


# from each model's published config.json: layers, KV heads, head width, longest documented context
KNOWN: dict[str, KVShape] = {
    "Llama-3.1-8B": KVShape.uniform(32, 8, 128, 131072),
    "Llama-3.1-70B": KVShape.uniform(80, 8, 128, 131072),
    "Llama-3.2-1B": KVShape.uniform(16, 8, 64, 131072),
    "Llama-3.2-3B": KVShape.uniform(28, 8, 128, 131072),
    "Mistral-7B-v0.3": KVShape.uniform(32, 8, 128, 32768),
    "Qwen2.5-7B": KVShape.uniform(28, 4, 128, 131072),
    "Qwen2.5-Coder-0.5B": KVShape.uniform(24, 2, 64, 32768),
    "Qwen3-4B": KVShape.uniform(36, 8, 128, 131072),
    "Qwen3-8B": KVShape.uniform(36, 8, 128, 131072),
    "SmolLM2-135M": KVShape.uniform(30, 3, 64, 8192),
}


def full_bytes(shape: KVShape, n_tokens: int, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes of K and V of `n_tokens` tokens in every layer.

    Args:
        shape: the model.
        n_tokens: tokens in the cache, at least 0.
        type_k: cache type of the keys, a name of `CACHE_TYPES`.
        type_v: of the values.

    Raises:
        ValueError: an unknown type, a head width that is no multiple of its block, or negative `n_tokens`.
    """
    if n_tokens < 0:
        raise ValueError(f"n_tokens is {n_tokens}, expected 0 or more")
    return shape.n_head * n_tokens * _row_bytes(shape, type_k, type_v)


def evicted_bytes(
    shape: KVShape,
    n_tokens: int,
    budget: float | int | str | Budget,
    type_k: str = "f16",
    type_v: str = "f16",
    window: int = 32,
    reserve: int = 256,
) -> int:
    """Bytes of K and V after a prompt of `n_tokens` tokens was evicted in every layer.

    Each head keeps k candidates on average and the window, and holds `reserve` rows ready for new tokens. Which heads
    keep them does not matter here: all rows are of one size. A budget that evicts nothing gives `full_bytes`.

    Args:
        shape: the model.
        n_tokens: N, tokens of the prompt.
        budget: as for `Llama(budget=...)`: 0.05, 1024 or "64MiB".
        type_k: cache type of the keys, a name of `CACHE_TYPES`.
        type_v: of the values.
        window: w, the last tokens, always kept.
        reserve: rows per head for new tokens.

    Raises:
        ValueError: as `full_bytes`, a bad budget, or a negative window or reserve.
    """
    if window < 0 or reserve < 0:
        raise ValueError(f"window is {window} and reserve {reserve}, expected 0 or more")
    full = full_bytes(shape, n_tokens, type_k, type_v)
    row_bytes = _row_bytes(shape, type_k, type_v)
    n_kept = Budget.parse(budget).kept(n_tokens, window, shape.n_head * row_bytes) + window
    if n_kept >= n_tokens:
        return full
    return shape.n_head * (n_kept + reserve) * row_bytes


def _row_bytes(shape: KVShape, type_k: str, type_v: str) -> int:
    """K and V of one position of one head."""
    return _type_bytes(shape.head_dim_k, type_k) + _type_bytes(shape.head_dim_v, type_v)


def _type_bytes(n: int, cache_type: str) -> int:
    if cache_type not in CACHE_TYPES:
        raise ValueError(f"unknown cache type {cache_type!r}, expected one of {', '.join(CACHE_TYPES)}")
    block, size = CACHE_TYPES[cache_type]
    if n % block != 0:
        raise ValueError(f"a head of {n} elements cannot be {cache_type}, expected a multiple of {block}; use f16")
    return n // block * size


#
# GGUF
#

# what a cache of rows per position and head does not describe
_UNSUPPORTED = {
    "attention.sliding_window": "sliding-window layers",
    "attention.kv_lora_rank": "compressed (MLA) keys and values",
    "ssm.state_size": "recurrent layers",
}


def from_gguf(path: str | Path) -> KVShape:
    """Read a model's shape from the metadata of a GGUF file (version 2 or 3, little-endian).

    Every length in the file is checked against the file's size before it is followed.

    Raises:
        OSError: the file cannot be read.
        ValueError: no GGUF file, a damaged one, or a model whose cache is not one row per position and KV head.
    """
    try:
        return _shape(gguf_meta.read(path))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _shape(meta: dict[str, object]) -> KVShape:
    arch = meta.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError("no general.architecture, expected a GGUF model; is it a vocabulary or an adapter?")
    for key, what in _UNSUPPORTED.items():
        if meta.get(f"{arch}.{key}"):
            raise ValueError(f"{arch} model with {what}, expected plain attention in every layer")

    n_layer = _int(meta, f"{arch}.block_count", 1 << 16)
    heads = meta.get(f"{arch}.attention.head_count_kv")
    if heads is None:
        n_head_kv = (_int(meta, f"{arch}.attention.head_count", 1 << 16),) * n_layer
    elif isinstance(heads, tuple):
        if len(heads) != n_layer or not all(type(n) is int and 0 <= n <= 1 << 16 for n in heads):
            raise ValueError(f"{arch}.attention.head_count_kv does not fit {n_layer} layers; the file is damaged")
        n_head_kv = heads
    else:
        n_head_kv = (_int(meta, f"{arch}.attention.head_count_kv", 1 << 16),) * n_layer

    key_length, value_length = f"{arch}.attention.key_length", f"{arch}.attention.value_length"
    if key_length not in meta or value_length not in meta:
        width = _int(meta, f"{arch}.embedding_length", 1 << 24) // _int(meta, f"{arch}.attention.head_count", 1 << 16)
    return KVShape(
        n_head_kv,
        _int(meta, key_length, 1 << 16) if key_length in meta else width,
        _int(meta, value_length, 1 << 16) if value_length in meta else width,
        _int(meta, f"{arch}.context_length", 1 << 32) if f"{arch}.context_length" in meta else 0,
    )


def _int(meta: dict[str, object], key: str, most: int) -> int:
    value = meta.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is {value!r}, expected an integer from 1 to {most}; the file is damaged")
    return value
