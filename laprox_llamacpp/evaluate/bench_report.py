"""What `laprox-llamacpp bench` measured, as tables, CSV rows and figures against the length (the paper's figure 5)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cells import FULL
from .records import RUN_FILE

if TYPE_CHECKING:
    from .plots import Look, Plot

_MIB = 1 << 20
_CACHES = ("full", "evicted", "limit")
_LIMIT = "limit: a full cache of as many rows"
_HEAD = (
    "tokens", "cell", "rows per head", "prefill, full / evicted tokens/s", "score / plan / move ms",
    "decode, full / evicted / limit tokens/s", "speed-up", "of the limit", "KV, full / evicted / peak MiB",
    "peak RSS, full / evicted / limit MiB", "peak on devices, full / evicted / limit MiB",
)  # fmt: skip
_CSV = (
    "model", "kv_type", "n_threads", "n_gpu_layers", "tokens", "method", "budget", "rows_per_head", "full_prefill_s",
    "evicted_prefill_s", "score_ms", "plan_ms", "move_ms", "full_decode_ms", "evicted_decode_ms", "limit_decode_ms",
    "speedup", "of_limit", "kv_bytes_full", "kv_bytes", "kv_bytes_peak", "kv_bytes_reserve", "full_peak_rss",
    "evicted_peak_rss", "limit_peak_rss", "full_device_peak", "evicted_device_peak", "limit_device_peak",
)  # fmt: skip
_COSTS = ("score_ms", "plan_ms", "move_ms")
_BOUND: dict[str, Any] = {
    "linestyle": ":", "linewidth": 1.1, "marker": "D", "markersize": 4, "markerfacecolor": "white",
}  # fmt: skip

Group = dict[str, Any]  # a length and a cell, as `bench.run` describes it


def read(root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Results of `bench --out` in `root` and below, and a line about each JSON file that could not be read.

    JSON files of other kinds are passed over.
    """
    results, unread = [], []
    for file in sorted(root.rglob("*.json")):
        if file.name == RUN_FILE:
            continue
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(result, dict) and "bench" in result:
                csv(result), table(result), title(result)  # all that is needed is there
                results.append(result)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            why = f"{type(e).__name__}: {' '.join(str(e).split())}"
            unread.append(f"{file} could not be read as a benchmark ({why})")
    return results, unread


def title(result: dict[str, Any]) -> str:
    """One line: the model and how it ran."""
    how = result["bench"]
    text = f"speed and memory, {result['model']}, {how['kv_type']} cache, {how['n_threads']} threads"
    layers = {0: "", -1: ", all layers on the GPU"}
    return text + layers.get(how["n_gpu_layers"], f", {how['n_gpu_layers']} layers on the GPU")


def methods(result: dict[str, Any]) -> list[str]:
    """The methods of its cells, for `Look.of`."""
    return list(dict.fromkeys(_method(g) for g in result["groups"]))


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, one for each length and cell; the last column is there if a device has memory of its own."""
    rows = []
    for g in result["groups"]:
        full, evicted = g["full"], g["evicted"]
        device = [_device(g[c]) for c in _CACHES]
        rows.append([
            str(g["tokens"]),
            g["cell"],
            f"{evicted['rows_per_head']:.0f}",
            _slashes((c["n_prompt"] / c["prefill_s"] for c in (full, evicted)), 0),
            _slashes((evicted[k] for k in _COSTS), 0),
            _slashes((1000 / _decode_ms(g[c]) for c in _CACHES), 1),
            f"{g['speedup']:.2f}x",
            f"{g['of_limit']:.0%}",
            _slashes((evicted[k] / _MIB for k in ("kv_bytes_full", "kv_bytes", "kv_bytes_peak")), 1),
            _slashes((g[c]["peak_rss"] / _MIB for c in _CACHES), 0),
            "" if any(map(math.isnan, device)) else _slashes((d / _MIB for d in device), 0),
        ])  # fmt: skip
    n = len(_HEAD) - (0 if any(row[-1] for row in rows) else 1)
    return list(_HEAD[:n]), [row[:n] for row in rows]


def csv(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Head and rows, one for each length and cell; times are medians over rounds, "" is what was not measured."""
    how = result["bench"]
    about = [result["model"], how["kv_type"], how["n_threads"], how["n_gpu_layers"]]
    rows = []
    for g in result["groups"]:
        caches, evicted = [g[c] for c in _CACHES], g["evicted"]
        rows.append([
            *about, g["tokens"], _method(g), _budget(g), evicted["rows_per_head"],
            g["full"]["prefill_s"], evicted["prefill_s"], *(evicted[k] for k in _COSTS), *map(_decode_ms, caches),
            g["speedup"], g["of_limit"],
            *(evicted[k] for k in ("kv_bytes_full", "kv_bytes", "kv_bytes_peak", "kv_bytes_reserve")),
            *(c["peak_rss"] for c in caches), *("" if math.isnan(d) else int(d) for d in map(_device, caches)),
        ])  # fmt: skip
    return list(_CSV), rows


