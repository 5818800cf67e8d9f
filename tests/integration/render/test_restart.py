"""uWSGI as the rendered units run it: systemd holds the socket, and nobody is lost meanwhile.

The part of systemd that matters is small: it opens the socket as ``keyfront-uwsgi.socket`` says,
and hands it over as descriptor 3. A test does that.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from keyfront.common.machine import Machine
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.render import versions
from keyfront.gateway.render import writer as folder
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from support import APPS
from support.programs import own_folder, program, ready, running
from support.served import PATIENCE, free_port, stats, wait_for

CLIENTS = 4
SETTINGS = "system/etc/systemd/system/keyfront-uwsgi.socket"
# As systemd does it: the descriptor is 3, and the variables name the process itself.
_HANDED_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Line:
    """nginx in front of a uWSGI whose socket is ours."""

    folder: Path
    port: int
    socket: socket.socket
    log: Path

    @contextmanager
    def uwsgi(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it as the unit does, until the block ends; it is ready when the block begins."""
        program_file = str(Path(sys.prefix, "bin", "uwsgi"))
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-c", _HANDED_OVER, str(self.socket.fileno()), program_file,
                    "--ini", str(self.folder / "uwsgi.ini"),
                ],
                env={**os.environ, "PYTHONPATH": str(APPS)},
                stdout=output, stderr=subprocess.STDOUT, pass_fds=[self.socket.fileno()],
            )  # fmt: skip
        try:
            ready(self.workers, process, self.log, (OSError,))
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
                process.wait()

    def workers(self) -> set[int]:
        found = stats(self.folder / "run/stats.sock")["workers"]
        assert isinstance(found, list)
        return {worker["pid"] for worker in found}

    def look(self) -> None:
        socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)


@dataclass
class Clients:
    """They send one request after the other, each on a connection of its own."""

    line: Line
    answers: dict[bytes, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def sending(self) -> Iterator[Clients]:
        over = threading.Event()

        def client() -> None:
            while not over.is_set():
                connection = self.line.connect()
                try:
                    connection.request("GET", "/")
                    answer = connection.getresponse()
                    body = answer.read()
                    if answer.status == 200:
                        self.answers[body] = self.answers.get(body, 0) + 1
                    else:
                        self.failures.append(str(answer.status))
                except (OSError, HTTPException) as error:
                    self.failures.append(repr(error))
                finally:
                    connection.close()

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def meet(self, pids: set[int]) -> None:
        """Wait until one of these workers has answered."""
        wait_for(lambda: any(int(body) in pids for body in tuple(self.answers)), "a worker answers")


@pytest.fixture(params=["nginx+uwsgi", "nginx+uwsgi-tcp"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    with own_folder("line") as where:
        where.chmod(0o755)
        for name in ("run", "log", "cache"):
            (where / name).mkdir()
            (where / name).chmod(0o777)
        port, upstream = free_port(), free_port()
        rendered = Settings(
            folder=where, server=request.param, listen=f"127.0.0.1:{port}",
            upstream=f"127.0.0.1:{upstream}", target="waiting_app:application",
            run_directory=where / "run", log_directory=where / "log",
            cache_directory=where / "cache", virtualenv=Path(sys.prefix),
        )  # fmt: skip
        made = plan(Machine(cores=2, memory=2**30))
        # waits for nobody: a restart shows at once
        mercy = replace(made["uwsgi.worker_reload_mercy"], value=5)
        made = replace(made, numbers={**made.numbers, mercy.name: mercy})
        folder.write(render(made, rendered, versions.find(rendered.virtualenv)), where)
        settings = dict(re.findall(r"^(\w+)=(.*)$", (where / SETTINGS).read_text(), re.MULTILINE))
        with _opened(settings) as opened:
            command = [
                str(program("nginx", "nginx")), "-c", str(where / "nginx.conf"), "-e",
                str(where / "log/nginx.error.log"), "-g", "daemon off;",
            ]  # fmt: skip
            with running(command, where / "log/nginx.out", signal.SIGQUIT) as nginx:
                found = Line(where, port, opened, where / "log/uwsgi.out")
                ready(found.look, nginx, where / "log/nginx.out", (OSError,))
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


def test_a_restart_and_a_reload_lose_nobody(line: Line) -> None:
    """What connects while no worker is there waits in the socket, and is answered."""
    clients = Clients(line)
    with ExitStack() as second:
        with clients.sending():
            with line.uwsgi() as uwsgi:
                first = line.workers()
                clients.meet(first)
                uwsgi.send_signal(signal.SIGHUP)
                wait_for(lambda: "binary reloading" in line.log.read_text(), "uWSGI starts over")
                wait_for(lambda: _reloaded(line, first), "there are other workers")
                clients.meet(line.workers())
                assert "SystemD socket activation detected" in line.log.read_text()
            # vacuum leaves what is not uWSGI's
            path = line.folder / "run/uwsgi.sock"
            assert path.exists() == (line.socket.family == socket.AF_UNIX)
            second.enter_context(line.uwsgi())
            clients.meet(line.workers())
    assert clients.failures == []


def _reloaded(line: Line, before: set[int]) -> bool:
    try:
        now = line.workers()
    except OSError:
        return False
    return bool(now) and not now & before and 0 not in now


def test_nobody_is_lost_when_workers_are_replaced(line: Line) -> None:
    """By age and by requests, with two threads each: the other thread's request ends first."""
    ini = line.folder / "uwsgi.ini"
    text = re.sub(r"^max-requests = .*", "max-requests = 50", ini.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^max-requests-delta = .*", "max-requests-delta = 7", text, flags=re.MULTILINE)
    ini.write_text(f"{text}\nmin-worker-lifetime = 0\nforkbomb-delay = 0\n")
    with line.uwsgi():
        with Clients(line).sending() as clients:
            wait_for(lambda: len(clients.answers) >= 5, "five workers have answered")
        # a worker that uWSGI's master starts while it is told to stop never hears of it
        wait_for(lambda: _settled(line.log.read_text()), "every worker has its successor")
    assert clients.failures == []
    assert "The work of process" in line.log.read_text()
    assert "NO MERCY" not in line.log.read_text()


def _settled(log: str) -> bool:
    return log.count("The work of process") == log.count("Respawned uWSGI worker")


def test_a_stopped_uwsgi_is_an_answer_to_come_back(line: Line) -> None:
    """Without anybody to hold the socket: 503 with Retry-After and Keystone's words, never 502."""
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
