"""Encodes LDAP requests (RFC 4511 section 4).

Requests are put together directly from their bytes; ldap3 spends two thirds of a search on building
its own. They are byte for byte what ldap3 and libldap send.
"""

from __future__ import annotations

from collections.abc import Sequence

from keyfront.errors import OptionError

from .ber import (
    BOOLEAN,
    ENUMERATED,
    INTEGER,
    OCTETS,
    TRUE,
    element,
    length,
    limit,
    number,
    text,
)

#: The extended operation after which all is encrypted (RFC 4511 section 4.14).
START_TLS = "1.3.6.1.4.1.1466.20037"

_SCOPES = {
    (scope, aliases): bytes((ENUMERATED, 1, scope, ENUMERATED, 1, aliases))
    for scope in range(4)
    for aliases in range(4)
}
_FALSE = bytes((BOOLEAN, 1, 0))
_NO_LIMITS = bytes((INTEGER, 1, 0, INTEGER, 1, 0)) + _FALSE


def password_octets(password: str | bytes) -> bytes | None:
    """Return a password as it is sent (RFC 4513 section 5.1.3).

    :return: ``None`` if it cannot be written in UTF-8, so that no directory has it
    """
    try:
        return password if isinstance(password, bytes) else password.encode()
    except UnicodeEncodeError:
        return None
    finally:
        # Of an error's frames, none may still have it.
        del password


def never_sent(password: bytes | None) -> str:
    """Return why a password is sent to no server; ``None`` is what no UTF-8 can express.

    Samba and 389 Directory Server end a password at a NUL: with anything after it, the right one
    would be taken for right.
    """
    if password is None:
        return "it cannot be written in UTF-8"
    return "it has a NUL" if password else "it is empty"


def bind_request(message_id: int, dn: str, password: bytes, controls: bytes = b"") -> bytes:
    """Encode a simple bind, version 3 (RFC 4511 section 4.2); the caller refuses empty passwords.

    :param controls: controls encoded by :func:`.controls.encode`
    :raises OptionError: the DN cannot be written in UTF-8
    """
    try:
        name = text(dn, "DN")
    except OptionError:
        # not in the traceback
        del password
        raise
    return _message(
        message_id,
        b"\x60",
        b"".join(
            (b"\x02\x01\x03\x04", length(len(name)), name, b"\x80", length(len(password)), password)
        ),
        controls,
    )


def search_request(
    message_id: int,
    base: str,
    scope: int,
    filter: bytes,
    attributes: Sequence[str] | None,
    *,
    attrs_only: bool = False,
    size_limit: int = 0,
    time_limit: int = 0,
    dereference: int = 0,
    controls: bytes = b"",
) -> bytes:
    """Encode a search (RFC 4511 section 4.5.1).

    :param scope: 0 the entry itself, 1 those right below, 2 all below and itself, 3 all below
    :param filter: filter encoded by :func:`.search_filter.encode`
    :param attributes: attributes to return; ``None`` or an empty sequence for all user attributes,
        ``("1.1",)`` for none
    :param attrs_only: return attributes without their values
    :param size_limit: entries, 0 for as many as the server gives
    :param time_limit: seconds for the server, 0 for as many as it takes
    :param dereference: aliases followed: 0 never, 1 below the base, 2 the base, 3 always
    :param controls: controls encoded by :func:`.controls.encode`
    :raises OptionError: an argument is out of its range
    """
    try:
        scopes = _SCOPES[scope, dereference]
    except KeyError:
        raise OptionError("scope, dereference", (scope, dereference), "from 0 to 3 each") from None
    if size_limit or time_limit or attrs_only:
        limits = b"".join(
            (
                element(INTEGER, number(limit("size_limit", size_limit))),
                element(INTEGER, number(limit("time_limit", time_limit))),
                TRUE if attrs_only else _FALSE,
            )
        )
    else:
        limits = _NO_LIMITS
    name = text(base, "search base")
    if attributes:
        wanted = b"".join([element(OCTETS, text(each, "attribute")) for each in attributes])
    else:
        wanted = b""
    return _message(
        message_id,
        b"\x63",
        b"".join(
            (
                b"\x04",
                length(len(name)),
                name,
                scopes,
                limits,
                filter,
                b"\x30",
                length(len(wanted)),
                wanted,
            )
        ),
        controls,
    )


def unbind_request(message_id: int) -> bytes:
    """Encode the end of a connection (RFC 4511 section 4.3); nothing answers it."""
    return _message(message_id, b"\x42", b"", b"")


def abandon_request(message_id: int, target: int) -> bytes:
    """Encode giving up the operation ``target`` (RFC 4511 section 4.11); nothing answers it."""
    return _message(message_id, b"\x50", number(target), b"")


def extended_request(
    message_id: int, oid: str, value: bytes | None = None, controls: bytes = b""
) -> bytes:
    """Encode an extended operation (RFC 4511 section 4.12)."""
    body = element(0x80, text(oid, "OID"))
    if value is not None:
        body += element(0x81, value)
    return _message(message_id, b"\x77", body, controls)


def _message(message_id: int, tag: bytes, body: bytes, controls: bytes) -> bytes:
    identity = number(message_id)
    size = length(len(body))
    # an identity is at most four bytes: its length is one
    whole = len(identity) + len(size) + len(body) + len(controls) + 3
    return b"".join(
        (
            b"\x30",
            length(whole),
            b"\x02",
            length(len(identity)),
            identity,
            tag,
            size,
            body,
            controls,
        )
    )
