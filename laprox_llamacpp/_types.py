"""ggml types of a KV cache: names, and bytes of a row."""

from __future__ import annotations

from collections.abc import Mapping

from .memory import CACHE_TYPES

NAMES: dict[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # GGML_TYPE_*


def to_ggml_type(what: str, value: int | str | None) -> int | None:
    """A `GGML_TYPE_*` number from a number, a name such as "q8_0", or None. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if value.lower() not in NAMES:
        raise ValueError(f"{what} is {value!r}, expected one of {', '.join(NAMES)}")
    return NAMES[value.lower()]


def kv_row_bytes(metadata: Mapping[str, str], n_embd: int, n_head: int, type_k: int, type_v: int) -> int:
    """Bytes of one row: K and V of one position in one KV head."""
    arch = metadata.get("general.architecture", "")
    width = n_embd // max(n_head, 1)
    d_k = int(metadata.get(f"{arch}.attention.key_length", width))
    d_v = int(metadata.get(f"{arch}.attention.value_length", width))
    return _row_bytes(type_k, d_k) + _row_bytes(type_v, d_v)


def _row_bytes(ggml_type: int, n: int) -> int:
    name = next(name for name, number in NAMES.items() if number == ggml_type)
    n_values, n_bytes = CACHE_TYPES[name]
    return n // n_values * n_bytes
