"""Statistics against the statistics module; reports and pages of kept rows must be whole and refer to nothing."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from laprox_llamacpp import cli
from laprox_llamacpp.evaluate import kept, kept_page, stats, tables
from laprox_llamacpp.evaluate.cells import grid
from laprox_llamacpp.evaluate.runner import Run, run
from laprox_llamacpp.evaluate.stats import Key, Mean
from laprox_llamacpp.evaluate.tasks.needle import Needle

METHODS, BUDGETS = ["laprox", "snapkv:window=32", "random"], ["0.1", "64", "0.5"]
VOID = {"meta", "br", "input", "rect", "path", "use", "img", "hr"}


class Page(HTMLParser):
    """Parses strictly: elements close in order, ids are unique, nothing comes from outside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.tags: list[str] = []
        self.spans: list[str] = []
        self.words: list[str] = []
        self._span: str | None = None
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert all(ref.startswith("#") and ref[1:] in self.ids for ref in self.refs), self.refs

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [str(v) for k, v in attrs if k == "id"]
        self.refs += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]
        if tag == "span" and "data-i" in named:
            assert named["data-i"] == str(len(self.spans))
            self._span = ""

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag
        if tag == "span" and self._span is not None:
            self.spans.append(self._span)
            self._span = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._span is not None:
            self._span += data


