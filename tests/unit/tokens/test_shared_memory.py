"""The file of the epoch table: what is refused, made anew, and noticed by those who had the old."""

from __future__ import annotations

import logging
import os
import random
import shutil
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator import local as module
from keyfront.middleware.tokens.coordinator.local import (
    LEASE_SECONDS,
    MARKS,
    NAME,
    WORD,
    SharedMemory,
    Table,
    size,
)
from keyfront.middleware.tokens.epochs import (
    ALL_SLOT,
    MARK_SECONDS,
    Epoch,
    Mark,
    Settling,
    Slots,
    View,
    slots,
)
from keyfront.middleware.tokens.folder import check_folder
from keyfront.middleware.tokens.invalidation.rules import FIXED, GRANTS_GROUP
from support.clocks import Clock

SLOTS = 1024
STRANGER = 12345
ENTRY = Slots([ALL_SLOT, 100])
CHANGED = Slots([100])

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path, clock: Clock) -> Path:
    return tmp_path / "epochs"


def attach(folder: Path, *, create: bool = True) -> SharedMemory:
    return SharedMemory(folder, create=create, slot_count=SLOTS)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# Made and attached to


def test_modes_do_not_go_by_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        attach(folder)
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == {NAME: 0o600, "lock": 0o600}


def test_made_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = attach(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / NAME}: made a new epoch table"
    ]
    caplog.clear()
    second = attach(folder)
    third = attach(folder, create=False)
    assert caplog.records == []
    assert first.now() == second.now() == third.now()
    assert first.secret == third.secret
    assert len(first.secret) == 32
    assert (folder / NAME).stat().st_size == size(SLOTS)


def test_its_room_is_reserved(folder: Path) -> None:
    attach(folder)
    found = (folder / NAME).stat()
    assert found.st_blocks * 512 >= found.st_size


def test_one_who_only_changes_makes_nothing(folder: Path) -> None:
    with pytest.raises(CoordinatorError, match="No such file"):
        attach(folder, create=False)
    assert not folder.exists()
    folder.mkdir(0o700)
    with pytest.raises(CoordinatorError):
        attach(folder, create=False)
    assert list(folder.iterdir()) == []
    (folder / "lock").touch(0o600)
    with pytest.raises(CoordinatorError, match=f"{NAME}: there is none"):
        attach(folder, create=False)
    assert [path.name for path in folder.iterdir()] == ["lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_takes_part_in_its_own_and_the_services_only(folder: Path) -> None:
    """Anybody may make a folder of that name, and could end root's process by cutting its file."""
    attach(folder)
    os.chown(folder, 65534, 65534)
    with pytest.raises(CoordinatorError, match="belongs to user 65534, and neither to root nor"):
        SharedMemory(folder, create=False, trusted={0, 1})
    SharedMemory(folder, create=False, trusted={0, 65534}).close()
    SharedMemory(folder, create=False).close()


def test_a_file_left_half_made_is_no_obstacle(folder: Path) -> None:
    check_folder(folder, make=True)
    (folder / f"{NAME}.new").write_bytes(b"x")
    attach(folder)
    assert not (folder / f"{NAME}.new").exists()


class WhileRead:
    """The slots of a table, of which some change before one of the fixed ones is read."""

    def __init__(self, values: memoryview, place: int, change: Callable[[], object]) -> None:
        self._values, self._place, self._change = values, place, change

    def __getitem__(self, part: slice) -> WhileRead:
        return self

    def tolist(self) -> list[int]:
        numbers = self._values[: self._place].tolist()
        self._change()
        return numbers + self._values[self._place : len(FIXED)].tolist()


@pytest.mark.parametrize("place", range(len(FIXED) + 1))
def test_a_change_amid_a_snapshot_is_not_seen_by_half(folder: Path, place: int) -> None:
    """Whoever reads them may stand still in between; what he then makes of values from before the
    change must not have its number."""
    writer, reader = attach(folder), attach(folder)
    changed = slots({"any", "content", "grants", GRANTS_GROUP}, SLOTS)
    writer.stamp(writer.mark(changed))
    before = reader.now()

    def change() -> None:
        # A group's last grant, and then somebody's token.
        writer.stamp(writer.mark(changed))
        writer.stamp(writer.mark(slots({"any", "revocations"}, SLOTS)))

    table = reader._table
    assert table is not None
    table.values = WhileRead(table.values, place, change)  # type: ignore[assignment]
    view = View.of(reader, Settling(0))
    for slot in changed:
        if view.numbers[slot] <= before.sequence:
            assert not writer.fresh(view.settled, Slots([slot]))
    assert view.settled <= writer.now()


# Refused


def empty(path: Path) -> None:
    path.write_bytes(b"")


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def truncated(path: Path) -> None:
    os.truncate(path, size(SLOTS) - 4096)


def cut_within_a_word(path: Path) -> None:
    os.truncate(path, size(SLOTS) - 3)


def longer(path: Path) -> None:
    os.truncate(path, size(SLOTS) + 8)


def foreign(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(size(SLOTS)))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(size(SLOTS)))


