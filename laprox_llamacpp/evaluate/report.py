"""`laprox-llamacpp report`: run folders as one HTML page, with the figures and numbers in files beside it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import markdown
from .cells import FULL
from .page import note, page, table
from .stats import DIVERGENCE, NEEDS_FULL, REFERENCE, Experiment, Key, Mean, read

if TYPE_CHECKING:
    from .plots import Look, Plot

PAGE = "index.html"
TABLES = "tables.md"
_MIB = 1 << 20
_LEFT_OUT = 12  # samples named one by one

_READ = (
    "Every value is a mean over prompts, ± one standard error. Methods are compared on the same prompts: the tables of "
    "differences are what to judge by, and no single cell: of twenty cells without any effect, one differs by two "
    "standard errors by chance. ▲ better, ▼ worse by more than two standard errors, from ten samples on."
)


def write(root: Path, out: Path) -> Path:
    """Report on all runs in `root` and below; returns the page, `out`/index.html.

    Raises:
        ValueError: there is no run.
        ImportError: matplotlib is missing.
    """
    try:
        from . import plots
    except ImportError as e:
        raise ImportError("a report needs matplotlib, which is not installed: pip install laprox-llamacpp[eval]") from e
    experiments, unread = read(root)
    out.mkdir(parents=True, exist_ok=True)
    looks = plots.Look.of(list(dict.fromkeys(m for e in experiments for m in e.methods)))
    names = _names(experiments)
    body = [
        f"<h1>KV cache eviction: {len(experiments)} {'experiment' if len(experiments) == 1 else 'experiments'}</h1>"
    ]
    body += [f'<p class="quiet">{escape(_READ)}</p>', *map(note, unread), _contents(experiments, names)]
    for experiment, name in zip(experiments, names):
        body.append(_section(experiment, name, looks, out))
    for family in _families(experiments):
        body += _lengths(family, out)
    _write_csv(out, experiments)
    (out / TABLES).write_text(_markdown(experiments, names), encoding="utf-8")
    file = out / PAGE
    file.write_text(page("KV cache eviction: report", "\n".join(body)), encoding="utf-8")
    return file


# ---- sections


def _contents(experiments: Sequence[Experiment], names: Sequence[str]) -> str:
    links = "".join(f'<li><a href="#{n}">{escape(e.title)}</a></li>' for e, n in zip(experiments, names))
    return f"<ul>{links}</ul>"


def _section(experiment: Experiment, name: str, looks: dict[str, Look], out: Path) -> str:
    from .plots import plots

    body = [f'<h2 id="{name}">{escape(experiment.title)}</h2>']
    body.append(f'<p class="quiet">{escape(_options(experiment))}</p>')
    body += map(note, experiment.notes())
    if experiment.metric not in experiment.metrics():
        body.append(note(f"No cell has a number for the metric {experiment.metric!r}: nothing to show."))
        return "\n".join([*body, _made(experiment)])
    if experiment.task in NEEDS_FULL:
        body += _left_out(experiment)
    body += [_figure(plot, f"{name}-{plot.name}", out) for plot in plots(experiment, looks)]
    body += [f"<h3>{escape(_by_budget(experiment))}</h3>", _labelled(*_results(experiment), 3)]
    for against in _references(experiment):
        head, rows, marks = _differences(experiment, against)
        if rows:
            body += [f"<h3>{escape(_paired(against))}</h3>", _labelled(head, rows, 3, marks)]
    body += ["<h3>Costs</h3>", _costs(experiment), _made(experiment)]
    return "\n".join(body)


def _options(experiment: Experiment) -> str:
    options = ", ".join(f"{k}={v}" for k, v in experiment.options.items())
    return f"{options}; KV cache {', '.join(experiment.kv_types) or 'not measured yet'}"


def _by_budget(experiment: Experiment) -> str:
    return f"{experiment.metric} by budget ({'higher' if experiment.higher else 'lower'} is better)"


def _paired(against: str) -> str:
    return f"Paired differences to {'the full cache' if against == FULL else against}"


def _references(experiment: Experiment) -> tuple[str, ...]:
    return (REFERENCE,) if experiment.metric == DIVERGENCE else (REFERENCE, FULL)


def _markdown(experiments: Sequence[Experiment], names: Sequence[str]) -> str:
    """The tables of the page, to be read where HTML is not."""
    body = ["# Tables", _READ]
    for e, name in zip(experiments, names):
        body += [f"## {e.title}", f"`{name}`: {_options(e)}", *e.notes()]
        if e.metric in e.metrics():
            body += [f"**{_by_budget(e)}**", markdown.table(*_kept(*_results(e)))]
            head, rows, _ = _differences(e, REFERENCE)
            body += [f"**{_paired(REFERENCE)}**", markdown.table(*_kept(head, rows))] if rows else []
    return "\n\n".join(body) + "\n"


def _results(experiment: Experiment) -> tuple[list[str], list[list[str]]]:
    budgets = experiment.budgets
    digits = _digits(
        experiment.mean(k, kind) for t in experiment.kv_types for k in experiment.keys(t) for kind in experiment.kinds
    )
    rows = []
    for t in experiment.kv_types:
        for kind in experiment.kinds:
            full = experiment.mean(Key(t, FULL, ""), kind)
            rows.append([t, kind, "full cache", str(full.n), _mean(full, digits), *[""] * len(budgets)])
            for method in experiment.methods:
                means = [experiment.mean(Key(t, method, b), kind) for b in budgets]
                rows.append([t, kind, method, _counts(means), "", *(_mean(m, digits) for m in means)])
    return ["KV type", "kind", "method", "n", "all rows", *budgets], rows


def _differences(experiment: Experiment, against: str) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Head, rows and what each cell is marked as; no rows when nothing is to be compared."""
    found, budgets = experiment.differences(against), experiment.budgets
    digits = _digits(d.value for d in found)
    by_row: dict[tuple[str, str, str], dict[str, Any]] = {}
    for d in found:
        by_row.setdefault((d.key.kv_type, d.kind, d.key.method), {})[d.key.budget] = d
    rows, marks = [], []
    for labels, row in by_row.items():
        cells = [row.get(b) for b in budgets]
        rows.append(
            [*labels, _counts([d.value for d in cells if d]), *(_signed(d.value, digits) if d else "" for d in cells)]
        )
        marks.append(["", "", "", "", *(_mark(d, experiment.higher) for d in cells)])
        for i, mark in enumerate(marks[-1]):
            rows[-1][i] += {"better": " ▲", "worse": " ▼"}.get(mark, "")
    return ["KV type", "kind", "method", "n", *budgets], rows, marks


