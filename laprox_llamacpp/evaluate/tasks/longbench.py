"""LongBench (the paper's figure 2): the 14 English and 2 code subsets, as its authors run them, through lm-eval."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ...llama import Llama
from ...parts.options import int_at_least, one_of
from ..lm_tasks import define, has_template, max_gen, require, until
from ..session import Session
from ..task import Sample, Task, sha256_of
from ..texts import chat, tokenize

SUBSETS = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
PLAIN = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # the authors give these without a chat template
FIELDS = ("input", "context", "answers", "all_classes")
SOURCE = "hf://datasets/THUDM/LongBench/data.zip"
ALL = "all"
_WRAPPER = 128  # tokens of a chat template around the prompt, and what it gains when it is tokenised again


@dataclass(frozen=True)
class LongBench(Task):
    """LongBench's prompts, limits and metrics from lm-eval's task files, data from `DIR/<subset>.jsonl`.

    The files are in the layout that LongBench publishes (input, context, answers, all_classes ...). A prompt of more
    than `max_length` tokens keeps int(max_length / 2) of them from each end; then it becomes a turn of the model's chat
    template, but for trec, triviaqa, samsum, lcc and repobench-p. Samples take the subsets in turn, as long as each has
    some. The score, 0 to 1, is lm-eval's for the subset, which is the sample's `kind`.

    Options: data (the folder), subset ("all", or names with "+" between), max_length in tokens, download ("yes": the
    authors' archive is fetched with `datasets`, and `data` is not needed).
    """

    data: str = ""
    subset: str = ALL
    max_length: int = 7500
    download: str = "no"

    name: ClassVar[str] = "longbench"
    metric: ClassVar[str] = "score"
    length: ClassVar[str] = "max_length"

    def __post_init__(self) -> None:
        int_at_least("max_length", self.max_length, 64)
        one_of("download", self.download, ("yes", "no"))
        for subset in self.subsets:
            one_of("subset", subset, SUBSETS)
        if len(set(self.subsets)) < len(self.subsets):
            raise ValueError(f"subset is {self.subset!r}, expected each name once")
        if self.download == "yes" and self.data:
            raise ValueError("longbench takes data=DIR or download=yes, not both")
        if self.download == "no":
            if not self.data:
                raise ValueError("longbench needs data=DIR, the folder of LongBench's jsonl files, or download=yes")
            for subset in self.subsets:
                if not self.file(subset).is_file():
                    raise ValueError(
                        f"{self.file(subset)} is missing, expected LongBench's file; or choose subset=, or download=yes"
                    )
        require(self.name, self.name)

    @property
    def subsets(self) -> tuple[str, ...]:
        """Their names."""
        return SUBSETS if self.subset == ALL else tuple(self.subset.split("+"))

    def check(self) -> None:
        """The data can be read."""
        for subset in self.subsets:
            self.definition(subset)

    def data_sha256(self) -> str:
        """Of every subset's documents."""
        docs = (doc for subset in self.subsets for doc in self.definition(subset).test_docs())
        return sha256_of(json.dumps(doc, sort_keys=True).encode() for doc in docs)

    @property
    def n_need(self) -> int:
        """Prompt, chat template and the longest answer of the subsets."""
        return self.max_length + _WRAPPER + max(max_gen(self.definition(s)) for s in self.subsets)

    def file(self, subset: str) -> Path:
        """Where the subset's data is."""
        return Path(self.data) / f"{subset}.jsonl"

    def definition(self, subset: str) -> Any:
        """lm-eval's task of the subset, with the data."""
        return _definition(self, subset)

    def sample(self, session: Session, index: int) -> Sample:
        """The subsets in turn, each from the start of its file. Raises ValueError past the last one."""
        sizes = {s: len(self.definition(s).test_docs()) for s in self.subsets}
        order = [(s, i) for i in range(max(sizes.values())) for s in self.subsets if i < sizes[s]]
        if index >= len(order):
            n = len(order)
            raise ValueError(f"longbench:subset={self.subset} has {n} samples, expected --samples {n} or less")
        subset, row = order[index]
        definition = self.definition(subset)
        doc = definition.test_docs()[row]
        text, n_whole = cut_middle(session, definition.doc_to_text(doc), self.max_length)
        if subset in PLAIN or not has_template(session):
            tokens = session.tokenize(text.encode(), add_bos=True, special=True)
        else:
            tokens = tokenize(session, chat(session, [{"role": "user", "content": text}]))
        info = {"kind": subset, "id": doc["_id"], "expected": doc["answers"], "tokens_before_cut": n_whole}
        return Sample(index, tokens, info, {"doc": doc})

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """The answer, and lm-eval's score of it."""
        definition = self.definition(sample.info["kind"])
        text = session.answer(max_gen(definition), until(definition))
        return {"text": text, "score": float(definition.process_results(sample.memo["doc"], [text])["score"])}


def cut_middle(llm: Llama, text: str, max_length: int) -> tuple[str, int]:
    """`text` with int(max_length / 2) tokens from each end when it has more than `max_length`, as LongBench's authors
    cut it; and how many it had.
    """
    tokens = llm.tokenize(text.encode(), add_bos=True, special=True)
    if len(tokens) > max_length:
        half = int(max_length / 2)
        text = "".join(
            llm.detokenize(part).decode("utf-8", errors="replace") for part in (tokens[:half], tokens[-half:])
        )
    return text, len(tokens)


@lru_cache(maxsize=len(SUBSETS))
def _definition(task: LongBench, subset: str) -> Any:
    def docs() -> list[dict[str, Any]]:
        # lm-eval calls the published field "input" "question"
        return [
            {**{key: row[key] for key in FIELDS[1:]}, "question": row["input"], "_id": row.get("_id", str(i))}
            for i, row in enumerate(_fetched(subset) if task.download == "yes" else _local(task.file(subset)))
        ]

    return define(task.name, task.name, "longbench", f"longbench_{subset}", docs)


def _local(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for i, line in enumerate(lines):
            try:
                row = json.loads(line)
                lost = [key for key in FIELDS if key not in row]
            except (ValueError, TypeError) as e:
                raise ValueError(f"{file}, line {i + 1} is not an object in JSON: {e}") from e
            if lost:
                raise ValueError(
                    f"{file}, line {i + 1} has no {', '.join(lost)}; expected the layout that LongBench publishes"
                )
            yield row


def _fetched(subset: str) -> Iterator[dict[str, Any]]:
    datasets = importlib.import_module("datasets")
    rows = datasets.load_dataset("json", data_files=f"zip://data/{subset}.jsonl::{SOURCE}", split="train")
    yield from rows
