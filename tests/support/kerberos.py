"""A real KDC of MIT Kerberos for tests: one realm on loopback, gone when the block ends.

It is Debian's own program, run by the test and never as a service, with a configuration of its own:
the machine's is not read. Clients and servers have it by :attr:`KDC.environment`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from keyfront.benchmarks.servers.ports import listening
from support import processes
from support.programs import own_folder, program, ready, running
from support.served import PATIENCE, free_port

REALM = "EXAMPLE.ORG"

# Where Debian's python3-gssapi is, for its own Python.
_DEBIAN = Path("/usr/lib/python3/dist-packages")

_KRB5_CONF = """
[libdefaults]
    default_realm = {realm}
    dns_lookup_kdc = false
    dns_lookup_realm = false
    default_ccache_name = MEMORY:none
    {more}
[realms]
    {realm} = {{
        kdc = 127.0.0.1:{port}
    }}
"""
_KDC_CONF = """
[kdcdefaults]
    kdc_listen = 127.0.0.1:{port}
    kdc_tcp_listen = 127.0.0.1:{port}
[realms]
    {realm} = {{
        database_name = {folder}/principal
        key_stash_file = {folder}/stash
        acl_file = {folder}/acl
        max_life = 10h
        supported_enctypes = aes256-cts-hmac-sha1-96:normal
    }}
[logging]
    kdc = FILE:{log}
    default = FILE:{log}
"""


def find_gssapi(folder: Path) -> Path:
    """Return a folder to be put on the path of Python, from which ``gssapi`` can be imported.

    It is built from source, by Cython, in most of a minute; so it is no part of the extra ``test``,
    and where pip has not installed it, Debian's own is taken, if that is for this Python.
    """
    folder.mkdir(exist_ok=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if _installed("gssapi"):
        return folder
    if not (_DEBIAN / "gssapi" / "raw" / f"creds{suffix}").exists():
        pytest.skip(
            f"no gssapi for Python 3.{sys.version_info.minor}: pip install 'keyfront[gssapi]'"
        )
    # Of what lies there nothing else is to be found.
    for name in ("gssapi", "decorator.py"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(_DEBIAN / name)
    return folder


def _installed(name: str) -> bool:
    return any((Path(each) / name / "__init__.py").exists() for each in sys.path if each)


class KDC:
    """A key distribution centre that can be paused."""

    realm = REALM

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.log = folder / "kdc.log"
        self.krb5_conf = folder / "krb5.conf"
        #: For programs that are to use this realm.
        self.environment = {"KRB5_CONFIG": str(self.krb5_conf)}
        self._folder = folder
        self._conf = folder / "kdc.conf"
        self._process: subprocess.Popen[bytes] | None = None
        self._kadmin = program("kadmin.local", "krb5-admin-server")

    @property
    def server_environment(self) -> dict[str, str]:
        """For the programs of the KDC itself."""
        return {**os.environ, **self.environment, "KRB5_KDC_PROFILE": str(self._conf)}

    def administer(self, *requests: str) -> str:
        """Do what kadmin is asked; returns what it says."""
        done = subprocess.run(
            [str(self._kadmin), "-r", REALM], input="\n".join(requests) + "\n", text=True,
            env=self.server_environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=PATIENCE, check=True,
        )  # fmt: skip
        return done.stdout

    def keytab(self, name: str, *principals: str) -> Path:
        """Make principals with new keys, which are in the file that is returned."""
        path = self._folder / f"{name}.keytab"
        path.unlink(missing_ok=True)
        self.administer(
            *(f"addprinc -randkey {each}" for each in principals),
            *(f"ktadd -k {path} -e aes256-cts-hmac-sha1-96:normal {each}" for each in principals),
        )
        return path

    def asked(self, kind: str) -> int:
        """How many requests of a kind, ``AS_REQ`` or ``TGS_REQ``, it answered so far."""
        return self.log.read_text().count(f" {kind} (")

    def issued(self, kind: str) -> int:
        """How many of them with a ticket."""
        text = self.log.read_text()
        return sum(f" {kind} (" in line and ": ISSUE:" in line for line in text.splitlines())

    def pause(self) -> None:
        """Stop its process: requests are sent, and nobody answers."""
        assert self._process is not None
        processes.stop(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def kdc(
    folder: Path, *, more: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[KDC]:
    """Run a KDC with an empty realm until the block ends.

    :param folder: where its log is left
    :param more: lines for ``[libdefaults]`` of krb5.conf
    :param environment: variables for it besides those of this process
    """
    krb5kdc, kdb5_util = program("krb5kdc", "krb5-kdc"), program("kdb5_util", "krb5-kdc")
    with own_folder("kdc") as own:
        made = KDC(own, free_port())
        values = {
            "realm": REALM, "port": made.port, "folder": own, "log": made.log,
            "more": "\n    ".join(more),
        }  # fmt: skip
        made.krb5_conf.write_text(_KRB5_CONF.format(**values))
        made._conf.write_text(_KDC_CONF.format(**values))
        (own / "acl").touch()
        subprocess.run(
            [str(kdb5_util), "-r", REALM, "create", "-s", "-P", "master"],
            env=made.server_environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=PATIENCE, check=True,
        )  # fmt: skip
        out = folder / "krb5kdc.out"
        command = [str(krb5kdc), "-n", "-r", REALM]
        known = {**made.server_environment, **(environment or {})}
        with running(command, out, signal.SIGTERM, environment=known) as process:

            def look() -> None:
                if made.port not in listening():
                    raise LookupError("it does not listen")

            ready(look, process, out, (LookupError,))
            made._process = process
            try:
                yield made
            finally:
                made.resume()
                if made.log.exists():
                    shutil.copy(made.log, folder / "kdc.log")
