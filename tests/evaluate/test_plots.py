"""Figures: what is drawn against the records, and that it can be read on paper."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pytest
from folders import BUDGETS, METHODS, folder, one

from laprox_llamacpp.evaluate import stats
from laprox_llamacpp.evaluate.stats import Key

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from laprox_llamacpp.evaluate import plots

A4 = 7.5, 10.9  # inches between the margins
MANY = [
    "laprox", "laprox:preset=paper", "laprox:alloc=layer:preset=paper", "criticalkv", "criticalkv:pool=reach12:0.3",
    "snapkv", "adakv", "pyramidkv", "h2o", "tova", "keydiff", "streaming", "random", "duo", "quest",
]  # fmt: skip


def every(root: Path) -> list[Any]:
    """Every kind of figure of the runs in `root`."""
    family, _ = stats.read(root)
    looks = plots.Look.of(family[0].methods)
    return [p for e in family for p in plots.plots(e, looks)] + plots.by_length(family, family[0].kv_types[0])


def many(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The same of as many methods as the results have, with names as long."""
    monkeypatch.setattr(folders, "METHODS", MANY)
    folder(root, kv_types=("f16", "q4_0"), n=4)
    folder(root, "long", n=8, tokens=512)
    return [p for p in every(root) if "q4_0" not in p.name]


