"""Encodes search filters, from the text of RFC 4515 to RFC 4511, and escapes values for them.

What libldap takes is taken, so that the filters of a working configuration go on working: a single
comparison without parentheses, spaces between parts, RFC 1960's ``\\*`` for ``\\2a``, ``(&)`` and
``(|)`` for true and false (RFC 4526). What it refuses is refused, but for spaces around the whole
and before a closing parenthesis. Spaces in a value are part of it.

Nothing is kept of a filter: it may hold the name of a user.
"""

from __future__ import annotations

import re

from keyfront.errors import FilterError

from .ber import OCTETS, TRUE, element

#: Filters inside filters; slapd takes no more either.
MAX_DEPTH = 1000

_SPACES = " \t\n"
_AND, _OR, _NOT = 0xA0, 0xA1, 0xA2
_EQUAL, _SUBSTRINGS, _PRESENT, _EXTENSIBLE = 0xA3, 0xA4, 0x87, 0xA9
_INITIAL, _ANY, _FINAL = 0x80, 0x81, 0x82
_LISTS = {"&": _AND, "|": _OR, "!": _NOT}
_COMPARISONS = {"=": _EQUAL, ">=": 0xA5, "<=": 0xA6, "~=": 0xA8}

# An attribute description or the OID of a matching rule (RFC 4512 sections 1.4 and 2.5).
_OID = r"(?:[A-Za-z][A-Za-z0-9-]*+|[0-9]++(?:\.[0-9]++)*)"
_DESCRIPTION = _OID + r"(?:;[A-Za-z0-9-]++)*"
_ESCAPES = r"\\(?:[0-9A-Fa-f]{2}|[()*\\])"
_VALUE = rf"([^()*\\\0]*+(?:{_ESCAPES}[^()*\\\0]*+)*)"
_VALUES = rf"([^()\\\0]*+(?:{_ESCAPES}[^()\\\0]*+)*)"
# One comparison, up to its parenthesis. No part can match in two ways, so that none takes longer
# than its length (a possessive group would say so, but is broken before Python 3.11.5).
_COMPARISON = re.compile(rf"({_DESCRIPTION})(?:={_VALUES}|([<>~]=){_VALUE})\)")
_EXTENSIBLE_COMPARISON = re.compile(
    rf"({_DESCRIPTION})?(:[dD][nN](?=:))?(?::({_OID})?)?:={_VALUE}\)"
)
_GAP = re.compile(r"[ \t\n]*+")
_OLD_ESCAPE = re.compile(r"\\([()*\\])")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2})")
_BYTES = {b"%02x" % byte: bytes((byte,)) for byte in range(256)}

_ESCAPED = str.maketrans({char: f"\\{ord(char):02x}" for char in "\\*()\0"})
_ESCAPED_BYTES = tuple(
    chr(byte) if byte < 128 and chr(byte) not in "\\*()\0" else f"\\{byte:02x}"
    for byte in range(256)
)

# Characters of a filter that an error shows.
_SHOWN = 60


def encode(filter: str) -> bytes:
    """Encode a filter as a search request holds it (RFC 4511 section 4.5.1.7).

    The time it takes grows with the length of the text, and up to ``MAX_DEPTH`` with its depth.

    :param filter: text such as ``(&(objectClass=person)(uid=...))``, with values that
        :func:`escape` returned
    :raises FilterError: it is no filter; shows the position
    """
    at = _skip(filter, 0)
    end = len(filter.rstrip(_SPACES))
    if not filter.startswith("(", at):
        text = filter[at:] + ")"
        found, stop = _comparison(filter, text, 0)
        if stop < len(text):
            raise _error(filter, at + stop - 1, "there is a ')' without a '('")
        return found
    # What is open: its tag, what it holds by now.
    stack: list[tuple[int, list[bytes]]] = []
    while True:
        if not filter.startswith("(", at):
            raise _error(filter, at, "there should be a '('" if at < end else "a ')' is missing")
        at = _skip(filter, at + 1)
        tag = _LISTS.get(filter[at : at + 1])
        if tag is None:
            found, at = _comparison(filter, filter, at)
            if not stack:
                break
            stack[-1][1].append(found)
        elif len(stack) == MAX_DEPTH:
            raise _error(filter, at, f"it is nested more than {MAX_DEPTH} deep")
        else:
            stack.append((tag, []))
            at += 1
        at = _skip(filter, at)
        while filter.startswith(")", at):
            tag, parts = stack.pop()
            if tag == _NOT and len(parts) != 1:
                raise _error(filter, at, f"a '!' is followed by {len(parts)} filters, not by one")
            found = element(tag, b"".join(parts))
            at += 1
            if not stack:
                break
            stack[-1][1].append(found)
            at = _skip(filter, at)
        if not stack:
            break
    if at < end:
        raise _error(filter, at, "it goes on after its end")
    return found


