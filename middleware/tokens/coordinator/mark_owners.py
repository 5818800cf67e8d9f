"""Who marked a change, and whether what he was about to commit is over.

A mark may be taken away from a writer only when his commit cannot become visible any more. One
that was killed may have sent it: the server may be waiting for a standby, and show it later. So a
mark names the process and the database session, and is taken away when neither is there any more.

An owner is text: ``NODE:PID:START SESSION#CHANGE``. The node is this boot and set of process
numbers, the start tells two processes of one number apart. The session is ``SERVER/NUMBER``, with
a digest of what tells the server, ``-`` where the process itself commits (SQLite), or ``?`` where
it is not known, as behind a proxy. The change is a number in the process, which alone knows
whether it is still at it: the answer to a mark may be lost. Without a process it is that of a
writer whose commit failed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyfront.common.process import started

LOG = logging.getLogger(__name__)

#: Seconds after which the commit of a session that cannot be looked for is taken for over.
UNKNOWN_SECONDS = 300.0

#: Sessions: the process commits by itself; it is not known.
HERE, UNKNOWN = "-", "?"

# Seconds between questions to the database about the same.
_ASK_SECONDS = 1.0

# The number of the connection, as the driver has it of the server's greeting, and as the server has
# it now; what tells the server. By its user, as others' sessions may be hidden from him.
_MYSQL_SESSION = "SELECT CONNECTION_ID(), @@hostname, @@port, @@server_id, CURRENT_USER()"
_POSTGRESQL_SESSION = (
    "SELECT pg_backend_pid(), extract(epoch FROM pg_postmaster_start_time()), "
    "current_setting('port')"
)
_MYSQL_LOOK = "SELECT COUNT(*) FROM information_schema.processlist WHERE id = %s"
_POSTGRESQL_LOOK = "SELECT COUNT(*) FROM pg_stat_activity WHERE pid = %s"
_SESSIONS = {
    "mysql": _MYSQL_SESSION,
    "mariadb": _MYSQL_SESSION,
    "postgresql": _POSTGRESQL_SESSION,
}


@functools.cache
def _node(pid: int) -> str:
    """Return the name of this boot and set of process numbers."""
    found = ""
    with suppress(OSError):
        found += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        found += os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(found.encode(), digest_size=6).hexdigest()


def _start(pid: int) -> str | None:
    """Return when a process began, in ticks since boot; ``None`` if there is none."""
    began = started(pid)
    return None if began is None else str(began)


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> str:
    return f"{_node(pid)}:{pid}:{_start(pid) or 0}"


def process() -> str:
    """Return the name of this process."""
    return _process(os.getpid())


#: The owners of the changes that this process is at.
under_way: set[str] = set()
_changes = itertools.count(1)


def owner(session: str) -> str:
    """Return this process as the owner of one more change, in a session."""
    return f"{process()} {session}#{next(_changes)}"


def left(session: str) -> str:
    """Return the owner of a commit that failed, or that is over without a word."""
    return f" {session}"


def lives(name: str) -> bool | None:
    """Whether a process lives; ``None`` of one of another node.

    :param name: as :func:`process` had it there
    """
    node, _, rest = name.partition(":")
    pid, _, start = rest.partition(":")
    if not name:
        return False
    if node != _node(os.getpid()) or not pid.isdigit():
        return None
    return _start(int(pid)) == start


def greeting(connection: Any) -> int | None:
    """Return the number of a connection that the server sent when it was made."""
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

    :param dialect: SQLAlchemy's name of it
    :param connection: of the driver, in no transaction; one is begun
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


def _row(connection: Any, statement: str, *values: Any) -> tuple[Any, ...]:
    cursor = connection.cursor()
    try:
        cursor.execute(statement, values or None)
        return tuple(cursor.fetchone())
    finally:
        cursor.close()


class Settled:
    """Tells of marks whether their commits are over; for all threads of a process."""

    def __init__(self) -> None:
        #: Make a new connection each to the database, with SQLAlchemy's name of its dialect.
        self.connections: list[tuple[str, Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._asked = -_ASK_SECONDS
        self._told = ""

    def __call__(self, owner: str, age: float) -> bool:
        """Whether the commit of ``owner`` is over, who marked it ``age`` seconds ago."""
        name, _, session = owner.partition(" ")
        session = session.partition("#")[0]
        alive = lives(name)
        if alive:
            # He will say it himself; but for what he was never told to have marked.
            return name == process() and owner not in under_way
        if not owner or (alive is False and session == HERE):
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread is just asking
        try:
            if time.monotonic() - self._asked < _ASK_SECONDS:
                return False
            there = self._is_there(session)
            self._asked = time.monotonic()
        finally:
            self._lock.release()
        if there is None and age > UNKNOWN_SECONDS:
            LOG.warning(
                "a change is taken for complete after %.0f s: its writer died, and whether the "
                "database still has its session cannot be found out", age,
            )  # fmt: skip
            return True
        if there is not False and owner != self._told:
            self._told = owner
            LOG.warning(
                "a writer died in its commit, and its database session %s; until that is over, "
                "what it changes is asked of Keystone each time",
                "goes on" if there else "cannot be looked for",
            )
        return there is False

    def _is_there(self, session: str) -> bool | None:
        """Whether the database has a session; ``None`` if that cannot be found out."""
        server, _, number = session.partition("/")
        if not number.isdigit():
            return None
        for dialect, connect in self.connections:
            with suppress(Exception):  # of whatever driver
                connection = connect()
                try:
                    if session_of(dialect, connection).partition("/")[0] == server:
                        look = _POSTGRESQL_LOOK if dialect == "postgresql" else _MYSQL_LOOK
                        return bool(_row(connection, look, int(number))[0])
                finally:
                    connection.close()
        return None
