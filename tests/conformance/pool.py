"""What a connection pool must do, whatever runs in it: threads, greenlets, or a forked child.

Derive from :class:`PoolSuite`. Where ``threading`` is patched by gevent or eventlet, the same tests
run on greenlets, and :class:`GreenletSuite` adds what only these can do: be killed while they wait.
No test needs a server; a :class:`Server` of a few lines counts who is connected.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from keyfront.errors import (
    DirectoryUnavailableError,
    PoolClosedError,
    PoolFullError,
    PoolTimeoutError,
)
from keyfront.middleware.ldap.pool import ConnectionPool
from support.served import PATIENCE


class Killed(BaseException):
    """What no ``except Exception`` catches."""


class Gate:
    """Holds whoever comes by, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE), "nobody opened the gate"


class Connection:
    """One to a :class:`Server`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False
        self.broken = False
        self.stale = False
        self.users = 0

    def __repr__(self) -> str:
        return f"<{self.number}>"


class Server:
    """Opens, checks and closes connections, and holds or fails any of it on demand."""

    def __init__(self) -> None:
        self.renew()
        #: Called with what they are called with, before they do their work.
        self.on_open: Callable[[Any], None] = lambda seconds: None
        self.on_check: Callable[[Any], None] = lambda connection: None
        self.on_stale: Callable[[Any], None] = lambda connection: None
        self.on_close: Callable[[Any], None] = lambda connection: None

    def renew(self) -> None:
        """Forget all, with locks of its own."""
        self._lock = threading.Lock()
        self.opened: list[Connection] = []
        self.seconds: list[float] = []
        self.checks = 0
        self.check_seconds: list[float] = []
        self.count = 0
        self.peak = 0
        self.abandoned: list[Connection] = []

    def open(self, seconds: float) -> Connection:
        with self._lock:
            self.seconds.append(seconds)
            self.count += 1
            self.peak = max(self.peak, self.count)
        try:
            self.on_open(seconds)
        except BaseException:
            with self._lock:
                self.count -= 1
            raise
        with self._lock:
            connection = Connection(len(self.opened) + 1)
            self.opened.append(connection)
        return connection

    def close(self, connection: Connection) -> None:
        try:
            self.on_close(connection)
        finally:
            assert not connection.closed, "closed twice"
            connection.closed = True
            with self._lock:
                self.count -= 1

    def check(self, connection: Connection, seconds: float) -> None:
        with self._lock:
            self.checks += 1
            self.check_seconds.append(seconds)
        self.on_check(connection)
        assert not connection.closed
        if connection.broken:
            raise DirectoryUnavailableError("gone")

    def abandon(self, connection: Connection) -> None:
        self.abandoned.append(connection)

    def is_stale(self, connection: Connection) -> bool:
        self.on_stale(connection)
        return connection.stale

    def is_fit(self, connection: Connection) -> bool:
        return not connection.broken

    def pool(self, **options: Any) -> ConnectionPool[Connection]:
        options = {"min_size": 0, "timeout": PATIENCE, "retry_delay": 0.01, **options}
        return ConnectionPool(self, **options)


def fail(_: object) -> None:
    raise DirectoryUnavailableError("no server")


def kill(_: object) -> None:
    raise Killed


class Task:
    """A function on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._answer: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                self._answer.append(function(*arguments))
            except BaseException as error:
                self._error.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return bool(self._answer or self._error)

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert self.done, "it hangs"
        assert not self._thread.is_alive(), "its thread does not end"
        if self._error:
            raise self._error[0]
        return self._answer[0]


def until(condition: Callable[[], object], what: str = "it is so") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.001)


def waiting(pool: ConnectionPool[Any], count: int) -> None:
    until(lambda: pool.get_stats()["waiting"] == count, f"{count} wait")


def is_whole(pool: ConnectionPool[Connection], server: Server) -> None:
    """Nothing is lost: all places can be had at once, and what is open is what is counted."""
    stats = pool.get_stats()
    assert stats["lent"] == stats["waiting"] == 0
    assert stats["size"] == stats["idle"] == server.count == stats["opened"] - stats["closed"]
    all_of_them = [pool.checkout() for _ in range(pool.max_size)]
    assert len(set(all_of_them)) == pool.max_size == server.count
    with pytest.raises(PoolTimeoutError):
        pool.checkout(0)
    for connection in all_of_them:
        pool.checkin(connection)


