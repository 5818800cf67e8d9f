"""The servers of a pool: which one is asked, what an outage costs, and what is said of it.

The network is made up and mostly has no time of its own: a black hole moves the clock on by the
seconds that it was given. Where threads meet, they meet at events.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    OptionError,
    Verdict,
)
from keyfront.middleware.ldap import servers as module
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.servers import SLOW_START_SECONDS, ServerSet
from support.clocks import Clock
from support.served import PATIENCE

# Numeric hosts: their lookup needs no thread.
A, B, C = (ServerURL.parse(f"ldap://192.0.2.{number}") for number in (1, 2, 3))
LOGGER = "keyfront.middleware.ldap.servers"


class Network:
    """What happens at each server: it answers, or raises what the test put there.

    :param clock: moved on by a black hole
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.outcomes: dict[ServerURL, Exception] = {}
        self.calls: list[ServerURL] = []
        self.seconds: list[float] = []

    def connect(self, url: ServerURL, address: Any, seconds: float) -> ServerURL:
        self.calls.append(url)
        self.seconds.append(seconds)
        outcome = self.outcomes.get(url)
        if outcome is None:
            return url
        if isinstance(outcome, TimeoutError):
            self.clock.later(seconds)
        raise outcome

    def probe(self, url: ServerURL, address: Any, seconds: float) -> None:
        self.connect(url, address, seconds)

    def asked(self) -> list[ServerURL]:
        """Who was asked since this was last called."""
        calls, self.calls = self.calls, []
        return calls


def refused() -> Exception:
    return ConnectionRefusedError(111, "Connection refused")


def hole() -> Exception:
    return TimeoutError("timed out")


