"""The Keystone that line-ups serve: one database, one set of keys, whoever serves it and how.

As in the published test it has two projects. It is made by ``keyfront serve``'s own steps, or is a
state folder of ``keyfront serve`` that is there already.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keyfront.errors import ServerError
from keyfront.gateway.serve.state import State

PROJECTS, VALIDATION, VERSION = "/v3/projects", "/v3/auth/tokens", "/v3"
SECOND_PROJECT = "service"
# Seconds; an answer that takes longer is none.
PATIENCE = 60
# What the cache answers beside validations: what the sweep asks for, too.
_ROUTES = (PROJECTS,)

_UNTOUCHED = """\
[database]
connection = {connection}
"""
_CACHED = """\
[database]
connection = {connection}

[keyfront_token_cache]
path = {shared}
node_memory = 8
routes = {routes}
"""


class Keystone:
    """A Keystone to be served.

    :param path: its state folder, as ``keyfront serve`` makes it
    :param connection: URL of its database without keyfront's plugin; default: SQLite in the folder
    """

    def __init__(self, path: Path, *, connection: str | None = None) -> None:
        self.state = State(path)
        self._connection = connection or f"sqlite:///{self.state.path / 'keystone.sqlite'}"
        self._projects: list[str] = []

    def make(self, say: Callable[[str], None]) -> None:
        """Make it, unless it is there already.

        :param say: told each step before it is taken
        :raises StateError: the folder is not ours to use
        :raises ServerError: Keystone cannot be set up
        """
        if not self.state.check():
            for step in self.state.create("http://127.0.0.1:5000/v3"):
                say(step)

    def environment(self, folder: Path, shared: Path | None) -> dict[str, str]:
        """What names its configuration to a process.

        :param folder: where a line-up keeps its files
        :param shared: where its token cache lies; ``None`` without one: then there is no line of
            keyfront in Keystone, either
        """
        # oslo.config substitutes $name
        values = {
            "connection": self._connection.replace("$", "$$"),
            "routes": ", ".join(_ROUTES),
        }
        text = _UNTOUCHED.format(**values)
        if shared is not None:
            mark = "&" if "?" in self._connection else "?"
            values["connection"] += f"{mark}plugin=keyfront"
            text = _CACHED.format(**values, shared=str(shared).replace("$", "$$"))
        more = folder / "line-up.conf"
        more.touch(mode=0o600)
        more.write_text(text, encoding="utf-8")
        # the last one wins
        files = f"{self.state.config};{more}"
        return {**self.state.environment(), "OS_KEYSTONE_CONFIG_FILES": files}

    def login(self) -> dict[str, Any]:
        """The body of a login as the administrator."""
        password = self.state.password_file.read_text(encoding="utf-8").strip()
        return login("admin", password, "admin")

    def token(self, url: str) -> str:
        """A new token of the administrator, from who serves at a URL.

        :raises ServerError: the login failed
        """
        return log_in(url, self.login())

    def populate(self, url: str) -> None:
        """Make the second project, unless it is there.

        :raises ServerError: Keystone does not answer as it should
        """
        token = self.token(url)
        found = ask(url, "GET", f"{PROJECTS}?name={SECOND_PROJECT}", token)["projects"]
        if not found:
            ask(url, "POST", PROJECTS, token, {"project": {"name": SECOND_PROJECT}})


def login(user: str, password: str, project: str, *, domain: str = "default") -> dict[str, Any]:
    """The body of a login with a password, for a project of the same domain (by its id)."""
    found = {"id": domain}
    return {
        "auth": {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": user, "domain": found, "password": password}},
            },
            "scope": {"project": {"name": project, "domain": found}},
        }
    }


def log_in(url: str, body: dict[str, Any]) -> str:
    """A new token, by the body of a login.

    :raises ServerError: the login failed
    """
    answer, _ = _exchange(url, "POST", VALIDATION, None, body)
    return answer["X-Subject-Token"]


def ask(
    url: str, method: str, path: str, token: str | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of an answer.

    :param url: of the server, without a path
    :raises ServerError: there was none, or another status than 2xx
    """
    _, text = _exchange(url, method, path, token, body)
    content: dict[str, Any] = json.loads(text or b"{}")
    return content


def _exchange(
    url: str, method: str, path: str, token: str | None, body: dict[str, Any] | None
) -> tuple[dict[str, str], bytes]:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token is not None:
        headers["X-Auth-Token"] = token
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    what = f"{method} {url}{path.partition('?')[0]}"
    try:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"{what}: no answer: {error!r}") from None
    finally:
        connection.close()
    if not 200 <= answer.status < 300:
        raise ServerError(f"{what}: Keystone answers {answer.status}")
    return dict(answer.getheaders()), text
