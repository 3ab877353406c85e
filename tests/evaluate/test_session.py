"""Sessions of the evaluation harness: one full cache, every method on it, the full cache again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import HEADS, ONE, PAGES

from laprox_llamacpp import Llama, _native
from laprox_llamacpp.evaluate.cells import Cell, grid
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task

W = 32
NEXT = [42, 7, 99]


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
