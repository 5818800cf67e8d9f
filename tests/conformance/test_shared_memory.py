"""The shared memory coordinator: the suite, and what only real processes show."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("conformance.coordinator")

from conformance.coordinator import (  # noqa: E402
    PATIENCE,
    CoordinatorSuite,
    World,
    change,
    entry,
    some,
)
from keyfront.common.file_lock import FileLock  # noqa: E402
from keyfront.errors import CoordinatorError  # noqa: E402
from keyfront.middleware.tokens.coordinator import local as shared_memory  # noqa: E402
from keyfront.middleware.tokens.coordinator.local import DIRTY, NAME, SharedMemory, Table  # noqa: E402
from keyfront.middleware.tokens.epochs import MARK_SECONDS  # noqa: E402
from support.clocks import Clock  # noqa: E402

SLOTS = 1024


class Node:
    """A folder, and processes that share the table in it."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock

    def attach(self, **options: Any) -> SharedMemory:
        return SharedMemory(self.folder, slot_count=SLOTS, **options)

    def later(self, seconds: float) -> None:
        self._clock.later(seconds)

    def lose(self) -> None:
        (self.folder / NAME).unlink()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(runs=True)
    monkeypatch.setattr(shared_memory, "time", clock)
    return clock


class TestSharedMemory(CoordinatorSuite):
    @pytest.fixture
    def world(self, tmp_path: Path, clock: Clock) -> World:
        return Node(tmp_path / "epochs", clock)


