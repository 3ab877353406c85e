"""Quest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..budget import Budget
from ..observed import ObservedPrompt
from ..parts.options import int_at_least, text
from ..policy import EvictionPolicy, PageReads


@dataclass(frozen=True)
class Quest(EvictionPolicy, name="quest"):
    """Quest (arXiv 2406.10774): nothing is evicted, but each decode step reads only the pages that may matter to it.

    A page is `page` consecutive keys of a KV head; a query head reads the pages of the highest bound
    sum_c max(q_c min_c, q_c max_c) on their scores, the newest always among them. Saves bandwidth, not bytes. Stands on
    top of an evicted cache, too: `"laprox+quest:read=256"` evicts by the budget, and reads 256 rows of what is left.

    Args:
        page: keys of a page, 16.
        min_pages: least number of pages that are read, 3.
        dense: first layers that read everything, 2.
        read: rows that each query head reads in a step, as `Llama(budget=...)`; alone, the budget itself. Query heads
            of a KV head may choose differently: up to as many times the rows.
        base: spec of the method that evicts below; the part before the "+".
    """

    page: int = 16
    min_pages: int = 3
    dense: int = 2
    read: str = ""
    base: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        int_at_least("page", self.page, 1, 1024)
        int_at_least("min_pages", self.min_pages, 1)
        int_at_least("dense", self.dense, 0)
        if text("read", self.read):
            Budget.parse(self.read)
        below = self._below()
        if below is None:
            return
        if below.page_reads() is not None:
            raise ValueError(f"{self.base!r} selects pages already, expected a method that evicts before '+quest'")
        if not self.read:
            raise ValueError(f"'{self.base}+quest' lacks the rows to read, expected e.g. '{self.base}+quest:read=256'")
        if self.window not in (EvictionPolicy.window, below.window):
            raise ValueError(
                f"window={self.window} belongs before the '+', to the method that is scored with it: {self.base}"
            )
        object.__setattr__(self, "window", below.window)

    def _below(self) -> EvictionPolicy | None:
        return EvictionPolicy.parse(self.base) if self.base else None

    @property
    def all_queries(self) -> bool:  # type: ignore[override]
        """As the method below."""
        below = self._below()
        return below is not None and below.all_queries

    def keep(self, prompt: ObservedPrompt, k: int) -> list[npt.NDArray[np.int32]] | None:
        """What the method below keeps; everything without one."""
        below = self._below()
        return None if below is None else below.keep(prompt, k)

    @property
    def evicts(self) -> bool:
        """If a method below does."""
        return bool(self.base)

    def check_model(self, model_path: str) -> None:
        """As the method below."""
        below = self._below()
        if below is not None:
            below.check_model(model_path)

    def page_reads(self) -> PageReads:
        """How decode steps read."""
        return PageReads(self.page, self.min_pages, self.dense, self.read)

    def __str__(self) -> str:
        """The shortest spec that parses back to this policy."""
        hidden = {"base"} | ({"window"} if self.base else set())
        spec = self._spec(hidden)
        return f"{self.base}+{spec}" if self.base else spec
