"""Pages in a real browser: nothing is loaded, nothing fails, and a reader sees what the numbers say."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import folder
from test_kept import data, made

from laprox_llamacpp.evaluate import kept_page
from laprox_llamacpp.evaluate.page import page

pytestmark = pytest.mark.slow
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PIECES = [b"<|im_start|>", b"</script>", b"a\n", "é".encode()[:1], "é".encode()[1:], b" snow"] * 40


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip) and a Chromium")
    if BROWSER is None:
        pytest.skip("needs a Chromium on the PATH")
    with api.sync_playwright() as playwright:
        # no sandbox: the pages are our own, and root in a container has none
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that must end without an error, and without a request beyond the page itself."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert said == []
    assert len(asked) == 1


def kept_file(tmp_path: Path) -> tuple[Path, list[np.ndarray]]:
    rng = np.random.default_rng(3)
    rows = [rng.random((3, len(PIECES))) < share for share in (0.1, 0.6)]
    for r in rows:
        r[:, -2:] = True
    file = tmp_path / "kept.html"
    file.write_text(kept_page.render(made(PIECES, [True, *[False] * 5] * 40, rows)), encoding="utf-8")
    return file, rows


def test_report(tab: Any, tmp_path: Path) -> None:
    report = pytest.importorskip("laprox_llamacpp.evaluate.report")
    pytest.importorskip("matplotlib")
    folder(tmp_path, kv_types=("f16", "q4_0"))
    tab.goto(report.write(tmp_path, tmp_path / "report").as_uri())
    boxes = tab.eval_on_selector_all("figure svg", "all => all.map(s => [s.getBBox().width, s.getBBox().height])")
    assert len(boxes) == 7 and all(w > 100 and h > 80 for w, h in boxes)
    assert tab.locator("table").count() >= 5
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1200
    tab.set_viewport_size({"width": 400, "height": 800})  # a phone: tables scroll inside themselves
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_letters_of_figures_are_apart(tab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser sets the text, as wide as its own fonts are."""
    pytest.importorskip("matplotlib")
    from test_plots import many

    found = [p for p in many(tmp_path, monkeypatch) if p.name != "bytes"]  # its points have names that may meet
    file = tmp_path / "figures.html"
    file.write_text(page("figures", "".join(f"<figure>{p.write(tmp_path, p.name)}</figure>" for p in found)))
    tab.goto(file.as_uri())
    for plot, (size, boxes) in zip(found, tab.evaluate(
        "() => Array.from(document.querySelectorAll('svg'), s => { const o = s.getBoundingClientRect();"
        " return [[o.width, o.height], Array.from(s.querySelectorAll('text'), t => {"
        " const r = t.getBoundingClientRect(); return [r.x - o.x, r.y - o.y, r.right - o.x, r.bottom - o.y]; })]; })"
    )):  # fmt: skip
        assert size[0] == pytest.approx(96 * plot.figure.get_figwidth(), abs=1)
        assert len(boxes) > 10
        # a line is higher than its letters: lines of one text may touch
        inner = [(x0, y0 + 0.2 * (y1 - y0), x1, y1 - 0.2 * (y1 - y0)) for x0, y0, x1, y1 in boxes]
        for i, a in enumerate(inner):
            assert a[0] >= 0 and a[1] >= 0 and a[2] <= size[0] and a[3] <= size[1], plot.name
            for b in inner[:i]:
                assert a[0] > b[2] or b[0] > a[2] or a[1] > b[3] or b[1] > a[3], (plot.name, a, b)


def test_kept_text_is_shaded_by_the_chosen_method(tab: Any, tmp_path: Path) -> None:
    file, rows = kept_file(tmp_path)
    tab.goto(file.as_uri())
    assert tab.inner_text("#text").startswith("<|im_start|></script>a\u21b5\né snow<|im_start|>")
    for i, r in enumerate(rows):
        tab.check(f"input[name=method][value='{i}']")
        colors = tab.eval_on_selector_all("#text span", "all => all.map(s => getComputedStyle(s).backgroundColor)")
        assert len(colors) == len(PIECES)
        for color, column in zip(colors, r.T):
            numbers = color[color.index("(") + 1 : -1].split(",")
            alpha = float(numbers[3]) if len(numbers) == 4 else 1.0
            assert alpha == pytest.approx((int(column.sum()) / 3) ** 0.5, abs=0.01)


def test_kept_maps_show_the_rows(tab: Any, tmp_path: Path) -> None:
    file, rows = kept_file(tmp_path)
    tab.goto(file.as_uri())
    assert tab.locator("canvas").count() == 2
    for i, r in enumerate(rows):
        pixels = tab.evaluate(
            "i => { const c = document.querySelectorAll('canvas')[i];"
            " return Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data); }", i,
        )  # fmt: skip
        seen = np.array(pixels).reshape(3, len(PIECES), 4)
        assert np.array_equal(seen[:, :, 0] < 128, r)
        assert (seen[:, :, 3] == 255).all()
    decoded = base64.b64decode(data(file.read_text(encoding="utf-8"))["methods"][0]["map"])
    assert np.array_equal(np.frombuffer(decoded, np.uint8).reshape(3, -1) == 255, rows[0])


def test_kept_tells_what_is_under_the_pointer(tab: Any, tmp_path: Path) -> None:
    file, rows = kept_file(tmp_path)
    tab.goto(file.as_uri())
    assert not tab.is_visible("#tip")
    tab.hover("#text span[data-i='1']")
    shares = [int(r[:, 1].sum()) / 3 for r in rows]
    told = ", ".join(f"{name} {100 * s:.{1 if s < 0.1 else 0}f}%" for name, s in zip(("laprox", "snapkv"), shares))
    assert tab.inner_text("#tip") == f'position 1: "</script>"   kept by {told}'
    canvas = tab.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    at = {"x": box["width"] * (7.5 / len(PIECES)), "y": box["height"] * 0.5}  # second head, position 7
    canvas.hover(position=at)
    state = "kept" if rows[0][1, 7] else "evicted"
    assert tab.inner_text("#tip") == f'laprox: layer 2, head 1, position 7: {state}   "</script>"'
    canvas.click(position=at)
    assert tab.get_attribute("#text span.at", "data-i") == "7"
    tab.wait_for_function("document.querySelector('#text span.at').getBoundingClientRect().top < innerHeight")


def test_kept_of_a_long_prompt_has_several_positions_to_a_column(tab: Any, tmp_path: Path) -> None:
    rows = np.zeros((3, 1200), np.bool_)
    rows[0, [4, 8, 9]] = True
    file = tmp_path / "long.html"
    file.write_text(kept_page.render(made([b" a"] * 1200, [False] * 1200, [rows])), encoding="utf-8")
    tab.goto(file.as_uri())
    canvas = tab.locator("canvas")
    box = canvas.bounding_box()
    for first, share in ((4, "50%"), (8, "100%"), (10, "0.0%")):
        canvas.hover(position={"x": box["width"] * (first + 1) / 1200, "y": 3})
        assert f"positions {first} to {first + 1}: {share} kept" in tab.inner_text("#tip")


def test_kept_fits_a_narrow_window(tab: Any, tmp_path: Path) -> None:
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto(kept_file(tmp_path)[0].as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
