"""Checks of the database (D): its URL in keystone.conf, its configuration, proxies before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from ..found import Found
from ..readers.keystone import KeystoneConf
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Setting


def _conf(found: Found) -> KeystoneConf:
    assert found.keystone is not None
    return found.keystone


def _url(found: Found) -> tuple[Setting, str, str, dict[str, list[str]]]:
    """Return the connection: the setting, its driver, its host, its parameters.

    :raises UnknownError: it is no URL
    """
    setting = _conf(found).last("database", "connection")
    assert setting is not None
    try:
        parts = urlsplit(setting.value)
        return setting, parts.scheme, parts.hostname or "", parse_qs(parts.query)
    except ValueError:
        raise UnknownError("[database] connection is no URL") from None


@check(
    "D01",
    WARNING,
    "keystone",
    "database",
    "mysql",
    holds="A Galera cluster's nodes answer with what was committed on the others",
    harm="Who has just got a role is refused by the next request, on another node.",
    source="oslo.db, mysql_wsrep_sync_wait; docs/tokens.md, replicas",
)
def galera(found: Found) -> Iterator[Finding]:
    """A node of Galera applies others' changes a moment later. wsrep_sync_wait = 1 makes a read
    wait for them. Where one node alone takes all reads and writes, nothing is needed."""
    assert found.mysql is not None
    wsrep = found.mysql.last("wsrep_on")
    address = found.mysql.last("wsrep_cluster_address")
    if not (wsrep and wsrep.on) or address is None or address.value in ("gcomm://", ""):
        return
    server = found.mysql.number("wsrep_sync_wait", default=0)
    if not server and not _conf(found).number("database", "mysql_wsrep_sync_wait", 0):
        single = (
            any("backup" in x.args for x in found.haproxy.all("server")) if found.haproxy else False
        )
        if not single:
            yield Finding(
                what="Galera without wsrep_sync_wait",
                where=(_conf(found).place("database", "connection"), address.place),
                lines=("[database]", "mysql_wsrep_sync_wait = 1"),
            )


@check(
    "D02",
    ERROR,
    "database",
    holds="No proxy sends Keystone's reads to a replica",
    harm="Revoked tokens go on being good, and what was just made is not found.",
    source="MaxScale, readwritesplit, causal_reads; ProxySQL, mysql_query_rules; docs/tokens.md",
)
def read_splitting(found: Found) -> Iterator[Finding]:
    """A replica answers from the past by as much as it lags."""
    for proxy in found.database_proxies:
        router = proxy.last("router")
        causal = proxy.last("causal_reads")
        if (
            router
            and router.value in ("readwritesplit", "readconnroute")
            and (causal is None or causal.value in ("none", "false"))
            and router.value == "readwritesplit"
        ):
            yield Finding(
                what="router = readwritesplit without causal_reads",
                where=(router.place,),
                lines=("causal_reads = global",),
            )
        for setting in proxy.settings:
            text = f"{setting.name} {setting.value}"
            match = re.search(r"match_(pattern|digest)\s*=\s*\"?\^SELECT(?!.*FOR UPDATE)", text)
            if match:
                yield Finding(
                    what=f"reads go to another hostgroup: {text}",
                    where=(setting.place,),
                    lines=("(no rule for ^SELECT of Keystone's user)",),
                )


@check(
    "D03",
    ERROR,
    "keystone",
    "database",
    holds="SQLite serves one node alone",
    harm="Nodes know nothing of each other's users, or the file on a share is damaged.",
    source="SQLite, How To Corrupt: network file systems",
)
def sqlite(found: Found) -> Iterator[Finding]:
    """keyfront serve and a single small node may use it."""
    setting, driver, _, _ = _url(found)
    if driver.startswith("sqlite") and found.told.nodes > 1:
        yield Finding(
            what=f"SQLite with {found.told.nodes} nodes",
            where=(setting.place,),
            lines=("[database]", "connection = mysql+pymysql://keystone:PASSWORD@HOST/keystone"),
        )


@check(
    "D04",
    ERROR,
    "keystone",
    "database",
    "mysql",
    holds="Keystone gives connections back before the database closes them",
    harm="After a quiet hour the first requests fail with 500: MySQL server has gone away.",
    source="oslo.db, connection_recycle_time 3600; MariaDB, wait_timeout 28800",
)
def recycle(found: Found) -> Iterator[Finding]:
    """A pool's connection that the server closed is found dead by the request that takes it."""
    assert found.mysql is not None
    conf = _conf(found)
    recycle_time = conf.number("database", "connection_recycle_time", 3600)
    known = found.mysql.last("wait_timeout")
    if known is not None and known.number is not None and recycle_time >= known.number:
        yield Finding(
            what=f"connection_recycle_time {recycle_time} is not below wait_timeout {known.number}",
            where=(conf.place("database", "connection_recycle_time"), known.place),
            lines=("[database]", f"connection_recycle_time = {max(1, known.number // 2)}"),
        )


def _takes_anybody(name: str, values: list[str]) -> bool:
    """Return whether a parameter of a URL has any certificate taken, or TLS left out."""
    value = values[-1].lower()
    if name == "sslmode":
        return value in ("disable", "allow", "prefer", "require")
    if name == "ssl_disabled":
        return value in ("true", "1")
    return name == "ssl_verify_cert" and value in ("false", "0", "no", "none")


