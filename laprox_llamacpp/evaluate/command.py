"""`laprox-llamacpp eval` and `bench`: from texts on the command line to a run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import models
from .._types import NAMES
from . import bench as bench_
from . import markdown, tables
from .records import RUN_FILE, SAMPLES, read_folder
from .runner import Run, run
from .stats import Experiment
from .task import Task

_SHARD = re.compile(r"(\d+)/(\d+)")
_WEEK = 7 * 24 * 3600  # seconds; a sample may take hours, and the time left is told from the last ones


def evaluate(
    task: str, model: str, methods: str, budgets: str, kv_types: str, samples: int, shard: str, threads: int | None,
    gpu_layers: int, out: Path, ray_address: str | None = None,
) -> str:  # fmt: skip
    """The means. Arguments as the options of the command. Raises ValueError with one line for a bad one."""
    types = list(dict.fromkeys(map(_kv_type, _listed(kv_types))))
    if not types:
        raise ValueError(f"--kv-type is empty, expected one of {', '.join(NAMES)}")
    m = _SHARD.fullmatch(shard)
    if m is None or not int(m[1]) < int(m[2]):
        raise ValueError(f"--shard is {shard!r}, expected I/N with I from 0 to N-1, such as 0/4")
    spec = Run(
        Task.parse(task), models.fetch(model), _listed(methods), _listed(budgets), types, samples,
        (int(m[1]), int(m[2])), threads or os.cpu_count() or 1, gpu_layers,
    )  # fmt: skip
    if not spec.methods:
        raise ValueError(
            "--methods is empty, expected one or more such as laprox,snapkv, or full for the full cache alone"
        )
    spec.cells  # noqa: B018 - a bad method or budget is told before a model is loaded
    if ray_address is not None:
        if spec.shard[0]:
            raise ValueError(f"--shard is {shard!r}, expected 0/{m[2]} with --ray, which sends all {m[2]} shards")
        on_ray(spec, out, ray_address)
        return means(out)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal, speed_estimate_period=_WEEK,
    )  # fmt: skip
    eta = _Eta()
    with bar:
        shown = bar.add_task(f"{spec.task.name} {spec.model_path.name}")

        def on_sample(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)
            if not console.is_terminal:
                console.print(f"{done} of {total} samples{eta(done, total)}", markup=False, highlight=False)

        records = run(spec, out, on_sample)
    console.print(f"{len(records)} samples in {out}; to look at them: laprox-llamacpp report {out}", markup=False)
    return means(out)


def means(out: Path) -> str:
    """What is in a run folder: the notes and the first table of its report."""
    experiment = Experiment([read_folder(out / RUN_FILE)])
    first = next(tables.tables(experiment), None)
    shown = [f"{first.title}\n\n{markdown.table(first.head, first.rows)}"] if first else []
    return "\n\n".join([*experiment.notes(), *shown])


def on_ray(spec: Run, out: Path, address: str) -> None:
    """Each of the run's N shards as a Ray task of `n_threads` CPUs, and of a GPU if layers are to be there; `out` is on
    storage that all nodes share.

    Raises ValueError when Ray is not installed.
    """
    try:
        import ray
    except ImportError as e:
        raise ValueError("--ray needs Ray, which is not installed: pip install ray") from e
    from dataclasses import replace

    ray.init(address=address, ignore_reinit_error=True)
    n = spec.shard[1]
    gpus = {"num_gpus": 1} if spec.n_gpu_layers else {}
    remote: Any = ray.remote(num_cpus=spec.n_threads, **gpus)(run)
    Console(stderr=True, soft_wrap=True).print(
        f"{n} shards on Ray: each sample that is done is a line of {out / SAMPLES}", markup=False, highlight=False
    )
    ray.get([remote.remote(replace(spec, shard=(i, n)), out.resolve()) for i in range(n)])


class _Eta:
    """How long a run still takes, told from what was measured since the first call."""

    def __init__(self) -> None:
        self.start: tuple[int, float] | None = None

    def __call__(self, done: int, total: int) -> str:
        """Such as ", 18 min left"; nothing as long as nothing was measured, and at the end."""
        now = time.monotonic()
        if self.start is None:
            self.start = (done, now)
        before, since = self.start
        if done in (before, total):
            return ""
        left = (now - since) / (done - before) * (total - done)
        if left < 90:
            return f", {left:.0f} s left"
        return f", {left / 60:.0f} min left" if left < 90 * 60 else f", {left / 3600:.1f} h left"


def bench(
    model: str, lengths: str, methods: str, budgets: str, kv_type: str, rounds: int, n_decode: int,
    threads: int | None, gpu_layers: int, out: Path | None,
) -> str:  # fmt: skip
    """The table. Arguments as the options of the command. Raises ValueError with one line for a bad one."""
    if not all(n.isdigit() for n in _listed(lengths)):
        raise ValueError(f"--tokens is {lengths!r}, expected numbers with commas between such as 2048,8192")
    spec = bench_.Bench(
        models.fetch(model), [int(n) for n in _listed(lengths)], _listed(methods), _listed(budgets),
        _kv_type(kv_type), rounds, n_decode, threads or os.cpu_count() or 1, gpu_layers,
    )  # fmt: skip
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console,
        transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        shown = bar.add_task("", total=len(spec.lengths) * len(spec.cells))
        result = bench_.run(spec, out, lambda what, done: bar.update(shown, description=what, completed=done))
    return f"{spec.model_path.name}, {kv_type} cache, {spec.n_threads} threads\n\n{bench_.table(result)}"


def _kv_type(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"--kv-type {name!r} is unknown, expected one of {', '.join(NAMES)}")
    return name


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
