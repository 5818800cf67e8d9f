"""Limits the refused logins of a user from an address, over all processes of a node.

Directories lock an account after some wrong passwords, so anybody who may send logins through a
service can lock others out. Here refusals are counted by a user's name and the client's address: a
login that the directory might refuse once too often is not sent. The same user may log in from
other addresses.

Directories forget a refusal when there was none after it for a while (Active Directory), or by its
own age. So a count here ends a while after the *last* refusal: from the first one on, somebody
could have a directory refuse nearly twice as many just before and after its end.

The counts are in a mapped file of a fixed size, by hashes with a key that is in the file; it holds
no names. Where many share a place, the count with the fewest refusals is dropped.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped
from keyfront.errors import CoordinatorError, CredentialsError, PoolTimeoutError, Verdict

from .service_refusals import shared_folder

LOG = logging.getLogger(__name__)

# The entry of a user at an address: hash, when he was last refused, a number of BIND_SECONDS,
# refusals, BINDs under way that began in these seconds, and in those before.
_ENTRY = struct.Struct("<QdIiii")
_PLACES = 1 << 15
_SHARED = 8
_KEY = 16
_SIZE = _KEY + (_PLACES + _SHARED) * _ENTRY.size
_LOCK = ".refused-lock"
# No limit lets a count get there.
_MANY = 1 << 20
_POLL_SECONDS = 0.005
#: Seconds after which, or after twice as many, a BIND is over: its process was killed.
BIND_SECONDS = 120.0
#: Seconds for which a process counts for itself, after it could not count with the others.
ALONE_SECONDS = 10.0
# Seconds to wait for the file, which is held for microseconds.
_LOCK_SECONDS = 1.0
# Seconds between two times in which its date is renewed, which no write into memory does: what is
# a day old is removed.
_TOUCH_SECONDS = 3600.0

_ESCAPED = re.compile(rb"\\([0-9A-Fa-f]{2})|\\(.)", re.DOTALL)
_TYPE = re.compile(r"(^|[,;+])\s*[A-Za-z0-9.-]+\s*=\s*")
_IN_BER = re.compile(r"(^|[,;+])#([0-9A-Fa-f]+)")
_SIGNS = re.compile("[,;+]")

# What came of asking for a BIND: it may be sent, or has to wait, or is not to be sent.
_SENT, _WAITS, _LOCKED = range(3)

_Change = Callable[[list[Any], float], tuple[int, float]]


class UserRefusals:
    """The refused logins of the users of a directory.

    :param most: refusals of one user at one address after which no more logins are sent, from 1
    :param seconds: the time within which refusals count, from the last one on; above 0
    :param directory: texts that name the directory, such as its URLs; ``None`` to share with nobody
    """

    def __init__(self, most: int, seconds: float, directory: Sequence[str] | None) -> None:
        self._most = most
        self._seconds = seconds
        # Of this process alone.
        self._memory = bytearray(_SIZE)
        self._threads = threading.Lock()
        self._lock: FileLock | None = None
        self._file: Mapped | None = None
        self._path = Path()
        self._alone_until = 0.0
        self._touch_at = 0.0
        folder = None if directory is None else shared_folder()
        if folder is not None:
            name = hashlib.blake2b(repr(tuple(directory or ())).encode(), digest_size=12)
            self._path = folder / f"{name.hexdigest()}.refused"
            self._lock = FileLock(self._path.with_suffix(_LOCK), seconds=_LOCK_SECONDS)

    def after_fork(self) -> None:
        """Replace the lock that a thread of the parent may have held."""
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
        text = f"{address}\0{folded(name)}".encode("utf-8", "surrogateescape")
        deadline = time.monotonic() + seconds
        while True:
            told, value = self._change(text, self._begin)
            if told == _SENT:
                break
            if told == _LOCKED:
                raise CredentialsError(
                    Verdict.LOCKED,
                    diagnostic=f"{self._most} logins from {address or 'there'} were refused; "
                    f"nothing was sent, and is not for {value:.0f} s",
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
            self._surely(text, lambda entry, now: outcome(entry, now, value))

    def _surely(self, text: bytes, change: _Change) -> None:
        """Count an outcome, also where a greenlet is killed while it waits for the file."""
        try:
            self._change(text, change)
        except BaseException:
            self._change(text, change)
            raise

    # Changes of an entry in place. ``_begin`` returns what comes of it, with the seconds left if
    # that is _LOCKED, and the time that the others are to be given if it is _SENT.

    def _begin(self, entry: list[Any], now: float) -> tuple[int, float]:
        _, refused_at, slot, refused, *under_way = entry
        if refused >= self._most:
            return _LOCKED, max(refused_at + self._seconds - now, 0.0)
        if refused + sum(under_way) >= self._most:
            return _WAITS, 0.0
        entry[4] += 1
        return _SENT, slot

    def _refused(self, entry: list[Any], now: float, began: float) -> tuple[int, float]:
        entry[1] = now
        entry[3] += 1
        return self._left(entry, now, began)

    def _accepted(self, entry: list[Any], now: float, began: float) -> tuple[int, float]:
        entry[3] = 0
        return self._left(entry, now, began)

    def _left(self, entry: list[Any], now: float, began: float) -> tuple[int, float]:
        for place, slot in ((4, entry[2]), (5, entry[2] - 1)):
            if began == slot:
                entry[place] = max(entry[place] - 1, 0)
        return _SENT, began

    def _change(self, text: bytes, change: _Change) -> tuple[int, float]:
        if self._lock is not None and time.monotonic() >= self._alone_until:
            try:
                with self._lock:
                    if self._file is None or not self._file.is_there():
                        self._file = Mapped(self._path, _SIZE)
                    self._touch()
                    told = self._in(self._file.map, text, change)
                self._alone_until = 0.0
                return told
            except CoordinatorError as error:
                reason = str(error)
            is_news = not self._alone_until
            self._alone_until = time.monotonic() + ALONE_SECONDS
            if is_news:
                LOG.warning("refused logins are not counted with other processes: %s", reason)
        with self._threads:
            return self._in(self._memory, text, change)

    def _touch(self) -> None:
        now = time.monotonic()
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_SECONDS
            for each in (self._path, self._path.with_suffix(_LOCK)):
                with suppress(OSError):
                    os.utime(each)

    def _in(self, memory: Any, text: bytes, change: _Change) -> tuple[int, float]:
        if memory[:_KEY] == bytes(_KEY):
            memory[:_KEY] = os.urandom(_KEY)
        digest = hashlib.blake2b(text, digest_size=8, key=bytes(memory[:_KEY])).digest()
        number = int.from_bytes(digest, "little") or 1
        now = time.monotonic()
        first = number % _PLACES
        at, entry = -1, [number, now, int(now / BIND_SECONDS), 0, 0, 0]
        fewest: tuple[int, float] | None = None
        for place in range(first, first + _SHARED):
            offset = _KEY + place * _ENTRY.size
            found = list(_ENTRY.unpack_from(memory, offset))
            if found[0]:
                self._let_go(found, now)
            if found[0] == number:
                at, entry = offset, found
                break
            order = (found[3] + sum(found[4:]), found[1])
            if fewest is None or order < fewest:
                at, fewest = offset, order
        told = change(entry, now)
        if any(entry[3:]):
            _ENTRY.pack_into(memory, at, *entry)
        elif _ENTRY.unpack_from(memory, at)[0] == number:
            memory[at : at + _ENTRY.size] = bytes(_ENTRY.size)
        return told

    def _let_go(self, entry: list[Any], now: float) -> None:
        """Take away what counts no more."""
        _, refused_at, slot, refused, *under_way = entry
        present = int(now / BIND_SECONDS)
        if not all(0 <= each <= _MANY for each in entry[3:]):
            refused, under_way = 0, [0, 0]  # of a damaged one nothing is true
        if not 0 <= now - refused_at < self._seconds:
            refused_at, refused = now, 0
        if slot == present - 1:
            under_way = [0, under_way[0]]
        elif slot != present:
            under_way = [0, 0]
        entry[1:] = [refused_at, present, refused, *under_way]


def folded(name: str) -> str:
    """Return the same text for names that a directory may take for the same.

    Of a DN it is the values, however they are escaped (RFC 4514) and whatever the attributes are
    called; of these the letters, in any case and width (RFC 4518). Others may have the same text,
    who are counted with them.

    :param name: a DN, or another name that is bound
    """
    octets = name.encode("utf-8", "surrogateescape")
    octets = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else found[2],
                          octets)  # fmt: skip
    text = octets.decode("utf-8", "surrogateescape")
    text = _IN_BER.sub(_decoded, _TYPE.sub(r"\1", text))
    values = []
    for each in _SIGNS.split(text):
        plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", each).casefold())
        # Without spaces, controls and marks.
        values.append("".join(x for x in plain if unicodedata.category(x)[0] not in "ZCM"))
    # In any order, as those of a name with several attributes are.
    return ",".join(sorted(each.replace('"', "") for each in values))


def _decoded(found: re.Match[str]) -> str:
    """Return a value that is written in BER: a tag, a length of one byte, and the text."""
    digits = found[2]
    value = bytes.fromhex(digits[: len(digits) // 2 * 2])
    return found[1] + value[2:].decode("utf-8", "surrogateescape")
