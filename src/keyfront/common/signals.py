"""Signals for a process that sleeps in ``select`` until one arrives."""

from __future__ import annotations

import signal
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
