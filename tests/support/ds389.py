"""A 389 Directory Server, in a mount namespace of its own: it insists on its folders.

Needs root, ``unshare`` and the package 389-ds-base.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ldap
import psutil

from support.served import PATIENCE, free_port, wait_for

SUFFIX = "dc=example,dc=org"
ROOT_DN = "cn=Directory Manager"
PASSWORD = "Pa55word-of-tests"

_DEFAULTS = Path("/usr/share/dirsrv/inf/defaults.inf")
_PLUGINS = ("Retro Changelog Plugin", "Content Synchronization")
_INSTANCE = "keyfront"
_INF = """\
[general]
selinux = False
full_machine_name = localhost
strict_host_checking = False
start = True
[slapd]
instance_name = {instance}
port = {port}
root_password = {password}
self_sign_cert = False
[backend-userroot]
suffix = {suffix}
create_suffix_entry = True
sample_entries = no
"""
# The folders of the package, and ours over them.
_MOUNTS = {
    "defaults.inf": str(_DEFAULTS),
    "etc": "/etc/dirsrv",
    "lib": "/var/lib/dirsrv",
    "log": "/var/log/dirsrv",
    "run": "/run/dirsrv",
    "lock": "/run/lock/dirsrv",
}


def missing() -> str:
    """Return why it cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "389-ds needs root, for a mount namespace"
    if not _DEFAULTS.exists() or shutil.which("dscreate", path="/usr/sbin:/usr/bin") is None:
        return "389-ds-base is not installed"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        return "no mount namespace can be made here"
    return ""


class Server:
    """A server that runs."""

    people, groups, old = (f"ou={x},{SUFFIX}" for x in ("People", "Groups", "Old"))
    service_dn = ROOT_DN
    service_password = PASSWORD

    def __init__(self, port: int) -> None:
        self.url = f"ldap://127.0.0.1:{port}"

    @contextmanager
    def as_root(self) -> Iterator[ldap.ldapobject.LDAPObject]:
        root = ldap.initialize(self.url)
        root.timeout = PATIENCE
        root.simple_bind_s(ROOT_DN, PASSWORD)
        try:
            yield root
        finally:
            root.unbind_s()


@contextmanager
def ds389(folder: Path) -> Iterator[Server]:
    """Make an instance with the plugin for syncrepl and run it until the block ends."""
    port = free_port()
    for each in (folder, *folder.parents):
        if each.owner() == "root" and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o011)  # it runs as a user of its own
    for name, place in _MOUNTS.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        if name in ("lib", "log", "run", "lock"):
            Path(place).mkdir(exist_ok=True)
            (folder / name).mkdir()
            shutil.chown(folder / name, "dirsrv", "dirsrv")
    text = _DEFAULTS.read_text()
    (folder / "defaults.inf").write_text(re.sub(r"(?m)^with_systemd = 1", "with_systemd = 0", text))
    subprocess.run(["cp", "-a", "/etc/dirsrv", str(folder / "etc")], check=True)
    values = {"instance": _INSTANCE, "port": port, "password": PASSWORD, "suffix": SUFFIX}
    (folder / "ds.inf").write_text(_INF.format(**values))
    config = f"/etc/dirsrv/slapd-{_INSTANCE}"
    script = "\n".join(
        [
            "set -e",
            *(f"mount --bind {folder / name} {place}" for name, place in _MOUNTS.items()),
            f"dscreate -v from-file {folder / 'ds.inf'}",
            f"pid=$(cat /run/dirsrv/slapd-{_INSTANCE}.pid); kill $pid",
            "while kill -0 $pid 2>/dev/null; do sleep 0.1; done",
            # Both plugins are there, and off.
            *(
                f"sed -i '/^dn: cn={plugin},/,/^$/s/\\(pluginEnabled: \\)off/\\1on/' "
                f"{config}/dse.ldif"
                for plugin in _PLUGINS
            ),
            f"touch {folder / 'made'}",
            f"exec ns-slapd -D {config} -i /run/dirsrv/keyfront.pid -d 0",
        ]
    )
    log = (folder / "output.log").open("wb")
    process = subprocess.Popen(
        # In a process namespace as well: what it leaves behind ends with it.
        ["unshare", "-m", "-p", "--fork", "--mount-proc", "sh", "-c", script],
        stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}"},
    )  # fmt: skip
    made = Server(port)

    def answers() -> bool:
        assert process.poll() is None, (folder / "output.log").read_text(errors="replace")[-2000:]
        if not (folder / "made").exists():
            return False
        try:
            with made.as_root() as root:
                for dn in (made.people, made.groups, made.old):
                    root.add_s(dn, [("objectClass", [b"organizationalUnit"])])
                return True
        except ldap.SERVER_DOWN:
            return False

    try:
        wait_for(answers, "389-ds answers")
        yield made
    finally:
        # The first process of the namespace; it takes the others along.
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.wait(PATIENCE)
        log.close()
