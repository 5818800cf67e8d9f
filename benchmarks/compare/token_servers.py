"""The servers that ``token_validation`` compares: uWSGIs that differ only in what they serve.

All share one Keystone, by default on SQLite, and use the packaged ini file with 2 processes and no
request log.
Stock Keystone and the bare application are served by their own entry, without a line of keyfront in
the process: no entrypoint, and no plugin in the database's URL. Stock Keystone is loaded by each
worker (``lazy-apps``): nothing in it would reopen what a fork must not share.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.errors import MissingPartError, ServerError
from keyfront.gateway.serve import lineups as serve_lineups

from .. import files
from ..lineups import uwsgi
from ..lineups.keystone import VALIDATION, Keystone, escaped
from ..lineups.uwsgi import PROCESSES, Server
from ..servers.delay_proxy import delay_proxy
from ..servers.mariadb import mariadb
from ..servers.memcached import memcached
from ..servers.memcached import program as memcached_program
from ..servers.ports import free_port

STOCK = "keystone.wsgi.api:application"
BARE = "bare:application"
# Of connections that are closed after each answer; kept ones hold a thread each.
CONNECTIONS = 4

# Where it is by default: in memory. Less than by default, since /dev/shm is small in containers.
# The one miss that ends every 30 s of hits is none of a run's hits: wrk, which corrects its
# latencies for requests it could not send meanwhile, makes it hundreds of slow answers.
_SHARED = """\
[keyfront_token_cache]
path = {shared}
node_memory = 8
ttl = 3600
"""
_MEMCACHED = """\
[cache]
enabled = true
backend = dogpile.cache.pymemcache
memcache_servers = {memcached}
"""
_NO_TOKEN_CACHING = """\
[token]
caching = false
"""
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An application that one uWSGI serves.

    :param module: uWSGI's ``module``; ``None`` for keyfront's entrypoint and packaged pipeline
    :param memcached: true if Keystone's own caches are in a memcached
    :param token_caching: Keystone's ``[token] caching``
    :param kept: true if connections are kept
    """

    label: str
    module: str | None = None
    memcached: bool = False
    token_caching: bool = True
    kept: bool = False

    def served(self) -> dict[str, Any]:
        """Return how uWSGI serves it, as arguments of :func:`.uwsgi.packaged`."""
        return {"module": self.module, "lazy": self.module == STOCK, "kept": self.kept}

    def configuration(self, keystone: Keystone, *, shared: Path, memcached: str) -> str:
        """Return what is added to keystone.conf.

        :param shared: folder of keyfront's epoch table and answers
        :param memcached: ``HOST:PORT``
        """
        own = _SHARED.format(shared=escaped(str(shared)))
        parts = [own if self.module is None else keystone.without_keyfront()]
        if self.memcached:
            parts.append(_MEMCACHED.format(memcached=memcached))
        if not self.token_caching:
            parts.append(_NO_TOKEN_CACHING)
        return "".join(parts)


CANDIDATES = {
    "keystone": Candidate(label="Keystone", module=STOCK),
    "memcached": Candidate(label="Keystone + memcached", module=STOCK, memcached=True),
    "bare": Candidate(label="bare WSGI application", module=BARE),
    "bare kept": Candidate(label="bare WSGI application", module=BARE, kept=True),
    "keyfront": Candidate(label="Keystone + keyfront"),
    "keyfront kept": Candidate(label="Keystone + keyfront", kept=True),
    "keyfront+memcached": Candidate(label="Keystone + memcached + keyfront", memcached=True),
    "keyfront+memcached-tokens": Candidate(
        label="the same, no token caching", memcached=True, token_caching=False
    ),
}


def check() -> None:
    """Find out, before anything is made, that the candidates can be served."""
    memcached_program()
    if not importlib.util.find_spec("pymemcache"):
        raise MissingPartError("pymemcache is not installed: run pip install pymemcache")
    serve_lineups.check("uwsgi")


class Answer(NamedTuple):
    """An answer of Keystone: ``200 OK``, headers, body."""

    status: str
    headers: list[tuple[str, str]]
    body: str


#: What the Keystone may keep its data in.
DATABASES = ("sqlite", "mariadb")


@contextmanager
def database(kind: str, folder: Path, *, delay: float = 0.0) -> Iterator[str | None]:
    """Run an empty database of a kind until the block ends.

    :param kind: one of :data:`DATABASES`
    :param folder: an empty one of this user only; its path is short, for a socket is in it
    :param delay: seconds that each round trip to a server takes, besides its own
    :returns: its URL; ``None`` for SQLite, which is in a file that Keystone makes itself
    """
    if kind == "sqlite":
        yield None
        return
    port = free_port() if delay else 0
    with mariadb(folder, port=port) as server:
        url = server.fresh_database("keystone")
        if not delay:
            yield url
            return
        with delay_proxy(port) as proxy:
            proxy.delay(delay)
            yield server.url("keystone", port=proxy.port)


