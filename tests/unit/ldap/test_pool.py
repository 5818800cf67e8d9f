"""The connection pool: the suite on threads, and what a test can only see from inside."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.register_assert_rewrite("conformance.pool")

from conformance.pool import (  # noqa: E402
    Connection,
    Gate,
    Killed,
    PoolSuite,
    Server,
    Task,
    fail,
    is_whole,
    until,
    waiting,
)
from keyfront.errors import (  # noqa: E402
    DirectoryUnavailableError,
    OptionError,
    PoolClosedError,
    PoolTimeoutError,
)
from keyfront.middleware.ldap import pool as pool_module  # noqa: E402
from keyfront.middleware.ldap.maintenance import MAX_RETRY_DELAY, SWEEP_SECONDS  # noqa: E402
from keyfront.middleware.ldap.pool import LIFETIME_JITTER, ConnectionPool  # noqa: E402
from support.clocks import Clock  # noqa: E402
from support.served import PATIENCE  # noqa: E402


class TestThreads(PoolSuite):
    pass


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(server: Server, clock: Clock) -> Callable[..., ConnectionPool[Connection]]:
    """Make open pools that go by the clock, without workers."""

    def make(**options: Any) -> ConnectionPool[Connection]:
        pool = server.pool(clock=clock.monotonic, workers=0, **options)
        pool.open()
        return pool

    return make


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size = 0: must be a whole number, 1 or more"),
        ({"min_size": 5, "max_size": 3}, r"= 5: must be a whole number from 0 to max_size \(3\)"),
        ({"min_size": -1}, "min_size = -1: must be a whole number from 0"),
        ({"max_waiting": -1}, "max_waiting = -1: must be a whole number, 0 or more"),
        ({"workers": -1}, "workers = -1: must be a whole number, 0 or more"),
        ({"check_after": -0.5}, "check_after = -0.5: must be a number of seconds, 0 or more"),
        ({"timeout": 0}, "timeout = 0: must be a number of seconds above 0"),
        ({"max_lifetime": math.nan}, "max_lifetime = nan"),
        ({"max_idle": -1}, "max_idle = -1"),
        ({"retry_delay": 0}, "retry_delay = 0"),
    ],
)
def test_options_out_of_range(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        server.pool(**options)


def test_never_is_a_time(server: Server) -> None:
    with server.pool(
        timeout=math.inf, max_lifetime=math.inf, max_idle=math.inf, check_after=math.inf,
        min_size=1, max_size=1,
    ) as pool:
        pool.wait()
        connection = pool.checkout()
        waiter = Task(pool.checkout)
        waiting(pool, 1)
        pool.checkin(connection)
        pool.checkin(waiter.result())


def test_it_must_be_opened(server: Server) -> None:
    pool = server.pool(name="new", min_size=1)
    assert pool.closed
    for use in (pool.checkout, pool.wait):
        with pytest.raises(PoolClosedError, match=r"new: the pool was not opened; call open\(\)"):
            use()
    assert server.count == 0
    with pool:
        pool.open()
        with pool.connection():
            assert not pool.closed
    assert pool.closed
    assert server.count == 0


def test_what_is_not_lent_is_not_taken_back(make: Any, server: Server) -> None:
    pool = make()
    connection = pool.checkout()
    with pytest.raises(ValueError, match="not lent by the pool"):
        pool.checkin(Connection(7))
    pool.checkin(connection)
    with pytest.raises(ValueError, match="not lent by the pool"):
        pool.checkin(connection)
    is_whole(pool, server)


def test_no_time_is_for_what_is_idle(make: Any, server: Server) -> None:
    pool = make()
    with pytest.raises(PoolTimeoutError):
        pool.checkout(0)
    assert not server.opened
    connection = pool.checkout()
    pool.checkin(connection)
    assert pool.checkout(0) is connection


def test_the_time_left_is_for_opening(make: Any, server: Server, clock: Clock) -> None:
    pool = make(timeout=10.0)
    stale = pool.checkout(5.0)
    pool.checkin(stale)
    stale.stale = True
    server.on_stale = lambda _: clock.later(4.0)
    pool.checkout()
    assert server.seconds == [5.0, 6.0]
    pool.checkin(server.opened[-1])
    server.opened[-1].stale = True
    server.on_stale = lambda _: clock.later(11.0)
    with pytest.raises(PoolTimeoutError):
        pool.checkout()
    assert len(server.seconds) == 2
    is_whole(pool, server)


def test_an_old_connection_is_replaced_at_checkout(
    make: Any, server: Server, clock: Clock
) -> None:
    pool = make(max_lifetime=100.0)
    connection = pool.checkout()
    pool.checkin(connection)
    clock.later(100 * (1 - LIFETIME_JITTER) - 1)
    assert pool.checkout() is connection
    pool.checkin(connection)
    clock.later(100 * LIFETIME_JITTER + 1)
    other = pool.checkout()
    assert connection.closed
    assert pool.get_stats()["expired"] == 1
    clock.later(100)
    pool.checkin(other)
    assert other.closed
    assert pool.get_stats()["expired"] == 2
    is_whole(pool, server)


def test_what_was_opened_together_does_not_end_together(make: Any, clock: Clock) -> None:
    pool = make(max_size=50, max_lifetime=100.0)
    connections = [pool.checkout() for _ in range(50)]
    for connection in connections:
        pool.checkin(connection)
    clock.later(100 * (1 - LIFETIME_JITTER / 2))
    pool.maintain()
    # All on one side of the middle: once in 2**49.
    assert 0 < sum(connection.closed for connection in connections) < 50


def test_only_what_was_idle_for_long_is_checked(make: Any, server: Server, clock: Clock) -> None:
    pool = make(check_after=30.0)
    pool.checkin(pool.checkout())
    clock.later(29)
    pool.checkin(pool.checkout())
    clock.later(29)
    pool.checkin(pool.checkout())
    assert server.checks == 0
    clock.later(30)
    pool.checkin(pool.checkout())
    assert server.checks == 1


def test_a_look_leaves_half_of_the_time(make: Any, server: Server, clock: Clock) -> None:
    pool = make(check_after=0.0, timeout=8.0, max_size=1)
    connection = pool.checkout()
    pool.checkin(connection)
    for timeout in (None, 2.0, 0):
        assert pool.checkout(timeout) is connection
        pool.checkin(connection)
    pool.check()
    assert server.check_seconds == [4.0, 1.0, 0.05, math.inf]
    # What is spent on one that is dead is not there for the next.
    connection.broken = True
    server.on_check = lambda _: clock.later(4.0)
    pool.checkout()
    assert server.seconds[-1] == 4.0


def test_eviction_ends_at_the_minimum(make: Any, server: Server, clock: Clock) -> None:
    pool = make(min_size=2, max_size=5, max_idle=80.0, max_lifetime=1e6)
    pool.wait()
    connections = [pool.checkout() for _ in range(5)]
    for connection in connections:
        pool.checkin(connection)
    assert pool.maintain() == 10.0
    clock.later(79)
    assert pool.maintain() == 1.0
    assert server.count == 5
    with pool.connection() as last:
        assert last is connections[-1]
    server.checks = 0
    clock.later(1)
    pool.maintain()
    assert [c.closed for c in connections] == [True, True, True, False, False]
    assert pool.get_stats()["idle_evicted"] == 3
    # Of those that stay, the server was asked over the one that it may soon find idle.
    assert server.checks == 1
    pool.maintain()
    assert server.checks == 1
    connections[3].broken = connections[4].broken = True
    clock.later(80)
    pool.maintain()
    assert connections[3].closed
    assert connections[4].closed
    assert pool.get_stats()["idle"] == server.count == 2


def test_the_minimum_is_asked_in_time(make: Any, server: Server, clock: Clock) -> None:
    pool = make(min_size=1, max_idle=80.0)
    pool.wait()
    clock.later(79)
    assert pool.maintain() == 1.0
    assert server.checks == 0
    clock.later(1)
    pool.maintain()
    assert server.checks == 1


def test_a_sweep_leaves_alone_what_was_heard_from(
    make: Any, server: Server, clock: Clock
) -> None:
    """Whoever wants it at that moment would find it lent, and open another one."""
    looked_at: list[Connection] = []
    pool = make(max_lifetime=1e6)
    connection = pool.checkout()
    pool.checkin(connection)
    server.on_stale = looked_at.append
    for seconds in (0, SWEEP_SECONDS / 2 - 1):
        clock.later(seconds)
        pool.maintain()
        assert not looked_at
    clock.later(1)
    pool.maintain()
    assert looked_at == [connection]
    connection.stale = True
    pool.maintain()
    assert connection.closed
    is_whole(pool, server)


def test_what_is_looked_at_can_be_doubted(make: Any, server: Server, clock: Clock) -> None:
    """It is lent to the workers then, and must not come back without having been asked."""
    pool = make(max_lifetime=1e6, check_after=math.inf)
    connection = pool.checkout()
    pool.checkin(connection)
    clock.later(SWEEP_SECONDS)
    server.on_stale = gate = Gate()
    sweeping = Task(pool.maintain)
    assert gate.reached.wait(60)
    pool.doubt(lambda each: each is connection)
    gate.open()
    sweeping.result()
    with pool.connection() as again:
        assert again is connection
    assert server.checks == 1


def test_what_is_lent_can_be_doubted(make: Any, server: Server) -> None:
    """Whoever gives it back may have heard from it before that, and be late."""
    pool = make(check_after=math.inf, max_size=1)
    with pool.connection() as connection:
        pool.doubt(lambda each: each is connection)
    for _ in range(2):
        with pool.connection() as again:
            assert again is connection
        assert server.checks == 1


def test_the_old_are_replaced_before_anybody_asks(
    make: Any, server: Server, clock: Clock
) -> None:
    pool = make(min_size=2, max_lifetime=100.0)
    pool.wait()
    clock.later(100)
    pool.maintain()
    assert [connection.closed for connection in server.opened] == [True, True, False, False]
    assert pool.get_stats()["expired"] == 2


def test_a_lent_connection_lets_one_more_idle_go(make: Any, server: Server, clock: Clock) -> None:
    pool = make(min_size=1, max_size=3, max_idle=80.0)
    pool.wait()
    lent, idle = pool.checkout(), pool.checkout()
    pool.checkin(idle)
    clock.later(80)
    pool.maintain()
    assert idle.closed
    assert not lent.closed


def test_workers_have_no_more_to_do_than_needed(server: Server, clock: Clock) -> None:
    """Nothing is due for ever, such as a check that was just made."""
    pool = ConnectionPool(server, min_size=1, max_idle=80.0, workers=0, clock=clock.monotonic)
    pool.open()
    for _ in range(5):
        assert pool.maintain() == 10.0
        clock.later(80)
    pool = ConnectionPool(server, min_size=1, max_idle=1e6, workers=0, clock=clock.monotonic)
    pool.open()
    assert pool.maintain() == SWEEP_SECONDS


def test_the_workers_pause_grows(
    make: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    pool = server.pool(
        clock=clock.monotonic, workers=0, min_size=1, retry_delay=1.0, name="lonely"
    )
    server.on_open = fail
    pool.open()
    pauses = []
    for _ in range(6):
        pauses.append(pool.maintain())
        assert pool.maintain() == pytest.approx(pauses[-1])  # not tried before it is time
        clock.later(pauses[-1] + 1e-6)
    for n, pause in enumerate(pauses):
        assert pause == pytest.approx(2.0**n, rel=0.101)
    assert pool.get_stats()["open_errors"] == len(pauses)
    for _ in range(100):
        pool.maintain()
        clock.later(MAX_RETRY_DELAY * 1.101)
    assert pool.get_stats()["open_errors"] == len(pauses) + 100
    server.on_open = lambda seconds: None
    pool.maintain()
    assert pool.get_stats()["idle"] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "lonely: cannot open a connection: no server",
        "lonely: connections can be opened again",
    ]
    assert not caplog.records[0].exc_info
    pool.retire(lambda connection: True)
    server.on_open = fail
    assert pool.maintain() == pytest.approx(1.0, rel=0.101)


def test_an_unexpected_error_has_its_trace(
    make: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(seconds: float) -> None:
        raise ZeroDivisionError

    server.on_open = stumble
    pool = make(min_size=1)
    pool.maintain()
    assert caplog.records[0].exc_info


def test_without_workers_a_wait_opens(make: Any, server: Server) -> None:
    pool = make(min_size=2)
    pool.wait()
    assert server.count == 2
    server.on_open = fail
    pool = make(min_size=2)
    with pytest.raises(PoolTimeoutError, match="no server"):
        pool.wait()


def test_who_waits_for_the_minimum_finds_it_idle(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no moment at which the wait is over and the connection is not idle yet."""
    seen = []

    class Watched:
        """A lock that looks, each time it is free again, at what anybody could see then."""

        def __init__(self) -> None:
            self._lock = Lock()
            self.acquire, self.locked = self._lock.acquire, self._lock.locked
            self.looking = False

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

        def release(self) -> None:
            self._lock.release()
            if not self.looking:
                self.looking = True
                stats = pool.get_stats()
                if stats["idle"] + stats["lent"]:
                    seen.append(stats["idle"])
                self.looking = False

    Lock = threading.Lock
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Lock", Watched)
        pool = server.pool(min_size=1, workers=0)
        pool.open()
    pool.maintain()
    assert seen
    assert set(seen) == {1}


