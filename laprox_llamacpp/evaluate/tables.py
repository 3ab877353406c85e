"""Tables of a report: an experiment's means, paired differences and costs as texts, for HTML and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .cells import FULL
from .stats import COSTS, DIVERGENCE, LABELS, NLL, REFERENCE, Difference, Experiment, Key, Mean

_MIB = 1 << 20
_ARROWS = {"": "", "better": " ▲", "worse": " ▼"}


@dataclass(frozen=True)
class Table:
    """Texts in columns.

    Args:
        title: a line above it.
        head, rows: texts; every row as long as the head.
        n_words: this many columns from the left are words, the others numbers.
        marks: "better", "worse" or "" for each cell; none at all for a table without.
        short: whether it is worth its place in a short report, too.
        about: a sentence below it.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    n_words: int
    marks: list[list[str]] = field(default_factory=list)
    short: bool = True
    about: str = ""

    def narrow(self) -> Table:
        """Without the columns "KV type" and "kind" where these are the same in every row."""
        kept = [
            i for i, h in enumerate(self.head) if h not in ("KV type", "kind") or len({r[i] for r in self.rows}) > 1
        ]
        head, *rest = ([row[i] for i in kept] for row in (self.head, *self.rows, *self.marks))
        n = len(self.rows)
        lost = len(self.head) - len(head)
        return Table(self.title, head, rest[:n], self.n_words - lost, rest[n:], self.short, self.about)


def tables(experiment: Experiment) -> Iterator[Table]:
    """All that there is to say about an experiment, what matters most first; each is made when it is asked for."""
    return (t.narrow() for t in _all(experiment) if t.rows)


def metrics(experiment: Experiment) -> list[str]:
    """Metrics that get tables: the task's own, then the others of quality."""
    return [m for m in experiment.metrics() if m not in COSTS]


def _all(experiment: Experiment) -> Iterator[Table]:
    for metric in metrics(experiment):
        yield _results(experiment, metric)
        yield _differences(experiment, REFERENCE, metric)
        if metric != DIVERGENCE:  # nothing but the divergence itself
            yield _differences(experiment, FULL, metric)
    if len(experiment.kv_types) > 1:
        yield _equal_bytes(experiment)
    yield _costs(experiment)


def _higher(experiment: Experiment, metric: str) -> bool:
    """Whether more of it is better."""
    return experiment.higher if metric == experiment.metric else metric != NLL


def _results(experiment: Experiment, metric: str) -> Table:
    budgets = experiment.budgets

    def mean(key: Key, kind: str) -> Mean:
        return experiment.perplexity(key, kind) if metric == NLL else experiment.mean(key, kind, metric)

    keys = [k for t in experiment.kv_types for k in experiment.keys(t)]
    digits = _digits(mean(k, kind) for k in keys for kind in experiment.kinds)
    rows = []
    for t in experiment.kv_types:
        for kind in experiment.kinds:
            full = mean(Key(t, FULL, ""), kind)
            rows.append([t, kind, "full cache", str(full.n), _mean(full, digits), *[""] * len(budgets)])
            for method in experiment.methods:
                means = [mean(Key(t, method, b), kind) for b in budgets]
                rows.append([t, kind, method, _counts(means), "", *(_mean(m, digits) for m in means)])
    shown = "perplexity" if metric == NLL else LABELS.get(metric, metric)
    better = "higher" if _higher(experiment, metric) else "lower"
    title = f"{shown[:1].upper()}{shown[1:]} by budget ({better} is better)"
    return Table(title, ["KV type", "kind", "method", "n", "all rows", *budgets], rows, 3)


def _differences(experiment: Experiment, against: str, metric: str) -> Table:
    found, budgets = experiment.differences(against, metric=metric), experiment.budgets
    digits = _digits(d.value for d in found)
    by_row: dict[tuple[str, str, str], dict[str, Difference]] = {}
    for d in found:
        by_row.setdefault((d.key.kv_type, d.kind, d.key.method), {})[d.key.budget] = d
    rows, marks = [], []
    for labels, row in by_row.items():
        told = [_told(row.get(b), digits, _higher(experiment, metric)) for b in budgets]
        rows.append([*labels, _counts([d.value for d in row.values()]), *(text for text, _ in told)])
        marks.append(["", "", "", "", *(mark for _, mark in told)])
    title = f"Paired differences of {LABELS.get(metric, metric)} to {'the full cache' if against == FULL else against}"
    head = ["KV type", "kind", "method", "n", *budgets]
    return Table(title, head, rows, 3, marks, short=against != FULL)


