"""Counts of all processes of a node."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from keyfront.common import counters as common_counters
from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import counters as module
from keyfront.middleware.tokens import node_cache
from keyfront.middleware.tokens.counters import HITS, MISSES, NAMES, Counters
from keyfront.middleware.tokens.invalidation import change_log

WORDS_OF_A_ROW = 48


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The processes that live; each Counters of a test gets the next."""
    living: set[int] = set()

    def getpid() -> int:
        living.add(1000 + len(made))
        made.append(None)
        return 1000 + len(made) - 1

    made: list[None] = []
    monkeypatch.setattr(common_counters, "lives", lambda pid: pid in living)

    class Os:
        def __getattr__(self, name: str) -> object:
            return getpid if name == "getpid" else getattr(os, name)

    monkeypatch.setattr(common_counters, "os", Os())
    yield living


def counters(folder: Path) -> Counters:
    return Counters(folder / "counters", FileLock(folder / "lock"))


def counted(made: Counters) -> dict[str, int]:
    """What was counted at all."""
    counts = made.statistics()
    return {name: counts[name] for name in NAMES if counts[name]}


def test_a_new_file(tmp_path: Path) -> None:
    made = counters(tmp_path)
    assert counted(made) == {}
    assert stat.S_IMODE((tmp_path / "counters").stat().st_mode) == 0o600


def test_each_process_counts_in_a_row_of_its_own(tmp_path: Path, pids: set[int]) -> None:
    one, two = counters(tmp_path), counters(tmp_path)
    one.row[HITS] += 3
    two.row[HITS] += 4
    two.row[MISSES] += 1
    for each in (one, two):
        assert counted(each) == {"hits": 7, "misses": 1}
    assert one.row[HITS] == 3


def test_counts_of_a_process_that_ended_are_kept(tmp_path: Path, pids: set[int]) -> None:
    one = counters(tmp_path)
    one.row[HITS] += 3
    pids.clear()
    two = counters(tmp_path)
    assert two.row[HITS] == 0
    two.row[HITS] += 1
    assert two.statistics()["hits"] == 4


def test_more_processes_than_rows(tmp_path: Path, pids: set[int]) -> None:
    made = [counters(tmp_path) for _ in range(module._ROWS + 2)]
    for each in made:
        each.row[HITS] += 1
    assert made[0].statistics()["hits"] == module._ROWS
    pids.clear()
    counters(tmp_path)
    assert made[0].statistics()["hits"] == module._ROWS


def test_a_child_counts_in_a_row_of_its_own(tmp_path: Path) -> None:
    made = counters(tmp_path)
    made.row[HITS] += 1
    pid = os.fork()
    if pid == 0:
        made.row[HITS] += 10
        os._exit(0 if made.row[HITS] == 10 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert made.row[HITS] == 1
    assert made.statistics()["hits"] == 11


@pytest.mark.parametrize("owner", [2**31, 2**63, 2**64 - 1, 2**22 + 1])
def test_a_row_of_no_process_is_taken(tmp_path: Path, owner: int) -> None:
    path = tmp_path / "counters"
    counters(tmp_path)
    with path.open("r+b") as file:
        file.seek(WORDS_OF_A_ROW * 8)
        file.write(struct.pack("<QQ", owner, 5))
    made = counters(tmp_path)
    assert made.statistics()["hits"] == 5
    assert made.row[HITS] == 0


def test_a_process_of_another_user_lives() -> None:
    assert common_counters.lives(1)
    assert common_counters.lives(os.getpid())


def test_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoordinatorError, match=r"counters: cannot be made: No space left"):
        counters(tmp_path)


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "counters").symlink_to(tmp_path / "other")
    with pytest.raises(CoordinatorError, match="cannot be made"):
        counters(tmp_path)
    assert not (tmp_path / "other").exists()


def test_read_without_taking_part(tmp_path: Path) -> None:
    made = counters(tmp_path)
    made.row[HITS] += 3
    before = (tmp_path / "counters").read_bytes()
    found = module.read(tmp_path / "counters")
    assert found["hits"] == 3
    assert found["processes"] == 1
    assert (tmp_path / "counters").read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"x" * 100])
def test_what_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "counters"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CoordinatorError, match=r"counters: "):
        module.read(path)


def test_a_refused_change_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        slot_count = 64

        def mark(self, *_: object, **__: object) -> None:
            raise CoordinatorError("it is away")

        def close(self) -> None:
            """Nothing is open."""

    made = counters(tmp_path)
    monkeypatch.setitem(node_cache.nodes, tmp_path, SimpleNamespace(counters=made))
    change_log.coordinators.set(tmp_path, Away())  # type: ignore[arg-type]
    try:
        with pytest.raises(CoordinatorError, match="away"):
            change_log.Changes(lambda: tmp_path).begin(["user-1"])
    finally:
        change_log.coordinators.forget(tmp_path)
    assert counted(made) == {"changes_refused": 1}
