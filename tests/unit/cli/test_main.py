"""The command line finds the module of a command, and imports it only when it is used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keyfront.cli import main as cli
from keyfront.cli.bench import ACTIONS

IMPORTED = """
import sys
from keyfront.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("keyfront.")), file=sys.stderr)
"""


# As from a shell: what is printed is kept until there is much of it.
_BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def imported(*words: str) -> set[str]:
    """Return the modules of keyfront that a fresh process has imported after a command line."""
    code = IMPORTED.format(words=list(words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", [("--version",), ("--help",)])
def test_what_needs_no_command_imports_none(words: tuple[str, ...]) -> None:
    assert imported(*words) == {
        "keyfront.cli", "keyfront.cli.main", "keyfront.cli.parser", "keyfront.errors",
    }  # fmt: skip


def test_a_command_imports_itself_and_no_other() -> None:
    found = imported("tokens", "stats", "--path", "/nonexistent")
    assert "keyfront.cli.tokens" in found
    others = {f"keyfront.cli.{name}" for name in cli._COMMANDS} - {"keyfront.cli.tokens"}
    assert not found & others
    assert not any(name.startswith(("keyfront.gateway", "keyfront.benchmarks")) for name in found)


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_each_command_has_a_module_with_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"keyfront.cli.{name}")
    assert callable(module.run)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    assert f"usage: keyfront {name}" in page
    assert [line for line in page.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "words",
    [
        *(("tokens", name) for name in ("stats", "flush", "prune", "check")),
        *(("ldap", name) for name in ("check", "stats")),
        ("heartbeat", "status"),
        *(("bench", name) for name in ACTIONS),
    ],
)
def test_the_help_of_each_action_fits_on_a_terminal(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    assert f"usage: keyfront {words[0]} {words[1]}" in page
    assert [line for line in page.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("words", "command"),
    [
        # no abbreviations
        (("check", "--stat", "/tmp"), "keyfront check"),
        (("tokens", "stats", "--jso"), "keyfront tokens stats"),
        (("--verbose", "check", "--json"), "keyfront"),
    ],
)
def test_a_wrong_word_is_told_in_one_line(
    words: tuple[str, ...], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{command}: unrecognized arguments: --")
    assert told.count("\n") == 1 and told.endswith(f"see {command} --help\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [("plan",), ("plan", "--json", "uwsgi.threads"), ("doctor",)])
def test_a_full_disk_is_told_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also by what is so short that it is written at the end."""
    where = ("--root", str(tmp_path)) if words[0] == "doctor" else ()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "keyfront", *words, *where], stdout=full,
            stderr=subprocess.PIPE, text=True, check=False, env=_BUFFERED,
        )  # fmt: skip
    said = "keyfront: what it prints cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "keyfront", "plan"], stdout=gone, stderr=subprocess.PIPE,
            text=True, check=False, env=_BUFFERED,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "words",
    [
        ("tokens", "stats", "--path", "/closed/here"),
        ("tokens", "flush", "--state", "/closed/here"),
        ("tokens", "prune", "--config-file", "/closed/here/keystone.conf"),
        ("bench", "report", "--results", "/closed/here"),
        ("status", "--state", "/closed/here"),
        ("drain", "--node", "/closed/here"),
    ],
)
def test_a_folder_where_nobody_may_look_is_told_in_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return known(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert cli.main(words) in (1, 2)
    told = "".join(capsys.readouterr())
    assert "/closed/here" in told and "Errno" not in told


def test_a_root_where_nobody_may_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path == Path("/closed/here"):
            raise PermissionError(13, "Permission denied", str(path))
        return known(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert cli.main(["doctor", "--root", "/closed/here"]) == 2
    said = "keyfront: --root = /closed/here: must be a folder (Permission denied)\n"
    assert capsys.readouterr().err == said