# ---- figures


@dataclass(frozen=True)
class _Quantity:
    """What a figure shows of the full cache (None: it has none), of an evicted one, and as its `bound`."""

    name: str
    caption: str
    unit: str
    full: Callable[[Group], float] | None
    evicted: Callable[[Group], float]
    bound: Callable[[Group], float] | None = None
    bound_name: str = ""
    log: bool = True


_QUANTITIES = (
    _Quantity(
        "decode", "Decode speed, median over rounds", "decode, tokens/s",
        lambda g: 1000 / _decode_ms(g["full"]), lambda g: 1000 / _decode_ms(g["evicted"]),
        lambda g: 1000 / _decode_ms(g["limit"]), _LIMIT, log=False,
    ),
    _Quantity(
        "prompt", "Time for the first prompt of a context: prefill, and for a method all that it needs to evict",
        "first prompt, s", lambda g: g["full"]["prefill_s"], lambda g: g["evicted"]["prefill_s"],
    ),
    _Quantity(
        "eviction", "What a method adds to the prefill: scores, plan and move", "eviction, ms",
        None, lambda g: sum(g["evicted"][k] for k in _COSTS),
        lambda g: g["evicted"]["score_ms"], "the scores alone",
    ),
    _Quantity(
        "kv", "The prompt's full KV cache, and what an evicted one holds, with its room for new tokens",
        "KV cache, MiB", lambda g: g["evicted"]["kv_bytes_full"] / _MIB,
        lambda g: g["evicted"]["kv_bytes"] / _MIB,
        lambda g: g["evicted"]["kv_bytes_peak"] / _MIB, "its peak, while rows are moved",
    ),
    _Quantity(
        "memory", "Peak memory of the process (RSS), weights included", "peak RSS, MiB",
        lambda g: g["full"]["peak_rss"] / _MIB, lambda g: g["evicted"]["peak_rss"] / _MIB,
        lambda g: g["limit"]["peak_rss"] / _MIB, _LIMIT, log=False,
    ),
    _Quantity(
        "device", "Peak memory of the process on devices, weights included", "peak on devices, MiB",
        lambda g: _device(g["full"]) / _MIB, lambda g: _device(g["evicted"]) / _MIB,
        lambda g: _device(g["limit"]) / _MIB, _LIMIT, log=False,
    ),
)  # fmt: skip


def plots(result: dict[str, Any], looks: dict[str, Look]) -> list[Plot]:
    """A figure for each quantity that was measured, a panel for each budget: lines, or bars for a single length.

    Args:
        result: what `bench.run` returns.
        looks: one for each of `methods(result)`, and the full cache's.
    """
    import matplotlib

    from .plots import _STYLE

    with matplotlib.rc_context(_STYLE):
        found = [_plot(result["groups"], quantity, looks) for quantity in _QUANTITIES]
    return [p for p in found if p is not None]


