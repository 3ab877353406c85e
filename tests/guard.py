"""The guarded device of device/guard.cpp, in a process of its own: loading it changes what every later model sees."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lowlevel import TESTS

from laprox_llamacpp._lib import ENV, lib_dir

HEADERS = TESTS.parent / "vendor" / "llama.cpp" / "ggml"


def libs() -> Path:
    return Path(os.environ.get(ENV, str(lib_dir())))


def build(folder: Path) -> Path:
    """Compile the device against the libraries in use; skips where that cannot be done."""
    cxx = os.environ.get("CXX") or shutil.which("c++")
    if cxx is None:
        pytest.skip("no C++ compiler")
    if not (HEADERS / "include" / "ggml.h").is_file():
        pytest.skip(f"no headers in {HEADERS}; a build lays them out (scripts/vendor.py)")
    if not (libs() / "libggml-cpu.so").is_file():
        pytest.skip(f"no libggml-cpu.so to link with in {libs()}")
    out = folder / "libguard.so"
    done = subprocess.run(
        [cxx, "-O1", "-std=c++17", "-fPIC", "-shared", f"-I{HEADERS / 'include'}", f"-I{HEADERS / 'src'}",
         str(TESTS / "device" / "guard.cpp"), "-o", str(out), f"-L{libs()}", "-lggml-base", "-lggml-cpu",
         f"-Wl,-rpath,{libs()}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


class Guard:
    """The device, loaded into this process before any model."""

    def __init__(self, path: str) -> None:
        ggml = ctypes.CDLL(str(libs() / "libggml.so"))
        ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        assert ggml.ggml_backend_load(path.encode()), path
        self._lib = ctypes.CDLL(path)
        self._lib.guard_report.restype = ctypes.c_size_t
        self._lib.guard_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def reset(self) -> None:
        """Count from here on."""
        self._lib.guard_reset()

    def peek(self) -> int:
        """A byte of its memory, read as the host would: the process does not survive it."""
        base = ctypes.CDLL(str(libs() / "libggml-base.so"))
        ggml = ctypes.CDLL(str(libs() / "libggml.so"))
        at: Any = ctypes.c_void_p
        for f in (ggml.ggml_backend_dev_by_name, base.ggml_backend_dev_buffer_type, base.ggml_backend_buffer_get_base):
            f.restype = at
        base.ggml_backend_buft_alloc_buffer.restype = at
        buft = at(base.ggml_backend_dev_buffer_type(at(ggml.ggml_backend_dev_by_name(b"GUARD0"))))
        buffer = at(base.ggml_backend_buft_alloc_buffer(buft, ctypes.c_size_t(4096)))
        return ctypes.string_at(base.ggml_backend_buffer_get_base(buffer), 1)[0]

    def report(self) -> list[tuple[str, int, int, str]]:
        """(what, calls, bytes, name); what is "set" or "get" (to or from the host), "copy" (on the device) or "op"."""
        text = ctypes.create_string_buffer(self._lib.guard_report(None, 0))
        self._lib.guard_report(text, len(text))
        lines = (line.split("\t", 3) for line in text.value.decode().splitlines())
        return [(what, int(n), int(n_bytes), name) for what, n, n_bytes, name in lines]
