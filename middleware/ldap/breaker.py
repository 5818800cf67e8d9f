"""What is known of one LDAP server, and when it may be asked again.

A breaker is closed while its server is taken for up, opens at the first failure, and lets one
attempt through when its time has come (half-open): if that succeeds the server is up, if not the
next one has to wait longer.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable
from typing import Literal

State = Literal["up", "down", "probing"]


class Attempt:
    """Leave to ask a server once; its end has to be told to the breaker that gave it."""

    __slots__ = ("began",)

    def __init__(self, began: float) -> None:
        self.began = began


class Breaker:
    """The breaker of one server. Its owner holds a lock around each call, and logs.

    A server that is up is asked by whoever wants to. One that is down is asked by one at a time,
    ``retry_delay`` seconds after it went down and then after twice as long each time.

    Only such a probe brings it up again. What else still comes from a server that is down, late
    connects and answers on older connections, does not: of a server that takes no new connections
    while it serves old ones, half of the users would wait for the next failure, again and again.

    :param retry_delay: seconds, above 0
    :param max_retry_delay: seconds, the most that doubling leads to
    :param jitter: 0 to below 1: the part by which a delay is made longer or shorter, so that many
        processes do not ask at once
    :param clock: seconds that never go back
    :param random: for the jitter
    """

    __slots__ = (
        "_clock",
        "_delay",
        "_down_since",
        "_due",
        "_failed_at",
        "_jitter",
        "_max_retry_delay",
        "_probe",
        "_random",
        "_retry_delay",
        "_up_since",
        "_urgent",
        "failures",
        "last_error",
    )

    def __init__(
        self,
        *,
        retry_delay: float,
        max_retry_delay: float,
        jitter: float,
        clock: Callable[[], float],
        random: random_module.Random,
    ) -> None:
        self._retry_delay = retry_delay
        self._max_retry_delay = max_retry_delay
        self._jitter = jitter
        self._clock = clock
        self._random = random
        #: Failures since it was last up; those that only confirm the first are not counted.
        self.failures = 0
        #: Why it failed last; kept when it is up again.
        self.last_error: str | None = None
        self._up_since = float("-inf")
        self._down_since: float | None = None
        self._failed_at = 0.0
        self._delay = 0.0
        self._due = 0.0
        self._urgent = False
        self._probe: Attempt | None = None

    @property
    def is_up(self) -> bool:
        """Whether the server is taken for up."""
        return self._down_since is None

    @property
    def state(self) -> State:
        """``up``, ``down``, or ``probing`` while one asks whether it is up again."""
        if self._down_since is None:
            return "up"
        return "down" if self._probe is None else "probing"

    @property
    def is_awaited(self) -> bool:
        """Whether the answer to a probe that runs is worth waiting for, see :meth:`hasten`."""
        return self._urgent and self._probe is not None

    @property
    def retry_in(self) -> float | None:
        """Seconds until it may be probed; ``None`` while it is up or being probed."""
        if self._down_since is None or self._probe is not None:
            return None
        return max(self._due - self._clock(), 0.0)

    @property
    def seconds_up(self) -> float:
        """How long it has been up; infinite for one that never was down, 0 for one that is."""
        return self._clock() - self._up_since if self._down_since is None else 0.0

    def attempt(self) -> Attempt | None:
        """Return leave to ask the server, or ``None`` if it is down and not to be asked now.

        If it is down this is the one probe: there is no other before its end was told.
        """
        now = self._clock()
        if self._down_since is None:
            return Attempt(now)
        if self._probe is not None or now < self._due:
            return None
        self._probe = Attempt(now)
        return self._probe

    def succeeded(self, attempt: Attempt) -> float | None:
        """Take in that a server answered.

        :return: if it is up again by this, how many seconds it was down
        """
        if attempt is not self._probe or self._down_since is None:
            return None
        now = self._clock()
        lasted = now - self._down_since
        self._probe = self._down_since = None
        self._urgent = False
        self._up_since = now
        self.failures = 0
        return lasted

    def failed(self, attempt: Attempt, reason: str) -> bool:
        """Take in that a server could not be asked; ``True`` if it is down from now on.

        :param reason: one line, without a secret
        """
        if attempt is self._probe:
            self._probe = None
            self._urgent = False
            self._fail(reason, min(self._delay * 2 or self._retry_delay, self._max_retry_delay))
            return False
        return self._open(attempt.began, reason, self._retry_delay)

    def lost(self, reason: str, since: float | None = None) -> bool:
        """Take in that a connection got no answer; ``True`` if the server is down from now on.

        A single operation may have been too much for a server that is well otherwise, so the
        first probe is due at once; but not over and over, if probes succeed and operations fail.

        :param since: when the operation began, by the clock
        """
        now = self._clock()
        steady = now - self._up_since >= self._retry_delay
        opened = self._open(now if since is None else since, reason, self._retry_delay)
        if opened and steady:
            self._delay, self._due, self._urgent = 0.0, now, True
        return opened

    def abandoned(self, attempt: Attempt) -> None:
        """Take in that an attempt ended and nothing was learnt by it."""
        if attempt is self._probe:
            self._probe = None

    def answered(self) -> None:
        """Take in that an older connection to it got an answer: it need not wait for long."""
        if self._down_since is not None:
            self._due = min(self._due, self._failed_at + self._retry_delay)

    def hasten(self) -> None:
        """Let the next probe begin at once, and have others wait for its answer, this once.

        For when the last server that was up is lost, and what is known of this one is old. It is
        not if it failed less than ``retry_delay`` ago.
        """
        now = self._clock()
        if self._down_since is not None and now - self._failed_at >= self._retry_delay:
            self._due = now
            self._urgent = True

    def after_fork(self) -> None:
        """Forget the probe of a thread that is the parent's."""
        self._probe = None

    def _open(self, began: float, reason: str, delay: float) -> bool:
        if self._down_since is not None:
            self.last_error = reason
            return False
        if began < self._up_since:
            return False  # what began before it was up again says nothing of now
        self._down_since = self._clock()
        self._fail(reason, delay)
        return True

    def _fail(self, reason: str, delay: float) -> None:
        now = self._clock()
        self.failures += 1
        self.last_error = reason
        self._failed_at = now
        self._delay = delay
        self._due = now + delay * self._random.uniform(1 - self._jitter, 1 + self._jitter)
