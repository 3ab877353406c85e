"""What each method costs: prefill, scores and plan on one prompt of a model, as ratios to the plain prefill.

    python scripts/method_costs.py --model smollm2-135m --n-prompt 2048 > methods.md

The prompt is the haystack of the demo. Every method is run on a fresh cache, the plain prefill first and last.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from laprox_llamacpp import Llama, models
from laprox_llamacpp.haystack import paragraphs
from laprox_llamacpp.policy import methods


def run(path: str, spec: str | None, tokens: Sequence[int], budget: float, n_threads: int) -> tuple[float, str]:
    """Seconds of the prompt, and what of it the method took."""
    options = {} if spec is None else {"kv_evict": spec, "budget": budget}
    llm = Llama(
        path, n_ctx=len(tokens) + 64, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False,
        **options,
    )  # fmt: skip
    try:
        start = time.perf_counter()
        llm.eval(tokens)
        seconds = time.perf_counter() - start
        s = llm.kv_stats()
        return seconds, f"{s.all_queries_ms:.0f} | {s.score_ms:.0f} | {s.plan_ms:.0f} | {s.commit_ms:.0f}"
    finally:
        llm.close()


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2-135m", help="a name that laprox_llamacpp.models knows, or a GGUF file")
    ap.add_argument("--n-prompt", type=int, default=2048)
    ap.add_argument("--budget", type=float, default=0.1)
    ap.add_argument("--methods", default=",".join(["laprox:preset=paper", *methods()]), help="with commas between")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    args = ap.parse_args(argv)
    path = str(models.fetch(args.model))
    vocab = Llama(path, vocab_only=True, verbose=False)
    tokens = vocab.tokenize("\n\n".join(paragraphs()).encode())[: args.n_prompt]
    vocab.close()
    plain, _ = run(path, None, tokens, args.budget, args.threads)
    print(f"{args.model}, {len(tokens)} tokens, budget {args.budget}; plain prefill {plain:.2f} s\n")
    print("| `kv_evict` | prompt / plain prefill | every query, ms | score, ms | plan, ms | move, ms |")
    print("|---" * 6 + "|")
    for spec in args.methods.split(","):
        try:
            seconds, parts = run(path, spec, tokens, args.budget, args.threads)
        except ValueError as e:
            print(f"| `{spec}` | not run: {e} | | | | |")
            continue
        print(f"| `{spec}` | {seconds / plain:.3f} | {parts} |", flush=True)
    again, _ = run(path, None, tokens, args.budget, args.threads)
    print(f"\nplain prefill again, at the end: {again / plain:.3f}")


if __name__ == "__main__":
    main()
