"""A directory's pool against servers of a few lines, which do what a real one does seldom."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ldap
import ldap.dn
import ldap.filter
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    OptionError,
    PoolClosedError,
    PoolFullError,
    PoolTimeoutError,
    Verdict,
)
from keyfront.middleware.ldap import LDAPPool, monitor, service_account, service_refusals
from keyfront.middleware.ldap.logins import Names, escape_dn, octets
from keyfront.middleware.ldap.protocol.ber import (
    element,
    number,
    read_element,
    read_header,
    read_number,
)
from keyfront.middleware.ldap.protocol.connection import FAST_BIND, SearchAnswer
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.servers import ServerSet
from keyfront.middleware.ldap.service_account import ServiceAccount
from keyfront.middleware.ldap.service_refusals import HOLD_SECONDS, MAX_HOLD_SECONDS
from support.served import PATIENCE, free_port

SERVICE, SECRET = "cn=service,dc=x", "service-pässwörd"
JANE, WORD = "uid=jane,ou=People,dc=x", "jane's-pässwörd"
SHORT = 0.3
# Seconds in which a server that is well answers, on a busy machine as well.
SOON = 4.0


def result(id: int, tag: int, code: int = 0, words: str = "") -> bytes:
    body = element(0x0A, number(code)) + element(4, b"") + element(4, words.encode())
    return element(0x30, element(2, number(id)) + element(tag, body))


def entry(id: int, dn: str, attributes: dict[str, list[str]]) -> bytes:
    listed = b"".join(
        element(0x30, element(4, k.encode()) + element(0x31, b"".join(
            element(4, x.encode()) for x in v)))
        for k, v in attributes.items()
    )  # fmt: skip
    body = element(4, dn.encode()) + element(0x30, listed)
    return element(0x30, element(2, number(id)) + element(0x64, body))


class Client:
    """A connection as the server sees it: who is bound, and what was asked, in order."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.bound: str | None = None
        self.asked: list[str] = []


Answer = Callable[[Client, int, Any], bytes | None]


