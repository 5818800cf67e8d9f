"""Encodes LDAP requests and decodes the answers of a server (RFC 4511 section 4).

Requests are put together directly from their bytes; ldap3 spends two thirds of a search on building
its own. They are byte for byte what ldap3 and libldap send.

Answers are decoded from a stream of bytes in one pass, and no further than somebody needs: an entry
costs a list per attribute and a ``bytes`` per value. What is read is bytes where a directory may
hold anything (values, cookies) and text where LDAP says UTF-8. A DN, an attribute description or a
URL that is no UTF-8 has its bad bytes as lone surrogates (``surrogateescape``): it is told apart
from others and can be sent back as it was. A diagnostic is only ever shown, and is read with
``replace``, so that it can be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keyfront.errors import OptionError

from .ber import (
    BOOLEAN,
    ENUMERATED,
    INTEGER,
    OCTETS,
    SEQUENCE,
    SET,
    TRUE,
    ProtocolError,
    TooLargeError,
    element,
    length,
    limit,
    number,
    read_element,
    read_header,
    read_length,
    read_number,
    read_text,
    text,
)
from .controls import Control

#: The extended operation after which all is encrypted (RFC 4511 section 4.14).
START_TLS = "1.3.6.1.4.1.1466.20037"
#: The extended operation that tells whom a connection is bound as (RFC 4532).
WHO_AM_I = "1.3.6.1.4.1.4203.1.11.3"

_SCOPES = {
    (scope, aliases): bytes((ENUMERATED, 1, scope, ENUMERATED, 1, aliases))
    for scope in range(4)
    for aliases in range(4)
}
_FALSE = bytes((BOOLEAN, 1, 0))
_NO_LIMITS = bytes((INTEGER, 1, 0, INTEGER, 1, 0)) + _FALSE


def password_octets(password: str | bytes) -> bytes | None:
    """Return a password as it is sent (RFC 4513 section 5.1.3).

    :returns: ``None`` if it cannot be written in UTF-8, so that no directory has it
    """
    try:
        return password if isinstance(password, bytes) else password.encode()
    except UnicodeEncodeError:
        return None
    finally:
        # Of an error's frames, none may still have it.
        del password


def never_sent(password: bytes | None) -> str:
    """Return the reason why a password is sent to no server; ``None`` is one that is no UTF-8.

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


def sasl_bind_request(message_id: int, mechanism: str, credentials: bytes | None) -> bytes:
    """Encode a SASL bind, version 3, without a name (RFC 4511 section 4.2).

    :param message_id: the number of this message
    :param mechanism: name of the mechanism
    :param credentials: the mechanism's credentials; ``None`` for none, which is not the same as
        empty ones (RFC 4513 section 5.2.1.2)
    """
    content = element(OCTETS, text(mechanism, "mechanism"))
    if credentials is not None:
        content += element(OCTETS, credentials)
    return _message(message_id, b"\x60", b"\x02\x01\x03\x04\x00" + element(0xA3, content), b"")


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
    """Encode giving up the operation ``target`` (RFC 4511 section 4.11); nothing answers it.

    :param message_id: the number of this message
    :param target: the number of the request that is given up
    """
    return _message(message_id, b"\x50", number(target), b"")


def extended_request(
    message_id: int, oid: str, value: bytes | None = None, controls: bytes = b""
) -> bytes:
    """Encode an extended operation (RFC 4511 section 4.12).

    :param message_id: the number of this message
    :param oid: the operation's OID
    :param value: its value, ``None`` for none
    :param controls: controls encoded by :func:`.controls.encode`
    """
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


# Tags of answers.
BIND, ENTRY, DONE, REFERENCE, EXTENDED, INTERMEDIATE = 1, 4, 5, 19, 24, 25

NOTICE_OF_DISCONNECTION = "1.3.6.1.4.1.1466.20036"

#: Bytes of one answer, at most; a photo or a group with a million members is below it.
MAX_MESSAGE = 64 << 20

#: Bytes of memory that a value takes besides its own, about: one of a byte takes a hundred times
#: what it takes in an answer.
VALUE_COST = 64
# Bytes of an answer, from which on its length is taken for nonsense.
_ABSURD = 1 << 30
# In entries, and in answers, of more bytes the values are counted.
_LARGE = 1 << 20


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
        """True if the server says that it closes the connection (RFC 4511 section 4.4.1)."""
        return self.id == 0 and self.tag == EXTENDED and self.oid == NOTICE_OF_DISCONNECTION

    def __repr__(self) -> str:
        return f"<Message id={self.id} tag={self.tag}>"


