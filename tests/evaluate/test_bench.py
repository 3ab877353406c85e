"""The benchmark: what is measured, in which order, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import HEADS, fails

from laprox_llamacpp import cli
from laprox_llamacpp.errors import LaproxError
from laprox_llamacpp.evaluate import bench


def test_bench(smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    args = ["bench", "--model", str(smol_path), "--tokens", "100", "--budgets", "0.5", "--rounds", "2"]
    assert cli.main([*args, "--decode", "2", "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (group,) = result["groups"]
    full, evicted, limit = (group[name] for name in ("full", "evicted", "limit"))
    assert (group["tokens"], group["cell"], evicted["rows_per_head"]) == (100, "laprox@0.5", 50)
    assert (full["n_prompt"], evicted["n_prompt"], limit["n_prompt"]) == (100, 100, 50)
    assert evicted["kv_bytes_full"] == HEADS * 100 * 256  # 64 f16 each of K and V
    assert evicted["kv_bytes"] - evicted["kv_bytes_reserve"] == HEADS * 50 * 256
    assert min(evicted[k] for k in ("score_ms", "plan_ms", "move_ms", "gram_ms", "prefill_s")) > 0
    assert all(len(c["decode_ms"]) == 2 and c["peak_rss"] > 60 << 20 for c in (full, evicted, limit))
    for ratio, other in (("speedup", full), ("of_limit", limit)):
        assert group[ratio] == pytest.approx(np.median(np.divide(other["decode_ms"], evicted["decode_ms"])))
    printed = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct.Q4_1.gguf, f16 cache, 1 threads" in printed
    line = printed.splitlines()[-1]
    assert line.startswith("| 100 | `laprox@0.5` | 50 |") and f"{group['speedup']:.2f}x" in line
    assert f"{HEADS * 100 * 256 / (1 << 20):.1f} / {evicted['kv_bytes'] / (1 << 20):.1f}" in line
    assert line.count("|") == printed.splitlines()[-2].count("|") == printed.splitlines()[-3].count("|")


def test_order_of_a_bench(smol_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[str] = []
    rounds: list[str] = []

    class Fake:
        def __init__(self, spec: Any, n_prompt: int, policy: Any = None, budget: Any = None) -> None:
            self.n_prompt, self.decode_ms = n_prompt, []
            self.name = f"{policy}@{budget}" if policy else f"full {n_prompt}"
            kept = min(n_prompt, round(float(str(budget)) * n_prompt)) if policy else 0
            self.facts = {"rows_per_head": float(kept)}
            live.append(self.name)

        def decode(self) -> None:
            rounds.append(self.name)
            self.decode_ms.append(1.0 if "@" in self.name else 3.0)

        def measured(self) -> dict[str, Any]:
            return {"decode_ms": self.decode_ms}

        def close(self) -> None:
            live.remove(self.name)

    monkeypatch.setattr(bench, "Cache", Fake)
    told: list[tuple[str, int]] = []
    spec = bench.Bench(smol_path, [200, 400], ["laprox", "snapkv"], ["0.2", "1.0"], rounds=3)
    result = bench.run(spec, on_cell=lambda what, done: told.append((what, done)))
    assert live == []
    assert told[0] == ("laprox@0.2, 200 tokens", 0) and told[-1] == ("snapkv@1.0, 400 tokens", 7)
    one = ["full 200", "laprox@0.2", "full 40"]
    assert rounds[:9] == [*one, *one[1:], one[0], one[2], *one[:2]]  # each goes first once
    whole = ["full 200", "laprox@1.0", "laprox@1.0", "full 200", "full 200", "laprox@1.0"]
    assert rounds[9:15] == whole  # nothing is evicted: the full cache is the limit
    assert [(g["tokens"], g["cell"]) for g in result["groups"]][2:5] == [
        (200, "snapkv@0.2"), (200, "snapkv@1.0"), (400, "laprox@0.2"),
    ]  # fmt: skip
    assert {g["speedup"] for g in result["groups"]} == {g["of_limit"] for g in result["groups"]} == {3.0}


def test_a_cache_that_ends_early(smol_path: Path) -> None:
    spec = bench.Bench(smol_path, [40], ["laprox"], ["0.5"], n_decode=1)
    cache = bench.Cache(spec, 40)
    cache._process.kill()
    with pytest.raises(LaproxError, match=r"full cache of 40 tokens ended early \(killed: out of memory\?\)"):
        cache.decode()
    cache.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tokens", "many"], "--tokens is 'many', expected numbers with commas between"),
        (["--tokens", "32"], "lengths are [32], expected tokens beyond the window of 32"),
        (["--tokens", ""], "lengths are [], expected tokens"),
        (["--methods", "full"], "no methods, expected at least one such as laprox"),
        (["--methods", "laprox:speed=1"], "unknown option 'speed'"),
        (["--methods", "duo:profile=/no/such.json"], "no duo profile"),
        (["--budgets", "7%%"], "budget is '7%%'"),
        (["--kv-type", "q9"], "--kv-type 'q9' is unknown"),
        (["--rounds", "0"], "--rounds"),
        (["--model", "/no/such.gguf"], "/no/such.gguf"),
        (["--model", __file__], "full cache, 2048 tokens: ValueError:"),
    ],
)
def test_errors_of_bench(capfd: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert says in fails(capfd, "bench", *args)
