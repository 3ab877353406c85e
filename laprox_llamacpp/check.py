"""`python -m laprox_llamacpp.check`: what was built, and whether a small model runs through a small eviction."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Callable

import numpy as np

from .errors import LaproxError
from .models import ModelError

_PACKAGES = ("laprox-llamacpp", "llama-cpp-python", "numpy")
_BUDGET = 0.2


def main() -> int:
    """Print the report; returns 0 when everything works, 1 otherwise."""
    print(f"python {platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed as a package")
    try:
        from . import _native
    except ImportError as e:
        print(f"FAILED library: {e}")
        return 1
    for key, value in _native.build_info().items():
        print(f"{key}: {value}")
    print(f"system: {_system_info()}")
    print("OK     library matches the bindings")
    try:
        results = _small_eviction()
    except (ImportError, LaproxError, ModelError, OSError, ValueError) as e:
        print(f"FAILED eviction: {e}")
        return 1
    for what, ok in results:
        print(f"{'OK    ' if ok else 'FAILED'} {what}")
    return 0 if all(ok for _, ok in results) else 1


def _system_info() -> str:
    import llama_cpp

    info: bytes = llama_cpp.llama_print_system_info()
    return info.decode()


def _small_eviction() -> list[tuple[str, bool]]:
    from . import haystack, models
    from .llama import Llama

    import llama_cpp  # isort: skip

    n_gpu_layers = -1 if llama_cpp.llama_supports_gpu_offload() else 0
    path = str(models.fetch("smollm2-135m"))
    llm = Llama(path, n_ctx=2048, n_gpu_layers=n_gpu_layers, kv_evict="laprox", budget=_BUDGET, verbose=False)
    try:
        count: Callable[[str], int] = lambda text: len(llm.tokenize(text.encode(), add_bos=False))  # noqa: E731
        tokens = llm.tokenize(haystack.hide([], 1000, count, seed=0, depths=[]).encode())
        answer = list(islice(llm.generate(tokens, temp=0.0), 8))
        stats = llm.kv_stats()
        kept = llm.kv_kept()
        n_prompt = len(tokens)
        expected = len(kept) * int(_BUDGET * n_prompt + 0.5)
        tail = np.arange(n_prompt - stats.n_window, n_prompt + len(answer) - 1)
        print(stats)
        print(
            f"rows on {', '.join(stats.devices)}; scores {stats.score_path}; "
            f"attention of decode steps {stats.attention_path}"
        )
        return [
            (f"evicted: {stats.rows_kept} of {stats.rows_full} rows, expected {expected}", stats.rows_kept == expected),
            ("the window and the new tokens are kept in every head", all(set(tail) <= set(p) for p in kept.values())),
            (f"bytes: {stats.bytes_now} now, {stats.bytes_full} uncut", stats.bytes_now < stats.bytes_full),
            (f"decoded {len(answer)} tokens from the evicted cache", len(answer) == 8),
        ]
    finally:
        llm.close()


if __name__ == "__main__":
    sys.exit(main())
