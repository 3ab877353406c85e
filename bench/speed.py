"""Decode speed, eviction cost and memory of one model, as ratios of one run. Prints a Markdown table.

Three caches decode in turn, round after round, so that a drift of the machine's speed hits all of them alike:

  full      every row of the prompt
  evicted   the budget's share of them, per layer and KV head
  limit     a full cache of as many rows as the evicted one holds per head: what eviction could reach at best

    python bench/speed.py --model smollm2-135m --n-prompt 8192 --budget 0.05
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from laprox_llamacpp import Llama, models
from laprox_llamacpp.haystack import paragraphs
from laprox_llamacpp.stats import mib


def rss() -> int:
    """Resident bytes of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def decode(llm: Llama, n: int) -> float:
    """Seconds for a token, over `n` tokens; the cache is cut back afterwards."""
    n_tokens = llm.n_tokens
    token = int(llm.input_ids[n_tokens - 1])
    llm.eval([token])  # the first one builds the graph
    start = time.perf_counter()
    for _ in range(n):
        llm.eval([token])
    took = (time.perf_counter() - start) / n
    llm.n_tokens = n_tokens
    return took


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2-135m", help="a name that laprox_llamacpp.models knows, or a GGUF file")
    ap.add_argument("--n-prompt", type=int, default=8192)
    ap.add_argument("--budget", type=float, default=0.05)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--tokens", type=int, default=24, help="tokens a cache decodes in each round")
    args = ap.parse_args(argv)

    path = str(models.fetch(args.model))
    n_ctx = args.n_prompt + 256
    common = dict(n_ctx=n_ctx, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    before = rss()
    evicted = Llama(path, kv_evict="laprox", budget=args.budget, **common)
    created = rss()
    tokens = evicted.tokenize(" ".join(paragraphs()).encode())
    tokens = (tokens * (args.n_prompt // len(tokens) + 1))[: args.n_prompt]
    evicted.eval(tokens)
    stats = evicted.kv_stats()
    after = rss()

    full = Llama(path, flash_attn=True, **common)
    full.eval(tokens)
    limit = Llama(path, flash_attn=True, **common)
    limit.eval(tokens[: round(args.budget * args.n_prompt)])

    caches = {"full": full, "evicted": evicted, "limit": limit}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(args.rounds):
        for name, llm in caches.items():
            times[name].append(decode(llm, args.tokens))

    ms = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    speedup = statistics.median(f / e for f, e in zip(times["full"], times["evicted"]))
    reach = statistics.median(lim / e for lim, e in zip(times["limit"], times["evicted"]))
    cost = stats.score_ms + stats.plan_ms + stats.commit_ms
    prefill = args.n_prompt / stats.prefill_tps * 1e3

    print(f"{args.model}, {args.n_prompt} tokens, budget {args.budget:.0%}, {args.threads} threads\n")
    print("| what | value |\n|---|---|")
    print(f"| decode, full / evicted / limit | {ms['full']:.1f} / {ms['evicted']:.1f} / {ms['limit']:.1f} ms a token |")
    print(f"| speed-up over the full cache | {speedup:.2f}x |")
    print(f"| share of the limit reached | {reach:.1%} |")
    print(f"| prefill (eviction included) | {prefill / 1e3:.1f} s |")
    print(f"| score + plan + commit | {stats.score_ms:.0f} + {stats.plan_ms:.0f} + {stats.commit_ms:.0f} ms,", end=" ")
    print(f"{cost / (prefill - cost):.2%} of the prefill |")
    print(f"| Gram matrices, once per context | {stats.gram_ms:.0f} ms |")
    kv_bytes = (stats.bytes_full, stats.bytes_peak, stats.bytes_now, stats.bytes_reserve)
    print(f"| KV bytes full / peak / now / of it reserve | {' / '.join(map(mib, kv_bytes))} |")
    print(f"| RSS: start, context created, prompt evicted | {mib(before)}, {mib(created)}, {mib(after)} |")


if __name__ == "__main__":
    main()
