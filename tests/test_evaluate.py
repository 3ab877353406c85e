"""The evaluation harness: runs, sessions and tasks. Prompts are short, so that the file stays fast."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from laprox_llamacpp import Llama, _native, cli, duo_profile
from laprox_llamacpp.errors import LaproxError
from laprox_llamacpp.evaluate import bench, runner, texts
from laprox_llamacpp.evaluate.cells import Cell, grid
from laprox_llamacpp.evaluate.runner import Run
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Sample, Task
from laprox_llamacpp.policy import methods

W = 32
HEADS = 90  # SmolLM2-135M: 30 layers of 3 KV heads
ONE: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}
TEXT = "continuation:tokens=64:n=6"
NEXT = [42, 7, 99]
STOP_WORDS = {"a", "an", "and", "any", "did", "do", "for", "in", "it", "of", "on", "that", "the", "to", "was", "which"}
PAGES = "laprox+quest:page=8:min_pages=1:dense=0:read=48"


# ---- runs


def spec(path: Path, **changes: Any) -> Run:
    run = Run(Task.parse(TEXT), path, ["laprox", "streaming"], ["0.6"], ["f16", "q4_0"], 2, n_threads=1)
    return replace(run, **changes)


def without_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By KV type and index."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if not k.endswith(("_ms", "_s"))}
        return value

    return [bare(r) for r in sorted(records, key=lambda r: (r["kv_type"], r["index"]))]


@pytest.fixture(scope="module")
def unbroken(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from beginning to end."""
    out = tmp_path_factory.mktemp("unbroken")
    seen: list[tuple[int, int]] = []
    records = runner.run(spec(smol_path), out, lambda done, total: seen.append((done, total)))
    assert seen == [(i, 4) for i in range(5)]
    assert without_times(records) == without_times(runner.read(out / "samples.jsonl"))
    return out


def test_records_hold_the_cells_of_each_sample(unbroken: Path) -> None:
    records = runner.read(unbroken / "samples.jsonl")
    assert [(r["kv_type"], r["index"]) for r in records] == [(t, i) for t in ("f16", "q4_0") for i in range(2)]
    for record in records:
        assert list(record["cells"]) == ["full", "laprox@0.6", "streaming@0.6"] and record["n_prompt"] == 64
        full, laprox, streaming = record["cells"].values()
        assert (full["kl"], full["top1"], full["rows"]) == (0.0, 1.0, HEADS * 64)
        assert laprox["rows"] == streaming["rows"] == HEADS * 38  # 0.6 of 64
        assert laprox["kl"] > 0 < streaming["kl"]
    assert len({r["info"]["start"] for r in records if r["kv_type"] == "f16"}) == 2
    f16, q4 = (sum(r["cells"]["full"]["kv_bytes"] for r in records if r["kv_type"] == t) for t in ("f16", "q4_0"))
    assert q4 / f16 == (18 / 32) / 2


def test_run_json_says_what_was_run(unbroken: Path, smol_path: Path) -> None:
    head = json.loads((unbroken / "run.json").read_text())
    assert head["setup"]["model_sha256"] == hashlib.sha256(smol_path.read_bytes()).hexdigest()
    assert head["setup"]["options"] == {"tokens": 64, "n": 6, "haystack": "python", "seed": 0}
    assert (head["setup"]["metric"], head["setup"]["higher"]) == ("kl", False)
    assert head["made"]["llama_cpp_python"] == "0.3.36" and head["made"]["laprox_llamacpp"]
    assert head["made"]["command"] and head["made"]["python"]
    assert head["made"]["build"] == _native.build_info()


def test_a_killed_run_goes_on(unbroken: Path, smol_path: Path, tmp_path: Path) -> None:
    args = ["eval", TEXT, "--methods", "laprox,streaming", "--budgets", "0.6", "--kv-type", "f16,q4_0"]
    args += ["--samples", "2", "--threads", "1", "--model", str(smol_path), "--out", str(tmp_path)]
    child = subprocess.Popen([sys.executable, "-m", "laprox_llamacpp.cli", *args], stderr=subprocess.DEVNULL)
    file, end = tmp_path / "samples.jsonl", time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 1):
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    measured = runner.read(file)
    assert 1 <= len(measured) < 4
    with file.open("ab") as f:
        f.write(b'{"index": 1, "kv_ty')  # what a kill may leave
    assert runner.read(file) == measured
    seen: list[int] = []
    runner.run(spec(smol_path), tmp_path, lambda done, total: seen.append(done))
    assert seen[0] == len(measured)
    assert runner.read(file)[: len(measured)] == measured
    assert without_times(runner.read(file)) == without_times(runner.read(unbroken / "samples.jsonl"))


