"""The tables of docs/results/README.md, from the runs beside it; what stands above them there is written by hand.

python scripts/results_tables.py docs/results
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from laprox_llamacpp.evaluate import bench_report, markdown, stats
from laprox_llamacpp.evaluate.cells import FULL
from laprox_llamacpp.evaluate.stats import ALL_KINDS, Experiment, Key, Mean

START = "<!-- tables: python scripts/results_tables.py docs/results -->\n"
QWEN, SMOL = "Qwen", "SmolLM2"
# numbers of an independent float32 reference: budgets, then methods; the model and length are the key's
ELSEWHERE = {
    ("needle-qwen-2k", f"{QWEN} 2K", ("0.05", "0.1")): {
        "streaming": (0, 0), "h2o": (0, 0), "snapkv": (0.25, 0.95), "adakv": (0.25, 0.98),
        "laprox:preset=paper": (0.35, 0.98), "criticalkv": (0.38, 1), "laprox:alloc=layer:preset=paper": (0.4, 1),
        "criticalkv:pool=reach12:0.3": (1, 1), "laprox": (1, 1),
    },
    ("needle-qwen-4k", f"{QWEN} 4K", ("0.025", "0.05")): {
        "snapkv": (0.08, 0.76), "adakv": (0.08, 0.75), "laprox:preset=paper": (0.31, 0.77), "criticalkv": (0.16, 0.8),
        "laprox:alloc=layer:preset=paper": (0.35, 0.75), "laprox": (1, 1),
    },
    ("needle-smol-2k", f"{SMOL} 2K", ("0.1", "0.2")): {
        "snapkv": (0.5, 0.91), "adakv": (0.27, 0.73), "laprox:preset=paper": (0.27, 0.73), "criticalkv": (0.64, 0.95),
        "laprox:alloc=layer:preset=paper": (0.82, 0.86), "criticalkv:pool=reach12:0.3": (0.91, 1), "laprox": (1, 1),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One part at one budget: of a kind of its samples, and of a metric where it is not the task's own."""

    part: str
    head: str
    kind: str = ALL_KINDS
    metric: str | None = None

    def mean(self, experiment: Experiment, method: str, budget: str = "") -> Mean:
        """Of a method on an F16 cache."""
        return experiment.mean(Key("f16", method, budget), self.kind, self.metric)


@dataclass(frozen=True)
class Section:
    """A heading, a text, and a table of methods for each budget; columns whose part is not there are left out."""

    title: str
    about: str
    columns: Sequence[Column]
    budgets: Sequence[str]
    digits: int = 2


def _plain(prefix: str, parts: Sequence[str]) -> list[Column]:
    names = {"smol": SMOL, "qwen": QWEN}
    found = [p.split("-") for p in parts]
    return [Column(f"{prefix}-{p}", f"{names[m]} {length.upper()}") for p, (m, length) in zip(parts, found)]


