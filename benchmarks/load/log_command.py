"""``keyfront bench log``: its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TextIO

from keyfront.errors import BenchmarkError, OptionError

from . import arguments as given
from . import synthetic


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Write a made-up access log of a Keystone with a realistic mix of requests, to be replayed "
        "with keyfront bench replay. The same seed makes the same log."
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a new file (default: standard output)"
    )
    parser.add_argument("--seconds", default="600", metavar="N", help="1 to 604800 (default: 600)")
    parser.add_argument(
        "--rate", default="20", metavar="N", help="requests per second, 0.1 to 10000 (default: 20)"
    )
    parser.add_argument("--users", default="200", metavar="N", help="1 to 100000 (default: 200)")
    parser.add_argument("--seed", default="1", metavar="N", help="any number (default: 1)")
    parser.add_argument(
        "--format",
        default="combined",
        metavar="|".join(synthetic.FORMATS),
        help="combined has whole seconds, json milliseconds (default: %(default)s)",
    )


def run(arguments: Namespace, out: TextIO) -> int:
    """Write it.

    :raises OptionError: an argument is wrong
    :raises BenchmarkError: the file is there already, or cannot be written
    """
    if arguments.format not in synthetic.FORMATS:
        raise OptionError("--format", arguments.format, f"one of {', '.join(synthetic.FORMATS)}")
    written = synthetic.FORMATS[arguments.format]
    found = synthetic.entries(
        seconds=given.whole("--seconds", arguments.seconds, 1, 604800),
        rate=given.decimal("--rate", arguments.rate, 0.1, 10000),
        seed=given.whole("--seed", arguments.seed, 0, 999_999_999),
        users=given.whole("--users", arguments.users, 1, 100000),
    )
    lines = (f"{written(entry)}\n" for entry in found)
    path = arguments.file
    if path is None:
        out.writelines(lines)
        return 0
    try:
        with path.open("x", encoding="ascii") as file:
            file.writelines(lines)
    except FileExistsError:
        raise BenchmarkError(f"{path}: is there already; name another file") from None
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from None
    out.write(f"written to {path}\n")
    return 0
