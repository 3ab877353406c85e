"""LongBench through lm-eval: its prompts, limits and scores on local files, and the authors' rules about them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from common import Says

from laprox_llamacpp import Llama
from laprox_llamacpp.evaluate.runner import Run, run
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.task import Task
from laprox_llamacpp.evaluate.tasks import longbench

import llama_cpp  # isort: skip

CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
WRAPPED = ("hotpotqa", "passage_retrieval_en")
BARE = ("trec", "samsum", "lcc")
# the authors' limits, and what ends an answer
LIMITS = {
    "hotpotqa": (32, []),
    "passage_retrieval_en": (32, []),
    "trec": (64, ["\n"]),
    "samsum": (128, ["\n"]),
    "lcc": (64, []),
}
CITIES = "Rome lies on the Tiber. Paris lies on the Seine. Cairo lies on the Nile. "
SHOTS = "Question: Who was Plato?\nType: Human\nQuestion: Where is the Nile?\nType: Place\n"
TALK = "Dialogue: Ann: Tea? Bob: Yes.\nSummary: Bob would like some tea.\n"
CODE = "def add(a, b):\n    return a + b\n\n\ndef minus(a, b):\n"
# subset: (context, input, answers, classes) of its samples
DOCS: dict[str, list[tuple[str, str, list[str], Any]]] = {
    "hotpotqa": [
        (CITIES * 12, "Which river is Paris on?", ["the Seine", "Seine"], None),
        (CITIES * 9, "Which city lies on the Tiber?", ["Rome"], None),
    ],
    "passage_retrieval_en": [
        ("Paragraph 1: Rome lies on the Tiber.\n\nParagraph 2: Cairo lies on the Nile.", "A city in Egypt.",
         ["Paragraph 2"], None),
        (CITIES * 11, "A city in Italy.", ["Paragraph 12"], None),
    ],
    "trec": [
        (SHOTS * 7, "Question: Where is Rome?\nType:", ["Place"], ["Human", "Place", "Number"]),
        (SHOTS * 5, "Question: Who wrote Faust?\nType:", ["Human"], ["Human", "Place", "Number"]),
    ],
    "samsum": [
        (TALK * 8, "Dialogue: Cy: Walk? Di: No, it rains.\nSummary:", ["Di will not walk in the rain."], None),
        (TALK * 6, "Dialogue: Ed: Late! Flo: Run.\nSummary:", ["Ed is late and has to run."], None),
    ],
    "lcc": [(CODE * 6, "", ["    return a - b"], None), (CODE * 4, "", ["    return a - b"], None)],
}  # fmt: skip
TRIED = {
    "hotpotqa": ["Seine", "The Seine.", "on the river Seine", "Rome", ""],
    "passage_retrieval_en": ["Paragraph 2", "12", "2 or 12", "none"],
    "trec": [" Place", "Human", "Place or Human", "City", ""],
    "samsum": ["Di will not walk in the rain.", "Ed runs.", ""],
    "lcc": ["    return a - b\n", "# a comment\n    return a - b\nx = 1", "\n\n    return b", "```"],
}


def write(folder: Path, renamed: bool = False) -> Path:
    """Files in the published layout; `renamed`: the input is called question, as lm-eval's prompts have it."""
    folder.mkdir(exist_ok=True)
    for subset, docs in DOCS.items():
        with (folder / f"{subset}.jsonl").open("w", encoding="utf-8") as f:
            for i, (context, question, answers, classes) in enumerate(docs):
                row = {
                    "question" if renamed else "input": question, "context": context, "answers": answers,
                    "length": len(context.split()), "dataset": subset, "language": "en", "all_classes": classes,
                    "_id": f"{subset}-{i}",
                }  # fmt: skip
                f.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("longbench"))


@pytest.fixture(scope="module")
def smol_tokens(smol_path: Path) -> Iterator[Llama]:
    llm = Llama(str(smol_path), vocab_only=True, verbose=False)
    yield llm
    llm.close()


