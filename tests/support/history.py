"""A history of what clients read and changed, and a checker that says whether it may have happened.

Each thing that is read is a register: it has one value at a time, and each change gives it a value
that it never had before. A history is right if the operations on each register can be put in one
order in which every read shows the last change before it, and in which no operation comes before
another that had ended when it began. That is linearizability; it says of a token cache that

- a read that began after a change was answered shows that change or a later one,
- once a read has shown a change, no read that began after its end shows what was before,
- nothing is shown that nobody wrote, or before it was written.

A change without a good answer (503, the worker was killed) may have been made, at any time after it
began, or never.

As no value is written twice, it is known which change each read shows, and a value with the reads
that show it is a *zone*: from the first end of any of its operations to the last beginning. So of
all reads of a value only the one that ended first and the one that began last are kept, and a
history of millions takes as much memory as its changes. If a zone
is forward in time, the register had the value all that while; if it is backward, at some moment of
that while. A history of such values is linearizable if and only if no two forward
zones overlap and no backward one lies within a forward one (P. Gibbons and E. Korach, Testing
Shared Memories, 1997).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Operation:
    """A read or a change of one register.

    :param register: which
    :param value: shown or written; ``None`` is one as well
    :param began: seconds of the monotonic clock, before the request was sent
    :param ended: the same, when the answer was there; infinite for a change that had no good one
    :param where: who was asked
    """

    register: str
    value: object
    began: float
    ended: float
    where: str
    writes: bool = False

    def __str__(self) -> str:
        deed = "write of" if self.writes else "read of"
        ended = "never answered" if self.ended == math.inf else f"answered at {self.ended:.6f}"
        return f"{deed} {self.value!r} at {self.where}, begun at {self.began:.6f}, {ended}"


class History:
    """What was read and changed, from any number of threads."""

    def __init__(self) -> None:
        #: How many reads of a register there are.
        self.reads = 0
        #: Changes that have ended, or never will.
        self._changes: list[Operation] = []
        # By register and value, the read that ended first and the one that began last.
        self._reads: dict[tuple[str, object], tuple[Operation, Operation]] = {}
        #: What each register was when it was first spoken of.
        self._first: dict[str, object] = {}
        self._lock = threading.Lock()

    def start(self, register: str, value: object) -> None:
        """Say what a register is before anybody reads or changes it."""
        with self._lock:
            self._first[register] = value

    def read(self, began: float, where: str, values: Iterable[tuple[str, object]]) -> None:
        """Note a read that ends now, of any number of registers at once."""
        ended = time.monotonic()
        self.merge([Operation(x, value, began, ended, where) for x, value in values])

    @contextmanager
    def change(self, register: str, value: object, where: str) -> Iterator[None]:
        """Note a change, made in the block; one that raises had no good answer."""
        began, ended = time.monotonic(), math.inf
        try:
            yield
            ended = time.monotonic()
        finally:
            self.merge([Operation(register, value, began, ended, where, writes=True)])

    def merge(self, operations: Iterable[Operation]) -> None:
        """Add operations, in any order."""
        with self._lock:
            for one in operations:
                if one.writes:
                    self._changes.append(one)
                    continue
                self.reads += 1
                place = one.register, one.value
                first, last = self._reads.get(place, (one, one))
                if one.ended < first.ended:
                    first = one
                if one.began > last.began:
                    last = one
                self._reads[place] = first, last

    @property
    def registers(self) -> int:
        """How many registers there are."""
        return len(self._first)

    @property
    def operations(self) -> list[Operation]:
        """The changes, and of the reads those that a fault can be seen by."""
        kept = (read for both in self._reads.values() for read in dict.fromkeys(both))
        return [*self._changes, *kept]

    def faults(self) -> list[str]:
        """Say what cannot have happened; nothing if all can."""
        first = [
            Operation(register, value, -math.inf, -math.inf, "the beginning", writes=True)
            for register, value in self._first.items()
        ]
        everything = sorted([*first, *self.operations], key=attrgetter("register"))
        return [
            f"{register}: {fault}"
            for register, operations in groupby(everything, key=attrgetter("register"))
            for fault in _faults(list(operations))
        ]


@dataclass
class _Zone:
    """A value, the operation with it that ended first, and the one that began last."""

    write: Operation
    first: Operation
    last: Operation

    @property
    def forward(self) -> bool:
        return self.first.ended < self.last.began


def _faults(operations: list[Operation]) -> Iterator[str]:
    zones: dict[object, _Zone] = {}
    for write in (x for x in operations if x.writes):
        if write.value in zones:
            raise ValueError(f"{write.register} was given {write.value!r} twice")
        zones[write.value] = _Zone(write, write, write)
    for read in (x for x in operations if not x.writes):
        zone = zones.get(read.value)
        if zone is None:
            yield f"nobody wrote what was read: {read}"
        elif read.ended < zone.write.began:
            yield f"it was read before it was written: {read}; {zone.write}"
        else:
            zone.first = min(zone.first, read, key=attrgetter("ended"))
            zone.last = max(zone.last, read, key=attrgetter("began"))
    # A change without an answer that nobody has seen may never have been made.
    seen = [x for x in zones.values() if x.first.ended < math.inf]
    forward = sorted((x for x in seen if x.forward), key=lambda x: x.first.ended)
    for zone, following in pairwise(forward):
        if following.first.ended < zone.last.began:
            yield (
                f"it was {zone.write.value!r} and {following.write.value!r} by turns: "
                f"{zone.first}; {following.first}; {zone.last}; {following.last}"
            )
    for inner in (x for x in seen if not x.forward):
        # Of forward zones that do not overlap only the last that begins before it may hold it.
        outer = None
        for zone in forward:
            if zone.first.ended >= inner.last.began:
                break
            outer = zone
        if outer is not None and inner.first.ended < outer.last.began:
            yield (
                f"it was {outer.write.value!r} before and after {inner.write.value!r}: "
                f"{outer.first}; {inner.last}; {outer.last}"
            )
