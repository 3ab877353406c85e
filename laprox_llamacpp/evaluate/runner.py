"""Runs a task over samples and cells: resumable, in shards, with one JSON line a sample."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import llama_cpp

from .. import __version__, _native, gguf_check
from .cells import FULL, Cell, grid
from .records import width
from .session import Session
from .task import Task

try:
    import fcntl
except ImportError:  # Windows: two evals in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

RUN_FILE = "run.json"
SAMPLES = "samples*.jsonl"


@dataclass(frozen=True)
class Run:
    """What is to be measured.

    Args:
        task: the task with its options.
        model_path: a GGUF file.
        methods, budgets: the grid of cells; the full cache is always measured, first.
        kv_types: types of K and V, one context each; all are open together.
        n_samples: samples of the whole run, over all shards.
        shard: (i, n): samples with index % n == i.
        n_threads: for prefill and decode.
        n_gpu_layers: as `Llama`.
    """

    task: Task
    model_path: Path
    methods: Sequence[str]
    budgets: Sequence[str]
    kv_types: Sequence[str] = ("f16",)
    n_samples: int = 20
    shard: tuple[int, int] = (0, 1)
    n_threads: int = os.cpu_count() or 1
    n_gpu_layers: int = 0

    @property
    def cells(self) -> list[Cell]:
        """Of every sample and KV type."""
        return grid(self.methods, self.budgets)

    @property
    def widest(self) -> str:
        """The KV type whose full cache the others are held against."""
        return min(self.kv_types, key=width)

    def setup(self) -> dict[str, Any]:
        """What makes two runs the same: only such records may be in one folder."""
        return {
            "task": self.task.name,
            "options": dataclasses.asdict(self.task),  # type: ignore[call-overload]
            "metric": self.task.metric,
            "higher": self.task.higher,
            "model": self.model_path.name,
            "model_sha256": sha256(self.model_path),
            "cells": [c.name for c in self.cells],
            "kv_types": list(self.kv_types),
            "n_samples": self.n_samples,
        }

    @property
    def samples_file(self) -> str:
        """Records of this shard."""
        i, n = self.shard
        return "samples.jsonl" if n == 1 else f"samples-{i}-of-{n}.jsonl"


def sha256(path: Path) -> str:
    """Of the whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Where a run is made, and by what."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "laprox_llamacpp": __version__,
        "llama_cpp_python": llama_cpp.__version__,
        "python": platform.python_version(),
        "build": _native.build_info(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }


def run(spec: Run, out: Path, on_sample: Callable[[int, int], None] = lambda done, total: None) -> list[dict[str, Any]]:
    """Measure what is not in `out` yet, a line as soon as a sample is done; returns the records of this shard.

    Args:
        spec: what to measure.
        out: folder of run.json and the samples; made if it is missing.
        on_sample: called with the samples done and in all, first before any is measured.

    Raises:
        ValueError: `out` holds another run, another eval is writing to it, or something that the run needs is missing.
    """
    gguf_check.require(str(spec.model_path))
    for cell in spec.cells:
        cell.policy.check_model(str(spec.model_path))
    spec.task.check()
    setup = spec.setup()
    out.mkdir(parents=True, exist_ok=True)
    _claim(out / RUN_FILE, setup)
    file = out / spec.samples_file
    with file.open("a", encoding="utf-8") as f, _alone(f, file):
        return _run(spec, file, f, on_sample)


def _run(spec: Run, file: Path, f: TextIO, on_sample: Callable[[int, int], None]) -> list[dict[str, Any]]:
    records = {(r["kv_type"], r["index"]): r for r in read(file) if _is_of(spec, r)}
    _drop_torn_line(file)
    i, n = spec.shard
    missing = {s: [t for t in spec.kv_types if (t, s) not in records] for s in range(spec.n_samples) if s % n == i}
    total = len(records) + sum(map(len, missing.values()))
    on_sample(len(records), total)
    for record in _measure(spec, missing):
        records[record["kv_type"], record["index"]] = record
        f.write(json.dumps(record) + "\n")
        f.flush()
        on_sample(len(records), total)
    return list(records.values())


def _is_of(spec: Run, record: dict[str, Any]) -> bool:
    """Whether a record counts: earlier versions held a narrow type against its own full cache; it is measured again."""
    widest = spec.widest
    return not spec.task.against_full or record["kv_type"] == widest or record.get("reference") == widest


@contextmanager
def _alone(f: TextIO, file: Path) -> Iterator[None]:
    """Nobody else writes these samples meanwhile; ValueError when somebody does. The lock goes with the process."""
    if fcntl is not None:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ValueError(f"another eval is writing to {file}; wait for it, or choose another --out") from e
    yield


