"""Real memcached, MariaDB and PostgreSQL for tests: empty, private, gone when the block ends.

Each is the program of a Debian package listed in bindep.txt, run by the test itself and never as
a service. It listens at a port the kernel chose or at a socket in a folder of its own; nothing but
its log stays. They keep the isolation levels and collations they come with: only how fast they
lose data in a power cut is tuned.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import pymysql
import pymysql.cursors

from support.programs import own_folder as _own_folder
from support.programs import program as _program
from support.programs import ready as _ready
from support.programs import running as _running
from support.programs import setpriv as _setpriv
from support.served import PATIENCE

_USER = "keystone"
# Greenlet workers open a hundred connections each.
_CONNECTIONS = 400


@dataclass(frozen=True)
class Memcached:
    """A running memcached."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """``HOST:PORT``, as oslo.cache's ``memcache_servers`` wants it."""
        return f"{self.host}:{self.port}"

    def stats(self) -> dict[str, str]:
        """Its own counters, ``cmd_set`` and ``get_hits`` among them."""
        lines = self._ask("stats", b"END\r\n").decode("ascii").splitlines()
        return dict(line.split(" ", 2)[1:] for line in lines if line.startswith("STAT "))

    def flush(self) -> None:
        """Forget everything, as a restart would."""
        self._ask("flush_all", b"OK\r\n")

    def _ask(self, command: str, end: bytes) -> bytes:
        with socket.create_connection((self.host, self.port), PATIENCE) as client:
            client.sendall(command.encode() + b"\r\n")
            answer = b""
            while not answer.endswith(end):
                part = client.recv(65536)
                assert part, f"memcached hung up after {answer!r}"
                answer += part
        return answer


@dataclass(frozen=True)
class MariaDB:
    """A running MariaDB; whoever can open the folder of its socket is let in."""

    socket: Path
    log: Path
    #: Where replicas find it; 0 if it has none.
    port: int = 0

    def url(self, name: str) -> str:
        """What SQLAlchemy, and so Keystone's ``[database] connection``, connects to."""
        return f"mysql+pymysql://{_USER}@localhost/{name}?unix_socket={self.socket}"

    def fresh_database(self, name: str) -> str:
        """Make an empty database, in place of one of that name; returns its URL."""
        connection = self._connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE IF EXISTS `{name}`")
                cursor.execute(f"CREATE DATABASE `{name}`")
        finally:
            connection.close()
        return self.url(name)

    def ask(self, *statements: str) -> list[dict[str, Any]]:
        """Run statements one by one; returns the rows of the last."""
        with contextlib.closing(self._connect()) as connection:
            connection.autocommit(True)
            with connection.cursor(pymysql.cursors.DictCursor) as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return list(cursor.fetchall())

    def _connect(self) -> pymysql.Connection:
        # pymysql leaves a socket open if it finds nobody there
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
        return pymysql.connect(unix_socket=str(self.socket), user=_USER)


