"""The LDAP servers of a pool: which one is asked next, and which ones are left alone.

Each server has a circuit breaker. Who needs a connection gets one to a server that is up, and pays
at most once for finding out that one is down; whether it is up again is asked in the background.
In the log a server that goes down is one line, with the reason and when it is tried next, and one
that is back is another, with how long it was down.
"""

from __future__ import annotations

import functools
import logging
import os
import random as random_module
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keyfront.common import ranges
from keyfront.common.condition import Condition
from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    OptionError,
)

from .discovery import DiscoveredServer, Discovery
from .protocol.addresses import Addresses, PassedOver, Resolve, look_up
from .protocol.srv import Resolver
from .protocol.transport import Address
from .protocol.urls import ServerURL

LOG = logging.getLogger(__name__)

#: Seconds over which a server that is back catches up with the others, where load is balanced.
SLOW_START_SECONDS = 30.0
# A server that had less time than this, because its caller had no more, is not blamed for it.
_FAIR_SECONDS = 0.25
# So many servers share the time of a caller at most: one that would answer gets a quarter of it.
_MOST_SHARES = 4

C = TypeVar("C")
State = Literal["up", "down", "probing"]


class Attempt:
    """Leave to ask a server once; its outcome has to be told to the breaker that gave it."""

    __slots__ = ("began",)

    def __init__(self, began: float) -> None:
        self.began = began


