"""The Keystone that line-ups serve, and its client by HTTP.

As in the published test it has two projects. It is made by ``keyfront serve``'s own steps, or is a
state folder of ``keyfront serve`` that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from keyfront.cli.credentials import Credentials
from keyfront.errors import ServerError
from keyfront.gateway.serve.database import Database
from keyfront.gateway.serve.state import State

from .. import files
from ..load.cloud_client import Answer, Client

PROJECTS, VALIDATION, VERSION = "/v3/projects", "/v3/auth/tokens", "/v3"
SECOND_PROJECT, SERVICE_USER = "service", "nova"
_MORE = "more.conf"
_DATABASE = "[database]\nconnection = {connection}\n"
_CACHE = """
[keyfront_token_cache]
path = {shared}
node_memory = 8
routes = {routes}
"""
_AUTHTOKEN = """\
auth_type = password
auth_url = {url}
www_authenticate_uri = {url}
username = admin
user_domain_id = default
password = {password}
project_name = admin
project_domain_id = default
"""
# Seconds; an answer that takes longer is none.
_PATIENCE = 60
_DEFAULT = {"id": "default"}


class Keystone:
    """A Keystone to be served.

    :param path: its state folder, as ``keyfront serve`` makes it
    :param database: the URL of its database; default: SQLite in the folder
    :param routes: the paths that keyfront's token cache answers beside validations
    """

    def __init__(
        self, path: Path, *, database: str | None = None, routes: tuple[str, ...] = (PROJECTS,)
    ) -> None:
        self.state = State(path)
        self._database = Database.of(database) if database else None
        self._routes = routes
        sqlite = f"sqlite:///{self.state.path / 'keystone.sqlite'}"
        self._connection = escaped(database or sqlite)

    @property
    def password(self) -> str:
        """The administrator's password."""
        return self.state.password_file.read_text(encoding="utf-8").strip()

    def make(
        self, say: Callable[[str], None] = lambda step: None, url: str = "http://127.0.0.1:5000/v3"
    ) -> None:
        """Make it, unless it is there already.

        :param say: told each step before it is taken
        :param url: the URL of the identity service, for its catalog
        :raises StateError: the folder is not ours to use
        """
        if not self.state.check():
            for step in self.state.create(url, self._database):
                say(step)

    def configured(self, folder: Path, text: str) -> dict[str, str]:
        """Return the environment that names its configuration, with more of it, to a process.

        :param folder: the folder of the file with ``text``
        :param text: more of keystone.conf, which wins over the state's own
        """
        more = folder / _MORE
        more.touch(mode=0o600)
        more.write_text(text, encoding="utf-8")
        # the last one wins
        files = f"{self.state.config};{more}"
        return {**self.state.environment(), "OS_KEYSTONE_CONFIG_FILES": files}

    def without_keyfront(self) -> str:
        """Return the lines of keystone.conf that leave nothing of keyfront in it."""
        return _DATABASE.format(connection=self._connection)

    def environment(self, folder: Path, shared: Path | None) -> dict[str, str]:
        """Return the environment that names its configuration to a process.

        :param folder: the folder of a line-up's files
        :param shared: the folder of its token cache; ``None`` without one: then there is no line of
            keyfront in Keystone, either
        """
        if shared is None:
            return self.configured(folder, self.without_keyfront())
        text = _DATABASE.format(connection=self.state.connection(self._database))
        routes = ", ".join(self._routes)
        text += _CACHE.format(shared=escaped(str(shared)), routes=routes)
        return self.configured(folder, text)

    def login(self) -> dict[str, Any]:
        """Return the body of a login as the administrator."""
        return login("admin", self.password, "admin")

    def token(self, url: str) -> str:
        """Return a new token of the administrator, from who serves at a URL."""
        return log_in(url, self.login())

    def admin(self, url: str) -> Admin:
        """Return who makes things in it, at a URL without a path."""
        token = self.token(url)
        return Admin(lambda method, path, body: ask(url, method, f"/v3/{path}", token, body))

    def validation_headers(self, url: str) -> dict[str, str]:
        """Return the headers by which a service validates the administrator's token.

        The service is a user of its own, made here, as it is in a cloud. For a user that asks
        about itself Keystone does half the work, since it finds the one side in what its thread
        remembers of the previous request.
        """
        subject = self.token(url)
        admin = self.admin(url)
        project = admin.made("project", SECOND_PROJECT)
        user = admin.made("user", SERVICE_USER, password=self.password)
        admin.grant(admin.made("role", "admin"), project, user)
        caller = log_in(url, login(SERVICE_USER, self.password, SECOND_PROJECT))
        return {"X-Auth-Token": caller, "X-Subject-Token": subject}


