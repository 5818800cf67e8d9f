"""The budgets: connections of all nodes' processes to database, directory and memcached."""

from __future__ import annotations

import math

from .reasons import Numbers, count
from .workload import Workload

# The part of the database's connections that is planned for; the rest is for administrators,
# backups, and processes that start before others have ended.
_DATABASE_SHARE = 0.8


def put_budgets(numbers: Numbers, workload: Workload) -> None:
    """Add the pools of a process and their connections on all nodes."""
    _database(numbers, workload)
    _ldap(numbers, workload)
    _memcached(numbers, workload)


def fits(workload: Workload, processes: int, threads: int) -> bool:
    """Return whether so many workers a node keep the budgets without overflow.

    :param processes: the worker processes of a node, at least 1
    :param threads: the threads of each, at least 1
    """
    each = processes * threads * workload.nodes
    for given, connections in (
        (workload.database_connections and workload.database_connections * _DATABASE_SHARE, each),
        (workload.ldap_connections, 2 * each),
        (workload.memcached_connections, each),
    ):
        if given is not None and connections > given:
            return False
    return True


def _everywhere(numbers: Numbers, workload: Workload) -> tuple[int, str]:
    """Return the number of processes on all nodes, and the words for it."""
    processes = numbers["uwsgi.processes"]
    return processes * workload.nodes, (
        f"{count(processes, 'process')} x {count(workload.nodes, 'node')}"
    )


def _database(numbers: Numbers, workload: Workload) -> None:
    everywhere, words = _everywhere(numbers, workload)
    threads = numbers["uwsgi.threads"]
    pool = numbers.put(
        "database.max_pool_size", threads, "connections a process",
        f"{count(threads, 'thread')}, each with one transaction at a time",
        "Fewer, and threads wait for each other's connection (30 s, then an error)",
    )
    given = workload.database_connections
    overflow, reason = threads, f"as many again as {count(threads, 'thread')}, opened when needed"
    usable = math.floor(given * _DATABASE_SHARE) if given else None
    if usable is not None and (pool + overflow) * everywhere > usable:
        overflow = max(0, min(overflow, usable // everywhere - pool))
        reason = f"what {_DATABASE_SHARE:.0%} of {given} leave each of {words} beside the pool"
    numbers.put(
        "database.max_overflow", overflow, "connections a process", reason,
        "More, and the budget no longer holds: SQLAlchemy opens them all under load",
    )
    total = everywhere * (pool + overflow)
    bound = f", at most {usable} ({_DATABASE_SHARE:.0%} of {given})" if usable is not None else ""
    numbers.put(
        "database.connections", total, "connections on all nodes",
        f"{words} x ({pool} + {overflow}){bound}",
        "Over max_connections (MariaDB's default 151, PostgreSQL's 100) requests fail with 500",
    )
    if usable is not None and total > usable:
        each = threads * workload.nodes
        numbers.refuse(
            "database.connections", total, usable,
            f"the database's max_connections must be at least {math.ceil(total / _DATABASE_SHARE)}"
            + _or_processes(usable // each, numbers["uwsgi.processes"], workload.nodes),
        )


def _or_processes(fit: int, processes: int, nodes: int) -> str:
    if fit >= 1:
        return f", or uwsgi.processes at most {fit} a node instead of {processes}"
    return f", or there must be fewer than {nodes} nodes" if nodes > 1 else ""


def _ldap(numbers: Numbers, workload: Workload) -> None:
    everywhere, words = _everywhere(numbers, workload)
    threads = numbers["uwsgi.threads"]
    given = workload.ldap_connections
    each = f"{count(threads, 'thread')}, each with one at a time"
    pool = numbers.put(
        "ldap.pool_size", threads, "connections a process", each,
        "Fewer, and searches wait for each other (pool_size's default 10 is per process, too)",
    )
    auth = numbers.put(
        "ldap.auth_pool_size", threads, "connections a process", each,
        "Fewer, and logins wait for each other; its default 100 is a hundred in each process",
    )
    total = everywhere * (pool + auth)
    numbers.put(
        "ldap.connections", total, "connections on all nodes",
        f"{words} x ({pool} + {auth})" + (f", at most {given}" if given else ""),
        "Over the directory's limit it refuses connections, and logins end with 503",
    )
    if given is not None and total > given:
        numbers.refuse(
            "ldap.connections", total, given,
            f"the directory's limit must be at least {total}"
            + _or_processes(
                given // (2 * threads * workload.nodes), numbers["uwsgi.processes"], workload.nodes
            ),
        )


def _memcached(numbers: Numbers, workload: Workload) -> None:
    everywhere, words = _everywhere(numbers, workload)
    threads = numbers["uwsgi.threads"]
    given = workload.memcached_connections
    pool = numbers.put(
        "memcached.pool_maxsize", threads, "connections a process",
        f"{count(threads, 'thread')}, each with one at a time",
        "Fewer, and threads wait for each other up to memcache_pool_connection_get_timeout (10 s)",
    )
    total = numbers.put(
        "memcached.connections", everywhere * pool, "connections on all nodes",
        f"{words} x {pool}" + (f", at most {given}" if given else ""),
        "Over memcached's -c (default 1024) new connections hang, and each lookup times out",
    )
    if given is not None and total > given:
        numbers.refuse(
            "memcached.connections", total, given,
            f"memcached's -c must be at least {total}"
            + _or_processes(
                given // (threads * workload.nodes), numbers["uwsgi.processes"], workload.nodes
            ),
        )