_KINDS = {
    "reversed": "value before name", "paraphrase": "no common word", "multiquery": "two asked",
    "multivalue": "three values",
}  # fmt: skip
HARD = [Column("hard-qwen-2k", f"2K {name}", kind) for kind, name in _KINDS.items()]
HARD += [
    Column(f"hard-qwen-{n}", f"{n.upper()} {_KINDS[kind]}", kind)
    for n in ("4k", "8k")
    for kind in ("reversed", "paraphrase")
]
TEXT = [
    Column(c.part, f"{c.head} {kind}")
    for kind, name in (("prose", "text"), ("code", "code"))
    for c in _plain(name, ["smol-2k", "smol-4k", "qwen-2k", "qwen-4k"])
]
QUESTIONS = [
    column
    for c in _plain("questions", ["smol-2k", "qwen-2k", "qwen-4k"])
    for column in (
        *(Column(c.part, f"{c.head} {which}", metric=which) for which in ("seen", "unseen")),
        Column(c.part.replace("questions", "questions-blind"), f"{c.head} none seen", metric="score"),
    )
]
SECTIONS = (
    Section(
        "Needles",
        "Single and multi-key in turn, five depths in turn; the share found of those that the full cache finds. The "
        "question stands at the end of the prompt, so the window sees it. A needle is right when its number stands in "
        "the answer by itself: seven digits for Qwen, four for SmolLM2. `quest` frees nothing: its budget is what a "
        "step reads. `duo` streams with every head below 384 rows.",
        _plain("needle", ["smol-2k", "smol-4k", "qwen-2k", "qwen-4k", "qwen-8k", "qwen-16k"]),
        ("0.025", "0.05", "0.1"),
    ),
    Section(
        "Hard needles",
        "Qwen. A score is the share of the expected values in the answer, over the prompts that the full cache solves "
        "whole.",
        HARD,
        ("0.025", "0.05", "0.1"),
    ),
    Section(
        "Continuation of text and code",
        "KL divergence from the full cache in nats, over the 128 tokens that follow the prompt; less is better. The "
        "prose is Python's documentation, the code its library.",
        TEXT,
        ("0.05", "0.1", "0.2"),
        3,
    ),
    Section(
        "Several questions on one evicted context",
        "Five facts, five questions as turns of one chat, in two orders. *seen*: the question at the end of the "
        "prompt, when the cache was evicted; *unseen*: the others; *none seen*: evicted before any question. The share "
        "answered right.",
        QUESTIONS,
        ("0.05", "0.1", "0.2"),
    ),
)
ACROSS = (
    ("similarity-qwen-2k", "Output similarity", f"{QWEN} 2K: cosine between the attention outputs of the full and the "
     "evicted cache, over layers and decode steps.", 3),
    ("forms-qwen-2k", "Forms of the score, hard needles", f"{QWEN} 2K, the four hard kinds together; other prompts "
     "than above.", 2),
    ("forms-text-smol-2k", "Forms of the score, text", f"{SMOL} 2K, KL divergence as above; other stretches.", 3),
)  # fmt: skip
RIVALS = (
    ("rival-qwen-2k", f"{QWEN} 2K, needles", 2),
    ("rival-smol-2k", f"{SMOL} 2K, needles", 2),
    ("rival-text-qwen-2k", f"{QWEN} 2K, KL divergence on text", 3),
    ("rival-text-smol-2k", f"{SMOL} 2K, KL divergence on text", 3),
)


class Results:
    """The parts in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._read: dict[str, Experiment | None] = {}

    def part(self, name: str) -> Experiment | None:
        """None for a part that was not run."""
        if name not in self._read:
            there = (self.root / name / "run.json").exists()
            self._read[name] = stats.read(self.root / name)[0][0] if there else None
        return self._read[name]


def text(root: Path) -> str:
    """Everything below the mark."""
    return "\n".join(_lines(Results(root)))


def _lines(results: Results) -> Iterator[str]:
    for section in SECTIONS:
        columns = [(c, e) for c in section.columns if (e := results.part(c.part))]
        if not columns:
            continue
        yield from ("", f"## {section.title}", "", _prose(section.about))
        for budget in section.budgets:
            yield from ("", f"**At {_percent(budget)}**", "")
            yield _at(columns, budget, section.digits)
    for name, title, about, digits in ACROSS:
        e = results.part(name)
        if e is not None:
            head = [_percent(b) for b in e.budgets]
            rows = [[f"`{m}`", *(_mean(e.mean(Key("f16", m, b)), digits) for b in e.budgets)] for m in e.methods]
            about = f"{about} n = {len(e.counted('f16'))}."
            yield from ("", f"## {title}", "", _prose(about), "", markdown.table(["method", *head], rows))
    yield from _equal_bytes(results)
    yield from _benchmarks(results)
    yield from _order(results)


def _at(columns: Sequence[tuple[Column, Experiment]], budget: str, digits: int) -> str:
    methods = dict.fromkeys(m for _, e in columns for m in e.methods)
    full = [c.mean(e, FULL) for c, e in columns]
    rows = [["n", *(str(m.n) for m in full)]]
    if any(c.metric for c, _ in columns):
        rows.append(["full cache", *(_mean(m, digits) for m in full)])
    rows += [[f"`{m}`", *(_mean(c.mean(e, m, budget), digits) for c, e in columns)] for m in methods]
    return markdown.table(["method", *(c.head for c, _ in columns)], rows)


def _equal_bytes(results: Results) -> Iterator[str]:
    """The default on each KV type against the full caches; the part's own metric, and the bytes of the f16 full one."""
    there = [(e, title, digits) for name, title, digits in RIVALS if (e := results.part(name))]
    if not there:
        return
    yield from ("", "## Quantised caches and eviction", "")
    yield _prose("The same prompts for every row. *Bytes*: of the full f16 cache, the reserve for new tokens included.")
    for e, title, digits in there:
        keys = [k for t in e.kv_types for k in e.keys(t) if k.method in (FULL, "laprox")]
        keys.sort(key=lambda k: -e.byte_share(k).mean)
        rows = [
            [
                f"full {k.kv_type}" if k.method == FULL else f"`laprox` {_percent(k.budget)} on {k.kv_type}",
                f"{100 * e.byte_share(k).mean:.1f} %",
                _mean(e.mean(k), digits),
            ]
            for k in keys
        ]
        yield from ("", f"**{title}** (n = {len(e.counted(e.kv_types[0]))})", "")
        yield markdown.table(["cache", "bytes", e.metric], rows)


