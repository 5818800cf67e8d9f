"""The owner's half of a connection that is kept alive: it stands where py-amqp writes.

py-amqp hands each frame, or several whole ones, to ``transport._write`` in one call. A writer takes
its place, so that a beat can never come between the bytes of a frame.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from . import native
from .kept_connection import KeptConnection

# Seconds after which a beat is over, and for which a greenlet waits at a time for another's frame.
_LONGEST_BEAT = 0.002
_PAUSE = 0.0005


class Writer(Protocol):
    """Writes on one connection, in the threads or greenlets of those who use it."""

    #: The native half.
    kept: KeptConnection

    def __call__(self, data: Any) -> None:
        """Send whole frames (``transport._write``).

        :raises Exception: what sending raises, unchanged; then no beat is ever sent again, since
            what the peer has got may end in the middle of a frame
        """


def make_writer(
    kept: KeptConnection,
    send: Callable[[Any], object],
    *,
    pause: Callable[[float], object],
    inherited: Callable[[], Exception],
) -> Writer:
    """Make the writer of a connection.

    :param kept: the native half of the connection
    :param send: the function that the transport wrote with: it sends all of the bytes, waiting as
        the process does
    :param pause: lets others run for some seconds: a hub's own sleep where the socket is green
    :param inherited: makes the error to raise in a process that was forked from the connection's
    """
    # Each message of the service goes through here: all that can be looked up is looked up now.
    lock, pid = kept.lock, kept.pid
    acquire, release = lock.acquire, lock.release
    getpid, monotonic = os.getpid, native.monotonic

    def write(data: Any) -> None:
        if getpid() != pid:
            raise inherited()
        if not acquire(False):
            _wait(kept, pause)
        try:
            if kept.pending:
                send(kept.pending)
                kept.pending = b""
            send(data)
        except BaseException:
            kept.stop()
            raise
        finally:
            kept.written = monotonic()
            release()
            if kept.closed:
                kept.shut()

    writer: Any = write
    writer.kept = kept
    made: Writer = writer
    return made


def _wait(kept: KeptConnection, pause: Callable[[float], object]) -> None:
    """Take the lock from a beat, or from another writer, without stopping the hub."""
    lock = kept.lock
    while not lock.acquire(False):
        if kept.beating:
            # The native thread needs no hub: it is done before this returns.
            if lock.acquire(True, _LONGEST_BEAT):
                return
        else:
            pause(_PAUSE)
