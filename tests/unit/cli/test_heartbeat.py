"""``keyfront heartbeat status``: which processes it finds, and what it prints."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.cli import heartbeat as heartbeat_commands
from keyfront.cli import main as cli
from keyfront.errors import HeartbeatError
from keyfront.gateway.heartbeat import counters as counts_module
from keyfront.gateway.heartbeat.counters import (
    BEATS,
    CONNECTIONS,
    DEAD_PEERS,
    NAMES,
    OPENED,
    STOPPED,
    Counts,
    default_folder,
)

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\u202e\u6f22\u5b57\ud800 --password" + "x" * 300
UNSAFE = "uWSGI with threads > 1 in a process patched by gevent: requests hang, use processes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "counts"


@pytest.fixture
def counts(folder: Path) -> Iterator[Counts]:
    made = Counts(folder)
    made.row[CONNECTIONS] += 2
    made.row[OPENED] += 3
    made.row[BEATS] += 1234
    made.row[DEAD_PEERS] += 1
    made.late(0.0123)
    made.describe(command="nova-api", server="uwsgi", threading="gevent")
    yield made
    made.close()


def living(**said: Any) -> dict[str, Any]:
    """What is read of a process."""
    lateness = {"lateness_worst": 0.0, "lateness_p99": 0.0}
    whose = {"pid": 1, "uid": 0, "path": "/x", "unsafe": []}
    return {**dict.fromkeys(NAMES, 0), **lateness, **whose, **said}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is printed of some processes."""

    def show(*processes: dict[str, Any]) -> str:
        monkeypatch.setattr(counts_module, "read_all", lambda folders: list(processes))
        out = io.StringIO()
        assert heartbeat_commands.status(None, out) == 0
        text = out.getvalue()
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert max(map(len, text.splitlines())) <= 80
        assert all(line == line.rstrip() for line in text.splitlines())
        return text

    return show


def columns(text: str, row: int = 1) -> dict[str, str]:
    """A row of the table by title, divided at the ends of right-hand titles."""
    head, line = text.splitlines()[0], text.splitlines()[row]
    found, start = {}, 0
    for title, width in heartbeat_commands._COLUMNS:
        assert head[start : start + width].strip() == title
        found[title] = line[start : start + width].strip()
        start += width + 1
    return found


def sums(text: str) -> dict[str, str]:
    lines = text.split("\n\n")[1].splitlines()
    return {line[:14].strip(): line[14:26].strip() for line in lines}


def test_a_table(counts: Counts, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["heartbeat", "status", "--path", str(folder)]) == 0
    out = capsys.readouterr().out
    assert columns(out) == {
        "PID": str(os.getpid()),
        "SERVICE": "nova-api",
        "SERVER": "uwsgi",
        "CONN": "2",
        "BEATS": "1234",
        "FLOWING": "0",
        "LATE": "12.3 ms",
        "DEAD": "1",
        "RECONN": "0",
    }
    assert sums(out)["processes"] == "1"
    assert (sums(out)["opened"], sums(out)["late"]) == ("3", "12.3 ms")
    assert "unsafe" not in out