class PoolSuite:
    """Behaviour that does not depend on what runs."""

    @pytest.fixture
    def server(self) -> Server:
        return Server()

    @pytest.fixture
    def make(self, server: Server) -> Iterator[Callable[..., ConnectionPool[Connection]]]:
        """Make open pools of the server, as ``Server.pool`` does."""
        pools = []

        def make(**options: Any) -> ConnectionPool[Connection]:
            pool = server.pool(**options)
            pool.open()
            pools.append(pool)
            return pool

        yield make
        for pool in pools:
            pool.close()

    def test_a_connection_is_used_again(self, make: Any, server: Server) -> None:
        pool = make()
        with pool.connection() as first:
            assert not first.closed
        with pool.connection() as second:
            assert second is first
        assert server.seconds[0] == pytest.approx(PATIENCE, abs=PATIENCE / 2)
        is_whole(pool, server)

    def test_the_last_used_is_lent_first(self, make: Any) -> None:
        pool = make()
        a, b, c = (pool.checkout() for _ in range(3))
        for connection in (b, c, a):
            pool.checkin(connection)
        again = [pool.checkout() for _ in range(3)]
        assert again == [a, c, b]
        for connection in again:
            pool.checkin(connection)

    def test_workers_open_the_minimum(self, make: Any, server: Server) -> None:
        pool = make(min_size=3, max_size=5, workers=2, name="warm")
        pool.wait()
        assert pool.get_stats()["idle"] == server.count == 3
        workers = [t for t in threading.enumerate() if t.name.startswith("keyfront-ldap-warm-")]
        assert {t.name for t in workers} == {"keyfront-ldap-warm-1", "keyfront-ldap-warm-2"}
        assert all(t.daemon for t in workers)
        pool.checkin(pool.checkout(), discard=True)
        until(lambda: pool.get_stats()["idle"] == 3)
        assert pool.close(PATIENCE)
        assert not any(t.is_alive() for t in workers)

    def test_who_came_first_is_served_first(self, make: Any, server: Server) -> None:
        pool = make(max_size=1)
        only = pool.checkout()
        order: list[int] = []

        def use(number: int) -> None:
            with pool.connection() as connection:
                assert connection is only
                order.append(number)

        tasks = []
        for number in range(5):
            tasks.append(Task(use, number))
            waiting(pool, number + 1)
        pool.checkin(only)
        for task in tasks:
            task.result()
        assert order == [0, 1, 2, 3, 4]
        stats = pool.get_stats()
        assert (stats["requests"], stats["requests_queued"], stats["opened"]) == (6, 5, 1)
        is_whole(pool, server)

    def test_a_connection_that_is_being_opened_counts(self, make: Any, server: Server) -> None:
        pool = make(max_size=1)
        server.on_open = gate = Gate()
        opener = Task(pool.checkout)
        assert gate.reached.wait(PATIENCE)
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        assert pool.get_stats()["size"] == server.count == 1
        gate.open()
        connection = opener.result()
        pool.checkin(connection)
        assert waiter.result() is connection
        pool.checkin(connection)
        is_whole(pool, server)

    def test_what_is_forgotten_under_the_lock_is_closed(self, make: Any, server: Server) -> None:
        """As the garbage collector does it, in a thread that holds the lock."""
        pool = make(max_size=1)
        connection = pool.checkout()
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        with pool._state.lock:
            pool.forget(connection)
        pool.checkin(waiter.result())
        assert connection.closed
        is_whole(pool, server)

    @pytest.mark.parametrize("doing", ["open", "check", "stale", "close"])
    def test_nobody_waits_for_anothers_network(
        self, make: Any, server: Server, doing: str
    ) -> None:
        pool = make(max_size=3, check_after=0.0)
        first, second = pool.checkout(), pool.checkout()
        gate = Gate()
        held: Callable[[], object]
        if doing == "open":
            server.on_open, held = gate, pool.checkout
        elif doing == "close":
            server.on_close, held = gate, lambda: pool.checkin(first, discard=True)
        else:
            setattr(server, f"on_{doing}", lambda c: gate() if c is first else None)
            pool.checkin(first)
            held = pool.checkout
        task = Task(held)
        assert gate.reached.wait(PATIENCE)
        pool.checkin(second)
        assert pool.checkout() is second
        pool.get_stats()
        pool.retire(lambda connection: False)
        assert not task.done
        gate.open()
        lent = task.result()
        pool.checkin(second)
        for connection in {first, lent} - {None}:
            with suppress(ValueError):
                pool.checkin(connection)
        is_whole(pool, server)

    def test_a_wait_ends(self, make: Any, server: Server) -> None:
        pool = make(max_size=1, name="people")
        connection = pool.checkout()
        patient = Task(pool.checkout)
        waiting(pool, 1)
        tries = 0
        while pool.get_stats()["requests_queued"] < 2:  # its time may be over before it waits
            tries += 1
            with pytest.raises(PoolTimeoutError, match=r"people.* within 0.01 s: 1 of 1"):
                pool.checkout(0.01)
        waiting(pool, 1)
        pool.checkin(connection)
        assert patient.result() is connection
        pool.checkin(connection)
        stats = pool.get_stats()
        assert (stats["requests_errors"], stats["requests_queued"]) == (tries, 2)
        assert stats["requests_wait_ms"] >= 10
        is_whole(pool, server)

    def test_only_so_many_wait(self, make: Any, server: Server) -> None:
        pool = make(max_size=1, max_waiting=2)
        connection = pool.checkout()

        def use() -> None:
            with pool.connection():
                pass

        tasks = [Task(use) for _ in range(2)]
        waiting(pool, 2)
        with pytest.raises(PoolFullError, match="max_waiting"):
            pool.checkout()
        pool.checkin(connection)
        for task in tasks:
            task.result()
        assert pool.get_stats()["requests_errors"] == 1
        is_whole(pool, server)

    def test_who_opens_in_vain_is_told_at_once_and_the_next_may_try(
        self, make: Any, server: Server
    ) -> None:
        pool = make(max_size=1)
        server.on_open = gate = Gate()

        def fail_later(seconds: float) -> None:
            gate()
            fail(seconds)

        server.on_open = fail_later
        first = Task(pool.checkout)
        assert gate.reached.wait(PATIENCE)
        second = Task(pool.checkout)
        waiting(pool, 1)
        third = Task(pool.checkout)
        waiting(pool, 2)
        attempts = iter([fail, lambda seconds: None])
        server.on_open = lambda seconds: next(attempts)(seconds)
        gate.open()
        for task in (first, second):
            with pytest.raises(DirectoryUnavailableError, match="no server"):
                task.result()
        pool.checkin(third.result())
        stats = pool.get_stats()
        assert (stats["opened"], stats["open_errors"], stats["requests_errors"]) == (1, 2, 2)
        is_whole(pool, server)

    def test_a_waiter_opens_in_the_place_of_one_that_is_dropped(
        self, make: Any, server: Server
    ) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        task = Task(pool.checkout)
        waiting(pool, 1)
        connection.broken = True
        pool.checkin(connection)
        assert connection.closed
        other = task.result()
        assert other is not connection
        assert server.peak == 1
        pool.checkin(other, discard=True)
        assert other.closed
        is_whole(pool, server)

    @pytest.mark.parametrize("closer", ["checkin", "retire", "check"])
    def test_a_connection_that_is_being_closed_counts(
        self, make: Any, server: Server, closer: str
    ) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        server.on_close = gate = Gate()
        if closer == "checkin":
            task = Task(pool.checkin, connection, True)
        else:
            pool.checkin(connection)
            connection.broken = True
            task = Task(pool.check) if closer == "check" else Task(pool.retire, lambda c: True)
        assert gate.reached.wait(PATIENCE)
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        gate.open()
        task.result()
        pool.checkin(waiter.result())
        assert server.peak == 1
        is_whole(pool, server)

    def test_what_is_seen_to_be_dead_is_not_lent(self, make: Any, server: Server) -> None:
        pool = make(max_size=3)
        a, b, c = (pool.checkout() for _ in range(3))
        for connection in (a, b, c):
            pool.checkin(connection)
        b.stale = c.stale = True
        assert pool.checkout() is a
        assert b.closed
        assert c.closed
        pool.checkin(a)
        a.stale = True
        fourth = pool.checkout()
        assert fourth not in (a, b, c)
        pool.checkin(fourth)
        stats = pool.get_stats()
        assert (stats["lost"], stats["closed"], stats["opened"]) == (3, 3, 4)
        is_whole(pool, server)

    def test_a_connection_handed_over_is_looked_at_too(self, make: Any, server: Server) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        task = Task(pool.checkout)
        waiting(pool, 1)
        connection.stale = True
        pool.checkin(connection)
        other = task.result()
        assert connection.closed
        assert not other.closed
        pool.checkin(other)
        is_whole(pool, server)

    def test_after_one_asked_in_vain_a_new_one_is_opened(self, make: Any, server: Server) -> None:
        pool = make(max_size=3, check_after=0.0, workers=0)
        members = [pool.checkout() for _ in range(3)]
        for connection in members:
            pool.checkin(connection)
            connection.broken = True
        with pool.connection() as connection:
            assert connection not in members
        assert server.checks == 1
        assert pool.get_stats()["lost"] == 1
        pool.maintain()  # the workers ask the others
        assert all(connection.closed for connection in members)
        is_whole(pool, server)

    def test_close_fails_who_waits_and_drains(self, make: Any, server: Server) -> None:
        pool = make(max_size=2, name="going")
        idle, lent = pool.checkout(), pool.checkout()
        tasks = [Task(pool.checkout) for _ in range(3)]
        waiting(pool, 3)
        closing = Task(pool.close, math.inf)
        for task in tasks:
            with pytest.raises(PoolClosedError, match="going: the pool is closed"):
                task.result()
        assert not closing.done
        assert pool.closed
        pool.checkin(idle)
        assert idle.closed
        assert not closing.done
        pool.checkin(lent)
        assert closing.result() is True
        assert server.count == pool.get_stats()["size"] == 0
        with pytest.raises(PoolClosedError):
            pool.checkout()
        with pytest.raises(PoolClosedError):
            pool.open()
        assert pool.close() is True

    def test_close_waits_no_longer_than_told(self, make: Any, server: Server) -> None:
        pool = make()
        connection = pool.checkout()
        assert pool.close(0.01) is False
        assert not connection.closed
        pool.checkin(connection)
        assert connection.closed
        assert server.count == 0

    def test_close_while_one_is_opened(self, make: Any, server: Server) -> None:
        pool = make()
        server.on_open = gate = Gate()
        opener = Task(pool.checkout)
        assert gate.reached.wait(PATIENCE)
        closing = Task(pool.close, math.inf)
        until(lambda: pool.closed)
        gate.open()
        with pytest.raises(PoolClosedError):
            opener.result()
        assert closing.result() is True
        assert server.count == 0
        assert server.opened[-1].closed

    def test_retire(self, make: Any, server: Server) -> None:
        pool = make(max_size=3)
        a, b, c = (pool.checkout() for _ in range(3))
        pool.checkin(a)
        pool.checkin(b)
        assert pool.retire(lambda connection: connection is not b) == 2
        assert a.closed
        assert not b.closed
        assert not c.closed
        pool.checkin(c)
        assert c.closed
        assert pool.checkout() is b
        pool.checkin(b)
        is_whole(pool, server)

    def test_check_closes_the_dead(self, make: Any, server: Server) -> None:
        pool = make(max_size=3)
        a, b, c = (pool.checkout() for _ in range(3))
        for connection in (a, b, c):
            pool.checkin(connection)
        b.broken = c.stale = True
        pool.check()
        assert [a.closed, b.closed, c.closed] == [False, True, True]
        assert pool.get_stats()["lost"] == 2
        is_whole(pool, server)

    def test_the_order_survives_a_check(self, make: Any) -> None:
        pool = make()
        a, b, c = (pool.checkout() for _ in range(3))
        for connection in (a, b, c):
            pool.checkin(connection)
        pool.check()
        again = [pool.checkout() for _ in range(3)]
        assert again == [c, b, a]
        for connection in again:
            pool.checkin(connection)

    def test_the_order_survives_a_check_that_is_interrupted(
        self, make: Any, server: Server
    ) -> None:
        pool = make()
        a, b, c = (pool.checkout() for _ in range(3))
        for connection in (a, b, c):
            pool.checkin(connection)
        server.on_check = lambda connection: kill(connection) if connection is b else None
        with pytest.raises(Killed):
            pool.check()
        again = [pool.checkout(0) for _ in range(2)]
        assert again == [c, a]
        for connection in again:
            pool.checkin(connection)

    def test_a_waiter_gets_what_a_check_returns(self, make: Any, server: Server) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        pool.checkin(connection)
        server.on_check = gate = Gate()
        checking = Task(pool.check)
        assert gate.reached.wait(PATIENCE)
        task = Task(pool.checkout)
        waiting(pool, 1)
        gate.open()
        checking.result()
        assert task.result() is connection
        pool.checkin(connection)
        is_whole(pool, server)

    @pytest.mark.parametrize("doing", ["open", "check", "stale", "close"])
    def test_death_at_the_network_loses_nothing(
        self, make: Any, server: Server, doing: str
    ) -> None:
        pool = make(max_size=2, check_after=0.0)
        busy = pool.checkout()
        if doing != "open":
            pool.checkin(pool.checkout())
        victim_stale = doing == "close"
        for connection in server.opened:
            connection.stale = victim_stale and connection is not busy
        gate = Gate()

        def die(_: object) -> None:
            gate()
            raise Killed

        setattr(server, f"on_{doing}", die)
        dying = Task(pool.checkout)
        assert gate.reached.wait(PATIENCE)
        setattr(server, f"on_{doing}", lambda _: None)
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        gate.open()
        with pytest.raises(Killed):
            dying.result()
        pool.checkin(waiter.result())  # the place of the dead was handed on
        pool.checkin(busy)
        assert pool.get_stats()["requests_errors"] == 1
        is_whole(pool, server)

    def test_death_in_a_sweep_loses_nothing(self, make: Any, server: Server) -> None:
        pool = make(max_size=2)
        pool.checkin(pool.checkout())
        for name in ("on_check", "on_stale"):
            setattr(server, name, kill)
            with pytest.raises(Killed):
                pool.check()
            setattr(server, name, lambda _: None)
            is_whole(pool, server)

    def test_who_dies_in_the_block_takes_the_connection_along(
        self, make: Any, server: Server
    ) -> None:
        pool = make()
        with pytest.raises(Killed):
            with pool.connection() as connection:
                raise Killed
        assert connection.closed
        with pytest.raises(RuntimeError, match="an ordinary one"):
            with pool.connection() as connection:
                raise RuntimeError("an ordinary one")
        assert not connection.closed
        is_whole(pool, server)

    def test_closing_may_fail(self, make: Any, server: Server) -> None:
        pool = make()
        server.on_close = fail
        pool.checkin(pool.checkout(), discard=True)
        is_whole(pool, server)

    def test_workers_try_again(self, make: Any, server: Server) -> None:
        attempts = []

        def fail_thrice(seconds: float) -> None:
            attempts.append(seconds)
            if len(attempts) <= 3:
                fail(seconds)

        pool = make(min_size=0)
        pool.close()
        server.on_open = fail_thrice
        pool = make(min_size=1)
        pool.wait()
        assert pool.get_stats()["idle"] == 1
        is_whole(pool, server)

    def test_a_pool_that_cannot_warm_up_says_why(self, make: Any, server: Server) -> None:
        pool = make(min_size=0)
        pool.close()
        server.on_open = fail
        pool = make(min_size=2, name="cold")
        until(lambda: pool.get_stats()["open_errors"])
        with pytest.raises(PoolTimeoutError, match=r"cold: 0 of 2 .* 0.01 s: no server"):
            pool.wait(0.01)

    def test_closing_ends_a_wait_for_the_minimum(self, make: Any, server: Server) -> None:
        server.on_open = gate = Gate()
        pool = make(min_size=1)
        waiter = Task(pool.wait)
        assert gate.reached.wait(PATIENCE)
        closing = Task(pool.close, math.inf)
        with pytest.raises(PoolClosedError):
            waiter.result()
        gate.open()
        assert closing.result() is True

    def test_a_worker_evicts(self, make: Any, server: Server) -> None:
        pool = make(min_size=1, max_size=4, max_idle=0.02)
        connections = [pool.checkout() for _ in range(4)]
        for connection in connections:
            pool.checkin(connection)
        until(lambda: pool.get_stats()["size"] == 1)
        assert pool.get_stats()["idle_evicted"] >= 3
        until(lambda: server.checks > 1, "the one that stays is asked")
        assert pool.close()

    def test_a_pool_that_is_forgotten_ends_its_workers(self, make: Any, server: Server) -> None:
        pool = server.pool(min_size=2, name="forgotten")
        pool.open()
        pool.wait()
        workers = [t for t in threading.enumerate() if "forgotten" in t.name]
        assert workers
        gone = weakref.ref(pool)
        del pool
        # A worker may be about to look for work.
        until(lambda: gc.collect() >= 0 and gone() is None, "the pool is collected")
        for worker in workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()

    def test_stress(self, make: Any, server: Server) -> None:
        """12 threads, 2000 checkouts each, 2 connections: no more, and none lent twice."""
        pool = make(max_size=2, check_after=0.0)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        lent: set[Connection] = set()

        def use(seed: int) -> int:
            served = 0
            for turn in range(2000):
                kind = (seed * 7919 + turn * 31) % 97
                try:
                    connection = pool.checkout(0 if kind == 3 else 1e-4 if kind == 5 else None)
                except PoolTimeoutError:
                    assert kind in (3, 5)
                    continue
                assert connection not in lent
                lent.add(connection)
                assert not connection.closed
                if turn % 16 == 0:
                    time.sleep(0)
                if kind == 7:
                    connection.broken = True
                elif kind == 11:
                    connection.stale = True
                lent.discard(connection)
                pool.checkin(connection, discard=kind == 13)
                served += 1
            return served

        try:
            tasks = [Task(use, seed) for seed in range(12)]
            served = sum(task.result() for task in tasks)
        finally:
            sys.setswitchinterval(interval)
        assert server.peak <= 2
        stats = pool.get_stats()
        assert stats["requests"] == 24000
        assert served == 24000 - stats["requests_errors"]
        is_whole(pool, server)


