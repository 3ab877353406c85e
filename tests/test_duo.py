"""duo: the kept set against a count row by row, profiles and their files, and calibration against NumPy float64."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from laprox_llamacpp import Llama, calibrate, cli, demo, duo_profile, haystack
from laprox_llamacpp.duo_profile import Profile, fingerprint, load, save
from laprox_llamacpp.evaluate.cells import grid
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.methods.duo import Duo
from laprox_llamacpp.observed import ObservedPrompt
from laprox_llamacpp.policy import EvictionPolicy

F64 = npt.NDArray[np.float64]
ONE: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}  # idle threads spin
SHAPE = [2, 3, 1]  # KV heads of each layer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smol_path: Path) -> Path:
    """An empty cache folder; `smol_path` comes from the real one."""
    monkeypatch.setenv("LAPROX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that stands for a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 4)
    return path


def profile_of(path: Path, scores: list[float], shape: list[int] = SHAPE) -> Profile:
    places = [(2 * il, h) for il, n in enumerate(shape) for h in range(n)]  # every other layer is not evictable
    heads = tuple((il, h, score) for (il, h), score in zip(places, scores))
    return Profile(fingerprint(path), path.name, 2 * len(shape), heads)


def prompt_of(path: Path, n_prompt: int, window: int, shape: list[int] = SHAPE) -> Any:
    return SimpleNamespace(
        n_prompt=n_prompt, window=window, n_cand=n_prompt - window, n_head_kv=shape, n_heads=sum(shape),
        model_path=str(path), note=None,
    )  # fmt: skip


# ---- the kept set


def by_rows(scores: list[float], n: int, w: int, k: int, sinks: int, recent: int) -> list[list[int]]:
    """The definition, a row at a time: who streams first, then the best heads get one older position after another."""
    rows = len(scores) * (k + w)
    recent = max(recent, w)
    streaming = [p for p in range(n) if p < sinks or p >= n - recent]
    held = [set(streaming) for _ in scores]
    if rows < len(scores) * len(streaming):
        n_first = min(k, int(Fraction(sinks, sinks + recent) * (k + w)))
        ends = set(range(n_first)) | set(range(n - (k + w - n_first), n))
        held = [set(ends) for _ in scores]
    rows -= sum(map(len, held))
    for head in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        for position in reversed(range(n)):
            if rows > 0 and position not in held[head]:
                held[head].add(position)
                rows -= 1
    return [sorted(p for p in positions if p < n - w) for positions in held]


def test_kept_set_is_the_definition(model: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    partial = 0
    for trial in range(60):
        n, w = rng.randint(20, 60), rng.randint(1, 8)
        sinks, recent = rng.choice([0, 3, 9, 40]), rng.choice([0, 5, 12, 50])
        scores = [rng.choice([0.0, 0.1, 0.2, rng.random()]) for _ in range(sum(SHAPE))]  # ties, too
        path = tmp_path / f"{trial}.json"
        save(profile_of(model, scores), path)
        policy = Duo(window=w, protect_sinks=sinks, recent=recent, profile=str(path))
        for k in range(n - w + 1):
            prompt = prompt_of(model, n, w)
            kept = policy.keep(prompt, k)
            assert [x.tolist() for x in kept] == by_rows(scores, n, w, k, sinks, recent), (n, w, k, sinks, recent)
            assert sum(map(len, kept)) == prompt.n_heads * k
            assert all(x.dtype == np.int32 for x in kept)
            assert (prompt.note is not None) == (k + w < min(n, sinks + max(recent, w)))
            if prompt.note is not None:
                first = next((i for i, p in enumerate(kept[0]) if p != i), k)
                assert f"with {first} sinks and {k + w - first} recent positions" in prompt.note
            partial += len({len(x) for x in kept}) == 3
    assert partial > 100  # streaming heads, one between, and whole ones


def test_defaults_are_the_papers() -> None:
    policy = EvictionPolicy.parse("duo")
    assert policy == Duo(window=32, protect_sinks=128, recent=256, profile="") and str(policy) == "duo"
    assert str(EvictionPolicy.parse("duo:recent=64:profile=/a:b.json")) == "duo:recent=64:profile=/a:b.json"
    for spec in ("duo:recent=-1", "duo:protect_sinks=x", "duo:sinks=4"):
        with pytest.raises(ValueError):
            EvictionPolicy.parse(spec)


# ---- profiles


def test_save_and_load(model: Path, tmp_path: Path) -> None:
    before = dataclasses.replace(
        profile_of(model, [0.1, 1 / 3, 0.0, 1e-30, 5.0, -2.0]), settings={"seed": 1}, package="0"
    )
    path = tmp_path / "new" / "folder" / "p.json"
    save(before, path)
    assert load(path) == before
    assert before.heads_per_layer() == SHAPE and before.scores()[1] == 1 / 3
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]  # nothing temporary stays


def test_a_failed_save_leaves_the_old_file(model: Path, tmp_path: Path) -> None:
    good = profile_of(model, [0.0] * 6)
    save(good, tmp_path / "p.json")
    with pytest.raises(ValueError):
        save(profile_of(model, [float("nan")] * 6), tmp_path / "p.json")
    assert load(tmp_path / "p.json") == good


@pytest.mark.parametrize("size", [0, 1, 1000, 65536, 65537, 5 << 20, 40 << 30])
def test_fingerprint_sees_the_size_and_every_block(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, size)  # sparse
    marks = {fingerprint(path)}
    os.truncate(path, size + 1)
    marks.add(fingerprint(path))
    os.truncate(path, size)
    places = [0, size // 2, size - 1] if size <= 4 << 20 else [i * (size - 65536) // 63 + 9 for i in range(64)]
    places = sorted({p for p in places if 0 <= p < size} | {size - 1} - {-1})
    for place in places:
        with path.open("r+b") as f:
            f.seek(place)
            f.write(b"x")
        marks.add(fingerprint(path))
        with path.open("r+b") as f:
            f.seek(place)
            f.write(b"\0")
    assert len(marks) == 2 + len(places)


def good(path: Path) -> dict[str, Any]:
    return {
        "format": duo_profile.FORMAT, "version": 1, "fingerprint": fingerprint(path), "model": "m", "n_layer": 6,
        "settings": {}, "package": "0.1.0", "heads": [[2 * il, h, 0.5] for il, n in enumerate(SHAPE) for h in range(n)],
    }  # fmt: skip


def but(**changes: Any) -> Callable[[dict[str, Any]], str]:
    return lambda data: json.dumps({**data, **changes})


HOSTILE: list[tuple[Callable[[dict[str, Any]], str | bytes], str]] = [
    (lambda d: "", "Expecting value"),
    (lambda d: json.dumps(d)[:-9], "Expecting"),
    (lambda d: b"\xff\xfe", "utf-8"),
    (lambda d: "[" * 100_000, "nested too deep"),
    (lambda d: "9" * 100_000, "an integer of 100000 digits"),
    (lambda d: " " * (duo_profile.MAX_BYTES + 1), "more than"),
    (lambda d: "[]", "format"),
    (lambda d: json.dumps({k: v for k, v in d.items() if k != "heads"}), "heads is None"),
    (but(format="gguf"), "format"),
    (but(version=2), "version is 2, expected 1"),
    (but(fingerprint=7), "fingerprint is 7"),
    (but(model=["x" * 1000]), "model is"),
    (but(n_layer=True), "n_layer is True"),
    (but(n_layer=2), "expected 0 to 1"),
    (but(settings=[]), "settings is []"),
    (but(package=None), "package is None"),
    (but(heads={}), "heads is {}"),
    (but(heads=[]), "no heads"),
    (but(heads=[5]), "a head is 5"),
    (but(heads=[[0, 0]]), "a head is [0, 0]"),
    (but(heads=[[0.0, 0, 1.0]]), "a head is"),
    (but(heads=[[0, 0, "1"]]), "is '1', expected a finite number"),
    (but(heads=[[0, 0, True]]), "is True, expected a finite number"),
    (but(heads=[[0, 0, float("nan")]]), "NaN is no number"),
    (lambda d: json.dumps({**d, "heads": [[0, 0, 77.5]]}).replace("77.5", "1e999"), "is inf"),
    (but(heads=[[-1, 0, 1.0]]), "layer is -1"),
    (but(heads=[[0, 1, 1.0]]), "does not follow"),
    (but(heads=[[0, 0, 1.0], [0, 0, 1.0]]), "does not follow"),
    (but(heads=[[2, 0, 1.0], [0, 0, 1.0]]), "does not follow"),
    (but(fingerprint="0" * 64, model="qwen.gguf"), "of another model file (qwen.gguf)"),
]


@pytest.mark.parametrize(("make", "says"), HOSTILE)
@pytest.mark.parametrize("named", [False, True])
def test_bad_profiles_are_one_line(
    model: Path, tmp_path: Path, make: Callable[[dict[str, Any]], str | bytes], says: str, named: bool
) -> None:
    path = tmp_path / "p.json" if named else duo_profile.default_path(fingerprint(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = make(good(model))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as e:
        Duo(profile=str(path) if named else "").check_model(str(model))
    text = str(e.value)
    assert says in text and str(path) in text and "\n" not in text and len(text) < 700
    out = " --out FILE" if "another model" in says else f" --out {path}" if named else ""
    assert text.endswith(f"calibrate duo {model}{out}")


def test_good_profile_is_found_by_the_file(model: Path, tmp_path: Path) -> None:
    path = duo_profile.default_path(fingerprint(model))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(good(model)))
    Duo().check_model(str(model))
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(ValueError, match="no duo profile for"):
        Duo().check_model(str(model))


def test_missing_profile_says_what_to_do(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as e:
        Llama(str(model), kv_evict="duo")  # before the model, which is none, is loaded
    assert str(e.value) == f"no duo profile for {model}; make one with: laprox-llamacpp calibrate duo {model}"
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(
            ValueError, match=f"profile.*{path}.*; make one with: laprox-llamacpp calibrate duo .*--out"
        ):
            Duo(profile=str(path)).check_model(str(model))
    with pytest.raises(ValueError, match="expected the path"):
        Duo(profile=tmp_path)  # type: ignore[arg-type]


def test_other_heads_than_the_prompts(model: Path, tmp_path: Path) -> None:
    save(profile_of(model, [0.0] * 6), tmp_path / "p.json")
    for shape in ([3, 2, 1], [2, 3], [2, 3, 1, 1]):
        with pytest.raises(ValueError, match="has 6 heads in 3 layers, not the"):
            Duo(window=2, profile=str(tmp_path / "p.json")).keep(prompt_of(model, 20, 2, shape), 3)


# ---- through a model


def test_freed_rows_and_the_note(smol_path: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    scores = [rng.random() for _ in range(90)]
    heads = tuple((i // 3, i % 3, score) for i, score in enumerate(scores))
    save(Profile(fingerprint(smol_path), smol_path.name, 30, heads), tmp_path / "p.json")
    n, w, budget = 150, 8, 60
    spec = f"duo:window={w}:protect_sinks=4:recent=20:profile={tmp_path / 'p.json'}"
    llm = Llama(str(smol_path), n_ctx=256, kv_evict=spec, budget=budget, verbose=False, **ONE)
    tokens = llm.tokenize(" ".join(haystack.paragraphs()[:6]).encode())[:n]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.eval(tokens)
    stats = llm.kv_stats()
    assert (stats.rows_kept, stats.note) == (90 * budget, None)
    expected = by_rows(scores, n, w, budget - w, 4, 20)
    assert [p[:-w].tolist() for p in llm.kv_kept().values()] == expected
    # 36 rows above the 24 of a streaming head, 126 more make a head whole: 25 heads, and 90 rows for the next
    assert sorted(len(p) for p in llm.kv_kept().values())[-27:] == [24, 24 + 90] + [n] * 25
    llm.close()

    llm = Llama(str(smol_path), n_ctx=256, kv_evict=spec, budget=12, verbose=False, **ONE)
    with pytest.warns(RuntimeWarning, match="every head streams, with 2 sinks and 10 recent positions") as said:
        llm.eval(tokens[:64])
        llm.reset()
        llm.eval(tokens)
    assert len(said) == 1
    stats = llm.kv_stats()
    assert stats.note is not None and "less than the 24 of a streaming head" in stats.note and stats.note in repr(stats)
    assert all(p.tolist() == [0, 1, *range(n - 10, n)] for p in llm.kv_kept().values())
    llm.close()


# ---- calibration


def softmax(x: F64) -> F64:
    e: F64 = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(prompt: ObservedPrompt) -> Iterator[F64]:
    """Of the window's queries, [n_head_kv, group, w, N], a layer at a time, from the queries and keys themselves."""
    for layer, n_kv in enumerate(prompt.n_head_kv):
        q, k = prompt.queries(layer).astype(np.float64), prompt.keys(layer).astype(np.float64)
        q = q.reshape(n_kv, -1, *q.shape[1:])
        logits = np.einsum("gqwd,gnd->gqwn", q, k) / np.sqrt(q.shape[-1])
        later = np.arange(prompt.n_prompt) > prompt.n_cand + np.arange(prompt.window)[:, None]
        yield softmax(np.where(later, -np.inf, logits))


