"""Requests per second of a service with a known token, by what is in front of it.

Makes a Keystone with keyfront's token cache, a Redis and a memcached, and serves one trivial WSGI
service by uWSGI, 2 processes of one thread, with the packaged ini file, behind:

    bare        nothing
    memcached   keystonemiddleware with memcached
    strict      keyfront's authtoken, which asks Redis at each request
    lease       the same, which asks it each half second
    revalidate  the same without a coordinator, which asks Keystone each second

and loads one after the other with wrk, 4 connections. Each request has a connection of its own, as
packaged; bare and lease are also loaded over kept ones, one for each process. The catalog has 15
services; ``no catalog`` is the same service asked with a token that has none.

All services ask one Keystone, which has the packaged pipeline and its epochs in the Redis. They are
loaded by each worker for itself: keystonemiddleware has connections that a fork must not share.

Each candidate must first give the right answers; at the end the token is revoked, and those of
keyfront must refuse it within what they promise. wrk and Redis run on the same cores.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import ServerError

from .. import files
from ..lineups import uwsgi
from ..lineups.keystone import (
    VALIDATION,
    Keystone,
    ask,
    authtoken_options,
    escaped,
    log_in,
    login,
)
from ..lineups.uwsgi import PROCESSES, Server
from ..load import wrk
from ..load.arguments import say
from ..servers.memcached import memcached
from ..servers.ports import free_port
from ..servers.processes import HOST
from ..servers.redis import redis
from . import comparison, loaded, service_application
from .comparison import Comparison, Report
from .loaded import Sample, Samples
from .token_servers import CONNECTIONS, check

# As many as a cloud has, with identity among them; each has three endpoints.
SERVICES = 15
# Seconds after which a revoked token has to be refused wherever it is not at once: the longest
# lease, and the default of revalidate.
LEASE = 1.0

_KEYSTONE = """\
[identity]
password_hash_rounds = 4

[keyfront_token_cache]
path = {shared}
node_memory = 8
ttl = 3600
coordinator = {coordinator}
"""
_PASTE = """\
[pipeline:main]
pipeline = {pipeline}

[app:service]
paste.app_factory = {package}.service_application:app_factory

[filter:authtoken]
{factory}
{options}"""
_STOCK = "paste.filter_factory = keystonemiddleware.auth_token:filter_factory\n"
_OURS = "use = egg:keyfront#authtoken\n"
_SHARED = "keyfront_coordinator = {coordinator}\nkeyfront_consistency = "


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An application that one uWSGI serves.

    :param filter: lines of the section of ``authtoken``; empty: the service alone
    :param kept: true if connections are kept
    :param refuses: seconds after which a revoked token has to be refused; ``None``: not looked at
    """

    label: str
    filter: str = ""
    kept: bool = False
    refuses: float | None = None


_LEASE = _OURS + _SHARED + "lease\n"
CANDIDATES = {
    "bare": Candidate(label="no authtoken"),
    "memcached": Candidate(
        label="keystonemiddleware, memcached", filter=_STOCK + "memcached_servers = {memcached}\n"
    ),
    "strict": Candidate(
        label="keyfront, Redis, strict", filter=_OURS + _SHARED + "strict\n", refuses=0
    ),
    "lease": Candidate(label="keyfront, Redis, lease", filter=_LEASE, refuses=LEASE),
    "revalidate": Candidate(label="keyfront, no Redis", filter=_OURS, refuses=LEASE),
    "bare kept": Candidate(label="no authtoken", kept=True),
    "lease kept": Candidate(
        label="keyfront, Redis, lease", filter=_LEASE, kept=True, refuses=LEASE
    ),
}


