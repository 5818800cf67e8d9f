"""The keys of Fernet tokens, read anew only when their files have changed.

Keystone lists the folder of its keys, reads each of them and prepares it each time that it makes or
reads a token: two to four times in a login. Here it compares inode, size and times of change of the
folder and its files with those of the keys that it has read. Keys that were changed less than two
seconds before are read each time, as clocks of file systems are coarse.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from keyfront.middleware.tokens.request import current

from .needed_interfaces import incompatible

# Nanoseconds after which a further change of a file has another time.
_SETTLED = 2_000_000_000

# All names that the property uses. A property that uses any other is left alone.
_GOES_BY = frozenset(
    {
        *("utils", "FernetUtils", "CONF", "fernet_tokens", "key_repository", "max_active_keys"),
        *("load_keys", "exception", "KeysNotFound", "fernet", "MultiFernet", "Fernet"),
    }
)

#: Device, inode, size, and times of the last change of content and of state of a file.
_Look = tuple[int, int, int, int, int]


class _Kept(NamedTuple):
    """Keys that were read."""

    folder: str
    #: By path, the state of the folder and its files before they were read.
    looks: dict[str, _Look]
    crypto: Any


def keep_keys(formatters: Any) -> None:
    """Make Keystone keep the keys of tokens as long as the files in their folder are unchanged.

    :param formatters: Keystone's module ``keystone.token.token_formatters``
    :raises IncompatibleError: it has no property that reads the keys
    """
    found = vars(getattr(formatters, "TokenFormatter", object)).get("crypto")
    read: Callable[[Any], Any] | None = getattr(found, "fget", None)
    if read is None:
        raise incompatible("keystone.token.token_formatters has no TokenFormatter.crypto")
    code = getattr(read, "__code__", None)
    names = set(code.co_names) if code is not None else {""}
    for constant in code.co_consts if code is not None else ():
        names |= set(getattr(constant, "co_names", ()))  # a comprehension, before Python 3.12
    if hasattr(read, "keyfront") or not names <= _GOES_BY:
        return
    read_keys = read
    kept: _Kept | None = None

    def crypto(self: Any) -> Any:
        nonlocal kept
        folder = formatters.CONF.fernet_tokens.key_repository
        one = kept
        if one is not None and one.folder == folder and _are_the_same(one.looks):
            return one.crypto
        # Before they are read: what is changed meanwhile is read again at the next use.
        looks = _look(folder)
        made = read_keys(self)
        kept = None if looks is None else _Kept(folder, looks, made)
        return made

    crypto.keyfront = True  # type: ignore[attr-defined]
    formatters.TokenFormatter.crypto = property(crypto, doc=found.__doc__)
    _remember_packed(formatters.TokenFormatter)


# All names that these methods use.
_PACKS = frozenset({"crypto", "encrypt", "rstrip", "decode"})
_UNPACKS = frozenset(
    {
        *("TokenFormatter", "restore_padding", "crypto", "decrypt", "encode", "fernet"),
        *("InvalidToken", "exception", "ValidationError", "_"),
    }
)


def _remember_packed(formatter: Any) -> None:
    """Make a request remember the token that it has just packed, so that it is not decrypted.

    :param formatter: Keystone's class that packs and unpacks tokens
    """
    pack, unpack = (getattr(formatter, name, None) for name in ("pack", "unpack"))
    for method, names in ((pack, _PACKS), (unpack, _UNPACKS)):
        code = getattr(method, "__code__", None)
        if code is None or not names.issuperset(code.co_names):
            return
    assert pack is not None and unpack is not None

    @functools.wraps(pack)
    def packed(self: Any, payload: bytes) -> Any:
        token = pack(self, payload)
        request = current.get()
        if request is not None:
            request.packed = token, payload
        return token

    @functools.wraps(unpack)
    def unpacked(self: Any, token: str) -> Any:
        request = current.get()
        if request is not None and request.packed is not None and request.packed[0] == token:
            return request.packed[1]
        return unpack(self, token)

    formatter.pack, formatter.unpack = packed, unpacked


def _look(folder: str) -> dict[str, _Look] | None:
    """Return the state of a folder and its files by path; ``None`` if they cannot be kept."""
    try:
        # The folder first: a file that comes later shows in its time.
        looks = {folder: _of(folder)}
        mode = os.stat(folder).st_mode
        looks |= {path: _of(path) for path in (entry.path for entry in os.scandir(folder))}
    except OSError:
        return None
    newest = max(max(look[3:]) for look in looks.values())
    # Keystone warns each time of a folder that everybody may read.
    if mode & (stat.S_IROTH | stat.S_IXOTH) or time.time_ns() - newest < _SETTLED:
        return None
    return looks


def _of(path: str) -> _Look:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _are_the_same(looks: dict[str, _Look]) -> bool:
    try:
        return all(_of(path) == look for path, look in looks.items())
    except OSError:
        return False
