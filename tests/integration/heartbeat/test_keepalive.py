"""Connections to a real MariaDB and a real slapd that die in the pool, in each kind of process.

Each model runs in a process of its own and tells what it saw; the servers are killed, stopped and
restarted here. A thread of the model ticks meanwhile: where threads are green it ticks only while
the hub runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

from keyfront.gateway.heartbeat import tcp
from keyfront.gateway.heartbeat.keepalive import keepalive
from support.directory import directory
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, free_port
from support.servers import _own_folder, _program, _ready, _running

MODELS = ["unpatched", *(x for x in ("gevent", "eventlet") if importlib.util.find_spec(x))]

COMMON = """
import sys, warnings
warnings.simplefilter("ignore")
model = sys.argv[1]
if model == "gevent":
    import gevent.monkey; gevent.monkey.patch_all()
elif model == "eventlet":
    import eventlet; eventlet.monkey_patch()
import json, os, socket, threading, time
from keyfront.gateway.heartbeat import tcp
from keyfront.gateway.heartbeat.keepalive import keepalive

def tell(**what):
    print(json.dumps(what), flush=True)
    sys.stdin.readline()

class Ticker:
    "How long other threads stood still while the block ran."
    def __enter__(self):
        self.stop, self.worst, self.ticks = False, 0.0, 0
        started = threading.Event()
        def tick():
            last = time.monotonic()
            while not self.stop:
                started.set()
                time.sleep(0.005)
                now = time.monotonic()
                self.worst, last, self.ticks = max(self.worst, now - last), now, self.ticks + 1
        self.thread = threading.Thread(target=tick)
        self.thread.start()
        started.wait()
        self.began = time.monotonic()
        return self
    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.began
        self.stop = True
        self.thread.join()
"""

# The listeners are those of docs/heartbeat.md.
DATABASE = (
    COMMON
    + """
import sqlalchemy
from sqlalchemy import event, text
from sqlalchemy.exc import DisconnectionError

def keep(engine, interval):
    kept = keepalive(lambda connection: connection.ping(reconnect=False), interval)

    @event.listens_for(engine, "connect")
    def connected(connection, record):
        kept.watch(connection, sock=connection._sock)

    @event.listens_for(engine, "checkout")
    def checked_out(connection, record, proxy):
        if kept.alive(connection):
            return
        if kept.inherited(connection):
            record.dbapi_connection = proxy.dbapi_connection = None
        raise DisconnectionError("the connection is no longer alive")

    return kept

def ask(engine):
    with engine.connect() as connection:
        return connection.execute(text("SELECT CONNECTION_ID()")).scalar()

direct, through = sys.argv[2:]
engine = sqlalchemy.create_engine(direct)
stock = sqlalchemy.create_engine(direct)
slow = sqlalchemy.create_engine(through, connect_args={"read_timeout": 1})
kept, kept_slow = keep(engine, 1000), keep(slow, 1)

before = [ask(engine), ask(engine)]
ask(stock), ask(slow)
inherited = None
if model == "unpatched":
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        seen = [ask(engine), ask(engine), kept.statistics()["inherited"]]
        os.write(writing, json.dumps(seen).encode())
        engine.dispose()
        os._exit(0)
    os.waitpid(child, 0)
    inherited = json.loads(os.read(reading, 1000)) + [ask(engine)]
tell(before=before, inherited=inherited, statistics=kept.statistics())

try:
    ask(stock)
    stock_error = None
except sqlalchemy.exc.OperationalError:
    stock_error = "OperationalError"
with Ticker() as ticker:
    after = [ask(engine), ask(engine)]
ask(slow)
tell(after=after, stock=stock_error, statistics=kept.statistics())

time.sleep(1.2)
with Ticker() as ticker:
    ask(slow)
tell(worst=ticker.worst, ticks=ticker.ticks, seconds=ticker.seconds,
     statistics=kept_slow.statistics())
"""
)

DIRECTORY = (
    COMMON
    + """
import ldap3
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL

url = sys.argv[2]

