"""Epochs: what tells a cached answer from a stale one.

A *tag* names something that answers depend on (``user:ID``, ``catalog``; see
``invalidation/rules.py``). A coordinator keeps a table of *slots*; a tag lives in one slot, and a
collision of two tags costs a needless miss and nothing else. A slot holds the sequence number of
the last change of its tags, or that a change is under way. Sequence numbers come from one counter
that never goes back; a new table has a new random *generation*, so no number of an older one is
ever taken for one of it. A version that numbers slots otherwise, or gives a write other tags, has
another table: :data:`DIGEST` is in its name.

The protocol, which every coordinator keeps and tests/conformance holds it to:

* Fill: take :meth:`Coordinator.now` *before* asking Keystone, keep it with the answer.
* Read: the answer stands while :meth:`Coordinator.fresh` says so of that epoch and its slots.
* Change: :meth:`Coordinator.mark` the tags before the database commits, :meth:`Coordinator.stamp`
  them after, and only then let the response go.

Why it is exact: a fill that started before the stamp has a smaller number than the stamp, so its
answer dies with it, however late it is stored. A fill that started after the stamp started after
the commit. A writer that dies between the two leaves a mark, under which nothing is fresh. Whoever
finds it :data:`MARK_SECONDS` later looks for its owner (``coordinator/mark_owners.py``), and stamps
it in its place when it is sure that the owner's commit is over.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from .invalidation.rules import FIXED, fingerprint

#: Seconds after which somebody looks who left a mark: far longer than a database commit takes.
MARK_SECONDS = 10.0

#: Bytes of what a mark says of its owner.
OWNER_BYTES = 128

#: Tags of one mark; more are taken for all tags. Bounds the room that a mark needs.
MARK_TAGS = 64

#: The number of a slot while a change of it is under way: newer than every other.
DIRTY = 2**64 - 1

# Raised when what a mark, a stamp or a number means changes.
_PROTOCOL = 3

#: The slot of the tag ``all``, on which every answer depends.
ALL_SLOT = 0


class Epoch(NamedTuple):
    """A moment in the life of an epoch table."""

    #: The table's random name.
    generation: int
    #: The number of the last change that was complete then.
    sequence: int


class Slots(tuple[int, ...]):
    """Slots of an epoch table, and the quickest way to read them all."""

    #: Called with the values of a table, returns those of the slots.
    read: Callable[[Any], tuple[int, ...]]

    def __new__(cls, numbers: Iterable[int]) -> Slots:
        """Take each number once, in ascending order.

        :param numbers: slot numbers, from 0 to the table's slot count less one
        :raises ValueError: there are none: every answer depends on something
        """
        self = super().__new__(cls, sorted(set(numbers)))
        if not self:
            raise ValueError("no slots")
        # Twice, so that it is two at least: one alone is not returned as a tuple.
        self.read = operator.itemgetter(self[0], *self)
        return self


class Mark(NamedTuple):
    """A change under way, from :meth:`Coordinator.mark` to :meth:`Coordinator.stamp`."""

    generation: int
    #: Tells it from every other mark of the table.
    serial: int
    slots: Slots


def settled_by_age(owner: str, age: float) -> bool:
    """Return true: a commit counts as over where nothing is known but that its mark is old enough.

    :param owner: the mark's owner, not looked at
    :param age: seconds since the mark was made, not looked at
    """
    return True


class Exchanged(NamedTuple):
    """What nodes have told each other, by :meth:`Coordinator.exchange`.

    :param key: the 16 bytes by which all nodes are to make their numbers
    :param place: the place of the last of the numbers among all that were told
    :param told: the numbers, with the seconds since each was told; those who tell hear of their own
    :param more: true if there are others that were told already
    """

    key: bytes
    place: str
    told: list[tuple[int, float]]
    more: bool


class Coordinator(Protocol):
    """Keeps the epoch table that a node's, or several nodes', processes share."""

    #: Called with a mark's owner and its age in seconds; returns whether its commit is over. Not
    #: called under a lock, nor of marks that are younger than :data:`MARK_SECONDS`.
    settled: Callable[[str, float], bool]

    #: True if the table is kept by a server, which may be away when a process starts.
    may_be_away: ClassVar[bool]

    @property
    def secret(self) -> bytes:
        """Return 32 bytes that the processes of this node share, others for each table.

        :raises CoordinatorError: the table cannot be reached, or the bytes cannot be kept
        """
        ...

    @property
    def slot_count(self) -> int:
        """Number of slots of the table, up to 2**24.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def now(self) -> Epoch:
        """Return the present epoch, to be kept with an answer that is asked for after this.

        :raises CoordinatorError: the table cannot be reached; then nothing may be cached
        """
        ...

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        """Return whether nothing in ``slots`` has changed since ``epoch``, nor is about to.

        ``False`` also whenever that cannot be known. Never raises.

        :param epoch: the result of :meth:`now` from before the answer was asked for
        :param slots: the slots that the answer depends on
        """
        ...

    def fresh_now(self, epoch: Epoch, slots: Slots) -> bool:
        """Do as :meth:`fresh`, but read the table itself, whatever a lease allows."""
        ...

    def follow(self, digest: str) -> None:
        """Go by the table that an answer was made with, where there may be several.

        :param digest: the digest of the tags and slots that the answer's table is for, as
            Keystone's cache named it
        """
        ...

    def snapshot(self) -> tuple[int, tuple[int, ...]]:
        """Return the generation, and the numbers of the slots of all fixed tags.

        They are those of :data:`~keyfront.middleware.tokens.invalidation.rules.FIXED`. None of the
        numbers is from before the call. A slot with a change under way has :data:`DIRTY`.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def mark(self, slots: Slots, owner: str = "", *, late: bool = False) -> Mark:
        """Announce a change: until :meth:`stamp`, nothing that depends on ``slots`` is fresh.

        :param slots: the slots of the change's tags; more than :data:`MARK_TAGS` are taken for all
        :param owner: the writer's name, as ``mark_owners.py`` makes it: up to :data:`OWNER_BYTES`
            bytes of ASCII; empty: the commit counts as over once the mark is old enough
        :param late: if true, others may be told only when a table that is kept elsewhere can be
            reached again: no answer from before the change says too much
        :returns: the mark, to be given to :meth:`stamp`
        :raises CoordinatorError: nobody could be told; then the change must not happen
        :raises ValueError: the owner is too long or not ASCII (shared memory)
        """
        ...

    def stamp(self, mark: Mark) -> None:
        """Complete a change, whether or not it came about: give its slots a new number.

        :param mark: the result of :meth:`mark`
        :raises CoordinatorError: the table cannot be reached; the mark stays and is stamped by
            whoever finds it, so nothing stale is served, only nothing fresh for that long
        """
        ...

    def touch(self, slots: Slots) -> None:
        """Give ``slots`` a new number without having marked them.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def flush(self) -> None:
        """Make every answer stale that is checked with this table.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def recover(self) -> int:
        """Stamp the old marks whose commits are over by :attr:`settled`; return their number.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def exchange(self, key: bytes, told: Sequence[int], after: str) -> Exchanged | None:
        """Tell the other nodes of numbers, and return what they have told; ``None`` if alone.

        What was told is kept for those who come later, as far as there is room.

        :param key: 16 bytes by which this node makes such numbers; nothing is told if the others
            make them by another key
        :param told: numbers, 1 to 2**64 - 1, 1000 at most
        :param after: the ``place`` of the result before; empty at first
        :raises CoordinatorError: the others cannot be reached
        """
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return the table's counts by name, for ``keyfront tokens stats``.

        :returns: ``changes``, ``changes_under_way``, ``changes_recovered``, ``flushes``,
            ``sequence`` (the number of the last complete change) and ``slots``
        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def close(self) -> None:
        """Detach from the table, which stays for others. A closed coordinator finds nothing fresh.
        """
        ...


