"""A thread that calls a method at intervals, such as one that asks a server for news."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from keyfront.errors import CoordinatorError


class Poller:
    """A thread that calls a method again and again as long as the method's object lives.

    Where green threads are in use it is one of them; where none runs between requests it does
    nothing.

    :param poll: a bound method; its :exc:`CoordinatorError` is ignored
    :param interval: seconds between two calls, above 0
    :param name: the name of the thread
    """

    def __init__(self, poll: Callable[[], None], interval: float, *, name: str) -> None:
        self._name = name
        self._poll = weakref.WeakMethod(poll)
        self._interval = interval
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread unless it runs."""
        thread = self._thread
        if (thread is not None and thread.is_alive()) or self._stop.is_set():
            return
        if not self._lock.acquire(blocking=False):
            return  # another one is just starting it
        try:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with suppress(RuntimeError):  # no more threads are to be had
                    thread.start()
                    self._thread = thread
        finally:
            self._lock.release()

    def stop(self) -> None:
        """End the thread at its next turn."""
        self._stop.set()

    def after_fork(self) -> None:
        """Drop the parent's thread, which does not run here."""
        self._lock = threading.Lock()
        self._thread = None
        stopped = self._stop.is_set()
        self._stop = threading.Event()
        if stopped:
            self._stop.set()

    def _run(self) -> None:
        stop = self._stop
        while not stop.wait(self._interval):
            poll = self._poll()
            if poll is None:
                return
            with suppress(CoordinatorError):
                poll()
            del poll
