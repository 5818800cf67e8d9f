"""A flood of logins: Keystone behind uWSGI goes on answering those who are not part of it."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from keyfront.gateway.keystone.password_slices import LONGEST, slice_of
from keyfront.gateway.node import login_turns
from keyfront.gateway.node.counters import read
from keyfront.gateway.node.login_turns import MUCH, Login, LoginTurns, Refusal, Turn
from support.keystone_world import User, World
from support.keystones import keystone_state, serve_as_is
from support.served import PATIENCE, Served, wait_for

pytest.importorskip("keystone")

LIMIT = 2
# At a time, each from an address of its own; more than turns and threads.
ATTACKERS = 8
# Seconds between an answer and the next attempt: without, attackers alone occupy all cores.
BREATH = 0.01
# What is refused here: nothing of a password is hashed before.
REFUSALS = (429, 503)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A Keystone that hashes for some hundredths of a second, and has turns for logins."""
    state = keystone_state(tmp_path_factory.mktemp("flood") / "state")
    environment = {"KEYFRONT_LOGIN_LIMIT": str(LIMIT), "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "10"}
    with serve_as_is(state, "uwsgi", environment=environment) as running:
        yield running


@pytest.mark.parametrize("server", ("gevent", "mod_wsgi"))
def test_other_servers_have_the_same_turns(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = keystone_state(tmp_path / "state")
    # This process has the turn that another one of the server would have; mod_wsgi has two.
    environment, alone = {"KEYFRONT_LOGIN_LIMIT": "1"}, server == "gevent"
    with serve_as_is(state, server, environment=environment, alone=alone) as served:
        world = World(served.url, served.password)
        known, stranger = Known(served, world.user(), "127.2.0.1"), world.user()
        if server == "gevent":  # its threads that hash stay
            assert min(len(worker.threads()) for worker in _workers(served)) > 1
            _sees_long_slices(served, known)
        slots = LoginTurns(state / "run/node", running=1, waiting=0)
        turn = slots.begin(Login("192.0.2.1"))
        assert isinstance(turn, Turn)
        # For this process what is more than there are turns is a flood at once, and so it is for
        # the server.
        monkeypatch.setattr(login_turns, "RUSH", 0.0)
        numbers = itertools.count(1)
        with ThreadPoolExecutor(1) as pool:

            def is_refused() -> bool:
                # who had a turn, as this process stood still, is no stranger any more
                asked = pool.submit(_log_in, served, f"127.3.1.{next(numbers)}", stranger)
                while not asked.done():
                    assert slots.begin(Login("192.0.2.2")) == Refusal(much=False)
                    wait([asked], 0.05)
                return bool(asked.result()[0] == 503)

            wait_for(is_refused, "it is refused")
        known.logs_in()
        slots.end(turn, right=False)
        wait_for(lambda: _log_in(served, "127.3.0.1", stranger)[0] == 201, "it has a turn")
        assert read(state / "run/node").logins_refused > 0


@pytest.fixture(scope="module")
def world(served: Served) -> World:
    return World(served.url, served.password)


def _ask(
    served: Served, source: str, method: str, body: object = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, Any]:
    """Send one request from an address of this machine."""
    connection = HTTPConnection(
        "127.0.0.1", served.port, timeout=PATIENCE, source_address=(source, 0)
    )
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, "/v3/auth/tokens", data, sent)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read() or b"null")


def _log_in(served: Served, source: str, user: User | str, password: str = "") -> Any:
    if isinstance(user, User):
        who: dict[str, object] = {"id": user.id, "password": password or user.password}
    else:
        who = {"name": user, "domain": {"id": "default"}, "password": password}
    identity = {"methods": ["password"], "password": {"user": who}}
    return _ask(served, source, "POST", {"auth": {"identity": identity}})


class Known:
    """A user who has logged in from an address, and may do so again at any time.

    But not if his login took more than a second, as on a busy machine it may: then he has taken
    much, and is refused until half of it is forgotten. What is refused for that is counted.
    """

    def __init__(self, served: Served, user: User, address: str) -> None:
        self.user, self.address = user, address
        self.refused = 0
        self._served = served
        began = time.monotonic()
        answer = _log_in(served, address, user)
        assert answer[0] == 201, (answer[0], answer[2])
        self._took = time.monotonic() - began

    def logs_in(self) -> None:
        """Log in, while others are refused."""
        began = time.monotonic()
        while (status := _log_in(self._served, self.address, self.user)[0]) != 201:
            assert status in REFUSALS and self._took >= MUCH / 2, (status, self._took)
            self.refused += 1
            assert time.monotonic() - began < PATIENCE
        self._took += time.monotonic() - began


