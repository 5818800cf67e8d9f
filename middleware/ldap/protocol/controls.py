"""Encodes and decodes controls: extras of requests and answers (RFC 4511 section 4.1.11).

Those known here are results by pages (RFC 2696), the password policy
(draft-behera-ldap-password-policy), and what a directory is followed by: content synchronization
(syncrepl, RFC 4533), of slapd and of 389 Directory Server with its plugin, and persistent search
(draft-ietf-ldapext-psearch-03), of 389 Directory Server and others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from .ber import (
    BOOLEAN,
    ENUMERATED,
    INTEGER,
    OCTETS,
    SEQUENCE,
    TRUE,
    ProtocolError,
    element,
    limit,
    number,
    read_element,
    read_header,
    read_number,
    read_text,
    text,
)

PAGED_RESULTS = "1.2.840.113556.1.4.319"
PASSWORD_POLICY = "1.3.6.1.4.1.42.2.27.8.5.1"
SYNC_REQUEST: Final = "1.3.6.1.4.1.4203.1.9.1.1"
SYNC_STATE: Final = "1.3.6.1.4.1.4203.1.9.1.2"
SYNC_INFO: Final = "1.3.6.1.4.1.4203.1.9.1.4"
#: The capability by which Active Directory and Samba are known (MS-ADTS 3.1.1.3.4.3.1).
ACTIVE_DIRECTORY: Final = "1.2.840.113556.1.4.800"
PERSISTENT_SEARCH: Final = "2.16.840.1.113730.3.4.3"
ENTRY_CHANGE: Final = "2.16.840.1.113730.3.4.7"

# What has become of an entry (RFC 4533 section 2.3).
PRESENT, ADDED, MODIFIED, DELETED = range(4)

_REFRESH_AND_PERSIST = bytes((ENUMERATED, 1, 3))
# Changes of all kinds: added, deleted, modified, renamed.
_ALL_CHANGES = 1 | 2 | 4 | 8
_OF_CHANGE = {1: ADDED, 2: DELETED, 4: MODIFIED, 8: MODIFIED}

Control = tuple[str, bool, bytes | None]
"""A control of an answer: OID, criticality, value."""


def control(oid: str, critical: bool = False, value: bytes | None = None) -> bytes:
    """Encode one control, for :func:`encode` (RFC 4511 section 4.1.11).

    :param oid: its OID
    :param critical: true if a server that does not know it has to refuse the request
    :param value: its value, ``None`` for none
    """
    parts = [element(OCTETS, text(oid, "OID"))]
    if critical:
        parts.append(TRUE)
    if value is not None:
        parts.append(element(OCTETS, value))
    return element(SEQUENCE, b"".join(parts))


def encode(*encoded: bytes) -> bytes:
    """Encode the controls of a request; empty if there is none."""
    return element(0xA0, b"".join(encoded)) if encoded else b""


def paged_control(size: int, cookie: bytes, critical: bool = True) -> bytes:
    """Encode the wish for a page of results (RFC 2696).

    :param size: entries of the page; 0 with a cookie to give up the rest
    :param cookie: cookie of the page before; empty for the first page
    :raises OptionError: the size is out of range
    """
    value = element(INTEGER, number(limit("page_size", size))) + element(OCTETS, cookie)
    return control(PAGED_RESULTS, critical, element(SEQUENCE, value))


def password_policy_control() -> bytes:
    """Encode the wish to hear of the password policy (draft-behera-ldap-password-policy 6.1)."""
    return _PASSWORD_POLICY_CONTROL


_PASSWORD_POLICY_CONTROL = control(PASSWORD_POLICY)


def find(controls: Iterable[Control], oid: str) -> tuple[bytes, int, int] | None:
    """Return the value of a control, and the offsets of its sequence's content in it.

    :param controls: the controls of an answer
    :param oid: the OID of the one that is looked for
    :returns: ``None`` if there is no such control
    :raises ProtocolError: its value is no sequence
    """
    for name, _, value in controls:
        if name == oid:
            if value is None:
                return b"", 0, 0
            tag, start, stop = read_header(value, 0, len(value))
            if tag != SEQUENCE:
                raise ProtocolError(f"the value of control {oid} is no sequence")
            return value, start, stop
    return None


def paged_cookie(controls: Iterable[Control]) -> bytes | None:
    """Return the cookie for the next page (RFC 2696): empty after the last, ``None`` without pages.

    :raises ProtocolError: the control is broken
    """
    found = find(controls, PAGED_RESULTS)
    if found is None:
        return None
    value, at, end = found
    _, at = read_element(value, at, end, INTEGER)
    return read_element(value, at, end, OCTETS)[0]


class PasswordPolicy(NamedTuple):
    """The password policy's answer to a bind (draft-behera-ldap-password-policy section 6.2)."""

    warning: tuple[int, int] | None
    """0 and the seconds until the password expires, or 1 and the logins left after it has."""
    error: int | None
    """0 expired, 1 locked, 2 must be changed, 3 to 8 about changes of a password."""

    @property
    def expiring(self) -> int | None:
        """Seconds until the password expires."""
        return self.warning[1] if self.warning and self.warning[0] == 0 else None

    @property
    def grace(self) -> int | None:
        """Logins that are left with an expired password."""
        return self.warning[1] if self.warning and self.warning[0] == 1 else None


