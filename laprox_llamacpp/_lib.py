"""Point llama-cpp-python at the patched libraries, and check that they are the ones these bindings were made for."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable

LLAMA_CPP_VERSION = "0.3.36"
ABI_VERSION = 3  # LAPROX_ABI_VERSION of laprox.h
ENV = "LLAMA_CPP_LIB_PATH"

# structs of llama.h that cross the boundary by value or inside an array
STRUCTS = (
    "llama_model_params",
    "llama_context_params",
    "llama_batch",
    "llama_token_data",
    "llama_token_data_array",
    "llama_sampler_chain_params",
)


def lib_dir() -> Path:
    """Folder of the patched libraries. An editable install keeps it apart from the sources, hence the search."""
    roots = [Path(p) for p in sys.modules[__package__].__path__]
    return next((root / "lib" for root in roots if (root / "lib").is_dir()), roots[0] / "lib")


def configure() -> None:
    """Set `LLAMA_CPP_LIB_PATH` before `llama_cpp` is imported; a value of the user's own stays, and is checked later.

    Raises ImportError when `llama_cpp` is already loaded from other libraries.
    """
    loaded = sys.modules.get("llama_cpp")
    if loaded is None:
        os.environ.setdefault(ENV, str(lib_dir()))
    elif not hasattr(_handle(loaded), "laprox_abi_version"):
        raise ImportError(
            f"llama_cpp is already loaded from {_handle(loaded)._name}, which cannot evict: "
            "import laprox_llamacpp before llama_cpp, in a fresh process"
        )


def load() -> ctypes.CDLL:
    """Import `llama_cpp` on our libraries and return the handle of libllama.

    Raises ImportError, one line, when the libraries are missing or do not match these bindings.
    """
    try:
        import llama_cpp
    except (FileNotFoundError, RuntimeError) as e:
        raise ImportError(f"no usable libllama in {_origin()}: {e}; build it with `pip install .`") from e
    lib = _handle(llama_cpp)
    why = mismatch(lib, llama_cpp)
    if why is not None:
        raise ImportError(f"{lib._name} does not match laprox_llamacpp: {why}")
    return lib


def mismatch(lib: ctypes.CDLL, llama_cpp: ModuleType) -> str | None:
    """What is wrong with the pair of libllama and `llama_cpp`, in one line; None when they belong together."""
    if llama_cpp.__version__ != LLAMA_CPP_VERSION:
        return (
            f"llama-cpp-python is {llama_cpp.__version__}, expected {LLAMA_CPP_VERSION}; "
            f"install llama-cpp-python=={LLAMA_CPP_VERSION}"
        )
    if not hasattr(lib, "laprox_abi_version"):
        return f"it is a llama.cpp without the laprox patches ({_origin()}); unset {ENV} or reinstall laprox-llamacpp"
    abi_version: Callable[[], int] = lib.laprox_abi_version
    if abi_version() != ABI_VERSION:
        return f"its laprox ABI is {abi_version()}, expected {ABI_VERSION}; reinstall laprox-llamacpp"
    for name, (there, here) in struct_sizes(lib, llama_cpp).items():
        if there != here:
            return f"struct {name} has {there} bytes there and {here} here; reinstall laprox-llamacpp"
    return None


def struct_sizes(lib: ctypes.CDLL, llama_cpp: ModuleType) -> dict[str, tuple[int, int]]:
    """(size in the library, size in the bindings) of each struct in `STRUCTS`."""
    sizeof = lib.laprox_sizeof
    sizeof.argtypes, sizeof.restype = [ctypes.c_char_p], ctypes.c_size_t
    return {name: (sizeof(name.encode()), ctypes.sizeof(getattr(llama_cpp, name))) for name in STRUCTS}


def _handle(llama_cpp: ModuleType) -> ctypes.CDLL:
    handle: ctypes.CDLL = sys.modules[f"{llama_cpp.__name__}.llama_cpp"]._lib
    return handle


def _origin() -> str:
    path = os.environ.get(ENV, str(lib_dir()))
    return path if path == str(lib_dir()) else f"{path} (set by {ENV})"
