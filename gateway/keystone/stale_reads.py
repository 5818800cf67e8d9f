"""Checks of the database connections that requests are given: may they answer from the past?

The token cache is exact if a transaction that begins after a commit has returned sees what was
committed. With SQLite, MariaDB, MySQL and PostgreSQL it does, on the server that was written to. On
a replica, on another node of a cluster without causality checks, or through a proxy that asks one
of them, it may not. Answers over such a connection are given to their request, and kept nowhere.

A server can be made a replica while it is connected to. So a connection is asked again after each
change: all changes up to the last one were made before, and if the server takes writes now, it was
the one that took them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from keyfront.middleware.tokens.coordinator.mark_owners import greeting
from keyfront.middleware.tokens.request import current

if TYPE_CHECKING:
    from sqlalchemy import Dialect

LOG = logging.getLogger(__name__)

# The bit of wsrep_sync_wait that makes reads wait for what other nodes have committed (MariaDB
# Galera documentation, wsrep_sync_wait).
_SYNC_READS = 1

# Levels of MySQL's group_replication_consistency at which a read waits for what other members have
# committed, and those at which a new primary first applies what the old one has (MySQL manual,
# "Configuring Transaction Consistency Guarantees").
_WAITS_AT_READS = frozenset({"BEFORE", "BEFORE_AND_AFTER"})
_WAITS_AT_FAILOVER = frozenset({"BEFORE_ON_PRIMARY_FAILOVER", "AFTER"})

# The variables that MariaDB and MySQL are asked for, as far as a server has them.
_VARIABLES = (
    *("read_only", "super_read_only", "innodb_read_only"),
    *("gtid_slave_pos", "gtid_current_pos"),
    *("wsrep_on", "wsrep_sync_wait"),
    *("group_replication_group_name", "group_replication_consistency"),
    "group_replication_single_primary_mode",
)

# The number of servers whose changes it applies, and of nodes of its Galera cluster.
_STATUS = ("slaves_running", "wsrep_cluster_size")
_SHOW_VARIABLES, _SHOW_STATUS = (
    f"SHOW {what} WHERE Variable_name IN ({', '.join(repr(name) for name in names)})"
    for what, names in (("VARIABLES", _VARIABLES), ("GLOBAL STATUS", _STATUS))
)

# Seconds after which a connection that is doubted is asked again even without a change.
_AGAIN_SECONDS = 5.0

# In the info dictionary of a database connection.
_VERDICT, _KNOWN = "keyfront.verdict", "keyfront.variables"


class Doubt(NamedTuple):
    """The reason for which a connection may answer from the past, and the remedy."""

    reason: str
    #: True if it is known that it may; else it could not be found out.
    certain: bool


class Connections:
    """A listener to ``checkout`` that checks an engine's connections when requests are given them.

    :param dialect: the engine's dialect
    :param bounded: true if an operator has set the seconds by which the database may be behind, so
        that doubts which are not certain do not count
    """

    def __init__(self, dialect: Dialect, *, bounded: bool = False) -> None:
        self._look = _LOOKS.get(dialect.name, _other)
        self._is_disconnect = dialect.is_disconnect
        self._bounded = bounded
        self._said: set[str] = set()

    def __call__(self, connection: Any, record: Any, proxy: Any) -> None:
        """Note in the present request if answers over ``connection`` must not be kept."""
        request = current.get()
        if request is None or request.unvouched:
            return
        since = request.since
        if since is None:
            return  # nothing is kept of it
        found: tuple[object, float, Doubt | None] | None = record.info.get(_VERDICT)
        if found is None or found[0] != since or (found[2] and time.monotonic() > found[1]):
            found = since, time.monotonic() + _AGAIN_SECONDS, self._judge(connection, record.info)
            record.info[_VERDICT] = found
        if found[2] is not None:
            request.unvouched = True

    def _judge(self, connection: Any, info: dict[str, Any]) -> Doubt | None:
        try:
            cursor = connection.cursor()
            try:
                doubt = self._look(connection, cursor, info)
            finally:
                cursor.close()
            connection.rollback()  # the request gets it in no transaction
        except Exception as error:
            if self._is_disconnect(error, connection, None):  # type: ignore[arg-type]
                return _ENDED
            doubt = Doubt(
                f"it could not be asked whether it is a replica ({type(error).__name__})", False
            )
        if doubt is None or (self._bounded and not doubt.certain):
            return None
        if doubt.reason not in self._said:
            self._said.add(doubt.reason)
            LOG.warning("token_cache keeps nothing of what this database says: %s", doubt.reason)
        return doubt


def mysql_doubt(
    connection_id: tuple[object, object], variables: Mapping[str, str]
) -> Doubt | None:
    """Return the reason for which a MariaDB or MySQL may answer from the past, if there is one.

    :param connection_id: the connection's number in the greeting, and from the server that answers
    :param variables: the values of :data:`_VARIABLES` and :data:`_STATUS`, as far as it has them
    """
    if _on(variables, "wsrep_on"):
        waits = variables.get("wsrep_sync_wait", "0")
        alone = variables.get("wsrep_cluster_size") == "1"
        if not alone and not (waits.isdigit() and int(waits) & _SYNC_READS):
            return Doubt(
                "it is a node of a Galera cluster, and reads may be older than a commit at another "
                "node; set [database] mysql_wsrep_sync_wait = 1",
                True,
            )
        return _REPLICATES if _on(variables, "slaves_running") else None
    reads_only = any(
        _on(variables, name) for name in ("read_only", "super_read_only", "innodb_read_only")
    )
    if variables.get("group_replication_group_name"):
        level = variables.get("group_replication_consistency", "EVENTUAL").upper()
        alone = _on(variables, "group_replication_single_primary_mode") and not reads_only
        if level not in _WAITS_AT_READS and not (alone and level in _WAITS_AT_FAILOVER):
            return Doubt(
                "it is a member of a replication group, and reads may be older than a commit at "
                f"another member; group_replication_consistency is {level}: set it to BEFORE, or, "
                "where [database] connection leads to the only primary, to "
                "BEFORE_ON_PRIMARY_FAILOVER",
                True,
            )
    elif reads_only:
        return Doubt(
            "it takes no writes (read_only), so it is a replica that may be behind; [database] "
            "connection must lead to the primary",
            True,
        )
    if connection_id[0] != connection_id[1]:
        return _PROXY
    position = variables.get("gtid_slave_pos", "")
    # A server that was promoted has written something of its own since.
    own = position != variables.get("gtid_current_pos")
    if _on(variables, "slaves_running") or (position and not own):
        return _REPLICATES
    return None


def postgresql_doubt(process: tuple[object, object], reads_only: str) -> Doubt | None:
    """Return the reason for which a PostgreSQL may answer from the past, if there is one.

    :param process: the number of the server process in the greeting, and from the one that answers
    :param reads_only: the setting ``transaction_read_only``, which on a standby is always ``on``
    """
    if reads_only != "off":
        return Doubt(
            "it is a standby server, or takes no writes; [database] connection must lead to the "
            "primary",
            True,
        )
    return _PROXY if process[0] != process[1] else None


# No fault: Keystone will be given another connection.
_ENDED = Doubt("the connection has ended", False)
_REPLICATES = Doubt(
    "it takes writes and replicates from another server, so it may be behind; [database] "
    "connection must lead to the primary (a replica that was promoted has to forget the old one: "
    "RESET SLAVE ALL), or settle in [keyfront_token_cache] must say for how many seconds",
    False,
)
_PROXY = Doubt(
    "a proxy stands in between that may ask a replica; let [database] connection lead to the "
    "primary itself, or by a proxy of plain TCP, or set settle in [keyfront_token_cache] to the "
    "seconds that a replica may be behind",
    False,
)


def _mysql(connection: Any, cursor: Any, info: dict[str, Any]) -> Doubt | None:
    known = info.get(_KNOWN)
    if known is None:
        # A name that a server does not have is an error in the statement below.
        cursor.execute(_SHOW_VARIABLES)
        known = info[_KNOWN] = tuple(str(name).lower() for name, _ in cursor.fetchall())
    # A proxy that divides reads from writes sends it where it sends what Keystone asks. This one
    # asks by SELECT as Keystone does, and not for the number alone, which ProxySQL says itself.
    columns = "".join(f", @@{name}" for name in known)
    cursor.execute(f"SELECT CONNECTION_ID(){columns}")
    number, *values = cursor.fetchone()
    variables = {
        name: str(value) for name, value in zip(known, values, strict=True) if value is not None
    }
    greeted = greeting(connection)
    identity = None if greeted is None else greeted % 2**32, int(number) % 2**32
    if "gtid_slave_pos" in known:  # a MariaDB: MySQL tells only those who administrate it
        cursor.execute(_SHOW_STATUS)
        variables |= {str(name).lower(): str(value) for name, value in cursor.fetchall()}
    return mysql_doubt(identity, variables)


def _postgresql(connection: Any, cursor: Any, info: dict[str, Any]) -> Doubt | None:
    # Of functions that pgpool sends where it sends reads: pg_is_in_recovery() would go to the
    # primary.
    cursor.execute("SELECT pg_backend_pid(), current_setting('transaction_read_only')")
    number, reads_only = cursor.fetchone()
    return postgresql_doubt((greeting(connection), number), reads_only)


def _other(connection: Any, cursor: Any, info: dict[str, Any]) -> Doubt | None:
    return Doubt("it is not known of this kind of database whether it can be a replica", False)


def _on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "OFF").upper() not in ("OFF", "0")


_LOOKS: Mapping[str, Callable[[Any, Any, dict[str, Any]], Doubt | None]] = {
    "mysql": _mysql,
    "mariadb": _mysql,
    "postgresql": _postgresql,
}
