"""The CUDA kernels, compiled for the CPU by a shim of threads, warps and barriers, against float64 (docs/gpu.md)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "gpu_emulation"
GGML = ROOT / "vendor" / "llama.cpp" / "ggml" / "include"

CUDA = ROOT / "native" / "ggml" / "src" / "ggml-cuda"

N_CASES = {"score-mma": 14, "score-simt": 14, "attn": 11}  # the shapes of shapes.h, and three that are drawn
KERNELS = {
    "score-mma": "laprox-score-kernel.cuh",
    "score-simt": "laprox-score-kernel.cuh",
    "attn": "laprox-attn-kernel.cuh",
}
TYPES = {"0", "1", "2", "8", "30"}  # F32, F16, Q4_0, Q8_0, BF16


SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def build(folder: Path, *options: str) -> Path:
    """The driver; a kernel that lies in `folder` goes before the one of native/."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: it compiles the kernels for the CPU")
    if not GGML.is_dir():
        pytest.skip("vendor/llama.cpp was not laid out: run python scripts/vendor.py")
    program = folder / "cuda_driver"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", *options]
    command += ["-include", "cuda_shim.h", f"-I{folder}", "-I.", f"-I{CUDA}", f"-I{GGML}"]
    command += ["-o", str(program), "cuda_driver.cpp", "cuda_shim.cpp"]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return program


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gpu_emulation"), *SANITIZE)


def run(driver: Path, kind: str, n_cases: int, seed: int) -> list[dict[str, str]]:
    """What each case was."""
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(driver), kind, str(n_cases), str(seed)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith("ok ")]
    assert done.returncode == 0 and wrong == ["0 wrong"], "\n".join(wrong)
    assert len(lines) == n_cases + 1
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines[:-1]]


@pytest.mark.parametrize("kind", N_CASES)
def test_kernels_agree_with_float64(driver: Path, kind: str) -> None:
    cases = run(driver, kind, N_CASES[kind], seed=1)

    def seen(*names: str) -> set[tuple[str, ...]]:
        return {tuple(case[name] for name in names) for case in cases}

    assert {k for (k,) in seen("k")} == TYPES == {v for (v,) in seen("v")} - {"-1"}
    assert any(int(case["chunks"]) > 2 for case in cases) and {cap for (cap,) in seen("cap")} > {"0"}
    assert {sinks for (sinks,) in seen("sinks")} == {"0", "1"}
    if kind == "attn":
        assert {chunk for (chunk,) in seen("chunk")} >= {"64", "128"}
        return
    assert seen("stat", "group") == {(stat, group) for stat in "012" for group in "01"}
    assert {mask for (mask,) in seen("mask")} == {"0", "1"} and any(int(case["tiles"]) > 1 for case in cases)
    assert "1" in {wide for (wide,) in seen("wide")}  # q, and K or V, beyond the range of F16
    default = {"stat": "0", "group": "0", "d_k": "128", "d_v": "128", "k": "1", "v": "1"}
    assert any(default.items() <= case.items() and int(case["chunks"]) > 2 for case in cases)


def test_refusals(driver: Path) -> None:
    """What the kernels cannot do is refused by supports_op, one thing at a time; what they can is not."""
    done = subprocess.run([str(driver), "refusals"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\nok ") > 40 and "WRONG" not in done.stdout


def barriers() -> list[tuple[str, int]]:
    return [
        (name, i)
        for name in sorted(set(KERNELS.values()))
        for i in range(len(re.findall(r"__sync(?:threads|warp)\(\);", (CUDA / name).read_text(encoding="utf-8"))))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name, i", barriers())
def test_no_barrier_may_be_missing(tmp_path: Path, name: str, i: int) -> None:
    """What the shim is there for: without any one barrier of the kernels, the shapes of shapes.h go wrong."""
    text = (CUDA / name).read_text(encoding="utf-8")
    found = list(re.finditer(r"__sync(?:threads|warp)\(\);", text))[i]
    (tmp_path / name).write_text(text[: found.start()] + text[found.end() :], encoding="utf-8")
    program = build(tmp_path)
    for kind in (kind for kind in KERNELS if KERNELS[kind] == name):
        done = subprocess.run([str(program), kind, str(N_CASES[kind]), "1"], capture_output=True, text=True)
        if done.returncode != 0:
            return
    pytest.fail(
        f"{name} without its barrier {i} is as right as with it: {text[found.start() - 200 : found.end() + 200]}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300, 100))
@pytest.mark.parametrize("kind", N_CASES)
def test_kernels_agree_with_float64_on_many_shapes(driver: Path, kind: str, seed: int) -> None:
    run(driver, kind, 64, seed)