def escape(value: str | bytes) -> str:
    """Escape a value for a filter's text (RFC 4515 section 3): it means nothing but itself.

    :param value: text, in which only characters with a meaning are escaped; or bytes, in which
        those that are not ASCII are escaped too
    """
    if isinstance(value, str):
        return value.translate(_ESCAPED)
    return "".join([_ESCAPED_BYTES[byte] for byte in value])


def _skip(text: str, at: int) -> int:
    match = _GAP.match(text, at)
    assert match is not None
    return match.end()


def _comparison(filter: str, text: str, at: int) -> tuple[bytes, int]:
    """Encode one comparison; return it with the offset after its parenthesis.

    :param filter: the whole filter, for the error
    """
    match = _COMPARISON.match(text, at)
    if match is None:
        return _extensible(filter, text, at)
    description, value, operator, ordered = match.groups()
    name = element(OCTETS, description.encode())
    if operator is not None:
        ordered = _modern(ordered)
        found = element(_COMPARISONS[operator], name + element(OCTETS, _value(filter, at, ordered)))
    elif "*" not in (value := _modern(value)):
        found = element(_EQUAL, name + element(OCTETS, _value(filter, at, value)))
    elif value == "*":
        found = element(_PRESENT, description.encode())
    else:
        found = _substrings(filter, at, name, value)
    return found, match.end()


def _substrings(filter: str, at: int, name: bytes, value: str) -> bytes:
    first, *middle, last = value.split("*")
    if not all(middle):
        raise _error(filter, at, "there is nothing between two '*'")
    parts = [element(_INITIAL, _value(filter, at, first))] if first else []
    parts += [element(_ANY, _value(filter, at, part)) for part in middle]
    if last:
        parts.append(element(_FINAL, _value(filter, at, last)))
    return element(_SUBSTRINGS, name + element(0x30, b"".join(parts)))


def _extensible(filter: str, text: str, at: int) -> tuple[bytes, int]:
    match = _EXTENSIBLE_COMPARISON.match(text, at)
    if match is None:
        raise _error(filter, at, _reason(text, at))
    description, dn, rule, value = match.groups()
    if not (description or rule):
        raise _error(filter, at, "an extensible comparison needs an attribute or a rule")
    parts = [element(0x81, rule.encode())] if rule else []
    if description:
        parts.append(element(0x82, description.encode()))
    parts.append(element(0x83, _value(filter, at, _modern(value))))
    if dn:
        parts.append(b"\x84" + TRUE[1:])
    return element(_EXTENSIBLE, b"".join(parts)), match.end()


def _modern(value: str) -> str:
    """Return a value with RFC 1960's escapes as RFC 4515's, so that all stars are wildcards."""
    return _OLD_ESCAPE.sub(lambda match: escape(match[1]), value) if "\\" in value else value


def _value(filter: str, at: int, value: str) -> bytes:
    """Return the bytes of a value with RFC 4515's escapes only, which are known to be whole."""
    try:
        content = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _error(filter, at, "it holds half of a UTF-16 pair") from None
    if b"\\" not in content:
        return content
    return _ESCAPE.sub(lambda match: _BYTES[match[1].lower()], content)


def _reason(text: str, at: int) -> str:
    """Return the reason why there is no comparison."""
    stop = min((i for i in (text.find(")", at), text.find("(", at)) if i >= 0), default=len(text))
    part = text[at:stop]
    left, sign, _ = part.partition("=")
    if not sign:
        return "there is no comparison" if part.strip(_SPACES) else "there is nothing"
    if re.fullmatch(_DESCRIPTION, left.rstrip("<>~:")) is None and ":" not in left:
        return "an attribute has letters, digits and '-'"
    if "\0" in part:
        return r"a zero byte is written \00"
    if re.search(r"\\(?![0-9A-Fa-f]{2}|[()*\\])", part):
        return r"a '\' is followed by two hexadecimal digits"
    if stop == len(text):
        return "a ')' is missing"
    return "this is no comparison; in values, parentheses and '*' are written \\28, \\29, \\2a"


def _error(filter: str, at: int, reason: str) -> FilterError:
    shown = filter if len(filter) <= _SHOWN else f"{filter[:_SHOWN]}..."
    return FilterError(f"filter {shown!r}: {reason} (character {at + 1})")