@dataclass(frozen=True)
class PostgreSQL:
    """A running PostgreSQL; the kernel tells it that its clients are this user."""

    folder: Path
    log: Path

    def url(self, name: str) -> str:
        """What SQLAlchemy, and so Keystone's ``[database] connection``, connects to."""
        return f"postgresql+psycopg2://{_USER}@/{name}?host={self.folder}"

    def fresh_database(self, name: str) -> str:
        """Make an empty database, in place of one of that name; returns its URL."""
        connection = self._connect()
        try:
            # neither statement may be in a transaction
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
                cursor.execute(f'CREATE DATABASE "{name}"')
        finally:
            connection.close()
        return self.url(name)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; returns its rows."""
        with contextlib.closing(self._connect()) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())

    def _connect(self) -> psycopg2.extensions.connection:
        return psycopg2.connect(host=str(self.folder), user=_USER, dbname="postgres")


@contextlib.contextmanager
def memcached() -> Iterator[Memcached]:
    """Run a memcached with 64 MB until the block ends."""
    program = _program("memcached", "memcached")
    with _own_folder("memcached") as folder:
        ports, log = folder / "ports", folder / "log"
        command = [str(program), "-l", "127.0.0.1", "-p", "-1", "-U", "0"]
        # without it memcached refuses to run as root
        command += ["-u", pwd.getpwuid(0).pw_name] if os.geteuid() == 0 else []
        # it takes a free port itself and, listening, moves this file in place
        environment = {"MEMCACHED_PORT_FILENAME": str(ports)}
        with _running(command, log, signal.SIGKILL, environment=environment) as process:

            def look() -> Memcached:
                line = next(x for x in ports.read_text().splitlines() if x.startswith("TCP"))
                found = Memcached("127.0.0.1", int(line.rpartition(":")[2]))
                found.stats()
                return found

            yield _ready(look, process, log, (OSError,))


@contextlib.contextmanager
def mariadb(
    folder: Path, *, port: int = 0, more: Mapping[str, object] | None = None,
    seed: Path | None = None, environment: dict[str, str] | None = None,
) -> Iterator[MariaDB]:
    """Run a MariaDB until the block ends.

    :param folder: where its log is left, ``mariadb.log``
    :param port: where it listens on 127.0.0.1 as well, to whoever is on this machine, as
        replication goes by TCP; 0: nowhere
    :param more: options of one that has others beside it, which also gets a database ``mysql``
    :param seed: the data of one that was shut down, to begin with
    """
    program = _program("mariadbd", "mariadb-server-core")
    with _own_folder("mariadb") as own:
        data, log = own / "data", folder / "mariadb.log"
        if seed is None:
            data.mkdir(mode=0o700)
        else:
            shutil.copytree(seed, data)
        server = MariaDB(own / "socket", log, port)
        options = {
            "datadir": data,
            "socket": server.socket,
            "pid-file": own / "pid",
            # Debian's, for new databases; mariadbd's own default is latin1
            "character-set-server": "utf8mb4",
            "collation-server": "utf8mb4_general_ci",
            "max-connections": _CONNECTIONS,
            "innodb-buffer-pool-size": "32M",
            "innodb-log-file-size": "16M",
            "innodb-flush-method": "nosync",
            "innodb-flush-log-at-trx-commit": 0,
            # their table is one of those that mariadb-install-db would make, in many seconds
            "innodb-stats-persistent": "OFF",
            "performance-schema": "OFF",
        }
        network = {"bind-address": "127.0.0.1", "port": port} if port else {"skip-networking": 1}
        options |= {"skip-log-bin": 1} if more is None else more
        if more is not None:
            (data / "mysql").mkdir(mode=0o700, exist_ok=True)
        options |= network
        command = [
            str(program), "--no-defaults", "--skip-grant-tables",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        # without it mariadbd refuses to run as root
        command += ["--user=root"] if os.geteuid() == 0 else []
        # nothing of the data is kept: it need not be put in order
        with _running(command, log, signal.SIGKILL, environment=environment) as process:
            _ready(lambda: server._connect().close(), process, log, (OSError, pymysql.Error))
            yield server


@contextlib.contextmanager
def postgresql(
    folder: Path, *, replicated: bool = False, standby_of: PostgreSQL | None = None
) -> Iterator[PostgreSQL]:
    """Run a PostgreSQL until the block ends.

    It does not run as root: root runs it as user postgres, which the package makes.

    :param folder: where its log is left, ``postgresql.log``
    :param replicated: whether it can have standbys
    :param standby_of: what it follows, from a copy of it that is made now
    """
    program = _program("postgres", "postgresql")
    user: list[str] = []
    with _own_folder("postgresql") as own:
        if os.geteuid() == 0:
            name = _ordinary_name()
            group = str(pwd.getpwnam(name).pw_gid)
            user = [f"--reuid={name}", f"--regid={group}", "--clear-groups"]
            shutil.chown(own, name, int(group))
            # a client that is root only within a user namespace has to get to the socket
            own.chmod(0o711)
        data, log = own / "data", folder / "postgresql.log"
        if standby_of is None:
            _make_cluster(program.with_name("initdb"), user, data)
        else:
            copy = ["pg_basebackup", f"--host={standby_of.folder}", f"--username={_USER}"]
            copy += [f"--pgdata={data}", "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
            _run(user, [str(program.with_name(copy[0])), *copy[1:]])
        server = PostgreSQL(own, log)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": own,
            "max_connections": _CONNECTIONS,
            "shared_buffers": "32MB",
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
            "wal_level": "minimal",
            "max_wal_senders": 0,
            "autovacuum": "off",
            "jit": "off",
        }
        if replicated or standby_of is not None:
            options |= {"wal_level": "replica", "max_wal_senders": 4}
        settings = [f"--{name}={value}" for name, value in options.items()]
        command = [str(program), "-D", str(data), *settings]
        # at once, collecting its children
        with _running(command, log, signal.SIGQUIT, user=user) as process:
            _ready(lambda: server._connect().close(), process, log, (psycopg2.Error,))
            yield server


def _make_cluster(initdb: Path, user: list[str], data: Path) -> None:
    _run(
        user,
        [
            str(initdb), "-D", str(data), "-U", _USER, "-A", "peer", "-E", "UTF8", "--locale=C",
            "--wal-segsize=1", "--no-sync",
        ],
    )
    # The one who runs the tests, and the servers themselves, and nobody else of this machine, are
    # its superuser.
    allowed = "local all all peer map=tests\nlocal replication all peer map=tests\n"
    (data / "pg_hba.conf").write_text(allowed)
    names = {pwd.getpwuid(os.geteuid()).pw_name, *([_ordinary_name()] if user else [])}
    (data / "pg_ident.conf").write_text("".join(f"tests {name} {_USER}\n" for name in names))


def _run(user: list[str], command: list[str]) -> None:
    done = subprocess.run(
        [*_setpriv(signal.SIGKILL, user), *command],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")


def _ordinary_name() -> str:
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
