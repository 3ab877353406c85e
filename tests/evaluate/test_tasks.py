"""Tasks of the evaluation harness, from their texts to their scores."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import HEADS, ONE

from laprox_llamacpp import Llama, _native
from laprox_llamacpp.evaluate import texts
from laprox_llamacpp.evaluate.cells import grid
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Sample, Task

STOP_WORDS = {"a", "an", "and", "any", "did", "do", "for", "in", "it", "of", "on", "that", "the", "to", "was", "which"}


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


@pytest.mark.parametrize(("n", "seed"), [(10, 0), (10, 1), (20, 2)])
def test_stretches_are_spread_over_the_text(session: Session, n: int, seed: int) -> None:
    text = "\n\n".join(texts.source("code"))
    found = [texts.stretch(session, "code", seed, index, 64) for index in range(n)]
    for start, tokens in found:
        assert text[start - 1].isspace() and not text[start].isspace()
        assert text[start:].startswith(session.detokenize(tokens[:32]).decode().strip())
    starts = sorted(start / len(text) for start, _ in found)
    gaps = np.diff([*starts, starts[0] + 1])
    assert gaps.min() > 0.3 / n and gaps.max() < 2 / n  # at random: the least of 20 is 0.05 / n on average


def test_stretches_of_one_long_paragraph_differ(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "mixed ünï.txt"
    file.write_text("A heading.\n\n" + " ".join(f"word{i}" for i in range(1500)), encoding="utf-8")
    found = [texts.stretch(session, str(file), 0, index, 200) for index in range(10)]
    assert len({start for start, _ in found}) == len({tuple(tokens) for _, tokens in found}) == 10


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
    answers = {f" {first.upper()} and {second}.": 2 / 3, f"{first}s, un{second}, {first}1": 0.0, f"({first})": 1 / 3}
    for answer, score in (answers | {"nothing": 0.0}).items():
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
    answers = iter([first, f"{second}0", f"it is {first}.", second] if aware == "yes" else [first, "no", second, first])
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
