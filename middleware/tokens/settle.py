"""Which changes a database has shown by now that may be behind its primary by so many seconds.

An answer is kept with the number of the last change that was complete when it was asked for
(``epochs.py``): it is made of what every change up to that one has left. Of a replica that may be
three seconds behind, that is true of the last change that was complete three seconds before. So an
answer is kept with the number of that one: what has changed since, in a slot that it depends on,
is newer, and the answer does not stand, however late it is stored.

Nothing has to be done at the end of those seconds, nor by the process that made the change.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from .epochs import Epoch

# How many moments are remembered; a change settles later by this part of the time at most.
_MOMENTS = 64


class Settling:
    """Remembers when this process saw which change complete.

    :param seconds: by how much the database may be behind; 0: it is not
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._generation = 0
        # When a number was first seen, the newest last; and the last one that was seen.
        self._seen: deque[tuple[float, int]] = deque()
        self._last = (0.0, 0)
        self._settled = -1

    def settled(self, epoch: Epoch) -> Epoch:
        """Return the epoch of a read that begins now.

        :param epoch: the present one. What it returns may have number -1, which finds nothing
            fresh: in a generation that this process has not yet seen for so long
        """
        if not self._seconds:
            return epoch
        with self._lock:
            now = time.monotonic()  # no earlier than when the epoch was read
            if epoch.generation != self._generation:
                self._generation = epoch.generation
                self._seen.clear()
                self._last = (now, epoch.sequence)
                self._settled = -1
            elif epoch.sequence > self._last[1]:
                far = self._last[0] - self._seen[-1][0] if self._seen else self._seconds
                if far >= self._seconds / _MOMENTS:
                    self._seen.append(self._last)
                self._last = (now, epoch.sequence)
            before = now - self._seconds
            while self._seen and self._seen[0][0] <= before:
                self._settled = self._seen.popleft()[1]
            if self._last[0] <= before:
                self._settled = self._last[1]
            return Epoch(epoch.generation, self._settled)
