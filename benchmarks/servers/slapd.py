"""The directory of the LDAP benchmarks: a slapd that counts.

It is Debian's slapd, started here on loopback with TLS, never as a service, and gone when the block
ends. Its log in the form "stats" tells what clients really sent.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import ServerError

from .. import proc
from .certificates import certificates
from .ports import free_port, listening
from .processes import HOST, Process

SUFFIX = "dc=example,dc=org"
PEOPLE = f"ou=People,{SUFFIX}"
GROUPS = f"ou=Groups,{SUFFIX}"
SERVICE_DN = f"cn=service,{SUFFIX}"
SERVICE_PASSWORD = "service-secret"
# All users are in it.
GROUP = "everybody"

_MODULES = Path("/usr/lib/ldap")
_SCHEMA = Path("/etc/ldap/schema")
# Ubuntu's lets slapd at its own path only into /var/lib/ldap, /etc/ldap and a few more.
_APPARMOR = Path("/etc/apparmor.d/usr.sbin.slapd")
_CONFIGURATION = """\
include {schema}/core.schema
include {schema}/cosine.schema
include {schema}/inetorgperson.schema
modulepath {modules}
moduleload back_mdb
TLSCertificateFile {pair.certificate}
TLSCertificateKeyFile {pair.key}
# 200 clients at once are measured; each holds a thread only while it is answered
threads 8
database mdb
suffix "{suffix}"
directory {folder}/data
dbnosync
maxsize 268435456
index objectClass,uid,cn,member eq
access to attrs=userPassword by anonymous auth by * none
access to * by users read
"""
_LINES = re.compile(
    rb"conn=\d+ (?:fd=\d+ (?P<connect>ACCEPT) "
    rb'|op=\d+ (?P<bind>BIND) dn="(?P<dn>[^"]*)" method=128'
    rb'|op=\d+ (?P<search>SRCH) base=")'
)


def user_name(number: int) -> str:
    """Return the name (and ``uid``) of a user."""
    return f"user{number}"


def user_dn(number: int) -> str:
    return f"uid={user_name(number)},{PEOPLE}"


def user_password(number: int) -> str:
    """It is worth nothing: the directory is made for the benchmark and deleted."""
    return f"secret-{number}"


class Counts(NamedTuple):
    """The clients' operations, by slapd's log."""

    connects: int
    binds: int
    searches: int
    bound: Counter[str]
    """BINDs by DN."""


@dataclass(frozen=True)
class Slapd:
    """A running slapd; made by :func:`slapd`.

    :ivar port: the port of LDAPS
    :ivar plain_port: without TLS
    :ivar ca_file: the authority that its certificate, for 127.0.0.1, is of
    """

    port: int
    plain_port: int
    ca_file: Path
    log: Path

    def mark(self) -> int:
        """Return where :meth:`counts` may begin."""
        return self.log.stat().st_size

    def counts(self, mark: int) -> Counts:
        """Return what clients did since a mark; all that was answered is in it."""
        with self.log.open("rb") as file:
            file.seek(mark)
            text = file.read()
        kinds: Counter[str | None] = Counter()
        bound: Counter[str] = Counter()
        for line in _LINES.finditer(text):
            if line["bind"]:
                kinds["bind"] += 1
                bound[line["dn"].decode()] += 1
            else:
                kinds[line.lastgroup] += 1
        return Counts(kinds["connect"], kinds["bind"], kinds["search"], bound)


@contextmanager
def slapd(folder: Path, users: int) -> Iterator[Slapd]:
    """Run a slapd with user 0 to ``users`` - 1, the service's identity and one group.

    :param folder: an empty one of this user only; the caller deletes it
    """
    program = usable(Path(slapd_program()), folder)
    made = certificates(folder)
    folder.joinpath("data").mkdir()
    configuration, content = folder / "slapd.conf", folder / "content.ldif"
    text = _CONFIGURATION.format(
        schema=_SCHEMA, modules=_MODULES, folder=folder, suffix=SUFFIX, pair=made.server
    )
    configuration.write_text(text)
    content.write_text(_ldif(users))
    fill(program, configuration, content)
    port, plain_port = (free_port() for _ in range(2))
    urls, log = f"ldaps://{HOST}:{port} ldap://{HOST}:{plain_port}", folder / "slapd.log"
    # with -d it stays in the foreground, and the log goes to standard error, unbuffered
    command = [str(program), "-f", str(configuration), "-d", "stats", "-h", urls]
    with Process("slapd", command, log=log) as process:
        # it says that it starts before it does; a connection would be one of those that it counts
        process.wait_until(lambda: {port, plain_port} <= listening())
        yield Slapd(port, plain_port, made.ca_file, log)


def usable(program: Path, folder: Path) -> Path:
    """Return a slapd that may use a folder: AppArmor's profile goes by its path."""
    # a copy has none
    return Path(shutil.copy2(program, folder / "slapd")) if _APPARMOR.exists() else program


def fill(program: Path, configuration: Path, content: Path) -> None:
    """Put LDIF into the database of :data:`SUFFIX` of a configuration, with nobody running."""
    done = proc.ran([program, "-T", "add", "-q", "-b", SUFFIX, "-f", configuration, "-l", content])
    if done.returncode:
        raise ServerError(f"slapadd failed: {(done.stdout + done.stderr)[-600:]}")


def slapd_program() -> str:
    """:raises MissingPartError: slapd is not installed; names the command"""
    return programs.system_program(("slapd",), "slapd")


def _ldif(users: int) -> str:
    service = {"objectClass": ["organizationalRole", "simpleSecurityObject"], "cn": ["service"]}
    members = [user_dn(number) for number in range(users)]
    entries: list[tuple[str, dict[str, list[str]]]] = [
        (SUFFIX, {"objectClass": ["dcObject", "organization"], "dc": ["example"], "o": ["one"]}),
        (PEOPLE, {"objectClass": ["organizationalUnit"], "ou": ["People"]}),
        (GROUPS, {"objectClass": ["organizationalUnit"], "ou": ["Groups"]}),
        (SERVICE_DN, {**service, "userPassword": [SERVICE_PASSWORD]}),
    ]
    for number, dn in enumerate(members):
        person = {
            "objectClass": ["inetOrgPerson"],
            "uid": [user_name(number)],
            "cn": [user_name(number)],
            "sn": [f"Number {number}"],
            "mail": [f"{user_name(number)}@example.org"],
            "description": ["a user of the benchmark"],
            "userPassword": [user_password(number)],
        }
        entries.append((dn, person))
    group = {"objectClass": ["groupOfNames"], "cn": [GROUP], "member": members}
    entries.append((f"cn={GROUP},{GROUPS}", group))
    lines = []
    for dn, attributes in entries:
        lines.append(f"dn: {dn}")
        lines += [f"{name}: {value}" for name, values in attributes.items() for value in values]
        lines.append("")
    return "\n".join(lines)
