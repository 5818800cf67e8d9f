"""A connection against servers that are wrong in every way; each is a thread on loopback."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    FilterError,
    OptionError,
    Verdict,
)
from keyfront.middleware.ldap.protocol import controls, messages
from keyfront.middleware.ldap.protocol.ber import ProtocolError, element, number
from keyfront.middleware.ldap.protocol.connection import FAST_BIND, Connection
from keyfront.middleware.ldap.protocol.sasl_gssapi import Exchange
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL
from support.certificates import certificates
from support.served import PATIENCE, free_port

DN = "uid=a,dc=x"
SECRET = "s3cret-pässwörd"
SHORT = 0.2

BIND, ENTRY, DONE, REFERENCE, EXTENDED, INTERMEDIATE = 0x61, 0x64, 0x65, 0x73, 0x78, 0x79


def result(
    id: int,
    tag: int,
    code: int = 0,
    words: str = "",
    *,
    matched: str = "",
    more: bytes = b"",
    controls: bytes = b"",
) -> bytes:
    body = element(0x0A, number(code)) + element(4, matched.encode()) + element(4, words.encode())
    return element(0x30, element(2, number(id)) + element(tag, body + more) + controls)


def entry(id: int, dn: str = DN, **attributes: list[bytes]) -> bytes:
    listed = b"".join(
        element(0x30, element(4, k.encode()) + element(0x31, b"".join(element(4, x) for x in v)))
        for k, v in attributes.items()
    )
    body = element(4, dn.encode()) + element(0x30, listed)
    return element(0x30, element(2, number(id)) + element(ENTRY, body))


def reference(id: int, *urls: str) -> bytes:
    body = b"".join(element(4, url.encode()) for url in urls)
    return element(0x30, element(2, number(id)) + element(REFERENCE, body))


NOTICE = result(
    0,
    EXTENDED,
    52,
    "going down for maintenance",
    more=element(0x8A, messages.NOTICE_OF_DISCONNECTION.encode()),
)


class Peer:
    """The server's end: reads whole requests, which are kept, and says what the test wants."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.heard: list[bytes] = []
        client.settimeout(PATIENCE)

    def request(self) -> bytes:
        """The next request; empty if the client closed."""
        start = self._read(2)
        if not start:
            return b""
        size = start[1]
        if size > 127:
            start += self._read(size & 0x7F)
            size = int.from_bytes(start[2:], "big")
        whole = start + self._read(size)
        self.heard.append(whole)
        return whole

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = b""
            with contextlib.suppress(ConnectionResetError):
                part = self.socket.recv(size - len(data))
            if not part:
                return b""
            data += part
        return data

    def say(self, *parts: bytes) -> None:
        # whoever is told may have gone
        with contextlib.suppress(OSError):
            self.socket.sendall(b"".join(parts))

    def answer(self, *parts: bytes) -> None:
        if self.request():
            self.say(*parts)

    def listen(self) -> None:
        """Until the client closes."""
        while self.request():
            pass


