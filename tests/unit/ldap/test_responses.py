"""Answers of a directory: whole, cut anywhere, broken, and made to hurt."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfront.middleware.ldap.protocol import controls, messages, search_filter
from keyfront.middleware.ldap.protocol.ber import ProtocolError, TooLargeError, element
from keyfront.middleware.ldap.protocol.messages import Decoder, Message
from support.ldap_samples import USUAL, Case, cases, entry, result
from support.served import PATIENCE


def facts(message: Message) -> dict[str, Any]:
    """All that a message has."""
    return {name: getattr(message, name) for name in Message.__slots__ if hasattr(message, name)}


def read(decoder: Decoder, chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    found = []
    for chunk in chunks:
        decoder.feed(chunk)
        while (message := decoder.next()) is not None:
            found.append(facts(message))
    return found


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    ends = [*sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(st.lists(cases, max_size=4), st.lists(st.integers(0, 1 << 20), max_size=12), st.booleans())
def test_a_stream_cut_anywhere(stream: list[Case], places: list[int], eager: bool) -> None:
    decoder = Decoder()
    data = b"".join(case.encoded for case in stream)
    chunks = cut(data, places)
    if eager:
        found = read(decoder, chunks)
    else:
        for chunk in chunks:
            decoder.feed(bytearray(chunk))
        found = read(decoder, [b""])
    assert found == [case.content for case in stream]
    assert decoder.pending == 0
    assert decoder.next() is None


def test_a_stream_in_single_bytes() -> None:
    data = b"".join(case.encoded for case in USUAL)
    decoder = Decoder()
    assert read(decoder, (data[at : at + 1] for at in range(len(data)))) == [
        case.content for case in USUAL
    ]


def wide(data: bytes, count: int) -> bytes:
    """The same elements with all lengths in ``count`` bytes, as Active Directory's in four."""
    out, at = b"", 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size > 127:
            more = size & 0x7F
            size = int.from_bytes(data[at : at + more], "big")
            at += more
        content = data[at : at + size]
        at += size
        if tag & 0x20:
            content = wide(content, count)
        out += bytes((tag, 0x80 | count)) + len(content).to_bytes(count, "big") + content
    return out


@given(cases, st.sampled_from([4, 8]), st.lists(st.integers(0, 1 << 20), max_size=5))
def test_lengths_need_not_be_short(case: Case, count: int, places: list[int]) -> None:
    assert read(Decoder(), cut(wide(case.encoded, count), places)) == [case.content]


def survey(data: Iterable[bytes]) -> None:
    """Whatever comes: messages, or one kind of error, forever the same."""
    decoder = Decoder(max_message=1 << 20)
    try:
        for found in read(decoder, data):
            controls.paged_cookie(found["controls"])
            controls.password_policy(found["controls"])
    except ProtocolError:
        pass
    try:
        decoder.feed(b"x")
        decoder.next()
    except ProtocolError as error:
        with pytest.raises(ProtocolError) as again:
            decoder.next()
        assert str(again.value) == str(error)
        assert decoder.pending == 0


