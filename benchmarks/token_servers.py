"""The servers that ``token_validation`` compares: uWSGIs that differ only in what they serve.

All share one Keystone on SQLite and use the packaged ini file with 2 processes and no request log.
Stock Keystone is loaded by each worker (``lazy-apps``): nothing in it would reopen what a fork must
not share.

uWSGI's ``http-socket`` closes after each answer, as packaged. A candidate that keeps connections
has ``http11-socket`` instead; then a connection occupies a thread.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.errors import MissingPartError, ServerError
from keyfront.gateway import application
from keyfront.gateway.render import render
from keyfront.gateway.serve import machine, shapes
from keyfront.gateway.serve.state import State

from .load import wrk
from .token_candidates import BARE, CANDIDATES, STOCK, Candidate

HOST = "127.0.0.1"
PATH = "/v3/auth/tokens"
PROCESSES = 2
# Of connections that are closed after each answer; kept ones hold a thread each.
CONNECTIONS = 4
# Seconds that a uWSGI gets to stop; it has nothing left to answer.
STOP_PATIENCE = 5
START_PATIENCE = 60

# Written beside the answer it gives, in a folder of this user only: a header holds the token.
_BARE = """\
import json
with open({answer!r}) as file:
    status, headers, text = json.load(file)
headers = [(name, value) for name, value in headers]
body = [text.encode()]
def application(environ, start_response):
    start_response(status, headers)
    return body
