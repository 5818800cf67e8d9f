"""Encodes and decodes what a directory is followed by: controls that make a search go on.

Content synchronization (syncrepl, RFC 4533), of slapd and of 389 Directory Server with its plugin;
and persistent search (draft-ietf-ldapext-psearch-03), of 389 Directory Server and others.
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
    number,
    read_element,
    read_header,
    read_number,
    read_text,
)
from .controls import Control, control, find

SYNC_REQUEST: Final = "1.3.6.1.4.1.4203.1.9.1.1"
SYNC_STATE: Final = "1.3.6.1.4.1.4203.1.9.1.2"
SYNC_INFO: Final = "1.3.6.1.4.1.4203.1.9.1.4"
#: What Active Directory and Samba say that they are (MS-ADTS 3.1.1.3.4.3.1).
ACTIVE_DIRECTORY: Final = "1.2.840.113556.1.4.800"
PERSISTENT_SEARCH: Final = "2.16.840.1.113730.3.4.3"
ENTRY_CHANGE: Final = "2.16.840.1.113730.3.4.7"

# What has become of an entry (RFC 4533 section 2.3).
PRESENT, ADDED, MODIFIED, DELETED = range(4)

_REFRESH_AND_PERSIST = bytes((ENUMERATED, 1, 3))
# Changes of all kinds: added, deleted, modified, renamed.
_ALL_CHANGES = 1 | 2 | 4 | 8
_OF_CHANGE = {1: ADDED, 2: DELETED, 4: MODIFIED, 8: MODIFIED}


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
    """What an entry that comes has to do with what was known."""

    #: :data:`PRESENT`, :data:`ADDED`, :data:`MODIFIED` or :data:`DELETED`.
    state: int
    #: What names it for ever; empty where the server does not tell.
    uuid: bytes
    #: Its DN before it was renamed; empty if it was not, or where the server does not tell.
    previous: str = ""


def entry_state(controls: Iterable[Control]) -> EntryState | None:
    """Return what a server says of an entry, by either control; ``None`` if nothing.

    :raises ProtocolError: the control is broken
    """
    controls = list(controls)
    if (found := find(controls, SYNC_STATE)) is not None:
        value, at, end = found
        state, at = read_element(value, at, end, ENUMERATED)
        uuid, _ = read_element(value, at, end, OCTETS)
        if (kind := read_number(state)) > DELETED:
            raise ProtocolError(f"an entry has the unknown state {kind}")
        return EntryState(kind, uuid)
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
    """Whether an intermediate answer says that only changes come from now on.

    :param oid: of the answer
    :param value: of the answer, a Sync Info Message (RFC 4533 section 2.5)
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


def csn_cookie(numbers: Iterable[bytes]) -> bytes:
    """Return slapd's cookie for the state that its ``contextCSN`` tells; empty if that is none."""
    known = ";".join(sorted(read_text(each) for each in numbers))
    return f"rid=000,csn={known}".encode() if known else b""
