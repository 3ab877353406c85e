"""Statistics of runs, against the statistics module and other definitions."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from folders import BUDGETS, METHODS, folder, one

from laprox_llamacpp.evaluate import stats, tables
from laprox_llamacpp.evaluate.stats import Key, Mean


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
