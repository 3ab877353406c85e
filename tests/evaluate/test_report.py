"""Reports are whole, refer to nothing outside, and show what the records say."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from folders import BUDGETS, METHODS, folder
from pages import Page

from laprox_llamacpp import cli
from laprox_llamacpp.evaluate import stats
from laprox_llamacpp.evaluate.runner import Run, run
from laprox_llamacpp.evaluate.tasks.needle import Needle


def report(tmp_path: Path) -> Page:
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(cli.cli, ["report", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    out = tmp_path / "report"
    assert done.output.strip() == str(out / "index.html")
    return Page((out / "index.html").read_text(encoding="utf-8"))


def test_report_has_every_figure_table_and_file(tmp_path: Path) -> None:
    records = folder(tmp_path, kv_types=("f16", "q4_0"))
    page = report(tmp_path)
    out = tmp_path / "report"
    figures = {
        f"needle-m-256-{x}"
        for x in ("bytes", *(f"{y}-{t}" for y in ("budget", "depth", "turn") for t in ("f16", "q4_0")))
    }
    assert {f.stem for f in out.glob("*.png")} == {f.stem for f in out.glob("*.svg")} == figures
    assert page.tags.count("svg") == len(figures)
    text = " ".join(page.words)
    for part in (
        "Paired differences of score to laprox", "Paired differences of score to the full cache", "At equal bytes",
        "Costs", "eval <x> & y", "ab" * 32,
        "too few to rank", "5 of 6 samples (f16)", "sample 1 (multikey, depth 10%)",
    ):  # fmt: skip
        assert part in text, part
    cells = list(csv.DictReader((out / "cells.csv").open(encoding="utf-8")))
    row = next(r for r in cells if (r["kv_type"], r["method"], r["budget"], r["kind"], r["metric"])
               == ("q4_0", "random", "0.5", "all", "score"))  # fmt: skip
    values = [r["cells"]["random@0.5"]["score"] for r in records if r["kv_type"] == "q4_0" and r["index"] != 1]
    assert float(row["mean"]) == pytest.approx(statistics.mean(values))
    assert (row["n"], row["n_samples"], row["n_full_right"]) == ("5", "6", "5")
    differences = list(csv.DictReader((out / "differences.csv").open(encoding="utf-8")))
    assert {r["against"] for r in differences} == {"laprox", "full"}
    assert len(list(csv.DictReader((out / "lists.csv").open(encoding="utf-8")))) == 2 * 2 * (1 + 9)


def test_markdown_tables_against_the_records(tmp_path: Path) -> None:
    records = folder(tmp_path, n=22, kv_types=("f16", "q4_0"))
    report(tmp_path)
    lines = (tmp_path / "report" / "tables.md").read_text(encoding="utf-8").splitlines()
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    by_row = {tuple(row[:3]): row for row in reversed(tables)}  # the first table, not that of the differences

    def scores(cell: str, kind: str) -> list[float]:
        right = [r["index"] for r in records if r["kv_type"] == "f16" and r["cells"]["full"]["score"] == 1]
        return [
            r["cells"][cell]["score"]
            for r in records
            if r["kv_type"] == "q4_0" and r["index"] in right and kind in ("all", r["info"]["kind"])
        ]

    assert tables[0] == ["KV type", "kind", "method", "n", "all rows", "0.1", "64", "0.5"]
    for kind in ("all", "single", "multikey"):
        for method in METHODS:
            row = by_row["q4_0", kind, method]
            for at, budget in enumerate(BUDGETS, 5):
                x = scores(f"{method}@{budget}", kind)
                mean, error = statistics.fmean(x), statistics.stdev(x) / math.sqrt(len(x))
                assert row[at] == f"{mean:.2f} ± {error:.2f}" and row[3] == str(len(x))
    pairs = list(zip(scores("random@64", "all"), scores("laprox@64", "all")))
    got = next(row for row in tables if row[:3] == ["q4_0", "all", "random"] and len(row) == 7)
    assert float(got[5].split()[0].replace("−", "-")) == pytest.approx(
        statistics.fmean(a - b for a, b in pairs), abs=6e-3
    )


def test_cells_of_other_seeds_are_not_compared(tmp_path: Path) -> None:
    folder(tmp_path, "a", kv_types=("f16",))
    folder(tmp_path, "b", kv_types=("f16", "q4_0"), seed=2)
    found, _ = stats.read(tmp_path)
    assert [(e.options["seed"], e.kv_types, len(e.samples)) for e in found] == [
        (0, ["f16"], 6), (2, ["f16", "q4_0"], 12),
    ]  # fmt: skip
    page = report(tmp_path)
    titles = [w for w in page.words if w.startswith("needle, m.gguf, 256 tokens, seed=")]
    assert titles == [f"needle, m.gguf, 256 tokens, seed={s}" for s in (0, 2)] * 2  # contents and sections
    assert (tmp_path / "report" / "needle-m-256-b-budget-q4_0.png").exists()


@pytest.mark.parametrize("what", ["no samples", "unknown metric", "missing cells", "half a line", "broken neighbour"])
def test_report_of_unfinished_runs(tmp_path: Path, what: str) -> None:
    records = folder(tmp_path)
    file = tmp_path / "run" / "samples.jsonl"
    says = {
        "no samples": "no finished sample", "unknown metric": "No cell has a number for the metric 'score'",
        "missing cells": "too few", "half a line": "0 of 6", "broken neighbour": "could not be read as a run",
    }  # fmt: skip
    if what == "no samples":
        file.unlink()
    elif what == "unknown metric":
        for r in records:
            r["cells"] = {name: {"glory": "much"} for name in r["cells"]}
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif what == "missing cells":
        for i, r in enumerate(records):
            r["cells"] = {"full": r["cells"]["full"]} if i % 2 else {"snapkv:window=32@64": {"score": 1.0}}
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif what == "half a line":
        file.write_text(json.dumps(records[0])[:80])
        says["half a line"] = "no finished sample"
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "run.json").write_text("{")
    assert says[what] in " ".join(report(tmp_path).words)


def test_a_run_that_went_on_elsewhere_is_told(tmp_path: Path) -> None:
    folder(tmp_path)
    file = tmp_path / "run" / "run.json"
    head = json.loads(file.read_text())
    file.write_text(
        json.dumps({**head, "resumed": [{"command": "went on"}], "merged": [{"command": "from elsewhere"}]})
    )
    words = report(tmp_path).words
    assert [w for w in words if w in ("folder", "later, in")] == ["folder", "later, in", "later, in"]
    assert [w for w in words if w in ("went on", "from elsewhere")] == ["went on", "from elsewhere"]


def test_report_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert cli.main(["report", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "holds no run" in err and err.count("\n") == 1
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "laprox_llamacpp.evaluate.plots", raising=False)
    monkeypatch.delattr("laprox_llamacpp.evaluate.plots", raising=False)
    assert cli.main(["report", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "pip install matplotlib" in err and err.count("\n") == 1


def test_report_of_a_real_run(tmp_path: Path, smol_path: Path) -> None:
    task = Needle(tokens=128, depths="10+90", digits=3, open_answer="yes", max_tokens=3)
    run(Run(task, smol_path, ["laprox", "snapkv"], ["0.4"], ["q8_0"], n_samples=2, n_threads=1), tmp_path / "run")
    text = " ".join(report(tmp_path).words)
    assert smol_path.name in text and "q8_0" in text and "Costs" in text
