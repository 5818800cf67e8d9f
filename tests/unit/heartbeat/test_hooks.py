"""What the hooks do with py-amqp's own classes, on sockets without a broker behind them."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import amqp
import amqp.transport
import pytest
from oslo_config import cfg

from keyfront.gateway import heartbeat
from keyfront.gateway.heartbeat import amqp_hooks, installation, pool_hooks
from keyfront.gateway.heartbeat import counters as names
from keyfront.gateway.heartbeat.amqp_connection import FRAME, KeptConnection
from keyfront.gateway.heartbeat.pool_hooks import BorrowHooks
from keyfront.gateway.heartbeat.registry import ConnectionRegistry, writer_of
from support.served import PATIENCE, wait_for


class Opened:
    """A connection of py-amqp as it is after its handshake, and the broker's end of its socket."""

    def __init__(self, timeout: float = 20.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sock = socket.create_connection(listening.getsockname())
            self.peer, _ = listening.accept()
        self.peer.settimeout(PATIENCE)
        transport = amqp.transport.TCPTransport("127.0.0.1:1")
        transport.sock = sock
        transport._setup_transport()
        transport.connected = True
        self.connection: Any = amqp.Connection(heartbeat=timeout)
        self.connection.heartbeat = timeout
        self.connection._transport = transport
        self.connection._handshake_complete = True
        self.connection.frame_writer = amqp.method_framing.frame_writer(self.connection, transport)

    @property
    def transport(self) -> Any:
        return self.connection._transport

    def close(self) -> None:
        if self.connection is not None and self.connection._transport is not None:
            self.connection.collect()
        self.peer.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    one = Opened()
    yield one
    one.close()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ConnectionRegistry]:
    made = ConnectionRegistry(amqp, interval=None, folder=tmp_path / "counts", threaded=False)
    yield made
    made.end()


@pytest.fixture
def hooks(registry: ConnectionRegistry) -> Iterator[amqp_hooks.AmqpHooks]:
    """Put the hooks in."""
    put = amqp_hooks.AmqpHooks(
        amqp, registry, connected=lambda: None, overdue=lambda kept: None
    )
    put.put_in()
    yield put
    put.take_out()


def test_this_amqp_looks_as_needed() -> None:
    assert amqp_hooks.difference(amqp) is None


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (amqp.connection.Connection, "heartbeat_tick", "no Connection.heartbeat_tick"),
        (amqp.transport._AbstractTransport, "close", "no _AbstractTransport.close"),
        (amqp.transport.SSLTransport, "_write", "SSLTransport._write"),
        (amqp.exceptions, "RecoverableConnectionError", "RecoverableConnectionError"),
    ],
)
def test_an_amqp_without_a_part_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, words: str
) -> None:
    monkeypatch.setattr(owner, name, None)
    found = amqp_hooks.difference(amqp)
    assert found is not None
    assert words in found


def test_an_amqp_that_writes_otherwise_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_halves(transport: Any, data: Any) -> None:
        transport._write(data[:4])
        transport._write(data[4:])

    monkeypatch.setattr(amqp.transport._AbstractTransport, "write", in_halves)
    assert "by one call" in (amqp_hooks.difference(amqp) or "")


def test_a_connection_without_heartbeats_is_left_alone(registry: ConnectionRegistry) -> None:
    one = Opened(timeout=0)
    registry.keep(one.connection)
    assert writer_of(one.transport) is None
    assert registry.counts.row[names.CONNECTIONS] == 0
    one.close()


def test_a_kept_connection_writes_and_is_beaten_on(
    registry: ConnectionRegistry, opened: Opened
) -> None:
    registry.keep(opened.connection)
    registry.keep(opened.connection)
    opened.connection.send_heartbeat()
    assert opened.peer.recv(100) == FRAME
    writer = writer_of(opened.transport)
    assert writer is not None
    assert writer.kept.interval == 10.0
    writer.kept.written -= 10.0
    writer.kept.beaten -= 10.0
    registry._thread.turn()
    assert opened.peer.recv(100) == FRAME
    row = registry.counts.row
    assert (row[names.CONNECTIONS], row[names.OPENED], row[names.BEATS]) == (1, 1, 1)


