"""One question to Keystone about a token at a time, whoever wants to know."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from keystoneauth1.exceptions import ConnectionError

from keyfront.middleware.tokens.authtoken.single_flight import Flight, Flights
from support.authtoken_world import NONE, STOCK, TAGS, World, shared_world
from support.served import PATIENCE, wait_for

TESTS = Path(__file__).resolve().parents[2]
MANY = 20


@pytest.fixture
def world() -> Iterator[World]:
    made = shared_world(keyfront_flight_timeout="60")
    yield made
    made.close()


class Gate:
    """Holds questions up until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, token: str) -> None:
        self.reached.release()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def status(world: World) -> int | str:
    """What a request is answered, or what the server is left to answer 500."""
    try:
        return world.get().status
    except ConnectionError:
        return "failed"


def together(world: World, count: int, meanwhile: Callable[[], None]) -> list[int | str]:
    """The statuses of requests that all wait for one question."""
    gate = Gate()
    world.keystone.before = gate
    flights = world.middleware._identity_server._flights
    waiting: list[int] = []
    wait = Flight.wait

    def counted(flight: Flight, seconds: float) -> None:
        waiting.append(1)  # it has the flight, and will not begin another
        wait(flight, seconds)

    patch = pytest.MonkeyPatch()
    patch.setattr(Flight, "wait", counted)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(status, world) for _ in range(count)]
        try:
            assert gate.reached.acquire(timeout=PATIENCE)
            wait_for(lambda: len(waiting) == count - 1, "all are waiting")
            meanwhile()
        finally:
            world.keystone.before = lambda token: None
            gate.open()
        found = [x.result(PATIENCE) for x in futures]
    patch.undo()
    assert len(flights) == 0
    return found


@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_many_who_want_to_know_ask_once(world: World, says: str) -> None:
    world.keystone.says = says
    assert together(world, MANY, lambda: None) == [200] * MANY
    assert world.asked == 1


def test_who_began_after_a_change_is_not_told_of_before(world: World) -> None:
    # The question is on its way back with what was read before the revocation.
    gate = Gate()
    world.keystone.after = gate
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: world.get().status)
        assert gate.reached.acquire(timeout=PATIENCE)
        world.keystone.after = lambda token: None
        world.keystone.revoke("t")
        second = pool.submit(lambda: world.get().status)
        gate.open()
        assert first.result(PATIENCE) == 200
        assert second.result(PATIENCE) == 401


def test_what_is_for_one_request_is_asked_by_each(world: World) -> None:
    world.keystone.says = NONE
    assert together(world, 5, lambda: None) == [200] * 5
    assert world.asked == 5


def test_a_refusal_is_for_all(world: World) -> None:
    world.keystone.tokens.clear()
    assert together(world, MANY, lambda: None) == [401] * MANY
    assert world.asked == 1


@pytest.mark.parametrize(
    ("failure", "delay", "expected"),
    [
        (requests.exceptions.ConnectionError("away"), "false", 503),
        (requests.exceptions.ConnectionError("away"), "true", 200),
        # keystonemiddleware expects neither
        (requests.exceptions.Timeout("slow"), "false", "failed"),
        (requests.exceptions.SSLError("not who it says"), "false", "failed"),
    ],
    ids=str,
)
def test_a_keystone_that_is_away_is_not_stormed(
    failure: Exception, delay: str, expected: int | str
) -> None:
    world = shared_world(keyfront_flight_timeout="60", delay_auth_decision=delay)

    def away() -> None:
        world.keystone.down = failure

    assert together(world, MANY, away) == [expected] * MANY
    assert world.asked == 1
    if delay == "true":
        assert {x["HTTP_X_IDENTITY_STATUS"] for x in world.service.seen} == {"Invalid"}
    # and nothing of it stays
    world.keystone.down = None
    assert world.get().status == 200
    assert world.service.seen[-1]["HTTP_X_IDENTITY_STATUS"] == "Confirmed"
    world.close()


@pytest.mark.parametrize("seconds", ["0", "0.01"])
def test_nobody_waits_longer_than_flight_timeout(seconds: str) -> None:
    world = shared_world(keyfront_flight_timeout=seconds)
    gate = Gate()
    world.keystone.before = gate
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(lambda: world.get().status) for _ in range(2)]
        for _ in futures:
            assert gate.reached.acquire(timeout=PATIENCE)
        gate.open()
        assert [x.result(PATIENCE) for x in futures] == [200, 200]
    world.close()


def test_a_child_does_not_wait_for_what_its_parent_asked() -> None:
    flights = Flights(60.0)
    assert flights.begin(b"key") is None
    child = os.fork()
    if not child:
        os._exit(0 if flights.begin(b"key") is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


GREEN = """
import sys
sys.path.insert(0, {tests!r})
{patch}
import time
from support.authtoken_world import shared_world
world = shared_world(keyfront_flight_timeout="60")
world.keystone.before = lambda token: time.sleep(0.05)
print([x.status for x in {run}])
print(world.asked)
"""


@pytest.mark.parametrize(
    ("patch", "run"),
    [
        (
            "import eventlet; eventlet.monkey_patch()",
            "list(eventlet.GreenPool(20).imap(lambda _: world.get(), range(20)))",
        ),
        (
            "import gevent.monkey; gevent.monkey.patch_all(); import gevent.pool",
            "gevent.pool.Pool(20).map(lambda _: world.get(), range(20))",
        ),
    ],
    ids=["eventlet", "gevent"],
)
def test_greenlets_wait_for_each_other(patch: str, run: str) -> None:
    script = textwrap.dedent(GREEN).format(tests=str(TESTS), patch=patch, run=run)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[200] * 20}\n1\n"
