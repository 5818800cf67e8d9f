"""A certificate authority, and certificates that are right or wrong in one way each.

Kept in a folder: asked for again there, they are read back. Nobody should trust them; they are
valid for some days only.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from keyfront.common import programs

WRONG_HOST = "elsewhere.example.org"
_HERE = ("localhost", "127.0.0.1", "::1")
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """The files of :func:`certificates`; all are signed by ``ca_file`` unless said otherwise."""

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
        """The pair for localhost, 127.0.0.1 and ::1."""
        return self.named("server")

    @property
    def wrong_host(self) -> Pair:
        """The pair for :data:`WRONG_HOST` only."""
        return self.named("wrong-host")

    @property
    def expired(self) -> Pair:
        """A pair for the names of :attr:`server`, until the day before yesterday."""
        return self.named("expired")

    @property
    def other_ca(self) -> Pair:
        """A pair for the names of :attr:`server`, signed by :attr:`other_ca_file`."""
        return self.named("other-ca-server")

    @property
    def client(self) -> Pair:
        """A client's pair; the common name of its subject is ``client``."""
        return self.named("client")

    def named(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")


def certificates(folder: Path) -> Certificates:
    """Make the certificates, or find those that an earlier call made there.

    :param folder: made if missing; for a whole session of pytest its ``getbasetemp()`` does
    :raises MissingPartError: trustme is not installed; names the command
    """
    programs.require_module("trustme", "experiments")
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
    from trustme import CA

    # in lower case, for the name that OpenSSL looks for
    ca, other = (
        CA(organization_name="keyfront", organization_unit_name=name) for name in ("ca", "other ca")
    )
    ca.cert_pem.write_to_path(str(into.ca_file))
    other.cert_pem.write_to_path(str(into.other_ca_file))
    now = datetime.datetime.now(datetime.UTC)
    since, until = now - 10 * _DAY, now + 30 * _DAY
    for pair, authority, names, end in (
        (into.server, ca, _HERE, until),
        (into.wrong_host, ca, (WRONG_HOST,), until),
        (into.expired, ca, _HERE, now - 2 * _DAY),
        (into.other_ca, other, _HERE, until),
        (into.client, ca, ("client",), until),
    ):
        leaf = authority.issue_cert(*names, common_name=names[0], not_before=since, not_after=end)
        pair.key.touch(mode=0o600)
        leaf.private_key_pem.write_to_path(str(pair.key))
        leaf.cert_chain_pems[0].write_to_path(str(pair.certificate))
    into.ca_dir.mkdir()
    into.ca_dir.joinpath(_hashed(ca.cert_pem.bytes())).write_bytes(into.ca_file.read_bytes())


def _hashed(certificate: bytes) -> str:
    """Return an authority's file name in a folder of OpenSSL's: X509_NAME_hash, then a number.

    It hashes the name in lower case without the outer header, two bytes long here.
    """
    from cryptography import x509

    subject = x509.load_pem_x509_certificate(certificate).subject
    digest = hashlib.sha1(subject.public_bytes()[2:], usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}.0"