def test_a_long_interval_is_cut_to_half_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ConnectionRegistry(amqp, interval=11.0, folder=tmp_path / "counts", threaded=False)
    pair = Opened(), Opened()
    for one in pair:
        registry.keep(one.connection)
        writer = writer_of(one.transport)
        assert writer is not None
        assert writer.kept.interval == 10.0
        one.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "heartbeat: interval = 11: must be at most half of the 20 s that a connection negotiated;"
        " it is 10 s there"
    )
    registry.end()


def test_a_transport_of_another_kind_is_left_alone_with_one_line(
    registry: ConnectionRegistry, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    opened.transport._write = lambda data: None
    registry.keep(opened.connection)
    registry.keep(opened.connection)
    assert writer_of(opened.transport) is None
    (record,) = caplog.records
    assert "TCPTransport" in record.getMessage()
    assert "not kept alive" in record.getMessage()


def test_a_writer_of_frames_of_the_services_own_is_left_alone(
    registry: ConnectionRegistry, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    opened.connection.frame_writer_cls = lambda *_: None
    registry.keep(opened.connection)
    assert writer_of(opened.transport) is None
    assert "a writer of its own" in caplog.records[0].getMessage()


@pytest.mark.usefixtures("hooks")
def test_closing_ends_it(registry: ConnectionRegistry, opened: Opened) -> None:
    registry.keep(opened.connection)
    writer = writer_of(opened.transport)
    assert writer is not None
    opened.connection.collect()
    assert writer.kept.closed
    assert writer.kept.sock.fileno() == -1
    assert registry.counts.row[names.CONNECTIONS] == 0
    assert opened.peer.recv(1) == b""


def test_a_connection_that_is_dropped_is_let_go(registry: ConnectionRegistry) -> None:
    one = Opened()
    registry.keep(one.connection)
    writer = writer_of(one.transport)
    assert writer is not None
    kept = writer.kept
    sock = one.transport.sock
    del writer
    one.connection._transport = one.connection.frame_writer = None
    one.connection = None
    gc.collect()
    assert kept.closed
    assert kept.sock.fileno() == -1
    assert registry.counts.row[names.CONNECTIONS] == 0
    sock.close()
    one.close()


@pytest.mark.usefixtures("hooks")
def test_unread_bytes_count_as_heard(registry: ConnectionRegistry, opened: Opened) -> None:
    connection = opened.connection
    registry.keep(connection)
    connection.prev_recv = connection.bytes_recv
    connection.last_heartbeat_received = installation_clock() - 100.0
    connection.heartbeat_tick()  # the kernel has heard of the peer just now
    assert connection.last_heartbeat_received > installation_clock() - 20.0
    # the thread has sent, so nothing is sent twice
    opened.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        opened.peer.recv(1)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read by another thread"])
def test_a_peer_that_stopped_within_a_frame_is_given_up(
    registry: ConnectionRegistry, opened: Opened, read: bool
) -> None:
    """py-amqp would ask for the rest for good, before it publishes, and let nothing else run."""
    connection = opened.connection
    connection.on_inbound_frame = amqp.method_framing.frame_handler(
        connection, connection.on_inbound_method
    )
    registry.keep(connection)
    kept = next(iter(registry._kept))
    item = SimpleNamespace(_connection_lock=threading.Lock())
    quiet: list[bool] = []

    def look() -> None:
        quiet.append(BorrowHooks(registry)._is_quiet(item, connection))

    opened.peer.sendall(FRAME + FRAME)
    wait_for(lambda: kept.state().unread == 16, "they are there")  # type: ignore[union-attr]
    look()
    assert quiet == [True]
    assert connection.bytes_recv == 2
    opened.peer.sendall(FRAME + FRAME[:7])
    wait_for(lambda: kept.state().unread == 15, "it is there")  # type: ignore[union-attr]
    if read:  # as oslo.messaging's own heartbeat does
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.001)
    looking = threading.Thread(target=look)
    looking.start()
    looking.join(PATIENCE)
    try:
        assert quiet == [True, False]
    finally:
        if looking.is_alive():
            opened.peer.sendall(FRAME[7:])
            looking.join(PATIENCE)
    assert connection.bytes_recv == 3
    assert not connection.connected
    assert registry.counts.row[names.DEAD_PEERS] == 1


@pytest.mark.usefixtures("hooks")
def test_a_silent_peer_is_given_up(
    registry: ConnectionRegistry, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = opened.connection
    registry.keep(connection)
    writer = writer_of(opened.transport)
    assert writer is not None
    state = writer.kept.state()
    assert state is not None
    monkeypatch.setattr(
        type(writer.kept), "state", lambda _: state._replace(silent_data=100.0)
    )
    connection.prev_recv = connection.bytes_recv
    connection.last_heartbeat_received = installation_clock() - 100.0
    with pytest.raises(amqp.exceptions.ConnectionForced):
        connection.heartbeat_tick()
    assert not connection.connected  # without this kombu would go on with it
    assert opened.peer.recv(1) == b""
    assert registry.counts.row[names.DEAD_PEERS] == 1


@pytest.mark.usefixtures("hooks")
def test_a_peer_that_has_no_room_to_send_is_not_given_up(
    registry: ConnectionRegistry, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = opened.connection
    registry.keep(connection)
    writer = writer_of(opened.transport)
    assert writer is not None
    state = writer.kept.state()
    assert state is not None
    monkeypatch.setattr(
        type(writer.kept), "state", lambda _: state._replace(silent_data=100.0, room=False)
    )
    connection.prev_recv = connection.bytes_recv
    connection.last_heartbeat_received = installation_clock() - 100.0
    connection.heartbeat_tick()
    assert connection.connected


def test_a_forked_process_neither_reads_nor_writes_nor_hangs_up(
    registry: ConnectionRegistry,
    hooks: amqp_hooks.AmqpHooks,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pid = parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid)
    connection, transport = opened.connection, opened.transport
    registry._mark = mark = bytearray([1])
    registry.keep(connection)
    pid = parent + 1  # the fork, in which the kernel empties the mark
    mark[0] = 0
    assert registry.is_inherited()
    registry.renew()
    hooks.forked()
    assert not (tmp_path / "counts" / f"{pid}.counts").exists()  # exec may follow
    connection.heartbeat_tick()
    duplicate = transport.sock.dup()  # the parent's
    with pytest.raises(amqp.exceptions.RecoverableConnectionError, match="forked"):
        connection.drain_events(timeout=0)
    assert transport.sock is None
    with pytest.raises(amqp.exceptions.RecoverableConnectionError, match="forked"):
        connection.send_heartbeat()
    connection.collect()
    opened.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        opened.peer.recv(1)  # no goodbye and no end
    duplicate.close()
    pid = parent


def test_before_a_fork_all_say_goodbye(registry: ConnectionRegistry, opened: Opened) -> None:
    registry.keep(opened.connection)
    registry.close_all()
    said = opened.peer.recv(1000)
    assert said[0] == 1  # a method
    assert said[7:11] == b"\x00\x0a\x00\x32"  # connection.close
    assert opened.peer.recv(1) == b""
    assert not opened.connection.connected


def test_a_child_begins_anew_whatever_is_collected_meanwhile(
    registry: ConnectionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = [Opened() for _ in range(3)]
    for one in three:
        registry.keep(one.connection)
    kept = list(registry._kept)
    close = KeptConnection.close

    def close_and_collect(one: KeptConnection) -> None:
        monkeypatch.setattr(KeptConnection, "close", close)
        one.close()
        registry.let_go(kept[1])  # as the collector has it done for a transport

    monkeypatch.setattr(KeptConnection, "close", close_and_collect)
    registry._let_go_of_parents()
    assert all(one.closed for one in kept)
    for one in three:
        one.close()


def test_connections_of_other_transports_are_lent_as_they_are(registry: ConnectionRegistry) -> None:
    import kombu.connection

    put = BorrowHooks(registry)
    put.put_in()
    try:
        with kombu.Connection("memory://") as client:
            pool = client.Pool(limit=1)
            with pool.acquire() as one:
                one.connect()
                connection = one._connection
            with pool.acquire() as again:
                assert again is one
                assert again._connection is connection
            pool.force_close_all()
    finally:
        put.take_out()


class Item:
    """What a pool of oslo.messaging lends, as far as the hooks look at it, connected already."""

    def __init__(self, connection: Any) -> None:
        self._connection_lock = threading.Lock()
        self.connection = Client(connection)


class Client:
    """kombu's connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.alt: list[str] = []


@pytest.fixture
def oslo_pool(registry: ConnectionRegistry, opened: Opened) -> Iterator[Any]:
    """A pool of oslo.messaging with the hooks, and one connection to lend."""
    from oslo_messaging._drivers.pool import ConnectionPool

    registry.keep(opened.connection)
    put = BorrowHooks(registry)
    put.put_in()
    yield ConnectionPool(
        None, 4, 2, 1200, None, lambda conf, url, purpose, retry: Item(opened.connection)
    )
    put.take_out()


def test_a_message_takes_three_functions_of_the_heartbeat(
    oslo_pool: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may cost a message one percent of its instructions: one more is a tenth of that."""
    monkeypatch.setattr(pool_hooks, "_RECENT", 3600.0)  # however busy the machine
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("keyfront."):
            called.append(frame.f_code.co_name)

    def publish() -> None:
        item = oslo_pool.get(retry=1)
        opened.transport.write(memoryview(FRAME))
        oslo_pool.put(item)

    publish()
    sys.setprofile(note)
    try:
        publish()
    finally:
        sys.setprofile(None)
    assert called == ["get", "write", "put"]


def test_a_pool_that_lends_by_other_arguments_is_left_alone_with_one_line(
    registry: ConnectionRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from oslo_messaging._drivers.pool import ConnectionPool

    def get(self: Any, retry: Any = None, purpose: Any = None) -> Any:
        return retry, purpose

    monkeypatch.setattr(ConnectionPool, "get", get)
    put = BorrowHooks(registry)
    for _ in range(2):
        put.put_in()
    try:
        assert ConnectionPool.get is get
    finally:
        put.take_out()
    (line,) = [one for one in caplog.messages if "without a look" in one]
    assert "use a keyfront that knows this oslo.messaging" in line


def test_a_connection_of_a_pool_is_noted_by_each_heartbeat(
    oslo_pool: Any, registry: ConnectionRegistry, opened: Opened
) -> None:
    """One that was noted by a heartbeat that was removed since is noted anew, and expires."""
    kept = kept_by_writer(opened.transport)
    item = oslo_pool.get()
    oslo_pool.put(item)
    first = kept.pooled
    assert oslo_pool.get() is item
    assert (first.there, first.until) == ([], None)
    kept.pooled = None
    oslo_pool.put(item)
    assert oslo_pool.get() is item
    oslo_pool.put(item)
    assert kept.pooled is not first
    assert len(kept.pooled.there) == 1
    kept.pooled.record.keep = 0
    assert kept.pooled.claim(kept.pooled.until + 1)
    assert list(registry.pools_with_expired()) == [oslo_pool]
    assert list(registry.pools_with_expired()) == []


def test_a_dead_connection_of_a_kombu_pool_is_not_lent(
    registry: ConnectionRegistry, hooks: amqp_hooks.AmqpHooks, opened: Opened
) -> None:
    import kombu.connection

    put = BorrowHooks(registry)
    put.put_in()
    try:
        registry.keep(opened.connection)
        pool = kombu.Connection("amqp://").Pool(limit=1)
        with pool.acquire() as one:
            one._connection = opened.connection
        with pool.acquire() as again:
            assert again._connection is opened.connection
        opened.peer.close()
        wait_for(lambda: not opened_state(opened).established, "the kernel has heard of it")
        with pool.acquire() as again:
            assert again._connection is None
    finally:
        put.take_out()


def kept_by_writer(transport: Any) -> Any:
    writer = writer_of(transport)
    assert writer is not None
    return writer.kept


def opened_state(opened: Opened) -> Any:
    writer = writer_of(opened.transport)
    assert writer is not None
    return writer.kept.state()


def test_before_a_fork_oslo_messaging_falls_silent(
    registry: ConnectionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        def __init__(self) -> None:
            self._heartbeat_exit_event = threading.Event()

    listening, sending = Connection(), Connection()
    del listening._heartbeat_exit_event
    BorrowHooks(registry).hush()
    assert not sending._heartbeat_exit_event.is_set()
    module = SimpleNamespace(Connection=Connection)
    monkeypatch.setitem(sys.modules, "oslo_messaging._drivers.impl_rabbit", module)
    BorrowHooks(registry).hush()
    assert sending._heartbeat_exit_event.is_set()


def test_reconnections_are_counted_and_the_old_one_is_closed(registry: ConnectionRegistry) -> None:
    class Client:
        pass

    client = Client()
    first, second = Opened(), Opened()
    first.connection.client = second.connection.client = client
    registry.keep(first.connection)
    assert registry.counts.row[names.RECONNECTIONS] == 0
    first.transport.connected = False
    registry.keep(second.connection)
    assert registry.counts.row[names.RECONNECTIONS] == 1
    assert first.peer.recv(1) == b""
    first.close()
    second.close()


@pytest.fixture
def installed() -> Iterator[None]:
    yield
    heartbeat.remove()


@pytest.fixture
def conf(monkeypatch: pytest.MonkeyPatch) -> cfg.ConfigOpts:
    made = cfg.ConfigOpts()
    made([], project="service", default_config_files=[])
    monkeypatch.setattr(cfg, "CONF", made)
    return made


@pytest.mark.usefixtures("installed")
def test_install_covers_what_is_open_and_remove_takes_it_back(
    opened: Opened, tmp_path: Path
) -> None:
    before = amqp.Connection.connect, amqp.Connection.heartbeat_tick
    assert heartbeat.install(path=str(tmp_path / "counts"))
    assert writer_of(opened.transport) is not None
    assert heartbeat.statistics()["connections"] == 1
    heartbeat.remove()
    assert (amqp.Connection.connect, amqp.Connection.heartbeat_tick) == before
    assert heartbeat.statistics() == {}
    heartbeat.remove()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), "soon", True])
def test_a_bad_interval_is_one_line(
    interval: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert heartbeat.install(interval=interval, path=str(tmp_path / "counts"))
    (record,) = caplog.records
    assert f"interval = {interval!r}: must be" in record.getMessage()


@pytest.mark.usefixtures("installed")
def test_twice_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert heartbeat.install(path=str(tmp_path / "counts"))
    assert heartbeat.install(interval=3.0)
    (record,) = caplog.records
    assert "called twice" in record.getMessage()


def test_without_amqp_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "amqp")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    assert not heartbeat.install()
    (record,) = caplog.records
    assert "amqp is not installed" in record.getMessage()


@pytest.mark.usefixtures("installed")
def test_the_filter_installs_it_and_is_not_in_the_way(conf: cfg.ConfigOpts, tmp_path: Path) -> None:
    application = object()
    made = installation.filter_factory({}, interval="7", path=str(tmp_path / "counts"))
    assert made(application) is application
    assert heartbeat.statistics()["interval"] == "7"


@pytest.mark.usefixtures("installed", "conf")
def test_a_bad_option_of_the_filter_does_not_stop_the_service(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    installation.filter_factory({}, interval="0")
    assert "interval" in caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.WARNING
    assert heartbeat.statistics()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("enabled", [True, False])
def test_entrypoints_go_by_the_configuration(
    conf: cfg.ConfigOpts, enabled: bool, tmp_path: Path
) -> None:
    from keyfront.gateway import application
    from keyfront.gateway.heartbeat import options

    options.heartbeat(conf)
    conf.set_override("enabled", enabled, options.HEARTBEAT_GROUP)
    conf.set_override("path", str(tmp_path / "counts"), options.HEARTBEAT_GROUP)
    application.keep_connections()
    assert bool(heartbeat.statistics()) is enabled


def test_a_bad_option_is_one_line_of_an_entrypoint(
    conf: cfg.ConfigOpts, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    written = tmp_path / "service.conf"
    written.write_text("[keyfront_heartbeat]\nenabled = true\ninterval = never\n")
    conf([], project="service", default_config_files=[str(written)])
    assert not heartbeat.install_if_enabled()
    (record,) = caplog.records
    assert "interval" in record.getMessage()
    assert "service.conf" in record.getMessage()


def test_folders_that_are_not_safe_only_cost_the_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "counts").mkdir(mode=0o777)
    (tmp_path / "counts").chmod(0o777)
    registry = ConnectionRegistry(amqp, interval=None, folder=tmp_path / "counts", threaded=False)
    assert registry.statistics()["connections"] == 0
    assert "counts of this process are not shown" in caplog.records[0].getMessage()
    registry.end()


def test_what_cannot_work_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    module = SimpleNamespace(
        opt={"threads": b"4"}, has_threads=1, masterpid=lambda: 7, worker_id=lambda: 1
    )
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    monkeypatch.setitem(
        sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda name: True)
    )
    registry = ConnectionRegistry(amqp, interval=None, folder=tmp_path / "counts", threaded=False)
    registry.look_around()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "4 threads" in lines[0]
    assert registry.statistics()["unsafe"]
    registry.end()


def installation_clock() -> float:
    from keyfront.gateway.heartbeat.native import monotonic

    return float(monotonic())
