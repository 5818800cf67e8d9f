"""A certificate authority for tests, and certificates that are right or wrong in one way each.

Made with ``cryptography``, in milliseconds, and kept in a folder: asked for again there, they are
read back. Nothing outside the tests should trust them; they are valid for some days only.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

WRONG_HOST = "elsewhere.example.org"
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """What :func:`certificates` made; all of it is signed by ``ca_file`` unless said otherwise."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        """The authority that clients should trust."""
        return self.folder / "ca.pem"

    @property
    def ca_dir(self) -> Path:
        """A folder with only that authority, under the name that OpenSSL looks for."""
        return self.folder / "ca"

    @property
    def other_ca_file(self) -> Path:
        """An authority that has signed :attr:`other_ca` and nothing else."""
        return self.folder / "other-ca.pem"

    @property
    def server(self) -> Pair:
        """For localhost, 127.0.0.1 and ::1."""
        return self.named("server")

    @property
    def wrong_host(self) -> Pair:
        """For :data:`WRONG_HOST` only."""
        return self.named("wrong-host")

    @property
    def expired(self) -> Pair:
        """For the same names as :attr:`server`, until the day before yesterday."""
        return self.named("expired")

    @property
    def other_ca(self) -> Pair:
        """For the same names as :attr:`server`, signed by :attr:`other_ca_file`."""
        return self.named("other-ca-server")

    @property
    def client(self) -> Pair:
        """What a client shows of itself; its subject is ``cn=client``."""
        return self.named("client")

    def named(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")


def certificates(folder: Path) -> Certificates:
    """Make the certificates, or find those that an earlier call made there.

    :param folder: made if missing; for a whole session ``tmp_path_factory.getbasetemp()`` does
    """
    made = Certificates(folder / "certificates")
    if made.folder.exists():
        return made
    # several processes may be here at once: whoever renames first has made them
    draft = Certificates(folder / f"certificates.{os.getpid()}")
    draft.folder.mkdir(parents=True)
    _make(draft)
    try:
        draft.folder.rename(made.folder)
    except OSError:
        assert made.ca_file.exists()
    return made


def _make(into: Certificates) -> None:
    ca = _authority("keyfront test ca", into.ca_file)
    other = _authority("keyfront other ca", into.other_ca_file)
    here = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
    )
    elsewhere = x509.SubjectAlternativeName([x509.DNSName(WRONG_HOST)])
    _leaf("localhost", here, ca, into.server)
    _leaf(WRONG_HOST, elsewhere, ca, into.wrong_host)
    _leaf("localhost", here, ca, into.expired, days=-2)
    _leaf("localhost", here, other, into.other_ca)
    _leaf("client", None, ca, into.client)
    into.ca_dir.mkdir()
    into.ca_dir.joinpath(_hashed(ca[0].subject)).write_bytes(into.ca_file.read_bytes())


_Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 30
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _authority(common_name: str, path: Path) -> _Authority:
    key, name = ec.generate_private_key(ec.SECP256R1()), _name(common_name)
    # Python 3.13 verifies strictly and wants all of these extensions
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _leaf(
    common_name: str, names: x509.SubjectAlternativeName | None, authority: _Authority, into: Pair,
    *, days: int = 30,
) -> None:
    signer, signing_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
    builder = (
        _builder(_name(common_name), signer.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(issuer, critical=False)
    )
    if names:
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(signing_key, hashes.SHA256())
    into.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    into.key.touch(mode=0o600)
    into.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _hashed(subject: x509.Name) -> str:
    """The file name of an authority in a folder of OpenSSL's: X509_NAME_hash, then a number.

    It hashes the name in lower case without the outer header, two bytes long here.
    """
    common_name = subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    assert common_name == str(common_name).lower()
    digest = hashlib.sha1(subject.public_bytes()[2:], usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}.0"
