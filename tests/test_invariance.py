"""Scores, to the bit, and kept sets do not depend on n_batch, n_ubatch or the number of threads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, W, as_set, golden

from laprox_llamacpp import Llama

N = 250  # the last step before the window is the rest of a multiple of 64


def evicted(path: Path, n_prompt: int, **options: Any) -> tuple[npt.NDArray[np.float32], set[tuple[int, int]]]:
    threads = {"n_threads": options.pop("n_threads", 1)}
    threads["n_threads_batch"] = threads["n_threads"]
    llm = Llama(str(path), kv_evict="laprox", budget=0.4, n_ctx=1024, verbose=False, **threads, **options)
    llm.eval(golden("smollm2-135m")["ids"][:n_prompt].tolist())
    scores, kept = np.concatenate(list(llm.kv_scores().values())), as_set(list(llm.kv_kept().values()))
    assert scores.shape == (90, n_prompt - W)
    assert len(kept) == 90 * int(0.4 * n_prompt + 0.5)
    llm.close()
    return scores, kept


@cache
def first(path: Path, n_prompt: int, kind: str) -> tuple[npt.NDArray[np.float32], set[tuple[int, int]]]:
    return evicted(path, n_prompt, n_batch=512, n_ubatch=512, type_k=kind, type_v=kind)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        {"n_ubatch": 32, "n_batch": 512},
        {"n_ubatch": 100, "n_batch": 512},
        {"n_ubatch": 512, "n_batch": 130, "n_threads": 2},
        pytest.param({"n_ubatch": 64, "n_batch": 64}, marks=slow),
        pytest.param({"n_ubatch": 512, "n_batch": 32}, marks=slow),
        pytest.param({"n_ubatch": 192, "n_batch": 1024}, marks=slow),
    ],
    ids=str,
)
def test_batches_and_threads(smol_path: Path, options: dict[str, Any]) -> None:
    scores, kept = first(smol_path, N, "f16")
    got, got_kept = evicted(smol_path, N, **options)
    assert np.array_equal(got, scores)
    assert got_kept == kept


@slow
@pytest.mark.parametrize("options", [{"n_ubatch": 32}, {"n_ubatch": 100}, {"n_batch": 130, "n_threads": 2}], ids=str)
@pytest.mark.parametrize(("n_prompt", "kind"), [(578, "f16"), (578, "q8_0"), (N, "q8_0"), (W + 64, "f16")])
def test_lengths_and_types(smol_path: Path, n_prompt: int, kind: str, options: dict[str, Any]) -> None:
    scores, kept = first(smol_path, n_prompt, kind)
    got, got_kept = evicted(smol_path, n_prompt, type_k=kind, type_v=kind, **{"n_batch": 512, **options})
    assert np.array_equal(got, scores)
    assert got_kept == kept


def test_scoring_threads(smol_path: Path) -> None:
    """The op alone: one cache, scored by one thread and by two."""
    import llama_cpp

    with Context(smol_path) as ctx:
        ctx.prefill(golden("smollm2-135m")["ids"][:N])
        one = ctx.score()
        llama_cpp.llama_set_n_threads(ctx.ptr, 2, 2)
        assert np.array_equal(ctx.score(), one)


def test_two_runs(smol_path: Path) -> None:
    again = evicted(smol_path, N, n_batch=512, n_ubatch=512)
    assert np.array_equal(again[0], first(smol_path, N, "f16")[0])
    assert again[1] == first(smol_path, N, "f16")[1]
