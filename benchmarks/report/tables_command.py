"""``keyfront bench tables``: its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TextIO

from .. import results
from . import tables


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Fill in the tables of documents from results, between <!-- bench KIND NAME TABLE --> and "
        "<!-- /bench -->. All documents are changed, or none."
    )
    parser.add_argument("documents", nargs="+", type=Path, metavar="FILE", help="Markdown")
    results.add_argument(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; the exit status is 1 if a table is not up to date",
    )


def run(arguments: Namespace, out: TextIO) -> int:
    """Fill in; returns 1 if ``--check`` found a difference.

    :raises BenchmarkError: a document or a result is wrong; nothing was changed
    """
    found = results.read_all(arguments.results)
    changes = [tables.filled(path, found) for path in arguments.documents]
    stale = 0
    for change in changes:
        if change.before == change.after:
            out.write(f"{change.path}: up to date\n")
            continue
        stale += 1
        if arguments.check:
            out.write(f"{change.path}: not up to date\n")
        else:
            tables.write(change)
            out.write(f"{change.path}: written\n")
    return 1 if stale and arguments.check else 0
