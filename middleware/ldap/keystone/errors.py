"""keyfront's errors as the exceptions of python-ldap that Keystone's code and operators expect."""

from __future__ import annotations

import re
from typing import Any

import ldap

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    FilterError,
)

# By result code; NO_UNIQUE_ENTRY is python-ldap's own and has the code of its base class.
_CLASSES: dict[int, type[Exception]] = {
    kind.errnum: kind
    for kind in vars(ldap).values()
    if isinstance(kind, type) and ldap.LDAPError in kind.__bases__ and hasattr(kind, "errnum")
}

# libldap's texts, where they are not the names of RFC 4511 in words.
_TEXTS = {
    -1: "Can't contact LDAP server",
    -5: "Timed out",
    -7: "Bad search filter",
    -9: "Bad parameter to an ldap routine",
    -12: "Not Supported",
    2: "Protocol error",
    3: "Time limit exceeded",
    7: "Authentication method not supported",
    8: "Strong(er) authentication required",
    11: "Administrative limit exceeded",
    12: "Critical extension is unavailable",
    17: "Undefined attribute type",
    20: "Type or value exists",
    50: "Insufficient access",
    51: "Server is busy",
    52: "Server is unavailable",
    53: "Server is unwilling to perform",
    66: "Operation not allowed on non-leaf",
    67: "Operation not allowed on RDN",
    68: "Already exists",
    69: "Cannot modify object class",
    71: "Operation affects multiple DSAs",
    80: "Other (e.g., implementation specific) error",
}


def translated(error: DirectoryError) -> Exception:
    """Return the exception that python-ldap would have raised, with its dictionary.

    In it, ``desc`` and ``result`` are libldap's; ``info`` is what the server said, or the line of
    ``error``, which names the server.
    """
    if isinstance(error, DirectoryAnswerError):
        # A password that must be changed first can come with the code of success.
        known = _CLASSES.get(error.code) if error.code else ldap.INVALID_CREDENTIALS
        about: dict[str, Any] = {
            "result": error.code,
            "desc": _TEXTS.get(error.code) or _in_words(error.name),
            "ctrls": [],
        }
        if error.matched_dn:
            about["matched"] = error.matched_dn
        info = error.diagnostic
        if error.referrals:
            info = f"Referral:\n{error.referrals[0]}"
        if info:
            about["info"] = info
        return _new(known or ldap.LDAPError, about)
    if isinstance(error, FilterError):
        return made(ldap.FILTER_ERROR)
    return made(
        ldap.TIMEOUT if isinstance(error, DirectoryTimeoutError) else ldap.SERVER_DOWN, str(error)
    )


def made(kind: Any, info: str = "") -> Exception:
    """Return an exception of python-ldap's for what no server answered.

    :param kind: one of python-ldap's classes
    :param info: text that says more about it
    """
    about = {"result": kind.errnum, "desc": _TEXTS[kind.errnum], "ctrls": []}
    return _new(kind, about | ({"info": info} if info else {}))


def _new(kind: type[Exception], about: dict[str, Any]) -> Exception:
    return kind(about)


def _in_words(name: str) -> str:
    """Return a name such as ``noSuchObject`` as libldap puts it: ``No such object``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z ]+", name)
    lower = " ".join(x if x.isupper() and len(x) > 1 else x.lower() for x in words)
    return lower[:1].upper() + lower[1:]