"""


class Server(NamedTuple):
    """A running uWSGI."""

    port: int
    master: int
    log: Path

    def connect(self) -> HTTPConnection:
        return HTTPConnection(HOST, self.port, timeout=wrk.PATIENCE)

    def cpu(self) -> float:
        """CPU seconds of the master and its workers up to now."""
        try:
            children = Path(f"/proc/{self.master}/task/{self.master}/children").read_text()
            ticks = 0
            for pid in (str(self.master), *children.split()):
                # behind the name, which may hold blanks: utime and stime are fields 14 and 15
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            raise ServerError(f"uWSGI ended: {tail(self.log)}") from None
        return ticks / os.sysconf("SC_CLK_TCK")


class Answer(NamedTuple):
    """An answer of Keystone: ``200 OK``, headers, body."""

    status: str
    headers: list[tuple[str, str]]
    body: str


class Servers:
    """The candidates that run, and the tokens that they are asked about.

    :param folder: a folder of this user only; the caller deletes it
    :param shared: the same in memory, for what keyfront's workers share
    :param threads: of each uWSGI process
    """

    def __init__(self, folder: Path, shared: Path, *, threads: int = 1) -> None:
        self.folder = folder
        self.threads = threads
        self.shared = shared
        self.state = State(folder / "state")
        self.headers: dict[str, str] = {}
        self._running: dict[str, Server] = {}
        self._expected: object = None

    def connections(self, name: str) -> int:
        """How many connections load a candidate."""
        return PROCESSES * self.threads if CANDIDATES[name].kept else CONNECTIONS

    def __getitem__(self, name: str) -> Server:
        return self._running[name]

    @contextmanager
    def running(self, names: Iterable[str]) -> Iterator[None]:
        """All candidates served, each one's answer checked."""
        names = dict.fromkeys(("keystone", *names))
        with ExitStack() as stack:
            for _ in self.state.create(f"http://{HOST}:5000/v3"):
                pass
            for name in names:
                values = {
                    "database": str(self.state.path / "keystone.sqlite"),
                    "shared": str(self.shared_folder(name)),
                }
                if CANDIDATES[name].memcached:
                    values["memcached"] = stack.enter_context(_memcached())
                self._running[name] = stack.enter_context(self._served(name, values))
                if name == "keystone":
                    self._log_in()
            for name in names:
                self._check(name)
            yield

    def shared_folder(self, name: str) -> Path:
        """Where a keyfront candidate's epoch table and answers are."""
        return self.shared / name.replace(" ", "-")

    @contextmanager
    def _served(self, name: str, values: dict[str, str]) -> Iterator[Server]:
        candidate, port = CANDIDATES[name], machine.claim(f"{HOST}:0", HOST, 0)
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(mode=0o700)
        environment = {**os.environ, **self.state.environment()}
        if candidate.module == BARE:
            answer = folder / "answer.json"
            answer.write_text(json.dumps(self._answer("keystone")))
            (folder / "bare.py").write_text(_BARE.format(answer=str(answer)))
            others = filter(None, [os.environ.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), *others])
        else:
            more = folder / "more.conf"
            # oslo.config substitutes $name
            dollars = {key: value.replace("$", "$$") for key, value in values.items()}
            more.write_text(candidate.configuration(dollars))
            # the last one wins
            environment["OS_KEYSTONE_CONFIG_FILES"] = f"{self.state.config};{more}"
        ini, log = folder / "uwsgi.ini", folder / "uwsgi.log"
        ini.write_text(self._ini(candidate, port, folder))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [machine.uwsgi_program(), "--ini", str(ini)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        try:
            _wait_for(process, log, *_ready(candidate))
            yield Server(port, process.pid, log)
        finally:
            # the master first takes its workers down, so that no zombie is left to the system
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_PATIENCE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _ini(self, candidate: Candidate, port: int, folder: Path) -> str:
        plan = shapes.Plan(
            state=self.state,
            listen=f"{HOST}:{port}",
            target=application.default_target(),
            runtime=folder,
            stop_timeout=1,
            processes=PROCESSES,
        )
        values = {**plan.values(), "threads": self.threads, "stats_socket": folder / "stats.sock"}
        text = render("uwsgi/keyfront.ini.j2", **values) + "\ndisable-logging = true\n"
        changes = {}
        if candidate.module is not None:
            changes["module = keyfront.gateway.uwsgi:application"] = f"module = {candidate.module}"
        if candidate.module == STOCK:
            changes["lazy-apps = false"] = "lazy-apps = true"
        if candidate.kept:
            changes["\nhttp-socket = "] = "\nhttp11-socket = "
            changes["add-header = Connection: close\n"] = ""
        for old, new in changes.items():
            if text.count(old) != 1:
                raise ServerError(f"the packaged uWSGI ini has changed: no single {old!r} in it")
            text = text.replace(old, new)
        return text

    def _log_in(self) -> None:
        """Get the token of a service that asks and of the user it asks about.

        Two users, as it is in a cloud. For a user that asks about itself Keystone does half the
        work, since it finds the one side in what its thread remembers of the previous request.
        """
        password = self.state.password_file.read_text(encoding="utf-8").strip()
        subject = self._token("admin", password, "admin")
        project = self._ask("POST", "projects", subject, {"project": {"name": "service"}})
        user = self._ask("POST", "users", subject, {"user": {"name": "nova", "password": password}})
        roles = self._ask("GET", "roles?name=admin", subject)
        place = f"projects/{project['project']['id']}/users/{user['user']['id']}"
        self._ask("PUT", f"{place}/roles/{roles['roles'][0]['id']}", subject)
        caller = self._token("nova", password, "service")
        self.headers = {"X-Auth-Token": caller, "X-Subject-Token": subject}
        self._expected = comparable(self._answer("keystone"))

    def _token(self, name: str, password: str, project: str) -> str:
        domain = {"id": "default"}
        user = {"name": name, "domain": domain, "password": password}
        login = {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": {"name": project, "domain": domain}},
            }
        }
        token: str = self._ask("POST", "auth/tokens", None, login)["token"]
        return token

    def _ask(
        self, method: str, path: str, token: str | None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request to Keystone itself; of a login it gives the token alone."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["X-Auth-Token"] = token
        connection = self["keystone"].connect()
        try:
            connection.request(method, f"/v3/{path}", json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, HTTPException) as error:
            raise ServerError(f"{method} /v3/{path}: {error!r}") from None
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise ServerError(f"{method} /v3/{path}: Keystone answers {answer.status}")
        if path == "auth/tokens":
            return {"token": answer.headers["X-Subject-Token"]}
        content: dict[str, Any] = json.loads(text or b"{}")
        return content

    def _answer(self, name: str) -> Answer:
        connection = self[name].connect()
        try:
            connection.request("GET", PATH, headers=self.headers)
            answer = connection.getresponse()
            body = answer.read().decode()
        except (OSError, HTTPException) as error:
            raise ServerError(f"{name} does not answer: {error!r}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerError(f"{name} answers {answer.status}: {tail(self[name].log)}")
        # that one is the server's, not the application's
        headers = [pair for pair in answer.getheaders() if pair[0].lower() != "connection"]
        return Answer(f"{answer.status} {answer.reason}", headers, body)

    def _check(self, name: str) -> None:
        # the second one is the cache's
        for _ in range(2 * PROCESSES):
            if comparable(self._answer(name)) != self._expected:
                raise ServerError(f"{name} answers otherwise than Keystone")

    def touch(self, name: str) -> None:
        """Let every thread of a candidate answer: its memory and its cache are warm then."""
        open_ones = [self[name].connect() for _ in range(self.connections(name))]
        try:
            # all at once, so that no thread takes two
            for _ in range(2):
                for connection in open_ones:
                    connection.request("GET", PATH, headers=self.headers)
                for connection in open_ones:
                    connection.getresponse().read()
        except (OSError, HTTPException) as error:
            raise ServerError(f"{name} does not answer: {error!r}") from None
        finally:
            for connection in open_ones:
                connection.close()


@contextmanager
def _memcached() -> Iterator[str]:
    """A memcached on a free port of loopback: its ``HOST:PORT``."""
    program = memcached_program()
    port = machine.claim(f"{HOST}:0", HOST, 0)
    user = pwd.getpwuid(os.geteuid()).pw_name
    process = subprocess.Popen(
        [program, "-l", HOST, "-p", str(port), "-U", "0", "-u", user],
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection((HOST, port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError("memcached did not start") from None
                time.sleep(0.02)
        yield f"{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


def memcached_program() -> str:
    """:raises MissingPartError: memcached or its client is not installed; names the command"""
    if not importlib.util.find_spec("pymemcache"):
        raise MissingPartError("pymemcache is not installed: run pip install pymemcache")
    return machine.system_program(("memcached",), "memcached")


def _ready(candidate: Candidate) -> tuple[str, int]:
    """The line of uWSGI's log that says it can answer, and how often it has to be there."""
    # with lazy-apps a worker is there before its application
    return ("WSGI app 0 " if candidate.module == STOCK else "spawned uWSGI worker"), PROCESSES


def _wait_for(process: subprocess.Popen[bytes], log: Path, line: str, count: int) -> None:
    deadline = time.monotonic() + START_PATIENCE
    while log.read_text(errors="replace").count(line) < count:
        if process.poll() is not None:
            raise ServerError(f"uWSGI ended: {tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"uWSGI is not ready after {START_PATIENCE} s: {tail(log)}")
        time.sleep(0.05)


def tail(log: Path) -> str:
    """The end of a log, for an error."""
    return log.read_text(errors="replace")[-600:]


def comparable(answer: Answer) -> object:
    """An answer without what may differ: the request's id, and the order within lists."""
    headers = {name.lower(): value for name, value in answer.headers}
    headers.pop("x-openstack-request-id", None)
    return answer.status, headers, _sorted(json.loads(answer.body))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(one) for key, one in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(one) for one in value), key=lambda one: json.dumps(one, default=str))
    return value
