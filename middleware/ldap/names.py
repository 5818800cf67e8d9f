"""Finds the DN for the name that a user typed, and describes a user who logged in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryUnavailableError,
    FilterError,
    OptionError,
    Verdict,
)

from .protocol import search_filter as filters
from .protocol.connection import SearchAnswer
from .protocol.requests import never_sent, password_octets

_SIZE_LIMIT_EXCEEDED = 4
# More than RFC 4514 section 2.4 asks for: "=", which may be, and controls, since libldap and slapd
# drop a line break at the end of a value like a space.
_SPECIAL = {ord(x): f"\\{x}" for x in '\\"+,;<>='}
_SPECIAL |= {x: f"\\{x:02x}" for x in (*range(32), 127)}


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

    Where ``user_dn`` or ``search_base`` is given, the text is always a name: whoever may log in is
    decided there, and a user must not get around that by typing a DN.

    :param user_dn: DN of every user, with ``{}`` for the name, for example
        ``uid={},ou=People,dc=example,dc=org``; the name is escaped (RFC 4514). Without a ``=`` it
        is no DN but what Active Directory takes as well, for example ``{}@example.org``.
    :param search_base: DN below which users are searched instead
    :param user_filter: filter of that search, with ``{}`` for the name, which is escaped (RFC 4515)
    :param name_attribute: attribute of what is found there that names the user
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
        """Return the DN to bind, or whatever else the server binds, and the user's name.

        :param search: the pool's :meth:`.directory.LDAPPool.search`
        :raises CredentialsError: there is nobody of this name, or more than one
        :raises DirectoryUnavailableError: the directory cannot be searched
        """
        verbatim = self._user_dn is None and self._search_base is None
        if not name or not _is_text(name, "surrogateescape" if verbatim else "strict"):
            raise _unknown()
        if self._user_dn is not None:
            is_dn = "=" in self._user_dn
            return self._user_dn.replace("{}", escape_dn(name) if is_dn else name), name
        if self._search_base is None:
            return name, name
        text = self._user_filter.replace("{}", filters.escape(name))
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
        raise DirectoryUnavailableError(f"bind_dn was refused, users cannot be found: {refused}")


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
    """Escape a value for the text of a DN (RFC 4514 section 2.4): it means nothing but itself."""
    text = value.translate(_SPECIAL)
    if value.endswith(" "):
        text = f"{text[:-1]}\\ "
    if value.startswith(("#", " ")) and text[0] != "\\":
        text = f"\\{text}"
    return text


def octets(password: str | bytes) -> bytes:
    """Return a password as it is sent (RFC 4513 section 5.1.3).

    :raises CredentialsError: it is empty, which a server would take for a wish to be nobody and
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
        # Of an error's frames, none may still have it.
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
        filters.encode(text.replace("{}", "x"))
    except FilterError as error:
        raise OptionError("user_filter", text, f"{allowed} ({error})") from None
