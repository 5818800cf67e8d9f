"""uWSGI forks its workers from a loaded application: what they share.

The application opens three connections while it loads: a plain one with a handler of its own, one
in a memcached client and one in a database engine's pool. Workers must not share any.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from support.served import PATIENCE, free_port

UWSGI = Path(sys.executable).with_name("uwsgi")
pytestmark = pytest.mark.skipif(not UWSGI.exists(), reason="uWSGI is not installed")
pytest.importorskip("pymemcache")
pytest.importorskip("sqlalchemy")

APPLICATION = '''
import json, os, pathlib, random, socket, sqlite3, sys
from keyfront.common.fork import registry

REGISTRY = os.environ["REGISTRY"] == "1"
PEER = ("127.0.0.1", int(os.environ["PEER"]))
if REGISTRY:
    registry.install()

import pymemcache, sqlalchemy, uwsgidecorators


class Database(sqlite3.Connection):
    """A database connection that stands on a TCP connection, as MySQL's do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.wire = socket.create_connection(PEER)

    def close(self):
        self.wire.close()
        super().close()


def use_all():
    raw = socket.create_connection(PEER)
    memcached._connect()
    with engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text("select 1")) == 1
    return raw


memcached = pymemcache.client.base.Client(PEER)
engine = sqlalchemy.create_engine("sqlite:///db", connect_args={"factory": Database})
raw = use_all()


def report(name):
    state = {"pid": os.getpid(), "random": hash(random.getstate())}
    path = pathlib.Path(name)
    # Lazy workers load at the same time, and each tells "master": a file of its own each.
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(state))
    new.rename(path)


@uwsgidecorators.postfork
def forked():
    global raw
    if REGISTRY:
        raw = use_all()
    report(f"worker{uwsgidecorators.uwsgi.worker_id()}.json")


random.seed(7)
report("master.json")
if REGISTRY:
    if os.environ["FORGET"] != "1":
        registry.register("raw", before=raw.close)
    worker = uwsgidecorators.uwsgi.worker_id
    registry.register("report", after=lambda: report(f"started{worker()}.json"))
    registry.loaded()


def application(environ, start_response):
    start_response("200 OK", [])
    return [b"served"]
'''


def wait_for(condition: Callable[[], Any], server: subprocess.Popen[bytes], log: Path) -> Any:
    """What ``condition`` gives once it gives something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        if server.poll() is not None:
            break
        time.sleep(0.02)
    pytest.fail(f"uWSGI did not get there:\n{log.read_text()}")


def tcp_connections(pid: int) -> set[int]:
    """The inodes of the established TCP connections of a process."""
    established = {
        int(fields[9])
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "01"
    }
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:"):
            inodes.add(int(target[8:-1]))
    return inodes & established


class Forked:
    """What the master and its two workers told, and the server's log."""

    def __init__(self, folder: Path, url: str, names: Iterable[str]) -> None:
        read = [json.loads((folder / f"{name}.json").read_text()) for name in names]
        self.master, self.first, self.second = read
        self.url = url
        self.log = (folder / "log").read_text()

    def shared(self) -> set[int]:
        return tcp_connections(self.first["pid"]) & tcp_connections(self.second["pid"])


@contextmanager
def uwsgi(
    folder: Path,
    *options: str,
    registry: bool,
    forget: bool = False,
    names: tuple[str, str, str] = ("master", "worker1", "worker2"),
) -> Iterator[Forked]:
    """Serve from ``folder`` until the master and both workers have told their state."""
    (folder / "app.py").write_text(APPLICATION)
    log = folder / "log"
    with create_server(("127.0.0.1", 0)) as peer:
        port = free_port()
        environment = {
            **os.environ,
            "REGISTRY": str(int(registry)),
            "FORGET": str(int(forget)),
            "PEER": str(peer.getsockname()[1]),
        }
        command = [
            str(UWSGI),
            *("--http-socket", f"127.0.0.1:{port}", "--master", "--processes", "2"),
            *("--need-app", "--die-on-term", "--virtualenv", sys.prefix, "--wsgi-file", "app.py"),
            *options,
        ]
        with log.open("wb") as out:
            server = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out, process_group=0
            )
        try:
            paths = [folder / f"{name}.json" for name in names]
            wait_for(lambda: all(path.exists() for path in paths), server, log)
            yield Forked(folder, f"http://127.0.0.1:{port}/", names)
        finally:
            # the workers too, even if the master has died
            try:
                os.killpg(server.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            server.wait()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--py-call-uwsgi-fork-hooks",), id="fork-hooks"),
        pytest.param(("--threads=2", "--py-call-uwsgi-fork-hooks"), id="threads"),
    ],
)
def test_workers_share_no_connection_and_no_random_state(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with uwsgi(tmp_path, *options, registry=True) as forked:
        # each worker has opened all three again, for itself
        assert len(tcp_connections(forked.first["pid"])) == 3
        assert len(tcp_connections(forked.second["pid"])) == 3
        assert forked.shared() == set()
        assert tcp_connections(forked.master["pid"]) == set()
        states = {each["random"] for each in (forked.master, forked.first, forked.second)}
        assert len(states) == 3
        assert "workers would share" not in forked.log
        assert "will not exist in the workers" not in forked.log
        with urllib.request.urlopen(forked.url, timeout=PATIENCE) as answer:
            assert answer.read() == b"served"


def test_without_the_registry_they_share_all_three(tmp_path: Path) -> None:
    with uwsgi(tmp_path, registry=False) as forked:
        assert len(forked.shared()) == 3


def test_a_connection_without_a_handler_is_named(tmp_path: Path) -> None:
    with uwsgi(tmp_path, registry=True, forget=True) as forked:
        assert len(forked.shared()) == 0  # use_all() replaced it
        assert forked.log.count("workers would share the connection to 127.0.0.1:") == 1


def test_an_application_loaded_by_each_worker_is_started_there(tmp_path: Path) -> None:
    # uWSGI's hook has nothing to call when a lazy worker forks: loaded() runs the handlers
    names = ("master", "started1", "started2")
    with uwsgi(tmp_path, "--lazy-apps", registry=True, names=names) as forked:
        assert forked.first["pid"] != forked.second["pid"]
        assert len(tcp_connections(forked.first["pid"])) == 3
        assert forked.shared() == set()


PATCHED = '''
import eventlet

