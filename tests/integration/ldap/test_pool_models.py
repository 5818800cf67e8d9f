"""The connection pool where it is not plain threads: under gevent, under eventlet, after a fork."""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("conformance.pool")

from conformance.pool import (  # noqa: E402
    Connection,
    PoolSuite,
    Server,
    Task,
    is_whole,
    waiting,
)
from keyfront.errors import PoolClosedError  # noqa: E402
from keyfront.middleware.ldap.pool import ConnectionPool  # noqa: E402
from support.served import PATIENCE  # noqa: E402

ROOT = Path(__file__).parents[3]

GREEN_TESTS = """
import pytest
pytest.register_assert_rewrite("conformance.pool")
from conformance.pool import GreenletSuite, PoolSuite

class TestGreenlets(PoolSuite, GreenletSuite):
    @pytest.fixture
    def green(self):
        return Green

def test_it_is_patched():
    import threading
    assert "%s" in type(threading.Lock()).__module__
"""

GEVENT = """
import gevent.monkey; gevent.monkey.patch_all()
import gevent, gc, threading

class Green:
    Timeout = gevent.Timeout
    spawn = staticmethod(gevent.spawn)

    @staticmethod
    def join(greenlet):
        greenlet.join()

    @staticmethod
    def kill(greenlet):
        greenlet.kill()

    @staticmethod
    def kill_soon(greenlet):
        greenlet.kill(block=False)

    @staticmethod
    def workers():
        return [g for g in gc.get_objects() if isinstance(g, gevent.Greenlet) and not g.dead]
"""

EVENTLET = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import eventlet
    eventlet.monkey_patch()
import gc

class Green:
    Timeout = eventlet.Timeout
    spawn = staticmethod(eventlet.spawn)

    kill = staticmethod(eventlet.kill)

    @staticmethod
    def join(greenlet):
        while not greenlet.dead:
            eventlet.sleep(0.001)

    @staticmethod
    def kill_soon(greenlet):
        pass  # kill throws at once

    @staticmethod
    def workers():
        ours = (eventlet.hubs.get_hub().greenlet, eventlet.getcurrent())
        return [g for g in gc.get_objects()
                if isinstance(g, type(ours[1])) and g and g.parent and g not in ours]
"""

RUN = """
import sys
import pytest
sys.modules["green"] = sys.modules["__main__"]
sys.exit(pytest.main(["-p", "no:benchmark", *sys.argv[1:]]))
"""


def run(script: str, *arguments: str, cwd: Path | None = None, seconds: float = 600) -> str:
    """What an interpreter prints, which must end well."""
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def need(model: str) -> None:
    if model != "threads" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")


@pytest.mark.parametrize("model", ["gevent", "eventlet"])
def test_greenlets(model: str, tmp_path: Path) -> None:
    """The suite, in a process that is patched from its first line."""
    subject = tmp_path / "test_green_pool.py"
    subject.write_text("from green import Green\n" + GREEN_TESTS % model)
    patch = GEVENT if model == "gevent" else EVENTLET
    need(model)
    output = run(
        patch + RUN, str(subject), "-c", str(ROOT / "pyproject.toml"), "-q", "-x",
        "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'bt'}", cwd=ROOT,
    )
    assert " passed" in output


class DoneInChildError(Exception):
    """The rest of the test ran in a forked child, and went well."""


def fork() -> int:
    with warnings.catch_warnings():
        # Since 3.12 for any process with threads; that is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test pass or fail as its forked child did; see ``TestAfterFork.make``."""

    @functools.wraps(test)
    def run_in_child(self: Any, *arguments: Any, **options: Any) -> None:
        parent = os.getpid()
        try:
            test(self, *arguments, **options)
            report = ""
        except DoneInChildError:
            return
        except BaseException:
            report = traceback.format_exc()
        if os.getpid() == parent:
            raise AssertionError(f"it did not fork: {report}")
        os.write(self.pipe, report.encode() or b"passed")
        os._exit(0)

    return run_in_child