class Services:
    """The candidates that run, and the tokens that they are asked with.

    :param folder: a folder of this user only; the caller deletes it
    :param shared: the same in memory, for what Keystone's workers share
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.keystone = Keystone(folder / "state")
        #: One with a catalog, and one that is scoped to nothing and has none.
        self.token = self.bare_token = ""
        self._user = ""
        self._server: Server
        self._running: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        return self._running[name]

    def connections(self, name: str) -> int:
        """Return how many connections load a candidate: kept ones hold a thread each."""
        return PROCESSES if CANDIDATES[name].kept else CONNECTIONS

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve Keystone and all candidates until the block ends, each one's answer checked."""
        with ExitStack() as stack:
            port = free_port()
            url = f"http://{HOST}:{port}/v3"
            self.keystone.make(url=url)
            values = {
                "coordinator": stack.enter_context(redis(self._folder("redis"))),
                "memcached": stack.enter_context(memcached()).address,
                "options": authtoken_options(url, self.keystone.password),
                "package": __package__,
            }
            folder = self._folder("keystone")
            shared = escaped(str(self.shared / "tokens"))
            text = _KEYSTONE.format(shared=shared, coordinator=escaped(values["coordinator"]))
            environment = self.keystone.configured(folder, text)
            served = uwsgi.serving(self.keystone.state, folder, environment, port=port)
            self._server = stack.enter_context(served)
            self._set_up()
            for name, candidate in CANDIDATES.items():
                self._running[name] = stack.enter_context(self._served(name, candidate, values))
            for name in CANDIDATES:
                self.touch(name)
            yield

    def _set_up(self) -> None:
        """Fill the catalog, and log in."""
        url = self._server.url
        first = self.keystone.token(url)
        for number in range(1, SERVICES):
            name = f"service-{number}"
            service = {"service": {"type": f"type-{number}", "name": name}}
            made = ask(url, "POST", "/v3/services", first, service)["service"]["id"]
            where = {"service_id": made, "url": f"http://{name}.example.org:8774/v2.1"}
            for interface in ("public", "internal", "admin"):
                endpoint = {**where, "interface": interface}
                ask(url, "POST", "/v3/endpoints", first, {"endpoint": endpoint})
        self.token = self.keystone.token(url)
        self.bare_token = log_in(url, login("admin", self.keystone.password, None))
        told = ask(url, "GET", VALIDATION, self.token, subject=self.token)["token"]
        if len(told["catalog"]) != SERVICES:
            raise ServerError(f"Keystone's catalog has {len(told['catalog'])} services")
        self._user = told["user"]["id"]

    def _served(
        self, name: str, candidate: Candidate, values: Mapping[str, str]
    ) -> AbstractContextManager[Server]:
        folder = self._folder(name)
        paste = folder / "service.ini"
        pipeline = "authtoken service" if candidate.filter else "service"
        factory = (candidate.filter or _STOCK).format(**values)
        paste.write_text(_PASTE.format(**values, pipeline=pipeline, factory=factory))
        environment = {service_application.PASTE_FILE: str(paste)}
        module = f"{service_application.__name__}:load()"
        return uwsgi.serving(
            self.keystone.state, folder, environment, module=module, lazy=True, kept=candidate.kept
        )

    def _folder(self, name: str) -> Path:
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(mode=0o700)
        return folder

    def touch(self, name: str) -> None:
        """Have every worker of a candidate answer, rightly: it knows both tokens then."""
        wanted = self._user if CANDIDATES[name].filter else service_application.NOBODY
        # the second time it is known
        for token in (self.token, self.bare_token) * 2:
            for status, text in self._answers(name, token):
                if (status, text) != (200, wanted):
                    raise ServerError(f"{name} answers {status}: {self[name].tail()}")
        for status, _ in self._answers(name, "no token"):
            if status != (401 if CANDIDATES[name].filter else 200):
                raise ServerError(f"{name} answers {status} without a good token")

    def _answers(self, name: str, token: str) -> list[tuple[int, str]]:
        """Return what all workers answer to a token: status and body."""
        # all at once, so that no worker takes all
        found = self[name].answers(self.connections(name), "/", {"X-Auth-Token": token})
        return [(status, text) for status, _, _, text in found]

    def revoke(self) -> None:
        """Revoke the token, and see that nobody goes on with it for longer than is promised.

        :raises ServerError: it is still taken, so what was measured is worth nothing
        """
        ask(self._server.url, "DELETE", VALIDATION, self.token, subject=self.token)
        revoked = time.monotonic()
        promised = {name: one.refuses for name, one in CANDIDATES.items()}
        for name, seconds in sorted(promised.items(), key=lambda item: item[1] or 0):
            if seconds is None:
                continue
            time.sleep(max(0, revoked + seconds - time.monotonic()))
            for status, _ in self._answers(name, self.token):
                if status != 401:
                    raise ServerError(f"{name} answers {status} to a revoked token")