class GreenletSuite:
    """What only greenlets can do.

    It needs a fixture ``green`` with ``spawn``, ``join`` (whatever it ends with), ``kill``,
    ``kill_soon`` (at the next switch at the earliest), ``Timeout``, and ``workers()``.
    """

    def test_a_waiter_is_killed(self, make: Any, server: Server, green: Any) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        victim = green.spawn(pool.checkout)
        waiting(pool, 1)
        green.kill(victim)
        waiting(pool, 0)
        pool.checkin(connection)
        is_whole(pool, server)

    def test_a_waiter_is_killed_as_it_is_served(
        self, make: Any, server: Server, green: Any
    ) -> None:
        pool = make(max_size=1)
        for discard in (False, True):
            connection = pool.checkout()
            victim = green.spawn(pool.checkout)
            waiting(pool, 1)
            after = Task(pool.checkout)
            waiting(pool, 2)
            # Without a switch in between, so that it is served and does not know it yet.
            green.kill_soon(victim)
            pool.checkin(connection, discard=discard)
            green.kill(victim)
            pool.checkin(after.result())
            is_whole(pool, server)

    def test_a_waiter_is_timed_out_from_outside(
        self, make: Any, server: Server, green: Any
    ) -> None:
        pool = make(max_size=1)
        connection = pool.checkout()
        with pytest.raises(green.Timeout):
            with green.Timeout(0.01):
                pool.checkout()
        pool.checkin(connection)
        is_whole(pool, server)

    @pytest.mark.parametrize("doing", ["open", "check", "stale"])
    def test_killed_at_the_network(
        self, make: Any, server: Server, green: Any, doing: str
    ) -> None:
        pool = make(max_size=1, check_after=0.0)
        if doing != "open":
            pool.checkin(pool.checkout())
        gate = Gate()
        setattr(server, f"on_{doing}", gate)
        victim = green.spawn(pool.checkout)
        assert gate.reached.wait(PATIENCE)
        setattr(server, f"on_{doing}", lambda _: None)
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        green.kill(victim)
        pool.checkin(waiter.result())
        is_whole(pool, server)

    def test_killed_in_the_block(self, make: Any, server: Server, green: Any) -> None:
        pool = make(max_size=1)
        gate = Gate()

        def use() -> None:
            with pool.connection():
                gate()

        victim = green.spawn(use)
        assert gate.reached.wait(PATIENCE)
        green.kill(victim)
        until(lambda: pool.get_stats()["lent"] == 0)
        assert server.opened[0].closed
        is_whole(pool, server)

    def test_users_without_time_take_no_place_with_them(
        self, make: Any, server: Server, green: Any
    ) -> None:
        """Wherever a timeout or a kill lands: waiting, opening, looking, giving back."""
        dice = random.Random(7)

        def pause(_: object = None) -> None:
            time.sleep(dice.choice((0.0, 0.0, 0.0005)))

        pool = make(max_size=5, check_after=0.0)
        server.on_open = server.on_stale = server.on_check = server.on_close = pause

        def use() -> None:
            for _ in range(40):
                with suppress(green.Timeout), green.Timeout(dice.uniform(0.0, 0.004)):
                    with pool.connection() as connection:
                        pause()
                        connection.broken = dice.random() < 0.4

        users = [green.spawn(use) for _ in range(40)]
        for victim in users[::4]:
            time.sleep(dice.uniform(0.0, 0.004))
            green.kill_soon(victim)
        for user in users:
            green.join(user)
        is_whole(pool, server)

    def test_nobody_else_runs_while_the_lock_is_held(
        self, make: Any, server: Server, green: Any
    ) -> None:
        pool = make(max_size=1)
        ran: list[int] = []
        green.spawn(ran.append, 1)
        with pool._state.lock:
            pool._state.close()
        assert not ran

    @pytest.mark.parametrize("doing", ["checkin", "discard"])
    def test_a_timeout_while_giving_back(
        self, make: Any, server: Server, green: Any, doing: str
    ) -> None:
        """Whoever holds the lock may be made to wait by a finalizer of anybody's."""
        pool = make(max_size=1)
        connection = pool.checkout()

        timers = []

        def give_back() -> None:
            with green.Timeout(0.01) as timer:
                timers.append(timer)
                pool.checkin(connection, doing == "discard")

        pool._state.lock.acquire()
        giving = Task(give_back)
        until(lambda: timers and not timers[0].pending, "its time is over")
        pool._state.lock.release()
        with pytest.raises(green.Timeout):
            giving.result()
        is_whole(pool, server)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_the_workers_may_be_killed(self, make: Any, server: Server, green: Any) -> None:
        pool = make(min_size=1, max_size=2)
        pool.wait()
        workers = green.workers()
        assert workers
        for worker in workers:
            green.kill(worker)
        is_whole(pool, server)
        pool.checkin(pool.checkout(), discard=True)
        pool.checkin(pool.checkout(), discard=True)
        with pool.connection():  # opens, and so sees that a worker is missing
            pass
        pool.retire(lambda connection: True)
        until(lambda: pool.get_stats()["idle"] == 1, "another worker opens the minimum")

    def test_the_hub_runs_while_one_waits_and_another_opens(
        self, make: Any, server: Server, green: Any
    ) -> None:
        pool = make(max_size=1)
        server.on_open = gate = Gate()
        opener, waiter = Task(pool.checkout), Task(pool.checkout)
        waiting(pool, 1)
        beats = []

        def beat() -> None:
            for _ in range(50):
                time.sleep(0.0001)
                beats.append(time.monotonic())

        Task(beat).result()
        assert len(beats) == 50
        assert not opener.done
        assert not waiter.done
        gate.open()
        pool.checkin(opener.result())
        pool.checkin(waiter.result())
        is_whole(pool, server)
