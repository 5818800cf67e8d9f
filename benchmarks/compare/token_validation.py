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

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import ServerError

from .. import results
from ..lineups.keystone import VALIDATION
from ..lineups.lineup import memory_folder
from ..lineups.uwsgi import PROCESSES
from ..load import wrk
from ..results import Table
from . import comparison
from .comparison import Sample, Samples, in_rounds, milliseconds, row, say, thousands
from .goals import Goal
from .ratios import Ratio, ratios
from .ratios import judge as judge_ratios
from .token_servers import CANDIDATES, CONNECTIONS, Servers, check

TITLE = "Validations of a token by Keystone, with and without keyfront's token cache"
DISTRIBUTIONS = ("keystone", "uWSGI", "pyuwsgi")
PROGRAMS = ("wrk", "memcached")
ROUNDS = 6
SECONDS = 2
# Longer for what answers slowly: requests under way at the end of a run are not counted.
SLOW = 3
# Keystone only looks whether nocatalog is there; to a cache each value is another request.
VARY = "?nocatalog="
# A miss takes many times the CPU time of a hit; what takes less than so many is none.
MISS_TIMES = 5
# Seconds between changes, less than the fastest validation takes.
CHANGE_EVERY = 0.005


class Settings(NamedTuple):
    """The settings of a measurement."""

    rounds: int
    seconds: int
    token_caching: bool = False
    threads: int = 1

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        more = " --token-caching" if self.token_caching else ""
        more += f" --threads {self.threads}" if self.threads > 1 else ""
        return (
            f"python -m keyfront.benchmarks.compare.token_validation --rounds {self.rounds} "
            f"--seconds {self.seconds}{more}"
        )


class Case(NamedTuple):
    """A candidate under one load.

    :param slow: measured for longer, so that there are enough answers
    :param vary: each request is another one, so that no cache in front knows its answer
    :param changes: all that Keystone's own caches hold is made stale all the time
    """

    candidate: str
    slow: bool = False
    vary: bool = False
    changes: bool = False

    @property
    def label(self) -> str:
        """Return its words in a table."""
        kind = "kept connections" if CANDIDATES[self.candidate].kept else ""
        if self.vary:
            kind = "misses, changes" if self.changes else "misses"
        label = CANDIDATES[self.candidate].label
        return f"{label}, {kind}" if kind else label


# The two sides of a ratio are neighbours.
CASES = {
    "bare kept": Case("bare kept"),
    "keyfront kept": Case("keyfront kept"),
    "bare": Case("bare"),
    "keyfront": Case("keyfront"),
    "memcached": Case("memcached", slow=True),
    "keystone": Case("keystone", slow=True),
    "keystone miss": Case("keystone", slow=True, vary=True),
    "keyfront miss": Case("keyfront", slow=True, vary=True),
    "memcached miss": Case("memcached", slow=True, vary=True),
    "keyfront+memcached miss": Case("keyfront+memcached", slow=True, vary=True),
}

TOKEN_CACHING_CASES = {
    "uncached tokens miss": Case("keyfront+memcached-tokens", slow=True, vary=True),
    "keyfront+memcached changes": Case("keyfront+memcached", slow=True, vary=True, changes=True),
    "uncached tokens changes": Case(
        "keyfront+memcached-tokens", slow=True, vary=True, changes=True
    ),
}
"""Whether Keystone's token cache helps beneath ours: at best, with what it holds never stale, and
at worst, with all of it stale before it is asked for again."""

RATIOS = (
    ("keyfront", "bare"),
    ("keyfront kept", "bare kept"),
    ("keyfront", "memcached"),
    ("keyfront", "keystone"),
    ("keyfront miss", "keystone miss"),
    ("keyfront+memcached miss", "memcached miss"),
    ("uncached tokens miss", "keyfront+memcached miss"),
    ("uncached tokens changes", "keyfront+memcached changes"),
)


FIGURES = ("rate", "p99")
ALL_CASES = CASES | TOKEN_CACHING_CASES