def _measure(spec: Run, missing: Mapping[int, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Records of the samples and KV types that are missing, sample by sample; a session of each type stays open."""
    sessions: dict[str, Session] = {}

    def session(kv_type: str) -> Session:
        if kv_type not in sessions:
            sessions[kv_type] = Session(
                str(spec.model_path), spec.cells, n_ctx=spec.task.n_ctx, type_k=kv_type, type_v=kv_type,
                n_threads=spec.n_threads, n_threads_batch=spec.n_threads, watch=spec.task.watch,
                n_gpu_layers=spec.n_gpu_layers,
            )  # fmt: skip
        return sessions[kv_type]

    try:
        for index, kv_types in missing.items():
            yield from _measure_sample(spec, index, kv_types, session)
    finally:
        for made in sessions.values():
            made.close()


def _measure_sample(
    spec: Run, index: int, kv_types: Sequence[str], session: Callable[[str], Session]
) -> Iterator[dict[str, Any]]:
    """One sample with each type, the widest first: what the task keeps of its full cache is what all are held against.

    The sample lives as long as this generator: what it keeps may be large.
    """
    todo = sorted(kv_types, key=width)
    if todo and spec.task.against_full and todo[0] != spec.widest:
        todo.insert(0, spec.widest)  # its record is there, what it was measured on is not
    sample = None
    for kv_type in todo:
        on = session(kv_type)
        sample = sample or spec.task.sample(on, index)
        on.prefill(sample.tokens)
        with on.under(None):
            measured = {FULL: {**spec.task.measure(on, sample), **on.cost()}}
        if kv_type not in kv_types:
            continue
        for cell in spec.cells:
            with on.under(cell):
                measured[cell.name] = {**spec.task.measure(on, sample), **on.cost()}
        yield {
            "index": index,
            "kv_type": kv_type,
            **({"reference": spec.widest} if spec.task.against_full else {}),
            "n_prompt": len(sample.tokens),
            "prefill_s": round(on.prefill_s, 3),
            "info": sample.info,
            "cells": measured,
        }


def _claim(file: Path, setup: dict[str, Any]) -> None:
    """Write run.json, or check that the folder's is of the same run."""
    if not file.exists():
        write(file, json.dumps({"setup": setup, "made": machine()}, indent=1) + "\n")
        return
    known = json.loads(file.read_text(encoding="utf-8"))
    different = _differ(setup, known["setup"])
    if different:
        raise ValueError(f"{file.parent} holds another run ({', '.join(different)} differ); choose another --out")
    if setup["n_samples"] > known["setup"]["n_samples"]:  # more of the same
        known["setup"]["n_samples"] = setup["n_samples"]
        write(file, json.dumps(known, indent=1) + "\n")


def _differ(setup: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What makes two runs different; the number of samples does not."""
    ours = json.loads(json.dumps(setup))
    return [key for key in ours if key != "n_samples" and ours[key] != theirs.get(key)]


def write(file: Path, text: str) -> None:
    """All of it, or nothing."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def read(file: Path) -> list[dict[str, Any]]:
    """Records of a file, none if it is missing; a last line that a kill cut short does not count.

    Raises ValueError for another line that is no record.
    """
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    records = []
    for i, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as e:
            raise ValueError(f"line {i} of {file} is no record ({e}); remove that line to measure it again") from e
    return records


def _drop_torn_line(file: Path) -> None:
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def merge(folders: Sequence[Path], out: Path) -> tuple[int, int]:
    """Put the samples of shards that ran elsewhere into one folder; returns how many records it holds, and how many the
    whole run has.

    Raises ValueError when the folders hold different runs.
    """
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for folder in folders:
        if not (folder / RUN_FILE).exists():
            raise ValueError(f"{folder} holds no {RUN_FILE}, expected the --out of an eval")
    every = list({f.resolve(): f for f in [*folders, *([out] if (out / RUN_FILE).exists() else [])]}.values())
    heads = [json.loads((folder / RUN_FILE).read_text(encoding="utf-8")) for folder in every]
    for folder, head in zip(every, heads):
        different = _differ(heads[0]["setup"], head["setup"])
        if different:
            raise ValueError(f"{folder} holds another run than {every[0]} ({', '.join(different)} differ)")
    head = max(heads, key=lambda h: int(h["setup"]["n_samples"]))
    with ExitStack() as stack:
        for folder in every:
            for file in sorted(folder.glob(SAMPLES)):
                stack.enter_context(_alone(stack.enter_context(file.open("a", encoding="utf-8")), file))
                records.update({(r["kv_type"], r["index"]): r for r in read(file)})
        out.mkdir(parents=True, exist_ok=True)
        write(out / RUN_FILE, json.dumps(head, indent=1) + "\n")
        write(out / "samples.jsonl", "".join(json.dumps(records[key]) + "\n" for key in sorted(records)))
        for file in out.glob(SAMPLES):
            if file.name != "samples.jsonl":
                file.unlink()
    return len(records), head["setup"]["n_samples"] * len(head["setup"]["kv_types"])
