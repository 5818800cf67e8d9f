"""The breaker of one LDAP server, by a clock that the test sets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfront.middleware.ldap.servers import Attempt, Breaker
from support.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **options: Any) -> Breaker:
    given = {"retry_delay": 1.0, "max_retry_delay": 60.0, "jitter": 0.0}
    return Breaker(clock=clock.monotonic, random=random.Random(1), **{**given, **options})


def leave(breaker: Breaker) -> Attempt:
    attempt = breaker.attempt()
    assert attempt is not None
    return attempt


def leave_soon(breaker: Breaker, clock: Clock) -> Attempt:
    assert breaker.retry_in is not None
    clock.later(breaker.retry_in + 1e-6)
    return leave(breaker)


def test_it_is_closed_at_first_and_lets_all_through(clock: Clock) -> None:
    breaker = make(clock)
    assert (breaker.state, breaker.is_up, breaker.failures) == ("up", True, 0)
    assert (breaker.last_error, breaker.retry_in) == (None, None)
    assert len({id(attempt) for attempt in [leave(breaker) for _ in range(5)]}) == 5
    assert breaker.succeeded(leave(breaker)) is None


def test_the_first_failure_opens_it(clock: Clock) -> None:
    breaker = make(clock)
    assert breaker.failed(leave(breaker), "refused")
    assert (breaker.state, breaker.is_up, breaker.failures) == ("down", False, 1)
    assert (breaker.last_error, breaker.retry_in) == ("refused", 1.0)
    assert breaker.attempt() is None
    clock.later(0.999)
    assert breaker.attempt() is None
    clock.later(0.002)
    assert breaker.attempt() is not None


def test_those_that_were_under_way_do_not_count_again(clock: Clock) -> None:
    """Fifty threads that meet one outage are one failure."""
    breaker = make(clock)
    attempts = [leave(breaker) for _ in range(50)]
    assert [breaker.failed(attempt, f"{n}") for n, attempt in enumerate(attempts)].count(True) == 1
    assert breaker.failures == 1
    assert breaker.retry_in == 1.0
    assert breaker.last_error == "49"


def test_one_probe_at_a_time(clock: Clock) -> None:
    breaker = make(clock)
    breaker.failed(leave(breaker), "refused")
    clock.later(1.1)
    probe = leave(breaker)
    assert (breaker.state, breaker.retry_in) == ("probing", None)
    clock.later(1000)
    assert breaker.attempt() is None
    assert not breaker.failed(probe, "refused again")
    assert (breaker.state, breaker.failures) == ("down", 2)
    assert breaker.retry_in == 2.0


def test_the_delay_doubles_up_to_its_limit_and_starts_anew(clock: Clock) -> None:
    breaker = make(clock)
    breaker.failed(leave(breaker), "x")
    delays = []
    for _ in range(9):
        assert breaker.retry_in is not None
        delays.append(breaker.retry_in)
        clock.later(breaker.retry_in + 1e-6)
        breaker.failed(leave(breaker), "x")
    assert delays == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])
    clock.later(61)
    assert breaker.succeeded(leave(breaker)) == pytest.approx(sum(delays) + 61, abs=0.01)
    assert (breaker.state, breaker.failures, breaker.last_error) == ("up", 0, "x")
    breaker.failed(leave(breaker), "x")
    assert breaker.retry_in == 1.0


def test_the_delay_is_jittered(clock: Clock) -> None:
    breaker = make(clock, jitter=0.1)
    breaker.failed(leave(breaker), "x")
    found = []
    for _ in range(200):
        assert breaker.retry_in is not None
        found.append(breaker.retry_in)
        clock.later(breaker.retry_in + 1e-6)
        breaker.failed(leave(breaker), "x")
    assert 0.9 <= found[0] <= 1.1
    assert all(54 <= delay <= 66 for delay in found[7:])
    assert max(found[7:]) - min(found[7:]) > 6


def test_only_its_probe_closes_it(clock: Clock) -> None:
    """A connect that began before the failure and ends well later proves little."""
    breaker = make(clock)
    late = leave(breaker)
    breaker.failed(leave(breaker), "x")
    assert breaker.succeeded(late) is None
    assert not breaker.is_up
    clock.later(1.1)
    probe = leave(breaker)
    assert breaker.succeeded(late) is None
    assert breaker.state == "probing"
    assert breaker.succeeded(probe) == pytest.approx(1.1)


def test_a_failure_from_before_it_was_back_is_none(clock: Clock) -> None:
    breaker = make(clock)
    late = leave(breaker)
    began = clock.monotonic()
    breaker.failed(leave(breaker), "x")
    clock.later(1.1)
    breaker.succeeded(leave(breaker))
    clock.later(0.1)
    assert not breaker.failed(late, "timed out")
    assert not breaker.lost("timed out", began)
    assert breaker.is_up
    assert breaker.failed(leave(breaker), "x")


def test_an_old_probe_is_no_probe(clock: Clock) -> None:
    """After a fork the child may probe while the parent's thread, which it has not, still does."""
    breaker = make(clock)
    breaker.failed(leave(breaker), "x")
    clock.later(1.1)
    old = leave(breaker)
    breaker.after_fork()
    new = leave(breaker)
    assert breaker.succeeded(old) is None
    breaker.abandoned(old)
    assert not breaker.failed(old, "y")
    assert breaker.state == "probing"
    assert breaker.succeeded(new) is not None


