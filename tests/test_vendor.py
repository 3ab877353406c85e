"""scripts/vendor.py on a repository and a source distribution of a few lines."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from script import load

ROOT = Path(__file__).resolve().parent.parent

TOP = "fake_pkg-1.0/vendor/llama.cpp/"
SOURCE = "".join(f"line {i}\n" for i in range(1, 31))
STOCK = {
    TOP + "CMakeLists.txt": "project(x)\n",
    TOP + ".git": "gitdir: nowhere\n",
    TOP + "src/.git": "gitdir: nowhere\n",
    TOP + "src/a.cpp": SOURCE,
    TOP + "src/b.cpp": "int b;\n",
    TOP + "examples/unwanted.cpp": "int u;\n",
    "fake_pkg-1.0/pyproject.toml": "",
}

OLD = 1_000_000_000  # seconds: any time long ago

vendor = load("vendor")


def tarball(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> str:
    """Write a .tar.gz and return its SHA-256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = target
            archive.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def patch_text(line: int, new: str, source: str = SOURCE, name: str = "src/a.cpp") -> str:
    """A one-hunk patch of one line, with one line of context, written out from the format's definition."""
    lines = source.splitlines()
    return (
        f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -{line - 1},3 +{line - 1},3 @@\n"
        f" {lines[line - 2]}\n-{lines[line - 1]}\n+{new}\n {lines[line]}\n"
    )


