"""The service that binds by Kerberos: its keytab, its login at the KDC, its tickets, and who waits
for whom. libkrb5 is in tests/integration/ldap/test_gssapi.py; here something is in its place."""

from __future__ import annotations

import datetime
import hashlib
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from keyfront.errors import (
    CredentialsError,
    DirectoryBusyError,
    DirectoryUnavailableError,
    KerberosError,
    OptionError,
    Verdict,
)
from keyfront.middleware.ldap import (
    TLS,
    Kerberos,
    LDAPPool,
    kerberos,
    service_account,
    service_refusals,
)
from keyfront.middleware.ldap.kerberos import NativeThread, Tickets
from keyfront.middleware.ldap.protocol.addresses import PassedOver
from keyfront.middleware.ldap.protocol.sasl_gssapi import Exchange, end_point_of
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.service_account import KerberosAccount
from support.served import PATIENCE, wait_for

URLS = ["ldaps://one.example.org:636", "ldaps://two.example.org:636"]
WHO = "keystone@EXAMPLE.ORG"
IDENTITY = "dn:cn=service,dc=x"
SHORT = 0.05
BASE = -1765328384


class GSSError(Exception):
    def __init__(self, code: int, text: str = "words") -> None:
        super().__init__(text)
        self.maj_code, self.min_code = 0xD0000, (code + BASE) % (1 << 32)
        self.text = text

    def get_all_statuses(self, code: int, is_maj: bool) -> list[str]:
        return ["major"] if is_maj else [self.text]


class MissingCredentialsError(GSSError):
    pass


class ExpiredCredentialsError(GSSError):
    pass


class Library:
    """In place of ``gssapi.raw``: a KDC that answers as it is told."""

    GSSError, MissingCredentialsError = GSSError, MissingCredentialsError
    ExpiredCredentialsError = ExpiredCredentialsError
    NameType = types.SimpleNamespace(kerberos_principal="principal")
    MechType = types.SimpleNamespace(kerberos="kerberos")
    RequirementFlag = types.SimpleNamespace(mutual_authentication=1, out_of_sequence_detection=2)

    def __init__(self) -> None:
        self.lifetime = 36000
        self.stores: list[dict[bytes, bytes]] = []
        self.services: list[bytes] = []
        self.bindings: list[Any] = []
        #: What the KDC says to a login, to a request for a ticket, and whether it answers.
        self.login: GSSError | None = None
        self.ticket: GSSError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def import_name(self, text: bytes, kind: str) -> bytes:
        assert kind == "principal"
        return text

    def ChannelBindings(self, *given: Any) -> Any:
        return given

    def acquire_cred_from(
        self, store: dict[bytes, bytes], name: bytes | None, mechs: list[str], usage: str
    ) -> Any:
        assert (mechs, usage) == (["kerberos"], "initiate")
        if store[b"client_keytab"] != b"MEMORY:keyfront-none":
            self.stores.append(dict(store))
            assert self.answers.wait(PATIENCE)
            if self.login is not None:
                raise self.login
        return types.SimpleNamespace(creds=store[b"ccache"])

    def inquire_cred(self, creds: bytes) -> Any:
        return types.SimpleNamespace(name=WHO.encode(), lifetime=self.lifetime)

    def display_name(self, name: bytes) -> Any:
        return types.SimpleNamespace(name=name)

    def init_sec_context(self, name: bytes, **given: Any) -> Any:
        assert given["flags"] == [1, 2]
        answers = self.answers
        self.bindings.append(given["channel_bindings"])
        self.services.append(name)
        assert answers.wait(PATIENCE)
        if self.ticket is not None:
            raise self.ticket
        more = given["input_token"] is None
        return types.SimpleNamespace(context=self, token=b"token", more_steps=more, flags={1, 2})


def until_begun(begun: Callable[[], object], attempt: Callable[[], object]) -> None:
    """Repeat what is left out unless it is begun within its short time."""
    end = time.monotonic() + PATIENCE
    while not begun():
        assert time.monotonic() < end, "it was never begun"
        attempt()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    module = types.ModuleType("gssapi")
    module.raw = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gssapi", module)
    monkeypatch.setitem(sys.modules, "gssapi.raw", made)
    for name in ("KRB5_CLIENT_KTNAME", "KRB5CCNAME"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_refusals, "shared_folder", lambda: tmp_path / "refusals")
    (tmp_path / "refusals").mkdir()
    # Longer than any test takes, on a busy machine too.
    monkeypatch.setattr(service_refusals, "HOLD_SECONDS", service_refusals.MAX_HOLD_SECONDS)
    monkeypatch.setattr(kerberos, "LATE_SECONDS", PATIENCE)