class Flood:
    """Logins with wrong passwords, each from another address, and how they were answered."""

    def __init__(self, served: Served, users: list[User | str]) -> None:
        self.served = served
        self.users = users
        self.over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[object] = []
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._send) for _ in range(ATTACKERS)]

    def _send(self) -> None:
        while not self.over.is_set():
            number = next(self._numbers)
            source = f"127.{number >> 14 & 63 | 64}.{number >> 7 & 127}.{number % 127 + 1}"
            try:
                status, headers, body = _log_in(
                    self.served, source, self.users[number % len(self.users)], "wrong"
                )
            except (OSError, http.client.HTTPException):
                continue  # its worker was killed
            finally:
                self.over.wait(BREATH)
            self.statuses[status] += 1
            if status in REFUSALS:
                right = body["error"]["code"] == status and headers["Retry-After"] == "2"
            else:
                right = status == 401
            if not right:
                self.wrong.append((status, body))

    def refused(self) -> int:
        return sum(self.statuses[status] for status in REFUSALS)

    def more(self, count: int) -> None:
        """Wait until as many more were refused."""
        before = self.refused()
        wait_for(lambda: self.refused() >= before + count, "they are refused", [self.statuses])

    @contextmanager
    def under_way(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            self.more(2 * ATTACKERS)
            yield
        finally:
            self.over.set()
            for thread in self._threads:
                thread.join()
        assert not self.wrong, self.wrong[:3]


def _slices(served: Served) -> set[int]:
    """Return how long threads of workers may go on before others that wake up."""
    return {
        slice_of(thread.id) for worker in _workers(served) for thread in worker.threads()
    } - {0}  # of a thread that has ended


def _sees_long_slices(served: Served, known: Known) -> None:
    """See threads that hash ask for long slices, and take them back."""
    if not slice_of():
        return  # the kernel has no slices of a thread's own
    over = threading.Event()

    def log_in() -> None:
        while not over.is_set():
            known.logs_in()

    with ThreadPoolExecutor(1) as pool:
        logins = pool.submit(log_in)
        try:
            wait_for(lambda: LONGEST in _slices(served) or logins.done(), "a hash has long slices")
        finally:
            over.set()
        logins.result()
    assert LONGEST not in _slices(served)


def _workers(served: Served) -> list[psutil.Process]:
    return served.masters("uwsgi").children()


def test_a_flood_keeps_nobody_out(served: Served, world: World) -> None:
    honest = [Known(served, world.user(), f"127.2.0.{number}") for number in range(1, 4)]
    token = world.admin
    # Strangers, and the honest ones' own names at other addresses.
    flood = Flood(served, [f"nobody-{number}" for number in range(3)] + [x.user for x in honest])
    node = Path(served.state) / "run/node"
    before = read(node).logins_refused
    with flood.under_way():
        for one in honest:
            one.logs_in()
            for _ in range(5):
                headers = {"X_Auth_Token": token, "X_Subject_Token": token}
                assert _ask(served, one.address, "GET", **headers)[0] == 200
        flood.more(ATTACKERS)
    assert flood.statuses[401], "strangers had turns as well"
    refused = flood.refused() + sum(one.refused for one in honest)
    assert read(node).logins_refused - before == refused
    # Once it is over everybody passes, also who has never been here.
    newcomer = world.user()
    assert _log_in(served, "127.3.0.1", newcomer)[0] == 201


@pytest.mark.skipif(not slice_of(), reason="the kernel has no slices of a thread's own")
def test_others_have_the_core_of_a_hash_as_soon_as_they_wake_up(
    served: Served, world: World
) -> None:
    _sees_long_slices(served, Known(served, world.user(), "127.5.0.1"))


def test_killed_workers_give_their_turns_back(served: Served, world: World) -> None:
    user = world.user()
    known = Known(served, user, "127.4.0.1")
    # For a name that there is not, nothing is hashed, and no turn would be held when it comes.
    flood = Flood(served, [user])
    with flood.under_way():
        for _ in range(2):
            killed = _workers(served)
            for worker in killed:
                os.kill(worker.pid, signal.SIGKILL)
            gone = {worker.pid for worker in killed}
            wait_for(
                lambda gone=gone: len({x.pid for x in _workers(served)} - gone) == len(gone),
                "the master has started others",
            )
            flood.more(ATTACKERS)
    # All turns at the same time, and nobody waits for more than those.
    with ThreadPoolExecutor(LIMIT) as pool:
        for done in [pool.submit(known.logs_in) for _ in range(LIMIT)]:
            done.result()
