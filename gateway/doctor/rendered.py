"""Finds the files of ``keyfront render`` on a machine, by the header that each has."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ..render.writer import SYSTEM, is_untouched
from .readers.files import Files

_COMMAND = re.compile(r"^# {5}(keyfront render (?:.|\n# {5})*?)$\n# (?!    )", re.MULTILINE)


@dataclass(frozen=True)
class RenderedFile:
    """A file that keyfront made.

    :param untouched: true if it is as it was made
    :param command: the words of the command that made it
    """

    path: str
    untouched: bool
    command: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The folder that the command wrote to."""
        return self.command[2] if len(self.command) > 2 else ""


def look(files: Files, paths: list[str]) -> list[RenderedFile]:
    """Return those of some files that keyfront made."""
    found = []
    for path in paths:
        text = files.text(path, wanted=False)
        untouched = None if text is None else is_untouched(text)
        if text is None or untouched is None:
            continue
        match = _COMMAND.search(text)
        words: list[str] = []
        if match is not None:
            try:
                words = shlex.split(" ".join(match[1].replace("\n#", "\n").split()))
            except ValueError:
                words = []
        found.append(RenderedFile(path, untouched, tuple(words)))
    return found


def in_place(folder: str, path: str) -> str:
    """Return where the system looks for a file below ``system/``; empty if it is used as it
    lies."""
    below = path.removeprefix(folder).lstrip("/")
    return f"/{below.removeprefix(SYSTEM)}" if below.startswith(SYSTEM) else ""


def folders(found: list[RenderedFile]) -> list[Path]:
    """Return the folders that files were rendered to, each once."""
    return list(dict.fromkeys(Path(one.folder) for one in found if one.folder.startswith("/")))
