"""The checker of histories, on some that are right and on some with a fault."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from support.history import History, Operation

NEVER = math.inf


def write(value: int, began: float, ended: float) -> Operation:
    return Operation("r", value, began, ended, "node", writes=True)


def read(value: object, began: float, ended: float) -> Operation:
    return Operation("r", value, began, ended, "service")


def faults(*operations: Operation) -> list[str]:
    history = History()
    history.start("r", 0)
    history.merge(operations)
    return history.faults()


RIGHT = {
    "nothing": (),
    "a read before the change": (read(0, 1, 2), write(1, 3, 4), read(1, 5, 6)),
    "either beside the change": (write(1, 1, 10), read(1, 2, 3), read(1, 4, 11)),
    "old and new beside each other": (write(1, 1, 10), read(0, 2, 5), read(1, 3, 4)),
    "an old read that ends late": (read(0, 1, 20), write(1, 2, 3), read(1, 4, 5)),
    "no answer, and not made": (write(1, 1, NEVER), read(0, 2, 3), read(0, 90, 91)),
    "no answer, and made late": (write(1, 1, NEVER), read(0, 50, 51), read(1, 52, 53)),
    "no answer, and made after a later one": (
        *(write(1, 1, NEVER), write(2, 2, 3), read(2, 4, 5), read(1, 6, 7), write(3, 8, 9)),
        read(3, 10, 11),
    ),
    "changes at once, in either order": (
        *(write(1, 1, 10), write(2, 1, 10), read(2, 11, 12), read(2, 13, 14)),
    ),
    "changed and overwritten unseen": (write(1, 1, 2), write(2, 3, 4), read(2, 5, 6)),
}
WRONG = {
    "a stale read": (write(1, 1, 2), read(0, 3, 4)),
    "a stale read of an answered change": (write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)),
    "a lost update": (write(1, 1, 2), write(2, 3, 4), read(2, 5, 6), read(1, 7, 8)),
    "an update lost unseen": (read(0, 0.1, 0.2), write(1, 1, 2), read(0, 3, 4)),
    "a flicker": (write(1, 1, 100), read(0, 2, 3), read(1, 4, 5), read(0, 6, 7), read(1, 8, 9)),
    "new and then old beside a change": (write(1, 1, 100), read(1, 2, 3), read(0, 4, 5)),
    "a change without an answer, seen and gone": (
        *(write(1, 1, NEVER), read(1, 2, 3), read(0, 4, 5)),
    ),
    "a late change that is undone by an older one": (
        *(write(1, 1, NEVER), write(2, 2, 3), read(1, 4, 5), read(2, 6, 7)),
    ),
    "what nobody wrote": (read(7, 1, 2),),
    "what was not yet written": (read(1, 1, 2), write(1, 3, 4)),
    "two orders at once": (
        *(write(1, 1, 10), write(2, 1, 10)),
        *(read(1, 11, 12), read(2, 13, 14), read(1, 15, 16)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_may_have_happened(name: str) -> None:
    assert faults(*RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_have_happened(name: str) -> None:
    assert faults(*WRONG[name])


def test_a_fault_names_the_operations() -> None:
    (fault,) = faults(write(1, 1, 2), read(0, 3, 4))
    assert fault.startswith("r: ")
    assert "write of 1 at node, begun at 1.000000, answered at 2.000000" in fault
    assert "read of 0 at service, begun at 3.000000" in fault
    (fault,) = faults(write(1, 1, NEVER), read(2, 3, 4))
    assert "nobody wrote" in fault


def test_a_value_is_written_once() -> None:
    with pytest.raises(ValueError, match="r was given 1 twice"):
        faults(write(1, 1, 2), write(1, 3, 4))


def test_registers_are_apart() -> None:
    history = History()
    for register in ("a", "b"):
        history.start(register, 0)
    with history.change("a", 1, "node"):
        pass
    with pytest.raises(OSError, match="killed"), history.change("b", 1, "node"):
        raise OSError("killed")
    began = history.operations[-1].began
    history.read(began, "service", [("a", 1), ("b", 0)])
    assert history.faults() == []
    assert history.reads == 2
    history.read(history.operations[-1].ended, "service", [("a", 0), ("b", 1)])
    (fault,) = history.faults()
    assert fault.startswith("a: ")


def test_of_many_reads_few_are_kept() -> None:
    reads = [read(0, began, began + 5) for began in range(1, 10_000)]
    random.Random(5).shuffle(reads)
    history = History()
    history.start("r", 0)
    history.merge([write(1, 500, 600), *reads, read(1, 700, 701)])
    assert history.reads == 10_000
    assert len(history.operations) < 10
    (fault,) = history.faults()
    assert "read of 0 at service, begun at 9999.000000" in fault


def test_against_every_order() -> None:
    """Of small histories the same is found by trying all orders of their operations."""
    dice = random.Random(13)
    right = 0
    for _ in range(3000):
        operations = list(_any(dice))
        may = any(_explains(order) for order in itertools.permutations(operations))
        assert (faults(*operations) == []) is may, operations
        right += may
    assert 300 < right < 2700


def _any(dice: random.Random) -> Iterator[Operation]:
    changes = dice.randint(1, 2)
    for value in range(1, changes + 1):
        began = dice.randrange(20)
        yield write(value, began, NEVER if dice.random() < 0.3 else began + dice.uniform(0.5, 8))
    for _ in range(dice.randint(1, 4)):
        began = dice.randrange(20) + 0.25
        yield read(dice.randint(0, changes), began, began + dice.uniform(0.1, 4))


def _explains(order: tuple[Operation, ...]) -> bool:
    """Whether this order is one in which it may have happened."""
    for place, operation in enumerate(order):
        if any(later.ended < operation.began for later in order[place + 1 :]):
            return False
    value: object = 0
    for operation in order:
        if operation.writes:
            value = operation.value
        elif operation.value != value:
            return False
    return True
