"""Decodes the answers of a directory server (RFC 4511 section 4) from a stream of bytes.

Answers are read in one pass, and no further than somebody needs: an entry costs a list per
attribute and a ``bytes`` per value.

What is read is bytes where a directory may hold anything (values, cookies) and text where LDAP says
UTF-8. A DN, an attribute description or a URL that is no UTF-8 has its bad bytes as lone surrogates
(``surrogateescape``): it is told apart from others and can be sent back as it was. A diagnostic is
only ever shown, and is read with ``replace``, so that it can be logged.
"""

from __future__ import annotations

from .ber import (
    BOOLEAN,
    ENUMERATED,
    INTEGER,
    OCTETS,
    SEQUENCE,
    SET,
    ProtocolError,
    read_element,
    read_header,
    read_length,
    read_number,
    read_text,
)
from .controls import Control

# Tags of answers.
BIND, ENTRY, DONE, REFERENCE, EXTENDED, INTERMEDIATE = 1, 4, 5, 19, 24, 25

NOTICE_OF_DISCONNECTION = "1.3.6.1.4.1.1466.20036"

#: Bytes of one answer, at most; a photo or a group with a million members is below it.
MAX_MESSAGE = 64 << 20


class Message:
    """An answer. Its attributes depend on its tag; asking for others is an error.

    All have ``controls``. An entry (4) has ``dn`` and ``attributes``; descriptions are spelled as
    the server does, and those it sends twice are joined. A reference (19) has ``urls``. An
    intermediate answer (25) has ``oid`` and ``value``. All others are results: ``code``,
    ``matched_dn``, ``diagnostic``, ``referrals``, ``oid`` and ``value`` (of an extended result; a
    bind's ``value`` is what SASL gets).
    """

    __slots__ = (
        "attributes",
        "code",
        "controls",
        "diagnostic",
        "dn",
        "id",
        "matched_dn",
        "oid",
        "referrals",
        "tag",
        "urls",
        "value",
    )

    id: int
    tag: int
    controls: list[Control]
    dn: str
    attributes: dict[str, list[bytes]]
    urls: list[str]
    code: int
    matched_dn: str
    diagnostic: str
    referrals: list[str]
    oid: str | None
    value: bytes | None

    def __init__(self, id: int, tag: int) -> None:
        self.id = id
        self.tag = tag

    @property
    def is_notice(self) -> bool:
        """Whether the server says that it closes the connection (RFC 4511 section 4.4.1)."""
        return self.id == 0 and self.tag == EXTENDED and self.oid == NOTICE_OF_DISCONNECTION

    def __repr__(self) -> str:
        return f"<Message id={self.id} tag={self.tag}>"


