"""Counts of what the heartbeat did: one small file a process, which ``keyfront heartbeat status``
reads while the service runs (:mod:`keyfront.common.counters`).

The folder is best on tmpfs (``/dev/shm``): on a disk, a write to a mapped page may wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from keyfront.common.counters import CounterRow, words_in_memory
from keyfront.common.mmap_file import Mapped
from keyfront.common.process import started
from keyfront.errors import CoordinatorError, HeartbeatError

#: The names of the counts, in the order of the row.
NAMES: Final = (
    "connections",  # kept alive now
    "opened",  # kept alive in all
    "beats",  # heartbeats sent
    "flowing",  # heartbeats not sent because bytes were flowing
    "full",  # heartbeats not sent because the send buffer was full
    "stopped",  # connections no longer kept alive after a write that was interrupted
    "dead_peers",  # connections whose peer was found gone or silent
    "reconnections",  # connections that were replaced
    "failures",  # times the thread could not start, ended, or failed at a beat
    "expired",  # connections hung up that lay in a pool for longer than it keeps them
)
CONNECTIONS: Final = 0
OPENED: Final = 1
BEATS: Final = 2
FLOWING: Final = 3
FULL: Final = 4
STOPPED: Final = 5
DEAD_PEERS: Final = 6
RECONNECTIONS: Final = 7
FAILURES: Final = 8
EXPIRED: Final = 9

# Then the lateness in microseconds: the worst, and how many were of each length in bits.
_WORST: Final = len(NAMES)
_LENGTHS: Final = _WORST + 1
_LONGEST: Final = 40  # bits; twelve days
_LIMIT: Final = 1e6  # seconds; fits

# The file, in words of 8 bytes: what it is, whose it is, the row, and JSON text.
_LAYOUT: Final = int.from_bytes(b"kfbeat\x00\x02", "big")  # the last byte is the version
_MAGIC, _PID, _STARTED, _NAMESPACE, _TEXT = range(5)
_ROW: Final = 8
_ROW_WORDS: Final = 56
_TEXT_START: Final = (_ROW + _ROW_WORDS) * 8
_TEXT_SIZE: Final = 2048
_SIZE: Final = _TEXT_START + _TEXT_SIZE
_BEING_WRITTEN: Final = 2**64 - 1  # in place of the length and the checksum of the text

#: The beginning of a folder's name; the number of the user follows.
PREFIX: Final = "keyfront-heartbeat-"
_SUFFIX: Final = ".counts"
_MANY: Final = 4096  # files looked at in a folder
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def default_folder() -> Path:
    """Return the folder of this user's counts: in ``/dev/shm``, or else in the temporary one."""
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return parent / f"{PREFIX}{os.geteuid()}"


