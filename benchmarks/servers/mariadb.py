"""A MariaDB: private, without what makes a measurement one of the disk, gone when the block ends.

It is Debian's mariadbd, started here at a socket in a folder of its own, never as a service. It
keeps its isolation level and collation; only how it loses data in a power cut is tuned.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfront.common import programs

from .processes import HOST, Process

_USER = "keystone"
#: MySQL's, when the published experiment was made.
CONNECTIONS = 100


@dataclass(frozen=True)
class MariaDB:
    """A running MariaDB; whoever can open the folder of its socket is let in.

    :ivar port: the port at which replicas find it; 0 if it has none
    """

    socket: Path
    log: Path
    port: int = 0

    def url(self, name: str, *, port: int = 0) -> str:
        """Return what SQLAlchemy, and so Keystone's ``[database] connection``, connects to.

        :param port: the port of a proxy before it; 0: none
        """
        if port:
            return f"mysql+pymysql://{_USER}@{HOST}:{port}/{name}"
        return f"mysql+pymysql://{_USER}@localhost/{name}?unix_socket={self.socket}"

    def fresh_database(self, name: str) -> str:
        """Make an empty database, in place of one of that name; return its URL."""
        self.ask(f"DROP DATABASE IF EXISTS `{name}`", f"CREATE DATABASE `{name}`")
        return self.url(name)

    def ask(self, *statements: str) -> list[dict[str, Any]]:
        """Run statements one by one; return the rows of the last, by the names of columns."""
        from pymysql.cursors import DictCursor

        with contextlib.closing(self._connect()) as connection:
            connection.autocommit(True)
            with connection.cursor(DictCursor) as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return list(cursor.fetchall())

    def limit(self, connections: int) -> None:
        """Let so many clients in at a time (``max_connections``)."""
        self.ask(f"SET GLOBAL max_connections = {connections:d}")

    def connections(self) -> float:
        """Return how many clients there are now, this one left out."""
        (row,) = self.ask("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
        return float(row["Value"]) - 1

    def most_connections(self) -> int:
        """Return the most clients at a time since this was last asked."""
        (row,) = self.ask("SHOW GLOBAL STATUS LIKE 'Max_used_connections'")
        self.ask("FLUSH STATUS")
        return int(row["Value"])

    def answers(self) -> bool:
        """Return whether it lets clients in."""
        import pymysql

        try:
            self._connect().close()
        except (OSError, pymysql.Error):
            return False
        return True

    def _connect(self) -> Any:
        import pymysql

        # pymysql leaves a socket open if it finds nobody there
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
        return pymysql.connect(unix_socket=str(self.socket), user=_USER)


@contextlib.contextmanager
def mariadb(
    folder: Path,
    *,
    log: Path | None = None,
    port: int = 0,
    connections: int = CONNECTIONS,
    more: Mapping[str, object] | None = None,
    seed: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[MariaDB]:
    """Run a MariaDB without databases until the block ends.

    :param folder: an empty one of this user only; its path is short, for the socket is in it
    :param log: its log; default: in the folder
    :param port: a port at which it listens on 127.0.0.1 as well, to anybody on this machine, as
        replication goes by TCP; 0: none
    :param connections: ``max_connections``
    :param more: options of one that has others beside it, which also gets a database ``mysql``
    :param seed: the data of one that was shut down, to begin with
    """
    program = programs.system_program(("mariadbd",), "mariadb-server-core")
    programs.require_module("pymysql", "experiments")
    data = folder / "data"
    if seed is None:
        data.mkdir(mode=0o700)
    else:
        shutil.copytree(seed, data)
    if more is not None:
        (data / "mysql").mkdir(mode=0o700, exist_ok=True)
    server = MariaDB(folder / "socket", log or folder / "log", port)
    options: dict[str, object] = {
        "datadir": data,
        "socket": server.socket,
        "pid-file": folder / "pid",
        # Debian's, for new databases; mariadbd's own default is latin1
        "character-set-server": "utf8mb4",
        "collation-server": "utf8mb4_general_ci",
        "max-connections": connections,
        "innodb-buffer-pool-size": "32M",
        "innodb-log-file-size": "16M",
        "innodb-flush-method": "nosync",
        "innodb-flush-log-at-trx-commit": 0,
        # their table is one of those that mariadb-install-db would make, in many seconds
        "innodb-stats-persistent": "OFF",
        "performance-schema": "OFF",
        **({"skip-log-bin": 1} if more is None else more),
        **({"bind-address": HOST, "port": port} if port else {"skip-networking": 1}),
    }
    command = [program, "--no-defaults", "--skip-grant-tables"]
    command += [f"--{name}={value}" for name, value in options.items()]
    # without it mariadbd refuses to run as root
    command += ["--user=root"] if os.geteuid() == 0 else []
    # nothing of the data is kept: it need not be put in order
    with Process(
        "MariaDB", command, log=server.log, environment=environment, stop=signal.SIGKILL
    ) as process:
        process.wait_until(server.answers)
        yield server