def _labelled(
    head: Sequence[str], rows: Sequence[Sequence[str]], text: int, marks: Sequence[Sequence[str]] = ()
) -> str:
    """An HTML table of the columns that are worth showing, the first `text` of them are words."""
    short, shown = _kept(head, rows)
    return table(short, shown, text - (len(head) - len(short)), _kept(head, marks, rows)[1])


def _kept(
    head: Sequence[str], rows: Sequence[Sequence[str]], by: Sequence[Sequence[str]] = ()
) -> tuple[list[str], list[list[str]]]:
    """Without the columns "KV type" and "kind" where these are the same in every row (of `by`, if given)."""
    kept = [i for i in range(len(head)) if head[i] not in ("KV type", "kind") or len({r[i] for r in by or rows}) > 1]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _mark(difference: Any, higher: bool) -> str:
    if difference is None or not difference.clear:
        return ""
    return "better" if (difference.value.mean > 0) == higher else "worse"


def _costs(experiment: Experiment) -> str:
    rows = []
    for t in experiment.kv_types:
        for key in experiment.keys(t):
            size, rows_kept, score, plan = (
                _cost(experiment, key, m) for m in ("kv_bytes", "rows", "score_ms", "plan_ms")
            )
            whole = _cost(experiment, Key(t, FULL, ""), "rows")
            rows.append([
                t, "full cache" if key.method == FULL else key.method, key.budget,
                _number(size.mean / _MIB, 1), _percent(experiment.byte_share(key).mean),
                _percent(rows_kept.mean / whole.mean if whole.n else math.nan),
                _number(score.mean, 1), _number(plan.mean, 1),
            ])  # fmt: skip
    widest = experiment.kv_types[0]
    head = ["KV type", "method", "budget", "KV MiB", f"of {widest} full", "rows kept", "score ms", "plan ms"]
    seconds = Mean.of(s.record["prefill_s"] for s in experiment.samples if isinstance(s.record.get("prefill_s"), float))
    prefill = f" One prefill a prompt, shared by all cells, took {_number(seconds.mean, 2)} s." if seconds.n else ""
    text = f"KV MiB is what the cache holds in memory, with the room that it keeps for new tokens.{prefill}"
    return _labelled(head, rows, 3) + f'<p class="quiet">{escape(text)}</p>'


def _cost(experiment: Experiment, key: Key, metric: str) -> Mean:
    """Over all samples: what the full cache cannot solve costs as much."""
    values = (s.value(key.name, metric) for s in experiment.of(key.kv_type))
    return Mean.of(v for v in values if v is not None)


def _left_out(experiment: Experiment) -> list[str]:
    """Names the prompts that the full cache fails on."""
    failed = {}
    for s in experiment.samples:
        if not experiment.solved(s):
            depth = (s.record.get("info") or {}).get("depth")
            about = [s.kind, f"depth {depth:.0%}" if isinstance(depth, (int, float)) else ""]
            failed[s.id] = f"sample {s.id[1]} ({', '.join(a for a in about if a)})"
    if not failed:
        return []
    named = list(failed.values())
    more = f" and {len(named) - _LEFT_OUT} more" if len(named) > _LEFT_OUT else ""
    return [f"<p>Left out, the full cache fails: {escape('; '.join(named[:_LEFT_OUT]))}{more}.</p>"]


