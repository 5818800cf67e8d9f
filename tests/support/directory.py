"""A real slapd for tests: loaded, private, on loopback only, gone when the block ends.

It is Debian's own program, run by the test and never as a service, without fsync. It logs each
operation to a file, from which :meth:`Directory.counts` tells what clients really sent.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import re
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ldap
import ldap.controls
import ldap.modlist

from keyfront.benchmarks.servers import slapd
from keyfront.benchmarks.servers.ports import listening
from keyfront.benchmarks.servers.slapd import SUFFIX as SUFFIX
from support import processes
from support.certificates import Certificates, Pair, certificates
from support.served import PATIENCE, free_port
from support.servers import _own_folder, _program, _ready, _running

_SCHEMA = Path("/etc/ldap/schema")
_MODULES = Path("/usr/lib/ldap")
# Lets root write what only the password policy overlay may: draft-zeilenga-ldap-relax.
_RELAX = "1.3.6.1.4.1.4203.666.5.12"
_STARTTLS = "1.3.6.1.4.1.1466.20037"
_MARK = "cn=keyfront-mark"

# Keystone's `enabled` and a group without members, which groupOfNames does not allow. The object
# identifiers are in an arc that nobody may use outside examples.
KEYSTONE_SCHEMA = """
attributetype ( 1.1.2.1.1 NAME 'enabled' EQUALITY caseIgnoreMatch
    SYNTAX 1.3.6.1.4.1.1466.115.121.1.15 SINGLE-VALUE )
attributetype ( 1.1.2.1.2 NAME 'defaultProject' EQUALITY caseIgnoreMatch
    SYNTAX 1.3.6.1.4.1.1466.115.121.1.15 SINGLE-VALUE )
objectclass ( 1.1.2.2.1 NAME 'kfUser' SUP inetOrgPerson STRUCTURAL
    MAY ( enabled $ defaultProject ) )
objectclass ( 1.1.2.2.2 NAME 'kfGroup' SUP top STRUCTURAL
    MUST cn MAY ( member $ ou $ description $ businessCategory $ owner $ enabled ) )
"""

Values = Mapping[str, Sequence[str | bytes]]


@dataclass(frozen=True)
class User:
    """A person in the directory, by objectClass inetOrgPerson and kfUser."""

    uid: str
    cn: str
    sn: str
    mail: str
    dn: str
    password: str


@dataclass(frozen=True)
class Counts:
    """What clients did, taken from slapd's log; operations, not successes."""

    connects: int = 0
    binds: int = 0
    binds_refused: int = 0
    sasl_binds: int = 0
    searches: int = 0
    unbinds: int = 0
    starttls: int = 0
    closes: int = 0

    def __sub__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a - b for a, b in pairs))