class Breaker:
    """The circuit breaker of one server. Its owner holds a lock around each call, and logs.

    It is closed while its server is taken for up, opens at the first failure, and lets one attempt
    through when its time has come (half-open): if that succeeds the server is up, if not the next
    one has to wait longer. So a server that is down is probed by one caller at a time,
    ``retry_delay`` seconds after it went down and then after twice as long each time.

    Only such a probe brings it up again. What else still comes from a server that is down, late
    connects and answers on older connections, does not: of a server that takes no new connections
    while it serves old ones, half of the users would wait for the next failure, again and again.

    What may be due to a single user, such as a login without an answer, opens nothing: the server
    is suspected, stays up, and is asked by the next one who would connect, or in the background.

    :param retry_delay: seconds from a failure to the first probe, above 0
    :param max_retry_delay: seconds, the most that doubling leads to
    :param jitter: part by which a delay is made longer or shorter, 0 to below 1, so that many
        processes do not ask at once
    :param clock: returns seconds that never go back
    :param random: makes the jitter
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
        "_suspected",
        "_up_since",
        "_urgent",
        "_well_at",
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
        #: The reason for its last failure; kept when it is up again.
        self.last_error: str | None = None
        self._up_since = float("-inf")
        self._down_since: float | None = None
        self._failed_at = 0.0
        self._delay = 0.0
        self._due = 0.0
        self._urgent = False
        self._probe: Attempt | None = None
        self._suspected = False
        # When a suspicion was last found to be none.
        self._well_at = float("-inf")

    @property
    def is_suspected(self) -> bool:
        """True if the server is up but has to be asked whether it is."""
        return self._suspected

    @property
    def is_up(self) -> bool:
        """True if the server is taken for up."""
        return self._down_since is None

    @property
    def state(self) -> State:
        """``up``, ``down``, or ``probing`` while one asks whether it is up again."""
        if self._down_since is None:
            return "up"
        return "down" if self._probe is None else "probing"

    @property
    def is_awaited(self) -> bool:
        """True if the answer to a probe that runs is worth waiting for, see :meth:`hasten`."""
        return (self._urgent or self._suspected) and self._probe is not None

    @property
    def retry_in(self) -> float | None:
        """Seconds until it may be probed; ``None`` while it is up or being probed."""
        if self._down_since is None or self._probe is not None:
            return None
        return max(self._due - self._clock(), 0.0)

    @property
    def seconds_up(self) -> float:
        """Seconds that it has been up; infinite for one that never was down, 0 for one that is."""
        return self._clock() - self._up_since if self._down_since is None else 0.0

    def attempt(self) -> Attempt | None:
        """Return leave to ask the server, or ``None`` if it is down and not to be asked now.

        If it is down, or suspected, this is the one probe: there is no other before its outcome
        was told.
        """
        now = self._clock()
        if self.is_up and not self._suspected:
            return Attempt(now)
        if self._probe is not None or (now < self._due and not self._suspected):
            return None
        self._probe = Attempt(now)
        return self._probe

    def succeeded(self, attempt: Attempt) -> float | None:
        """Note that a server answered.

        :returns: the seconds that it was down, if it is up again by this
        """
        if attempt is not self._probe:
            return None
        now = self._clock()
        self._probe = None
        if self._suspected:
            self._suspected = False
            self._well_at = now
        if self._down_since is None:
            return None
        lasted = now - self._down_since
        self._down_since = None
        self._urgent = False
        self._up_since = now
        self.failures = 0
        return lasted

    def failed(self, attempt: Attempt, reason: str) -> bool:
        """Note that a server could not be asked.

        :param reason: one line, without a secret
        :returns: true if it is down from now on
        """
        if attempt is self._probe:
            self._probe = None
            if self._suspected:
                return self._open(attempt.began, reason, self._retry_delay)
            self._urgent = False
            self._fail(reason, min(self._delay * 2 or self._retry_delay, self._max_retry_delay))
            return False
        return self._open(attempt.began, reason, self._retry_delay)

    def suspect(self) -> bool:
        """Note what speaks against the server and may be a single user's matter.

        Nothing happens if it was found well less than ``retry_delay`` ago.

        :returns: true if it is suspected from now on
        """
        if self._suspected or not self.is_up:
            return False
        self._suspected = self._clock() - self._well_at >= self._retry_delay
        return self._suspected

    def lost(self, reason: str, since: float | None = None) -> bool:
        """Note that a connection got no answer.

        A single operation may have been too much for a server that is well otherwise, so the
        first probe is due at once; but not over and over, if probes succeed and operations fail.

        :param reason: one line, without a secret
        :param since: the operation's beginning, by the clock; by default now
        :returns: true if the server is down from now on
        """
        now = self._clock()
        steady = now - self._up_since >= self._retry_delay
        opened = self._open(now if since is None else since, reason, self._retry_delay)
        if opened and steady:
            self._delay, self._due, self._urgent = 0.0, now, True
        return opened

    def abandoned(self, attempt: Attempt) -> None:
        """Note that an attempt ended and nothing was learnt by it."""
        if attempt is self._probe:
            self._probe = None

    def answered(self) -> None:
        """Note that an older connection got an answer: the next probe need not wait for long."""
        if self._down_since is not None:
            self._due = min(self._due, self._failed_at + self._retry_delay)

    def hasten(self) -> None:
        """Let the next probe begin at once, and have others wait for its answer, this once.

        It is for the moment in which the last server that was up is lost, and what is known of
        this one is old. Nothing happens if it failed less than ``retry_delay`` ago.
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
        self._suspected = False
        self._fail(reason, delay)
        return True

    def _fail(self, reason: str, delay: float) -> None:
        now = self._clock()
        self.failures += 1
        self.last_error = reason
        self._failed_at = now
        self._delay = delay
        self._due = now + delay * self._random.uniform(1 - self._jitter, 1 + self._jitter)


@dataclass(frozen=True)
class ServerState:
    """The state of a server as far as it is known.

    :ivar failures: failed attempts since it was last up
    :ivar last_error: reason of the last failure; kept when it is up again
    :ivar connections: connections that are open or being opened
    :ivar retry_in: seconds until it is tried again; ``None`` if it is up or being tried
    """

    url: ServerURL
    state: State
    failures: int
    last_error: str | None
    connections: int
    retry_in: float | None


class _Server:
    __slots__ = ("addresses", "breaker", "connections", "resolve", "share", "tier", "url")

    def __init__(
        self, url: ServerURL, addresses: Addresses, resolve: Resolve, breaker: Breaker
    ) -> None:
        self.url = url
        self.addresses = addresses
        self.resolve = resolve
        self.breaker = breaker
        self.connections = 0
        # See `.discovery.DiscoveredServer`.
        self.tier = 0
        self.share = 1.0