class Server:
    def __init__(self, script: Callable[[Peer], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE)
        self._script = script
        self._failed: BaseException | None = None
        self.peer: Peer | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.url = ServerURL.parse(f"ldap://127.0.0.1:{self._listener.getsockname()[1]}")

    def _run(self) -> None:
        try:
            client, _ = self._listener.accept()
            with client:
                self.peer = Peer(client)
                self._script(self.peer)
        except BaseException as error:
            self._failed = error

    def end(self) -> list[bytes]:
        """Wait for the end of the script; returns the requests it heard."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._listener.close()
        assert self._failed is None, self._failed
        assert self.peer is not None
        return self.peer.heard


@contextlib.contextmanager
def talk(
    script: Callable[[Peer], None], **options: Any
) -> Iterator[tuple[Connection, Callable[[], list[bytes]]]]:
    """A connection to a server that does so, and what it heard once it has ended."""
    server = Server(script)
    options = {"tls": TLS(), "connect_timeout": PATIENCE, "timeout": PATIENCE, **options}
    connection = Connection.connect(server.url, **options)

    def heard() -> list[bytes]:
        connection.close()
        return server.end()

    try:
        yield connection, heard
    finally:
        connection.close()
        server.end()


def says(*answers: bytes) -> Callable[[Peer], None]:
    """One answer to each request, then only listen."""

    def script(peer: Peer) -> None:
        for each in answers:
            peer.answer(each)
        peer.listen()

    return script


def tag(request: bytes) -> int:
    at = 2 + (request[1] & 0x7F if request[1] > 127 else 0)
    return request[at + 2 + request[at + 1]]


def is_lost(connection: Connection) -> None:
    """Nothing is asked of it any more."""
    assert not connection.usable
    assert connection.readable()
    assert connection.bound_as is None
    for ask in (
        connection.ping,
        lambda: connection.search("dc=x"),
        lambda: connection.bind(DN, "x"),
    ):
        with pytest.raises(DirectoryUnavailableError, match="lost or closed"):
            ask()


# BIND


def test_one_bind_is_one_message() -> None:
    with talk(says(result(1, BIND), result(2, BIND))) as (connection, heard):
        assert connection.bound_as is None
        answer = connection.bind(DN, SECRET)
        assert (answer.password_expiring, answer.grace) == (None, None)
        assert (connection.bound_as, connection.usable, connection.binds) == (DN, True, 1)
        connection.bind("cn=b", b"\xff\x01")
        assert (connection.bound_as, connection.binds) == ("cn=b", 2)
    assert heard() == [
        messages.bind_request(1, DN, SECRET.encode()),
        messages.bind_request(2, "cn=b", b"\xff\x01"),
        messages.unbind_request(3),
    ]


def test_a_refused_bind_leaves_nobody_bound() -> None:
    script = says(result(1, BIND), result(2, BIND, 49, "no", matched="dc=x"), result(3, BIND))
    with talk(script) as (connection, _):
        connection.bind(DN, SECRET)
        with pytest.raises(CredentialsError) as caught:
            connection.bind(DN, "wrong")
        assert caught.value.verdict is Verdict.WRONG_PASSWORD
        assert (caught.value.diagnostic, caught.value.server) == ("no", connection.server)
        assert connection.bound_as is None
        assert connection.usable
        connection.bind(DN, SECRET)
        assert connection.bound_as == DN


@pytest.mark.parametrize(
    ("dn", "password", "anonymous", "verdict"),
    [
        (DN, "", False, Verdict.WRONG_PASSWORD),
        (DN, b"", True, Verdict.WRONG_PASSWORD),
        (DN, "", True, Verdict.WRONG_PASSWORD),
        (DN, "\ud800", False, Verdict.WRONG_PASSWORD),
        ("", "\ud800", True, Verdict.UNKNOWN_USER),
        ("", "x", True, Verdict.UNKNOWN_USER),
        ("", "x", False, Verdict.UNKNOWN_USER),
        ("", "", False, Verdict.UNKNOWN_USER),
    ],
)
def test_what_no_server_is_asked(
    dn: str, password: str | bytes, anonymous: bool, verdict: Verdict
) -> None:
    with talk(says()) as (connection, heard):
        with pytest.raises(CredentialsError, match="nothing was sent") as caught:
            connection.bind(dn, password, allow_anonymous=anonymous)
        assert caught.value.verdict is verdict
        assert connection.usable
        assert connection.binds == 0
    assert heard() == [messages.unbind_request(heard()[0][4])]


def test_anonymous_when_told_so() -> None:
    with talk(says(result(1, BIND))) as (connection, _):
        connection.bind("", allow_anonymous=True)
        assert connection.bound_as == ""


def test_a_dn_that_cannot_be_sent() -> None:
    with talk(says()) as (connection, _):
        with pytest.raises(OptionError, match="DN"):
            connection.bind("cn=\ud800", SECRET)
        assert connection.usable


def policy(value: bytes) -> bytes:
    return controls.encode(controls.control(controls.PASSWORD_POLICY, value=value))


def test_warnings_of_the_password_policy() -> None:
    expiring = policy(element(0x30, element(0xA0, element(0x80, number(3600)))))
    grace = policy(element(0x30, element(0xA0, element(0x81, number(2)))))
    locked = policy(element(0x30, element(0x81, number(1))))
    script = says(
        result(1, BIND, controls=expiring), result(2, BIND, controls=grace),
        result(3, BIND, 49, controls=locked), result(4, BIND, controls=policy(b"\x30\x7f")),
    )  # fmt: skip
    with talk(script) as (connection, heard):
        assert connection.bind(DN, SECRET, password_policy=True).password_expiring == 3600
        assert connection.bind(DN, SECRET, password_policy=True).grace == 2
        with pytest.raises(CredentialsError) as caught:
            connection.bind(DN, SECRET, password_policy=True)
        assert caught.value.verdict is Verdict.LOCKED
        with pytest.raises(DirectoryProtocolError):
            connection.bind(DN, SECRET, password_policy=True)
        is_lost(connection)
    wanted = controls.encode(controls.password_policy_control())
    assert heard()[0] == messages.bind_request(1, DN, SECRET.encode(), wanted)


# SASL EXTERNAL

IDENTITY = "dn:cn=service,dc=x"


def whoami(id: int, identity: str | None, code: int = 0) -> bytes:
    more = b"" if identity is None else element(0x8B, identity.encode())
    return result(id, EXTENDED, code, more=more)


def test_external_is_a_bind_and_a_question() -> None:
    with talk(says(result(1, BIND), whoami(2, IDENTITY), whoami(3, IDENTITY))) as (
        connection,
        heard,
    ):
        assert connection.bind_external() == IDENTITY
        assert connection.bound_as == IDENTITY
        assert connection.binds == 1
        assert connection.who_am_i() == IDENTITY
        assert connection.usable
    assert heard()[:3] == [
        messages.sasl_bind_request(1, "EXTERNAL", b""),
        messages.extended_request(2, "1.3.6.1.4.1.4203.1.11.3"),
        messages.extended_request(3, "1.3.6.1.4.1.4203.1.11.3"),
    ]


def test_a_server_that_asks_for_what_it_was_given() -> None:
    challenge = result(1, BIND, 14, more=element(0x87, b""))
    with talk(says(challenge, result(2, BIND), whoami(3, IDENTITY))) as (connection, heard):
        assert connection.bind_external() == IDENTITY
    assert heard()[1] == messages.sasl_bind_request(2, "EXTERNAL", b"")
    # but not for ever
    with talk(says(challenge, result(2, BIND, 14))) as (connection, heard):
        with pytest.raises(DirectoryAnswerError, match="saslBindInProgress"):
            connection.bind_external()
        assert connection.bound_as is None
    assert len(heard()) == 3


@pytest.mark.parametrize("identity", [None, "", "dn:", "u:"])
def test_accepted_as_nobody(identity: str | None) -> None:
    script = says(
        result(1, BIND), result(2, BIND), whoami(3, identity), result(4, BIND)
    )
    with talk(script) as (connection, _):
        connection.bind(DN, SECRET)
        with pytest.raises(CredentialsError, match=r"as nobody .*authz-regexp") as caught:
            connection.bind_external()
        assert "success (0)" in str(caught.value)
        assert caught.value.verdict is Verdict.NO_IDENTITY
        assert caught.value.server == connection.server
        assert connection.bound_as is None
        connection.bind(DN, SECRET)


@pytest.mark.parametrize("code", [2, 12, 50, 53])
def test_who_it_is_must_be_told(code: int) -> None:
    """Or a wrong set-up would look like a directory that has no users."""
    with talk(says(result(1, BIND), whoami(2, None, code))) as (connection, _):
        with pytest.raises(CredentialsError, match="does not say as whom") as caught:
            connection.bind_external()
        assert caught.value.verdict is Verdict.NO_IDENTITY
        assert connection.bound_as is None


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (7, Verdict.WRONG_CERTIFICATE), (48, Verdict.WRONG_CERTIFICATE),
        (49, Verdict.WRONG_CERTIFICATE), (32, Verdict.UNKNOWN_USER), (53, Verdict.UNWILLING),
    ],
)  # fmt: skip
def test_external_is_refused(code: int, verdict: Verdict) -> None:
    with talk(says(result(1, BIND, code, "no"), result(2, BIND))) as (connection, heard):
        with pytest.raises(CredentialsError, match=f"{code}.*: no") as caught:
            connection.bind_external()
        assert caught.value.verdict is verdict
        assert connection.bound_as is None
        connection.bind(DN, SECRET)
    assert len(heard()) == 3


@pytest.mark.parametrize("at", [1, 2])
def test_external_of_a_server_in_trouble_is_no_verdict(at: int) -> None:
    answers = [result(1, BIND, 51)] if at == 1 else [result(1, BIND), whoami(2, None, 51)]
    with talk(says(*answers)) as (connection, _):
        with pytest.raises(DirectoryBusyError):
            connection.bind_external()
        assert connection.bound_as is None


@pytest.mark.parametrize("at", [1, 2])
def test_external_without_an_answer(at: int) -> None:
    with talk(says(*[result(1, BIND)][: at - 1])) as (connection, _):
        with pytest.raises(DirectoryTimeoutError):
            connection.bind_external(timeout=SHORT)
        is_lost(connection)


def test_external_has_one_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    with talk(says(result(1, BIND, 14), result(2, BIND), whoami(3, IDENTITY))) as (connection, _):
        begin = connection.transport.begin
        monkeypatch.setattr(
            type(connection.transport), "begin",
            lambda self, seconds: given.append(seconds) or begin(seconds),
        )  # fmt: skip
        connection.bind_external(timeout=PATIENCE)
    assert given[0] == PATIENCE
    assert PATIENCE > given[1] > given[2]


def test_external_that_is_half_done_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose connection it is then, we do not know."""
    with talk(says(result(1, BIND))) as (connection, _):
        real = connection._bind_sasl

        def stand_still(mechanism: str, timeout: float | None) -> Any:
            message = real(mechanism, timeout)
            late = time.monotonic() + PATIENCE
            clock = types.SimpleNamespace(monotonic=lambda: late)
            monkeypatch.setattr("keyfront.middleware.ldap.protocol.connection.time", clock)
            return message

        monkeypatch.setattr(Connection, "_bind_sasl", lambda self, *given: stand_still(*given))
        with pytest.raises(DirectoryTimeoutError, match="no time was left"):
            connection.bind_external(timeout=PATIENCE)
        monkeypatch.undo()
        is_lost(connection)


def test_external_with_a_broken_control() -> None:
    with talk(says(result(1, BIND, controls=policy(b"\x30\x7f")))) as (connection, _):
        with pytest.raises(DirectoryProtocolError):
            connection.bind_external()
        is_lost(connection)


# SASL GSSAPI

FIRST, TOKEN, ANSWER = b"first", b"the server's", b"answered"
OFFER = b"\x01\0\0\0"


class FakeContext:
    """A context of GSSAPI that takes one token of the server's, and shows what it wraps."""

    def __init__(self) -> None:
        self.first = FIRST
        self.complete = False
        self.offer = OFFER

    def step(self, token: bytes) -> bytes:
        if token != TOKEN:
            raise ProtocolError("a token of GSSAPI is not accepted: no")
        self.complete = True
        return ANSWER

    def wrap(self, message: bytes) -> bytes:
        return b"wrapped " + message

    def unwrap(self, token: bytes) -> bytes:
        if not token.startswith(b"wrapped "):
            raise ProtocolError("a token of GSSAPI is not accepted: not wrapped")
        return token.removeprefix(b"wrapped ")


def challenge(id: int, token: bytes | None) -> bytes:
    return result(id, BIND, 14, more=b"" if token is None else element(0x87, token))


def gssapi(connection: Connection, **options: Any) -> str:
    return connection.bind_gssapi(Exchange(FakeContext(), "me@REALM"), **options)


def test_gssapi_is_three_binds_and_a_question() -> None:
    script = says(
        challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER), result(3, BIND),
        whoami(4, IDENTITY),
    )  # fmt: skip
    with talk(script) as (connection, heard):
        assert connection.end_point == b""
        assert gssapi(connection) == IDENTITY
        assert (connection.bound_as, connection.binds) == (IDENTITY, 3)
        assert connection.usable
    assert heard()[:4] == [
        messages.sasl_bind_request(1, "GSSAPI", FIRST),
        messages.sasl_bind_request(2, "GSSAPI", ANSWER),
        # No layer, and so no messages of one; as nobody else.
        messages.sasl_bind_request(3, "GSSAPI", b"wrapped \x01\0\0\0"),
        messages.extended_request(4, "1.3.6.1.4.1.4203.1.11.3"),
    ]


