"""Redacts other people's files: no secret is shown, and nothing that steers a terminal."""

from __future__ import annotations

import re

# The user and the password of a URL: driver://user:password@host.
_CREDENTIALS = re.compile(r"(?P<scheme>\b[\w+.-]+://)(?P<user>[^\s:/@]*):[^\s]*@(?=[^\s@]*)")
# A name that says that its value is secret, what is between them, and the value.
_SECRET = re.compile(
    r"""(?ix)
    (?<![A-Za-z])
    ( [\w-]* (?: pass(?:word|wd|phrase) | secret | auth[_-]?key | secret[_-]?key
                | api[_-]?key | access[_-]?key | private[_-]?key | auth-pass
                | token | cookie )
    | \w+_key(?:_id)? | \w+_pass(?=\s*=) | x-[\w-]*key | (?:proxy-)?authorization | stats\s+auth
    )
    (?![\w.(/-]) ["']? (\s*[=:]\s*|\s+)
    (?P<value> "[^"]*" | '[^']*'
             | (?:basic|bearer|digest|negotiate|token)\s+[^\s"';]+ | (?:\\.|[^\s;\\])+ )
    """
)
_LONGEST = 300


def shown(text: object) -> str:
    """Return text of a file as it may be printed.

    Passwords of URLs and values whose names say that they are secret become ``***``, what would
    steer a terminal ``?``, and more than 300 characters an ellipsis.
    """
    line = masked(" ".join(str(text).split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def shown_line(text: str) -> str:
    """Return a line that is to be written, as it may be printed: with its indent, and whole."""
    indent = text[: len(text) - len(text.lstrip())]
    return indent + masked(" ".join(text.split()))


def masked(line: str, *, ours: bool = False) -> str:
    """Return a line of a file, whole, without its secrets and without what steers a terminal.

    :param ours: it is of a file that keyfront renders, whose comments speak of passwords and
        tokens: secret is only what is set, by ``=`` or ``:``
    """
    hidden = _hidden_if_set if ours else _hidden
    line = _SECRET.sub(hidden, _CREDENTIALS.sub(r"\g<scheme>***@", line))
    return "".join(x if x.isprintable() or x == "\t" else "?" for x in line)


# What may stand where a value stands, and is none: words that switch, sizes, other names.
_PLAIN = frozenset(
    ("on", "off", "true", "false", "yes", "no", "early", "always", "fernet", "is", "and", "or",
     "of", "has", "not", "for", "with", "without")
)  # fmt: skip
# A variable of nginx or Apache, which only names what it holds.
_NAMED = re.compile(r"[\"']?[$%]\{?[A-Za-z_][\w-]*\}?[ei]?[\"']?")


def _hidden_if_set(match: re.Match[str]) -> str:
    return _hidden(match) if match[2].strip() else match[0]


def _hidden(match: re.Match[str]) -> str:
    value = match["value"]
    if value.strip("\"'(").lower() in _PLAIN or _NAMED.fullmatch(value):
        return match[0]
    if match[1].lower().endswith("certificate_key") and value.startswith("/"):
        return match[0]
    return f"{match[1]}{match[2]}***"