eventlet.monkey_patch()
import json, os, socket, time

held = []


def application(environ, start_response):
    start_response("200 OK", [])
    return hold() if environ["PATH_INFO"] == "/hold" else [see().encode()]


def hold():
    """Have a green thread wait for what never comes, and go on for longer than a stop may take."""
    ours, other = socket.socketpair()
    held.extend((ours, other, eventlet.spawn(ours.recv, 1)))
    time.sleep(0.01)
    yield json.dumps([os.getpid(), os.fstat(ours.fileno()).st_ino]).encode()
    time.sleep(3600)


def see():
    """Tell for which inodes the kernel wakes this process."""
    time.sleep(0.01)
    waits_for = []
    for number in os.listdir("/proc/self/fd"):
        try:
            with open(f"/proc/self/fdinfo/{number}") as file:
                lines = [line.split() for line in file if line.startswith("tfd:")]
        except FileNotFoundError:
            continue  # it listed the folder
        waits_for += [int(word[4:], 16) for words in lines for word in words if word[:4] == "ino:"]
    return json.dumps([os.getpid(), waits_for])
'''
MERCY = 1


def test_an_application_that_patches_itself_answers_and_stops(tmp_path: Path) -> None:
    """It has patched what our thread for the stop is made of, and made the hub of all workers.

    One that gevent patches passes as well, but its workers end by an error of gevent's own.
    """
    pytest.importorskip("eventlet")
    (tmp_path / "patched.py").write_text(PATCHED)
    port, log = free_port(), tmp_path / "log"
    hooks = (
        *("master-start=unix_signal:15 gracefully_kill_them_all", "asap=callint:sighold 15"),
        *("master-start=callint:sigrelse 15", "post-fork=callint:sigrelse 15"),
        *("asap=callint:sighold 1", "master-start=callint:sigrelse 1"),
        *("post-fork=callint:sighold 1", "post-fork=unix_signal:40 gracefully_kill"),
    )
    command = [
        str(UWSGI), "--http-socket", f"127.0.0.1:{port}", "--master", "--processes", "2",
        "--need-app", "--die-on-term", "--virtualenv", sys.prefix, "--enable-threads",
        "--py-call-uwsgi-fork-hooks", "--worker-reload-mercy", str(MERCY), "--pythonpath", ".",
        "--module", "keyfront.gateway.uwsgi:application",
        *(f"--hook-{hook}" for hook in hooks),
    ]  # fmt: skip
    environment = {**os.environ, "KEYFRONT_APP": "patched:application"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=out, process_group=0
        )
    try:
        wait_for(
            lambda: "spawned uWSGI worker 2" in log.read_text(errors="replace"), server, log
        )
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/hold", timeout=PATIENCE) as held:
            busy, inode = json.loads(held.read1())
            # the other one answers, is no part of what the first waits for, and waits for itself
            with urllib.request.urlopen(f"{url}/see", timeout=PATIENCE) as seen:
                free, waits_for = json.loads(seen.read())
            assert free != busy
            assert inode not in waits_for
            server.terminate()
            assert server.wait(PATIENCE) == 0
        # the worker that was cut off tells where it was
        assert "Timeout (" in log.read_text(errors="replace")
    finally:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        server.wait()
