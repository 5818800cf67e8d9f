"""``keyfront tokens``: which cache it finds, what it prints, what it empties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.cli import main as cli
from keyfront.cli import tokens as token_commands
from keyfront.gateway.heartbeat.counters import Counts
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.counters import HITS, MISSES
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.node_cache import Node

INNER = "/run/keyfront/tokens-*"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with 3 hits and 1 miss."""
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    folder = tmp_path / "shared"
    coordinator = SharedMemory(folder)
    node = Node(folder, size=1 << 20, flight_timeout=1)
    node.start(coordinator.secret)
    node.counters.row[HITS] += 3
    node.counters.row[MISSES] += 1
    return folder


def test_stats_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokens", "stats", "--path", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = {line[:12].strip(): line[12:].split()[0] for line in out.splitlines()[1:]}
    assert lines["hits"] == "3"
    assert lines["misses"] == "1"
    assert lines["hit ratio"] == "75.00"
    assert lines["processes"] == "1"
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_stats_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokens", "stats", "--json", "--path", str(folder)]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["hits"], counts["misses"], counts["changes"]) == (3, 1, 0)


def test_stats_of_a_cache_that_nobody_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    secret = SharedMemory(folder).secret
    Node(folder, size=1 << 20, flight_timeout=1).start(secret)
    assert cli.main(["tokens", "stats", "--path", str(folder)]) == 0
    assert "hit ratio" not in capsys.readouterr().out


def test_flush(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = SharedMemory(folder)
    epoch, everything = coordinator.now(), slots(["all"], coordinator.slot_count)
    assert cli.main(["tokens", "flush", "--path", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert not coordinator.fresh(epoch, everything)
    assert coordinator.statistics()["flushes"] == 1


@pytest.mark.parametrize("action", ["stats", "flush"])
def test_no_cache_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert cli.main(["tokens", action, "--path", str(tmp_path / "none")]) == 2
    assert "there is no token cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("place", ["/dev/shm/keyfront-*", INNER])
def test_the_only_cache_is_found(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    found: list[str] = []
    folders = {place: found}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", lambda pattern: folders.get(pattern, []))
    assert cli.main(["tokens", "stats"]) == 2
    assert "is the service running?" in capsys.readouterr().err
    found.append(str(folder))
    assert cli.main(["tokens", "stats"]) == 0
    capsys.readouterr()
    another = tmp_path / "another"
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    SharedMemory(another)
    found.append(str(another))
    assert cli.main(["tokens", "stats"]) == 2
    error = capsys.readouterr().err
    assert str(folder) in error
    assert str(another) in error


def test_a_folder_of_another_part_is_no_cache(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = Counts(tmp_path / "keyfront-heartbeat-1000")
    (tmp_path / "file").touch()
    found = [str(folder), str(tmp_path / "keyfront-heartbeat-1000"), str(tmp_path / "file")]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", {"/dev/shm/keyfront-*": found, INNER: []}.get)
    assert cli.main(["tokens", "stats"]) == 0
    assert str(folder) in capsys.readouterr().out
    counts.close()


def test_a_cache_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    found = [str(tmp_path / name) for name in ("keyfront-1234", "keyfront-heartbeat-1000")]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", {"/dev/shm/keyfront-*": found, INNER: []}.get)
    monkeypatch.setattr(token_commands.Path, "stat", refused)
    assert token_commands.cache(path=None, config_file=None).folder == tmp_path / "keyfront-1234"


def test_the_cache_of_keyfront_serve_is_found(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("oslo_db")
    monkeypatch.setattr(token_commands.glob, "glob", lambda pattern: [])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = tmp_path / "keyfront" / "keystone.conf"
    config.parent.mkdir(mode=0o700)
    config.write_text(f"[keyfront_token_cache]\npath = {folder}\n")
    assert cli.main(["tokens", "stats"]) == 0
    assert str(folder) in capsys.readouterr().out


def test_a_keystone_conf_says_which(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("oslo_db")
    config = tmp_path / "keystone.conf"
    config.write_text(f"[keyfront_token_cache]\npath = {folder}\n")
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 0
    assert str(folder) in capsys.readouterr().out
    config.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/db\n")
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 2
    assert "/keyfront-" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no section\n", "[keyfront_token_cache]\nttl = soon\n"])
def test_a_keystone_conf_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    pytest.importorskip("oslo_db")
    config = tmp_path / "keystone.conf"
    if text is not None:
        config.write_text(text)
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("keyfront: ")
    assert error.count("\n") == 1
