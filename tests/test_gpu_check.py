"""scripts/gpu_check.py on a machine without a GPU: what it makes of the programs' output, and that its steps run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from script import SCRIPTS, load

from laprox_llamacpp.evaluate import bench
from laprox_llamacpp.stats import KVStats

ROOT = Path(__file__).parents[1]

TESTED = """Testing 1 devices
  LAPROX_SCORE(d=64): OK
  LAPROX_SCORE(d=80): OK
  2/2 tests passed
  Backend CUDA0: OK
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    if not (ROOT / "scripts" / "gpu_check.py").exists():
        pytest.skip("no checkout: scripts/ is not installed")
    return load("gpu_check")


def program(folder: Path, text: str, status: int = 0, name: str = "ops") -> str:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!{sys.executable}\nprint({text!r})\nraise SystemExit({status})\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def test_what_the_ops_say(script: ModuleType, tmp_path: Path) -> None:
    def check(text: str, status: int = 0) -> Any:
        return script.test_ops(program(tmp_path, text, status))[0]

    passed = check(TESTED)
    assert passed.ok and passed.seen == "2 of 2 cases, 0 refused"
    assert not check(TESTED, status=1).ok
    assert not check("nothing").ok
    refused = check(TESTED.replace("d=80): OK", "d=80): not supported [CUDA0]").replace("2/2", "1/1"))
    assert not refused.ok and refused.seen == "1 of 1 cases, 1 refused"
    assert not check("  LAPROX_SCORE(d=64): not supported [CUDA0]\n  0/0 tests passed\n").ok
    assert not check("  0/0 tests passed\n").ok
    assert not check(TESTED.replace("2/2", "1/2")).ok


def timed(script: ModuleType, us: float, leave_out: tuple[int, int, int] | None = None) -> str:
    """What `test-backend-ops perf` prints: the shapes of both ops, `us` microseconds each."""
    lines = []
    for op, n in (("LAPROX_SCORE", "n_kv"), ("LAPROX_ATTN", "n_mask")):
        for heads, d, n_rows in sorted(script.TIMED[op], key=lambda shape: shape[2]):
            if (heads, d, n_rows) != leave_out:
                lines.append(
                    f"  {op}(d={d},n_head_kv={heads},n_gqa=4,{n}={n_rows},type_k=f16): 100 runs - {us:.2f} us/run -"
                )
    return "\n".join(lines)


@pytest.mark.parametrize("bandwidth", [1e12, 4e12])
def test_times_against_the_floor(script: ModuleType, tmp_path: Path, bandwidth: float) -> None:
    checks = script.time_ops(program(tmp_path, timed(script, 1000.0)), bandwidth)
    assert len(checks) == 8
    judged = [check for check in checks if check.ok is not None]
    assert [check.data["case"]["n_kv"] for check in judged] == ["8192", "32768"]  # 256 MiB of K each, in no card's L2
    floor = 3 * (256 << 20) / bandwidth * 1e6  # K twice and V once
    for check in judged:
        assert check.data["floor_us"] == pytest.approx(floor) and check.ok == (2 * floor >= 1000)


def test_a_time_that_is_missing_is_a_failure(script: ModuleType, tmp_path: Path) -> None:
    for left_out in ((32, 128, 32768), (3, 64, 1024)):
        checks = script.time_ops(program(tmp_path, timed(script, 1.0, left_out)), 1e12)
        assert len(checks) == 8 and [check.ok for check in checks].count(False) == 1
        assert f"{left_out[0]} x {left_out[1]}" in next(check.seen for check in checks if check.ok is False)
    assert [check.ok for check in script.time_ops(program(tmp_path, "nothing"), 1e12)] == [False, False]


