"""Who of this process is asking Keystone about which token, so that others wait for the answer."""

from __future__ import annotations

import os
import threading


class Flight:
    """One question that is under way."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        #: Why it brought no answer: Keystone is away.
        self.error: Exception | None = None

    def wait(self, seconds: float) -> None:
        """Wait for its end, whatever that is, or as long as this."""
        self._done.wait(seconds)

    def end(self, error: Exception | None) -> None:
        """Say that it is over."""
        self.error = error
        self._done.set()


class Flights:
    """The questions of a process, by key. Its threads or greenlets share them; a fork does not.

    :param timeout: seconds to wait for another's question; 0 never waits
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._flights: dict[bytes, Flight] = {}
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, key: bytes) -> Flight | None:
        """Begin a question, to be ended by :meth:`end`; or return that of another, having waited.

        Whoever waited looks at what is known now, and asks himself if it does not do.
        """
        if not self._timeout:
            return None
        if self._pid != os.getpid():
            # those of the parent's other threads, which end there and not here
            self._flights, self._pid = {}, os.getpid()
        mine = Flight()
        flight = self._flights.setdefault(key, mine)
        if flight is mine:
            return None
        flight.wait(self._timeout)
        return flight

    def end(self, key: bytes, error: Exception | None = None) -> None:
        """End the question that this request began."""
        flight = self._flights.pop(key, None)
        if flight is not None:
            flight.end(error)
