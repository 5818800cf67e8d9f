"""Runs the settings of ``deploy_sweep``, one at a time, all on one Keystone on SQLite."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from grp import getgrgid
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from keyfront.common import machine
from keyfront.common import programs as here
from keyfront.errors import ServerError
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import Workload
from keyfront.gateway.render import versions
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.serve.state import State

from .deploy_settings import OURS, STOCK

HOST = "127.0.0.1"
PATH = "/v3/auth/tokens"
START_PATIENCE = 60
STOP_PATIENCE = 40
# The application with keyfront's token cache, and without it.
_PLAIN = "[app:main]\nuse = egg:keyfront#keystone\n"
_STOCK_MODULES = {True: "keyfront.gateway.uwsgi", False: "keystone.wsgi.api"}
_STOCK_SCRIPTS = {True: "keyfront.gateway.mod_wsgi", False: "keystone.wsgi.api"}
_NOT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


class Deployment:
    """A running setting."""

    def __init__(self, port: int, masters: list[int]) -> None:
        self.port = port
        self._masters = masters

    def url(self) -> str:
        return f"http://{HOST}:{self.port}{PATH}"

    def cpu(self) -> float:
        """CPU seconds of all processes up to now, of those that have ended, too."""
        ticks = 0
        for pid in self._family():
            with suppress(OSError):
                # behind the name, which may hold blanks: utime, stime, cutime and cstime are
                # fields 14 to 17
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """MiB of all processes, what they share counted once."""
        kib = 0
        for pid in self._family():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        kib += int(line.split()[1])
        return kib / 1024

    def _family(self) -> list[int]:
        found = list(self._masters)
        for pid in found:
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                found += map(int, text.split())
        return found


class Deployments:
    """The settings, and the token that they are asked about.

    :param folder: a folder of this user only; the caller deletes it
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State(folder / "state")
        self.headers: dict[str, str] = {}
        self.workload = Workload()

    def create(self) -> None:
        """Make the Keystone."""
        for _ in self.state.create(f"http://{HOST}:5000/v3"):
            pass
        # a web server that gave up root has to get to its sockets, and to nothing else
        self.folder.chmod(0o711)

    @contextmanager
    def running(self, name: str, *, cache: bool) -> Iterator[Deployment]:
        """Serve one setting, until the block ends.

        :raises ServerError: it does not start, or does not answer as Keystone does
        """
        words = [*name.split(), "on" if cache else "off"]
        folder = self.folder / "-".join(words)
        folder.mkdir(mode=0o711)
        port = here.claim(f"{HOST}:0", HOST, 0)
        if name in OURS:
            self._render(folder, OURS[name], port, cache=cache)
            kind = OURS[name]
        else:
            self._write_stock(folder, name, port, cache=cache)
            kind = {"nginx": "nginx+uwsgi", "apache": "apache+uwsgi"}.get(
                STOCK[name].front, "mod_wsgi"
            )
        environment = {**os.environ, **self.state.environment()}
        # our files name what they need themselves
        for variable in ("KEYFRONT_APP", *(self.state.environment() if name in OURS else ())):
            environment.pop(variable, None)
        with ExitStack() as stack:
            masters = [
                stack.enter_context(_program(folder, program, command, stop, environment))
                for program, command, stop in _commands(folder, kind)
            ]
            deployment = Deployment(port, masters)
            self._wait(deployment, folder)
            yield deployment

    def _render(self, folder: Path, server: str, port: int, *, cache: bool) -> None:
        target = ""
        if not cache:
            (folder / "plain.ini").write_text(_PLAIN)
            target = f"config:{folder}/plain.ini"
        for name in ("run", "run/app", "log", "cache"):
            (folder / name).mkdir()
        user, group = _user()
        settings = Settings(
            folder=folder, server=server, target=target, listen=f"{HOST}:{port}",
            user=user, group=group, web_user=user, web_group=group, config=self.state.path,
            run_directory=folder / "run" / "app", log_directory=folder / "log",
            cache_directory=folder / "cache", virtualenv=Path(here.python_home()),
        )  # fmt: skip
        computed = plan(machine.read(), self.workload)
        for file in render(computed, settings, versions.find(settings.virtualenv)):
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)

    def _write_stock(self, folder: Path, name: str, port: int, *, cache: bool) -> None:
        stock = STOCK[name]
        user, group = _user()
        modules = _STOCK_SCRIPTS if stock.front == "mod_wsgi" else _STOCK_MODULES
        values = {
            "folder": str(folder),
            "listen": f"{HOST}:{port}",
            "socket": str(folder / "uwsgi.sock"),
            "user": user,
            "group": group,
            "modules": here.apache_modules("mod_mpm_event.so", "apache2-bin"),
            "mod_wsgi": here.mod_wsgi_module(),
            "virtualenv": here.python_home(),
            "module": f"{modules[cache]}:application",
        }
        for file, text in stock.files(values, machine.read().somaxconn).items():
            (folder / file).write_text(text)

    def _wait(self, deployment: Deployment, folder: Path) -> None:
        """Until it answers a validation, the first time after a login."""
        deadline = time.monotonic() + START_PATIENCE
        while True:
            try:
                if not self.headers:
                    self._log_in(deployment)
                status = _get(deployment, self.headers)
            except (OSError, HTTPException):
                status = 0
            if status == 200:
                return
            if time.monotonic() > deadline:
                logs = "; ".join(
                    path.read_text(errors="replace")[-300:] for path in folder.glob("*.out")
                )
                raise ServerError(f"{folder.name} answers {status or 'nothing'}: {logs}")
            time.sleep(0.1)

    def _log_in(self, deployment: Deployment) -> None:
        password = self.state.password_file.read_text(encoding="utf-8").strip()
        domain = {"id": "default"}
        user = {"name": "admin", "domain": domain, "password": password}
        body = {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": {"name": "admin", "domain": domain}},
            }
        }
        connection = HTTPConnection(HOST, deployment.port, timeout=START_PATIENCE)
        try:
            connection.request(
                "POST", PATH, json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        token = answer.headers["X-Subject-Token"]
        if token:
            self.headers = {"X-Auth-Token": token, "X-Subject-Token": token}


def _get(deployment: Deployment, headers: dict[str, str]) -> int:
    connection = HTTPConnection(HOST, deployment.port, timeout=START_PATIENCE)
    try:
        connection.request("GET", PATH, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _user() -> tuple[str, str]:
    """Whom a web server drops to; this user, if it is not root."""
    front = here.front_user()
    return front or (pwd.getpwuid(os.geteuid()).pw_name, getgrgid(os.getegid()).gr_name)


def _commands(folder: Path, kind: str) -> Iterator[tuple[str, list[str], signal.Signals]]:
    """Name, command and what stops it, in the order in which they start."""
    if "+uwsgi" in kind:
        yield "uwsgi", [here.uwsgi_program(), "--ini", str(folder / "uwsgi.ini")], signal.SIGTERM
    if kind.startswith("nginx"):
        nginx = here.system_program(("nginx",), "nginx")
        command = [nginx, "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.error")]
        yield "nginx", [*command, "-g", "daemon off;"], signal.SIGQUIT
        return
    apache = here.system_program(("apache2", "httpd"), "apache2-bin")
    # mod_wsgi runs no application as root
    user = _NOT_ROOT if kind == "mod_wsgi" and os.geteuid() == 0 else ()
    command = [*user, apache, "-f", str(folder / "apache.conf"), "-DFOREGROUND"]
    yield "apache", command, signal.SIGTERM


@contextmanager
def _program(
    folder: Path, name: str, command: list[str], stop: signal.Signals, environment: dict[str, str]
) -> Iterator[int]:
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            process_group=0,
        )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.send_signal(stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
