"""Encodes and decodes controls: extras of requests and answers (RFC 4511 section 4.1.11).

Two are known here: results by pages (RFC 2696) and the password policy
(draft-behera-ldap-password-policy). Those by which a directory is followed are in ``sync.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .ber import (
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
    text,
)

PAGED_RESULTS = "1.2.840.113556.1.4.319"
PASSWORD_POLICY = "1.3.6.1.4.1.42.2.27.8.5.1"

Control = tuple[str, bool, bytes | None]
"""A control of an answer: OID, criticality, value."""


def control(oid: str, critical: bool = False, value: bytes | None = None) -> bytes:
    """Encode one control, for :func:`encode` (RFC 4511 section 4.1.11)."""
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
    """Return what the password policy says about a bind, ``None`` if nothing.

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