@pytest.mark.parametrize("offered", [b"\x07\0\xff\xff", b"\x01\0\0\0", b"\x03\0\0\x01"])
def test_whatever_layers_a_server_offers_none_is_taken(offered: bytes) -> None:
    script = says(
        challenge(1, TOKEN), challenge(2, b"wrapped " + offered), result(3, BIND),
        whoami(4, IDENTITY),
    )  # fmt: skip
    with talk(script) as (connection, heard):
        gssapi(connection)
    assert heard()[2] == messages.sasl_bind_request(3, "GSSAPI", b"wrapped \x01\0\0\0")


@pytest.mark.parametrize("offered", [b"\x06\0\xff\xff", b"\0\0\0\0", b"\x04\0\0\0"])
def test_a_server_that_wants_a_layer(offered: bytes) -> None:
    script = says(challenge(1, TOKEN), challenge(2, b"wrapped " + offered))
    with talk(script) as (connection, heard):
        with pytest.raises(DirectoryAnswerError, match="use ldaps:// or StartTLS") as caught:
            gssapi(connection)
        assert caught.value.code == 8
        is_lost(connection)
    assert len(heard()) == 2


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        # Who says yes has not proved who he is.
        ([result(1, BIND)], "before the server had proved who it is"),
        ([challenge(1, TOKEN), result(2, BIND)], "before the server had proved who it is"),
        ([challenge(1, b"forged")], "not accepted: no"),
        ([challenge(1, None)], "not accepted: no"),
        ([challenge(1, TOKEN), challenge(2, b"")], "not wrapped"),
        ([challenge(1, TOKEN), challenge(2, OFFER)], "not wrapped"),
        ([challenge(1, TOKEN), challenge(2, b"wrapped \x01")], "has 1 bytes"),
        ([challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER * 2)], "has 8 bytes"),
        (
            [challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER), challenge(3, b"more")],
            "after its last step",
        ),
        ([challenge(1, b"x" * 65537)], "more than 65536 bytes"),
    ],
)
def test_gssapi_with_a_hostile_server(answers: list[bytes], words: str) -> None:
    with talk(says(*answers)) as (connection, heard):
        with pytest.raises(DirectoryProtocolError, match=words):
            gssapi(connection)
        is_lost(connection)
    assert len(heard()) == len(answers)


def test_gssapi_does_not_go_on_for_ever() -> None:
    class Endless(FakeContext):
        def step(self, token: bytes) -> bytes:
            return token

    with talk(says(*(challenge(number, b"again") for number in range(1, 99)))) as (
        connection,
        heard,
    ):
        with pytest.raises(DirectoryProtocolError, match="more than 5 rounds"):
            connection.bind_gssapi(Exchange(Endless(), "me"))
        is_lost(connection)
    assert len(heard()) == 5


@pytest.mark.parametrize("code", [7, 48, 49])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_gssapi_is_refused(code: int, at: int) -> None:
    answers = [challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER)][: at - 1]
    answers.append(result(at, BIND, code, "data 52e, no" if code == 49 else "no"))
    with talk(says(*answers, result(at + 1, BIND))) as (connection, _):
        with pytest.raises(CredentialsError, match=f"{code}.*: .*no") as caught:
            gssapi(connection)
        assert caught.value.verdict is Verdict.WRONG_TICKET
        assert connection.bound_as is None
        connection.bind(DN, SECRET)


