"""The questions of this process to Keystone that are under way, so that others wait for the answer.
"""

from __future__ import annotations

import os
import threading


class Flight:
    """One question that is under way."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        #: The error in place of an answer, when Keystone is away.
        self.error: Exception | None = None

    def wait(self, seconds: float) -> None:
        """Wait for the end of the question, for ``seconds`` at most."""
        self._done.wait(seconds)

    def end(self, error: Exception | None) -> None:
        """End the question, and wake those who wait for it.

        :param error: the error that says that Keystone is away, if it is
        """
        self.error = error
        self._done.set()


class Flights:
    """The questions of a process, by key. Its threads or greenlets share them; a child does not.

    :param timeout: seconds to wait for another's question, 0 or more; 0 never waits
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._flights: dict[bytes, Flight] = {}
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, key: bytes) -> Flight | None:
        """Begin a question, or wait for the same one of another request.

        :param key: the token's key
        :returns: ``None`` if the caller is to ask, and to call :meth:`end` (with a timeout of 0
            needlessly); else the other's question, for whose end this has waited: the caller looks
            at what is known now, and asks Keystone itself if that is not enough
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
        """End the question that this request began.

        :param key: the token's key
        :param error: the error that says that Keystone is away, if it is
        """
        flight = self._flights.pop(key, None)
        if flight is not None:
            flight.end(error)