def test_shards_merge_to_the_whole_run(
    unbroken: Path, smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = without_times(runner.read(unbroken / "samples.jsonl"))
    runner.run(spec(smol_path, shard=(0, 2)), tmp_path / "a")
    runner.run(spec(smol_path, shard=(1, 2)), tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").glob("*.jsonl")] == ["samples-1-of-2.jsonl"]
    out = ["--out", str(tmp_path / "ab")]
    assert cli.main(["merge", str(tmp_path / "b"), *out]) == 0
    assert capsys.readouterr().out == f"2 of 4 samples in {tmp_path / 'ab'}\n"
    assert cli.main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), *out]) == 0
    assert capsys.readouterr().out == f"4 of 4 samples in {tmp_path / 'ab'}\n"
    assert without_times(runner.read(tmp_path / "ab" / "samples.jsonl")) == want
    # shards of one folder are merged where they are
    (tmp_path / "a" / "samples-1-of-2.jsonl").write_bytes((tmp_path / "b" / "samples-1-of-2.jsonl").read_bytes())
    assert cli.main(["merge", str(tmp_path / "a"), "--out", str(tmp_path / "a")]) == 0
    assert [p.name for p in (tmp_path / "a").glob("*.jsonl")] == ["samples.jsonl"]
    assert without_times(runner.read(tmp_path / "a" / "samples.jsonl")) == want


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budgets": ["0.5"]}, "cells differ"),
        ({"task": Task.parse("continuation:tokens=64:n=6:seed=1")}, "options differ"),
        ({"kv_types": ["f16"]}, "kv_types differ"),
        ({"task": Task.parse("needle")}, "task, options, metric, higher differ"),
    ],
)
def test_the_folder_of_another_run_is_refused(
    unbroken: Path, smol_path: Path, changes: dict[str, Any], says: str
) -> None:
    before = {p.name: p.read_bytes() for p in unbroken.iterdir()}
    with pytest.raises(ValueError, match=re.escape(f"holds another run ({says})")) as e:
        runner.run(spec(smol_path, **changes), unbroken)
    assert "\n" not in str(e.value)
    assert before == {p.name: p.read_bytes() for p in unbroken.iterdir()}


