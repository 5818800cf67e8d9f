"""LDAP messages: requests as ldap3 and libldap send them, and controls."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ldap3 import ANONYMOUS, SASL, SIMPLE
from ldap3.operation.bind import bind_operation
from ldap3.operation.extended import extended_operation
from ldap3.operation.search import search_operation
from ldap3.protocol import rfc4511
from ldap3.protocol.controls import build_control
from ldap3.protocol.rfc2696 import paged_search_control
from ldap3.utils.asn1 import encode

from keyfront.benchmarks.micro import ldap_codec
from keyfront.errors import OptionError
from keyfront.middleware.ldap.protocol import controls, messages, search_filter
from keyfront.middleware.ldap.protocol.ber import MAX_INT, ProtocolError
from keyfront.middleware.ldap.protocol.controls import PASSWORD_POLICY
from support.ldap_samples import blobs, ids, long_texts, texts, triples, whole
from support.served import PATIENCE

# Requests ----------------------------------------------------------------------------------------


@given(
    ids, texts.filter(bool), st.text(st.characters(codec="ascii"), min_size=1), st.lists(triples)
)
@example(1, "cn=x", "p" * 300, [])
def test_bind_is_that_of_ldap3(message_id: int, dn: str, password: str, asked: Any) -> None:
    # ldap3 makes SASLprep of a password; libldap and we send what was typed.
    try:
        operation = bind_operation(3, SIMPLE, dn, password)
    except Exception:  # SASLprep refuses control characters
        return
    ours = messages.bind_request(
        message_id,
        dn,
        password.encode(),
        controls.encode(*(controls.control(*c) for c in asked)),
    )
    assert ours == whole(message_id, "bindRequest", operation, asked)


@given(ids, texts, st.binary())
def test_bind_with_any_bytes(message_id: int, dn: str, password: bytes) -> None:
    operation = bind_operation(3, ANONYMOUS)
    operation["name"] = dn
    operation["authentication"] = rfc4511.AuthenticationChoice().setComponentByName(
        "simple", rfc4511.Simple(password)
    )
    assert messages.bind_request(message_id, dn, password) == whole(
        message_id, "bindRequest", operation
    )


@given(ids, texts, st.none() | blobs)
@example(1, "EXTERNAL", b"")
@example(1, "EXTERNAL", None)
def test_bind_by_sasl_is_that_of_ldap3(
    message_id: int, mechanism: str, credentials: bytes | None
) -> None:
    operation = bind_operation(3, SASL, "", None, mechanism, credentials)
    ours = messages.sasl_bind_request(message_id, mechanism, credentials)
    assert ours == whole(message_id, "bindRequest", operation)


def test_bind_by_sasl_in_bytes() -> None:
    """RFC 4511 section 4.2: version 3, no name, [3] of mechanism and credentials."""
    ours = messages.sasl_bind_request(1, "EXTERNAL", b"")
    assert ours.hex() == "3018" "020101" "6013" "020103" "0400" "a30c" "0408" + (
        b"EXTERNAL".hex() + "0400"
    )
    with pytest.raises(OptionError, match="mechanism"):
        messages.sasl_bind_request(1, "\ud800", None)


@given(
    message_id=ids,
    base=long_texts,
    scope=st.integers(0, 2),
    attributes=st.lists(texts, max_size=5),
    attrs_only=st.booleans(),
    size_limit=st.sampled_from([0, 1, 127, 128, 255, 256, 32768, MAX_INT]) | ids,
    time_limit=ids,
    dereference=st.integers(0, 3),
    page=st.none() | st.tuples(ids, st.binary(max_size=300), st.booleans()),
)
def test_search_is_that_of_ldap3(
    message_id: int, base: str, scope: int, attributes: list[str], attrs_only: bool,
    size_limit: int, time_limit: int, dereference: int, page: tuple[int, bytes, bool] | None,
) -> None:  # fmt: skip
    text = "(&(objectClass=person)(|(uid=a*b)(!(cn=*))))"
    operation = search_operation(
        base, text, scope, dereference, attributes, size_limit, time_limit, attrs_only, False, False
    )
    asked = []
    if page is not None:
        asked = [paged_search_control(page[2], page[0], page[1])]
    ours = messages.search_request(
        message_id,
        base,
        scope,
        search_filter.encode(text),
        attributes,
        attrs_only=attrs_only,
        size_limit=size_limit,
        time_limit=time_limit,
        dereference=dereference,
        controls=controls.encode(*([controls.paged_control(*page)] if page else [])),
    )
    assert ours == whole(message_id, "searchRequest", operation, asked)


@given(ids, ids, st.none() | blobs)
def test_the_small_requests_are_those_of_ldap3(
    message_id: int, target: int, value: bytes | None
) -> None:
    extended = rfc4511.ExtendedRequest()
    extended["requestName"] = rfc4511.RequestName("1.3.6.1.4.1.1466.20037")
    if value is not None:
        extended["requestValue"] = rfc4511.RequestValue(value)
    assert messages.extended_request(message_id, "1.3.6.1.4.1.1466.20037", value) == whole(
        message_id, "extendedReq", extended
    )
    assert messages.unbind_request(message_id) == whole(
        message_id, "unbindRequest", rfc4511.UnbindRequest("")
    )
    assert messages.abandon_request(message_id, target) == whole(
        message_id, "abandonRequest", rfc4511.AbandonRequest(target)
    )


def of_libldap(send: Callable[[Any], int]) -> tuple[int, bytes]:
    """What a python-ldap client sends, and its number."""
    ldap = pytest.importorskip("ldap")
    ours, its = socket.socketpair()
    with ours:
        ours.settimeout(PATIENCE)
        client = ldap.initialize("ldapi:///", fileno=its.detach())
        message_id = send(client)
        return message_id, ours.recv(1 << 16)


def test_requests_are_those_of_libldap() -> None:
    pytest.importorskip("ldap")
    from ldap.controls.libldap import SimplePagedResultsControl
    from ldap.controls.ppolicy import PasswordPolicyControl

    policy = [PasswordPolicyControl()]
    number, sent = of_libldap(lambda c: c.simple_bind("cn=č", "sécret", serverctrls=policy))
    ours = controls.encode(controls.password_policy_control())
    assert sent == messages.bind_request(number, "cn=č", "sécret".encode(), ours)

    text = "(&(objectClass=person)(uid=č*))"
    for wanted in (None, [], ["1.1"], ["cn", "mail"]):
        number, sent = of_libldap(lambda c, w=wanted: c.search_ext("dc=x", 2, text, w))
        ours = messages.search_request(number, "dc=x", 2, search_filter.encode(text), wanted)
        assert sent == ours

    page = [SimplePagedResultsControl(True, size=100, cookie=b"\x00c")]
    number, sent = of_libldap(
        lambda c: c.search_ext("dc=x", 3, text, ["*", "+"], 1, page, timeout=300, sizelimit=2000)
    )
    assert sent == messages.search_request(
        number,
        "dc=x",
        3,
        search_filter.encode(text),
        ("*", "+"),
        attrs_only=True,
        size_limit=2000,
        time_limit=300,
        controls=controls.encode(controls.paged_control(100, b"\x00c")),
    )


def test_who_am_i_is_that_of_ldap3_and_libldap() -> None:
    pytest.importorskip("ldap")
    operation = extended_operation(messages.WHO_AM_I)
    assert messages.extended_request(7, messages.WHO_AM_I) == whole(7, "extendedReq", operation)
    from ldap.extop import ExtendedRequest

    number, sent = of_libldap(lambda c: c.extop(ExtendedRequest(messages.WHO_AM_I, None)))
    assert sent == messages.extended_request(number, messages.WHO_AM_I)


def test_no_control_is_nothing() -> None:
    assert controls.encode() == b""


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("scope", lambda: messages.search_request(1, "", 4, b"", None)),
        ("scope", lambda: messages.search_request(1, "", -1, b"", None)),
        ("dereference", lambda: messages.search_request(1, "", 0, b"", None, dereference=4)),
        ("size_limit", lambda: messages.search_request(1, "", 0, b"", None, size_limit=-1)),
        ("time_limit", lambda: messages.search_request(1, "", 0, b"", None, time_limit=2**31)),
        ("page_size", lambda: controls.paged_control(-1, b"")),
        ("search base", lambda: messages.search_request(1, "\ud800", 0, b"", None)),
        ("attribute", lambda: messages.search_request(1, "", 0, b"", ["\ud800"])),
    ],
)
def test_out_of_range(option: str, call: Callable[[], bytes]) -> None:
    with pytest.raises(OptionError, match=option) as caught:
        call()
    str(caught.value).encode()


def test_a_refused_bind_does_not_keep_the_password() -> None:
    secret = b"s3cret-" + b"x" * 8
    with pytest.raises(OptionError, match="DN") as caught:
        messages.bind_request(1, "cn=\ud800", secret)
    assert "s3cret" not in str(caught.value)
    trace = caught.value.__traceback__
    assert trace is not None
    frames = []
    while (trace := trace.tb_next) is not None:  # but not this test's own
        frames.append(trace.tb_frame)
    assert frames
    assert not [frame for frame in frames if secret in frame.f_locals.values()]


# Controls of answers -----------------------------------------------------------------------------


@given(ids, blobs)
def test_a_cookie_of_ldap3(size: int, cookie: bytes) -> None:
    value = bytes(paged_search_control(False, size, cookie)["controlValue"])
    assert controls.paged_cookie([("1.2", True, b""), (controls.PAGED_RESULTS, False, value)]) == (
        cookie
    )


def test_no_controls() -> None:
    assert controls.paged_cookie([]) is None
    assert controls.password_policy([("1.2.3", False, b"junk")]) is None


@pytest.mark.parametrize(
    ("value", "warning", "error"),
    [
        (None, None, None),
        ("3000", None, None),
        ("3005a003800105", (0, 5), None),
        ("3006a00480020e10", (0, 3600), None),
        ("3005a003810102", (1, 2), None),
        ("3003810102", None, 2),
        ("3008a003810100810100", (1, 0), 0),
        ("308400000005a003800105", (0, 5), None),
    ],
)
def test_password_policies(
    value: str | None, warning: tuple[int, int] | None, error: int | None
) -> None:
    content = None if value is None else bytes.fromhex(value)
    found = controls.password_policy([(PASSWORD_POLICY, False, content)])
    assert found is not None
    assert found == (warning, error)
    assert found.expiring == (warning[1] if warning and warning[0] == 0 else None)
    assert found.grace == (warning[1] if warning and warning[0] == 1 else None)


@given(st.none() | st.tuples(st.sampled_from([0, 1]), ids), st.none() | st.integers(0, 9))
def test_password_policies_of_python_ldap(
    warning: tuple[int, int] | None, error: int | None
) -> None:
    ppolicy = pytest.importorskip("ldap.controls.ppolicy")
    content = ppolicy.PasswordPolicyResponseValue()
    if warning:
        content["warning"][["timeBeforeExpiration", "graceAuthNsRemaining"][warning[0]]] = warning[
            1
        ]
    if error is not None:
        content["error"] = error
    if not warning and error is None:
        content.clear()
    assert controls.password_policy([(PASSWORD_POLICY, False, encode(content))]) == (warning, error)


@pytest.mark.parametrize("value", ["", "31", "3001", "3003020105", "30050401780201"])
def test_broken_controls(value: str) -> None:
    content = bytes.fromhex(value)
    with pytest.raises(ProtocolError):
        controls.paged_cookie([(controls.PAGED_RESULTS, False, content)])
    for broken in ("", "31", "3002a001", "3003810180", "3005a003800180"):
        with pytest.raises(ProtocolError):
            controls.password_policy([(PASSWORD_POLICY, False, bytes.fromhex(broken))])


def test_a_control_is_that_of_ldap3() -> None:
    for critical in (False, True):
        for value in (None, b"", b"x" * 200):
            theirs = encode(build_control("1.2.3", critical, value, encode_control_value=False))
            assert controls.control("1.2.3", critical, value) == theirs


def test_the_benchmark_compares_the_same_messages() -> None:
    for step in ldap_codec.cases():
        assert step.ours() == step.theirs(), step.name
