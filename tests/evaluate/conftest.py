"""One session on SmolLM2 for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from common import HEADS, ONE, PAGES

from laprox_llamacpp import duo_profile
from laprox_llamacpp.evaluate.cells import Cell, grid
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task
from laprox_llamacpp.policy import methods


@pytest.fixture(scope="module")
def profile(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A duo profile that ranks the heads in an order of its own."""
    scores = np.random.default_rng(5).random(HEADS).tolist()
    heads = tuple((i // 3, i % 3, s) for i, s in enumerate(scores))
    path = tmp_path_factory.mktemp("duo") / "profile.json"
    made = duo_profile.Profile(duo_profile.fingerprint(smol_path), smol_path.name, 30, heads)
    duo_profile.save(made, path)
    return path


@pytest.fixture(scope="module")
def cells(profile: Path) -> list[Cell]:
    """Every method, and pages of an evicted cache."""
    duo = f"duo:protect_sinks=8:recent=40:profile={profile}"
    names = [duo if m == "duo" else m for m in methods() if not m.startswith("test")]
    assert len(names) >= 11
    return grid([*names, PAGES], ["0.4"])


@pytest.fixture(scope="module")
def session(smol_path: Path, cells: list[Cell]) -> Iterator[Session]:
    made = Session(str(smol_path), cells, n_ctx=1024, watch=True, **ONE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt(session: Session) -> list[int]:
    return Task.parse("needle:tokens=160").sample(session, 0).tokens
