"""The owner's half of a connection that is kept alive: it stands where py-amqp writes.

py-amqp hands each frame, or several whole ones, to ``transport._write`` in one call. A writer takes
its place, so that a beat can never come between the bytes of a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import native
from .pulse import Pulse

# Seconds: a beat is over by then; and how long one greenlet waits for another's frame at a time.
_LONGEST_BEAT = 0.002
_PAUSE = 0.0005


class Writer:
    """Writes on one connection, in the threads or greenlets of those who use it.

    :param pulse: the native half
    :param send: what the transport wrote with: sends all of the bytes, waiting as the process does
    :param pause: lets others run for some seconds: a hub's own sleep where the socket is green
    :param inherited: makes the error to raise in a process that was forked from the connection's
    """

    __slots__ = ("_inherited", "_pause", "_send", "pulse")

    def __init__(
        self,
        pulse: Pulse,
        send: Callable[[Any], object],
        *,
        pause: Callable[[float], object],
        inherited: Callable[[], Exception],
    ) -> None:
        self.pulse = pulse
        self._send = send
        self._pause = pause
        self._inherited = inherited

    def __call__(self, data: Any) -> None:
        """Send whole frames (``transport._write``).

        :raises Exception: what sending raises, unchanged; then no beat is ever sent again, since
            what the peer has got may end in the middle of a frame
        """
        pulse = self.pulse
        if pulse.inherited():
            raise self._inherited()
        lock = pulse.lock
        if not lock.acquire(False):
            self._wait(lock)
        try:
            if pulse.pending:
                self._send(pulse.pending)
                pulse.pending = b""
            self._send(data)
        except BaseException:
            pulse.stop()
            raise
        finally:
            pulse.written = native.monotonic()
            lock.release()
            if pulse.closed:
                pulse.shut()

    def _wait(self, lock: native.Lock) -> None:
        """Take the lock from a beat, or from another writer, without stopping the hub."""
        while not lock.acquire(False):
            if self.pulse.beating:
                # The native thread needs no hub: it is done before this returns.
                if lock.acquire(True, _LONGEST_BEAT):
                    return
            else:
                self._pause(_PAUSE)
