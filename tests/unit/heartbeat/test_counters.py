"""The counts of the heartbeat: files that others damage, folders that others made, lateness."""

from __future__ import annotations

import dis
import errno
import fcntl
import json
import math
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keyfront.common import process
from keyfront.errors import HeartbeatError
from keyfront.gateway.heartbeat import counters as module
from keyfront.gateway.heartbeat.counters import (
    BEATS,
    CONNECTIONS,
    NAMES,
    RECONNECTIONS,
    Counts,
    default_folder,
    read_all,
)

NOBODY = 2**22 + 1  # above the highest number that Linux gives to a process
MAGIC, PID, STARTED, NAMESPACE, TEXT, ROW = 0, 1, 2, 3, 4, 8
TEXT_START, TEXT_SIZE = 512, 2048


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "counts"


@pytest.fixture
def counts(folder: Path) -> Iterator[Counts]:
    made = Counts(folder)
    yield made
    made.close()


def crafted(
    folder: Path,
    name: str,
    words: dict[int, int] | None = None,
    *,
    text: bytes | None = None,
    size: int | None = None,
) -> Path:
    """A file like that of this process, but for some words."""
    folder.mkdir(mode=0o700, exist_ok=True)
    own = Counts(folder)
    assert own.path is not None
    data = bytearray(own.path.read_bytes())
    own.close()
    view = memoryview(data).cast("Q")
    if text is not None:
        data[TEXT_START : TEXT_START + len(text)] = text
        view[TEXT] = zlib.crc32(text) << 32 | len(text)
    for place, word in (words or {}).items():
        view[place] = word
    path = folder / name
    path.write_bytes(bytes(data)[:size])
    return path


def pids(folder: Path) -> list[int]:
    return [one["pid"] for one in read_all([folder])]


# what is counted


def test_what_is_counted_is_read_by_others(counts: Counts, folder: Path) -> None:
    counts.row[BEATS] += 5
    counts.row[CONNECTIONS] += 2
    counts.row[CONNECTIONS] -= 1
    counts.row[RECONNECTIONS] += 1
    counts.late(0.003)
    counts.describe(command="nova-api", unsafe=["threads"])
    (found,) = read_all([folder])
    assert {name: found[name] for name in NAMES if found[name]} == {
        "beats": 5,
        "connections": 1,
        "reconnections": 1,
    }
    assert (found["command"], found["unsafe"]) == ("nova-api", ["threads"])
    assert (found["pid"], found["uid"]) == (os.getpid(), os.geteuid())
    assert found["path"] == str(counts.path)
    own = counts.statistics()
    assert own == {name: found[name] for name in own}
    assert own.keys() >= {*NAMES, "lateness_worst", "lateness_p99", "command", "unsafe"}


def test_each_name_has_its_place() -> None:
    for place, name in enumerate(NAMES):
        assert getattr(module, name.upper()) == place


def test_files_of_mode_0600_in_a_folder_of_mode_0700(counts: Counts, folder: Path) -> None:
    assert counts.path == folder / f"{os.getpid()}.counts"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(counts.path.stat().st_mode) == 0o600


def test_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Counts(None)
    made.row[BEATS] += 1
    made.late(0.5)
    made.describe(server="uwsgi")
    said = made.statistics()
    assert (said["beats"], said["lateness_worst"], said["server"]) == (1, 0.5, "uwsgi")
    assert made.path is None
    made.close()
    made.row[BEATS] += 1
    assert made.statistics()["beats"] == 2
    assert list(tmp_path.iterdir()) == []


def test_closed(counts: Counts, folder: Path) -> None:
    counts.close()
    assert list(folder.iterdir()) == []
    counts.row[BEATS] += 1  # the native thread may be at it yet
    counts.late(1)
    counts.close()
    assert counts.statistics()["beats"] == 1


def test_a_child_that_ends_leaves_the_file(
    counts: Counts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "getpid", lambda: NOBODY)
    counts.close()
    assert list(folder.iterdir()) == [counts.path]


