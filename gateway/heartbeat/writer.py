"""The owner's half of a connection that is kept alive: it stands where py-amqp writes.

py-amqp hands each frame, or several whole ones, to ``transport._write`` in one call. A writer takes
its place, so that a beat can never come between the bytes of a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from . import native
from .amqp_connection import KeptConnection

# Seconds to wait at a time for a beat, which takes microseconds, and for another writer's frame.
_BEAT = 0.00005
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
    mark, take, give = kept.mark, kept.lock.take, kept.lock.give
    monotonic = native.monotonic

    def write(data: Any) -> None:
        if not mark[0]:
            raise inherited()
        busy = False
        try:
            take()
        except IndexError:
            busy = True
        if busy:
            wait_for_turn(kept, pause)
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
            give(None)
            if kept.closed:
                kept.close()

    writer: Any = write
    writer.kept = kept
    made: Writer = writer
    return made


def wait_for_turn(kept: KeptConnection, pause: Callable[[float], object]) -> None:
    """Take the lock from a beat, or from another writer, without stopping the hub."""
    while not kept.lock.acquire():
        if kept.beating:
            kept.wanted = True
            try:
                native.sleep(_BEAT)  # the native thread needs no hub
            finally:
                kept.wanted = False
        else:
            pause(_PAUSE)
