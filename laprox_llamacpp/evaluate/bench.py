"""`laprox-llamacpp bench`: what an eviction costs and saves against the length of the prompt (the paper's figure 5).

For each length, method and budget three caches decode in turn, round after round, so that a drift of the machine's
speed hits all of them alike:

  full      every row of the prompt, llama.cpp without eviction
  evicted   what the method leaves
  limit     a full cache of as many rows as the evicted one holds per head: what eviction could reach at best

Each is a process of its own (`bench_cache`), for the sake of its peak memory; while one works, the others wait.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

from ..budget import Budget
from ..errors import LaproxError
from ..gguf_check import n_ctx_train
from ..policy import EvictionPolicy
from . import bench_report, markdown
from .cells import Cell, grid
from .runner import machine, sha256, write


@dataclass(frozen=True)
class Bench:
    """What is to be measured.

    Args:
        model_path: a GGUF file.
        lengths: of the prompts, in tokens.
        methods, budgets: the grid of cells.
        kv_type: of K and V.
        rounds: times that each cache decodes.
        n_decode: tokens that it decodes in a round.
        n_threads: for prefill and decode.
        n_gpu_layers: as `Llama`.
        beyond_training: allow lengths that the model was not trained for; speed and memory do not depend on that.

    Raises:
        ValueError: a bad method or budget, no cells, a length that is not beyond the window, or one that the model
            was not trained for.
    """

    model_path: Path
    lengths: Sequence[int]
    methods: Sequence[str]
    budgets: Sequence[str]
    kv_type: str = "f16"
    rounds: int = 7
    n_decode: int = 24
    n_threads: int = 1
    n_gpu_layers: int = 0
    beyond_training: bool = False

    def __post_init__(self) -> None:
        cells = self.cells
        if not cells:
            raise ValueError("no methods, expected at least one such as laprox: the full cache is in every comparison")
        if not self.lengths or min(self.lengths) <= cells[0].policy.window:
            raise ValueError(
                f"lengths are {list(self.lengths)}, expected tokens beyond the window of {cells[0].policy.window}"
            )
        for cell in cells:
            cell.policy.check_model(str(self.model_path))
        need, n_train = max(self.lengths) + self.n_decode, n_ctx_train(self.model_path)
        if n_train is not None and need > n_train and not self.beyond_training:
            raise ValueError(
                f"{max(self.lengths)} tokens and {self.n_decode} more need a context of {need}, "
                f"the model was trained for {n_train}: take fewer"
            )

    @property
    def cells(self) -> list[Cell]:
        """Of every length."""
        return grid(self.methods, self.budgets)


class Cache:
    """A process that holds a prompt's cache; `facts` is what it says about the prompt, as `bench_cache` has it.

    Raises LaproxError, one line, when the process ends early.
    """

    def __init__(self, bench: Bench, n_prompt: int, policy: EvictionPolicy | None = None, budget: Budget | None = None):
        self.name = f"{policy}@{budget}" if policy else "full cache"
        self.n_prompt = n_prompt
        command = [sys.executable, "-m", f"{__package__}.bench_cache"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.decode_ms: list[float] = []
        self.facts: dict[str, Any] = self._ask(
            {
                "model": str(bench.model_path), "n_prompt": n_prompt, "n_decode": bench.n_decode,
                "kv_type": bench.kv_type, "n_threads": bench.n_threads, "n_gpu_layers": bench.n_gpu_layers,
                "kv_evict": str(policy) if policy else None, "budget": str(budget) if budget else None,
            }
        )  # fmt: skip

    def decode(self) -> None:
        """One round."""
        self.facts.update(self._ask({}))
        self.decode_ms.append(self.facts["decode_ms"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def measured(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {**self.facts, "n_prompt": self.n_prompt, "decode_ms": self.decode_ms}

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it says below why it ended
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            why = "killed: out of memory?" if status < 0 else f"exit status {status}"
            raise LaproxError(f"the process of the {self.name} of {self.n_prompt} tokens ended early ({why})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise LaproxError(f"{self.name}, {self.n_prompt} tokens: {answer['error']}")
        return answer


def run(
    bench: Bench, out: Path | None = None, on_cell: Callable[[str, int], None] = lambda what, done: None
) -> dict[str, Any]:
    """Measure every length and cell; `out` is written after each.

    Args:
        bench: what to measure.
        out: a JSON file, overwritten.
        on_cell: called before each cell, with a line about it and the number of those that are done.

    Returns:
        What `out` holds: "made", "model", "model_sha256", "bench" and "groups", one per length and cell: the three
        caches with their raw times, and the medians over rounds "speedup" (full / evicted time of a token) and
        "of_limit" (limit / evicted time).
    """
    settings = {k: v for k, v in asdict(bench).items() if k != "model_path"}
    result: dict[str, Any] = {
        "made": machine(), "model": bench.model_path.name, "model_sha256": sha256(bench.model_path),
        "bench": settings, "groups": [],
    }  # fmt: skip

    def tell(what: str) -> None:
        on_cell(what, len(result["groups"]))

    for n_prompt in bench.lengths:
        for group in _groups(bench, n_prompt, tell):
            result["groups"].append(group)
            if out is not None:
                write(out, json.dumps(result, indent=1) + "\n")
    return result


def _groups(bench: Bench, n_prompt: int, on_cell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One full cache of this length for all cells."""
    with ExitStack() as stack:
        full: Cache | None = None
        limits: dict[int, Cache] = {}
        for cell in bench.cells:
            on_cell(f"{cell.name}, {n_prompt} tokens")
            if full is None:
                full = stack.enter_context(closing(Cache(bench, n_prompt)))
            with closing(Cache(bench, n_prompt, cell.policy, cell.budget)) as evicted:
                rows = round(evicted.facts["rows_per_head"])
                if rows < n_prompt and rows not in limits:
                    limits[rows] = stack.enter_context(closing(Cache(bench, rows)))
                yield _group(bench, cell.name, full, evicted, limits.get(rows, full))


def _group(bench: Bench, name: str, full: Cache, evicted: Cache, limit: Cache) -> dict[str, Any]:
    caches = {id(c): c for c in (full, evicted, limit)}
    for cache in caches.values():
        cache.decode_ms = []
    order = list(caches.values())
    for _ in range(bench.rounds):
        for cache in order:
            cache.decode()
        order = order[1:] + order[:1]
    return {
        "tokens": full.n_prompt,
        "cell": name,
        "full": full.measured(),
        "evicted": evicted.measured(),
        "limit": limit.measured(),
        "speedup": statistics.median(f / e for f, e in zip(full.decode_ms, evicted.decode_ms)),
        "of_limit": statistics.median(x / e for x, e in zip(limit.decode_ms, evicted.decode_ms)),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown, one line per length and cell."""
    head, rows = bench_report.table(result)
    return markdown.table(head, [[n, f"`{cell}`", *row] for n, cell, *row in rows])
