"""A database server and a replica of it that can be held in the past; on MariaDB and PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import servers
from served import PATIENCE, wait_for

# Of these one is made by mariadb-install-db, which takes many seconds.
_POSITIONS = """\
CREATE TABLE mysql.gtid_slave_pos (
  domain_id INT UNSIGNED NOT NULL, sub_id BIGINT UNSIGNED NOT NULL,
  server_id INT UNSIGNED NOT NULL, seq_no BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (domain_id, sub_id)
) ENGINE=InnoDB"""


@dataclass(frozen=True)
class MariaDBPair:
    """Two MariaDBs; :func:`mariadb_pair` starts them."""

    primary: servers.MariaDB
    replica: servers.MariaDB

    def hold(self) -> None:
        """Have the replica apply nothing more."""
        self.replica.ask("STOP SLAVE SQL_THREAD")

    def let_go(self) -> None:
        """Have it apply everything, and wait for that."""
        self.replica.ask("START SLAVE SQL_THREAD")
        (row,) = self.primary.ask("SELECT @@gtid_binlog_pos AS position")
        wait = f"SELECT MASTER_GTID_WAIT('{row['position']}', {PATIENCE}) AS late"
        assert self.replica.ask(wait) == [{"late": 0}]

    def refuse_writes(self, refuse: bool) -> None:
        """Have the replica say that it takes no writes, or that it does."""
        self.replica.ask(f"SET GLOBAL read_only = {refuse:d}")

    def replicate(self) -> None:
        """Have the replica follow the primary from the beginning."""
        self.replica.ask(
            f"CHANGE MASTER TO master_host = '127.0.0.1', master_port = {self.primary.port},"
            " master_user = 'keystone', master_log_file = 'binlog.000001', master_log_pos = 4",
            "START SLAVE",
        )

    def promote(self) -> None:
        """Make the replica a primary of its own, which it stays."""
        self.replica.ask(
            "STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = 0", "CREATE DATABASE own"
        )


@dataclass(frozen=True)
class PostgreSQLPair:
    """Two PostgreSQLs; :func:`postgresql_pair` starts them."""

    primary: servers.PostgreSQL
    replica: servers.PostgreSQL

    def hold(self) -> None:
        """Have the standby apply nothing more."""
        self.replica.ask("SELECT pg_wal_replay_pause()")
        wait_for(
            lambda: self.replica.ask("SELECT pg_get_wal_replay_pause_state()") == [("paused",)],
            "the standby applies nothing",
        )

    def let_go(self) -> None:
        """Have it apply everything, and wait for that."""
        self.replica.ask("SELECT pg_wal_replay_resume()")
        ((position,),) = self.primary.ask("SELECT pg_current_wal_insert_lsn()")
        wait_for(
            lambda: self.replica.ask(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")
            == [(True,)],
            "the standby has caught up",
        )

    def promote(self) -> None:
        """Make the standby a primary of its own, which it stays."""
        assert self.replica.ask("SELECT pg_promote()") == [(True,)]


@contextlib.contextmanager
def mariadb_pair(folder: Path) -> Iterator[MariaDBPair]:
    """Run them until the block ends; the replica takes writes.

    :param folder: where their logs are left
    """
    logs = folder / "replica"
    logs.mkdir()
    with (
        servers.mariadb(folder, server_id=1) as primary,
        servers.mariadb(logs, server_id=2) as replica,
    ):
        replica.ask("SET sql_log_bin = 0", "CREATE DATABASE IF NOT EXISTS mysql", _POSITIONS)
        pair = MariaDBPair(primary, replica)
        pair.replicate()
        yield pair


@contextlib.contextmanager
def postgresql_pair(folder: Path) -> Iterator[PostgreSQLPair]:
    """Run them until the block ends.

    :param folder: where their logs are left
    """
    logs = folder / "replica"
    logs.mkdir()
    with (
        servers.postgresql(folder, replicated=True) as primary,
        servers.postgresql(logs, standby_of=primary) as standby,
    ):
        yield PostgreSQLPair(primary, standby)
