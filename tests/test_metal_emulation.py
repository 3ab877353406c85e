"""The Metal kernels and their encoder, run on the CPU: tests/gpu_emulation/metal_*. No Mac is needed, only g++.

The kernels are compiled as they are, against a shim of metal_stdlib, and driven by the encoder as it is, against a shim
of ggml's device interface. Expected values are float64 (reference.h). What this proves and what not: docs/gpu.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "gpu_emulation"
METAL = ROOT / "native" / "ggml" / "src" / "ggml-metal"
KERNELS = METAL / "kernels"
TREE = ROOT / "vendor" / "llama.cpp" / "ggml"

WIDTHS = [64, 80, 96, 112, 128, 192, 256]

EMBED = """
cmake_minimum_required(VERSION 3.21)
project(embed C)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/none.c" "")
function(ggml_add_backend_library name)
    add_library(${name} STATIC "${CMAKE_BINARY_DIR}/none.c")
endfunction()
set(GGML_METAL_EMBED_LIBRARY ON)
add_subdirectory("${METAL_DIR}" metal)
"""


def run(command: list[str], cwd: Path | None = None, fails: bool = False) -> str:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode("utf-8", "replace")
    assert (done.returncode != 0) == fails, f"{' '.join(command)}\n{text[-4000:]}"
    return text


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no g++")
    macros = subprocess.run([found, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True).stdout
    if "__GNUC__" not in macros or "__clang__" in macros:
        pytest.skip(f"{found} is not GCC: others refuse attributes of Metal that they do not know")
    return found


@pytest.fixture(scope="module")
def tree() -> Path:
    if not (TREE / "src" / "ggml-metal" / "kernels" / "common.h").is_file():
        pytest.skip("vendor/llama.cpp is missing: run scripts/vendor.py")
    if "laprox" not in (TREE / "src" / "ggml-metal" / "ggml-metal-ops.cpp").read_text(encoding="utf-8"):
        pytest.skip("vendor/llama.cpp is older than patches/: run scripts/vendor.py")
    return TREE


def flags(tree: Path) -> list[str]:
    folders = [METAL, EMULATION, tree / "include", tree / "src", tree / "src" / "ggml-metal"]
    return ["-std=c++17", "-Wno-attributes", "-Wno-unknown-pragmas", *(f"-I{folder}" for folder in folders)]


def kernel_flags(tree: Path) -> list[str]:
    return [f"-I{EMULATION / 'metal_include'}", f"-I{KERNELS}", f"-I{tree / 'src' / 'ggml-metal' / 'kernels'}"]


Run = Callable[..., str]


@pytest.fixture(scope="module")
def emulation(compiler: str, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs metal_test; built once, the kernels once more where they are compiled with fast math."""
    build = tmp_path_factory.mktemp("metal")
    common = [compiler, *flags(tree), "-O1", "-g", "-fsanitize=address"]
    others = []
    for source in (METAL / "laprox-metal.cpp", *(EMULATION / f"metal_{x}.cpp" for x in ("emulator", "device", "test"))):
        others.append(str(build / f"{source.stem}.o"))
        run([*common, "-c", str(source), "-o", others[-1]])

    def metal_test(*args: str, fast_math: bool = False, kernels: Path = KERNELS, fails: bool = False) -> str:
        """`kernels` is a folder whose laprox.metal goes before ours."""
        program = build / f"metal_test_{'fast' if fast_math else ''}_{kernels.name}"
        if not program.exists():
            compiled = f"{program}.o"
            options = ["-ffast-math"] if fast_math else []
            command = [*common, f"-I{kernels}", *kernel_flags(tree), *options]
            run([*command, "-c", str(EMULATION / "metal_kernels.cpp"), "-o", compiled])
            run([compiler, "-fsanitize=address", compiled, *others, "-o", str(program)])
        return run([str(program), *args], fails=fails)

    return metal_test


# the shapes of shapes.h, which cover what the kernels branch on, and one that is drawn


def test_score(emulation: Run) -> None:
    assert "12 cases, 0 failed" in emulation("score", "1", "12")


def test_attn(emulation: Run) -> None:
    assert "9 cases, 0 failed" in emulation("attn", "1", "9")


def test_refusals(emulation: Run) -> None:
    """What the kernels cannot do is refused, one thing at a time; what the other tests run is not."""
    assert "0 failed" in emulation("refusals")


@pytest.mark.slow
@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("op", ["score", "attn"])
def test_many(emulation: Run, op: str, fast_math: bool) -> None:
    """Fast math is how Metal compiles: no result may hang on infinities or NaN."""
    assert "150 cases, 0 failed" in emulation(op, "1001", "150", fast_math=fast_math)


BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\(mem_flags::mem_threadgroup\);")


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(BARRIER.findall((KERNELS / "laprox.metal").read_text(encoding="utf-8")))))
def test_no_barrier_may_be_missing(emulation: Run, tmp_path: Path, i: int) -> None:
    """Without any one barrier of the kernels, the shapes of shapes.h go wrong."""
    text = (KERNELS / "laprox.metal").read_text(encoding="utf-8")
    found = list(BARRIER.finditer(text))[i]
    folder = tmp_path / f"without_{i}"
    folder.mkdir()
    (folder / "laprox.metal").write_text(text[: found.start()] + text[found.end() :], encoding="utf-8")
    op, n = ("score", 12) if found.start() < text.index("// GGML_OP_LAPROX_ATTN\n") else ("attn", 9)
    emulation(op, "1", str(n), kernels=folder, fails=True)