class Directory:
    """A slapd that can be stopped, killed, paused and started again at its own port.

    :attr:`users` are user0, user1 and so on; :attr:`odd_users` have names that need escaping or
    are not ASCII. :attr:`groups_of` says who is in which group. ``kfUser`` and ``kfGroup`` are
    the object classes that Keystone can write.
    """

    suffix = SUFFIX
    root_dn = f"cn=root,{SUFFIX}"
    root_password = "root-secret"
    # An ordinary identity to search with; root is above limits and policies.
    service_dn = f"cn=service,ou=Services,{SUFFIX}"
    service_password = "service-secret"
    people = f"ou=People,{SUFFIX}"
    groups = f"ou=Groups,{SUFFIX}"

    def __init__(
        self, program: Path, own: Path, folder: Path, port: int, tls_port: int | None,
        made: Certificates, users: Sequence[User], odd_users: Sequence[User],
        socket_file: Path | None = None, environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.tls_port = tls_port
        self.users = list(users)
        self.odd_users = list(odd_users)
        self.certificates = made
        self._program = program
        self._own = own
        self._folder = folder
        self._logs: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket_file
        self._environment = dict(environment or {})
        self._running = contextlib.ExitStack()
        self._paused = False
        self._marks = 0
        self._start_of_counts: dict[Path, int] = {}
        self._lines: dict[Path, _Log] = {}

    # Where it is

    @property
    def url(self) -> str:
        return f"ldap://127.0.0.1:{self.port}"

    @property
    def ldaps_url(self) -> str:
        assert self.tls_port, 'made without tls="both"'
        return f"ldaps://localhost:{self.tls_port}"

    @property
    def ldapi_url(self) -> str:
        assert self._socket, "made without socket_file"
        return f"ldapi://{urllib.parse.quote(str(self._socket), safe='')}"

    @property
    def ca_file(self) -> Path:
        return self.certificates.ca_file

    @property
    def log(self) -> Path:
        """The log since the last start, in slapd's "stats" form."""
        return self._logs[-1]

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def groups_of(self, user: User) -> list[str]:
        """The names of the groups that a user was put into at the beginning."""
        return [name for name, members in _groups(self.users).items() if user in members]

    # Its life

    def start(self) -> None:
        """Start it at the port it had, with what it stored.

        Only from a thread that lives on: the kernel ends slapd with the thread that started it.
        """
        assert self._process is None, "it runs"
        urls = [f"ldap://127.0.0.1:{self.port}"]
        urls += [f"ldaps://127.0.0.1:{self.tls_port}"] if self.tls_port else []
        urls += [self.ldapi_url] if self._socket else []
        log = self._folder / f"slapd-{self.port}-{len(self._logs)}.log"
        # with -d it stays in the foreground, and stats go to standard error, unbuffered
        command = [
            str(self._program), "-f", str(self._own / "slapd.conf"), "-d", "stats",
            "-h", " ".join(urls),
        ]
        process = self._running.enter_context(
            _running(command, log, signal.SIGKILL, environment=self._environment)
        )

        ports = {self.port, self.tls_port} - {None}

        def look() -> None:
            # it has its ports before it says this, listens a little later, and would count
            # a connection
            if b"slapd starting" not in log.read_bytes() or not ports <= listening():
                raise LookupError("it does not listen")

        try:
            _ready(look, process, log, (LookupError,))
        except BaseException:
            self._running.close()
            raise
        self._logs.append(log)
        self._process = process

    def stop(self) -> None:
        """End it in good order: it closes its connections."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; the kernel closes its connections."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._paused:
            self.resume()
        self._process.send_signal(number)
        self._process.wait(PATIENCE)
        self._process = None
        self._running.close()

    def pause(self) -> None:
        """Stop its process: connections stay, new ones are made by the kernel, nobody answers."""
        assert self._process is not None
        processes.stop(self._process.pid)
        self._paused = True

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._paused = False

    # What it holds; done as root, and never counted

    def add(self, dn: str, attributes: Values) -> None:
        entry = {name: _bytes(values) for name, values in attributes.items()}
        with self._as_root() as root:
            root.add_s(dn, ldap.modlist.addModlist(entry))

    def modify(self, dn: str, attributes: Values) -> None:
        """Replace these attributes; those without values are removed."""
        with self._as_root() as root:
            root.modify_s(dn, _replace(attributes))

    def delete(self, dn: str) -> None:
        with self._as_root() as root:
            root.delete_s(dn)

    def read(self, dn: str, attributes: Sequence[str] = ("*", "+")) -> dict[str, list[bytes]]:
        with self._as_root() as root:
            ((_, found),) = root.search_s(dn, ldap.SCOPE_BASE, attrlist=list(attributes))
        return dict(found)

    def password(self, dn: str, new: str) -> None:
        self.modify(dn, {"userPassword": [new]})

    # What the password policy says of a user; only with ppolicy=True

    def lock(self, dn: str) -> None:
        """As if the password had been wrong too often (three times, by the default policy)."""
        self._override(dn, {"pwdAccountLockedTime": ["000001010000Z"]})

    def unlock(self, dn: str) -> None:
        self._override(dn, {"pwdAccountLockedTime": [], "pwdFailureTime": []})

    def failures(self, dn: str) -> int:
        """How many wrong passwords it remembers."""
        return len(self.read(dn, ["pwdFailureTime"]).get("pwdFailureTime", []))

    def must_change(self, dn: str) -> None:
        """The password is right once more, to change it."""
        reset = {"pwdReset": ["TRUE"]}
        self._override(dn, {"pwdPolicySubentry": [_policy("must-change")], **reset})

    def expire(self, dn: str, *, grace: bool = False) -> None:
        """The password is too old; with `grace` it is accepted a few times still."""
        policy = "grace" if grace else "expired"
        self._override(dn, {"pwdPolicySubentry": [_policy(policy)], "pwdChangedTime": [_time(-2)]})

    def expire_soon(self, dn: str) -> None:
        """The password is right for less than a day, and the server says for how long."""
        changed = {"pwdChangedTime": [_time(-1)]}
        self._override(dn, {"pwdPolicySubentry": [_policy("expiring")], **changed})

    def end_account(self, dn: str) -> None:
        """The account itself ended yesterday."""
        self._override(dn, {"pwdEndTime": [_time(-1)]})

    def _override(self, dn: str, attributes: Values) -> None:
        relax = ldap.controls.RequestControl(_RELAX, True)
        with self._as_root() as root:
            root.modify_ext_s(dn, _replace(attributes), serverctrls=[relax])

    @contextlib.contextmanager
    def _as_root(self) -> Iterator[ldap.ldapobject.LDAPObject]:
        # one connection each time: nothing that a forked child could close by mistake
        root = ldap.initialize(self.url)
        root.set_option(ldap.OPT_NETWORK_TIMEOUT, PATIENCE)
        root.timeout = PATIENCE
        try:
            with contextlib.suppress(ldap.NO_SUCH_OBJECT):
                root.search_s(_MARK, ldap.SCOPE_BASE, attrlist=["1.1"])
            root.simple_bind_s(self.root_dn, self.root_password)
            yield root
        finally:
            root.unbind_s()

    # What clients did

    def mark(self) -> None:
        """Let :meth:`counts` begin at zero."""
        self._catch_up()
        self._start_of_counts = {log: log.stat().st_size for log in self._logs}

    def counts(self) -> Counts:
        """What clients did since the last :meth:`mark`, or since the first start.

        All that was answered is in it, and all connections on which something was. An unbind or
        a close has no answer: slapd may learn of it later, see :meth:`wait_for`.
        """
        self._catch_up()
        total = [0] * len(_FIELDS)
        for log in self._logs:
            start = self._start_of_counts.get(log, 0)
            counted = _count(log.read_bytes(), start)
            total = [a + b for a, b in zip(total, counted, strict=True)]
        return Counts(*total)

    def open_connections(self) -> int:
        """How many connections of clients it has now, by its own log."""
        self._catch_up()
        connects, *_, closes = _count(self.log.read_bytes(), 0)
        return connects - closes if self._process else 0

    def wait_for(self, condition: Callable[[Counts], bool], what: str) -> Counts:
        """Wait until the counts are so; returns them."""
        began = time.monotonic()
        while not condition(counts := self.counts()):
            waited = time.monotonic() - began
            assert waited < PATIENCE, f"waited in vain until {what}: {counts}"
            time.sleep(min(max(0.01, waited / 20), 0.2))
        return counts

    def _catch_up(self) -> None:
        """Have what was sent so far in the log, by a search that comes after it."""
        if self._process is None or self._paused:
            return
        self._marks += 1
        name = f"{_MARK}-{self._marks}"
        # A new connection: those on which anything was answered before have lesser numbers.
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as client:
            client.sendall(_search_request(name))
            assert client.recv(4096), f"slapd hung up; see {self.log}"
        deadline = time.monotonic() + PATIENCE
        while owed := self._owed(name.encode()):
            assert time.monotonic() < deadline, f"slapd does not write of {owed}; see {self.log}"
            time.sleep(0.005)

    def _owed(self, name: bytes) -> set[str]:
        log = self._lines.setdefault(self.log, _Log())
        log.read(self.log)
        return log.owed(name)


@contextlib.contextmanager
def directory(
    folder: Path, *, tls: str = "none", ppolicy: bool = False, extra: str = "",
    extra_database: str = "", users: int = 20, certificate: Pair | None = None,
    socket_file: Path | None = None, environment: Mapping[str, str] | None = None,
) -> Iterator[Directory]:
    """Run a slapd until the block ends.

    :param folder: where its logs and the certificates are left
    :param tls: "none", or "both": StartTLS at the port and LDAPS at another
    :param ppolicy: with the password policy overlay, which locks a user after three failures
    :param extra: lines for slapd.conf, about the whole server (``idletimeout 1``)
    :param extra_database: lines for slapd.conf, about the database (``limits users size=5``)
    :param users: how many of user0, user1, … there are
    :param certificate: what it shows instead of the right one, of :mod:`certificates`
    :param socket_file: where it listens as well, for ``ldapi://``
    :param environment: variables for it besides those of this process
    """
    assert tls in ("none", "both"), tls
    program = _program("slapd", "slapd")
    made = certificates(folder)
    with _own_folder("slapd") as own:
        program = slapd.usable(program, own)
        many = [_user(f"user{n}", f"User {n}", f"Number{n}", n) for n in range(users)]
        odd = [_user(uid, cn, sn, n) for n, (uid, cn, sn) in enumerate(_ODD)]
        shown = (certificate or made.server) if tls == "both" else None
        _make_database(program, own, shown, _ldif(many, odd, ppolicy), ppolicy, extra,
                       extra_database)  # fmt: skip
        while True:
            port, tls_port = free_port(), free_port()
            server = Directory(
                program, own, folder, port, tls_port if shown else None, made, many, odd,
                socket_file, environment,
            )
            try:
                server.start()
                break
            except AssertionError as error:
                # somebody took the port since we looked
                if f"errno={errno.EADDRINUSE}" not in str(error):
                    raise
        try:
            yield server
        finally:
            server.kill()


_ODD = (
    ("zoë", "Zoë Åström", "Åström"),
    ("李雷", "李雷", "李"),
    ("smith, john", "Smith, John", "Smith"),
    ("o'neil (ops)*", "O'Neil (Ops) *", "O'Neil"),
    ("back\\slash", "Back\\Slash", "Slash"),
    (' #a+b="c"; <d> ', 'A+B="C"; <D>', "D"),
)


def _user(uid: str, cn: str, sn: str, number: int) -> User:
    dn = f"uid={ldap.dn.escape_dn_chars(uid)},{Directory.people}"
    return User(uid, cn, sn, f"mail{number}@example.org", dn, f"secret-{number}-{sn}")


def _groups(users: Sequence[User]) -> dict[str, list[User]]:
    return {"admins": list(users[:1]), "even": list(users[::2]), "everybody": list(users)}


def _policy(name: str) -> str:
    return f"cn={name},ou=Policies,{SUFFIX}"


def _time(days: int) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + days * 86400))


def _bytes(values: Sequence[str | bytes]) -> list[bytes]:
    return [x.encode() if isinstance(x, str) else x for x in values]


def _replace(attributes: Values) -> list[tuple[int, str, list[bytes] | None]]:
    return [(ldap.MOD_REPLACE, k, _bytes(v) or None) for k, v in attributes.items()]


def _ldif(users: Sequence[User], odd: Sequence[User], ppolicy: bool) -> str:
    entries: list[tuple[str, dict[str, list[str]]]] = [
        (SUFFIX, {"objectClass": ["dcObject", "organization"], "dc": ["example"], "o": ["Test"]}),
    ]
    for name in ("People", "Groups", "Services", "Policies"):
        folder = {"objectClass": ["organizationalUnit"], "ou": [name]}
        entries.append((f"ou={name},{SUFFIX}", folder))
    role = {"objectClass": ["organizationalRole", "simpleSecurityObject"], "cn": ["service"]}
    role["userPassword"] = [Directory.service_password]
    entries.append((Directory.service_dn, role))
    for user in (*users, *odd):
        person = {
            "objectClass": ["inetOrgPerson", "kfUser"], "uid": [user.uid], "cn": [user.cn],
            "sn": [user.sn], "mail": [user.mail], "description": [f"about {user.cn}"],
            "userPassword": [user.password], "enabled": ["TRUE"],
        }  # fmt: skip
        entries.append((user.dn, person))
    for name, members in _groups(users).items():
        dns = [x.dn for x in members] or [Directory.service_dn]
        group = {"objectClass": ["groupOfNames"], "cn": [name], "ou": [name], "member": dns}
        entries.append((f"cn={name},{Directory.groups}", group | {"description": [f"the {name}"]}))
    policies = {
        "default": {},
        "expired": {"pwdMaxAge": ["1"]},
        "grace": {"pwdMaxAge": ["1"], "pwdGraceAuthNLimit": ["3"]},
        "expiring": {"pwdMaxAge": ["172800"], "pwdExpireWarning": ["172800"]},
        # elsewhere a password that root sets would have to be changed, too
        "must-change": {"pwdMustChange": ["TRUE"]},
    }
    for name, rules in policies.items() if ppolicy else ():
        policy = {
            "objectClass": ["device", "pwdPolicy"], "cn": [name], "pwdAttribute": ["userPassword"],
            "pwdLockout": ["TRUE"], "pwdMaxFailure": ["3"],
        }  # fmt: skip
        entries.append((_policy(name), policy | rules))
    return "\n".join(_entry(dn, attributes) for dn, attributes in entries)


def _entry(dn: str, attributes: Mapping[str, Sequence[str]]) -> str:
    pairs = [("dn", dn), *((k, x) for k, values in attributes.items() for x in values)]
    return "".join(f"{k}:: {base64.b64encode(x.encode()).decode()}\n" for k, x in pairs)


def _make_database(
    program: Path, own: Path, shown: Pair | None, ldif: str, ppolicy: bool, extra: str,
    extra_database: str,
) -> None:
    data, schema = own / "data", own / "keystone.schema"
    data.mkdir(mode=0o700)
    schema.write_text(KEYSTONE_SCHEMA)
    includes = [*(_SCHEMA / f"{x}.schema" for x in ("core", "cosine", "inetorgperson")), schema]
    lines = [f"include {path}" for path in includes]
    lines += [f"modulepath {_MODULES}", "moduleload back_mdb"]
    lines += ["moduleload ppolicy"] if ppolicy else []
    if shown:
        lines += [f"TLSCertificateFile {shown.certificate}", f"TLSCertificateKeyFile {shown.key}"]
    lines += [
        # starting threads costs more than these tests ask of it
        "threads 8", extra, "database mdb", f'suffix "{SUFFIX}"', f'rootdn "{Directory.root_dn}"',
        f"rootpw {Directory.root_password}", f"directory {data}", "dbnosync",
        f"maxsize {256 << 20}", "index objectClass,uid,cn,sn,member eq",
        "access to attrs=userPassword by self write by anonymous auth by * none",
        "access to * by self write by * read",
    ]  # fmt: skip
    if ppolicy:
        lines += ["overlay ppolicy", f'ppolicy_default "{_policy("default")}"']
        lines += ["ppolicy_use_lockout"]
    lines += [extra_database]
    conf, content = own / "slapd.conf", own / "content.ldif"
    conf.touch(mode=0o600)
    conf.write_text("\n".join(lines) + "\n")
    content.write_text(ldif)
    slapd.fill(program, conf, content)


def _search_request(base: str) -> bytes:
    """A search of one entry for no attribute: RFC 4511 section 4.5.1."""

    def element(tag: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([tag, len(content)]) + content

    limits = b"\x0a\x01\x00\x0a\x01\x00\x02\x01\x00\x02\x01\x00\x01\x01\x00"
    rest = element(0x87, b"objectClass") + element(0x30, element(0x04, b"1.1"))
    search = element(0x63, element(0x04, base.encode()) + limits + rest)
    return element(0x30, b"\x02\x01\x01" + search)


_LINE = re.compile(
    rb"conn=(\d+) (?:"
    rb"fd=\d+ (?P<accept>ACCEPT) "
    rb"|op=\d+ (?P<bind>BIND) dn=.* method=128"
    rb"|op=\d+ (?P<sasl>BIND) dn=.* method=163"
    rb"|op=\d+ RESULT (?P<refused>tag=97 err=(?!0 |14 ))"
    rb'|op=\d+ (?P<search>SRCH) base="'
    rb"|op=\d+ (?P<unbind>UNBIND)"
    rb"|op=\d+ (?P<starttls>EXT oid=" + re.escape(_STARTTLS.encode()) + rb")"
    rb"|fd=\d+ (?P<close>closed)"
    rb")"
)
_OURS = re.compile(rb'conn=(\d+) op=0 SRCH base="(' + _MARK.encode() + rb'[^"]*)')
_OWES = re.compile(
    rb"conn=(?P<conn>\d+) (?:"
    rb"fd=\d+ (?P<accept>ACCEPT) "
    rb"|op=(?P<bind>\d+) BIND dn=.* method=(?:128|163)"
    rb"|op=(?P<answered>\d+) RESULT tag=97 "
    rb"|fd=\d+ (?P<close>closed)"
    rb")"
)
_FIELDS = ("accept", "bind", "refused", "sasl", "search", "unbind", "starttls", "close")


class _Log:
    """What slapd has written in one run, read on from where it was read last."""

    def __init__(self) -> None:
        self._read = 0
        self._numbers: set[int] = set()
        self._accepted: set[int] = set()
        self._closed: set[int] = set()
        self._binds: set[tuple[int, int]] = set()
        self._ours: dict[bytes, int] = {}

    def owed(self, name: bytes) -> set[str]:
        """What slapd has done before it answered our search, and not written yet.

        It writes of a connection, and of the answer to a BIND, a little later than others can act
        on it, each from a thread of its own.
        """
        ours = self._ours.get(name)
        if ours is None:
            return {"the search"}
        before = set(range(min(self._numbers), ours + 1))
        owed = {f"conn={x}" for x in before - self._accepted}
        return owed | {f"conn={x} op={n}" for x, n in self._binds if x not in self._closed}

    def read(self, path: Path) -> None:
        """Read on, to the end of the last whole line."""
        with path.open("rb") as file:
            file.seek(self._read)
            log = file.read()
        log = log[: log.rfind(b"\n") + 1]
        self._read += len(log)
        for line in _OWES.finditer(log):
            connection = int(line["conn"])
            if line["accept"]:
                self._accepted.add(connection)
            elif line["close"]:
                self._closed.add(connection)
            elif line["bind"]:
                self._binds.add((connection, int(line["bind"])))
            else:
                self._binds.discard((connection, int(line["answered"])))
        self._numbers.update(map(int, re.findall(rb"conn=(\d+)", log)))
        self._ours.update((name, int(number)) for number, name in _OURS.findall(log))


def _count(log: bytes, start: int) -> list[int]:
    """Count the lines after `start`, in the order of :class:`Counts`, but for our connections.

    The end of a connection counts only with its beginning: that of one before has no answer, and
    may be logged whenever slapd comes to it.
    """
    ours = {number for number, _ in _OURS.findall(log)}
    begun = set()
    counted = dict.fromkeys(_FIELDS, 0)
    for line in _LINE.finditer(log, start):
        if line[1] in ours or not line.lastgroup:
            continue
        if line.lastgroup == "connects":
            begun.add(line[1])
        if line.lastgroup not in ("unbinds", "closes") or line[1] in begun:
            counted[line.lastgroup] += 1
    return list(counted.values())
