"""``keyfront bench report``: one page of all results in a folder."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TextIO

from keyfront.errors import BenchmarkError, OptionError

from .. import results
from . import page

NAME = "report.html"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``keyfront bench report``."""
    results.add_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {NAME} in that folder)",
    )


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Write the page; returns 0.

    :raises BenchmarkError: there are no results, or one is damaged, or the page cannot be written
    :raises MissingPartError: matplotlib is not installed; names the pip command
    """
    folder: Path = arguments.results
    if not folder.is_dir():
        raise OptionError(
            "--results", folder, "a folder with results, as keyfront bench experiment all leaves it"
        )
    target: Path = arguments.output or folder / NAME
    text = page.page(results.read_all(folder))
    _write(target, text)
    out.write(f"{target}\n")
    return 0


def _write(target: Path, text: str) -> None:
    """Write the page whole or not at all."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".html")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o644)
                file.write(text)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BenchmarkError(f"{target}: cannot be written: {error.strerror}") from None
