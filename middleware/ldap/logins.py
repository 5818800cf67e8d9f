"""Logins: the DN for the name that a user typed, the user who logged in, and a bound on slow BINDs.

Where a part of a directory is on another server that is away, a BIND of a user there waits as long
as it may, and anybody who knows a name can send many. So while others wait for a connection, the
users of a part that has answered nothing for two seconds have no more than half of the connections:
the rest of their BINDs give up, and no more are let in. A part that answers, even slowly, may have
all connections.

A part is all that lies below one entry: a user's DN shows to which parts he belongs. For other
kinds of names the domain counts (``jane@example.org``, ``EXAMPLE\\jane``).
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryUnavailableError,
    FilterError,
    OptionError,
    PoolFullError,
    Verdict,
)

from .protocol import search_filter
from .protocol.connection import SearchAnswer
from .protocol.messages import never_sent, password_octets

_SIZE_LIMIT_EXCEEDED = 4
# More characters than RFC 4514 section 2.4 demands: "=", which it allows, and controls, since
# libldap and slapd drop a line break at the end of a value like a space.
_SPECIAL = {ord(x): f"\\{x}" for x in '\\"+,;<>='}
_SPECIAL |= {x: f"\\{x:02x}" for x in (*range(32), 127)}

#: Seconds without an answer after which a BIND is slow.
SLOW_SECONDS = 2.0
# Seconds between two looks of a slow BIND whether others wait.
_LOOK_SECONDS = 0.5
# Entries above a user's that count, and parts whose last answer is remembered.
_DEPTH = 12
_PARTS = 1024

_COMMA = re.compile(r"\s*(?<!\\),\s*")


@dataclass(frozen=True, slots=True)
class Identity:
    """A user whose password a server took.

    :ivar dn: the name that was bound: a DN, or a UPN where such are used
    :ivar name: the name as it was given, or as the entry has it
    :ivar server: URL of the server that took the password
    :ivar password_expiring: seconds until the password expires, if the server says that it will
    :ivar grace: logins left with an expired password, if the server says so
    """

    dn: str
    name: str
    server: str
    password_expiring: int | None = None
    grace: int | None = None


class Names:
    """Finds the DN to bind for the name of a user.

    Where ``user_dn`` or ``search_base`` is given, the text is always a name: they decide who may
    log in, and a user must not get around that by typing a DN.

    :param user_dn: DN of every user, with ``{}`` for the name, for example
        ``uid={},ou=People,dc=example,dc=org``; the name is escaped (RFC 4514). Without a ``=`` it
        is no DN but another name that Active Directory accepts, for example ``{}@example.org``.
    :param search_base: DN below which users are searched instead
    :param user_filter: filter of that search, with ``{}`` for the name, which is escaped (RFC 4515)
    :param name_attribute: attribute of the entry found whose value is the user's name
    :raises OptionError: a template lacks its ``{}``, or both ways are given
    """

    def __init__(
        self,
        *,
        user_dn: str | None,
        search_base: str | None,
        user_filter: str,
        name_attribute: str | None = None,
    ) -> None:
        if name_attribute is not None and search_base is None:
            allowed = "left out without search_base: no entry is read"
            raise OptionError("user_name_attribute", name_attribute, allowed)
        if user_dn is not None and search_base is not None:
            raise OptionError("user_dn", user_dn, "left out where search_base is given")
        if user_dn is not None and user_dn.count("{}") != 1:
            raise OptionError("user_dn", user_dn, "a DN with {} once, where the name belongs")
        if search_base is not None:
            _check_filter(user_filter)
        self._user_dn = user_dn
        self._search_base = search_base
        self._user_filter = user_filter
        self._name_attribute = name_attribute

    def find(self, name: str, search: Callable[..., SearchAnswer]) -> tuple[str, str]:
        """Return the DN to bind, or another name that the server binds, and the user's name.

        :param name: the name that the user typed
        :param search: the pool's :meth:`.directory.LDAPPool.search`
        :raises CredentialsError: no entry has this name, or more than one has
        :raises DirectoryUnavailableError: the directory cannot be searched
        :raises DirectoryAnswerError: a server refused the search
        """
        verbatim = self._user_dn is None and self._search_base is None
        if not name or not _is_text(name, "surrogateescape" if verbatim else "strict"):
            raise _unknown()
        if self._user_dn is not None:
            is_dn = "=" in self._user_dn
            return self._user_dn.replace("{}", escape_dn(name) if is_dn else name), name
        if self._search_base is None:
            return name, name
        text = self._user_filter.replace("{}", search_filter.escape(name))
        try:
            # A second one is enough to know that it is not unique.
            wanted = self._name_attribute or "1.1"
            found = search(self._search_base, 2, text, [wanted], size_limit=2).entries
        except CredentialsError as error:
            # It is the service that was refused, and nothing is known of the user.
            refused = str(error)
        except DirectoryAnswerError as error:
            if error.code != _SIZE_LIMIT_EXCEEDED:
                raise
            raise _unknown() from None
        else:
            if len(found) != 1:
                raise _unknown()
            dn, attributes = found[0]
            return dn, name if self._name_attribute is None else self._named(attributes)
        raise DirectoryUnavailableError(
            "bind_dn or the Kerberos principal or the client certificate was refused, users cannot "
            f"be found: {refused}"
        )


    def _named(self, attributes: dict[str, list[bytes]]) -> str:
        """Return the name that an entry gives to its user."""
        values = [value for found in attributes.values() for value in found]
        try:
            (value,) = values
            name = value.decode()
        except ValueError:
            name = ""
        if not name or not name.isprintable():
            raise CredentialsError(
                Verdict.UNKNOWN_USER,
                diagnostic=f"{self._name_attribute} of its entry is not one name",
            )
        return name


def escape_dn(value: str) -> str:
    """Return a value escaped for the text of a DN (RFC 4514 section 2.4)."""
    text = value.translate(_SPECIAL)
    if value.endswith(" "):
        text = f"{text[:-1]}\\ "
    if value.startswith(("#", " ")) and text[0] != "\\":
        text = f"\\{text}"
    return text


def octets(password: str | bytes) -> bytes:
    """Return a password as it is sent (RFC 4513 section 5.1.3).

    :param password: the password; text becomes UTF-8
    :raises CredentialsError: it is empty, which a server would take for an anonymous BIND and
        accept for any user (RFC 4513 section 5.1.2), no UTF-8 can express it, or it has a NUL
    :raises TypeError: it is neither text nor bytes
    """
    secret: bytes | None = None
    try:
        if not isinstance(password, (str, bytes)):
            raise TypeError(f"a password is text or bytes, not {type(password).__name__}")
        secret = password_octets(password)
        if secret and b"\0" not in secret:
            return secret
        reason = never_sent(secret)
        raise CredentialsError(
            Verdict.WRONG_PASSWORD, diagnostic=f"{reason}; nothing was sent"
        )
    finally:
        # No frame of an error's traceback may still have it.
        del password
        secret = None


def _unknown() -> CredentialsError:
    return CredentialsError(
        Verdict.UNKNOWN_USER, diagnostic="no entry, or more than one, has this name"
    )


def _is_text(name: str, errors: str) -> bool:
    """Return whether any directory can have such a name."""
    try:
        name.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return "\0" not in name


def _check_filter(text: str) -> None:
    allowed = "a filter with {} where the name belongs, for example (uid={})"
    if "{}" not in text:
        raise OptionError("user_filter", text, allowed)
    try:
        search_filter.encode(text.replace("{}", "x"))
    except FilterError as error:
        raise OptionError("user_filter", text, f"{allowed} ({error})") from None


class BindAttempt:
    """A BIND under way, for a ``with`` block, which decides how long it waits (``Patience``).

    :param binds: all BINDs of the pool
    :param name: the DN, or another name that is bound
    """

    __slots__ = ("_binds", "_end", "began", "name")

    def __init__(self, binds: SlowBinds, name: str) -> None:
        self._binds = binds
        self.name = name
        self.began = time.monotonic()
        self._end = math.inf

    def __enter__(self) -> BindAttempt:
        self._binds.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        answered = error is None or isinstance(error, (DirectoryAnswerError, DirectoryBusyError))
        self._binds.leave(self, answered)

    def first(self, seconds: float | None) -> float:
        """Return the seconds to wait at first.

        :param seconds: the time for the answer in all; ``None`` for any time
        """
        self._end = math.inf if seconds is None else self.began + seconds
        return SLOW_SECONDS if seconds is None else min(seconds, SLOW_SECONDS)

    def more(self) -> float:
        """Return the seconds to wait on; 0 to give up."""
        left = self._end - time.monotonic()
        if left <= 0 or not self._binds.goes_on(self):
            return 0.0
        return min(left, _LOOK_SECONDS)


class SlowBinds:
    """The BINDs under way in a pool.

    :param places: BINDs that may be under way at once, from 1
    :param waited_for: a function that tells whether somebody waits for a connection
    """

    def __init__(self, places: int, waited_for: Callable[[], bool]) -> None:
        self._most = places // 2
        self._waited_for = waited_for
        self.after_fork()

    def after_fork(self) -> None:
        """Drop the BINDs of the parent's threads."""
        self._lock = threading.Lock()
        # Each is one step of the interpreter, so that no lock is taken where nothing is slow.
        self._running: dict[BindAttempt, None] = {}
        self._slow: dict[BindAttempt, None] = {}
        #: Monotonic time of the last answer, by the part of the user's name that others share.
        self._answered: dict[str, float] = {}

    def attempt(self, name: str) -> BindAttempt:
        """Return a context manager for one BIND."""
        return BindAttempt(self, name)

    def check(self, name: str) -> None:
        """Refuse a BIND for a part that does not answer, if enough others wait for it already.

        :param name: the DN, or another name that is bound
        :raises PoolFullError: half of the connections wait for that part
        """
        if not self._slow:
            return
        with self._lock:
            parts = _parts(_above(name))
            # A part above may be silent, too, only because nobody else asks there.
            above_answers = False
            for part in reversed(parts):
                silent, number = self._look(part)
                if silent and number >= self._most and (above_answers or part == parts[0]):
                    raise PoolFullError(
                        f"nobody answers for users below {part or 'the root'} at the moment, and "
                        f"{number} of them wait already"
                    )
                above_answers = not silent

    def enter(self, attempt: BindAttempt) -> None:
        """Note that a BIND is sent.

        :raises PoolFullError: as :meth:`check`
        """
        if self._slow:
            self.check(attempt.name)
        attempt.began = time.monotonic()
        self._running[attempt] = None

    def leave(self, attempt: BindAttempt, answered: bool) -> None:
        """Note that a BIND is over, and whether it was answered."""
        self._running.pop(attempt, None)
        self._slow.pop(attempt, None)
        if answered:
            if len(self._answered) >= _PARTS:
                self._answered.clear()
            self._answered[_above(attempt.name)] = time.monotonic()

    def goes_on(self, attempt: BindAttempt) -> bool:
        """Return whether a slow BIND may wait on; if not, it is over."""
        self._slow[attempt] = None
        if not self._waited_for():
            return True
        with self._lock:
            for part in _parts(_above(attempt.name)):
                silent, number = self._look(part)
                if silent and number > self._most:
                    self._running.pop(attempt, None)
                    return False
        return True

    def _look(self, part: str) -> tuple[bool, int]:
        """Return whether a part does not answer, and the number of its slow BINDs."""
        since = time.monotonic() - SLOW_SECONDS
        slow = [
            x for x in list(self._running)
            if x.began <= since and part in _parts(_above(x.name))
        ]  # fmt: skip
        silent = bool(slow) and not any(
            at > since and part in _parts(above) for above, at in list(self._answered.items())
        )
        return silent, len(slow)


def _above(name: str) -> str:
    """Return the part of a name that several users share, not yet folded as :func:`_parts` does."""
    if "," in name:
        return name.partition(",")[2]
    if "@" in name:
        return "@" + name.rpartition("@")[2]
    return name.partition("\\")[0] + "\\" if "\\" in name else ""


@functools.lru_cache(maxsize=4096)
def _parts(above: str) -> tuple[str, ...]:
    """Return the parts of a directory to which a user belongs, the smallest first."""
    folded = _COMMA.split(above.strip().lower())
    own = [",".join(folded[depth:]) for depth in range(min(len(folded), _DEPTH))]
    return (*own, "") if own[-1] else tuple(own)
