"""A machine made of files, and the doctor's word on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from keyfront.gateway.doctor import config_files
from keyfront.gateway.doctor.diagnosis import Diagnosis, diagnose
from keyfront.gateway.doctor.found import Found, Told
from keyfront.gateway.doctor.machine_state import Live
from keyfront.gateway.doctor.schema import Schema

#: The time at which the doctor comes, in seconds since 1970.
NOW = 1_800_000_000.0


@cache
def certificate(days: float) -> str:
    """A certificate in PEM that ends so many days after :data:`NOW`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cloud.example.org")])
    ends = datetime.fromtimestamp(NOW, UTC) + timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(ends - timedelta(days=400))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has.

    :param files: texts by path
    :param modes: permission bits by path, of files and of folders
    :param ages: seconds since a file was changed, by path
    :param somaxconn: ``net.core.somaxconn`` of its kernel
    :param whole: whether these are all of its files that matter, and not a part of them
    """

    files: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    live: Live | None = None
    schema: Schema | None = None
    node: dict[str, Any] | None = None
    features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    somaxconn: int = 4096
    whole: bool = True

    def put(self, path: str, text: str) -> Machine:
        """Return the machine with another file, or another text of it."""
        return replace(self, files={**self.files, path: text})

    def swap(self, path: str, old: str, new: str) -> Machine:
        """Return the machine with a part of a file's text replaced."""
        assert old in self.files[path], old
        return self.put(path, self.files[path].replace(old, new))

    def append(self, path: str, text: str) -> Machine:
        """Return the machine with lines at the end of a file."""
        return self.put(path, self.files.get(path, "") + text)

    def without(self, path: str) -> Machine:
        """Return the machine without a file."""
        return replace(
            self,
            files={key: x for key, x in self.files.items() if key != path},
            modes={key: x for key, x in self.modes.items() if key != path},
        )

    def make(self, folder: Path) -> None:
        """Write the files below a folder."""
        found = {"/proc/sys/net/core/somaxconn": f"{self.somaxconn}\n", **self.files}
        if self.whole:
            found["/usr/bin/sh"] = ""
        for path, text in found.items():
            real = folder / path.lstrip("/")
            if path.endswith("/"):
                real.mkdir(parents=True, exist_ok=True)
                continue
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_text(text, encoding="utf-8")
            real.chmod(0o640)
            when = NOW - self.ages.get(path, 0)
            os.utime(real, (when, when))
        for path, mode in self.modes.items():
            (folder / path.lstrip("/")).chmod(mode)

    def found(self, folder: Path) -> Found:
        """Return what the doctor finds, the machine being made in a folder."""
        self.make(folder)
        found = config_files.look(folder, config_files.Given(assumed=self.assumed), self.told, NOW)
        found.live, found.schema, found.other_node = self.live, self.schema, self.node
        found.features.update(self.features)
        return found

    def diagnosis(self, folder: Path, *codes: str) -> Diagnosis:
        """Return what the doctor says, of some checks or of all."""
        return diagnose(self.found(folder), codes or None)