class TestAfterFork(PoolSuite):
    """Each test forks in the middle: its pool was made and used by the parent.

    At the fork, other threads of the parent hold the pool's lock, wait, and have connections.
    """

    pipe = -1

    @pytest.fixture
    def make(self, server: Server) -> Iterator[Callable[..., ConnectionPool[Connection]]]:
        parent = os.getpid()
        pools: list[ConnectionPool[Connection]] = []

        def make(**options: Any) -> ConnectionPool[Connection]:
            if os.getpid() != parent:  # not the first of the test: it is the child's own
                pool = server.pool(**options)
                pool.open()
                return pool
            hooks = {k: v for k, v in vars(server).items() if k.startswith("on_")}
            for name in hooks:
                setattr(server, name, lambda _: None)
            pool = server.pool(**options)
            pool.open()
            pools.append(pool)
            idle = [pool.checkout() for _ in range(min(2, pool.max_size))]
            for connection in idle:
                pool.checkin(connection)
            lent = [pool.checkout() for _ in range(pool.max_size)]
            waiter = Task(pool.checkout)
            waiting(pool, 1)
            release, held = threading.Event(), threading.Event()

            def hold() -> None:
                with pool._state.lock:
                    held.set()
                    release.wait(PATIENCE)

            holder = Task(hold)
            assert held.wait(PATIENCE)
            reading, self.pipe = os.pipe()
            if not fork():
                vars(server).update(hooks)
                server.renew()
                return pool
            release.set()
            os.close(self.pipe)
            with os.fdopen(reading) as pipe:
                report = pipe.read()
            os.wait()
            holder.result()
            for connection in lent:
                pool.checkin(connection)
            pool.checkin(waiter.result())
            is_whole(pool, server)
            assert report == "passed", report
            raise DoneInChildError

        yield make
        assert os.getpid() == parent
        for pool in pools:
            assert pool.close()


for _name, _test in vars(PoolSuite).items():
    # One needs no fork to be what it is: its pool is never shown to the child.
    if _name.startswith("test_") and _name != "test_a_pool_that_is_forgotten_ends_its_workers":
        setattr(TestAfterFork, _name, in_child(_test))


