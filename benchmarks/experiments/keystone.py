"""The Keystone that the experiments share: made once, on MariaDB or SQLite, with its tokens.

What differs between line-ups is who serves it and how; database, keys, users and tokens are the
same. As in the published test there are two projects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from keyfront.errors import ServerError
from keyfront.gateway.serve.state import State

from ..worlds import mariadb
from ..worlds.delaying_proxy import HOST

PROJECTS, VALIDATION = "/v3/projects", "/v3/auth/tokens"
SERVICE = "service"
SERVICE_USER = "nova"


class DatabaseState(State):
    """A state folder whose Keystone is on another database than its SQLite.

    :param url: of the database; ``None`` for SQLite
    """

    def __init__(self, path: Path, url: str | None) -> None:
        super().__init__(path)
        self._url = url

    @property
    def url(self) -> str:
        """The database's, without keyfront's plugin."""
        return self._url or f"sqlite:///{self.path / 'keystone.sqlite'}"

    def write_configuration(self, endpoint: str) -> None:
        super().write_configuration(endpoint)
        if self._url is not None:
            mark = "&" if "?" in self._url else "?"
            lines = self.config.read_text(encoding="utf-8").splitlines()
            lines = [
                f"connection = {self._url.replace('$', '$$')}{mark}plugin=keyfront"
                if line.startswith("connection =")
                else line
                for line in lines
            ]
            self.write("keystone.conf", "\n".join(lines) + "\n")


class Keystone:
    """A Keystone that line-ups serve.

    :ivar state: its folder
    :ivar database: the MariaDB it is on; ``None`` for SQLite
    """

    def __init__(self, state: DatabaseState, database: mariadb.MariaDB | None) -> None:
        self.state = state
        self.database = database
        self._headers: dict[str, str] = {}

    def stock_environment(self) -> dict[str, str]:
        """What names its configuration to a process, without a line of keyfront in it."""
        plain = self.state.path / "stock.conf"
        if not plain.exists():
            url = self.state.url.replace("$", "$$")
            self.state.write("stock.conf", f"[database]\nconnection = {url}\n")
        # the last one wins
        files = f"{self.state.config};{plain}"
        return {**self.state.environment(), "OS_KEYSTONE_CONFIG_FILES": files}

    def headers(self, port: int) -> dict[str, str]:
        """The tokens of a service and of the user it asks about, got once from a server.

        Two users, as it is in a cloud: of a user that asks about itself Keystone remembers half.
        """
        if not self._headers:
            password = self.state.password_file.read_text(encoding="utf-8").strip()
            subject = _token(port, "admin", password, "admin")
            project = _ask(port, "POST", "projects", subject, {"project": {"name": SERVICE}})
            user = {"user": {"name": SERVICE_USER, "password": password}}
            user = _ask(port, "POST", "users", subject, user)
            (role,) = _ask(port, "GET", "roles?name=admin", subject)["roles"]
            place = f"projects/{project['project']['id']}/users/{user['user']['id']}"
            _ask(port, "PUT", f"{place}/roles/{role['id']}", subject)
            caller = _token(port, SERVICE_USER, password, SERVICE)
            self._headers = {"X-Auth-Token": caller, "X-Subject-Token": subject}
        return self._headers

    def login(self) -> bytes:
        """The body of a login as the administrator, with a project."""
        password = self.state.password_file.read_text(encoding="utf-8").strip()
        return json.dumps(_login("admin", password, "admin")).encode()


@contextmanager
def keystone(folder: Path, *, sqlite: bool) -> Iterator[Keystone]:
    """Make a Keystone that is there until the block ends.

    :param folder: an empty one of this user only; the caller deletes it
    :raises MissingPartError: Keystone or MariaDB is not installed; names the command
    """
    if sqlite:
        yield _made(folder, None)
        return
    place = folder / "db"
    place.mkdir(mode=0o700)
    with mariadb.mariadb(place) as database:
        yield _made(folder, database)


def _made(folder: Path, database: mariadb.MariaDB | None) -> Keystone:
    state = DatabaseState(folder / "state", database.url if database else None)
    for _ in state.create(f"http://{HOST}:5000/v3"):
        pass
    return Keystone(state, database)


def _login(name: str, password: str, project: str) -> dict[str, Any]:
    domain = {"id": "default"}
    user = {"name": name, "domain": domain, "password": password}
    return {
        "auth": {
            "identity": {"methods": ["password"], "password": {"user": user}},
            "scope": {"project": {"name": project, "domain": domain}},
        }
    }


def _token(port: int, name: str, password: str, project: str) -> str:
    token: str = _ask(port, "POST", "auth/tokens", None, _login(name, password, project))["token"]
    return token


def _ask(
    port: int, method: str, path: str, token: str | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One request; of a login it gives the token alone."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token is not None:
        headers["X-Auth-Token"] = token
    client = HTTPConnection(HOST, port, timeout=60)
    try:
        client.request(method, f"/v3/{path}", json.dumps(body) if body else None, headers)
        answer = client.getresponse()
        text = answer.read()
    except OSError as error:
        raise ServerError(f"{method} /v3/{path}: Keystone does not answer: {error}") from None
    finally:
        client.close()
    if not 200 <= answer.status < 300:
        raise ServerError(f"{method} /v3/{path}: Keystone answers {answer.status}")
    if path == "auth/tokens":
        return {"token": answer.headers["X-Subject-Token"]}
    found: dict[str, Any] = json.loads(text or b"{}")
    return found
