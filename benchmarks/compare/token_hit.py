"""Microseconds of a hit in the token cache, in this process, by the number of its entries.

Fills the filter with validations of 1000, 10 000 and 100 000 tokens (``--million``: also 1 000 000)
through the front door: requests that a stand-in for Keystone answers. Then it asks for entries in
random order, 20 times 5000, and prints the median over the 20, with the lowest and the highest.
What comes from the stand-in meanwhile would be a miss, and an error.

Then the same after 60 000 changes of random slots of the epoch table, which must not matter; and
the bytes that an entry takes. Seconds depend on the machine: the goal fails nothing.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from keyfront.errors import ServerError
from keyfront.middleware.tokens import node_cache as node
from keyfront.middleware.tokens.cache import TokenCache
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.routes import Routes

from .. import files
from ..results import Cell, Table
from . import comparison
from .comparison import Comparison, Report
from .goals import HIT_MICROSECONDS
from .ratios import Spread, at_most, spreads
from .token_stand_in import Answers, request

Pipeline = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

COUNTS = (1_000, 10_000, 100_000)
MILLION = 1_000_000
REPEATS = 20
CALLS = 5_000
# Requests that are made at a time: in the processor's caches, as a server has just made them.
BATCH = 50
TOUCHES = 60_000
SEED = 20
# Seconds: no entry ends while it is measured.
TTL = 3600.0
# Bytes: nothing has to go for room, here; what workers share may be overwritten.
ENTRY = 16_384
NODE_MEMORY = 8 << 20
# Entries that are weighed; they fit into what workers share.
WEIGHED = 1_000


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder in memory, where the shared files are by default, for the block."""
    with files.folders() as (_, memory):
        yield memory / "shared"


def new_filter(application: Pipeline, folder: Path, count: int, *, ttl: float = TTL) -> TokenCache:
    """Return the filter in front of ``application``, with room for ``count`` entries."""
    return TokenCache(
        application,
        SharedMemory(folder),
        NodeCache(folder, size=NODE_MEMORY, flight_timeout=5.0),
        routes=Routes(()),
        ttl=ttl,
        negative_ttl=ttl,
        memory=count * ENTRY,
    )


def fill(cache: Pipeline, count: int) -> None:
    """Have the cache know the validations of tokens 0 to ``count`` - 1."""
    for number in range(count):
        call(cache, request(number))


def call(pipeline: Pipeline, environ: dict[str, Any]) -> bytes:
    """Make one request, to the last byte of its answer."""
    answer = pipeline(environ, _ignore)
    body = b"".join(answer)
    close = getattr(answer, "close", None)
    if close is not None:
        close()
    return body


def _ignore(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
    if not status.startswith("200"):
        raise ServerError(f"a request was answered {status}")


def timed(step: Callable[[Any], object], make: Callable[[int], Any], numbers: list[int]) -> float:
    """Return microseconds per call of ``step``, on what ``make`` makes of each number."""
    spent = 0.0
    # not the collection of what was made before
    gc.collect()
    gc.disable()
    try:
        for first in range(0, len(numbers), BATCH):
            arguments = [make(number) for number in numbers[first : first + BATCH]]
            start = time.perf_counter()
            for argument in arguments:
                step(argument)
            spent += time.perf_counter() - start
    finally:
        gc.enable()
    return spent / len(numbers) * 1e6


def measure(count: int, calls: int = CALLS, *, touches: int = 0, ttl: float = TTL) -> Spread:
    """Fill a new cache with ``count`` entries and time its hits.

    :param touches: changes of random slots before that
    :raises ServerError: an entry that was put in was not found
    """
    keystone = Answers()
    with shared_folder() as folder:
        cache = new_filter(keystone, folder, count, ttl=ttl)
        for number in range(touches):
            cache.coordinator.touch(slots([f"user:{number}"], cache.coordinator.slot_count))
        fill(cache, count)
        # what the cache holds is none of the collector's work in a served process either
        gc.freeze()
        try:
            before = keystone.calls
            dice = random.Random(SEED)
            times = [
                timed(lambda environ: call(cache, environ), request,
                      [dice.randrange(count) for _ in range(calls)])
                for _ in range(REPEATS)
            ]
            if keystone.calls != before:
                raise ServerError(
                    f"{keystone.calls - before} of {REPEATS * calls} requests were no hits, with "
                    f"{count} entries put in"
                )
            return Spread.of(times)
        finally:
            gc.unfreeze()


def weigh(count: int = WEIGHED) -> dict[str, float]:
    """Return the bytes that an entry takes, by where it lies."""
    with shared_folder() as folder:
        keystone = Answers()
        first, second = (new_filter(keystone, folder, count) for _ in range(2))
        asked = _growth(first, count)
        shared = node.statistics(folder)["answers_bytes"] / count
        found = _growth(second, count)
        if keystone.calls != count:
            raise ServerError(f"{keystone.calls} requests reached Keystone instead of {count}")
        return {
            "in the worker that asked": asked,
            "in one that found it": found,
            "as counted by memory": first.answers.size / count,
            "in what workers share": shared,
        }


def _growth(cache: Pipeline, count: int) -> float:
    """Return bytes of Python's memory per entry that a cache takes up."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        fill(cache, count)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return (after - before) / count
    finally:
        tracemalloc.stop()


def report(million: bool) -> Report:
    """Measure hits, after changes too, and the weight of an entry.

    :param million: true for a million entries as well
    """
    counts = (*COUNTS, MILLION) if million else COUNTS
    hits = {f"{count} entries": measure(count) for count in counts}
    hits[f"{COUNTS[0]} entries, {TOUCHES} changes"] = measure(COUNTS[0], touches=TOUCHES)
    slowest = max(times.median for times in hits.values())
    weights: list[list[Cell]] = [[where, round(size)] for where, size in weigh().items()]
    return Report(
        [
            spreads("a hit", "us", hits),
            Table(name="weights", columns=["an entry", "bytes"], rows=weights),
        ],
        [at_most("a hit with any number of entries", HIT_MICROSECONDS, "us", slowest)],
    )


COMPARISON = Comparison(
    title="A hit in the token cache",
    measure=lambda options: report(options.million),
    flags=(("--million", "also 1 000 000 entries"),),
)
main = partial(comparison.main, "token_hit", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())
