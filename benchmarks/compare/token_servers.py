"""The servers that ``token_validation`` compares: uWSGIs that differ only in what they serve.

All share one Keystone on SQLite and use the packaged ini file with 2 processes and no request log.
Stock Keystone is loaded by each worker (``lazy-apps``): nothing in it would reopen what a fork must
not share.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import MissingPartError, ServerError
from keyfront.gateway.serve.state import State

from ..lineups import uwsgi_server
from ..lineups.uwsgi_server import HOST, PROCESSES, Server, tail
from .keystone_requests import ask, log_in
from .token_candidates import BARE, CANDIDATES, STOCK, Candidate

PATH = "/v3/auth/tokens"
# Of connections that are closed after each answer; kept ones hold a thread each.
CONNECTIONS = 4

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
    :param extra: more of keystone.conf, for all
    """

    def __init__(
        self, folder: Path, shared: Path, *, threads: int = 1, extra: str = ""
    ) -> None:
        self.folder = folder
        self._extra = extra
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
                    values["memcached"] = stack.enter_context(memcached())
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
        candidate, port = CANDIDATES[name], programs.claim(f"{HOST}:0", HOST, 0)
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
            more.write_text(candidate.configuration(dollars) + self._extra)
            # the last one wins
            environment["OS_KEYSTONE_CONFIG_FILES"] = f"{self.state.config};{more}"
        text = self._ini(candidate, port, folder)
        lazy = candidate.module == STOCK
        with uwsgi_server.running(folder, text, port, environment, lazy=lazy) as server:
            yield server

    def _ini(self, candidate: Candidate, port: int, folder: Path) -> str:
        return uwsgi_server.ini(
            self.state,
            port,
            folder,
            module=candidate.module,
            lazy=candidate.module == STOCK,
            kept=candidate.kept,
            threads=self.threads,
        )

    def _log_in(self) -> None:
        """Get the token of a service that asks and of the user it asks about.

        Two users, as it is in a cloud. For a user that asks about itself Keystone does half the
        work, since it finds the one side in what its thread remembers of the previous request.
        """
        password = self.state.password_file.read_text(encoding="utf-8").strip()
        server = self["keystone"]
        subject = log_in(server, "admin", password, "admin")
        project = ask(server, "POST", "projects", subject, {"project": {"name": "service"}})
        nova = {"user": {"name": "nova", "password": password}}
        user = ask(server, "POST", "users", subject, nova)
        roles = ask(server, "GET", "roles?name=admin", subject)
        place = f"projects/{project['project']['id']}/users/{user['user']['id']}"
        ask(server, "PUT", f"{place}/roles/{roles['roles'][0]['id']}", subject)
        caller = log_in(server, "nova", password, "service")
        self.headers = {"X-Auth-Token": caller, "X-Subject-Token": subject}
        self._expected = comparable(self._answer("keystone"))

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
def memcached() -> Iterator[str]:
    """A memcached on a free port of loopback: its ``HOST:PORT``."""
    program = memcached_program()
    port = programs.claim(f"{HOST}:0", HOST, 0)
    user = pwd.getpwuid(os.geteuid()).pw_name
    process = subprocess.Popen(
        [program, "-l", HOST, "-p", str(port), "-U", "0", "-u", user],
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        uwsgi_server.await_port(process, port, lambda: "memcached did not start")
        yield f"{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


def memcached_program() -> str:
    """:raises MissingPartError: memcached or its client is not installed; names the command"""
    if not importlib.util.find_spec("pymemcache"):
        raise MissingPartError("pymemcache is not installed: run pip install pymemcache")
    return programs.system_program(("memcached",), "memcached")


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
