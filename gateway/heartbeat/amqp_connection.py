"""The native half of an AMQP connection that is kept alive: all that a heartbeat's thread touches.

It holds a duplicate of the connection's descriptor, a native lock that is taken around each write,
and the rest of a beat that was sent in part. It holds nothing green: no socket of eventlet or
gevent, no transport, no callback.
"""

from __future__ import annotations

import _socket
import os
import socket
from typing import Final

from .counters import BEATS, CONNECTIONS, EXPIRED, FLOWING, FULL, STOPPED
from .native import Mark, TryLock, monotonic, sleep
from .native import mark as make_mark
from .pool_expiry import Pooled
from .tcp import State, look_at, plain_socket

#: A heartbeat frame: type 8, channel 0, no payload, the end octet (AMQP 0-9-1, section 4.2.7).
FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

#: A goodbye: connection.close (10, 50) with the code 200, "idle" and no method to blame, in a frame
#: of type 1 on channel 0 (AMQP 0-9-1, section 1.4.2.6).
GOODBYE: Final = b"\x01\x00\x00\x00\x00\x00\x0f\x00\x0a\x00\x32\x00\xc8\x04idle\x00\x00\x00\x00\xce"

#: The answer to it: connection.close-ok (10, 51), the last frame that a broker sends.
_CLOSE_OK: Final = b"\x01\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x33\xce"

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# The part of an interval by which a beat may be early, so that several are sent at one waking.
_EARLY: Final = 0.1
# How often whoever ends a connection looks whether a beat is over that is being sent, and seconds
# between two looks. No time in all: of a process that was stopped it would be over at once, and the
# beat of a TLS connection be written to whatever has the number of its descriptor by then.
_LOOKS: Final = 2000
_BEAT: Final = 0.00005
# The part of an interval by which a beat may be late before somebody else has to send it.
_SLACK: Final = 0.5
#: Seconds that a broker has at most for ending its channels and answering a goodbye: RabbitMQ takes
#: a connection that ends before that for a client that vanished.
ANSWER: Final = 10.0
#: Seconds between two looks for that answer.
LOOK: Final = 1.0
# Bytes that are looked at for the answer: an hour of heartbeats is 1 kB at most.
_UNREAD: Final = 65536


