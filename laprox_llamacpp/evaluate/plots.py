"""Figures of a report, in colours that colour-blind readers tell apart, and markers and lines that print in black."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from .cells import FULL
from .records import Sample
from .stats import ALL_KINDS, DIVERGENCE, Experiment, Key, Mean

# Okabe and Ito; black is the full cache's
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "laprox",
    "svg.fonttype": "path",
}
COSTS = ("kv_bytes", "rows", "score_ms", "plan_ms")
SHARES = ("score", "top1", "seen", "unseen")
LABELS = {
    "kl": "KL divergence from the full cache (nats)",
    "nll": "negative log-likelihood (nats)",
    "cosine": "cosine to the full cache's attention outputs",
    "top1": "top token as the full cache's",
    "seen": "question that the window saw",
    "unseen": "questions that it did not see",
}
_PANEL = (3.6, 2.9)  # inches


@dataclass(frozen=True)
class Plot:
    """A figure with the file name and the words that go with it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a method, the same in every figure of a report."""

    color: str
    marker: str
    dash: Any

    @classmethod
    def of(cls, methods: Sequence[str]) -> dict[str, Look]:
        """One for each method; the full cache is black."""
        looks = {
            m: cls(_COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)])
            for i, m in enumerate(m for m in methods if m != FULL)
        }
        return {FULL: cls("#000000", "", (0, (4, 2))), **looks}


def plots(experiment: Experiment, looks: dict[str, Look]) -> list[Plot]:
    """Every figure that the experiment has numbers for."""
    out: list[Plot | None] = []
    with matplotlib.rc_context(_STYLE):
        for t in experiment.kv_types:
            out += [by_budget(experiment, t, looks), by_depth(experiment, t)]
            out += [by_entry(experiment, t, looks, metric) for metric in experiment.list_metrics()]
        if len(experiment.kv_types) > 1:
            out.append(by_bytes(experiment))
    return [p for p in out if p is not None]


def by_budget(experiment: Experiment, kv_type: str, looks: dict[str, Look]) -> Plot | None:
    """The metric against the budget: a panel for each kind, then one for each other metric of quality."""
    others = [m for m in experiment.metrics() if m not in COSTS and m != experiment.metric]
    wanted = [(experiment.metric, kind) for kind in experiment.kinds] + [(m, ALL_KINDS) for m in others]
    panels = [(m, kind) for m, kind in wanted if _lines(experiment, kv_type, m, kind)]
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for axis, (metric, kind) in zip(axes, panels):
        full = experiment.mean(Key(kv_type, FULL, ""), kind, metric)
        log = metric == DIVERGENCE
        if full.n and not log:
            axis.axhline(full.mean, color="black", linestyle=looks[FULL].dash, linewidth=1.2)
        for i, (method, line) in enumerate(_lines(experiment, kv_type, metric, kind).items()):
            _line(axis, [x * 1.012**i for x, _ in line], [y for _, y in line], looks[method])
        _budget_axis(axis, experiment)
        _value_axis(axis, experiment, metric, log)
        several = metric == experiment.metric and len(experiment.kinds) > 1
        axis.set_title(kind if several else LABELS.get(metric, metric), fontsize=9)
    full_too = [FULL] if any(m != DIVERGENCE for m, _ in panels) else []
    _legend(figure, [*full_too, *experiment.methods], looks)
    caption = f"{_metric(experiment)} against the budget, {kv_type} cache. Bars are one standard error."
    return Plot(f"budget-{kv_type}", caption, figure)


def by_entry(experiment: Experiment, kv_type: str, looks: dict[str, Look], metric: str) -> Plot | None:
    """A metric that is a list, such as "by_turn", entry by entry: a panel for each budget."""
    keys = [k for k in experiment.keys(kv_type) if experiment.listed(k, metric)]
    budgets = [b for b in experiment.budgets if any(k.budget == b for k in keys)]
    if not budgets:
        return None
    across = metric.replace("by_", "").replace("_", " ")
    figure, axes = _panels(len(budgets))
    for axis, budget in zip(axes, budgets):
        shown = [k for k in keys if k.budget in ("", budget)]
        for i, key in enumerate(shown):
            entries = experiment.listed(key, metric)
            _line(axis, [x + 0.03 * i for x in experiment.entries(metric, len(entries))], entries, looks[key.method])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel(across)
        _value_axis(axis, experiment, experiment.metric, False)
        axis.set_title(f"budget {_percent(experiment, budget)}", fontsize=9)
    _legend(figure, list(dict.fromkeys(k.method for k in keys)), looks)
    caption = f"{_metric(experiment)} by {across}, {kv_type} cache. Bars are one standard error."
    return Plot(f"{across.replace(' ', '-')}-{kv_type}", caption, figure)


def by_depth(experiment: Experiment, kv_type: str) -> Plot | None:
    """Heat maps of the metric, depth of the needle against the budget, one for each method."""
    depths = _depths([experiment], kv_type)
    methods, budgets = experiment.methods, experiment.budgets
    if len(depths) < 2 or not methods or not budgets:
        return None

    def at(depth: float) -> Callable[[Sample], bool]:
        return lambda s: _depth(s) == depth

    right = [(sum(map(at(d), experiment.counted(kv_type))), sum(map(at(d), experiment.of(kv_type)))) for d in depths]
    ticks = [f"{d:.0%}" + (f" ({n} of {m})" if n < m else "") for d, (n, m) in zip(depths, right)]
    figure, axes = _panels(len(methods), height=0.8 + 0.33 * len(depths))
    for axis, method in zip(axes, methods):
        cells = [[experiment.mean_where(Key(kv_type, method, b), at(d)) for b in budgets] for d in depths]
        _heat(axis, cells, [_percent(experiment, b) for b in budgets], ticks)
        axis.set_xlabel("budget")
        axis.set_title(method, fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    caption = (
        f"{_metric(experiment)} by depth of the needle and budget, {kv_type} cache. "
        "(n of m): prompts at this depth that the full cache solves; hatched: none."
    )
    return Plot(f"depth-{kv_type}", caption, figure)


def by_length(family: Sequence[Experiment], kv_type: str) -> Plot | None:
    """Heat maps of depth against length for experiments that differ in length: methods across, budgets down."""
    depths = _depths(family, kv_type)
    methods = list(dict.fromkeys(m for e in family for m in e.methods))
    budgets = list(dict.fromkeys(b for e in family for b in e.budgets))
    if len(family) < 2 or len(depths) < 2 or not methods or not budgets:
        return None
    with matplotlib.rc_context(_STYLE):
        size = (2.2 * len(methods) + 1, (0.9 + 0.33 * len(depths)) * len(budgets) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(budgets), len(methods), squeeze=False)
        for i, budget in enumerate(budgets):
            for j, method in enumerate(methods):
                cells = [
                    [e.mean_where(Key(kv_type, method, budget), lambda s, d=d: _depth(s) == d) for e in family]  # type: ignore[misc]
                    for d in depths
                ]
                _heat(axes[i][j], cells, [str(e.tokens) for e in family], [f"{d:.0%}" for d in depths])
                axes[i][j].set_title(f"{method}, {_percent(family[0], budget)}", fontsize=9)
        figure.supxlabel("tokens of the prompt", fontsize=9)
        figure.supylabel("depth of the needle", fontsize=9)
    caption = f"{_metric(family[0])} by depth and length, {kv_type} cache. Hatched: the full cache solves none."
    return Plot(f"length-{kv_type}", caption, figure)


def by_bytes(experiment: Experiment) -> Plot | None:
    """The metric against KV bytes: full caches of each type, and a panel for each method with a line for each type."""
    methods, types = experiment.methods, experiment.kv_types
    if not methods:
        return None
    looks = Look.of(types)
    figure, axes = _panels(len(methods))
    log = experiment.metric == DIVERGENCE
    full = [Key(t, FULL, "") for t in types]
    for axis, method in zip(axes, methods):
        points = [(experiment.byte_share(k).mean, experiment.mean(k), k) for k in full]
        points = [p for p in points if not log or p[1].mean > 0]
        axis.plot([x for x, _, _ in points], [y.mean for _, y, _ in points], color="black", dashes=(4, 2), linewidth=1)
        for x, y, key in points:
            axis.errorbar(x, y.mean, yerr=_bar(y), color="black", marker="*", markersize=9, capsize=2)
            axis.annotate(key.kv_type, (x, y.mean), (0, -13), textcoords="offset points", ha="center", fontsize=7)
        for t in types:
            keys = [k for k in experiment.keys(t) if k.method == method and experiment.mean(k).n]
            line = sorted(((experiment.byte_share(k).mean, experiment.mean(k)) for k in keys), key=lambda p: p[0])
            _line(axis, [x for x, _ in line], [y for _, y in line], looks[t])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(f"KV bytes, {types[0]} full cache = 100%")
        _value_axis(axis, experiment, experiment.metric, log)
        axis.set_title(method, fontsize=9)
    _legend(figure, types, looks, ["full caches, not evicted"], "evicted on ")
    caption = (
        f"{_metric(experiment)} at equal bytes: full caches of smaller types (stars), and eviction on each of them. "
        f"{'Up' if experiment.higher else 'Down'} and to the left is better."
    )
    return Plot("bytes", caption, figure)


def _lines(experiment: Experiment, kv_type: str, metric: str, kind: str) -> dict[str, list[tuple[float, Mean]]]:
    """By method: (budget as a share, mean), where there is something to draw."""
    out: dict[str, list[tuple[float, Mean]]] = {}
    for key in experiment.keys(kv_type):
        x = experiment.share(key.budget) if key.budget else math.nan
        y = experiment.mean(key, kind, metric)
        if math.isfinite(x) and y.n and (metric != DIVERGENCE or y.mean > 0):
            out.setdefault(key.method, []).append((x, y))
    return out


def _panels(n: int, height: float = _PANEL[1]) -> tuple[Figure, list[Any]]:
    across = min(n, 3) if n != 4 else 2
    down = -(-n // across)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(max(_PANEL[0] * across, 4.5), height * down + 0.4), layout=layout)
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for axis in axes[n:]:
        axis.set_visible(False)
    return figure, axes[:n]


def _line(axis: Any, x: Sequence[float], y: Sequence[Mean], look: Look) -> None:
    axis.errorbar(
        x, [m.mean for m in y], yerr=[_bar(m) for m in y], color=look.color, marker=look.marker, linestyle=look.dash,
        markersize=5, linewidth=1.4, capsize=2, elinewidth=0.9, markeredgecolor="white", markeredgewidth=0.4,
    )  # fmt: skip


def _bar(mean: Mean) -> float:
    return 0.0 if math.isnan(mean.sem) else mean.sem


def _budget_axis(axis: Any, experiment: Experiment) -> None:
    shares = {experiment.share(b): _percent(experiment, b) for b in experiment.budgets}
    shares = {x: text for x, text in shares.items() if math.isfinite(x) and x > 0}
    axis.set_xscale("log")
    axis.set_xlim(min(shares, default=0.5) / 1.3, max(shares, default=1.0) * 1.3)  # methods are drawn side by side
    axis.xaxis.set_major_locator(FixedLocator(list(shares)))
    axis.xaxis.set_major_formatter(FixedFormatter(list(shares.values())))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("budget: rows kept of the prompt")


def _value_axis(axis: Any, experiment: Experiment, metric: str, log: bool) -> None:
    """Label and range: metrics that are shares get all of 0 to 1, so that panels compare."""
    if metric == experiment.metric:
        axis.set_ylabel(f"{metric} ({'higher' if experiment.higher else 'lower'} is better)")
    if log:
        axis.set_yscale("log")
    elif metric in SHARES:
        axis.set_ylim(-0.04, 1.04)


def _heat(axis: Any, cells: Sequence[Sequence[Mean]], across: Sequence[str], down: Sequence[str]) -> None:
    """A map of shares, 0 to 1, with the numbers in it."""
    values = np.array([[m.mean for m in row] for row in cells])
    axis.grid(False)
    axis.set_facecolor("#eeeeee")
    edges = [np.arange(n + 1) - 0.5 for n in values.shape]
    axis.pcolormesh(edges[1], edges[0], values, cmap="cividis", vmin=0, vmax=1)  # no bitmap: sharp in print
    axis.invert_yaxis()
    for (i, j), value in np.ndenumerate(values):
        if math.isnan(value):
            axis.add_patch(
                matplotlib.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="///", edgecolor="#aaaaaa")
            )
        else:
            axis.text(
                j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="black" if value > 0.55 else "white"
            )
    axis.set_xticks(range(len(across)), across)
    axis.set_yticks(range(len(down)), down)
    axis.tick_params(length=0)


def _legend(
    figure: Figure, names: Sequence[str], looks: dict[str, Look], black: Sequence[str] = (), before: str = ""
) -> None:
    stars = [Line2D([], [], color="black", marker="*", markersize=9, dashes=(4, 2), label=text) for text in black]
    lines = [
        Line2D(
            [], [], color=looks[n].color, marker=looks[n].marker, linestyle=looks[n].dash,
            label="full cache" if n == FULL else before + n,
        )
        for n in names
    ]  # fmt: skip
    widest = 0.7 + 0.075 * max(len(str(h.get_label())) for h in stars + lines)  # inches
    across = max(1, min(int(figure.get_figwidth() / widest), len(stars + lines)))
    figure.legend(handles=stars + lines, loc="outside lower center", ncols=across, frameon=False, handlelength=3.2)


def _percent(experiment: Experiment, budget: str) -> str:
    share = experiment.share(budget)
    return f"{100 * share:.3g}%" if budget.replace(".", "").isdigit() and "." in budget else budget


def _depth(sample: Sample) -> float | None:
    depth = (sample.record.get("info") or {}).get("depth")
    return float(depth) if isinstance(depth, (int, float)) else None


def _depths(experiments: Sequence[Experiment], kv_type: str) -> list[float]:
    found = {_depth(s) for e in experiments for s in e.of(kv_type)}
    return sorted(d for d in found if d is not None)


def _metric(experiment: Experiment) -> str:
    name = LABELS.get(experiment.metric, experiment.metric)
    return name[:1].upper() + name[1:]
