"""The commands that the documents tell to type: each exists, and takes the options given there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyfront.cli import main as cli

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

# What a reader may type: indented lines with those that go on, and what stands between backquotes.
CODE = re.compile(r"^    +(?:\S*\$ +)?(.+(?:\\\n.+)*)$|`([^`]+)`", re.MULTILINE)
COMMAND = re.compile(r"(?:^|/|&& )keyfront((?: [a-z]+)+)(.*)", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands(text: str) -> list[tuple[list[str], set[str]]]:
    """The words behind ``keyfront`` of each command, and the options of it."""
    found = []
    for match in CODE.finditer(text):
        command = COMMAND.search(match[1] or match[2])
        if command:
            # what comes after it in the line is another program's, or a remark
            own = re.split(r" [#|&>]|;", command[2])[0]
            found.append((command[1].split(), set(OPTION.findall(own))))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist_and_take_their_options(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for words, options in commands(document.read_text(encoding="utf-8")):
        helped, known = "", 0
        while known < len(words):  # the rest are arguments
            with pytest.raises(SystemExit) as ended:
                cli.main([*words[: known + 1], "--help"])
            if ended.value.code != 0:
                break
            helped, known = capsys.readouterr().out, known + 1
        named = known == len(words) or (known and "ACTION ..." not in helped)
        missing = options - set(OPTION.findall(helped))
        if not named or missing:
            wrong.append((words, missing))
    assert wrong == []
