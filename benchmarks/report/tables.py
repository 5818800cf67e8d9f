"""Tables of documents, made from results: nobody types a figure.

A document says where a table goes by two comments; what is between them is replaced::

    <!-- bench sweep keystone throughput -->
    <!-- /bench -->

The words are the result's kind, its name and the table's name. Below a table stands what it was
measured on.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from keyfront.errors import BenchmarkError

from .. import files, results
from ..results import Result

_BEGIN = re.compile(r"^<!-- bench (\S+) (\S+) (\S+) -->$")
_END = "<!-- /bench -->"
# From a comment to its end, if it has one before the next comment.
_PART = re.compile(
    r"^([ \t]*<!--[ \t]*bench\b.*)$"
    r"(?:\n(?:(?![ \t]*<!--[ \t]*bench\b).*\n)*?([ \t]*<!-- /bench -->[ \t]*)$)?",
    re.MULTILINE,
)


def filled(path: Path, found: Sequence[Result]) -> tuple[str, str]:
    """Return a document and what it becomes with its tables filled in; nothing is written.

    :raises BenchmarkError: it cannot be read, a comment is wrong or has no end, or there is no such
        result or table; names file and line
    """
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise BenchmarkError(f"{path}: is no text in UTF-8") from None

    def made(match: re.Match[str]) -> str:
        where = f"{path}:{before.count(chr(10), 0, match.start()) + 1}"
        words = _BEGIN.match(match[1].strip())
        if not words:
            raise BenchmarkError(f"{where}: must be <!-- bench KIND NAME TABLE -->")
        if match[2] is None:
            raise BenchmarkError(f"{where}: has no {_END} behind it")
        return f"{match[1]}\n\n{text(found, words[1], words[2], words[3], where)}\n\n{match[2]}"

    return before, _PART.sub(made, before)


def text(found: Sequence[Result], kind: str, name: str, table: str, where: str) -> str:
    """Return a table in Markdown, and what it was measured on.

    :param where: file and line, for errors
    """
    result = next((one for one in found if (one.kind, one.name) == (kind, name)), None)
    if result is None:
        there = ", ".join(f"{one.kind} {one.name}" for one in found)
        raise BenchmarkError(f"{where}: there is no result {kind} {name}; there are: {there}")
    content = result.table(table)
    if content is None:
        there = ", ".join(one.name for one in result.tables) or "none"
        raise BenchmarkError(f"{where}: {kind} {name} has no table {table}; it has: {there}")
    return f"{results.markdown(content)}\n\n{results.measured_on(result)}"


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Fill in the tables of documents from results, between <!-- bench KIND NAME TABLE --> and "
        "<!-- /bench -->. All documents are changed, or none."
    )
    parser.add_argument("documents", nargs="+", type=Path, metavar="FILE", help="Markdown")
    results.add_argument(parser)
    text = "change nothing; the exit status is 1 if a table is not up to date"
    parser.add_argument("--check", action="store_true", help=text)


def run(arguments: Namespace, out: TextIO) -> int:
    """Fill in; returns 1 if ``--check`` found a difference.

    :raises BenchmarkError: a document or a result is wrong; nothing was changed
    """
    found = results.read_all(arguments.results)
    changes = {path: filled(path, found) for path in arguments.documents}
    stale = {path: after for path, (before, after) in changes.items() if before != after}
    for path in changes:
        done = "up to date"
        if path in stale and arguments.check:
            done = "not up to date"
        elif path in stale:
            files.write(path, stale[path])
            done = "written"
        out.write(f"{path}: {done}\n")
    return int(bool(stale) and arguments.check)