def test_the_counts(make: Any, clock: Clock) -> None:
    pool = make(max_size=4)
    with pool.connection():
        clock.later(1.5)
    with pool.connection():
        clock.later(0.25)
    expected = {
        "size": 1, "idle": 1, "lent": 0, "waiting": 0, "max_size": 4, "requests": 2,
        "requests_queued": 0, "requests_wait_ms": 0, "requests_errors": 0, "opened": 1,
        "open_errors": 0, "closed": 0, "lost": 0, "expired": 0, "idle_evicted": 0,
        "usage_ms": 1750,
    }
    assert pool.get_stats() == expected
    assert pool.pop_stats() == expected
    popped = pool.get_stats()
    assert {name for name in expected if popped[name]} == {"size", "idle", "max_size"}
    assert repr(pool) == "<ConnectionPool pool: 1 of 4>"


class Signal:
    """A waiter's signal that does something when it has waited, and then fails to tell."""

    def __init__(self, then: Callable[[], bool]) -> None:
        self._then = then

    def acquire(self, timeout: float) -> bool:
        return self._then()

    def release(self) -> None:
        pass


def rigged(monkeypatch: pytest.MonkeyPatch, then: Callable[[], bool]) -> None:
    """The next who waits calls ``then``."""
    rig: list[Signal] = [Signal(then)]

    class Waiter(pool_module._Waiter[Any]):
        def __init__(self) -> None:
            super().__init__()
            if rig:
                self.signal = rig.pop()  # type: ignore[assignment]

    monkeypatch.setattr(pool_module, "_Waiter", Waiter)


