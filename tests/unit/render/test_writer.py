"""The folder of a deployment: whole or nothing, and a hand's changes are kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.render import writer as folder
from keyfront.gateway.render.writer import CHANGED, KEPT, NEW, UNCHANGED, File, with_header


def made(value: int, *paths: str, command: str = "keyfront render") -> list[File]:
    return [
        File(
            path=path,
            text=with_header(f"value = {value}\n", title=path, command=command, versions="any"),
        )
        for path in paths or ("a.ini", "system/etc/b.conf")
    ]


def changes(found: list[folder.Change]) -> list[str]:
    return [item.kind for item in found]


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(x.relative_to(path)): x.read_bytes() for x in path.rglob("*") if x.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writes_and_says_what_it_did(tmp_path: Path) -> None:
    where = tmp_path / "etc" / "keyfront"
    assert changes(folder.write(made(1), where)) == [NEW, NEW]
    assert changes(folder.write(made(1), where)) == [UNCHANGED, UNCHANGED]
    assert changes(folder.write(made(2), where)) == [CHANGED, CHANGED]
    assert sorted(snapshot(where)) == ["a.ini", "system/etc/b.conf"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    where = tmp_path / "d"
    before = os.umask(umask)
    try:
        folder.write([*made(1), File(path="key", text="x", mode=0o600)], where)
    finally:
        os.umask(before)
    assert mode(where) == mode(where / "system" / "etc") == 0o755
    assert mode(where / "a.ini") == 0o644
    assert mode(where / "key") == 0o600
    (where / "a.ini").chmod(0o666)
    folder.write(made(1), where)
    assert mode(where / "a.ini") == 0o644


def test_a_change_by_hand_is_kept_unless_forced(tmp_path: Path) -> None:
    folder.write(made(1), tmp_path)
    by_hand = (tmp_path / "a.ini").read_text() + "more = 1\n"
    (tmp_path / "a.ini").write_text(by_hand)
    assert changes(folder.write(made(2), tmp_path)) == [KEPT, CHANGED]
    assert (tmp_path / "a.ini").read_text() == by_hand
    assert changes(folder.write(made(2), tmp_path, force=True)) == [CHANGED, UNCHANGED]
    assert (tmp_path / "a.ini").read_text() == made(2)[0].text


def test_a_file_of_somebody_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.ini").write_bytes(b"\xff mine\n")
    assert changes(folder.write(made(1), tmp_path)) == [KEPT, NEW]
    assert (tmp_path / "a.ini").read_bytes() == b"\xff mine\n"


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_in_the_middle_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    where = tmp_path / "d"
    folder.write(made(1), where)
    before = snapshot(where)
    paths = ("a.ini", "system/etc/b.conf", "system/new/c.conf")
    replace, calls = Path.replace, []

    def fails(self: Path, target: Path) -> Path:
        if ".old" not in self.name:
            calls.append(target)
            if len(calls) == failing:
                raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OptionError, match="No space left on device"):
        folder.write(made(2, *paths), where)
    assert len(calls) == failing
    assert snapshot(where) == before
    assert not (where / "system" / "new").exists()
    monkeypatch.undo()
    assert changes(folder.write(made(2, *paths), where)) == [CHANGED, CHANGED, NEW]


def test_a_failure_before_any_file_is_in_place_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OptionError, match="Input/output error"):
        folder.write(made(1), tmp_path / "x" / "y")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(OptionError, match="Permission denied"):
        folder.write(made(1), tmp_path)


def test_what_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for where in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(OptionError, match="DIR"):
            folder.write(made(1), where)


def test_links_and_folders_in_the_way_are_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "target").write_text("precious")
    where = tmp_path / "d"
    where.mkdir()
    for make_link in (
        lambda: (where / "a.ini").symlink_to(elsewhere / "target"),
        lambda: (where / "system").symlink_to(elsewhere),
        lambda: (where / "a.ini").mkdir(),
    ):
        make_link()
        with pytest.raises(OptionError, match="remove"):
            folder.write(made(1), where, force=True)
        for path in where.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert snapshot(elsewhere) == {"target": b"precious"}


def test_a_folder_that_is_itself_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder.write(made(1), tmp_path / "link")
    assert (tmp_path / "real" / "a.ini").exists()


def test_diff_writes_nothing_and_shows_what_differs(tmp_path: Path) -> None:
    folder.write(made(1), tmp_path)
    before = snapshot(tmp_path)
    shown = "".join(folder.diff(made(2, "a.ini", "new.ini"), tmp_path))
    assert f"--- {tmp_path}/a.ini\n+++ {tmp_path}/a.ini\n" in shown
    assert "-value = 1\n+value = 2\n" in shown
    assert f"--- /dev/null\n+++ {tmp_path}/new.ini\n" in shown
    assert snapshot(tmp_path) == before


def test_diff_leaves_out_what_differs_in_the_header_alone(tmp_path: Path) -> None:
    folder.write(made(1), tmp_path)
    other = made(1, command="keyfront render --other")
    assert not list(folder.diff(other, tmp_path))
    assert changes(folder.write(other, tmp_path)) == [CHANGED, CHANGED]


def test_what_another_line_up_left_is_named_and_stays(tmp_path: Path) -> None:
    folder.write(made(1, "nginx.conf", "apache.conf", "mine.conf"), tmp_path)
    (tmp_path / "mine.conf").write_text("by hand")
    known = ("nginx.conf", "apache.conf", "mine.conf", "absent.conf")
    assert folder.left_over(made(1, "nginx.conf"), tmp_path, known) == ["apache.conf"]
    assert (tmp_path / "apache.conf").exists()
