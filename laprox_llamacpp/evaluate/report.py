"""`laprox-llamacpp report`: run folders as one HTML page, with the figures and numbers in files beside it."""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import bench_report, markdown, tables
from .cells import FULL
from .page import note, page, table
from .stats import NEEDS_FULL, REFERENCE, Experiment, read
from .tables import Table

if TYPE_CHECKING:
    from .plots import Look, Plot

PAGE = "index.html"
TABLES = "tables.md"
_LEFT_OUT = 12  # samples named one by one

_READ = (
    "Every value is a mean over prompts, ± one standard error; where all n prompts agree it is 0 and says little: a "
    "rate of 0 or 1 may be off by 3/n. Methods are compared on the same prompts: the tables of differences are what to "
    "judge by, and no single cell: of twenty without any effect, one is marked by chance. ▲ better, ▼ worse, from "
    "ten samples on, where chance alone makes such a difference in less than one of twenty cases (answers that are "
    "right or wrong: exact sign test; else t test)."
)


def write(root: Path, out: Path) -> Path:
    """Report on all runs and benchmarks in `root` and below; returns the page, `out`/index.html.

    Raises:
        ValueError: there is neither.
        ImportError: matplotlib is missing.
    """
    try:
        from . import plots
    except ImportError as e:
        raise ImportError("a report needs matplotlib, which is not installed: pip install matplotlib") from e
    benches, unread = bench_report.read(root)
    experiments: list[Experiment] = []
    try:
        experiments, more = read(root)
        unread += more
    except ValueError as e:
        if not benches:
            raise ValueError("; ".join([str(e), *unread[:1]])) from e
    out.mkdir(parents=True, exist_ok=True)
    methods = [m for e in experiments for m in e.methods] + [m for b in benches for m in bench_report.methods(b)]
    looks = plots.Look.of(list(dict.fromkeys(methods)))
    names, titles = _names(experiments), _titles(experiments)
    bench_names = [f"bench-{i}-{_slug(str(b['model']))}" for i, b in enumerate(benches, 1)]
    contents = _contents([*titles, *map(bench_report.title, benches)], [*names, *bench_names])
    body = ["<h1>KV cache eviction</h1>", f'<p class="quiet">{escape(_READ)}</p>', *map(note, unread), contents]
    shown = [list(tables.tables(e)) if e.metric in e.metrics() else [] for e in experiments]
    for experiment, name, title, found in zip(experiments, names, titles, shown):
        body.append(_section(experiment, name, title, found, looks, out))
    for family in _families(experiments):
        body += _lengths(family, names[experiments.index(family[0])], out)
    for result, name in zip(benches, bench_names):
        body.append(_bench(result, name, looks, out))
    _write_csv(out, experiments, benches)
    (out / TABLES).write_text(_markdown(experiments, names, titles, shown, benches), encoding="utf-8")
    file = out / PAGE
    file.write_text(page("KV cache eviction: report", "\n".join(body)), encoding="utf-8")
    return file


# ---- sections


def _contents(titles: Sequence[str], names: Sequence[str]) -> str:
    links = "".join(f'<li><a href="#{n}">{escape(title)}</a></li>' for title, n in zip(titles, names))
    return f"<ul>{links}</ul>"


def _section(
    experiment: Experiment, name: str, title: str, found: Sequence[Table], looks: dict[str, Look], out: Path
) -> str:
    from .plots import plots

    body = [f'<h2 id="{name}">{escape(title)}</h2>']
    body.append(f'<p class="quiet">{escape(_options(experiment))}</p>')
    body += map(note, experiment.notes())
    if experiment.metric not in experiment.metrics():
        body.append(note(f"No cell has a number for the metric {experiment.metric!r}: nothing to show."))
        return "\n".join([*body, _made(experiment)])
    if experiment.task in NEEDS_FULL:
        body += _left_out(experiment)
    body += [_figure(plot, f"{name}-{plot.name}", out) for plot in plots(experiment, looks)]
    for shown in found:
        body += [f"<h3>{escape(shown.title)}</h3>", table(shown.head, shown.rows, shown.n_words, shown.marks)]
        body += [f'<p class="quiet">{escape(shown.about)}</p>'] if shown.about else []
    body.append(_made(experiment))
    return "\n".join(body)


def _bench(result: dict[str, Any], name: str, looks: dict[str, Look], out: Path) -> str:
    head, rows = bench_report.table(result)
    body = [f'<h2 id="{name}">{escape(bench_report.title(result))}</h2>', table(head, rows, 2)]
    return "\n".join([*body, *(_figure(p, f"{name}-{p.name}", out) for p in bench_report.plots(result, looks))])