def password_policy(controls: Iterable[Control]) -> PasswordPolicy | None:
    """Return the password policy's words on a bind, ``None`` without any.

    :raises ProtocolError: the control is broken
    """
    found = find(controls, PASSWORD_POLICY)
    if found is None:
        return None
    value, at, end = found
    warning, error = None, None
    while at < end:
        tag, start, at = read_header(value, at, end)
        if tag == 0xA0:
            kind, first, last = read_header(value, start, at)
            if kind in (0x80, 0x81):
                warning = kind & 1, read_number(value[first:last])
        elif tag == 0x81:
            error = read_number(value[start:at])
    return PasswordPolicy(warning, error)


def sync_control(cookie: bytes = b"") -> bytes:
    """Encode the wish for all entries, and then for each change (RFC 4533 section 2.2).

    :param cookie: the state that is known already; empty: none
    """
    known = element(OCTETS, cookie) if cookie else b""
    return control(SYNC_REQUEST, True, element(SEQUENCE, _REFRESH_AND_PERSIST + known))


def persistent_control() -> bytes:
    """Encode the wish for each change from now on, and to be told its kind."""
    value = element(INTEGER, number(_ALL_CHANGES)) + TRUE + TRUE
    return control(PERSISTENT_SEARCH, True, element(SEQUENCE, value))


class EntryState(NamedTuple):
    """The state of an entry that comes, against what was known."""

    #: :data:`PRESENT`, :data:`ADDED`, :data:`MODIFIED` or :data:`DELETED`.
    state: int
    #: The name that it keeps for ever; empty where the server does not tell it.
    uuid: bytes
    #: Its DN before it was renamed; empty if it was not, or where the server does not tell.
    previous: str = ""
    #: The state of the server after this change, where it tells; see :func:`csns`.
    cookie: bytes = b""


def entry_state(controls: Iterable[Control]) -> EntryState | None:
    """Return a server's note on an entry, by either control; ``None`` without one.

    :raises ProtocolError: the control is broken
    """
    controls = list(controls)
    if (found := find(controls, SYNC_STATE)) is not None:
        value, at, end = found
        state, at = read_element(value, at, end, ENUMERATED)
        uuid, at = read_element(value, at, end, OCTETS)
        cookie = b""
        if at < end and value[at] == OCTETS:
            cookie, _ = read_element(value, at, end, OCTETS)
        if (kind := read_number(state)) > DELETED:
            raise ProtocolError(f"an entry has the unknown state {kind}")
        return EntryState(kind, uuid, cookie=cookie)
    if (found := find(controls, ENTRY_CHANGE)) is not None:
        value, at, end = found
        changed, at = read_element(value, at, end, ENUMERATED)
        previous = b""
        if at < end and value[at] == OCTETS:
            previous, _ = read_element(value, at, end, OCTETS)
        kind = _OF_CHANGE.get(read_number(changed), DELETED)
        return EntryState(kind, b"", read_text(previous))
    return None


def ends_refresh(oid: str | None, value: bytes | None) -> bool:
    """Return whether an intermediate answer says that only changes come from now on.

    :param oid: the answer's OID
    :param value: the answer's value, a Sync Info Message (RFC 4533 section 2.5)
    :raises ProtocolError: it is broken
    """
    if oid != SYNC_INFO or not value:
        return False
    tag, at, end = read_header(value, 0, len(value))
    if tag not in (0xA1, 0xA2):  # refreshDelete, refreshPresent
        return False
    while at < end:
        tag, start, at = read_header(value, at, end)
        if tag == BOOLEAN:
            return any(value[start:at])
    return True  # the default of refreshDone


def told_cookie(oid: str | None, value: bytes | None) -> bytes:
    """Return the cookie of an intermediate answer; empty if it has none.

    :param oid: the answer's OID
    :param value: the answer's value, a Sync Info Message (RFC 4533 section 2.5)
    :raises ProtocolError: it is broken
    """
    if oid != SYNC_INFO or not value:
        return b""
    tag, at, end = read_header(value, 0, len(value))
    if tag == 0x80:  # newcookie
        return value[at:end]
    if tag not in (0xA1, 0xA2, 0xA3) or at == end or value[at] != OCTETS:
        return b""
    return read_element(value, at, end, OCTETS)[0]


def csns(cookie: bytes) -> list[bytes]:
    """Return the change numbers in a cookie of slapd's (``rid=000,sid=001,csn=NUMBER;NUMBER``)."""
    for part in cookie.split(b","):
        name, _, numbers = part.partition(b"=")
        if name == b"csn":
            return [each for each in numbers.split(b";") if each]
    return []


def by_server(numbers: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the newest of slapd's change numbers for each server that gave them out.

    A number is ``TIME#COUNT#SERVER#MODIFICATION``, and of one server a later one is greater, byte
    by byte.
    """
    newest: dict[bytes, bytes] = {}
    for each in numbers:
        parts = each.split(b"#")
        server = parts[2] if len(parts) == 4 else b""
        newest[server] = max(each, newest.get(server, b""))
    return newest


def csn_cookie(numbers: Iterable[bytes]) -> bytes:
    """Return slapd's cookie for the state that its ``contextCSN`` tells; empty if that is none."""
    known = ";".join(sorted(read_text(each) for each in numbers))
    return f"rid=000,csn={known}".encode() if known else b""