class Decoder:
    """Decodes answers from a stream of bytes that is cut in any way.

    A byte is copied a fixed number of times, however small the chunks are. Once it has raised, it
    raises the same again and keeps nothing.

    :param max_message: most bytes of an answer. It is held against what the answer claims, so
        that no more is ever waited for. Reading one of many small values takes some times its size.
    """

    __slots__ = ("_at", "_data", "_error", "_max", "_need", "_tail")

    def __init__(self, *, max_message: int = MAX_MESSAGE) -> None:
        self._max = max_message
        self._error: str | None = None
        # What is being read, from where, and what came after it. The next answer, or as much of it
        # as tells its length, takes so many bytes.
        self._data = b""
        self._at = 0
        self._tail = bytearray()
        self._need = 1

    @property
    def pending(self) -> int:
        """The number of bytes that were fed and are not part of an answer given out."""
        return len(self._data) - self._at + len(self._tail)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that were received."""
        if self._error is not None:
            return
        if self._tail or self._at < len(self._data):
            self._tail += data
        else:
            self._data = bytes(data)
            self._at = 0

    def next(self) -> Message | None:
        """Return the next answer, or ``None`` if it is not all there.

        :raises ProtocolError: what was received is no LDAP, or too large
        """
        if self._error is not None:
            raise ProtocolError(self._error)
        try:
            return self._next()
        except (IndexError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._error = str(error)
            else:
                self._error = "an element is cut off"
            self._data, self._at, self._tail = b"", 0, bytearray()
        raise ProtocolError(self._error)

    def _next(self) -> Message | None:
        while True:
            data, at = self._data, self._at
            have = len(data) - at
            if have < self._need:
                if not self._tail or have + len(self._tail) < self._need:
                    return None
                data = self._data = b"".join((data[at:], self._tail))
                at = self._at = 0
                have = len(data)
                self._tail = bytearray()
            if data[at] != SEQUENCE:
                raise ProtocolError(f"an answer begins with 0x{data[at]:02x}")
            if have < 2:
                self._need = 2
                continue
            size, start = data[at + 1], at + 2
            if size > 127:
                size, start = read_length(data, start, size)
                if start > at + have:
                    self._need = start - at
                    continue
            if size > self._max:
                raise ProtocolError(f"an answer claims {size} bytes, more than {self._max}")
            stop = start + size
            if stop <= at + have:
                break
            self._need = stop - at
        message = _read_message(data, start, stop)
        self._need = 1
        if stop == len(data):
            self._data, self._at = b"", 0
        else:
            self._at = stop
        return message


def _read_message(data: bytes, at: int, end: int) -> Message:
    identity, at = read_element(data, at, end, INTEGER)
    tag, at, stop = read_header(data, at, end)
    message = Message(read_number(identity), tag & 0x1F)
    if tag == 0x64:
        _read_entry(message, data, at, stop)
    elif tag in _RESULTS:
        _read_result(message, data, at, stop)
    elif tag == 0x73:
        message.urls = _read_texts(data, at, stop)
    elif tag == 0x79:
        _read_named(message, data, at, stop, 0x80, 0x81)
    else:
        raise ProtocolError(f"an answer is of the unknown kind 0x{tag:02x}")
    message.controls = [] if stop == end else _read_controls(data, stop, end)
    return message


# Bind, search, modify, add, delete, rename, compare, extended.
_RESULTS = frozenset((0x61, 0x65, 0x67, 0x69, 0x6B, 0x6D, 0x6F, 0x78))


def _read_entry(message: Message, data: bytes, at: int, end: int) -> None:
    name, at = read_element(data, at, end, OCTETS)
    message.dn = read_text(name)
    tag, at, end = read_header(data, at, end)
    if tag != SEQUENCE:
        raise ProtocolError("an entry has no list of attributes")
    attributes: dict[str, list[bytes]] = {}
    message.attributes = attributes
    # Here the time of a search goes, hence no calls. An index beyond the data is an IndexError, one
    # beyond the element but not the data is seen when what was read turns out not to fit.
    while at < end:
        if data[at] != SEQUENCE:
            raise ProtocolError("an attribute is no sequence")
        size = data[at + 1]
        at += 2
        if size > 127:
            size, at = read_length(data, at, size)
        last = at + size
        if data[at] != OCTETS:
            raise ProtocolError("an attribute has no description")
        size = data[at + 1]
        at += 2
        if size > 127:
            size, at = read_length(data, at, size)
        stop = at + size
        description = data[at:stop].decode("utf-8", "surrogateescape")
        if data[stop] != SET:
            raise ProtocolError("an attribute's values are no set")
        size = data[stop + 1]
        at = stop + 2
        if size > 127:
            size, at = read_length(data, at, size)
        stop = at + size
        if stop > last or last > end:
            raise ProtocolError("an attribute is longer than its entry")
        values = []
        while at < stop:
            if data[at] != OCTETS:
                raise ProtocolError("a value is no string")
            size = data[at + 1]
            at += 2
            if size > 127:
                size, at = read_length(data, at, size)
            value = data[at : at + size]
            at += size
            values.append(value)
        if at != stop:
            raise ProtocolError("a value is longer than its attribute")
        known = attributes.get(description)
        if known is None:
            attributes[description] = values
        else:
            known += values
        at = last


def _read_result(message: Message, data: bytes, at: int, end: int) -> None:
    code, at = read_element(data, at, end, ENUMERATED)
    matched, at = read_element(data, at, end, OCTETS)
    diagnostic, at = read_element(data, at, end, OCTETS)
    message.code = read_number(code)
    message.matched_dn = read_text(matched)
    message.diagnostic = diagnostic.decode("utf-8", "replace")
    message.referrals = []
    if at == end:
        message.oid = message.value = None
    elif message.tag == BIND:
        _read_named(message, data, at, end, None, 0x87)
    else:
        _read_named(message, data, at, end, 0x8A, 0x8B)


def _read_named(
    message: Message, data: bytes, at: int, end: int, oid: int | None, value: int
) -> None:
    """Read what is optional: a name and a value by these tags, referrals, and what we ignore."""
    message.oid = message.value = None
    while at < end:
        tag, start, at = read_header(data, at, end)
        if tag == oid:
            message.oid = read_text(data[start:at])
        elif tag == value:
            message.value = data[start:at]
        elif tag == 0xA3 and message.tag != INTERMEDIATE:
            message.referrals = _read_texts(data, start, at)


def _read_texts(data: bytes, at: int, end: int) -> list[str]:
    texts = []
    while at < end:
        content, at = read_element(data, at, end, OCTETS)
        texts.append(read_text(content))
    return texts


def _read_controls(data: bytes, at: int, end: int) -> list[Control]:
    found: list[Control] = []
    while at < end:
        tag, start, at = read_header(data, at, end)
        # Others are from a later version, to be ignored (RFC 4511 section 4).
        if tag != 0xA0:
            continue
        while start < at:
            tag, part, start = read_header(data, start, at)
            if tag != SEQUENCE:
                raise ProtocolError("a control is no sequence")
            found.append(_read_control(data, part, start))
    return found


def _read_control(data: bytes, at: int, end: int) -> Control:
    oid, at = read_element(data, at, end, OCTETS)
    critical, value = False, None
    while at < end:
        tag, start, at = read_header(data, at, end)
        if tag == BOOLEAN:
            critical = any(data[start:at])
        elif tag == OCTETS:
            value = data[start:at]
    return read_text(oid), critical, value
