"""docs/results: what its page and the README say is what the stored samples say, counted here from the raw lines."""

from __future__ import annotations

import gzip
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from script import load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
BUDGETS = {"2.5 %": "0.025", "5 %": "0.05", "10 %": "0.1", "20 %": "0.2", "50 %": "0.5"}

script = load("results_tables")


@cache
def records(part: str) -> list[dict[str, Any]]:
    """Those whose full cache scores 1, for needles; all of any other task."""
    lines = gzip.decompress((RESULTS / part / "samples.jsonl.gz").read_bytes()).decode().splitlines()
    found = [json.loads(line) for line in lines]
    needles = json.loads((RESULTS / part / "run.json").read_text())["setup"]["task"] == "needle"
    return [r for r in found if not needles or r["cells"]["full"]["score"] >= 1]


def mean(values: list[float], digits: int = 2) -> str:
    """As a table shows it; the error from the sum of squared deviations."""
    m = sum(values) / len(values)
    error = math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values)) if len(values) > 1 else 0
    return f"{m:.{digits}f}" + (f" ± {error:.{digits}f}".replace("± 0.", "± .") if error else "")


def row_after(page: str, heading: str, method: str) -> list[str]:
    """The cells of a method's row in the first table below a line."""
    below = page[page.index(heading) :]
    line = next(x for x in below.splitlines() if x.startswith(f"| `{method}` |"))
    return [c.strip() for c in line.strip("|").split("|")][1:]


def test_the_page_has_the_tables_of_the_runs_beside_it() -> None:
    page = (RESULTS / "README.md").read_text()
    assert page.partition(script.START)[2] == script.text(RESULTS) + "\n", "run scripts/results_tables.py"


@pytest.mark.parametrize("method", ["laprox", "snapkv", "tova", "quest"])
def test_a_row_of_the_page_is_counted_from_the_raw_lines(method: str) -> None:
    page = (RESULTS / "README.md").read_text()
    row = row_after(page, "**At 5 %**", method)
    for part, cell in zip(["needle-smol-2k", "needle-smol-4k", "needle-qwen-2k", "needle-qwen-4k"], row):
        assert cell == mean([r["cells"][f"{method}@0.05"]["score"] for r in records(part)]), part


def test_a_part_that_was_not_run_has_no_column(tmp_path: Path) -> None:
    for part in ("needle-qwen-2k", "needle-qwen-4k", "needle-smol-2k"):
        (tmp_path / part).symlink_to(RESULTS / part)
    assert "| method | SmolLM2 2K | Qwen 2K | Qwen 4K |" in script.text(tmp_path)
    assert "Hard needles" not in script.text(tmp_path)


def test_the_table_of_the_readme_is_of_the_runs() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("Qwen2.5-Coder-0.5B, 2,048 tokens, n = 40:") :].partition("\n\n[")[0]
    head, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    rows = [r for r in rows if not set(r[0]) <= {"-"}]
    found = records("needle-qwen-2k")
    assert len(found) == 40 and len(rows) > 3
    for method, *cells in rows:
        for budget, cell in zip(head[1:], cells):
            values = [r["cells"][f"{method.strip('`')}@{BUDGETS[budget]}"]["score"] for r in found]
            assert cell == mean(values), (method, budget)


def test_samples_are_stored_with_their_answers_and_no_path_of_a_machine() -> None:
    for head in sorted(RESULTS.glob("*/run.json")):
        assert not re.search(r"/(home|work|root|tmp|Users)/", head.read_text()), head
        for record in records(head.parent.name)[:2]:
            for name, cell in record["cells"].items():
                assert {"text", "answers", "kl", "cosine"} & set(cell), (head, name)
