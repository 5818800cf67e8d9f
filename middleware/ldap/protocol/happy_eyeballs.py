"""Connects to the addresses of a name without waiting for those that do not answer (RFC 8305)."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

#: Seconds until the next address is tried beside those before it (RFC 8305 section 8).
STAGGER_SECONDS = 0.25


class Connected(tuple[Any, ...]):
    """An address with a socket that is connected to it, for whoever takes it."""

    _socket: socket.socket | None = None

    def take(self) -> socket.socket | None:
        """Return the socket, once; the caller closes it."""
        taken, self._socket = self._socket, None
        return taken

    @classmethod
    def made(cls, address: tuple[Any, ...], connected: socket.socket) -> Connected:
        """Return an address with its socket."""
        found = cls(address)
        found._socket = connected
        return found


class HappyEyeballs:
    """Connects by TCP to addresses in turn; :meth:`next` tells which ones answered.

    The next one is begun when one has failed, or after ``stagger`` seconds; none is given up before
    the end of the block, where all that nobody took is closed.

    :param addresses: results of ``socket.getaddrinfo``, in the order of preference
    :param stagger: seconds, above 0
    :ivar failed: the addresses that failed so far, with the error
    """

    def __init__(self, addresses: Sequence[tuple[Any, ...]], stagger: float) -> None:
        self.failed: list[tuple[tuple[Any, ...], OSError]] = []
        self._left = deque(addresses)
        self._stagger = stagger
        self._begin_at = 0.0
        self._trying: dict[socket.socket, tuple[Any, ...]] = {}
        self._answered: deque[tuple[tuple[Any, ...], socket.socket]] = deque()
        # Looked up here, as gevent and eventlet put one in its place that waits in a greenlet.
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> HappyEyeballs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in (*self._trying, *(found for _, found in self._answered)):
            each.close()
        self._selector.close()

    @property
    def waiting(self) -> list[tuple[Any, ...]]:
        """The addresses that are connected to, and have neither answered nor failed."""
        return list(self._trying.values())

    @property
    def unused(self) -> int:
        """The number of addresses that nobody has been told of, as neither answered nor failed."""
        return len(self._left)

    @property
    def remaining(self) -> int:
        """The number of addresses that may still answer."""
        return len(self._left) + len(self._trying) + len(self._answered)

    def next(self, seconds: float) -> Connected | None:
        """Return the next address that answered; ``None`` if none did within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self._answered:
            now = time.monotonic()
            if now >= deadline:
                return None
            if self._left and (now >= self._begin_at or not self._trying):
                self._begin(self._left.popleft())
                self._begin_at = now + self._stagger
            elif self._trying:
                until = min(deadline, self._begin_at) if self._left else deadline
                self._look(max(until - now, 0.0))
            else:
                return None
        return Connected.made(*self._answered.popleft())

    def _begin(self, address: tuple[Any, ...]) -> None:
        family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
        made: socket.socket | None = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            try:
                made.connect(address)
            except BlockingIOError:
                self._selector.register(made, selectors.EVENT_WRITE)
                self._trying[made] = address
            else:
                self._answered.append((address, made))
        except OSError as error:
            self.failed.append((address, error))
            if made is not None:
                made.close()

    def _look(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            found: Any = key.fileobj
            self._selector.unregister(found)
            address = self._trying.pop(found)
            code = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                found.close()
                self.failed.append((address, OSError(code, os.strerror(code))))
                self._begin_at = 0.0
            else:
                self._answered.append((address, found))
