"""Serves what ``keyfront render`` makes, by the commands of its units, and takes it down again."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from grp import getgrgid
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path

import psutil

from keyfront.common.machine import Machine
from keyfront.gateway.plan.compute import Plan, plan
from keyfront.gateway.plan.workload import STANDARD, Profile, Workload
from keyfront.gateway.render import certificates, versions
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from support.programs import program, ready, running
from support.served import PATIENCE, as_ordinary_user, free_port, wait_for

# Small queues and short waits, so that a test can fill them.
MACHINE = Machine(cores=2, memory=512 * 2**20, somaxconn=32)
WORKLOAD = Workload(latency=1.0)
NAME = "localhost"


@dataclass
class Deployment:
    """A running line-up."""

    folder: Path
    port: int
    plan: Plan
    processes: list[psutil.Process]
    foremost: tuple[subprocess.Popen[bytes], Path]

    def wait(self) -> None:
        """Until the application answers."""
        process, log = self.foremost
        ready(self._ask, process, log, (OSError, HTTPException, AssertionError))

    def _ask(self) -> None:
        connection = self.connect()
        try:
            observed(connection)
        finally:
            connection.close()

    @property
    def url(self) -> str:
        return f"https://{NAME}:{self.port}"

    @property
    def certificate(self) -> Path:
        return certificates.paths(self.folder)[0]

    def connect(self, source: str = "127.0.0.1") -> HTTPConnection:
        """A connection by TLS from a loopback address, each of which is a client of its own."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        return HTTPSConnection(
            NAME, self.port, timeout=PATIENCE, context=context, source_address=(source, 0)
        )

    def raw(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        """The same without HTTP."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        plain = socket.create_connection(("127.0.0.1", self.port), PATIENCE, (source, 0))
        return context.wrap_socket(plain, server_hostname=NAME)

    def logs(self) -> dict[str, str]:
        return {
            path.name: path.read_text(errors="replace")
            for path in sorted((self.folder / "log").iterdir())
        }

    def family(self) -> list[psutil.Process]:
        """All processes of all its servers."""
        found = list(self.processes)
        for process in self.processes:
            found += process.children(recursive=True)
        return found

    def reload(self, environment: Mapping[str, str]) -> None:
        """Load the application anew, as the units do; uWSGI has to be run by its manager.

        :param environment: variables that the application needs, beside this process's
        """
        if not (self.folder / "uwsgi.ini").exists():
            apache = str(self.folder / "apache.conf")
            command = [*as_ordinary_user(), sys.executable, "-m", "keyfront", "reload", apache]
            subprocess.run(command, env={**os.environ, **environment}, check=True)
            return
        manager = self.processes[0]
        (former,) = manager.children()
        manager.send_signal(signal.SIGHUP)
        wait_for(lambda: not former.is_running(), "it has reloaded")

    def descriptors(self) -> int:
        return sum(process.num_fds() for process in self.family())


@contextlib.contextmanager
def deployed(
    folder: Path, server: str, *, nodes: tuple[Deployment, ...] = (),
    config: Path = Path("/nowhere"), target: str = "", json_logs: bool = False,
    trusted: tuple[str, ...] = (), machine: Machine = MACHINE, workload: Workload = WORKLOAD,
    profile: Profile = STANDARD, environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (), pair: Path | None = None, manager: bool = False,
) -> Iterator[Deployment]:
    """Render a line-up with TLS into a folder and serve it until the block ends.

    The block begins before it answers: see :meth:`Deployment.wait`.

    :param folder: empty; others can pass through it, and its path is short (unix sockets)
    :param server: a line-up's name, or ``haproxy`` for HAProxy in front of ``nodes``
    :param pair: the folder of a line-up whose certificate this one shall have: HAProxy knows its
        nodes by it
    :param prefix: put before each server's command
    :param manager: run uWSGI by ``keyfront uwsgi``, which can reload it
    """
    port = free_port()
    (folder / "log").mkdir()
    (folder / "run").mkdir()
    if pair is not None:
        shutil.copytree(pair / "tls", folder / "tls")
    certificate, key = certificates.make(folder, NAME)
    me = pwd.getpwuid(os.geteuid()).pw_name, getgrgid(os.getegid()).gr_name
    web = ("www-data", "www-data") if os.geteuid() == 0 else me
    settings = Settings(
        folder=folder, server="nginx+uwsgi" if nodes else server, target=target, config=config,
        listen=f"127.0.0.1:{port}", public_host=NAME, certificate=certificate, key=key, hsts=300,
        upstream=f"127.0.0.1:{free_port()}", login_upstream=f"127.0.0.1:{free_port()}",
        json_logs=json_logs, user=web[0], group=web[1], web_user=web[0], web_group=web[1],
        run_directory=folder / "run" / "app", log_directory=folder / "log",
        cache_directory=folder / "cache", virtualenv=Path(sys.prefix),
        haproxy=tuple(f"127.0.0.1:{node.port}" for node in nodes), trusted_proxies=trusted,
    )
    for name in ("run/app", "cache"):
        (folder / name).mkdir()
    computed = plan(machine, workload, profile)
    for file in render(computed, settings, versions.find(Path(sys.prefix))):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    with contextlib.ExitStack() as stack:
        # stopped in the reverse order: the server in front first
        started = []
        for name, command, stop in _commands(folder, server, settings):
            if manager and name == "uwsgi":
                command = uwsgi_manager(folder)
            log = folder / "log" / f"{name}.out"
            started_by = running([*prefix, *command], log, stop, environment=environment)
            process = stack.enter_context(started_by)
            started.append((process, log))
        deployment = Deployment(
            folder, port, computed, [psutil.Process(x.pid) for x, _ in started], started[-1]
        )
        yield deployment


def uwsgi_manager(folder: Path) -> list[str]:
    """The command of a rendered unit that runs uWSGI."""
    return [str(Path(sys.prefix, "bin", "keyfront")), "uwsgi", str(folder / "uwsgi.ini")]


def _commands(
    folder: Path, server: str, settings: Settings
) -> Iterator[tuple[str, list[str], signal.Signals]]:
    """As the units have it, in the order they start: name, command, what stops it."""
    if "+uwsgi" in server:
        uwsgi = str(Path(sys.prefix, "bin", "uwsgi"))
        yield "uwsgi", [uwsgi, "--ini", str(folder / "uwsgi.ini")], signal.SIGTERM
    if server.startswith("nginx"):
        nginx, config = str(program("nginx", "nginx")), str(folder / "nginx.conf")
        command = [nginx, "-c", config, "-e", f"{folder}/log/nginx.error.log", "-g", "daemon off;"]
        yield "nginx", command, signal.SIGQUIT
    elif server == "haproxy":
        config = folder / "haproxy.cfg"
        if os.geteuid() != 0:
            # it cannot become anybody else
            text = re.sub(r"^    (user|group) haproxy\n", "", config.read_text(), flags=re.M)
            config.write_text(text)
        haproxy = str(program("haproxy", "haproxy"))
        yield "haproxy", [haproxy, "-db", "-f", str(config)], signal.SIGTERM
    else:
        apache = str(program("apache2", "apache2-bin"))
        # mod_wsgi runs no application as root
        user = as_ordinary_user() if "mod_wsgi" in server else []
        yield (
            "apache", [*user, apache, "-f", str(folder / "apache.conf"), "-DFOREGROUND"],
            signal.SIGWINCH,
        )


def in_turn(
    connection: HTTPConnection, method: str, path: str, **request: object
) -> tuple[HTTPResponse, bytes]:
    """Send a request, and again as long as it is told that it waited too long for its turn.

    On a busy machine that may be more than the second of :data:`WORKLOAD`. Nothing was begun then.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        connection.request(method, path, **request)  # type: ignore[arg-type]
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 503 or b"waited too long for its turn" not in body:
            return answer, body
        assert answer.headers["Retry-After"]
        assert time.monotonic() < deadline, "its turn never comes"


def observed(
    connection: HTTPConnection, method: str = "GET", **request: object
) -> dict[str, object]:
    """What the application sees of a request."""
    answer, body = in_turn(connection, method, "/observed/environ", **request)
    assert answer.status == 200, (answer.status, body)
    content: dict[str, object] = json.loads(body)
    return content


def settled(deployment: Deployment, before: int) -> None:
    """Wait until no more descriptors are open than before."""
    wait_for(lambda: deployment.descriptors() <= before, f"only {before} descriptors are open")