def test_gssapi_as_nobody_or_from_a_server_in_trouble() -> None:
    steps = [challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER)]
    with talk(says(*steps, result(3, BIND), whoami(4, ""))) as (connection, _):
        with pytest.raises(CredentialsError, match="GSSAPI was accepted, but as nobody") as caught:
            gssapi(connection)
        assert caught.value.verdict is Verdict.WRONG_TICKET
    # One that does not know the question, as Samba, and one that does not answer it.
    with talk(says(*steps, result(3, BIND), whoami(4, None, 2))) as (connection, _):
        assert gssapi(connection) == connection.bound_as == "u:me@REALM"
        assert connection.usable
    with talk(says(*steps, result(3, BIND), whoami(4, None, 53))) as (connection, _):
        with pytest.raises(CredentialsError, match="does not say as whom"):
            gssapi(connection)
    with talk(says(steps[0], result(2, BIND, 80, "no keytab"))) as (connection, _):
        with pytest.raises(DirectoryBusyError):
            gssapi(connection)
        assert connection.usable


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_gssapi_without_an_answer(at: int) -> None:
    answers = [challenge(1, TOKEN), challenge(2, b"wrapped " + OFFER), result(3, BIND)]
    with talk(says(*answers[: at - 1])) as (connection, _):
        with pytest.raises(DirectoryTimeoutError):
            gssapi(connection, timeout=SHORT)
        is_lost(connection)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
@pytest.mark.parametrize("shown", [None, "other_ca"])
def test_a_client_certificate_that_tls_refuses_is_told(
    tmp_path: Path, version: str, shown: str | None
) -> None:
    """OpenSSL says why; with TLS 1.3 when the first answer is read."""
    made = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.load_cert_chain(made.server.certificate, made.server.key)
    context.load_verify_locations(made.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE)

    def serve() -> None:
        client, _ = listener.accept()
        client.settimeout(PATIENCE)
        with context.wrap_socket(
            client, server_side=True, do_handshake_on_connect=False
        ) as secured:
            with contextlib.suppress(OSError):
                secured.do_handshake()
            # Closed with something unread it would be a reset, and the reason might be lost.
            with contextlib.suppress(ConnectionResetError):
                while socket.socket.recv(secured, 4096):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    pair = getattr(made, shown) if shown else None
    tls = TLS(
        ca_file=str(made.ca_file), client_cert=pair and str(pair.certificate),
        client_key=pair and str(pair.key),
    )  # fmt: skip
    url = ServerURL.parse(f"ldaps://127.0.0.1:{listener.getsockname()[1]}")
    try:
        with pytest.raises(DirectoryUnavailableError) as caught:
            with contextlib.closing(
                Connection.connect(url, tls=tls, connect_timeout=PATIENCE, timeout=PATIENCE)
            ) as connection:
                connection.bind_external()
    finally:
        thread.join(PATIENCE)
        listener.close()
    if version == "TLSv1_3" or shown:
        assert isinstance(caught.value, DirectoryTLSError)
        assert "the client certificate, or that there is none, is not accepted" in str(caught.value)


@pytest.mark.parametrize("code", [1, 3, 51, 52, 80])
def test_a_server_in_trouble_is_no_verdict(code: int) -> None:
    """It has answered all the same, and the next user may be none of its troubles."""
    answers = result(1, BIND, code, "in trouble"), result(2, BIND)
    with talk(says(*answers)) as (connection, _):
        with pytest.raises(DirectoryBusyError, match="in trouble"):
            connection.bind(DN, SECRET)
        assert connection.bound_as is None
        connection.bind(DN, SECRET)
        assert connection.bound_as == DN


def test_fast_bind_leaves_the_connection_anonymous() -> None:
    with talk(says(result(1, EXTENDED), result(2, BIND))) as (connection, heard):
        connection.fast_bind()
        connection.bind(DN, SECRET)
        assert connection.bound_as is None
        assert connection.binds == 1
    assert heard()[0] == messages.extended_request(1, FAST_BIND)


def test_fast_bind_that_is_not_there() -> None:
    with talk(says(result(1, EXTENDED, 2, "unsupported"), result(2, BIND))) as (connection, _):
        with pytest.raises(DirectoryAnswerError, match="unsupported"):
            connection.fast_bind()
        connection.bind(DN, SECRET)
        assert connection.bound_as == DN


# Searches


def test_what_a_search_finds_in_order() -> None:
    answers = (
        entry(1, "cn=1", cn=[b"1"]), reference(1, "ldap://b", "ldap://c"),
        element(0x30, element(2, number(1)) + element(INTERMEDIATE, b"")),
        entry(1, "cn=2", cn=[b"\xff", b""]), result(1, DONE),
    )  # fmt: skip
    with talk(says(b"".join(answers))) as (connection, heard):
        found = connection.search("dc=x", 1, "(cn=*)", ["cn"], time_limit=3)
        assert found.items == [
            ("cn=1", {"cn": [b"1"]}),
            (None, ["ldap://b", "ldap://c"]),
            ("cn=2", {"cn": [b"\xff", b""]}),
        ]
        assert [dn for dn, _ in found.entries] == ["cn=1", "cn=2"]
        assert found.referrals == ["ldap://b", "ldap://c"]
        assert connection.usable
        assert connection.searches == 1
    present = b"\x87\x02cn"
    assert heard()[0] == messages.search_request(1, "dc=x", 1, present, ["cn"], time_limit=3)


def test_bytes_in_any_pieces() -> None:
    whole = entry(1, cn=[b"x" * 300]) + result(1, DONE)

    def script(peer: Peer) -> None:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.request()
        for n in range(len(whole)):
            peer.say(whole[n : n + 1])
        peer.listen()

    with talk(script) as (connection, _):
        assert connection.search("dc=x").items == [(DN, {"cn": [b"x" * 300]})]


@pytest.mark.parametrize("code", [1, 3, 4, 10, 11, 12, 32, 50, 80])
def test_a_refused_search_is_an_answer(code: int) -> None:
    urls = element(0xA3, element(4, b"ldap://b"))
    refused = result(1, DONE, code, "no", matched="dc=y", more=urls)
    with talk(says(entry(1) + refused, result(2, DONE))) as (connection, _):
        with pytest.raises(DirectoryAnswerError) as caught:
            connection.search("dc=x")
        error = caught.value
        assert (error.code, error.matched_dn, error.referrals) == (code, "dc=y", ("ldap://b",))
        assert connection.search("dc=x").items == []


@pytest.mark.parametrize("code", [51, 52])
def test_a_busy_server_is_an_outage(code: int) -> None:
    with talk(says(result(1, DONE, code), result(2, DONE), result(3, DONE, code))) as (
        connection,
        _,
    ):
        with pytest.raises(DirectoryBusyError):
            connection.search("dc=x")
        connection.search("dc=x")
        # Asked for a sign of life, it speaks of itself.
        with pytest.raises(DirectoryUnavailableError) as caught:
            connection.ping()
        assert type(caught.value) is DirectoryUnavailableError
        is_lost(connection)


