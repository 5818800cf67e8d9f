"""The controls by which a directory is followed, as RFC 4533 and the draft write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfront.middleware.ldap.protocol import controls
from keyfront.middleware.ldap.protocol.ber import ProtocolError
from keyfront.middleware.ldap.protocol.controls import (
    ADDED,
    DELETED,
    ENTRY_CHANGE,
    MODIFIED,
    SYNC_INFO,
    SYNC_STATE,
    EntryState,
    by_server,
    csn_cookie,
    csns,
    ends_refresh,
    entry_state,
    persistent_control,
    sync_control,
    told_cookie,
)

UUID = bytes(range(16))


def test_what_is_asked_for() -> None:
    # libldap's: OID, critical, SEQUENCE {ENUMERATED 3}
    expected = b"\x30\x24\x04\x18" + controls.SYNC_REQUEST.encode() + b"\x01\x01\xff\x04\x05"
    assert sync_control() == expected + b"\x30\x03\x0a\x01\x03"
    assert sync_control(b"rid=000").endswith(b"\x30\x0c\x0a\x01\x03\x04\x07rid=000")
    # changeTypes 15, changesOnly and returnECs true
    assert persistent_control().endswith(b"\x30\x09\x02\x01\x0f\x01\x01\xff\x01\x01\xff")


@pytest.mark.parametrize("state", [ADDED, MODIFIED, DELETED])
def test_what_an_entry_is(state: int) -> None:
    value = b"\x30\x15\x0a\x01" + bytes([state]) + b"\x04\x10" + UUID
    assert entry_state([(SYNC_STATE, False, value)]) == EntryState(state, UUID)


def test_the_cookie_of_an_entry() -> None:
    value = b"\x30\x1a\x0a\x01\x02\x04\x10" + UUID + b"\x04\x03abc"
    assert entry_state([(SYNC_STATE, False, value)]) == EntryState(MODIFIED, UUID, cookie=b"abc")


@pytest.mark.parametrize(
    ("kind", "state"), [(1, ADDED), (2, DELETED), (4, MODIFIED), (8, MODIFIED)]
)
def test_what_a_persistent_search_says_of_it(kind: int, state: int) -> None:
    value = b"\x30\x03\x0a\x01" + bytes([kind])
    assert entry_state([(ENTRY_CHANGE, False, value)]) == EntryState(state, b"")


def test_where_an_entry_was_before() -> None:
    value = b"\x30\x0b\x0a\x01\x08\x04\x03o=a\x02\x01\x05"
    assert entry_state([(ENTRY_CHANGE, False, value)]) == EntryState(MODIFIED, b"", "o=a")


def test_an_entry_of_which_nothing_is_said() -> None:
    assert entry_state([]) is None
    assert entry_state([("1.2.3", False, b"x")]) is None


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (b"\xa1\x00", True),  # refreshDelete, refreshDone by default
        (b"\xa2\x00", True),
        (b"\xa2\x03\x01\x01\x00", False),
        (b"\xa1\x08\x04\x03abc\x01\x01\xff", True),
        (b"\x80\x03abc", False),  # a new cookie
        (b"\xa3\x02\x31\x00", False),  # a set of identifiers
        (None, False),
    ],
)
def test_when_only_changes_come(value: bytes | None, ends: bool) -> None:
    assert ends_refresh(SYNC_INFO, value) is ends
    assert ends_refresh("1.2.3", value) is False


@pytest.mark.parametrize(
    ("value", "cookie"),
    [
        (b"\x80\x03abc", b"abc"),
        (b"\xa1\x08\x04\x03abc\x01\x01\xff", b"abc"),
        (b"\xa2\x05\x04\x03abc", b"abc"),
        (b"\xa3\x07\x04\x03abc\x31\x00", b"abc"),
        (b"\xa3\x02\x31\x00", b""),
        (b"\xa2\x03\x01\x01\x00", b""),
        (b"\xa1\x00", b""),
        (None, b""),
    ],
)
def test_the_cookie_of_an_intermediate_answer(value: bytes | None, cookie: bytes) -> None:
    assert told_cookie(SYNC_INFO, value) == cookie
    assert told_cookie("1.2.3", value) == b""


@pytest.mark.parametrize(
    ("cookie", "numbers"),
    [
        (b"rid=000,csn=10#1#000#0", [b"10#1#000#0"]),
        (b"rid=000,sid=001,csn=10#1#000#0;20#1#001#0", [b"10#1#000#0", b"20#1#001#0"]),
        (b"csn=1;,delcsn=2", [b"1"]),
        (b"rid=000,csn=", []),
        (b"rid=000,sid=001", []),
        (b"host:389#cn=x:(uid=*)#12", []),
        (b"", []),
    ],
)
def test_the_numbers_in_a_cookie(cookie: bytes, numbers: list[bytes]) -> None:
    assert csns(cookie) == numbers


def test_the_newest_number_of_each_server() -> None:
    numbers = [b"10#1#000#0", b"20#1#001#0", b"20#0#001#0", b"odd", b"even"]
    assert by_server(numbers) == {b"000": b"10#1#000#0", b"001": b"20#1#001#0", b"": b"odd"}


def test_slapds_cookie() -> None:
    assert csn_cookie([]) == b""
    assert csn_cookie([b"20#1#001#0", b"10#1#000#0"]) == b"rid=000,csn=10#1#000#0;20#1#001#0"


@given(st.binary(max_size=40))
def test_junk_is_refused_or_understood(value: bytes) -> None:
    for oid in (SYNC_STATE, ENTRY_CHANGE):
        try:
            entry_state([(oid, False, value)])
        except ProtocolError:
            pass
    for understand in (ends_refresh, told_cookie):
        try:
            understand(SYNC_INFO, value)
        except ProtocolError:
            pass
    by_server(csns(value))