@pytest.mark.parametrize("discard", [False, True])
def test_served_at_the_last_moment(
    make: Any, server: Server, monkeypatch: pytest.MonkeyPatch, discard: bool
) -> None:
    pool = make(max_size=1)
    connection = pool.checkout()

    def time_out() -> bool:
        pool.checkin(connection, discard=discard)
        return False

    rigged(monkeypatch, time_out)
    pool.checkin(pool.checkout())
    is_whole(pool, server)


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_dead_at_the_moment_it_is_served(
    make: Any, server: Server, monkeypatch: pytest.MonkeyPatch, discard: bool, others: int
) -> None:
    pool = make(max_size=1)
    connection = pool.checkout()
    tasks = []

    def die() -> bool:
        tasks.extend(Task(pool.checkout) for _ in range(others))
        waiting(pool, 1 + others)
        pool.checkin(connection, discard=discard)
        raise Killed

    rigged(monkeypatch, die)
    with pytest.raises(Killed):
        pool.checkout()
    for task in tasks:
        pool.checkin(task.result())
    is_whole(pool, server)


def test_a_place_that_comes_too_late_is_passed_on(
    make: Any, server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(max_size=1)
    connection = pool.checkout()

    def come_late() -> bool:
        clock.later(10)
        pool.checkin(connection, discard=True)
        return True

    rigged(monkeypatch, come_late)
    with pytest.raises(PoolTimeoutError):
        pool.checkout(5.0)
    assert len(server.opened) == 1
    is_whole(pool, server)


def test_closed_at_the_moment_it_dies(
    make: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that it was served is closed rather than kept."""
    pool = make(max_size=1)
    connection = pool.checkout()

    def die() -> bool:
        pool.checkin(connection)
        pool.close(0)
        raise Killed

    rigged(monkeypatch, die)
    with pytest.raises(Killed):
        pool.checkout()
    assert connection.closed
    assert server.count == pool.get_stats()["size"] == 0


NO_MEMORY = """
import _testcapi, gc, logging, os, signal, sys
from keyfront.middleware.ldap.pool import ConnectionPool

class Connection:
    closed = False

class Connector:
    def __init__(self):
        self.made = [Connection() for _ in range(4)]
        self.opened = 0
    def open(self, seconds):
        self.opened += 1
        return self.made[self.opened - 1]
    def close(self, connection):
        connection.closed = True
    abandon = close
    def is_stale(self, connection):
        return False
    def is_fit(self, connection):
        return True

def attempt(before, expired, number):
    connector = Connector()
    pool = ConnectionPool(connector, min_size=0, max_size=2, timeout=1.0, workers=0)
    pool.open()
    for each in [pool.checkout() for _ in range(before)]:
        pool.checkin(each)
    for each in pool._state.idle if expired else ():
        each.expires_at = 0.0
    done = False
    try:
        _testcapi.set_nomemory(number, number + 1)
        pool.checkin(pool.checkout())
        done = True
    except (MemoryError, RuntimeError):  # the latter: "can't allocate lock"
        pass
    finally:
        _testcapi.remove_mem_hooks()
    stats = pool.get_stats()
    living = sum(not each.closed for each in connector.made[: connector.opened])
    if not (stats["size"] == stats["idle"] == living and stats["lent"] == 0):
        print(before, expired, number, stats, living)
    return done

def ends(*case):
    # In a child: Python 3.13.0 itself dies of some allocations.
    child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if attempt(*case) else 1
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

logging.disable()
gc.disable()
told = died = 0
for before, expired in ((0, False), (1, False), (2, False), (1, True)):
    attempt(before, expired, 10**6)
    number = 0
    while any(statuses := [ends(before, expired, number + n) for n in range(4)]):
        assert statuses[0] in (0, 1, -signal.SIGSEGV, -signal.SIGABRT), (number, statuses)
        told += statuses[0] == 1
        died += statuses[0] < 0
        number += 1
assert told > 10 * died, (told, died)
"""


def test_no_memory_for_the_one_or_the_other() -> None:
    """Wherever it ends: no place of the pool is lost, and nothing stays open."""
    pytest.importorskip("_testcapi")
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_interrupted_while_it_waits(make: Any, server: Server) -> None:
    pool = make(max_size=1)
    connection = pool.checkout()
    struck = []

    def interrupt_once(*_: object) -> None:
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt

    def interrupt() -> None:
        waiting(pool, 1)
        # Again and again, as a signal that comes just before the system call does not end it.
        until(lambda: signal.pthread_kill(main, signal.SIGINT) or struck)

    main = threading.main_thread().ident or 0
    before = signal.signal(signal.SIGINT, interrupt_once)
    try:
        task = Task(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.checkout()
        task.result()
    finally:
        signal.signal(signal.SIGINT, before)
    pool.checkin(connection)
    is_whole(pool, server)


def test_no_thread_can_be_started(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter, or at a limit: the pool works, and tries again."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = server.pool(min_size=2)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        pool.open()
        is_whole(pool, server)
    pool.retire(lambda connection: True)
    with pool.connection():
        until(lambda: pool.get_stats()["size"] == 2)
    assert pool.close()


def test_a_fitness_that_raises_drops(
    make: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(connection: Connection) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(server, "is_fit", stumble)
    pool = make()
    connection = pool.checkout()
    with pytest.raises(ZeroDivisionError):
        pool.checkin(connection)
    assert connection.closed
    assert pool.get_stats()["size"] == 0


def test_a_retired_one_that_is_handed_on_unused_is_closed(make: Any, server: Server) -> None:
    pool = make(max_size=1)
    pool.checkin(pool.checkout())
    server.on_check = gate = Gate()
    checking = Task(pool.check)
    assert gate.reached.wait(60)
    assert pool.retire(lambda connection: True) == 1
    gate.open()
    checking.result()
    assert server.count == 0
    is_whole(pool, server)


def test_retired_at_the_moment_it_is_served(
    make: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(max_size=1)
    connection = pool.checkout()

    def retire() -> bool:
        pool.checkin(connection)
        return bool(pool.retire(lambda connection: True))

    rigged(monkeypatch, retire)
    other = pool.checkout()
    assert connection.closed
    assert not other.closed
    pool.checkin(other)
    is_whole(pool, server)


class Machine(RuleBasedStateMachine):
    """Any order of doings, on a clock that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.server = Server()
        self.pool = self.server.pool(
            min_size=1, max_size=3, timeout=5.0, max_lifetime=100.0, max_idle=40.0,
            check_after=10.0, workers=0, retry_delay=1.0, clock=self.clock.monotonic,
        )
        self.pool.open()
        self.lent: list[Connection] = []
        self.requests = self.errors = 0

    @precondition(lambda self: not self.pool.closed)
    @rule()
    def checkout(self) -> None:
        self.requests += 1
        # Who would wait, would wait for ever: all is one thread.
        no_time = len(self.lent) == self.pool.max_size
        try:
            connection = self.pool.checkout(0 if no_time else None)
        except (PoolTimeoutError, DirectoryUnavailableError):
            self.errors += 1
            assert no_time or self.server.on_open is fail
            return
        assert not no_time
        assert connection not in self.lent
        assert not connection.closed
        assert not connection.stale
        self.lent.append(connection)

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), discard=st.booleans())
    def checkin(self, data: st.DataObject, discard: bool) -> None:
        connection = data.draw(st.sampled_from(self.lent))
        self.lent.remove(connection)
        self.pool.checkin(connection, discard)
        assert connection.closed or not (discard or connection.broken)

    @precondition(lambda self: self.server.count)
    @rule(data=st.data(), how=st.sampled_from(["broken", "stale"]))
    def die(self, data: st.DataObject, how: str) -> None:
        living = [c for c in self.server.opened if not c.closed]
        setattr(data.draw(st.sampled_from(living)), how, True)

    @rule(seconds=st.sampled_from([0.5, 9.0, 39.0, 94.0]))
    def later(self, seconds: float) -> None:
        self.clock.later(seconds)

    @rule(up=st.booleans())
    def server_is(self, up: bool) -> None:
        self.server.on_open = (lambda seconds: None) if up else fail

    @rule()
    def maintain(self) -> None:
        assert self.pool.maintain() > 0

    @rule()
    def check(self) -> None:
        self.pool.check()

    @precondition(lambda self: self.server.count)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        living = [c for c in self.server.opened if not c.closed]
        chosen = data.draw(st.sampled_from(living))
        self.pool.retire(lambda connection: connection is chosen)
        assert chosen.closed or chosen in self.lent

    @precondition(lambda self: len(self.server.opened) > 5)
    @rule()
    def close(self) -> None:
        assert self.pool.close(0) is not bool(self.lent)
        with pytest.raises(PoolClosedError):
            self.pool.checkout()
        self.requests += 1
        self.errors += 1

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.pool.get_stats()
        living = [c for c in self.server.opened if not c.closed]
        assert stats["size"] == stats["idle"] + stats["lent"] == len(living) == self.server.count
        assert stats["size"] == stats["opened"] - stats["closed"]
        assert stats["lent"] == len(self.lent)
        assert stats["opened"] == len(self.server.opened)
        assert self.server.peak <= self.pool.max_size
        assert stats["requests"] == self.requests
        assert stats["requests_errors"] == self.errors
        assert stats["requests_queued"] == stats["waiting"] == 0
        assert all(not c.closed for c in self.lent)
        assert not (self.pool.closed and stats["idle"])
        assert stats["lost"] + stats["expired"] + stats["idle_evicted"] <= stats["closed"]


def test_any_order() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
