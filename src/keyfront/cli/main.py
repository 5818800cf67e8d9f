"""The ``keyfront`` command: finds the module of a command and runs it.

Such a module has ``add_arguments(parser)``, which adds the command's options, and
``run(arguments, out, err)``, which returns the exit status. It is imported only when its command
is used. Bad input ends with one line on standard error and exit status 2.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from keyfront import __version__
from keyfront.errors import KeyfrontError

from .parser import Parser

# The module of each command has its name; here is what keyfront --help says of it.
_COMMANDS = {
    "serve": "serve a Keystone on this machine, made on the first run",
    "check": "log in to a Keystone, validate the token, and tell how long it took",
    "uwsgi": "run uWSGI so that a reload keeps nobody waiting",
    "reload": "load a served application anew, without a pause",
    "status": "say how this node is: workers, health, token cache, LDAP, heartbeat",
    "top": "show how this node is, live in a terminal",
    "drain": "take this node out of service, and wait until nothing runs on it",
    "tokens": "look at the token cache of this machine, or empty it",
    "ldap": "look at LDAP servers",
    "metrics": "tell Prometheus what this node counts",
    "heartbeat": "look at the AMQP connections that are kept alive on this machine",
    "plan": "compute processes, queues, pools and timeouts for a machine, with reasons",
    "render": "write the configuration files of a deployment",
    "doctor": "say what is wrong with this Keystone, across layers, and what to write instead",
    "bench": "measure this machine's Keystone, and compare",
}


# Of a full disk, or one that is broken.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0; 1 if a check failed; 2 for bad input; 3 if a plan cannot be met.

    :param argv: the words behind ``keyfront``; by default this process's
    """
    try:
        arguments = _parser().parse_args(argv)
        command = importlib.import_module(f"keyfront.cli.{arguments.command}")
        status: int = command.run(arguments, sys.stdout, sys.stderr)
        sys.stdout.flush()
        return status
    except KeyfrontError as error:
        sys.stderr.write(f"keyfront: {error}\n")
        return 2
    except KeyboardInterrupt:
        # during the set-up; a running server takes the signal itself and stops in order
        sys.stderr.write("keyfront: interrupted; the next run begins again\n")
        return 130
    except BrokenPipeError:
        _forget_output()
        return 1
    except PermissionError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"keyfront: {error.filename}: {error.strerror}\n")
        return 2
    except OSError as error:
        # one of a file that is not named is of what was printed
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _forget_output()
        sys.stderr.write(f"keyfront: what it prints cannot be written: {error.strerror}\n")
        return 2


def _forget_output() -> None:
    """Redirect standard output, so that the interpreter does not write to it again at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # no file
        pass


def _parser() -> Parser:
    parser = Parser(prog="keyfront", description="Keystone, fast and steady.")
    parser.add_argument("--version", action="version", version=f"keyfront {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_arguments=partial(_add_arguments, name))
    return parser


def _add_arguments(name: str, parser: ArgumentParser) -> None:
    importlib.import_module(f"keyfront.cli.{name}").add_arguments(parser)
