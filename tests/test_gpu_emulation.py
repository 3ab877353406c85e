"""The CUDA kernels, compiled for the CPU by a shim of threads, warps and barriers, against float64 (docs/gpu.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "gpu_emulation"
GGML = ROOT / "vendor" / "llama.cpp" / "ggml" / "include"

KINDS = ["score-mma", "score-simt", "attn"]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: it compiles the kernels for the CPU")
    if not GGML.is_dir():
        pytest.skip("vendor/llama.cpp was not laid out: run python scripts/vendor.py")
    program = tmp_path_factory.mktemp("gpu_emulation") / "cuda_driver"
    command = [compiler, "-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-include", "cuda_shim.h"]
    command += ["-I.", f"-I{ROOT / 'native' / 'ggml' / 'src' / 'ggml-cuda'}", f"-I{GGML}"]
    command += ["-o", str(program), "cuda_driver.cpp", "cuda_shim.cpp"]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return program


def run(driver: Path, kind: str, n_cases: int, seed: int) -> None:
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(driver), kind, str(n_cases), str(seed)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith("ok ")]
    assert done.returncode == 0 and wrong == ["0 wrong"], "\n".join(wrong)
    assert len(lines) == n_cases + 1


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_float64(driver: Path, kind: str) -> None:
    run(driver, kind, 8 if kind == "attn" else 7, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300, 100))
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_float64_on_many_shapes(driver: Path, kind: str, seed: int) -> None:
    run(driver, kind, 64, seed)