class Server:
    """One thread for each client. ``on_bind`` and the like return an answer, or ``None`` for the
    usual one; ``b""`` is to hang up."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.passwords = {SERVICE: SECRET, JANE: WORD}
        self.root: dict[str, list[str]] = {}
        self.on_bind: Answer = lambda client, id, dn: None
        self.on_search: Answer = lambda client, id, base: None
        self.on_extended: Answer = lambda client, id, oid: result(id, 0x78, 2)
        self.on_end: Callable[[], None] = lambda: None
        self.clients: list[Client] = []
        self.gone: list[Client] = []
        # Of its own also while it is stopped.
        self.port = free_port()
        self._listener: socket.socket | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"ldap://127.0.0.1:{self.port}"

    @property
    def all_clients(self) -> list[Client]:
        with self.changed:
            return self.gone + self.clients

    def asked(self, kind: str = "") -> list[str]:
        return [x for each in self.all_clients for x in each.asked if x.startswith(kind)]

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Hang up, and refuse new clients."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.hang_up()
        self.wait(lambda: not self.clients)

    def hang_up(self) -> None:
        with self.changed:
            ends = [client.socket for client in self.clients]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def wait(self, condition: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                client = Client(end)
                with self.changed:
                    self.clients.append(client)
                    self.changed.notify_all()
                if self._listener is not listener:
                    # It came as it was being stopped, after all others were hung up.
                    end.shutdown(socket.SHUT_RDWR)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: Client) -> None:
        with contextlib.suppress(OSError), client.socket.makefile("rb") as stream:
            while (start := stream.read(2)) and len(start) == 2:
                size = start[1]
                if size > 127:
                    size = int.from_bytes(stream.read(size & 0x7F), "big")
                answer = self._answer(client, stream.read(size))
                if answer == b"":
                    break
                client.socket.sendall(answer)
        client.socket.close()
        with self.changed:
            self.clients.remove(client)
            self.gone.append(client)
            self.on_end()
            self.changed.notify_all()

    def _answer(self, client: Client, body: bytes) -> bytes:
        raw, at = read_element(body, 0, len(body), 2)
        id = read_number(raw)
        tag, start, stop = read_header(body, at, len(body))
        about = body[start:stop]
        if tag == 0x60:
            _, at = read_element(about, 0, len(about), 2)
            name, at = read_element(about, at, len(about), 4)
            word, _ = read_element(about, at, len(about), 0x80)
            return self._bind(client, id, name.decode(), word.decode())
        if tag == 0x63:
            base = read_element(about, 0, len(about), 4)[0].decode()
            self._note(client, f"search {base}")
            if (told := self.on_search(client, id, base)) is not None:
                return told
            found = entry(id, base, self.root if not base else {"cn": [base]})
            return found + result(id, 0x65)
        if tag == 0x77:
            oid = read_element(about, 0, len(about), 0x80)[0].decode()
            self._note(client, f"extended {oid}")
            told = self.on_extended(client, id, oid)
            assert told is not None
            return told
        return b""  # unbind, abandon

    def _bind(self, client: Client, id: int, dn: str, word: str) -> bytes:
        self._note(client, f"bind {dn}")
        if (told := self.on_bind(client, id, dn)) is not None:
            return told
        right = self.passwords.get(dn) == word
        client.bound = dn if right else None
        return result(id, 0x61, 0 if right else 49)

    def _note(self, client: Client, what: str) -> None:
        with self.changed:
            client.asked.append(what)
            self.changed.notify_all()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def second() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def make() -> Iterator[Callable[..., LDAPPool]]:
    pools = []

    def make(*servers: Server, **options: Any) -> LDAPPool:
        options = {
            "bind_dn": SERVICE, "bind_password": SECRET, "min_size": 0, "timeout": PATIENCE,
            "connect_timeout": PATIENCE, "operation_timeout": PATIENCE, **options,
        }  # fmt: skip
        pool = LDAPPool([each.url for each in servers], **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close(0.0)


def together(number: int, call: Callable[[], Any]) -> list[Any]:
    """What so many threads get from it, or the errors, when they all begin at once."""
    barrier = threading.Barrier(number)
    found: list[Any] = []

    def run() -> None:
        barrier.wait(PATIENCE)
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == number
    return found


# Options


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("urls", "(none)", {"urls": " , "}),
        ("urls", "(none)", {"urls": []}),
        ("urls", "http://x", {"urls": "ldap://ok http://x"}),
        ("urls", "ldap://x/dc=x", {"urls": ["ldap://x/dc=x"]}),
        *((name, value, {name: value}) for name in ("max_size", "auth_max_size")
          for value in (0, -1, 2.5, True, "9")),
        *((name, value, {name: value}) for name in ("min_size", "auth_min_size")
          for value in (-1, 1.0, None)),
        ("min_size", 11, {"min_size": 11}),
        ("min_size", 3, {"min_size": 3, "max_size": 2}),
        ("auth_min_size", 101, {"auth_min_size": 101}),
        *((name, value, {name: value}) for name in (
            "timeout", "max_lifetime", "auth_max_lifetime", "max_idle", "connect_timeout",
            "operation_timeout") for value in (0, -0.1, math.nan, "5", True)),
        ("connect_timeout", math.inf, {"connect_timeout": math.inf}),
        *(("check_after", value, {"check_after": value}) for value in (-1, math.nan, None)),
        *(("max_waiting", value, {"max_waiting": value}) for value in (-1, 0.5)),
        ("fast_bind", "always", {"fast_bind": "always"}),
        ("strategy", "random", {"strategy": "random"}),
        ("start_tls", True, {"urls": "ldaps://x", "tls": TLS(start_tls=True)}),
        ("start_tls", True, {"urls": "ldap://x,ldapi://%2Fx", "tls": TLS(start_tls=True)}),
        ("ca_file", "/nowhere", {"urls": "ldaps://x", "tls": TLS(ca_file="/nowhere")}),
        ("sasl_mechanism", "GSSAPI", {"sasl_mechanism": "GSSAPI"}),
        ("sasl_mechanism", "external", {"sasl_mechanism": "external"}),
        ("sasl_mechanism", "EXTERNAL", {"sasl_mechanism": "EXTERNAL"}),
        *((option, shown, {
            "urls": "ldaps://x", "tls": TLS(client_cert="/x"), "sasl_mechanism": "EXTERNAL",
            "bind_dn": "", "bind_password": "", option: value,
        }) for option, value, shown in (
            ("bind_dn", SERVICE, SERVICE), ("bind_password", SECRET, "(hidden)"),
            ("bind_password_file", "/x", "/x"))),
        ("client_cert", "(not set)", {"urls": "ldaps://x", "sasl_mechanism": "EXTERNAL"}),
        ("client_cert", "(not set)", {
            "urls": "ldapi://%2Fx ldaps://x", "sasl_mechanism": "EXTERNAL"}),
        ("sasl_mechanism", "EXTERNAL", {
            "urls": "ldaps://x ldap://y", "tls": TLS(client_cert="/x"),
            "sasl_mechanism": "EXTERNAL"}),
        ("client_cert", "/nowhere", {
            "urls": "ldaps://x", "tls": TLS(client_cert="/nowhere"),
            "sasl_mechanism": "EXTERNAL"}),
        ("bind_password", "(not set)", {"bind_dn": SERVICE}),
        ("bind_dn", "(not set)", {"bind_password": SECRET}),
        ("bind_password", "(hidden)", {"bind_dn": SERVICE, "bind_password": "\ud800"}),
        ("user_dn", "uid=jane,dc=x", {"user_dn": "uid=jane,dc=x"}),
        ("user_dn", "uid={},cn={}", {"user_dn": "uid={},cn={}"}),
        ("user_dn", JANE, {"user_dn": JANE, "search_base": "dc=x"}),
        ("user_filter", "(uid=x)", {"search_base": "dc=x", "user_filter": "(uid=x)"}),
        ("user_filter", "(uid={}", {"search_base": "dc=x", "user_filter": "(uid={}"}),
    ],
)  # fmt: skip
def test_options_out_of_range(option: str, value: Any, others: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        LDAPPool(**{"urls": "ldap://x", "open": False, **others})
    assert (caught.value.option, str(caught.value.value)) == (option, str(value))
    assert SECRET not in str(caught.value)


def test_external_by_a_socket_file_needs_no_certificate() -> None:
    with LDAPPool("ldapi://%2Fx", sasl_mechanism="EXTERNAL", open=False) as pool:
        assert "EXTERNAL" in repr(pool._search_connector.account)


def test_an_error_of_the_options_does_not_lead_to_the_password() -> None:
    with pytest.raises(OptionError) as caught:
        LDAPPool("ldap://x", bind_dn=SERVICE, bind_password=SECRET, max_size=0)
    trace = caught.value.__traceback__
    assert trace is not None
    frames = []
    while trace.tb_next is not None:
        trace = trace.tb_next
        frames.append(trace.tb_frame)
    assert frames
    for frame in frames:
        assert "bind_password" not in frame.f_locals
        assert not any(value == SECRET for value in frame.f_locals.values())


def test_infinite_times_and_one_text_of_urls() -> None:
    pool = LDAPPool(
        "ldap://a ldap://b,ldap://a", timeout=math.inf, max_lifetime=math.inf, max_idle=math.inf,
        check_after=math.inf, operation_timeout=60, open=False,
    )  # fmt: skip
    assert [state.url.text for state in pool.servers] == ["ldap://a:389", "ldap://b:389"]
    assert pool.closed
    with pytest.raises(PoolClosedError):
        pool.search("dc=x")


# From names to DNs


def find(name: str, *entries: str, error: Exception | None = None, **options: Any) -> Any:
    asked: list[Any] = []

    def search(*arguments: Any, **more: Any) -> SearchAnswer:
        asked.append((arguments, more))
        if error is not None:
            raise error
        return SearchAnswer([(dn, {}) for dn in entries] + [(None, ["ldap://elsewhere"])])

    options = {"user_dn": None, "search_base": None, "user_filter": "(uid={})", **options}
    dn, shown = Names(**options).find(name, search)
    assert shown == name
    return dn, asked


def test_a_name_in_a_template_is_a_value_and_no_dn() -> None:
    template = "uid={},ou=People,dc=x"
    assert find("jane", user_dn=template)[0] == JANE
    assert find("a,ou=Root", user_dn=template)[0] == "uid=a\\,ou\\=Root,ou=People,dc=x"
    # Active Directory's other names are no DNs
    assert find("a=b,c", user_dn="{}@example.org")[0] == "a=b,c@example.org"


@example("\n")
@example("#a")
@example(" ")
@example(" a ")
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_every_value_comes_back_from_a_dn_and_a_filter(value: str) -> None:
    if "\0" not in value:  # libldap ends there
        (((_, found, _),), _) = ldap.dn.str2dn(f"uid={escape_dn(value)},dc=x")
        assert found == value
    assert "\0" not in escape_dn(value)


def test_a_name_in_a_filter_is_a_value_and_no_filter() -> None:
    dn, asked = find("*)(uid=x", JANE, search_base="dc=x", user_filter="(|(uid={})(mail={}))")
    assert dn == JANE
    (((base, scope, text, attributes), more),) = asked
    escaped = ldap.filter.escape_filter_chars("*)(uid=x")
    assert (base, scope, attributes) == ("dc=x", 2, ["1.1"])
    assert text == f"(|(uid={escaped})(mail={escaped}))"
    assert more == {"size_limit": 2}


def test_who_is_not_there_exactly_once_is_unknown() -> None:
    too_many = DirectoryAnswerError(4, "sizeLimitExceeded")
    told = set()
    for entries, error in (((), None), ((JANE, "uid=jane,dc=y"), None), ((), too_many)):
        with pytest.raises(CredentialsError) as caught:
            find("jane", *entries, error=error, search_base="dc=x")
        assert caught.value.verdict is Verdict.UNKNOWN_USER
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
@pytest.mark.parametrize(
    "how", [{}, {"user_dn": "uid={},dc=x"}, {"search_base": "dc=x"}], ids=["", "dn", "search"]
)
def test_what_can_be_nobodys_name(name: str, how: dict[str, Any]) -> None:
    with pytest.raises(CredentialsError) as caught:
        find(name, JANE, error=AssertionError("it was asked"), **how)
    assert caught.value.verdict is Verdict.UNKNOWN_USER


def test_without_a_way_the_text_is_bound_as_it_is() -> None:
    for name in (JANE, "jane@example.org", "X\\jane", "uid=\udce9,dc=x"):
        assert find(name) == (name, [])


def test_a_failed_search_says_nothing_of_the_user() -> None:
    refused = CredentialsError(Verdict.WRONG_PASSWORD, server="ldap://x:389")
    with pytest.raises(DirectoryUnavailableError, match=r"bind_dn .* refused.*ldap://x:389"):
        find("jane", error=refused, search_base="dc=x")
    missing = DirectoryAnswerError(32, "noSuchObject")
    with pytest.raises(DirectoryAnswerError) as caught:
        find("jane", error=missing, search_base="dc=x")
    assert caught.value is missing


@pytest.mark.parametrize("password", ["", b"", "\ud800", None, 5, bytearray(b"x")])
def test_passwords_that_are_never_sent(password: Any, server: Server, make: Any) -> None:
    pool = make(server, search_base="dc=x")
    expected = CredentialsError if isinstance(password, (str, bytes)) else TypeError
    with pytest.raises(expected) as caught:
        pool.authenticate("jane", password)
    if isinstance(caught.value, CredentialsError):
        assert caught.value.verdict is Verdict.WRONG_PASSWORD
    assert server.all_clients == []
    assert octets("ä") == octets("ä".encode()) == b"\xc3\xa4"


# The service's identity


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_refused_service_is_not_offered_again_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    for module in (service_refusals, service_account):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    identity = ServiceAccount(SERVICE, SECRET)
    refused = CredentialsError(Verdict.LOCKED, diagnostic="too often", server="ldap://x:389")
    offered = []
    for _ in range(3600):
        with contextlib.suppress(CredentialsError):
            identity.begin(1.0)
            offered.append(clock.now - 1000)
            identity.refused(refused)
        clock.now += 1
    assert offered[:5] == [0, 10, 30, 70, 150]
    assert offered[-1] - offered[-2] == MAX_HOLD_SECONDS
    assert HOLD_SECONDS == 10
    with pytest.raises(CredentialsError, match=r"too often; .* not offered again for \d+ s") as e:
        identity.begin(1.0)
    assert (e.value.verdict, e.value.server) == (Verdict.LOCKED, "ldap://x:389")
    # once it is accepted all is forgotten
    clock.now += MAX_HOLD_SECONDS
    identity.begin(1.0)
    identity.accepted()
    identity.begin(1.0)
    identity.begin(1.0)
    identity.refused(refused)
    clock.now += HOLD_SECONDS
    identity.begin(1.0)
    identity.failed()


def test_the_first_bind_of_the_service_is_waited_for() -> None:
    identity = ServiceAccount(SERVICE, SECRET)
    identity.begin(PATIENCE)
    with pytest.raises(DirectoryTimeoutError, match=r"cn=service,dc=x"):
        identity.begin(0.01)
    identity.failed()
    identity.begin(0.01)
    waiting = threading.Thread(target=lambda: identity.begin(math.inf), daemon=True)
    waiting.start()
    until(lambda: identity._changed._waiters, "it waits")
    identity.accepted()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    identity.begin(0.01)
    identity.begin(0.01)


def test_the_services_password_is_not_shown_or_copied() -> None:
    identity = ServiceAccount(SERVICE, SECRET)
    assert SERVICE in repr(identity)
    assert SECRET not in repr(identity)
    with pytest.raises(TypeError):
        pickle.dumps(identity)


@pytest.mark.parametrize("min_size", [0, 3])
def test_a_wrong_service_password_is_sent_once(
    server: Server, make: Any, min_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "keyfront"):
        pool = make(server, bind_password="wrong", min_size=min_size, search_base="dc=x")
        found = together(20, lambda: pool.search("dc=x"))
        for error in found:
            assert isinstance(error, CredentialsError)
            assert error.verdict is Verdict.WRONG_PASSWORD
        # to a user it is no verdict
        for error in together(20, lambda: pool.authenticate("jane", "x")):
            assert type(error) is DirectoryUnavailableError
            assert "client certificate was refused" in str(error)
        with pytest.raises(CredentialsError), pool.connection():
            pass
        until(lambda: caplog.records or not min_size, "a worker, too, has been told")
    assert server.asked("bind") == [f"bind {SERVICE}"]
    assert pool.servers[0].state == "up"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (1 if min_size else 0), lines
    assert pool.get_stats()["credentials_refused"] == 0
    # logins that need no search go on
    with_dn = make(server, bind_password="wrong", user_dn="uid={},ou=People,dc=x")
    assert with_dn.authenticate("jane", WORD).dn == JANE


def test_without_an_identity_nobody_is_bound(server: Server, make: Any) -> None:
    pool = make(server, bind_dn="", bind_password="")
    assert pool.search("dc=x").entries == [("dc=x", {"cn": [b"dc=x"]})]
    assert server.asked() == ["search ", "search dc=x"]
    with pool.connection() as connection:
        connection.bind(JANE, WORD)
    assert pool.search("dc=x").entries
    assert len(server.all_clients) == 2


# Logging in


def test_what_a_login_returns(server: Server, make: Any) -> None:
    pool = make(server, search_base="dc=x", name="users")
    server.on_search = lambda client, id, base: (
        entry(id, JANE, {}) + result(id, 0x65) if base else None
    )
    identity = pool.authenticate("jane", WORD)
    assert (identity.dn, identity.name, identity.server) == (JANE, "jane", server.url)
    assert (identity.password_expiring, identity.grace) == (None, None)
    assert pool.authenticate("jane", WORD.encode()) == identity
    with pytest.raises(CredentialsError):
        pool.authenticate("jane", "wrong")
    stats = pool.get_stats()
    assert (stats["logins"], stats["binds"], stats["credentials_refused"]) == (3, 3, 1)
    assert server.asked("bind") == [f"bind {SERVICE}"] + [f"bind {JANE}"] * 3


def test_connections_for_logins_are_not_searched_with(server: Server, make: Any) -> None:
    pool = make(server, search_base="dc=x", check_after=0)
    server.on_search = lambda client, id, base: (
        entry(id, JANE, {}) + result(id, 0x65) if base else None
    )
    for password in (WORD, "wrong", WORD):
        with contextlib.suppress(CredentialsError):
            pool.authenticate("jane", password)
        pool.search("ou=Groups,dc=x")
    searching, logging_in = server.all_clients
    # Before its first BIND, for which other processes wait, it asks whether anybody is there.
    assert searching.asked[:2] == ["search ", f"bind {SERVICE}"]
    assert f"bind {JANE}" not in searching.asked
    # pings only
    assert [x for x in logging_in.asked if x != f"bind {JANE}"] == ["search "] * 3
    assert logging_in.asked.count(f"bind {JANE}") == 3


def test_a_bind_that_was_sent_is_not_sent_again(server: Server, make: Any) -> None:
    pool = make(server)
    server.on_bind = lambda client, id, dn: b""
    with pytest.raises(DirectoryUnavailableError):
        pool.authenticate(JANE, WORD)
    assert server.asked("bind") == [f"bind {JANE}"]
    # a server may end a connection at any time: that is no outage
    assert pool.servers[0].state == "up"
    stats = pool.get_stats()
    assert (stats["logins_failed"], stats["credentials_refused"], stats["auth_size"]) == (1, 0, 0)


def test_a_connection_that_was_closed_is_replaced_before_the_bind(
    server: Server, make: Any
) -> None:
    pool = make(server)
    pool.authenticate(JANE, WORD)
    server.hang_up()
    server.wait(lambda: not server.clients)
    assert pool.authenticate(JANE, WORD).dn == JANE
    assert server.asked("bind") == [f"bind {JANE}"] * 2
    assert pool.get_stats()["auth_lost"] == 1


def test_no_answer_to_a_bind_is_an_outage(server: Server, make: Any) -> None:
    release = threading.Event()
    pool = make(server)
    pool.authenticate(JANE, WORD)

    def hang(client: Client, id: int, dn: str) -> None:
        release.wait(PATIENCE)

    server.on_bind = hang
    server.on_search = hang
    with pytest.raises(DirectoryTimeoutError):
        pool.authenticate(JANE, WORD, timeout=SHORT)
    assert server.asked("bind") == [f"bind {JANE}"] * 2
    # It is no verdict, but has the server asked.
    server.wait(lambda: any("search" in x for x in server.clients[-1].asked))
    assert pool.servers[0].state == "up"
    # It waits for its clients, which wait here.
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    try:
        until(lambda: pool.servers[0].state != "up", "the question was in vain")
    finally:
        release.set()
        stopping.join()


def test_a_hurried_caller_is_no_outage(server: Server, make: Any) -> None:
    release = threading.Event()
    pool = make(server)
    pool.search("dc=x")
    server.on_search = lambda client, id, base: release.wait(PATIENCE) and None  # type: ignore
    with pytest.raises(DirectoryTimeoutError):
        pool.search("dc=x", timeout=0.01)
    assert pool.servers[0].state == "up"
    release.set()


@pytest.mark.parametrize("code", [51, 52])
def test_a_server_that_is_busy_for_one_is_asked(server: Server, make: Any, code: int) -> None:
    pool = make(server)
    pool.authenticate(JANE, WORD)
    server.on_bind = lambda client, id, dn: result(id, 0x61, code)
    asked: list[str] = []

    def look(client: Client, id: int, base: str) -> bytes | None:
        asked.append(base)
        return result(id, 0x65, code) if server.root else None

    server.on_search = look
    with pytest.raises(DirectoryBusyError, match=r"busy|unavailable"):
        pool.authenticate(JANE, WORD)
    until(lambda: asked and not pool._servers._servers[0].breaker.is_suspected, "it is well")
    assert pool.get_stats()["servers_up"] == 1
    # Of itself, it says so to whoever asks.
    server.root = {"busy": []}

    def is_down() -> bool:
        with pytest.raises(DirectoryUnavailableError):
            pool.authenticate(JANE, WORD)
        return pool.get_stats()["servers_down"] == 1

    until(is_down, "it says that it is busy")


def test_a_server_that_refuses_binds_as_such(server: Server, make: Any) -> None:
    pool = make(server)
    server.on_bind = lambda client, id, dn: result(id, 0x61, 13)
    with pytest.raises(DirectoryAnswerError, match="StartTLS") as caught:
        pool.authenticate(JANE, WORD)
    assert not isinstance(caught.value, CredentialsError)
    assert pool.servers[0].state == "up"
    assert pool.get_stats()["auth_idle"] == 1


def test_fast_bind_where_a_server_has_it(server: Server, second: Server, make: Any) -> None:
    """And only if that is asked for."""
    server.root = {"supportedCapabilities": ["1.2.3"], "supportedExtension": [FAST_BIND]}
    make(server).authenticate(JANE, WORD)
    assert not server.asked("extended")
    server.hang_up()
    server.wait(lambda: not server.clients)
    server.gone.clear()
    server.on_extended = lambda client, id, oid: result(id, 0x78)
    pool = make(server, fast_bind="auto")
    together(5, lambda: pool.authenticate(JANE, WORD))
    pool.authenticate(JANE, WORD)
    for client in server.all_clients:
        asked = [x for x in client.asked if x != "search "]
        assert asked[:2] == [f"extended {FAST_BIND}", f"bind {JANE}"]
        assert asked.count(f"extended {FAST_BIND}") == 1
    server.hang_up()
    server.wait(lambda: not server.clients)
    before = len(server.asked("search"))
    pool.authenticate(JANE, WORD)
    assert len(server.asked("search")) == before  # it was asked once
    # the other server has none
    other = make(second, fast_bind="auto")
    other.authenticate(JANE, WORD)
    assert second.asked() == ["search ", f"bind {JANE}"]
    with pytest.raises(DirectoryAnswerError):
        make(second, fast_bind=True).authenticate(JANE, WORD)
    make(server).authenticate(JANE, WORD)
    assert server.all_clients[-1].asked == ["search ", f"bind {JANE}"]


def test_fast_bind_that_is_promised_and_refused(server: Server, make: Any) -> None:
    server.root = {"supportedExtension": [FAST_BIND]}
    pool = make(server, fast_bind="auto")
    assert pool.authenticate(JANE, WORD).dn == JANE
    assert server.asked() == ["search ", f"extended {FAST_BIND}", f"bind {JANE}"]


# Searching


def test_a_search_is_sent_again_once_if_nothing_came(server: Server, make: Any) -> None:
    pool = make(server)
    dying = [1, 1]
    server.on_search = lambda client, id, base: b"" if base and dying.pop() else None
    dying[:] = [0, 1]
    assert pool.search("dc=x").entries
    assert server.asked("search dc") == ["search dc=x"] * 2
    assert pool.get_stats()["searches_retried"] == 1
    dying[:] = [0, 1, 1]
    with pytest.raises(DirectoryUnavailableError):
        pool.search("dc=x")
    assert dying == [0]
    assert pool.get_stats()["searches_failed"] == 1
    assert pool.servers[0].state == "up"


@pytest.mark.parametrize("size", [5, None], ids=["part of an entry", "an entry"])
def test_a_search_is_not_sent_again_if_something_came(
    server: Server, make: Any, size: int | None
) -> None:
    pool = make(server)

    def die(client: Client, id: int, base: str) -> bytes | None:
        if not base:
            return None
        client.socket.sendall(entry(id, base, {"cn": ["x"]})[:size])
        return b""

    server.on_search = die
    with pytest.raises(DirectoryUnavailableError):
        pool.search("dc=x")
    assert server.asked("search dc") == ["search dc=x"]
    assert pool.get_stats()["searches_retried"] == 0


def test_a_search_that_is_late_is_not_sent_again(server: Server, make: Any) -> None:
    release = threading.Event()
    pool = make(server)
    pool.search("dc=x")
    server.on_search = lambda client, id, base: release.wait(PATIENCE) and None  # type: ignore
    with pytest.raises(DirectoryTimeoutError):
        pool.search("dc=x", timeout=SHORT)
    assert server.asked("search dc") == ["search dc=x"] * 2
    release.set()


def test_a_refused_search_leaves_all_as_it_is(server: Server, make: Any) -> None:
    pool = make(server)
    server.on_search = lambda client, id, base: result(id, 0x65, 32)
    for _ in range(3):
        with pytest.raises(DirectoryAnswerError):
            pool.search("dc=x")
        with pytest.raises(DirectoryError, match="filter"):
            pool.search("dc=x", filter="(")
        with pytest.raises(OptionError):
            pool.search("dc=x", page_size=-1)
    assert pool.servers[0].state == "up"
    assert len(server.all_clients) == 1
    assert len(server.asked("search dc")) == 3


def test_an_outage_within_a_loan_is_told_to_the_servers(server: Server, make: Any) -> None:
    pool = make(server)
    with pool.connection() as connection:
        pass
    other = DirectoryProtocolError("another", server="ldap://elsewhere:389")
    with pytest.raises(DirectoryProtocolError), pool.connection():
        raise other
    assert pool.servers[0].state == "up"
    server.on_search = lambda client, id, base: element(0x31, b"no LDAP")
    with pytest.raises(DirectoryUnavailableError), pool.connection() as connection:
        connection.search("dc=x")
    assert pool.servers[0].state != "up"
    assert pool.get_stats()["search_size"] == 0


def test_a_connection_that_became_anothers_is_not_lent_again(server: Server, make: Any) -> None:
    pool = make(server)
    for password in (WORD, "wrong"):
        with pool.connection() as connection:
            assert connection.bound_as == SERVICE
            with contextlib.suppress(CredentialsError):
                connection.bind(JANE, password)
        pool.search("dc=x")
        assert server.clients[-1].bound == SERVICE
    with pool.connection() as connection:
        connection.bind(SERVICE, SECRET)
    assert len(server.all_clients) == 3
    server.wait(lambda: len(server.clients) == 1)


# Several servers


def held(server: Server) -> int:
    with server.changed:
        return sum(f"bind {SERVICE}" in client.asked for client in server.clients)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


def test_fail_over_and_back_without_a_dip(server: Server, second: Server, make: Any) -> None:
    pool = make(server, second, min_size=3, max_size=5)
    pool.wait()
    assert held(server) == 3
    server.stop()
    assert pool.search("dc=x").entries
    until(lambda: held(second) >= 3, "the connections are to the second server")
    pool.wait()
    lowest = [99]

    def count() -> None:
        # one of the second's clients has gone
        lowest[0] = min(lowest[0], held(server) + held(second))

    second.on_end = count
    server.start()
    until(lambda: held(second) == 0, "they are back")
    assert lowest[0] >= 3
    until(lambda: held(server) == 3, "there are as many as before")
    assert pool.get_stats()["servers_up"] == 2
    until(lambda: [x.connections for x in pool.servers] == [3, 0], "the second has none")


def test_lent_connections_move_when_they_come_back(
    server: Server, second: Server, make: Any
) -> None:
    pool = make(server, second, min_size=1, max_size=3)
    server.stop()
    with pool.connection() as connection:
        assert connection.url.text == second.url
        server.start()
        until(lambda: pool.get_stats()["servers_up"] == 2, "the first is back")
        assert connection.search("dc=x").entries  # a loan is not touched
    until(lambda: held(server) == 1 and held(second) == 0, "it moved")


def test_without_fail_back_they_stay(server: Server, second: Server, make: Any) -> None:
    pool = make(server, second, fail_back=False)
    server.stop()
    pool.search("dc=x")
    server.start()
    until(lambda: pool.get_stats()["servers_up"] == 2, "the first is back")
    pool.search("dc=x")
    assert held(second) == 1


def test_connections_to_a_server_that_is_down_are_not_tried(
    server: Server, second: Server, make: Any
) -> None:
    """Of several to a server that hangs, only the first costs the time it takes to notice."""
    release = threading.Event()
    pool = make(server, second, max_size=5, auth_max_size=8, connect_timeout=SOON)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(pool.connection())

    def hang(*_: Any) -> None:
        release.wait(PATIENCE)

    server.on_bind = server.on_search = hang
    with pytest.raises(DirectoryTimeoutError):
        pool.search("dc=x", timeout=SHORT)
    asked = len(server.asked("search dc"))
    for _ in range(10):
        assert pool.search("dc=x").entries
    assert len(server.asked("search dc")) == asked
    release.set()


def test_each_outage_rouses_the_health_worker(
    server: Server, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "IDLE_SECONDS", 10 * PATIENCE)
    pool = make(server)
    for _ in range(2):
        server.stop()
        with pytest.raises(DirectoryUnavailableError):
            pool.search("dc=x")
        server.start()
        # nobody asks for anything
        until(lambda: pool.get_stats()["servers_up"] == 1, "it is back")


def test_a_probe_has_no_password(server: Server, second: Server, make: Any) -> None:
    pool = make(server, second)
    server.stop()
    pool.search("dc=x")
    before = len(server.all_clients)
    server.start()
    until(lambda: pool.get_stats()["servers_up"] == 2, "the first is back")
    assert [client.asked for client in server.all_clients[before : before + 1]] == [["search "]]


def test_balanced_over_all_that_are_up(server: Server, second: Server, make: Any) -> None:
    pool = make(server, second, strategy="balanced", min_size=4)
    pool.wait()
    assert (held(server), held(second)) == (2, 2)
    server.stop()
    with contextlib.ExitStack() as stack:
        loans = [stack.enter_context(pool.connection()) for _ in range(4)]
        assert {loan.server for loan in loans} == {second.url}
    until(lambda: pool.servers[0].connections == 0, "the first has none")
    assert pool.servers[1].connections == pool.get_stats()["search_size"]


def test_times_without_end(server: Server, make: Any) -> None:
    pool = make(server, timeout=math.inf, operation_timeout=math.inf, max_lifetime=math.inf,
                max_idle=math.inf, check_after=math.inf, min_size=1)  # fmt: skip
    together(5, lambda: pool.search("dc=x"))
    assert pool.authenticate(JANE, WORD)
    assert pool.check()[0].ok


# Its life


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_the_health_worker_is_named_and_ends_with_the_pool(server: Server, make: Any) -> None:
    pool = make(server, name="users", min_size=1)
    pool.wait()
    assert "keyfront-ldap-users-health-1" not in names_of_threads()
    server.stop()
    with pytest.raises(DirectoryUnavailableError):
        pool.search("dc=x")
    assert {"keyfront-ldap-users-search-1", "keyfront-ldap-users-health-1"} <= names_of_threads()
    pool.close(PATIENCE)
    assert not {x for x in names_of_threads() if x.startswith("keyfront-ldap-users")}


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_pool_that_nobody_refers_to_ends(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "keyfront")  # a record kept has an error, and that has us
    pool = LDAPPool(server.url, name="forgotten", timeout=PATIENCE)
    pool.wait()
    server.stop()
    with pytest.raises(DirectoryUnavailableError):
        pool.search("dc=x")
    assert "keyfront-ldap-forgotten-health-1" in names_of_threads()
    gone = weakref.ref(pool)
    gc.collect()
    gc.disable()
    try:
        del pool  # no cycle keeps it
        assert gone() is None
    finally:
        gc.enable()

    def ended() -> bool:
        gc.collect()  # the error of a check that ran meanwhile may hold what watched
        return "forgotten" not in str(names_of_threads())

    until(ended, "its threads have ended")


def test_close_waits_for_what_is_lent(server: Server, make: Any) -> None:
    pool = make(server, auth_min_size=2, min_size=2)
    pool.wait()
    done: list[bool] = []
    with pool.connection():
        thread = threading.Thread(target=lambda: done.append(pool.close(PATIENCE)))
        thread.start()
        until(lambda: pool.closed, "it is closed")
        assert done == []
    thread.join(PATIENCE)
    assert done == [True]
    server.wait(lambda: not server.clients)
    for call in (lambda: pool.search("dc=x"), lambda: pool.authenticate(JANE, WORD), pool.open):
        with pytest.raises(PoolClosedError):
            call()
    assert pool.close()


class Killed(BaseException):
    """What a greenlet is killed with."""


@pytest.mark.parametrize(
    ("who", "method"),
    [
        (monitor.Monitor, "update"), (monitor.Monitor, "opened"),
        (ServerSet, "_end_well"), (service_refusals.ServiceRefusals, "forget"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_whoever_is_killed_once_he_is_connected_leaves_nothing_open(
    server: Server, make: Any, monkeypatch: pytest.MonkeyPatch, who: type, method: str
) -> None:
    pool = make(server)
    original = getattr(who, method)
    before, kills = [0], [0]

    def killed(self: Any, *values: Any) -> Any:
        if len(server.all_clients) > before[0] and (method != "forget" or not values[1]):
            before[0] = 1 << 30
            kills[0] += 1
            raise Killed
        return original(self, *values)

    monkeypatch.setattr(who, method, killed)

    def dedicate() -> None:
        address = ("127.0.0.1", server.port)
        pool.dedicated(pool.urls[0], address, PATIENCE).close()

    for call in (
        lambda: pool.authenticate(JANE, WORD), lambda: pool.search("dc=x", 0), dedicate
    ):  # fmt: skip
        before[0] = len(server.all_clients)
        with contextlib.suppress(Killed):
            call()
        stats = pool.get_stats()
        assert pool.servers[0].connections == stats["search_size"] + stats["auth_size"]
        server.wait(lambda: len(server.clients) == pool.servers[0].connections)
    assert kills[0]


def test_bounds(server: Server, make: Any) -> None:
    pool = make(server, max_size=1, max_waiting=1)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(pool.search("dc=x")))
    with pool.connection():
        pool._search_pool.timeout = 0.05
        with pytest.raises(PoolTimeoutError, match=r"127\.0\.0\.1-search"):
            pool.search("dc=x")
        pool._search_pool.timeout = PATIENCE
        waiting.start()
        until(lambda: pool.get_stats()["search_waiting"] == 1, "one waits")
        for _ in range(3):
            with pytest.raises(PoolFullError, match=r"127\.0\.0\.1-search"):
                pool.search("dc=x")
    waiting.join(PATIENCE)
    assert found[0].entries


def test_stats_are_numbers_in_one_row(server: Server, make: Any) -> None:
    pool = make(server, name="users")
    pool.search("dc=x")
    with pytest.raises(CredentialsError):
        pool.authenticate(JANE, "wrong")
    stats = pool.get_stats()
    assert all(type(value) in (int, float) for value in stats.values())
    assert stats["search_size"] == stats["auth_size"] == stats["searches"] == stats["logins"] == 1
    assert stats["servers_up"] == 1
    assert pool.pop_stats() == stats
    later = pool.get_stats()
    assert later["search_size"] == 1
    assert later["searches"] == later["search_requests"] == later["logins"] == 0
    assert "users" in repr(pool)
    assert SECRET not in repr(pool)


def fork_with(pool: LDAPPool) -> int:
    """Fork as if other threads held the locks; they are not there to let go of them."""
    locks = (pool._counts_lock, pool._search_connector.account._changed.lock, pool._monitor._lock)
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child:
        for lock in locks:
            lock.release()
    return child


def test_a_forked_child_has_connections_of_its_own(server: Server, second: Server) -> None:
    """Forked while the locks of the parent are held, and while a server is down."""
    pool = LDAPPool([server.url, second.url], bind_dn=SERVICE, bind_password=SECRET, name="forked",
                    timeout=PATIENCE, connect_timeout=PATIENCE)  # fmt: skip
    server.stop()
    pool.search("dc=x")
    read, write = os.pipe()
    child = fork_with(pool)
    if child == 0:
        report = b"failed"
        try:
            found = pool.search("dc=x").entries
            login = pool.authenticate(JANE, WORD)
            stats = pool.get_stats()
            assert found and login.dn == JANE
            assert stats["searches"] == 1
            assert stats["search_opened"] >= 1
            os.write(write, b"searched")
            # a worker of its own sees the server come back
            until(lambda: pool.get_stats()["servers_up"] == 2, "the server is back")
            report = b" done"
        except BaseException as error:
            report = repr(error).encode()
        finally:
            os.write(write, report)
            os._exit(0)
    os.close(write)
    try:
        assert os.read(read, 1000) == b"searched"
        assert pool.search("dc=x").entries  # the child closed nothing of ours
        server.start()
        assert os.read(read, 1000) == b" done"
    finally:
        os.close(read)
        os.waitpid(child, 0)
        pool.close()


def test_a_fork_amid_the_first_bind_of_the_service(server: Server, make: Any) -> None:
    pool = make(server, max_size=1)
    identity = pool._search_connector.account
    identity.begin(PATIENCE)  # by a thread that is not in the child
    child = fork_with(pool)
    if child == 0:
        code = 1
        try:
            code = 0 if pool.search("dc=x").entries else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    identity.failed()
    assert pool.search("dc=x").entries


# What each server says of itself


def test_reports(server: Server, second: Server, make: Any) -> None:
    server.root = {"namingContexts": ["dc=x"], "supportedControl": ["1.2.840.113556.1.4.319"]}
    pool = make(server, second)
    second.stop()
    well, away = pool.check()
    assert (well.server, well.ok, well.error, well.address) == (server.url, True, None, "127.0.0.1")
    assert (well.reachable, well.bind, well.search, well.paging) == (True, True, True, True)
    assert (well.tls, well.cipher, well.certificate_expires) == (None, None, None)
    times = (well.connect_ms, well.bind_ms, well.search_ms)
    assert all(x is not None and 0 < x < PATIENCE * 1000 for x in times)
    assert not (away.ok or away.reachable)
    assert "refused" in str(away.error)
    assert (away.bind, away.search, away.paging, away.connect_ms) == (None, None, None, None)
    assert pool.get_stats()["search_size"] == 0
    server.wait(lambda: not server.clients)
    second.start()
    second.passwords[SERVICE] = "another"
    _, wrong = pool.check()
    assert (wrong.reachable, wrong.bind, wrong.search) == (True, False, None)
    assert "wrong password" in str(wrong.error)


def test_a_report_of_a_server_without_paging(server: Server, make: Any) -> None:
    (report,) = make(server, search_base="dc=y", bind_dn="", bind_password="").check()
    assert (report.ok, report.bind, report.search, report.paging) == (True, None, True, False)
    assert server.asked("search dc") == ["search dc=y"]
    server.on_search = lambda client, id, base: result(id, 0x65, 32, "not here") if base else None
    (report,) = make(server, search_base="dc=y").check()
    assert (report.ok, report.bind, report.search) == (False, True, False)
    assert "not here" in str(report.error)


def test_a_report_tells_each_step(server: Server, make: Any) -> None:
    def steps(**options: Any) -> dict[str, list[Any]]:
        (report,) = make(server, **options).check()
        assert SECRET not in repr(report)
        found: dict[str, list[Any]] = {}
        for check in report.checks:
            found.setdefault(check.name, []).append(check)
        return found

    found = steps()
    assert found["connect"][0].data["address"] == f"127.0.0.1:{server.port}"
    assert [check.state for check in found["bind"]] == ["ok", "warning"]
    assert "use ldaps:// or start_tls" in found["bind"][1].text
    assert "no search_base is given" in found["search"][0].text
    assert found["ping"][0].data["best_milliseconds"] > 0
    before = len(server.asked("bind"))
    (nobody,) = steps(bind_dn="", bind_password="")["bind"]
    assert (nobody.state, nobody.text) == ("note", "anonymous, without a BIND")
    assert len(server.asked("bind")) == before
    server.on_search = lambda client, id, base: result(id, 0x65) if base else None
    (hidden,) = steps(search_base="dc=y")["search"]
    assert hidden.text == f"dc=y is not shown to {SERVICE}; try another bind_dn"


def test_a_refused_check_counts_for_the_pool(server: Server, make: Any) -> None:
    """The account must not be locked by asking again; nor by asking the next server."""
    server.passwords[SERVICE] = "another"
    pool = make(server, min_size=0)
    for _ in range(2):
        assert pool.check()[0].bind is False
    with pytest.raises(CredentialsError, match="not offered again"):
        pool.search("dc=x")
    assert len(server.asked("bind")) == 1