@pytest.fixture
def keytab(tmp_path: Path) -> Path:
    path = tmp_path / "service.keytab"
    path.touch(0o600)
    path.write_bytes(b"keys")
    return path


# What waits in C


def test_a_call_is_done_in_another_thread() -> None:
    thread = NativeThread()
    assert thread.do("x", threading.get_ident, PATIENCE) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.do("x", lambda: 1 // 0, PATIENCE)
    assert thread.do("x", lambda: 1, PATIENCE) == 1


def test_nobody_waits_longer_than_he_has() -> None:
    thread, ends, calls = NativeThread(), threading.Event(), []

    def slow() -> int:
        calls.append(1)
        ends.wait(PATIENCE)
        return 5

    def ask() -> None:
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            thread.do("same", slow, SHORT)

    until_begun(lambda: calls, ask)
    ask()
    ask()
    # What nobody waits for any more is not begun, and what was asked for twice is done once.
    with pytest.raises(TimeoutError):
        thread.do("other", lambda: calls.append(2), SHORT)
    assert calls == [1]
    found = []
    waiting = threading.Thread(target=lambda: found.append(thread.do("same", slow, PATIENCE)))
    waiting.start()
    wait_for(lambda: thread._calls[0].wanted == 1, "it waits")
    ends.set()
    waiting.join(PATIENCE)
    assert found == [5]
    assert thread.do("third", lambda: 3, PATIENCE) == 3
    assert calls == [1]


def test_who_comes_late_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KDC that is silent has been waited for."""
    thread, began, ends = NativeThread(), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        ends.wait(PATIENCE)

    def ask() -> None:
        with pytest.raises(TimeoutError):
            thread.do("same", slow, SHORT)

    until_begun(began.is_set, ask)
    monkeypatch.setattr(kerberos, "LATE_SECONDS", 0.0)
    for key in ("same", "other"):
        with pytest.raises(TimeoutError, match=r"^for \d+ s$"):
            thread.do(key, lambda: None, PATIENCE)
    ends.set()
    wait_for(lambda: not thread._runs, "it has ended")
    assert thread.do("same", lambda: 1, PATIENCE) == 1


# Options


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"keytab": ""}, "kerberos_keytab = (empty): must be a text"),
        ({"principal": "a\0b"}, "kerberos_principal = a\0b: must be a text"),
        ({"keytab": "/nowhere/it"}, "kerberos_keytab = /nowhere/it: must be a file that can be"),
        ({"keytab": "/dev/null"}, "kerberos_keytab = /dev/null: must be a regular file"),
    ],
)
def test_options_that_are_refused(library: Library, options: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        Kerberos(**options).check()
    assert str(caught.value).startswith(allowed)


def test_a_keytab_that_others_can_read(library: Library, keytab: Path) -> None:
    keytab.chmod(0o644)
    with pytest.raises(OptionError, match=r"its mode is 0644, try chmod 0600"):
        Kerberos(keytab=str(keytab)).check()
    keytab.chmod(0o640)
    Kerberos(keytab=str(keytab)).check()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gssapi", "gssapi.raw"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"sasl_mechanism = GSSAPI: .*keyfront\[gssapi\]"):
        LDAPPool("ldaps://x", sasl_mechanism="GSSAPI", open=False)


# Logging in


def test_a_login_has_a_cache_of_its_own_and_keys_of_no_other(
    library: Library, keytab: Path
) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    assert (tickets.due, tickets.good) == (True, False)
    assert tickets.who == f"the principal of {keytab}"
    tickets.log_in(PATIENCE)
    assert (tickets.due, tickets.good, tickets.who) == (False, True, WHO)
    tickets.log_in(PATIENCE)
    caches = [store[b"ccache"] for store in library.stores]
    assert len(set(caches)) == 2
    assert all(cache.startswith(b"MEMORY:keyfront-") for cache in caches)
    assert {store[b"client_keytab"] for store in library.stores} == {str(keytab).encode()}


def test_another_login_is_due_at_half_of_the_time_and_with_other_keys(
    library: Library, keytab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    now = time.monotonic()

    def look(later: float) -> tuple[bool, bool]:
        clock = types.SimpleNamespace(monotonic=lambda: now + later, sleep=time.sleep)
        monkeypatch.setattr(kerberos, "time", clock)
        return tickets.due, tickets.good

    assert look(17000) == (False, True)
    assert look(18001) == (True, True)
    assert look(36001) == (True, False)
    with pytest.raises(KerberosError, match="has ended"):
        tickets.exchange("x", b"", PATIENCE)
    assert look(0) == (False, True)
    fresh = keytab.with_suffix(".new")
    fresh.write_bytes(b"sekt")
    fresh.replace(keytab)
    assert look(0) == (True, True)
    tickets.put_off()
    assert look(0) == (False, True)


@pytest.mark.parametrize("code", [1, 6, 12, 18, 23, 24, 31])
def test_a_refusal_of_the_kdc(library: Library, keytab: Path, code: int) -> None:
    library.login = MissingCredentialsError(code)
    with pytest.raises(CredentialsError) as caught:
        Tickets(Kerberos(keytab=str(keytab))).log_in(PATIENCE)
    assert (caught.value.verdict, caught.value.code) == (Verdict.WRONG_TICKET, code)
    assert f"the KDC refused the principal of {keytab}" in str(caught.value)
    # No frame of it leads to the credentials.
    assert caught.value.__context__ is None or caught.value.__context__.__traceback__ is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MissingCredentialsError(156, "Cannot contact any KDC"), "Cannot contact any KDC"),
        (MissingCredentialsError(37, "Clock skew"), "Clock skew: set the clocks of this machine"),
        (MissingCredentialsError(195), "has no key; klist -k"),
        (MissingCredentialsError(41521428), "has no key; klist -k"),
        (GSSError(136, "Improper format"), "Improper format"),
    ],
)
def test_what_is_no_refusal(library: Library, keytab: Path, error: GSSError, words: str) -> None:
    library.login = error
    with pytest.raises(KerberosError, match=f"^Kerberos: .*{words}"):
        Tickets(Kerberos(keytab=str(keytab))).log_in(PATIENCE)


def test_a_login_that_comes_too_late_counts(library: Library, keytab: Path) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    library.answers.clear()
    words = r"no answer of the KDC within 0\.05 s to the login of"

    def log_in() -> None:
        with pytest.raises(KerberosError, match=words):
            tickets.log_in(SHORT)

    until_begun(lambda: library.stores, log_in)
    library.answers.set()
    wait_for(lambda: tickets.good, "the ticket is there")
    assert len(library.stores) == 1


def test_a_child_logs_in_itself(library: Library, keytab: Path) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    tickets.after_fork()
    assert (tickets.due, tickets.good) == (True, False)


# A ticket for a server


def test_the_ticket_is_for_the_name_in_the_url(library: Library, keytab: Path) -> None:
    """Not for what DNS calls it, nor for what its address is called."""
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    name = ServerURL.parse("ldaps://DC1.Example.org.").tls_name
    assert isinstance(tickets.exchange(name, b"tls-server-end-point:x", PATIENCE), Exchange)
    tickets.exchange(name, b"", PATIENCE)
    assert library.services == [b"ldap/dc1.example.org@"] * 2
    assert library.bindings == [(0, None, 0, None, b"tls-server-end-point:x"), None]


def test_one_server_for_which_the_kdc_is_silent_holds_up_no_other(
    library: Library, keytab: Path
) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    silent = library.answers
    silent.clear()
    try:
        words = r"within 0\.05 s to the request for a ticket of ldap/a$"

        def exchange() -> None:
            with pytest.raises(KerberosError, match=words):
                tickets.exchange("a", b"", SHORT)

        until_begun(lambda: library.services, exchange)
        library.answers = threading.Event()
        library.answers.set()
        tickets.exchange("b", b"", PATIENCE)
        assert tickets._threads["ldap/a@"]._runs
    finally:
        silent.set()
    wait_for(lambda: not tickets._threads["ldap/a@"]._runs, "it has ended")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GSSError(7, "Server ldap/x@R not found"), "the URL must have the name"),
        (GSSError(156, "Cannot contact any KDC"), "Cannot contact"),
        (GSSError(18, "revoked"), "revoked"),
    ],
)
def test_no_ticket(library: Library, keytab: Path, error: GSSError, words: str) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    library.ticket = error
    with pytest.raises(KerberosError, match=words):
        tickets.exchange("x", b"", PATIENCE)
    assert tickets.good


@pytest.mark.parametrize("error", [GSSError(32), ExpiredCredentialsError(0)])
def test_a_ticket_that_is_over_is_fetched_anew(
    library: Library, keytab: Path, error: GSSError
) -> None:
    tickets = Tickets(Kerberos(keytab=str(keytab)))
    tickets.log_in(PATIENCE)
    library.ticket = error
    with pytest.raises(KerberosError):
        tickets.exchange("x", b"", PATIENCE)
    assert tickets.due


# The account


class FakeConnection:
    """A connection to a server that takes the ticket, or says otherwise."""

    def __init__(self, url: str = URLS[0], error: Exception | None = None) -> None:
        self.url = ServerURL.parse(url)
        self.server = url
        self.source = f"{url} 192.0.2.1"
        self.end_point = b""
        self.binds = 0
        self._error = error

    def ping(self, seconds: float) -> None:
        pass

    def bind_gssapi(self, exchange: Exchange, *, timeout: float) -> str:
        self.binds += 1
        assert exchange.first == b"token"
        if self._error is not None:
            raise self._error
        return IDENTITY


def assume(account: KerberosAccount, connection: FakeConnection) -> None:
    """Open a connection as a pool does."""
    with account.attempt(PATIENCE):
        account.assume(connection, PATIENCE)  # type: ignore[arg-type]


def made(keytab: Path, urls: list[str] = URLS) -> KerberosAccount:
    return KerberosAccount(Kerberos(keytab=str(keytab)), servers=urls)


def refused_49() -> CredentialsError:
    return CredentialsError(Verdict.WRONG_TICKET, 49, "invalidCredentials", server=URLS[0])


def test_who_it_is_to_each_server(library: Library, keytab: Path) -> None:
    account = made(keytab)
    assert not account.anonymous
    for url in URLS:
        assume(account, FakeConnection(url))
    assert account.identities == {IDENTITY}
    assert repr(account) == f"<KerberosAccount 'GSSAPI {keytab}'>"
    assert len(library.stores) == 1


def test_what_the_kdc_refused_no_process_offers_again(library: Library, keytab: Path) -> None:
    library.login = MissingCredentialsError(24)
    for account in (made(keytab), made(keytab)):
        for _ in range(2):
            connection = FakeConnection()
            with pytest.raises(CredentialsError):
                assume(account, connection)
            assert connection.binds == 0
    assert len(library.stores) == 1
    # Other keys are others.
    library.login = None
    keytab.with_suffix(".new").write_bytes(b"more keys")
    keytab.with_suffix(".new").replace(keytab)
    assume(account, FakeConnection())
    assert len(library.stores) == 2


def test_a_refused_renewal_is_offered_once_while_the_ticket_serves(
    library: Library, keytab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    account = made(keytab)
    assume(account, FakeConnection())
    account._tickets._login.renew_at = 0.0  # type: ignore[union-attr]
    library.login = MissingCredentialsError(24)
    for _ in range(3):
        assume(account, FakeConnection())
    account._tickets._login.renew_at = 0.0  # type: ignore[union-attr]
    assume(account, FakeConnection())
    assert len(library.stores) == 2
    lines = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert [line.partition(": ")[0] for line in lines] == [
        f"the Kerberos ticket of {WHO} is not renewed"
    ] * 2
    assert "not offered again" in lines[1]


def test_a_ticket_that_servers_refuse_is_held_as_a_password_is(
    library: Library, keytab: Path
) -> None:
    account = made(keytab)
    with pytest.raises(PassedOver):
        assume(account, FakeConnection(URLS[0], refused_49()))
    with pytest.raises(CredentialsError):
        assume(account, FakeConnection(URLS[1], refused_49()))
    other = FakeConnection(URLS[0])
    for each in (account, made(keytab)):
        with pytest.raises(CredentialsError, match="not offered again"):
            assume(each, other)
    assert other.binds == 0


@pytest.mark.parametrize("kind", ["kdc", "busy"])
def test_what_is_not_the_servers_fault_passes_it_over(
    library: Library, keytab: Path, kind: str
) -> None:
    account, error = made(keytab), None
    if kind == "kdc":
        library.ticket = GSSError(7)
    else:
        error = DirectoryBusyError("other (80)", server=URLS[0])
    with pytest.raises(PassedOver) as caught:
        assume(account, FakeConnection(URLS[0], error))
    assert str(caught.value).startswith(f"{URLS[0]}: ")
    assert str(caught.value).count(URLS[0]) == 1
    # Nothing is held of it.
    library.ticket = None
    assume(account, FakeConnection(URLS[0]))


def test_a_silent_kdc_comes_before_any_server(
    library: Library, keytab: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    account = made(keytab)
    library.answers.clear()

    def begin() -> None:
        with pytest.raises(DirectoryUnavailableError, match="no answer of the KDC"):
            account.begin(SHORT)

    until_begun(lambda: library.stores, begin)
    library.answers.set()
    wait_for(lambda: account._tickets.good, "it answered")
    assume(account, FakeConnection())
    # And with a ticket it costs a moment, once in a while.
    monkeypatch.setattr(service_account, "RENEWAL_SECONDS", SHORT)
    account._tickets._login.renew_at = 0.0  # type: ignore[union-attr]
    library.answers.clear()
    for _ in range(3):
        account.begin(PATIENCE)
        account.accepted()
    library.answers.set()
    assert len([x for x in caplog.records if "is not renewed" in x.getMessage()]) == 1
    wait_for(lambda: not account._tickets._threads[""]._runs, "it has ended")


@pytest.mark.parametrize(
    ("urls", "options", "error"),
    [
        ("ldap://x", {}, "sasl_mechanism = GSSAPI: must be used over TLS only, and ldap://x:389"),
        ("ldapi://%2Fx", {}, "sasl_mechanism = GSSAPI: must be used with servers that have a name"),
        ("ldaps://x", {"bind_dn": "cn=x"}, "bind_dn = cn=x: must be left out beside sasl_mech"),
        ("ldaps://x", {"bind_password": "secret"}, "bind_password = (hidden): must be left out"),
        (
            "ldaps://x", {"sasl_mechanism": None, "kerberos": Kerberos(principal="a")},
            "kerberos_principal = a: must be left out without sasl_mechanism = GSSAPI",
        ),
        (
            "ldaps://x", {"sasl_mechanism": None, "kerberos": Kerberos(without_tls=True)},
            "kerberos_without_tls = True: must be left out without",
        ),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(
    library: Library, urls: str, options: Any, error: str
) -> None:
    with pytest.raises(OptionError) as caught:
        LDAPPool(urls, open=False, **{"sasl_mechanism": "GSSAPI", **options})
    assert str(caught.value).startswith(error)
    assert "secret" not in str(caught.value)


def test_options_that_agree(library: Library) -> None:
    options: Any = {"sasl_mechanism": "GSSAPI", "open": False}
    for urls, more in (
        ("ldaps://x", {}),
        ("ldap://x", {"tls": TLS(start_tls=True)}),
        ("ldap://x", {"kerberos": Kerberos(without_tls=True)}),
    ):
        with LDAPPool(urls, **options, **more, min_size=0) as pool:
            assert pool._search_connector.account.sasl == "GSSAPI"


# Bound to TLS


def certificate(key: Any, hash: Any, **options: Any) -> bytes:
    name = x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now)
    return made.sign(key, hash, **options).public_bytes(Encoding.DER)


def test_the_hash_is_that_of_the_signature() -> None:
    rsa_key = rsa.generate_private_key(65537, 2048)
    ec_key = ec.generate_private_key(ec.SECP256R1())
    pss = padding.PSS(padding.MGF1(hashes.SHA384()), 32)
    for key, hash, options, name in (
        (rsa_key, hashes.SHA256(), {}, "sha256"),
        (rsa_key, hashes.SHA384(), {}, "sha384"),
        (rsa_key, hashes.SHA512(), {}, "sha512"),
        (rsa_key, hashes.SHA384(), {"rsa_padding": pss}, "sha384"),
        (ec_key, hashes.SHA256(), {}, "sha256"),
        (ec_key, hashes.SHA384(), {}, "sha384"),
        (ec_key, hashes.SHA512(), {}, "sha512"),
    ):
        made = certificate(key, hash, **options)
        digest = hashlib.new(name, made).digest()
        assert end_point_of(made) == b"tls-server-end-point:" + digest


def test_for_what_there_is_no_binding() -> None:
    assert end_point_of(certificate(ed25519.Ed25519PrivateKey.generate(), None)) == b""
    for broken in (b"", b"\x30\x00", b"\x30\x03\x30\x01\x00", b"x" * 100):
        assert end_point_of(broken) == b""


def test_sha1_and_md5_are_taken_for_sha256() -> None:
    made = certificate(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    for last in (b"\x05", b"\x04"):  # sha1 and md5WithRSAEncryption
        algorithm = bytes.fromhex("2a864886f70d0101")
        old = made.replace(algorithm + b"\x0b", algorithm + last)
        assert old != made
        assert end_point_of(old) == b"tls-server-end-point:" + hashlib.sha256(old).digest()
