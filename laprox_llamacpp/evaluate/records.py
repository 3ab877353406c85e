"""Run folders as `laprox-llamacpp eval` leaves them, also unfinished and packed ones. Nothing is written."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
SAMPLES = "samples*.jsonl"
PACKED = f"{SAMPLES}.gz"
# KV types from the widest on; the full cache of the first one measured is what everything is held against
WIDEST = ("f32", "f16", "bf16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Folder:
    """One run folder: what is measured, how it was made (the first run, then later ones that differed), the records,
    and how many lines are none.
    """

    path: Path
    setup: dict[str, Any]
    made: list[dict[str, Any]]
    records: list[dict[str, Any]]
    n_bad: int


@dataclass(frozen=True)
class Sample:
    """A prompt with one KV type: what was measured on it, by cell name. `id` is the seed and the index."""

    id: tuple[Any, int]
    kv_type: str
    kind: str
    record: dict[str, Any]
    cells: dict[str, dict[str, Any]]

    def value(self, cell: str, metric: str) -> float | None:
        """A finite number, or None when the cell or the metric is missing or no number."""
        found = self.cells.get(cell, {}).get(metric)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            return None
        return float(found)


def read_folder(run_file: Path) -> Folder:
    """The folder of a run.json, with the last record of each sample and KV type; lines that are no records are counted.

    Raises ValueError when it is none of ours.
    """
    head = read_head(run_file)
    records: dict[tuple[str, int], dict[str, Any]] = {}
    n_bad = 0
    for file in sample_files(run_file.parent):
        for line in _lines(file):
            try:
                record = _record(line)
            except ValueError:
                n_bad += 1
                continue
            records[record["kv_type"], record["index"]] = record
    return Folder(run_file.parent, head["setup"], makes(head), list(records.values()), n_bad)


def makes(head: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that a run.json says about how its records were made, the first run first."""
    parts = [head.get("made"), *(head.get("resumed") or []), *(head.get("merged") or [])]
    return [made for made in parts if isinstance(made, dict) and made]


def read_head(run_file: Path) -> dict[str, Any]:
    """A run.json. Raises ValueError when it is none of ours."""
    head: dict[str, Any] = json.loads(run_file.read_text(encoding="utf-8"))
    setup = head.get("setup") if isinstance(head, dict) else None
    if not isinstance(setup, dict):
        raise ValueError("it has no setup, expected what `laprox-llamacpp eval` writes")
    if not isinstance(setup.get("n_samples"), int) or not isinstance(setup.get("kv_types"), list):
        raise ValueError("its setup has no n_samples or kv_types, expected what `laprox-llamacpp eval` writes")
    return head


def sample_files(folder: Path) -> list[Path]:
    """Of all shards, packed ones first: a line in a plain file is the later one."""
    return [*sorted(folder.glob(PACKED)), *sorted(folder.glob(SAMPLES))]


def read(file: Path) -> list[dict[str, Any]]:
    """Records of a file, packed or not, none if it is missing; a last line that a kill cut short does not count.

    Raises ValueError for another line that is no record.
    """
    return _read(file, _record)


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The same of a file whose lines are any objects."""
    return _read(file, _object)


def _read(file: Path, parsed: Callable[[bytes], dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for i, line in enumerate(_lines(file) if file.exists() else [], 1):
        try:
            out.append(parsed(line))
        except ValueError as e:
            raise ValueError(f"line {i} of {file} is no record ({e}); remove that line to measure it again") from e
    return out


def _lines(file: Path) -> list[bytes]:
    text = file.read_bytes()
    if file.suffix == ".gz":
        try:
            text = gzip.decompress(text)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"{file} cannot be unpacked ({e})") from e
    return text.split(b"\n")[:-1]


def _object(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("expected an object")
    return found


def _record(line: bytes) -> dict[str, Any]:
    record = _object(line)
    for key, kind in (("kv_type", str), ("index", int), ("cells", dict)):
        if not isinstance(record.get(key), kind):
            raise ValueError(f"its {key} is {record.get(key)!r}")
    return record


def join(folders: Sequence[Folder]) -> list[Sample]:
    """One for each prompt and KV type; folders that tried other cells on it add theirs."""
    joined: dict[tuple[str, tuple[Any, int]], Sample] = {}
    for folder in folders:
        for r in folder.records:
            key = (str(r["kv_type"]), (seed_of(folder), int(r["index"])))
            kind = (r.get("info") or {}).get("kind") or ""
            sample = joined.setdefault(key, Sample(key[1], key[0], str(kind), r, {}))
            sample.cells.update({name: cell for name, cell in r["cells"].items() if isinstance(cell, dict)})
    return [joined[key] for key in sorted(joined, key=lambda k: (width(k[0]), str(k[1][0]), k[1][1]))]


def seed_of(folder: Folder) -> Any:
    """Of the run's samples."""
    return (folder.setup.get("options") or {}).get("seed", 0)


def width(kv_type: str) -> tuple[int, str]:
    """Sorts KV types, the widest first."""
    return (WIDEST.index(kv_type) if kv_type in WIDEST else len(WIDEST), kv_type)
