"""A first look at a model file, so that a wrong one is named in one line."""

from __future__ import annotations

import os

from . import gguf_meta

_MAGIC = b"GGUF"
_HEADER = 24  # magic, version, number of tensors, number of key-value pairs


def require(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, one line, unless `path` is a file that starts as GGUF does."""
    if not os.path.exists(path):
        raise ValueError(f"Model path does not exist: {path}")
    if os.path.isdir(path):
        raise ValueError(f"Model path is a folder, expected a GGUF file: {path}")
    with open(path, "rb") as f:
        head = f.read(_HEADER)
    if not head:
        raise ValueError(f"Model file is empty: {path}")
    if head[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"Model file is not GGUF (it starts with {head[:4]!r}, expected {_MAGIC!r}): {path}")
    if len(head) < _HEADER:
        raise ValueError(f"Model file is truncated in its header, download it again: {path}")


def n_ctx_train(path: str | os.PathLike[str]) -> int | None:
    """Tokens of context that a model was trained for, None if the file does not say.

    Raises ValueError when the metadata cannot be read.
    """
    try:
        found = gguf_meta.read(path)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    n = found.get(f"{found.get('general.architecture')}.context_length")
    return n if isinstance(n, int) else None
