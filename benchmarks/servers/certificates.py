"""A certificate authority and a server's certificate, for some days; nobody should trust them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common import programs

if TYPE_CHECKING:
    from trustme import CA

HERE = ("localhost", "127.0.0.1", "::1")
DAY = datetime.timedelta(days=1)


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
    def server(self) -> Pair:
        """The pair for localhost, 127.0.0.1 and ::1."""
        return self.named("server")

    def named(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")


def certificates(folder: Path) -> Certificates:
    """Make an authority and a server's certificate in a folder of their own within a folder."""
    made = Certificates(folder / "certificates")
    made.folder.mkdir(parents=True)
    issue(made.server, authority(made.ca_file, "ca"), HERE)
    return made


def authority(file: Path, name: str) -> CA:
    """Make an authority and write what clients need to trust it."""
    programs.require_module("trustme", "experiments")
    import trustme

    made = trustme.CA(organization_name="keyfront", organization_unit_name=name)
    made.cert_pem.write_to_path(str(file))
    return made


def issue(
    pair: Pair, by: CA, names: tuple[str, ...], *, until: datetime.timedelta = 30 * DAY
) -> None:
    """Issue a certificate and write it with its key.

    :param until: its end, from now; it began ten days ago
    """
    now = datetime.datetime.now(datetime.UTC)
    leaf = by.issue_cert(
        *names, common_name=names[0], not_before=now - 10 * DAY, not_after=now + until
    )
    pair.key.touch(mode=0o600)
    leaf.private_key_pem.write_to_path(str(pair.key))
    leaf.cert_chain_pems[0].write_to_path(str(pair.certificate))