@pytest.fixture()
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are checked as if lm-eval were installed."""
    monkeypatch.setattr(longbench, "require", lambda what, extra: None)


# ---- without lm-eval


def test_without_lm_eval_the_error_names_the_extra(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError) as error:
        Task.parse(f"longbench:data={data}:subset=trec")
    assert str(error.value) == (
        "longbench needs lm_eval, which is not installed: pip install '.[longbench]' in a clone"
    )


def test_a_package_of_lm_evals_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from laprox_llamacpp.evaluate import lm_tasks

    def load(name: str) -> Any:
        try:
            raise ModuleNotFoundError("No module named 'rouge'", name="rouge")
        except ImportError:
            raise ImportError("Please install the required dependencies for this task") from None

    monkeypatch.setattr(lm_tasks.importlib, "import_module", load)
    with pytest.raises(
        ValueError, match=r"^longbench needs rouge, which is not installed: pip install '\.\[longbench\]'"
    ):
        lm_tasks.define("longbench", "longbench", "longbench", "longbench_trec", list)


def test_the_tasks_are_known_without_importing_lm_eval() -> None:
    code = (
        "import sys; from laprox_llamacpp.evaluate.tasks import TASKS; assert {'longbench', 'ruler'} <= set(TASKS);"
        "assert not {'lm_eval', 'datasets', 'nltk', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("longbench", "needs data=DIR"),
        ("longbench:data={}:subset=lsht", "unknown subset 'lsht', expected one of narrativeqa, "),
        ("longbench:data={}:subset=trec+trec", "each name once"),
        ("longbench:data={}:subset=qasper", "qasper.jsonl is missing"),
        ("longbench:data={}", "narrativeqa.jsonl is missing"),
        ("longbench:data={}:subset=trec:max_length=0", "max_length is 0"),
        ("longbench:data={}:subset=trec:download=yes", "not both"),
        ("longbench:data={}:subset=trec:download=maybe", "unknown download 'maybe'"),
    ],
)
def test_bad_options_are_told_in_one_line(spec: str, text: str, data: Path) -> None:
    with pytest.raises(ValueError) as error:
        Task.parse(spec.format(data))
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"input": ', "line 2 is not an object in JSON"),
        ("[1]", "line 2 has no input, context, answers, all_classes"),
        ("3", "line 2 is not an object in JSON"),
        ('{"question": "", "context": "", "answers": [], "all_classes": null}', "line 2 has no input; expected"),
    ],
)
def test_a_bad_line_is_named(line: str, text: str, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "trec.jsonl"
    file.write_text((data / "trec.jsonl").read_text(encoding="utf-8").splitlines()[0] + f"\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        list(longbench._local(file))
    assert text in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("max_length", [64, 65, 127, 198, 199])
def test_a_long_prompt_keeps_half_of_the_limit_from_each_end(max_length: int, smol_tokens: Llama) -> None:
    text = "".join(str(i * i % 10) for i in range(200))  # SmolLM2 has a token for each digit
    assert len(smol_tokens.tokenize(text.encode(), add_bos=True)) == 200
    kept, n = longbench.cut_middle(smol_tokens, text, max_length)
    assert n == 200 and kept == text[: max_length // 2] + text[200 - max_length // 2 :]


@pytest.mark.parametrize("max_length", [200, 201, 7500])
def test_a_prompt_that_fits_stays(max_length: int, smol_tokens: Llama) -> None:
    text = "7" * 200
    assert longbench.cut_middle(smol_tokens, text, max_length) == (text, 200)


def test_the_16_english_and_code_subsets(pretended: None, tmp_path: Path) -> None:
    names = (
        "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa samsum "
        "passage_count passage_retrieval_en lcc repobench-p"
    )
    for name in names.split():
        (tmp_path / f"{name}.jsonl").touch()
    task = Task.parse(f"longbench:data={tmp_path}")
    assert isinstance(task, longbench.LongBench) and sorted(task.subsets) == sorted(names.split())
    assert sorted(longbench.PLAIN) == sorted(["trec", "triviaqa", "samsum", "lcc", "repobench-p"])


# ---- with lm-eval


@pytest.fixture(scope="module")
def lm_evals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's own pipeline: its task files with the data set to local files, in a folder that it indexes."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("rouge")
    from lm_eval.tasks import TaskManager

    folder = write(tmp_path_factory.mktemp("reference"), renamed=True)
    theirs = Path(lm_eval.__file__).parent / "tasks" / "longbench"
    for subset in DOCS:
        (folder / f"{subset}.yaml").write_text(
            f"include: {theirs / f'{subset}.yaml'}\ntask: local_{subset}\ndataset_path: json\ndataset_name: null\n"
            f"test_split: train\ndataset_kwargs:\n  data_files: {folder / f'{subset}.jsonl'}\n"
            f"  cache_dir: {folder / 'cache'}\n",
            encoding="utf-8",
        )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    tasks = {subset: manager.load(f"local_{subset}")["tasks"][f"local_{subset}"] for subset in DOCS}
    return SimpleNamespace(folder=folder, manager=manager, tasks=tasks)


@pytest.fixture(scope="module")
def task(data: Path, lm_evals: Any) -> longbench.LongBench:
    made = Task.parse(f"longbench:data={data}:subset={'+'.join(DOCS)}")
    assert isinstance(made, longbench.LongBench)
    return made


@pytest.fixture(scope="module")
def session(smol_path: Path) -> Iterator[Session]:
    made = Session(str(smol_path), [], n_ctx=2048, n_threads=1, n_threads_batch=1)
    yield made
    made.close()


@pytest.mark.slow
def test_prompts_are_what_lm_eval_builds(task: longbench.LongBench, lm_evals: Any, session: Session) -> None:
    built: dict[str, list[str]] = {}
    for subset, theirs in lm_evals.tasks.items():
        theirs.build_all_requests()
        built[subset] = [instance.args[0] for instance in theirs.instances]
    subsets = list(DOCS)
    for index in range(2 * len(subsets)):
        subset, row = subsets[index % len(subsets)], index // len(subsets)
        sample = task.sample(session, index)
        assert sample.info["kind"] == subset and sample.info["id"] == f"{subset}-{row}"
        text = built[subset][row]
        assert DOCS[subset][row][0] in text and DOCS[subset][row][1] in text
        expected = CHATML.format(text) if subset in WRAPPED else text
        assert session.detokenize(sample.tokens, special=True).decode() == expected
        assert sample.tokens == session.tokenize(expected.encode(), add_bos=False, special=True)


@pytest.mark.slow
def test_a_cut_prompt_is_wrapped_after_the_cut(data: Path, lm_evals: Any, session: Session) -> None:
    for subset in ("hotpotqa", "trec"):
        task = Task.parse(f"longbench:data={data}:subset={subset}:max_length=101")
        sample = task.sample(session, 0)
        whole = lm_evals.tasks[subset].doc_to_text(lm_evals.tasks[subset].test_docs()[0])
        tokens = session.tokenize(whole.encode(), add_bos=False)
        assert sample.info["tokens_before_cut"] == len(tokens) > 101
        kept = session.detokenize(tokens[:50]).decode() + session.detokenize(tokens[-50:]).decode()
        expected = CHATML.format(kept) if subset == "hotpotqa" else kept
        assert session.detokenize(sample.tokens, special=True).decode() == expected


@pytest.mark.slow
@pytest.mark.parametrize("subset", DOCS)
def test_scores_and_limits_are_lm_evals(
    subset: str, task: longbench.LongBench, lm_evals: Any, session: Session
) -> None:
    theirs = lm_evals.tasks[subset]
    for row in range(2):
        sample = task.sample(session, row * len(DOCS) + list(DOCS).index(subset))
        for text in TRIED[subset]:
            says = Says(text)
            got = task.measure(says, sample)  # type: ignore[arg-type]
            assert got == {"text": text, "score": theirs.process_results(theirs.test_docs()[row], [text])["score"]}
            assert says.asked == LIMITS[subset]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subset", "text", "score"),
    [
        ("hotpotqa", "on the river Seine", 0.5),  # without the article 3 words and 1, one in common: 2 * 1 / (3 + 1)
        ("hotpotqa", "THE SEINE!", 1.0),
        ("passage_retrieval_en", "2 or 12", 0.5),
        ("trec", "Place or Human", 0.5),
        ("trec", "City", 0.0),
        ("samsum", "Di will not walk in the rain.", 1.0),
        ("lcc", "# a comment\n    return a - b\nx = 1", 1.0),
    ],
)
def test_scores_by_hand(subset: str, text: str, score: float, task: longbench.LongBench, session: Session) -> None:
    sample = task.sample(session, list(DOCS).index(subset))
    got = task.measure(Says(text), sample)  # type: ignore[arg-type]
    assert got["score"] == pytest.approx(score, abs=1e-6)


@pytest.mark.slow
def test_samples_take_the_subsets_in_turn_while_they_last(tmp_path: Path, lm_evals: Any, session: Session) -> None:
    write(tmp_path)
    lines = (tmp_path / "trec.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "trec.jsonl").write_text(lines[0], encoding="utf-8")
    task = Task.parse(f"longbench:data={tmp_path}:subset=trec+lcc+samsum")
    ids = [task.sample(session, i).info["id"] for i in range(5)]
    assert ids == ["trec-0", "lcc-0", "samsum-0", "lcc-1", "samsum-1"]
    with pytest.raises(ValueError, match="has 5 samples, expected --samples 5 or less"):
        task.sample(session, 5)


@pytest.mark.slow
def test_download_reads_the_authors_archive(
    data: Path, tmp_path: Path, lm_evals: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(data / "trec.jsonl", "data/trec.jsonl")
    monkeypatch.setattr(longbench, "SOURCE", str(tmp_path / "data.zip"))
    local, fetched = (Task.parse(f"longbench:subset=trec:{x}") for x in (f"data={data}", "download=yes"))
    for index in range(2):
        a, b = local.sample(session, index), fetched.sample(session, index)
        assert (a.tokens, a.info) == (b.tokens, b.info)


# ---- our model in lm-eval


@pytest.fixture(scope="module")
def records(data: Path, lm_evals: Any, smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    task = Task.parse(f"longbench:data={data}:subset={'+'.join(DOCS)}:max_length=700")
    spec = Run(task, smol_path, ["laprox"], ["0.5"], n_samples=2 * len(DOCS), n_threads=1)
    return run(spec, tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_lm_eval_with_our_model_answers_and_scores_as_our_runner(
    records: list[Any], lm_evals: Any, smol_path: Path
) -> None:
    import lm_eval

    from laprox_llamacpp.evaluate.lm import LaproxLM

    model = LaproxLM(str(smol_path), n_ctx=1024, n_threads=1, n_threads_batch=1, kv_evict="laprox", budget=0.5)
    for subsets, chat in ((WRAPPED, True), (BARE, False)):
        made = lm_eval.simple_evaluate(
            model=model, tasks=[f"local_{s}" for s in subsets], task_manager=lm_evals.manager, apply_chat_template=chat,
            log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
        for subset in subsets:
            ours = [r["cells"]["laprox@0.5"] for r in records if r["info"]["kind"] == subset]
            theirs = sorted(made["samples"][f"local_{subset}"], key=lambda s: s["doc_id"])
            assert [r["text"] for r in ours] == [s["resps"][0][0] for s in theirs]
            assert [r["score"] for r in ours] == [s["score"] for s in theirs]
            mean = made["results"][f"local_{subset}"]["score,none"]
            assert mean == pytest.approx(np.mean([r["score"] for r in ours]))
    model.llm.close()


def pairs(*requests: tuple[str, str]) -> list[Any]:
    return [SimpleNamespace(args=request, task_name="test") for request in requests]


@pytest.mark.slow
def test_without_eviction_answers_are_llama_cpps(smol_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from laprox_llamacpp.evaluate.lm import LaproxLM

    model = LaproxLM(str(smol_path), n_ctx=512, n_threads=1, max_gen_toks=12)
    stock = llama_cpp.Llama(str(smol_path), n_ctx=512, n_threads=1, verbose=False)
    stock.eval(stock.tokenize((SHOTS * 4).encode()))
    tokens: list[int] = []
    while len(tokens) < 12:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(stock.ctx, -1), shape=(stock.n_vocab(),))
        tokens.append(int(logits.argmax()))
        stock.eval(tokens[-1:])
    text = stock.detokenize(tokens).decode()
    end = text.split()[-1]
    got = model.generate_until(
        pairs((SHOTS * 4, {}), (SHOTS * 4, {"max_gen_toks": 5, "until": []}), (SHOTS * 4, {"until": ["??", end]})),
        disable_tqdm=True,
    )
    assert got == [text, stock.detokenize(tokens[:5]).decode(), text[: text.index(end)]]
    stock.close()
    model.llm.close()


@pytest.mark.slow
def test_loglikelihoods(smol_path: Path) -> None:
    """Against logits of llama.cpp's, token by token; evicted: the first one is the prefill's, the others differ."""
    pytest.importorskip("lm_eval")
    from laprox_llamacpp.evaluate.lm import LaproxLM

    context = CITIES * 10 + "Paris lies on the"
    llm = llama_cpp.Llama(str(smol_path), n_ctx=1024, n_threads=1, logits_all=True, flash_attn=True, verbose=False)
    before = llm.tokenize(context.encode())
    llm.eval(before)
    best = llm.detokenize([int(llm.scores[len(before) - 1].argmax())]).decode()
    words = (best, " Tiber and the Nile", best, " Tiber and the Nile")
    expected = []
    for word in words:
        llm.n_tokens = len(before)
        tokens = llm.tokenize((context + word).encode())[len(before) :]
        for token in tokens:
            llm.eval([token])
        logits = llm.scores[len(before) - 1 :][: len(tokens)].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected.append(logprobs[np.arange(len(tokens)), tokens])
    assert len(expected[0]) == 1 and len(expected[1]) > 2
    llm.close()
    requests = pairs(*((context, word) for word in words))

    whole = LaproxLM(str(smol_path), n_ctx=1024, n_threads=1, flash_attn=True)
    got = whole.loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in got] == pytest.approx([e.sum() for e in expected], abs=1e-4)
    assert [greedy for _, greedy in got] == [True, False, True, False] and got[:2] == got[2:]
    assert whole.loglikelihood(pairs(("", "Paris")), disable_tqdm=True)[0][0] < 0
    with pytest.raises(NotImplementedError, match="eval continuation"):
        whole.loglikelihood_rolling(requests)
    whole.llm.close()

    evicted = LaproxLM(str(smol_path), n_ctx=1024, n_threads=1, kv_evict="streaming", budget=0.4)
    got = evicted.loglikelihood(requests, disable_tqdm=True)
    assert evicted.llm.kv_stats().evicted and got[:2] == got[2:]
    assert got[0][0] == pytest.approx(expected[0].sum(), abs=0.05)
    assert math.isfinite(got[1][0]) and abs(got[1][0] - expected[1].sum()) > 0.05
    evicted.llm.close()


@pytest.mark.slow
def test_the_model_refuses_what_it_cannot_do(smol_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from laprox_llamacpp.evaluate.lm import LaproxLM

    with pytest.raises(ValueError, match="batch_size is 8, expected 1"):
        LaproxLM(str(smol_path), batch_size=8)
    model = LaproxLM(str(smol_path), n_ctx=256, n_threads=1)
    with pytest.raises(ValueError, match="samples, expected do_sample=False"):
        model.generate_until(pairs(("a", {"do_sample": True, "temperature": 0.7})))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chat template 'tools' is unknown"):
        model.chat_template("tools")
    assert model.chat_template() is None and "<|im_start|>" in str(model.chat_template(True))
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert model.apply_chat_template(history[:1]) == CHATML.format("Hi")
    assert model.apply_chat_template(history, add_generation_prompt=False) == CHATML.format("Hi") + "Well,"
    with pytest.warns(RuntimeWarning, match="126 are kept from each end"):
        assert model._fit(list(range(500)), 4) == [*range(126), *range(374, 500)]
    model.llm.close()


@pytest.mark.slow
def test_lm_evals_command_line(lm_evals: Any, smol_path: Path, tmp_path: Path) -> None:
    args = f"path={smol_path},kv_evict=snapkv:window=16,budget=0.2,n_ctx=1024,n_threads=1"
    command = [sys.executable, "-m", "laprox_llamacpp.evaluate.lm", "--model", "laprox", "--model_args", args]
    command += ["--tasks", "local_trec", "--include_path", str(lm_evals.folder), "--limit", "1"]
    done = subprocess.run([*command, "--output_path", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "local_trec" in done.stdout and "classification_score" in done.stdout
    [file] = tmp_path.rglob("results*.json")
    made = json.loads(file.read_text(encoding="utf-8"))
    assert (
        made["config"]["model_args"]["kv_evict"] == "snapkv:window=16" and made["config"]["model_args"]["budget"] == 0.2
    )