def test_a_child_lets_go_of_the_lock(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = counts._lock
    assert lock is not None
    monkeypatch.setattr(module.os, "getpid", lambda: NOBODY)
    counts.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(lock)


def test_another_file_under_the_number_of_the_lock_stays_open(
    counts: Counts, tmp_path: Path
) -> None:
    """As in a daemon that closed all descriptors."""
    assert counts._lock is not None
    with (tmp_path / "other").open("w") as other:
        os.dup2(other.fileno(), counts._lock)
        again, lock = os.fstat(other.fileno()), counts._lock
        counts.close()
        assert os.path.samestat(os.fstat(lock), again)
    os.close(lock)


def test_a_process_is_known_by_its_name_and_not_its_arguments(
    counts: Counts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path("/proc/self/comm").read_text().strip()
    assert (
        [one["command"] for one in read_all([folder])] == [name] == [counts.statistics()["command"]]
    )

    def refused(self: Path, **_: object) -> str:
        raise OSError

    monkeypatch.setattr(module.Path, "read_text", refused)
    assert Counts(None).statistics()["command"] == ""


def test_a_later_one_of_this_process_is_not_removed_by_the_first(
    counts: Counts, folder: Path
) -> None:
    second = Counts(folder)
    second.row[BEATS] += 7
    assert second.path == counts.path
    counts.close()
    assert [one["beats"] for one in read_all([folder])] == [7]
    second.close()


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"keyfront-heartbeat-{os.geteuid()}"
    assert default_folder() == Path("/dev/shm") / name
    monkeypatch.setattr(module.Path, "is_dir", lambda self: False)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_folder() == tmp_path / name


# lateness

SECONDS = st.one_of(
    st.floats(min_value=0, max_value=100),
    st.integers(0, 45).map(lambda bits: 2**bits / 1e6),
    st.floats(allow_nan=True, allow_infinity=True),
)


@given(st.lists(SECONDS, max_size=300))
@example([0.0])
@example([0.001] * 99 + [1.0])
@example([0.001] * 98 + [1.0] * 2)
@example([math.inf, -1.0, math.nan])
def test_worst_and_p99(lateness: list[float]) -> None:
    counts = Counts(None)
    for seconds in lateness:
        counts.late(seconds)
    found = counts.statistics()
    micros = sorted(
        0 if math.isnan(one) else int(min(max(one, 0.0), 1e6) * 1e6 + 0.5) for one in lateness
    )
    if not micros:
        assert (found["lateness_worst"], found["lateness_p99"]) == (0.0, 0.0)
        return
    exact = micros[math.ceil(0.99 * len(micros) - 1e-9) - 1]
    bound = 1
    while bound <= exact:
        bound *= 2
    assert found["lateness_worst"] == micros[-1] / 1e6
    assert found["lateness_p99"] == min(bound, micros[-1]) / 1e6
    assert sum(counts.row[len(NAMES) + 1 :]) == len(lateness)


def test_late_calls_nothing_that_could_be_patched() -> None:
    code = Counts.late.__code__
    used = {name: vars(module)[name] for name in code.co_names if name in vars(module)}
    assert {type(value) for value in used.values()} <= {int, float}
    made = [one.opname for one in dis.get_instructions(code) if one.opname.startswith("BUILD_")]
    assert made == []
    counts = Counts(None)
    seen = []

    def watch(frame: object, event: str, what: object) -> None:
        if event == "call" or (event == "c_call" and what is not sys.setprofile):
            seen.append(getattr(what, "__name__", None) or getattr(frame, "f_code").co_name)  # noqa: B009

    sys.setprofile(watch)
    try:
        counts.late(0.25)
    finally:
        sys.setprofile(None)
    assert set(seen) <= {"late", "bit_length"}


def test_late_leaves_nothing_behind(counts: Counts) -> None:
    def left() -> int:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            counts.late(0.25)
        return sys.getallocatedblocks() - before

    # the least of some: a thread that another test has left may leave more
    assert min(left() for _ in range(5)) < 20


def test_late_in_a_damaged_file_does_not_raise(counts: Counts) -> None:
    counts.row[:] = memoryview(b"\xff" * 8 * len(counts.row)).cast("Q")
    counts.late(0.25)


# folders


def refusal(folder: Path) -> str:
    with pytest.raises(HeartbeatError) as caught:
        Counts(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def test_a_folder_that_is_a_symlink(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "mine")
    assert "is not a folder" in refusal(folder)
    assert list((tmp_path / "mine").iterdir()) == []
    crafted(tmp_path / "mine", "1.counts")
    assert pids(tmp_path / "mine") == [os.getpid()]
    assert pids(folder) == []


def test_a_folder_that_is_a_file(folder: Path) -> None:
    folder.touch()
    assert "File exists" in refusal(folder)
    assert read_all([folder]) == []


def test_a_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(module.os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert f"belongs to the user {folder.stat().st_uid}" in refusal(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750, 0o701, 0o1777])
def test_a_folder_that_others_can_enter(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    assert f"has the mode {mode:04o} instead of 0700" in refusal(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    folder.touch()
    assert "Not a directory" in refusal(folder / "below")


def test_a_full_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in refusal(folder)
    assert list(folder.iterdir()) == []


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", none_left)
    assert "No locks available" in refusal(folder)
    assert list(folder.iterdir()) == []


def test_something_else_in_place_of_the_file(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    name = f"{os.getpid()}.counts"
    (tmp_path / "precious").write_text("mine")
    (folder / name).symlink_to(tmp_path / "precious")
    made = Counts(folder)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (folder / name).is_symlink()
    made.close()
    (folder / name).mkdir()
    refusal(folder)


# processes that ended


def test_a_file_of_a_process_that_ended_is_removed(folder: Path) -> None:
    path = crafted(folder, f"{NOBODY}.counts", {PID: NOBODY})
    assert pids(folder) == []
    assert path.exists()  # looking removes nothing
    made = Counts(folder)
    assert not path.exists()
    assert pids(folder) == [os.getpid()]
    made.close()


def test_a_number_that_another_process_has_now(folder: Path) -> None:
    other = os.getppid()
    path = crafted(folder, f"{other}.counts", {PID: other, STARTED: 1})
    assert pids(folder) == []
    made = Counts(folder)
    assert not path.exists()
    made.close()


def test_the_own_number_had_by_one_that_ended(folder: Path) -> None:
    path = crafted(folder, f"{os.getpid()}.counts", {STARTED: 1, ROW + BEATS: 99})
    made = Counts(folder)
    assert made.path == path
    assert [one["beats"] for one in read_all([folder])] == [0]
    made.close()


def test_another_process_that_lives_is_left(folder: Path) -> None:
    other = os.getppid()
    started = module.started(other)
    assert started
    path = crafted(folder, f"{other}.counts", {PID: other, STARTED: started})
    made = Counts(folder)
    assert path.exists()
    assert sorted(pids(folder)) == sorted([other, os.getpid()])
    made.close()


def test_a_zombie_is_a_process_that_ended(
    counts: Counts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Path(f"/proc/{os.getpid()}/stat").read_bytes().rpartition(b") ")[2]

    class Stat:
        def __enter__(self) -> Stat:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, size: int) -> bytes:
            return b"7 (a) S (b)) Z" + state[1:]

    monkeypatch.setattr(process, "open", lambda *_, **__: Stat(), raising=False)
    assert pids(folder) == []


def test_a_process_that_proc_does_not_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid: the lock tells."""

    def kill(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(module.os, "kill", kill)
    path = crafted(folder, f"{NOBODY}.counts", {PID: NOBODY})
    assert pids(folder) == []
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert pids(folder) == [NOBODY]


def test_containers_that_share_the_folder(folder: Path) -> None:
    """The same number in another PID namespace is another process, which lives by its lock."""
    here = module._namespace()
    theirs = crafted(folder, f"{os.getpid()}.counts", {NAMESPACE: here + 1, ROW + BEATS: 3})
    with theirs.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = Counts(folder)
        assert made.path == folder / f"{os.getpid()}-{here}.counts"
        made.row[BEATS] += 4
        assert sorted(one["beats"] for one in read_all([folder])) == [3, 4]
        made.close()
        assert list(folder.iterdir()) == [theirs]
    assert pids(folder) == []
    made = Counts(folder)
    assert made.path == theirs
    assert [one["beats"] for one in read_all([folder])] == [0]
    made.close()


def test_a_file_that_another_container_is_making_is_left(folder: Path) -> None:
    path = crafted(folder, f"{NOBODY}.counts", {MAGIC: 0})
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Counts(folder).close()
        assert path.exists()
    Counts(folder).close()
    assert not path.exists()


def test_what_is_none_of_ours_is_left(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes").touch()
    (folder / "x.counts").mkdir()
    (folder / "y.counts").symlink_to(folder / "notes")
    made = Counts(folder)
    assert pids(folder) == [os.getpid()]
    made.close()
    assert {one.name for one in folder.iterdir()} == {"notes", "x.counts", "y.counts"}


# files


@pytest.mark.parametrize("size", [0, 1, 8, 511, TEXT_START, TEXT_START + TEXT_SIZE - 1])
def test_a_truncated_file(folder: Path, size: int) -> None:
    crafted(folder, f"{os.getpid()}.counts", size=size)
    assert pids(folder) == []


def test_a_longer_file(folder: Path) -> None:
    path = crafted(folder, "1.counts")
    path.write_bytes(path.read_bytes() + b"x")
    assert pids(folder) == []


def test_a_link_to_a_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = crafted(folder, "1.counts")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "1.counts").symlink_to(path)
    assert pids(folder) == [os.getpid()]
    assert pids(other) == []


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (MAGIC, 0),
        (MAGIC, 2**64 - 1),
        (PID, 0),
        (PID, NOBODY),
        (PID, 2**64 - 1),
        (STARTED, 0),
        (TEXT, 2**64 - 1),
        (TEXT, 1),
        (TEXT, TEXT_SIZE + 1),
    ],
)
def test_a_damaged_word(folder: Path, place: int, word: int) -> None:
    crafted(folder, "1.counts", {place: word})
    assert pids(folder) == []


def test_a_file_of_another_version_is_skipped_and_left(folder: Path) -> None:
    path = crafted(folder, "1.counts")
    assert pids(folder) == [os.getpid()]
    data = bytearray(path.read_bytes())
    version = data.index(b"\x02", 0, 8)  # at the one end or at the other
    data[version] = 1
    path.write_bytes(data)
    assert pids(folder) == []
    made = Counts(folder)
    assert path.exists()  # process 1 lives
    made.close()
    path = path.rename(folder / f"{NOBODY}.counts")
    Counts(folder).close()
    assert not path.exists()


def test_a_pipe_does_not_block(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "1.counts")
    assert read_all([folder]) == []


@pytest.mark.parametrize(
    "text",
    [b" ", b"[]", b"{", b"null", b"\xff\xfe", b'{"unsafe": "x"}', b"[" * 2000, b'{"unsafe": {}}'],
)
def test_text_that_is_none(folder: Path, text: bytes) -> None:
    crafted(folder, "1.counts", text=text)
    assert pids(folder) == []


def test_text_of_another_checksum(folder: Path) -> None:
    text = b'{"command": "x"}'
    crafted(folder, "1.counts", {TEXT: (zlib.crc32(text) ^ 1) << 32 | len(text)}, text=text)
    assert pids(folder) == []


def test_long_text_is_cut_by_the_reader(folder: Path) -> None:
    crafted(folder, "1.counts", text=b'{"command": "' + b"x" * 2000 + b'"}')
    assert [len(one["command"]) for one in read_all([folder])] == [400]


def test_text_cannot_take_the_place_of_a_count(folder: Path) -> None:
    said = dict.fromkeys((*NAMES, "pid", "uid", "path", "lateness_worst"), "text")
    path = crafted(folder, "1.counts", {ROW + BEATS: 6}, text=json.dumps(said).encode())
    (found,) = read_all([folder])
    assert (found["beats"], found["pid"], found["uid"]) == (6, os.getpid(), os.geteuid())
    assert found["path"] == str(path)
    assert "text" not in found.values()


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\u202eexe\x00\ud800" + "x" * 500


def test_text_is_made_harmless(counts: Counts, folder: Path) -> None:
    counts.describe(command=HOSTILE, unsafe=[HOSTILE, "plain"], **{HOSTILE[:9]: "x"})
    (found,) = read_all([folder])
    texts = [found["command"], *found["unsafe"], *found]
    assert all(text.isprintable() and len(text) <= 400 for text in texts)
    assert found["unsafe"][1] == "plain"
    assert found["command"].startswith("?[2J?]0;owned? ?exe??")


TEXTS = st.text(st.characters(), max_size=3000)


@given(st.dictionaries(st.sampled_from("abcde"), TEXTS | st.lists(TEXTS, max_size=20)))
@example({"a": "\U0001f600" * 3000, "b": ["\ud800" * 3000] * 20})
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_text_is_cut_to_fit(tmp_path: Path, said: dict[str, str | list[str]]) -> None:
    folder = tmp_path / "cut"
    counts = Counts(folder)
    try:
        row = counts.row.tolist()
        counts.describe(**said)
        (found,) = read_all([folder])
        assert counts.row.tolist() == row
        for name, value in said.items():
            assert type(found[name]) is type(value)
            if isinstance(value, str) and value.isascii() and value.isprintable():
                assert value.startswith(found[name].rstrip()) or " " in value
    finally:
        counts.close()


def test_what_was_said_before_stays(counts: Counts, folder: Path) -> None:
    counts.describe(command="a long command", server="uwsgi")
    counts.describe(command="b", unsafe=["x"])
    (found,) = read_all([folder])
    assert (found["command"], found["server"], found["unsafe"]) == ("b", "uwsgi", ["x"])


def test_text_that_is_being_written_is_waited_for(
    counts: Counts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts.describe(command="old")
    whole = counts._words[TEXT]
    counts._words[TEXT] = 2**64 - 1

    def written(seconds: float) -> None:
        counts._words[TEXT] = whole

    monkeypatch.setattr(module.time, "sleep", written)
    assert [one["command"] for one in read_all([folder])] == ["old"]


def test_folders_that_cannot_be_read(
    tmp_path: Path, counts: Counts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one["pid"] for one in read_all([tmp_path / "none", folder])] == [os.getpid()]

    def refused(path: Path) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(module.os, "listdir", refused)
    assert read_all([folder]) == []


def test_a_flood_of_files_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, counts: Counts
) -> None:
    monkeypatch.setattr(module.os, "listdir", lambda path: [f"{n}.counts" for n in range(10**5)])
    looked_at: list[Path] = []
    monkeypatch.setattr(module, "_living", looked_at.append)
    assert read_all([folder]) == []
    assert len(looked_at) == 4096