def measure(settings: Settings) -> Samples:
    """Measure every case in each round.

    :raises MissingPartError: wrk, memcached, pymemcache, uWSGI or Keystone is not installed
    :raises ServerError: a server did not start or does not answer as it should
    """
    wrk.program()
    check()
    cases = CASES | (TOKEN_CACHING_CASES if settings.token_caching else {})
    with (
        tempfile.TemporaryDirectory(prefix="token-validation-", dir=temporary_parent()) as folder,
        tempfile.TemporaryDirectory(
            prefix="token-validation-", dir=memory_folder()
        ) as shared,
    ):
        servers = Servers(Path(folder), Path(shared), threads=settings.threads)
        say("a Keystone and its servers start")
        with servers.running(case.candidate for case in cases.values()):
            samples = in_rounds(
                list(cases),
                settings.rounds,
                lambda name: measure_once(servers, cases[name], settings.seconds),
                say,
            )
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
    from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT

    coordinator = SharedMemory(folder, create=False)
    stop = threading.Event()

    def change() -> None:
        found = slots((ALL, ANY, CONTENT), coordinator.slot_count)
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
    hit = row(samples["keyfront"]).cpu
    for name in ("keyfront miss", "keyfront+memcached miss"):
        miss = row(samples[name]).cpu
        if miss < hit * MISS_TIMES:
            raise ServerError(
                f"{VARY}NUMBER is no miss: {name} takes {miss:.0f} us of CPU time, a hit {hit:.0f}"
            )


def table(samples: Samples) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [
        f"{'':<50}{'answers/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'errors':>7}{'CPU us':>9}{'wrk':>6}"
    ]
    for name, each in samples.items():
        one = row(each)
        lines.append(
            f"{ALL_CASES[name].label:<50}{one.rate:>10.0f}{milliseconds(one.p50):>9}{milliseconds(one.p99):>9}"
            f"{one.errors:>7}{one.cpu:>9.0f}{one.generator:>6.0%}"
        )
    lines.append("")
    lines.append(f"{'ratio of each pair (lowest to highest)':<54}{'answers/s':>22}{'p99':>22}")
    for rate, p99 in ratios(samples, RATIOS, FIGURES):
        name = f"{rate.first} / {rate.second}"
        lines.append(f"{name:<54}{_spread(rate):>22}{_spread(p99):>22}")
    lines.append("")
    return "\n".join([*lines, *comparison.verdict_lines(judge(samples))])


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """Return the result as the documents show it: ``rates`` and ``ratios``."""
    stock = row(samples["keystone"]).rate
    rates: list[list[results.Cell]] = []
    for name in ("keystone", "memcached", "keyfront", "bare", "keyfront kept", "bare kept"):
        one = row(samples[name])
        times = one.rate / stock
        rates.append(
            [
                CASES[name].label,
                thousands(one.rate),
                f"{milliseconds(one.p50)} ms",
                f"{milliseconds(one.p99)} ms",
                one.errors,
                f"{times:.{0 if times >= 10 else 1}f}",
            ]
        )
    found: list[list[results.Cell]] = []
    for rate, p99 in ratios(samples, RATIOS, FIGURES):
        names = " / ".join(ALL_CASES[one].label for one in rate[:2])
        wanted = [f"{one.figure} {one.goal}" for one in (rate, p99) if one.goal is not None]
        found.append([names, _spread(rate), _spread(p99), ", ".join(wanted)])
    columns = ["validations of a token", "per second", "p50", "p99", "errors", "times Keystone"]
    caption = (
        f"`{settings.command}`: wrk with {CONNECTIONS} connections on the same cores; uWSGI "
        f"`http-socket` with {PROCESSES} processes of {settings.threads} thread(s), Keystone on "
        "SQLite."
    )
    spread = "ratio: median of the pairs (lowest to highest)"
    return [
        Table(name="rates", columns=columns, rows=rates, caption=caption),
        Table(name="ratios", columns=[spread, "per second", "p99", "goal"], rows=found),
    ]


def raw(samples: Samples) -> list[results.Sample]:
    """Return every round of every case."""
    return [
        {
            "case": name,
            "kept": CANDIDATES[ALL_CASES[name].candidate].kept,
            "round": number,
            **sample.described(),
        }
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    return judge_ratios(ratios(samples, RATIOS, FIGURES))


def _spread(ratio: Ratio) -> str:
    high = max(ratio.pairs)
    return ratio.spread(3 if high < 0.1 else 2 if high < 10 else 0)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    more = f", {SLOW} times that where Keystone itself answers"
    comparison.add_rounds(parser, ROUNDS, SECONDS, more)
    parser.add_argument(
        "--threads",
        type=comparison.at_least_one,
        default=1,
        help="of each uWSGI process (default 1; keyfront serve has 2)",
    )
    parser.add_argument(
        "--token-caching", action="store_true", help="also without Keystone's own token cache"
    )
    comparison.add_results(parser)
    options = parser.parse_args(arguments)
    settings = Settings(options.rounds, options.seconds, options.token_caching, options.threads)
    comparison.ends_in_order()
    return comparison.run(measure, settings, options, sys.modules[__name__])


if __name__ == "__main__":
    sys.exit(main())