class Child:
    """A forked process that calls a function and ends; its traceback goes to standard error."""

    def __init__(self, function: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # some tests have threads
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def status(self) -> int:
        """How it ended; it is killed if it does not."""
        pidfd = os.pidfd_open(self.pid)
        try:
            if not select.select([pidfd], [], [], PATIENCE)[0]:
                os.kill(self.pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def hand_over(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b".")


def await_hand_over(pipe: tuple[int, int]) -> None:
    assert select.select([pipe[0]], [], [], PATIENCE)[0]
    os.read(pipe[0], 1)


@pytest.fixture
def pipes() -> Iterator[Callable[[], tuple[int, int]]]:
    made: list[int] = []

    def make() -> tuple[int, int]:
        pipe = os.pipe()
        made.extend(pipe)
        return pipe

    yield make
    for fd in made:
        os.close(fd)


def table_of(folder: Path) -> Table:
    return Table(words_of(folder))


def words_of(folder: Path) -> memoryview:
    with open(folder / NAME, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


def settled(folder: Path) -> SharedMemory:
    """A table in which changes may begin at once, without a wait or another clock."""
    coordinator = SharedMemory(folder, slot_count=SLOTS)
    mapped = words_of(folder)
    words = mapped.cast("Q")
    words[5] = 1
    mapped[96:112] = Table._digest(mapped)
    words.release()
    assert Table.fault(mapped) is None
    mapped.release()
    return coordinator


CHANGE = """
import random, sys
from pathlib import Path
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import Slots
coordinator = SharedMemory(Path(sys.argv[1]), create=False)
dice = random.Random(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    mark = coordinator.mark(Slots(dice.sample(range(100, 140), 5)))
    coordinator.stamp(mark)
"""


def test_interpreters_of_their_own_keep_the_table_valid(tmp_path: Path) -> None:
    folder = tmp_path / "epochs"
    coordinator = settled(folder)
    processes, changes = 4, 150
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", CHANGE, folder, str(number), str(changes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdin is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
        for writer in writers:
            writer.communicate(timeout=PATIENCE)
            assert writer.returncode == 0
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert Table.fault(words_of(folder)) is None
    counts = coordinator.statistics()
    assert counts["changes"] == processes * changes
    assert counts["sequence"] == 2 + processes * changes
    assert counts["changes_under_way"] == counts["changes_recovered"] == 0
    assert DIRTY not in table_of(folder).values.tolist()
    assert coordinator.fresh(coordinator.now(), entry(*range(40)))


def test_no_process_is_shown_what_another_has_changed(tmp_path: Path, pipes: Callable) -> None:
    """Three writers raise versions in memory that five readers keep answers of."""
    folder = tmp_path / "epochs"
    settled(folder)
    tags = 3
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    committed, told, hits, over = 0, 100, 200, 300
    guard = tmp_path / "guard"
    started = pipes()

    def write(seed: int) -> None:
        coordinator = SharedMemory(folder, create=False)
        lock, dice = FileLock(guard), random.Random(seed)
        for _ in range(150):
            tag = dice.randrange(tags)
            mark = coordinator.mark(some(tag))
            with lock:
                shared[committed + tag] += 1
                version = shared[committed + tag]
            coordinator.stamp(mark)
            with lock:
                shared[told + tag] = max(shared[told + tag], version)

    def read(seed: int) -> None:
        coordinator = SharedMemory(folder, slot_count=SLOTS)
        dice = random.Random(seed)
        kept = {}
        hand_over(started)
        while not shared[over]:
            tag = dice.randrange(tags)
            least = shared[told + tag]
            if tag in kept and coordinator.fresh(kept[tag][0], entry(tag)):
                assert kept[tag][1] >= least
                shared[hits + seed] += 1
            else:
                epoch = coordinator.now()
                kept[tag] = epoch, shared[committed + tag]

    readers = [Child(lambda seed=seed: read(seed)) for seed in range(5)]
    for _ in readers:
        await_hand_over(started)
    writers = [Child(lambda seed=seed: write(seed)) for seed in range(3)]
    ends = [writer.status() for writer in writers]
    shared[over] = 1
    ends += [reader.status() for reader in readers]
    assert ends == [0] * 8
    assert sum(shared[hits : hits + 5]) > 0
    assert Table.fault(words_of(folder)) is None


@pytest.mark.parametrize("deed", ["change", "touch"])
def test_killed_writers_leave_nothing_that_cannot_be_recovered(
    tmp_path: Path, clock: Clock, pipes: Callable, deed: str
) -> None:
    folder = tmp_path / "epochs"
    survivor = settled(folder)
    dice = random.Random(deed)

    def write(ready: tuple[int, int]) -> None:
        coordinator = SharedMemory(folder, slot_count=SLOTS)
        hand_over(ready)
        while True:
            if deed == "change":
                coordinator.stamp(coordinator.mark(some(1, 2, 3, 4)))
            else:
                coordinator.touch(some(1, 2, 3, 4))

    for _ in range(30):
        ready = pipes()
        epoch = survivor.now()
        begun = survivor.statistics()["changes"]
        child = Child(lambda ready=ready: write(ready))
        await_hand_over(ready)
        time.sleep(dice.random() * 0.003)
        child.kill()
        # Its lock went with it: to wait in vain for that would be an error.
        found = SharedMemory(folder, create=False)
        # One of them at least was complete: of a touch that was not, nobody was told.
        complete = survivor.statistics()["changes"] > begun + 1
        if complete:
            assert not survivor.fresh(epoch, entry(1, 2, 3, 4))
        clock.later(MARK_SECONDS + 1)
        assert found.recover() <= 1
        table = table_of(folder)
        assert DIRTY not in table.values.tolist()
        assert survivor.statistics()["changes_under_way"] == 0
        assert survivor.fresh(survivor.now(), entry(1, 2, 3, 4))
        if complete or (deed == "change" and survivor.now() != epoch):
            assert not survivor.fresh(epoch, entry(1, 2, 3, 4))
        change(survivor, some(1))
        assert found.fresh(found.now(), entry(1))


def test_the_kernel_lets_go_of_the_lock_of_who_is_killed(
    tmp_path: Path, pipes: Callable
) -> None:
    path, locked = tmp_path / "lock", pipes()

    def hold() -> None:
        with FileLock(path):
            hand_over(locked)
            signal.pause()

    child = Child(hold)
    await_hand_over(locked)
    lock = FileLock(path)
    assert not lock.attempt()
    child.kill()
    with lock:  # to wait in vain for it would be an error
        pass


def test_a_stopped_holder_is_an_error_in_time(
    tmp_path: Path, pipes: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "epochs"
    coordinator = settled(folder)
    locked = pipes()

    def hold() -> None:
        with FileLock(folder / "lock"):
            hand_over(locked)
            signal.pause()

    child = Child(hold)
    await_hand_over(locked)
    monkeypatch.setattr(coordinator._lock, "_seconds", 0.05)
    try:
        epoch = coordinator.now()
        for deed in (coordinator.mark, coordinator.touch):
            with pytest.raises(CoordinatorError, match="a process that holds it is stopped"):
                deed(some(1))
        assert coordinator.fresh(epoch, entry(1))
    finally:
        child.kill()
    change(coordinator, some(1))


def test_a_child_forked_while_a_thread_holds_the_lock(tmp_path: Path, pipes: Callable) -> None:
    folder = tmp_path / "epochs"
    coordinator = settled(folder)
    held, forked, done = threading.Event(), pipes(), threading.Event()

    def hold() -> None:
        with coordinator._lock:
            held.set()
            await_hand_over(forked)
        done.set()

    def child() -> None:
        hand_over(forked)
        change(coordinator, some(1))
        assert coordinator.fresh(coordinator.now(), entry(1))

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    epoch = coordinator.now()
    assert Child(child).status() == 0
    thread.join(PATIENCE)
    assert done.is_set()
    assert not coordinator.fresh(epoch, entry(1))
    change(coordinator, some(1))


def test_a_child_does_not_keep_the_lock_of_a_parent_who_is_killed(
    tmp_path: Path, pipes: Callable
) -> None:
    path, ready, end = tmp_path / "lock", pipes(), pipes()

    def grandchild() -> None:
        hand_over(ready)
        select.select([end[0]], [], [], PATIENCE)

    def parent() -> None:
        lock = FileLock(path)
        with lock:
            Child(grandchild)
            signal.pause()

    child = Child(parent)
    await_hand_over(ready)
    child.kill()
    try:
        with FileLock(path):  # to wait in vain for it would be an error
            pass
    finally:
        os.write(end[1], b".")


def test_a_child_uses_the_table_of_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "epochs"
    coordinator = settled(folder)
    epoch = coordinator.now()

    def child() -> None:
        assert coordinator.fresh(epoch, entry(1))
        change(coordinator, some(1))

    assert Child(child).status() == 0
    assert not coordinator.fresh(epoch, entry(1))
    assert coordinator.fresh(epoch, entry(2))
    assert coordinator.statistics()["changes"] == 1


def test_processes_keep_each_other_out_when_folder_and_lock_are_made_anew(
    tmp_path: Path, pipes: Callable
) -> None:
    """One who still has the removed lock open must lock the new one, or both would write."""
    folder = tmp_path / "epochs"
    old = settled(folder)
    change(old, some(1))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    new = settled(folder)
    locked = pipes()
    release = pipes()

    def hold() -> None:
        with new._lock:
            hand_over(locked)
            await_hand_over(release)

    child = Child(hold)
    await_hand_over(locked)
    entered = threading.Event()

    def enter() -> None:
        with contextlib.suppress(CoordinatorError), old._lock:
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    try:
        assert not entered.wait(0.05)
    finally:
        hand_over(release)
        assert child.status() == 0
        thread.join(PATIENCE)
    assert entered.is_set()


def test_words_of_the_header_that_these_tests_set(tmp_path: Path) -> None:
    """``settled`` above knows the layout: where the digest is, and when changes may begin."""
    folder = tmp_path / "epochs"
    coordinator = settled(folder)
    assert table_of(folder).settled == 1
    assert struct.unpack_from("<8s", words_of(folder))[0] == b"keyfront"
    assert coordinator.now().sequence == 2  # the mark with which it begins is over