@contextmanager
def serving(
    names: Iterable[str], kind: str = "sqlite", delay: float = 0, threads: int = 1, extra: str = ""
) -> Iterator[Servers]:
    """Serve candidates until the block ends, each one's answer checked.

    :param kind: the kind of the Keystone's database, one of :data:`DATABASES`
    :param delay: seconds that each round trip to it takes, besides its own
    :param threads: the threads of each uWSGI process
    :param extra: more of keystone.conf, for all
    """
    check()
    with files.folders() as (folder, shared):
        folder.joinpath("database").mkdir(mode=0o700)
        with database(kind, folder / "database", delay=delay) as url:
            servers = Servers(folder, shared, threads=threads, extra=extra, url=url)
            with servers.running(names):
                yield servers


class Servers:
    """The candidates that run, and the tokens that they are asked about.

    :param folder: a folder of this user only; the caller deletes it
    :param shared: the same in memory, for what keyfront's workers share
    :param threads: the threads of each uWSGI process
    :param extra: more of keystone.conf, for all
    :param url: the URL of the Keystone's database, an empty one; ``None``: SQLite in the folder
    """

    def __init__(
        self, folder: Path, shared: Path, *, threads: int, extra: str, url: str | None
    ) -> None:
        self.folder = folder
        self._extra = extra
        self.threads = threads
        self.shared = shared
        self.keystone = Keystone(folder / "state", database=url)
        self._url = url or f"sqlite:///{self.keystone.state.path / 'keystone.sqlite'}"
        self.headers: dict[str, str] = {}
        self._running: dict[str, Server] = {}
        self._expected: object = None

    def connections(self, name: str) -> int:
        """Return how many connections load a candidate."""
        return PROCESSES * self.threads if CANDIDATES[name].kept else CONNECTIONS

    def __getitem__(self, name: str) -> Server:
        return self._running[name]

    @contextmanager
    def running(self, names: Iterable[str]) -> Iterator[None]:
        """Serve all candidates until the block ends, each one's answer checked."""
        names = dict.fromkeys(("keystone", *names))
        with ExitStack() as stack:
            self.keystone.make()
            for name in names:
                address = ""
                if CANDIDATES[name].memcached:
                    address = stack.enter_context(memcached()).address
                self._running[name] = stack.enter_context(self._served(name, address))
                if name == "keystone":
                    self.headers = self.keystone.validation_headers(self[name].url)
                    self._expected = comparable(self._answer(name))
            for name in names:
                self._check(name)
            yield

    def shared_folder(self, name: str) -> Path:
        """Return where a keyfront candidate's epoch table and answers are."""
        return self.shared / name.replace(" ", "-")

    def database_url(self, name: str) -> str:
        """Return the URL of the database for another process, as a candidate's owner writes it."""
        if CANDIDATES[name].module is not None:
            return self._url
        more = f"plugin=keyfront&keyfront_path={self.shared_folder(name)}"
        return f"{self._url}{'&' if '?' in self._url else '?'}{more}"

    def _served(self, name: str, address: str) -> AbstractContextManager[Server]:
        candidate = CANDIDATES[name]
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(mode=0o700)
        if candidate.module == BARE:
            answer = folder / "answer.json"
            answer.write_text(json.dumps(self._answer("keystone")))
            (folder / "bare.py").write_text(_BARE.format(answer=str(answer)))
            others = filter(None, [os.environ.get("PYTHONPATH")])
            environment = {"PYTHONPATH": os.pathsep.join([str(folder), *others])}
        else:
            text = candidate.configuration(
                self.keystone, shared=self.shared_folder(name), memcached=address
            )
            environment = self.keystone.configured(folder, text + self._extra)
        how = {**candidate.served(), "threads": self.threads}
        return uwsgi.serving(self.keystone.state, folder, environment, **how)

    def _answer(self, name: str) -> Answer:
        ((status, reason, headers, body),) = self[name].answers(1, VALIDATION, self.headers)
        if status != 200:
            raise ServerError(f"{name} answers {status}: {self[name].tail()}")
        # that one is the server's, not the application's
        headers = [pair for pair in headers if pair[0].lower() != "connection"]
        return Answer(f"{status} {reason}", headers, body)

    def _check(self, name: str) -> None:
        # the second one is the cache's
        for _ in range(2 * PROCESSES):
            if comparable(self._answer(name)) != self._expected:
                raise ServerError(f"{name} answers otherwise than Keystone")

    def touch(self, name: str) -> None:
        """Let every thread of a candidate answer: its memory and its cache are warm then."""
        for _ in range(2):
            self[name].answers(self.connections(name), VALIDATION, self.headers)


def comparable(answer: Answer) -> object:
    """Return an answer without what may differ: the request's id, and the order within lists."""
    headers = {name.lower(): value for name, value in answer.headers}
    headers.pop("x-openstack-request-id", None)
    return answer.status, headers, _sorted(json.loads(answer.body))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(one) for key, one in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(one) for one in value), key=lambda one: json.dumps(one, default=str))
    return value
