"""A MariaDB for Keystone, as the published experiment had one: private, and gone with the block.

It is Debian's mariadbd, started here at a unix socket in a folder of its own, never as a service.
It keeps its isolation level and collation; only how it loses data in a power cut is tuned, so that
a benchmark is not one of this machine's disk.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfront.common import programs
from keyfront.errors import MissingPartError

from ..experiments import processes

_USER = "keystone"
NAME = "keystone"
# MySQL's when the experiment was published.
CONNECTIONS = 100


class MariaDB:
    """A running MariaDB; whoever can open the folder of its socket is let in.

    :ivar url: what SQLAlchemy, and so Keystone's ``[database] connection``, connects to
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.url = f"mysql+pymysql://{_USER}@localhost/{NAME}?unix_socket={socket}"

    def ask(self, *statements: str) -> Any:
        """Run statements; gives the rows of the last one."""
        import pymysql

        connection = pymysql.connect(unix_socket=str(self._socket), user=_USER)
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return cursor.fetchall()
        finally:
            connection.close()

    def limit(self, connections: int) -> None:
        """Let so many clients in at a time (``max_connections``)."""
        self.ask(f"SET GLOBAL max_connections = {connections:d}")

    def connections(self) -> float:
        """How many clients there are now, this one left out."""
        (row,) = self.ask("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
        return float(row[1]) - 1

    def most_connections(self) -> int:
        """The most clients at a time since this was last asked."""
        (row,) = self.ask("SHOW GLOBAL STATUS LIKE 'Max_used_connections'")
        self.ask("FLUSH STATUS")
        return int(row[1])


@contextmanager
def mariadb(folder: Path) -> Iterator[MariaDB]:
    """Run a MariaDB with an empty database until the block ends.

    :param folder: an empty one of this user only; its path is short, for the socket is in it
    :raises MissingPartError: mariadbd or PyMySQL is not installed; names the command
    :raises ServerError: it did not start
    """
    program = programs.system_program(("mariadbd",), "mariadb-server-core")
    try:
        import pymysql
    except ImportError:
        raise MissingPartError("PyMySQL is not installed: run pip install PyMySQL") from None
    folder.joinpath("data").mkdir(mode=0o700)
    server = MariaDB(folder / "socket")
    options = {
        "datadir": folder / "data",
        "socket": folder / "socket",
        "pid-file": folder / "pid",
        "character-set-server": "utf8mb4",
        "collation-server": "utf8mb4_general_ci",
        "max-connections": CONNECTIONS,
        "innodb-buffer-pool-size": "32M",
        "innodb-log-file-size": "16M",
        "innodb-flush-method": "nosync",
        "innodb-flush-log-at-trx-commit": 0,
        # their table is one of those that mariadb-install-db would make, in many seconds
        "innodb-stats-persistent": "OFF",
        "performance-schema": "OFF",
    }
    command = [program, "--no-defaults", "--skip-networking", "--skip-grant-tables"]
    command += ["--skip-log-bin", *(f"--{name}={value}" for name, value in options.items())]
    # without it mariadbd refuses to run as root
    command += ["--user=root"] if os.geteuid() == 0 else []

    def ready() -> bool:
        try:
            server.ask(f"CREATE DATABASE IF NOT EXISTS {NAME}")
        except (OSError, pymysql.Error):
            return False
        return True

    with processes.running(
        "MariaDB", command, folder / "log", stop=signal.SIGKILL, folder=folder
    ) as process:
        process.wait(ready)
        yield server
