"""RULER through lm-eval: its documents in the model's tokens, nothing downloaded, files where it needs some."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from common import Says

from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task
from laprox_llamacpp.evaluate.tasks import ruler

LIMITS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_squad": 32, "qa_hotpot": 32}  # RULER's; 128 for needles


# ---- without lm-eval


def test_without_lm_eval_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError) as error:
        Task.parse("ruler")
    assert str(error.value) == "ruler needs lm_eval, which is not installed: pip install '.[ruler]' in a clone"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("ruler:tokens=100", "tokens is 100"),
        ("ruler:n=0", "n is 0"),
        ("ruler:subset=niah", "unknown subset 'niah', expected one of niah_single_1, "),
        ("ruler:subset=niah_single_2", "ruler:subset=niah_single_2 needs essays=FILE, got ''"),
        ("ruler:subset=vt+qa_squad:hotpot=x.json", "ruler:subset=qa_squad needs squad=FILE, got ''"),
        ("ruler:subset=qa_hotpot:hotpot=/nowhere.json", "needs hotpot=FILE, got '/nowhere.json'"),
    ],
)
def test_bad_options_are_told_in_one_line(spec: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "require", lambda what, extra: None)
    with pytest.raises(ValueError) as error:
        Task.parse(spec)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_thirteen_subsets() -> None:
    assert len(ruler.SUBSETS) == len(set(ruler.SUBSETS)) == 13


# ---- with lm-eval


@pytest.fixture(scope="module")
def session(smol_path: Path) -> Iterator[Session]:
    pytest.importorskip("lm_eval")
    for package in ("nltk", "wonderwords", "scipy", "transformers"):
        pytest.importorskip(package)
    made = Session(str(smol_path), [], n_ctx=2048, n_threads=1, n_threads_batch=1)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network."""

    def refuse(*_: Any) -> None:
        raise AssertionError("something is being downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture()
def fresh() -> Iterator[None]:
    """Documents are made anew."""
    ruler._MADE.clear()
    yield
    ruler._MADE.clear()


def text_of(session: Session, tokens: list[int]) -> str:
    return session.detokenize(tokens, special=True).decode()


@pytest.mark.slow
@pytest.mark.parametrize("subset", ruler.OFFLINE)
def test_documents_hold_their_answers_and_fit(subset: str, session: Session) -> None:
    task = Task.parse(f"ruler:tokens=1024:n=3:subset={subset}")
    for index in range(3):
        sample = task.sample(session, index)
        text = text_of(session, sample.tokens)
        doc = sample.memo["doc"]
        assert text.startswith("<|im_start|>system\n") and doc["input"].strip() in text
        # the answer is begun for the model, after the template
        assert text.endswith(f"<|im_start|>assistant\n{doc['gen_prefix']}")
        assert all(value in doc["input"] for value in sample.info["expected"])
        n = len(session.tokenize(doc["input"].encode(), add_bos=True))
        assert 300 < n <= 1024 and len(sample.tokens) + LIMITS.get(subset, 128) <= task.n_ctx
    with pytest.raises(ValueError, match=f"document 3 of {subset}, which has 3; raise ruler:n="):
        task.sample(session, 3)


@pytest.mark.slow
def test_nltk_data_is_not_fetched(session: Session, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """lm-eval's module would, when it is imported."""
    import nltk

    asked: list[str] = []
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", asked.append)
    for name in [n for n in sys.modules if n.startswith("lm_eval.tasks.ruler")]:
        monkeypatch.delitem(sys.modules, name)
    Task.parse("ruler:tokens=1024:n=1:subset=niah_single_1").sample(session, 0)
    assert "lm_eval.tasks.ruler.prepare_niah" in sys.modules and not asked


@pytest.mark.slow
def test_more_tokens_make_longer_documents(session: Session) -> None:
    for subset in ("niah_single_1", "vt", "fwe"):
        short, long = (
            len(Task.parse(f"ruler:tokens={n}:n=1:subset={subset}").sample(session, 0).tokens) for n in (1024, 2048)
        )
        assert long > 1.7 * short, subset


@pytest.mark.slow
def test_needles_are_counted_and_asked_for(session: Session) -> None:
    single, many = (
        Task.parse(f"ruler:tokens=1024:n=1:subset={s}").sample(session, 0) for s in ("niah_single_1", "niah_multikey_2")
    )
    for sample in (single, many):
        [value], doc = sample.info["expected"], sample.memo["doc"]["input"]
        key = re.search(rf"magic numbers for (\S+) is: {value}\.", doc)
        assert key is not None and doc.endswith(f"for {key[1]} mentioned in the provided text?")
    assert len(re.findall("magic numbers? for", single.memo["doc"]["input"])) == 2
    assert len(re.findall("magic numbers? for", many.memo["doc"]["input"])) > 20


@pytest.mark.slow
@pytest.mark.parametrize("subset", ruler.OFFLINE)
def test_documents_depend_on_the_seed_alone(subset: str, session: Session, fresh: None) -> None:
    def made(seed: int) -> list[str]:
        ruler._MADE.clear()
        random.seed()  # what the process has drawn before says nothing
        task = Task.parse(f"ruler:tokens=1024:n=2:subset={subset}:seed={seed}")
        return [text_of(session, task.sample(session, i).tokens) for i in range(2)]

    first = made(1)
    assert first == made(1) and first[0] != first[1] and first != made(2)


@pytest.mark.slow
def test_scores_are_shares_of_the_expected_strings(session: Session) -> None:
    task = Task.parse("ruler:tokens=1024:n=1:subset=fwe+niah_single_1")
    words, needle = task.sample(session, 0), task.sample(session, 1)
    expected = words.info["expected"]
    for text, score in ((" ".join(expected).upper(), 1.0), (f"\n{expected[1]}, {expected[0]}", 2 / 3), ("none", 0.0)):
        says = Says(text)
        got = task.measure(says, words)  # type: ignore[arg-type]
        assert got["text"] == text and got["score"] == pytest.approx(score) and says.asked == (50, [])
    says = Says(f" {needle.info['expected'][0]}.")
    assert task.measure(says, needle)["score"] == 1.0 and says.asked == (128, [])  # type: ignore[arg-type]


# ---- files


@pytest.fixture()
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """A sentence splitter without any knowledge: it ends sentences at full stops."""
    import nltk

    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).touch()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


def essay(folder: Path) -> Path:
    rng = random.Random(3)
    words = ["sun", "tree", "road", "stone", "lake", "cloud", "field", "bird"]
    text = " ".join(" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(400))
    file = folder / "essay.txt"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subset", "n_needles", "n_expected"),
    [("niah_single_2", 1, 1), ("niah_single_3", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4),
     ("niah_multiquery", 4, 4)],
)  # fmt: skip
def test_essays_come_from_a_file(
    subset: str, n_needles: int, n_expected: int, session: Session, tmp_path: Path, punkt: None
) -> None:
    task = Task.parse(f"ruler:tokens=1024:n=1:subset={subset}:essays={essay(tmp_path)}")
    sample = task.sample(session, 0)
    doc = sample.memo["doc"]["input"]
    assert len(re.findall("One of the special magic", doc)) == n_needles
    assert len(sample.info["expected"]) == n_expected and all(v in doc for v in sample.info["expected"])
    assert len(re.findall(r"\b(sun|tree|road|stone|lake|cloud|field|bird)\b", doc)) > 100


@pytest.mark.slow
def test_essays_without_punkt_are_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    task = Task.parse(f"ruler:tokens=1024:n=1:subset=niah_single_2:essays={essay(tmp_path)}")
    with pytest.raises(ValueError, match=r"need NLTK's punkt_tab, .* python -m nltk\.downloader punkt_tab"):
        task.sample(session, 0)


def squad(folder: Path) -> Path:
    def paragraph(i: int) -> dict[str, Any]:
        right = {"question": f"Where is tower {i}?", "is_impossible": False, "answers": [{"text": f"hill {i}"}]}
        other = {"question": "Why?", "is_impossible": True, "answers": []}
        return {"context": f"Tower {i} stands on hill {i}, " + "far from here, " * 6, "qas": [right, other]}

    data = {"data": [{"paragraphs": [paragraph(i), paragraph(100 + i)]} for i in range(30)]}
    (folder / "squad.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "squad.json"


def hotpot(folder: Path) -> Path:
    def item(i: int) -> dict[str, Any]:
        texts = [[f"Tower {i}", [f"It stands on hill {i}. ", "It is old."]], [f"Hill {i}", [f"It is in land {i}."]]]
        return {"question": f"Where is tower {i}?", "answer": f"land {i}", "context": texts}

    (folder / "hotpot.json").write_text(json.dumps([item(i) for i in range(60)]), encoding="utf-8")
    return folder / "hotpot.json"


@pytest.mark.slow
@pytest.mark.parametrize(("subset", "make", "n"), [("qa_squad", squad, 60), ("qa_hotpot", hotpot, 60)])
def test_questions_come_from_a_file(subset: str, make: Any, n: int, session: Session, tmp_path: Path) -> None:
    option = ruler.NEEDS[subset]
    task = Task.parse(f"ruler:tokens=1024:n=500:subset={subset}:{option}={make(tmp_path)}")
    assert isinstance(task, ruler.Ruler) and len(task.definition(session, subset).test_docs()) == n
    sample = task.sample(session, 0)
    [answer] = sample.info["expected"]
    doc = sample.memo["doc"]["input"]
    assert answer in doc and "Question: Where is tower" in doc and doc.count("Document ") > 5
    assert text_of(session, sample.tokens).endswith("<|im_start|>assistant\nAnswer:")
    says = Says(f" On {answer.upper()}")
    assert task.measure(says, sample)["score"] == 1.0 and says.asked == (32, [])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{", "[]x", '{"other": 1}', '{"data": [1]}'])
def test_another_layout_is_refused(text: str, session: Session, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    task = Task.parse(f"ruler:tokens=1024:subset=qa_squad:squad={tmp_path / 'x.json'}")
    with pytest.raises(ValueError, match=r"x\.json is not in the layout of squad's JSON files"):
        task.sample(session, 0)
