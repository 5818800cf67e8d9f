"""The table's words: marks, stamps, what is found wrong with it, and what a killed writer leaves.

A writer is killed here between any two instructions of the interpreter, by an exception that no
line of :class:`Table` handles; tests/conformance does the same to a few processes for real.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from keyfront.middleware.tokens.coordinator import local as module
from keyfront.middleware.tokens.coordinator.local import DIRTY, LAYOUT, MARKS, Table, size
from keyfront.middleware.tokens.epochs import ALL_SLOT, MARK_SECONDS, MARK_TAGS

SLOTS = 1024
NOW = 10**12
ABANDONED = NOW + int(MARK_SECONDS * 1e9)


@pytest.fixture
def memory() -> memoryview:
    memory = memoryview(bytearray(size(SLOTS)))
    Table.make(memory, SLOTS, 5)
    return memory


@pytest.fixture
def table(memory: memoryview) -> Table:
    return Table(memory)


def mark(table: Table, *slots: int, now: int = NOW) -> int:
    serial = table.mark(slots, now)
    assert serial is not None
    return serial


def recover(table: Table, now: int) -> int:
    """Complete all marks that are old enough, whoever made them."""
    return table.recover({serial for serial, _, _ in table.old_marks(now)})


def test_a_new_table(memory: memoryview, table: Table) -> None:
    assert Table.fault(memory) is None
    assert table.slot_count == SLOTS == len(table.values)
    assert table.sequence == 1
    assert table.settled == 5
    assert set(table.values) == {0}
    assert len(table.secret) == 32


def test_two_tables_have_two_generations_and_secrets(table: Table) -> None:
    other = Table.make(memoryview(bytearray(size(SLOTS))), SLOTS, 5)
    assert other.generation != table.generation
    assert other.secret != table.secret
    assert 0 < other.generation < 2**63


def test_mark_and_stamp(memory: memoryview, table: Table) -> None:
    serial = mark(table, 3, 4)
    assert table.values[3] == table.values[4] == DIRTY
    assert table.sequence == 1
    assert Table.fault(memory) is None
    table.stamp((3, 4), serial)
    assert table.values[3] == table.values[4] == table.sequence == 2
    assert Table.fault(memory) is None
    assert table.statistics() == {
        "changes": 1,
        "changes_under_way": 0,
        "changes_recovered": 0,
        "flushes": 0,
        "sequence": 2,
        "slots": SLOTS,
    }


def test_room_for_marks_is_bounded_and_comes_back(table: Table) -> None:
    serials = [mark(table, number) for number in range(MARKS)]
    assert len(set(serials)) == MARKS
    assert table.mark((900,), NOW) is None
    assert table.values[900] == 0
    table.stamp((17,), serials[17])
    assert table.mark((900,), NOW) not in (None, *serials)
    assert table.mark((901,), NOW) is None


def test_all_abandoned_marks_are_recovered_at_once(memory: memoryview, table: Table) -> None:
    for number in range(MARKS):
        mark(table, number, number + 1, now=NOW + number)
    assert recover(table, ABANDONED - 1) == 0
    assert recover(table, ABANDONED + 9) == 10
    assert table.values[9] == 11
    assert table.values[10] == DIRTY
    assert recover(table, ABANDONED + MARKS) == MARKS - 10
    assert DIRTY not in table.values.tolist()
    assert table.statistics()["changes_recovered"] == MARKS
    assert Table.fault(memory) is None


def test_a_mark_says_whose_it_is_and_how_old(table: Table) -> None:
    one, two = table.mark((3,), NOW, "node:1:2 s/3"), table.mark((4,), NOW + 10**9, "x" * 128)
    assert table.old_marks(ABANDONED - 1) == []
    assert table.old_marks(ABANDONED) == [(one, "node:1:2 s/3", MARK_SECONDS)]
    assert table.old_marks(ABANDONED + 2 * 10**9) == [
        (one, "node:1:2 s/3", MARK_SECONDS + 2),
        (two, "x" * 128, MARK_SECONDS + 1),
    ]
    with pytest.raises(ValueError, match="129 bytes of owner"):
        table.mark((5,), NOW, "x" * 129)


def test_flush(table: Table) -> None:
    table.flush()
    assert table.values[ALL_SLOT] == table.sequence == 2
    assert table.statistics()["flushes"] == 1


def test_the_largest_mark(memory: memoryview, table: Table) -> None:
    slots = tuple(range(SLOTS - MARK_TAGS, SLOTS))
    places = [table.mark(slots, NOW) for _ in range(MARKS)]
    assert None not in places
    assert Table.fault(memory) is None
    recover(table, ABANDONED)
    assert {table.values[slot] for slot in slots} == {table.sequence}
    assert Table.fault(memory) is None


def words(memory: memoryview) -> memoryview:
    return memory.cast("Q")


def test_too_short() -> None:
    assert Table.fault(memoryview(bytearray(8))) == "it is too short"


@pytest.mark.parametrize("missing", [1, 7, 8, 4096])
def test_truncated(memory: memoryview, missing: int) -> None:
    fault = Table.fault(memory[:-missing])
    assert fault == (
        "it ends within a word"
        if missing % 8
        else f"it has {size(SLOTS) - missing} bytes instead of {size(SLOTS)}"
    )


def test_longer(memory: memoryview) -> None:
    assert "instead of" in str(Table.fault(memoryview(bytes(memory) + bytes(8))))


def test_random_bytes_are_no_table() -> None:
    dice = random.Random(1)
    for _ in range(20):
        length = size(SLOTS) + dice.randint(-9, 9)
        assert Table.fault(memoryview(dice.randbytes(length))) is not None


def test_another_layout(memory: memoryview) -> None:
    words(memory)[1] = LAYOUT + 1
    assert Table.fault(memory) == f"it has layout {LAYOUT + 1}, this keyfront uses {LAYOUT}"


def test_another_boot(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "boot_word", lambda: 12345)
    assert Table.fault(memory) == "it is from before the machine started"


def test_every_bit_of_the_header_counts(memory: memoryview) -> None:
    for byte in range(module._DIGEST * 8 + 16):
        for bit in range(8):
            memory[byte] ^= 1 << bit
            assert Table.fault(memory) is not None, (byte, bit)
            memory[byte] ^= 1 << bit
    assert Table.fault(memory) is None


def test_any_bit_of_a_slot_counts(memory: memoryview, table: Table) -> None:
    dice = random.Random(2)
    for number in range(40):
        table.stamp((dice.randrange(SLOTS),))
        mark(table, 1000 - number)
    first = len(memory) - SLOTS * 8
    for _ in range(300):
        place, bit = dice.randrange(first, len(memory)), dice.randrange(8)
        memory[place] ^= 1 << bit
        assert Table.fault(memory) is not None
        memory[place] ^= 1 << bit
    assert Table.fault(memory) is None


def test_two_slots_that_change_places_are_noticed(memory: memoryview, table: Table) -> None:
    table.stamp((1,))
    table.stamp((2,))
    values = table.values
    values[1], values[2] = values[2], values[1]
    assert Table.fault(memory) == "its slots do not match their checksum"


def test_a_table_that_went_back_is_noticed(memory: memoryview, table: Table) -> None:
    table.stamp((1,))
    words(memory)[module._SEQUENCE] = 1
    assert Table.fault(memory) == "a slot is newer than the table"


@pytest.mark.parametrize(("word", "value"), [(2, 0), (2, MARK_TAGS + 1), (2, 2**63), (3, SLOTS)])
def test_a_damaged_mark_is_noticed(
    memory: memoryview, table: Table, word: int, value: int
) -> None:
    mark(table, 1)
    words(memory)[module._HEADER_WORDS + word] = value
    assert Table.fault(memory) == "a mark in it is damaged"


# A writer that is killed


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed_after(steps: int, deed: Callable[[], Any]) -> bool:
    """Whether ``deed`` was killed, after as many instructions of ``local.py``."""
    left = steps

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        deed()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def instructions(start: bytes, deed: Callable[[Table], Any]) -> int:
    """How many instructions of ``local.py`` the deed takes."""

    def killed(steps: int) -> bool:
        table = Table(memoryview(bytearray(start)))
        return killed_after(steps, lambda: deed(table))

    # Python 3.12 reports instructions of a function only from its second traced call on.
    assert not killed(1_000_000)
    low, high = 0, 1
    while killed(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if killed(middle):
            low = middle
        else:
            high = middle
    return high


def deaths(start: bytes, deed: Callable[[Table], Any]) -> list[tuple[bytearray, Table]]:
    """Tables as they are left, for every memory that a killed ``deed`` can leave."""
    seen: dict[bytes, None] = {}
    for steps in range(instructions(start, deed)):
        memory = bytearray(start)
        table = Table(memoryview(memory))
        assert killed_after(steps, lambda table=table: deed(table))
        seen.setdefault(bytes(memory))
    copies = [bytearray(copy) for copy in seen]
    return [(copy, Table(memoryview(copy))) for copy in copies]


@pytest.fixture
def few_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only four places for marks are looked through, as instructions of a search are dull."""
    monkeypatch.setattr(module, "_PLACES", module._PLACES[:4])


