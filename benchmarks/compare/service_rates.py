"""Requests per second of a service with a known token, by what is in front of it.

    python -m keyfront.benchmarks.compare.service_rates [--rounds 6] [--seconds 2]

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

Each candidate must first give the right answers; at the end the token is revoked, and those of
keyfront must refuse it within what they promise. wrk and Redis run on the same cores.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import ServerError

from ..lineups.lineup import memory_folder
from ..lineups.uwsgi import PROCESSES
from ..load import wrk
from . import comparison, loaded
from .comparison import Comparison, Report, say
from .loaded import Sample, Samples
from .service_servers import CANDIDATES, SERVICES, Services
from .token_servers import CONNECTIONS, check

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
    "memcached": Case("memcached"),
    "revalidate": Case("revalidate"),
    "strict": Case("strict"),
    "bare": Case("bare"),
    "lease": Case("lease"),
    "lease, no catalog": Case("lease", catalog=False),
    "lease kept": Case("lease kept"),
    "bare kept": Case("bare kept"),
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
    """Measure every case in each round.

    :raises MissingPartError: wrk, memcached, Redis, their clients, uWSGI or Keystone is missing
    :raises ServerError: a server did not start or does not answer as it should
    """
    wrk.program()
    check()
    programs.require_module("redis", "redis")
    programs.require_module("keystonemiddleware", "keystone")
    with (
        tempfile.TemporaryDirectory(prefix="service-rates-", dir=temporary_parent()) as folder,
        tempfile.TemporaryDirectory(prefix="service-rates-", dir=memory_folder()) as shared,
    ):
        services = Services(Path(folder), Path(shared))
        say("a Keystone and the services start")
        with services.running():
            samples = loaded.in_rounds(
                list(CASES),
                options.rounds,
                lambda name: measure_once(services, CASES[name], options.seconds),
            )
            services.revoke()
    return report(samples, options.command)


def measure_once(services: Services, case: Case, seconds: int) -> Sample:
    """Load one candidate once.

    :raises ServerError: something was not answered well
    """
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
    sys.exit(main())