def _plot(groups: Sequence[Group], quantity: _Quantity, looks: dict[str, Look]) -> Plot | None:
    from matplotlib.figure import Figure

    from .plots import Plot

    groups = [g for g in groups if math.isfinite(quantity.evicted(g))]
    budgets = list(dict.fromkeys(map(_budget, groups)))
    if not budgets:
        return None
    names = list(dict.fromkeys(map(_method, groups)))
    lengths = sorted({g["tokens"] for g in groups})
    bars = len(lengths) == 1
    across = min(len(budgets), 2)
    down = -(-len(budgets) // across)
    height = 0.75 + 0.26 * (len(names) + 1) if bars else 2.8
    figure = Figure(figsize=(7.2 if across > 1 else 4.5, height * down + 0.6), layout="constrained")
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    for axis in axes[len(budgets) :]:
        axis.set_visible(False)
    for axis, budget in zip(axes, budgets):
        (_bars if bars else _lines)(axis, [g for g in groups if _budget(g) == budget], quantity, names, looks)
        axis.set_title(f"budget {_percent(budget)}" + (f", {lengths[0]} tokens" if bars else ""), fontsize=9)
        axis.tick_params(labelbottom=True)  # also above a place without a panel
        axis.set_xlabel(quantity.unit if bars else "tokens of the prompt")
    if not bars:
        for axis in axes[::across]:
            axis.set_ylabel(quantity.unit)
        _length_axis(axes[0], lengths)
        _value_axis(axes[0], quantity.log)
    _legend(figure, quantity, [] if bars else names, looks)
    where = f"at {lengths[0]} tokens" if bars else "against the length of the prompt"
    return Plot(quantity.name, f"{quantity.caption}, {where}.", figure)


def _lines(
    axis: Any, groups: Sequence[Group], quantity: _Quantity, names: Sequence[str], looks: dict[str, Look]
) -> None:
    if quantity.full is not None:
        full = _full(groups, quantity.full)
        axis.plot(list(full), list(full.values()), color="black", linestyle=looks[FULL].dash, linewidth=1.4)
    lengths = [g["tokens"] for g in groups]
    for i, name in enumerate(names):
        mine = sorted((g for g in groups if _method(g) == name), key=lambda g: int(g["tokens"]))
        aside = (max(lengths) / min(lengths)) ** (0.006 * i)  # methods cost alike
        x, look = [g["tokens"] * aside for g in mine], looks[name]
        if quantity.bound is not None:
            axis.plot(x, [quantity.bound(g) for g in mine], color=look.color, **_BOUND)
        axis.plot(
            x, [quantity.evicted(g) for g in mine], color=look.color, marker=look.marker, linestyle=look.dash,
            linewidth=1.4, markersize=5, markeredgecolor="white", markeredgewidth=0.4,
        )  # fmt: skip


def _bars(
    axis: Any, groups: Sequence[Group], quantity: _Quantity, names: Sequence[str], looks: dict[str, Look]
) -> None:
    """The names are at the bars, so that none has to be told by its colour."""
    shown = [*([FULL] if quantity.full is not None else []), *names]
    if quantity.full is not None:
        axis.barh(0, list(_full(groups, quantity.full).values()), color="black", height=0.7)
    for g in groups:
        at = shown.index(_method(g))
        axis.barh(at, quantity.evicted(g), color=looks[_method(g)].color, height=0.7)
        if quantity.bound is not None:
            axis.plot(quantity.bound(g), at, color="black", **_BOUND)
    axis.set_yticks(range(len(shown)), ["full cache" if n == FULL else n for n in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(False, axis="y")
    axis.set_axisbelow(True)


def _full(groups: Sequence[Group], value: Callable[[Group], float]) -> dict[int, float]:
    """By length: the median, since each group measures the full cache again."""
    lengths = sorted({g["tokens"] for g in groups})
    return {n: statistics.median(value(g) for g in groups if g["tokens"] == n) for n in lengths}


def _length_axis(axis: Any, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axis.xaxis.set_major_formatter(FixedFormatter([f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]))
    axis.xaxis.set_minor_locator(NullLocator())


def _value_axis(axis: Any, log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    if not log:
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Any, quantity: _Quantity, names: Sequence[str], looks: dict[str, Look]) -> None:
    from matplotlib.lines import Line2D

    full = [FULL] if names and quantity.full is not None else []
    handles = [
        Line2D(
            [], [], color=looks[n].color, marker=looks[n].marker, linestyle=looks[n].dash,
            label="full cache" if n == FULL else n,
        )
        for n in [*full, *names]
    ]  # fmt: skip
    if quantity.bound is not None:
        handles.append(Line2D([], [], color="black", label=quantity.bound_name, **_BOUND))
    if handles:
        widest = 0.7 + 0.075 * max(len(str(h.get_label())) for h in handles)  # inches
        across = max(1, int(figure.get_figwidth() / widest))
        figure.legend(handles=handles, loc="outside lower center", ncols=across, frameon=False, handlelength=3.2)


# ---- numbers


def _method(group: Group) -> str:
    return str(group["cell"]).rsplit("@", 1)[0]


def _budget(group: Group) -> str:
    return str(group["cell"]).rsplit("@", 1)[1]


def _percent(budget: str) -> str:
    return f"{100 * float(budget):.3g}%" if budget.replace(".", "").isdigit() and "." in budget else budget


def _decode_ms(cache: dict[str, Any]) -> float:
    return float(statistics.median(cache["decode_ms"]))


def _device(cache: dict[str, Any]) -> float:
    """Bytes over all devices; NaN without one, or where the file is older than the measurement."""
    peak = cache.get("device_peak")
    return math.nan if peak is None else float(sum(peak.values()))


def _slashes(values: Iterable[float], digits: int) -> str:
    return " / ".join(f"{v:.{digits}f}" for v in values)
