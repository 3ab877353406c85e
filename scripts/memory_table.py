#!/usr/bin/env python3
"""Print the Markdown table of KV cache sizes: whole (f16, q8_0) and evicted (f16) at 20, 10 and 5 %.

python scripts/memory_table.py
python scripts/memory_table.py --gguf model.gguf --tokens 8192 32768
"""

from __future__ import annotations

import argparse
from pathlib import Path

from laprox_llamacpp import memory

BUDGETS = (0.2, 0.1, 0.05)


def size(n_bytes: int) -> str:
    """Three digits or so, in MiB or GiB."""
    mib = n_bytes / (1 << 20)
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def table(models: dict[str, memory.KVShape], tokens: list[int]) -> str:
    """One row per model and prompt length that the model can take; its own longest where none is."""
    head = ["model", "tokens", "full f16", "full q8_0", *(f"laprox {b:.0%}" for b in BUDGETS)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, shape in models.items():
        fitting = [n for n in tokens if not shape.n_ctx or n <= shape.n_ctx] or [shape.n_ctx]
        for n in fitting:
            cells = [
                memory.full_bytes(shape, n),
                memory.full_bytes(shape, n, "q8_0", "q8_0"),
                *(memory.evicted_bytes(shape, n, b) for b in BUDGETS),
            ]
            rows.append([name, f"{n // 1024}K" if n % 1024 == 0 else str(n), *map(size, cells)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="prompt lengths")
    parser.add_argument("--gguf", type=Path, nargs="+", help="models of your own instead of the well-known ones")
    args = parser.parse_args()
    if min(args.tokens) < 1:
        parser.error(f"--tokens {min(args.tokens)}, expected 1 or more")
    try:
        models = {path.stem: memory.from_gguf(path) for path in args.gguf} if args.gguf else memory.KNOWN
    except (OSError, ValueError) as e:
        parser.error(str(e))
    print(table(models, args.tokens))


if __name__ == "__main__":
    main()
