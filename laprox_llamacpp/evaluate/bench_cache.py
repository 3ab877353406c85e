"""One cache of a benchmark in a process of its own: JSON lines in and out.

The first line in says what to hold, and is answered with the facts of the prefilled prompt. Each further line is a
round of decoding, answered with its time and the peak memory so far. An error is answered with {"error": text}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ..haystack import paragraphs
from ..llama import Llama


def main() -> None:
    """Serve standard input until it ends."""
    try:
        what = json.loads(sys.stdin.readline())
        llm, facts = prefill(what)
        _say(facts)
        for _ in sys.stdin:
            _say({"decode_ms": decode(llm, what["n_decode"]), "peak_rss": peak_rss()})
    except KeyboardInterrupt:  # the parent says so
        sys.exit(130)
    except BrokenPipeError:  # the parent is gone
        sys.exit(1)
    except Exception as e:  # whatever it is, the parent has to know
        _say({"error": f"{type(e).__name__}: {e}"})
        sys.exit(1)


def prefill(what: dict[str, Any]) -> tuple[Llama, dict[str, Any]]:
    """A prompt of `n_prompt` tokens of prose; seconds, and for an evicted one rows, bytes and milliseconds."""
    options = {} if what["kv_evict"] is None else {"kv_evict": what["kv_evict"], "budget": what["budget"]}
    llm = Llama(
        what["model"], n_ctx=what["n_prompt"] + what["n_decode"] + 1, n_threads=what["n_threads"],
        n_threads_batch=what["n_threads"], type_k=what["kv_type"], type_v=what["kv_type"], flash_attn=True,
        n_gpu_layers=what["n_gpu_layers"], verbose=False, **options,
    )  # fmt: skip
    tokens = llm.tokenize("\n\n".join(paragraphs()).encode())
    tokens = (tokens * (what["n_prompt"] // len(tokens) + 1))[: what["n_prompt"]]
    start = time.perf_counter()
    llm.eval(tokens)
    facts: dict[str, Any] = {"prefill_s": time.perf_counter() - start, "peak_rss": peak_rss()}
    if what["kv_evict"] is not None:
        s = llm.kv_stats()
        if s.fallback:
            raise RuntimeError(s.fallback)
        n_full = llm._n_heads * len(tokens)
        n_rows = s.rows_kept if s.evicted else n_full
        facts.update(
            rows_per_head=n_rows / llm._n_heads, note=s.note,
            kv_bytes=s.bytes_now, kv_bytes_peak=s.bytes_peak, kv_bytes_reserve=s.bytes_reserve,
            kv_bytes_full=llm._bytes_per_token * len(tokens) + s.bytes_other,
            score_ms=s.score_ms, plan_ms=s.plan_ms, move_ms=s.commit_ms, all_queries_ms=s.all_queries_ms,
            gram_ms=s.gram_ms,
        )  # fmt: skip
    return llm, facts


def decode(llm: Llama, n: int) -> float:
    """Milliseconds for a token, over `n` tokens; the cache is cut back afterwards."""
    n_tokens = llm.n_tokens
    token = int(llm.input_ids[n_tokens - 1])
    llm.eval([token])  # the first one builds the graph
    start = time.perf_counter()
    for _ in range(n):
        llm.eval([token])
    took = 1000 * (time.perf_counter() - start) / n
    llm.n_tokens = n_tokens
    return took


def peak_rss() -> int:
    """Most resident bytes of this process so far, mapped weights included; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    except (OSError, IndexError):
        pass  # not Linux; there getrusage would count what ran before exec, too
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