class Admin:
    """Makes what a measurement needs in a Keystone, unless it is there.

    :param ask: an administrator's request: of method, path behind ``/v3/`` and body the answer
    """

    def __init__(self, ask: Callable[[str, str, object], Any]) -> None:
        self._ask = ask

    def made(self, kind: str, name: str, **values: object) -> str:
        """Return the identifier of a ``project``, ``user`` or ``role`` with a name.

        :param values: more of the body, if it is made
        """
        found = self._ask("GET", f"{kind}s?name={name}", None)[f"{kind}s"]
        made = found or [self._ask("POST", f"{kind}s", {kind: {"name": name, **values}})[kind]]
        return str(made[0]["id"])

    def grant(self, role: str, project: str, user: str) -> None:
        """Give a user a role on a project; all by their identifiers."""
        self._ask("PUT", f"projects/{project}/users/{user}/roles/{role}", None)


@contextmanager
def temporary(
    say: Callable[[str], None] = lambda step: None, path: Path | None = None
) -> Iterator[tuple[Path, Keystone]]:
    """Make a Keystone in a folder, which is given too, and delete both when the block ends.

    :param say: told each step before it is taken
    :param path: a state folder, which stays, with the Keystone to use; made if it is not there
    :raises StateError: the state folder is in use or not ours to use
    """
    with files.folders() as (folder, _):
        keystone = Keystone(path or folder / "state")
        with keystone.state.locked():
            keystone.make(say)
            yield folder, keystone


def escaped(text: str) -> str:
    """Return a value for keystone.conf, where oslo.config substitutes ``$name``."""
    return text.replace("$", "$$")


def login(
    user: str, password: str, project: str | None, *, domain: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the body of a login with a password.

    :param project: one of the domain Default, or ``None`` for an unscoped token
    :param domain: the domain of the user, by id or name; default: the domain Default
    """
    scope: object = "unscoped"
    if project is not None:
        scope = {"project": {"name": project, "domain": _DEFAULT}}
    who = {"name": user, "domain": dict(domain or _DEFAULT), "password": password}
    identity = {"methods": ["password"], "password": {"user": who}}
    return {"auth": {"identity": identity, "scope": scope}}


def authtoken_options(url: str, password: str) -> str:
    """Return the options of ``authtoken`` for a service that validates as the administrator.

    :param url: the URL of the Keystone, with its ``/v3``
    """
    return _AUTHTOKEN.format(url=url, password=password)


def log_in(url: str, body: dict[str, Any]) -> str:
    """Return a new token, by the body of a login.

    :param url: the URL of the server, without a path
    """
    token = _answer(url, "POST", VALIDATION, None, body).token
    if not token:
        raise ServerError(f"{url}: a login is answered with no token")
    return token


def ask(
    url: str, method: str, path: str, token: str | None, body: Any = None, *, subject: str = ""
) -> dict[str, Any]:
    """Make one request, on a connection of its own, and return the content of its answer.

    :param url: the URL of the server, without a path
    :param subject: the token that the request is about
    """
    return _answer(url, method, path, token, body, subject=subject or None).content


def _answer(url: str, method: str, path: str, *given: Any, **more: Any) -> Answer:
    with closing(Client(Credentials(url, {}), timeout=_PATIENCE)) as client:
        answer = client.ask(method, path, *given, **more)
    if answer.failure:
        what = f"{method} {url}{path.partition('?')[0]}"
        raise ServerError(f"{what}: {answer.failure}")
    return answer