def numeric(host: str, port: int) -> list[Any]:
    return [(host, port)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def network(clock: Clock) -> Network:
    return Network(clock)


def make(clock: Any, *urls: ServerURL, **options: Any) -> ServerSet:
    given: dict[str, Any] = {
        "connect_timeout": 1.0,
        "jitter": 0.0,
        "clock": clock.monotonic,
        "resolve": numeric,
        "random": random.Random(1),
    }
    return ServerSet(urls or (A, B), **{**given, **options})


def waiting(servers: ServerSet) -> int:
    """How many threads wait for a probe that another one makes."""
    return len(servers._changed._waiters)


def wait_for_waiting(servers: ServerSet, number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while waiting(servers) < number:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def state(servers: ServerSet, url: ServerURL) -> str:
    return next(found.state for found in servers.states() if found.url == url)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "random"}, "strategy = random: must be one of ordered, balanced"),
        ({"connect_timeout": 0}, "connect_timeout = 0: must be a number of seconds above 0"),
        ({"connect_timeout": float("inf")}, "connect_timeout = inf"),
        ({"connect_timeout": float("nan")}, "connect_timeout = nan"),
        ({"retry_delay": -1}, "retry_delay = -1: must be a number of seconds above 0"),
        ({"retry_delay": 5, "max_retry_delay": 4}, "max_retry_delay = 4: must be 5 s or more"),
        ({"max_retry_delay": float("inf")}, "max_retry_delay = inf"),
        ({"jitter": 1}, "jitter = 1: must be 0 to below 1"),
        ({"jitter": -0.1}, "jitter = -0.1: must be 0 to below 1"),
    ],
)
def test_what_is_out_of_range(clock: Clock, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(clock, **options)


def test_no_server_is_no_set() -> None:
    with pytest.raises(OptionError, match="at least one"):
        ServerSet([])


def test_one_given_twice_counts_once(clock: Clock) -> None:
    assert [found.url for found in make(clock, A, B, A).states()] == [A, B]


def test_its_own_clock_and_dice() -> None:
    servers = ServerSet([A, B], resolve=numeric)
    url, address, seconds = servers.open(lambda *arguments: arguments)
    assert (url, address) == (A, ("192.0.2.1", 389))
    assert 4 < seconds <= 5.0


# In order


def test_the_first_that_is_up(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C)
    assert servers.open(network.connect) == A
    network.outcomes[A] = refused()
    assert servers.open(network.connect) == B
    assert network.asked() == [A, A, B]
    assert servers.open(network.connect) == B
    assert network.asked() == [B]


def test_a_black_hole_costs_one_timeout_once(clock: Clock, network: Network) -> None:
    """Not even when it may be probed again is it a user who pays, nor is it for the background."""
    servers = make(clock)
    network.outcomes[A] = hole()
    costs = []
    for _ in range(100):
        began = clock.monotonic()
        assert servers.open(network.connect) == B
        costs.append(clock.monotonic() - began)
        clock.later(10)
    assert costs[0] == pytest.approx(1.0)
    assert costs[1:] == [0.0] * 99
    assert network.asked().count(A) == 1


def test_it_is_probed_in_the_background(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = refused()
    assert servers.next_check() is None
    servers.open(network.connect)
    assert servers.next_check() == pytest.approx(1.0)
    network.asked()
    servers.check(network.probe)
    assert network.asked() == []
    clock.later(1.1)
    assert servers.next_check() == 0.0
    servers.check(network.probe)
    assert network.asked() == [A]
    assert servers.next_check() == pytest.approx(2.0)
    assert servers.open(network.connect) == B
    clock.later(2.1)
    network.outcomes.clear()
    servers.check(network.probe)
    assert servers.next_check() is None
    assert network.asked() == [B, A]
    assert servers.open(network.connect) == A


def test_only_servers_that_are_down_are_probed(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C)
    network.outcomes = {A: refused(), B: refused()}
    servers.open(network.connect)
    network.asked()
    clock.later(1.1)
    servers.check(network.probe)
    assert network.asked() == [A, B]
    assert network.seconds[-1] == 1.0


def test_a_probe_that_is_refused_shows_a_server(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    clock.later(1.1)
    network.outcomes[A] = CredentialsError(Verdict.WRONG_PASSWORD)
    servers.check(network.probe)
    assert state(servers, A) == "up"


def test_a_probe_with_a_fault_of_its_own_is_none(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    clock.later(1.1)
    network.outcomes[A] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        servers.check(network.probe)
    (found, _) = servers.states()
    assert (found.state, found.failures, found.retry_in) == ("down", 1, 0.0)


def test_fail_back(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C)
    assert [servers.preferred(url) for url in (A, B, C)] == [True, False, False]
    network.outcomes = {A: refused()}
    servers.open(network.connect)
    assert [servers.preferred(url) for url in (A, B, C)] == [False, True, False]
    network.outcomes = {A: refused(), B: refused()}
    servers.open(network.connect)
    assert [servers.preferred(url) for url in (A, B, C)] == [False, False, True]
    network.outcomes = {A: refused(), B: refused(), C: refused()}
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    # With none up, what is left of connections is all there is.
    assert [servers.preferred(url) for url in (A, B, C)] == [True, True, True]
    clock.later(3)
    network.outcomes.clear()
    servers.check(network.probe)
    assert [servers.preferred(url) for url in (A, B, C)] == [True, False, False]


# All of them down


def test_with_all_down_it_fails_at_once_and_tells(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes = {A: refused(), B: DirectoryTLSError("not trusted", server=B.text)}
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    assert network.asked() == [A, B]
    clock.later(0.5)
    with pytest.raises(DirectoryUnavailableError) as caught:
        servers.open(network.connect)
    assert network.asked() == []
    assert str(caught.value) == (
        "no LDAP server can be reached: "
        "ldap://192.0.2.1:389: Connection refused; it is tried again in 0.5 s; "
        "ldap://192.0.2.2:389: not trusted; it is tried again in 0.5 s"
    )
    assert caught.value.server is None
    assert caught.value.__context__ is None


def test_with_all_down_a_user_is_the_probe(clock: Clock, network: Network) -> None:
    servers = make(clock, A)
    network.outcomes[A] = refused()
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    clock.later(1.1)
    network.outcomes.clear()
    assert servers.open(network.connect) == A
    assert state(servers, A) == "up"


def test_with_all_timed_out_it_is_a_timeout(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes = {A: hole(), B: hole()}
    with pytest.raises(DirectoryTimeoutError, match="no LDAP server answered in time: ldap:"):
        servers.open(network.connect)


def test_one_server_is_told_of_as_itself(clock: Clock, network: Network) -> None:
    servers = make(clock, A)
    network.outcomes[A] = DirectoryTLSError("certificate has expired", server=A.text)
    with pytest.raises(DirectoryTLSError) as caught:
        servers.open(network.connect)
    assert caught.value.server == A.text
    assert str(caught.value) == (
        "ldap://192.0.2.1:389: certificate has expired; it is tried again in 1.0 s"
    )


def test_when_the_last_one_is_lost_the_others_are_asked_again(
    clock: Clock, network: Network
) -> None:
    """What is known of them may be a minute old."""
    servers = make(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    for _ in range(8):
        clock.later(100)
        servers.check(network.probe)
    assert servers.next_check() == 60.0
    network.outcomes = {B: hole()}
    network.asked()
    assert servers.open(network.connect) == A
    assert network.asked() == [B, A]
    assert state(servers, A) == "up"


def test_the_same_when_it_is_lost_by_an_operation(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    for _ in range(8):
        clock.later(100)
        servers.check(network.probe)
    clock.later(2)
    network.outcomes = {B: hole()}
    servers.failed(B, DirectoryTimeoutError("no answer", server=B.text))
    assert servers.open(network.connect) == A


def test_with_all_down_they_are_probed_less_and_less(clock: Clock, network: Network) -> None:
    """Users who keep asking do not change that, nor do old connections that end one by one."""
    servers = make(clock)
    network.outcomes = {A: refused(), B: refused()}
    for _ in range(2000):
        with pytest.raises(DirectoryUnavailableError):
            servers.open(network.connect)
        servers.failed(A, DirectoryTimeoutError("no answer", server=A.text))
        clock.later(0.5)
    found = collections.Counter(network.asked())
    assert found[A] <= 1 + 6 + 1000 // 60
    assert found[B] <= 1 + 6 + 1000 // 60


# Answers and errors


def test_a_refusal_is_an_answer(clock: Clock, network: Network) -> None:
    servers = make(clock)
    refusal = CredentialsError(Verdict.WRONG_PASSWORD, server=A.text)
    network.outcomes[A] = refusal
    for _ in range(3):
        with pytest.raises(CredentialsError) as caught:
            servers.open(network.connect)
        assert caught.value is refusal
    assert network.asked() == [A] * 3
    assert [found.state for found in servers.states()] == ["up", "up"]
    assert [found.connections for found in servers.states()] == [0, 0]


def test_a_refusal_of_a_users_probe(clock: Clock, network: Network) -> None:
    servers = make(clock, A)
    network.outcomes[A] = refused()
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    clock.later(1.1)
    network.outcomes[A] = DirectoryAnswerError(53, "unwillingToPerform")
    with pytest.raises(DirectoryAnswerError):
        servers.open(network.connect)
    assert state(servers, A) == "up"


@pytest.mark.parametrize(
    "error",
    [
        refused(),
        hole(),
        DirectoryTLSError("x", server=A.text),
        DirectoryProtocolError("x", server=A.text),
        DirectoryTimeoutError("x", server=A.text),
        DirectoryUnavailableError("x", server=A.text),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_kind_of_outage_opens_it(clock: Clock, network: Network, error: Exception) -> None:
    servers = make(clock)
    network.outcomes[A] = error
    assert servers.open(network.connect) == B
    assert state(servers, A) == "down"


def test_an_error_of_ours_is_none_of_the_servers(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        servers.open(network.connect)
    assert [(found.state, found.connections) for found in servers.states()] == [("up", 0)] * 2


def test_a_users_probe_that_is_killed_leaves_it_to_others(clock: Clock, network: Network) -> None:
    """As gevent kills a greenlet."""
    servers = make(clock, A)
    network.outcomes[A] = refused()
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    clock.later(1.1)

    def killed(*arguments: Any) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        servers.open(killed)
    network.outcomes.clear()
    assert servers.open(network.connect) == A


def test_a_resolver_that_fails_is_an_outage(clock: Clock, network: Network) -> None:
    named = ServerURL.parse("ldap://ldap.example.org")

    def resolve(host: str, port: int) -> list[Any]:
        if host == "ldap.example.org":
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(host, port)]

    servers = make(clock, named, B, resolve=resolve)
    assert servers.open(network.connect) == B
    (found, _) = servers.states()
    assert found.last_error == (
        "the lookup of ldap.example.org failed: Temporary failure in name resolution"
    )


# The time a caller has


def test_a_callers_time_is_shared(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C)
    network.outcomes = {A: hole(), B: hole()}
    began = clock.monotonic()
    assert servers.open(network.connect, 1.5) == C
    assert network.seconds == pytest.approx([0.5, 0.5, 0.5])
    assert clock.monotonic() - began == pytest.approx(1.0)
    assert servers.open(network.connect, 1.5) == C
    assert network.seconds[3:] == pytest.approx([1.0])


def test_a_server_is_not_blamed_for_a_caller_in_a_hurry(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes = {A: hole(), B: hole()}
    with pytest.raises(DirectoryTimeoutError) as caught:
        servers.open(network.connect, 0.1)
    assert network.seconds == pytest.approx([0.05, 0.05])
    assert [found.state for found in servers.states()] == ["up", "up"]
    assert [found.connections for found in servers.states()] == [0, 0]
    assert str(caught.value) == (
        "no LDAP server answered in time: ldap://192.0.2.1:389: timed out; "
        "ldap://192.0.2.2:389: timed out"
    )
    network.outcomes = {A: refused()}
    assert servers.open(network.connect, 0.1) == B
    assert state(servers, A) == "down"


def test_a_short_connect_timeout_is_meant(clock: Clock, network: Network) -> None:
    servers = make(clock, connect_timeout=0.1)
    network.outcomes = {A: hole()}
    assert servers.open(network.connect) == B
    assert state(servers, A) == "down"


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_without_time_nobody_is_asked(clock: Clock, network: Network, timeout: float) -> None:
    servers = make(clock)
    with pytest.raises(DirectoryTimeoutError, match=r"\.1:389: not tried, no time was left; "):
        servers.open(network.connect, timeout)
    assert network.asked() == []


def test_what_comes_after_the_callers_time_is_not_tried(clock: Clock, network: Network) -> None:
    servers = make(clock)

    def slow(url: ServerURL, address: Any, seconds: float) -> None:
        network.calls.append(url)
        clock.later(10)
        raise refused()

    with pytest.raises(DirectoryTimeoutError, match=r"\.2:389: not tried, no time was left$"):
        servers.open(slow, 5.0)
    assert network.asked() == [A]


# Reports of operations


def test_an_operation_without_answer_opens_it(clock: Clock, network: Network) -> None:
    servers = make(clock)
    assert servers.open(network.connect) == A
    servers.failed(A, DirectoryTimeoutError("no answer within 30 s", server=A.text))
    (found, _) = servers.states()
    assert (found.state, found.last_error) == ("down", "no answer within 30 s")
    assert servers.open(network.connect) == B
    assert not servers.preferred(A)
    # One operation may have been too much for it: it is looked into at once.
    assert servers.next_check() == 0.0
    servers.check(network.probe)
    assert servers.open(network.connect) == A


def test_a_refused_operation_does_not(clock: Clock) -> None:
    servers = make(clock)
    servers.failed(A, DirectoryAnswerError(50, "insufficientAccessRights", server=A.text))
    assert state(servers, A) == "up"


def test_an_operation_from_before_the_outage(clock: Clock, network: Network) -> None:
    servers = make(clock)
    began = clock.monotonic()
    network.outcomes[A] = refused()
    servers.open(network.connect)
    clock.later(5)
    network.outcomes.clear()
    servers.check(network.probe)
    clock.later(25)
    servers.failed(A, DirectoryTimeoutError("x", server=A.text), since=began)
    assert state(servers, A) == "up"
    servers.failed(A, DirectoryTimeoutError("x", server=A.text), since=clock.monotonic())
    assert state(servers, A) == "down"


def test_a_suspicion_is_no_verdict_but_a_question(clock: Clock, network: Network) -> None:
    servers = make(clock)
    assert servers.suspect(A)
    assert not servers.suspect(A)
    assert state(servers, A) == "up"
    assert servers.preferred(A)
    assert servers.next_check() == 1.0
    servers.check(network.probe)
    assert network.asked() == [A]
    assert servers.next_check() is None
    # It was found well a moment ago; the question costs at most one connect in that time.
    assert not servers.suspect(A)
    clock.later(1)
    assert servers.suspect(A)
    # Who connects is the one who asks.
    assert servers.open(network.connect) == A
    servers.check(network.probe)
    assert network.asked() == [A]
    clock.later(1)
    assert servers.suspect(A)
    network.outcomes[A] = hole()
    assert servers.open(network.connect) == B
    assert state(servers, A) == "down"
    assert not servers.suspect(A)


def test_answers_do_not_close_it_but_hasten_its_probe(clock: Clock, network: Network) -> None:
    """A server may serve its old connections and take no new ones."""
    servers = make(clock)
    network.outcomes[A] = hole()
    servers.open(network.connect)
    for _ in range(8):
        clock.later(100)
        servers.check(network.probe)
    servers.succeeded(A)
    servers.succeeded(B)
    assert servers.next_check() == 1.0
    network.asked()
    assert servers.open(network.connect) == B
    assert network.asked() == [B]


# Balanced


def test_the_least_connections(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C, strategy="balanced")
    found = collections.Counter(servers.open(network.connect) for _ in range(30))
    assert found == {A: 10, B: 10, C: 10}
    for _ in range(4):
        servers.released(B)
    assert [servers.open(network.connect) for _ in range(4)] == [B] * 4
    assert [found.connections for found in servers.states()] == [10, 10, 10]


def test_ties_are_at_random(clock: Clock, network: Network) -> None:
    first = {
        make(clock, A, B, C, strategy="balanced", random=random.Random(seed)).open(network.connect)
        for seed in range(30)
    }
    assert first == {A, B, C}


def test_connections_being_opened_count(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, strategy="balanced")
    nested: list[ServerURL] = []

    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        if not nested:
            nested.append(url)
            nested.append(servers.open(network.connect))
        return url

    assert {servers.open(connect), nested[1]} == {A, B}


def test_balanced_skips_one_that_is_down(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, C, strategy="balanced")
    network.outcomes[B] = refused()
    found = collections.Counter(servers.open(network.connect) for _ in range(30))
    assert found == {A: 15, C: 15}
    assert network.asked().count(B) == 1
    assert [servers.preferred(url) for url in (A, B, C)] == [True, False, True]


def test_one_that_is_back_is_not_stampeded(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, strategy="balanced")
    network.outcomes[B] = refused()
    for _ in range(40):
        servers.open(network.connect)
    clock.later(2)
    network.outcomes.clear()
    servers.check(network.probe)
    found = collections.Counter(servers.open(network.connect) for _ in range(40))
    assert 10 <= found[B] <= 30
    # In the end it has as many as the other.
    clock.later(SLOW_START_SECONDS + 1)
    for _ in range(200):
        servers.open(network.connect)
    first, second = (found.connections for found in servers.states())
    assert abs(first - second) <= 1


def test_it_gets_more_as_time_passes(clock: Clock, network: Network) -> None:
    servers = make(clock, A, B, strategy="balanced")
    network.outcomes[B] = refused()
    for _ in range(400):
        servers.open(network.connect)
    clock.later(2)
    network.outcomes.clear()
    servers.check(network.probe)
    clock.later(SLOW_START_SECONDS / 2)
    found = [servers.open(network.connect) for _ in range(400)]
    # Its own half, and half of the other's.
    assert 260 <= found.count(B) <= 340


def test_all_new_servers_start_alike(clock: Clock, network: Network) -> None:
    """Nobody has been down, so nobody starts slowly."""
    servers = make(clock, A, B, strategy="balanced")
    for _ in range(20):
        servers.open(network.connect)
    for _ in range(8):
        servers.released(A)
    assert [servers.open(network.connect) for _ in range(8)] == [A] * 8


def test_released_never_goes_below_none(clock: Clock, network: Network) -> None:
    servers = make(clock)
    servers.released(A)
    servers.open(network.connect)
    assert servers.states()[0].connections == 1


# The log


def test_one_line_down_and_one_back(
    clock: Clock, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    servers = make(clock)
    servers.open(network.connect)
    network.outcomes[A] = refused()
    for _ in range(20):
        servers.open(network.connect)
        servers.failed(A, DirectoryTimeoutError("x", server=A.text))
        clock.later(5)
        servers.check(network.probe)
    network.outcomes.clear()
    clock.later(60)
    servers.check(network.probe)
    servers.check(network.probe)
    servers.open(network.connect)
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            LOGGER,
            "WARNING",
            "ldap://192.0.2.1:389 is down: Connection refused; it is tried again in 1.0 s",
        ),
        (LOGGER, "INFO", "ldap://192.0.2.1:389 is back, after 160.0 s"),
    ]


def test_the_log_is_not_written_under_the_lock(clock: Clock, network: Network) -> None:
    servers = make(clock)
    free: list[bool] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            free.append(servers._changed.lock.acquire(blocking=False))
            if free[-1]:
                servers._changed.lock.release()

    handler = Handler()
    module.LOG.addHandler(handler)
    previous = module.LOG.level
    module.LOG.setLevel(logging.DEBUG)
    try:
        network.outcomes[A] = refused()
        servers.open(network.connect)
        clock.later(2)
        network.outcomes.clear()
        servers.check(network.probe)
        servers.failed(B, DirectoryTimeoutError("x", server=B.text))
    finally:
        module.LOG.removeHandler(handler)
        module.LOG.setLevel(previous)
    assert free == [True] * 3


def test_nor_is_anything_else_waited_for_under_it(clock: Clock) -> None:
    free: list[str] = []
    named = ServerURL.parse("ldap://ldap.example.org")

    def look(where: str) -> None:
        assert servers._changed.lock.acquire(blocking=False)
        servers._changed.lock.release()
        free.append(where)

    def resolve(host: str, port: int) -> list[Any]:
        look("resolve")
        return [("192.0.2.1", 389)]

    def connect(*arguments: Any) -> None:
        look("connect")
        raise refused()

    servers = make(clock, named, resolve=resolve)
    with pytest.raises(DirectoryUnavailableError):
        servers.open(connect)
    clock.later(2)
    servers.check(connect)
    assert free == ["resolve", "connect"] * 2


# Threads


class Gate:
    """A server whose callers wait until the test lets them go, each with an outcome."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self.inside = 0
        self.most = 0
        self._open = False
        self._error: Exception | None = None

    def __call__(self) -> None:
        with self._state:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self._state.notify_all()
            assert self._state.wait_for(lambda: self._open, PATIENCE)
            self.inside -= 1
            if self._error is not None:
                raise self._error

    def wait_for(self, number: int) -> None:
        with self._state:
            assert self._state.wait_for(lambda: self.inside >= number, PATIENCE)

    def let_go(self, error: Exception | None = None) -> None:
        with self._state:
            self._error = error
            self._open = True
            self._state.notify_all()


@contextlib.contextmanager
def running(number: int, work: Any) -> Iterator[list[Any]]:
    """Run ``work`` in threads; what each returned or raised is there after the block."""
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=body) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == number


def test_fifty_threads_in_front_of_a_black_hole(clock: Clock) -> None:
    """All pay once, none twice; who comes after the first has failed pays nothing."""
    servers = make(clock)
    first = Gate()
    asked: collections.Counter[ServerURL] = collections.Counter()

    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        asked[url] += 1
        if url == A:
            first()
        return url

    with running(50, lambda: servers.open(connect)) as results:
        first.wait_for(50)
        # One of them is told first; a user who comes now goes straight to the second.
        servers.failed(A, DirectoryTimeoutError("x", server=A.text))
        assert servers.open(connect) == B
        assert asked == {A: 50, B: 1}
        first.let_go(hole())
    assert results == [B] * 50
    assert asked == {A: 50, B: 51}
    (found, _) = servers.states()
    assert found.failures == 1
    assert [found.connections for found in servers.states()] == [0, 51]


def test_the_same_with_sockets() -> None:
    """The first server's backlog is full, so its kernel does not answer; the second listens."""
    with contextlib.ExitStack() as stack:
        hole, second = (stack.enter_context(socket.socket()) for _ in range(2))
        for listener, backlog in ((hole, 0), (second, 128)):
            listener.bind(("127.0.0.1", 0))
            listener.listen(backlog)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(hole.getsockname())
        urls = [
            ServerURL.parse(f"ldap://localhost:{listener.getsockname()[1]}")
            for listener in (hole, second)
        ]
        asked: collections.Counter[ServerURL] = collections.Counter()

        def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
            asked[url] += 1
            with socket.create_connection(address[:2], seconds):
                return url

        # More than a thread waits for its turn on a busy machine.
        seconds = 3.0
        # Nobody listens on ::1.
        servers = make(
            time,
            *urls,
            connect_timeout=seconds,
            retry_delay=PATIENCE,
            max_retry_delay=PATIENCE,
            resolve=lambda host, port: [("::1", port, 0, 0), ("127.0.0.1", port)],
        )
        began = time.monotonic()
        with running(20, lambda: servers.open(connect)) as results:
            pass
        # Once for all of them, and not one after the other.
        assert time.monotonic() - began < 20 * seconds / 2
        assert results == [urls[1]] * 20
        asked.clear()
        assert [servers.open(connect) for _ in range(5)] == [urls[1]] * 5
        assert asked == {urls[1]: 5}
        assert [found.connections for found in servers.states()] == [0, 25]


def test_one_thread_probes_and_others_fail_at_once(clock: Clock) -> None:
    servers = make(clock, A, connect_timeout=PATIENCE)
    network = Network(clock)
    network.outcomes[A] = refused()
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    clock.later(1.1)
    gate = Gate()
    began = time.monotonic()
    with running(1, lambda: servers.open(lambda *arguments: gate())) as results:
        gate.wait_for(1)
        assert servers.states()[0].state == "probing"
        assert servers.next_check() == 1.0
        for _ in range(20):
            with pytest.raises(DirectoryUnavailableError, match="it is being tried now"):
                servers.open(network.connect)
        servers.check(network.probe)
        assert time.monotonic() - began < PATIENCE / 2
        gate.let_go()
    assert results == [None]
    assert gate.most == 1
    assert len(network.asked()) == 1


def test_a_probe_delays_nobody(clock: Clock, network: Network) -> None:
    servers = make(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    clock.later(1.1)
    gate = Gate()
    with running(1, lambda: servers.check(lambda *arguments: gate())):
        gate.wait_for(1)
        network.asked()
        assert [servers.open(network.connect) for _ in range(50)] == [B] * 50
        assert network.asked() == [B] * 50
        gate.let_go()
    assert state(servers, A) == "up"


def test_a_suspected_server_is_asked_by_one_and_the_others_wait(clock: Clock) -> None:
    servers = make(clock, connect_timeout=PATIENCE)
    gate = Gate()

    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        if url == A:
            gate()
        return url

    servers.suspect(A)
    with running(5, lambda: servers.open(connect)) as results:
        gate.wait_for(1)
        wait_for_waiting(servers, 4)
        gate.let_go(refused())
    assert results == [B] * 5
    assert gate.most == 1


def test_who_has_little_time_does_not_wait_for_that_alone(clock: Clock) -> None:
    servers = make(clock, connect_timeout=PATIENCE)
    gate = Gate()
    servers.suspect(A)
    with running(1, lambda: servers.open(lambda *arguments: gate())) as results:
        gate.wait_for(1)
        assert servers.open(lambda url, *_: url, 0.02) == B
        gate.let_go()
    assert results == [None]
    assert state(servers, A) == "up"


@pytest.mark.parametrize("recovers", [True, False])
def test_who_loses_the_last_server_waits_for_the_probe_of_another(
    clock: Clock, recovers: bool
) -> None:
    """A has recovered since it was last asked; B dies under fifty users; none of them fails."""
    servers = make(clock, connect_timeout=PATIENCE)
    network = Network(clock)
    network.outcomes[A] = refused()
    servers.open(network.connect)
    for _ in range(8):
        clock.later(100)
        servers.check(network.probe)
    clock.later(2)
    second, probe = Gate(), Gate()
    began = time.monotonic()

    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        (probe if url == A else second)()
        return url

    with running(50, lambda: servers.open(connect)) as results:
        second.wait_for(50)
        second.let_go(refused())
        probe.wait_for(1)
        wait_for_waiting(servers, 49)
        assert probe.most == 1
        probe.let_go(None if recovers else refused())
    if recovers:
        assert results == [A] * 50
    else:
        assert [type(result) for result in results] == [DirectoryUnavailableError] * 50
    assert time.monotonic() - began < PATIENCE / 2
    assert servers.states()[0].state == ("up" if recovers else "down")


def test_who_waits_takes_over_from_a_probe_that_is_killed(clock: Clock) -> None:
    servers = make(clock, A, connect_timeout=PATIENCE)
    servers.failed(A, DirectoryTimeoutError("x", server=A.text))
    gate = Gate()
    began = time.monotonic()
    with running(1, lambda: servers.open(lambda *arguments: gate())) as killed:
        gate.wait_for(1)
        with running(1, lambda: servers.open(lambda *arguments: "well")) as results:
            wait_for_waiting(servers, 1)
            gate.let_go(ZeroDivisionError())
    assert [type(result) for result in killed] == [ZeroDivisionError]
    assert results == ["well"]
    assert time.monotonic() - began < PATIENCE / 2


def test_waiting_for_a_probe_has_an_end(clock: Clock) -> None:
    servers = make(clock, A, connect_timeout=0.25)
    servers.failed(A, DirectoryTimeoutError("x", server=A.text))
    gate = Gate()
    with running(1, lambda: servers.open(lambda *arguments: gate())) as results:
        gate.wait_for(1)
        began = time.monotonic()
        with pytest.raises(DirectoryUnavailableError, match="it is being tried now"):
            servers.open(lambda *arguments: pytest.fail("a second probe"))
        assert 0.2 < time.monotonic() - began < PATIENCE / 2
        gate.let_go()
    assert results == [None]


def test_storm(clock: Clock) -> None:
    """Threads, a background worker and servers that come and go, by the real clock.

    At no time do two probe one server, and as the last server never fails nobody is refused.
    """
    servers = make(time, A, B, C, retry_delay=0.002, max_retry_delay=0.01, connect_timeout=5.0)
    stop = threading.Event()
    inside: collections.Counter[ServerURL] = collections.Counter()
    lock = threading.Lock()
    most = 0
    dice = random.Random(7)

    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        if url != C and dice.random() < 0.5:
            raise refused()
        return url

    def probe(url: ServerURL, address: Any, seconds: float) -> None:
        nonlocal most
        with lock:
            inside[url] += 1
            most = max(most, inside[url])
        try:
            time.sleep(0)
            connect(url, address, seconds)
        finally:
            with lock:
                inside[url] -= 1

    def check() -> int:
        while not stop.is_set():
            servers.check(probe)
            time.sleep(0)
        return 0

    def use() -> int:
        for _ in range(300):
            servers.released(servers.open(connect))
        return 300

    with running(2, check), running(6, use) as uses:
        for _ in range(200):
            servers.failed(dice.choice([A, B]), DirectoryTimeoutError("x"))
            servers.succeeded(dice.choice([A, B]))
            servers.states()
        deadline = time.monotonic() + PATIENCE
        while len(uses) < 6 and time.monotonic() < deadline:
            stop.wait(0.005)
        stop.set()
    assert uses == [300] * 6
    assert most == 1
    assert [found.connections for found in servers.states()] == [0, 0, 0]


# Fork


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_starts_without_what_the_parents_threads_hold(
    clock: Clock, network: Network
) -> None:
    servers = make(clock, A)
    servers.open(network.connect)
    network.outcomes[A] = refused()
    with pytest.raises(DirectoryUnavailableError):
        servers.open(network.connect)
    clock.later(1.1)
    gate = Gate()
    with running(1, lambda: servers.open(lambda *arguments: gate())):
        gate.wait_for(1)
        with servers._changed:  # as another thread may hold it
            child = os.fork()
            if child == 0:
                network.outcomes.clear()
                network.asked()
                done = False
                with contextlib.suppress(BaseException):
                    done = servers.open(network.connect) == A
                    done = done and [s.connections for s in servers.states()] == [1]
                os._exit(0 if done else 1)
        deadline = time.monotonic() + PATIENCE
        pid, status = os.waitpid(child, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            threading.Event().wait(0.01)
            pid, status = os.waitpid(child, os.WNOHANG)
        if not pid:
            os.kill(child, 9)
            os.waitpid(child, 0)
        gate.let_go()
    assert pid == child
    assert os.waitstatus_to_exitcode(status) == 0


def test_children_do_not_choose_alike(clock: Clock) -> None:
    dice = random.Random(1)
    servers = make(clock, random=dice)
    before = dice.getstate()
    servers.after_fork()
    assert dice.getstate() != before


# In any order


class Servers(RuleBasedStateMachine):
    """Users, a background worker, servers that come and go, and time that passes.

    A user's connect or a probe begins in one step and ends in a later one, in a thread of its
    own that does nothing in between, so all of them may overlap.
    """

    strategy: ClassVar[str] = "ordered"

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.urls = [A, B, C]
        self.servers = make(
            self.clock,
            *self.urls,
            strategy=self.strategy,
            max_retry_delay=8.0,
            connect_timeout=PATIENCE,
        )
        self.healthy = dict.fromkeys(self.urls, True)
        self.lock = threading.Condition()
        #: Calls that have begun: their server, whether it was down, and the verdict once given.
        self.under_way: list[list[Any]] = []
        self.began = 0
        self.threads: list[threading.Thread] = []
        self.ended: list[Any] = []
        self.idle = 0

    def connect(self, url: ServerURL, address: Any, seconds: float) -> ServerURL:
        call: list[Any] = [url, state(self.servers, url) != "up", None]
        with self.lock:
            self.under_way.append(call)
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: call[2] is not None, PATIENCE)
            healthy = call[2]
            self.under_way.remove(call)
        if not healthy:
            raise refused()
        return url

    def begin(self, work: Any) -> None:
        """Start a thread, and wait until it has ended or waits in a call or for a probe."""

        def body() -> None:
            try:
                result = work()
            except DirectoryUnavailableError as error:
                result = error
            with self.lock:
                self.ended.append(result)
                self.lock.notify_all()

        thread = threading.Thread(target=body, daemon=True)
        self.threads.append(thread)
        thread.start()
        self.settle()

    def waiting(self) -> int:
        return waiting(self.servers)

    def settle(self) -> None:
        """Wait until every thread has ended, is in a call that has no verdict, or waits."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with self.lock:
                calls = [call for call in self.under_way if call[2] is None]
                if len(calls) == len(self.under_way):
                    at_rest = len(calls) + len(self.ended) + self.waiting()
                    if at_rest == len(self.threads):
                        return
                self.lock.wait(0.0005)
        raise AssertionError("a thread hangs")

    @rule()
    def use(self) -> None:
        if len(self.threads) - len(self.ended) < 6:
            self.begin(lambda: self.servers.open(self.connect))

    @rule()
    def check(self) -> None:
        if len(self.threads) - len(self.ended) < 6:
            self.begin(lambda: self.servers.check(self.connect))

    @rule(number=st.integers(0, 5))
    def end(self, number: int) -> None:
        with self.lock:
            if not self.under_way:
                return
            call = self.under_way[number % len(self.under_way)]
            call[2] = self.healthy[call[0]]
            self.lock.notify_all()
        self.settle()

    @rule(number=st.integers(0, 2), healthy=st.booleans())
    def change(self, number: int, healthy: bool) -> None:
        self.healthy[self.urls[number]] = healthy

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        url = self.urls[number]
        if not self.healthy[url]:
            self.servers.failed(url, DirectoryTimeoutError("no answer", server=url.text))
            self.settle()

    @rule(number=st.integers(0, 2))
    def doubt(self, number: int) -> None:
        self.servers.suspect(self.urls[number])

    @rule(number=st.integers(0, 2))
    def answer(self, number: int) -> None:
        self.servers.succeeded(self.urls[number])

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, 4.0, 9.0, 9.0]))
    def later(self, seconds: float) -> None:
        self.clock.later(seconds)

    @rule()
    def find(self) -> None:
        """With nothing else under way, a user finds a server that is up and healthy."""
        if self.under_way:
            return
        states = self.servers.states()
        old = {
            server.url
            for server in self.servers._servers
            if self.clock.monotonic() - server.breaker._failed_at >= 1.0
        }
        found: Any = None
        tried: list[ServerURL] = []

        def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
            tried.append(url)
            if not self.healthy[url]:
                raise refused()
            return url

        with contextlib.suppress(DirectoryUnavailableError):
            found = self.servers.open(connect)
        up = [s.url for s in states if s.state == "up"]
        due = [s.url for s in states if s.retry_in == 0.0]
        # When the last one that is up is lost the others are asked, however long they would have
        # had to wait, but for those that failed a moment ago.
        candidates = {*up, *due, *(old if up else ())}
        if any(self.healthy[url] for url in candidates):
            assert found is not None
            assert self.healthy[found]
        assert len(set(tried)) == len(tried)
        if any(self.healthy[url] for url in up):
            assert set(tried) <= set(up)
        if found is not None:
            self.servers.released(found)

    @rule()
    def recover(self) -> None:
        """Whatever happened: when its time has come, the background finds each healthy server."""
        if self.under_way:
            return
        self.clock.later(9)
        healthy = dict(self.healthy)

        def probe(url: ServerURL, address: Any, seconds: float) -> None:
            if not healthy[url]:
                raise refused()

        self.servers.check(probe)
        for found in self.servers.states():
            assert found.state == "up" or not healthy[found.url]

    @invariant()
    def one_probe_per_server(self) -> None:
        # A call to a server that was down when it began is its probe.
        probes = collections.Counter(url for url, was_down, _ in self.under_way if was_down)
        assert all(number <= 1 for number in probes.values())

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.waiting():
            assert any(server.breaker.is_awaited for server in self.servers._servers)

    def teardown(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(self.ended) < len(self.threads) and time.monotonic() < deadline:
            with self.lock:
                for call in self.under_way:
                    call[2] = True
                self.lock.notify_all()
            self.settle()
        for thread in self.threads:
            thread.join(PATIENCE)
        for result in self.ended:
            if isinstance(result, ServerURL):
                self.servers.released(result)
        assert [found.connections for found in self.servers.states()] == [0, 0, 0]
        super().teardown()


class Balanced(Servers):
    strategy = "balanced"


@pytest.mark.parametrize("machine", [Servers, Balanced])
def test_in_any_order(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