def _equal_bytes(experiment: Experiment) -> Table:
    """Every cell, the fewest bytes first, against the full caches of each type on the same prompts."""
    widest = experiment.kv_types[0]
    full = [Key(t, FULL, "") for t in experiment.kv_types]
    keys = [k for t in experiment.kv_types for k in experiment.keys(t) if k != full[0]]
    keys.sort(key=lambda k: experiment.byte_share(k).mean)
    found = [[experiment.difference(k, f) if k != f else None for f in full] for k in keys]
    digits = _digits(d.value for row in found for d in row if d)
    rows, marks = [], []
    for key, row in zip(keys, found):
        told = [_told(d, digits, experiment.higher) for d in row]
        share, mean = experiment.byte_share(key), experiment.mean(key)
        method = "full cache" if key.method == FULL else key.method
        rows.append([
            key.kv_type, method, key.budget, _percent(share.mean), str(mean.n), _mean(mean, digits),
            *(text for text, _ in told),
        ])  # fmt: skip
        marks.append([*[""] * 6, *(mark for _, mark in told)])
    head = ["KV cache", "method", "budget", f"bytes of {widest} full", "n", experiment.metric]
    head += [f"minus full {k.kv_type}" for k in full]
    about = "Each on the same prompts: a quantised cache loses to what is better than it with no more bytes."
    return Table("At equal bytes: eviction, quantised caches, and both", head, rows, 3, marks, about=about)


def _costs(experiment: Experiment) -> Table:
    rows = []
    for t in experiment.kv_types:
        for key in experiment.keys(t):
            size, rows_kept, score, plan = (_cost(experiment, key, m) for m in COSTS)
            whole = _cost(experiment, Key(t, FULL, ""), "rows")
            rows.append([
                t, "full cache" if key.method == FULL else key.method, key.budget,
                number(size.mean / _MIB, 1), _percent(experiment.byte_share(key).mean),
                _percent(rows_kept.mean / whole.mean if whole.n else math.nan),
                number(score.mean, 1), number(plan.mean, 1),
            ])  # fmt: skip
    widest = experiment.kv_types[0] if experiment.kv_types else ""
    head = ["KV type", "method", "budget", "KV MiB", f"of {widest} full", "rows kept", "score ms", "plan ms"]
    seconds = Mean.of(s.record["prefill_s"] for s in experiment.samples if isinstance(s.record.get("prefill_s"), float))
    prefill = f" One prefill a prompt, shared by all cells, took {number(seconds.mean, 2)} s." if seconds.n else ""
    about = f"KV MiB is what the cache holds in memory, with the room that it keeps for new tokens.{prefill}"
    return Table("Costs", head, rows, 3, short=False, about=about)


def _cost(experiment: Experiment, key: Key, metric: str) -> Mean:
    """Over all samples: what the full cache cannot solve costs as much."""
    values = (s.value(key.name, metric) for s in experiment.of(key.kv_type))
    return Mean.of(v for v in values if v is not None)


# ---- numbers as text


def number(value: float, digits: int) -> str:
    """With so many decimals; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def exact(*values: float) -> list[str]:
    """All digits; nothing for NaN."""
    return ["" if math.isnan(v) else repr(v) for v in values]


def _told(difference: Difference | None, digits: int, higher: bool) -> tuple[str, str]:
    """A difference and how it is marked."""
    if difference is None or not difference.value.n:
        return "", ""
    m = difference.value
    mark = ("better" if (m.mean > 0) == higher else "worse") if difference.clear else ""
    text = _mean(m, digits)
    text = text.replace("-", "−") if m.mean < 0 else f"+{text}" if m.mean > 0 else text
    return text + _ARROWS[mark], mark


def _digits(means: Iterable[Mean]) -> int:
    """Decimals of a table: one digit of its smallest standard error, two at least."""
    known = [x for m in means for x in (m.sem if m.sem > 0 else abs(m.mean),) if x > 0]
    return min(6, max(2, -math.floor(math.log10(min(known))))) if known else 2


def _mean(m: Mean, digits: int) -> str:
    return number(m.mean, digits) + (f" ± {number(m.sem, digits)}" if m.n > 1 else "")


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}%"


def _counts(means: Sequence[Mean]) -> str:
    low, high = (f(m.n for m in means) if means else 0 for f in (min, max))
    return str(low) if low == high else f"{low}–{high}"
