"""Who builds a release again gets its bytes: not those of his umask, clock, folder and language."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
DATE = 1_700_000_000
# As pip calls it, both in one process: the source archive, then the wheel.
BUILD = (
    "import sys, setuptools.build_meta as b\n"
    "_, into, *kinds = sys.argv\n"  # which setuptools sets
    "for kind in kinds: getattr(b, 'build_' + kind)(into)\n"
)
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".tox", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache",
    ".hypothesis", "pytest-cache-files-*",
)  # fmt: skip


def build(source: Path, into: Path, *kinds: str, umask: int, **environment: str) -> dict[str, str]:
    """Return the hashes of what was built, by name."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, into, *kinds],
        cwd=source, env={**kept, **environment}, umask=umask, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in into.iterdir()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkouts of other ages, made under other umasks, one in a folder with an odd name."""
    made = []
    for name, age, closed in (("one", 0, 0o077), ("ü b", 86_400, 0)):
        copy = tmp_path_factory.mktemp("sources") / name
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        for path in copy.rglob("*"):
            path.chmod(path.stat().st_mode & ~closed)
            os.utime(path, (DATE - age, DATE - age))
        made.append(copy)
    return made[0], made[1]


def test_two_builds_are_the_same_bytes(sources: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first = build(
        sources[0], one, "sdist", "wheel", umask=0o077, SOURCE_DATE_EPOCH=str(DATE),
        TZ="Asia/Kathmandu", PYTHONHASHSEED="1", LC_ALL="C.UTF-8",
    )  # fmt: skip
    second = build(
        sources[1], other, "sdist", "wheel", umask=0, SOURCE_DATE_EPOCH=str(DATE), TZ="UTC",
        PYTHONHASHSEED="2", LC_ALL="C",
    )  # fmt: skip
    assert len(first) == 2
    assert first == second
    # Another date is another file: the bytes are compared.
    again = tmp_path / "again"
    later = build(sources[1], again, "sdist", umask=0, SOURCE_DATE_EPOCH=str(DATE + 2))
    assert later.keys() < first.keys() and not set(later.values()) & set(first.values())
    (archive,) = one.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        for member in packed:
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert member.mtime == DATE
            runs = member.isdir() or member.name.endswith("/.ci/run")
            assert member.mode in ((0o755,) if runs else (0o644, 0o755)), member.name
        names = packed.getnames()
        # Debian's 3.11.2 has no filters yet.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(tmp_path / "unpacked", **safely)
    assert names == sorted(names, key=lambda name: name.split("/"))
    (wheel,) = one.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        modes = {info.filename: info.external_attr >> 16 for info in packed.infolist()}
    (record,) = (name for name in modes if name.endswith(".dist-info/RECORD"))
    assert modes.pop(record) == 0o100664  # setuptools' own choice
    assert set(modes.values()) == {0o100644}
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("LICENSE", "tox.ini", "bindep.txt", "conftest.py", ".ci/run", "tests/unit"):
        assert (unpacked / name).exists(), name
    # And the wheel is that of the source archive, which knows its date; a module that was there at
    # the build before does not linger.
    extra = unpacked / "gateway/left_over.py"
    extra.write_text("")
    build(unpacked, tmp_path / "with", "wheel", umask=0o027)
    with zipfile.ZipFile(tmp_path / "with" / wheel.name) as packed:
        assert set(packed.namelist()) == {*modes, record, "keyfront/gateway/left_over.py"}
    extra.unlink()
    from_archive = build(unpacked, tmp_path / "from archive", "wheel", umask=0o027)
    assert from_archive == {wheel.name: first[wheel.name]}
