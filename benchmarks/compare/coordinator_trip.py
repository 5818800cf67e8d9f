"""Microseconds that the coordinator takes to check an answer, by where it keeps the epochs.

    python -m keyfront.benchmarks.compare.coordinator_trip --url redis://127.0.0.1:6379

Asks 20 times 2000 whether an answer of 10 slots is fresh: of shared memory, of the Redis (or
Valkey) at the URL, and of the same under a lease; then makes changes, a mark and a stamp each.
Prints the median over the 20, with the lowest and the highest. Redis runs where it runs: what the
network takes is in the figures. The table is one of its own, removed afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keyfront.errors import KeyfrontError, ServerError
from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.coordinator.factory import coordinator_of
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import ALL_SLOT, DIGEST, Coordinator, Slots

from .ratios import Spread

REPEATS = 20
CALLS = 2_000
CHANGES = 200
# As an answer of a user with a few roles has them.
SLOTS = Slots((ALL_SLOT, *range(100, 109)))
CHANGED = Slots((40_000, 40_001))


def _times(step: Callable[[], Any], calls: int) -> str:
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        found.append((time.perf_counter() - start) / calls * 1e6)
    middle, low, high = Spread.of(found)
    return f"{middle:9.1f} us ({low:.1f} to {high:.1f})"


def _measure(name: str, coordinator: Coordinator) -> None:
    # So that the table is made and has settled.
    coordinator.stamp(coordinator.mark(CHANGED))
    epoch = coordinator.now()

    def check() -> None:
        if not coordinator.fresh(epoch, SLOTS):
            raise ServerError(f"{name}: an answer is not fresh, though nothing has changed")

    def change() -> None:
        coordinator.stamp(coordinator.mark(CHANGED))

    print(f"{name:<20} check  {_times(check, CALLS)}")
    print(f"{name:<20} change {_times(change, CHANGES)}")


def _remove(url: str, *keys: str) -> None:
    import redis

    with contextlib.suppress(redis.RedisError), redis.Redis.from_url(url) as client:
        client.delete(*keys)


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="coordinator_trip", description="Times the coordinators.")
    parser.add_argument("--url", required=True, help="as the option coordinator")
    arguments = parser.parse_args(argv)
    defaults = {option.dest: option.default for option in options.COORDINATOR}
    prefix = f"keyfront-trip-{secrets.token_hex(4)}:"
    values = {**defaults, "coordinator": arguments.url, "coordinator_prefix": prefix}
    try:
        with ExitStack() as stack:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="trip-"))
            stack.callback(
                _remove, arguments.url, f"{prefix}epochs:{DIGEST}", f"{prefix}digests"
            )
            shared = SharedMemory(Path(place) / "shared")
            stack.callback(shared.close)
            _measure("shared memory", shared)
            for consistency in ("strict", "lease"):
                made = coordinator_of({**values, "consistency": consistency}, True)
                assert made is not None
                stack.callback(made.close)
                _measure(f"Redis, {consistency}", made)
    except KeyfrontError as error:
        sys.stderr.write(f"coordinator_trip: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
