"""Waits for something to read."""

from __future__ import annotations

import select


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether there is something to read, or its end.

    :param descriptor: a file descriptor, also one that is too large for ``select()``
    :param seconds: how long to wait for it, 0 or more
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
