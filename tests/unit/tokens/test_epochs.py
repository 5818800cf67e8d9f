"""Slots of tags: the same in every process, the fixed ones at the front and alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keyfront.middleware.tokens.epochs import ALL_SLOT, Slots, slots
from keyfront.middleware.tokens.invalidation.rules import ALL, FIXED, tag

COUNT = 65536


def test_slots_are_in_order_and_each_once() -> None:
    assert Slots([5, 3, 5, 4]) == (3, 4, 5)


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="no slots"):
        Slots([])
    with pytest.raises(ValueError, match="no slots"):
        slots([], COUNT)


@pytest.mark.parametrize("numbers", [[0], [7], [0, 1], [3, 1, 2], list(range(64))])
def test_read_returns_every_slot_of_a_table(numbers: list[int]) -> None:
    values = memoryview(bytearray(8 * 100)).cast("Q")
    for index in range(100):
        values[index] = 1000 + index
    read = Slots(numbers).read(values)
    assert isinstance(read, tuple)
    assert set(read) == {1000 + number for number in numbers}


def test_read_finds_the_newest_of_one_slot_alone() -> None:
    values = memoryview(bytearray(8 * 100)).cast("Q")
    values[7] = 3
    assert max(Slots([7]).read(values)) == 3


def test_fixed_tags_have_slots_of_their_own() -> None:
    assert slots([ALL], COUNT) == (ALL_SLOT,)
    found = [slots([tag], COUNT)[0] for tag in FIXED]
    assert found == list(range(len(FIXED)))
    others = slots((tag("user", f"{number:032x}") for number in range(5000)), COUNT)
    assert len(FIXED) <= others[0]
    assert others[-1] < COUNT


def test_a_small_table_is_used_whole() -> None:
    found = slots((f"user:{number}" for number in range(20000)), 1024)
    assert found == tuple(range(len(FIXED), 1024))


def test_slots_spread_evenly() -> None:
    found = slots((f"user:{number}" for number in range(1000)), COUNT)
    assert len(found) > 980


def test_tags_need_not_be_ascii() -> None:
    assert slots(["user:é", "user:\udc80"], COUNT)


def test_every_interpreter_finds_the_same_slots() -> None:
    script = (
        "from keyfront.middleware.tokens.epochs import slots\n"
        f"print(slots(['all', 'catalog', 'user:u1', 'project:é'], {COUNT}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{slots(['all', 'catalog', 'user:u1', 'project:é'], COUNT)}\n"}
