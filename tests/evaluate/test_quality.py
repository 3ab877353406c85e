"""Needles, rows really freed: the default form finds them where the full cache does."""

from __future__ import annotations

from pathlib import Path

import pytest

from laprox_llamacpp.evaluate.cells import grid
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task

SEED = 29  # not one of the tables'
SMALL = "digits=4:open_answer=yes:max_tokens=12"


def shares(path: Path, methods: list[str], budget: str, n_samples: int, options: str) -> list[float]:
    """Share of needles that each method finds, over the samples that the full cache answers."""
    task = Task.parse(f"needle:kind=single+multikey:seed={SEED}:{options}")
    cells = grid(methods, [budget])
    session = Session(str(path), cells, n_ctx=task.n_ctx, n_threads=1)
    found: list[list[float]] = []
    try:
        for index in range(n_samples):
            sample = task.sample(session, index)
            session.prefill(sample.tokens)
            with session.under(None):
                known = task.measure(session, sample)["score"] == 1
                whole = session.cost()["kv_bytes"]
            if not known:
                continue
            found.append([])
            for cell in cells:
                with session.under(cell):
                    found[-1].append(task.measure(session, sample)["score"])
                    assert session.cost()["kv_bytes"] < whole
    finally:
        session.close()
    assert len(found) >= n_samples / 2, "the full cache should answer most of them"
    return [sum(column) / len(found) for column in zip(*found)]


def test_one_needle_survives_at_a_tenth(smol_path: Path) -> None:
    assert shares(smol_path, ["laprox"], "0.1", 1, f"tokens=1024:{SMALL}") == [1.0]


@pytest.mark.slow
def test_smollm2_at_a_tenth(smol_path: Path) -> None:
    (default,) = shares(smol_path, ["laprox"], "0.1", 20, SMALL)
    assert default >= 0.95


@pytest.mark.slow
def test_qwen_at_a_twentieth_against_the_paper(qwen_path: Path) -> None:
    default, paper = shares(qwen_path, ["laprox", "laprox:preset=paper"], "0.05", 20, "max_tokens=16")
    assert default >= 0.95
    assert default - paper >= 0.3