def test_arguments_that_cannot_be_sent() -> None:
    with talk(says()) as (connection, _):
        for arguments, kind in (
            ({"filter": "(cn="}, FilterError),
            ({"scope": 7}, OptionError),
            ({"dereference": 4}, OptionError),
            ({"size_limit": -1}, OptionError),
            ({"page_size": -1}, OptionError),
            ({"attributes": ["\ud800"]}, OptionError),
        ):
            with pytest.raises(kind):
                connection.search("dc=x", **arguments)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="TLS begins"):
            connection.extended("1.3.6.1.4.1.1466.20037")
        assert connection.usable
        assert connection.searches == 0


def cookie(value: bytes) -> bytes:
    body = element(0x30, element(2, number(0)) + element(4, value))
    return controls.encode(controls.control(controls.PAGED_RESULTS, value=body))


def test_pages_until_there_are_no_more() -> None:
    script = says(
        entry(1, "cn=1") + result(1, DONE, controls=cookie(b"next")),
        entry(2, "cn=2") + result(2, DONE, controls=cookie(b"last")),
        result(3, DONE, controls=cookie(b"")),
    )
    with talk(script) as (connection, heard):
        assert [dn for dn, _ in connection.search("dc=x", page_size=1).items] == ["cn=1", "cn=2"]
        assert connection.usable
        assert connection.searches == 3
    asked = [
        messages.search_request(
            id, "dc=x", 2, b"\x87\x0bobjectClass", None,
            controls=controls.encode(controls.paged_control(1, value)),
        )
        for id, value in ((1, b""), (2, b"next"), (3, b"last"))
    ]  # fmt: skip
    assert heard()[:3] == asked


def test_one_page_and_its_cookie() -> None:
    script = says(
        entry(1, "cn=1") + result(1, DONE, controls=cookie(b"next")),
        result(2, DONE, controls=cookie(b"")),
    )
    with talk(script) as (connection, _):
        found, next_page = connection.search_page("dc=x", page_size=1)
        assert (len(found.items), next_page) == (1, b"next")
        assert connection.search_page("dc=x", page_size=0, cookie=next_page)[1] == b""


def test_pages_that_are_broken_or_fail_halfway() -> None:
    broken = controls.encode(controls.control(controls.PAGED_RESULTS, value=b"\x30\x7f"))
    with talk(says(result(1, DONE, controls=broken))) as (connection, _):
        with pytest.raises(DirectoryProtocolError):
            connection.search("dc=x", page_size=1)
        is_lost(connection)
    script = says(result(1, DONE, controls=cookie(b"a")), result(2, DONE, 53))
    with talk(script) as (connection, _):
        with pytest.raises(DirectoryAnswerError):
            connection.search("dc=x", page_size=1)
        assert connection.usable


def test_pages_without_end_have_one_deadline() -> None:
    def script(peer: Peer) -> None:
        for id in range(1, 1_000_000):
            if not peer.request():
                return
            peer.say(result(id, DONE, controls=cookie(b"again")))

    with talk(script) as (connection, _):
        start = time.monotonic()
        with pytest.raises(DirectoryTimeoutError):
            connection.search("dc=x", page_size=1, timeout=SHORT)
        assert time.monotonic() - start < PATIENCE / 2
        is_lost(connection)


def test_more_than_was_asked_for_is_refused() -> None:
    flood = b"".join(entry(1, f"cn={n}") for n in range(3)) + result(1, DONE)
    with talk(says(flood)) as (connection, heard):
        with pytest.raises(DirectoryAnswerError) as caught:
            connection.search("dc=x", size_limit=2)
        assert (caught.value.code, caught.value.name) == (4, "sizeLimitExceeded")
        assert not connection.usable
    assert heard()[1] == messages.abandon_request(2, 1)
    with talk(says(flood)) as (connection, _):
        assert len(connection.search("dc=x", size_limit=3).items) == 3


def test_a_size_limit_is_for_all_pages() -> None:
    script = says(
        entry(1) + reference(1, "ldap://b") + entry(1) + result(1, DONE, controls=cookie(b"a")),
        entry(2) + entry(2) + result(2, DONE),
    )
    with talk(script) as (connection, _):
        with pytest.raises(DirectoryAnswerError, match="sizeLimitExceeded"):
            connection.search("dc=x", page_size=2, size_limit=3)


def test_values_that_come_in_ranges() -> None:
    """As from Active Directory, which gives 1500 members of a group at a time."""
    group, other = "cn=g,dc=x", "cn=h,dc=x"
    script = says(
        entry(1, group, cn=[b"g"], **{"member;range=0-1": [b"a", b"b"], "member": []})
        + reference(1, "ldap://b")
        + entry(1, other, **{"Member;Range=0-0": [b"x"], "cert;binary": [b"c"]})
        + result(1, DONE),
        entry(2, group, **{"member;range=2-3": [b"c", b"d"]}) + result(2, DONE),
        entry(3, group, **{"member;range=4-*": [b"e"]}) + result(3, DONE),
        entry(4, other, cn=[]) + result(4, DONE),  # the rest is gone meanwhile
        entry(5, group, **{"member;range=1-1": [b"b"]}) + result(5, DONE),
        entry(6, group, **{"member;range=0-0": [b"a"]}) + result(6, DONE),
        entry(7, group, **{"member;range=0-0": [b"a"]}) + result(7, DONE),
    )
    with talk(script) as (connection, heard):
        found = dict(connection.search("dc=x").entries)
        assert found[group] == {"cn": [b"g"], "member": [b"a", b"b", b"c", b"d", b"e"]}
        assert found[other] == {"Member": [b"x"], "cert;binary": [b"c"]}
        assert connection.usable
        # who asks for a part gets that
        (part,) = connection.search(group, 0, attributes=["member;range=1-1"]).entries
        assert part[1] == {"member;range=1-1": [b"b"]}
        # and who never comes to an end is not waited for
        with pytest.raises(DirectoryProtocolError, match="after 0 end at 0"):
            connection.search(group, 0)
        assert not connection.usable
    assert b"member;range=2-*" in b"".join(heard())


def test_ranges_of_a_page() -> None:
    script = says(
        entry(1, "cn=g", **{"member;range=0-0": [b"a"]}) + result(1, DONE, controls=cookie(b"n")),
        entry(2, "cn=g", **{"member;range=1-*": [b"b"]}) + result(2, DONE),
    )
    with talk(script) as (connection, _):
        answer, following = connection.search_page("dc=x", page_size=1)
        assert answer.entries == [("cn=g", {"member": [b"a", b"b"]})]
        assert following == b"n" and connection.usable


def test_abilities_are_asked_once() -> None:
    root = entry(1, "", supportedControl=[b"1.2"], supportedExtension=[b"1.3", b"\xff"])
    with talk(says(root + result(1, DONE))) as (connection, heard):
        assert connection.supports("1.2")
        assert connection.supports("1.3")
        assert not connection.supports("1.4")
    assert len(heard()) == 2
    root = entry(2, "", supportedControl=[b"1.2"])
    with talk(says(result(1, DONE, 50), root + result(2, DONE))) as (connection, _):
        # that it offers nothing, it has not said
        with pytest.raises(DirectoryAnswerError):
            connection.supports("1.2")
        assert connection.usable
        assert connection.supports("1.2")


def test_a_refused_ping_is_an_answer() -> None:
    with talk(says(entry(1, "") + result(1, DONE), result(2, DONE, 50))) as (connection, _):
        connection.ping()
        connection.ping(1.0)
        assert connection.usable


# Servers that are wrong

GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00" * 10,
    b"\x30\x80\x02\x01\x01\x61\x00\x00\x00",
    b"\x30\x03\x02\x05\x01",
    b"\x30\x84\x7f\xff\xff\xff\x02\x01\x01",
    b"\x30\x88\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x30\xff\x01",
    result(7, BIND),
    result(0, BIND),
    result(1, 0x69),
    entry(7),
    b"\xff" * 70000,
]
ASK: dict[str, Callable[[Connection], object]] = {
    "bind": lambda connection: connection.bind(DN, SECRET),
    "search": lambda connection: connection.search("dc=x"),
    "page": lambda connection: connection.search_page("dc=x", page_size=5),
    "ping": lambda connection: connection.ping(),
    "supports": lambda connection: connection.supports("1.2"),
    "extended": lambda connection: connection.extended("1.2.3", b"value"),
}
each_ask = pytest.mark.parametrize("ask", ASK.values(), ids=ASK)


@each_ask
@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda x: repr(x[:12]))
def test_garbage(ask: Callable[[Connection], object], garbage: bytes) -> None:
    with talk(says(garbage)) as (connection, heard):
        with pytest.raises(DirectoryProtocolError) as caught:
            ask(connection)
        assert str(caught.value).startswith(connection.server)
        is_lost(connection)
    assert len(heard()) == 1


@each_ask
def test_a_notice_of_disconnection(ask: Callable[[Connection], object]) -> None:
    with talk(says(NOTICE)) as (connection, _):
        with pytest.raises(DirectoryUnavailableError, match="going down for maintenance") as caught:
            ask(connection)
        assert type(caught.value) is DirectoryUnavailableError
        is_lost(connection)


def test_other_notices_and_late_answers_are_passed_over() -> None:
    unknown = result(0, EXTENDED, more=element(0x8A, b"1.2.3.4"))
    script = says(result(1, BIND), unknown + result(1, BIND, 49) + result(2, BIND))
    with talk(script) as (connection, _):
        connection.bind(DN, SECRET)
        connection.bind(DN, SECRET)
        assert connection.bound_as == DN


CUT = [(ask, part) for ask in ASK for part in (b"", result(1, BIND)[:1], result(1, BIND)[:-1])]


@pytest.mark.parametrize(("ask", "part"), [*CUT, ("search", entry(1)), ("page", entry(1))])
def test_a_server_that_closes(ask: str, part: bytes) -> None:
    with talk(lambda peer: peer.answer(part)) as (connection, _):
        with pytest.raises(DirectoryUnavailableError, match="closed the connection"):
            ASK[ask](connection)
        is_lost(connection)


@each_ask
def test_a_server_that_resets(ask: Callable[[Connection], object]) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(result(1, BIND)[:-1])
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with talk(script) as (connection, _):
        with pytest.raises(DirectoryUnavailableError):
            ask(connection)
        is_lost(connection)


@each_ask
def test_a_server_that_stalls(ask: Callable[[Connection], object]) -> None:
    with talk(says(result(1, BIND)[:-1]), timeout=SHORT) as (connection, heard):
        with pytest.raises(DirectoryTimeoutError, match=r"no answer within 0\.2 s"):
            ask(connection)
        is_lost(connection)
    searching = ask not in (ASK["bind"], ASK["extended"])
    # a search is abandoned; a BIND is left alone, and nothing is repeated
    assert heard()[1:] == ([messages.abandon_request(2, 1)] if searching else [])


def test_a_stream_of_entries_has_a_deadline() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        data = entry(1) * 100
        with contextlib.suppress(OSError):
            while True:
                peer.socket.sendall(data)

    # However many come before the deadline.
    with talk(script, limits=messages.Limits(size=1 << 40, entries=0)) as (connection, _):
        with pytest.raises(DirectoryTimeoutError):
            connection.search("dc=x", timeout=SHORT)
        connection.close()


def test_no_time_left_is_not_asking() -> None:
    with talk(says()) as (connection, _):
        for timeout in (0, 0.0, -1.0):
            with pytest.raises(DirectoryTimeoutError, match="no time"):
                connection.bind(DN, SECRET, timeout=timeout)
        assert connection.usable
        assert connection.binds == 0


def test_a_large_request_to_a_server_that_does_not_read() -> None:
    ready = threading.Event()
    with talk(lambda _: ready.wait(PATIENCE) and None) as (connection, _):
        with pytest.raises(DirectoryTimeoutError, match="could not be sent within"):
            connection.bind(DN, b"x" * 30_000_000, timeout=SHORT)
        is_lost(connection)
        start = time.monotonic()
        connection.close()
        assert time.monotonic() - start < PATIENCE / 2
        ready.set()


# Nobody there


def test_a_refused_connection_names_the_server() -> None:
    port = free_port()
    url = ServerURL.parse(f"ldap://127.0.0.1:{port}")
    with pytest.raises(DirectoryUnavailableError, match=rf"127.0.0.1:{port}: .*refused"):
        Connection.connect(url, tls=TLS(), connect_timeout=PATIENCE)
    with pytest.raises(DirectoryUnavailableError, match="refused"):
        Connection.connect(url, tls=TLS(), connect_timeout=PATIENCE, address=("127.0.0.1", port))


