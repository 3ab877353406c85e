"""RULER's thirteen tasks: lm-eval generates, prompts and scores them; the model's own tokenizer sizes them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from ...llama import Llama
from ...parts.options import int_at_least, one_of
from ..lm_tasks import Docs, define, has_template, max_gen, render, require, until
from ..session import Session
from ..task import Sample, Task, sha256_of
from ..texts import tokenize

OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
NEEDS = {**dict.fromkeys(ESSAYS, "essays"), "qa_squad": "squad", "qa_hotpot": "hotpot"}  # subset: option with its file
SUBSETS = (*OFFLINE, *NEEDS)
# those that lm-eval names otherwise: its name, then the module and the function that generate the documents
GENERATORS = {
    "vt": ("ruler_vt", "vt_utils", "get_vt_dataset"),
    "cwe": ("ruler_cwe", "cwe_utils", "get_cw_dataset"),
    "fwe": ("ruler_fwe", "fwe_utils", "fwe_download"),
    "qa_squad": ("ruler_qa_squad", "qa_utils", "get_squad"),
    "qa_hotpot": ("ruler_qa_hotpot", "qa_utils", "get_hotpotqa"),
}
# where a generator is told how many documents to make
COUNTED = ("generate_samples", "sys_word_pair_random", "sys_kwext", "sys_vartrack_w_noise_random")
_PUNKT = "tokenizers/punkt_tab"
_WRAPPER = 128  # tokens of a chat template around the prompt
_LONGEST = 128  # tokens of an answer, over all tasks


@dataclass(frozen=True)
class Ruler(Task):
    """RULER through lm-eval: the document in the model's chat template, the answer begun for the model.

    niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe need no data. The other needle tasks take their
    haystack from a text file (RULER's own are Paul Graham's essays) and cut it into sentences with NLTK's punkt_tab;
    qa_squad and qa_hotpot read the published JSON files. Nothing is downloaded. Samples take the subsets in turn; the
    score, 0 to 1, is the share of the expected strings in the answer (qa: whether one of them is), and the subset is
    the sample's `kind`.

    Options: tokens of prompt and answer together, subset (names with "+" between), n documents made for each, essays,
    squad and hotpot (files), seed.
    """

    tokens: int = 4096
    subset: str = "+".join(OFFLINE)
    n: int = 100
    essays: str = ""
    squad: str = ""
    hotpot: str = ""
    seed: int = 42

    name: ClassVar[str] = "ruler"
    metric: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        int_at_least("tokens", self.tokens, 512)
        int_at_least("n", self.n, 1)
        for subset in self.subsets:
            one_of("subset", subset, SUBSETS)
            option = NEEDS.get(subset)
            if option and not Path(getattr(self, option) or "?").is_file():
                raise ValueError(f"ruler:subset={subset} needs {option}=FILE, got {getattr(self, option)!r}")
        require(self.name, self.name)

    @property
    def subsets(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.subset.split("+"))

    def data_sha256(self) -> str:
        """Of the files that are named."""
        return sha256_of(Path(file).read_bytes() for file in (self.essays, self.squad, self.hotpot) if file)

    @property
    def n_need(self) -> int:
        """Prompt, chat template and answer; a generator may miss the length by an answer."""
        return self.tokens + _LONGEST + _WRAPPER

    def sample(self, session: Session, index: int) -> Sample:
        """The subsets in turn. Raises ValueError past the last document."""
        subset, row = self.subsets[index % len(self.subsets)], index // len(self.subsets)
        definition = self.definition(session, subset)
        docs = definition.test_docs()
        if row >= len(docs):
            raise ValueError(f"sample {index} needs document {row} of {subset}, which has {len(docs)}; raise ruler:n=")
        doc = docs[row]
        context = partial(definition.fewshot_context, doc, 0, gen_prefix=definition.doc_to_prefix(doc))
        if has_template(session):
            text = context(apply_chat_template=True, chat_template=partial(render, session))
            tokens = tokenize(session, text)
        else:
            tokens = session.tokenize(context().encode(), add_bos=True, special=True)
        memo = {"doc": doc, "definition": definition}
        return Sample(index, tokens, {"kind": subset, "row": row, "expected": doc["outputs"]}, memo)

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """The answer, and lm-eval's score of it."""
        definition = sample.memo["definition"]
        text = session.answer(max_gen(definition), until(definition))
        scores = definition.process_results(sample.memo["doc"], [text])
        return {"text": text, "score": float(scores[str(self.tokens)])}

    def definition(self, llm: Llama, subset: str) -> Any:
        """lm-eval's task of the subset, with documents that `llm`'s tokenizer has sized; made once."""
        key = (self, subset, llm.model_path)
        if key not in _MADE:
            lm_name, module, function = GENERATORS.get(subset, (subset, "niah_utils", subset))
            with _no_download(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                docs = partial(self._docs, llm, module, function)
                _MADE[key] = define(self.name, self.name, "ruler", lm_name, docs)
        return _MADE[key]

    def _docs(self, llm: Llama, module: str, function: str) -> Docs:
        generators = importlib.import_module(f"lm_eval.tasks.ruler.{module}")
        swaps: dict[str, Any] = {"get_tokenizer": lambda *_, **__: _Tokenizer(llm)}
        n = self.n
        if module == "niah_utils":
            haystack = generators.get_haystack
            swaps["get_haystack"] = lambda type_haystack: (
                _essays(Path(self.essays)) if type_haystack == "essay" else haystack(type_haystack)
            )
        if module == "qa_utils":
            read, option = {"get_squad": ("read_squad", self.squad), "get_hotpotqa": ("read_hotpotqa", self.hotpot)}[
                function
            ]
            questions, texts = _questions(generators, read, Path(option))
            n = min(n, len(questions))
            swaps[read] = lambda: (questions, texts)
        for name in COUNTED:
            if hasattr(generators, name):
                swaps[name] = _counted(getattr(generators, name), n)
        if hasattr(generators, "RNG"):
            swaps["RNG"] = random.Random(self.seed)
        with _swapped(generators, swaps), _seeded(self.seed):
            docs: Docs = getattr(generators, function)(max_seq_lengths=[self.tokens], tokenizer=llm.model_path)["test"]
        return docs


_MADE: dict[tuple[Ruler, str, str], Any] = {}


class _Tokenizer:
    """A model's tokenizer, as far as the generators ask."""

    def __init__(self, llm: Llama) -> None:
        self.llm = llm

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=self.llm.tokenize(text.encode(), add_bos=True, special=True))


