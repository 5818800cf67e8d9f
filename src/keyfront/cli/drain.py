"""``keyfront drain``: take this node out of service, and wait until nothing runs on it."""

from __future__ import annotations

import argparse
import glob
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from keyfront.common.counters import VARIABLE
from keyfront.errors import KeyfrontError, OptionError, ServerError
from keyfront.gateway.node import drain

from .parser import add_state_argument

#: The meaning of ``--state`` where it names a node.
OF_SERVE = "a Keystone of keyfront serve: its state folder, instead of FILE"

# Seconds: three checks of the rendered HAProxy take 3.
_NOTICE, _TIMEOUT, _LONGEST = 4.0, 60.0, 86400.0
# Where the rendered files have their nodes.
_USUAL = "/run/keyfront*/node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Have this node answer that it is not ready (/readyz: 503), so that balancers send it "
        "nothing more, and wait until nothing runs on it. Until they have noticed it answers as "
        "before, and so it does afterwards: stop it, or end the drain with --undo. Exit status 1 "
        "if something still runs after --timeout."
    )
    add_file_argument(parser)
    add_state_argument(parser, OF_SERVE)
    parser.add_argument("--undo", action="store_true", help="have it answer that it is ready again")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        default=f"{_TIMEOUT:g}",
        help="to wait in all, 0 to 86400 (default: %(default)s)",
    )
    parser.add_argument(
        "--notice",
        metavar="SECONDS",
        default=f"{_NOTICE:g}",
        help="to wait at least, as balancers have to notice (default: %(default)s; the rendered "
        "HAProxy needs 3)",
    )


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """Add what names a node to a parser."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="the ini file that uWSGI runs, or the .conf of an Apache with mod_wsgi (default: the "
        "one node of this machine)",
    )
    parser.add_argument(
        "--node", type=Path, metavar="DIR", help=f"its folder instead, as in {VARIABLE}"
    )


def folder(file: Path | None, node: Path | None, state: Path | None = None) -> Path:
    """Return the folder of the node that the command line names, or of the one there is.

    :param file: the ini file or configuration of the server
    :param node: the folder itself; not with a file
    :param state: the state folder of a ``keyfront serve``, which counts without file and node
    :raises OptionError: the file names none
    :raises ServerError: there is none on this machine, or several
    """
    if node is not None and file is not None:
        raise OptionError("--node", node, "left out beside FILE")
    if node is not None:
        return node
    if file is not None:
        return drain.folder_of(file)
    if state is not None:
        from keyfront.gateway.serve.state import State

        return State(state).node
    found = nodes()
    if len(found) == 1:
        return found[0]
    if not found:
        raise ServerError(
            f"no node in /run/keyfront*, and none of keyfront serve: is the server running, with "
            f"{VARIABLE} set? Name its FILE, or --state DIR"
        )
    raise ServerError(f"there are several nodes, {', '.join(map(str, found))}: name one's FILE")


def nodes() -> list[Path]:
    """Return the folders of the nodes of this machine: the environment's, or the usual ones; where
    there are none of these, that of this user's ``keyfront serve``."""
    named = os.environ.get(VARIABLE)
    found = [named] if named else sorted(glob.glob(_USUAL))
    if not found:
        from keyfront.gateway.serve.state import State, default_path

        with suppress(KeyfrontError):  # this user has no home, or may not look into it
            node = State(default_path()).node
            found = [str(node)] if drain.is_node(node) else []
    return [Path(name) for name in found]


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Drain the node, or end that; returns the exit status.

    :raises KeyfrontError: there is no such node, or an option has a value out of its range
    """
    timeout = _seconds("--timeout", arguments.timeout)
    notice = _seconds("--notice", arguments.notice)
    where = folder(arguments.file, arguments.node, arguments.state)
    is_there = drain.is_there(where)
    if arguments.file is None and not is_there:
        # Only a file tells a node whose server has not run yet from a name that is misspelt.
        raise ServerError(f"{where}: there is no such folder; is the server running?")
    if arguments.undo:
        undone = drain.undo(where)
        out.write(f"{where}: {'ready again' if undone else 'was not draining'}\n")
        return 0
    if not is_there:
        out.write(f"{where}: nothing runs\n")
        return 0
    if not drain.is_node(where):
        raise ServerError(f"{where}: no server has counted there; is it running?")
    drain.begin(where)
    out.write(f"{where}: draining\n")
    out.flush()
    try:
        found = drain.wait(where, notice=notice, timeout=max(timeout, notice))
    except KeyboardInterrupt:
        err.write("keyfront: interrupted; it goes on draining, ask again or end it with --undo\n")
        return 130
    if not found.workers:
        out.write("no worker runs\n")
    elif found.under_way:
        err.write(
            f"keyfront: {found.under_way} request(s) still run after {timeout:g} s; it goes on "
            "draining, ask again or end it with --undo\n"
        )
        return 1
    else:
        out.write("nothing runs any more\n")
    return 0


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
        if not 0 <= seconds <= _LONGEST:
            raise ValueError
    except ValueError:
        raise OptionError(option, text, "a number of seconds from 0 to 86400") from None
    return seconds
