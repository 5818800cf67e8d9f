"""The command line finds the module of a command, and imports it only when it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from keyfront.cli import main as cli

IMPORTED = """
import sys
from keyfront.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("keyfront.")), file=sys.stderr)
"""


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
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"keyfront.cli.{name}")
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: keyfront {name}" in capsys.readouterr().out


def test_a_wrong_word_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--stat", "/tmp"])  # no abbreviations
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.endswith("see keyfront --help\n")
