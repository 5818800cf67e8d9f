"""The epoch table: whether an answer still stands, and making answers stale."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.benchmarks.compare.token_hit import shared_folder
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import Slots, slots

# What a validation depends on: all, the catalog, user, project, domain, roles.
TAGS = ("all", "catalog", "user:a", "project:b", "domain:c", "role:d", "role:e")


@pytest.fixture(scope="module")
def table() -> Iterator[SharedMemory]:
    with shared_folder() as folder:
        made = SharedMemory(folder)
        yield made
        made.close()


@pytest.fixture(scope="module")
def sqlite() -> Iterator[sqlite3.Connection]:
    """The same in SQLite on tmpfs, which would have been less code."""
    with shared_folder() as folder:
        folder.mkdir()
        connection = sqlite3.connect(Path(folder) / "epochs", isolation_level=None)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = off")
        connection.execute("create table epochs (slot integer primary key, number integer)")
        connection.executemany("insert into epochs values (?, 0)", ((n,) for n in range(70_000)))
        yield connection
        connection.close()


def reading(table: SharedMemory) -> tuple[Slots, Callable[[], bool]]:
    """Return the slots of an answer, and what looks whether it stands."""
    numbers, epoch = slots(TAGS, table.slot_count), table.now()
    return numbers, lambda: table.fresh(epoch, numbers)


def test_read_against_sqlite(paired: Any, table: SharedMemory, sqlite: sqlite3.Connection) -> None:
    """Reading the slots of an answer costs no system call; at least 5 times as fast."""
    numbers, ours = reading(table)
    marks = ",".join("?" * len(numbers))
    query = f"select max(number) from epochs where slot in ({marks})"

    def theirs() -> object:
        return sqlite.execute(query, numbers).fetchone()

    assert ours()
    paired(ours, theirs, limit=1 / 5)


def test_bump_against_sqlite(paired: Any, table: SharedMemory, sqlite: sqlite3.Connection) -> None:
    """A change is marked, then stamped: slower than two writes of SQLite that reach no disk."""
    numbers = slots(["user:a"], table.slot_count)
    (slot,) = numbers
    update = "update epochs set number = number + 1 where slot = ?"

    def ours() -> None:
        table.stamp(table.mark(numbers))

    def theirs() -> None:
        sqlite.execute(update, (slot,))
        sqlite.execute(update, (slot,))

    paired(ours, theirs, limit=6)


def test_counts(counted: Any, table: SharedMemory) -> None:
    counted(syscalls_of_10_reads=counted.syscalls(reading(table)[1]))


def test_counts_of_a_change(counted: Any, table: SharedMemory) -> None:
    numbers = slots(["user:a"], table.slot_count)
    counted(syscalls_of_10_changes=counted.syscalls(lambda: table.stamp(table.mark(numbers))))


@pytest.mark.slow
def test_read_in_instructions(instructions: Any, table: SharedMemory) -> None:
    instructions(reading(table)[1])
