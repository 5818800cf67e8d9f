"""The LDAP servers of a pool: which one is asked next, and which ones are left alone.

Each server has a breaker (``breaker.py``). Who needs a connection gets one to a server that is up,
and pays at most once for finding out that one is down; whether it is up again is asked in the
background. In the log a server that goes down is one line, with the reason and when it is tried
next, and one that is back is another, with how long it was down.
"""

from __future__ import annotations

import logging
import os
import random as random_module
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    OptionError,
)

from .breaker import Attempt, Breaker, State
from .protocol.addresses import Address, Addresses, Resolve, look_up
from .protocol.urls import ServerURL

LOG = logging.getLogger(__name__)

#: Seconds over which a server that is back catches up with the others, where load is balanced.
SLOW_START_SECONDS = 30.0
# A server that had less time than this, because its caller had no more, is not blamed for it.
_FAIR_SECONDS = 0.25

C = TypeVar("C")


@dataclass(frozen=True)
class ServerState:
    """What is known of a server.

    :param failures: since it was last up
    :param last_error: why it failed last; kept when it is up again
    :param connections: open ones, and those being opened
    :param retry_in: seconds until it is tried again; ``None`` if it is up or being tried
    """

    url: ServerURL
    state: State
    failures: int
    last_error: str | None
    connections: int
    retry_in: float | None


class _Server:
    __slots__ = ("addresses", "breaker", "connections", "url")

    def __init__(self, url: ServerURL, addresses: Addresses, breaker: Breaker) -> None:
        self.url = url
        self.addresses = addresses
        self.breaker = breaker
        self.connections = 0


