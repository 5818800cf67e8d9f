"""Arguments that several actions of ``keyfront bench`` have, and how they are read."""

from __future__ import annotations

import re
import signal
import sys
from argparse import ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keyfront.errors import OptionError

from ..lineups.keystone import Keystone, temporary


def add_state(parser: ArgumentParser) -> None:
    text = "state folder of keyfront serve with the Keystone to measure, made if it is not there "
    text += "(default: one that is made and deleted again, which takes some ten seconds)"
    parser.add_argument("--state", type=Path, metavar="DIR", help=text)


def add_name(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--name", default=default, metavar="NAME", help="of the result (default: %(default)s)"
    )


def add_texts(parser: _ActionsContainer, *options: tuple[str, str, str]) -> None:
    """Add options that take a text: the name, what stands for the text, words of help."""
    for option, metavar, text in options:
        parser.add_argument(option, metavar=metavar, help=text)


def points(option: str, text: str, high: int) -> list[int]:
    """Return ascending whole numbers, read of ``10,50,100`` or ranges with a step, ``10-100/10``.

    :raises OptionError: it is not of that form, or beyond 1 and ``high``
    """
    found: set[int] = set()
    allowed = f"numbers from 1 to {high}, such as 10,50,100-1000/100"
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6})/([0-9]{1,6}))?", part.strip())
        if not match or (match[3] and int(match[3]) == 0):
            raise OptionError(option, text, allowed)
        first = int(match[1])
        found |= set(range(first, int(match[2]) + 1, int(match[3])) if match[2] else [first])
    if not found or min(found) < 1 or max(found) > high:
        raise OptionError(option, text, allowed)
    return sorted(found)


def choices(option: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return what was chosen, by options that are repeated or lists with commas; all without any.

    :raises OptionError: a name is not known
    """
    if not given:
        return list(known)
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in known:
            raise OptionError(option, name, f"one of {', '.join(known)}")
    return list(dict.fromkeys(names))


@contextmanager
def keystone(arguments: Namespace, say: Callable[[str], None]) -> Iterator[Keystone]:
    """Make the Keystone of ``--state``, or one for the block alone.

    :raises StateError: the folder is in use or not ours to use
    """
    with temporary(say, arguments.state) as (_, found):
        yield found


def say(text: str) -> None:
    """Tell a line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, so that nothing is left running or lying about."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
