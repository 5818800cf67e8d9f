"""Sockets in folders whose paths are too long for them."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from keyfront.common import unix_sockets
from keyfront.errors import OptionError, ServerError

LONG = "ü" * 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / LONG
    made.mkdir()
    return made


@pytest.mark.parametrize("place", ("long", "short"))
def test_sockets_of_any_path(folder: Path, place: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as here:
        path = (folder if place == "long" else Path(here)) / "socket"
        before = os.listdir("/proc/self/fd")
        with (
            socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client,
        ):  # fmt: skip
            unix_sockets.bind(server, path)
            server.listen()
            unix_sockets.connect(client, path)
            assert path.is_socket()
        assert os.listdir("/proc/self/fd") == before


def test_what_is_not_there_is_said_as_ever(folder: Path) -> None:
    for path in (folder / "socket", folder / "none" / "socket"):
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
            unix_sockets.connect(client, path)


def test_a_short_path_is_used_as_it_is() -> None:
    path = Path("/" + "x" * (unix_sockets.LIMIT - 1))
    with unix_sockets.short(path) as found:
        assert found == str(path)


def test_says_what_is_too_long() -> None:
    path = "/" + "ü" * 60
    with pytest.raises(OptionError, match=r"--listen = /ü+: .* at most 107 bytes.* it has 121$"):
        unix_sockets.check("--listen", path)
    unix_sockets.check("--listen", path[:-7])


def test_temporary_folders_are_where_a_socket_can_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert unix_sockets.temporary_parent() == "/var/tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert unix_sockets.temporary_parent() == "/tmp"
    monkeypatch.setattr(unix_sockets, "_SHORT", str(folder / "none"))
    with pytest.raises(ServerError, match=r"^TMPDIR = .*\d+ bytes.* 42 .*shorter path"):
        unix_sockets.temporary_parent()