def _counted(generate: Callable[..., Any], n: int) -> Callable[..., Any]:
    """`generate`, making n documents where it would make lm-eval's 500."""
    return lambda *args, **kwargs: generate(*args, **{**kwargs, "num_samples": min(n, kwargs.get("num_samples", n))})


def _essays(file: Path) -> list[str]:
    """Words of a text, for haystacks that are cut into sentences."""
    nltk = importlib.import_module("nltk")
    try:
        nltk.data.find(_PUNKT)
    except LookupError as e:
        raise ValueError(
            "ruler's essay haystacks need NLTK's punkt_tab, which is not on this machine: "
            "python -m nltk.downloader punkt_tab"
        ) from e
    try:
        return file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as e:
        raise ValueError(f"essays={file} cannot be read as UTF-8 text: {e}") from e


def _questions(generators: ModuleType, read: str, file: Path) -> tuple[list[Any], list[str]]:
    """Questions and texts of a published file, as lm-eval reads them."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        with _swapped(generators, {"download_json": lambda _url: data}):
            questions, texts = getattr(generators, read).__wrapped__()
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{file} is not in the layout of {read.replace('read_', '')}'s JSON files: {e!r}") from e
    return questions, texts


@contextlib.contextmanager
def _swapped(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """The module with other values under these names, for a while."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators, which lm-eval's modules draw from, from a seed on; as they were afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _no_download() -> contextlib.AbstractContextManager[None]:
    """lm-eval's module of needles fetches NLTK data when it is imported: not now."""
    if importlib.util.find_spec("nltk") is None:
        return contextlib.nullcontext()  # told by what needs it
    return _swapped(importlib.import_module("nltk"), {"download": lambda *_, **__: False})