def ours():
    return Connection.connect(ServerURL.parse(url), tls=TLS(), connect_timeout=60)

def theirs():
    made = ldap3.Connection(ldap3.Server(url, get_info=None), receive_timeout=1)
    made.open()
    return made

def search(connection):
    return connection.search("", "(objectClass=*)", "BASE", attributes=["1.1"])

kinds = [
    (ours, lambda connection: connection.ping(1.0), lambda connection: connection.transport.raw),
    (theirs, search, lambda connection: connection.socket),
]

def fresh(interval):
    made = []
    for connect, check, sock in kinds:
        kept, connection = keepalive(check, interval), connect()
        check(connection)
        kept.watch(connection, sock=sock(connection))
        made.append((kept, connection, sock(connection)))
    return made

def asked(made):
    told = []
    for kept, connection, sock in made:
        state = tcp.look(sock.fileno())
        with Ticker() as ticker:
            alive = kept.alive(connection)
        told.append(dict(alive=alive, statistics=kept.statistics(), state=state._asdict(),
                         worst=ticker.worst, ticks=ticker.ticks, seconds=ticker.seconds))
    return told

heard = asked(fresh(1000))
idle = fresh(1)
time.sleep(1.2)
checked = asked(idle)
tell(heard=heard, checked=checked)

# stopped: it acknowledges the probes
time.sleep(2.5)
tell(stopped=asked(idle))

idle = fresh(1)
tell()

tell(killed=asked(idle))
"""
)


class Model:
    """One process, which says a line and waits for one."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], f"{self.name} hangs"
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended: {self.process.communicate()[1]}"
        told: dict[str, Any] = json.loads(line)
        return told

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def models(script: str, *arguments: str) -> Iterator[list[Model]]:
    """All of them at once."""
    with contextlib.ExitStack() as ending:
        made = []
        for name in MODELS:
            process = ending.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, name, *arguments],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True,
                )
            )  # fmt: skip
            ending.callback(process.kill)
            made.append(Model(name, process))
        yield made
        for model in made:
            errors = model.process.communicate(timeout=PATIENCE)[1]
            assert model.process.returncode == 0, errors