class KeptConnection:
    """A connection that is kept alive, as the native thread sees it.

    :param fd: the connection's descriptor, which stays as it is
    :param interval: seconds between beats while nothing else is sent
    :param timeout: seconds of the heartbeat that the connection negotiated
    :param row: the counts to add beats to (see :mod:`.counters`)
    :param mark: the process's (:func:`.native.mark`)
    :raises OSError: the descriptor is not open, or not a socket

    ``lock`` is held by whoever sends. Whoever finds ``closed`` set when he has let it go calls
    :meth:`close`, so that the duplicate is never closed while somebody is sending on it.
    """

    __slots__ = (
        "beaten",
        "beating",
        "closed",
        "dead",
        "early",
        "expired",
        "hung_up",
        "interval",
        "lock",
        "mark",
        "pending",
        "pooled",
        "row",
        "sock",
        "stopped",
        "timeout",
        "tried",
        "wanted",
        "written",
    )

    def __init__(
        self,
        fd: int,
        *,
        interval: float,
        timeout: float,
        row: memoryview[int],
        mark: Mark | None = None,
    ) -> None:
        self.lock = TryLock()
        self.interval = interval
        self.early = interval * _EARLY
        self.timeout = timeout
        self.row = row
        self.mark: Mark = make_mark() if mark is None else mark
        #: The rest of a beat that was sent in part.
        self.pending = b""
        #: The times of the owner's last write, and for which the last beat was due
        #: (``time.monotonic``).
        self.written: float = monotonic()
        self.beaten: float = self.written
        #: The moment when a beat or the goodbye was last sent, or not taken as bytes of ours fill
        #: the buffer.
        self.tried: float = self.written
        #: True while the native thread holds the lock.
        self.beating = False
        #: True while a writer waits for a beat to end: no other one is to come before him.
        self.wanted = False
        #: A write was interrupted, perhaps in the middle of a frame: nothing may be put after it.
        self.stopped = False
        #: Sending showed that the peer is gone.
        self.dead = False
        self.closed = False
        #: Its place in a pool that keeps it for a limited time, once it has lain in one.
        self.pooled: Pooled | None = None
        #: A goodbye was said, as that time was over.
        self.expired = False
        #: The broker has answered the goodbye, or had enough time.
        self.hung_up = False
        self.sock: _socket.socket = plain_socket(os.dup(fd))

    def beat(self, now: float) -> float | None:
        """Send a beat, unless bytes were sent within the interval; in the native thread only.

        It waits for nobody, logs nothing and raises nothing. The next one is due an interval after
        this one *was*, so that being late does not add up.

        :returns: the moment to call again (``time.monotonic``); ``None`` if never
        """
        lock = self.lock
        if self.wanted or not lock.acquire():
            # Somebody is writing at this moment, or about to.
            self.row[FLOWING] += 1
            return now + self.interval
        self.beating = True
        try:
            if self.stopped or self.dead or self.closed:
                return None
            if self.expired:
                if self._waits_for_answer(now):
                    return now + min(self.interval, LOOK)
                self._hang_up()
                return None
            if self.pooled is not None and self.pooled.claim(now - self.interval):
                self._expire()
                self.tried = monotonic()
                return now + min(self.interval, LOOK)
            due = max(self.written, self.beaten) + self.interval
            if due - self.early > now and not self.pending:
                self.row[FLOWING] += 1
                return due
            return self._send(now, due if now - self.interval < due < now else now)
        finally:
            self.beating = False
            lock.give(None)
            if self.closed:
                self.close()

    def _send(self, now: float, due: float) -> float | None:
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
            self.beaten = due
            self.row[BEATS] += 1
        self.tried = now
        return due + self.interval

    def _expire(self) -> None:
        """Say goodbye on a connection that has lain in its pool for too long."""
        self.expired = True
        try:
            self._say_goodbye()
        except OSError:
            pass  # it is down already
        self.row[EXPIRED] += 1
        self.row[CONNECTIONS] -= 1

    def _waits_for_answer(self, now: float) -> bool:
        """Return whether the broker has not answered the goodbye yet, and may still."""
        state = self.state()
        passed = now - self.tried
        if state is None or not state.established or passed >= ANSWER:
            return False
        if passed < LOOK / 2 or state.silent_data >= passed:
            return True
        return not self._is_answered(state)

    def _is_answered(self, state: State) -> bool:
        """Return whether what came since the goodbye is its answer: it may be heartbeats, too."""
        try:
            unread = self.sock.recv(_UNREAD, _FLAGS | socket.MSG_PEEK) if state.unread else b""
        except OSError:
            return False
        # What its owner has read is not known; nothing comes after the answer.
        return unread.endswith(_CLOSE_OK) if unread else state.silent_data >= LOOK

    def _hang_up(self) -> None:
        """End it, after the broker could answer the goodbye; it is left to be closed."""
        self.hung_up = True
        try:
            # More may still come in: shut for reading as well, it would be answered by RST.
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is down already

    def _say_goodbye(self) -> None:
        self.sock.send(self.pending + GOODBYE, _FLAGS)

    def is_beaten(self, now: float) -> bool:
        """Return whether bytes went out lately enough for nobody else to have to send any."""
        return now < max(self.written, self.tried) + self.interval * (1 + _SLACK)

    def stop(self) -> None:
        """Never beat again: a write was interrupted. The holder of the lock calls it."""
        if not self.stopped:
            self.stopped = True
            if not self.closed and not self.dead and not self.expired:
                self.row[STOPPED] += 1

    def state(self) -> State | None:
        """Return the kernel's state of the connection; ``None`` if it is not TCP."""
        return look_at(self.sock)

    def silent(self, state: State) -> bool:
        """Return whether the peer has missed two heartbeats although it could have sent them."""
        return state.room and state.silent_data > 2 * self.timeout

    def close(self) -> None:
        """Stop beating and give back what it holds; as often as wanted, in any thread."""
        self.closed = True
        if self.inherited():
            # The lock may be held by a thread that does not exist in this process.
            self._shut()
            return
        # A beat that has begun takes microseconds. A writer may take longer: he closes it himself.
        looks = 0
        while not self.lock.acquire():
            if not self.beating or looks == _LOOKS:
                return
            looks += 1
            sleep(_BEAT)
        try:
            self._shut()
        finally:
            self.lock.give(None)

    def inherited(self) -> bool:
        """Return whether another process made the connection, from which this one was forked."""
        return not self.mark[0]

    def _shut(self) -> None:
        """Close the duplicate; only where nobody sends."""
        self.sock.close()
