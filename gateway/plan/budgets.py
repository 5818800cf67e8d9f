"""What all processes of all nodes may take of a database, a directory and memcached."""

from __future__ import annotations

import math

from .numbers import Sheet, count
from .workload import Workload

#: The part of the database's connections that is planned for; the rest is for administrators,
#: backups, and processes that start before others have ended.
DATABASE_SHARE = 0.8


def put_budgets(sheet: Sheet, workload: Workload) -> None:
    """Pools of a process, and what they come to on all nodes."""
    _database(sheet, workload)
    _ldap(sheet, workload)
    _memcached(sheet, workload)


def fits(workload: Workload, processes: int, threads: int) -> bool:
    """Whether so many workers keep the budgets without overflow."""
    each = processes * threads * workload.nodes
    for given, connections in (
        (workload.database_connections and workload.database_connections * DATABASE_SHARE, each),
        (workload.ldap_connections, 2 * each),
        (workload.memcached_connections, each),
    ):
        if given is not None and connections > given:
            return False
    return True


def _everywhere(sheet: Sheet, workload: Workload) -> tuple[int, str]:
    """Processes on all nodes, and the words for it."""
    processes = sheet["uwsgi.processes"]
    return processes * workload.nodes, (
        f"{count(processes, 'process')} x {count(workload.nodes, 'node')}"
    )


def _database(sheet: Sheet, workload: Workload) -> None:
    everywhere, words = _everywhere(sheet, workload)
    threads = sheet["uwsgi.threads"]
    pool = sheet.put(
        "database.max_pool_size", threads, "connections a process",
        f"{count(threads, 'thread')}, each with one transaction at a time",
        "Fewer, and threads wait for each other's connection (30 s, then an error)",
    )
    given = workload.database_connections
    overflow, reason = threads, f"as many again as {count(threads, 'thread')}, opened when needed"
    usable = math.floor(given * DATABASE_SHARE) if given else None
    if usable is not None and (pool + overflow) * everywhere > usable:
        overflow = max(0, min(overflow, usable // everywhere - pool))
        reason = f"what {DATABASE_SHARE:.0%} of {given} leave each of {words} beside the pool"
    sheet.put(
        "database.max_overflow", overflow, "connections a process", reason,
        "More, and the budget no longer holds: SQLAlchemy opens them all under load",
    )
    total = everywhere * (pool + overflow)
    bound = f", at most {usable} ({DATABASE_SHARE:.0%} of {given})" if usable is not None else ""
    sheet.put(
        "database.connections", total, "connections on all nodes",
        f"{words} x ({pool} + {overflow}){bound}",
        "Over max_connections (MariaDB's default 151, PostgreSQL's 100) requests fail with 500",
    )
    if usable is not None and total > usable:
        each = threads * workload.nodes
        sheet.refuse(
            "database.connections", total, usable,
            f"the database's max_connections must be at least {math.ceil(total / DATABASE_SHARE)}"
            + _or_processes(usable // each, sheet["uwsgi.processes"], workload.nodes),
        )


def _or_processes(fit: int, processes: int, nodes: int) -> str:
    if fit >= 1:
        return f", or uwsgi.processes at most {fit} a node instead of {processes}"
    return f", or there must be fewer than {nodes} nodes" if nodes > 1 else ""


def _ldap(sheet: Sheet, workload: Workload) -> None:
    everywhere, words = _everywhere(sheet, workload)
    threads = sheet["uwsgi.threads"]
    given = workload.ldap_connections
    each = f"{count(threads, 'thread')}, each with one at a time"
    pool = sheet.put(
        "ldap.pool_size", threads, "connections a process", each,
        "Fewer, and searches wait for each other (pool_size's default 10 is per process, too)",
    )
    auth = sheet.put(
        "ldap.auth_pool_size", threads, "connections a process", each,
        "Fewer, and logins wait for each other; its default 100 is a hundred in each process",
    )
    total = everywhere * (pool + auth)
    sheet.put(
        "ldap.connections", total, "connections on all nodes",
        f"{words} x ({pool} + {auth})" + (f", at most {given}" if given else ""),
        "Over the directory's limit it refuses connections, and logins end with 503",
    )
    if given is not None and total > given:
        sheet.refuse(
            "ldap.connections", total, given,
            f"the directory's limit must be at least {total}"
            + _or_processes(
                given // (2 * threads * workload.nodes), sheet["uwsgi.processes"], workload.nodes
            ),
        )


def _memcached(sheet: Sheet, workload: Workload) -> None:
    everywhere, words = _everywhere(sheet, workload)
    threads = sheet["uwsgi.threads"]
    given = workload.memcached_connections
    pool = sheet.put(
        "memcached.pool_maxsize", threads, "connections a process",
        f"{count(threads, 'thread')}, each with one at a time",
        "Fewer, and threads wait for each other up to memcache_pool_connection_get_timeout (10 s)",
    )
    total = sheet.put(
        "memcached.connections", everywhere * pool, "connections on all nodes",
        f"{words} x {pool}" + (f", at most {given}" if given else ""),
        "Over memcached's -c (default 1024) new connections hang, and each lookup times out",
    )
    if given is not None and total > given:
        sheet.refuse(
            "memcached.connections", total, given,
            f"memcached's -c must be at least {total}"
            + _or_processes(
                given // (threads * workload.nodes), sheet["uwsgi.processes"], workload.nodes
            ),
        )
