"""What a pool counts: by these numbers an operator sizes it."""

from __future__ import annotations


class Counts:
    """Sums since the pool was opened, or since they were last popped; times in seconds.

    They are changed under the pool's lock. ``opened - closed`` is the number of connections there
    are, if nothing was popped in between.
    """

    __slots__ = (
        "closed",
        "errors",
        "evicted",
        "expired",
        "lost",
        "open_errors",
        "opened",
        "queued",
        "requests",
        "used",
        "waited",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.queued = 0
        self.waited = 0.0
        self.errors = 0
        self.opened = 0
        self.open_errors = 0
        self.closed = 0
        self.lost = 0
        self.expired = 0
        self.evicted = 0
        self.used = 0.0

    def statistics(self) -> dict[str, int]:
        """Return them by the names that are shown, times in milliseconds."""
        return {
            "requests": self.requests,  # checkouts that were asked for
            "requests_queued": self.queued,  # of these, had to wait for another's connection
            "requests_wait_ms": round(self.waited * 1000),  # the time they waited, in all
            "requests_errors": self.errors,  # ended without a connection
            "opened": self.opened,
            "open_errors": self.open_errors,
            "closed": self.closed,  # for whatever reason, those below included
            "lost": self.lost,  # were found dead before they were lent
            "expired": self.expired,  # had reached max_lifetime
            "idle_evicted": self.evicted,  # nobody wanted them for max_idle
            "usage_ms": round(self.used * 1000),  # the time connections were lent, in all
        }