def header(path: Path) -> None:
    poke(path, 8 * WORD, b"another secret")


def slot(path: Path) -> None:
    poke(path, size(SLOTS) - WORD, struct.pack("<Q", 1))


def newer_slot(path: Path) -> None:
    poke(path, size(SLOTS) - WORD, struct.pack("<Q", 99))


def layout(path: Path) -> None:
    poke(path, WORD, struct.pack("<Q", 99))


def readable(path: Path) -> None:
    path.chmod(0o644)


def writable(path: Path) -> None:
    path.chmod(0o620)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


DAMAGE = [
    (empty, "it is empty"),
    (short, "it is too short"),
    (truncated, f"it has {size(SLOTS) - 4096} bytes instead of {size(SLOTS)}"),
    (cut_within_a_word, "it ends within a word"),
    (longer, f"it has {size(SLOTS) + 8} bytes instead of {size(SLOTS)}"),
    (foreign, "it is no epoch table"),
    (zeros, "it is no epoch table"),
    (header, "its header was changed"),
    (slot, "its slots do not match their checksum"),
    (newer_slot, "a slot is newer than the table"),
    (layout, "it has layout 99, this keyfront uses 2"),
    (readable, "others may read or write it; its mode must be 0600"),
    (writable, "others may read or write it; its mode must be 0600"),
    (link, "it is a symbolic link"),
    (fifo, "it is no file"),
    pytest.param(given_away, "it belongs to another user", marks=needs_root),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_refused_and_made_anew(
    folder: Path, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = attach(folder)
    old = before.now()
    before.close()
    damage(folder / NAME)
    with pytest.raises(CoordinatorError) as caught:
        attach(folder, create=False)
    assert str(caught.value) == f"{folder / NAME}: {reason}"
    assert warnings_of(caplog) == [f"{folder / NAME}: refused, {reason}"]
    caplog.clear()
    anew = attach(folder)
    assert warnings_of(caplog) == [f"{folder / NAME}: refused, {reason}"]
    assert anew.now().generation != old.generation
    assert not anew.fresh(old, ENTRY)
    assert anew.fresh(anew.now(), ENTRY)
    assert mode(folder / NAME) == 0o600
    assert (folder / NAME).lstat().st_uid == os.geteuid()
    assert not (folder / NAME).is_symlink()
    attach(folder, create=False)
    assert len(warnings_of(caplog)) == 1


def test_zeros_do_not_say_that_nothing_has_changed(folder: Path) -> None:
    worker = attach(folder)
    epoch = worker.now()
    worker._looked = time.monotonic_ns() + 10**12  # just now, so that it does not look again
    poke(folder / NAME, 0, bytes(size(SLOTS)))
    assert not worker.fresh(epoch, ENTRY)
    with pytest.raises(CoordinatorError, match="its header was changed"):
        worker.snapshot()


def test_what_a_link_pointed_to_is_left_alone(folder: Path) -> None:
    attach(folder).close()
    target = folder.parent / "target"
    target.write_text("precious")
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(target)
    attach(folder)
    assert target.read_text() == "precious"


def test_of_another_boot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = attach(folder).now()
    monkeypatch.setattr(module, "boot_word", lambda: 1)
    with pytest.raises(CoordinatorError, match="it is from before the machine started"):
        attach(folder, create=False)
    caplog.clear()
    assert attach(folder).now().generation != old.generation
    assert warnings_of(caplog) == [
        f"{folder / NAME}: refused, it is from before the machine started"
    ]


def test_a_folder_in_its_place(folder: Path) -> None:
    attach(folder).close()
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    for create in (True, False):
        with pytest.raises(CoordinatorError, match=f"{NAME}: "):
            attach(folder, create=create)


@pytest.mark.parametrize("bits", [0o701, 0o710, 0o750, 0o755, 0o777])
def test_a_folder_open_to_others_is_refused(folder: Path, bits: int) -> None:
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(CoordinatorError, match="others may enter it; its mode must be 0700"):
        attach(folder)
    assert list(folder.iterdir()) == []


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, STRANGER, -1)
    with pytest.raises(CoordinatorError, match=f"belongs to user {STRANGER}, not to this"):
        attach(folder)
    assert list(folder.iterdir()) == []


@needs_root
def test_root_takes_part_in_the_table_of_a_service(folder: Path) -> None:
    worker = attach(folder)
    for path in (folder, *folder.iterdir()):
        os.chown(path, STRANGER, -1)
    before = worker.now()
    manage = attach(folder, create=False)
    manage.stamp(manage.mark(CHANGED))
    assert not worker.fresh(before, ENTRY)
    assert {path.stat().st_uid for path in folder.iterdir()} == {STRANGER}


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    other = folder.with_name("other")
    other.mkdir(0o700)
    folder.symlink_to(other)
    with pytest.raises(CoordinatorError, match="is no folder"):
        attach(folder)
    assert list(other.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    folder.write_text("x")
    with pytest.raises(CoordinatorError, match="is no folder"):
        attach(folder)


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    with pytest.raises(CoordinatorError, match="cannot be made: No such file"):
        attach(folder / "a" / "b")


def test_a_full_file_system_names_the_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoordinatorError) as caught:
        attach(folder)
    assert str(caught.value) == (
        f"{folder / NAME}: cannot be made: No space left on device; it needs {size(SLOTS)} bytes"
    )
    monkeypatch.undo()
    attach(folder).now()


# Lost or replaced while in use


def test_others_notice_a_new_file_within_the_lease(folder: Path, clock: Clock) -> None:
    one, two = attach(folder), attach(folder)
    old = one.now()
    clock.later(LEASE_SECONDS / 2)
    (folder / NAME).unlink()
    anew = attach(folder)
    assert anew.now().generation != old.generation
    clock.later(LEASE_SECONDS + 0.001)
    for each in (one, two):
        assert not each.fresh(old, ENTRY)
        assert each.now() == anew.now()


def test_a_lease_begins_before_the_look(folder: Path, clock: Clock) -> None:
    """Whoever has looked may stand still, while the folder is taken away with the lock in it."""
    stopped = attach(folder)
    old = stopped.now()
    look = stopped._is_mapped

    def then_stands_still() -> bool:
        found = look()
        stopped._is_mapped = look  # type: ignore[method-assign]
        shutil.rmtree(folder)
        writer = attach(folder)
        writer.stamp(writer.mark(CHANGED))
        return found

    stopped._is_mapped = then_stands_still  # type: ignore[method-assign]
    assert stopped.statistics()["changes"] == 0  # of the table that was there
    assert not stopped.fresh(old, ENTRY)


def test_no_change_begins_in_a_new_file_while_an_old_one_is_trusted(
    folder: Path, clock: Clock
) -> None:
    """The worst case: the old file was looked for just before it was replaced."""
    trusting = attach(folder)
    old = trusting.now()
    clock.later(10)
    assert trusting.fresh(old, ENTRY)  # its lease begins here
    (folder / NAME).unlink()
    writer = attach(folder)
    begun = clock.monotonic()
    assert trusting.fresh(old, ENTRY)  # nothing has changed yet
    mark = writer.mark(CHANGED)
    waited = clock.monotonic() - begun
    assert LEASE_SECONDS < waited <= 2 * LEASE_SECONDS + 0.01
    assert not trusting.fresh(old, ENTRY)
    assert not trusting.fresh(trusting.now(), ENTRY)
    writer.stamp(mark)
    assert trusting.fresh(trusting.now(), ENTRY)


def test_a_change_that_began_before_the_file_was_lost(folder: Path, clock: Clock) -> None:
    trusting, writer = attach(folder), attach(folder)
    clock.later(10)
    mark = writer.mark(CHANGED)
    old = trusting.now()
    (folder / NAME).unlink()
    attach(folder)
    writer.stamp(mark)
    # Who still trusts the old file finds the mark in it.
    assert not trusting.fresh(old, ENTRY)
    clock.later(1)
    assert trusting.fresh(trusting.now(), ENTRY)


def test_a_stamp_waits_for_those_who_trust_a_file_without_its_mark(
    folder: Path, clock: Clock
) -> None:
    """Lost twice during one change: the file between had neither its mark nor its stamp."""
    trusting, writer = attach(folder), attach(folder)
    clock.later(10)
    mark = writer.mark(CHANGED)
    (folder / NAME).unlink()
    between = attach(folder)
    filled = between.now()  # and read before the commit
    (folder / NAME).unlink()
    assert between.fresh(filled, ENTRY)
    writer.stamp(mark)
    assert not between.fresh(filled, ENTRY)
    clock.later(1)
    assert not trusting.fresh(filled, ENTRY)


@pytest.mark.parametrize("deed", ["touch", "flush"])
def test_what_needs_no_mark_waits_for_those_who_trust_an_older_file(
    folder: Path, clock: Clock, deed: str
) -> None:
    trusting = attach(folder)
    clock.later(10)
    old = trusting.now()
    (folder / NAME).unlink()
    writer = attach(folder)
    if deed == "touch":
        writer.touch(CHANGED)
    else:
        writer.flush()
    assert not trusting.fresh(old, ENTRY)


class Killed(BaseException):
    """Stands for SIGKILL."""


def _killed_in_a_touch(worker: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a writer when one of two slots is dirty, in a touch that has no mark."""
    step = Table._set

    def once(table: Table, slot: int, value: int) -> None:
        if slot != CHANGED[0]:
            raise Killed
        step(table, slot, value)

    with monkeypatch.context() as killed, pytest.raises(Killed):
        killed.setattr(Table, "_set", once)
        worker.touch(Slots([*CHANGED, CHANGED[0] + 1]))


def test_a_reader_completes_a_touch_whose_writer_was_killed(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mark tells of it, and nobody need ever write again."""
    reader, writer = attach(folder), attach(folder)
    clock.later(10)
    before = reader.now()
    _killed_in_a_touch(writer, monkeypatch)
    assert not reader.fresh(reader.now(), ENTRY)
    clock.later(1)
    assert not reader.fresh(before, ENTRY)
    assert reader.fresh(reader.now(), ENTRY)


def test_a_reader_does_not_fail_where_junk_is_in_such_a_touch(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = attach(folder), attach(folder)
    clock.later(10)
    _killed_in_a_touch(writer, monkeypatch)
    table = reader._table
    assert table is not None
    table._words[module._SEQUENCE] = 2**64 - 1
    clock.later(1)
    for _ in range(2):
        assert not reader.fresh(Epoch(table.generation, 1), ENTRY)
        clock.later(1)
    with pytest.raises(CoordinatorError, match="taken away"):
        writer.touch(CHANGED)
    writer.touch(CHANGED)


def test_one_who_only_changes_refuses_when_the_file_is_lost(folder: Path, clock: Clock) -> None:
    attach(folder)
    manage = attach(folder, create=False)
    (folder / NAME).unlink()
    with pytest.raises(CoordinatorError, match="there is none"):
        manage.mark(CHANGED)
    assert not (folder / NAME).exists()
    attach(folder)
    manage.stamp(manage.mark(CHANGED))


def test_it_steps_aside_with_one_line_until_mended(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = attach(folder)
    old = worker.now()
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    for _ in range(5):
        clock.later(LEASE_SECONDS + 0.1)
        assert not worker.fresh(old, ENTRY)
        for ask in (worker.now, worker.snapshot, lambda: worker.mark(CHANGED)):
            with pytest.raises(CoordinatorError):
                ask()
    (line,) = [text for text in warnings_of(caplog) if "steps aside" in text]
    assert line.startswith("the token cache steps aside until this is mended: ")
    (folder / NAME).rmdir()
    clock.later(LEASE_SECONDS + 0.1)
    assert worker.fresh(worker.now(), ENTRY)
    # The next time it is told again.
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    clock.later(LEASE_SECONDS + 0.1)
    assert not worker.fresh(old, ENTRY)
    assert len([text for text in warnings_of(caplog) if "steps aside" in text]) == 2


def test_the_whole_folder_is_removed_and_made_anew(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    old = worker.now()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    clock.later(LEASE_SECONDS + 0.1)
    assert not worker.fresh(old, ENTRY)
    # It made the folder anew: the service goes on.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    restarted = attach(folder)
    clock.later(LEASE_SECONDS + 0.1)
    assert worker.now() == restarted.now()
    before = worker.now()
    worker.stamp(worker.mark(CHANGED))
    assert not restarted.fresh(before, ENTRY)
    assert restarted.statistics()["changes"] == 1


def test_a_file_that_shrinks_is_not_looked_into(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    old = worker.now()
    clock.later(LEASE_SECONDS + 0.1)
    os.truncate(folder / NAME, 0)
    assert not worker.fresh(old, ENTRY)
    assert worker.now().generation != old.generation


def test_no_look_at_the_file_within_the_lease(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = attach(folder)
    epoch = worker.now()
    looks: list[object] = []
    stat_of = os.stat

    def counted(*arguments: object, **options: object) -> object:
        looks.append(arguments)
        return stat_of(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", counted)
    for _ in range(100):
        assert worker.fresh(epoch, ENTRY)
    assert looks == []
    clock.later(LEASE_SECONDS + 0.1)
    for _ in range(100):
        assert worker.fresh(epoch, ENTRY)
    assert len(looks) == 1


def test_a_file_that_took_too_long_to_make_is_not_used(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def slow(*arguments: object) -> None:
        clock.later(LEASE_SECONDS + 0.1)
        rename(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", slow)
    with pytest.raises(CoordinatorError, match="took too long to be made"):
        attach(folder)
    assert not (folder / NAME).exists()


def test_a_machine_that_stood_still_once_has_another_one_made(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, identities = os.rename, []

    def slow_once(source: Path, target: Path) -> None:
        if not identities:
            clock.later(LEASE_SECONDS + 0.1)
        rename(source, target)
        identities.append(os.stat(target).st_ino)

    monkeypatch.setattr(os, "rename", slow_once)
    worker = attach(folder)
    assert worker.fresh(worker.now(), ENTRY)
    # Of the first one nobody has learned.
    assert len(identities) == 2
    assert (folder / NAME).stat().st_ino == identities[-1]
    begun = clock.monotonic()
    worker.mark(CHANGED)
    assert clock.monotonic() - begun > LEASE_SECONDS, "from its own beginning on"


# Bounds


def test_too_many_changes_at_once_are_refused_in_time(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    marks = [worker.mark(Slots([100 + number])) for number in range(MARKS)]
    begun = clock.monotonic()
    with pytest.raises(CoordinatorError, match="too many changes are under way at once"):
        worker.mark(Slots([900]))
    assert clock.monotonic() - begun < 6
    worker.stamp(marks[3])
    worker.stamp(worker.mark(Slots([900])))


def test_abandoned_marks_make_room(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    for number in range(MARKS):
        worker.mark(Slots([100 + number]))
    clock.later(MARK_SECONDS + 1)
    worker.stamp(worker.mark(Slots([900])))
    assert worker.statistics()["changes_recovered"] == MARKS
    assert worker.fresh(worker.now(), Slots(range(SLOTS)))


def test_slots_of_a_larger_table_are_everything(folder: Path, clock: Clock) -> None:
    """Computed for a table that was lost since; in the new one they say nothing."""
    worker = attach(folder)
    for deed in (lambda: worker.stamp(worker.mark(Slots([SLOTS]))),
                 lambda: worker.touch(Slots([5, SLOTS + 7]))):  # fmt: skip
        before = worker.now()
        deed()
        assert not worker.fresh(before, ENTRY)
        assert worker.fresh(worker.now(), ENTRY)
    assert worker.statistics()["changes_under_way"] == 0


def test_recovery_is_told_once(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = attach(folder)
    worker.mark(CHANGED)
    clock.later(MARK_SECONDS + 1)
    assert not worker.fresh(worker.now(), ENTRY)  # this look is what completes it
    assert worker.fresh(worker.now(), ENTRY)
    assert worker.recover() == 0
    assert warnings_of(caplog) == [
        f"{folder / NAME}: completed 1 change(s) of writers that died"
    ]


def test_fresh_never_raises(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    worker.mark(CHANGED)
    for epoch in (Epoch(0, 0), Epoch(worker.now().generation, 0), Epoch(2**64, 2**64)):
        for path in list(folder.iterdir()):
            path.unlink()
        clock.later(MARK_SECONDS)
        assert worker.fresh(epoch, ENTRY) is False
    for path in list(folder.iterdir()):
        path.unlink()
    folder.rmdir()
    clock.later(MARK_SECONDS)
    assert worker.fresh(Epoch(1, 1), ENTRY) is False


def test_closed_amid_its_use_by_another_thread(folder: Path, clock: Clock) -> None:
    """Who holds the lock keeps it, whoever closes it meanwhile."""
    lock = FileLock(folder.with_name("a-lock"))
    with lock:
        fd = lock._fd
        os.fstat(fd)
    lock.close()
    assert lock._fd == -1
    lock.close()
    with lock:
        assert lock._fd >= 0
    lock.close()


def test_a_closed_coordinator_can_still_complete_its_change(folder: Path, clock: Clock) -> None:
    worker, other = attach(folder), attach(folder)
    mark = worker.mark(CHANGED)
    worker.close()
    worker.stamp(mark)
    assert other.fresh(other.now(), ENTRY)
    assert not worker.fresh(other.now(), ENTRY)
    with pytest.raises(CoordinatorError):
        worker.now()


def test_a_mark_of_another_table_touches_everything(folder: Path, clock: Clock) -> None:
    worker = attach(folder)
    before = worker.now()
    worker.stamp(Mark(before.generation + 1, 1, CHANGED))
    assert not worker.fresh(before, Slots([ALL_SLOT, 500]))
    assert worker.fresh(worker.now(), ENTRY)
