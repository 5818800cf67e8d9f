"""Signals for a process that sleeps in ``select`` until one arrives, and for one that they end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def taken(
    numbers: Iterable[signal.Signals], note: Callable[[int, object], None], wake: int
) -> Iterator[None]:
    """Take signals while the block runs; afterwards they are as before.

    :param note: called with the number of each
    :param wake: the writing end of a pipe that does not block; each signal writes a byte into it
    """
    before = {number: signal.signal(number, note) for number in numbers}
    wakeup = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Hold signals back until the ``with`` block is over.

    A handler that raises does so between any two steps: what was begun in the one is not known yet
    to who would have ended it in the other. Outside the main thread nothing is done: none is
    handled there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    come: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: come.append(number))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(come):
            signal.raise_signal(late)
