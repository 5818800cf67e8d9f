"""How late a thread gets a core on which a password is hashed: with long slices, and without.

A thread of this process sleeps for 3 ms and computes for 0.3, as one does that validates tokens, on
one core, again and again, and notes how much later than asked for it woke up. In each round it does
so alone, beside a thread of the same core that checks one password after the other by bcrypt, and
beside one that does it in long slices (``gateway/keystone/password_hashing.py``). Prints, as
medians of the rounds with the lowest and highest, the part of all wakeups that were more than half
a millisecond late, the latest of 99 in 100, and the hashes a second. What other programs do on that
core is in all three.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import bcrypt

from keyfront.errors import MissingPartError
from keyfront.gateway.keystone.password_hashing import in_long_slices, slice_of

from ..results import Cell, Table
from . import comparison
from .comparison import Comparison, Report
from .ratios import Spread

_SLEEPS, _COMPUTES, _LATE = 0.003, 0.0003, 0.0005


class Round(NamedTuple):
    """What one case did in one round.

    :ivar late: parts of a hundred of the wakeups that were late
    :ivar p99: milliseconds by which 99 of 100 wakeups were late at most
    :ivar hashes: passwords checked a second
    """

    late: float
    p99: float
    hashes: float


Rounds = dict[str, list[Round]]

CASES: dict[str, Callable[..., object] | None] = {
    "alone": None,
    "beside a hash": bcrypt.hashpw,
    "in long slices": in_long_slices(bcrypt.hashpw),
}


def measure(rounds: int, seconds: float) -> Rounds:
    """Return what each case did.

    :raises MissingPartError: the kernel has no slices of a thread's own
    """
    if not slice_of():
        raise MissingPartError("the kernel has no slices of a thread's own: take Linux 6.12")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        return comparison.in_rounds(list(CASES), rounds, lambda name: _round(CASES[name], seconds))
    finally:
        os.sched_setaffinity(0, cores)


def _round(check: Callable[..., object] | None, seconds: float) -> Round:
    hashes = 0
    salt = bcrypt.gensalt(12)

    def hashing(over: threading.Event) -> None:
        nonlocal hashes
        while check is not None and not over.is_set():
            check(b"a password", salt)
            hashes += 1

    late = []
    began = time.monotonic()
    with comparison.meanwhile(hashing):
        while time.monotonic() - began < seconds:
            due = time.monotonic() + _SLEEPS
            time.sleep(_SLEEPS)
            late.append(time.monotonic() - due)
            while time.monotonic() < due + late[-1] + _COMPUTES:
                pass
    late.sort()
    return Round(
        100 * sum(one > _LATE for one in late) / len(late),
        late[int(0.99 * len(late))] * 1e3,
        hashes / (time.monotonic() - began),
    )


def report(found: Rounds) -> Report:
    """Return the table."""
    rows: list[list[Cell]] = []
    for name, rounds in found.items():
        late, p99, hashes = (Spread.of(figures) for figures in zip(*rounds, strict=True))
        rows.append([name, late.text(1), p99.text(2), hashes.text(1)])
    columns = ["a thread", "over 0.5 ms late, %", "p99, ms", "hashes/s"]
    return Report([Table(name="wakeups", columns=columns, rows=rows)])


COMPARISON = Comparison(
    title="Wakeups on a core on which a password is hashed",
    measure=lambda options: report(measure(options.rounds, options.seconds)),
    numbers=(("--rounds", 5, "an odd number"), ("--seconds", 2, "of each case")),
    distributions=("bcrypt",),
)
main = partial(comparison.main, "hash_wakeups", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())
