"""Run folders as `laprox-llamacpp eval` leaves them, also unfinished and packed ones. Nothing is written."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
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
    """One run folder: run.json's two parts, and what could not be read of the rest."""

    path: Path
    setup: dict[str, Any]
    made: dict[str, Any]
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
    """The folder of a run.json. Raises ValueError, TypeError or KeyError when it is none of ours."""
    head = json.loads(run_file.read_text(encoding="utf-8"))
    setup = head["setup"]
    if not isinstance(setup, dict):
        raise ValueError("its setup is no object")
    records, n_bad = [], 0
    for file in sorted([*run_file.parent.glob(SAMPLES), *run_file.parent.glob(PACKED)]):
        text = file.read_bytes()
        *lines, _unfinished = (gzip.decompress(text) if file.suffix == ".gz" else text).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
                record["kv_type"], record["index"], record["cells"].items()
                records.append(record)
            except (ValueError, KeyError, TypeError, AttributeError):
                n_bad += 1
    return Folder(run_file.parent, setup, head.get("made") or {}, records, n_bad)


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
