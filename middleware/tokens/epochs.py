"""Epochs: what tells a cached answer from a stale one.

A *tag* names something that answers depend on (``user:ID``, ``catalog``; see ``touches.py``). A
coordinator keeps a table of *slots*; a tag lives in one slot, and a collision of two tags costs a
needless miss and nothing else. A slot holds the sequence number of the last change of its tags, or
that a change is under way. Sequence numbers come from one counter that never goes back; a new table
has a new random *generation*, so no number of an older one is ever taken for one of it. Who numbers
slots otherwise, or gives a write other tags, has another table: :data:`DIGEST` is in its name.

The protocol, which every coordinator keeps and tests/conformance holds it to:

* Fill: take :meth:`Coordinator.now` *before* asking Keystone, keep it with the answer.
* Read: the answer stands while :meth:`Coordinator.fresh` says so of that epoch and its slots.
* Change: :meth:`Coordinator.mark` the tags before the database commits, :meth:`Coordinator.stamp`
  them after, and only then let the response go.

Why it is exact: a fill that started before the stamp has a smaller number than the stamp, so its
answer dies with it, however late it is stored. A fill that started after the stamp started after
the commit. A writer that dies between the two leaves a mark, under which nothing is fresh. Whoever
finds it :data:`MARK_SECONDS` later looks for its owner (``owners.py``), and stamps it in his place
when it is sure that his commit is over.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from .invalidation.rules import FIXED, fingerprint

#: Seconds after which somebody looks who left a mark: far longer than a database commit takes.
MARK_SECONDS = 10.0

#: Bytes of what a mark says of its owner.
OWNER_BYTES = 128

#: Tags of one mark; more are taken for all tags. Bounds the room that a mark needs.
MARK_TAGS = 64

#: What a slot holds while a change of it is under way: newer than every number.
DIRTY = 2**64 - 1

# Raised when what a mark, a stamp or a number means changes.
_PROTOCOL = 1

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
        """Take each once, in order.

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
    """Whether a commit is over, for who knows nothing but that its mark is old enough."""
    return True


class Coordinator(Protocol):
    """Keeps the epoch table that a node's, or several nodes', processes share."""

    #: Whether the commit of a mark is over, by its owner and its age in seconds. Not asked under a
    #: lock, nor of marks that are younger than :data:`MARK_SECONDS`.
    settled: Callable[[str, float], bool]

    @property
    def slot_count(self) -> int:
        """How many slots the table has."""
        ...

    def now(self) -> Epoch:
        """Return the present epoch, to be kept with an answer that is asked for after this.

        :raises CoordinatorError: the table cannot be reached; then nothing may be cached
        """
        ...

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        """Whether nothing in ``slots`` has changed since ``epoch``, nor is about to.

        ``False`` also whenever that cannot be known. Never raises.
        """
        ...

    def snapshot(self) -> tuple[int, tuple[int, ...]]:
        """Return the generation, and the numbers of the slots of all :data:`~.touches.FIXED` tags.

        Of the present: none is from before the call. A slot with a change under way has
        :data:`DIRTY`.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def mark(self, slots: Slots, owner: str = "") -> Mark:
        """Announce a change: until :meth:`stamp`, nothing that depends on ``slots`` is fresh.

        :param owner: who does it, as ``owners.py`` has it: up to :data:`OWNER_BYTES` of ASCII;
            empty: whose commit is over when the mark is old enough
        :raises CoordinatorError: nobody could be told; then the change must not happen
        """
        ...

    def stamp(self, mark: Mark) -> None:
        """Complete a change, whether or not it came about: give its slots a new number.

        :raises CoordinatorError: the table cannot be reached; the mark stays and is stamped by
            whoever finds it, so nothing stale is served, only nothing fresh for that long
        """
        ...

    def touch(self, slots: Slots) -> None:
        """Give ``slots`` a new number without having marked them.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def recover(self) -> int:
        """Stamp the marks of which :attr:`settled` says that they may be; return how many.

        :raises CoordinatorError: the table cannot be reached
        """
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return counts by name, for ``keyfront tokens stats``."""
        ...

    def close(self) -> None:
        """Let go of the table; it lives on for others. A closed coordinator finds nothing fresh."""
        ...


_FIXED_SLOTS = {tag: index for index, tag in enumerate(FIXED)}


def slots(tags: Iterable[str], count: int) -> Slots:
    """Return the slots of ``tags`` in a table of ``count`` slots.

    Tags that are known beforehand have slots of their own at the front, ``all`` the first. Others
    share the rest by an unkeyed hash: every process must find the same slot, and an operator's
    users cannot choose the random identifiers in tags.

    :param count: slots in the table, more than twice the fixed tags
    """
    return Slots(_slot(tag, count) for tag in tags)


def _slot(tag: str, count: int) -> int:
    fixed = _FIXED_SLOTS.get(tag)
    if fixed is not None:
        return fixed
    # By the identifier alone: all tags of one user are in one slot, so that fewer have to be read.
    # What changes of a user makes about the same answers stale whichever of them it is.
    identifier = tag.rpartition(":")[2]
    digest = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return len(_FIXED_SLOTS) + int.from_bytes(digest, "big") % (count - len(_FIXED_SLOTS))


def _digest() -> str:
    probes = [_slot(f"user:{number}", 65536) for number in range(16)]
    text = f"{_PROTOCOL} {fingerprint()} {probes}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


#: Names what processes must have in common to share a table: tags and the slots they live in.
DIGEST: Final = _digest()