class Counts(CounterRow):
    """The counts of this process.

    After a fork, a child makes its own: :attr:`pid` tells whose these are.

    :param folder: the folder of the file, made with mode 0700 if it is missing; files of processes
        that ended are removed. ``None`` counts in memory only
    :raises HeartbeatError: the folder is not safe, or the file cannot be made
    """

    __slots__ = ("_described", "_file", "_lock", "_words", "path", "pid")

    #: The file; ``None`` in memory only.
    path: Path | None
    #: The number of the process that counts here.
    pid: int

    def __init__(self, folder: Path | None) -> None:
        super().__init__(_ROW_WORDS)
        self.pid = os.getpid()
        self._described: dict[str, Any] = {}
        self._file: Mapped | None = None
        self._lock: int | None = None
        self.path = None
        if folder is None:
            self._words = words_in_memory(_SIZE // 8)
        else:
            self._make(folder)
        self.row = self._words[_ROW : _ROW + _ROW_WORDS]
        self.describe(command=_command())

    def _make(self, folder: Path) -> None:
        _check(folder)
        _remove_ended(folder)
        namespace = _namespace()
        self.path = folder / f"{self.pid}{_SUFFIX}"
        there = _living(self.path)
        if there is not None and there.words[_NAMESPACE] != namespace:
            self.path = folder / f"{self.pid}-{namespace}{_SUFFIX}"
        try:
            self.path.unlink(missing_ok=True)
            self._file = Mapped(self.path, _SIZE)
            # Tells processes that cannot see this one in their /proc that it lives.
            self._lock = os.open(self.path, _READ)
            with suppress(BlockingIOError):  # somebody is looking
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except CoordinatorError as error:
            raise HeartbeatError(str(error)) from None
        except OSError as error:
            self.close()
            raise HeartbeatError(f"{self.path}: cannot be made: {error.strerror}") from None
        self._words = memoryview(self._file.map).cast("Q")
        self._words[_PID] = self.pid
        self._words[_STARTED] = started(self.pid) or 0
        self._words[_NAMESPACE] = namespace
        self._words[_MAGIC] = _LAYOUT  # last: from here on it is read

    def late(self, seconds: float) -> None:
        """Count a beat that came ``seconds`` after it was due; for the native thread.

        Calls nothing that could be patched, makes no container, never raises.
        """
        if not seconds > 0.0:
            seconds = 0.0
        elif seconds > _LIMIT:
            seconds = _LIMIT
        micros = int(seconds * 1e6 + 0.5)
        row = self.row
        try:
            if micros > row[_WORST]:
                row[_WORST] = micros
            row[_LENGTHS + micros.bit_length()] += 1
        except ValueError:
            pass  # somebody damaged the file

    def describe(self, **text: str | list[str]) -> None:
        """Say something about this process, besides what was said before; not for the native
        thread.

        It is shown by ``keyfront heartbeat status``: never a secret. Long texts are cut.

        :param text: ``command`` (by default the process's name), ``server``, ``threading``,
            ``interval``, and ``unsafe``, a list
        """
        self._described.update(text)
        data = _fitting(self._described)
        self._words[_TEXT] = _BEING_WRITTEN
        self._words.cast("B")[_TEXT_START : _TEXT_START + len(data)] = data
        self._words[_TEXT] = zlib.crc32(data) << 32 | len(data)

    def statistics(self) -> dict[str, Any]:
        """Return the counts by name, ``lateness_worst`` and ``lateness_p99`` in seconds (whole
        microseconds; for the latter, the upper bound of a power of two), and what
        :meth:`describe` was told.
        """
        return {"unsafe": [], **self._described, **_numbers(self.row.tolist())}

    def close(self) -> None:
        """Remove the file; counting goes on in what is mapped. In a child, the file is left."""
        lock, self._lock = self._lock, None
        if lock is not None and self.path is not None:
            # A daemon that closed all descriptors may have another file under this number.
            with suppress(OSError):
                if os.path.samestat(os.fstat(lock), os.lstat(self.path)):
                    os.close(lock)
        if self._file is None or self.path is None or self.pid != os.getpid():
            return
        if self._file.is_there():
            with suppress(OSError):
                self.path.unlink()


def read_all(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the statistics of each living process that counts in one of the folders.

    Besides those of :meth:`Counts.statistics` they have ``pid``, ``uid`` (of the file) and
    ``path``. Text is made harmless to a terminal. What is damaged, of another version, not
    readable or of a process that ended is left out.
    """
    found = []
    for folder in folders:
        for path in _files(folder):
            one = _living(path)
            if one is not None:
                whose = {"pid": one.words[_PID], "uid": one.uid, "path": str(path)}
                found.append({"unsafe": [], **one.text, **_numbers(one.words[_ROW:]), **whose})
    return sorted(found, key=lambda one: (one["uid"], one["pid"]))


@dataclass
class ProcessSums:
    """Sums over processes, whose counts end with them: none falls while this process lives.

    :ivar last: the counts of each process when it was last seen, by its file and number
    :ivar seen: true if there ever was a process
    """

    last: dict[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    seen: bool = False
    _sums: dict[str, int] = field(default_factory=dict)

    def add(self, living: Mapping[tuple[str, int], Mapping[str, int]]) -> dict[str, int]:
        """Return the sums over those that live and those that were seen and ended."""
        for whose, counts in self.last.items():
            # one of the same number that counts less is another
            again = living.get(whose)
            if again is None or any(again[name] < counts[name] for name in counts):
                for name, count in counts.items():
                    self._sums[name] = self._sums.get(name, 0) + count
        self.last = dict(living)
        self.seen = self.seen or bool(living)
        found = dict(self._sums)
        for counts in living.values():
            for name, count in counts.items():
                found[name] = found.get(name, 0) + count
        return found


def _check(folder: Path) -> None:
    """Make the folder, or see that nobody else can write to it or read it."""
    advice = "remove it, or name another with path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise HeartbeatError(f"{folder}: {error.strerror}; {advice}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise HeartbeatError(f"{folder}: is not a folder; {advice}")
    if found.st_uid != os.geteuid():
        raise HeartbeatError(f"{folder}: belongs to the user {found.st_uid}; {advice}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise HeartbeatError(f"{folder}: has the mode {mode:04o} instead of 0700; {advice}")


def _files(folder: Path) -> list[Path]:
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return []
        names = [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]
    except OSError:
        return []
    return [folder / name for name in sorted(names)[:_MANY]]


def _remove_ended(folder: Path) -> None:
    for path in _files(folder):
        with suppress(OSError):
            if _living(path) is None and _may_be_removed(path):
                path.unlink()


def _may_be_removed(path: Path) -> bool:
    """Return whether a file of no living process may be removed.

    It may not while it is being made, nor if it is that of a living process of another version.
    """
    fd = os.open(path, _READ)
    try:
        if _held(fd):
            return False
        ours = os.pread(fd, 8, 0) == _LAYOUT.to_bytes(8, sys.byteorder)
        same = os.path.samestat(os.fstat(fd), path.lstat())
    finally:
        os.close(fd)
    pid = path.name.removesuffix(_SUFFIX).partition("-")[0]
    return same and (ours or started(pid) is None)


class _Living(NamedTuple):
    """The content of a living process's file."""

    words: list[int]
    text: dict[str, Any]
    uid: int


def _living(path: Path) -> _Living | None:
    """Return the content of a living process's file; ``None`` for everything else."""
    try:
        fd = os.open(path, _READ)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _SIZE:
            return None
        for _ in range(5):
            data = os.pread(fd, _SIZE, 0)
            if len(data) != _SIZE:
                return None
            words = memoryview(data)[:_TEXT_START].cast("Q").tolist()
            if words[_MAGIC] != _LAYOUT or not _lives(fd, words):
                return None
            text = _text(words[_TEXT], data[_TEXT_START:])
            if text is not None:
                return _Living(words, text, found.st_uid)
            time.sleep(0.001)  # it is being written
    except OSError:
        pass
    finally:
        os.close(fd)
    return None


def _lives(fd: int, words: list[int]) -> bool:
    if words[_NAMESPACE] != _namespace():
        return _held(fd)
    began = started(words[_PID])
    if began is not None:
        return began == words[_STARTED]
    try:
        os.kill(words[_PID], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return _held(fd)  # /proc does not show other users' (hidepid)
    return False  # a zombie


def _held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _command() -> str:
    """Return the name of this process; its arguments may hold a secret."""
    try:
        return Path("/proc/self/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _namespace() -> int:
    """Return the PID namespace's number: containers that share ``/dev/shm`` may share PIDs."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _numbers(row: list[int]) -> dict[str, Any]:
    worst = row[_WORST]
    lengths = row[_LENGTHS : _LENGTHS + _LONGEST + 1]
    total, seen, p99 = sum(lengths), 0, 0
    for bits, count in enumerate(lengths):
        seen += count
        if total and seen * 100 >= total * 99:
            p99 = min(2**bits, worst)
            break
    counts: dict[str, Any] = dict(zip(NAMES, row, strict=False))
    return {**counts, "lateness_worst": worst / 1e6, "lateness_p99": p99 / 1e6}


def _fitting(described: dict[str, Any]) -> bytes:
    for length in (400, 200, 100, 50, 20, 0):
        cut = {
            name: [one[:length] for one in said[:8]] if isinstance(said, list) else said[:length]
            for name, said in described.items()
        }
        data = json.dumps(cut).encode()
        if len(data) <= _TEXT_SIZE:
            return data
    return b"{}"


def _text(word: int, area: bytes) -> dict[str, Any] | None:
    """Return the text in the file, read as JSON; ``None`` if it is damaged or being written."""
    if word == 0:
        return {}
    length = word & 0xFFFFFFFF
    if zlib.crc32(area[:length]) != word >> 32:
        return None
    try:
        said = json.loads(area[:length])
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("unsafe", []), list):
        return None
    return {
        _harmless(name): [_harmless(one) for one in value]
        if isinstance(value, list)
        else _harmless(value)
        for name, value in said.items()
    }


def _harmless(value: object) -> str:
    line = " ".join(str(value).split())[:400]
    return "".join(one if one.isprintable() else "?" for one in line)
