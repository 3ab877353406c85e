"""Which llama.cpp is loaded, and what is refused. Each case is a process of its own: imports happen once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def fake_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a `llama_cpp` that is loaded from the C library: a llama.cpp without the patches."""
    package = tmp_path_factory.mktemp("fake") / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("from . import llama_cpp\n__version__ = '0.3.36'\n")
    (package / "llama_cpp.py").write_text("import ctypes\n_lib = ctypes.CDLL(None)\n")
    return str(package.parent)


def test_loads_the_packages_own_library() -> None:
    code = (
        "import laprox_llamacpp, llama_cpp; from laprox_llamacpp import _lib, _native; "
        "print(llama_cpp.llama_cpp._lib._name); print(_lib.lib_dir()); print(*_native.build_info())"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    loaded, folder, keys = done.stdout.splitlines()
    assert Path(loaded).parent == Path(folder)
    assert {"compiler", "flags", "patches"} <= set(keys.split())


def test_llama_cpp_on_our_library_first_is_fine() -> None:
    folder = python("from laprox_llamacpp import _lib; print(_lib.lib_dir())").stdout.strip()
    done = python("import llama_cpp; from laprox_llamacpp import Llama", LLAMA_CPP_LIB_PATH=folder)
    assert done.returncode == 0, done.stderr


def test_llama_cpp_loaded_from_elsewhere_first(fake_llama_cpp: str) -> None:
    line = last_line(python("import llama_cpp, laprox_llamacpp", PYTHONPATH=_path(fake_llama_cpp)))
    assert line.startswith("ImportError") and "import laprox_llamacpp before llama_cpp" in line


def test_llama_cpp_without_the_patches(fake_llama_cpp: str) -> None:
    code = "from laprox_llamacpp import Llama"
    line = last_line(python(code, PYTHONPATH=_path(fake_llama_cpp), LLAMA_CPP_LIB_PATH="/elsewhere"))
    assert "without the laprox patches (/elsewhere (set by LLAMA_CPP_LIB_PATH))" in line


def test_no_library_there(tmp_path: Path) -> None:
    line = last_line(python("from laprox_llamacpp import Llama", LLAMA_CPP_LIB_PATH=str(tmp_path)))
    assert line.startswith("ImportError") and str(tmp_path) in line and "pip install ." in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("llama_cpp.__version__ = '0.3.35'", "llama-cpp-python is 0.3.35, expected 0.3.36"),
        ("_lib.ABI_VERSION = 99", "expected 99"),
        ("llama_cpp.llama_batch = llama_cpp.llama_token_data", "struct llama_batch has"),
    ],
)
def test_a_mismatch_is_refused(change: str, says: str) -> None:
    code = f"import laprox_llamacpp, llama_cpp; from laprox_llamacpp import _lib; {change}; laprox_llamacpp.Llama"
    line = last_line(python(code))
    assert line.startswith("ImportError") and "does not match laprox_llamacpp" in line and says in line


def _path(first: str) -> str:
    return os.pathsep.join([first, *filter(None, [os.environ.get("PYTHONPATH")])])
