"""Certificates for the TLS servers of benchmarks: an authority of a day, a server on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from keyfront.errors import MissingPartError

from .processes import HOST


def write(folder: Path) -> None:
    """Write ``ca.pem``, and ``server.pem`` with ``server.key`` for 127.0.0.1.

    :raises MissingPartError: ``cryptography`` is not installed; names the command
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise MissingPartError("cryptography is missing: run pip install cryptography") from None
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keyfront benchmark ca")])
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def build(name: x509.Name, number: int) -> x509.CertificateBuilder:
        # Python 3.13 verifies strictly and wants all of these extensions
        authority = number == 0
        usage = x509.KeyUsage(
            digital_signature=not authority,
            key_cert_sign=authority,
            crl_sign=authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        public = keys[number].public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key())
    leaf = (
        build(own, 1)
        .add_extension(here, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(signer, critical=False)
    )
    for name, builder in (("ca.pem", build(issuer, 0)), ("server.pem", leaf)):
        made = builder.sign(keys[0], hashes.SHA256())
        folder.joinpath(name).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key = folder / "server.key"
    key.touch(mode=0o600)
    key.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
