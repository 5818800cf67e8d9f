"""The background threads of a pool. They do what no caller should have to wait for.

Where ``threading`` is monkey-patched they are greenlets.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Protocol


class Employer(Protocol):
    """What a worker works for."""

    def work(self, worker: Worker) -> float | None:
        """Do all that is due; return the seconds until there is more, ``None`` if never."""
        ...


class Worker:
    """One daemon thread. It refers to its employer weakly, and ends when that is gone.

    :param employer: asked for work again and again
    :param name: of the thread
    """

    def __init__(self, employer: Employer, name: str) -> None:
        #: The process it runs in: a greenlet goes on in a forked child, where it must end.
        self.pid = os.getpid()
        #: Whether it does nothing any more, and another may take its place.
        self.ended = False
        # A lock and no condition: what wakes it may be the garbage collector, in a thread that
        # holds any lock.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._employer = weakref.ref(employer, self._gone)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Let it begin. Where no thread can be started, it has ended instead."""
        started = False
        try:
            self._thread.start()
            started = True
        except RuntimeError:
            pass  # at the process's end, or at its limit: the pool does without
        finally:
            self.ended = not started

    def ring(self) -> None:
        """Have it look for work now. Never waits."""
        if self._bell.locked():
            try:
                self._bell.release()
            except RuntimeError:
                pass  # another rang at the same instant

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until it has ended."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(min(max(timeout, 0.0), threading.TIMEOUT_MAX))

    def _gone(self, _: weakref.ref[Any]) -> None:
        self.ring()

    def _run(self) -> None:
        try:
            while True:
                employer = self._employer()
                delay = None if employer is None else employer.work(self)
                employer = None  # while it sleeps, nothing of the pool is held
                if delay is None:
                    return
                self._bell.acquire(timeout=delay)
        finally:
            self.ended = True


class Crew:
    """The workers of a pool in one process.

    :param name: of the pool, to name the threads by
    :param count: how many there are to be
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def start(self, employer: Employer) -> None:
        """Start those that are missing; costs little if none is."""
        workers = self._workers
        if len(workers) == self.count and not any(worker.ended for worker in workers):
            return
        new = []
        with self._lock:
            workers = [worker for worker in self._workers if not worker.ended]
            while len(workers) < self.count:
                worker = Worker(employer, f"keyfront-ldap-{self.name}-{len(workers) + 1}")
                workers.append(worker)
                new.append(worker)
            self._workers = workers
        try:
            while new:
                new[0].start()
                del new[0]
        finally:
            for worker in new:  # not reached, as a greenlet was killed here
                worker.ended = True

    def ring(self) -> None:
        """Wake all."""
        for worker in self._workers:
            worker.ring()

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all have ended."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.join(deadline - time.monotonic())

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers
