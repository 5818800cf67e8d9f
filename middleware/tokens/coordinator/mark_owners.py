"""The owners of marks: which writer marked a change, and whether his commit is over.

A mark may be taken away from a writer only when his commit cannot become visible any more. A writer
that was killed may have sent it: the server may be waiting for a standby, and show it later. So a
mark names the process and the database session, and is taken away when neither is there any more.
A session that is in no transaction counts as gone: the server keeps one for hours whose machine was
lost, and it was in the transaction when the mark was made.

An owner is text: ``PROCESS SESSION#CHANGE``. The process is named as in ``common/process.py``. The
session is ``SERVER/NUMBER``, with a digest of the server's identity; ``-`` where the process itself
commits (SQLite), whose commit is over when nobody writes; ``xid/NUMBER``, a transaction of
PostgreSQL that was sent through a proxy; or ``?`` where nothing is known, as behind other proxies.
The change is a number in the process, which alone knows whether it is still working on it: the
answer to a mark may be lost. An owner without a process is that of a writer whose commit failed.

A new table may have taken the place of one that was lost with all its marks. So it begins with a
mark of everything, whose owner is ``new GENERATION``: that mark is over when all transactions have
ended that were under way when the database was first asked after that.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keyfront.common.process import name_of, named_lives

from ..epochs import MARK_SECONDS

LOG = logging.getLogger(__name__)

#: Default for the seconds after which a commit is taken for over, where the database answers but
#: cannot tell.
COMMIT_TIMEOUT = 300.0

#: Sessions: the process commits by itself; the session is not known.
HERE, UNKNOWN = "-", "?"

#: A word in place of a server: the number is that of a transaction of PostgreSQL, whatever its
#: session.
TRANSACTION = "xid"

# A member of a set of sessions: some of them may be in no transaction, and wait for ever.
_ENDLESS = "endless"

# In place of a process: the mark with which a table begins.
_NEW = "new"

# Seconds between questions to the database, and to a cluster of which one node did not answer: a
# request waits for each.
_ASK_SECONDS = 1.0
_CUT_OFF_SECONDS = 20.0

#: Seconds for which a transaction that has written may wait for its client in MariaDB, which then
#: ends it: after that time none is left that wrote before a table was begun.
IDLE_SECONDS = 30

# Seconds for which a COMMIT may be on its way to MySQL or MariaDB, which does not tell whether a
# session that waits for a statement is in a transaction; its times are rounded to seconds.
_ARRIVAL_SECONDS = 2

# The connection's number as the server has it now, to be compared with that of its greeting, and
# the server's identity. With the user, as others' sessions may be hidden from him.
_MYSQL_SESSION = "SELECT CONNECTION_ID(), @@hostname, @@port, @@server_id, CURRENT_USER()"
_POSTGRESQL_SESSION = (
    "SELECT pg_backend_pid(), extract(epoch FROM pg_postmaster_start_time()), "
    "current_setting('port')"
)
_MYSQL_LOOK = "SELECT command, time FROM information_schema.processlist WHERE id = %s"
# The state of others' sessions is not shown; then it counts.
_POSTGRESQL_LOOK = """\
SELECT COUNT(*) FROM pg_stat_activity
WHERE pid = %s AND (state IS DISTINCT FROM 'idle' OR xact_start IS NOT NULL)"""
# A standby may have applied what its primary does not show yet, and knows of nobody who writes.
_POSTGRESQL_TRANSACTION = "SELECT pg_is_in_recovery(), txid_status(%s)"
# The sessions that write, visible to every user: a transaction that writes has a number, and is a
# lock, until others see its commit.
_POSTGRESQL_WRITERS = """\
SELECT pg_is_in_recovery(), ARRAY(
    SELECT l.pid || ' ' || l.transactionid FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
    AND a.datname = current_database() AND l.pid <> pg_backend_pid()
)"""
# Sessions whose statement began before so many seconds; other users' only with the right PROCESS.
_MYSQL_WRITERS = """\
SELECT id FROM information_schema.processlist
WHERE db = DATABASE() AND command <> 'Sleep' AND id <> CONNECTION_ID() AND time + %s >= %s"""
# Sessions that have waited for their client for longer, in a transaction or in none.
_MYSQL_IDLE = """\
SELECT id FROM information_schema.processlist
WHERE db = DATABASE() AND command = 'Sleep' AND id <> CONNECTION_ID() AND time + %s >= %s"""
# All transactions, and whether each writes to this database; only with that right. InnoDB makes a
# new list when nobody has asked for 0.1 seconds, and else returns the former one: it is new if this
# connection's own transaction is in it, which has just begun.
_MYSQL_BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT"
_MYSQL_TRANSACTIONS = """\
SELECT CONCAT(trx_mysql_thread_id, ' ', trx_id), trx_mysql_thread_id = CONNECTION_ID(),
    trx_rows_modified > 0 AND trx_mysql_thread_id IN (
        SELECT id FROM information_schema.processlist
        WHERE db = DATABASE() AND id <> CONNECTION_ID()
    )
