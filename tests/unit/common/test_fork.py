"""The registry of what is released before a fork and reopened after it."""

from __future__ import annotations

import gc
import logging
import os
import random
import socket
import sys
import threading
import types
from collections.abc import Iterator

import pytest

from keyfront.common import fork as process
from keyfront.common.fork import ForkRegistry
from keyfront.errors import ServerError


@pytest.fixture(autouse=True)
def own_fork_hooks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Fork hooks cannot be taken back, so the tests of this process only collect them."""
    hooks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **kinds: hooks.append(kinds))
    # What is frozen stays so: else each collection from here on goes through all that pytest has.
    return hooks


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, str]]:
    """A connected TCP socket, made when the test runs, and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            yield client, f"{address[0]}:{address[1]}"


def fake_uwsgi(monkeypatch: pytest.MonkeyPatch, worker: int, master: int) -> types.ModuleType:
    module = types.ModuleType("uwsgi")
    module.worker_id = lambda: worker  # type: ignore[attr-defined]
    module.masterpid = lambda: master  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    return module


def test_order_last_in_releases_first_and_first_in_reopens_first() -> None:
    calls: list[str] = []
    registry = ForkRegistry()
    for name in ("a", "b"):
        registry.register(
            name,
            before=lambda name=name: calls.append(f"-{name}"),
            after=lambda name=name: calls.append(f"+{name}"),
        )
    registry.prepare()
    registry.reopen()
    assert calls == ["-b", "-a", "+a", "+b"]


