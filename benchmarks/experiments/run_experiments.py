"""``keyfront bench experiment``: repeats published experiments and says what differs.

Each runs in namespaces of its own where the kernel permits it (see ``isolation``): in a child that
is told what to do by the JSON of its standard input. The folder for its files is this process's, so
it goes however the child ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from keyfront.common import ranges
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import KeyfrontError, OptionError

from .. import environment, results
from ..load.arguments import ended_in_order, say
from ..servers.processes import streamed
from . import apache_mpm, isolation, keystone_frontends, ldap_pool, live_replay, small_nginx
from .experiment import Options, World, as_text

#: In the order in which ``all`` runs them.
EXPERIMENTS = {
    one.name: one
    for one in (
        keystone_frontends.EXPERIMENT,
        apache_mpm.EXPERIMENT,
        ldap_pool.EXPERIMENT,
        small_nginx.EXPERIMENT,
        live_replay.EXPERIMENT,
    )
}
NAMES = tuple(EXPERIMENTS)
ALL = "all"
_MODULE = f"{__package__}.run_experiments"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``keyfront bench experiment``."""
    parser.add_argument(
        "name", metavar="NAME", help=f"one of {', '.join(NAMES)}, or all, one after the other"
    )
    text = "a form of less than three minutes each, with rough figures"
    parser.add_argument("--quick", action="store_true", help=text)
    results.add_argument(parser)
    text = "of each point, 1 to 3600 (default: each experiment's own; 120 is as published)"
    parser.add_argument("--seconds", metavar="N", help=text)
    text = "Keystone's database is SQLite instead of MariaDB"
    parser.add_argument("--sqlite", action="store_true", help=text)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Run the experiments; 0, or 1 if one of several could not be run.

    :raises OptionError: an option has a wrong value
    :raises KeyfrontError: the only experiment could not be run
    """
    names = list(NAMES) if arguments.name == ALL else [arguments.name]
    if not set(names) <= set(NAMES):
        raise OptionError("NAME", arguments.name, f"one of {', '.join(NAMES)}, or {ALL}")
    seconds = arguments.seconds and ranges.whole("--seconds", arguments.seconds, 1, 3600)
    command, quick = tuple(environment.command_line()), arguments.quick
    options = Options(quick=quick, seconds=seconds, sqlite=arguments.sqlite, command=command)
    folder: Path = arguments.results
    if folder.exists() and not folder.is_dir():
        raise OptionError("--results", folder, "a folder, or a path where one can be made")
    place = temporary_parent()
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="keyfront-", dir=place) as name:
        # a server that has dropped root passes through; what is inside is guarded itself
        os.chmod(name, 0o711)
        task: dict[str, Any] = {
            "names": names,
            "options": asdict(options),
            "folder": name,
            "results": str(folder.absolute()),
        }
        prefix = isolation.prefix()
        if prefix is None:
            return perform(task, out)
        return _in_namespaces(prefix, task, out)


def _in_namespaces(prefix: tuple[str, ...], task: dict[str, Any], out: TextIO) -> int:
    # unshare takes the namespaces' first process, and so all of them, with it
    return streamed(
        [*prefix, sys.executable, "-m", _MODULE],
        partial(print, end="", file=out, flush=True),
        stdin=json.dumps(task),
        env={**os.environ, isolation.INSIDE: "1"},
        start_new_session=True,
    )


def perform(task: dict[str, Any], out: TextIO) -> int:
    """Do what a task says, in this process; tells each result when it is there.

    :raises KeyfrontError: the only experiment could not be run
    """
    names: list[str] = task["names"]
    options = Options(**{**task["options"], "command": tuple(task["options"]["command"])})
    folder, target = Path(task["folder"]), Path(task["results"])
    failed = 0
    with World(folder, options, say).open() as world:
        for name in names:
            experiment = EXPERIMENTS[name]
            say(f"{name}: {experiment.title}")
            try:
                result = experiment.result(world)
            except KeyfrontError as error:
                if len(names) == 1:
                    raise
                say(f"{name}: left out: {error}")
                failed += 1
                continue
            path = results.write(result, target)
            out.write(f"== {result.title} ==\n\n")
            out.write(as_text(result.tables, result.notes))
            out.write(f"\n{result.seconds:.0f} s; written to {path.name}\n\n")
            out.flush()
    return 1 if failed else 0


def child(given: TextIO, out: TextIO, *, terminate: Callable[[], None]) -> int:
    """Return what the process in the namespaces does; returns the exit status."""
    task = json.loads(given.read())
    # the first process of a namespace ignores every signal it has no handler for
    signal.signal(signal.SIGTERM, lambda number, frame: terminate())
    isolation.raise_loopback()
    try:
        return perform(task, out)
    except KeyfrontError as error:
        say(f"keyfront: {error}")
        return 2


def _terminate() -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(child(sys.stdin, sys.stdout, terminate=_terminate))
