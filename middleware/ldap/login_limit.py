"""A limit of the refused logins of a user from an address, for all processes of a node.

Directories lock an account after some wrong passwords, so anybody who may send logins through a
service can lock others out. Here refusals are counted by a user's name and the client's address: a
login that the directory might refuse once too often is not sent. The same user may log in from
other addresses.

The counts are in a mapped file of a fixed size, by hashes with a key that is in the file; it holds
no names. Where many share a place, the oldest count is dropped.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped
from keyfront.errors import CoordinatorError, CredentialsError, PoolTimeoutError, Verdict

from .service_refusals import shared_folder

LOG = logging.getLogger(__name__)

# The entry of a user at an address: hash, the beginning of the time in which refusals count,
# refusals, BINDs under way.
_ENTRY = struct.Struct("<Qdii")
_PLACES = 1 << 15
_SHARED = 8
_KEY = 16
_SIZE = _KEY + (_PLACES + _SHARED) * _ENTRY.size
# No limit lets a count get there.
_MANY = 1 << 20
_POLL_SECONDS = 0.005
_AROUND_SIGNS = re.compile(r"\s*([,=+])\s*")


class LoginLimit:
    """The refused logins of the users of a directory.

    :param most: refusals of one user at one address after which no more logins are sent, from 1
    :param seconds: the time within which refusals count, from the first one on; above 0
    :param directory: texts that name the directory, such as its URLs; ``None`` to share with nobody
    """

    def __init__(self, most: int, seconds: float, directory: Sequence[str] | None) -> None:
        self._most = most
        self._seconds = seconds
        self._lock: FileLock | None = None
        folder = None if directory is None else shared_folder()
        if folder is not None:
            name = hashlib.blake2b(repr(tuple(directory or ())).encode(), digest_size=12)
            path = folder / f"{name.hexdigest()}.logins"
            self._lock = FileLock(path.with_suffix(".login-lock"), seconds=1.0)
            try:
                self._file: Any = Mapped(path, _SIZE)
            except CoordinatorError as error:
                self._alone(error)
        else:
            self._alone(None)

    def _alone(self, error: Exception | None) -> None:
        if error is not None:
            LOG.warning("refused logins are not counted with other processes: %s", error)
        self._lock = None
        self._file = None
        self._map = mmap.mmap(-1, _SIZE)
        self._threads = threading.Lock()

    @contextmanager
    def attempt(self, name: str, address: str, seconds: float) -> Iterator[None]:
        """Allow a BIND in a ``with`` block, and count its outcome.

        As many are under way at a time as may still be refused; the others wait for these.

        :param name: the DN, or another name that is bound
        :param address: the client's address; any text
        :param seconds: time to wait for others' BINDs
        :raises CredentialsError: enough logins were refused; its verdict is ``LOCKED``
        :raises PoolTimeoutError: others' BINDs are under way for too long
        """
        folded = _AROUND_SIGNS.sub(r"\1", name.strip().lower())
        deadline = time.monotonic() + seconds
        while True:
            refused, left = self._change(folded, address, self._begin)
            if not refused and left:
                break
            if refused:
                raise CredentialsError(
                    Verdict.LOCKED,
                    diagnostic=f"{self._most} logins from {address or 'there'} were refused; "
                    f"nothing was sent, and is not for {left:.0f} s",
                )
            if time.monotonic() >= deadline:
                raise PoolTimeoutError(
                    f"logins of {name} from {address or 'there'} are under way for {seconds:.3g} s"
                )
            time.sleep(_POLL_SECONDS)
        outcome = self._left
        try:
            yield
            outcome = self._accepted
        except CredentialsError:
            outcome = self._refused
            raise
        finally:
            self._surely(folded, address, outcome)

    def _surely(self, name: str, address: str, change: Any) -> None:
        """Count an outcome, also where a greenlet is killed while it waits for the file."""
        try:
            self._change(name, address, change)
        except BaseException:
            self._change(name, address, change)
            raise

    # Changes of an entry in place. ``_begin`` returns true and the seconds left if the limit is
    # reached; else false, and 1 if the BIND may be sent, 0 if it has to wait.

    def _begin(self, entry: list[Any], now: float) -> tuple[bool, float]:
        if entry[2] >= self._most:
            return True, max(entry[1] + self._seconds - now, 0.0)
        if entry[2] + entry[3] >= self._most:
            return False, 0.0
        entry[3] += 1
        return False, 1.0

    def _refused(self, entry: list[Any], now: float) -> tuple[bool, float]:
        entry[2] += 1
        return self._left(entry, now)

    def _accepted(self, entry: list[Any], now: float) -> tuple[bool, float]:
        entry[2] = 0
        return self._left(entry, now)

    def _left(self, entry: list[Any], now: float) -> tuple[bool, float]:
        entry[3] = max(entry[3] - 1, 0)
        return True, 0.0

    def _change(
        self, name: str, address: str, change: Callable[[list[Any], float], tuple[bool, float]]
    ) -> tuple[bool, float]:
        try:
            with self._lock or nullcontext():
                if self._file is not None and not self._file.is_there():
                    self._file = Mapped(self._file.path, _SIZE)
                return self._changed(name, address, change)
        except CoordinatorError as error:
            self._alone(error)
            return self._changed(name, address, change)

    def _changed(
        self, name: str, address: str, change: Callable[[list[Any], float], tuple[bool, float]]
    ) -> tuple[bool, float]:
        memory = self._map if self._file is None else self._file.map
        if self._file is None:
            with self._threads:
                return self._in(memory, name, address, change)
        return self._in(memory, name, address, change)

    def _in(
        self, memory: Any, name: str, address: str,
        change: Callable[[list[Any], float], tuple[bool, float]],
    ) -> tuple[bool, float]:  # fmt: skip
        if memory[:_KEY] == bytes(_KEY):
            memory[:_KEY] = os.urandom(_KEY)
        text = f"{address}\0{name}".encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(text, digest_size=8, key=memory[:_KEY]).digest()
        number = int.from_bytes(digest, "little") or 1
        now = time.monotonic()
        first = number % _PLACES
        at, oldest, begin = -1, -1, now
        for place in range(first, first + _SHARED):
            offset = _KEY + place * _ENTRY.size
            other, began, _, _ = _ENTRY.unpack_from(memory, offset)
            if other == number:
                at = offset
                break
            if other == 0 or not 0 <= now - began < self._seconds:
                began = -1.0  # empty, or over
            if oldest < 0 or began < begin:
                oldest, begin = offset, began
        entry: list[Any] = [number, now, 0, 0]
        if at >= 0:
            entry = list(_ENTRY.unpack_from(memory, at))
            # Of a damaged one nothing is true.
            counted = 0 <= entry[2] <= _MANY and 0 <= entry[3] <= _MANY
            if not (counted and 0 <= now - entry[1] < self._seconds):
                entry = [number, now, 0, 0]
        told = change(entry, now)
        if not (entry[2] or entry[3]):
            if at >= 0:
                memory[at : at + _ENTRY.size] = bytes(_ENTRY.size)
            return told
        _ENTRY.pack_into(memory, at if at >= 0 else oldest, *entry)
        return told