def test_merge_refuses_other_runs_and_other_folders(unbroken: Path, tmp_path: Path) -> None:
    head = json.loads((unbroken / "run.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        runner.merge([other], tmp_path / "out")
    head["setup"]["model_sha256"] = "0" * 64
    (other / "run.json").write_text(json.dumps(head))
    with pytest.raises(ValueError, match=r"other holds another run than .*\(model_sha256 differ\)"):
        runner.merge([unbroken, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_written_to_is_refused(unbroken: Path, smol_path: Path) -> None:
    file = unbroken / "samples.jsonl"
    before = file.read_bytes()
    with file.open("a") as f:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(f, fcntl.LOCK_EX)
        for write in (lambda: runner.run(spec(smol_path), unbroken), lambda: runner.merge([unbroken], unbroken)):
            with pytest.raises(ValueError, match="another eval is writing"):
                write()
    assert file.read_bytes() == before
    assert runner.merge([unbroken], unbroken)[0] == len(before.splitlines())


def test_more_samples_go_on_with_a_finished_run(unbroken: Path, smol_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unbroken, copy)
    before = (copy / "samples.jsonl").read_bytes()
    n = spec(smol_path).n_samples
    records = runner.run(spec(smol_path, n_samples=n + 1), copy)
    assert {r["index"] for r in records} == set(range(n + 1))
    assert (copy / "samples.jsonl").read_bytes().startswith(before)
    assert json.loads((copy / "run.json").read_text())["setup"]["n_samples"] == n + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model_path": Path(__file__)},
        {"methods": ["duo:profile=/nowhere"]},
        {"task": Task.parse("needle:haystack=/nowhere")},
    ],
)
def test_nothing_is_left_of_a_run_that_cannot_begin(smol_path: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        runner.run(spec(smol_path, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prompt_beyond_the_models_context(smol_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model was trained for 8192"):
        runner.run(spec(smol_path, task=Task.parse("needle:tokens=9000")), tmp_path / "out")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"index": 0}\n\0\0\n{"index": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*samples\.jsonl is no record") as e:
        runner.read(file)
    assert "\n" not in str(e.value)


# ---- the command


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that fails, after the progress that it had made."""
    assert cli.main(args) in (1, 2)
    out, err = capsys.readouterr()
    *progress, line = err.splitlines()
    assert out == "" and line.startswith("laprox-llamacpp: ") and all(p.endswith(" samples") for p in progress)
    return line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "unknown task 'nonsense', expected one of continuation,"),
        (["needle:kind=double"], "unknown kind 'double', expected one of single,"),
        (["needle:value=date"], "unknown value 'date'"),
        (["needle:tokens=12"], "tokens is 12, expected an integer >= 128"),
        (["needle:depths=10+101"], "depths is '10+101', expected percents"),
        (["needle:open_answer=maybe"], "unknown open_answer 'maybe'"),
        (["needle:speed=1"], "unknown option 'speed'"),
        (["continuation:n=1"], "n is 1, expected an integer >= 2"),
        (["multi_question:questions=11"], "questions is 11, expected at most 10"),
        (["multi_question:digits=1"], "digits is 1, expected an integer >= 2"),
        (["multi_question:aware=perhaps"], "unknown aware 'perhaps'"),
        (["similarity:n=0"], "n is 0, expected an integer >= 1"),
        (["needle", "--methods", "snap"], "unknown eviction method 'snap'"),
        (["needle", "--budgets", "0.1,2.0"], "budget is '2.0', expected a fraction"),
        (["needle", "--budgets", " , "], "no budgets, expected at least one such as 0.1"),
        (
            ["needle", "--methods", "laprox,snapkv:window=16"],
            "methods with windows of 16, 32 tokens, expected one window",
        ),
        (["needle", "--kv-type", "f16,q9"], "--kv-type 'q9' is unknown, expected one of f32, f16,"),
        (["needle", "--kv-type", ""], "--kv-type is empty, expected one of"),
        (["needle", "--shard", "2/2"], "--shard is '2/2', expected I/N with I from 0 to N-1"),
        (["needle", "--shard", "half"], "--shard is 'half'"),
        (["needle", "--samples", "0"], "--samples"),
        (["needle", "--model", "/no/such.gguf"], "/no/such.gguf"),
        (["needle:haystack=/no/such.txt"], "haystack '/no/such.txt' cannot be read as UTF-8 text"),
    ],
)
def test_errors_of_eval(capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], says: str) -> None:
    assert says in fails(capsys, "eval", *args, "--out", str(tmp_path / "out"))


def test_eval_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out" in fails(capsys, "eval", "needle")


def test_short_haystacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, out = tmp_path / "short.txt", str(tmp_path / "out")
    file.write_text("one line\nand another")
    for task in ("needle", "continuation", "similarity", "multi_question"):
        err = fails(capsys, "eval", f"{task}:haystack={file}", "--out", out, "--threads", "1")
        assert "holds 1 paragraphs, expected a long text with blank lines" in err
        assert not (tmp_path / "out").exists()
    file.write_text("one line\n\nand another")
    err = fails(capsys, "eval", f"continuation:haystack={file}", "--out", out, "--threads", "1")
    assert re.search(r"short\.txt' has \d tokens, expected at least 2304", err)


def test_eval_on_ray(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["eval", TEXT, "--model", str(smol_path), "--methods", "full", "--samples", "2", "--shard", "0/2"]
    args += ["--threads", "1", "--ray", "head:6379", "--out", str(tmp_path)]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray needs Ray, which is not installed: pip install ray" in fails(capsys, *args)
    calls: list[Any] = []

    def remote(**options: Any) -> Callable[..., Any]:
        calls.append(options)
        return lambda f: SimpleNamespace(remote=lambda *a: lambda: f(*a))

    ray = SimpleNamespace(
        init=lambda **options: calls.append(options), remote=remote, get=lambda refs: [ref() for ref in refs]
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert cli.main(args) == 0
    assert calls == [{"address": "head:6379", "ignore_reinit_error": True}, {"num_cpus": 1}]
    shards = [runner.read(tmp_path / f"samples-{i}-of-2.jsonl") for i in range(2)]
    assert [[r["index"] for r in shard] for shard in shards] == [[0], [1]]
    assert list(shards[0][0]["cells"]) == ["full"]


def test_cells() -> None:
    assert [c.name for c in grid(["full", "laprox", "snapkv:pool=7"], ["0.05", "64", "1MiB"])] == [
        f"{m}@{b}" for m in ("laprox", "snapkv:pool=7") for b in ("0.05", "64", "1MiB")
    ]
    assert [c.name for c in grid(["laprox", "laprox"], ["0.1", "10%"])] == ["laprox@0.1"]
    assert grid(["full"], []) == grid([], ["0.1"]) == []


# ---- sessions


@pytest.fixture(scope="module")
def profile(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A duo profile that ranks the heads in an order of its own."""
    scores = np.random.default_rng(5).random(HEADS).tolist()
    heads = tuple((i // 3, i % 3, s) for i, s in enumerate(scores))
    path = tmp_path_factory.mktemp("duo") / "profile.json"
    made = duo_profile.Profile(duo_profile.fingerprint(smol_path), smol_path.name, 30, heads)
    duo_profile.save(made, path)
    return path


@pytest.fixture(scope="module")
def cells(profile: Path) -> list[Cell]:
    """Every method, and pages of an evicted cache."""
    duo = f"duo:protect_sinks=8:recent=40:profile={profile}"
    names = [duo if m == "duo" else m for m in methods() if not m.startswith("test")]
    assert len(names) >= 11
    return grid([*names, PAGES], ["0.4"])


@pytest.fixture(scope="module")
def session(smol_path: Path, cells: list[Cell]) -> Iterator[Session]:
    made = Session(str(smol_path), cells, n_ctx=1024, watch=True, **ONE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt(session: Session) -> list[int]:
    return Task.parse("needle:tokens=160").sample(session, 0).tokens


def after(session: Session) -> Any:
    """Logits of the next steps, [3, n_vocab]."""
    rows = []
    for token in NEXT:
        session.decode([token])
        rows.append(session.last_logits())
    return np.stack(rows)


def test_every_method_leaves_the_full_cache_as_it_was(session: Session, cells: list[Cell], prompt: list[int]) -> None:
    n = len(prompt)
    k = int(0.4 * n + 0.5) - W
    session.prefill(prompt)

    def full() -> tuple[str, Any]:
        with session.under(None):
            assert session.cost()["rows"] == HEADS * n
            text = session.answer(8)
            session.cut()
            return text, after(session)

    text, logits = full()
    different = 0
    for cell in cells:
        with session.under(cell):
            rows, stats = session.cost()["rows"], _native.stats(session.ctx)
            evicts = cell.policy.evicts
            assert (stats.evicted, rows) == (evicts, HEADS * (k + W if evicts else n)), cell.name
            assert not evicts or stats.rows_kept == rows
            got = after(session)
            different += not np.array_equal(got, logits)
            if cell.policy.page_reads() is not None:
                stats = _native.stats(session.ctx)
                assert 0 < stats.rows_read < stats.rows_dense
        with session.under(None):
            session.decode(NEXT[:1])
            assert np.array_equal(session.last_logits(), logits[0]), cell.name
    assert different == len(cells)
    again, logits_again = full()
    assert again == text and np.array_equal(logits_again, logits)


def test_an_error_inside_a_cell_leaves_the_full_cache(session: Session, cells: list[Cell], prompt: list[int]) -> None:
    session.prefill(prompt)
    with session.under(None):
        want = after(session)
    with pytest.raises(KeyError), session.under(cells[0]):
        session.decode(NEXT)
        raise KeyError
    with session.under(None):
        assert np.array_equal(after(session), want)


@pytest.mark.parametrize("name", ["h2o", "laprox", PAGES])
def test_a_cell_answers_as_llama_does(
    session: Session, cells: list[Cell], prompt: list[int], smol_path: Path, name: str
) -> None:
    cell = next(c for c in cells if str(c.policy) == name)
    session.prefill(prompt)
    with session.under(cell):
        kept = _native.kept(session.ctx)
        text = session.answer(10)
        session.cut()
        got = after(session)
    alone = Llama(str(smol_path), kv_evict=name, budget=0.4, n_ctx=1024, verbose=False, **ONE)
    try:
        tokens = list(islice(alone.generate(prompt, temp=0.0), 10))
        assert text == alone.detokenize(tokens).decode()
        assert all(np.array_equal(a, b) for a, b in zip(kept, _native.kept(alone.ctx)))
        alone.n_tokens = len(prompt)
        for token, want in zip(NEXT, got):
            alone.eval([token])
            row = np.ctypeslib.as_array(alone._ctx.get_logits_ith(-1), shape=(alone.n_vocab(),))
            assert np.array_equal(row, want)
    finally:
        alone.close()


def test_a_draft_saves_steps_and_changes_no_answer(
    session: Session, cells: list[Cell], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    decode, rows = Session._decode_now, Session._rows
    monkeypatch.setattr(Session, "_decode_now", lambda self, tokens: (steps.append(1), decode(self, tokens))[1])
    monkeypatch.setattr(Session, "_rows", lambda self, tokens: (steps.append(1), rows(self, tokens))[1])

    def answer(cell: Cell | None) -> tuple[str, list[int], int]:
        steps.clear()
        with session.under(cell):
            text = session.answer(10)
            taken = len(steps)
            session.decode(NEXT)
            return text, session.input_ids[len(prompt) : session.n_tokens].tolist(), taken

    session.prefill(prompt)
    full = answer(None)
    for cell in cells:
        session._drafts = {}
        want = answer(cell)
        first = int(session.after_prompt.argmax())
        for draft in ([], full[1][: -len(NEXT)], want[1][: -len(NEXT)], [first, 5, 6, 7], [5, 6, 7]):
            session._drafts = {(): draft}
            got = answer(cell)
            assert got[:2] == want[:2], (cell, draft)
        session._drafts = {(): want[1][: -len(NEXT)]}
        assert answer(cell)[2] < want[2] or "quest" in cell.name


def test_notes_of_a_cell(session: Session, profile: Path, prompt: list[int]) -> None:
    session.prefill(prompt)
    streams, narrow = grid([f"duo:profile={profile}"], ["0.4"])[0], grid(["snapkv"], ["10"])[0]
    with session.under(streams):
        assert "every head streams" in session.cost()["note"]
    with session.under(narrow):
        assert session.cost()["note"] == "the budget is 10 tokens, less than the window of 32, which alone is kept"
        assert session.cost()["rows"] == HEADS * W
    with session.under(None):
        assert "note" not in session.cost()


def test_wrong_use_of_a_session(session: Session, prompt: list[int], smol_path: Path) -> None:
    with pytest.raises(ValueError, match="a prompt of 32 tokens, expected more than the window of 32"):
        session.prefill(prompt[:W])
    session.prefill(prompt[:80])
    with pytest.raises(ValueError, match="cut at 79 is inside the prompt of 80 tokens"):
        session.cut(79)
    with pytest.raises(ValueError, match="no duo profile"):
        Session(str(smol_path), grid(["duo:profile=/no/such.json"], ["0.1"]), n_ctx=256, **ONE)


def test_stop_strings_and_the_end_of_the_answer(session: Session, prompt: list[int]) -> None:
    session.prefill(prompt)
    with session.under(None):
        text = session.answer(8)
        session.cut()
        words = text.split()
        assert session.answer(8, stop=[words[1]]) == text[: text.index(words[1])]
        session.cut()
        assert session.answer(1) and session.n_tokens == len(prompt)
        session.decode(NEXT)  # the token of that answer goes first
        first = int(session.after_prompt.argmax())
        assert session.input_ids[len(prompt) : session.n_tokens].tolist() == [first, *NEXT]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_sliding_window_that_passed_the_prompts_end(gemma_path: Path, kind: str) -> None:
    cell = grid(["laprox"], ["0.2"])[0]
    made = Session(str(gemma_path), [cell], n_ctx=1024, n_ubatch=64, type_k=kind, type_v=kind, **ONE)
    task = Task.parse("continuation:tokens=600:n=300")
    sample = task.sample(made, 0)
    try:
        assert sample.tokens[0] == made.token_bos()
        made.prefill(sample.tokens)
        with made.under(None):
            full = after(made)
        with made.under(cell):
            want = after(made)
            assert not np.array_equal(want, full)
            list(made.logprobs(sample.memo["after"]))
            assert not made._can_cut(600)
            made.cut()
            assert _native.stats(made.ctx).evicted and made.cost()["rows"] == 3 * 120
            assert np.array_equal(after(made), want)
            list(made.logprobs(sample.memo["after"]))
        assert not _native.stats(made.ctx).evicted
        with made.under(None):
            assert np.array_equal(after(made), full)
    finally:
        made.close()


# ---- texts


def test_longest_prompt(session: Session) -> None:
    words = texts.shuffled("python", random.Random(1), 600)

    def build(chosen: Sequence[str]) -> list[int]:
        return texts.tokenize(session, " ".join(chosen) + " What is it?")

    for limit in (20, 333, 512):
        tokens = texts.longest(words, limit, build)
        n = next(i for i in range(len(words)) if build(words[:i]) == tokens)
        assert len(tokens) <= limit < len(build(words[: n + 1]))
    with pytest.raises(ValueError, match="3 tokens do not even hold the question"):
        texts.longest(words, 3, build)


def test_spaces_of_a_haystack_stay(tmp_path: Path) -> None:
    paragraphs = ["def f(x):\n    return  x", "    indented   text."]
    (tmp_path / "code.txt").write_text("\n\n".join(paragraphs))
    words = texts.shuffled(str(tmp_path / "code.txt"), random.Random(1), 12)
    assert all(w.strip(" ") for w in words)
    assert set(texts.hide(words, [], []).split("\n\n")) == {p.strip() for p in paragraphs}


def test_chat_without_a_template(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "metadata", {})
    turns = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert texts.chat(session, turns) == "One.\n\nTwo.\n\nAnswer:"
    monkeypatch.setattr(session._model, "add_bos_token", lambda: True)
    bos = session._model.token_get_text(session.token_bos())
    assert texts.chat(session, turns).startswith(f"{bos}One.")


# ---- needles

VALUES = {
    "number": r"\d{7}",
    "word": r"[a-z]+",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
N_HIDDEN = {"single": 1, "multikey": 4, "multivalue": 3, "multiquery": 4, "reversed": 4, "paraphrase": 1}
N_EXPECTED = {"multivalue": 3, "multiquery": 2}


def text_of(session: Session, sample: Sample) -> str:
    return session.detokenize(sample.tokens, special=True).decode()


@pytest.mark.parametrize("value", VALUES)
def test_needles_are_in_the_prompt_at_their_depth(session: Session, value: str) -> None:
    task = Task.parse(f"needle:tokens=1200:value={value}:kind={'+'.join(N_HIDDEN)}:depths=0+25+50+100")
    for index in range(12):
        sample = task.sample(session, index)
        assert 1150 < len(sample.tokens) <= 1200
        info, text = sample.info, text_of(session, sample)
        kind = list(N_HIDDEN)[index % 6]
        assert (info["kind"], info["depth"]) == (kind, [0, 0.25][index // 6])
        assert len(info["sentences"]) == N_HIDDEN[kind]
        assert len(info["expected"]) == len(set(info["expected"])) == N_EXPECTED.get(kind, 1)
        assert all(re.fullmatch(VALUES[value], v) for v in info["expected"])
        user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        *body, question = user.split("\n\n")
        for sentence in info["sentences"]:
            assert body.count(sentence) == 1  # a paragraph of its own
        assert all(any(v in s for s in info["sentences"]) and v not in question for v in info["expected"])
        others = [p for p in body if p not in info["sentences"]]
        before = body[: body.index(info["sentences"][0])]
        at = len([p for p in before if p not in info["sentences"]])
        assert abs(at - info["depth"] * len(others)) <= 0.5
        assert text.rstrip().endswith("<|im_start|>assistant")


def test_paraphrased_needles_share_no_word_with_the_question(session: Session) -> None:
    for value in VALUES:
        task = Task.parse(f"needle:tokens=200:kind=paraphrase:value={value}")
        for index in range(8):
            sample = task.sample(session, index)
            question = text_of(session, sample).split("\n\n")[-1].split("<|im_end|>")[0]
            asked, told = (set(re.findall(r"[a-z]+", t.lower())) for t in (question, sample.info["sentences"][0]))
            assert "which" in asked and not (asked & told) - STOP_WORDS


def test_samples_are_a_matter_of_seed_and_index(session: Session) -> None:
    def tokens(spec: str, index: int) -> list[int]:
        return Task.parse(spec).sample(session, index).tokens

    assert tokens("needle:tokens=200", 3) == tokens("needle:tokens=200", 3)
    assert tokens("needle:tokens=200", 3) != tokens("needle:tokens=200", 4)
    assert tokens("needle:tokens=200", 3) != tokens("needle:tokens=200:seed=1", 3)


def test_score_of_a_needle_and_the_opened_answer(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.parse("needle:tokens=200:kind=multivalue:open_answer=yes:value=word")
    sample = task.sample(session, 0)
    name = sample.info["sentences"][0].split(" for ")[1].split(" is ")[0]
    assert text_of(session, sample).endswith(f"assistant\nThe special magic words for {name} are")
    first, second, _ = sample.info["expected"]
    for answer, score in ((f" {first.upper()} and {second}.", 2 / 3), ("nothing", 0.0)):
        monkeypatch.setattr(session, "answer", lambda n, answer=answer: answer)
        assert task.measure(session, sample) == {"text": answer.strip(), "score": score}


# ---- continuations


def log_softmax(row: Any) -> Any:
    row = np.asarray(row, np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_continuation_against_numpy(session: Session, smol_path: Path) -> None:
    cell = grid(["laprox"], ["0.5"])[0]
    task = Task.parse("continuation:tokens=96:n=7")
    sample = task.sample(session, 1)
    text = sample.memo["after"]
    assert (len(sample.tokens), len(text)) == (96, 7)
    session.prefill(sample.tokens)
    with session.under(None):
        full = task.measure(session, sample)
    with session.under(cell):
        evicted = task.measure(session, sample)
    assert (full["kl"], full["top1"]) == (0.0, 1.0)

    def rows(steps: Sequence[int], **options: Any) -> list[Any]:
        llm = Llama(str(smol_path), n_ctx=256, verbose=False, flash_attn=True, **ONE, **options)
        for end in steps:
            llm.eval(sample.tokens[llm.n_tokens : end])
        found = []
        for token in text[:-1]:
            llm.eval([token])
            found.append(log_softmax(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))))
        llm.close()
        return found

    plain = rows([64, 96])  # as a prompt with a window of 32 is decoded
    cut = rows([96], kv_evict="laprox", budget=0.5)
    for got, logprobs in ((full, plain), (evicted, cut)):
        assert got["nll"] == pytest.approx(-np.mean([r[t] for r, t in zip(logprobs, text[1:])]), abs=1e-4)
    kl = np.mean([(np.exp(f) * (f - e)).sum() for f, e in zip(plain, cut)])
    assert kl > 5e-3 and evicted["kl"] == pytest.approx(kl, rel=1e-3)
    assert evicted["top1"] == np.mean([f.argmax() == e.argmax() for f, e in zip(plain, cut)])


def test_continuation_selects_pages(session: Session) -> None:
    cell = grid(["quest:page=8:min_pages=1:dense=0"], ["0.2"])[0]
    task = Task.parse("continuation:tokens=128:n=4")
    sample = task.sample(session, 0)
    session.prefill(sample.tokens)
    with session.under(None):
        task.measure(session, sample)
    with session.under(cell):
        assert task.measure(session, sample)["kl"] > 1e-3


def test_chunks_of_logprobs(session: Session, smol_path: Path) -> None:
    with_small_batches = Session(str(smol_path), [], n_ctx=512, n_batch=64, **ONE)
    try:
        sample = Task.parse("continuation:tokens=64:n=70").sample(with_small_batches, 0)
        with_small_batches.prefill(sample.tokens)
        session.prefill(sample.tokens)
        assert np.array_equal(with_small_batches.after_prompt, session.after_prompt)  # which is watched
        rows = list(with_small_batches.logprobs(sample.memo["after"]))
        assert len(rows) == 70 and with_small_batches.n_tokens == 134
        assert all(np.exp(r, dtype=np.float64).sum() == pytest.approx(1, abs=1e-4) for r in rows)
        with pytest.raises(ValueError, match="expected watch=True at construction"):
            with_small_batches.attention_outputs(1)
    finally:
        with_small_batches.close()


# ---- several questions


def test_questions_are_turns_on_one_evicted_cache(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.parse("multi_question:tokens=300:questions=3:orders=2:max_tokens=4")
    sample = task.sample(session, 0)
    orders = sample.info["orders"]
    assert len(orders) == 2 and all(sorted(o) == [0, 1, 2] and o[0] == 0 for o in orders)
    assert sample.info["questions"][0] in text_of(session, sample)
    assert all(text_of(session, sample).count(v) == 1 for v in sample.info["expected"])
    session.prefill(sample.tokens)
    held: list[int] = []
    ask = session.ask

    def asked(*args: Any) -> str:
        answer = ask(*args)
        held.append(_native.stats(session.ctx).rows_kept)
        return answer

    monkeypatch.setattr(session, "ask", asked)
    with session.under(grid(["laprox"], ["0.3"])[0]):
        rows = _native.stats(session.ctx).rows_kept
        assert rows == HEADS * int(0.3 * len(sample.tokens) + 0.5)
        got = task.measure(session, sample)
        assert held == [rows] * 4
        # the cache holds the chat as the template has it, the end of a cut answer included
        turns = [sample.memo["text"] + "\n\n" + sample.info["questions"][0]]
        turns += [sample.info["questions"][q] for q in orders[1][1:]]
        messages = []
        for i, turn in enumerate(turns):
            messages += [{"role": "user", "content": turn}]
            messages += [{"role": "assistant", "content": got["answers"][1][i]}] if i < 2 else []
        cached = session.detokenize([*session.input_ids[: session.n_tokens].tolist(), *session._pending], special=True)
        assert cached.decode() == texts.chat(session, messages) + got["answers"][1][2]


def test_a_prompt_that_does_not_know_the_question(session: Session) -> None:
    task = Task.parse("multi_question:tokens=300:questions=3:orders=4:max_tokens=2:aware=no")
    sample = task.sample(session, 0)
    assert text_of(session, sample).endswith(sample.memo["text"][-60:])
    assert not any(q in text_of(session, sample) for q in sample.info["questions"])
    assert [o[0] for o in sample.info["orders"]] == [0, 1, 2, 0]
    assert all(sorted(o) == [0, 1, 2] for o in sample.info["orders"])


@pytest.mark.parametrize("aware", ["yes", "no"])
def test_scores_of_questions(session: Session, monkeypatch: pytest.MonkeyPatch, aware: str) -> None:
    task = Task.parse(f"multi_question:tokens=300:questions=2:orders=2:aware={aware}")
    sample = task.sample(session, 0)
    session._tokens, session._end = sample.tokens, len(sample.tokens)
    first, second = sample.info["expected"]
    answers = iter([first, "no", f"it is {first}.", second] if aware == "yes" else [first, "no", second, first])
    for name in ("answer", "ask"):
        monkeypatch.setattr(session, name, lambda *a: next(answers))
    monkeypatch.setattr(session, "cut", lambda end: None)
    assert sample.info["orders"] == ([[0, 1], [0, 1]] if aware == "yes" else [[0, 1], [1, 0]])
    got = task.measure(session, sample)
    assert (got["score"], got["by_turn"]) == (0.75, [1.0, 0.5])
    assert (got["seen"], got["unseen"]) == ((1.0, 0.5) if aware == "yes" else (None, 0.75))


# ---- output similarity


def test_similarity_is_the_cosine_of_what_w_o_gives(session: Session, smol_path: Path) -> None:
    import gguf
    import llama_cpp as lib
    from lowlevel import Context
    from tensors import Tensor, read

    task = Task.parse("similarity:tokens=96:n=3")
    sample = task.sample(session, 0)
    session.prefill(sample.tokens)
    measured = {}
    for name, cell in (("full", None), ("evicted", grid(["laprox"], ["0.5"])[0]), ("again", None)):
        with session.under(cell):
            measured[name] = task.measure(session, sample)
    tokens = sample.memo["tokens"]

    steps: list[dict[str, Any]] = []

    @lib.ggml_backend_sched_eval_callback
    def watch(address: int, ask: bool, _: Any) -> bool:
        node = Tensor.from_address(address)
        weight = Tensor.from_address(node.src[0]).name.decode() if node.src[0] else ""
        wanted = weight.endswith("attn_output.weight")
        if wanted and not ask:
            steps[-1][weight] = read(node.src[1])[0, -1], read(address)[0, -1]
        return wanted or not ask

    with Context(smol_path, n_ctx=512, cb_eval=watch) as ctx:
        steps.append({})
        logits = ctx.prefill(sample.tokens)
        for token in tokens:
            assert token == logits.argmax()  # greedy
            steps.append({})
            logits = ctx.decode([token])
        assert ctx.cut(96)
        steps.append({})
        ctx.evict(0.5)  # multiplies by W_O, too
        for token in tokens:
            steps.append({})
            ctx.decode([token])
    weights = {t.name: t for t in gguf.GGUFReader(smol_path).tensors}
    names = [f"blk.{il}.attn_output.weight" for il in range(30)]
    w_o = [gguf.dequantize(weights[n].data, weights[n].tensor_type).astype(np.float64) for n in names]
    for step, caught in zip(steps[1:4], sample.memo["outputs"]):
        for name, w, got in zip(names, w_o, caught):
            want = w @ step[name][0]
            assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)  # the engine rounds its input to 8 bits
    out = np.array([[step[n][1] for n in names] for step in steps[1:4] + steps[5:]])
    full, evicted = out[:3], out[3:]
    norms = np.linalg.norm(full, axis=2) * np.linalg.norm(evicted, axis=2)
    cosine = np.einsum("sld,sld->sl", full, evicted) / norms
    got = measured["evicted"]
    assert 0.5 < cosine.mean() < 0.999 and got["cosine"] == pytest.approx(cosine.mean(), abs=1e-6)
    assert got["by_layer"] == pytest.approx(cosine.mean(axis=0), abs=2e-6)
    assert got["by_step"] == pytest.approx(cosine.mean(axis=1), abs=2e-6)
    assert measured["full"]["cosine"] == pytest.approx(1, abs=1e-12) == measured["again"]["cosine"]
    assert sample.info["layers"] == list(range(30))


def test_a_model_without_w_o(session: Session, prompt: list[int]) -> None:
    session.prefill(prompt[:64])
    assert session._outputs is not None
    with session._outputs.of([0, 30]) as caught:
        session.decode([1])
    with pytest.raises(ValueError, match=r"no product with blk\.30\.attn_output\.weight"):
        caught()


# ---- speed


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