class Database:
    """A MariaDB at a port, which can be killed and started again."""

    def __init__(self, own: Path, folder: Path) -> None:
        self._own, self._log = own, folder / "mariadb.log"
        self._program = _program("mariadbd", "mariadb-server-core")
        self._life = contextlib.ExitStack()
        self.port = free_port()

    def start(self) -> None:
        # killed before it wrote its first files whole, it would not start again with them
        data = Path(tempfile.mkdtemp(prefix="data-", dir=self._own))
        command = [
            str(self._program), "--no-defaults", "--skip-grant-tables", "--skip-log-bin",
            "--bind-address=127.0.0.1", f"--port={self.port}", f"--datadir={data}",
            f"--socket={self._own / 'socket'}", f"--pid-file={self._own / 'pid'}",
            "--skip-name-resolve", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M",
            "--innodb-flush-method=nosync", "--innodb-stats-persistent=OFF",
        ]  # fmt: skip
        command += ["--user=root"] if os.geteuid() == 0 else []
        process = self._life.enter_context(_running(command, self._log, signal.SIGKILL))
        _ready(self._look, process, self._log, (OSError, pymysql.Error))

    def kill(self) -> None:
        self._life.close()

    def _look(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()
        pymysql.connect(host="127.0.0.1", port=self.port, user="keystone").close()

    def url(self, port: int) -> str:
        return f"mysql+pymysql://keystone@127.0.0.1:{port}/"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with _own_folder("mariadb") as own:
        made = Database(own, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.kill()


def did_not_stand_still(told: dict[str, Any]) -> None:
    """While the check waited for a second or more, the others ran: nothing like all of it.

    Under 50 ms on a quiet machine; this one may be shared.
    """
    assert told["seconds"] >= 0.9
    assert told["worst"] < told["seconds"] / 2, told
    assert told["ticks"] > 20


def test_a_database_that_restarts_and_one_that_is_gone_silently(database: Database) -> None:
    with FaultProxy(database.port) as proxy:
        with models(DATABASE, database.url(database.port), database.url(proxy.port)) as running:
            for model in running:
                told = model.told()
                first, again = told["before"]
                # one and the same, without asking the server
                assert first == again
                assert (told["statistics"]["watched"], told["statistics"]["checked"]) == (1, 0)
                if told["inherited"]:
                    child, child_again, inherited, parent = told["inherited"]
                    # the child has its own, and the parent still has its
                    assert child == child_again != first
                    assert inherited == 1
                    assert parent == first
            database.kill()
            database.start()
            for model in running:
                model.go_on()
            for model in running:
                told = model.told()
                assert told["stock"] == "OperationalError"
                first, again = told["after"]
                assert first == again
                found = told["statistics"]
                # not one question was put to a connection that was known to be dead
                assert (found["watched"], found["closed"]) == (2, 1)
                assert found["checked"] + found["failed"] == 0
            proxy.half_open()
            for model in running:
                model.go_on()
            for model in running:
                told = model.told()
                found = told["statistics"]
                assert found["failed"] == 1
                assert found["check_seconds_worst"] >= 0.9
                did_not_stand_still(told)
                model.go_on()


def test_a_directory_that_stops_and_one_that_is_killed(tmp_path: Path) -> None:
    with directory(tmp_path) as slapd, models(DIRECTORY, slapd.url) as running:
        for model in running:
            told = model.told()
            for kind in told["heard"]:
                assert kind["alive"] and kind["statistics"]["heard"] == 1
            for kind in told["checked"]:
                assert kind["alive"] and kind["statistics"]["checked"] == 1
        slapd.pause()
        for model in running:
            model.go_on()
        for model in running:
            for kind in model.told()["stopped"]:
                state = kind["state"]
                assert state["established"]
                # the kernel of the stopped server answered a probe
                assert state["silent"] < state["silent_data"] - 0.5
                assert not kind["alive"]
                assert kind["statistics"]["failed"] + kind["statistics"]["refused"] == 1
                did_not_stand_still(kind)
        slapd.resume()
        for model in running:
            model.go_on()
            model.told()
        slapd.kill()
        slapd.start()
        for model in running:
            model.go_on()
        for model in running:
            for kind in model.told()["killed"]:
                assert not kind["alive"]
                assert not kind["state"]["established"]
                found = kind["statistics"]
                assert (found["closed"], found["checked"], found["failed"]) == (1, 0, 0)
            model.go_on()


class Owner:
    """A connection that may be weakly referenced."""


def test_a_host_that_vanished_is_given_up_by_the_kernel_alone() -> None:
    """And one that is merely idle is not: it answers the probes."""
    checks: list[Owner] = []
    kept = keepalive(checks.append, 1)
    with contextlib.ExitStack() as closing:
        ours, peers = {}, {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for name in ("vanished", "idle", "stock"):
                ours[name] = closing.enter_context(
                    socket.create_connection(listener.getsockname())
                )
                peers[name] = closing.enter_context(listener.accept()[0])
        owners = {name: Owner() for name in ours}
        for name in ("vanished", "idle"):
            kept.watch(owners[name], sock=ours[name])
        # nothing that arrives gets to these two, as if their host were gone: classic BPF, ret #0
        program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        for name in ("vanished", "stock"):
            peers[name].setsockopt(
                socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program))
            )
        deadline = time.monotonic() + PATIENCE
        while (state := tcp.look(ours["vanished"].fileno())) and state.established:
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        assert not kept.alive(owners["vanished"])
        assert checks == []
        assert kept.statistics()["closed"] == 1
        with pytest.raises(TimeoutError):
            ours["vanished"].recv(1)
        for name in ("idle", "stock"):
            state = tcp.look(ours[name].fileno())
            assert state is not None and state.established
        assert kept.alive(owners["idle"])
        assert checks == [owners["idle"]]
