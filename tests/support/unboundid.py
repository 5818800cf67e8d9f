"""UnboundID's in-memory directory server, with StartTLS; ends with its process.

Needs Java and the jar of ``com.unboundid:unboundid-ldapsdk``: the one that
``KEYFRONT_UNBOUNDID`` names, one in Maven's own folder, or else Maven, which fetches it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.certificates import Certificates
from support.served import PATIENCE, wait_for

ARTIFACT = "com.unboundid:unboundid-ldapsdk:7.0.1"
SUFFIX = "dc=example,dc=org"
PEOPLE = f"ou=people,{SUFFIX}"
SERVICE_DN, PASSWORD = "cn=service", "Pa55word-of-tests"

_MAIN = "com.unboundid.ldap.listener.InMemoryDirectoryServerTool"
_OWN = Path.home() / ".m2/repository/com/unboundid/unboundid-ldapsdk"


def _jar() -> Path | None:
    named = os.environ.get("KEYFRONT_UNBOUNDID")
    if named:
        return Path(named)
    return next(_OWN.glob("*/unboundid-ldapsdk-*[0-9].jar"), None)


def missing() -> str:
    """Return why it cannot run here; empty if it can."""
    if shutil.which("java") is None:
        return "java is not installed"
    if _jar() is not None:
        return ""
    if shutil.which("mvn") is None:
        return f"neither KEYFRONT_UNBOUNDID nor Maven has {ARTIFACT}"
    done = subprocess.run(
        ["mvn", "-q", "-B", "dependency:get", f"-Dartifact={ARTIFACT}"],
        capture_output=True, check=False, timeout=5 * PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return "" if done.returncode == 0 and _jar() is not None else f"Maven has no {ARTIFACT}"


def ldif(users: int) -> str:
    """Return the entries of a directory with so many users, ``user0`` and so on."""
    entries = [
        f"dn: {SUFFIX}\nobjectClass: domain\ndc: example\n",
        f"dn: {PEOPLE}\nobjectClass: organizationalUnit\nou: people\n",
    ]
    for number in range(users):
        name = f"user{number}"
        entries.append(
            f"dn: uid={name},{PEOPLE}\nobjectClass: inetOrgPerson\nuid: {name}\ncn: {name}\n"
            f"sn: {number}\nuserPassword: {PASSWORD}\n"
        )
    return "\n".join(entries)


@contextmanager
def unboundid(folder: Path, certificates: Certificates, users: int) -> Iterator[int]:
    """Run a server until the block ends; gives its port."""
    jar = _jar()
    assert jar is not None
    (folder / "data.ldif").write_text(ldif(users))
    store = folder / "keys.p12"
    pair = certificates.server
    subprocess.run(
        ["openssl", "pkcs12", "-export", "-in", str(pair.certificate), "-inkey", str(pair.key),
         "-out", str(store), "-passout", "pass:secret"],
        check=True, capture_output=True,
    )  # fmt: skip
    output = folder / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["java", "-Xmx128m", "-cp", str(jar), _MAIN,
             "--baseDN", SUFFIX, "--ldifFile", str(folder / "data.ldif"), "--useDefaultSchema",
             "--additionalBindDN", SERVICE_DN, "--additionalBindPassword", PASSWORD,
             "--useStartTLS", "--keyStorePath", str(store), "--keyStorePassword", "secret",
             "--keyStoreType", "PKCS12"],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def port() -> str:
        text = output.read_text(errors="replace")
        assert process.poll() is None, text[-2000:]
        found = re.search(r"(?i)listening .*port (\d+)", text)
        return found[1] if found else ""

    try:
        wait_for(lambda: bool(port()), "the server listens")
        yield int(port())
    finally:
        process.kill()
        process.wait(PATIENCE)
