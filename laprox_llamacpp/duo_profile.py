"""Profiles of the method `duo`: which KV heads of a model retrieve. Small JSON files; plain Python, no native library.

    {"format": "laprox-llamacpp duo profile", "version": 1,
     "fingerprint": "<64 hex digits>", "model": "model.gguf", "n_layer": 30,
     "settings": {"samples": 8, ...}, "package": "0.1.0",
     "heads": [[0, 0, 0.0123], [0, 1, 0.0002], ...]}

`n_layer` counts the layers of the model, `heads` are [model layer, KV head, score] of every head that can be evicted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from . import models

FORMAT = "laprox-llamacpp duo profile"
VERSION = 1
MAX_BYTES = 4 << 20  # of a file; 128 layers of 128 heads take less than one MiB

_BLOCK = 64 << 10
_N_BLOCKS = 64
_MAX_DIGITS = 18  # of an integer


@dataclass(frozen=True)
class Profile:
    """The retrieval scores of a model's KV heads.

    Attributes:
        fingerprint: of the model file, see `fingerprint`.
        model: its name, for people.
        n_layer: layers of the model, those without an evictable cache included.
        heads: (model layer, KV head, score), ascending; the higher a score, the longer its head keeps everything.
        settings: of the calibration, for people.
        package: version of this package that made it.
    """

    fingerprint: str
    model: str
    n_layer: int
    heads: tuple[tuple[int, int, float], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    package: str = ""

    def heads_per_layer(self) -> list[int]:
        """KV heads of each layer that has any, by layer."""
        layers = [il for il, _, _ in self.heads]
        return [layers.count(il) for il in sorted(set(layers))]

    def scores(self) -> list[float]:
        """By layer, then by KV head."""
        return [score for _, _, score in self.heads]


def fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 over a file's size and 64 blocks of 64 KiB at evenly spaced places, first and last included; as hex.

    4 MiB are read however large the file is, so that 40 GB take no longer; a file up to 4 MiB is read whole. A change
    between the blocks goes unseen: this tells one model, or one quantisation of it, from another, and is no checksum.
    Of a model in several files it sees the one that is given.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _BLOCK)
    with open(path, "rb") as f:
        for start in sorted({i * last // (_N_BLOCKS - 1) for i in range(_N_BLOCKS)}):
            f.seek(start)
            digest.update(f.read(_BLOCK))
    return digest.hexdigest()


def default_path(model_fingerprint: str) -> Path:
    """Where `calibrate` leaves the profile of a model: in the folder `duo` beside that of `models.cache_dir`."""
    return models.cache_dir().parent / "duo" / f"{model_fingerprint}.json"


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a file that `load` reads, or leave what was there before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "n_layer": profile.n_layer,
        "settings": profile.settings,
        "package": profile.package,
        "heads": profile.heads,
    }
    text = json.dumps(data, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile. Raises ValueError, one line, for a file that is missing, unreadable or none."""
    try:
        if not Path(path).is_file():  # not a pipe or a device, which could be read for ever
            raise ValueError("there is no such file")
        with open(path, "rb") as f:
            raw = f.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        data = json.loads(raw.decode("utf-8"), parse_constant=_no_number, parse_int=_int)
        return _checked(data)
    except (OSError, ValueError) as e:
        raise ValueError(f"cannot read the duo profile {path}: {e}") from e
    except RecursionError as e:
        raise ValueError(f"cannot read the duo profile {path}: nested too deep") from e


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _checked(data: Any) -> Profile:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"its version is {_short(data.get('version'))}, expected {VERSION}")
    kinds = {"fingerprint": str, "model": str, "n_layer": int, "heads": list, "settings": dict, "package": str}
    for key, kind in kinds.items():
        if type(data.get(key)) is not kind:
            raise ValueError(f"{key} is {_short(data.get(key))}, expected {kind.__name__}")
    heads = [_head(entry, data["n_layer"]) for entry in data["heads"]]
    if not heads:
        raise ValueError("it has no heads")
    places = [(il, h) for il, h, _ in heads]
    for before, (il, h) in zip([(-1, 0), *places], places):
        if h != (before[1] + 1 if il == before[0] else 0) or il < before[0]:
            raise ValueError(f"layer {il}, KV head {h} does not follow layer {before[0]}, KV head {before[1]}")
    return Profile(data["fingerprint"], data["model"], data["n_layer"], tuple(heads), data["settings"], data["package"])


def _head(entry: Any, n_layer: int) -> tuple[int, int, float]:
    if not isinstance(entry, list) or [type(x) for x in entry[:2]] != [int, int] or len(entry) != 3:
        raise ValueError(f"a head is {_short(entry)}, expected [layer, KV head, score]")
    il, h, score = entry
    if not 0 <= il < n_layer:
        raise ValueError(f"a head's layer is {il}, expected 0 to {n_layer - 1}")
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ValueError(f"the score of layer {il}, KV head {h} is {_short(score)}, expected a finite number")
    return il, h, float(score)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