def test_decode_speed_beyond_training(script: ModuleType, smol_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for length in script.LENGTHS:  # up to 32K, on a model that was trained for 8K
        assert script.speed(str(smol_path), length).lengths == [length]
    with pytest.raises(ValueError, match="trained for 8192"):
        bench.Bench(smol_path, [script.LENGTHS[-1]], ["laprox"], ["0.05"])
    monkeypatch.setattr(bench, "n_ctx_train", lambda _path: 256)
    check = script.decode(str(smol_path), 512)
    assert check.ok is None and check.what == "decode, 512 tokens at 5%"
    assert re.fullmatch(r"[\d.]+ -> [\d.]+ tokens/s \([\d.]+x, \d+% of the limit\)", check.seen)


@pytest.mark.slow
def test_decode_speed_at_a_length_beyond_training(script: ModuleType, smol_path: Path) -> None:
    assert script.decode(str(smol_path), 8192).data["evicted"]["rows_per_head"] < 500


def test_a_step_that_fails_does_not_stop_the_others(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Any:
        raise OSError("no memory")

    good = script.Check("good", "1", True)
    out = tmp_path / "out.json"
    checks = script.run({"a": lambda: good, "b": fails, "c": lambda: [good, good]}, out)
    assert [(c.what, c.ok) for c in checks] == [("good", True), ("b", False), ("good", True), ("good", True)]
    assert [c["what"] for c in json.loads(out.read_text())] == ["good", "b", "good", "good"]
    assert "FAILED b: OSError: no memory" in capsys.readouterr().out


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs gpu_check.sh in a folder with nvidia-smi and a Python that says what it is called with."""
    program(tmp_path, "9.0", name="bin/nvidia-smi")
    for tool in ("python", "nvcc", "cmake"):
        file = tmp_path / "bin" / tool
        file.write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$LLAMA_CPP_LIB_PATH" "$@"\n', encoding="utf-8")
        file.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": path, "PYTHON": str(tmp_path / "bin" / "python"), **env}
        return subprocess.run(
            ["bash", str(SCRIPTS / "gpu_check.sh"), *args], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize("absolute", [False, True])
def test_libraries_from_elsewhere(
    script: ModuleType, shell: Callable[..., Any], tmp_path: Path, absolute: bool
) -> None:
    lib = tmp_path / "carried"
    lib.mkdir()
    given = str(lib) if absolute else "carried"
    done = shell(LIBRARIES=given)
    assert done.returncode == 2 and f"no libllama.so in {lib}" in done.stderr
    for name in ("libllama.so", "test-backend-ops"):
        (lib / name).touch()
    (tmp_path / "my.gguf").touch()
    done = shell("my.gguf", "out.json", LIBRARIES=given)
    ops, model, out = str(lib / "test-backend-ops"), str(tmp_path / "my.gguf"), str(tmp_path / "out.json")
    want = ["python", str(lib), "scripts/gpu_check.py", "--ops", ops, "--model", model, "--out", out]
    assert (done.returncode, done.stdout.splitlines()) == (0, want)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_build_of_its_own(script: ModuleType, shell: Callable[..., Any], tmp_path: Path, absolute: bool) -> None:
    build = tmp_path / "build" if absolute else ROOT / "build" / "no such thing"
    (tmp_path / "build" / "bin").mkdir(parents=True)
    for name in ("libllama.so", "test-backend-ops"):
        (tmp_path / "build" / "bin" / name).touch()
    done = shell(BUILD=str(build) if absolute else "build/no such thing")
    log = (tmp_path / "gpu_check.log").read_text(encoding="utf-8").splitlines()
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in log and str(build) in [str(ROOT / line) for line in log]
    if absolute:
        assert done.returncode == 0 and str(build / "bin") in done.stdout.splitlines()
        assert "smollm2-135m" in done.stdout.splitlines()  # no file of that name: a known model
    else:
        assert done.returncode == 2 and "no libllama.so in build/no such thing/bin" in done.stderr


def test_what_is_carried_is_all_that_is_required(script: ModuleType) -> None:
    """The recipe at the head of gpu_check.sh against what the packages say that they need."""
    head = (SCRIPTS / "gpu_check.sh").read_text(encoding="utf-8")
    (carried,) = re.findall(r"pip wheel --wheel-dir carry ([^-].*)", head)  # with what these need
    (installed,) = re.findall(r"--find-links carry (.*)", head)

    def needs(package: str) -> set[str]:
        found = metadata.requires(package) or []
        return {re.split(r"[^\w-]", line)[0].replace("_", "-").lower() for line in found if "extra ==" not in line}

    bindings = {"llama-cpp-python"}
    assert needs("laprox-llamacpp") | needs("llama-cpp-python") <= set(carried.split()) | bindings
    assert set(installed.split()) | needs("llama-cpp-python") >= needs("laprox-llamacpp")


def test_steps_run_without_a_gpu(script: ModuleType, smol_path: Path) -> None:
    class Cuda:
        held = 1 << 40

        def used(self) -> int:
            self.held -= 1 << 20
            return self.held

    tokens = list(range(100, 900))
    same, ours, took = script.agreement(str(smol_path), tokens)
    assert same.ok and same.data == {"mean": 1.0, "min": 1.0, "heads": 90}
    assert ours.ok is False and ours.seen == "CPU: scores fused, decode per_head"  # what a GPU must not say
    assert "KVStats" in took.seen
    freed = script.memory(str(smol_path), tokens, Cuda())
    assert freed.data["before"] - freed.data["after"] == 1 << 20 and freed.data["said"] > 0


@pytest.mark.parametrize(
    "paths, ok",
    [
        (("fused", "ragged_op", ("CUDA0",)), True),
        (("composed", "ragged_op", ("CUDA0",)), False),
        (("fused", "per_head", ("CUDA0",)), False),
        (("fused", "ragged_op", ("CPU", "CUDA0")), False),
    ],
)
def test_our_ops_must_have_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, paths: tuple[str, str, tuple[str, ...]], ok: bool
) -> None:
    offloaded = []

    class Fake:
        def __init__(self, _model: str, **options: Any) -> None:
            offloaded.append((options["n_gpu_layers"], options["op_offload"]))

        def eval(self, _tokens: list[int]) -> None: ...

        def close(self) -> None: ...

        def kv_kept(self) -> dict[tuple[int, int], Any]:
            return {(0, 0): np.arange(5)}

        def kv_stats(self) -> KVStats:
            return KVStats(score_path=paths[0], attention_path=paths[1], devices=paths[2])

    monkeypatch.setattr(script, "Llama", Fake)
    _, ours, _ = script.agreement("model", [1, 2])
    assert ours.ok is ok
    assert offloaded == [(0, False), (-1, True)]
