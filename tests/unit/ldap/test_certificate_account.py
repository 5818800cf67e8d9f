"""The service that binds by its certificate: what is offered, over which connection, how often."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    Verdict,
)
from keyfront.middleware.ldap import service_refusals
from keyfront.middleware.ldap.protocol.addresses import PassedOver
from keyfront.middleware.ldap.service_account import (
    CertificateAccount,
    ServiceAccount,
    bind_by_certificate,
)
from support.served import PATIENCE

URLS = ["ldaps://one.example.org:636", "ldaps://two.example.org:636"]
IDENTITY = "dn:cn=service,dc=x"
OLD, NEW = b"digest of the old one", b"digest of the new one"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_refusals, "shared_folder", lambda: tmp_path)
    # Longer than any test takes, on a busy machine too.
    monkeypatch.setattr(service_refusals, "HOLD_SECONDS", service_refusals.MAX_HOLD_SECONDS)


class Files:
    """In place of TLS: the certificate that its file has now."""

    client_cert = "/a/file"

    def __init__(self, certificate: bytes) -> None:
        self.certificate = certificate

    def prepared(self) -> Any:
        return types.SimpleNamespace(certificate=self.certificate)


class FakeConnection:
    """A connection that showed a certificate, to a server that takes some."""

    def __init__(self, certificate: bytes, url: str = URLS[0], *, taken: bytes = b"") -> None:
        self.certificate = certificate
        self.server = url
        self.source = f"{url} 192.0.2.1"
        self.binds = 0
        self.lost: Exception | None = None
        self._taken = taken

    def ping(self, seconds: float) -> None:
        if self.lost is not None:
            raise self.lost

    def bind_external(self, *, timeout: float | None) -> str:
        self.binds += 1
        if self.lost is not None:
            raise self.lost
        if self.certificate != self._taken:
            raise CredentialsError(Verdict.WRONG_CERTIFICATE, 7, "no", server=self.server)
        return IDENTITY


def assume(account: ServiceAccount, connection: FakeConnection) -> None:
    """Open a connection as a pool does."""
    with account.attempt(PATIENCE):
        account.assume(connection, PATIENCE)  # type: ignore[arg-type]


def made(files: Files, urls: list[str] = URLS) -> CertificateAccount:
    return CertificateAccount(files, servers=urls)  # type: ignore[arg-type]


def test_who_it_is_to_each_server() -> None:
    account = made(Files(NEW))
    assert not account.anonymous
    assert account.identities == frozenset()
    assume(account, FakeConnection(NEW, taken=NEW))
    assert account.identities == {IDENTITY}
    assert repr(account) == "<CertificateAccount 'EXTERNAL'>"


def test_what_is_refused_is_what_the_connection_showed() -> None:
    """Its file may have become another one since."""
    account, other = made(Files(NEW)), made(Files(OLD))
    old = FakeConnection(OLD, taken=NEW)
    with pytest.raises(PassedOver):
        assume(account, old)
    # No other one can be offered over it: TLS has shown the one.
    assert old.binds == 1
    assume(account, FakeConnection(NEW, taken=NEW))
    again = FakeConnection(OLD, taken=NEW)
    with pytest.raises(PassedOver):
        assume(other, again)
    assert again.binds == 0


def test_after_a_change_one_bind_tells() -> None:
    files = Files(OLD)
    account = made(files)
    assume(account, FakeConnection(OLD, taken=OLD))
    account.begin(0.01)
    account.accepted()
    files.certificate = NEW
    account.begin(0.01)
    with pytest.raises(DirectoryTimeoutError, match="first BIND as EXTERNAL"):
        account.begin(0.01)
    account.accepted()
    account.begin(0.01)


def test_another_certificate_is_offered_at_once() -> None:
    files = Files(OLD)
    account = made(files)
    for url in URLS:
        with pytest.raises(DirectoryUnavailableError if url == URLS[0] else CredentialsError):
            assume(account, FakeConnection(OLD, url))
    # Refused by two servers, it is offered to nobody, by no process.
    for each in (account, made(files)):
        with pytest.raises(CredentialsError, match="not offered again") as caught:
            each.begin(0.01)
        assert caught.value.verdict is Verdict.WRONG_CERTIFICATE
    files.certificate = NEW
    assume(account, FakeConnection(NEW, taken=NEW))


def test_two_certificates_are_two() -> None:
    """As of two domains with one directory."""
    with pytest.raises(PassedOver):
        assume(made(Files(OLD)), FakeConnection(OLD))
    connection = FakeConnection(NEW, taken=NEW)
    assume(made(Files(NEW)), connection)
    assert connection.binds == 1


def test_by_a_socket_file_it_is_the_process() -> None:
    account = made(Files(NEW), ["ldapi://%2Frun%2Fldapi"])
    assume(account, FakeConnection(b"", "ldapi://%2Frun%2Fldapi"))
    refused = FakeConnection(b"", "ldapi://%2Frun%2Fldapi", taken=NEW)
    with pytest.raises(CredentialsError):
        assume(account, refused)
    with pytest.raises(CredentialsError, match="not offered again"):
        account.begin(0.01)
    assert refused.binds == 1


@pytest.mark.parametrize("first", ["ping", "bind"])
def test_a_server_that_hangs_up_may_not_like_the_certificate(first: str) -> None:
    connection = FakeConnection(NEW)
    closed = DirectoryUnavailableError("the server closed the connection", server=URLS[0])

    def ask() -> None:
        if first == "bind":
            bind_by_certificate(connection, PATIENCE)  # type: ignore[arg-type]
        else:
            assume(made(Files(NEW)), connection)

    connection.lost = closed
    with pytest.raises(DirectoryUnavailableError) as caught:
        ask()
    assert str(caught.value) == (
        f"{URLS[0]}: the server closed the connection; it may not accept the client certificate"
    )
    # What says why is left as it is.
    for error in (DirectoryTimeoutError("x"), DirectoryTLSError("x")):
        connection.lost = error
        with pytest.raises(type(error), match=r"^x$"):
            ask()
    connection.lost, connection.certificate = closed, b""
    with pytest.raises(DirectoryUnavailableError, match=r"connection$"):
        ask()
