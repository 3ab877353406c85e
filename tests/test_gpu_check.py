"""scripts/gpu_check.py on a machine without a GPU: what it makes of the programs' output, and that its steps run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

TESTED = """Testing 1 devices
  LAPROX_SCORE(d=64): OK
  LAPROX_SCORE(d=72): not supported [CUDA0]
  1/1 tests passed
  Backend CUDA0: OK
"""
TIMED = """
  LAPROX_SCORE(d=128,n_head_kv=8,n_gqa=4,n_kv=8192,w=32,type_k=f16,type_v=f16):    100 runs -   150.00 us/run
  LAPROX_ATTN(d=64,n_head_kv=3,n_gqa=3,n_mask=1024,n_tokens=1,type_k=f16,type_v=f16):    100 runs -     5.00 us/run
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    if not (ROOT / "scripts" / "gpu_check.py").exists():
        pytest.skip("no checkout: scripts/ is not installed")
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec and spec.loader
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(folder: Path, text: str, status: int = 0) -> str:
    file = folder / "ops"
    file.write_text(f"#!{sys.executable}\nprint({text!r})\nraise SystemExit({status})\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def test_what_the_ops_say(script: ModuleType, tmp_path: Path) -> None:
    score, _ = script.test_ops(program(tmp_path, TESTED))
    assert score.ok and score.seen == "1 of 1 cases, 1 refused"
    assert not script.test_ops(program(tmp_path, TESTED, status=1))[0].ok
    assert not script.test_ops(program(tmp_path, "nothing"))[0].ok


@pytest.mark.parametrize("bandwidth", [1e12, 4e12])
def test_times_against_the_floor(script: ModuleType, tmp_path: Path, bandwidth: float) -> None:
    score, attn = script.time_ops(program(tmp_path, TIMED), bandwidth)
    floor = 3 * 8192 * 8 * 128 * 2 / bandwidth * 1e6  # K twice and V once, in F16
    assert score.data["floor_us"] == pytest.approx(floor) and score.ok == (2 * floor >= 150)
    assert attn.ok is None and attn.data["us"] == 5


def test_steps_run_without_a_gpu(script: ModuleType, smol_path: Path) -> None:
    class Cuda:
        held = 1 << 40

        def used(self) -> int:
            self.held -= 1 << 20
            return self.held

    tokens = list(range(100, 900))
    same, took = script.agreement(str(smol_path), tokens)
    assert same.ok and same.data == {"mean": 1.0, "min": 1.0, "heads": 90}
    assert "KVStats" in took.seen
    freed = script.memory(str(smol_path), tokens, Cuda())
    assert freed.data["before"] - freed.data["after"] == 1 << 20 and freed.data["said"] > 0