def _made(experiment: Experiment) -> str:
    rows = [["model", experiment.model], ["model SHA-256", experiment.model_sha256]]
    for folder in experiment.folders:
        made = dict(folder.made)
        rows.append(["folder", folder.path.name])
        rows += [[key, _told(made.pop(key))] for key in ("command", "machine", "time") if key in made]
        rows += [[key, _told(value)] for key, value in made.items()]
    return "<h3>How it was made</h3>" + table(["", ""], rows, text=2, marks=[["", "wrap"]] * len(rows))


def _told(value: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _lengths(family: Sequence[Experiment], out: Path) -> list[str]:
    from .plots import by_length

    body = []
    types = dict.fromkeys(t for e in family for t in e.kv_types)
    for t in types:
        plot = by_length(family, t)
        if plot is not None:
            body.append(_figure(plot, f"{family[0].task}-{_slug(family[0].model)}-{plot.name}", out))
    title = f"{family[0].task}, {family[0].model}: depth and length"
    return [f"<h2>{escape(title)}</h2>", *body] if body else []


def _families(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """Experiments that differ in length alone, two or more."""
    found: dict[str, list[Experiment]] = {}
    for e in experiments:
        options = {k: v for k, v in e.options.items() if k not in ("tokens", "seed")}
        found.setdefault(json.dumps([e.task, e.model_sha256, options], sort_keys=True), []).append(e)
    return [f for f in found.values() if len(f) > 1]


# ---- figures and files


def _figure(plot: Plot, name: str, out: Path) -> str:
    """Write the figure as PNG and SVG, and return it for the page."""
    plot.figure.savefig(out / f"{name}.png", dpi=160)
    plot.figure.set_layout_engine("none")  # laid out once is enough
    drawn = io.StringIO()
    plot.figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    (out / f"{name}.svg").write_text(text, encoding="utf-8")
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg)  # several figures are in one page
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.caption)}" ', 1)
    return f"<figure>{svg}<figcaption>{escape(plot.caption)} ({escape(name)}.png, .svg)</figcaption></figure>"


def _write_csv(out: Path, experiments: Sequence[Experiment]) -> None:
    cells, differences, lists = [], [], []
    for e in experiments:
        about = [e.task, e.model, e.tokens, " ".join(f"{k}={v}" for k, v in e.options.items())]
        for t in e.kv_types:
            for key in e.keys(t):
                row = [*about, t, key.method, key.budget]
                share = e.byte_share(key).mean
                for kind in e.kinds:
                    seen, counted = len(e.of(t, kind)), len(e.counted(t, kind))
                    for metric in e.metrics():
                        m = e.mean(key, kind, metric)
                        cells.append([*row, kind, metric, m.n, seen, counted, *_exact(m.mean, m.sem, share)])
                for metric in e.list_metrics():
                    entries = e.listed(key, metric)
                    for i, m in zip(e.entries(metric, len(entries)), entries):
                        lists.append([*row, metric, i, m.n, *_exact(m.mean, m.sem)])
        for against in (REFERENCE, FULL):
            for d in e.differences(against):
                row = [*about, d.key.kv_type, d.key.method, d.key.budget, d.kind, e.metric]
                differences.append([*row, against, d.value.n, *_exact(d.value.mean, d.value.sem)])
    about = ["task", "model", "tokens", "options", "kv_type", "method", "budget"]
    last = ["n", "mean", "standard_error"]
    head = ["kind", "metric", "n", "n_samples", "n_full_right", "mean", "standard_error", "bytes_of_widest_full"]
    _save(out / "cells.csv", [*about, *head], cells)
    _save(out / "differences.csv", [*about, "kind", "metric", "against", *last], differences)
    if lists:
        _save(out / "lists.csv", [*about, "metric", "entry", *last], lists)


def _save(file: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([head, *rows])


# ---- numbers as text


def _exact(*values: float) -> list[str]:
    return ["" if math.isnan(v) else repr(v) for v in values]


def _digits(means: Iterable[Mean]) -> int:
    """Decimals of a table: one digit of its smallest standard error, two at least."""
    known = [x for m in means for x in (m.sem if m.sem > 0 else abs(m.mean),) if x > 0]
    return min(6, max(2, -math.floor(math.log10(min(known))))) if known else 2


def _mean(m: Mean, digits: int) -> str:
    return _number(m.mean, digits) + (f" ± {_number(m.sem, digits)}" if m.n > 1 else "")


def _signed(m: Mean, digits: int) -> str:
    text = _mean(m, digits)
    return text.replace("-", "−") if m.mean < 0 else f"+{text}" if m.mean > 0 else text


def _number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}%"


def _counts(means: Sequence[Mean]) -> str:
    low, high = (f(m.n for m in means) if means else 0 for f in (min, max))
    return str(low) if low == high else f"{low}–{high}"


def _names(experiments: Sequence[Experiment]) -> list[str]:
    """A file name for each experiment, numbered where two would be the same."""
    out: list[str] = []
    for e in experiments:
        name = "-".join([e.task, _slug(e.model), *([str(e.tokens)] if e.tokens else [])])
        out.append(_slug(name) if _slug(name) not in out else f"{_slug(name)}-{len(out)}")
    return out


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text.removesuffix(".gguf"))
