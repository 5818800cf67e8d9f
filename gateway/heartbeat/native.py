"""Primitives of the interpreter itself, whatever has been monkey-patched, and whenever
(:mod:`keyfront.common.interpreter`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from keyfront.common import interpreter
from keyfront.common.process import Mark as Mark
from keyfront.common.process import mark as mark


class Lock(Protocol):
    """A lock of the interpreter (``_thread.lock``)."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def locked(self) -> bool: ...


class TryLock:
    """A lock that is tried and never waited for, at a fifth of what the interpreter's locks cost.

    Taking the one element out of a list, and putting it back, are single steps of the interpreter.

    :ivar take: takes the lock; raises ``IndexError`` while somebody has it
    :ivar give: gives it back: ``give(None)``
    """

    __slots__ = ("give", "take")

    def __init__(self) -> None:
        free = [None]
        self.take: Callable[[], None] = free.pop
        self.give: Callable[[None], None] = free.append

    def acquire(self) -> bool:
        """Take the lock; tells whether nobody had it."""
        try:
            self.take()
        except IndexError:
            return False
        return True


_time = interpreter.fresh("time")

#: ``_thread.allocate_lock`` of the interpreter.
allocate_lock = interpreter.allocate_lock
#: ``_thread.start_new_thread`` of the interpreter: never joined, not even at exit.
start_new_thread = interpreter.start_new_thread
#: ``time.sleep`` of the interpreter: it gives the interpreter lock to others, and no hub a turn.
sleep = _time.sleep
#: ``time.monotonic``, which nothing patches; here so that a beat goes through no patched module.
monotonic = _time.monotonic
#: ``select.poll`` of the interpreter.
poll = interpreter.fresh("select").poll
