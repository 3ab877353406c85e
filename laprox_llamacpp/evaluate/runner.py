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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TextIO

import llama_cpp
import numpy as np

from .. import __version__, _native, gguf_check
from .cells import FULL, Cell, grid
from .records import RUN_FILE, SAMPLES, makes, read, read_head, sample_files, width
from .session import Session
from .task import Task

try:
    import fcntl
except ImportError:  # Windows: two evals in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

LATER = ("data_sha256",)  # keys of a setup that earlier versions did not write


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

    @property
    def n_ctx(self) -> int:
        """Context of each KV type, in tokens: what the samples need, and room as far as the model goes.

        Raises ValueError when the samples need more than the model was trained for.
        """
        need, n_train = self.task.n_need, gguf_check.n_ctx_train(self.model_path)
        if n_train is None:
            return self.task.n_ctx
        if need > n_train:
            option = self.task.length
            n = int(getattr(self.task, option))
            most = n_train - (need - n)
            raise ValueError(
                f"{self.task.name}:{option}={n} with {need - n} more for its answers needs a context of {need} tokens, "
                f"the model was trained for {n_train}: use "
                + (f"{option}={most} or less" if most > 0 else "fewer or shorter answers")
            )
        return min(self.task.n_ctx, n_train)

    def setup(self) -> dict[str, Any]:
        """What makes two runs the same: only such records may be in one folder."""
        return {
            "task": self.task.name,
            "options": dataclasses.asdict(self.task),  # type: ignore[call-overload]
            "metric": self.task.metric,
            "higher": self.task.higher,
            "model": self.model_path.name,
            "model_sha256": sha256(self.model_path),
            "data_sha256": self.task.data_sha256(),
            "cells": [c.name for c in self.cells],
            "kv_types": list(self.kv_types),
            "n_samples": self.n_samples,
        }

    def made(self) -> dict[str, Any]:
        """Where, when and by what it is made."""
        return {**machine(), "n_threads": self.n_threads, "n_gpu_layers": self.n_gpu_layers}

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
    spec.n_ctx  # noqa: B018 - samples that do not fit are told before anything is written
    setup, made = spec.setup(), spec.made()
    _make(out)
    new = _claim(out, setup, made)
    file = out / spec.samples_file
    with file.open("a", encoding="utf-8") as f, _alone(f, file), _given_back(file, new):
        return _run(spec, made, file, f, on_sample)


