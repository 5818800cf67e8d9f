"""Requests per second of a service with a known token, by what is in front of it.

    python -m keyfront.benchmarks.compare.service_rates [--rounds 6] [--seconds 2] [--markdown]

Makes a Keystone with keyfront's token cache, a Redis and a memcached, and serves one trivial WSGI
service by uWSGI, 2 processes of one thread, with the packaged ini file, behind:

    bare        nothing
    memcached   keystonemiddleware with memcached
    strict      keyfront's authtoken, which asks Redis at each request
    lease       the same, which asks it each half second
    revalidate  the same without a coordinator, which asks Keystone each second

and loads one after the other with wrk, 4 connections: in each round every case once, in the next
round in the reverse order. A ratio is taken in each round; its median is printed, with the lowest
and the highest. Each request has a connection of its own, as packaged; bare and lease are also
loaded over kept ones, one for each process. The catalog has 15 services; ``no catalog`` is the same
service asked with a token that has none, for what the catalog costs.

Each candidate must first give the right answers; at the end the token is revoked, and those of
keyfront must refuse it within what they promise. wrk and Redis run on the same cores.

Ends with status 1 if a goal was missed: see ``goals.py``, also for how noise is taken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import ServerError

from .. import results
from ..lineups.lineup import memory_folder
from ..lineups.uwsgi import PROCESSES
from ..load import wrk
from ..results import Table
from . import comparison
from .comparison import Sample, Samples, in_rounds, row, say, thousands
from .goals import Goal
from .ratios import Ratio, ratios
from .ratios import judge as judge_ratios
from .service_servers import CANDIDATES, SERVICES, Services
from .token_servers import CONNECTIONS, check

TITLE = "A service behind authtoken, and behind keystonemiddleware's"
DISTRIBUTIONS = ("keystone", "keystonemiddleware", "redis", "uWSGI", "pyuwsgi")
PROGRAMS = ("wrk", "memcached", "redis-server")
ROUNDS = 6
SECONDS = 2
# Seconds before a run. Rates varied with the order of the cases; after a run, Linux gives the ports
# of connections that were closed on the loopback to new ones, and a fast run uses all there are
# (net.ipv4.tcp_tw_reuse).
PAUSE = 1.5


class Settings(NamedTuple):
    """The settings of a measurement."""

    rounds: int
    seconds: int

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        return (
            f"python -m keyfront.benchmarks.compare.service_rates --rounds {self.rounds} "
            f"--seconds {self.seconds}"
        )


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
FIGURES = ("rate", "CPU")


def measure(settings: Settings) -> Samples:
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
        tempfile.TemporaryDirectory(
            prefix="service-rates-", dir=memory_folder()
        ) as shared,
    ):
        services = Services(Path(folder), Path(shared))
        say("a Keystone and the services start")
        with services.running():
            samples = in_rounds(
                list(CASES),
                settings.rounds,
                lambda name: measure_once(services, CASES[name], settings.seconds),
                say,
            )
            services.revoke()
    return samples


def measure_once(services: Services, case: Case, seconds: int) -> Sample:
    """Load one candidate once.

    :raises ServerError: something was not answered well
    """
    time.sleep(PAUSE)
    services.touch(case.candidate)
    server = services[case.candidate]
    before = server.cpu()
    seen = wrk.run(
        f"{server.url}/",
        {"X-Auth-Token": services.token if case.catalog else services.bare_token},
        seconds=seconds,
        connections=services.connections(case.candidate),
    )
    spent = server.cpu() - before
    if not seen.good or seen.failed:
        raise ServerError(f"{case.label}: {seen.failed} errors; {server.tail()}")
    return Sample(seen, spent)


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    return judge_ratios(ratios(samples, RATIOS, FIGURES))


def table(samples: Samples) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [f"{'':<50}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU us':>9}{'wrk':>6}"]
    for name, each in samples.items():
        one = row(each)
        lines.append(
            f"{CASES[name].label:<50}{one.rate:>11.0f}{one.p50:>9.3f}{one.p99:>9.3f}"
            f"{one.cpu:>9.0f}{one.generator:>6.0%}"
        )
    lines += [
        "",
        f"{'ratio of each pair (lowest to highest)':<42}{'requests/s':>22}{'CPU per request':>22}",
    ]
    for rate, cpu in ratios(samples, RATIOS, FIGURES):
        names = f"{rate.first} / {rate.second}"
        lines.append(f"{names:<42}{_spread(rate):>22}{_spread(cpu):>22}")
    lines.append("")
    return "\n".join([*lines, *comparison.verdict_lines(judge(samples))])


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """Return the result as the documents show it: ``rates`` and ``ratios``."""
    rates: list[list[results.Cell]] = []
    for name, each in samples.items():
        one = row(each)
        rates.append(
            [
                CASES[name].label,
                thousands(one.rate, hundreds_from=0),
                f"{one.p50:.2f} ms",
                f"{one.p99:.2f} ms",
                f"{one.cpu:.0f} µs",
            ]
        )
    verdicts = judge(samples)
    found: list[list[results.Cell]] = []
    for both in ratios(samples, RATIOS, FIGURES):
        names = " / ".join(CASES[one].label for one in both[0][:2])
        wanted = [
            f"{one.goal.figure} {one.goal}: {verdicts[one.goal]}" for one in both if one.goal
        ]
        rate, cpu = map(_spread, both)
        found.append([names, rate, cpu, ", ".join(wanted)])
    columns = ["in front of the service", "requests per second", "p50", "p99", "CPU per request"]
    caption = (
        f"`{settings.command}`: wrk with {CONNECTIONS} connections, Redis, memcached and Keystone "
        f"on the same cores; a catalog of {SERVICES} services; uWSGI with {PROCESSES} processes."
    )
    spread = "ratio: median of the pairs (lowest to highest)"
    return [
        Table(name="rates", columns=columns, rows=rates, caption=caption),
        Table(
            name="ratios",
            columns=[spread, "requests per second", "CPU per request", "goal"],
            rows=found,
        ),
    ]


def raw(samples: Samples) -> list[results.Sample]:
    """Return every round of every case."""
    return [
        {
            "case": name,
            "round": number,
            **sample.described(),
        }
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def _spread(found: Ratio) -> str:
    return found.spread(2 if max(found.pairs) < 10 else 1)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    comparison.add_rounds(parser, ROUNDS, SECONDS)
    comparison.add_results(parser)
    options = parser.parse_args(arguments)
    comparison.ends_in_order()
    settings = Settings(options.rounds, options.seconds)
    return comparison.run(measure, settings, options, sys.modules[__name__])


if __name__ == "__main__":
    sys.exit(main())
