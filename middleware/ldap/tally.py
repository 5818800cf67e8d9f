"""What a directory pool counts besides its connections."""

from __future__ import annotations

import threading

_NAMES = (
    "searches",  # by search(); each was answered or raised an error
    "searches_retried",  # of these, sent a second time, as the first connection was dead
    "searches_failed",  # of these, ended in an outage
    "logins",  # by authenticate(), whatever came of them
    "binds",  # of users, sent by these; never more than one for each
    "credentials_refused",  # logins that ended with a verdict on the user
    "logins_failed",  # that ended in an outage: nothing is known of the user
)


class Tally:
    """Sums since the pool was made, or since they were last popped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(_NAMES, 0)

    def add(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            self._sums[name] += 1

    def read(self, *, pop: bool) -> dict[str, int | float]:
        """Return all by name; with ``pop``, begin to count anew."""
        with self._lock:
            sums: dict[str, int | float] = dict(self._sums)
            if pop:
                self._sums = dict.fromkeys(_NAMES, 0)
        return sums

    def after_fork(self) -> None:
        """Begin at zero, with a lock that no thread of the parent holds."""
        self.__init__()  # type: ignore[misc]
