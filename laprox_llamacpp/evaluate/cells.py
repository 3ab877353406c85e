"""Cells: what a sample is tried with, beside the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..budget import Budget
from ..policy import EvictionPolicy

FULL = "full"


@dataclass(frozen=True)
class Cell:
    """A method at a budget; `name` is how records and tables call it, e.g. "snapkv@0.05"."""

    policy: EvictionPolicy
    budget: Budget

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.budget}"


def grid(methods: Sequence[str], budgets: Sequence[str | float | int]) -> list[Cell]:
    """Every method at every budget, methods first; "full" is always measured and may be named, too.

    A cell that is named twice is there once. Raises ValueError for an unknown method, a bad budget, methods without a
    budget, and methods with different windows: one observation serves them all.
    """
    policies = [EvictionPolicy.parse(m) for m in methods if m != FULL]
    windows = {p.window for p in policies}
    if len(windows) > 1:
        raise ValueError(
            f"methods with windows of {', '.join(map(str, sorted(windows)))} tokens, expected one window for all: "
            "they share a prefill; run them one after another"
        )
    if policies and not budgets:
        raise ValueError("no budgets, expected at least one such as 0.1")
    cells = [Cell(p, Budget.parse(b)) for p in policies for b in budgets]
    return list({c.name: c for c in cells}.values())
