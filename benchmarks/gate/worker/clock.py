"""The gate's stop watch: the same code times both sides, in one process or in two."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

#: Nanoseconds of a batch: short, so that most are over before the scheduler takes the processor.
BATCH = 300_000
#: More calls than that are not needed to make a batch of the shortest callable.
MOST = 1 << 20


def batch(step: Callable[[], object], calls: int) -> int:
    """Nanoseconds that so many calls take together."""
    now = time.perf_counter_ns
    rounds = repeat(None, calls)
    start = now()
    for _ in rounds:
        step()
    return now() - start


def calibrate(step: Callable[[], object], nanoseconds: int = BATCH) -> int:
    """Return how many calls last about that long; at least one, and warm when it returns."""
    calls = 1
    while True:
        # the best of three: what disturbs makes it longer only
        took = min(batch(step, calls) for _ in range(3))
        if took >= nanoseconds or calls >= MOST:
            return calls
        if took > nanoseconds // 16:
            return max(1, round(calls * nanoseconds / took))
        calls *= 2


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage in the block: it would come at the cost of whoever is timed then."""
    was = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()
