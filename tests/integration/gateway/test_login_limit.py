"""A flood of logins: Keystone behind uWSGI goes on answering those who are not part of it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from keyfront.gateway.keystone.password_hashing import LONGEST, slice_of
from keyfront.gateway.login_limit import login_of
from keyfront.gateway.node import login_turns
from keyfront.gateway.node.counters import read
from keyfront.gateway.node.login_turns import Login, LoginTurns, Refusal, Turn
from support.floods import ATTACKERS, Flood, Known, ask, log_in, login_environ
from support.keystone_world import World
from support.keystones import keystone_state, serve_as_is
from support.served import Served, wait_for

pytest.importorskip("keystone")

LIMIT = 2


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
                asked = pool.submit(log_in, served, f"127.3.1.{next(numbers)}", stranger)
                while not asked.done():
                    assert slots.begin(Login("192.0.2.2")) == Refusal(much=False)
                    wait([asked], 0.05)
                return bool(asked.result()[0] == 503)

            wait_for(is_refused, "it is refused")
        known.logs_in()
        slots.end(turn, right=False)
        wait_for(lambda: log_in(served, "127.3.0.1", stranger)[0] == 201, "it has a turn")
        assert read(state / "run/node").logins_refused > 0


@pytest.fixture(scope="module")
def world(served: Served) -> World:
    return World(served.url, served.password)


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

    def again() -> None:
        while not over.is_set():
            known.logs_in()

    with ThreadPoolExecutor(1) as pool:
        logins = pool.submit(again)
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
                assert ask(served, one.address, "GET", **headers)[0] == 200
        flood.more(ATTACKERS)
    assert flood.statuses[401], "strangers had turns as well"
    refused = flood.refused() + sum(one.refused for one in honest)
    assert read(node).logins_refused - before == refused
    # Once it is over everybody passes, also who has never been here.
    newcomer = world.user()
    assert log_in(served, "127.3.0.1", newcomer)[0] == 201


def test_who_logs_in_is_whom_keystone_takes_him_for(served: Served, world: World) -> None:
    """An id beside a name is not looked at, so it may be another user's."""
    user, other, address = world.user(), world.user(), "127.6.0.1"
    who = {"name": user.name, "domain": {"id": "default"}, "password": user.password}
    password = {"user": {**who, "id": other.id}}
    auth = {"auth": {"identity": {"methods": ["password"], "password": password}}}
    status, _, answer = ask(served, address, "POST", auth)
    assert (status, answer["token"]["user"]["id"]) == (201, user.id)
    node = LoginTurns(Path(served.state) / "run/node", running=LIMIT, waiting=0)
    for one, is_known in ((user.name, True), (other, False)):
        login = login_of(login_environ(address, one))
        assert login is not None
        turn = node.begin(login)
        assert isinstance(turn, Turn)
        node.end(turn, right=None)
        assert turn.known == is_known


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
