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

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from keyfront.common import programs
from keyfront.errors import ServerError

from ..lineups.lineup import memory_folder
from ..load import wrk
from . import command, service_report
from .service_report import CASES, Case, Settings, judge
from .service_servers import Services
from .token_samples import Sample, Samples
from .token_servers import check

ROUNDS = 6
SECONDS = 2
# Seconds before a run. Rates varied with the order of the cases; after a run, Linux gives the ports
# of connections that were closed on the loopback to new ones, and a fast run uses all there are
# (net.ipv4.tcp_tw_reuse).
PAUSE = 1.5


def say(text: str) -> None:
    """A line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(settings: Settings) -> Samples:
    """Measure every case in each round.

    :raises MissingPartError: wrk, memcached, Redis, their clients, uWSGI or Keystone is missing
    :raises ServerError: a server did not start or does not answer as it should
    """
    wrk.program()
    check()
    programs.require_module("redis", "redis")
    programs.require_module("keystonemiddleware", "keystone")
    samples: Samples = {name: [] for name in CASES}
    with (
        tempfile.TemporaryDirectory(prefix="service-rates-") as folder,
        tempfile.TemporaryDirectory(
            prefix="service-rates-", dir=memory_folder()
        ) as shared,
    ):
        services = Services(Path(folder), Path(shared))
        say("a Keystone and the services start")
        with services.running():
            for number in range(settings.rounds):
                rates = []
                for name in reversed(CASES) if number % 2 else CASES:
                    sample = measure_once(services, CASES[name], settings.seconds)
                    samples[name].append(sample)
                    rates.append(f"{name} {sample.load.rate:.0f}/s")
                say(f"round {number + 1} of {settings.rounds}: {', '.join(rates)}")
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


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rounds",
        type=command.at_least_one,
        default=ROUNDS,
        help=f"an even number (default {ROUNDS})",
    )
    parser.add_argument(
        "--seconds",
        type=command.at_least_one,
        default=SECONDS,
        help=f"per case (default {SECONDS})",
    )
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    # what runs is taken down as after Ctrl-C
    signal.signal(signal.SIGTERM, command.terminated)
    settings = Settings(options.rounds, options.seconds)
    return command.run(
        "service_rates", measure, settings, options, report=service_report, judge=judge, say=say
    )


if __name__ == "__main__":
    sys.exit(main())