def test_reopen_runs_once_per_process() -> None:
    pids: list[int] = []
    registry = ForkRegistry()
    registry.register("pid", after=lambda: pids.append(os.getpid()))
    registry.reopen()
    registry.reopen()
    assert pids == [os.getpid()]
    child = os.fork()
    if child == 0:
        registry.reopen()
        registry.reopen()
        os._exit(0 if pids[1:] == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_name_registered_again_replaces() -> None:
    calls: list[int] = []
    registry = ForkRegistry()
    registry.register("x", after=lambda: calls.append(1))
    registry.register("x", after=lambda: calls.append(2))
    registry.reopen()
    assert calls == [2]


def test_a_failing_reopen_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    registry = ForkRegistry()
    registry.register("broken", after=lambda: 1 / 0)
    registry.register("sound", after=lambda: calls.append("sound"))
    assert registry.reopen() == ("broken",)
    assert calls == ["sound"]
    assert "fork handler broken (after) failed: ZeroDivisionError" in caplog.text


def test_a_failing_release_is_raised_after_the_others_ran() -> None:
    calls: list[str] = []
    registry = ForkRegistry()
    registry.register("sound", before=lambda: calls.append("sound"))
    registry.register("broken", before=lambda: 1 / 0)
    with pytest.raises(ServerError, match="could not release before the fork: broken"):
        registry.prepare()
    assert calls == ["sound"]


def test_prepare_freezes_what_is_alive() -> None:
    alive: list[list[int]] = [[] for _ in range(2000)]
    before = gc.get_freeze_count()
    ForkRegistry().prepare()
    assert gc.get_freeze_count() > before + len(alive) // 2


def test_a_connection_left_open_is_named(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    registry = ForkRegistry()
    client, peer = request.getfixturevalue("connection")
    assert registry.prepare() == ((client.fileno(), peer),)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert peer in lines[0].getMessage()
    assert f"descriptor {client.fileno()}" in lines[0].getMessage()


def test_a_connection_that_a_handler_closes_is_not_named(request: pytest.FixtureRequest) -> None:
    registry = ForkRegistry()
    client, _ = request.getfixturevalue("connection")
    registry.register("client", before=client.close)
    assert registry.prepare() == ()


def test_unix_connections_and_socketpairs_are_named(tmp_path: os.PathLike[str]) -> None:
    registry = ForkRegistry()
    path = os.path.join(tmp_path, "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        one, two = socket.socketpair()
        with one, two:
            assert sorted(registry.prepare()) == sorted(
                [
                    (client.fileno(), path),
                    (one.fileno(), "socketpair"),
                    (two.fileno(), "socketpair"),
                ]
            )


def test_what_the_server_holds_or_cannot_mix_up_is_not_named(
    connection: tuple[socket.socket, str],
) -> None:
    registry = ForkRegistry()  # after the connection: it is the server's
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(),
    ):
        datagrams.connect(("127.0.0.1", 9))
        assert registry.prepare() == ()


def test_a_thread_that_a_worker_would_miss_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="refresher")
    thread.start()
    try:
        ForkRegistry().prepare()
    finally:
        stop.set()
        thread.join()
    assert "thread refresher will not exist in the workers" in caplog.text


def test_install_hooks_python_and_uwsgi_once_and_chains(
    own_fork_hooks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    uwsgi = fake_uwsgi(monkeypatch, 0, os.getpid())
    uwsgi.post_fork_hook = lambda: calls.append("theirs")  # type: ignore[attr-defined]
    registry = ForkRegistry()
    registry.register("ours", after=lambda: calls.append("ours"))
    registry.install()
    registry.install()
    assert own_fork_hooks == [{"after_in_child": registry.reopen}]
    uwsgi.post_fork_hook()
    assert calls == ["ours", "theirs"]


def test_prepare_takes_back_a_hook_that_an_import_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    uwsgi = fake_uwsgi(monkeypatch, 0, os.getpid())
    registry = ForkRegistry()
    registry.register("ours", after=lambda: calls.append("ours"))
    registry.install()
    uwsgi.post_fork_hook = lambda: calls.append("decorators")  # type: ignore[attr-defined]
    registry.prepare()
    uwsgi.post_fork_hook()
    assert calls == ["ours", "decorators"]


@pytest.mark.parametrize(
    ("worker", "master", "expected"),
    [
        pytest.param(0, os.getpid(), "before", id="the master loads"),
        pytest.param(0, 0, "before", id="no master"),
        pytest.param(2, os.getppid(), "after", id="a lazy worker loads"),
        pytest.param(0, os.getppid(), "after", id="a lazy spooler loads"),
        pytest.param(None, None, "after", id="not uWSGI"),
    ],
)
def test_loaded_knows_who_forks(
    worker: int | None, master: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if worker is not None and master is not None:
        fake_uwsgi(monkeypatch, worker, master)
    calls: list[str] = []
    registry = ForkRegistry()
    registry.register(
        "x", before=lambda: calls.append("before"), after=lambda: calls.append("after")
    )
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append("frozen"))
    registry.loaded()
    # nor is what was loaded looked through in a worker's first requests
    assert sorted(calls) == [expected, "frozen"]


def test_the_registry_reseeds_random() -> None:
    child = os.fork()
    if child == 0:
        random.seed(7)  # Python has reseeded on os.fork(), which a server's fork in C does not
        inherited = random.getstate()
        process.registry.reopen()
        os._exit(0 if random.getstate() != inherited else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def prepared() -> ForkRegistry:
    """A registry with the built-in entry for connections, as the process's own has it."""
    registry = ForkRegistry()
    connections = process._Connections()
    registry.register("connections", before=connections.release, after=connections.forget)
    return registry


def test_memcached_clients_are_disconnected_and_stay_usable(port: int) -> None:
    base = pytest.importorskip("pymemcache.client.base")
    registry = prepared()
    client = base.Client(("127.0.0.1", port))
    client._connect()
    assert registry.prepare() == ()
    assert client.sock is None
    client._connect()
    client.close()


def test_python_memcached_is_disconnected(port: int) -> None:
    memcache = pytest.importorskip("memcache")
    registry = prepared()
    client = memcache.Client([f"127.0.0.1:{port}"])
    assert client.servers[0].connect() == 1
    assert registry.prepare() == ()


def test_redis_pools_are_disconnected(port: int) -> None:
    redis = pytest.importorskip("redis")
    registry = prepared()
    pool = redis.ConnectionPool(host="127.0.0.1", port=port)
    connection = pool.make_connection()
    pool._in_use_connections.add(connection)
    connection._sock = connection._connect()
    assert registry.prepare() == ()


def test_requests_sessions_are_disconnected() -> None:
    requests = pytest.importorskip("requests")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

        def serve() -> None:
            with server.accept()[0] as peer:
                peer.recv(65536)
                peer.sendall(answer)
                peer.recv(1)  # until the client hangs up

        thread = threading.Thread(target=serve)
        registry = prepared()
        thread.start()
        with requests.Session() as session:
            url = f"http://127.0.0.1:{server.getsockname()[1]}/"
            assert session.get(url, timeout=60).status_code == 200
            kept = {peer for _, peer in registry._shared_sockets()}
            assert any(str(server.getsockname()[1]) in peer for peer in kept)
            process._Connections().release()
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_engines_are_disposed_and_usable(tmp_path: os.PathLike[str]) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{os.path.join(tmp_path, 'db')}")
    with engine.connect():
        pass
    assert engine.pool.checkedin() == 1
    prepared().prepare()
    assert engine.pool.checkedin() == 0
    with engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text("select 1")) == 1
    engine.dispose()


def test_a_database_in_memory_is_kept() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.pool.StaticPool)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table t (x)"))
    registry = prepared()
    registry.prepare()
    registry.reopen()
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("select * from t")).all() == []
    engine.dispose()


def test_a_child_drops_its_parents_later_connections(tmp_path: os.PathLike[str]) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{os.path.join(tmp_path, 'db')}")
    registry = prepared()
    registry.prepare()
    with engine.connect():
        pass
    child = os.fork()
    if child == 0:
        registry.reopen()
        os._exit(0 if engine.pool.checkedin() == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.pool.checkedin() == 1
    engine.dispose()