@pytest.fixture
def prepared(memory: memoryview, table: Table, few_marks: None) -> tuple[bytes, int]:
    """A table with a change of 3 and 4 under way, and one of 4 and 5."""
    table.stamp((3, 9))
    mark(table, 4, 5)
    serial = mark(table, 3, 4)
    return bytes(memory), serial


def recovered(memory: bytearray, table: Table) -> None:
    """What holds of every table that a killed writer left, once its marks are abandoned."""
    assert Table.fault(memoryview(memory)) is None
    recover(table, ABANDONED + 1)
    assert Table.fault(memoryview(memory)) is None
    assert DIRTY not in table.values.tolist()
    assert table.statistics()["changes_under_way"] == 0
    assert max(table.values) <= table.sequence


def test_killed_while_marking(prepared: tuple[bytes, int]) -> None:
    start, _ = prepared
    before = Table(memoryview(bytearray(start)))
    found = deaths(start, lambda table: table.mark((6, 9), NOW))
    assert len(found) > 8
    for memory, table in found:
        # Its change was not committed: to others everything is as before, or not known.
        for slot in range(SLOTS):
            assert table.values[slot] in (before.values[slot], DIRTY)
        assert table.sequence == before.sequence
        recovered(memory, table)


def test_killed_while_stamping(prepared: tuple[bytes, int]) -> None:
    start, serial = prepared
    epoch = Table(memoryview(bytearray(start))).sequence
    found = deaths(start, lambda table: table.stamp((3, 4), serial))
    assert len(found) > 4
    for memory, table in found:
        # Its change was committed: what was filled before is fresh at no moment.
        assert table.values[3] > epoch
        assert table.values[4] == DIRTY  # of the other change
        assert table.values[5] == DIRTY
        recovered(memory, table)
        assert table.values[3] > epoch
        assert table.values[4] > epoch


