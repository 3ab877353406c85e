"""One cache of a benchmark in a process of its own: JSON lines in and out.

The first line in says what to hold, and is answered with the facts of the prefilled prompt. Each further line is a
round of decoding, answered with its time and the peaks of memory so far. An error is answered with {"error": text}.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._lib import load
from ..haystack import paragraphs
from ..llama import Llama

_GPU = (1, 2)  # ggml_backend_dev_type: GPU, IGPU
_LOOK_S = 0.002


def main() -> None:
    """Serve standard input until it ends."""
    try:
        what = json.loads(sys.stdin.readline())
        devices = DeviceMemory()
        with devices.watched():
            llm, facts = prefill(what)
        _say({**facts, "peak_rss": peak_rss(), "device_peak": devices.peak()})
        for _ in sys.stdin:
            decode_ms = decode(llm, what["n_decode"])
            _say({"decode_ms": decode_ms, "peak_rss": peak_rss(), "device_peak": devices.peak()})
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
    facts: dict[str, Any] = {"prefill_s": time.perf_counter() - start}
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


class DeviceMemory:
    """Most memory in use on each GPU since this was made, in bytes, beyond what was in use then.

    The whole device is counted: nobody else may allocate there meanwhile. What the driver needs for itself is not.
    """

    def __init__(self) -> None:
        self._first = free_memory()
        self._least = dict(self._first)

    def peak(self) -> dict[str, int] | None:
        """By name of the device, up to now; None without a GPU."""
        self._look()
        return {name: free - self._least[name] for name, free in self._first.items()} or None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look all the time, since an eviction holds both caches for a moment only."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                self._look()

        thread = threading.Thread(target=watch, daemon=True)
        if self._first:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self._first:
                thread.join()

    def _look(self) -> None:
        for name, free in free_memory().items():
            self._least[name] = min(free, self._least[name])


def free_memory() -> dict[str, int]:
    """Free bytes of each GPU that llama.cpp sees, by name."""
    ggml, at = load(), ctypes.c_void_p  # libllama: its symbols are looked up in ggml, too
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype, ggml.ggml_backend_dev_get.argtypes = at, [ctypes.c_size_t]
    ggml.ggml_backend_dev_name.restype, ggml.ggml_backend_dev_name.argtypes = ctypes.c_char_p, [at]
    ggml.ggml_backend_dev_type.argtypes = [at]
    ggml.ggml_backend_dev_memory.restype = None
    ggml.ggml_backend_dev_memory.argtypes = [at, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    out = {}
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        if ggml.ggml_backend_dev_type(device) in _GPU:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            out[ggml.ggml_backend_dev_name(device).decode()] = free.value
    return out


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
