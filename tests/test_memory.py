"""The memory calculator, by explicit arithmetic and hand-made GGUF headers."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from laprox_llamacpp import memory
from laprox_llamacpp.memory import KVShape

TINY = KVShape.uniform(n_layer=2, n_head_kv=3, head_dim=64)  # 6 heads

Pair = tuple[str, int, bytes]


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


def u32(key: str, n: int) -> Pair:
    return key, 4, struct.pack("<I", n)


def gguf(pairs: list[Pair], version: int = 3) -> bytes:
    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + body


LLAMA: list[Pair] = [
    ("general.architecture", 8, text("llama")),
    ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
    ("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 0.5, 1)),
    ("general.some_flag", 7, b"\x01"),
    u32("llama.block_count", 3),
    u32("llama.context_length", 4096),
    u32("llama.embedding_length", 512),
    u32("llama.attention.head_count", 8),
    u32("llama.attention.head_count_kv", 2),
]


def read(tmp_path: Path, data: bytes) -> KVShape:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return memory.from_gguf(path)


@pytest.mark.parametrize(
    ("type_k", "type_v", "row"),
    [
        ("f16", "f16", 64 * 2 + 64 * 2),
        ("f32", "bf16", 64 * 4 + 64 * 2),
        ("q8_0", "q8_0", 2 * 2 * (2 + 32)),  # two blocks each: a half and 32 bytes
        ("q8_0", "q4_0", 2 * (2 + 32) + 2 * (2 + 16)),
    ],
)
def test_full(type_k: str, type_v: str, row: int) -> None:
    assert memory.full_bytes(TINY, 1000, type_k, type_v) == 6 * 1000 * row
    assert memory.full_bytes(TINY, 0, type_k, type_v) == 0


def test_full_of_a_known_model() -> None:
    # 32 layers, K and V, 8 heads, 128 wide, 2 bytes
    assert memory.full_bytes(memory.KNOWN["Llama-3.1-8B"], 32768) == 32 * 2 * 8 * 128 * 2 * 32768 == 4 << 30


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0.05, 50),  # 18 candidates and the window
        (0.0505, 51),  # floor(50.5 + 0.5)
        (0.01, 32),  # less than the window: the window stays
        (100, 100),
        ("10%", 100),
        (f"{6 * 256 * 70 + 100}B", 70),  # whole tokens only
    ],
)
def test_evicted(budget: object, kept: int) -> None:
    assert memory.evicted_bytes(TINY, 1000, budget, reserve=0) == 6 * kept * 256  # type: ignore[arg-type]
    assert memory.evicted_bytes(TINY, 1000, budget, reserve=10) == 6 * (kept + 10) * 256  # type: ignore[arg-type]


def test_nothing_to_evict_is_the_full_cache() -> None:
    assert memory.evicted_bytes(TINY, 1000, 1.0) == 6 * 1000 * 256
    assert memory.evicted_bytes(TINY, 1000, 5000) == 6 * 1000 * 256
    assert memory.evicted_bytes(TINY, 32, 0.05) == 6 * 32 * 256
    assert memory.evicted_bytes(TINY, 33, 0.05, reserve=0) == 6 * 32 * 256


def test_layers_need_not_be_alike() -> None:
    shape = KVShape((1, 0, 4), head_dim_k=32, head_dim_v=64)
    assert memory.full_bytes(shape, 10) == (1 + 4) * 10 * (32 + 64) * 2


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="q5_k"):
        memory.full_bytes(TINY, 10, "q5_k")
    with pytest.raises(ValueError, match="multiple of 32"):
        memory.full_bytes(KVShape.uniform(1, 1, 80), 10, "f16", "q8_0")
    with pytest.raises(ValueError, match="n_tokens"):
        memory.full_bytes(TINY, -1)
    with pytest.raises(ValueError, match="window"):
        memory.evicted_bytes(TINY, 100, 0.5, window=-1)
    with pytest.raises(ValueError, match="budget"):
        memory.evicted_bytes(TINY, 100, 0.0)
    for heads in ((), (0, 0), (1, -1)):
        with pytest.raises(ValueError, match="n_head_kv"):
            KVShape(heads, 64, 64)
    with pytest.raises(ValueError, match="head widths"):
        KVShape((1,), 0, 64)


@pytest.mark.parametrize("version", [2, 3])
def test_gguf(tmp_path: Path, version: int) -> None:
    assert read(tmp_path, gguf(LLAMA, version)) == KVShape((2, 2, 2), 64, 64, 4096)


def test_gguf_head_widths_and_heads_per_layer(tmp_path: Path) -> None:
    pairs = [
        *LLAMA[:-1],
        ("llama.attention.head_count_kv", 9, struct.pack("<IQ3i", 5, 3, 1, 0, 4)),
        u32("llama.attention.key_length", 128),
        u32("llama.attention.value_length", 96),
    ]
    assert read(tmp_path, gguf(pairs)) == KVShape((1, 0, 4), 128, 96, 4096)


def test_gguf_without_kv_heads_is_multi_head(tmp_path: Path) -> None:
    assert read(tmp_path, gguf(LLAMA[:-1])).n_head_kv == (8, 8, 8)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([], "architecture"),
        (LLAMA[1:], "architecture"),
        ([*LLAMA, LLAMA[0]], "twice"),
        ([*LLAMA, u32("llama.attention.sliding_window", 512)], "sliding-window"),
        ([*LLAMA, u32("llama.attention.kv_lora_rank", 512)], "MLA"),
        ([*LLAMA, u32("llama.ssm.state_size", 16)], "recurrent"),
        ([p for p in LLAMA if p[0] != "llama.block_count"], "block_count"),
        ([p for p in LLAMA if p[0] != "llama.attention.head_count"], "head_count"),
        ([*LLAMA[:-1], u32("llama.attention.head_count_kv", 0)], "head_count_kv"),
        ([*LLAMA[:-1], u32("llama.attention.head_count_kv", 4294967295)], "head_count_kv"),
        ([*LLAMA[:-1], ("llama.attention.head_count_kv", 9, struct.pack("<IQ2i", 5, 2, 1, 4))], "3 layers"),
        ([*LLAMA[:-1], ("llama.attention.head_count_kv", 9, struct.pack("<IQ3f", 6, 3, 1, 1, 1))], "3 layers"),
        ([*LLAMA[:-1], ("llama.attention.head_count_kv", 8, text("2"))], "head_count_kv"),
        ([*LLAMA[:4], u32("llama.block_count", 4294967295), *LLAMA[5:]], "block_count"),
        ([("x", 13, b"\0" * 8)], "value type is 13"),
        ([("x", 9, struct.pack("<IQ", 9, 1) + b"\0" * 8)], "value type is 9"),  # arrays do not nest
        ([("x", 9, struct.pack("<IQ", 4, 1 << 62))], "cut off"),
        ([("x", 9, struct.pack("<IQ", 8, 1 << 62))], "cut off"),
        ([("x", 9, struct.pack("<IQQ", 8, 1, 1 << 63))], "cut off"),
        ([("x", 8, struct.pack("<Q", (1 << 64) - 1))], "cut off"),
    ],
)
def test_gguf_refused(tmp_path: Path, pairs: list[Pair], why: str) -> None:
    with pytest.raises(ValueError, match=why) as e:
        read(tmp_path, gguf(pairs))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"GG", "expected b'GGUF'"),
        (b"PK\x03\x04" + gguf(LLAMA)[4:], "expected b'GGUF'"),
        (gguf(LLAMA, version=1), "version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + b"\0" * 64, "version"),  # big-endian
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + b"\0" * 64, "cut off"),
    ],
)
def test_not_a_gguf(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(tmp_path, data)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        memory.from_gguf(tmp_path / "none.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf(LLAMA)
    for n in range(len(whole)):
        with pytest.raises(ValueError):
            read(tmp_path, whole[:n])


def test_damaged_bytes_raise_nothing_else(tmp_path: Path) -> None:
    whole = gguf(LLAMA)
    rng = random.Random(1)
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read(tmp_path, bytes(data))
        except ValueError:
            refused += 1
    assert refused > 100