_FIXED_SLOTS = {tag: index for index, tag in enumerate(FIXED)}


def slots(tags: Iterable[str], count: int) -> Slots:
    """Return the slots of ``tags`` in a table of ``count`` slots.

    Tags that are known beforehand have slots of their own at the front, ``all`` the first. Others
    share the rest by an unkeyed hash: every process must find the same slot, and an operator's
    users cannot choose the random identifiers in tags.

    :param tags: tags as ``invalidation/rules.py`` makes them, at least one
    :param count: number of slots in the table, more than twice that of the fixed tags
    :raises ValueError: there are no tags
    """
    return Slots(
        _kept_slot(tag, count) if len(tag) <= _LONGEST_KEPT else _slot(tag, count) for tag in tags
    )


def _slot(tag: str, count: int) -> int:
    fixed = _FIXED_SLOTS.get(tag)
    if fixed is not None:
        return fixed
    # By the identifier alone: all tags of one user are in one slot, so that fewer have to be read.
    # What changes of a user makes about the same answers stale whichever of them it is.
    identifier = tag.rpartition(":")[2]
    digest = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return len(_FIXED_SLOTS) + int.from_bytes(digest, "big") % (count - len(_FIXED_SLOTS))


# Mostly the same tags are asked for again. Anybody may have one made that is as long as a request.
_LONGEST_KEPT = 300
_kept_slot = functools.lru_cache(maxsize=8192)(_slot)


