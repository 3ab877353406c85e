"""Figures of a report, in colours that colour-blind readers tell apart, and markers and lines that print in black."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from .cells import FULL
from .records import Sample
from .stats import ALL_KINDS, COSTS, DIVERGENCE, LABELS, NLL, Experiment, Key, Mean

# Okabe and Ito; black is the full cache's
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_STYLE = {
    "font.size": 8.0,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],  # of like widths, for readers of the SVG
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "laprox",
    "svg.fonttype": "none",  # text stays text: smaller than outlines, and it can be searched
}
SHARES = ("score", "top1", "seen", "unseen")
# inches: A4 between its margins, so that no figure is shrunk in print and a point of text stays a point
_WIDTH, _HEIGHT = 7.5, 9.8
_SMALL = 7.2  # points: the smallest text
# one line of panels or maps; a cell of a map holds two lines of small text
_PANEL, _CELL = 2.5, (0.29, 0.3)

Cell = tuple[Mean, int]
"""Mean over the samples that count, and how many were measured at all."""


@dataclass(frozen=True)
class Plot:
    """A figure with the file name and the words that go with it."""

    name: str
    caption: str
    figure: Figure

    def write(self, out: Path, name: str) -> str:
        """Write `out`/`name`.png and .svg; returns the SVG element for a page, with ids that other figures have too."""
        with matplotlib.rc_context(_STYLE):  # text, fonts and ids of an SVG are chosen when it is saved
            self.figure.savefig(out / f"{name}.png", dpi=160)
            self.figure.set_layout_engine("none")  # laid out once is enough
            drawn = io.StringIO()
            self.figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = _tidy(drawn.getvalue())
        (out / f"{name}.svg").write_text(text, encoding="utf-8")
        return text[text.index("<svg") :]


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a method, the same in every figure of a report."""

    color: str
    marker: str
    dash: Any
    hollow: bool = False

    @classmethod
    def of(cls, methods: Sequence[str]) -> dict[str, Look]:
        """One for each method; the full cache is black, and no other has the colour of the first.

        The others' colours come again with hollow markers, then filled.
        """
        first, *others = _COLORS
        looks: dict[str, Look] = {}
        for i, m in enumerate(m for m in methods if m != FULL):
            turn, at = divmod(i - 1, len(others))
            color, hollow = (others[at], turn % 2 == 1) if i else (first, False)
            looks[m] = cls(color, _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)], hollow)
        return {FULL: cls("#000000", "", (0, (4, 2))), **looks}

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a matplotlib line."""
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.dash, "markersize": 4.6 if self.hollow else 5,
            "markerfacecolor": "white" if self.hollow else self.color,
            "markeredgecolor": self.color if self.hollow else "white", "markeredgewidth": 1 if self.hollow else 0.4,
        }  # fmt: skip


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
        lines = _lines(experiment, kv_type, metric, kind)
        for (method, line), aside in zip(lines.items(), _aside(len(lines), 0.012, 0.03)):
            _line(axis, [x * (1 + aside) for x, _ in line], [y for _, y in line], looks[method])
        _budget_axis(axis, experiment)
        _value_axis(axis, experiment, metric, log)
        several = metric == experiment.metric and len(experiment.kinds) > 1
        axis.set_title(kind if several else LABELS.get(metric, metric), fontsize=8)
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
        for key, aside in zip(shown, _aside(len(shown), 0.03, 0.2)):
            entries = experiment.listed(key, metric)
            _line(axis, [x + aside for x in experiment.entries(metric, len(entries))], entries, looks[key.method])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel(across)
        _value_axis(axis, experiment, experiment.metric, False)
        axis.set_title(f"budget {_percent(experiment, budget)}", fontsize=8)
    _legend(figure, list(dict.fromkeys(k.method for k in keys)), looks)
    caption = f"{_metric(experiment)} by {across}, {kv_type} cache. Bars are one standard error."
    return Plot(f"{across.replace(' ', '-')}-{kv_type}", caption, figure)


def by_depth(experiment: Experiment, kv_type: str) -> Plot | None:
    """Heat maps of the metric, depth of the needle against the budget, one for each method."""
    depths, budgets = _depths([experiment], kv_type), experiment.budgets
    if len(depths) < 2:
        return None
    maps = {m: [[_at(experiment, Key(kv_type, m, b), d) for b in budgets] for d in depths] for m in experiment.methods}
    figure, told = _maps(maps, "budget", [_percent(experiment, b) for b in budgets], depths)
    if figure is None:
        return None
    caption = f"{_metric(experiment)} by depth of the needle and budget, {kv_type} cache. {told}"
    return Plot(f"depth-{kv_type}", caption, figure)


def by_length(family: Sequence[Experiment], kv_type: str) -> list[Plot]:
    """For each budget, heat maps of depth against length for experiments that differ in length, one for each method."""
    depths = _depths(family, kv_type)
    methods = list(dict.fromkeys(m for e in family for m in e.methods))
    if len(family) < 2 or len(depths) < 2:
        return []
    out = []
    for budget in dict.fromkeys(b for e in family for b in e.budgets):
        maps = {m: [[_at(e, Key(kv_type, m, budget), d) for e in family] for d in depths] for m in methods}
        with matplotlib.rc_context(_STYLE):
            figure, told = _maps(maps, "tokens of the prompt", [str(e.tokens) for e in family], depths)
        if figure is not None:
            at = f"budget {_percent(family[0], budget)}, {kv_type} cache"
            caption = f"{_metric(family[0])} by depth of the needle and length, {at}. {told}"
            out.append(Plot(f"length-{kv_type}-{budget}", caption, figure))
    return out


def by_bytes(experiment: Experiment) -> Plot | None:
    """The metric against KV bytes: full caches of each type, and a panel for each method with a line for each type."""
    methods, types = experiment.methods, experiment.kv_types
    if not methods:
        return None
    looks = Look.of(types)
    figure, axes = _panels(len(methods))
    log = experiment.metric == DIVERGENCE
    full = [Key(t, FULL, "") for t in types]
    label, ha = ((0, -13), "center") if experiment.higher else ((-7, -3), "right")  # the best stars stand on the axis
    for axis, method in zip(axes, methods):
        points = [(experiment.byte_share(k).mean, experiment.mean(k), k) for k in full]
        points = [p for p in points if not log or p[1].mean > 0]
        axis.plot([x for x, _, _ in points], [y.mean for _, y, _ in points], color="black", dashes=(4, 2), linewidth=1)
        for x, y, key in points:
            axis.errorbar(x, y.mean, yerr=_bar(y), color="black", marker="*", markersize=9, capsize=2)
            axis.annotate(key.kv_type, (x, y.mean), label, textcoords="offset points", ha=ha, fontsize=7)
        for t in types:
            keys = [k for k in experiment.keys(t) if k.method == method and experiment.mean(k).n]
            line = sorted(((experiment.byte_share(k).mean, experiment.mean(k)) for k in keys), key=lambda p: p[0])
            _line(axis, [x for x, _ in line], [y for _, y in line], looks[t])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(f"KV bytes, {types[0]} full cache = 100%")
        _value_axis(axis, experiment, experiment.metric, log)
        axis.set_title(_wrapped(method, 36), fontsize=8)
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


def _aside(n: int, step: float, most: float) -> list[float]:
    """Offsets that draw `n` methods side by side, centred and no more than `most` to either side."""
    return [(i - (n - 1) / 2) * min(step, 2 * most / max(n - 1, 1)) for i in range(n)]


def _panels(n: int) -> tuple[Figure, list[Any]]:
    across = min(n, 3) if n != 4 else 2
    down = -(-n // across)
    return _figure(n, across, _WIDTH, min(_PANEL, _HEIGHT / down) * down)


def _figure(n: int, across: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05))
    axes = figure.subplots(-(-n // across), across, squeeze=False).ravel().tolist()
    for axis in axes[n:]:
        axis.set_visible(False)
    return figure, axes[:n]


def _line(axis: Any, x: Sequence[float], y: Sequence[Mean], look: Look) -> None:
    axis.errorbar(x, [m.mean for m in y], yerr=[_bar(m) for m in y], linewidth=1.2, elinewidth=0.8, **look.line)


def _bar(mean: Mean) -> float:
    return 0.0 if math.isnan(mean.sem) else mean.sem


def _budget_axis(axis: Any, experiment: Experiment) -> None:
    shares = {experiment.share(b): _percent(experiment, b) for b in experiment.budgets}
    shares = {x: text for x, text in shares.items() if math.isfinite(x) and x > 0}
    axis.set_xscale("log")
    axis.set_xlim(min(shares, default=0.5) / 1.15, max(shares, default=1.0) * 1.15)  # methods are drawn side by side
    axis.xaxis.set_major_locator(FixedLocator(list(shares)))
    axis.xaxis.set_major_formatter(FixedFormatter(list(shares.values())))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("budget, of the prompt")


def _value_axis(axis: Any, experiment: Experiment, metric: str, log: bool) -> None:
    """Label and range: metrics that are shares get all of 0 to 1, so that panels compare."""
    if metric != experiment.metric or axis.get_subplotspec().is_first_col():
        higher = experiment.higher if metric == experiment.metric else metric != NLL
        axis.set_ylabel(f"{metric} ({'higher' if higher else 'lower'} is better)")
    if log:
        axis.set_yscale("log")
    elif metric in SHARES:
        axis.set_ylim(-0.04, 1.04)


def _maps(
    maps: Mapping[str, Sequence[Sequence[Cell]]], label: str, across: Sequence[str], depths: Sequence[float]
) -> tuple[Figure | None, str]:
    """A heat map for each method that has numbers, and what a reader must know of their cells."""
    maps = {m: rows for m, rows in maps.items() if any(measured for row in rows for _, measured in row)}
    if not maps:
        return None, ""
    most = max(mean.n for rows in maps.values() for row in rows for mean, _ in row)
    columns = max(1, min(len(maps), 4, int(_WIDTH / (0.4 + _CELL[0] * len(across)))))
    lines = -(-len(maps) // columns)
    width = min(_WIDTH, 0.5 + 2.5 * columns)
    figure, axes = _figure(len(maps), columns, width, lines * (0.55 + _CELL[1] * len(depths)) + 0.2)
    for axis, (method, rows) in zip(axes, maps.items()):
        _heat(axis, rows, most)
        axis.set_xticks(range(len(across)), across, fontsize=_SMALL)
        first = axis.get_subplotspec().is_first_col()
        axis.set_yticks(range(len(depths)), [f"{d:.0%}" if first else "" for d in depths], fontsize=_SMALL)
        axis.set_title(_wrapped(method, int((width - 0.7) / columns / 0.062)), fontsize=8)
    figure.supxlabel(label, fontsize=8)
    figure.supylabel("depth of the needle", fontsize=8)
    told = f"Means over {most} {'sample' if most == 1 else 'samples'}, or over n where a cell says so. "
    return figure, told + "Hatched: measured, but the full cache solves none of the samples. Blank: not measured."


def _heat(axis: Any, cells: Sequence[Sequence[Cell]], most: int) -> None:
    """A map of shares, 0 to 1, with the numbers in it, and the number of samples where it is not `most`."""
    values = np.array([[mean.mean for mean, _ in row] for row in cells])
    axis.grid(False)
    edges = [np.arange(n + 1) - 0.5 for n in values.shape]
    # no bitmap: sharp in print
    axis.pcolormesh(edges[1], edges[0], values, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    axis.invert_yaxis()
    axis.tick_params(length=0)
    for i, row in enumerate(cells):
        for j, (mean, measured) in enumerate(row):
            if mean.n:
                text = f"{mean.mean:.2f}" + (f"\nn={mean.n}" if mean.n != most else "")
                color = "black" if mean.mean >= 0.5 else "white"
                axis.text(j, i, text, ha="center", va="center", fontsize=_SMALL, linespacing=1.05, color=color)
            elif measured:
                axis.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#777777"))


def _legend(
    figure: Figure, names: Sequence[str], looks: dict[str, Look], black: Sequence[str] = (), before: str = ""
) -> None:
    """Below the panels; the figure grows by it."""
    stars = [Line2D([], [], color="black", marker="*", markersize=9, dashes=(4, 2), label=text) for text in black]
    lines = [Line2D([], [], label="full cache" if n == FULL else before + n, **looks[n].line) for n in names]
    handles = stars + lines
    lengths = [len(str(h.get_label())) for h in handles]
    columns = next(n for n in range(len(handles), 0, -1) if n == 1 or _legend_width(lengths, n) < figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-len(handles) // columns) + 0.15)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.4, columnspacing=1.4,
        fontsize=7.5,
    )  # fmt: skip


def _legend_width(lengths: Sequence[int], columns: int) -> float:
    """Inches of a legend whose texts have so many letters, filled column by column as matplotlib does."""
    return sum(0.6 + 0.063 * int(max(part)) for part in np.array_split(lengths, columns))


def _wrapped(method: str, width: int) -> str:
    """The name on several lines of at most `width` letters, broken before an option."""
    lines = [""]
    for part in re.split("(?=:)", method):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _tidy(svg: str) -> str:
    """An SVG of matplotlib's without what no reader sees: less than half the size."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # a hundredth of a point is enough for coordinates; inside of tags alone: texts are numbers too
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", tag[0]), svg)
    # groups are named though nothing refers to them, and texts that stand upright are turned by nothing
    svg = re.sub(r'(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"', "", svg)
    fonts = re.search(r" font-family: ([^;]*);", svg)
    if fonts is not None:  # the same for every text: once for all
        svg = svg.replace(fonts[0], "").replace("<svg ", f'<svg font-family="{fonts[1]}" ', 1)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _percent(experiment: Experiment, budget: str) -> str:
    share = experiment.share(budget)
    return f"{100 * share:.3g}%" if budget.replace(".", "").isdigit() and "." in budget else budget


def _at(experiment: Experiment, key: Key, depth: float) -> Cell:
    """A cell at one depth of the needle."""
    here = [s for s in experiment.of(key.kv_type) if _depth(s) == depth]
    measured = sum(s.value(key.name, experiment.metric) is not None for s in here)
    return experiment.mean_where(key, lambda s: _depth(s) == depth), measured


def _depth(sample: Sample) -> float | None:
    depth = (sample.record.get("info") or {}).get("depth")
    return float(depth) if isinstance(depth, (int, float)) else None


def _depths(experiments: Sequence[Experiment], kv_type: str) -> list[float]:
    found = {_depth(s) for e in experiments for s in e.of(kv_type)}
    return sorted(d for d in found if d is not None)


def _metric(experiment: Experiment) -> str:
    name = LABELS.get(experiment.metric, experiment.metric)
    return name[:1].upper() + name[1:]
