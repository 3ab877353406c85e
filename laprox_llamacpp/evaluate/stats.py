"""What run folders say: means, standard errors, and paired differences. Plain NumPy; no model, no native library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..budget import Budget
from .cells import FULL
from .records import RUN_FILE, Folder, Sample, join, read_folder, seed_of, width

REFERENCE = "laprox"
ALL_KINDS = "all"
DIVERGENCE = "kl"  # zero for the full cache by definition
# tasks where a sample says something about eviction only if the full cache solves it
NEEDS_FULL = ("needle", "ruler")
LEAST_FULL = 0.2  # a model whose full cache scores less cannot do the task
FEW = 10  # below this, a standard error is itself too uncertain to rank methods by
LEVEL = 0.05  # a difference is clear when chance alone makes one as large less often than this
LABELS = {
    "kl": "KL divergence from the full cache (nats)",
    "nll": "negative log-likelihood (nats)",
    "cosine": "cosine to the full cache's attention outputs",
    "top1": "top token as the full cache's",
    "seen": "question that the window saw",
    "unseen": "questions that it did not see",
}
_NAMED = 4  # cells that share a note, one by one
# tasks that measure a distance from the widest full cache of the run
AGAINST_FULL = ("continuation", "similarity")
COSTS = ("kv_bytes", "rows", "score_ms", "plan_ms")
NLL = "nll"


@dataclass(frozen=True)
class Mean:
    """Mean of `n` values and its standard error s / sqrt(n), s with n - 1 below; NaN where there are too few."""

    n: int
    mean: float
    sem: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Mean of `values`; NaN for none of them, and a standard error of NaN for one."""
        x = np.array(list(values), np.float64)
        mean = float(x.mean()) if x.size else math.nan
        return cls(x.size, mean, float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan)


@dataclass(frozen=True)
class Key:
    """Names a cell: KV type, method ("full", "laprox:window=16") and budget ("0.05", "" for the full cache)."""

    kv_type: str
    method: str
    budget: str

    @property
    def name(self) -> str:
        """As records call it."""
        return f"{self.method}@{self.budget}" if self.budget else self.method


@dataclass(frozen=True)
class Difference:
    """Cell minus another one, over the prompts that both have; `p` as `chance`."""

    kind: str
    key: Key
    against: Key
    value: Mean
    p: float

    @property
    def clear(self) -> bool:
        """Whether chance hardly makes it, with enough samples for that to mean something."""
        return self.value.n >= FEW and self.p < LEVEL


