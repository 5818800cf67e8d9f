"""uWSGI as the rendered units run it: nobody is lost over a restart, nor waits for a reload.

The part of systemd that matters is small: it opens the socket as ``keyfront-uwsgi.socket`` says,
hands it over as descriptor 3, and runs the commands of ``keyfront-uwsgi.service``. A test does so.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from pwd import getpwuid

import pytest

from keyfront.common.machine import Machine
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import Workload
from keyfront.gateway.render import versions
from keyfront.gateway.render import writer as folder
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from support import APPS
from support.programs import own_folder, program, ready, running
from support.served import PATIENCE, free_port, stats, wait_for

CLIENTS = 4
# Seconds between an answer and its client's next request: without, clients alone occupy all cores.
BREATH = 0.01
UNIT = "system/etc/systemd/system/keyfront-uwsgi"
# As systemd does it: the descriptor is 3, and the variables name the process itself.
_HANDED_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Line:
    """A line-up whose uWSGI is ours, and so its socket, if systemd would hold it.

    Loads of the application wait while ``load.go`` is not there, and fail over ``load.fail``.
    """

    folder: Path
    port: int
    socket: socket.socket | None
    log: Path

    @contextmanager
    def uwsgi(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it as the unit does, until the block ends; it is ready when the block begins."""
        command, passed = self.command("ExecStart"), []
        if self.socket is not None:
            passed = [self.socket.fileno()]
            command = [sys.executable, "-c", _HANDED_OVER, str(passed[0]), *command]
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT,
                pass_fds=passed,
            )  # fmt: skip
        try:
            ready(self._look_at_workers, process, self.log, (OSError, AssertionError))
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
                process.wait()

    def command(self, name: str, **variables: int) -> list[str]:
        """The words of a line of the unit."""
        unit = (self.folder / f"{UNIT}.service").read_text()
        (line,) = re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)
        for variable, value in variables.items():
            line = line.replace(f"${variable}", str(value))
        return shlex.split(line)

    def reload(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Begin a reload as the unit does."""
        return subprocess.Popen(
            self.command("ExecReload", MAINPID=process.pid), env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ, "PYTHONPATH": str(APPS), "HOLD_FOLDER": str(self.folder), "HOLD_LOAD": "1"
        }

    def go(self) -> None:
        (self.folder / "load.go").touch()

    def hold(self) -> None:
        """Have loads wait from now on."""
        (self.folder / "load.go").unlink(missing_ok=True)
        for begun in self.folder.glob("load-*"):
            begun.unlink()

    def wait_for_load(self) -> None:
        wait_for(lambda: list(self.folder.glob("load-*")), "the application is loaded")

    def _look_at_workers(self) -> None:
        assert 0 not in self.workers()

    def workers(self) -> set[int]:
        found = stats(self.folder / "run/stats.sock")["workers"]
        assert isinstance(found, list)
        return {worker["pid"] if worker["accepting"] else 0 for worker in found}

    def all_workers(self) -> set[int]:
        """They, once all of them accept: one alone may answer for a while."""
        wait_for(lambda: 0 not in self.workers(), "all workers accept")
        return self.workers()

    def look(self) -> None:
        socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)


@dataclass
class Clients:
    """They send one request after the other, each on a connection of its own."""

    line: Line
    answers: list[int] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def sending(self) -> Iterator[Clients]:
        def client() -> None:
            while not self.over.is_set():
                connection = self.line.connect()
                try:
                    connection.request("GET", "/")
                    answer = connection.getresponse()
                    body = answer.read()
                    if answer.status == 200:
                        self.answers.append(int(body))
                        self.answered.add(threading.get_ident())
                    else:
                        self.failures.append(str(answer.status))
                except (OSError, HTTPException) as error:
                    self.failures.append(repr(error))
                finally:
                    connection.close()
                self.over.wait(BREATH)

        self.threads += [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in self.threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def go_on(self) -> set[int]:
        """Wait for many answers from now on; returns the workers of the last ones."""
        before = len(self.answers)
        wait_for(lambda: len(self.answers) > before + 25 * CLIENTS, "they are answered")
        return set(self.answers[-20 * CLIENTS :])


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    """A line-up by its name; behind a blank, ``in-place`` for a machine with little memory."""
    server, _, way = request.param.partition(" ")
    with own_folder("line") as where, ExitStack() as stack:
        where.chmod(0o755)
        for name in ("run", "log", "cache"):
            (where / name).mkdir()
            (where / name).chmod(0o777)
        port, upstream = free_port(), free_port()
        web = "www-data" if os.geteuid() == 0 else getpwuid(os.geteuid()).pw_name
        rendered = Settings(
            folder=where, server=server, listen=f"127.0.0.1:{port}",
            upstream=f"127.0.0.1:{upstream}", target="waiting_app:application",
            run_directory=where / "run", log_directory=where / "log",
            cache_directory=where / "cache", virtualenv=Path(sys.prefix), web_user=web,
            web_group=web,
        )  # fmt: skip
        # however busy this machine is, nobody waits for too long for his turn
        made = plan(Machine(cores=2, memory=2**30), Workload(latency=60))
        # waits for nobody: a restart shows at once
        numbers = {"uwsgi.worker_reload_mercy": 5}
        if way == "in-place":
            numbers["uwsgi.reload_memory"] = 0
            # the shortest that there is
            numbers["haproxy.queue_timeout"] = 1
        changed = {name: replace(made[name], value=value) for name, value in numbers.items()}
        made = replace(made, numbers={**made.numbers, **changed})
        folder.write(render(made, rendered, versions.find(rendered.virtualenv)), where)
        opened = None
        if server != "uwsgi":
            unit = (where / f"{UNIT}.socket").read_text()
            settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
            opened = stack.enter_context(_opened(settings))
        found = Line(where, port, opened, where / "log/uwsgi.out")
        found.go()
        out = where / "log/front.out"
        if server.startswith("nginx"):
            command = [
                str(program("nginx", "nginx")), "-c", str(where / "nginx.conf"), "-e",
                str(where / "log/nginx.error.log"), "-g", "daemon off;",
            ]  # fmt: skip
            front = stack.enter_context(running(command, out, signal.SIGQUIT))
            ready(found.look, front, out, (OSError,))
        elif server.startswith("apache"):
            apache = str(program("apache2", "apache2-bin"))
            command = [apache, "-f", str(where / "apache.conf"), "-DFOREGROUND"]
            front = stack.enter_context(running(command, out, signal.SIGWINCH))
            ready(found.look, front, out, (OSError,))
        yield found


@contextmanager
def _opened(settings: dict[str, str]) -> Iterator[socket.socket]:
    """The socket as its unit describes it."""
    address = settings["ListenStream"]
    if address.startswith("/"):
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(address)
            Path(address).chmod(0o666)
            opened.listen(int(settings["Backlog"]))
            yield opened
    else:
        host, _, port = address.rpartition(":")
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((host, int(port)))
            opened.listen(int(settings["Backlog"]))
            yield opened


@pytest.mark.parametrize(
    "line", ["nginx+uwsgi", "nginx+uwsgi-tcp", "apache+uwsgi", "uwsgi"], indirect=True
)
def test_a_reload_keeps_nobody_waiting_and_a_restart_loses_nobody(line: Line) -> None:
    """The former workers answer while a load takes its time, and when it fails."""
    clients = Clients(line)
    with ExitStack() as second:
        with clients.sending():
            with line.uwsgi() as uwsgi:
                clients.go_on()
                if line.socket is None:
                    # they came before uWSGI listened: each was told of before an answer
                    wait_for(lambda: len(clients.answered) == CLIENTS, "all are answered")
                    clients.failures.clear()
                for way in ("ExecReload", "SIGHUP"):
                    clients.go_on()
                    old = line.all_workers()
                    line.hold()
                    if way == "SIGHUP":
                        uwsgi.send_signal(signal.SIGHUP)
                    else:
                        reloading = line.reload(uwsgi)
                    line.wait_for_load()
                    assert clients.go_on() <= old
                    line.go()
                    wait_for(lambda old=old: not clients.go_on() & old, "only new workers answer")
                    if way == "ExecReload":
                        assert _ended(reloading)[0] == 0
                    # One of the former may just have ended its last request.
                    wait_for(lambda: clients.go_on() <= line.workers(), "none of the former does")
                old = line.all_workers()
                line.hold()
                reloading = line.reload(uwsgi)
                line.wait_for_load()
                (line.folder / "load.fail").touch()
                status, output = _ended(reloading)
                assert status == 1
                assert b"not reloaded, the former goes on" in output
                assert clients.go_on() <= old == line.workers()
                (line.folder / "load.fail").unlink()
                if line.socket is None:
                    clients.stop()
                # a stop does not wait for a load
                line.hold()
                reloading = line.reload(uwsgi)
                line.wait_for_load()
            assert _ended(reloading)[0] == 1
            if line.socket is not None:
                # vacuum leaves what is not uWSGI's
                path = line.folder / "run/uwsgi.sock"
                assert path.exists() == (line.socket.family == socket.AF_UNIX)
                line.go()
                second.enter_context(line.uwsgi())
                assert clients.go_on() <= line.workers()
    assert clients.failures == []


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


@pytest.mark.parametrize("line", ["nginx+uwsgi in-place"], indirect=True)
def test_who_waits_for_a_reload_in_place_is_answered(line: Line) -> None:
    """However long it takes: the limit of the queue is for waiting one's turn."""
    with line.uwsgi() as uwsgi:
        # a worker that is being forked would not hear of it
        with Clients(line).sending() as clients:
            clients.go_on()
        line.hold()
        assert _ended(line.reload(uwsgi))[0] == 0
        line.wait_for_load()
        connection = line.connect()
        connection.request("GET", "/")
        time.sleep(1.5)  # longer than the limit
        line.go()
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 200


@pytest.mark.parametrize("line", ["nginx+uwsgi", "nginx+uwsgi-tcp"], indirect=True)
def test_nobody_is_lost_when_workers_are_replaced(line: Line) -> None:
    """By age and by requests, with two threads each: the other thread's request ends first."""
    ini = line.folder / "uwsgi.ini"
    text = re.sub(r"^max-requests = .*", "max-requests = 50", ini.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^max-requests-delta = .*", "max-requests-delta = 7", text, flags=re.MULTILINE)
    ini.write_text(f"{text}\nmin-worker-lifetime = 0\nforkbomb-delay = 0\n")
    with line.uwsgi():
        with Clients(line).sending() as clients:
            wait_for(lambda: len(set(clients.answers)) >= 5, "five workers have answered")
        # a worker that uWSGI's master starts while it is told to stop never hears of it
        wait_for(lambda: _settled(line.log.read_text()), "every worker has its successor")
    assert clients.failures == []
    assert "The work of process" in line.log.read_text()
    assert "NO MERCY" not in line.log.read_text()


def _settled(log: str) -> bool:
    return log.count("The work of process") == log.count("Respawned uWSGI worker")


@pytest.mark.parametrize("line", ["nginx+uwsgi", "nginx+uwsgi-tcp"], indirect=True)
def test_a_stopped_uwsgi_is_an_answer_to_come_back(line: Line) -> None:
    """Without anybody to hold the socket: 503 with Retry-After and Keystone's words, never 502."""
    assert line.socket is not None
    line.socket.close()
    connection = line.connect()
    connection.request("GET", "/v3")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"] == "application/json"
    assert b'"code":503' in body