class ServerSet:
    """The servers of a pool, for all its threads. It has no threads and no connections itself.

    No lock is held while a server, the resolver or the log is waited for.

    Where URLs name domains that are looked up (``srv``), the servers change while it is in use. One
    that is not named any more gets no new connection; those that it has are still told of.

    :param urls: the servers, at least one; one given twice counts once
    :param strategy: ``ordered``: the first one that is up, in the order given; ``balanced``: the
        one of those that are up with the fewest connections of this set, of the first tier that
        has one up (:class:`.discovery.DiscoveredServer`)
    :param connect_timeout: seconds for a server to be connected to, all its addresses, their
        lookup, TLS and the first answer included; above 0
    :param retry_delay: seconds until a server that went down is tried again; above 0
    :param max_retry_delay: seconds, the most that this doubles to
    :param jitter: part of the delay, up or down, that is left to chance, 0 to below 1
    :param clock: returns seconds that never go back
    :param resolve: finds the addresses of a name and a port, as :func:`.addresses.look_up`
    :param resolver: looks up the servers of URLs with ``srv``, and their addresses if it is to
    :param random: decides jitter and ties
    :raises OptionError: one is out of its range
    :ivar any_down: true if a server is down; read without a lock
    """

    def __init__(
        self,
        urls: Sequence[ServerURL],
        *,
        strategy: Literal["ordered", "balanced"] = "ordered",
        connect_timeout: float = 5.0,
        retry_delay: float = 1.0,
        max_retry_delay: float = 60.0,
        jitter: float = 0.1,
        clock: Callable[[], float] | None = None,
        resolve: Resolve = look_up,
        resolver: Resolver | None = None,
        random: random_module.Random | None = None,
    ) -> None:
        if not urls:
            raise OptionError("urls", "", "at least one LDAP URL")
        ranges.one_of("strategy", strategy, "ordered", "balanced")
        ranges.finite("connect_timeout", connect_timeout)
        ranges.finite("retry_delay", retry_delay)
        if not retry_delay <= max_retry_delay < float("inf"):
            raise OptionError("max_retry_delay", max_retry_delay, f"{retry_delay:g} s or more")
        if not 0 <= jitter < 1:
            raise OptionError("jitter", jitter, "0 to below 1")
        self._balanced = strategy == "balanced"
        self._connect_timeout = connect_timeout
        self._retry_delay = retry_delay
        self._clock = clock or (lambda: time.monotonic())
        self._random = random or random_module.Random()
        self._changed = Condition()
        self._resolve = resolve
        self._resolver = resolver
        # Whose addresses are the system's to find.
        self._given = frozenset(url for url in urls if not url.srv)
        self._delays = (retry_delay, max_retry_delay, jitter)
        # Those that are named now, the preferred ones first: never changed, but replaced.
        self._servers: list[_Server] = []
        # These, and others that still have connections.
        self._by_url: dict[ServerURL, _Server] = {}
        self._discovery: Discovery | None = None
        self.any_down = False
        if any(url.srv for url in urls):
            assert resolver is not None, "URLs with srv need a resolver"
            # No lookup, nor who does it, keeps these servers.
            this = weakref.WeakMethod(self._replace)

            def changed(entries: list[DiscoveredServer]) -> None:
                if (replace := this()) is not None:
                    replace(entries)

            self._discovery = Discovery(
                urls, resolver.servers, seconds=connect_timeout, clock=self._clock,
                random=self._random, changed=changed,
            )  # fmt: skip
            self._replace(self._discovery.entries())
        else:
            self._replace([DiscoveredServer(url, 0, 1.0) for url in dict.fromkeys(urls)])
        _all.add(self)

    @property
    def discovery(self) -> Discovery | None:
        """The lookups of its servers; ``None`` if all are named by their own URLs."""
        return self._discovery

    def open(
        self, connect: Callable[[ServerURL, Address, float], C], timeout: float | None = None
    ) -> C:
        """Return the result of ``connect`` with the first server with which it does not fail.

        Servers that are up come first. Only if there is none is one tried that is down, if its
        time has come and nobody else is trying it; and if there is none of these either, it fails
        at once. In the moment in which the last server is lost the others are due, if they failed
        ``retry_delay`` ago or more, and who finds one of them being tried waits for the outcome.

        What ``connect`` returns counts as a connection to that server until :meth:`released`.

        :param connect: called with a URL, one of its addresses and the seconds it may take. It
            should wait for an answer of LDAP: a stopped server still accepts TCP connections. What
            it returns is closed by its ``close``, if it has one, where nobody is given it
        :param timeout: seconds for all servers together; less than ``connect_timeout`` for each
            is shared among those that are up
        :raises DirectoryUnavailableError: no server; names each, why, and when it is tried next;
            or none is known
        :raises DirectoryTimeoutError: the same, and there was no time to try them all
        :raises DirectoryAnswerError: raised by ``connect``: the server answered, and refused
        """
        deadline = None if timeout is None else self._clock() + timeout
        tried: list[_Server] = []
        kinds: list[type[DirectoryError]] = []
        reasons: dict[ServerURL, str] = {}
        answer: DirectoryAnswerError | None = None
        if self._discovery is not None:
            self._discovery.refresh()
            if not self._discovery.is_settled:
                self._settle(deadline)
        looked_up = self._discovery is None
        while True:
            chosen = self._choose(tried, deadline)
            if chosen is None:
                if looked_up or answer is not None:
                    break
                looked_up = True
                self._look_up(tried, deadline)
                continue
            server, attempt, seconds = chosen
            tried.append(server)
            try:
                return self._reach(server, attempt, connect, seconds)
            except DirectoryUnavailableError as error:
                self.released(server.url)
                if isinstance(error, PassedOver):
                    answer = answer or error.answer
                else:
                    kinds.append(type(error))
                reasons[server.url] = _reason(server, error)
            except BaseException:
                self.released(server.url)
                raise
        if answer is not None:
            raise answer
        raise self._unavailable(kinds, reasons, deadline)

    def released(self, url: ServerURL) -> None:
        """Note that a connection that :meth:`open` returned is closed."""
        with self._changed.surely():
            server = self._by_url.get(url)
            if server is not None:
                server.connections = max(server.connections - 1, 0)
                if not server.connections and server not in self._servers:
                    del self._by_url[url]

    def failed(self, url: ServerURL, error: DirectoryError, *, since: float | None = None) -> None:
        """Note that an operation on a connection failed for a reason that concerns the server.

        That is: it got no answer in time, or none that is LDAP, or "busy" or "unavailable". Not:
        the connection was found closed, as servers do with idle ones; whether such a server is
        down shows when it is connected to next. A refusal is an answer and counts as none of it.

        :param url: the server
        :param error: the operation's error
        :param since: the operation's beginning, by the clock, so that a failure from before an
            outage which has ended is not taken for a new one
        """
        if isinstance(error, DirectoryAnswerError):
            return
        server = self._by_url.get(url)
        if server is None:
            return
        reason = _reason(server, error)
        self._note_failure(server, reason, lambda: server.breaker.lost(reason, since))

    def suspect(self, url: ServerURL) -> bool:
        """Have a server asked because of what may be a single user's matter: it stays up.

        Whoever connects to it next asks, or :meth:`check`; others wait for that.

        :returns: true if it is suspected from now on
        """
        server = self._by_url.get(url)
        if server is None or not server.breaker.is_up:
            return False
        with self._changed.surely():
            return server in self._servers and server.breaker.suspect()

    def succeeded(self, url: ServerURL) -> None:
        """Note that an operation on a connection got an answer; costs little if all is well.

        A server that is down is not up by this, but need not wait long for its next probe.
        """
        server = self._by_url.get(url)
        if server is None or server.breaker.is_up:
            return
        with self._changed.surely():
            server.breaker.answered()

    def preferred(self, url: ServerURL) -> bool:
        """Return whether connections to this server should be kept; takes no lock.

        They should not if it is down, is not named any more or, where order counts, an earlier one
        is up; unless none is up at all.
        """
        up = [server for server in self._servers if server.breaker.is_up]
        if self._balanced:
            return not up or any(server.url == url for server in _first_tier(up))
        return not up or url == up[0].url

    def has_left(self, url: ServerURL) -> bool:
        """Return whether a server is not named any more, and another one is up instead of it.

        Takes no lock.
        """
        servers = self._servers
        return any(server.breaker.is_up for server in servers) and all(
            server.url != url for server in servers
        )

    def avoided(self) -> tuple[frozenset[ServerURL], frozenset[ServerURL]]:
        """Return the servers that are down, and those that are and should not be used: none, unless
        another one is up. Both with those that are not named any more and have connections."""
        with self._changed:
            down = frozenset(
                url for url, server in self._by_url.items() if not server.breaker.is_up
            )
            any_up = any(server.breaker.is_up for server in self._servers)
        return down, down if any_up else frozenset()

    def look_up(self, seconds: float) -> list[ServerURL]:
        """Return the URLs of the servers, the preferred ones first; where none is known, after a
        lookup.

        :param seconds: time for that
        :raises DirectoryUnavailableError: none could be found
        """
        if self._discovery is not None:
            self._discovery.refresh()
            if not self._servers:
                self._look_up([], self._clock() + seconds)
            if not self._servers:
                raise self._unavailable([], {}, None)
        return [server.url for server in self._servers]

    def addresses(self, url: ServerURL) -> list[tuple[Any, ...]]:
        """Return the addresses of a server, as connections to it look them up.

        :param url: its URL
        :raises OSError: there are none, or nobody tells
        """
        server = self._by_url.get(url)
        resolve = self._resolve if server is None else server.resolve
        return list(resolve(url.host, url.port))

    def check(self, probe: Callable[[ServerURL, Address, float], None]) -> None:
        """Probe each server that is suspected, or down and due, in turn; for a background worker.

        Other servers are left alone: the operations tell of them.

        :param probe: a function that takes the arguments of ``connect`` in :meth:`open`, and leaves
            no connection open
        """
        if self._discovery is not None:
            self._discovery.refresh()
        for server in self._servers:
            with self._changed:
                breaker = server.breaker
                asked = breaker.is_suspected or not breaker.is_up
                attempt = breaker.attempt() if asked else None
            if attempt is not None:
                try:
                    self._reach(server, attempt, probe, self._connect_timeout)
                except (DirectoryUnavailableError, DirectoryAnswerError):
                    pass  # the breaker knows, and a refusal is for those who ask for something

    def next_check(self) -> float | None:
        """Return the seconds until :meth:`check` may have something to do; ``None`` if all are up.

        Servers may go down at any time, so nobody should sleep for longer than a second or so.
        """
        with self._changed:
            breakers = [server.breaker for server in self._servers]
            times = [breaker.retry_in for breaker in breakers if not breaker.is_up]
            times += [None for breaker in breakers if breaker.is_suspected]
        return min((self._retry_delay if x is None else x for x in times), default=None)

    def lookups(self) -> tuple[int, int]:
        """Return the number of lookups of servers so far, and of those that have failed."""
        found = self._discovery
        return (0, 0) if found is None else (found.lookups, found.failures)

    def lookup_failures(self) -> list[str]:
        """Return the reasons why servers could not be looked up last, one line for each domain."""
        found = self._discovery
        return [] if found is None else [str(each) for each in found.reasons(awaited=False)]

    def next_lookup(self) -> float | None:
        """Return the seconds until :meth:`check` is to look up servers; ``None``: not before it is
        told so."""
        return None if self._discovery is None else self._discovery.next_due()

    def states(self) -> list[ServerState]:
        """Return the state of each server that is named now, the preferred ones first."""
        with self._changed:
            return [
                ServerState(
                    url=server.url,
                    state=server.breaker.state,
                    failures=server.breaker.failures,
                    last_error=server.breaker.last_error,
                    connections=server.connections,
                    retry_in=server.breaker.retry_in,
                )
                for server in self._servers
            ]

    def after_fork(self) -> None:
        """Let go of what the parent's threads hold and have; what is known of servers stays."""
        self._changed = Condition()
        self._random.seed()  # or all children would choose alike
        for server in self._by_url.values():
            server.connections = 0
            server.breaker.after_fork()
        if self._discovery is not None:
            self._replace(self._discovery.after_fork())

    def _replace(self, entries: Sequence[DiscoveredServer]) -> None:
        """Have other servers. Those that were there before stay what they were."""
        with self._changed.surely():
            before = self._by_url
            named = []
            for entry in entries:
                server = before.get(entry.url) or self._make(entry.url)
                server.tier, server.share = entry.tier, entry.share
                named.append(server)
            self._servers = named
            self._by_url = {server.url: server for server in named}
            for url, server in before.items():
                if server.connections:
                    self._by_url.setdefault(url, server)
            self._note_change()

    def _make(self, url: ServerURL) -> _Server:
        resolve, resolver = self._resolve, self._resolver
        if resolver is not None and resolver.finds_addresses and url not in self._given:
            resolve = functools.partial(resolver.addresses, seconds=self._connect_timeout)
        retry_delay, max_retry_delay, jitter = self._delays
        breaker = Breaker(
            retry_delay=retry_delay, max_retry_delay=max_retry_delay, jitter=jitter,
            clock=self._clock, random=self._random,
        )  # fmt: skip
        addresses = Addresses(url, resolve=resolve, clock=self._clock, beside=True)
        return _Server(url, addresses, resolve, breaker)

    def _settle(self, deadline: float | None) -> None:
        """Wait for the first lookup, but leave time for servers that are named otherwise."""
        assert self._discovery is not None
        seconds = self._connect_timeout
        if deadline is not None:
            left = deadline - self._clock()
            seconds = min(left / 2 if self._servers else left, seconds)
        if seconds > 0:
            self._discovery.settle(seconds)

    def _look_up(self, tried: list[_Server], deadline: float | None) -> None:
        """Have the servers looked up now, and wait until there is one that was not tried."""
        assert self._discovery is not None
        seconds = self._connect_timeout
        if deadline is not None:
            seconds = min(deadline - self._clock(), seconds)
        if seconds > 0:
            self._discovery.demand(
                lambda: any(server not in tried for server in self._servers), seconds
            )

    def _choose(
        self, tried: list[_Server], deadline: float | None
    ) -> tuple[_Server, Attempt, float] | None:
        """Return a server to try, with the seconds for it; ``None`` if there is none."""
        with self._changed:
            while True:
                left = self._connect_timeout
                if deadline is not None:
                    left = min(deadline - self._clock(), left)
                if left <= 0:
                    return None
                others = [server for server in self._servers if server not in tried]
                up = [server for server in others if server.breaker.is_up]
                # A server that is down is probed by a user only if there is no other.
                candidates = [self._best(up)] if up else others
                for server in candidates:
                    attempt = server.breaker.attempt()
                    if attempt is not None:
                        server.connections += 1
                        return server, attempt, self._share(left, up, deadline)
                if not any(server.breaker.is_awaited for server in candidates):
                    return None
                if not self._changed.wait(self._share(left, up, deadline)):
                    if not up:
                        return None
                    tried += candidates

    def _share(self, left: float, up: list[_Server], deadline: float | None) -> float:
        """Return the seconds for one server, so that some are left for the others that are up."""
        if not up or deadline is None:
            return left
        return min(left, (deadline - self._clock()) / min(len(up), _MOST_SHARES))

    def _best(self, up: list[_Server]) -> _Server:
        if not self._balanced:
            return up[0]
        up = _first_tier(up)
        loads = [float(self._load(server, up)) for server in up]
        if any(server.share != up[0].share for server in up):
            # By weight: also who has none yet is not always the heaviest.
            loads = [
                (load + self._random.random()) / server.share
                for server, load in zip(up, loads, strict=True)
            ]
        least = min(loads)
        ties = [server for server, load in zip(up, loads, strict=True) if load == least]
        return self._random.choice(ties)

    def _load(self, server: _Server, up: list[_Server]) -> int:
        """Return the number of connections by which a server is chosen.

        A server that is back has none, and would be given every new connection until it had as
        many as the others. So at first it counts as having as many as the least loaded of them,
        and ever more often, over ``SLOW_START_SECONDS``, as having what it has.
        """
        true_share = server.breaker.seconds_up / SLOW_START_SECONDS
        others = [other.connections for other in up if other is not server]
        if not others or self._random.random() < true_share:
            return server.connections
        return max(server.connections, min(others))

    def _reach(
        self,
        server: _Server,
        attempt: Attempt,
        call: Callable[[ServerURL, Address, float], C],
        seconds: float,
    ) -> C:
        failure: DirectoryUnavailableError | None = None
        try:
            result = server.addresses.reach(call, seconds)
        except (DirectoryAnswerError, PassedOver):
            self._end_well(server, attempt)
            raise
        except DirectoryUnavailableError as error:
            failure = error
        except BaseException:
            self._abandon(server, attempt)
            raise
        if failure is None:
            try:
                self._end_well(server, attempt)
            except BaseException:  # a greenlet is killed while it waits for a lock or the log
                if (close := getattr(result, "close", None)) is not None:
                    close()
                raise
            return result
        try:
            # No more in the except block, in which oslo.log would add the error to the line.
            self._end_badly(server, attempt, failure, seconds)
            raise failure
        finally:
            failure = None  # or it would hold this frame, and this frame it

    def _end_badly(
        self, server: _Server, attempt: Attempt, error: DirectoryUnavailableError, seconds: float
    ) -> None:
        fair = min(self._connect_timeout, _FAIR_SECONDS)
        if isinstance(error, DirectoryTimeoutError) and seconds < fair:
            self._abandon(server, attempt)
        else:
            reason = _reason(server, error)
            self._note_failure(server, reason, lambda: server.breaker.failed(attempt, reason))

    def _end_well(self, server: _Server, attempt: Attempt) -> None:
        if server.breaker.is_up and not server.breaker.is_suspected:
            return  # nothing that it did not know
        with self._changed.surely():
            lasted = server.breaker.succeeded(attempt)
            self._note_change()
        if lasted is not None:
            LOG.info("%s is back, after %.1f s", server.url.text, lasted)

    def _abandon(self, server: _Server, attempt: Attempt) -> None:
        with self._changed.surely():
            server.breaker.abandoned(attempt)
            self._note_change()

    def _note_change(self) -> None:
        self.any_down = not all(server.breaker.is_up for server in self._servers)
        self._changed.notify_all()

    def _note_failure(self, server: _Server, reason: str, failed: Callable[[], bool]) -> None:
        """Tell the breaker of a failure, and the log if the server is down from now on.

        :param failed: tells the breaker, and returns whether the server is down from now on
        """
        with self._changed.surely():
            went_down = failed() and server in self._servers
            retry_in = server.breaker.retry_in or 0.0
            if went_down and not any(other.breaker.is_up for other in self._servers):
                # What is known of the others may be a minute old.
                for other in self._servers:
                    other.breaker.hasten()
            self._note_change()
        if went_down:
            LOG.warning(
                "%s is down: %s; it is tried again %s",
                server.url.text,
                reason,
                _in_seconds(retry_in),
            )

    def _unavailable(
        self,
        kinds: list[type[DirectoryError]],
        reasons: dict[ServerURL, str],
        deadline: float | None,
    ) -> DirectoryError:
        late = deadline is not None and self._clock() >= deadline
        states = self.states()
        told = [_when(state, reasons.get(state.url)) for state in states]
        lookups = [] if self._discovery is None else self._discovery.reasons()
        if len(lookups) == 1 and not states:
            one = lookups[0]
            text = str(one).removeprefix(f"{one.server}: ")
            return (DirectoryTimeoutError if late else type(one))(text, server=one.server)
        if len(states) == 1 and not lookups:
            kind = kinds[0] if kinds else DirectoryUnavailableError
            return (DirectoryTimeoutError if late else kind)(told[0], server=states[0].url.text)
        kinds += [type(error) for error in lookups]
        if late or (kinds and set(kinds) == {DirectoryTimeoutError}):
            kind, summary = DirectoryTimeoutError, "no LDAP server answered in time"
        else:
            kind, summary = DirectoryUnavailableError, "no LDAP server can be reached"
        words = [f"{state.url.text}: {text}" for state, text in zip(states, told, strict=True)]
        words += [str(error) for error in lookups]
        return kind(f"{summary}: {'; '.join(words)}")


def _first_tier(up: list[_Server]) -> list[_Server]:
    least = min(server.tier for server in up)
    return [server for server in up if server.tier == least]


def _reason(server: _Server, error: DirectoryError) -> str:
    return str(error).removeprefix(f"{server.url.text}: ")


def _when(state: ServerState, reason: str | None) -> str:
    if state.state == "up":
        return reason or "not tried, no time was left"
    if state.retry_in is None:
        return f"{state.last_error}; it is being tried now"
    return f"{state.last_error}; it is tried again {_in_seconds(state.retry_in)}"


def _in_seconds(seconds: float) -> str:
    return f"in {seconds:.1f} s" if seconds > 0 else "at once"


_all: weakref.WeakSet[ServerSet] = weakref.WeakSet()


def _after_fork() -> None:
    for servers in _all:
        servers.after_fork()


os.register_at_fork(after_in_child=_after_fork)
