"""KV cache eviction per layer and KV head (LaProx) for llama.cpp models.

    from laprox_llamacpp import Llama
    llm = Llama("model.gguf", n_ctx=32768, kv_evict="laprox", budget=0.05)

`Llama` is a subclass of `llama_cpp.Llama`. Importing this package points llama-cpp-python at the package's own build of
llama.cpp, so it has to come before the first `import llama_cpp`. The libraries are loaded, and checked against the
bindings, when `Llama` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _lib
from .budget import Budget
from .errors import AllocError, ArgumentError, ComputeError, LaproxError, StateError, UnsupportedError
from .policy import EvictionPolicy
from .stats import KVStats

if TYPE_CHECKING:
    from .llama import Llama

__version__ = "0.1.0"

__all__ = [
    "AllocError",
    "ArgumentError",
    "Budget",
    "ComputeError",
    "EvictionPolicy",
    "KVStats",
    "LaproxError",
    "Llama",
    "StateError",
    "UnsupportedError",
    "__version__",
]

_lib.configure()


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from .llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
