"""The command line: parsing, one-line errors, exit status. Models and libraries are not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laprox_llamacpp import cli, haystack
from laprox_llamacpp.stats import KVStats


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(args)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["nonsense"], 2, "nonsense"),
        (["ask", "q"], 2, "--file"),
        (["ask", "--file", "/does/not/exist", "q"], 2, "/does/not/exist"),
        (["ask", "--file", __file__], 2, "QUESTION"),
        (["ask", "--file", __file__, "--budget", "0", "q"], 2, "budget is '0'"),
        (["ask", "--file", __file__, "--budget", "64MB/s", "q"], 2, "budget is '64MB/s'"),
        (["ask", "--file", __file__, "--policy", "snap", "q"], 2, "unknown eviction method"),
        (["ask", "--file", __file__, "--model", "/does/not/exist.gguf", "q"], 1, "/does/not/exist.gguf"),
        (["demo", "--facts", "9"], 2, "facts"),
        (["demo", "--policy", "laprox:pool=avg2"], 2, "odd"),
        (["memory", "--budget", "2.0"], 2, "budget is '2.0'"),
        (["memory", "/does/not/exist.gguf"], 1, "/does/not/exist.gguf"),
        (["memory", __file__], 1, "GGUF"),
        (["memory", "--type", "q9"], 1, "q9"),
        (["models", "no-such-model"], 1, "no-such-model"),
    ],
)
def test_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], args: list[str], status: int, says: str
) -> None:
    got, out, err = run(capsys, *args)
    assert (got, out) == (status, "")
    assert err.startswith("laprox-llamacpp: ") and err.count("\n") == 1 and says in err


def test_models_lists_without_fetching(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models")
    assert status == 0 and "smollm2-135m" in out and "qwen2.5-coder-0.5b" in out


def test_memory_table(capsys: pytest.CaptureFixture[str]) -> None:
    # 32 layers x 8 heads x 1024 tokens x 2 x 128 x 2 bytes = 128 MiB
    status, out, _ = run(capsys, "memory", "Llama-3.1-8B", "--tokens", "1024", "--budget", "1.0")
    assert status == 0
    assert [word for word in out.replace("│", " ").split() if word == "128"] == ["128", "128"]


def test_help_needs_no_library(tmp_path: Path) -> None:
    code = (
        "import sys; from laprox_llamacpp import cli; status = cli.main(['ask', '--help']); "
        "assert 'llama_cpp' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "QUESTION" in done.stdout


def test_stats_lines() -> None:
    import numpy as np

    stats = KVStats(
        policy="laprox", budget="0.1", evicted=True, n_tokens=110, n_prompt=100, n_window=8,
        rows_full=400, rows_kept=80,
        layers=(0, 2), n_layers_untouched=1, kept_per_head=np.array([[12, 28], [40, -1]], np.int32),
        bytes_full=3 << 20, bytes_peak=4 << 20, bytes_now=2 << 20, bytes_reserve=1 << 20,
        score_ms=1.5, plan_ms=0.5, commit_ms=2.0, decode_tps=12.5,
    )  # fmt: skip
    text = repr(stats)
    for part in ("80 of 400 rows (20.0%)", "min 12 mean 27 max 40", "2 evicted, 1 untouched", "2.0 MiB (1.0 MiB of it"):
        assert part in text
    line = stats.one_line()
    assert "\n" not in line and "kept 20.0% of 100 tokens" in line and "evicted in 4 ms" in line
    assert "off" in KVStats(n_tokens=3).one_line() and "off" in repr(KVStats())
    assert "no memory" in KVStats(policy="laprox", fallback="no memory").one_line()


def test_haystack_hides_each_fact_once_at_its_depth() -> None:
    facts = haystack.facts(3, seed=5)
    assert len({f.name for f in facts}) == len({f.number for f in facts}) == 3
    text = haystack.hide(facts, 3000, lambda s: len(s.split()), seed=5, depths=(0.1, 0.5, 0.9))
    words = len(text.split())
    assert 3000 <= words < 3200
    for fact, depth in zip(facts, (0.1, 0.5, 0.9)):
        assert text.count(fact.sentence) == text.count(fact.number) == 1
        assert abs(len(text[: text.index(fact.sentence)].split()) / words - depth) < 0.05
    assert text == haystack.hide(facts, 3000, lambda s: len(s.split()), seed=5, depths=(0.1, 0.5, 0.9))


def test_haystack_without_pydoc_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert sum(len(p.split()) for p in haystack.paragraphs()) > 4000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no text"),
        (b" \n\t ", "holds no text"),
        (b"text\0text", "NUL"),
        ("caf\u00e9".encode("latin-1"), "not UTF-8"),
    ],
)
def test_files_without_a_text(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "doc.txt"
    file.write_bytes(content)
    status, _, err = run(capsys, "ask", "--file", str(file), "What?")
    assert status == 1
    assert str(file) in err and says in err and len(err.splitlines()) == 1


def test_an_empty_question(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "ask", "--file", __file__, "")
    assert (status, "question is empty" in err) == (1, True)


def test_no_arguments_print_the_help_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys)
    assert status == 2
    assert len(err.splitlines()) > 8 and "Commands:" in err


def test_memory_names_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "memory", "nope")
    assert status == 1
    assert "Llama-3.1-8B" in err and "smollm2-135m" in err


def test_memory_of_a_model_that_can_be_fetched(capsys: pytest.CaptureFixture[str], smol_path: Path) -> None:
    status, out, _ = run(capsys, "memory", "smollm2-135m", "--tokens", "8192")
    assert status == 0
    assert "180" in out  # 30 layers x 3 heads x 64 x 2 x 2 bytes x 8192