def test_killed_while_recovering(prepared: tuple[bytes, int]) -> None:
    start, _ = prepared
    epoch = Table(memoryview(bytearray(start))).sequence
    for memory, table in deaths(start, lambda table: recover(table, ABANDONED + 1)):
        for slot in (3, 4, 5):
            assert table.values[slot] > epoch
        recovered(memory, table)


def test_killed_while_touching(prepared: tuple[bytes, int]) -> None:
    start, _ = prepared
    before = Table(memoryview(bytearray(start)))
    for memory, table in deaths(start, lambda table: table.stamp((5, 8, 9))):
        assert table.values[5] == DIRTY
        for slot in (8, 9):
            assert table.values[slot] in (before.values[slot], DIRTY, before.sequence + 1)
        recovered(memory, table)
        for slot in (8, 9):
            number = table.values[slot]
            assert number == before.values[slot] or number > before.sequence


def test_at_no_moment_of_a_touch_has_a_slot_its_old_number_beside_the_new_one(
    prepared: tuple[bytes, int],
) -> None:
    """Else what another worker then makes of what it knows would have the number of the change."""
    start, serial = prepared
    recovered_before = Table(memoryview(bytearray(start)))
    recover(recovered_before, ABANDONED + 1)
    for beginning, deed, touched in (
        (start, lambda table: table.stamp((8, 9)), (8, 9)),
        (start, lambda table: table.flush(), (ALL_SLOT,)),
        # of a change whose mark somebody has recovered
        (
            recovered_before._words.tobytes(),
            lambda table: table.stamp((3, 4), serial),
            (3, 4),
        ),
    ):
        before = Table(memoryview(bytearray(beginning)))
        found = [table for _, table in deaths(beginning, deed)]
        assert [table for table in found if table.sequence > before.sequence]
        for table in found:
            for slot in touched:
                if table.sequence > before.sequence:
                    assert table.values[slot] > before.sequence


def test_a_change_after_a_killed_one(prepared: tuple[bytes, int]) -> None:
    """The next writer does not take a mark's place while it counts, nor its serial number."""
    start, serial = prepared
    for _, table in deaths(start, lambda table: table.mark((6, 9), NOW)):
        half = table.values[6] == DIRTY or table.values[9] == DIRTY
        following = mark(table, 6, 20)
        assert following > serial
        table.stamp((6, 20), following)
        assert table.values[20] == table.sequence
        if half:
            assert DIRTY in (table.values[6], table.values[9])
        table.stamp((3, 4), serial)
        recover(table, ABANDONED + 1)
        assert DIRTY not in table.values.tolist()


def test_a_fill_during_a_stamp_is_stale_or_after_it(prepared: tuple[bytes, int]) -> None:
    """Readers take no lock: each state between two instructions is one that they may see."""
    start, serial = prepared
    old = Table(memoryview(bytearray(start))).sequence
    for _, table in deaths(start, lambda table: table.stamp((3, 4), serial)):
        fill = table.sequence
        table.stamp((3, 4), serial)
        # A fill that saw the new number began after the commit, so it may stand or not.
        if fill == old:
            assert table.values[3] > fill
