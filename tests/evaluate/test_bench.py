"""The benchmark: what is measured, in which order, its command, and what a report shows of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import HEADS, fails

from laprox_llamacpp import cli
from laprox_llamacpp.errors import LaproxError
from laprox_llamacpp.evaluate import bench, bench_cache, bench_report
from laprox_llamacpp.evaluate.plots import Look

TESTS = Path(__file__).resolve().parents[1]
MIB = 1 << 20


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
    assert evicted["kv_bytes_peak"] >= HEADS * (100 + 50) * 256  # while rows are moved both caches are there
    assert all(len(c["decode_ms"]) == 2 and c["peak_rss"] > 60 << 20 for c in (full, evicted, limit))
    for ratio, other in (("speedup", full), ("of_limit", limit)):
        assert group[ratio] == pytest.approx(np.median(np.divide(other["decode_ms"], evicted["decode_ms"])))
    printed = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct.Q4_1.gguf, f16 cache, 1 threads" in printed
    line = printed.splitlines()[-1]
    assert line.startswith("| 100 | `laprox@0.5` | 50 |") and f"{group['speedup']:.2f}x" in line
    kv = (HEADS * 100 * 256, evicted["kv_bytes"], evicted["kv_bytes_peak"])
    assert " / ".join(f"{n / MIB:.1f}" for n in kv) in line
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


def test_peak_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"A": 900, "B": 500}
    looks = []

    def look() -> dict[str, int]:
        looks.append(dict(free))
        return dict(free)

    monkeypatch.setattr(bench_cache, "free_memory", look)
    devices = bench_cache.DeviceMemory()
    assert devices.peak() == {"A": 0, "B": 0}
    with devices.watched():
        free.update(A=200, B=450)  # for a moment, and nobody asks
        until = time.monotonic() + 20
        while {"A": 200, "B": 450} not in looks and time.monotonic() < until:
            time.sleep(0.001)
        free.update(A=800, B=500)
    assert devices.peak() == {"A": 700, "B": 50}
    n = len(looks)
    time.sleep(0.02)
    assert len(looks) == n  # nobody looks while decoding is timed
    free.update(A=100, B=470)
    assert devices.peak() == {"A": 800, "B": 50}


@pytest.mark.parametrize("on_device", [True, False])
def test_memory_of_a_device(smol_path: Path, tmp_path: Path, on_device: bool) -> None:
    from guard import build  # its device says that 8 GiB are free, always

    what = {
        "model": str(smol_path), "n_prompt": 60, "n_decode": 1, "kv_type": "f16", "n_threads": 1,
        "n_gpu_layers": 99 if on_device else 0, "kv_evict": "laprox", "budget": "0.8",
    }  # fmt: skip
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from guard import Guard; Guard({str(build(tmp_path))!r}); "
    code = (code if on_device else "") + (
        "from laprox_llamacpp.evaluate import bench_cache; print(bench_cache.free_memory()); bench_cache.main()"
    )
    given = json.dumps(what) + "\n{}\n"
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=600)
    free, *answers = done.stdout.splitlines()
    assert free == str({"GUARD0": 8 << 30} if on_device else {}), done.stderr
    prompt, step = map(json.loads, answers)
    assert prompt["device_peak"] == step["device_peak"] == ({"GUARD0": 0} if on_device else None)


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
        (["--model", __file__], "expected b'GGUF'"),
        (["--tokens", "100,8192"], "8192 tokens and 24 more need a context of 8216, the model was trained for 8192"),
    ],
)
def test_errors_of_bench(capfd: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert says in fails(capfd, "bench", *args)


# ---- report


def measured(lengths: Sequence[int], device: bool = False) -> dict[str, Any]:
    """A result of numbers that differ: two methods at two budgets, three rounds."""
    made = np.random.default_rng(3)

    def cache(n_prompt: int) -> dict[str, Any]:
        return {
            "n_prompt": n_prompt, "prefill_s": made.uniform(1, 9), "peak_rss": int(made.integers(MIB, 900 * MIB)),
            "decode_ms": made.uniform(5, 50, 3).tolist(),
            "device_peak": {d: int(made.integers(MIB, 900 * MIB)) for d in "AB"} if device else None,
        }  # fmt: skip

    groups = []
    for n in lengths:
        for method in ("laprox:pool=none", "snapkv"):
            for budget in ("0.05", "96"):
                more = ("kv_bytes_full", "kv_bytes", "kv_bytes_peak", "kv_bytes_reserve")
                evicted = {**cache(n), "rows_per_head": 96.4, **{k: int(made.integers(MIB, 900 * MIB)) for k in more}}
                evicted.update({k: made.uniform(1, 90) for k in ("score_ms", "plan_ms", "move_ms")})
                groups.append({
                    "tokens": n, "cell": f"{method}@{budget}", "full": cache(n), "evicted": evicted,
                    "limit": cache(96), "speedup": made.uniform(1, 5), "of_limit": made.uniform(0.5, 1),
                })  # fmt: skip
    about = {"kv_type": "q8_0", "n_threads": 3, "n_gpu_layers": -1 if device else 0}
    return {"model": "some.gguf", "bench": about, "groups": groups}


def test_table_and_csv_of_a_result() -> None:
    result = measured([512, 1024], device=True)
    g = result["groups"][-1]
    caches = [g[c] for c in ("full", "evicted", "limit")]
    head, rows = bench_report.table(result)
    line = dict(zip(head, rows[-1]))
    assert len(rows) == 8 and {len(r) for r in rows} == {len(head)}
    assert line["peak on devices, full / evicted / limit MiB"] == " / ".join(
        f"{(c['device_peak']['A'] + c['device_peak']['B']) / MIB:.0f}" for c in caches
    )
    assert bench_report.table(measured([512]))[0] == head[:-1]  # no device, no column

    head, values = bench_report.csv(result)
    row = dict(zip(head, values[-1]))
    assert {len(v) for v in values} == {len(head)}
    assert (row["method"], row["budget"], row["tokens"], row["n_gpu_layers"]) == ("snapkv", "96", 1024, -1)
    for name, c in zip(("full", "evicted", "limit"), caches):
        assert row[f"{name}_decode_ms"] == np.median(c["decode_ms"])
        assert row[f"{name}_peak_rss"] == c["peak_rss"]
        assert row[f"{name}_device_peak"] == sum(c["device_peak"].values())
    for key in ("score_ms", "plan_ms", "move_ms", "kv_bytes", "kv_bytes_full", "kv_bytes_peak", "kv_bytes_reserve"):
        assert row[key] == g["evicted"][key]
    assert (row["full_prefill_s"], row["evicted_prefill_s"]) == (g["full"]["prefill_s"], g["evicted"]["prefill_s"])
    assert (row["speedup"], row["of_limit"], row["rows_per_head"]) == (g["speedup"], g["of_limit"], 96.4)
    assert dict(zip(head, bench_report.csv(measured([512]))[1][0]))["full_device_peak"] == ""
    assert bench_report.title(result) == ("speed and memory, some.gguf, q8_0 cache, 3 threads, all layers on the GPU")


def test_figures_of_a_result() -> None:
    result = measured([512, 3000, 4096], device=True)
    assert bench_report.methods(result) == ["laprox:pool=none", "snapkv"]
    looks = Look.of(bench_report.methods(result))
    plots = {p.name: p for p in bench_report.plots(result, looks)}
    assert list(plots) == ["decode", "prompt", "eviction", "kv", "memory", "device"]
    groups = [g for g in result["groups"] if g["cell"].endswith("@96")]
    snapkv = [g for g in groups if g["cell"] == "snapkv@96"]

    def speed(g: dict[str, Any], which: str) -> float:
        return float(1000 / np.median(g[which]["decode_ms"]))

    shown = {name: [(line.get_color(), list(line.get_ydata())) for line in p.figure.axes[1].lines]
             for name, p in plots.items()}  # fmt: skip
    full = [np.mean([speed(g, "full") for g in groups if g["tokens"] == n]) for n in (512, 3000, 4096)]  # of two
    color = looks["snapkv"].color
    for want in (("black", full), (color, [speed(g, "evicted") for g in snapkv]),
                 (color, [speed(g, "limit") for g in snapkv])):  # fmt: skip
        assert any(c == want[0] and y == pytest.approx(want[1]) for c, y in shown["decode"]), want
    for name, of in {
        "prompt": lambda g: g["evicted"]["prefill_s"],
        "eviction": lambda g: g["evicted"]["score_ms"] + g["evicted"]["plan_ms"] + g["evicted"]["move_ms"],
        "kv": lambda g: g["evicted"]["kv_bytes_peak"] / MIB,
        "memory": lambda g: g["limit"]["peak_rss"] / MIB,
        "device": lambda g: sum(g["evicted"]["device_peak"].values()) / MIB,
    }.items():
        assert any(c == color and y == pytest.approx([of(g) for g in snapkv]) for c, y in shown[name]), name
    for p in plots.values():
        titles = [a.get_title() for a in p.figure.axes]
        ticks = [t.get_text() for t in p.figure.axes[0].get_xticklabels()]
        assert titles == ["budget 5%", "budget 96"] and ticks == ["512", "3000", "4K"]
        assert p.figure.get_figwidth() <= 7.5


def test_figures_of_a_single_length() -> None:
    result = measured([2048])
    plots = {p.name: p for p in bench_report.plots(result, Look.of(bench_report.methods(result)))}
    assert list(plots) == ["decode", "prompt", "eviction", "kv", "memory"]
    axis = plots["kv"].figure.axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["full cache", "laprox:pool=none", "snapkv"]
    at_5 = [g["evicted"] for g in result["groups"] if g["cell"].endswith("@0.05")]
    full = np.mean([e["kv_bytes_full"] for e in at_5])
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([n / MIB for n in (full, *(e["kv_bytes"] for e in at_5))])
    peaks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines]
    assert peaks == [(pytest.approx(e["kv_bytes_peak"] / MIB), i) for i, e in enumerate(at_5, 1)]
    assert len(plots["eviction"].figure.axes[0].patches) == 2  # the full cache evicts nothing


def test_results_of_a_folder(tmp_path: Path) -> None:
    result = measured([512])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bench.json").write_text(json.dumps(result))
    (tmp_path / "a.json").write_text(json.dumps({**result, "groups": []}))  # stopped before the first was done
    (tmp_path / "other.json").write_text('{"format": 1}')
    (tmp_path / "run.json").write_text("{")  # of an evaluation
    (tmp_path / "cut.json").write_text("{")
    del result["groups"][0]["evicted"]
    (tmp_path / "lacks.json").write_text(json.dumps(result))
    found, unread = bench_report.read(tmp_path)
    assert [len(r["groups"]) for r in found] == [0, 4]
    assert bench_report.plots(found[0], Look.of([])) == []
    assert [Path(line.split(" could not be read as a benchmark (")[0]).name for line in unread] == [
        "cut.json", "lacks.json",
    ]  # fmt: skip
    assert "KeyError: 'evicted'" in unread[1]


def test_a_report_of_benchmarks_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, lengths in enumerate(([512, 1024], [2048])):
        (tmp_path / f"{i}.json").write_text(json.dumps(measured(lengths)))
    (tmp_path / "torn.json").write_text('{"bench": 1, "groups"')
    assert cli.main(["report", str(tmp_path)]) == 0
    out = tmp_path / "report"
    page, tables = ((out / name).read_text(encoding="utf-8") for name in ("index.html", "tables.md"))
    for i in (1, 2):
        for name in ("decode", "prompt", "eviction", "kv", "memory"):
            for suffix in ("png", "svg"):
                assert (out / f"bench-{i}-some-{name}.{suffix}").exists()
    assert page.count("speed and memory, some.gguf, q8_0 cache, 3 threads") == 2 * 2 and "torn.json" in page
    assert tables.count("| 2048 |") == 4 and tables.count("| 512 |") == 4
    assert len((out / "bench.csv").read_text(encoding="utf-8").splitlines()) == 1 + 4 * 3
