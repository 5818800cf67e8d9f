"""Validations of a token (``GET /v3/auth/tokens``) per second, with and without keyfront's cache.

    python -m keyfront.benchmarks.compare.token_validation [--rounds 6] [--seconds 2] [--markdown]

Makes a Keystone on SQLite in a temporary folder and serves it by uWSGI, 2 processes, with the
packaged ini file, in several candidates:

    bare        a WSGI application that answers with the bytes of Keystone's answer
    keyfront    the packaged pipeline: the token cache in front of Keystone
    memcached   stock Keystone, by its own entry, with memcached behind its own caches
    keystone    stock Keystone as it comes

and loads one after the other with wrk: in each round every case once, in the next round in the
reverse order, so that what the machine does meanwhile meets both sides of a ratio. A ratio is taken
in each round; its median is printed, with the lowest and the highest.

A miss is a request that no cache in front can know. It is compared to the same load on stock
Keystone, and with memcached under both. ``--token-caching`` tells whether Keystone's own cache of
tokens (``[token] caching``) should be on under keyfront: at best, when what it holds is never
stale, and at worst, when changes make it stale 200 times a second.

Each request has a connection of its own, as packaged (``http-socket``); bare and keyfront are also
loaded over kept ones (``http11-socket``), which show more of the difference since connecting does
not hide it; there are then as many connections as threads. Each process has one thread unless
``--threads`` says otherwise: with more, threads wait for each other's interpreter lock.

Before it is measured, each candidate must give Keystone's answer. Answers per second, p50 and p99
(over all rounds), errors and the CPU time of the uWSGI processes per answer are printed. wrk runs
on the same cores, so rates would be higher from another machine; that it never waits between
requests (a closed loop) flatters the p99 of all candidates alike.

Ends with status 1 if a goal was missed: see ``goals.py``, also for how noise is taken. Ratios only;
a bound in seconds would tell of the machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from keyfront.errors import ServerError

from ..lineups.keystone import VALIDATION
from ..lineups.lineup import memory_folder
from ..load import wrk
from . import command, token_report
from .token_report import Settings
from .token_samples import CASES, TOKEN_CACHING_CASES, Case, Sample, Samples, judge, row
from .token_servers import Servers, check

ROUNDS = 6
SECONDS = 2
# Longer for what answers slowly: requests under way at the end of a run are not counted.
SLOW = 3
# Keystone only looks whether nocatalog is there; to a cache each value is another request.
VARY = "?nocatalog="
# A miss cannot take less CPU time than Keystone; below this part of it, it is not noise.
HIT_SUSPECTED = 0.5
# Seconds between changes, less than the fastest validation takes.
CHANGE_EVERY = 0.005


def say(text: str) -> None:
    """A line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(settings: Settings) -> Samples:
    """Measure every case in each round.

    :raises MissingPartError: wrk, memcached, pymemcache, uWSGI or Keystone is not installed
    :raises ServerError: a server did not start or does not answer as it should
    """
    wrk.program()
    check()
    cases = CASES | (TOKEN_CACHING_CASES if settings.token_caching else {})
    samples: Samples = {name: [] for name in cases}
    with (
        tempfile.TemporaryDirectory(prefix="token-validation-") as folder,
        tempfile.TemporaryDirectory(
            prefix="token-validation-", dir=memory_folder()
        ) as shared,
    ):
        servers = Servers(Path(folder), Path(shared), threads=settings.threads)
        say("a Keystone and its servers start")
        with servers.running(case.candidate for case in cases.values()):
            for number in range(settings.rounds):
                rates = []
                for name in reversed(cases) if number % 2 else cases:
                    sample = measure_once(servers, cases[name], settings.seconds)
                    samples[name].append(sample)
                    rates.append(f"{name} {sample.load.rate:.0f}/s")
                say(f"round {number + 1} of {settings.rounds}: {', '.join(rates)}")
    _check_misses(samples)
    return samples


def measure_once(servers: Servers, case: Case, seconds: int) -> Sample:
    """Load one candidate once.

    :raises ServerError: nothing was answered well
    """
    servers.touch(case.candidate)
    server = servers[case.candidate]
    folder = servers.shared_folder(case.candidate)
    with _changes(folder) if case.changes else nullcontext():
        before = server.cpu()
        seen = wrk.run(
            f"{server.url}{VALIDATION}",
            servers.headers,
            seconds=seconds * SLOW if case.slow else seconds,
            connections=servers.connections(case.candidate),
            # nothing that an earlier run asked for
            vary=f"{VARY}{time.time_ns()}-" if case.vary else None,
        )
        spent = server.cpu() - before
    if not seen.good:
        raise ServerError(f"{case.label}: no good answer, {seen.failed} errors; {server.tail()}")
    return Sample(seen, spent)


@contextmanager
def _changes(folder: Path) -> Iterator[None]:
    """Make all that Keystone keeps in its own caches stale, over and over."""
    from keyfront.middleware.tokens.coordinator.local import SharedMemory
    from keyfront.middleware.tokens.epochs import slots
    from keyfront.middleware.tokens.invalidation.rules import ANY, CONTENT

    coordinator = SharedMemory(folder, create=False)
    stop = threading.Event()

    def change() -> None:
        found = slots((ANY, CONTENT), coordinator.slot_count)
        while not stop.wait(CHANGE_EVERY):
            coordinator.touch(found)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        coordinator.close()


def _check_misses(samples: Samples) -> None:
    for first, second in (
        ("keyfront miss", "keystone miss"),
        ("keyfront+memcached miss", "memcached miss"),
    ):
        miss, stock = row(samples[first]).cpu, row(samples[second]).cpu
        if miss < stock * HIT_SUSPECTED:
            raise ServerError(
                f"{VARY}NUMBER is no miss: keyfront answers it with {miss:.0f} us of CPU time, "
                f"Keystone with {stock:.0f}"
            )


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
        help=f"per case (default {SECONDS}), {SLOW} times that where Keystone itself answers",
    )
    parser.add_argument(
        "--threads",
        type=command.at_least_one,
        default=1,
        help="of each uWSGI process (default 1; keyfront serve has 2)",
    )
    parser.add_argument(
        "--token-caching", action="store_true", help="also without Keystone's own token cache"
    )
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    settings = Settings(options.rounds, options.seconds, options.token_caching, options.threads)
    # what runs is taken down as after Ctrl-C
    signal.signal(signal.SIGTERM, command.terminated)
    return command.run(
        "token_validation", measure, settings, options, report=token_report, judge=judge, say=say
    )


if __name__ == "__main__":
    sys.exit(main())