@given(
    st.lists(cases, min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
    st.sampled_from(["change", "insert", "remove"]),
)
def test_broken_answers(stream: list[Case], edits: list[tuple[int, int]], how: str) -> None:
    data = bytearray(b"".join(case.encoded for case in stream))
    for place, byte in edits:
        at = place % len(data) if data else 0
        if how == "insert":
            data.insert(at, byte)
        elif data and how == "change":
            data[at] = byte
        elif data:
            del data[at]
    survey([bytes(data)])


@given(st.lists(st.binary(max_size=40), max_size=6), st.booleans())
def test_any_bytes(data: list[bytes], framed: bool) -> None:
    if framed:
        content = b"\x02\x01\x01" + b"".join(data)
        data = [bytes((0x30, 0x82)) + len(content).to_bytes(2, "big") + content]
    survey(data)


def of(*numbers: int) -> bytes:
    return bytes(numbers)


def tlv(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    assert len(content) < 128
    return bytes((tag, len(content))) + content


def framed(*parts: bytes) -> bytes:
    return tlv(0x30, of(2, 1, 1), *parts)


def entry_of(*numbers: int) -> bytes:
    """An entry with these bytes for its attributes."""
    return framed(tlv(0x64, of(4, 0), tlv(0x30, bytes(numbers))))


OK = of(0x65, 7, 10, 1, 0, 4, 0, 4, 0)
# All bytes that an element may wrongly reach, so that nothing ends by the end of the data.
MORE = b"\x04" * 40


@pytest.mark.parametrize("more", [b"", MORE], ids=["alone", "followed"])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.1 400", id="HTTP"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x46", id="TLS alert"),
        pytest.param(b"\x30\x80", id="indefinite"),
        pytest.param(b"\x30\xff", id="reserved"),
        pytest.param(b"\x30\x89", id="nine bytes of length"),
        pytest.param(b"\x30\x84\xff\xff\xff\xff", id="4 GB"),
        pytest.param(b"\x30\x88" + b"\xff" * 8, id="16 EB"),
        pytest.param(b"\x30\x84\x04\x00\x00\x01", id="a byte above 64 MiB"),
        pytest.param(tlv(0x30), id="empty"),
        pytest.param(framed(), id="only a number"),
        pytest.param(tlv(0x30, of(2, 1, 0x80), OK), id="number below 0"),
        pytest.param(tlv(0x30, of(2, 5, 1, 0, 0, 0, 0), OK), id="number too large"),
        pytest.param(tlv(0x30, of(2, 0), OK), id="no number"),
        pytest.param(tlv(0x30, of(4, 1, 1), OK), id="a string for a number"),
        pytest.param(framed(tlv(0x60, of(2, 1, 3, 4, 0, 0x80, 0))), id="a request"),
        pytest.param(framed(of(0x7F, 0x2A, 0)), id="a long tag"),
        pytest.param(framed(tlv(0x65, OK[2:], of(0x9F, 0x81, 1, 0))), id="a long tag inside"),
        pytest.param(framed(of(0x65, 0x80)), id="indefinite inside"),
        pytest.param(framed(of(0x65, 8, 10, 1, 0, 4, 0, 4, 0)), id="result cut"),
        pytest.param(framed(tlv(0x65, of(10, 1, 0, 4, 0))), id="no diagnostic"),
        pytest.param(framed(tlv(0x65, of(10, 1, 0xFF, 4, 0, 4, 0))), id="code below 0"),
        pytest.param(framed(tlv(0x65, of(10, 1, 0, 4, 1, 4, 0))), id="diagnostic cut"),
        pytest.param(framed(tlv(0x65, OK[2:], tlv(0xA3, of(4, 1)))), id="referral cut"),
        pytest.param(framed(tlv(0x65, OK[2:], of(0x8A))), id="half a head"),
        pytest.param(framed(tlv(0x73, of(2, 0))), id="a reference that is a number"),
        pytest.param(framed(tlv(0x73, of(4, 1))), id="reference cut"),
        pytest.param(framed(OK, tlv(0xA0, of(0x31, 2, 4, 0))), id="a control that is a set"),
        pytest.param(framed(OK, tlv(0xA0, tlv(0x30))), id="a control without OID"),
        pytest.param(framed(OK, tlv(0xA0, of(0x30, 1))), id="control cut"),
        pytest.param(framed(OK, of(0xA0, 1)), id="controls cut"),
        pytest.param(framed(tlv(0x64, of(4, 0))), id="no attributes"),
        pytest.param(framed(tlv(0x64, of(4, 0, 0x31, 0))), id="attributes in a set"),
        pytest.param(framed(tlv(0x64, of(4, 0, 0x30, 1))), id="attributes cut"),
        pytest.param(entry_of(0x30), id="half a head of an attribute"),
        pytest.param(entry_of(0x31, 4, 4, 0, 0x31, 0), id="an attribute that is a set"),
        pytest.param(entry_of(0x30, 0), id="an attribute without name"),
        pytest.param(entry_of(0x30, 2, 4, 0), id="an attribute without values"),
        pytest.param(entry_of(0x30, 4, 2, 0, 0x31, 0), id="a name that is a number"),
        pytest.param(entry_of(0x30, 4, 4, 0, 0x30, 0), id="values in a sequence"),
        pytest.param(entry_of(0x30, 5, 4, 0, 0x31, 0), id="an attribute beyond the entry"),
        pytest.param(entry_of(0x30, 4, 4, 0, 0x31, 2), id="values beyond the entry"),
        # these values are read as attributes, too
        pytest.param(
            entry_of(0x30, 3, 4, 0, 0x31, *[0x30, 4, 4, 0, 0x31, 0] * 9),
            id="values beyond the attribute",
        ),
        pytest.param(entry_of(0x30, 6, 4, 0, 0x31, 2, 2, 0), id="a value that is a number"),
        pytest.param(entry_of(0x30, 6, 4, 0, 0x31, 2, 4, 2), id="a value beyond the values"),
        pytest.param(entry_of(0x30, 5, 4, 0, 0x31, 1, 4), id="half a value"),
        pytest.param(
            entry_of(0x30, 9, 4, 0, 0x31, 5, 4, 0x84, 255, 255, 255, 255), id="a value of 4 GB"
        ),
        pytest.param(entry_of(0x30, 6, 4, 0x84, 255, 255, 255, 255), id="a name of 4 GB"),
    ],
)
def test_refused_at_once(data: bytes, more: bytes) -> None:
    decoder = Decoder()
    decoder.feed(data + more)
    with pytest.raises(ProtocolError):
        decoder.next()


