"""scripts/gpu_check.py on a machine without a GPU: what it makes of the programs' output, and that its steps run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from script import load

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


def program(folder: Path, text: str, status: int = 0) -> str:
    file = folder / "ops"
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
