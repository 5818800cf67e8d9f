"""LDAP messages, written and read by ours and by ldap3, without a server.

ldap3's way is that of its synchronous strategy at its fastest (``fast_decoder``, no schema): what
it does between being called and ``send``, and between ``recv`` and the attributes of an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from keyfront.common import programs
from keyfront.errors import ServerError
from keyfront.middleware.ldap.protocol import messages, search_filter

DN = "uid=user1,ou=People,dc=example,dc=org"
PASSWORD = "correct horse battery staple"
BASE = "ou=People,dc=example,dc=org"
FILTER = "(&(objectClass=inetOrgPerson)(uid=user1))"
WANTED = ["uid", "cn", "sn", "mail", "description"]
VALUES: dict[str, list[bytes]] = {
    "uid": [b"user1"],
    "cn": [b"User One"],
    "sn": [b"One"],
    "mail": [b"user1@example.org", b"one@example.org"],
    "description": ["Benutzer Nummer eins, für Messungen".encode()],
}


class Case(NamedTuple):
    """One step, done in two ways."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


def answer(entries: int) -> bytes:
    """Return what a server sends for a search: entries, and that these are all."""
    wire = []
    for number in range(entries):
        attributes = b"".join(
            _tlv(0x30, _tlv(4, name.encode()), _tlv(0x31, *(_tlv(4, each) for each in values)))
            for name, values in VALUES.items()
        )
        dn = f"uid=user{number},{BASE}".encode()
        wire.append(_framed(_tlv(0x64, _tlv(4, dn), _tlv(0x30, attributes))))
    wire.append(_framed(b"\x65\x07\x0a\x01\x00\x04\x00\x04\x00"))
    return b"".join(wire)


def _tlv(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    head = bytes((tag, size)) if size < 128 else bytes((tag, 0x82)) + size.to_bytes(2, "big")
    return head + content


def _framed(operation: bytes) -> bytes:
    return _tlv(0x30, b"\x02\x01\x02", operation)


def read(wire: bytes) -> list[dict[str, list[bytes]]]:
    """Return the attributes of all entries, by ours."""
    decoder = messages.Decoder()
    decoder.feed(wire)
    found = []
    while (message := decoder.next()) is not None:
        if message.tag == messages.ENTRY:
            found.append(message.attributes)
    return found


def write_bind() -> bytes:
    """Return a bind, by ours."""
    return messages.bind_request(2, DN, PASSWORD.encode())


def write_search() -> bytes:
    """Return a search, by ours."""
    return messages.search_request(2, BASE, 2, search_filter.encode(FILTER), WANTED)


def cases() -> list[Case]:
    """Return all steps.

    :raises MissingPartError: ldap3 is not installed
    :raises ServerError: ours and ldap3's differ, so that a comparison would mean nothing
    """
    theirs = _ldap3()
    for ours, other in ((write_bind(), theirs.bind()), (write_search(), theirs.search())):
        if ours != other:
            raise ServerError("ldap3 writes another message than ours")
    found = [
        Case("write a bind", write_bind, theirs.bind),
        Case("write a search", write_search, theirs.search),
    ]
    for count, name in ((1, "read 1 entry, done"), (100, "read 100 entries, done")):
        wire = answer(count)
        if read(wire) != theirs.read(wire):
            raise ServerError("ldap3 reads another answer than ours")
        found.append(Case(name, partial(read, wire), partial(theirs.read, wire)))
    return found


def _ldap3() -> Any:
    programs.require_module("ldap3", "ldap")
    from ldap3 import SIMPLE, SYNC, Connection, Server
    from ldap3.operation.bind import bind_operation
    from ldap3.operation.search import search_operation
    from ldap3.protocol.rfc4511 import LDAPMessage, MessageID, ProtocolOp
    from ldap3.strategy.base import BaseStrategy
    from ldap3.utils.asn1 import decode_message_fast, encode

    # never connected: only its decoding is used
    strategy = Connection(Server("localhost", get_info=None), client_strategy=SYNC).strategy

    def message(name: str, request: Any) -> bytes:
        whole = LDAPMessage()
        whole["messageID"] = MessageID(2)
        whole["protocolOp"] = ProtocolOp().setComponentByName(name, request)
        # ``send`` does so before it sends
        BaseStrategy.decode_request(name, request, None)
        return bytes(encode(whole))

    def bind() -> bytes:
        return message("bindRequest", bind_operation(3, SIMPLE, DN, PASSWORD))

    def search() -> bytes:
        request = search_operation(BASE, FILTER, 2, 0, WANTED, 0, 0, False, False, False)
        return message("searchRequest", request)

    def read(wire: bytes) -> list[dict[str, list[bytes]]]:
        found = []
        while wire:
            size = strategy.compute_ldap_message_size(wire)
            response = strategy.decode_response_fast(decode_message_fast(wire[:size]))
            wire = wire[size:]
            if response["type"] == "searchResEntry":
                found.append(dict(response["raw_attributes"]))
        return found

    return SimpleNamespace(bind=bind, search=search, read=read)
