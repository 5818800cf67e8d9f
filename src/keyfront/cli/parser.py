"""The parsers of the commands: what ``argparse`` has, with errors in one line and late imports."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and says in one line what is wrong.

    :param add_arguments: adds the arguments, once the parser is used: a command whose options are
        told by modules that take long to import costs the other commands nothing
    """

    def __init__(
        self,
        *,
        add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, **values)
        self._add_arguments = add_arguments

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        add, self._add_arguments = self._add_arguments, None
        if add is not None:
            add(self)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, since a command's own --help is of more use than that of keyfront
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line, instead of the usage and the line."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


_STATE = (
    "folder with database, keys and configuration (default: keyfront in $XDG_STATE_HOME or in "
    "~/.local/state)"
)


def add_state_argument(parser: argparse._ActionsContainer, help: str = _STATE) -> None:
    """Add ``--state``, the folder of ``keyfront serve``.

    :param help: the text of its help, where it is not looked at by default
    """
    parser.add_argument("--state", type=Path, metavar="DIR", help=help)
