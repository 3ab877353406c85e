"""Runs of the evaluation harness: records, resuming, shards, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import HEADS, ONE, fails

from laprox_llamacpp import _native, cli, gguf_check
from laprox_llamacpp.evaluate import records, runner, stats, texts
from laprox_llamacpp.evaluate.cells import grid
from laprox_llamacpp.evaluate.records import read, read_folder
from laprox_llamacpp.evaluate.runner import Run
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Sample, Task
from laprox_llamacpp.evaluate.tasks.continuation import Continuation

TEXT = "continuation:tokens=64:n=6"


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
    assert without_times(records) == without_times(read(out / "samples.jsonl"))
    return out


def test_records_hold_the_cells_of_each_sample(unbroken: Path) -> None:
    records = read(unbroken / "samples.jsonl")
    assert [(r["kv_type"], r["index"]) for r in records] == [(t, i) for i in range(2) for t in ("f16", "q4_0")]
    for record in records:
        assert list(record["cells"]) == ["full", "laprox@0.6", "streaming@0.6"] and record["n_prompt"] == 64
        full, laprox, streaming = record["cells"].values()
        assert full["rows"] == HEADS * 64 and record["reference"] == "f16"
        assert (full["kl"], full["top1"]) == (0.0, 1.0) or (record["kv_type"] == "q4_0" and full["kl"] > 0)
        assert laprox["rows"] == streaming["rows"] == HEADS * 38  # 0.6 of 64
        assert laprox["kl"] > 0 < streaming["kl"]
    assert len({r["info"]["start"] for r in records if r["kv_type"] == "f16"}) == 2
    f16, q4 = (sum(r["cells"]["full"]["kv_bytes"] for r in records if r["kv_type"] == t) for t in ("f16", "q4_0"))
    assert q4 / f16 == (18 / 32) / 2


def test_a_narrow_cache_is_held_against_the_widest(unbroken: Path, smol_path: Path) -> None:
    task = spec(smol_path).task
    rows: dict[str, Any] = {}
    for kv_type in ("f16", "q4_0"):
        session = Session(str(smol_path), [], n_ctx=task.n_ctx, type_k=kv_type, type_v=kv_type, **ONE)
        sample = task.sample(session, 1)
        session.prefill(sample.tokens)
        rows[kv_type] = np.stack(list(session.logprobs(sample.memo["after"][:-1]))).astype(np.float64)
        session.close()
    kl = (np.exp(rows["f16"]) * (rows["f16"] - rows["q4_0"])).sum(axis=1).mean()
    record = next(r for r in read(unbroken / "samples.jsonl") if (r["kv_type"], r["index"]) == ("q4_0", 1))
    assert record["cells"]["full"]["kl"] == pytest.approx(kl, rel=1e-4) and kl > 1e-3


@pytest.mark.parametrize("done", [[("f16", 0)], [("f16", 0), ("f16", 1)], [("f16", 0), ("q4_0", 0), ("f16", 1)]])
def test_a_run_that_ended_between_two_types_goes_on(
    unbroken: Path, smol_path: Path, tmp_path: Path, done: list[tuple[str, int]]
) -> None:
    want = read(unbroken / "samples.jsonl")
    shutil.copy(unbroken / "run.json", tmp_path)
    kept = [r for r in want if (r["kv_type"], r["index"]) in done]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    runner.run(spec(smol_path), tmp_path)
    got = read(tmp_path / "samples.jsonl")
    assert got[: len(kept)] == kept and len(got) == len(want)
    assert without_times(got) == without_times(want)


def test_a_narrow_cache_that_was_held_against_itself_is_measured_again(
    unbroken: Path, smol_path: Path, tmp_path: Path
) -> None:
    want = read(unbroken / "samples.jsonl")
    shutil.copy(unbroken / "run.json", tmp_path)
    former = [{k: v for k, v in r.items() if k != "reference"} for r in want]  # as earlier versions wrote them
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in former))
    seen: list[tuple[int, int]] = []
    records = runner.run(spec(smol_path), tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(2, 4), (3, 4), (4, 4)]
    assert len(read(tmp_path / "samples.jsonl")) == 6
    for got in (records, read_folder(tmp_path / "run.json").records):
        assert [r.get("reference") for r in sorted(got, key=lambda r: str(r["kv_type"]))] == [None, None, "f16", "f16"]


def test_the_widest_cache_is_measured_again_only_where_it_is_needed(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    init = Session.__init__
    monkeypatch.setattr(Session, "__init__", lambda self, *a, **k: (made.append(k["type_k"]), init(self, *a, **k))[1])
    needle = spec(smol_path, task=Task.parse("needle:tokens=128:max_tokens=2"), methods=[], n_samples=1)
    for run, want in ((needle, ["q4_0"]), (spec(smol_path, methods=[], n_samples=1), ["f16", "q4_0"])):
        out = tmp_path / run.task.name
        runner.run(run, out)
        wide = next(r for r in read(out / "samples.jsonl") if r["kv_type"] == "f16")
        (out / "samples.jsonl").write_text(json.dumps(wide) + "\n")
        made.clear()
        runner.run(run, out)
        assert made == want and ("reference" in wide) == run.task.against_full


def test_a_sample_is_gone_before_the_next(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Sample]] = []
    sample = Continuation.sample

    def watched(self: Continuation, session: Session, index: int) -> Sample:
        assert not any(ref() for ref in alive)
        made = sample(self, session, index)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Continuation, "sample", watched)
    runner.run(spec(smol_path, methods=[]), tmp_path / "out")
    assert len(alive) == 2  # one for both KV types


def test_run_json_says_what_was_run(unbroken: Path, smol_path: Path) -> None:
    head = json.loads((unbroken / "run.json").read_text())
    assert head["setup"]["model_sha256"] == hashlib.sha256(smol_path.read_bytes()).hexdigest()
    assert head["setup"]["options"] == {"tokens": 64, "n": 6, "haystack": "python", "seed": 0}
    assert (head["setup"]["metric"], head["setup"]["higher"]) == ("kl", False)
    assert head["made"]["llama_cpp_python"] == "0.3.36" and head["made"]["laprox_llamacpp"]
    assert head["made"]["command"] and head["made"]["python"]
    assert head["made"]["build"] == _native.build_info()
    assert (head["made"]["n_threads"], head["made"]["n_gpu_layers"]) == (1, 0)
    assert "resumed" not in head and "merged" not in head


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
    measured = read(file)
    assert 1 <= len(measured) < 4
    with file.open("ab") as f:
        f.write(b'{"index": 1, "kv_ty')  # what a kill may leave
    assert read(file) == measured
    seen: list[int] = []
    runner.run(spec(smol_path), tmp_path, lambda done, total: seen.append(done))
    assert seen[0] == len(measured)
    assert read(file)[: len(measured)] == measured
    assert without_times(read(file)) == without_times(read(unbroken / "samples.jsonl"))


def test_shards_merge_to_the_whole_run(
    unbroken: Path, smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = without_times(read(unbroken / "samples.jsonl"))
    runner.run(spec(smol_path, shard=(0, 2)), tmp_path / "a")
    runner.run(spec(smol_path, shard=(1, 2)), tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").glob("*.jsonl")] == ["samples-1-of-2.jsonl"]
    out = ["--out", str(tmp_path / "ab")]
    assert cli.main(["merge", str(tmp_path / "b"), *out]) == 0
    assert capsys.readouterr().out == f"2 of 4 samples in {tmp_path / 'ab'}\n"
    assert cli.main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), *out]) == 0
    assert capsys.readouterr().out == f"4 of 4 samples in {tmp_path / 'ab'}\n"
    assert without_times(read(tmp_path / "ab" / "samples.jsonl")) == want
    # shards of one folder are merged where they are
    (tmp_path / "a" / "samples-1-of-2.jsonl").write_bytes((tmp_path / "b" / "samples-1-of-2.jsonl").read_bytes())
    assert cli.main(["merge", str(tmp_path / "a"), "--out", str(tmp_path / "a")]) == 0
    assert [p.name for p in (tmp_path / "a").glob("*.jsonl")] == ["samples.jsonl"]
    assert without_times(read(tmp_path / "a" / "samples.jsonl")) == want


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
    (other / "run.json").write_text((unbroken / "run.json").read_text())
    (other / "samples.jsonl").write_text('{"torn')
    with pytest.raises(ValueError, match="other: no finished sample, nothing to merge"):
        runner.merge([other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_written_to_is_refused(unbroken: Path, smol_path: Path) -> None:
    file = unbroken / "samples.jsonl"
    before = file.read_bytes()
    with file.open("a") as f:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(f, fcntl.LOCK_EX)
        for write in (
            lambda: runner.run(spec(smol_path), unbroken), lambda: runner.merge([unbroken], unbroken),
            lambda: runner.run(spec(smol_path, shard=(1, 2)), unbroken),  # its samples are among those
        ):  # fmt: skip
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


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("needle:tokens=8192:max_tokens=16", "needle:tokens=8192 with 16 more for its answers needs a context of 8208 "
         "tokens, the model was trained for 8192: use tokens=8176 or less"),
        ("needle:tokens=8177:max_tokens=16", "use tokens=8176 or less"),
        ("continuation:tokens=8190:n=3", "use tokens=8189 or less"),
        ("needle:max_tokens=9000", "use fewer or shorter answers"),
    ],
)  # fmt: skip
def test_a_prompt_beyond_the_models_context(smol_path: Path, tmp_path: Path, task: str, says: str) -> None:
    tmp_path.joinpath("out").mkdir()
    with pytest.raises(ValueError, match=says) as e:
        runner.run(spec(smol_path, task=Task.parse(task)), tmp_path / "out")
    assert "\n" not in str(e.value) and not list((tmp_path / "out").iterdir())


def test_prompts_as_long_as_the_model_goes(smol_path: Path, qwen_path: Path) -> None:
    assert gguf_check.n_ctx_train(smol_path) == 8192 and gguf_check.n_ctx_train(qwen_path) == 32768
    whole = spec(qwen_path, task=Task.parse("needle:tokens=32752:max_tokens=16"))
    assert whole.n_ctx == 32768
    assert spec(smol_path, task=Task.parse("continuation:tokens=8064:n=128")).n_ctx == 8192


@pytest.mark.parametrize("task", ["continuation:tokens=250:n=6", "needle:tokens=252:max_tokens=4"])
def test_a_context_without_room_is_enough(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    one = spec(smol_path, task=Task.parse(task), kv_types=["f16"], n_samples=1)
    want = runner.run(one, tmp_path / "room")
    monkeypatch.setattr(gguf_check, "n_ctx_train", lambda path: 256)
    assert one.n_ctx == 256
    assert without_times(runner.run(one, tmp_path / "tight")) == without_times(want)


def test_a_run_that_fails_before_its_first_record_leaves_nothing(smol_path: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "short.txt", tmp_path / "out"
    text.write_text("one line\n\nand another")
    run = spec(smol_path, task=Task.parse(f"continuation:haystack={text}"))
    with pytest.raises(ValueError, match="expected at least 2304"):
        runner.run(run, out)
    assert not out.exists()
    out.mkdir()
    out.joinpath("samples-1-of-2.jsonl").write_text("")  # another shard has begun
    with pytest.raises(ValueError, match="expected at least 2304"):
        runner.run(replace(run, shard=(0, 2)), out)
    assert sorted(p.name for p in out.iterdir()) == ["run.json", "samples-1-of-2.jsonl"]


def test_longbench_data_is_read_before_the_folder_is_taken(smol_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    line = json.dumps({"input": "Who?", "context": "Ann. " * 60, "answers": ["Ann"], "all_classes": None})
    hashes = []
    for folder, text in (("a", f"{line}\n"), ("b", f"{line}\n{line}\n"), ("c", f"{line}\n5\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hotpotqa.jsonl").write_text(text)
        task = Task.parse(f"longbench:data={tmp_path / folder}:subset=hotpotqa")
        if folder != "c":
            hashes.append(task.data_sha256())
            continue
        with pytest.raises(ValueError, match="line 2 is not an object"):
            runner.run(spec(smol_path, task=task, methods=[]), tmp_path / "out")
    assert len(set(hashes)) == 2 and not (tmp_path / "out").exists()


def test_other_texts_are_another_run(
    unbroken: Path, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(f"Paragraph {i} about nothing at all." for i in range(40)))
    for name in ("continuation:n=6", "similarity:n=1", "needle", "multi_question"):
        task = Task.parse(f"{name}:tokens=256:haystack={text}")
        before = task.data_sha256()
        text.write_text(text.read_text().replace("Paragraph 7", "Paragraph 8", 1))
        assert task.data_sha256() != before and len(before) == 64
        text.write_text(text.read_text().replace("Paragraph 8", "Paragraph 7", 1))
        assert task.data_sha256() == before
    run = spec(smol_path, task=Task.parse(f"continuation:tokens=64:n=6:haystack={text}"), methods=[], n_samples=1)
    runner.run(run, out)
    text.write_text(text.read_text() + "\n\nOne more.")
    with pytest.raises(ValueError, match=re.escape("holds another run (data_sha256 differ)")):
        runner.run(run, out)
    # a folder of before the texts were told goes on
    head = json.loads((unbroken / "run.json").read_text())
    del head["setup"]["data_sha256"]
    old = tmp_path / "old"
    shutil.copytree(unbroken, old)
    (old / "run.json").write_text(json.dumps(head))
    assert len(runner.run(spec(smol_path), old)) == 4
    # another Python with other documentation
    monkeypatch.setattr(texts, "paragraphs", lambda: ["Other words."] * 9)
    with pytest.raises(ValueError, match=re.escape("holds another run (data_sha256 differ)")):
        runner.run(spec(smol_path), unbroken)


def test_merge_refuses_other_prompts(unbroken: Path, tmp_path: Path) -> None:
    first = read(unbroken / "samples.jsonl")[0]
    task = Task.parse(TEXT)
    assert re.fullmatch("[0-9a-f]{16}", first["prompt_sha256"]) and task.name == "continuation"
    prompts = {r["index"]: {s["prompt_sha256"] for s in read(unbroken / "samples.jsonl") if s["index"] == r["index"]}
               for r in read(unbroken / "samples.jsonl")}  # fmt: skip
    assert [len(p) for p in prompts.values()] == [1, 1] and prompts[0] != prompts[1]
    other = tmp_path / "other"
    shutil.copytree(unbroken, other)
    for digest, refused in (("0" * 16, True), (None, False)):
        changed = {**first, "prompt_sha256": digest} if digest else {k: v for k, v in first.items() if "sha" not in k}
        (other / "samples.jsonl").write_text(json.dumps(changed) + "\n")
        if refused:
            with pytest.raises(ValueError, match=r"sample 0 \(f16\) in .*other.* has another prompt") as e:
                runner.merge([unbroken, other], tmp_path / "out")
            assert "\n" not in str(e.value) and not (tmp_path / "out").exists()
        else:
            assert runner.merge([unbroken, other], tmp_path / "out") == (4, 4)


def pack(file: Path) -> None:
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()


def test_a_packed_run_goes_on_and_merges(unbroken: Path, smol_path: Path, tmp_path: Path) -> None:
    whole = read(unbroken / "samples.jsonl")
    packed, plain = tmp_path / "samples.jsonl.gz", tmp_path / "samples.jsonl"
    shutil.copy(unbroken / "run.json", tmp_path)
    plain.write_text("".join(json.dumps(r) + "\n" for r in whole))
    pack(plain)
    before = packed.read_bytes()
    seen: list[tuple[int, int]] = []
    assert runner.run(spec(smol_path), tmp_path, lambda done, total: seen.append((done, total))) == whole
    assert seen == [(4, 4)] and not plain.exists()
    assert runner.run(spec(smol_path, shard=(1, 2)), tmp_path) == [r for r in whole if r["index"] == 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", packed.name]
    runner.run(spec(smol_path, n_samples=3), tmp_path)
    assert [r["index"] for r in read(plain)] == [2, 2] and packed.read_bytes() == before
    experiment = stats.read(tmp_path)[0][0]
    assert len(experiment.samples) == 6
    assert runner.merge([tmp_path], tmp_path / "elsewhere") == (6, 6)
    assert packed.exists() and plain.exists()
    assert runner.merge([tmp_path], tmp_path) == (6, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run.json", "samples.jsonl"]
    assert without_times(read(plain)) == without_times(read(tmp_path / "elsewhere" / "samples.jsonl"))
    assert without_times(r for r in read(plain) if r["index"] < 2) == without_times(whole)


def test_how_a_run_went_on_is_told(
    unbroken: Path, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(unbroken, tmp_path / "a")
    shutil.copytree(unbroken, tmp_path / "b")
    heads = {name: lambda name=name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("a", "b", "c")}
    made = heads["a"]()["made"]
    lines = (unbroken / "samples.jsonl").read_text().splitlines(keepends=True)

    def go_on(name: str, n_done: int, build: str = _native.build_info()) -> None:
        monkeypatch.setattr(_native, "build_info", lambda: build)
        (tmp_path / name / "samples.jsonl").write_text("".join(lines[:n_done]))
        runner.run(spec(smol_path), tmp_path / name)

    go_on("a", 3)  # time and command alone
    go_on("a", 4, "newer")  # nothing was measured
    assert "resumed" not in heads["a"]() and heads["a"]()["made"] == made
    go_on("a", 3, "newer")
    go_on("a", 3, "newer")
    assert [m["build"] for m in heads["a"]()["resumed"]] == ["newer"] and heads["a"]()["made"] == made
    go_on("b", 3, "another")
    assert [m["build"] for m in heads["b"]()["resumed"]] == ["another"]
    runner.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    head = heads["c"]()
    assert (head["made"], head["resumed"]) == (made, heads["a"]()["resumed"])
    assert head["merged"] == heads["b"]()["resumed"]  # both began as the same run
    runner.merge([tmp_path / "b"], tmp_path / "c")
    assert json.loads(json.dumps(sorted(map(str, records.makes(heads["c"]()))))) == sorted(
        map(str, records.makes(head))
    )


def test_damaged_records_are_named(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    good = '{"index": 0, "kv_type": "f16", "cells": {}}\n'
    for bad in ("\0\0", "5", "{}", "[]", "null", '{"index": "0", "kv_type": "f16", "cells": {}}'):
        file.write_text(f"{good}{bad}\n{good}")
        with pytest.raises(ValueError, match=r"line 2 of .*samples\.jsonl is no record") as e:
            read(file)
        assert "\n" not in str(e.value)
    pack(file)
    with pytest.raises(ValueError, match=r"line 2 of .*samples\.jsonl\.gz is no record"):
        read(tmp_path / "samples.jsonl.gz")
    (tmp_path / "samples.jsonl.gz").write_bytes(gzip.compress(good.encode())[:-9])
    with pytest.raises(ValueError, match=r"samples\.jsonl\.gz cannot be unpacked"):
        read(tmp_path / "samples.jsonl.gz")


@pytest.mark.parametrize("line", ["5", "{}"])
def test_a_damaged_line_is_told_in_one(
    unbroken: Path, smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    shutil.copy(unbroken / "run.json", tmp_path)
    (tmp_path / "samples.jsonl").write_text(f"{line}\n")
    args = ["eval", TEXT, "--methods", "laprox,streaming", "--budgets", "0.6", "--kv-type", "f16,q4_0"]
    args += ["--samples", "2", "--threads", "1", "--model", str(smol_path), "--out", str(tmp_path)]
    for command_ in (args, ["merge", str(tmp_path), "--out", str(tmp_path / "out")]):
        assert "line 1 of " in fails(capsys, *command_)


def test_cells() -> None:
    assert [c.name for c in grid(["full", "laprox", "snapkv:pool=7"], ["0.05", "64", "1MiB"])] == [
        f"{m}@{b}" for m in ("laprox", "snapkv:pool=7") for b in ("0.05", "64", "1MiB")
    ]
    assert [c.name for c in grid(["laprox", "laprox"], ["0.1", "10%"])] == ["laprox@0.1"]
    assert grid(["full"], []) == grid([], ["0.1"]) == []
