"""A self-signed certificate for trying: made once, never replaced.

Clients trust it by being given it (``OS_CACERT``). In production take one of an authority.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from keyfront.errors import MissingPartError, OptionError

from .versions import SYSTEM_PATH

#: Days until it expires: who still runs on it then should notice.
DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")


def paths(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a folder's certificate and key."""
    return folder / "tls" / "keyfront.crt", folder / "tls" / "keyfront.key"


def check_name(name: str) -> str:
    """Return a name that a certificate can be made for.

    :raises OptionError: it is neither a host name of at most 64 characters nor an address
    """
    if not _NAME.fullmatch(name) and not _is_address(name):
        raise OptionError(
            "--self-signed", name, "a host name or an address, e.g. cloud.example.org"
        )
    return name


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair for a name, EC P-256, unless it is there; its key has mode 0600.

    :param folder: the folder that the pair lies in, made if it is not there
    :param name: a host name or an address
    :returns: certificate and key
    :raises OptionError: only one of the two is there, or the folder cannot be written to
    :raises MissingPartError: there is neither cryptography nor openssl
    """
    check_name(name)
    certificate, key = paths(folder)
    if certificate.exists() != key.exists():
        alone = certificate if certificate.exists() else key
        raise OptionError("--self-signed", name, f"used with both files or none: remove {alone}")
    if certificate.exists():
        return certificate, key
    pair = _by_cryptography(name) if importlib.util.find_spec("cryptography") else _by_openssl(name)
    try:
        for missing in (folder, certificate.parent):
            if not missing.exists():
                missing.mkdir(parents=True)
                missing.chmod(0o755)
        # the key first: a certificate without it is of no use
        try:
            _create(key, pair[1], 0o600)
            _create(certificate, pair[0], 0o644)
        except OSError:
            for path in (key, certificate):
                with suppress(OSError):
                    path.unlink()
            raise
    except OSError as error:
        raise OptionError(
            "DIR", folder, f"a folder that can be written to ({error.filename}: {error.strerror})"
        ) from None
    return certificate, key


def _create(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(descriptor, mode)
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _by_cryptography(name: str) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    also = x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # a client's clock may be a little behind
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([also]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _by_openssl(name: str) -> tuple[bytes, bytes]:
    program = shutil.which("openssl", path=SYSTEM_PATH)
    if program is None:
        raise MissingPartError(
            "a self-signed certificate needs cryptography or openssl: run pip install "
            "cryptography, or apt install openssl"
        )
    kind = "IP" if _is_address(name) else "DNS"
    try:
        key = subprocess.run(
            [program, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
            capture_output=True,
            check=True,
        ).stdout
        # the key comes by a pipe: it is on no disk before it is in its place
        certificate = subprocess.run(
            [
                program,
                "req",
                "-x509",
                "-new",
                "-sha256",
                "-key",
                "/dev/stdin",
                "-days",
                str(DAYS),
                "-subj",
                f"/CN={name}",
                "-addext",
                f"subjectAltName={kind}:{name}",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
                "-addext",
                "extendedKeyUsage=serverAuth",
            ],
            input=key,
            capture_output=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingPartError(
            f"openssl could not make a certificate ({type(error).__name__}): run pip install "
            "cryptography"
        ) from None
    return certificate, key
