"""Run folders of random numbers, as `eval` leaves them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laprox_llamacpp.evaluate import stats

METHODS, BUDGETS = ["laprox", "snapkv:window=32", "random"], ["0.1", "64", "0.5"]


def folder(
    root: Path, name: str = "run", kv_types: Sequence[str] = ("f16",), n: int = 6, task: str = "needle",
    metric: str = "score", higher: bool = True, seed: int = 0, **changed: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A run folder as `eval` leaves it, of random numbers; returns its records."""
    rng = random.Random(f"{name}/{seed}")
    cells = [f"{m}@{b}" for m in METHODS for b in BUDGETS]
    options = {"tokens": 256, "kind": "single+multikey", "depths": "10+90", "seed": seed, **changed}
    setup = {
        "task": task, "options": options, "metric": metric, "higher": higher, "model": "m.gguf",
        "model_sha256": "ab" * 32, "cells": cells, "kv_types": list(kv_types), "n_samples": n,
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    for i in range(n):
        solved = float(i != 1)
        for t in kv_types:
            size = {"f16": 1000, "q4_0": 281}[t]
            full = {metric: solved if t == "f16" else rng.random(), "kv_bytes": size, "rows": 90, "by_turn": [1.0, 0.5]}
            measured = {"full": full}
            for cell in cells:
                share = {"0.1": 0.1, "64": 0.25, "0.5": 0.5}[cell.split("@")[1]]
                measured[cell] = {
                    metric: rng.random(), "seen": None, "kv_bytes": round(size * share), "rows": round(90 * share),
                    "score_ms": rng.random(), "plan_ms": rng.random(), "by_turn": [rng.random(), rng.random()],
                }  # fmt: skip
            info = {"kind": ("single", "multikey")[i % 2], "depth": (0.1, 0.9)[i // 2 % 2]}
            records.append(
                {"index": i, "kv_type": t, "n_prompt": 256, "prefill_s": 0.5, "info": info, "cells": measured}
            )
    records.sort(key=lambda r: list(kv_types).index(r["kv_type"]))
    (root / name).mkdir(parents=True)
    (root / name / "run.json").write_text(json.dumps({"setup": setup, "made": {"command": "eval <x> & y"}}))
    (root / name / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def one(root: Path) -> stats.Experiment:
    experiments, unread = stats.read(root)
    assert len(experiments) == 1 and unread == []
    return experiments[0]