def test_the_bound_is_inclusive() -> None:
    encoded = USUAL[0].encoded
    size = len(encoded) - 2
    assert encoded[1] == size
    assert read(Decoder(max_message=size), [encoded]) == [USUAL[0].content]
    with pytest.raises(ProtocolError, match=f"{size} bytes, more than {size - 1}"):
        read(Decoder(max_message=size - 1), [encoded[:2]])


def test_a_claim_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        for claim in (b"\x30\x84\xff\xff\xff\xff", b"\x30\x84\x03\xff\xff\xff"):
            decoder = Decoder()
            try:
                read(decoder, [claim, b"\x02\x01\x01\x64\x84\xff\xff\xff\xff" + b"x" * 1000])
            except ProtocolError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("chunk", [1 << 24, 1 << 14, 50])
def test_a_photo_takes_linear_time(chunk: int) -> None:
    """With a quadratic step, the smallest chunks would copy a terabyte."""
    photo = b"\xff\xd8" * (5 << 20)
    case = entry(7, "cn=x", [("jpegPhoto", [photo]), ("cn", [b"x"])], [])
    data = case.encoded + USUAL[0].encoded
    start = time.monotonic()
    found = read(Decoder(), (data[at : at + chunk] for at in range(0, len(data), chunk)))
    assert time.monotonic() - start < PATIENCE
    assert found == [case.content, USUAL[0].content]


def test_a_backlog_takes_linear_time() -> None:
    """Each round finds megabytes unread, takes one answer and gets one more byte."""
    count = 200_000
    encoded = USUAL[0].encoded
    decoder = Decoder()
    deadline = time.monotonic() + PATIENCE
    decoder.feed(encoded * count)
    for at in range(count):
        decoder.feed(encoded[at % len(encoded) :][:1])
        message = decoder.next()
        assert message is not None and message.dn == USUAL[0].content["dn"]
        assert at % 1000 or time.monotonic() < deadline
    assert len(read(decoder, [b""])) == count // len(encoded)


