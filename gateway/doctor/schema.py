"""Asks the database for its indexes, its clock, and whether it is behind another one."""

from __future__ import annotations

import importlib
import queue
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .found import Found
from .readers.files import Unread

# Seconds for connecting, for each answer, and for all together.
_ANSWER, _ALL = 5, 20
# How often the time is asked for.
_CLOCKS = 3
# Transactions that a node of Galera may have to apply yet; from 16 on it holds up all the others.
_QUEUE = 10


@dataclass
class Schema:
    """The facts that the database gives about itself.

    :param missing_indexes: tables with the columns that have no index; ``None`` if Keystone's
        models could not be loaded
    :param replica: a sentence if it is a replica; else empty
    :param lag: the seconds by which it is behind; ``None`` if it does not say
    :param galera: the fault of a node of Galera, in words; empty without one, or if it is no node
    :param ahead: seconds by which this machine's clock is ahead of the database's; ``None`` for one
        on this machine
    :param unknown: the reason for which it cannot be told whether it is a replica; else empty
    """

    missing_indexes: list[tuple[str, tuple[str, ...]]] | None = field(default_factory=list)
    replica: str = ""
    lag: float | None = None
    galera: str = ""
    ahead: float | None = None
    host: str = ""
    unknown: str = ""


def look(found: Found, *, patience: float = _ALL) -> Schema | None:
    """Ask the database; ``None`` if it cannot be asked, which is noted without its URL.

    Nothing is changed: a file of SQLite is opened for reading, and one that is not there is not
    made.

    :param patience: seconds after which it is given up, whatever its driver waits for
    """
    conf = found.keystone
    url = conf.text("database", "connection") if conf else ""
    if not url:
        return None
    try:
        import sqlalchemy  # noqa: F401
    except ImportError:
        found.unread.append(Unread("the database", "SQLAlchemy is not installed here"))
        return None
    made: queue.SimpleQueue[Schema | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            made.put(_asked(found, url))
        # What a driver raises is its own, and may name the password.
        except Exception as error:
            made.put(error)

    answer: Schema | Exception | None
    # Filters of warnings are this process's: a thread that is lost would put them back at any time.
    with warnings.catch_warnings(action="ignore"):
        # Of a driver that waits for ever only a thread is lost.
        threading.Thread(target=ask, name="doctor-database", daemon=True).start()
        try:
            # Not by join(): Keystone's models bring eventlet, which imports a second threading, and
            # the thread in which that happens is never seen to end.
            answer = made.get(timeout=patience)
        except queue.Empty:
            answer = None
    if isinstance(answer, Schema):
        return answer
    kind = f"no answer within {patience:g} s" if answer is None else type(answer).__name__
    found.unread.append(
        Unread("the database", f"it cannot be asked ({kind}): is it up, and may this user connect?")
    )
    return None


def _asked(found: Found, url: str) -> Schema:
    import sqlalchemy

    plain = sqlalchemy.engine.make_url(url).difference_update_query(["plugin"])
    plain, arguments = _for_reading(found, plain)
    engine = sqlalchemy.create_engine(
        plain, poolclass=sqlalchemy.pool.NullPool, connect_args=arguments
    )
    schema = Schema(host=plain.host or "")
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            _postgresql(connection, schema)
        elif engine.dialect.name == "mysql":
            _mysql(connection, schema)
        schema.missing_indexes = _missing(sqlalchemy.inspect(connection), found)
    return schema


def _for_reading(found: Found, url: Any) -> tuple[Any, dict[str, Any]]:
    """Return a URL and its driver's arguments that change nothing, and wait for no longer."""
    kind, driver = url.get_backend_name(), url.get_driver_name()
    if kind == "sqlite":
        if not url.database or url.database == ":memory:":
            raise FileNotFoundError
        real = found.files.resolved(url.database)
        # One with a log of writes is in use, and read with it; another is read as it is.
        how = "mode=ro" if Path(f"{real}-wal").exists() else "immutable=1"
        query = {"mode": "ro", "uri": "true", **dict([how.split("=")])}
        return url.set(database=f"file:{quote(str(real))}", query=query), {"timeout": _ANSWER}
    if kind == "mysql" and driver in ("pymysql", "mysqldb"):
        waits = ("connect_timeout", "read_timeout", "write_timeout")
        return url, dict.fromkeys(waits, _ANSWER)
    if kind == "postgresql" and driver in ("psycopg2", "psycopg"):
        return url, {
            "connect_timeout": _ANSWER,
            "options": f"-c statement_timeout={_ANSWER * 1000} -c default_transaction_read_only=on",
        }
    return url, {}


def _ahead(connection: Any, statement: str) -> float:
    """Return by how many seconds this clock is ahead of what a statement gives, since 1970.

    By the quickest answer: by one that was long on its way it may be off by half of that.
    """
    import sqlalchemy

    told = []
    for _ in range(_CLOCKS):
        begun = time.time()
        theirs = float(connection.execute(sqlalchemy.text(statement)).scalar())
        ended = time.time()
        told.append((ended - begun, (begun + ended) / 2 - theirs))
    return min(told)[1]


def _postgresql(connection: Any, schema: Schema) -> None:
    import sqlalchemy

    schema.ahead = _ahead(connection, "SELECT EXTRACT(EPOCH FROM clock_timestamp())")
    if connection.execute(sqlalchemy.text("SELECT pg_is_in_recovery()")).scalar():
        schema.replica = "the database is a standby (pg_is_in_recovery)"
        late = "SELECT EXTRACT(EPOCH FROM clock_timestamp() - pg_last_xact_replay_timestamp())"
        lag = connection.execute(sqlalchemy.text(late)).scalar()
        schema.lag = None if lag is None else float(lag)


def _mysql(connection: Any, schema: Schema) -> None:
    import sqlalchemy

    schema.ahead = _ahead(connection, "SELECT UNIX_TIMESTAMP(NOW(6))")
    read_only = connection.execute(sqlalchemy.text("SELECT @@global.read_only")).scalar()
    rows, schema.unknown = _replication(connection)
    running = [row for row in rows if "Yes" in (_runs(row, "IO"), _runs(row, "SQL"))]
    if rows and (running or read_only in (1, "1", "ON")):
        schema.replica = "the database is a replica (SHOW REPLICA STATUS)"
        behind = [
            row.get("seconds_behind_master", row.get("seconds_behind_source")) for row in rows
        ]
        known = [float(x) for x in behind if x is not None]
        schema.lag = max(known, default=None)
    elif read_only in (1, "1", "ON"):
        schema.replica = "the database is read-only, as replicas are"
    status = {
        str(name).lower(): str(value)
        for name, value in connection.execute(
            sqlalchemy.text("SHOW GLOBAL STATUS LIKE 'wsrep\\_%'")
        )
    }
    schema.galera = galera(status)


def _runs(row: dict[str, Any], thread: str) -> str:
    kind = thread.lower()
    found = str(row.get(f"slave_{kind}_running", row.get(f"replica_{kind}_running", "No")))
    return "Yes" if found in ("Yes", "Connecting", "Preparing") else found


def _replication(connection: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a replica's status, and why it cannot be asked; empty if it can."""
    import sqlalchemy

    for statement in ("SHOW ALL SLAVES STATUS", "SHOW REPLICA STATUS", "SHOW SLAVE STATUS"):
        try:
            rows = connection.execute(sqlalchemy.text(statement)).mappings().all()
        except sqlalchemy.exc.DBAPIError as error:
            if (getattr(error.orig, "args", None) or [0])[0] in (1227, 1044, 1045, 1142):
                return [], (
                    "whether the database is a replica: its user lacks SLAVE MONITOR or "
                    "REPLICATION CLIENT"
                )
            connection.rollback()
            continue
        return [{str(key).lower(): value for key, value in row.items()} for row in rows], ""
    return [], "whether the database is a replica: it knows no SHOW REPLICA STATUS"


def galera(status: dict[str, str]) -> str:
    """Return the fault of a node of Galera, by its status; empty if it has none."""
    state = status.get("wsrep_local_state_comment", "")
    if (
        not status.get("wsrep_cluster_size", "0").isdigit()
        or status.get("wsrep_cluster_size", "0") == "0"
    ):
        return ""
    cluster = status.get("wsrep_cluster_status", "Primary")
    if cluster != "Primary":
        return f"the node of Galera is in a part without the majority ({cluster})"
    if state != "Synced":
        return f"the node of Galera is {state or 'in no state'}, not Synced"
    queue = status.get("wsrep_local_recv_queue", "0")
    if queue.isdigit() and int(queue) > _QUEUE:
        return f"{queue} transactions of other nodes wait to be applied on this node of Galera"
    return ""


def _missing(inspector: Any, found: Found) -> list[tuple[str, tuple[str, ...]]] | None:
    """Return the columns of Keystone's models that lead no index in the database."""
    try:
        import keystone
        from keystone.common import sql

        for path in sorted(Path(keystone.__file__).parent.glob("*/*backends/sql*.py")):
            names = path.relative_to(Path(keystone.__file__).parents[1]).with_suffix("").parts
            importlib.import_module(".".join(names))
        metadata = sql.ModelBase.metadata
    # Whatever keeps Keystone's models from loading: the schema is not to blame.
    except Exception as error:
        found.unread.append(
            Unread(
                "indexes of the database", f"Keystone's models do not load ({type(error).__name__})"
            )
        )
        return None
    missing = []
    there = set(inspector.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in there:
            continue
        known = [tuple(x["column_names"]) for x in inspector.get_indexes(table.name)]
        known += [tuple(x["column_names"]) for x in inspector.get_unique_constraints(table.name)]
        known.append(tuple(inspector.get_pk_constraint(table.name)["constrained_columns"]))
        for index in sorted(table.indexes, key=lambda x: str(x.name)):
            columns = tuple(column.name for column in index.columns)
            if not any(x[: len(columns)] == columns for x in known):
                missing.append((table.name, columns))
    return missing