def _run(
    spec: Run, made: dict[str, Any], file: Path, f: TextIO, on_sample: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    i, n = spec.shard
    found = [r for other in sample_files(file.parent) for r in read(other)]  # packed or in other shards, too
    records = {(r["kv_type"], r["index"]): r for r in found if r["index"] % n == i and _is_of(spec, r)}
    _drop_torn_line(file)
    missing = {s: [t for t in spec.kv_types if (t, s) not in records] for s in range(spec.n_samples) if s % n == i}
    total = len(records) + sum(map(len, missing.values()))
    on_sample(len(records), total)
    for n_new, record in enumerate(_measure(spec, missing)):
        if n_new == 0:
            _tell_made(file.parent, made)
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
    """Nobody else writes these samples meanwhile; ValueError when somebody does, or when a run with another number of
    shards is at work, whose samples are the same. The lock goes with the process.
    """
    _lock(f, file)
    for other in file.parent.glob(SAMPLES):
        if _n_shards(other) != _n_shards(file):
            with other.open("a", encoding="utf-8") as opened:
                _lock(opened, other)
    yield


def _lock(f: TextIO, file: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ValueError(f"another eval is writing to {file}; wait for it, or choose another --out") from e


def _n_shards(file: Path) -> str:
    """ "" for a run that is not split."""
    return file.stem.partition("-of-")[2]


@contextmanager
def _given_back(file: Path, new: bool) -> Iterator[None]:
    """No empty file is left. A run that fails before its first record does not keep the folder either: the corrected
    command may take it.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        if not file.stat().st_size:
            with suppress(OSError):  # Windows removes no open file
                file.unlink()
                if failed and new and not sample_files(file.parent):
                    (file.parent / RUN_FILE).unlink()
                    file.parent.rmdir()  # an empty one


def _measure(spec: Run, missing: Mapping[int, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Records of the samples and KV types that are missing, sample by sample; a session of each type stays open."""
    sessions: dict[str, Session] = {}

    def session(kv_type: str) -> Session:
        if kv_type not in sessions:
            sessions[kv_type] = Session(
                str(spec.model_path), spec.cells, n_ctx=spec.n_ctx, type_k=kv_type, type_v=kv_type,
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
            cost = on.cost()  # of the prompt: an answer makes a full cache grow, an evicted one has room
            measured = {FULL: {**spec.task.measure(on, sample), **cost}}
        if kv_type not in kv_types:
            continue
        for cell in spec.cells:
            with on.under(cell):
                cost = on.cost()
                measured[cell.name] = {**spec.task.measure(on, sample), **cost}
        yield {
            "index": index,
            "kv_type": kv_type,
            **({"reference": spec.widest} if spec.task.against_full else {}),
            "n_prompt": len(sample.tokens),
            "prompt_sha256": hashlib.sha256(np.array(sample.tokens, "<i4").tobytes()).hexdigest()[:16],
            "prefill_s": round(on.prefill_s, 3),
            "info": sample.info,
            "cells": measured,
        }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"{folder} cannot be made ({e.strerror}); choose another --out") from e


def _claim(folder: Path, setup: dict[str, Any], made: dict[str, Any]) -> bool:
    """Write run.json, or check that the folder's is of the same run; whether it was written."""
    file = folder / RUN_FILE
    if not file.exists():
        write(file, json.dumps({"setup": setup, "made": made}, indent=1) + "\n")
        return True
    known = _head(folder)
    different = _differ(setup, known["setup"])
    if different:
        raise ValueError(f"{folder} holds another run ({', '.join(different)} differ); choose another --out")
    if setup["n_samples"] > known["setup"]["n_samples"]:  # more of the same
        known["setup"]["n_samples"] = setup["n_samples"]
        write(file, json.dumps(known, indent=1) + "\n")
    return False


def _tell_made(folder: Path, made: dict[str, Any]) -> None:
    """Add to run.json how a run goes on, if by another build, machine or number of threads than before."""

    def what(one: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in one.items() if key not in ("time", "command")}

    head = _head(folder)
    if what(made) not in map(what, makes(head)):
        head.setdefault("resumed", []).append(made)
        write(folder / RUN_FILE, json.dumps(head, indent=1) + "\n")


def _head(folder: Path) -> dict[str, Any]:
    try:
        return read_head(folder / RUN_FILE)
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder / RUN_FILE} could not be read as a run: {e}") from e


def _differ(setup: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What makes two runs different; the number of samples does not, nor what an earlier version did not tell."""
    ours = json.loads(json.dumps(setup))
    told = [key for key in ours if key != "n_samples" and not (key in LATER and key not in theirs)]
    return [key for key in told if ours[key] != theirs.get(key)]


def write(file: Path, text: str) -> None:
    """All of it, or nothing."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _drop_torn_line(file: Path) -> None:
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def merge(folders: Sequence[Path], out: Path) -> tuple[int, int]:
    """Put the samples of shards that ran elsewhere, packed or not, into one plain file of one folder; returns how many
    records it holds, and how many the whole run has. run.json lists how each shard was made ("merged").

    Raises ValueError when the folders hold different runs, or a sample with different prompts.
    """
    for folder in folders:
        if not (folder / RUN_FILE).exists():
            raise ValueError(f"{folder} holds no {RUN_FILE}, expected the --out of an eval")
    every = list({f.resolve(): f for f in [*folders, *([out] if (out / RUN_FILE).exists() else [])]}.values())
    heads = [_head(folder) for folder in every]
    for (folder, head), (other, its) in combinations(zip(every, heads), 2):
        different = _differ(head["setup"], its["setup"])
        if different:
            raise ValueError(f"{other} holds another run than {folder} ({', '.join(different)} differ)")
    head = max(heads, key=lambda h: int(h["setup"]["n_samples"]))
    for made in (made for h in heads for made in makes(h)):
        if made not in makes(head):
            head.setdefault("merged", []).append(made)
    records: dict[tuple[str, int], dict[str, Any]] = {}
    with ExitStack() as stack:
        for folder in every:
            for file in sample_files(folder):
                if file.suffix != ".gz":
                    _lock(stack.enter_context(file.open("a", encoding="utf-8")), file)
                for record in read(file):
                    key = (record["kv_type"], record["index"])
                    _check_prompts(record, records.get(key, record), file)
                    records[key] = record
        if not records:
            raise ValueError(f"{', '.join(map(str, folders))}: no finished sample, nothing to merge")
        _make(out)
        write(out / RUN_FILE, json.dumps(head, indent=1) + "\n")
        write(out / "samples.jsonl", "".join(json.dumps(records[key]) + "\n" for key in sorted(records)))
        for file in sample_files(out):
            if file.name != "samples.jsonl":
                file.unlink()
    return len(records), head["setup"]["n_samples"] * len(head["setup"]["kv_types"])


def _check_prompts(record: dict[str, Any], other: dict[str, Any], file: Path) -> None:
    """Raise ValueError when two records of a sample have different prompts; earlier versions did not tell."""
    key = "prompt_sha256"
    if key in record and key in other and record[key] != other[key]:
        raise ValueError(
            f"sample {record['index']} ({record['kv_type']}) in {file} has another prompt than before, expected shards "
            "made from the same texts by the same version"
        )
