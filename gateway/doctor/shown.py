"""What may be shown of other people's files: no secret, and nothing that steers a terminal."""

from __future__ import annotations

import re

# The user and the password of a URL: driver://user:password@host.
_CREDENTIALS = re.compile(r"(?P<scheme>\b[\w+.-]+://)(?P<user>[^\s:/@]*):[^\s]*@(?=[^\s@]*)")
_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:password|passwd|secret|auth_key|secret_key|auth-pass|token)\b\s*[=: ]\s*)\S+"
)
_LONGEST = 300


def shown(text: object) -> str:
    """Return text of a file as it may be printed.

    Passwords of URLs and values whose names say that they are secret become ``***``, what would
    steer a terminal ``?``, and more than 300 characters an ellipsis.
    """
    line = masked(" ".join(str(text).split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def masked(line: str) -> str:
    """Return a line of a file, whole, without its secrets and without what steers a terminal."""
    line = _SECRET.sub(r"\1***", _CREDENTIALS.sub(r"\g<scheme>***@", line))
    return "".join(x if x.isprintable() or x == "\t" else "?" for x in line)