@check(
    "D05",
    INFO,
    "keystone",
    "database",
    holds="What goes to a database on another machine is encrypted",
    harm="Who listens between them reads password hashes and the database's password.",
    source="PyMySQL, ssl_ca; libpq, sslmode",
)
def encrypted(found: Found) -> Iterator[Finding]:
    """ssl_ca for PyMySQL, sslmode=verify-full for PostgreSQL, whose require takes any certificate.
    Within a network of the cloud's own it may be left out on purpose; what is asked for and not
    verified is a warning."""
    setting, driver, host, query = _url(found)
    local = host in ("", "localhost", "127.0.0.1", "::1")
    anybody = next((x for x in query.items() if _takes_anybody(*x)), None)
    if anybody == ("sslmode", ["require"]) and "sslrootcert" in query:
        anybody = None  # libpq verifies where it is told of an authority
    if anybody is not None and not local:
        name = anybody[0]
        right = "verify-full" if name == "sslmode" else "true"
        yield Finding(
            what=f"{driver} to {host} with {name}={anybody[1][-1]}: whoever answers is taken "
            "for it",
            where=(setting.place,),
            lines=("[database]", f"connection = (as it is, with {name}={right})"),
            level=WARNING,
            harm="Who stands between them reads password hashes and the database's password.",
        )
        return
    known = {"ssl_ca", "ssl", "sslmode", "ssl_verify_cert", "read_default_file", "charset_ssl"}
    if not driver.startswith("sqlite") and not local and not known & set(query):
        option = (
            "sslmode=verify-full"
            if driver.startswith("postgresql")
            else "ssl_ca=/etc/ssl/certs/db.pem"
        )
        yield Finding(
            what=f"{driver} to {host} without TLS",
            where=(setting.place,),
            lines=("[database]", f"connection = (as it is){'&' if query else '?'}{option}"),
        )


@check(
    "D06",
    WARNING,
    "keystone",
    "database",
    holds="The database's driver is one that threads and green threads can wait in",
    harm="A worker that waits for the database stands still as a whole.",
    source="oslo.db: mysql+pymysql; mysql:// alone is MySQLdb, in C",
)
def driver(found: Found) -> Iterator[Finding]:
    """mysql:// is SQLAlchemy's MySQLdb, which is in C and mostly not installed."""
    setting, name, _, _ = _url(found)
    if name in ("mysql", "mysql+mysqldb", "postgres"):
        right = "mysql+pymysql" if name.startswith("mysql") else "postgresql+psycopg2"
        yield Finding(
            what=f"{name}://",
            where=(setting.place,),
            lines=("[database]", f"connection = {right}://(as it is)"),
        )


@check(
    "D07",
    WARNING,
    "keystone",
    "database",
    holds="Keystone waits seconds, not minutes, for a connection of its pool",
    harm="Requests wait for ever behind a database that is away, with all threads.",
    source="oslo.db, max_retries, pool_timeout; kolla-ansible has max_retries = -1",
)
def pool_timeout(found: Found) -> Iterator[Finding]:
    """pool_timeout is 30 s by default."""
    conf = _conf(found)
    known = conf.last("database", "pool_timeout")
    if known is not None and known.number is not None and known.number > 60:
        yield Finding(
            what=f"pool_timeout = {known.number}",
            where=(known.place,),
            lines=("[database]", "pool_timeout = 30"),
        )


@check(
    "D08",
    WARNING,
    "schema",
    holds="The database has the indexes of this Keystone",
    harm="What is looked up by these columns alone reads the whole table, slower with each row.",
    source="keystone's own models; the migrations of 30.0.0 leave ix_system_actor_id out, which "
    "matters where a user or group with a role in the system is deleted",
)
def indexes(found: Found) -> Iterator[Finding]:
    """Compared with the models of the Keystone that is installed here, by --live."""
    assert found.schema is not None
    if found.schema.missing_indexes is None:
        raise UnknownError("Keystone's models: run this with the Python that has Keystone")
    for table, columns in found.schema.missing_indexes:
        yield Finding(
            what=f"{table} has no index of ({', '.join(columns)})",
            lines=(
                f"CREATE INDEX ix_{table}_{'_'.join(columns)}",
                f"    ON {table} ({', '.join(columns)});",
            ),
        )


@check(
    "D09",
    ERROR,
    "schema",
    holds="The database that answers is not behind another",
    harm="Revoked tokens go on being good, and what was just made is not found.",
    source="MariaDB, SHOW REPLICA STATUS, Seconds_Behind_Master; Galera, wsrep_local_state; "
    "PostgreSQL, pg_is_in_recovery(), pg_last_xact_replay_timestamp(); docs/tokens.md",
)
def replica(found: Found) -> Iterator[Finding]:
    """Keystone writes, so it has to be led to the primary. MariaDB tells a user of a replica only
    with the right SLAVE MONITOR or REPLICATION CLIENT; without it read_only is what is left. A
    node of Galera that is not Synced, or has a long queue, answers from the past."""
    schema = found.schema
    assert schema is not None
    if schema.replica:
        late = f", {schema.lag:.0f} s behind" if schema.lag is not None else ""
        yield Finding(
            what=f"{schema.replica}{late}",
            lines=("[database]", "connection = (of the primary)"),
            file=found.keystone.path if found.keystone else "",
        )
    if schema.galera:
        yield Finding(what=schema.galera, lines=("SHOW GLOBAL STATUS LIKE 'wsrep%';",))
    if not schema.replica and not schema.galera and schema.unknown:
        raise UnknownError(schema.unknown)
