"""TLS options: one context each, strict unless told otherwise; bad files are named."""

from __future__ import annotations

import os
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from keyfront.errors import OptionError
from keyfront.middleware.ldap.protocol.tls import TLS
from support.certificates import Certificates, Pair, certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


def test_strict_by_default(made: Certificates) -> None:
    for tls in (TLS(), TLS(ca_file=str(made.ca_file)), TLS(ca_dir=str(made.ca_dir))):
        context = tls.context()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.keylog_filename is None


def test_only_the_given_authority_is_trusted(made: Certificates) -> None:
    assert len(TLS(ca_file=str(made.ca_file)).context().get_ca_certs()) == 1


@pytest.mark.parametrize("verify", ["allow", "never"])
def test_loose_when_told_so(verify: str, made: Certificates) -> None:
    context = TLS(verify=verify, ca_file=str(made.ca_file)).context()
    assert context.verify_mode is ssl.CERT_NONE
    assert not context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_one_context_each(made: Certificates) -> None:
    tls, other = TLS(ca_file=str(made.ca_file)), TLS(ca_file=str(made.ca_file))
    found: list[ssl.SSLContext] = []
    threads = [threading.Thread(target=lambda: found.append(tls.context())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert {id(context) for context in found} == {id(tls.context())}
    assert other.context() is not tls.context()
    assert other == tls
    assert hash(other) == hash(tls)


def test_files_that_are_replaced_are_read_again(
    made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(made.ca_file.read_bytes())
    tls = TLS(ca_file=str(path))
    first = tls.context()
    assert tls.context() is first
    # replaced, as tools do it that never leave half a file
    another = certificates(tmp_path).ca_file
    fresh = tmp_path / "fresh.pem"
    fresh.write_bytes(another.read_bytes())
    fresh.replace(path)
    second = tls.context()
    assert second is not first and tls.context() is second
    assert second.get_ca_certs() != first.get_ca_certs()
    # or written over, and for a moment half of it is there; or gone
    for bad in (lambda: path.write_bytes(another.read_bytes()[:100]), path.unlink):
        caplog.clear()
        bad()
        assert tls.context() is tls.context() is second
        (record,) = caplog.records
        assert record.levelname == "WARNING" and str(path) in record.getMessage()
    path.write_bytes(made.ca_file.read_bytes() + another.read_bytes())
    assert len(tls.context().get_ca_certs()) == 2


def test_a_certificate_of_our_own(made: Certificates, tmp_path: Path) -> None:
    pair = made.client
    TLS(client_cert=str(pair.certificate), client_key=str(pair.key)).context()
    both = tmp_path / "both.pem"
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    TLS(client_cert=str(both)).context()


def test_which_certificate_is_shown(made: Certificates, tmp_path: Path) -> None:
    """Told from another one by its file, so that another one is another one to offer."""
    assert TLS(ca_file=str(made.ca_file)).prepared().certificate == b""
    own, key = tmp_path / "own.pem", tmp_path / "own.key"

    def put(pair: Pair) -> None:
        own.write_bytes(pair.certificate.read_bytes())
        key.write_bytes(pair.key.read_bytes())

    put(made.client)
    tls = TLS(client_cert=str(own), client_key=str(key))
    first = tls.prepared()
    assert first.context is tls.context()
    assert len(first.certificate) == 32
    put(made.server)
    assert tls.prepared().certificate not in (b"", first.certificate)
    put(made.client)
    assert tls.prepared().certificate == first.certificate
    # Half of it is there: what goes on is what is told.
    own.write_bytes(made.server.certificate.read_bytes())
    assert tls.prepared().certificate == first.certificate


def test_ciphers() -> None:
    context = TLS(ciphers="ECDHE+AESGCM").context()
    assert not any("CHACHA" in x["name"] for x in context.get_ciphers() if "TLSv1.2" in str(x))


def refused(option: str, tls: TLS) -> str:
    with pytest.raises(OptionError) as caught:
        tls.context()
    assert caught.value.option == option
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


def test_missing_files(made: Certificates, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    there = str(made.client.certificate)
    assert missing in refused("ca_file", TLS(ca_file=missing))
    assert "No such file" in refused("client_cert", TLS(client_cert=missing))
    assert missing in refused("client_key", TLS(client_cert=there, client_key=missing))
    assert missing in refused("ca_dir", TLS(ca_dir=missing))
    refused("ca_dir", TLS(ca_dir=there))
    refused("ca_file", TLS(ca_file=str(tmp_path)))
    refused("ca_file", TLS(ca_file="a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files(made: Certificates, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    locked.write_bytes(made.ca_file.read_bytes())
    locked.chmod(0)
    assert "Permission denied" in refused("ca_file", TLS(ca_file=str(locked)))


def test_files_of_something_else(made: Certificates, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    for content in (b"", b"garbage", os.urandom(100), made.client.key.read_bytes()):
        garbage.write_bytes(content)
        assert str(garbage) in refused("ca_file", TLS(ca_file=str(garbage)))
        assert str(garbage) in refused("client_cert", TLS(client_cert=str(garbage)))


def test_a_key_that_is_not_the_certificates(made: Certificates) -> None:
    certificate, key = str(made.client.certificate), str(made.server.key)
    assert key in refused("client_key", TLS(client_cert=certificate, client_key=key))


def test_a_key_with_a_passphrase_asks_nobody(made: Certificates, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(made.client.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    tls = TLS(client_cert=str(made.client.certificate), client_key=str(locked))
    assert "without a passphrase" in refused("client_key", tls)


def test_other_values_out_of_range() -> None:
    with pytest.raises(OptionError, match="verify = maybe: must be one of demand, allow, never"):
        TLS(verify="maybe")
    with pytest.raises(OptionError, match="client_key = x: must be given together"):
        TLS(client_key="x")
    assert "no-such" in refused("ciphers", TLS(ciphers="no-such"))