# Seconds before a run. Rates varied with the order of the cases; after a run, Linux gives the ports
# of connections that were closed on the loopback to new ones, and a fast run uses all there are
# (net.ipv4.tcp_tw_reuse).
PAUSE = 1.5


class Case(NamedTuple):
    """A candidate under one load.

    :param catalog: true if the token has one
    """

    candidate: str
    catalog: bool = True

    @property
    def label(self) -> str:
        """Return its words in a table."""
        label = CANDIDATES[self.candidate].label
        if CANDIDATES[self.candidate].kept:
            label += ", kept connections"
        return label if self.catalog else f"{label}, no catalog"


# The two sides of a ratio are neighbours.
CASES = {
    **{name: Case(name) for name in ("memcached", "revalidate", "strict", "bare", "lease")},
    "lease, no catalog": Case("lease", catalog=False),
    **{name: Case(name) for name in ("lease kept", "bare kept")},
}
RATIOS = (
    ("strict", "bare"),
    ("lease", "bare"),
    ("revalidate", "bare"),
    ("lease kept", "bare kept"),
    ("strict", "memcached"),
    ("lease", "memcached"),
    ("revalidate", "memcached"),
    ("bare", "memcached"),
    ("lease", "lease, no catalog"),
)
FIGURES = {"rate": "requests per second", "CPU": "CPU per request"}
LABELS = {name: case.label for name, case in CASES.items()}


def measure(options: Namespace) -> Report:
    """Measure every case in each round."""
    wrk.program()
    check()
    programs.require_module("redis", "redis")
    programs.require_module("keystonemiddleware", "keystone")
    with files.folders() as (folder, shared):
        services = Services(folder, shared)
        say("a Keystone and the services start")
        with services.running():
            once = partial(measure_once, services, options.seconds)
            samples = comparison.in_rounds(list(CASES), options.rounds, once)
            services.revoke()
    return report(samples, options.command)


def measure_once(services: Services, seconds: int, name: str) -> Sample:
    """Load the candidate of a case once."""
    case = CASES[name]
    time.sleep(PAUSE)
    services.touch(case.candidate)
    server = services[case.candidate]
    sample = loaded.once(
        server,
        "/",
        {"X-Auth-Token": services.token if case.catalog else services.bare_token},
        seconds=seconds,
        connections=services.connections(case.candidate),
    )
    if sample.load.failed:
        raise ServerError(f"{case.label}: {sample.load.failed} errors; {server.tail()}")
    return sample


def report(samples: Samples, command: str) -> Report:
    """Return the tables ``rates`` and ``ratios``, and how the goals were met."""
    return loaded.report(
        samples,
        RATIOS,
        FIGURES,
        LABELS,
        title="in front of the service",
        caption=f"`{command}`: wrk with {CONNECTIONS} connections, Redis, memcached and Keystone "
        f"on the same cores; a catalog of {SERVICES} services; uWSGI with {PROCESSES} processes.",
        against="memcached",
        times="times memcached",
    )


COMPARISON = Comparison(
    title="A service behind authtoken, and behind keystonemiddleware's",
    measure=measure,
    numbers=(("--rounds", 6, "an even number"), ("--seconds", 2, "of each case")),
    distributions=("keystone", "keystonemiddleware", "redis", "uWSGI", "pyuwsgi"),
    programs=("wrk", "memcached", "redis-server"),
)
main = partial(comparison.main, "service_rates", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())
