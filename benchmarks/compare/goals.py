"""The goals of all benchmarks: the ratios that keyfront's parts have to reach.

A ratio is taken of two cases that were measured one after the other, a pair in each round. A goal
is *met* if the median of the pairs meets it, and *missed* if no single pair does; in between, the
noise of the machine decides, and it is *unclear*. Where the true ratio lies at the goal itself,
each pair is a coin toss, so 6 rounds call it missed by mistake once in 2**6 runs; what is worse
than the goal by more than the noise is missed in every run. Only what is missed fails a build.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MET, UNCLEAR, MISSED = "met", "unclear", "missed"

HIT_MICROSECONDS = 15.0
"""A hit in the process, at most. It depends on the machine: told, but no build fails by it."""

LDAP_BIND_MICROSECONDS = 60.0
"""CPU time of the client for a BIND, at most; like the next one told only."""

LDAP_SEARCH_MICROSECONDS = 150.0
"""The same for a search that finds one entry."""


class Goal(NamedTuple):
    """A bound on a ratio of two cases of one benchmark.

    :param figure: ``rate`` (answers per second: at least), ``p99``, ``CPU``, ``BINDs`` or
        ``instructions`` (at most)
    """

    first: str
    second: str
    figure: str
    bound: float

    def __str__(self) -> str:
        return f"{'>=' if self.figure == 'rate' else '<='} {self.bound:g}"

    def judge(self, ratios: Sequence[float]) -> str:
        """Say how the goal was met, by the ratio of each pair."""
        if self._holds(statistics.median(ratios)):
            return MET
        return UNCLEAR if any(map(self._holds, ratios)) else MISSED

    def _holds(self, ratio: float) -> bool:
        return ratio >= self.bound if self.figure == "rate" else ratio <= self.bound


GOALS = (
    Goal("keyfront", "bare", "rate", 0.9),
    Goal("keyfront", "bare", "p99", 2.0),
    Goal("keyfront", "memcached", "rate", 40.0),
    Goal("keyfront miss", "keystone miss", "rate", 0.98),
    Goal("keyfront+memcached miss", "memcached miss", "rate", 0.98),
)

SERVICE_GOALS = (
    Goal("strict", "bare", "rate", 0.35),
    Goal("lease", "bare", "rate", 0.9),
    # of the service's processes: what wrk and the kernel take is more than the application alone
    Goal("lease", "memcached", "CPU", 0.1),
    # a token with a catalog to one without
    Goal("lease", "lease, no catalog", "rate", 0.9),
)
"""Of ``service_rates``."""

# By the driver alone Keystone's own work is most of a token, whatever brings the connections.
LDAP_GOALS = (
    Goal("keyfront whole, one, 10 ms", "unpooled, one, 10 ms", "rate", 5.0),
    Goal("keyfront whole, many, 10 ms", "unpooled, many, 10 ms", "rate", 5.0),
    Goal("keyfront whole, one, 10 ms", "ldappool, one, 10 ms", "rate", 2.0),
    Goal("keyfront whole, many, 10 ms", "ldappool, many, 10 ms", "rate", 2.0),
    Goal("keyfront, many, 0 ms", "ldappool, many, 0 ms", "rate", 1.0),
    Goal("keyfront, many, 1 ms", "ldappool, many, 1 ms", "rate", 1.0),
    Goal("keyfront, many, 10 ms", "ldappool, many, 10 ms", "rate", 1.0),
    # the drivers alone: whole tokens are bounded by what Keystone computes for each, see the report
    Goal(
        "keyfront gevent driver, many, 50 ms", "ldappool gevent driver, many, 50 ms", "rate", 10.0
    ),
)
"""Of ``ldap_logins``."""

ONE_BIND = Goal("keyfront", "logins", "BINDs", 1.0)
"""Of the same, and exact: never more, never fewer, for any user."""

LDAPS_CONNECT = Goal("keyfront", "python-ldap", "CPU", 2.0)
"""Of ``ldap_operations``, to connect by LDAPS."""


HEARTBEAT_GOALS = tuple(
    Goal(f"kept, {way}, {patch}", f"stock, {way}, {patch}", "instructions", bound)
    for way, bound in (("cast", 1.01), ("own", 1.01), ("shared", 1.05))
    for patch in ("none", "eventlet", "gevent")
    # py-amqp itself cannot do this under plain threads
    if (way, patch) != ("shared", "none")
)
"""Of ``heartbeat instructions``: those of a message."""

HEARTBEAT_PERCENT = 0.1
"""Of ``heartbeat idle``: the most that the thread takes of a core, for 300 idle connections."""


_ALL = {
    goal[:3]: goal
    for goal in (*GOALS, *SERVICE_GOALS, *LDAP_GOALS, LDAPS_CONNECT, *HEARTBEAT_GOALS)
}


def find(first: str, second: str, figure: str) -> Goal | None:
    """Return the goal for a figure of two cases, if there is one."""
    return _ALL.get((first, second, figure))