def run_in_fork(body: Callable[[], object]) -> None:
    """Run ``body`` in a forked child, and fail if it does."""
    reading, writing = os.pipe()
    if not fork():
        report = "passed"
        try:
            body()
        except BaseException:
            report = traceback.format_exc()
        os.write(writing, report.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        report = pipe.read()
    os.wait()
    assert report == "passed", report


class Sockets:
    """Opens socket pairs; closing one says goodbye first, as LDAP's unbind does."""

    def __init__(self) -> None:
        self.far: list[socket.socket] = []

    def open(self, seconds: float) -> socket.socket:
        near, far = socket.socketpair()
        far.settimeout(PATIENCE)
        self.far.append(far)
        return near

    def close(self, connection: socket.socket) -> None:
        connection.sendall(b"goodbye")
        connection.close()

    def abandon(self, connection: socket.socket) -> None:
        connection.close()

    def check(self, connection: socket.socket, seconds: float) -> None:
        pass

    def is_stale(self, connection: socket.socket) -> bool:
        return False

    def is_fit(self, connection: socket.socket) -> bool:
        return True


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    for far in sockets.far:
        far.close()


def test_a_child_says_nothing_over_what_it_inherits(sockets: Sockets) -> None:
    pool = ConnectionPool(sockets, min_size=0, max_size=2)
    pool.open()
    idle, lent = pool.checkout(), pool.checkout()
    pool.checkin(idle)

    def child() -> None:
        assert pool.get_stats()["size"] == 0
        assert idle.fileno() == lent.fileno() == -1
        pool.checkin(lent)
        with pytest.raises(ValueError, match="not lent"):
            pool.checkin(lent)
        with pool.connection() as own:
            assert own not in (idle, lent)
            own.sendall(b"child")
            assert sockets.far[-1].recv(5) == b"child"
        assert pool.close()

    run_in_fork(child)
    with pool.connection() as connection:
        assert connection is idle
        connection.sendall(b"parent")
    pool.checkin(lent)
    assert sockets.far[0].recv(100) == b"parent"
    assert pool.close()
    assert sockets.far[0].recv(100) == b"goodbye"
    assert sockets.far[1].recv(100) == b"goodbye"
    # The child let go of its descriptors: the end is seen.
    assert sockets.far[0].recv(100) == sockets.far[1].recv(100) == b""


def test_the_block_in_which_was_forked_may_be_left(sockets: Sockets) -> None:
    pool = ConnectionPool(sockets, min_size=0, max_size=1)
    pool.open()
    with pool.connection() as connection:
        lease = pool.connection()
        lease._connection = connection

        def child() -> None:
            lease.__exit__(None, None, None)
            assert connection.fileno() == -1
            with pool.connection() as own:
                assert own is not connection
            assert pool.close()

        run_in_fork(child)
    assert pool.close()


def test_a_grandchild_and_a_closed_pool(sockets: Sockets) -> None:
    pool = ConnectionPool(sockets, min_size=1, max_size=2)
    pool.open()
    pool.wait()

    def child() -> None:
        pool.wait()
        assert pool.get_stats()["opened"] == 1

        def grandchild() -> None:
            pool.wait()
            assert len(sockets.far) == 3
            assert pool.get_stats()["opened"] == 1
            assert pool.close()

        run_in_fork(grandchild)
        assert len(sockets.far) == 2
        assert pool.get_stats()["size"] == 1
        assert pool.close()

        def closed() -> None:
            with pytest.raises(PoolClosedError):
                pool.checkout()

        run_in_fork(closed)

    run_in_fork(child)
    assert pool.get_stats()["size"] == 1
    assert pool.close()


def test_many_threads_of_a_child_find_one_pool() -> None:
    server = Server()
    pool = server.pool(max_size=2, workers=0)
    pool.open()
    pool.checkin(pool.checkout())
    abandoned = list(server.opened)

    def child() -> None:
        server.renew()
        start = threading.Barrier(8)

        def use() -> None:
            start.wait(PATIENCE)
            for _ in range(50):
                with pool.connection():
                    pass

        for task in [Task(use) for _ in range(8)]:
            task.result()
        assert server.abandoned == abandoned
        assert server.peak <= 2
        is_whole(pool, server)

    for _ in range(20):
        run_in_fork(child)
    assert pool.close()


EXIT = """
import sys, threading
from conformance.pool import Server, Gate, Task, until
server = Server()
pool = server.pool(min_size=2, max_size=3, max_idle=0.05, workers=2)
pool.open()
pool.wait()
lent = [pool.checkout() for _ in range(3)]
waiter = Task(pool.checkout)
until(lambda: pool.get_stats()["waiting"] == 1)
server.on_open = Gate()  # a worker hangs in an opening
pool2 = server.pool(min_size=1)
pool2.open()
assert server.on_open.reached.wait(60)
"""


@pytest.mark.parametrize("model", ["threads", "gevent", "eventlet"])
def test_the_interpreter_ends_whatever_is_under_way(model: str) -> None:
    patch = {"threads": "", "gevent": GEVENT, "eventlet": EVENTLET}[model]
    need(model)
    # Less than what the worker is held for, which begins later.
    assert run("import sys\n" + patch + EXIT, seconds=PATIENCE) == ""


def test_a_greenlet_that_waits_moves_to_the_childs_pool() -> None:
    """gevent's greenlets live on in a forked child: also those that wait for the parent's."""
    need("gevent")
    script = GEVENT + """
import os, sys
from conformance.pool import Server, Task, Gate, until, waiting, is_whole
server = Server()
pool = server.pool(max_size=1, min_size=1)
pool.open(); pool.wait()
connection = pool.checkout()
waiter = Task(pool.checkout)
waiting(pool, 1)
pool2 = server.pool(max_size=1)
pool2.open()
server.on_open = gate = Gate()
opener = Task(pool2.checkout)
assert gate.reached.wait(60)
server.on_open = lambda seconds: None
pid = os.fork()
if pid:
    pool.checkin(connection)
    assert waiter.result() is connection
    gate.open()
    assert not opener.result().closed
    assert os.waitpid(pid, 0)[1] == 0
else:
    server.renew()
    pool.checkin(connection)
    until(lambda: waiter.done)  # threading thinks that its thread ended with the fork
    other = waiter.result()
    assert other is not connection, other
    assert server.abandoned == [connection]
    pool.checkin(other)
    gate.open()
    until(lambda: opener.done)
    mine = opener.result()
    assert len(server.abandoned) == 2
    pool2.checkin(mine)
    assert pool2.get_stats()["opened"] == 1
    assert pool.get_stats()["idle"] == 1
    os._exit(0)
"""
    # gevent itself complains of threads that end in a forked child.
    run(script)