FROM information_schema.innodb_trx"""
_MARIADB_IDLE_SECONDS = "SELECT @@idle_write_transaction_timeout"
_MARIADB_BOUND = """\
SET SESSION idle_write_transaction_timeout = IF(
    @@idle_write_transaction_timeout BETWEEN 1 AND {0}, @@idle_write_transaction_timeout, {0}
)"""
# Queries with a row where other servers take writes of the same database.
_GALERA = "SHOW STATUS WHERE variable_name = 'wsrep_cluster_size' AND value > 1"
_MYSQL_OTHERS = (
    "SHOW VARIABLES WHERE variable_name = 'group_replication_single_primary_mode' "
    "AND value = 'OFF'"
)
# The facts of a node of a Galera cluster: its identity, the other nodes, and the cluster it sees.
_GALERA_NODE = """\
SHOW STATUS WHERE variable_name IN (
    'wsrep_gcomm_uuid', 'wsrep_incoming_addresses', 'wsrep_cluster_size', 'wsrep_cluster_status',
    'wsrep_cluster_state_uuid', 'wsrep_cluster_conf_id'
)"""
_GALERA_SAME = ("wsrep_cluster_status", "wsrep_cluster_state_uuid", "wsrep_cluster_conf_id")
_SESSIONS = {
    "mysql": _MYSQL_SESSION,
    "mariadb": _MYSQL_SESSION,
    "postgresql": _POSTGRESQL_SESSION,
}


#: The owners of the changes that this process is making.
under_way: set[str] = set()
#: Those of its changes whose commits failed, and may still come about while their sessions last;
#: the coordinator was away when it should have been told of that.
given_up: set[str] = set()
_changes = itertools.count(1)


def owner(session: str) -> str:
    """Return a new owner: this process, a session and the number of one more change.

    :param session: the database session, as :func:`session_of` returns it
    """
    return f"{name_of(os.getpid())} {session}#{next(_changes)}"


def left(session: str) -> str:
    """Return the owner of a commit that failed, in a session that may still be committing it."""
    return f" {session}"


def beginning(generation: int | str) -> str:
    """Return the owner of the mark with which the table of a generation begins.

    :param generation: the generation, as a number or in hexadecimal
    """
    return f"{_NEW} {generation:x}" if isinstance(generation, int) else f"{_NEW} {generation}"


def begins(name: str) -> bool:
    """Return whether an owner is that of the mark with which a table begins."""
    return name.startswith(f"{_NEW} ")


def greeting(connection: Any) -> int | None:
    """Return the number that the server gave a connection in its greeting; ``None`` if unknown.

    :param connection: a DBAPI connection of PyMySQL, mysqlclient, MySQL Connector/Python, psycopg2
        or psycopg
    """
    looks: tuple[Callable[[], Any], ...] = (
        lambda: connection.thread_id(),  # PyMySQL, mysqlclient
        lambda: connection.info.backend_pid,  # psycopg2, psycopg
        lambda: connection.connection_id,  # MySQL Connector/Python
    )
    for look in looks:
        try:
            return int(look())
        except (AttributeError, TypeError):
            continue
    return None


def session_of(dialect: str, connection: Any) -> str:
    """Return the session of a database connection, as the server knows it.

    :param dialect: SQLAlchemy's name of the database's dialect
    :param connection: the DBAPI connection, in no transaction; one is begun
    :returns: ``SERVER/NUMBER``; :data:`UNKNOWN` through a proxy or if the server cannot be asked
    """
    try:
        number, *server = _row(connection, _SESSIONS[dialect])
        greeted = greeting(connection)
        if greeted is None or int(number) % 2**32 != greeted % 2**32:
            return UNKNOWN  # of a proxy
    except Exception as error:  # of whatever driver
        LOG.debug("the session of a database connection is not known: %s", type(error).__name__)
        return UNKNOWN
    digest = hashlib.blake2b(repr(list(map(str, server))).encode(), digest_size=6).hexdigest()
    return f"{digest}/{number}"


def transaction_of(dialect: str, connection: Any) -> str:
    """Return the session of a single transaction, where that of its connection is not known.

    :param dialect: SQLAlchemy's name of the database's dialect
    :param connection: the DBAPI connection, in a transaction that has written
    :returns: ``xid/NUMBER`` with PostgreSQL; else :data:`UNKNOWN`
    """
    if dialect != "postgresql":
        return UNKNOWN
    try:
        return f"{TRANSACTION}/{int(_row(connection, 'SELECT txid_current()')[0])}"
    except Exception as error:  # of whatever driver; the commit will fail as well
        LOG.debug("a database transaction is not known: %s", type(error).__name__)
        return UNKNOWN


def _do(connection: Any, statement: str) -> None:
    cursor = connection.cursor()
    try:
        cursor.execute(statement)
    finally:
        cursor.close()


def _rows(connection: Any, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    try:
        cursor.execute(statement, values or None)
        return [tuple(row) for row in cursor.fetchall()]
    finally:
        cursor.close()


def _row(connection: Any, statement: str, *values: Any) -> tuple[Any, ...]:
    (row,) = _rows(connection, statement, *values)
    return row


def _is_written_to(connection: Any) -> bool:
    """Return whether somebody writes to a SQLite database, who may have marked a change."""
    connection.isolation_level = None
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("BEGIN IMMEDIATE")
    except Exception as error:  # of whatever driver
        if "locked" in str(error) or "busy" in str(error):
            return True
        raise
    connection.execute("ROLLBACK")
    return False


def _session_is_there(dialect: str, connection: Any, session: str) -> bool | None:
    """Return whether a server has a session; ``None`` if it cannot tell."""
    server, _, number = session.partition("/")
    if dialect == "sqlite":
        return _is_written_to(connection) if session == HERE else None
    if not number.isdigit():
        return None
    if server == TRANSACTION:
        if dialect != "postgresql":
            return None
        behind, status = _row(connection, _POSTGRESQL_TRANSACTION, int(number))
        return None if behind else status == "in progress"
    if session_of(dialect, connection).partition("/")[0] != server:
        return None
    if dialect == "postgresql":
        return bool(_row(connection, _POSTGRESQL_LOOK, int(number))[0])
    return _is_in_transaction(connection, int(number))


def _is_in_transaction(connection: Any, number: int) -> bool:
    """Return whether MySQL or MariaDB has a session, which is in a transaction or may be.

    :param connection: a DBAPI connection, in no transaction
    :param number: the session's number
    """
    for command, seconds in _rows(connection, _MYSQL_LOOK, number):
        if command != "Sleep":
            return True
        listed = _transactions(connection)
        if listed is not None:
            return any(name.startswith(f"{number} ") for name, _, _ in listed)
        # Without the right: MariaDB ends who waits for his client in a transaction for longer.
        return float(seconds) < _idle_seconds(connection) + _ARRIVAL_SECONDS
    return False


# Sessions that may have been writing since before a time, by server and by the list they are in.
_Writers = dict[str, set[str]]


def _writers(
    dialect: str, connection: Any, age: float, connect: Callable[..., Any]
) -> _Writers | None:
    """Return the sessions that may have been writing since before a time; ``None``: unknown.

    :param dialect: SQLAlchemy's name of the database's dialect
    :param connection: a DBAPI connection of its own, in no transaction
    :param age: seconds since that time
    :param connect: the function that connects to another server of a cluster, by host and port
    """
    if dialect == "sqlite":
        return {"": {HERE} if _is_written_to(connection) else set()}
    if dialect == "postgresql":
        behind, found = _row(connection, _POSTGRESQL_WRITERS)
        # A standby that is asked in place of its primary says nothing; by itself it has no writers.
        behind = behind and session_of(dialect, connection) == UNKNOWN
        return None if behind else {"": set(found)}
    if dialect not in ("mysql", "mariadb") or session_of(dialect, connection) == UNKNOWN:
        return None
    if age < _ARRIVAL_SECONDS:
        return {"": {UNKNOWN}}
    if _rows(connection, _GALERA):
        return _writers_of_cluster(connection, age, connect)
    found = _writers_here(connection, age)
    return None if not any(found.values()) and _rows(connection, _MYSQL_OTHERS) else found


def _writers_of_cluster(
    connection: Any, age: float, connect: Callable[..., Any]
) -> _Writers | None:
    """Return the same for all nodes of a Galera cluster; ``None`` if one cannot be asked.

    A writer is in a session of one of them. A node shows what was certified elsewhere to whoever
    waits for it, and no other node keeps anything.
    """
    here = _galera_node(connection)
    found: _Writers = {}
    nodes = set()
    try:
        for address in here["wsrep_incoming_addresses"].split(","):
            host, _, port = address.rpartition(":")
            other = connect(host.strip("[]"), int(port))
            try:
                node = _galera_node(other)
                writers = _writers_here(other, age)
            finally:
                other.close()
            if any(node[name] != here[name] for name in _GALERA_SAME):
                return None
            nodes.add(node["wsrep_gcomm_uuid"])
            for way, those in writers.items():
                found[f"{node['wsrep_gcomm_uuid']} {way}"] = those
    except Exception as error:  # of whatever driver
        LOG.debug("a node of the cluster cannot be asked: %s", type(error).__name__)
        return None
    whole = here["wsrep_cluster_status"] == "Primary"
    return found if whole and len(nodes) == int(here["wsrep_cluster_size"]) else None


def _galera_node(connection: Any) -> dict[str, str]:
    return {str(row[0]).lower(): str(row[1]) for row in _rows(connection, _GALERA_NODE)}


def _transactions(connection: Any) -> list[tuple[Any, ...]] | None:
    """Return the rows of :data:`_MYSQL_TRANSACTIONS`; ``None`` without the right, or of before.

    The list may stay an older one for as long as anybody keeps asking.
    """
    with suppress(Exception):
        _do(connection, _MYSQL_BEGIN)
        listed = _rows(connection, _MYSQL_TRANSACTIONS)
        if any(own for _, own, _ in listed):
            return listed
    return None


def _idle_seconds(connection: Any) -> float:
    """Return the seconds that a transaction which has written may wait for its client."""
    try:
        _row(connection, _MARIADB_IDLE_SECONDS)
    except Exception:  # MySQL
        return math.inf
    return IDLE_SECONDS


def _writers_here(connection: Any, age: float) -> _Writers:
    listed = _transactions(connection)
    if listed is not None:
        writers = _of_sessions(connection, _MYSQL_WRITERS, _ARRIVAL_SECONDS, age)
        writers.update(str(name) for name, _, writes in listed if writes)
        return {"transactions": writers}
    return {"sessions": _sessions_at_it(connection, age)}


def _sessions_at_it(connection: Any, age: float) -> set[str]:
    """Return the sessions that may be in a transaction which has written since before a time.

    This is for users to whom MySQL or MariaDB shows no transactions, or an older list of them. Of a
    session that waits for its client only the time can be seen that it has waited, and MariaDB
    bounds that time for transactions that have written.

    :param connection: a DBAPI connection
    :param age: seconds since that time
    """
    bound = _idle_seconds(connection) + _ARRIVAL_SECONDS
    # A commit may have been sent after that time, by whoever had waited until then.
    late = min(bound, age)
    writers = _of_sessions(connection, _MYSQL_WRITERS, late, age)
    if age <= bound:
        writers |= _of_sessions(connection, _MYSQL_IDLE, _ARRIVAL_SECONDS, age)
    return writers | {_ENDLESS} if writers and bound == math.inf else writers


def _of_sessions(connection: Any, statement: str, *values: Any) -> set[str]:
    return {str(row[0]) for row in _rows(connection, statement, *values)}


def bound_idleness(dialect: str, connection: Any) -> None:
    """Make the server end transactions that have written and wait long for their client.

    That is after :data:`IDLE_SECONDS`, and only MariaDB can. Without a right that few grant, a
    client that stands still before its commit cannot be told from one that is idle; so its
    transaction must not go on later than this.

    :param dialect: SQLAlchemy's name of the database's dialect
    :param connection: the DBAPI connection, to a server itself: a proxy that divides reads from
        writes may refuse statements after a SET that it does not know
    """
    if dialect in ("mysql", "mariadb"):
        with suppress(Exception):
            _do(connection, _MARIADB_BOUND.format(IDLE_SECONDS))


class Settled:
    """Tells whether the commits of marks are over; for all threads of a process."""

    def __init__(self) -> None:
        #: For each database SQLAlchemy's name of its dialect, and a function that makes a new
        #: DBAPI connection to it, or to another server of its cluster by a host and a port.
        self.connections: list[tuple[str, Callable[..., Any]]] = []
        #: Seconds after which a commit is taken for over if the database cannot tell.
        self.timeout = COMMIT_TIMEOUT
        self._lock = threading.Lock()
        self._asked = -_ASK_SECONDS
        # Monotonic times by owner: of the last call, and of the last question to the database.
        self._met: dict[str, tuple[float, float]] = {}
        self._told = ""
        # By database: sessions that may have been writing since before an owner's table was made.
        self._older: dict[int, tuple[str, _Writers]] = {}
        # By database: the monotonic time when a server of its cluster last did not answer.
        self._cut_off: dict[int, float] = {}

    def __call__(self, owner: str, age: float) -> bool:
        """Return whether the commit of ``owner`` is over, who marked it ``age`` seconds ago.

        It asks each database once a second at most, and returns false in between.
        """
        name, _, session = owner.partition(" ")
        session = session.partition("#")[0]
        if not begins(owner):
            alive = named_lives(name)
            if alive and (name != name_of(os.getpid()) or owner in under_way):
                return False  # it stamps the mark itself
            if alive and owner not in given_up:
                return True  # the answer to its mark or its stamp was lost
            if not owner or (alive is False and session == HERE):
                return True
        if not self.connections or not self._lock.acquire(blocking=False):
            return False  # others can, or another thread is just asking
        try:
            if not self._is_next(owner):
                return False
            there, why = self._is_there(owner, session, age)
            self._asked = time.monotonic()
        finally:
            self._lock.release()
        if there is None and age > self.timeout:
            LOG.warning(
                "a change is taken for complete after %.0f s ([keyfront_token_cache] "
                "commit_timeout): %s",
                *(age, why),
            )
            return True
        # A writer at the start is usual, and not logged.
        if there is not False and owner != self._told and (there is None or age >= MARK_SECONDS):
            self._told = owner
            LOG.warning(
                "%s; until %s, what %s is asked of Keystone each time",
                why,
                f"{self.timeout:g} s have passed" if there is None else "that is over",
                "it was asked before" if begins(owner) else "it changes",
            )
        if there is False:
            given_up.discard(owner)
        return there is False

    def _is_next(self, owner: str) -> bool:
        """Return whether it is an owner's turn to be asked about; no owner waits for another."""
        now = time.monotonic()
        asked = self._met.get(owner, (now, float("-inf")))[1]
        self._met[owner] = (now, asked)
        if now - self._asked < _ASK_SECONDS:
            return False
        recent = now - 3 * _ASK_SECONDS
        self._met = {one: times for one, times in self._met.items() if times[0] >= recent}
        if any(before < asked for _, before in self._met.values()):
            return False
        self._met[owner] = (now, now)
        return True

    def _is_there(self, owner: str, session: str, age: float) -> tuple[bool | None, str]:
        """Return whether a commit may still come, and a text for the log; ``None``: unknown."""
        new = begins(owner)
        found: list[bool | None] = []
        away = False
        for number, (dialect, connect) in enumerate(tuple(self.connections)):
            try:
                connection = connect()
                try:
                    if new:
                        there = self._is_written_since(
                            owner, number, dialect, connection, age, connect
                        )
                    else:
                        there = _session_is_there(dialect, connection, session)
                finally:
                    connection.close()
            except Exception as error:  # of whatever driver
                LOG.debug("a database could not be asked: %s", type(error).__name__)
                away = True
                continue
            found.append(there)
        # One server that knows a session is enough; that nobody writes, each must say.
        over = False in found and not (new and (away or None in found))
        if True in found:
            return True, _GO_ON if new else _DIED.format("goes on")
        if over:
            return False, ""
        return True if away else None, _NOT_KNOWN if new else _DIED.format("cannot be looked for")

    def _is_written_since(
        self, owner: str, number: int, dialect: str, connection: Any, age: float,
        connect: Callable[..., Any],
    ) -> bool | None:
        """Return whether somebody may have been writing since before the table was made."""

        asked = False

        def elsewhere(host: str, port: int) -> Any:
            nonlocal asked
            if time.monotonic() - self._cut_off.get(number, float("-inf")) < _CUT_OFF_SECONDS:
                raise ConnectionError("it did not answer a moment ago")
            asked = True
            return connect(host, port)

        found = _writers(dialect, connection, age, elsewhere)
        if found is None:
            if asked:
                self._cut_off[number] = time.monotonic()
            return None
        known, older = self._older.get(number, ("", {}))
        if known != owner:
            older = {}
        left = {way: those & older.get(way, those) for way, those in found.items()}
        if not any(UNKNOWN in those for those in left.values()):
            self._older[number] = (owner, {**older, **left})
        writers = set().union(*left.values())
        return None if _ENDLESS in writers and len(writers) > 1 else bool(writers - {_ENDLESS})


_DIED = "a writer died in its commit, and its database session {}"
_GO_ON = "transactions go on that began before the epoch table was made"
_NOT_KNOWN = "whether commits from before the epoch table was made are over cannot be found out"
