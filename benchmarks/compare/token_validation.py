"""Validations of a token (``GET /v3/auth/tokens``) per second, with and without keyfront's cache.

Makes a Keystone on SQLite in a temporary folder and serves it by uWSGI, 2 processes, with the
packaged ini file, in several candidates:

    bare        a WSGI application that answers with the bytes of Keystone's answer
    keyfront    the packaged pipeline: the token cache in front of Keystone
    memcached   stock Keystone, by its own entry, with memcached behind its own caches
    keystone    stock Keystone as it comes

and loads one after the other with wrk.

A miss is a request that no cache in front can know. It is compared to the same load on stock
Keystone, and with memcached under both. ``--token-caching`` tells whether Keystone's own cache of
tokens (``[token] caching``) should be on under keyfront: at best, when what it holds is never
stale, and at worst, when changes make it stale 200 times a second.

Each request has a connection of its own, as packaged (``http-socket``); bare and keyfront are also
loaded over kept ones (``http11-socket``), which show more of the difference since connecting does
not hide it; there are then as many connections as threads. Each process has one thread unless
``--threads`` says otherwise: with more, threads wait for each other's interpreter lock.

Before it is measured, each candidate must give Keystone's answer. wrk runs on the same cores, so
rates would be higher from another machine; that it never waits between requests (a closed loop)
flatters the p99 of all candidates alike.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.errors import ServerError

from ..lineups.keystone import VALIDATION
from ..lineups.uwsgi import PROCESSES
from ..load import wrk
from ..load.arguments import say
from . import comparison, loaded
from .comparison import Comparison, Report
from .loaded import Sample, Samples
from .token_servers import CANDIDATES, CONNECTIONS, Servers, serving

# Longer for what answers slowly: requests under way at the end of a run are not counted.
SLOW = 3
# Keystone only looks whether nocatalog is there; to a cache each value is another request.
VARY = "?nocatalog="
# A miss takes many times the CPU time of a hit; what takes less than so many is none.
MISS_TIMES = 5
# Seconds between changes, less than the fastest validation takes.
CHANGE_EVERY = 0.005


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
    **{name: Case(name) for name in ("bare kept", "keyfront kept", "bare", "keyfront")},
    **{name: Case(name, slow=True) for name in ("memcached", "keystone")},
    **{
        f"{name} miss": Case(name, slow=True, vary=True)
        for name in ("keystone", "keyfront", "memcached", "keyfront+memcached")
    },
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
FIGURES = {"rate": "per second", "p99": "p99"}
ALL_CASES = CASES | TOKEN_CACHING_CASES
LABELS = {name: case.label for name, case in ALL_CASES.items()}


def measure(options: Namespace) -> Report:
    """Measure every case in each round."""
    wrk.program()
    cases = ALL_CASES if options.token_caching else CASES
    say("a Keystone and its servers start")
    names = [case.candidate for case in cases.values()]
    with serving(names, threads=options.threads) as servers:
        once = partial(measure_once, servers, options.seconds)
        samples = comparison.in_rounds(list(cases), options.rounds, once)
    spent = {name: min(sample.cpu for sample in each) for name, each in samples.items()}
    for name in ("keyfront miss", "keyfront+memcached miss"):
        if spent[name] < spent["keyfront"] * MISS_TIMES:
            raise ServerError(
                f"{VARY}NUMBER is no miss: {name} takes {spent[name] * 1e6:.0f} us of CPU time, "
                f"a hit {spent['keyfront'] * 1e6:.0f}"
            )
    return report(samples, options.command, options.threads)


def measure_once(servers: Servers, seconds: int, name: str) -> Sample:
    """Load the candidate of a case once."""
    case = ALL_CASES[name]
    servers.touch(case.candidate)
    folder = servers.shared_folder(case.candidate)
    with _changes(folder) if case.changes else nullcontext():
        return loaded.once(
            servers[case.candidate],
            VALIDATION,
            servers.headers,
            seconds=seconds * SLOW if case.slow else seconds,
            connections=servers.connections(case.candidate),
            # nothing that an earlier run asked for
            vary=f"{VARY}{time.time_ns()}-" if case.vary else None,
        )


@contextmanager
def _changes(folder: Path) -> Iterator[None]:
    """Make all that Keystone keeps in its own caches stale, over and over."""
    from keyfront.middleware.tokens.coordinator.local import SharedMemory
    from keyfront.middleware.tokens.epochs import slots
    from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT

    def change(over: threading.Event) -> None:
        found = slots((ALL, ANY, CONTENT), coordinator.slot_count)
        while not over.wait(CHANGE_EVERY):
            coordinator.touch(found)

    with closing(SharedMemory(folder, create=False)) as coordinator, comparison.meanwhile(change):
        yield


def report(samples: Samples, command: str, threads: int = 1) -> Report:
    """Return the tables ``rates`` and ``ratios``, and how the goals were met."""
    return loaded.report(
        samples,
        RATIOS,
        FIGURES,
        LABELS,
        title="validations of a token",
        caption=f"`{command}`: wrk with {CONNECTIONS} connections on the same cores; uWSGI "
        f"`http-socket` with {PROCESSES} processes of {threads} thread(s), Keystone on SQLite.",
        against="keystone",
        times="times Keystone",
    )


COMPARISON = Comparison(
    title="Validations of a token by Keystone, with and without keyfront's token cache",
    measure=measure,
    numbers=(
        ("--rounds", 6, "an even number"),
        ("--seconds", 2, f"of each case, {SLOW} times that where Keystone itself answers"),
        ("--threads", 1, "of each uWSGI process; keyfront serve has 2"),
    ),
    flags=(("--token-caching", "also without Keystone's own token cache"),),
    distributions=("keystone", "uWSGI", "pyuwsgi"),
    programs=("wrk", "memcached"),
)
main = partial(comparison.main, "token_validation", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())
