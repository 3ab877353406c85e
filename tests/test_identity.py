"""Where nothing is evicted, nothing changes: logits equal to the bit, within our build and against an unpatched one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import NAMES, TESTS, Context, W, golden
from script import load

from laprox_llamacpp import Llama, _native

IDS = golden("smollm2-135m")["ids"]
N = 300  # more than the prompt buffer starts with
STOCK_LIB = "LAPROX_STOCK_LIB"  # folder of an unpatched build, instead of making one

slow = pytest.mark.slow


def logits(path: Path, n: int, kind: str, evict: bool, observe: bool = False) -> npt.NDArray[np.float32]:
    """The steps of plain_logits.py."""
    ids = IDS[:n]
    with Context(path, type_k=kind, evict=evict) as ctx:
        first = ctx.decode(ids[:-W])
        if observe:
            _native.observe(ctx.ptr, W)
        window = ctx.decode(ids[-W:])
        if observe:
            ctx.score()
        return np.stack([first, window, *(ctx.decode([token]) for token in ids[:6])])


@pytest.mark.parametrize("kind", ["f16", "q8_0", pytest.param("f32", marks=slow), pytest.param("bf16", marks=slow)])
def test_a_context_that_could_evict(smol_path: Path, kind: str) -> None:
    plain = logits(smol_path, N, kind, evict=False)
    assert np.array_equal(logits(smol_path, N, kind, evict=True), plain)
    assert np.array_equal(logits(smol_path, N, kind, evict=True, observe=True), plain)  # scores change nothing


@slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_sliding_window_model(gemma_path: Path, kind: str) -> None:
    assert np.array_equal(logits(gemma_path, 560, kind, evict=True), logits(gemma_path, 560, kind, evict=False))


@pytest.mark.parametrize(("n", "budget"), [(N, 1.0), (W, 0.05), (W + 8, 0.999)])
def test_budgets_that_keep_everything(smol_path: Path, n: int, budget: float) -> None:
    got: list[list[npt.NDArray[Any]]] = []
    for options in ({"kv_evict": "laprox", "budget": budget}, {"kv_evict": None, "flash_attn": True}):
        llm = Llama(str(smol_path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **options)
        got.append([])
        for step in (IDS[:n], IDS[n : n + 1], IDS[n + 1 : n + 2]):
            llm.eval(step.tolist())
            out = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()
            got[-1].append(out)
        assert not llm.kv_stats().evicted
        llm.close()
    assert all(np.array_equal(a, b) for a, b in zip(*got))


# ---- against an unpatched build


def cpu_options() -> list[str]:
    """The options that give llama.cpp the CPU flags of our build."""
    info = _native.build_info()
    tuning = info.get("cpu_tuning")
    if tuning == "native":
        return ["-DGGML_NATIVE=ON"]
    if tuning != "probed":
        pytest.skip(f"CPU tuning is {tuning}: the flags are the user's own; set {STOCK_LIB} to an unpatched build")
    on = [f"-DGGML_{name}=ON" for name in info["cpu_features"].split()]
    off = [f"-DGGML_{name}=OFF" for name in info["cpu_refused"].split()]
    return ["-DGGML_NATIVE=OFF", *on, *off]


@pytest.fixture(scope="module")
def stock_lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries of the pinned sources as they come: minutes of compiling."""
    given = os.environ.get(STOCK_LIB)
    if given:
        return Path(given)
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake on the path")
    options = cpu_options()
    base = tmp_path_factory.mktemp("stock")
    vendor = load("vendor")
    layout = vendor.default_layout()
    vendor.unpack(layout, vendor.get_sdist(layout), base / "src")
    for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP"):
        options.append(f"-DLLAMA_BUILD_{part}=OFF")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", base / "src", "-B", base / "build", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON",
         *generator, *options],
        ["cmake", "--build", base / "build", "--parallel", str(os.cpu_count() or 1)],
    ):  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
    return base / "build" / "bin"


@slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("model", "n"), [("smol_path", N), ("smol_path", W + 3), ("gemma_path", 560)])
def test_an_unpatched_build(
    request: pytest.FixtureRequest, tmp_path: Path, stock_lib: Path, model: str, n: int, kind: str
) -> None:
    path = request.getfixturevalue(model)
    np.save(tmp_path / "ids.npy", IDS[:n])
    command = [sys.executable, TESTS / "plain_logits.py", path, tmp_path / "ids.npy", str(NAMES[kind]), str(W)]
    done = subprocess.run(
        [*command, tmp_path / "out.npy"], env={**os.environ, "LLAMA_CPP_LIB_PATH": str(stock_lib)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    stock = np.load(tmp_path / "out.npy")
    assert np.array_equal(logits(path, n, kind, evict=False), stock)
    assert np.array_equal(logits(path, n, kind, evict=True), stock)
