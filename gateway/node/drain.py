"""Takes a node out of service without losing a request.

A file in the node's folder says that it is draining. Each worker looks for it when it is asked for
its health, also one that has just been started; requests do not look. A balancer that asks for
``/readyz`` gets 503 and sends no more. Until it has noticed, the node answers as before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keyfront.common.counters import VARIABLE
from keyfront.errors import CoordinatorError, OptionError, ServerError

from .counters import NAME, Count, read

_FLAG = "draining"
# Seconds between looks, and for which nothing may run: a request may be on its way to a worker.
_LOOK = 0.1
_QUIET = 1.0

_UWSGI = re.compile(rf"^env[ \t]*=[ \t]*{VARIABLE}=(/.*?)[ \t]*$", re.MULTILINE)
_SCRIPT = re.compile(r'^[ \t]*WSGIScriptAlias[ \t]+\S+[ \t]+"?([^"\s]+)', re.MULTILINE)
_MOD_WSGI = re.compile(rf'"{VARIABLE}",[ \t]*"(/[^"]*)"')


def folder_of(file: Path) -> Path:
    """Return the folder of the node that a uWSGI ini file or an Apache configuration makes.

    :raises OptionError: the file cannot be read, or names none
    """
    text = _read(file)
    if file.suffix == ".conf":
        script = _SCRIPT.search(text)
        found = _MOD_WSGI.search(_read(Path(script[1]))) if script else None
    else:
        found = _UWSGI.search(text)
    if found is None:
        raise OptionError(
            "FILE", file, f"the uWSGI ini file or the Apache .conf of a server with {VARIABLE}"
        )
    return Path(found[1].replace("%%", "%"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError("FILE", file, f"a file that can be read: {reason}") from None


def is_there(path: Path) -> bool:
    """Return whether there is such a file or folder.

    :raises ServerError: it may not be looked at
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # a NUL
        raise ServerError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return True


def is_node(folder: Path) -> bool:
    """Return whether the processes of a server have counted in a folder.

    :raises ServerError: it may not be looked at
    """
    return is_there(folder / NAME)


def is_draining(folder: Path | None) -> bool:
    """Return whether a node is draining; one without a folder never is."""
    return folder is not None and os.path.lexists(folder / _FLAG)


def begin(folder: Path) -> None:
    """Make a node answer that it is not ready, from now on and until :func:`undo`.

    :param folder: the node's folder
    :raises ServerError: there is no such node, or it belongs to another user
    """
    try:
        os.close(os.open(folder / _FLAG, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    except FileNotFoundError:
        raise ServerError(f"{folder}: no server has counted there; is it running?") from None
    except OSError as error:
        raise ServerError(f"{folder}: cannot be drained: {error.strerror}") from None


def undo(folder: Path) -> bool:
    """Make a node answer that it is ready again; return whether it was draining.

    :param folder: the node's folder
    :raises ServerError: it belongs to another user
    """
    try:
        (folder / _FLAG).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ServerError(f"{folder}: the drain cannot be undone: {error.strerror}") from None
    return True


def wait(
    folder: Path,
    *,
    notice: float,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Count:
    """Wait until nothing runs on a draining node and nothing has come for a second.

    :param notice: seconds that balancers need to see that it is not ready; it may be idle until
        then only because nobody happened to come
    :param timeout: seconds to wait in all
    :returns: the counts by then: ``under_way`` is not 0 if the time did not suffice
    :raises ServerError: what the node counts cannot be read
    """
    began = changed = clock()
    before = -1
    while True:
        try:
            found = read(folder)
        except CoordinatorError as error:
            raise ServerError(str(error)) from None
        now = clock()
        if found.under_way or found.requests != before:
            before, changed = found.requests, now
        if not found.workers:
            return found
        if now - changed >= _QUIET and now - began >= notice:
            return found
        if now - began >= timeout:
            return found
        with suppress(InterruptedError):
            sleep(_LOOK)
