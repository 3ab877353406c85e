"""The metadata of a GGUF file, read without loading the model."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1 << 16  # a number per layer is what we look for, not one per token of the vocabulary
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read(path: str | os.PathLike[str]) -> dict[str, object]:
    """Key-value pairs of a GGUF file (version 2 or 3, little-endian); None for arrays of strings, and for long ones.

    Every length in the file is checked against the file's size before it is followed.

    Raises:
        OSError: the file cannot be read.
        ValueError: no GGUF file, or a damaged one; the path is not named.
    """
    with open(path, "rb") as f:
        if f.seek(0, 2) == 0:
            raise ValueError("the file is empty, expected a GGUF file")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()


class _Reader:
    """GGUF's header and key-value pairs, one after another. Arrays of strings, and long ones, are skipped."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def metadata(self) -> dict[str, object]:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"starts with {self.data[:4]!r}, expected b'GGUF'; give a GGUF model")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version is {version}, expected 2 or 3, little-endian; convert the model again")
        self.scalar("Q")  # tensors
        n_kv = self.size(self.scalar("Q"), 13)  # an empty key, a type and a byte
        out: dict[str, object] = {}
        for _ in range(n_kv):
            key = self.string()
            if key in out:
                raise ValueError(f"key {key!r} is there twice; the file is damaged")
            out[key] = self.value(self.scalar("I"))
        return out

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self.code(kind))
        kind = self.scalar("I")
        if kind == _STRING:
            for _ in range(self.size(self.scalar("Q"), 8)):
                self.skip(self.scalar("Q"))
            return None
        code = self.code(kind)
        n = self.size(self.scalar("Q"), struct.calcsize(code))
        start = self.skip(n * struct.calcsize(code))
        if n > _MAX_ARRAY:
            return None
        return struct.unpack_from(f"<{n}{code}", self.data, start)

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"value type is {kind} at byte {self.at}, expected 0 to 12; the file is damaged")
        return _SCALARS[kind]

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(code)))[0]

    def string(self) -> str:
        start = self.skip(self.scalar("Q"))
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def size(self, n: int, least: int) -> int:
        """`n` elements of at least `least` bytes must fit into the rest of the file."""
        if n * least > len(self.data) - self.at:
            raise ValueError(f"{n} elements at byte {self.at} of {len(self.data)}; the file is cut off or damaged")
        return n

    def skip(self, n: int) -> int:
        start = self.at
        self.at += self.size(n, 1)
        return start
