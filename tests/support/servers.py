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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2

from keyfront.benchmarks.servers import memcached as _memcached
from keyfront.benchmarks.servers.mariadb import MariaDB
from keyfront.benchmarks.servers.mariadb import mariadb as _mariadb
from support.processes import command_line, runs
from support.programs import or_skip as _or_skip
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
class PostgreSQL:
    """A running PostgreSQL; the kernel tells it that its clients are this user."""

    folder: Path
    log: Path
    #: In the name of its socket, and on 127.0.0.1 if it was asked to listen there.
    port: int = 5432

    def url(self, name: str, *, port: int = 0) -> str:
        """What SQLAlchemy, and so Keystone's ``[database] connection``, connects to.

        :param port: that of a proxy before it; 0: none
        """
        if port:
            return f"postgresql+psycopg2://{_USER}@127.0.0.1:{port}/{name}"
        more = "" if self.port == PostgreSQL.port else f"&port={self.port}"
        return f"postgresql+psycopg2://{_USER}@/{name}?host={self.folder}{more}"

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

    def ask(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement; returns its rows."""
        with contextlib.closing(self._connect(database)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall()) if cursor.description else []

    def _connect(self, database: str = "postgres") -> psycopg2.extensions.connection:
        return psycopg2.connect(
            host=str(self.folder), port=self.port, user=_USER, dbname=database
        )


class Memcached(_memcached.Memcached):
    """A running memcached that is told and asked."""

    def stats(self) -> dict[str, str]:
        """Return its own counters, ``cmd_set`` and ``get_hits`` among them."""
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


@contextlib.contextmanager
def memcached() -> Iterator[Memcached]:
    """Run a memcached with 64 MB until the block ends."""
    with _or_skip(_memcached.memcached()) as found:
        yield Memcached(found.host, found.port)


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
    with _own_folder("mariadb") as own:
        world = _mariadb(
            own, log=folder / "mariadb.log", port=port, connections=_CONNECTIONS, more=more,
            seed=seed, environment=environment,
        )  # fmt: skip
        with _or_skip(world) as server:
            yield server


#: Options of a MariaDB whose commits outlive it: they are handed to the kernel.
OUTLIVES: Mapping[str, object] = {
    "skip-log-bin": 1, "innodb-flush-method": "fsync", "innodb-flush-log-at-trx-commit": 2,
}  # fmt: skip


class Restarts:
    """Kills a MariaDB and starts it with what it has written; a context manager.

    :param server: one with :data:`OUTLIVES`
    """

    def __init__(self, server: MariaDB) -> None:
        self._server = server
        self._lives = contextlib.ExitStack()
        self._process = self._find()
        # What a new one has of itself in no file yet it would not find again.
        server.ask("SET GLOBAL innodb_log_checkpoint_now = 1")

    def __enter__(self) -> Restarts:
        return self

    def __exit__(self, *error: object) -> None:
        self._lives.close()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def __call__(self) -> None:
        command = self._process.cmdline()
        self._process.kill()
        while runs(self._process):
            time.sleep(0.01)
        log = self._server.log.with_suffix(".again.log")
        process = self._lives.enter_context(_running(command, log, signal.SIGKILL))
        self._process = psutil.Process(process.pid)
        _ready(self._greeting, process, log, (OSError,))

    def _greeting(self) -> bytes:
        # pymysql leaves a socket open if it is not answered
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self._server.socket))
            greeting = probe.recv(5)
        if not greeting:
            raise ConnectionError("it ended the connection")
        return greeting

    def _find(self) -> psutil.Process:
        option = f"--socket={self._server.socket}"
        for process in psutil.Process().children(recursive=True):
            if option in command_line(process):
                return process
        raise AssertionError(f"nobody listens at {self._server.socket}")


@contextlib.contextmanager
def postgresql(
    folder: Path, *, replicated: bool = False, standby_of: PostgreSQL | None = None, port: int = 0
) -> Iterator[PostgreSQL]:
    """Run a PostgreSQL until the block ends.

    It does not run as root: root runs it as user postgres, which the package makes.

    :param folder: where its log is left, ``postgresql.log``
    :param replicated: whether it can have standbys and subscribers
    :param standby_of: what it follows, from a copy of it that is made now
    :param port: where it listens on 127.0.0.1 as well, to whoever is on this machine; 0: nowhere
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
        server = PostgreSQL(own, log, port or PostgreSQL.port)
        if port:
            with (data / "pg_hba.conf").open("a", encoding="ascii") as rules:
                rules.write("host all all 127.0.0.1/32 trust\n")
        options = {
            "listen_addresses": "127.0.0.1" if port else "",
            "port": server.port,
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
            options |= {"wal_level": "logical", "max_wal_senders": 4}
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