def drawn(figure: Any) -> Any:
    """The renderer, with everything in place."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


# ---- what is drawn


def test_a_divergence_has_a_logarithmic_axis(tmp_path: Path) -> None:
    folder(tmp_path, task="continuation", metric="kl", higher=False, kind=None)
    e = one(tmp_path)
    axis = plots.by_budget(e, "f16", plots.Look.of(e.methods)).figure.axes[0]
    assert "lower is better" in axis.get_ylabel()
    assert axis.get_yscale() == "log"
    line = axis.containers[0].lines[0].get_ydata()
    assert list(line) == pytest.approx([e.mean(Key("f16", "laprox", b)).mean for b in e.budgets])


def test_depth_by_length_has_a_figure_for_each_budget(tmp_path: Path) -> None:
    folder(tmp_path, "short")
    folder(tmp_path, "long", tokens=512)
    family, _ = stats.read(tmp_path)
    found = plots.by_length(family, "f16")
    assert [p.name for p in found] == [f"length-f16-{b}" for b in BUDGETS]
    for plot, budget, told in zip(found, BUDGETS, ("10%", "64", "50%")):
        assert f"budget {told}, f16" in plot.caption
        assert [a.get_title() for a in plot.figure.axes] == METHODS
        for method, axis in zip(METHODS, plot.figure.axes):
            mesh = np.asarray(axis.collections[0].get_array()).reshape(2, 2)  # depth, length
            for (i, j), value in np.ndenumerate(mesh):
                cell, depth = f"{method}@{budget}", (0.1, 0.9)[i]
                same = [s.cells[cell]["score"] for s in family[j].samples
                        if s.record["info"]["depth"] == depth and s.id[1] != 1]  # fmt: skip
                assert value == pytest.approx(statistics.mean(same))
    assert plots.by_length(family[:1], "f16") == []


def test_cells_tell_unmeasured_from_unsolved_and_few_samples(tmp_path: Path) -> None:
    for name, tokens in (("short", 256), ("long", 512)):
        records = folder(tmp_path, name, n=12, tokens=tokens)
        for r in records:
            if name == "long" and r["info"]["depth"] == 0.9:
                r["cells"]["full"]["score"] = 0.0  # measured, and never solved
            elif name == "long" and r["index"] > 1:
                r["cells"].pop("random@64")  # not measured, but on a sample that is solved and on one that is not
        (tmp_path / name / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    family, _ = stats.read(tmp_path)

    def cells(axis: Any) -> dict[tuple[float, float], str]:
        """(depth, column): the text, or "hatched"."""
        found = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in axis.texts}
        found = {at: text.partition("\n")[2] for at, text in found.items()}
        return {**found, **{(p.get_y() + 0.5, p.get_x() + 0.5): "hatched" for p in axis.patches if p.get_hatch()}}

    # the full cache fails on sample 1, of depth 10%: 5 of 6 samples there, 6 of depth 90% in the short prompts
    length = plots.by_length(family, "f16")[BUDGETS.index("64")]
    assert "over 6 samples" in length.caption
    assert cells(length.figure.axes[0]) == {(0, 0): "n=5", (0, 1): "n=5", (1, 0): "", (1, 1): "hatched"}
    assert cells(length.figure.axes[2])[0, 1] == "n=1"
    depth = plots.by_depth(family[1], "f16")
    assert "over 5 samples" in depth.caption
    assert cells(depth.figure.axes[0]) == {(0, b): "" for b in range(3)} | {(1, b): "hatched" for b in range(3)}
    assert cells(depth.figure.axes[2])[0, 1] == "n=1"

    # nothing at all at this depth and budget: no text and no hatch
    for name in ("short", "long"):
        file = tmp_path / name / "samples.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for r in records:
            if r["info"]["depth"] == 0.9:
                r["cells"].pop("laprox@64")
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    family, _ = stats.read(tmp_path)
    assert set(cells(plots.by_length(family, "f16")[1].figure.axes[0])) == {(0, 0), (0, 1)}
    assert (1, 1) not in cells(plots.by_depth(family[1], "f16").figure.axes[0])


def test_methods_side_by_side_stay_near_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "METHODS", MANY)
    folder(tmp_path)
    e = one(tmp_path)
    looks = plots.Look.of(e.methods)
    x = np.array([c.lines[0].get_xdata() for c in plots.by_budget(e, "f16", looks).figure.axes[0].containers])
    aside = x / np.array([0.1, 0.25, 0.5])
    assert aside.shape == (len(MANY), 3) and len(np.unique(aside[:, 0])) == len(MANY)
    assert abs(aside - 1).max() < 0.0301 and aside.mean() == pytest.approx(1)
    axis = plots.by_entry(e, "f16", looks, "by_turn").figure.axes[0]
    aside = np.array([c.lines[0].get_xdata() for c in axis.containers]) - np.array([1, 2])
    assert abs(aside).max() < 0.25 and aside.mean() == pytest.approx(0)


# ---- whether it can be read


def test_looks_differ_without_colour() -> None:
    looks = list(plots.Look.of([f"m{i}" for i in range(30)]).values())
    assert len({(k.marker, k.hollow, k.dash) for k in looks}) == 31
    for i, a in enumerate(looks):
        for b in looks[i + 1 : i + 12]:
            assert a.color != b.color or a.hollow != b.hollow
    assert [k.color for k in looks].count(looks[1].color) == 1


def test_figures_fit_a_page_and_keep_their_letters_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = many(tmp_path, monkeypatch)
    assert {p.name.split("-")[0] for p in found} == {"budget", "depth", "turn", "bytes", "length"}
    for plot in found:
        size = plot.figure.get_size_inches()
        assert (size <= A4).all(), (plot.name, size)
        renderer = drawn(plot.figure)
        assert min(t.get_fontsize() for t in plot.figure.findobj(Text) if t.get_text()) >= 7
        whole = plot.figure.get_tightbbox(renderer)
        assert (whole.min > 0).all() and (whole.max < size).all(), plot.name
        titles = [a.title.get_window_extent(renderer) for a in plot.figure.axes if a.get_title()]
        assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i]), plot.name
        for axis in plot.figure.axes if plot.name.startswith(("length", "depth")) else ():
            for text in axis.texts:  # numbers stay in their cells
                box = text.get_window_extent(renderer)
                x, y = text.get_position()
                low, high = axis.transData.transform([(x - 0.5, y + 0.5), (x + 0.5, y - 0.5)])
                assert (low < box.min).all() and (box.max < high).all(), text


def test_a_long_legend_takes_nothing_from_the_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    for name, methods in (("few", METHODS), ("many", MANY)):
        monkeypatch.setattr(folders, "METHODS", methods)
        folder(tmp_path / name)
        e = one(tmp_path / name)
        figure = plots.by_budget(e, "f16", plots.Look.of(e.methods)).figure
        renderer = drawn(figure)
        heights.append(figure.axes[0].get_position().height * figure.get_figheight())
        legend = figure.legends[0].get_window_extent(renderer)
        assert legend.x0 > 0 and legend.x1 < figure.bbox.x1
        assert legend.height < 0.3 * figure.bbox.height
    assert heights[1] == pytest.approx(heights[0], rel=0.05)


def test_the_text_of_an_svg_is_text(tmp_path: Path) -> None:
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    axis.plot([0.123456, 1.7], [0, 1])
    axis.set_title("<0.123456>")
    svg = plots.Plot("name", "caption", figure).write(tmp_path, "name")
    assert (tmp_path / "name.svg").read_text(encoding="utf-8").endswith(svg)
    assert (tmp_path / "name.png").stat().st_size > 1000
    assert "&lt;0.123456&gt;</text>" in svg and "'DejaVu Sans', 'Verdana', 'Arial', sans-serif" in svg
    assert not re.search(r"<use [^>]*#DejaVu|<metadata|<!--", svg)
    assert not re.search(r"\d\.\d{3}", svg.replace("0.123456", ""))


def test_figures_are_the_same_each_time(tmp_path: Path) -> None:
    folder(tmp_path, n=4)
    first, second = ([p.write(tmp_path, "x") for p in every(tmp_path)] for _ in range(2))
    assert first == second and len(first) == 3


def test_many_methods_make_no_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "METHODS", MANY)
    folder(tmp_path)
    e = one(tmp_path)
    plot = plots.by_budget(e, "f16", plots.Look.of(e.methods))
    assert len(plot.write(tmp_path, "budget")) < 100_000