@pytest.fixture
def layout(tmp_path: Path):
    """A git repository that ignores vendor/, as ours does: git apply must not skip the ignored files."""
    root = tmp_path / "repo"
    for folder in ("patches", "native/src"):
        (root / folder).mkdir(parents=True)
    (root / ".gitignore").write_text("/vendor/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "native/src/ours.cpp").write_text("int ours;\n")
    cache = tmp_path / "cache"
    cache.mkdir()
    sha256 = tarball(cache / "fake_pkg-1.0.tar.gz", STOCK)
    return vendor.Layout(root=root, cache=cache, package="fake-pkg", version="1.0", sha256=sha256)


def age(layout) -> None:
    for path in layout.tree.rglob("*"):
        os.utime(path, (OLD, OLD))


def fresh(layout) -> set[str]:
    """Files written since age()."""
    files = (path for path in layout.tree.rglob("*") if path.is_file())
    return {path.relative_to(layout.tree).as_posix() for path in files if path.stat().st_mtime != OLD}


def test_unpacks_what_is_wanted_and_copies_native(layout) -> None:
    vendor.update(layout)
    files = {path.relative_to(layout.tree).as_posix() for path in layout.tree.rglob("*") if path.is_file()}
    assert files == {"CMakeLists.txt", "src/a.cpp", "src/b.cpp", "src/ours.cpp"}
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE
    assert (layout.tree / "src/ours.cpp").read_text() == "int ours;\n"


def test_second_run_does_nothing(layout) -> None:
    assert vendor.stale_reason(layout) == "missing"
    vendor.update(layout)
    assert vendor.stale_reason(layout) is None
    age(layout)
    layout.sdist.unlink()  # not even looked at
    vendor.update(layout)
    assert fresh(layout) == set()


def test_patches_apply_in_order_inside_an_ignored_folder(layout) -> None:
    (layout.root / "patches/0001-one.patch").write_text(patch_text(10, "first"))
    (layout.root / "patches/0002-two.patch").write_text(
        patch_text(10, "second", SOURCE.replace("line 10\n", "first\n"))
    )
    vendor.update(layout)
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE.replace("line 10\n", "second\n")


def test_changed_patch_makes_the_tree_anew_and_leaves_other_files_alone(layout) -> None:
    patch = layout.root / "patches/0001-one.patch"
    patch.write_text(patch_text(10, "first"))
    vendor.update(layout)
    age(layout)
    patch.write_text(patch_text(10, "other"))
    assert vendor.stale_reason(layout) == "patches changed"
    vendor.update(layout)
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE.replace("line 10\n", "other\n")
    assert fresh(layout) == {"src/a.cpp"}

    patch.unlink()
    vendor.update(layout)
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE


def test_changed_native_file_alone_is_copied_without_the_sources(layout) -> None:
    (layout.root / "native/src/still.cpp").write_text("int still;\n")
    vendor.update(layout)
    age(layout)
    layout.sdist.unlink()
    (layout.root / "native/src/ours.cpp").write_text("long ours;\n")
    assert vendor.stale_reason(layout) == "native changed"
    vendor.update(layout)
    assert (layout.tree / "src/ours.cpp").read_text() == "long ours;\n"
    assert fresh(layout) == {"src/ours.cpp"}
    assert vendor.stale_reason(layout) is None


def test_removed_native_file_gives_the_stock_file_back(layout) -> None:
    extra = layout.root / "native/src/b.cpp"
    extra.write_text("long b;\n")
    vendor.update(layout)
    assert (layout.tree / "src/b.cpp").read_text() == "long b;\n"
    extra.unlink()
    (layout.root / "native/src/ours.cpp").unlink()
    vendor.update(layout)
    assert (layout.tree / "src/b.cpp").read_text() == "int b;\n"
    assert not (layout.tree / "src/ours.cpp").exists()


def test_patch_that_does_not_apply_names_patch_file_and_hunk(layout) -> None:
    vendor.update(layout)
    good = patch_text(5, "five").rstrip("\n")
    bad = patch_text(20, "twenty", SOURCE.replace("line 20\n", "something else\n"))
    bad_hunk = bad[bad.index("@@") :]
    (layout.root / "patches/0007-bad.patch").write_text(good + "\n" + bad_hunk)
    with pytest.raises(vendor.VendorError) as error:
        vendor.update(layout)
    text = str(error.value)
    assert "patches/0007-bad.patch" in text
    assert "src/a.cpp" in text
    assert "hunk 2 of 2" in text
    assert "@@ -19,3" in text
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE  # neither hunk


def test_patch_of_a_missing_file_is_an_error(layout) -> None:
    (layout.root / "patches/0001-gone.patch").write_text(patch_text(5, "five", name="src/gone.cpp"))
    with pytest.raises(vendor.VendorError, match=r"0001-gone\.patch does not apply:\n.*src/gone\.cpp"):
        vendor.update(layout)
    assert not layout.tree.exists()


def test_edit_in_the_tree_is_not_overwritten(layout) -> None:
    vendor.update(layout)
    edited = layout.tree / "src/a.cpp"
    edited.write_text("somebody's work\n")
    (layout.root / "patches/0001-one.patch").write_text(patch_text(10, "first"))
    with pytest.raises(vendor.VendorError, match=r"edited by hand.*src/a\.cpp"):
        vendor.update(layout)
    assert edited.read_text() == "somebody's work\n"


def test_wrong_hash_is_an_error_and_leaves_no_file(layout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.sdist.unlink()
    monkeypatch.setattr(vendor, "download", lambda layout, folder: tarball(folder / layout.sdist.name, {"x": "other"}))
    with pytest.raises(vendor.VendorError, match=rf"SHA-256 [0-9a-f]{{64}}, expected {layout.sha256}"):
        vendor.update(layout)
    assert list(layout.cache.rglob("*")) == []
    assert not layout.tree.exists()


def test_damaged_cached_file_is_fetched_again(layout, monkeypatch: pytest.MonkeyPatch) -> None:
    good = layout.sdist.read_bytes()
    layout.sdist.write_bytes(good[:-1])
    monkeypatch.setattr(vendor, "download", lambda layout, folder: (folder / layout.sdist.name).write_bytes(good))
    vendor.update(layout)
    assert layout.sdist.read_bytes() == good
    assert (layout.tree / "src/a.cpp").read_text() == SOURCE


@pytest.mark.parametrize(
    ("files", "links"),
    [
        ({TOP + "src/../../../../evil.cpp": "int e;\n"}, {}),
        ({}, {TOP + "src/link.cpp": "/etc/passwd"}),
    ],
    ids=["path traversal", "link"],
)
def test_hostile_archive_writes_nothing(layout, files: dict[str, str], links: dict[str, str]) -> None:
    sha256 = tarball(layout.sdist, {**STOCK, **files}, links)
    hostile = vendor.Layout(layout.root, layout.cache, layout.package, layout.version, sha256)
    with pytest.raises(vendor.VendorError, match="not a plain file with a plain name"):
        vendor.update(hostile)
    assert not layout.tree.exists()
    assert list(layout.root.parent.rglob("evil.cpp")) == []


def test_one_release_everywhere() -> None:
    pin = f"{vendor.PACKAGE}=={vendor.VERSION}"
    assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text()
    requirements = (ROOT / "requirements.txt").read_text()
    assert re.search(rf"^{re.escape(pin)} ", requirements, re.MULTILINE)


def test_every_patch_marks_what_it_touches() -> None:
    patches = vendor.default_layout().patches
    for patch in patches:
        for part in patch.read_text().split("\ndiff --git ")[0:]:
            if "\n@@ " in part:
                assert "laprox" in part, f"{patch.name}: no laprox: comment in {part.splitlines()[0]}"
