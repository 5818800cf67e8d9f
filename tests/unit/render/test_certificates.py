"""The self-signed pair for trying."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from keyfront.errors import MissingPartError, OptionError
from keyfront.gateway.render import certificates


@pytest.fixture(params=["cryptography", "openssl"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "openssl":
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed; on Debian: apt-get install openssl")
        monkeypatch.setattr(certificates.importlib.util, "find_spec", lambda name: None)
    return str(request.param)


@pytest.mark.parametrize("name", ["cloud.example.org", "localhost", "192.0.2.7", "2001:db8::7"])
def test_a_pair_that_clients_can_trust(tmp_path: Path, maker: str, name: str) -> None:
    certificate, key = certificates.make(tmp_path / "d", name)
    assert (certificate, key) == certificates.paths(tmp_path / "d")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(certificate.stat().st_mode) == 0o644
    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    assert isinstance(read.public_key(), ec.EllipticCurvePublicKey)
    assert read.public_key().curve.name == "secp256r1"
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if ":" in name or name[0].isdigit():
        assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(name)]
    else:
        assert names.get_values_for_type(x509.DNSName) == [name]
    left = read.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=1) < left <= datetime.timedelta(days=certificates.DAYS)
    # the key fits, and the certificate can be a client's only trust
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    ssl.create_default_context(cafile=str(certificate))


def test_it_is_made_once(tmp_path: Path) -> None:
    pair = certificates.make(tmp_path, "localhost")
    before = [path.read_bytes() for path in pair]
    assert certificates.make(tmp_path, "other.example.org") == pair
    assert [path.read_bytes() for path in pair] == before


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    certificate, key = certificates.make(tmp_path, "localhost")
    certificate.unlink()
    with pytest.raises(OptionError, match=f"remove {key}"):
        certificates.make(tmp_path, "localhost")
    assert key.exists()


@pytest.mark.parametrize("name", ["", "a b", "x/CN=y", "-a", "a" * 65, "*.example.org"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="--self-signed"):
        certificates.make(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_nothing_to_make_it_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(certificates, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(MissingPartError, match="openssl"):
        certificates.make(tmp_path, "localhost")


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="DIR"):
        certificates.make(tmp_path / "file", "localhost")
