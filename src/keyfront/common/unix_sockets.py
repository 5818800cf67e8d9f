"""Unix sockets in folders of long paths: that of a socket has at most 107 bytes (unix(7))."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keyfront.errors import OptionError, ServerError

#: Bytes that the path of a socket may have.
LIMIT = 107
#: The same of one that uWSGI opens (core/socket.c, bind_to_unix).
UWSGI_LIMIT = 102
# What a temporary folder's own name and the names of sockets in it take, those with process numbers
# of mod_wsgi among them.
_ROOM = 60
_SHORT = "/tmp"


def length(path: Path | str) -> int:
    """Return the number of bytes of a path."""
    return len(os.fsencode(path))


def check(option: str, path: Path | str, *, limit: int = LIMIT) -> None:
    """Find out that a socket can have a path.

    :param option: the option that names it
    :raises OptionError: it is too long
    """
    if length(path) > limit:
        raise OptionError(
            option, path,
            f"a path of at most {limit} bytes, the most that a unix socket can have; it has "
            f"{length(path)}",
        )  # fmt: skip


def temporary_parent() -> str:
    """Return the folder to make temporary folders in that hold sockets: that of ``TMPDIR``, or
    /tmp where its path is too long.

    :raises ServerError: neither can be used
    """
    usual = tempfile.gettempdir()
    if length(usual) + _ROOM <= UWSGI_LIMIT:
        return usual
    if os.access(_SHORT, os.W_OK | os.X_OK):
        return _SHORT
    raise ServerError(
        f"TMPDIR = {usual}: its path has {length(usual)} bytes, and with one of more than "
        f"{UWSGI_LIMIT - _ROOM} no unix socket can be opened in it; set TMPDIR to a folder with a "
        f"shorter path ({_SHORT} cannot be written to)"
    )


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Give a path that leads to the same file, for this process and while the block runs; another
    one than ``path`` only where that is too long for a socket.

    :raises OSError: its folder cannot be opened
    """
    if length(path) <= LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(client: socket.socket, path: Path) -> None:
    """Connect a socket to a path of any length.

    :raises OSError: nobody listens there
    """
    with short(path) as within:
        client.connect(within)


def bind(server: socket.socket, path: Path) -> None:
    """Give a socket a path of any length; whoever connects needs one of at most :data:`LIMIT`, or
    :func:`connect`.

    :raises OSError: it cannot be made
    """
    with short(path) as within:
        server.bind(within)