class Watched(calibrate.Calibrator):
    """Takes down what every sample showed."""

    samples: ClassVar[list[calibrate.Sample]] = []
    scores: ClassVar[list[F64]] = []  # of the package
    attention: ClassVar[list[list[F64]]] = []  # on the needle, [n_head_kv, group, w, digits] for each layer
    spelled: ClassVar[list[tuple[str, str, str]]] = []  # needle, answer, whole text

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, **ONE})

    def score(self, sample: calibrate.Sample, seen: Any = None) -> F64:
        def watch(prompt: ObservedPrompt) -> None:
            self.attention.append([a[..., sample.needle] for a in attention(prompt)])

        answer = [*sample.tokens, sample.last][-sample.window :]
        parts = ([sample.tokens[p] for p in sample.needle], answer, sample.tokens)
        needle, answer_text, text = (self.llm.detokenize(ids, special=True).decode() for ids in parts)
        self.spelled.append((needle, answer_text, text))
        self.samples.append(sample)
        self.scores.append(super().score(sample, watch))
        return self.scores[-1]


@pytest.fixture(scope="module")
def command(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Output of `calibrate duo` on two samples, and its cache folder; `Watched` has what it saw."""
    cache = tmp_path_factory.mktemp("cache")
    args = ["calibrate", "duo", str(smol_path), "--samples", "2", "--tokens", "256", "--seed", "5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "Calibrator", Watched)
        done = CliRunner().invoke(cli.cli, args, env={"COLUMNS": "100", "LAPROX_CACHE": str(cache)})
    assert done.exit_code == 0, done.output
    yield done.output, cache


@pytest.mark.usefixtures("command")
def test_window_predicts_the_answer() -> None:
    for sample, (needle, answer, text) in zip(Watched.samples, Watched.spelled):
        assert needle == answer and len(needle) == calibrate.DIGITS
        assert text.endswith(f" is {answer[:-1]}")  # the last one is predicted, not read
        assert len(text.split(f"is {needle}.")) == 2  # in the text, whole, once
        assert max(sample.needle) < len(sample.tokens) - sample.window
        asked = text.rsplit("The special magic number for the ", 1)[1].split(" is ")[0]
        assert f"The special magic number for the {asked} is {needle}." in text
        assert text.count("The special magic number for the ") == calibrate.N_FACTS + 1
    assert len(Watched.spelled) == 2 and Watched.spelled[0][0] != Watched.spelled[1][0]


@pytest.mark.usefixtures("command")
def test_scores_are_the_attention_on_the_passkey() -> None:
    for got, layers in zip(Watched.scores, Watched.attention):
        expected = np.concatenate([a.sum(axis=3).mean(axis=(1, 2)) for a in layers])
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.usefixtures("command")
def test_heads_that_retrieve_are_told_from_the_rest() -> None:
    mean = np.mean(Watched.scores, axis=0)
    ranked = np.sort(mean)[::-1]
    assert ranked[:4].mean() > 10 * np.median(mean)
    # the best query head looks at digit i of the passkey when digit i is to be predicted
    best = int(mean.argmax())
    for layers in Watched.attention:
        group = layers[best // 3][best % 3]
        head = group[group.sum(axis=(1, 2)).argmax()]
        assert np.mean(head.argmax(axis=1) == np.arange(len(head))) >= 0.75


def test_calibrate_command(command: tuple[str, Path], smol_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, cache = command
    monkeypatch.setenv("LAPROX_CACHE", str(cache))
    path = cache / "duo" / f"{fingerprint(smol_path)}.json"
    assert output.rstrip().endswith(str(path)) and "of 90 heads" in output
    profile = load(path)
    assert (profile.model, profile.n_layer, profile.heads_per_layer()) == (smol_path.name, 30, [3] * 30)
    assert profile.settings == {"samples": 2, "tokens": 256, "seed": 5}
    assert profile.scores() == np.mean(Watched.scores, axis=0).tolist()
    best = max(profile.heads, key=lambda head: head[2])
    assert f"layer {best[0]}, KV head {best[1]}" in output
    Duo().check_model(str(smol_path))


@pytest.mark.usefixtures("command")
def test_the_same_seed_gives_the_same_scores(smol_path: Path) -> None:
    calibrator = calibrate.Calibrator(smol_path, n_tokens=256, seed=5, **ONE)
    again = calibrator.sample(1)
    assert again == Watched.samples[1]
    assert calibrator.score(again).tolist() == Watched.scores[1].tolist()
    calibrator.close()


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["calibrate", "duo"], 2, "MODEL"),
        (["calibrate", "duo", "x.gguf", "--samples", "0"], 2, "samples"),
        (["calibrate", "duo", "x.gguf", "--tokens", "10"], 2, "tokens"),
        (["calibrate", "duo", "x.gguf"], 1, "x.gguf"),
        (["calibrate", "duo", __file__], 1, "GGUF"),
        (["calibrate", "duo", __file__, "--out", "/"], 2, "directory"),
        (["ask", "q", "--file", __file__, "--policy", "duo", "--model", __file__], 1, "GGUF"),
    ],
)
def test_command_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], status: int, says: str
) -> None:
    assert cli.main(args) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("laprox-llamacpp: ") and err.count("\n") == 1 and says in err


def test_every_depth_is_asked_for(smol_path: Path) -> None:
    calibrator = calibrate.Calibrator(smol_path, **ONE)
    samples = [calibrator.sample(i) for i in range(5)]
    spell: Callable[[list[int]], str] = lambda ids: calibrator.llm.detokenize(ids).decode()  # noqa: E731
    for s in samples[1:]:  # other passkeys in every sample
        assert spell([s.tokens[p] for p in s.needle]) not in spell(samples[0].tokens)
    calibrator.close()
    found = sorted(s.needle[0] / len(s.tokens) for s in samples)
    np.testing.assert_allclose(found, calibrate.DEPTHS, atol=0.1)
    for s in samples:  # what a streaming head keeps by default
        assert s.needle[0] >= 128 and s.needle[-1] < len(s.tokens) - 256
    assert len({s.needle[0] for s in samples}) == len({tuple(s.tokens[p] for p in s.needle) for s in samples}) == 5


def test_plain_text_without_a_chat_template(smol_path: Path) -> None:
    calibrator = calibrate.Calibrator(smol_path, n_tokens=256, **ONE)
    chat = calibrator.sample(0)
    del calibrator.llm.metadata["tokenizer.chat_template"]
    plain = calibrator.sample(0)
    text = [calibrator.llm.detokenize(s.tokens, special=True).decode() for s in (chat, plain)]
    calibrator.close()
    assert "<|im_start|>user" in text[0] and "<|im_start|>user" not in text[1]
    assert text[0].endswith(text[1][-50:]) and len(plain.needle) == calibrate.DIGITS


@pytest.mark.slow
def test_calibrated_heads_answer_and_the_reversed_do_not(qwen_path: Path, smol_path: Path, tmp_path: Path) -> None:
    result = calibrate.duo(qwen_path)
    assert result.n_right == result.n_samples == 8
    reverse = tuple((il, h, -score) for il, h, score in result.profile.heads)
    for name, profile in (("best", result.profile), ("worst", dataclasses.replace(result.profile, heads=reverse))):
        save(profile, tmp_path / name)
    cells = grid([f"duo:profile={tmp_path / name}" for name in ("best", "worst")], ["0.5"])
    with pytest.raises(ValueError, match=rf"another model file \({qwen_path.name}\)"):
        cells[0].policy.check_model(str(smol_path))

    session = Session(str(qwen_path), cells, n_ctx=2048, **ONE)
    known, right = 0, [0, 0]
    for i in range(6):
        facts = haystack.facts(3, seed=1000 + i, digits=7)
        count: Callable[[str], int] = lambda text: len(session.tokenize(text.encode(), add_bos=False))  # noqa: E731
        text = haystack.hide(facts, 1000, count, 1000 + i, depths=(0.3, 0.45, 0.6))  # beyond sinks and recent positions
        question, opening = demo.ask_for([facts[i % 3]])
        session.prefill(demo.chat_tokens(session, f"{text}\n\n{question}", opening))
        with session.under(None):
            full = session.answer(16)
        if facts[i % 3].number in full:
            known += 1
            for j, cell in enumerate(cells):
                with session.under(cell):
                    right[j] += facts[i % 3].number in session.answer(16)
    session.close()
    assert known >= 5
    assert right[0] >= known - 1 and right[1] <= 1