class Decoder:
    """Decodes answers from a stream of bytes that is cut in any way.

    A byte is copied a fixed number of times, however small the chunks are. Once it has raised, it
    raises the same again and keeps nothing.

    :param max_message: most bytes of an answer. It is held against what the answer claims, so
        that no more is ever waited for.
    :param max_memory: most bytes of an entry and ``VALUE_COST`` for each of its values
    """

    __slots__ = ("_at", "_data", "_error", "_max", "_max_memory", "_need", "_tail")

    def __init__(
        self, *, max_message: int = MAX_MESSAGE, max_memory: int = 2 * MAX_MESSAGE
    ) -> None:
        self._max = max_message
        self._max_memory = max_memory
        self._error: ProtocolError | None = None
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
            raise type(self._error)(*self._error.args)
        try:
            return self._next()
        except (IndexError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._error = type(error)(*error.args)
            else:
                self._error = ProtocolError("an element is cut off")
            self._data, self._at, self._tail = b"", 0, bytearray()
        raise type(self._error)(*self._error.args)

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
                kind = TooLargeError if size <= _ABSURD else ProtocolError
                raise kind(f"an answer claims {size} bytes, more than {self._max}")
            stop = start + size
            if stop <= at + have:
                break
            self._need = stop - at
        message = _read_message(data, start, stop, self._max_memory)
        self._need = 1
        if stop == len(data):
            self._data, self._at = b"", 0
        else:
            self._at = stop
        return message


class Limits(NamedTuple):
    """The limits of each answer to a search.

    :ivar size: bytes, at least 1, of what is received, and ``VALUE_COST`` for each value
    :ivar entries: entries at most; 0 for any number
    """

    size: int = 128 << 20
    entries: int = 100_000


#: The usual one.
DEFAULT_LIMITS = Limits()


class Budget:
    """The rest of the limits, for one search.

    :param limits: at its beginning
    :ivar counting: true if entries have to be counted by :meth:`entry`, too
    """

    __slots__ = ("_limits", "_received", "_size", "counting", "entries")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size = limits.size
        self._received = 0
        #: Entries that may still come; never 0 if any number may.
        self.entries = limits.entries or -1
        self.counting = limits.size < 16 * _LARGE

    def received(self, size: int) -> None:
        """Count bytes.

        :raises TooLargeError: the answer is too large
        """
        self._size -= size
        self._received += size
        if self._received > _LARGE:
            self.counting = True
        if self._size < 0:
            raise self.error()

    def entry(self, message: Message) -> None:
        """Count the values of an entry.

        :raises TooLargeError: the answer is too large
        """
        self._size -= VALUE_COST * sum(map(len, message.attributes.values()))
        if self._size < 0:
            raise self.error()

    def error(self) -> TooLargeError:
        """Return the error for an answer that is too large."""
        return TooLargeError(f"it takes more than {self._limits.size >> 10} KiB (max_answer)")

    def entries_error(self) -> TooLargeError:
        """Return the error for an answer of too many entries."""
        return TooLargeError(f"it has more than {self._limits.entries} entries (max_entries)")


def _read_message(data: bytes, at: int, end: int, max_memory: int) -> Message:
    identity, at = read_element(data, at, end, INTEGER)
    tag, at, stop = read_header(data, at, end)
    message = Message(read_number(identity), tag & 0x1F)
    if tag == 0x64:
        if stop - at > _LARGE:
            _read_large_entry(message, data, at, stop, max_memory)
        else:
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


def _read_large_entry(
    message: Message, data: bytes, at: int, end: int, max_memory: int
) -> None:
    """Read as :func:`_read_entry`, and no further than the memory that it may take."""
    left = max_memory - (end - at)
    name, at = read_element(data, at, end, OCTETS)
    message.dn = read_text(name)
    tag, at, end = read_header(data, at, end)
    if tag != SEQUENCE:
        raise ProtocolError("an entry has no list of attributes")
    message.attributes = {}
    while at < end:
        tag, at, last = read_header(data, at, end)
        if tag != SEQUENCE:
            raise ProtocolError("an attribute is no sequence")
        description, at = read_element(data, at, last, OCTETS)
        tag, at, stop = read_header(data, at, last)
        if tag != SET:
            raise ProtocolError("an attribute's values are no set")
        values = message.attributes.setdefault(read_text(description), [])
        while at < stop:
            value, at = read_element(data, at, stop, OCTETS)
            values.append(value)
            left -= VALUE_COST
            if left < 0:
                message.attributes = {}
                raise TooLargeError(
                    f"an entry takes more than {max_memory >> 10} KiB (max_answer)"
                )
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
    """Read the optional parts: a name and a value by these tags, referrals, and what we ignore."""
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
