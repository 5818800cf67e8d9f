"""LDAP messages as ldap3 encodes them, any of them, for tests of ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st
from ldap3.protocol import rfc4511
from ldap3.protocol.convert import build_controls_list
from ldap3.utils.asn1 import encode

from keyfront.middleware.ldap.protocol.ber import MAX_INT
from keyfront.middleware.ldap.protocol.controls import PAGED_RESULTS, PASSWORD_POLICY
from keyfront.middleware.ldap.protocol.messages import NOTICE_OF_DISCONNECTION

ids = st.integers(0, MAX_INT)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
long_texts = texts | st.integers(100, 70_000).map(lambda size: "č" * (size // 2))
blobs = st.binary(max_size=20) | st.integers(100, 70_000).map(bytes)
oids = st.sampled_from(["1.2.3", PAGED_RESULTS, PASSWORD_POLICY])
triples = st.tuples(oids, st.booleans(), st.none() | blobs)


def whole(message_id: int, name: str, operation: Any, controls: Any = ()) -> bytes:
    """A message as ldap3's strategy puts it together."""
    message = rfc4511.LDAPMessage()
    message["messageID"] = rfc4511.MessageID(message_id)
    message["protocolOp"] = rfc4511.ProtocolOp().setComponentByName(name, operation)
    built = build_controls_list(list(controls))
    if built is not None:
        message["controls"] = built
    return encode(message)


class Case(NamedTuple):
    """An answer as ldap3 would encode it, and what is in it."""

    encoded: bytes
    content: dict[str, Any]


def seen(controls: Iterable[tuple[str, bool, bytes | None]]) -> list[Any]:
    return [tuple(control) for control in controls]


def entry(message_id: int, dn: str, pairs: Any, controls: Any) -> Case:
    operation = rfc4511.SearchResultEntry()
    operation["object"] = rfc4511.LDAPDN(dn)
    attributes = rfc4511.PartialAttributeList()
    expected: dict[str, list[bytes]] = {}
    for place, (name, values) in enumerate(pairs):
        attribute = rfc4511.PartialAttribute()
        attribute["type"] = rfc4511.AttributeDescription(name)
        attribute["vals"] = rfc4511.Vals()
        attribute["vals"].clear()
        for at, value in enumerate(values):
            attribute["vals"][at] = rfc4511.AttributeValue(value)
        attributes[place] = attribute
        expected.setdefault(name, []).extend(values)
    if not pairs:
        attributes.clear()
    operation["attributes"] = attributes
    return Case(
        whole(message_id, "searchResEntry", operation, controls),
        {
            "id": message_id,
            "tag": 4,
            "dn": dn,
            "attributes": expected,
            "controls": seen(controls),
        },
    )


def reference(message_id: int, urls: list[str], controls: Any) -> Case:
    operation = rfc4511.SearchResultReference()
    for at, url in enumerate(urls):
        operation[at] = rfc4511.URI(url)
    return Case(
        whole(message_id, "searchResRef", operation, controls),
        {"id": message_id, "tag": 19, "urls": urls, "controls": seen(controls)},
    )


RESULTS: dict[str, tuple[int, Any]] = {
    "bindResponse": (1, rfc4511.BindResponse),
    "searchResDone": (5, rfc4511.SearchResultDone),
    "modifyResponse": (7, rfc4511.ModifyResponse),
    "addResponse": (9, rfc4511.AddResponse),
    "delResponse": (11, rfc4511.DelResponse),
    "modDNResponse": (13, rfc4511.ModifyDNResponse),
    "compareResponse": (15, rfc4511.CompareResponse),
    "extendedResp": (24, rfc4511.ExtendedResponse),
}


def result(
    message_id: int, kind: str, code: int, matched: str, diagnostic: str, urls: list[str],
    oid: str | None, value: bytes | None, controls: Any,
) -> Case:  # fmt: skip
    tag, make = RESULTS[kind]
    operation = make()
    operation["resultCode"] = rfc4511.ResultCode(code)
    operation["matchedDN"] = rfc4511.LDAPDN(matched)
    operation["diagnosticMessage"] = rfc4511.LDAPString(diagnostic)
    if urls:
        operation["referral"] = rfc4511.Referral()
        for at, url in enumerate(urls):
            operation["referral"][at] = rfc4511.URI(url)
    if tag != 24:
        oid = None
    elif oid is not None:
        operation["responseName"] = rfc4511.ResponseName(oid)
    if tag not in (1, 24):
        value = None
    elif value is not None:
        if tag == 1:
            operation["serverSaslCreds"] = rfc4511.ServerSaslCreds(value)
        else:
            operation["responseValue"] = rfc4511.ResponseValue(value)
    return Case(
        whole(message_id, kind, operation, controls),
        {
            "id": message_id,
            "tag": tag,
            "code": code,
            "matched_dn": matched,
            "diagnostic": diagnostic,
            "referrals": urls,
            "oid": oid,
            "value": value,
            "controls": seen(controls),
        },
    )


def intermediate(message_id: int, oid: str | None, value: bytes | None, controls: Any) -> Case:
    operation = rfc4511.IntermediateResponse()
    if oid is not None:
        operation["responseName"] = rfc4511.IntermediateResponseName(oid)
    if value is not None:
        operation["responseValue"] = rfc4511.IntermediateResponseValue(value)
    if oid is None and value is None:
        operation.clear()
    return Case(
        whole(message_id, "intermediateResponse", operation, controls),
        {"id": message_id, "tag": 25, "oid": oid, "value": value, "controls": seen(controls)},
    )


many_controls = st.lists(triples, max_size=2)
urls = st.lists(texts, min_size=1, max_size=3)
names = st.sampled_from(["cn", "mail", "jpegPhoto;binary"]) | texts
pairs = st.lists(st.tuples(names, st.lists(blobs, max_size=4)), max_size=5)
cases = st.one_of(
    st.builds(entry, ids, long_texts, pairs, many_controls),
    st.builds(reference, ids, urls, many_controls),
    st.builds(
        result,
        ids,
        st.sampled_from(sorted(RESULTS)),
        st.sampled_from([0, 4, 10, 32, 49, 53, 4096]),
        texts,
        long_texts,
        st.just([]) | urls,
        st.none() | oids,
        st.none() | blobs,
        many_controls,
    ),
    st.builds(intermediate, ids, st.none() | oids, st.none() | blobs, many_controls),
)
USUAL = [
    entry(2, "uid=user1,ou=People,dc=example,dc=org", [("cn", [b"a", b"b"]), ("mail", [])], []),
    result(2, "searchResDone", 0, "", "", [], None, None, [(PAGED_RESULTS, False, b"x")]),
    reference(3, ["ldap://a/dc=x", "ldap://b/dc=x"], []),
    result(5, "bindResponse", 14, "", "go on", [], None, b"challenge", []),
    result(6, "extendedResp", 10, "dc=x", "", ["ldap://a"], "1.2.3", b"value", []),
    intermediate(7, "1.2.3", b"value", [("1.2.3", True, None)]),
    result(4, "extendedResp", 52, "", "bye", [], NOTICE_OF_DISCONNECTION, None, []),
]
