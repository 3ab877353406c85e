"""Pages of kept rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pages import Page

from laprox_llamacpp import cli
from laprox_llamacpp.evaluate import kept, kept_page
from laprox_llamacpp.evaluate.cells import grid


def made(pieces: Sequence[bytes], controls: Sequence[bool], rows: Sequence[np.ndarray]) -> kept.Kept:
    cells = grid(["laprox", "snapkv"][: len(rows)], ["0.05"])
    survivors = [kept.Survivors(c, r) for c, r in zip(cells, rows)]
    heads = [(2, 0), (2, 1), (5, 0)]  # layers of different numbers of heads, some not evictable
    return kept.Kept("<m>", "Is a < b & c?", 2, kept.tokens(pieces, controls), heads, survivors)


def data(page: str) -> Any:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_tokens_of_parts_of_characters() -> None:
    euro = "€".encode()
    got = kept.tokens([b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"\xff", b"c"], [False] * 6)
    assert [t.text for t in got] == ["a", "", "", "€b", "\ufffd", "c"]


def test_page_shows_texts_as_they_are() -> None:
    euro = "€".encode()
    pieces = [
        b"<|im_start|>", b"</script><script>alert(1)</script>", b"&amp;", b"a\n\nb", euro[:2], euro[2:], b"\x00\x1b",
        "\u202e".encode(), b"\r\n", b"\"'", b"<!--", b" ",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    rows = [rng.random((3, len(pieces))) < 0.5 for _ in range(2)]
    text = kept_page.render(made(pieces, [True] + [False] * 11, rows))
    page = Page(text)
    assert page.spans == [
        "<|im_start|>", "</script><script>alert(1)</script>", "&amp;", "a\u21b5\n\u21b5\nb", "", "€", "\ufffd\ufffd",
        "\ufffd", "\u21b5\n", "\"'", "<!--", " ",
    ]  # fmt: skip
    assert page.tags.count("script") == 2 and page.tags.count("canvas") == 2
    assert "default-src 'none'" in text
    got = data(text)
    assert got["heads"] == [[2, 0], [2, 1], [5, 0]]
    assert got["tokens"][1] == '"</script><script>alert(1)</script>"' and got["tokens"][4] == "bytes e2 82"
    for method, r in zip(got["methods"], rows):
        assert method["shares"] == [round(sum(bool(x) for x in column) / 3, 4) for column in r.T]
    counts = [f"layer {il}, head {h}: {int(r.sum())} of 12 rows" for (il, h), r in zip(got["heads"], rows[0])]
    assert all(c in " ".join(page.words) for c in counts)


def test_maps_of_long_prompts_are_binned() -> None:
    rng = np.random.default_rng(1)
    rows = rng.random((3, 2500)) < 0.3
    got = kept.Survivors(SimpleNamespace(), rows).binned(1024)  # type: ignore[arg-type]
    assert got.shape == (3, 834)  # 3 positions to a column
    for h in range(3):
        for i in range(834):
            part = rows[h, 3 * i : 3 * i + 3]
            assert got[h, i] == pytest.approx(part.sum() / len(part))


def test_kept_of_a_real_model(tmp_path: Path, smol_path: Path) -> None:
    file, out = tmp_path / "t.txt", tmp_path / "page.html"
    file.write_text("Snow fell <b>all</b> night 🦖 on the hills. " * 40, encoding="utf-8")
    args = ["kept", "--model", str(smol_path), "--file", str(file), "--tokens", "160", "--question", "What fell?",
            "--methods", "laprox,snapkv,quest", "--budget", "0.3", "--threads", "1", "--out", str(out)]  # fmt: skip
    done = CliRunner().invoke(cli.cli, args, catch_exceptions=False)
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    text = out.read_text(encoding="utf-8")
    page, got = Page(text), data(text)
    n = len(page.spans)
    assert 150 < n <= 160
    shown = "".join(page.spans)
    assert "Snow fell <b>all</b> night" in shown and "What fell?" in shown and "🦖" in shown and "<|im_start|>" in shown
    asked = int(0.3 * n + 0.5)
    for method, rows in zip(got["methods"], (asked, asked, n)):  # quest removes nothing
        assert sum(method["shares"]) == pytest.approx(rows, abs=n * 1e-4)
        assert method["shares"][-32:] == [1.0] * 32
    assert "quest removes nothing" in " ".join(page.words)
    assert len(got["heads"]) == 90


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ([], 2, "--file FILE or --text NAME"),
        (["--file", __file__, "--text", "python"], 2, "--file FILE or --text NAME"),
        (["--text", "poems"], 2, "poems"),
        (["--text", "python", "--budget", "0"], 2, "budget is '0'"),
        (["--text", "python", "--question", " "], 1, "question is empty"),
        (["--text", "python", "--methods", "full"], 1, "no method that evicts"),
        (["--text", "python", "--methods", "nope"], 1, "unknown eviction method"),
        (["--text", "python", "--methods", "laprox,snapkv:window=8"], 1, "windows"),
        (["--text", "python", "--question", "why " * 70, "--tokens", "64"], 1, "raise --tokens"),
    ],
)
def test_kept_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smol_path: Path, args: list[str], status: int, says: str
) -> None:
    common = ["kept", "--model", str(smol_path), "--question", "Why?", "--out", str(tmp_path / "x.html")]
    assert cli.main([*common, *args]) == status
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