def _options(experiment: Experiment) -> str:
    options = ", ".join(f"{k}={v}" for k, v in experiment.options.items())
    return f"{options}; KV cache {', '.join(experiment.kv_types) or 'not measured yet'}"


def _markdown(
    experiments: Sequence[Experiment],
    names: Sequence[str],
    titles: Sequence[str],
    shown: Sequence[Sequence[Table]],
    benches: Sequence[dict[str, Any]],
) -> str:
    """The tables of the page, to be read where HTML is not."""
    body = ["# Tables", _READ]
    for e, name, title, found in zip(experiments, names, titles, shown):
        body += [f"## {title}", f"`{name}`: {_options(e)}", *e.notes()]
        for one in found:
            if one.short:
                body += [f"**{one.title}**", markdown.table(one.head, one.rows)]
    for result in benches:
        body += [f"## {bench_report.title(result)}", markdown.table(*bench_report.table(result))]
    return "\n\n".join(body) + "\n"


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
        for i, how in enumerate(folder.made):
            made = dict(how)
            rows.append(["folder" if i == 0 else "later, in", folder.path.name])
            rows += [[key, _told(made.pop(key))] for key in ("command", "machine", "time") if key in made]
            rows += [[key, _told(value)] for key, value in made.items()]
    return "<h3>How it was made</h3>" + table(["", ""], rows, text=2, marks=[["", "wrap"]] * len(rows))


def _told(value: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _lengths(family: Sequence[Experiment], name: str, out: Path) -> list[str]:
    from .plots import by_length

    types = dict.fromkeys(t for e in family for t in e.kv_types)
    found = [plot for t in types for plot in by_length(family, t)]
    title = f"{family[0].task}, {family[0].model}: depth and length"
    return [f"<h2>{escape(title)}</h2>", *(_figure(p, f"{name}-{p.name}", out) for p in found)] if found else []


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
    svg = plot.write(out, name)
    short = f"f{zlib.crc32(name.encode()):x}-"  # several figures are in one page
    svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{short}", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.caption)}" ', 1)
    return f"<figure>{svg}<figcaption>{escape(plot.caption)} ({escape(name)}.png, .svg)</figcaption></figure>"


def _write_csv(out: Path, experiments: Sequence[Experiment], benches: Sequence[dict[str, Any]]) -> None:
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
                        cells.append([*row, kind, metric, m.n, seen, counted, *tables.exact(m.mean, m.sem, share)])
                for metric in e.list_metrics():
                    entries = e.listed(key, metric)
                    for i, m in zip(e.entries(metric, len(entries)), entries):
                        lists.append([*row, metric, i, m.n, *tables.exact(m.mean, m.sem)])
        for metric in tables.metrics(e):
            for d in [d for against in (REFERENCE, FULL) for d in e.differences(against, metric=metric)]:
                row = [*about, d.key.kv_type, d.key.method, d.key.budget, d.kind, metric]
                differences.append([*row, d.against.method, d.value.n, *tables.exact(d.value.mean, d.value.sem, d.p)])
    about = ["task", "model", "tokens", "options", "kv_type", "method", "budget"]
    last = ["n", "mean", "standard_error"]
    head = ["kind", "metric", "n", "n_samples", "n_full_right", "mean", "standard_error", "bytes_of_widest_full"]
    _save(out / "cells.csv", [*about, *head], cells)
    _save(out / "differences.csv", [*about, "kind", "metric", "against", *last, "p"], differences)
    if benches:
        tabled = [bench_report.csv(b) for b in benches]
        _save(out / "bench.csv", tabled[0][0], [row for _, rows in tabled for row in rows])
    if lists:
        _save(out / "lists.csv", [*about, "metric", "entry", *last], lists)


def _save(file: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([head, *rows])


# ---- names


def _titles(experiments: Sequence[Experiment]) -> list[str]:
    """Task, model and length of each, with the options that tell it from others of the same."""
    alike: dict[str, list[Experiment]] = {}
    for e in experiments:
        alike.setdefault(e.title, []).append(e)
    out = []
    for e in experiments:
        others = [o.options for o in alike[e.title]]
        telling = [k for k in e.options if len({str(o.get(k)) for o in others}) > 1]
        out.append(", ".join([e.title, *(f"{k}={e.options[k]}" for k in telling)]))
    return out


def _names(experiments: Sequence[Experiment]) -> list[str]:
    """A file name for each experiment: its title, and the folder of its first run where two would be the same."""
    short = [_slug("-".join([e.task, e.model, *([str(e.tokens)] if e.tokens else [])])) for e in experiments]
    return [
        f"{name}-{_slug(e.folders[0].path.name)}" if short.count(name) > 1 else name
        for e, name in zip(experiments, short)
    ]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text.replace(".gguf", ""))
