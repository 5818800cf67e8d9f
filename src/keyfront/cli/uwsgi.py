"""``keyfront uwsgi``: uWSGI, run so that a reload keeps nobody waiting."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from keyfront.common.programs import uwsgi_program
from keyfront.gateway.reload import uwsgi_manager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Run the uWSGI of an ini file in the foreground. SIGHUP, or keyfront reload FILE, loads "
        "the application anew in a second uWSGI, which takes over once its workers accept; "
        "if it does not load, the former goes on. SIGTERM stops after the running requests."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="uWSGI's ini file")
    parser.add_argument(
        "--program", metavar="PATH", help="uWSGI (default: the one beside this Python)"
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Run uWSGI until a signal; returns the exit status.

    :raises KeyfrontError: it cannot be run
    """
    return uwsgi_manager.run(arguments.file, arguments.program or uwsgi_program())