class ServerSet:
    """The servers of a pool, for all its threads. It has no threads and no connections itself.

    No lock is held while a server, the resolver or the log is waited for.

    :param urls: at least one; one given twice counts once
    :param strategy: ``ordered``: the first one that is up, in the order given; ``balanced``: the
        one of those that are up with the fewest connections of this set
    :param connect_timeout: seconds for a server to be connected to, all its addresses, their
        lookup and TLS included; above 0
    :param retry_delay: seconds until a server that went down is tried again; above 0
    :param max_retry_delay: seconds, the most that this doubles to
    :param jitter: 0 to below 1, of the delay, up or down
    :param clock: seconds that never go back
    :param resolve: from a name and a port to addresses, as :func:`.addresses.look_up`
    :param random: for jitter and ties
    :raises OptionError: one is out of its range
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
        random: random_module.Random | None = None,
    ) -> None:
        if not urls:
            raise OptionError("urls", "", "at least one LDAP URL")
        if strategy not in ("ordered", "balanced"):
            raise OptionError("strategy", strategy, "ordered or balanced")
        for name, value in (("connect_timeout", connect_timeout), ("retry_delay", retry_delay)):
            if not 0 < value < float("inf"):
                raise OptionError(name, value, "a number of seconds above 0")
        if not retry_delay <= max_retry_delay < float("inf"):
            raise OptionError("max_retry_delay", max_retry_delay, f"{retry_delay:g} s or more")
        if not 0 <= jitter < 1:
            raise OptionError("jitter", jitter, "0 to below 1")
        self._balanced = strategy == "balanced"
        self._connect_timeout = connect_timeout
        self._retry_delay = retry_delay
        self._clock = clock or (lambda: time.monotonic())
        self._random = random or random_module.Random()
        self._changed = threading.Condition(threading.Lock())
        self._servers = [
            _Server(
                url,
                Addresses(url, resolve=resolve, clock=self._clock),
                Breaker(
                    retry_delay=retry_delay,
                    max_retry_delay=max_retry_delay,
                    jitter=jitter,
                    clock=self._clock,
                    random=self._random,
                ),
            )
            for url in dict.fromkeys(urls)
        ]
        self._by_url = {server.url: server for server in self._servers}
        _all.add(self)

    def open(
        self, connect: Callable[[ServerURL, Address, float], C], timeout: float | None = None
    ) -> C:
        """Return what ``connect`` returns for the first server with which it does not fail.

        Servers that are up come first. Only if there is none is one tried that is down, if its
        time has come and nobody else is trying it; and if there is none of these either, it fails
        at once. In the moment in which the last server is lost the others are due, if they failed
        ``retry_delay`` ago or more, and who finds one of them being tried waits for the outcome.

        What ``connect`` returns counts as a connection to that server until :meth:`released`.

        :param connect: given a URL, one of its addresses and the seconds it may take. It should
            wait for an answer of LDAP: a stopped server still accepts TCP connections
        :param timeout: seconds for all servers together; less than ``connect_timeout`` for each
            is shared among those that are up
        :raises DirectoryUnavailableError: no server; names each, why, and when it is tried next
        :raises DirectoryTimeoutError: the same, and there was no time to try them all
        :raises DirectoryAnswerError: of ``connect``: the server answered, and refused
        """
        deadline = None if timeout is None else self._clock() + timeout
        tried: list[_Server] = []
        kinds: list[type[DirectoryError]] = []
        reasons: dict[ServerURL, str] = {}
        while (chosen := self._choose(tried, deadline)) is not None:
            server, attempt, seconds = chosen
            tried.append(server)
            try:
                return self._reach(server, attempt, connect, seconds)
            except DirectoryUnavailableError as error:
                self.released(server.url)
                kinds.append(type(error))
                reasons[server.url] = _reason(server, error)
            except BaseException:
                self.released(server.url)
                raise
        raise self._unavailable(kinds, reasons, deadline)

    def released(self, url: ServerURL) -> None:
        """Take in that a connection that :meth:`open` returned is closed."""
        server = self._by_url[url]
        with self._changed:
            server.connections = max(server.connections - 1, 0)

    def failed(self, url: ServerURL, error: DirectoryError, *, since: float | None = None) -> None:
        """Take in that an operation on a connection failed for a reason that concerns the server.

        That is: it got no answer in time, or none that is LDAP, or "busy" or "unavailable". Not:
        the connection was found closed, as servers do with idle ones; whether such a server is
        down shows when it is connected to next. A refusal is an answer and counts as none of it.

        :param since: when the operation began, by the clock, so that one that began before an
            outage which has ended is not taken for a new one
        """
        if isinstance(error, DirectoryAnswerError):
            return
        server = self._by_url[url]
        reason = _reason(server, error)
        self._take(server, reason, lambda: server.breaker.lost(reason, since))

    def succeeded(self, url: ServerURL) -> None:
        """Take in that an operation on a connection got an answer; costs nothing if all is well.

        A server that is down is not up by this, but need not wait long for its next probe.
        """
        server = self._by_url[url]
        if server.breaker.is_up:
            return
        with self._changed:
            server.breaker.answered()

    def preferred(self, url: ServerURL) -> bool:
        """Whether connections to this server should be kept.

        Not if it is down or, where order counts, an earlier one is up; unless none is up at all.
        Takes no lock.
        """
        up = [server.url for server in self._servers if server.breaker.is_up]
        if self._balanced:
            return not up or url in up
        return not up or url == up[0]

    def check(self, probe: Callable[[ServerURL, Address, float], None]) -> None:
        """Probe each server that is down and due, one after the other; for a background worker.

        Servers that are up are left alone: the operations tell of them.

        :param probe: as ``connect`` of :meth:`open`, leaving nothing open
        """
        for server in self._servers:
            with self._changed:
                attempt = None if server.breaker.is_up else server.breaker.attempt()
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
            down = [server.breaker for server in self._servers if not server.breaker.is_up]
            times = [breaker.retry_in for breaker in down]
        return min((self._retry_delay if x is None else x for x in times), default=None)

    def states(self) -> list[ServerState]:
        """Return what is known of each server, in the order given."""
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
        self._changed = threading.Condition(threading.Lock())
        self._random.seed()  # or all children would choose alike
        for server in self._servers:
            server.connections = 0
            server.breaker.after_fork()

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
                for server in [self._best(up)] if up else others:
                    attempt = server.breaker.attempt()
                    if attempt is not None:
                        server.connections += 1
                        if up and deadline is not None:
                            left = min(left, (deadline - self._clock()) / len(up))
                        return server, attempt, left
                if not any(server.breaker.is_awaited for server in others):
                    return None
                if not self._changed.wait(left):
                    return None

    def _best(self, up: list[_Server]) -> _Server:
        if not self._balanced:
            return up[0]
        loads = [self._load(server, up) for server in up]
        least = min(loads)
        ties = [server for server, load in zip(up, loads, strict=True) if load == least]
        return self._random.choice(ties)

    def _load(self, server: _Server, up: list[_Server]) -> int:
        """Return a server's connections; for one that is back, as many as another has, at first.

        It has none, and would be given every new connection until it had as many. So it has the
        share of any other, and more and more often the truth is told.
        """
        told = server.breaker.seconds_up / SLOW_START_SECONDS
        others = [other.connections for other in up if other is not server]
        if not others or self._random.random() < told:
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
        except DirectoryAnswerError:
            self._end_well(server, attempt)
            raise
        except DirectoryUnavailableError as error:
            failure = error
        except BaseException:
            self._abandon(server, attempt)
            raise
        if failure is None:
            self._end_well(server, attempt)
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
            self._take(server, reason, lambda: server.breaker.failed(attempt, reason))

    def _end_well(self, server: _Server, attempt: Attempt) -> None:
        if server.breaker.is_up:
            return  # nothing that it did not know
        with self._changed:
            lasted = server.breaker.succeeded(attempt)
            self._changed.notify_all()
        if lasted is not None:
            LOG.info("%s is back, after %.1f s", server.url.text, lasted)

    def _abandon(self, server: _Server, attempt: Attempt) -> None:
        with self._changed:
            server.breaker.abandoned(attempt)
            self._changed.notify_all()

    def _take(self, server: _Server, reason: str, failed: Callable[[], bool]) -> None:
        """Take in a failure, by a call that returns whether the server is down from now on."""
        with self._changed:
            went_down = failed()
            retry_in = server.breaker.retry_in or 0.0
            if went_down and not any(other.breaker.is_up for other in self._servers):
                # What is known of the others may be a minute old.
                for other in self._servers:
                    other.breaker.hasten()
            self._changed.notify_all()
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
        if len(states) == 1:
            kind = kinds[0] if kinds else DirectoryUnavailableError
            return (DirectoryTimeoutError if late else kind)(told[0], server=states[0].url.text)
        if late or (kinds and set(kinds) == {DirectoryTimeoutError}):
            kind, summary = DirectoryTimeoutError, "no LDAP server answered in time"
        else:
            kind, summary = DirectoryUnavailableError, "no LDAP server can be reached"
        words = [f"{state.url.text}: {text}" for state, text in zip(states, told, strict=True)]
        return kind(f"{summary}: {'; '.join(words)}")


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