def test_what_is_no_utf_8() -> None:
    dn, name, text = b"cn=\xff\xc4\x8d", b"\xfe", b"\xffwhy"
    body = of(4, len(dn)) + dn + of(0x30, 10, 0x30, 8, 4, 1) + name + of(0x31, 3, 4, 1, 0xFD)
    done = of(10, 1, 32, 4, len(dn)) + dn + of(4, len(text)) + text
    done += of(0xA3, 3, 4, 1, 0xFC)
    decoder = Decoder()
    decoder.feed(framed(tlv(0x64, body)))
    decoder.feed(framed(tlv(0x65, done)))
    first, second = decoder.next(), decoder.next()
    assert first is not None and second is not None
    assert first.dn == second.matched_dn == "cn=\udcffč"
    assert first.attributes == {"\udcfe": [b"\xfd"]}
    assert second.diagnostic == "\ufffdwhy"
    assert second.referrals == ["\udcfc"]
    # and back as it was
    assert dn in messages.bind_request(1, first.dn, b"")
    assert dn in messages.search_request(1, first.dn, 0, b"", None)
    assert dn in search_filter.encode(f"(member={search_filter.escape(first.dn)})")


def test_what_is_new_is_ignored() -> None:
    """RFC 4511 section 4: unknown elements at the end of any sequence."""
    new = tlv(0x8F, b"new")
    code = of(10, 1, 0, 4, 0, 4, 0)
    attribute = tlv(0x30, of(4, 1, 97, 0x31, 2, 4, 0), new)
    control = tlv(0x30, tlv(4, b"1.2"), new)
    data = tlv(0x30, of(2, 1, 1), tlv(0x65, code, new), tlv(0xA0, control), tlv(0xAF, new), new)
    data += tlv(0x30, of(2, 1, 1), tlv(0x64, of(4, 0), tlv(0x30, attribute, attribute), new))
    done, found = read(Decoder(), [data])
    assert done["code"] == 0
    assert done["controls"] == [("1.2", False, None)]
    assert found["attributes"] == {"a": [b"", b""]}


def test_a_notice_of_disconnection() -> None:
    notice = result(0, "extendedResp", 52, "", "", [], messages.NOTICE_OF_DISCONNECTION, None, [])
    for case, is_notice in ((notice, True), *((case, False) for case in USUAL)):
        decoder = Decoder()
        decoder.feed(case.encoded)
        message = decoder.next()
        assert message is not None
        assert message.is_notice == is_notice


def test_a_repr_has_no_content() -> None:
    decoder = Decoder()
    decoder.feed(USUAL[0].encoded)
    assert repr(decoder.next()) == "<Message id=2 tag=4>"


def test_a_large_entry_is_read_like_a_small_one_within_its_memory() -> None:
    values = [b"x" * 1000] * 1200 + [b""]
    size = sum(map(len, values))
    body = element(0x04, b"cn=x") + element(
        0x30,
        element(0x30, element(4, b"a") + element(0x31, b"".join(element(4, v) for v in values)))
        + element(0x30, element(4, b"b") + element(0x31, element(4, b"1")))
        + element(0x30, element(4, b"a") + element(0x31, element(4, b"2"))),
    )
    message = element(0x30, element(2, b"\x01") + element(0x64, body))
    decoder = Decoder(max_memory=len(body) + 64 * (len(values) + 2))
    decoder.feed(message)
    read = decoder.next()
    assert read is not None
    assert (read.dn, read.attributes) == ("cn=x", {"a": [*values, b"2"], "b": [b"1"]})
    assert size > 1 << 20
    decoder = Decoder(max_memory=len(body) + 64 * (len(values) + 1))
    decoder.feed(message)
    for _ in range(2):
        with pytest.raises(TooLargeError, match=r"max_answer"):
            decoder.next()
    assert not decoder.pending
