"""Certificates that are right, as the benchmarks', or wrong in one way each.

Kept in a folder: asked for again there, they are read back.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from keyfront.benchmarks.servers import certificates as right
from keyfront.benchmarks.servers.certificates import DAY, HERE, Pair

__all__ = ["WRONG_HOST", "Certificates", "Pair", "certificates"]

WRONG_HOST = "elsewhere.example.org"


class Certificates(right.Certificates):
    """The files of :func:`certificates`; all are signed by ``ca_file`` unless said otherwise."""

    @property
    def ca_dir(self) -> Path:
        """A folder with only that authority, under the name that OpenSSL looks for."""
        return self.folder / "ca"

    @property
    def other_ca_file(self) -> Path:
        """An authority that has signed :attr:`other_ca` and nothing else."""
        return self.folder / "other-ca.pem"

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


def certificates(folder: Path) -> Certificates:
    """Make the certificates, or find those that an earlier call made there.

    :param folder: made if missing; for a whole session of pytest its ``getbasetemp()`` does
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
    # in lower case, for the name that OpenSSL looks for
    ca = right.authority(into.ca_file, "ca")
    right.issue(into.server, ca, HERE)
    right.issue(into.wrong_host, ca, (WRONG_HOST,))
    right.issue(into.expired, ca, HERE, until=-2 * DAY)
    right.issue(into.client, ca, ("client",))
    right.issue(into.other_ca, right.authority(into.other_ca_file, "other ca"), HERE)
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
