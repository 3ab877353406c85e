"""scripts/compare_kvpress.py: what it does to be fair, and what it prints; slow: a sample, and kvpress's own pipeline.

The slow tests need kvpress: `pip install kvpress gguf`, then `python -m pytest -m slow tests/test_compare_kvpress.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from script import load

from laprox_llamacpp.evaluate.records import read_objects
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task
from laprox_llamacpp.parts.alloc import Alloc

ROOT = Path(__file__).resolve().parent.parent
W = 32

script = load("compare_kvpress")


@pytest.mark.parametrize("n", [33, 100, 1023, 2048, 4095])
def test_kvpress_is_told_to_keep_what_we_keep(n: int) -> None:
    kept = np.arange(W + 1, n)
    assert [int(n * (1 - script.ratio(n, k))) for k in kept.tolist()] == kept.tolist()  # as compute_n_kept does it


@pytest.mark.parametrize("n_kept", [33, 64, 102, 205, 410, 1024])
def test_both_protect_equally_many_rows_beside_the_window(n_kept: int) -> None:
    alpha = script.safeguard(n_kept)
    assert 0 <= alpha <= 1
    assert int(n_kept * alpha) == W + Alloc.parse("guard0.2").floor(n_kept - W)  # as AdaKVPress does it


def test_budgets_that_the_window_alone_fills_are_refused() -> None:
    assert script.kept_tokens("0.1", 1023) == 102
    assert script.kept_tokens("33", 1023) == 33
    for budget in ("32", "0.03", "1.0"):
        with pytest.raises(ValueError, match="expected more than the window of 32"):
            script.kept_tokens(budget, 1023)
    with pytest.raises(ValueError, match="counts bytes"):
        script.kept_tokens("64MiB", 1023)


def test_jaccard_of_each_head() -> None:
    a, b = [np.array([0, 1, 2]), np.array([5])], [np.array([2, 3]), np.array([5])]
    assert script.jaccard(a, b) == [0.25, 1.0]


def sides(**texts: str) -> dict[str, Any]:
    return {side: {"text": text, "score": float("7" in text)} for side, text in texts.items()}


def records() -> list[dict[str, Any]]:
    cells = [
        (sides(ours="7", kvpress="7"), {**sides(ours="7", kvpress="8", our_rows="7"), "jaccard": 0.9}),
        (sides(ours="7", kvpress="71"), {**sides(ours="8", kvpress="8", our_rows="8"), "jaccard": 0.8}),
        (sides(ours="7", kvpress="7"), {**sides(ours="7", kvpress="7", our_rows="9"), "jaccard": 1.0}),
    ]
    return [
        {
            "logits": {"correlation": c, "rms": 1 - c},
            "cells": {"full": full, "snapkv@0.1": {**cell, "rows": 100, "kvpress_rows": 100}},
        }
        for c, (full, cell) in zip((0.99, 0.98, 0.999), cells)
    ]


def test_the_table_pairs_samples() -> None:
    head, rule, full, snapkv = (
        [x.strip() for x in line.strip("|").split("|")] for line in script.table(records(), "score").split("\n")
    )
    assert len(head) == len(rule) == len(full) == len(snapkv)
    assert full[:5] == ["full", "", "1.000 ± 0.000", "1.000 ± 0.000", "+0.000 ± 0.000"]
    assert full[head.index("same answer")] == "2 of 3"
    # ours 1 0 1, kvpress 0 0 1, on our rows 1 0 0: standard error of (1, 0, 0) is sqrt(1/3) / sqrt(3) = 1/3
    assert snapkv[:4] == ["snapkv", "0.1", "0.667 ± 0.333", "0.333 ± 0.333"]
    assert snapkv[4:6] == ["+0.333 ± 0.333", "+0.333 ± 0.333"]
    assert snapkv[head.index("same answer")] == "2 of 3"
    assert snapkv[head.index("same answer, on our rows")] == "2 of 3"
    assert snapkv[-1] == "0.900 (0.800)"


def test_the_table_without_answers() -> None:
    cell = {side: {"kl": kl} for side, kl in (("ours", 0.25), ("kvpress", 0.125), ("our_rows", 0.2))}
    got = script.table([{"cells": {"full": cell, "snapkv@0.1": cell}}] * 2, "kl")
    assert "answer" not in got and "| 0.25000 ± 0.00000 | 0.12500 ± 0.00000 | +0.12500 ± 0.00000 |" in got


def test_unequal_rows_are_told() -> None:
    some = records()
    assert "equally many in every cell" in script.notes(some)
    assert "correlation 0.99000 (lowest 0.98000)" in script.notes(some)
    some[1]["cells"]["snapkv@0.1"]["rows"] = 101
    assert "Rows kept: snapkv@0.1 by +1." in script.notes(some)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "version", lambda package: "1.2")
    file, setup = tmp_path / "new" / "out.jsonl", {"budgets": ("0.1",)}
    assert script.resume(file, setup) == []
    assert read_objects(file)[0]["made"]["kvpress"] == "1.2"
    with file.open("a") as f:
        f.write('{"index": 0}\n{"ind')
    assert script.resume(file, setup) == [{"index": 0}]
    assert file.read_text().endswith('{"index": 0}\n')
    with pytest.raises(ValueError, match="another run"):
        script.resume(file, {"budgets": ("0.2",)})


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_kvpress.py", *args])
    script.main()


def test_errors_are_one_line(
    tmp_path: Path, smol_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--model", str(smol_path), "--out", str(tmp_path / "x.jsonl"))
    monkeypatch.setattr(script, "missing", None)
    for args, why in (
        (("--budgets", "0.01"), "budget 0.01 keeps 10 of a prompt of 1024 tokens"),
        (("--budgets", ","), "--budgets is empty"),
        (("--model", "nothing"), "neither a file nor a known model"),
    ):
        with pytest.raises(SystemExit) as e:
            call(monkeypatch, *out, *args)
        assert why in str(e.value) and "\n" not in str(e.value)
    monkeypatch.setattr(script, "missing", ImportError("No module named 'kvpress'"))
    with pytest.raises(SystemExit):
        call(monkeypatch, *out)
    told = capsys.readouterr().err.strip().split("\n")[-1]
    assert "No module named 'kvpress'" in told and "pip install kvpress==" in told
    assert not (tmp_path / "x.jsonl").exists()


# ---- with kvpress


@pytest.mark.slow
def test_a_sample_is_answered_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kvpress", reason="pip install kvpress gguf")
    wrong = script.Method("wrong", "snapkv:pool=avg5", script._snapkv)  # the pool of 7 there
    monkeypatch.setattr(script, "METHODS", [*script.METHODS, wrong])
    out = tmp_path / "out.jsonl"
    call(monkeypatch, "--f32", "--samples", "1", "--tokens", "512", "--budgets", "0.2", "--out", str(out))
    assert "equally many in every cell" in capsys.readouterr().out
    cells = read_objects(out)[1]["cells"]
    assert len(cells) == 6
    for name, cell in cells.items():
        texts = {side: cell[side]["text"] for side in ("ours", "kvpress")}
        assert texts["ours"] == texts["kvpress"] or name == "wrong@0.2", name
        if name not in ("full", "wrong@0.2"):
            assert cell["jaccard"] >= 0.99, name
    assert cells["wrong@0.2"]["jaccard"] < 0.95


@pytest.mark.slow
def test_rival_does_what_kvpress_does(smol_path: Path) -> None:
    """Presses called afterwards, and our greedy loop, against kvpress's own context manager and pipeline."""
    kvpress = pytest.importorskip("kvpress", reason="pip install kvpress gguf")
    import torch
    import transformers

    torch.set_num_threads(1)
    task = Task.parse("needle:digits=4:open_answer=yes:max_tokens=12:tokens=500")
    session = Session(str(smol_path), [], n_ctx=task.n_ctx, n_threads=1, n_threads_batch=1)
    rival = script.Rival(smol_path, session)
    model = rival._model
    tokens = task.sample(session, 0).tokens
    rival.prefill(tokens)
    eos = model.generation_config.eos_token_id

    def decode(ids: Any, skip_special_tokens: bool) -> str:
        return session.detokenize([int(x) for x in ids if int(x) != eos]).decode()

    pipeline = SimpleNamespace(model=model, tokenizer=SimpleNamespace(decode=decode))
    answers = set()
    for method in script.METHODS:
        press = method.press(len(tokens), 90)
        rival.under(press)
        kept, theirs = rival.kept(), rival.answer(12)
        cache = transformers.DynamicCache()
        with torch.no_grad(), press(model):
            model.model(torch.tensor(tokens)[None], past_key_values=cache)
        left = iter(kept)
        for layer, of, whole in zip(model.model.layers, cache.layers, rival._whole.layers):
            masked = layer.self_attn.masked_key_indices
            for head in range(whole.keys.shape[1]):
                want = whole.keys[0, head, torch.tensor(next(left))]
                got = of.keys[0, head]
                if masked is not None:
                    gone = masked[2][masked[1] == head]
                    got = got[[i for i in range(len(tokens)) if i not in set(gone.tolist())]]
                assert {x.numpy().tobytes() for x in got} == {x.numpy().tobytes() for x in want}
        first = int(rival.after_prompt.argmax())
        with torch.no_grad():
            after = kvpress.KVPressTextGenerationPipeline.generate_answer(
                pipeline, torch.tensor([[first]]), cache, len(tokens), 11
            )
        assert session.detokenize([first]).decode() + after == theirs
        answers.add(theirs)
    assert len(answers) > 1  # eviction tells them apart
    session.close()
