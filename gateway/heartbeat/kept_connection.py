"""The native half of a connection that is kept alive: all that the thread of heartbeats may touch.

It holds a duplicate of the connection's descriptor, a native lock that is taken around each write,
and the rest of a beat that was sent in part. It holds nothing green: no socket of eventlet or
gevent, no transport, no callback.
"""

from __future__ import annotations

import _socket
import os
import socket
from typing import Final

from .counters import BEATS, FLOWING, FULL, STOPPED
from .native import Lock, allocate_lock, monotonic
from .tcp import State, look_at, plain_socket

#: A heartbeat frame: type 8, channel 0, no payload, the end octet (AMQP 0-9-1, section 4.2.7).
FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# The part of an interval by which a beat may be early, so that several are sent at one waking.
_EARLY: Final = 0.1
# Seconds: how long whoever ends a connection waits for a beat that is being sent.
_LONGEST_BEAT: Final = 0.1


class KeptConnection:
    """A connection that is kept alive, as the native thread sees it.

    :param fd: the connection's descriptor, which stays as it is
    :param interval: seconds between beats while nothing else is sent
    :param timeout: seconds of the heartbeat that the connection negotiated
    :param row: the counts to add beats to (see :mod:`.counters`)
    :raises OSError: the descriptor is not open, or not a socket

    ``lock`` is held by whoever sends. Whoever finds ``closed`` set when he has let it go closes the
    duplicate, so that it is never closed while somebody is sending on it.
    """

    __slots__ = (
        "beaten",
        "beating",
        "closed",
        "dead",
        "early",
        "interval",
        "lock",
        "pending",
        "pid",
        "row",
        "sock",
        "stopped",
        "timeout",
        "written",
    )

    def __init__(self, fd: int, *, interval: float, timeout: float, row: memoryview[int]) -> None:
        self.lock: Lock = allocate_lock()
        self.interval = interval
        self.early = interval * _EARLY
        self.timeout = timeout
        self.row = row
        self.pid = os.getpid()
        #: The rest of a beat that was sent in part.
        self.pending = b""
        #: The times of the owner's last write and of the last beat (``time.monotonic``).
        self.written: float = monotonic()
        self.beaten: float = self.written
        #: True while the native thread holds the lock.
        self.beating = False
        #: A write was interrupted, perhaps in the middle of a frame: nothing may be put after it.
        self.stopped = False
        #: Sending showed that the peer is gone.
        self.dead = False
        self.closed = False
        self.sock: _socket.socket = plain_socket(os.dup(fd))

    def beat(self, now: float) -> float | None:
        """Send a beat, unless bytes were sent within the interval; in the native thread only.

        It waits for nobody, logs nothing and raises nothing.

        :returns: when to call again (``time.monotonic``); ``None`` if never
        """
        lock = self.lock
        if not lock.acquire(False):
            # Somebody is writing at this moment.
            self.row[FLOWING] += 1
            return now + self.interval
        self.beating = True
        try:
            if self.stopped or self.dead or self.closed:
                return None
            due = max(self.written, self.beaten) + self.interval
            if due - self.early > now and not self.pending:
                self.row[FLOWING] += 1
                return due
            return self._send(now)
        finally:
            self.beating = False
            lock.release()
            if self.closed:
                self.shut()

    def _send(self, now: float) -> float | None:
        data = self.pending or FRAME
        try:
            sent = self.sock.send(data, _FLAGS)
        except BlockingIOError:
            self.row[FULL] += 1
        except OSError:
            self.dead = True
            return None
        else:
            self.pending = data[sent:]
            self.beaten = now
            self.row[BEATS] += 1
        return now + self.interval

    def stop(self) -> None:
        """Never beat again: a write was interrupted. The holder of the lock calls it."""
        if not self.stopped:
            self.stopped = True
            if not self.closed and not self.dead:
                self.row[STOPPED] += 1

    def state(self) -> State | None:
        """Return what the kernel knows of the connection; ``None`` if it is not TCP."""
        return look_at(self.sock)

    def silent(self, state: State) -> bool:
        """Tell whether the peer has missed two heartbeats although it could have sent them."""
        return state.room and state.silent_data > 2 * self.timeout

    def close(self) -> None:
        """Stop beating and give the duplicate back; as often as wanted, in any thread."""
        self.closed = True
        if self.inherited():
            # The lock may be held by a thread that does not exist in this process.
            self.shut()
        # A beat that has begun takes microseconds. A writer may take longer: he closes it himself.
        elif self.lock.acquire(True, _LONGEST_BEAT) if self.beating else self.lock.acquire(False):
            self.lock.release()
            self.shut()

    def inherited(self) -> bool:
        """Tell whether another process made the connection, from which this one was forked."""
        return self.pid != os.getpid()

    def shut(self) -> None:
        """Close the duplicate; only where nobody sends."""
        self.sock.close()