def test_names_and_attributes() -> None:
    """What the shim cannot see: the names of kernels, and which thread index an argument is."""
    text = (KERNELS / "laprox.metal").read_text(encoding="utf-8")
    named = dict(re.findall(r'host_name\("(\w+)"\)\]\]\s+kernel \w+ (\w+<\d+>);', text))
    assert named == {
        f"kernel_laprox_{x}_d{d}": f"kernel_laprox_{x}<{d}>" for x in ("score_stats", "score") for d in WIDTHS
    }

    order = [
        ("uint3", "tgpig", "threadgroup_position_in_grid"),
        ("ushort", "tiitg", "thread_index_in_threadgroup"),
        ("ushort", "tiisg", "thread_index_in_simdgroup"),
        ("ushort", "sgitg", "simdgroup_index_in_threadgroup"),
    ]
    kernels = re.findall(r"^kernel void (\w+)\((.*?)\) \{", text, re.DOTALL | re.MULTILINE)
    assert len(kernels) == 6
    for name, arguments in kernels:
        found = re.findall(r"(\w+)\s+(\w+)\s*\[\[(\w+)\]\]", arguments)
        assert found == order[: len(found)], name
        assert len(found) in (2, 4), name

    constants = re.findall(r"constant int (\w+)\s+\[\[function_constant\(FC_LAPROX \+ (\d)\)\]\]", text)
    bound = re.findall(r"&(FC_laprox_\w+),", (EMULATION / "metal_kernels.cpp").read_text(encoding="utf-8"))
    assert constants == [(constant, str(i)) for i, constant in enumerate(bound)]


def test_address_spaces(tmp_path: Path) -> None:
    """Pointers into device, constant and threadgroup memory are not mixed: clang knows address spaces, GCC does not.

    The attributes go: clang does not take them where Metal has them.
    """
    clang = next(
        (path for path in map(shutil.which, ["clang++", *(f"clang++-{i}" for i in range(22, 13, -1))]) if path), None
    )
    if clang is None:
        pytest.skip("no clang++")
    kernels = re.sub(r"\[\[[^\]]*\]\]", "", (KERNELS / "laprox.metal").read_text(encoding="utf-8"))
    mixed = kernels.replace("threadgroup float  * tile  = ", "device float * tile = ")
    assert mixed != kernels
    (tmp_path / "common.h").write_text('#include "metal_address_spaces.h"\n', encoding="utf-8")
    for name, text in (("laprox.cpp", kernels), ("mixed.cpp", mixed)):
        (tmp_path / name).write_text(text, encoding="utf-8")

    command = [clang, "-std=c++14", "-Wall", "-Wextra", "-fsyntax-only", f"-I{EMULATION}", f"-I{KERNELS}"]
    assert run([*command, str(tmp_path / "laprox.cpp")]) == ""
    done = subprocess.run(
        [*command, str(tmp_path / "mixed.cpp")], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "address_space" in done.stderr


@pytest.mark.parametrize("name", ["ggml-metal-ops.cpp", "ggml-metal-device.cpp", "ggml-metal.cpp", "laprox-metal.cpp"])
def test_backend_compiles(compiler: str, tree: Path, name: str) -> None:
    """The patched backend, as far as it is C++; <memory> comes with a header of Apple's."""
    source = METAL / name if name.startswith("laprox") else tree / "src" / "ggml-metal" / name
    run([compiler, *flags(tree), "-Wall", "-Wno-format", "-fsyntax-only", "-include", "memory", str(source)])


def test_embedded_library(compiler: str, tree: Path, tmp_path: Path) -> None:
    """The patched CMakeLists.txt puts kernels and headers into one text, which compiles."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("no cmake, or no ninja")
    (tmp_path / "CMakeLists.txt").write_text(EMBED, encoding="utf-8")
    libraries = [f"-D{name}=none" for name in ("FOUNDATION_LIBRARY", "METAL_FRAMEWORK", "METALKIT_FRAMEWORK")]
    build = tmp_path / "build"
    run(
        [
            "cmake",
            "-S",
            str(tmp_path),
            "-B",
            str(build),
            "-G",
            "Ninja",
            *libraries,
            f"-DMETAL_DIR={tree / 'src' / 'ggml-metal'}",
        ]
    )
    run(["ninja", "-C", str(build), "metal/autogenerated/ggml-metal-embed-laprox.s"])

    text = (build / "metal" / "autogenerated" / "ggml-metal-embed-laprox.metal").read_text(encoding="utf-8")
    outside = re.sub(r"#if !defined\(GGML_METAL_EMBED_LIBRARY\)\n.*?#endif", "", text, flags=re.DOTALL)
    assert re.findall(r'#include "(.*?)"', outside) == []
    (tmp_path / "laprox.metal").write_text(text, encoding="utf-8")
    shim = [f"-I{tmp_path}", f"-I{EMULATION / 'metal_include'}", f"-I{EMULATION}"]
    options = ["-std=c++17", "-Wno-attributes", "-Wno-unknown-pragmas", "-DGGML_METAL_EMBED_LIBRARY", "-fsyntax-only"]
    run([compiler, *options, *shim, str(EMULATION / "metal_kernels.cpp")])
