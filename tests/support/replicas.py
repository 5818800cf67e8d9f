"""Two database servers, of which the second can be held in the past."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg2
import pymysql
import pytest

from support import programs, servers
from support.programs import own_folder
from support.served import PATIENCE, free_port, wait_for

# Of these one is made by mariadb-install-db, which takes many seconds.
_POSITIONS = """\
CREATE TABLE mysql.gtid_slave_pos (
  domain_id INT UNSIGNED NOT NULL, sub_id BIGINT UNSIGNED NOT NULL,
  server_id INT UNSIGNED NOT NULL, seq_no BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (domain_id, sub_id)
) ENGINE=InnoDB"""

# Run by a node of a Galera cluster that joins, and by one that has what it lacks. They began with
# the same data, and the changes since go by other ways.
_TRANSFER = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        --role) role=$2 ;;
        --gtid) gtid=$2 ;;
    esac
    shift
done
if [ "$role" = donor ]; then
    echo "done $gtid"
else
    echo "ready 127.0.0.1"
    echo {begin}
fi
"""


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

    def cut(self) -> None:
        """End the primary's connections to Keystone."""
        _cut(self.primary)

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


def _cut(server: servers.MariaDB) -> None:
    def sessions() -> set[int]:
        return {row["Id"] for row in server.ask("SHOW PROCESSLIST") if row["db"] == "keystone"}

    # It says so before they have ended, and one may do so by itself meanwhile.
    cut = sessions()
    for session in cut:
        with contextlib.suppress(pymysql.err.OperationalError):
            server.ask(f"KILL {session}")
    wait_for(lambda: not cut & sessions(), "they have ended")


@dataclass(frozen=True)
class GaleraPair:
    """Two nodes of a Galera cluster; :func:`galera_pair` starts them."""

    primary: servers.MariaDB
    replica: servers.MariaDB
    _holder: pymysql.Connection

    def hold(self) -> None:
        """Have the second node apply nothing more, while it says to all others that it will."""
        with self._holder.cursor() as cursor:
            cursor.execute("FLUSH TABLES WITH READ LOCK")

    def let_go(self) -> None:
        """Have it apply everything, and wait for that."""
        with self._holder.cursor() as cursor:
            cursor.execute("UNLOCK TABLES")
        wanted = int(_galera(self.primary, "wsrep_last_committed"))
        wait_for(
            lambda: int(_galera(self.replica, "wsrep_last_committed")) >= wanted,
            "the second node has caught up",
        )

    def cut(self) -> None:
        """End the first node's connections to Keystone."""
        _cut(self.primary)


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

    def cut(self) -> None:
        """End the primary's connections to Keystone."""
        self.primary.ask(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = 'keystone'"
        )

    def promote(self) -> None:
        """Make the standby a primary of its own, which it stays."""
        assert self.replica.ask("SELECT pg_promote()") == [(True,)]


@dataclass(frozen=True)
class LogicalPair(PostgreSQLPair):
    """The same, when the standby has become a primary that subscribes to the first one.

    It takes writes, and shows those of the first one when it has applied them.
    """

    _moments: Iterator[int] = field(default_factory=itertools.count)

    def follow(self) -> None:
        """Begin, with what is there by now."""
        self.primary.ask("CREATE TABLE moments (moment integer PRIMARY KEY)", _KEYSTONE)
        PostgreSQLPair.let_go(self)
        self.promote()
        self.primary.ask("CREATE PUBLICATION keyfront FOR ALL TABLES", _KEYSTONE)
        where = f"host={self.primary.folder} user=keystone dbname={_KEYSTONE}"
        self.replica.ask(
            f"CREATE SUBSCRIPTION keyfront CONNECTION '{where}' PUBLICATION keyfront"
            " WITH (copy_data = false)",
            _KEYSTONE,
        )
        self.let_go()

    def hold(self) -> None:
        """Have the subscriber apply nothing more."""
        self.replica.ask("ALTER SUBSCRIPTION keyfront DISABLE", _KEYSTONE)
        wait_for(
            lambda: self.replica.ask("SELECT pid FROM pg_stat_subscription WHERE pid > 0") == [],
            "the subscriber applies nothing",
        )

    def let_go(self) -> None:
        """Have it apply everything, and wait for that."""
        self.replica.ask("ALTER SUBSCRIPTION keyfront ENABLE", _KEYSTONE)
        moment = next(self._moments)
        self.primary.ask(f"INSERT INTO moments VALUES ({moment})", _KEYSTONE)
        wait_for(
            lambda: self.replica.ask(f"SELECT 1 FROM moments WHERE moment = {moment}", _KEYSTONE)
            != [],
            "the subscriber has caught up",
        )


_KEYSTONE = "keystone"


@contextlib.contextmanager
def logical_pair(folder: Path) -> Iterator[LogicalPair]:
    """Run them until the block ends; it begins with :meth:`LogicalPair.follow`.

    :param folder: where their logs are left
    """
    with postgresql_pair(folder) as pair:
        yield LogicalPair(pair.primary, pair.replica)


