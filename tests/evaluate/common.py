"""What the tests of the evaluation harness share."""

from __future__ import annotations

from typing import Any

import pytest

from laprox_llamacpp import cli

HEADS = 90  # SmolLM2-135M: 30 layers of 3 KV heads
ONE: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}
PAGES = "laprox+quest:page=8:min_pages=1:dense=0:read=48"


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that fails, after the progress that it had made."""
    assert cli.main(args) in (1, 2)
    out, err = capsys.readouterr()
    *progress, line = err.splitlines()
    assert out == "" and line.startswith("laprox-llamacpp: ") and all(p.endswith(" samples") for p in progress)
    return line


class Says:
    """Stands for a session: gives one answer, and notes how it was asked for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def answer(self, max_tokens: int, stop: list[str]) -> str:
        self.asked = (max_tokens, stop)
        return self.text