def test_for_programs(counts: Counts, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts.describe(unsafe=[UNSAFE, HOSTILE])
    assert cli.main(["heartbeat", "status", "--json", "--path", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    (process,) = found["processes"]
    assert (process["pid"], process["command"]) == (os.getpid(), "nova-api")
    assert (process["threading"], process["lateness_worst"]) == ("gevent", 0.0123)
    assert process.keys() >= {*NAMES, "user", "uid", "path", "lateness_p99", "server"}
    assert found["sums"]["beats"] == 1234
    assert found["unsafe"][0] == {"text": UNSAFE, "pids": [os.getpid()]}
    assert all(one["text"].isprintable() for one in found["unsafe"])


def test_sums_and_worst(shown: Callable[..., str]) -> None:
    text = shown(
        living(pid=7, beats=10, stopped=1, lateness_worst=0.5, lateness_p99=0.25),
        living(pid=8, beats=5, reconnections=2, lateness_worst=2.0, lateness_p99=0.125),
    )
    found = sums(text)
    assert (found["processes"], found["beats"], found["stopped"]) == ("2", "15", "1")
    assert (found["reconnections"], found["late"]) == ("2", "2.0 s")
    assert "99 of 100 in each process within 250 ms" in text
    assert columns(text, 2)["RECONN"] == "2"


def test_an_unsafe_combination_once_with_its_processes(shown: Callable[..., str]) -> None:
    text = shown(
        living(pid=7, unsafe=[UNSAFE, UNSAFE]),
        living(pid=8, unsafe=["alone"]),
        living(pid=9, unsafe=[UNSAFE]),
    )
    said = " ".join(text.split())
    assert said.count(UNSAFE) == 1
    assert f"unsafe: {UNSAFE} (processes 7, 9)" in said
    assert "unsafe: alone (process 8)" in said


def test_users_are_told_apart(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_commands, "_user", lambda uid: f"user{uid}" * uid)
    assert "user user1" not in shown(living(uid=1), living(uid=1, pid=2))
    text = shown(living(uid=1), living(uid=1, pid=2), living(uid=100, pid=3))
    assert text.count("user user1:") == 1
    assert text.count("user user100user100") == 1
    assert columns(text, 2)["SERVICE"] == "user1"  # it said no command


def test_a_user_without_a_name() -> None:
    assert heartbeat_commands._user(2**31 - 17) == str(2**31 - 17)
    assert heartbeat_commands._user(0) == "root"


def test_hostile_text_and_numbers_stay_in_their_columns(shown: Callable[..., str]) -> None:
    numbers: dict[str, Any] = dict.fromkeys((*NAMES, "pid"), 2**64 - 1)
    numbers["pid"] = 4194304
    late = (2**64 - 1) / 1e6
    text = shown(
        living(
            **numbers,
            command=HOSTILE,
            server=HOSTILE,
            unsafe=[HOSTILE],
            lateness_worst=late,
            lateness_p99=late,
        ),
        living(command="x", beats=99_999),
    )
    assert columns(text)["PID"] == "4194304"
    assert columns(text)["BEATS"] == "18.4E"
    assert columns(text)["RECONN"] == "18.4E"
    assert len(columns(text)["SERVICE"]) == 11
    assert columns(text, 2)["BEATS"] == "99999"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (99_999, "99999"),
        (100_000, "100k"),
        (999_999, "999k"),
        (1_000_000, "1.0M"),
        (12_345_678, "12.3M"),
        (123_456_789, "123M"),
        (2**64 - 1, "18.4E"),
    ],
)
def test_numbers_in_five_columns(number: int, text: str) -> None:
    assert heartbeat_commands._short(number) == text
    assert len(text) <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (1e-6, "1 us"),
        (0.000999, "999 us"),
        (0.001, "1.0 ms"),
        (0.09999, "100.0 ms"),
        (0.1, "100 ms"),
        (0.9999999, "1000 ms"),
        (1.0, "1.0 s"),
        (999.99, "1000.0 s"),
        (1000.0, "1000 s"),
        (1e6, "1.0M s"),
        (2**64 / 1e6, "18.4T s"),
    ],
)
def test_times_in_eight_columns(seconds: float, text: str) -> None:
    assert heartbeat_commands._span(seconds) == text
    assert len(text) <= 8


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without a heartbeat; the list takes folders that /dev/shm is to have."""
    found: list[str] = []
    monkeypatch.setattr(heartbeat_commands.glob, "glob", lambda pattern: found)
    monkeypatch.setattr(counts_module, "default_folder", lambda: tmp_path / "default")
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["heartbeat", "status", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("keyfront: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_no_process(nowhere: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--json"]):
        error = refused(capsys, *arguments)
        assert "[keyfront_heartbeat] enabled" in error
        assert "--path" in error
        assert "only root" not in error
    tmp_path.joinpath("empty").mkdir()
    error = refused(capsys, "--path", str(tmp_path / "empty"))
    assert str(tmp_path / "empty") in error


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, "--path", str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(capsys, "--path", str(tmp_path / "file"))


def test_a_process_that_ended(
    counts: Counts,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(counts_module, "_lives", lambda fd, words: False)
    refused(capsys, "--path", str(folder))


def test_folders_of_other_users_are_named(
    nowhere: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder.mkdir()
    nowhere.append(str(folder))
    monkeypatch.setattr(heartbeat_commands.os, "access", lambda path, mode: False)
    assert f"only root can read {folder}" in refused(capsys)


def test_all_folders_are_looked_at(
    nowhere: list[str],
    counts: Counts,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere.append(str(folder))
    nowhere.append(str(tmp_path / "gone"))
    assert cli.main(["heartbeat", "status"]) == 0
    assert columns(capsys.readouterr().out)["PID"] == str(os.getpid())


def test_the_folder_that_is_used_without_dev_shm(
    nowhere: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Counts(tmp_path / "default")
    assert cli.main(["heartbeat", "status"]) == 0
    assert columns(capsys.readouterr().out)["PID"] == str(os.getpid())
    made.close()


def test_the_own_folder_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = default_folder()
    monkeypatch.setattr(heartbeat_commands.glob, "glob", lambda pattern: [str(own)])
    assert heartbeat_commands.folders(None) == [own]


def test_a_link_given_by_hand_is_followed(counts: Counts, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    out = io.StringIO()
    assert heartbeat_commands.status(tmp_path / "link", out) == 0
    with pytest.raises(HeartbeatError):
        heartbeat_commands.status(tmp_path / "none", out)


def test_a_stopped_connection_is_no_failure(
    counts: Counts, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts.row[STOPPED] += 1
    counts.describe(unsafe=["x"])
    assert cli.main(["heartbeat", "status", "--path", str(folder)]) == 0
    assert sums(capsys.readouterr().out)["stopped"] == "1"


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["heartbeat", "--help"], ["heartbeat", "status", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
