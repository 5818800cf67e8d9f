"""Writes and reads BER elements, as far as LDAP needs them (RFC 4511 section 5.1, X.690).

Lengths are definite, strings are primitive, tags are one byte; lengths need not be the shortest
possible when read (Active Directory always sends four bytes). Nothing here keeps anything.

Texts (DNs, attribute descriptions, URLs, OIDs) are UTF-8. Bytes that are not are read with
``surrogateescape`` and written back the same way, so that an entry with a broken name can still be
searched below, bound to or named in a filter.
"""

from __future__ import annotations

from keyfront.errors import OptionError

OCTETS, SEQUENCE, SET = 0x04, 0x30, 0x31
BOOLEAN, INTEGER, ENUMERATED = 0x01, 0x02, 0x0A

#: The largest number in LDAP (``maxInt``, RFC 4511 section 4.1.1).
MAX_INT = 2**31 - 1

# An LDAP library for C reads at most as many bytes of length.
_LENGTH_BYTES = 8
#: The BOOLEAN (RFC 4511 section 5.1: 0xff and nothing else).
TRUE = b"\x01\x01\xff"

_SHORT = tuple(bytes((number,)) for number in range(128))


class ProtocolError(ValueError):
    """Raised for received bytes that are no LDAP; the connection cannot be used any more."""


class TooLargeError(ProtocolError):
    """Raised for an answer that is LDAP and takes more memory than it may."""


def length(size: int) -> bytes:
    """Return the length octets for ``size`` bytes of content, as short as possible."""
    if size < 128:
        return _SHORT[size]
    count = (size.bit_length() + 7) >> 3
    return bytes((0x80 | count,)) + size.to_bytes(count, "big")


def element(tag: int, content: bytes) -> bytes:
    """Return a whole element.

    :param tag: the identifier octet, 0 to 255
    """
    size = len(content)
    if size < 128:
        return bytes((tag, size)) + content
    return b"".join((bytes((tag,)), length(size), content))


def number(value: int) -> bytes:
    """Return the content octets of an INTEGER or ENUMERATED of 0 or more."""
    return value.to_bytes((value.bit_length() >> 3) + 1, "big")


def text(value: str, what: str) -> bytes:
    """Return a text in UTF-8.

    :param what: name of the text in the error
    :raises OptionError: it holds half of a UTF-16 pair, which no UTF-8 can express
    """
    try:
        return value.encode()
    except UnicodeEncodeError:
        pass
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise OptionError(what, ascii(value), "text that UTF-8 can express") from None


def limit(option: str, value: int) -> int:
    """Return the value of an option that LDAP sends as a number, 0 to ``MAX_INT``.

    :param option: the option's name, for the error
    :raises OptionError: it is out of range
    """
    if not 0 <= value <= MAX_INT:
        raise OptionError(option, value, f"from 0 to {MAX_INT}")
    return value


def read_text(content: bytes) -> str:
    """Return the text of a name, DN or URL; what is no UTF-8 goes back the same by :func:`text`."""
    return content.decode("utf-8", "surrogateescape")


def read_header(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Read the head of the element at ``at``.

    :param at: offset of the element
    :param end: offset at which the data that it is part of end
    :returns: its tag, and the offsets at which its content begins and ends
    :raises ProtocolError: it does not end before ``end``, or has no definite length
    """
    start = at + 2
    if start > end:
        raise ProtocolError("an element is cut off")
    tag, size = data[at], data[at + 1]
    if tag & 0x1F == 0x1F:
        raise ProtocolError("a tag is longer than a byte")
    if size > 127:
        size, start = read_length(data, start, size)
    stop = start + size
    if stop > end:
        raise ProtocolError("an element is longer than what it is part of")
    return tag, start, stop


def read_length(data: bytes, at: int, first: int) -> tuple[int, int]:
    """Read a length of the long form.

    :param data: the encoded message
    :param at: offset after the length's first byte
    :param first: the length's first byte, above 127
    :returns: the length, and the offset of the content; the caller holds it against the end
    :raises ProtocolError: it is indefinite or absurd
    """
    count = first & 0x7F
    if not 0 < count <= _LENGTH_BYTES:
        raise ProtocolError("an element's length is " + ("absurd" if count else "indefinite"))
    return int.from_bytes(data[at : at + count], "big"), at + count


def read_element(data: bytes, at: int, end: int, tag: int) -> tuple[bytes, int]:
    """Read an element that must have this tag.

    :param data: the bytes of a message
    :param at: the offset at which the element begins
    :param end: the offset at which what it lies in ends
    :param tag: the tag, one byte
    :returns: its content, and the offset at which the next one begins
    :raises ProtocolError: there is none, or another one
    """
    found, start, stop = read_header(data, at, end)
    if found != tag:
        raise ProtocolError(f"an element has tag 0x{found:02x} instead of 0x{tag:02x}")
    return data[start:stop], stop


def read_number(content: bytes) -> int:
    """Return the value of an INTEGER or ENUMERATED.

    :raises ProtocolError: it is not from 0 to ``MAX_INT``, as all of LDAP's are
    """
    value = int.from_bytes(content, "big", signed=True)
    if not content or not 0 <= value <= MAX_INT:
        raise ProtocolError("a number is out of range")
    return value
