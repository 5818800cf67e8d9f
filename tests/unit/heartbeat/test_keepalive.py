"""The check at borrow time, and the kernel options, on sockets of this process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.heartbeat.keepalive import Keepalive, keepalive
from support.certificates import certificates

PATIENCE = 90.0
LONG = 1000.0

# the package has a function of this name
module: Any = importlib.import_module("keyfront.gateway.heartbeat.keepalive")


class Connection:
    """As a driver's: it owns a socket and may be weakly referenced."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()


class Check:
    """Asked instead of a server; says what the test wants."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, int]] = []
        self.answer: object = None

    def __call__(self, connection: object) -> object:
        self.asked.append((connection, threading.get_ident()))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def check() -> Check:
    return Check()


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as ours:
            peer, _ = listener.accept()
            with peer:
                yield Connection(ours), peer


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make the kernel say that the peer sent its last data so many seconds ago."""
    look_at = module.tcp.look_at

    def silence(seconds: float) -> None:
        def look(sock: Any) -> Any:
            state = look_at(sock)
            return state and state._replace(silent_data=seconds, silent=0.0)

        monkeypatch.setattr(module.tcp, "look_at", look)

    return silence


def until(condition: Callable[[], bool]) -> None:
    """The kernel carries packets when it likes, and tells nobody."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# The kernel options


@pytest.mark.parametrize(
    ("interval", "idle", "between", "limit"),
    [
        (1, 1, 1, 4),
        (30, 30, 10, 60),
        (1.2, 2, 1, 5),
        (10.0, 10, 4, 22),
        (32767, 32767, 10923, 65536),
    ],
)
def test_sets_the_options(
    ends: tuple[Connection, socket.socket], interval: float, idle: int, between: int, limit: int
) -> None:
    connection, _ = ends
    keepalive(Check(), interval).watch(connection)

    def option(name: int) -> int:
        return connection.sock.getsockopt(socket.IPPROTO_TCP, name)

    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert option(socket.TCP_KEEPIDLE) == idle
    assert option(socket.TCP_KEEPINTVL) == between
    assert option(socket.TCP_KEEPCNT) == 3
    assert option(socket.TCP_USER_TIMEOUT) == limit * 1000


@pytest.mark.parametrize("how", ["object", "descriptor", "its own", "TLS"])
def test_whatever_the_socket_is(
    ends: tuple[Connection, socket.socket], check: Check, tmp_path: Path, how: str
) -> None:
    connection, peer = ends
    ours: Any = connection.sock
    alive = keepalive(check, LONG)
    with contextlib.ExitStack() as closing:
        if how == "TLS":
            made = certificates(tmp_path)
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.load_cert_chain(made.server.certificate, made.server.key)
            ours.settimeout(PATIENCE)
            thread = threading.Thread(
                target=lambda: closing.enter_context(server.wrap_socket(peer, server_side=True))
            )
            thread.start()
            ours = closing.enter_context(
                ssl.create_default_context(cafile=made.ca_file).wrap_socket(
                    ours, server_hostname="localhost"
                )
            )
            thread.join(PATIENCE)
        sock = {"descriptor": ours.fileno(), "its own": None}.get(how, ours)
        alive.watch(connection, sock) if sock is not None else alive.watch(connection)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == LONG
        assert alive.alive(connection)
        closing.close()
        peer.close()
        until(lambda: not alive.alive(connection))


@pytest.mark.parametrize("timeout", [None, 0.0, 5.0])
def test_leaves_the_mode_of_the_socket(
    ends: tuple[Connection, socket.socket], check: Check, timeout: float | None
) -> None:
    connection, _ = ends
    connection.sock.settimeout(timeout)
    before = os.get_blocking(connection.sock.fileno())
    alive = keepalive(check, LONG)
    alive.watch(connection)
    assert alive.alive(connection)
    assert os.get_blocking(connection.sock.fileno()) == before
    assert connection.sock.gettimeout() == timeout


def test_says_once_which_options_do_not_hold(
    ends: tuple[Connection, socket.socket], check: Check, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    connection, _ = ends
    alive = keepalive(check, LONG)
    # past the kernel's limits, an option that no kernel has, and one that it sets otherwise
    alive._wanted = [
        ("TCP_KEEPIDLE", socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 40000),
        ("TCP_KEEPCNT", socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ("TCP_NONE", socket.IPPROTO_TCP, 9999, 1),
        ("SO_RCVBUF", socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000),
    ]
    with caplog.at_level(logging.DEBUG):
        alive.watch(connection)
        alive.watch(connection)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "does not keep TCP_KEEPIDLE, TCP_NONE, SO_RCVBUF on" in record.getMessage()
    assert alive.statistics()["unset"] == 2
    assert alive.alive(connection)


# Alive or not


def test_heard_from_needs_no_check(ends: tuple[Connection, socket.socket], check: Check) -> None:
    connection, _ = ends
    alive = keepalive(check, LONG)
    alive.watch(connection)
    assert alive.alive(connection) and alive.alive(connection)
    assert check.asked == []
    assert alive.statistics()["heard"] == 2


def test_a_silent_one_is_checked_by_the_caller(
    ends: tuple[Connection, socket.socket], check: Check, silence: Callable[[float], None]
) -> None:
    connection, _ = ends
    alive = keepalive(check, 10)
    alive.watch(connection)
    silence(10.0)
    assert alive.alive(connection)
    assert check.asked == []
    silence(10.1)
    for answer in (None, True, 0, ""):
        check.answer = answer
        assert alive.alive(connection)
    assert check.asked == [(connection, threading.get_ident())] * 4
    assert alive.statistics()["checked"] == 4


def test_a_refusal_is_final(
    ends: tuple[Connection, socket.socket], check: Check, silence: Callable[[float], None]
) -> None:
    connection, _ = ends
    alive = keepalive(check, 10)
    alive.watch(connection)
    silence(11)
    check.answer = False
    assert not alive.alive(connection)
    check.answer = True
    assert not alive.alive(connection)
    assert len(check.asked) == 1
    found = alive.statistics()
    assert (found["refused"], found["closed"]) == (1, 1)
    alive.watch(connection)
    assert alive.alive(connection)


def test_an_error_is_a_refusal_and_its_text_is_kept_from_the_log(
    ends: tuple[Connection, socket.socket], check: Check, silence: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    connection, _ = ends
    alive = keepalive(check, 10)
    alive.watch(connection)
    silence(11)
    check.answer = OSError("mysql://keystone:secret@db is gone")
    with caplog.at_level(logging.DEBUG):
        assert not alive.alive(connection)
    assert "OSError" in caplog.text and "secret" not in caplog.text
    assert alive.statistics()["failed"] == 1


def test_a_check_that_is_broken_off_spoils_the_connection(
    ends: tuple[Connection, socket.socket], check: Check, silence: Callable[[float], None]
) -> None:
    class Timeout(BaseException):
        """As those of gevent and eventlet."""

    connection, _ = ends
    alive = keepalive(check, 10)
    alive.watch(connection)
    silence(11)
    check.answer = Timeout()
    with pytest.raises(Timeout):
        alive.alive(connection)
    silence(0)
    assert not alive.alive(connection)


@pytest.mark.parametrize("how", ["close", "reset", "last words"])
def test_closed_by_the_peer_needs_no_check(
    ends: tuple[Connection, socket.socket], check: Check, how: str
) -> None:
    connection, peer = ends
    check.answer = False
    alive = keepalive(check, LONG)
    alive.watch(connection)
    if how == "reset":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "last words":
        peer.sendall(b"goodbye")
    peer.close()
    until(lambda: not module.tcp.look(connection.fileno()).established)
    assert not alive.alive(connection)
    assert check.asked == []
    assert alive.statistics()["closed"] == 1


def test_what_nobody_asked_for_is_checked(
    ends: tuple[Connection, socket.socket], check: Check
) -> None:
    connection, peer = ends
    alive = keepalive(check, LONG)
    alive.watch(connection)
    peer.sendall(b"you will be disconnected")
    until(lambda: module.tcp.look(connection.fileno()).unread > 0)
    assert alive.alive(connection)
    assert len(check.asked) == 1


def test_closed_here_and_its_number_given_away(
    ends: tuple[Connection, socket.socket], check: Check
) -> None:
    connection, _ = ends
    alive = keepalive(check, LONG)
    fd = connection.fileno()
    alive.watch(connection, sock=fd)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as other:
            connection.sock.close()
            assert not alive.alive(connection)
            # the same number, a connection that stands: another's
            os.dup2(other.fileno(), fd)
            with socket.socket(fileno=fd):
                assert module.tcp.look(fd).established
                assert not alive.alive(connection)
    assert check.asked == []


def test_one_that_was_closed_before_it_was_watched(check: Check) -> None:
    connection = Connection(socket.socket())
    connection.sock.close()
    alive = keepalive(check, LONG)
    alive.watch(connection)
    assert not alive.alive(connection)


def test_one_that_was_never_watched_is_checked(
    ends: tuple[Connection, socket.socket], check: Check
) -> None:
    alive = keepalive(check, LONG)
    assert alive.alive(ends[0])
    check.answer = False
    assert not alive.alive(ends[0])
    assert len(check.asked) == 2


def test_a_socket_in_the_file_system(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = socket.socketpair()
    connection = Connection(ours)
    alive = keepalive(check, 10)
    with ours, peer:
        alive.watch(connection)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert alive.statistics()["unset"] == 0
        assert alive.alive(connection) and check.asked == []
        now = time.monotonic()
        monkeypatch.setattr(module.time, "monotonic", lambda: now + 11)
        assert alive.alive(connection) and len(check.asked) == 1
        # the check counts as heard from
        assert alive.alive(connection) and len(check.asked) == 1
        peer.close()
        assert not alive.alive(connection) and len(check.asked) == 1


# What it holds


def test_holds_neither_connection_nor_socket_nor_descriptor(
    ends: tuple[Connection, socket.socket], check: Check
) -> None:
    alive = keepalive(check, LONG)
    gc.collect()  # what other tests have left would be closed below
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        connection = Connection(sock)
        alive.watch(connection)
        assert alive.alive(connection)
        gone, socket_gone = weakref.ref(connection), weakref.ref(sock)
        sock.close()
        # a duplicate of ours would have kept the connection open
        peer.settimeout(PATIENCE)
        assert peer.recv(1) == b""
        peer.close()
        del connection, sock
        gc.collect()
        assert gone() is None and socket_gone() is None
        assert alive._watched == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_old_reference_does_not_forget_a_new_connection(
    ends: tuple[Connection, socket.socket], check: Check
) -> None:
    connection, _ = ends
    alive = keepalive(check, LONG)
    alive.watch(connection)
    key, found = id(connection), alive._watched[id(connection)]
    alive.watch(connection)
    module._forget(alive._watched, key, found.connection)
    module._forget(alive._watched, key + 1, found.connection)
    # weakref.ref is one and the same for one object unless it has a callback
    assert alive._watched[key].connection is not found.connection


def test_a_connection_from_before_a_fork(
    ends: tuple[Connection, socket.socket], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = ends
    alive = keepalive(check, LONG)
    alive.watch(connection)
    assert not alive.inherited(connection)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert alive.inherited(connection)
    assert not alive.alive(connection)
    assert check.asked == []
    # the child counts from zero
    assert alive.statistics()["watched"] == 0 and alive.statistics()["inherited"] == 1
    monkeypatch.undo()
    assert alive.alive(connection)


def test_counts_how_long_checks_took(
    ends: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def slow(_: object) -> None:
        now[0] += 2.0 if now[0] == 100.0 else 0.5

    alive = keepalive(slow, 10)
    assert alive.alive(ends[0]) and alive.alive(ends[0])
    found = alive.statistics()
    assert (found["check_seconds"], found["check_seconds_worst"]) == (2.5, 2.0)


# What is out of range


@pytest.mark.parametrize(
    "interval", [0, 0.99, -1, 32767.5, 32768, math.inf, math.nan, "30", None, True]
)
def test_an_interval_out_of_range(interval: Any) -> None:
    with pytest.raises(OptionError) as caught:
        keepalive(Check(), interval)
    assert str(caught.value) == f"interval = {interval!r}: must be from 1 to 32767 seconds"


def test_a_check_that_is_none() -> None:
    check: Any = "SELECT 1"
    with pytest.raises(OptionError, match=r"^check = str: must be a function of a connection"):
        keepalive(check, 10)


@pytest.mark.parametrize("sock", ["7", object(), True, 1.5])
def test_a_socket_that_is_none(sock: Any, ends: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(OptionError, match=r"^sock = .*: must be a socket"):
        keepalive(Check(), 10).watch(ends[0], sock)


def test_a_connection_that_cannot_be_weakly_referenced(
    ends: tuple[Connection, socket.socket],
) -> None:
    alive: Keepalive[Any] = keepalive(Check(), 10)
    with pytest.raises(OptionError, match=r"^connection = int: must be an object"):
        alive.watch(ends[0].fileno())
    with pytest.raises(OptionError, match=r"^connection = tuple: "):
        alive.watch((1, 2), ends[0].sock)
