"""``keyfront reload``: load a served application anew, and wait until it serves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from keyfront.errors import ServerError
from keyfront.gateway.reload import daemons, uwsgi_manager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Load the application anew, with its configuration, while the former one still answers. "
        "Ends once the new one serves; exit status 1 if it does not, and the former goes on."
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the ini file that keyfront uwsgi runs, or the .conf of an Apache with mod_wsgi",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Reload; returns the exit status.

    :raises OptionError: the file cannot be used
    """
    try:
        part = daemons if arguments.file.suffix == ".conf" else uwsgi_manager
        out.write(f"{part.reload(arguments.file)}\n")
    except ServerError as error:
        err.write(f"keyfront: {error}\n")
        return 1
    return 0
