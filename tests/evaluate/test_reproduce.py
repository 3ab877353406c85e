"""scripts/reproduce.sh: every part can begin, with its model, its methods and its lengths."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from laprox_llamacpp import models
from laprox_llamacpp.evaluate.bench import Bench
from laprox_llamacpp.evaluate.runner import Run
from laprox_llamacpp.evaluate.task import Task

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reproduce.sh"


def listed() -> list[list[str]]:
    env = {k: v for k, v in os.environ.items() if k not in ("SMOL", "QWEN")}
    done = subprocess.run([SCRIPT, "list"], capture_output=True, text=True, check=True, env=env)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("part", listed(), ids=lambda part: part[0])
def test_a_part_can_begin(part: list[str]) -> None:
    _, model, samples, methods, budgets, kv_types, task = part
    path = models.fetch(model)
    grid = [m for m in methods.split(",") if m != "duo"], budgets.split(",")  # the script ranks heads for duo first
    if task.startswith("bench:"):
        lengths = [int(n) for n in task.partition(":")[2].split(",")]
        Bench(path, lengths, *grid, kv_type=kv_types, rounds=int(samples), n_decode=16)
    else:
        run = Run(Task.parse(task), path, *grid, kv_types.split(","), int(samples))
        run.task.check()
        assert run.n_ctx > 0 and len(run.cells) == len(grid[0]) * len(grid[1])


def test_names_are_unique() -> None:
    names = [part[0] for part in listed()]
    assert len(names) == len(set(names)) > 30


def test_an_unknown_part_is_named() -> None:
    done = subprocess.run([SCRIPT, "needle-smol-3k"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "no part needle-smol-3k; see: scripts/reproduce.sh list\n"
