"""The eval command: its errors, progress, and the way over Ray."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from common import fails

from laprox_llamacpp import cli
from laprox_llamacpp.evaluate import command
from laprox_llamacpp.evaluate.records import read
from laprox_llamacpp.evaluate.runner import Run

TEXT = "continuation:tokens=64:n=6"


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
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    err = fails(capsys, "eval", "needle", "--out", str(tmp_path / "file" / "out"))
    assert "cannot be made (Not a directory); choose another --out" in err


@pytest.mark.parametrize("head", ["{}", "{", "5", '{"setup": {}}', '{"setup": 5}', "\0"])
def test_a_damaged_run_json_is_named(
    smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str
) -> None:
    (tmp_path / "run.json").write_text(head)
    commands = [["merge", str(tmp_path), "--out", str(tmp_path / "out")], ["report", str(tmp_path)]]
    commands.append(["eval", TEXT, "--model", str(smol_path), "--methods", "full", "--out", str(tmp_path)])
    for args in commands:
        if args[0] == "report":
            pytest.importorskip("matplotlib")
        assert f"{tmp_path / 'run.json'} could not be read as a run" in fails(capsys, *args)
    assert (tmp_path / "run.json").read_text() == head and not (tmp_path / "samples.jsonl").exists()


def test_the_time_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 100 + 120, 100 + 20 * 600, 100 + 60, 9999])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(times))
    eta = command._Eta()
    assert eta(10, 40) == ""  # of an earlier run
    told = [eta(done, 40) for done in (12, 30, 39, 40)]
    # 60 s a sample and 28 left; 600 s and 10 left; 60 / 29 s and one left; the end
    assert told == [", 28 min left", ", 1.7 h left", ", 2 s left", ""]


def test_progress_tells_the_time_left_of_long_samples(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    progress = command.Progress
    monkeypatch.setattr(command, "Progress", lambda *a, **k: made.append(progress(*a, **k)) or made[-1])

    def run(spec: Run, out: Path, on_sample: Callable[[int, int], None]) -> list[Any]:
        for done in range(3):
            on_sample(done, 3)
        return []

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "means", lambda out: "")
    assert cli.main(["eval", TEXT, "--model", str(smol_path), "--methods", "full", "--out", str(tmp_path)]) == 0
    assert [line.split(" samples")[1] for line in capsys.readouterr().err.splitlines()[:3]] == [
        "", ", 0 s left", ", 0 s left"
    ]  # fmt: skip
    now = 0.0
    bar = progress(speed_estimate_period=made[0].speed_estimate_period, get_time=lambda: now, disable=True)
    task = bar.add_task("", total=4)
    for done in range(4):
        now = done * 7200.0
        bar.update(task, completed=done)
    assert bar.tasks[0].time_remaining == 7200


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
    assert "--shard is '1/2', expected 0/2 with --ray" in fails(capsys, *args, "--shard", "1/2")
    assert cli.main(args) == 0
    told, err = capsys.readouterr()
    assert err == f"2 shards on Ray: each sample that is done is a line of {tmp_path / 'samples*.jsonl'}\n"
    assert "KL divergence from the full cache (nats) by budget (lower is better)" in told
    assert told.splitlines()[-1].startswith("| full cache | 2 | 0.00 ± 0.00")
    assert calls == [{"address": "head:6379", "ignore_reinit_error": True}, {"num_cpus": 1}]
    shards = [read(tmp_path / f"samples-{i}-of-2.jsonl") for i in range(2)]
    assert [[r["index"] for r in shard] for shard in shards] == [[0], [1]]
    assert list(shards[0][0]["cells"]) == ["full"]
    calls.clear()
    monkeypatch.setattr(command, "run", lambda spec, out: None)
    assert cli.main([*args, "--gpu-layers", "-1"]) == 0
    assert calls[1] == {"num_cpus": 1, "num_gpus": 1}