def changed(
    epoch: Epoch, slots: Slots, generation: int, numbers: tuple[int, ...]
) -> str | None:
    """Return the tag of a change in ``slots`` since ``epoch``; only counts are made by it.

    :param epoch: the epoch with which the answer was kept
    :param slots: the slots that the answer depends on
    :param generation: the table's generation now, from :meth:`Coordinator.snapshot`
    :param numbers: the numbers of the fixed tags' slots now, from the same
    :returns: a fixed tag that has changed; else ``rows``, if the answer depends on others; else
        ``None``, as also for an epoch of another table
    """
    if generation != epoch.generation:
        return None
    for slot in slots:  # the fixed ones come first
        if slot >= len(numbers):
            return "rows"
        if numbers[slot] > epoch.sequence:
            return FIXED[slot]
    return None


def _digest() -> str:
    probes = [_slot(f"user:{number}", 65536) for number in range(16)]
    text = f"{_PROTOCOL} {fingerprint()} {probes}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


#: Names what processes must have in common to share a table: tags and the slots they live in.
DIGEST: Final = _digest()


# Which changes a database shows by now that may be behind its primary by some seconds.
#
# An answer is kept with the number of the last change that was complete when it was asked for: it
# is made of what every change up to that one has left. Of a replica that may be three seconds
# behind, that is true of the last change that was complete three seconds before. So an answer is
# kept with the number of that one: what has changed since, in a slot that it depends on, is
# newer, and the answer does not stand, however late it is stored. Nothing has to be done at the
# end of those seconds, nor by the process that made the change.

# How many moments are remembered; a change settles later by this part of the time at most.
_MOMENTS = 64


class Settling:
    """Remembers when this process saw which change complete.

    :param seconds: seconds by which the database may be behind its primary, 0 or more; 0: it is
        never behind
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._generation = 0
        # When a number was first seen, the newest last; and the last one that was seen.
        self._seen: deque[tuple[float, int]] = deque()
        self._last = (0.0, 0)
        self._settled = -1

    def settled(self, epoch: Epoch) -> Epoch:
        """Return the epoch of a read that begins now.

        :param epoch: the present epoch, from :meth:`Coordinator.now`
        :returns: the epoch of the last change that the database is sure to show; its sequence is
            -1, which finds nothing fresh, in a generation that this process has not yet seen for
            as long as the database may be behind
        """
        if not self._seconds:
            return epoch
        with self._lock:
            now = time.monotonic()  # no earlier than when the epoch was read
            if epoch.generation != self._generation:
                self._generation = epoch.generation
                self._seen.clear()
                self._last = (now, epoch.sequence)
                self._settled = -1
            elif epoch.sequence > self._last[1]:
                far = self._last[0] - self._seen[-1][0] if self._seen else self._seconds
                if far >= self._seconds / _MOMENTS:
                    self._seen.append(self._last)
                self._last = (now, epoch.sequence)
            before = now - self._seconds
            while self._seen and self._seen[0][0] <= before:
                self._settled = self._seen.popleft()[1]
            if self._last[0] <= before:
                self._settled = self._last[1]
            # No newer one, which another thread may have seen since: what this read may use of
            # caches is looked up by its own epoch.
            return Epoch(epoch.generation, min(self._settled, epoch.sequence))


class View(NamedTuple):
    """The state of the database in which a request begins, for the values of Keystone's caches.

    Values that the request keeps are of this state or a later one. Values that it finds must not
    be of an earlier one.
    """

    coordinator: Coordinator
    #: The numbers of the fixed tags.
    numbers: tuple[int, ...]
    #: The last change that was complete.
    seen: Epoch
    #: The last change that the database shows for certain.
    settled: Epoch

    @classmethod
    def of(cls, coordinator: Coordinator, settling: Settling) -> View:
        """Return the present state.

        :param coordinator: the coordinator of Keystone's database
        :param settling: the memory of which changes the database shows by now
        :raises CoordinatorError: the table cannot be reached
        """
        generation, numbers = coordinator.snapshot()
        # A change under way has no number yet: the one before it counts.
        last = max(numbers, default=0)
        if last == DIRTY:
            last = max((number for number in numbers if number != DIRTY), default=0)
        seen = Epoch(generation, last)
        return cls(coordinator, numbers, seen, settling.settled(seen))

    def name(self, tag: str) -> str:
        """Return a name of this state; empty if the database may not show it yet.

        :param tag: a fixed tag; each of its changes gives another name
        """
        newest = max(self.numbers[ALL_SLOT], self.numbers[_FIXED_SLOTS[tag]])
        if newest == DIRTY or newest > self.settled.sequence:
            return ""
        return f"{self.seen.generation:x}.{newest:x}"