def test_a_name_without_an_address() -> None:
    url = ServerURL.parse("ldap://nobody.invalid")
    with pytest.raises(DirectoryUnavailableError, match=r"nobody\.invalid:389: cannot find"):
        Connection.connect(url, tls=TLS(), connect_timeout=PATIENCE)


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(says())
    host, port = server.url.host, server.url.port
    closed = free_port()
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, (host, closed)), (*kind, (host, port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    Connection.connect(server.url, tls=TLS(), connect_timeout=PATIENCE).close()
    server.end()


def test_a_local_socket(tmp_path: Any) -> None:
    path = str(tmp_path / "ldapi")
    url = ServerURL.parse("ldapi://" + path.replace("/", "%2F"))
    with pytest.raises(DirectoryUnavailableError, match="No such file"):
        Connection.connect(url, tls=TLS(), connect_timeout=PATIENCE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection = Connection.connect(url, tls=TLS(), connect_timeout=PATIENCE)
        with listener.accept()[0] as client:
            client.sendall(result(1, BIND))
            connection.bind(DN, SECRET)
            assert str(connection.ldap3.server.host) == "localhost"
            connection.close()
            assert Peer(client).request() == messages.bind_request(1, DN, SECRET.encode())


def test_options_that_contradict_each_other() -> None:
    tls = TLS(start_tls=True, verify="never")
    for url in ("ldaps://127.0.0.1:1", "ldapi://%2Fx"):
        with pytest.raises(OptionError, match="start_tls = True: must be off"):
            Connection.connect(ServerURL.parse(url), tls=tls, connect_timeout=PATIENCE)
    with pytest.raises(OptionError, match="ca_file"):
        Connection.connect(
            ServerURL.parse("ldaps://127.0.0.1:1"), tls=TLS(ca_file="/missing"),
            connect_timeout=PATIENCE,
        )  # fmt: skip


# TLS


def start_tls(script: Callable[[Peer], None], seconds: float = PATIENCE) -> DirectoryError:
    """The error of a connection with StartTLS."""
    server = Server(script)
    with pytest.raises(DirectoryError) as caught:
        Connection.connect(
            server.url, tls=TLS(start_tls=True, verify="never"), connect_timeout=seconds
        )
    heard = server.end()
    assert heard[0] == messages.extended_request(1, "1.3.6.1.4.1.1466.20037")
    return caught.value


def test_start_tls_refused() -> None:
    for code in (1, 2, 52, 53):
        error = start_tls(says(result(1, EXTENDED, code, "no TLS here")))
        assert type(error) is DirectoryTLSError
        assert "StartTLS was refused" in str(error)
        assert "no TLS here" in str(error)


@pytest.mark.parametrize("extra", [result(2, BIND), result(1, EXTENDED), b"\x30", NOTICE])
def test_what_comes_in_the_clear_after_start_tls_is_refused(extra: bytes) -> None:
    error = start_tls(says(result(1, EXTENDED) + extra))
    assert type(error) is DirectoryTLSError
    assert "in the clear" in str(error)


def test_start_tls_then_garbage_silence_or_the_end() -> None:
    def garbage(peer: Peer) -> None:
        peer.answer(result(1, EXTENDED))
        peer.socket.recv(65536)
        peer.say(b"\x30garbage garbage garbage")

    assert type(start_tls(garbage)) is DirectoryTLSError
    assert type(start_tls(lambda peer: peer.answer(result(1, EXTENDED)))) is DirectoryTLSError

    def silence(peer: Peer) -> None:
        peer.answer(result(1, EXTENDED))
        while peer.socket.recv(65536):
            pass

    assert isinstance(start_tls(silence, SHORT), DirectoryTimeoutError)
    assert isinstance(start_tls(says(), SHORT), DirectoryTimeoutError)
    assert isinstance(start_tls(says(b"garbage")), DirectoryProtocolError)


def test_ldaps_to_a_server_without_tls() -> None:
    server = Server(lambda peer: peer.say(b"\x30garbage" * 10))
    url = ServerURL.parse(server.url.text.replace("ldap:", "ldaps:"))
    with pytest.raises(DirectoryTLSError):
        Connection.connect(url, tls=TLS(verify="never"), connect_timeout=PATIENCE)
    server.end()


# Idle, and the end


def test_an_idle_connection_that_has_something_to_say() -> None:
    told, go = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.answer(result(1, BIND))
        assert go.wait(PATIENCE)
        peer.say(NOTICE)
        told.set()
        peer.listen()

    with talk(script) as (connection, _):
        assert not connection.readable()
        connection.bind(DN, SECRET)
        assert not connection.readable()
        assert connection.usable
        go.set()
        assert told.wait(PATIENCE)
        assert connection.readable()
        assert not connection.usable


def test_an_idle_connection_that_was_closed() -> None:
    with talk(lambda _: None) as (connection, heard):
        # a close in good order, unlike a reset, does not disturb the connecting
        deadline = time.monotonic() + PATIENCE
        while not connection.readable():
            assert time.monotonic() < deadline
        assert not connection.usable
    assert heard() == []


def test_what_came_with_an_answer_counts() -> None:
    with talk(says(result(1, BIND) + NOTICE[:5])) as (connection, _):
        connection.bind(DN, SECRET)
        assert connection.readable()


def test_a_look_does_not_change_the_timeout_of_what_follows() -> None:
    with talk(says(result(1, BIND), result(2, BIND)[:-1])) as (connection, _):
        connection.bind(DN, SECRET)
        assert not connection.readable()
        with pytest.raises(DirectoryTimeoutError):
            connection.bind(DN, SECRET, timeout=SHORT)


def test_close_says_goodbye_once() -> None:
    with talk(says()) as (connection, heard):
        connection.close()
        connection.close()
        is_lost(connection)
    assert heard() == [messages.unbind_request(1)]


def test_a_child_does_not_speak_for_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with talk(says()) as (connection, heard):
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        connection.close()
    assert heard() == []


def test_a_reset_connection_closes_in_peace() -> None:
    connected = threading.Event()

    def script(peer: Peer) -> None:
        assert connected.wait(PATIENCE)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with talk(script) as (connection, _):
        connected.set()
        deadline = time.monotonic() + PATIENCE
        while not connection.transport.is_readable():
            assert time.monotonic() < deadline
        connection.close()


# Passwords


def words(value: object, depth: int = 6, seen: set[int] | None = None) -> Iterator[object]:
    """All text that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return
    seen.add(id(value))
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        yield bytes(value).decode("latin-1") if not isinstance(value, str) else value
    elif depth:
        for each in gc.get_referents(value):
            yield from words(each, depth - 1, seen)


def is_told(error: BaseException, secret: str) -> bool:
    """Whether an error leads to a password, through frames below the test or what it holds."""
    chain = [error, error.__cause__, error.__context__]
    for each in (x for x in chain if x is not None):
        trace = each.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_name.startswith("test_"):
                for value in trace.tb_frame.f_locals.values():
                    if any(secret in str(word) for word in words(value)):
                        return True
            trace = trace.tb_next
        if any(secret in str(word) for word in words([each.args, vars(each)])):
            return True
    return False


def test_the_search_for_passwords_finds_them() -> None:
    with pytest.raises(AttributeError) as caught:
        messages.bind_request("x", DN, b"s3cret")  # type: ignore[arg-type]
    assert is_told(caught.value, "s3cret")
    assert any("s3cret" in str(word) for word in words({"a": [memoryview(b"as3cretb")]}))


@pytest.mark.parametrize(
    "answer",
    [
        result(1, BIND, 49), result(1, BIND, 53, "no"), result(1, BIND, 8), result(1, BIND, 51),
        result(1, BIND, 10, more=element(0xA3, element(4, b"ldap://s3cret-p"))),
        result(1, BIND, controls=policy(b"\x30\x7f")), *GARBAGE, NOTICE, result(1, BIND)[:-1],
        result(1, BIND, 49, f"{SECRET} is wrong"), result(1, BIND, 8, SECRET, matched=SECRET),
        result(1, BIND, 51, SECRET),
        result(1, BIND, 10, more=element(0xA3, element(4, f"ldap://a/{SECRET}".encode()))),
    ],
    ids=lambda x: repr(x[:20]),
)  # fmt: skip
def test_no_error_leads_to_the_password(answer: bytes) -> None:
    with talk(says(answer), timeout=SHORT) as (connection, _):
        for password in (SECRET, SECRET.encode()):
            with pytest.raises(DirectoryError) as caught:
                connection.bind(DN, password, password_policy=True)
            assert not is_told(caught.value, SECRET)
            assert not is_told(caught.value, SECRET.encode().decode("latin-1"))
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None


def test_no_error_leads_to_a_password_that_cannot_be_sent() -> None:
    with talk(says()) as (connection, _):
        for dn, password in (("cn=\ud800", SECRET), (DN, SECRET + "\ud800"), ("", SECRET)):
            with pytest.raises((CredentialsError, OptionError)) as caught:
                connection.bind(dn, password)
            assert not is_told(caught.value, SECRET)
        connection.close()
        with pytest.raises(DirectoryUnavailableError) as lost:
            connection.bind(DN, SECRET)
        assert not is_told(lost.value, SECRET)


def test_nothing_keeps_the_password() -> None:
    script = says(result(1, BIND), result(2, BIND, 49), result(3, DONE))
    with talk(script) as (connection, _):
        secret = "".join(["s3", "cret-", "x" * 40])
        connection.bind(DN, secret)
        with pytest.raises(CredentialsError):
            connection.bind(DN, secret.encode())
        connection.search("dc=x")
        _ = connection.ldap3
        gc.collect()
        assert not any(secret in str(word) for word in words(connection, 12))


class Killed(BaseException):
    """What gevent throws into a greenlet, or Ctrl-C."""


class Fragile:
    """A socket that is interrupted."""

    def __init__(self, *, send: bool) -> None:
        self._fails = "send" if send else "recv"

    def settimeout(self, _: float | None) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, data: bytes) -> int:
        if self._fails == "send":
            try:
                raise BlockingIOError
            except BlockingIOError:
                raise Killed  # noqa: B904
        return len(data)

    def recv(self, _: int) -> bytes:
        raise Killed


@pytest.mark.parametrize("send", [True, False])
def test_an_interrupted_bind(send: bool) -> None:
    with talk(says()) as (connection, _):
        real = connection.transport.raw
        assert real is not None
        connection.transport._socket = Fragile(send=send)  # type: ignore[assignment]
        with pytest.raises(Killed) as caught:
            connection.bind(DN, SECRET)
        assert not is_told(caught.value, SECRET)
        assert not is_told(caught.value, SECRET.encode().decode("latin-1"))
        is_lost(connection)
        real.close()


# ldap3


def test_ldap3_takes_turns_with_us() -> None:
    compared = result(2, 0x6F, 6)
    script = says(result(1, BIND), compared, result(3, DONE), result(4, 0x67), result(5, DONE))
    with talk(script) as (connection, heard):
        connection.bind(DN, SECRET)
        other = connection.ldap3
        assert other is connection.ldap3
        assert (other.password, other.user, other.auto_referrals) == (None, None, False)
        assert other.compare("dc=x", "dc", "x")
        connection.search("dc=x")
        assert other.modify("dc=x", {"description": [("MODIFY_REPLACE", ["s3cret"])]})
        assert other.request is None
        connection.search("dc=x")
        assert connection.usable
        assert connection.bound_as == DN
        connection.forget()
        assert connection.ldap3 is not other
    assert [tag(each) for each in heard()] == [0x60, 0x6E, 0x63, 0x66, 0x63, 0x42]
    assert [each[4] for each in heard()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        *((each, DirectoryProtocolError) for each in GARBAGE[:7]),
        (NOTICE, DirectoryUnavailableError),
        (result(1, 0x6F)[:-1], DirectoryTimeoutError),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_ldap3_and_servers_that_are_wrong(answer: bytes, kind: type[Exception]) -> None:
    with talk(says(answer), timeout=SHORT) as (connection, _):
        with pytest.raises(kind) as caught:
            connection.ldap3.compare("dc=x", "dc", "x")
        assert type(caught.value) is kind
        is_lost(connection)


def test_ldap3_and_an_answer_to_something_else() -> None:
    with talk(says(result(7, 0x6F, 6))) as (connection, _):
        with pytest.raises(Exception, match="invalid messageId"):
            connection.ldap3.compare("dc=x", "dc", "x")
        is_lost(connection)


def test_ldap3_and_a_server_that_closes() -> None:
    with talk(lambda peer: peer.answer(b"")) as (connection, _):
        with pytest.raises(DirectoryUnavailableError, match="closed"):
            connection.ldap3.delete("dc=x")
        is_lost(connection)


def test_what_comes_after_an_answer_to_ldap3_is_ours() -> None:
    unknown = result(0, EXTENDED, more=element(0x8A, b"1.2.3.4"))
    with talk(says(unknown + result(1, 0x6F, 6) + NOTICE)) as (connection, _):
        assert connection.ldap3.compare("dc=x", "dc", "x")
        assert connection.usable
        with pytest.raises(DirectoryUnavailableError, match="maintenance"):
            connection.search("dc=x")


def test_ldap3_may_not_bind_encrypt_or_reopen() -> None:
    with talk(says(result(1, DONE))) as (connection, heard):
        other = connection.ldap3
        for forbidden in (other.bind, other.start_tls, other.open):
            with pytest.raises(DirectoryError):
                forbidden()
        assert connection.usable
        connection.search("dc=x")
    assert [tag(each) for each in heard()] == [0x63, 0x42]


def test_ldap3_may_unbind() -> None:
    with talk(says()) as (connection, heard):
        connection.ldap3.unbind()
        is_lost(connection)
    assert [tag(each) for each in heard()] == [0x42]