def _benchmarks(results: Results) -> Iterator[str]:
    found, _ = bench_report.read(results.root)
    if not found:
        return
    yield from ("", "## Speed and memory", "")
    yield _prose(
        "Medians over rounds in which a full cache, the evicted one, and the *limit*, a full cache of as many rows, "
        "decode in turn; one process each. The speed-up and the share of the limit are medians of a round's ratios."
    )
    for result in found:
        head, rows = bench_report.table(result)
        yield from ("", f"**{bench_report.title(result)}**", "", markdown.table(head, rows))


def _order(results: Results) -> Iterator[str]:
    """The methods beside what other code measured on other prompts."""
    columns = [(names, rows, e) for names, rows in ELSEWHERE.items() if (e := results.part(names[0]))]
    head = [
        h for (_, title, budgets), _, _ in columns
        for h in (f"{title} at {' / '.join(map(_percent, budgets))}: reference", "here")
    ]  # fmt: skip
    rows = []
    for method in max((rows for _, rows, _ in columns), key=len):
        row = [f"`{method}`"]
        for (_, _, budgets), theirs, e in columns:
            row.append(" / ".join(f"{x:.2f}" for x in theirs[method]) if method in theirs else "–")
            row.append(" / ".join(f"{e.mean(Key('f16', method, b)).mean:.2f}" for b in budgets))
        rows.append(row)
    yield from ("", "## The order of the methods", "")
    yield _prose(
        "is that of an independent float32 reference (PyTorch, other code, other prompts; n = 10 to 40), which was "
        "measured before this engine. Its SmolLM2 numbers are divided by 0.88, what its full cache finds; its 4K "
        "prompts have multi-value ones among them."
    )
    yield from ("", markdown.table(["needles found", *head], rows))


def _prose(about: str) -> str:
    return textwrap.fill(about, 120, break_on_hyphens=False)


def _percent(budget: str) -> str:
    return f"{100 * float(budget):g} %"


def _mean(m: Mean, digits: int) -> str:
    if not m.n:
        return "–"
    error = f" ± {m.sem:.{digits}f}".replace("± 0.", "± .") if m.sem > 0 and not math.isnan(m.sem) else ""
    return f"{m.mean:.{digits}f}{error}"


def main(root: Path) -> None:
    page = root / "README.md"
    by_hand = page.read_text().partition(START)[0]
    page.write_text(f"{by_hand}{START}{text(root)}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("one argument expected: the folder of the results")
    main(Path(sys.argv[1]))