def test_an_abandoned_probe_teaches_nothing(clock: Clock) -> None:
    breaker = make(clock)
    breaker.failed(leave(breaker), "x")
    clock.later(1.1)
    breaker.abandoned(leave(breaker))
    assert (breaker.state, breaker.failures, breaker.retry_in) == ("down", 1, 0.0)
    assert breaker.attempt() is not None


def test_a_lost_answer_opens_it_and_is_looked_into_at_once(clock: Clock) -> None:
    breaker = make(clock)
    assert breaker.lost("no answer")
    assert (breaker.state, breaker.retry_in, breaker.last_error) == ("down", 0.0, "no answer")
    assert not breaker.lost("no answer either")
    breaker.failed(leave(breaker), "refused")
    assert breaker.retry_in == 1.0
    clock.later(1.1)
    breaker.failed(leave(breaker), "refused")
    assert breaker.retry_in == 2.0


def test_a_server_that_fails_operations_but_no_probe_does_not_flap(clock: Clock) -> None:
    breaker = make(clock)
    changes = 0
    until = clock.monotonic() + 100
    while clock.monotonic() < until:
        if breaker.is_up:
            changes += breaker.lost("no answer")
        attempt = breaker.attempt()
        if attempt is not None and not breaker.is_up:
            breaker.succeeded(attempt)
        clock.later(0.01)
    assert 90 <= changes <= 110


def test_an_answer_shortens_the_wait_of_one_that_is_down(clock: Clock) -> None:
    breaker = make(clock)
    breaker.answered()
    assert breaker.is_up
    breaker.failed(leave(breaker), "x")
    for _ in range(6):
        clock.later(100)
        breaker.failed(leave(breaker), "x")
    assert breaker.retry_in == 60.0
    breaker.answered()
    assert breaker.retry_in == 1.0
    clock.later(10)
    breaker.answered()
    assert breaker.retry_in == 0.0
    assert not breaker.is_up


def test_to_hasten_it_is_for_one_probe(clock: Clock) -> None:
    breaker = make(clock)
    breaker.hasten()
    assert breaker.is_up
    assert not breaker.is_awaited
    breaker.failed(leave(breaker), "x")
    assert not breaker.is_awaited
    breaker.hasten()
    assert breaker.retry_in == 1.0  # that was a moment ago
    clock.later(0.5)
    breaker.failed(leave_soon(breaker, clock), "x")
    assert breaker.retry_in == 2.0
    clock.later(1.1)
    breaker.hasten()
    assert breaker.retry_in == 0.0
    assert not breaker.is_awaited
    probe = leave(breaker)
    assert breaker.is_awaited
    breaker.failed(probe, "x")
    assert breaker.retry_in == 4.0
    clock.later(5)
    breaker.hasten()
    breaker.succeeded(leave(breaker))
    breaker.failed(leave(breaker), "x")
    clock.later(2)
    probe = leave(breaker)
    assert not breaker.is_awaited
    breaker.abandoned(probe)


DEEDS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "good", "bad", "give_up", "lost", "answered", "hasten", "later", "later"]
        ),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(deeds=DEEDS, seed=st.integers(0, 5))
def test_in_whatever_order(deeds: list[tuple[str, int]], seed: int) -> None:
    """One probe at most; down only by a failure, up only by a probe; due within the limit."""
    clock = Clock()
    breaker = Breaker(
        retry_delay=1.0,
        max_retry_delay=8.0,
        jitter=0.1,
        clock=clock.monotonic,
        random=random.Random(seed),
    )
    open_: list[tuple[Attempt, bool]] = []
    for deed, number in deeds:
        was_up = breaker.is_up
        if deed == "ask":
            attempt = breaker.attempt()
            assert attempt is not None or not was_up
            if attempt is not None:
                open_.append((attempt, not was_up))
        elif deed in ("good", "bad", "give_up") and open_:
            attempt, is_probe = open_.pop(number % len(open_))
            if deed == "good":
                lasted = breaker.succeeded(attempt)
                assert (lasted is not None) == is_probe
                assert breaker.is_up == (was_up or is_probe)
            elif deed == "bad":
                assert breaker.failed(attempt, "x") == (was_up and not breaker.is_up)
            else:
                breaker.abandoned(attempt)
                assert breaker.is_up == was_up
        elif deed == "lost":
            assert breaker.lost("y") == was_up
        elif deed == "answered":
            breaker.answered()
            assert breaker.is_up == was_up
        elif deed == "hasten":
            breaker.hasten()
        elif deed == "later":
            clock.later([0.01, 0.5, 1.0, 2.0, 4.0, 9.0, 60.0, 3600.0][number])
        probes = sum(is_probe for _, is_probe in open_)
        assert probes <= 1
        assert (breaker.state == "probing") == (probes == 1)
        assert (breaker.failures == 0) == breaker.is_up
        if breaker.state == "down":
            assert breaker.retry_in is not None
            assert 0 <= breaker.retry_in <= 8.0 * 1.1
