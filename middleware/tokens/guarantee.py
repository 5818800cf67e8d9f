"""Looks whether a database can answer from the past, where that can be seen.

The token cache is exact if a transaction that begins after a commit has returned sees what was
committed. SQLite, MariaDB, MySQL and PostgreSQL do, asked at the server that was written to. A
replica, or another node of a Galera cluster without causality checks, may not.
"""

from __future__ import annotations

import logging
from typing import Any

LOG = logging.getLogger(__name__)

# The bit of wsrep_sync_wait that makes reads wait for what other nodes have committed (MariaDB
# Galera documentation, wsrep_sync_wait).
_SYNC_READS = 1


def doubts(dialect: str, cursor: Any) -> list[str]:
    """Return what speaks against the database's being asked for the present, in words.

    :param dialect: SQLAlchemy's name of it
    :param cursor: of a new connection, set up as Keystone's are
    """
    if dialect in ("mysql", "mariadb"):
        cursor.execute("SHOW VARIABLES LIKE 'wsrep%'")
        values = {str(name): str(value) for name, value in cursor.fetchall()}
        waits = values.get("wsrep_sync_wait", "0")
        waiting = waits.isdigit() and int(waits) & _SYNC_READS
        if values.get("wsrep_on", "OFF").upper() in ("ON", "1") and not waiting:
            return [
                "the database is a Galera cluster and reads may be older than a commit at another "
                "node; set [database] mysql_wsrep_sync_wait = 1"
            ]
    elif dialect == "postgresql":
        cursor.execute("SELECT pg_is_in_recovery()")
        if cursor.fetchone()[0]:
            return ["the database is a standby server; [database] connection must be the primary"]
    return []


def replica_doubts(conf: Any) -> list[str]:
    """Return what in Keystone's configuration sends reads elsewhere than writes."""
    if getattr(conf.database, "slave_connection", None):
        return [
            "[database] slave_connection is set and a replica may be behind; remove it, or the "
            "cache may keep an answer from before a change until its ttl ends"
        ]
    return []


def warn(found: list[str]) -> None:
    """Log doubts, one line each."""
    for doubt in found:
        LOG.warning("token_cache cannot promise exact answers: %s", doubt)


class FirstConnection:
    """Looks at the first connection that each process makes; a listener for ``connect``."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._looked = False

    def __call__(self, connection: Any, record: Any) -> None:
        """Look, once."""
        if self._looked:
            return
        self._looked = True
        try:
            cursor = connection.cursor()
            try:
                warn(doubts(self._dialect, cursor))
            finally:
                cursor.close()
        except Exception as error:
            LOG.warning(
                "token_cache could not find out whether the database answers for the present: %s",
                type(error).__name__,
            )