def chance(differences: Sequence[float]) -> float:
    """Probability of a mean at least this far from zero, on either side, if there were no effect.

    Answers that are right or wrong differ by -1, 0 or 1: the exact sign test (McNemar's). Other numbers: Student's t
    with n - 1 degrees of freedom, whose distribution is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    mean = Mean.of(differences)
    if all(d in (-1, 0, 1) for d in differences):
        n, fewer = sum(map(bool, differences)), min(differences.count(1), differences.count(-1))
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / float(2**n))
    if mean.n < 2:
        return 1.0
    df = mean.n - 1
    angle = math.atan2(abs(mean.mean) / mean.sem, math.sqrt(df)) if mean.sem else math.pi / 2
    sine, cosine = math.sin(angle), math.cos(angle)
    first = df % 2  # the sum is over even powers of the cosine, or over odd ones
    term, total = (cosine if first else 1.0), 0.0
    for power in range(first, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 1 - (2 / math.pi * (angle + sine * total) if first else sine * total)


class Experiment:
    """One task with its options on one model: run folders as `_experiments` joins them."""

    def __init__(self, folders: Sequence[Folder]) -> None:
        self.folders = list(folders)
        self.samples = join(folders)
        setup = folders[0].setup
        self.task = str(setup.get("task", "?"))
        self.metric = str(setup.get("metric", "score"))
        self.higher = bool(setup.get("higher", True))
        self.model = str(setup.get("model", "?"))
        self.model_sha256 = str(setup.get("model_sha256", "?"))
        self.options: dict[str, Any] = dict(setup.get("options") or {})
        self._solved = {id: _solves(group, self.metric) for id, group in _by_id(self.samples).items()}

    @property
    def tokens(self) -> Any:
        """Length of the prompts as the task was asked for it; None for a task without one."""
        return self.options.get("tokens")

    @property
    def title(self) -> str:
        """Task, model and length."""
        return ", ".join([self.task, self.model, *([f"{self.tokens} tokens"] if self.tokens else [])])

    @property
    def kinds(self) -> list[str]:
        """Kinds of samples, "all" first when there are several."""
        found = sorted({s.kind for s in self.samples if s.kind})
        return [ALL_KINDS, *found] if len(found) != 1 else found

    @property
    def kv_types(self) -> list[str]:
        """Those measured, the widest first."""
        return sorted({s.kv_type for s in self.samples}, key=width)

    @property
    def methods(self) -> list[str]:
        """Those measured, in the order of the command, without the full cache."""
        return list(dict.fromkeys(k.method for k in self._keys() if k.method != FULL))

    @property
    def budgets(self) -> list[str]:
        """Those measured, the smallest share of the prompt first."""
        found = dict.fromkeys(k.budget for k in self._keys() if k.budget)
        return sorted(found, key=lambda b: (self.share(b), b))

    def keys(self, kv_type: str) -> list[Key]:
        """Every cell of a KV type, the full cache first."""
        pairs = [(m, b) for m in self.methods for b in self.budgets]
        measured = {name for s in self.samples if s.kv_type == kv_type for name in s.cells}
        return [k for k in (Key(kv_type, FULL, ""), *(Key(kv_type, m, b) for m, b in pairs)) if k.name in measured]

    def share(self, budget: str) -> float:
        """A budget as a share of the prompt, on average; NaN when it cannot be told."""
        try:
            parsed = Budget.parse(budget)
        except ValueError:
            return math.nan
        if parsed.kind == "fraction":
            return parsed.value
        if parsed.kind == "tokens":
            whole = [s.record.get("n_prompt") or math.nan for s in self.samples]
        else:
            whole = [s.value(FULL, "kv_bytes") or math.nan for s in self.samples]
        return parsed.value / float(np.mean(whole)) if whole else math.nan

    def of(self, kv_type: str, kind: str = ALL_KINDS) -> list[Sample]:
        """Samples of a KV type and kind."""
        return [s for s in self.samples if s.kv_type == kv_type and kind in (ALL_KINDS, s.kind)]

    def counted(self, kv_type: str, kind: str = ALL_KINDS) -> list[Sample]:
        """Samples that enter the averages: all, or those that the widest full cache solves (see `NEEDS_FULL`)."""
        return [s for s in self.of(kv_type, kind) if self.solved(s)]

    def solved(self, sample: Sample) -> bool:
        """Whether the widest full cache measured on this prompt scores 1; True for a task that does not ask."""
        return self.task not in NEEDS_FULL or self._solved[sample.id]

    def mean(self, key: Key, kind: str = ALL_KINDS, metric: str | None = None) -> Mean:
        """Of a metric (the task's own by default) over the samples that count."""
        return self.mean_where(key, lambda s: True, kind, metric)

    def mean_where(
        self, key: Key, where: Callable[[Sample], bool], kind: str = ALL_KINDS, metric: str | None = None
    ) -> Mean:
        """The same over those samples for which `where` holds."""
        values = (s.value(key.name, metric or self.metric) for s in self.counted(key.kv_type, kind) if where(s))
        return Mean.of(v for v in values if v is not None)

    def listed(self, key: Key, metric: str) -> list[Mean]:
        """Of a metric that is a list of numbers ("by_turn"), entry by entry."""
        found: list[Any] = [s.cells.get(key.name, {}).get(metric) for s in self.counted(key.kv_type)]
        rows = [row for row in found if _numbers(row)]
        longest = max((len(row) for row in rows), default=0)
        return [Mean.of(row[i] for row in rows if i < len(row)) for i in range(longest)]

    def list_metrics(self) -> list[str]:
        """Names of the metrics that are lists of numbers somewhere."""
        found = {
            name: None for s in self.samples for cell in s.cells.values() for name, v in cell.items() if _numbers(v)
        }
        return list(found)

    def entries(self, metric: str, n: int) -> list[int]:
        """What the entries of a list are numbered by: layers of the model, or 1, 2, 3 ..."""
        layers = next(((s.record.get("info") or {}).get("layers") for s in self.samples), None)
        if metric == "by_layer" and isinstance(layers, list) and len(layers) == n:
            return layers
        return list(range(1, n + 1))

    def metrics(self) -> list[str]:
        """Names of all metrics that are numbers somewhere, the task's own first."""
        found = {
            name: None
            for s in self.samples
            for cell, values in s.cells.items()
            for name in values
            if s.value(cell, name) is not None
        }
        return sorted(found, key=lambda name: name != self.metric)

    def within(self, low: float, high: float) -> bool:
        """Whether every value of the task's metric lies in a range."""
        values = (s.value(cell, self.metric) for s in self.samples for cell in s.cells)
        return all(low <= v <= high for v in values if v is not None)

    def difference(self, key: Key, against: Key, kind: str = ALL_KINDS, metric: str | None = None) -> Difference:
        """One cell minus another, prompt by prompt; the KV types may differ, too."""
        ours, theirs = (
            {s.id: s.value(k.name, metric or self.metric) for s in self.counted(k.kv_type, kind)}
            for k in (key, against)
        )
        pairs = [(a, theirs.get(id)) for id, a in ours.items()]
        values = [a - b for a, b in pairs if a is not None and b is not None]
        return Difference(kind, key, against, Mean.of(values), chance(values))

    def differences(
        self, against: str = REFERENCE, kv_type: str | None = None, metric: str | None = None
    ) -> list[Difference]:
        """Every cell minus the one of method `against` ("full" or a method) at the same budget and KV type."""
        found = (
            self.difference(key, Key(t, against, "" if against == FULL else key.budget), kind, metric)
            for kind in self.kinds
            for t in (self.kv_types if kv_type is None else [kv_type])
            for key in self.keys(t)
            if key.method not in (FULL, against)
        )
        return [d for d in found if d.value.n]

    def perplexity(self, key: Key, kind: str = ALL_KINDS) -> Mean:
        """exp of the mean negative log-likelihood; the standard error to first order."""
        m = self.mean(key, kind, NLL)
        return Mean(m.n, math.exp(m.mean), math.exp(m.mean) * m.sem)

    def byte_share(self, key: Key) -> Mean:
        """KV bytes of a cell over those of the widest full cache, on the same prompts."""
        widest = self.kv_types[0]
        whole = {s.id: s.value(FULL, "kv_bytes") for s in self.of(widest)}
        pairs = [(s.value(key.name, "kv_bytes"), whole.get(s.id)) for s in self.of(key.kv_type)]
        return Mean.of(a / b for a, b in pairs if a is not None and b)

    def notes(self) -> list[str]:
        """What a reader must know before the numbers: few samples, left out, unfinished, unreadable."""
        out = []
        if self.task in NEEDS_FULL and self.samples:
            right = ", ".join(f"{len(self.counted(t))} of {len(self.of(t))} samples ({t})" for t in self.kv_types)
            out.append(f"Full cache right on {right}; only those are averaged.")
        elif self.higher and self.within(0, 1):
            for t in self.kv_types:
                full = self.mean(Key(t, FULL, ""))
                if full.mean < LEAST_FULL:
                    out.append(
                        f"The full cache ({t}) itself scores {full.mean:.2f}: what the model cannot do with all of its "
                        "cache says little about eviction."
                    )
        counts = [self.mean(key, k).n for t in self.kv_types for k in self.kinds for key in self.keys(t)]
        if counts and not any(counts):
            out.append("Nothing to compare: take shorter prompts, longer answers, an easier kind or a larger model.")
        elif counts and min(counts) < FEW:
            out.append(
                f"As few as {min(counts)} {'sample' if min(counts) == 1 else 'samples'} behind a cell: too few to rank "
                "methods that are close; the standard errors themselves are uncertain."
            )
        for t in self.kv_types:
            prompts = [s.record["prompt_sha256"] for s in self.of(t) if "prompt_sha256" in s.record]
            if len(set(prompts)) < len(prompts):
                out.append(
                    f"{len(prompts)} samples ({t}) have {len(set(prompts))} different prompts: take a longer text, "
                    "the standard errors are too small."
                )
        for seed in dict.fromkeys(s.id[0] for s in self.samples):
            setups = [f.setup for f in self.folders if seed_of(f) == seed]
            asked = {(t, i) for x in setups for t in x.get("kv_types", ()) for i in range(x.get("n_samples", 0))}
            there = {(s.kv_type, s.id[1]) for s in self.samples if s.id[0] == seed}
            if asked - there:
                out.append(f"Unfinished: {len(asked & there)} of {len(asked)} samples of seed {seed} are there.")
        out += self._notes_of_cells()
        own = [t for t in self.kv_types[1:] if any(s.record.get("reference", t) == t for s in self.of(t))]
        if own and self.task in AGAINST_FULL:
            of = ", ".join(own)
            out.append(f"{self.metric} on {of} is against that type's own full cache, not that of {self.kv_types[0]}.")
        for folder in self.folders:
            if folder.n_bad:
                out.append(f"{folder.path.name}: lines that could not be read, and are left out: {folder.n_bad}.")
            if not folder.records:
                out.append(f"{folder.path.name}: no finished sample.")
        return out

    def _notes_of_cells(self) -> Iterator[str]:
        """What cells could not do as they say, as they told it when they were measured."""
        told: dict[str, dict[str, None]] = {}
        for s in self.samples:
            for name, cell in s.cells.items():
                if cell.get("note"):
                    told.setdefault(str(cell["note"]), {})[name] = None
        for text, names in told.items():
            few = list(names)[:_NAMED]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"{', '.join(few)}{more}: {text}."

    def _keys(self) -> Iterator[Key]:
        named = [name for f in self.folders for name in f.setup.get("cells", ())]
        seen = {name: None for s in self.samples for name in s.cells}
        for name in [n for n in dict.fromkeys(named) if n in seen] + list(seen):
            method, at, budget = name.rpartition("@")
            yield Key("", method, budget) if at else Key("", name, "")


def read(root: Path) -> tuple[list[Experiment], list[str]]:
    """All run folders in `root` and below, joined into experiments, and a line about each file that is no run.

    Files are only read, also while a run is going on. Raises ValueError when there is no run.
    """
    folders, unread = [], []
    for file in sorted(root.rglob(RUN_FILE)):
        try:
            folders.append(read_folder(file))
        except (OSError, ValueError, TypeError, KeyError) as e:
            unread.append(f"{file} could not be read as a run: {' '.join(str(e).split())}")
    if not folders:
        why = f" ({unread[0]})" if unread else ""
        raise ValueError(f"{root} holds no run{why}, expected what `laprox-llamacpp eval` or `bench` wrote to --out")
    found = [Experiment(group) for group in _experiments(folders)]
    return sorted(found, key=lambda e: (e.task, e.model, _number(e.tokens), json.dumps(e.options))), unread


def _experiments(folders: Sequence[Folder]) -> list[list[Folder]]:
    """Folders that measure the same: other cells and KV types on the same prompts, or the same cells on prompts of
    another seed. With neither the same, means would compare cells on different prompts.
    """
    by_seed: dict[str, list[Folder]] = {}
    for folder in folders:
        key = [*_same(folder.setup), seed_of(folder)]
        by_seed.setdefault(json.dumps(key, sort_keys=True), []).append(folder)
    found: dict[str, list[Folder]] = {}
    for group in by_seed.values():
        cells, types = (sorted({x for f in group for x in f.setup.get(k, ())}) for k in ("cells", "kv_types"))
        found.setdefault(json.dumps([*_same(group[0].setup), cells, types], sort_keys=True), []).extend(group)
    return list(found.values())


def _same(setup: Mapping[str, Any]) -> list[Any]:
    """What folders of one experiment have in common."""
    options = {k: v for k, v in (setup.get("options") or {}).items() if k != "seed"}
    return [setup.get(k) for k in ("task", "metric", "model", "model_sha256", "data_sha256")] + [options]


def _by_id(samples: Sequence[Sample]) -> dict[tuple[Any, int], list[Sample]]:
    out: dict[tuple[Any, int], list[Sample]] = {}
    for sample in samples:
        out.setdefault(sample.id, []).append(sample)
    return out


def _solves(same: Sequence[Sample], metric: str) -> bool:
    """Whether the widest of the full caches that saw a prompt scores 1 on it."""
    scores = [v for s in sorted(same, key=lambda s: width(s.kv_type)) if (v := s.value(FULL, metric)) is not None]
    return bool(scores) and scores[0] >= 1


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, (int, float)) for v in value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