def folder(
    root: Path, name: str = "run", kv_types: Sequence[str] = ("f16",), n: int = 6, task: str = "needle",
    metric: str = "score", higher: bool = True, seed: int = 0, **changed: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A run folder as `eval` leaves it, of random numbers; returns its records."""
    rng = random.Random(f"{name}/{seed}")
    cells = [f"{m}@{b}" for m in METHODS for b in BUDGETS]
    options = {"tokens": 256, "kind": "single+multikey", "depths": "10+90", "seed": seed, **changed}
    setup = {
        "task": task, "options": options, "metric": metric, "higher": higher, "model": "m.gguf",
        "model_sha256": "ab" * 32, "cells": cells, "kv_types": list(kv_types), "n_samples": n,
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    for i in range(n):
        solved = float(i != 1)
        for t in kv_types:
            size = {"f16": 1000, "q4_0": 281}[t]
            full = {metric: solved if t == "f16" else rng.random(), "kv_bytes": size, "rows": 90, "by_turn": [1.0, 0.5]}
            measured = {"full": full}
            for cell in cells:
                share = {"0.1": 0.1, "64": 0.25, "0.5": 0.5}[cell.split("@")[1]]
                measured[cell] = {
                    metric: rng.random(), "seen": None, "kv_bytes": round(size * share), "rows": round(90 * share),
                    "score_ms": rng.random(), "plan_ms": rng.random(), "by_turn": [rng.random(), rng.random()],
                }  # fmt: skip
            info = {"kind": ("single", "multikey")[i % 2], "depth": (0.1, 0.9)[i // 2 % 2]}
            records.append(
                {"index": i, "kv_type": t, "n_prompt": 256, "prefill_s": 0.5, "info": info, "cells": measured}
            )
    records.sort(key=lambda r: list(kv_types).index(r["kv_type"]))
    (root / name).mkdir(parents=True)
    (root / name / "run.json").write_text(json.dumps({"setup": setup, "made": {"command": "eval <x> & y"}}))
    (root / name / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def one(root: Path) -> stats.Experiment:
    experiments, unread = stats.read(root)
    assert len(experiments) == 1 and unread == []
    return experiments[0]


# ---- statistics


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_mean_and_standard_error(n: int) -> None:
    values = [random.Random(n).gauss(3, 2) for _ in range(n)]
    got = Mean.of(values)
    assert got.n == n
    if n == 0:
        assert math.isnan(got.mean)
    else:
        assert got.mean == pytest.approx(statistics.mean(values))
    if n < 2:
        assert math.isnan(got.sem)
    else:
        assert got.sem == pytest.approx(statistics.stdev(values) / n**0.5)


@pytest.mark.parametrize("against", ["laprox", "full"])
def test_paired_differences(tmp_path: Path, against: str) -> None:
    records = folder(tmp_path)
    found = one(tmp_path).differences(against)
    others = [m for m in METHODS if m != against]
    assert len(found) == len(others) * len(BUDGETS) * 3  # all, multikey, single
    for d in found:
        paired = []
        for r in records:
            if r["index"] == 1 or (d.kind != "all" and r["info"]["kind"] != d.kind):  # the full cache fails on 1
                continue
            other = "full" if against == "full" else f"laprox@{d.key.budget}"
            paired.append(r["cells"][d.key.name]["score"] - r["cells"][other]["score"])
        assert d.value.n == len(paired) == {"all": 5, "multikey": 2, "single": 3}[d.kind]
        assert d.value.mean == pytest.approx(statistics.mean(paired))
        assert d.value.sem == pytest.approx(statistics.stdev(paired) / len(paired) ** 0.5)
        assert not d.clear  # too few


def test_a_difference_is_clear_from_ten_samples_on() -> None:
    key, other = Key("f16", "snapkv", "0.1"), Key("f16", "laprox", "0.1")
    assert stats.Difference("all", key, other, Mean(10, -0.21, 0.1), 0.049).clear
    assert not stats.Difference("all", key, other, Mean(9, -0.21, 0.1), 0.049).clear
    assert not stats.Difference("all", key, other, Mean(10, -0.19, 0.1), 0.051).clear


@pytest.mark.parametrize("fewer, more, same", [(0, 4, 8), (0, 6, 0), (2, 9, 1), (3, 3, 2), (0, 0, 5)])
def test_chance_of_right_and_wrong_answers_by_all_signs(fewer: int, more: int, same: int) -> None:
    sums = [sum(signs) for signs in itertools.product((-1, 1), repeat=fewer + more)]
    want = sum(abs(s) >= more - fewer for s in sums) / len(sums)
    assert stats.chance([-1.0] * fewer + [1.0] * more + [0.0] * same) == pytest.approx(want)


@pytest.mark.parametrize("n", [2, 3, 10, 11, 40])
def test_chance_of_other_numbers_by_the_density_of_t(n: int) -> None:
    x = np.random.default_rng(n).normal(0.4, 1, n)
    t, df = x.mean() / (x.std(ddof=1) / math.sqrt(n)), n - 1
    u = (np.arange(200_000) + 0.5) / 200_000 * abs(t)  # midpoints from 0 to |t|
    scale = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    inside = 2 * float(np.mean(scale * (1 + u * u / df) ** (-(df + 1) / 2))) * abs(t)
    assert stats.chance(x.tolist()) == pytest.approx(1 - inside, abs=1e-6)


def test_chance_of_nothing() -> None:
    assert stats.chance([]) == stats.chance([0.3]) == stats.chance([0.0, 0.0]) == 1
    assert stats.chance([0.3, 0.3, 0.3]) == pytest.approx(0)


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


def test_equal_bytes_against_every_full_cache(tmp_path: Path) -> None:
    records = folder(tmp_path, n=22, kv_types=("f16", "q4_0"))
    e = one(tmp_path)
    table = next(t for t in tables.tables(e) if t.title.startswith("At equal bytes"))
    assert table.head[-2:] == ["minus full f16", "minus full q4_0"]
    assert [row[:4] for row in table.rows][:2] == [
        ["q4_0", "laprox", "0.1", "2.8%"], ["q4_0", "snapkv:window=32", "0.1", "2.8%"],
    ]  # fmt: skip
    at = {(r["kv_type"], r["index"]): r["cells"] for r in records}
    pairs = [(at["f16", i]["laprox@0.1"]["score"], at["q4_0", i]["full"]["score"]) for i in range(22) if i != 1]
    d = e.difference(Key("f16", "laprox", "0.1"), Key("q4_0", "full", ""))
    assert (d.value.n, d.value.mean) == (21, pytest.approx(statistics.fmean(a - b for a, b in pairs)))
    row = next(row for row in table.rows if row[:3] == ["f16", "laprox", "0.1"])
    assert float(row[-1].split()[0].replace("−", "-")) == pytest.approx(d.value.mean, abs=6e-3)
    full = next(row for row in table.rows if row[:2] == ["q4_0", "full cache"])
    assert full[3] == "28.1%" and full[-1] == ""


def test_notes_of_cells_and_of_references_are_told(tmp_path: Path) -> None:
    records = folder(tmp_path, task="continuation", metric="kl", higher=False, kv_types=("f16", "q4_0"))
    for r in records:
        for name in ("laprox@0.1", "random@0.1"):
            r["cells"][name]["note"] = "only the window is kept"
    write = (tmp_path / "run" / "samples.jsonl").write_text
    write("".join(json.dumps(r) + "\n" for r in records))
    notes = one(tmp_path).notes()
    assert "laprox@0.1, random@0.1: only the window is kept." in notes
    assert "kl on q4_0 is against that type's own full cache, not that of f16." in notes
    write("".join(json.dumps({**r, "reference": "f16"}) + "\n" for r in records))
    assert not any("own full cache" in note for note in one(tmp_path).notes())


def test_prompts_that_are_the_same_are_told(tmp_path: Path) -> None:
    records = folder(tmp_path, n=12)
    prompts = [{**r, "prompt_sha256": f"{r['index'] // 3}"} for r in records]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in prompts))
    assert any("12 samples (f16) have 4 different prompts" in note for note in one(tmp_path).notes())


def test_the_fewest_samples_of_a_cell_are_told(tmp_path: Path) -> None:
    records = folder(tmp_path, n=30)
    for r in records[4:]:
        del r["cells"]["laprox@0.1"]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert any("As few as 1 sample behind a cell" in note for note in one(tmp_path).notes())  # multikey


def test_nothing_solved_is_nothing_to_compare(tmp_path: Path) -> None:
    records = folder(tmp_path)
    for r in records:
        r["cells"]["full"]["score"] = 0.5
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert any(note.startswith("Nothing to compare") for note in one(tmp_path).notes())


def test_perplexity(tmp_path: Path) -> None:
    records = folder(tmp_path, task="continuation", metric="kl", higher=False)
    for r in records:
        for cell in r["cells"].values():
            cell["nll"] = 1 + cell["kl"]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    e = one(tmp_path)
    nll = [r["cells"]["random@64"]["nll"] for r in records]
    got = e.perplexity(Key("f16", "random", "64"))
    assert got.mean == pytest.approx(math.exp(statistics.fmean(nll)))
    assert got.sem == pytest.approx(got.mean * statistics.stdev(nll) / math.sqrt(len(nll)))
    found = {t.title: t for t in tables.tables(e)}
    assert "Perplexity by budget (lower is better)" in found
    assert "Paired differences of negative log-likelihood (nats) to laprox" in found


def test_the_widest_full_cache_decides_what_counts(tmp_path: Path) -> None:
    records = folder(tmp_path, kv_types=("q4_0", "f16"))
    e = one(tmp_path)
    assert e.kv_types == ["f16", "q4_0"]
    for t in e.kv_types:
        assert sorted(s.id[1] for s in e.counted(t)) == [0, 2, 3, 4, 5]
        assert len(e.of(t)) == 6
    small = [r["cells"]["full"]["score"] for r in records if r["kv_type"] == "q4_0" and r["index"] != 1]
    assert e.mean(Key("q4_0", "full", "")).mean == pytest.approx(statistics.mean(small))
    assert any("5 of 6 samples (f16), 5 of 6 samples (q4_0)" in note for note in e.notes())
    # bytes against the f16 full cache of 1000
    assert e.byte_share(Key("q4_0", "full", "")).mean == pytest.approx(0.281)
    assert e.byte_share(Key("q4_0", "laprox", "0.5")).mean == pytest.approx(0.140)
    assert e.byte_share(Key("f16", "laprox", "0.1")).mean == pytest.approx(0.1)


def test_nothing_is_left_out_of_other_tasks(tmp_path: Path) -> None:
    folder(tmp_path, task="multi_question")
    e = one(tmp_path)
    assert len(e.counted("f16")) == 6
    assert e.mean(Key("f16", "full", "")).mean == pytest.approx(5 / 6)


def test_budgets_sort_by_their_share(tmp_path: Path) -> None:
    folder(tmp_path)
    e = one(tmp_path)
    assert e.budgets == ["0.1", "64", "0.5"]
    assert [e.share(b) for b in e.budgets] == [0.1, 0.25, 0.5]  # 64 of 256 tokens
    assert e.share("100B") == pytest.approx(0.1)  # of 1000 bytes
    assert math.isnan(e.share("nonsense"))


def test_seeds_and_shards_are_one_experiment_lengths_are_not(tmp_path: Path) -> None:
    first = folder(tmp_path, "a")
    second = folder(tmp_path, "b", seed=1)
    folder(tmp_path, "c", tokens=512)
    found, _ = stats.read(tmp_path)
    assert [e.tokens for e in found] == [256, 512]
    key = Key("f16", "random", "64")
    values = [r["cells"][key.name]["score"] for r in first + second if r["index"] != 1]
    got = found[0].mean(key)
    assert got.n == 10 and got.mean == pytest.approx(statistics.mean(values))


def test_methods_measured_later_join_the_same_samples(tmp_path: Path) -> None:
    records = folder(tmp_path, "a")
    folder(tmp_path, "b")
    more = [{**r, "cells": {"full": r["cells"]["full"], "tova@0.1": {"score": 0.25}}} for r in records]
    (tmp_path / "b" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in more))
    e = one(tmp_path)
    assert len(e.samples) == 6 and e.methods == [*METHODS, "tova"]
    assert next(d for d in e.differences() if d.key.method == "tova").value.n == 5


def test_packed_samples_are_read(tmp_path: Path) -> None:
    records = folder(tmp_path)
    plain = tmp_path / "run" / "samples.jsonl"
    want = one(tmp_path).mean(Key("f16", "laprox", "0.1"))
    (tmp_path / "run" / "samples.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert one(tmp_path).mean(Key("f16", "laprox", "0.1")) == want and len(one(tmp_path).samples) == len(records)


def test_turns(tmp_path: Path) -> None:
    records = folder(tmp_path, task="multi_question")
    got = one(tmp_path).listed(Key("f16", "laprox", "0.1"), "by_turn")
    for i, m in enumerate(got):
        values = [r["cells"]["laprox@0.1"]["by_turn"][i] for r in records]
        assert m.mean == pytest.approx(statistics.mean(values))
        assert m.sem == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)


def test_reading_changes_no_file_and_skips_what_is_broken(tmp_path: Path) -> None:
    folder(tmp_path)
    file = tmp_path / "run" / "samples.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:3]) + b"{nonsense}\n[]\n" + whole[3] + whole[4][:50])
    before = file.read_bytes()
    e = one(tmp_path)
    assert file.read_bytes() == before
    assert len(e.samples) == 4
    notes = " ".join(e.notes())
    assert "4 of 6 samples" in notes and "left out: 2" in notes


# ---- the report


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


# ---- kept rows


def made(pieces: Sequence[bytes], controls: Sequence[bool], rows: Sequence[np.ndarray]) -> kept.Kept:
    cells = grid(["laprox", "snapkv"][: len(rows)], ["0.05"])
    survivors = [kept.Survivors(c, r) for c, r in zip(cells, rows)]
    heads = [(2, 0), (2, 1), (5, 0)]  # layers of different numbers of heads, some not evictable
    return kept.Kept("<m>", "Is a < b & c?", 2, kept.tokens(pieces, controls), heads, survivors)


def data(page: str) -> Any:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_tokens_of_parts_of_characters() -> None:
    euro = "€".encode()
    got = kept.tokens([b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"\xff", b"c"], [False] * 6)
    assert [t.text for t in got] == ["a", "", "", "€b", "\ufffd", "c"]


def test_page_shows_texts_as_they_are() -> None:
    euro = "€".encode()
    pieces = [
        b"<|im_start|>", b"</script><script>alert(1)</script>", b"&amp;", b"a\n\nb", euro[:2], euro[2:], b"\x00\x1b",
        "\u202e".encode(), b"\r\n", b"\"'", b"<!--", b" ",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    rows = [rng.random((3, len(pieces))) < 0.5 for _ in range(2)]
    text = kept_page.render(made(pieces, [True] + [False] * 11, rows))
    page = Page(text)
    assert page.spans == [
        "<|im_start|>", "</script><script>alert(1)</script>", "&amp;", "a\u21b5\n\u21b5\nb", "", "€", "\ufffd\ufffd",
        "\ufffd", "\u21b5\n", "\"'", "<!--", " ",
    ]  # fmt: skip
    assert page.tags.count("script") == 2 and page.tags.count("canvas") == 2
    assert "default-src 'none'" in text
    got = data(text)
    assert got["heads"] == [[2, 0], [2, 1], [5, 0]]
    assert got["tokens"][1] == '"</script><script>alert(1)</script>"' and got["tokens"][4] == "bytes e2 82"
    for method, r in zip(got["methods"], rows):
        assert method["shares"] == [round(sum(bool(x) for x in column) / 3, 4) for column in r.T]
    counts = [f"layer {il}, head {h}: {int(r.sum())} of 12 rows" for (il, h), r in zip(got["heads"], rows[0])]
    assert all(c in " ".join(page.words) for c in counts)


def test_maps_of_long_prompts_are_binned() -> None:
    rng = np.random.default_rng(1)
    rows = rng.random((3, 2500)) < 0.3
    got = kept.Survivors(SimpleNamespace(), rows).binned(1024)  # type: ignore[arg-type]
    assert got.shape == (3, 834)  # 3 positions to a column
    for h in range(3):
        for i in range(834):
            part = rows[h, 3 * i : 3 * i + 3]
            assert got[h, i] == pytest.approx(part.sum() / len(part))


def test_kept_of_a_real_model(tmp_path: Path, smol_path: Path) -> None:
    file, out = tmp_path / "t.txt", tmp_path / "page.html"
    file.write_text("Snow fell <b>all</b> night 🦖 on the hills. " * 40, encoding="utf-8")
    args = ["kept", "--model", str(smol_path), "--file", str(file), "--tokens", "160", "--question", "What fell?",
            "--methods", "laprox,snapkv,quest", "--budget", "0.3", "--threads", "1", "--out", str(out)]  # fmt: skip
    done = CliRunner().invoke(cli.cli, args, catch_exceptions=False)
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    text = out.read_text(encoding="utf-8")
    page, got = Page(text), data(text)
    n = len(page.spans)
    assert 150 < n <= 160
    shown = "".join(page.spans)
    assert "Snow fell <b>all</b> night" in shown and "What fell?" in shown and "🦖" in shown and "<|im_start|>" in shown
    asked = int(0.3 * n + 0.5)
    for method, rows in zip(got["methods"], (asked, asked, n)):  # quest removes nothing
        assert sum(method["shares"]) == pytest.approx(rows, abs=n * 1e-4)
        assert method["shares"][-32:] == [1.0] * 32
    assert "quest removes nothing" in " ".join(page.words)
    assert len(got["heads"]) == 90


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ([], 2, "--file FILE or --text NAME"),
        (["--file", __file__, "--text", "python"], 2, "--file FILE or --text NAME"),
        (["--text", "poems"], 2, "poems"),
        (["--text", "python", "--budget", "0"], 2, "budget is '0'"),
        (["--text", "python", "--question", " "], 1, "question is empty"),
        (["--text", "python", "--methods", "full"], 1, "no method that evicts"),
        (["--text", "python", "--methods", "nope"], 1, "unknown eviction method"),
        (["--text", "python", "--methods", "laprox,snapkv:window=8"], 1, "windows"),
        (["--text", "python", "--question", "why " * 70, "--tokens", "64"], 1, "raise --tokens"),
    ],
)
def test_kept_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smol_path: Path, args: list[str], status: int, says: str
) -> None:
    common = ["kept", "--model", str(smol_path), "--question", "Why?", "--out", str(tmp_path / "x.html")]
    assert cli.main([*common, *args]) == status
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