@contextlib.contextmanager
def mariadb_pair(folder: Path) -> Iterator[MariaDBPair]:
    """Run them until the block ends; the replica takes writes.

    :param folder: where their logs are left
    """
    logs = folder / "replica"
    logs.mkdir()
    both = {"log-bin": "binlog", "relay-log": "relay", "binlog-format": "ROW"}
    with (
        servers.mariadb(folder, port=free_port(), more={**both, "server-id": 1}) as primary,
        servers.mariadb(logs, port=free_port(), more={**both, "server-id": 2}) as replica,
    ):
        replica.ask("SET sql_log_bin = 0", _POSITIONS)
        pair = MariaDBPair(primary, replica)
        pair.replicate()
        yield pair


@contextlib.contextmanager
def galera_pair(folder: Path) -> Iterator[GaleraPair]:
    """Run them until the block ends; they begin alike.

    :param folder: where their logs are left
    """
    logs = folder / "second"
    logs.mkdir()
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(own_folder("galera"))
        ports = [free_port() for _ in range(6)]
        first, second = galera_options(ports[:3]), galera_options(ports[3:])
        seed = own / "seed"
        with servers.mariadb(folder, more=first) as node:
            node.ask("SHUTDOWN")
            wait_for(lambda: not (node.socket.parent / "pid").exists(), "it is shut down")
            shutil.copytree(node.socket.parent / "data", seed)
        lines = (seed / "grastate.dat").read_text().splitlines()
        found = {name: value.strip() for name, _, value in (x.partition(":") for x in lines)}
        script = own / "wsrep_sst_nothing"
        script.write_text(_TRANSFER.format(begin=f"{found['uuid']}:{found['seqno']}"))
        script.chmod(0o755)
        environment = {"PATH": f"{own}:{os.environ.get('PATH', os.defpath)}"}
        second["wsrep-cluster-address"] = f"gcomm://127.0.0.1:{ports[0]}"
        nodes = []
        for place, more, port in ((folder, first, ports[2]), (logs, second, ports[5])):
            node = stack.enter_context(
                servers.mariadb(place, port=port, more=more, seed=seed, environment=environment)
            )
            wait_for(lambda node=node: _galera(node, "wsrep_ready") == "ON", "the node is ready")
            nodes.append(node)
        assert _galera(nodes[0], "wsrep_cluster_size") == "2"
        yield GaleraPair(*nodes, stack.enter_context(contextlib.closing(nodes[1]._connect())))


def galera_options(ports: Sequence[int]) -> dict[str, object]:
    """The options of a MariaDB that begins a Galera cluster; skips the test if there is none.

    :param ports: two free ones; a third is where clients find it
    """
    provider = next(Path("/usr/lib").glob("**/libgalera_smm.so"), None)
    if provider is None:
        pytest.skip("Galera is not installed; on Debian: apt-get install galera-4")
    clients = {"wsrep-node-incoming-address": f"127.0.0.1:{ports[2]}"} if ports[2:] else {}
    return {
        **clients,
        "binlog-format": "ROW",
        "innodb-autoinc-lock-mode": 2,
        "wsrep-on": "ON",
        "wsrep-provider": provider,
        "wsrep-cluster-address": "gcomm://",
        "wsrep-node-address": f"127.0.0.1:{ports[0]}",
        "wsrep-sst-method": "nothing",
        "wsrep-provider-options": f"gmcast.listen_addr=tcp://127.0.0.1:{ports[0]};"
        f"ist.recv_addr=127.0.0.1:{ports[1]};gcache.size=8M",
    }


def _galera(node: servers.MariaDB, name: str) -> str:
    (row,) = node.ask(f"SHOW GLOBAL STATUS LIKE '{name}'")
    return str(row["Value"])


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


@contextlib.contextmanager
def pgpool(pair: PostgreSQLPair) -> Iterator[str]:
    """Run a pgpool until the block ends that sends reads to the standby; yields its URL."""
    program = programs.program("pgpool", "pgpool2")
    with own_folder("pgpool") as own:
        port, log = free_port(), own / "log"
        options = {
            "backend_clustering_mode": "streaming_replication",
            "listen_addresses": "",
            "port": port,
            "socket_dir": own,
            "unix_socket_directories": own,  # the same since 4.4
            "logdir": own,
            "pcp_listen_addresses": "",
            "pcp_port": free_port(),
            "pcp_socket_dir": own,
            "pid_file_name": own / "pid",
            "sr_check_user": "keystone",
            "num_init_children": 4,
        }
        for number, (server, weight) in enumerate(((pair.primary, 0), (pair.replica, 1))):
            options[f"backend_hostname{number}"] = server.folder
            options[f"backend_port{number}"] = 5432
            options[f"backend_weight{number}"] = weight
        files = {"-f": own / "pgpool.conf", "-F": own / "pcp.conf", "-a": own / "pool_hba.conf"}
        for file in files.values():
            file.touch()
        files["-f"].write_text("".join(f"{name} = '{x}'\n" for name, x in options.items()))
        command = [str(program), "-n", *(str(x) for option in files.items() for x in option)]
        with programs.running(command, log, signal.SIGINT) as process:

            def look() -> None:
                where = f"host={own} port={port} user=keystone dbname=postgres"
                psycopg2.connect(where).close()

            programs.ready(look, process, log, (psycopg2.Error,))
            yield f"postgresql+psycopg2://keystone@/postgres?host={own}&port={port}"
