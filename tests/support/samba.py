"""An Active Directory of Samba's, in a network namespace of its own: it insists on port 389.

Reached by its socket file, which belongs to no namespace. Needs root, ``unshare`` and the packages
that :func:`missing` names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import ldap
import ldap.modlist

from support.served import PATIENCE, wait_for

PASSWORD = "Pa55word-of-tests"
REALM = "EXAMPLE.TEST"
SUFFIX = "DC=example,DC=test"


def missing() -> str:
    """Return why it cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "Samba's port 389 needs root, for a network namespace"
    for program in ("samba", "samba-tool", "unshare", "ip"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"{program} is not installed (samba-ad-dc, samba-ad-provision, iproute2)"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        return "no network namespace can be made here"
    return ""


@dataclass
class Samba:
    """A domain controller that runs."""

    folder: Path
    process: subprocess.Popen[bytes]

    people = f"CN=Users,{SUFFIX}"
    service_dn = f"CN=Administrator,CN=Users,{SUFFIX}"
    service_password = PASSWORD

    @property
    def url(self) -> str:
        return "ldapi://" + quote(str(self.folder / "private" / "ldapi"), safe="")

    @contextmanager
    def as_root(self) -> Iterator[ldap.ldapobject.LDAPObject]:
        root = ldap.initialize(self.url)
        root.set_option(ldap.OPT_REFERRALS, 0)
        root.timeout = PATIENCE
        root.simple_bind_s(self.service_dn, self.service_password)
        try:
            yield root
        finally:
            root.unbind_s()

    def add_user(self, name: str, password: str = "") -> str:
        """Make a user, who may log in if there is a password; returns the DN."""
        dn = f"CN={name},{self.people}"
        entry = {
            "objectClass": [b"user"],
            "sAMAccountName": [name.encode()],
            "userPrincipalName": [f"{name}@{REALM.lower()}".encode()],
            "userAccountControl": [b"512" if password else b"546"],
        }
        if password:
            entry["unicodePwd"] = [f'"{password}"'.encode("utf-16-le")]
        with self.as_root() as root:
            root.add_s(dn, ldap.modlist.addModlist(entry))
        return dn

    @contextmanager
    def lockout(self, refused: int) -> Iterator[None]:
        """Lock accounts after so many refused logins, until the block ends."""
        with self.as_root() as root:
            root.modify_s(SUFFIX, [(2, "lockoutThreshold", [str(refused).encode()])])
        try:
            yield
        finally:
            with self.as_root() as root:
                root.modify_s(SUFFIX, [(2, "lockoutThreshold", [b"0"])])


@contextmanager
def samba(folder: Path) -> Iterator[Samba]:
    """Provision a domain and run its controller until the block ends."""
    target = folder / "samba"
    provision = [
        *("samba-tool", "domain", "provision", f"--realm={REALM}", "--domain=EXAMPLE"),
        *("--server-role=dc", "--dns-backend=NONE", f"--adminpass={PASSWORD}", "--use-rfc2307"),
        *(f"--targetdir={target}", "--host-name=dc1", "--host-ip=127.0.0.1"),
        *("--option=bind interfaces only = yes", "--option=interfaces = lo"),
        "--option=vfs objects = dfs_samba4 acl_xattr xattr_tdb",
    ]
    done = subprocess.run(provision, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    conf = target / "etc" / "smb.conf"
    own = "\n".join(
        (
            "[global]",
            "\tserver services = ldap",
            "\tldap server require strong auth = no",
            f"\tncalrpc dir = {target}/ncalrpc",
            f"\tpid directory = {target}",
        )
    )
    text = re.sub(r"(?m)^\s*server services.*$", "", conf.read_text())
    conf.write_text(text.replace("[global]", own, 1))
    log = (folder / "samba.log").open("wb")
    command = f"ip link set lo up; exec samba -i -M single -s {conf}"
    process = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", command], stdout=log, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
    )  # fmt: skip
    made = Samba(target, process)

    def answers() -> bool:
        assert process.poll() is None, (folder / "samba.log").read_text(errors="replace")[-2000:]
        try:
            with made.as_root():
                return True
        except ldap.LDAPError:
            return False

    try:
        wait_for(answers, "Samba answers")
        yield made
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)
        log.close()
