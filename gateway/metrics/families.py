"""The metrics of a node: the one list of their names, from which docs/metrics.md is made."""

from __future__ import annotations

from typing import NamedTuple

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Family(NamedTuple):
    """A metric.

    :param name: with its unit at the end; a counter's sample adds ``_total``
    :param kind: :data:`COUNTER`, :data:`GAUGE` or :data:`HISTOGRAM`
    :param text: what it tells
    :param labels: names of its labels, each with its values in words
    :param source: the part that counts it, one of :data:`SOURCES`
    """

    name: str
    kind: str
    text: str
    source: str
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def sample(self) -> str:
        """The name of its samples."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name


#: The parts that count, with where.
SOURCES = {
    "metrics": "the process that tells them",
    "node": "all processes of the server (KEYFRONT_NODE)",
    "tokens": "all processes that share the token cache",
    "ldap": "all processes with an LDAP pool (KEYFRONT_NODE)",
    "heartbeat": "all processes of this machine with a heartbeat, other services' included",
}

_POOL = (("pool", "search, auth"),)

FAMILIES = (
    Family(
        "keyfront_source_up", GAUGE,
        "1 if the counts of a part could be read, else 0; a part that is not in use has none",
        "metrics", (("source", "node, tokens, ldap, heartbeat"),),
    ),
    Family("keyfront_workers", GAUGE, "processes that serve", "node"),
    Family(
        "keyfront_worker_memory_bytes", GAUGE,
        "resident memory of the processes that serve, shared pages counted in each", "node",
        (("statistic", "sum, max"),),
    ),
    Family("keyfront_workers_started", COUNTER, "processes that began to serve", "node"),
    Family(
        "keyfront_workers_outgrown", COUNTER,
        "workers replaced as they had grown beyond KEYFRONT_RELOAD_ON_RSS", "node",
    ),
    Family(
        "keyfront_application_loaded_timestamp_seconds", GAUGE,
        "when the newest process that serves began to, since 1970: it changes with each reload",
        "node",
    ),
    Family("keyfront_draining", GAUGE, "1 while the node is draining, else 0", "node"),
    Family(
        "keyfront_part_ok", GAUGE,
        "1 if a part that Keystone needs was there when a worker last asked it, for /readyz and "
        "within the last minute; else 0", "node", (("part", "database, directory, redis, keys"),),
    ),
    Family("keyfront_requests", COUNTER, "requests, but for /livez and /readyz", "node"),
    Family("keyfront_requests_in_progress", GAUGE, "requests that have not ended", "node"),
    Family(
        "keyfront_requests_shed", COUNTER,
        "requests refused with 503, as they had waited longer than KEYFRONT_QUEUE_TIMEOUT", "node",
    ),
    Family(
        "keyfront_queue_seconds", HISTOGRAM,
        "how long requests waited for a worker, those included that were refused for it; none "
        "without KEYFRONT_QUEUE_TIMEOUT", "node",
    ),
    Family(
        "keyfront_token_cache_requests", COUNTER,
        "requests by what the token cache did with them", "tokens",
        (("result", "the counts of keyfront tokens stats: hits, node_hits, misses, bypassed, …"),),
    ),
    Family(
        "keyfront_token_cache_ended", COUNTER,
        "misses whose answer had been kept, by what had ended it", "tokens",
        (("cause", "time, rows, all, and the families of tables of keyfront tokens stats"),),
    ),
    Family(
        "keyfront_token_cache_directory_changes", COUNTER,
        "changes that directories told of which are followed", "tokens",
    ),
    Family(
        "keyfront_token_cache_changes", COUNTER, "committed changes that made answers stale",
        "tokens",
    ),
    Family(
        "keyfront_token_cache_changes_under_way", GAUGE, "changes that are being committed",
        "tokens",
    ),
    Family(
        "keyfront_token_cache_changes_recovered", COUNTER,
        "changes completed for processes that died over them", "tokens",
    ),
    Family(
        "keyfront_token_cache_changes_refused", COUNTER,
        "changes that the server's processes did not commit, as others could not be told of them",
        "tokens",
    ),
    Family(
        "keyfront_token_cache_flushes", COUNTER, "times that all answers were made stale", "tokens"
    ),
    Family(
        "keyfront_token_cache_processes", GAUGE, "processes that share the cache", "tokens"
    ),
    Family(
        "keyfront_token_cache_bytes", GAUGE, "bytes taken of what the processes share", "tokens",
        (("kind", "answers, refusals"),),
    ),
    Family(
        "keyfront_token_cache_limit_bytes", GAUGE, "bytes that may be taken", "tokens",
        (("kind", "answers, refusals"),),
    ),
    Family("keyfront_ldap_processes", GAUGE, "processes with an LDAP pool", "ldap"),
    Family(
        "keyfront_ldap_servers", GAUGE,
        "servers as each process and pool sees them: 2 processes with 3 servers each make 6",
        "ldap", (("state", "up, down"),),
    ),
    Family(
        "keyfront_ldap_logins", COUNTER,
        "logins by their outcome: accepted, refused because of the user, or ended in an outage",
        "ldap", (("outcome", "accepted, refused, failed"),),
    ),
    Family("keyfront_ldap_binds", COUNTER, "BINDs of users that were sent", "ldap"),
    Family("keyfront_ldap_searches", COUNTER, "searches", "ldap"),
    Family(
        "keyfront_ldap_searches_retried", COUNTER,
        "searches sent again, as the connection was dead", "ldap",
    ),
    Family("keyfront_ldap_searches_failed", COUNTER, "searches that ended in an outage", "ldap"),
    Family(
        "keyfront_ldap_connections", GAUGE, "connections there are", "ldap",
        (*_POOL, ("state", "idle, lent, other (being opened or closed)")),
    ),
    Family("keyfront_ldap_connections_limit", GAUGE, "connections there may be", "ldap", _POOL),
    Family("keyfront_ldap_waiting", GAUGE, "requests that wait for a connection", "ldap", _POOL),
    Family("keyfront_ldap_checkouts", COUNTER, "connections asked for", "ldap", _POOL),
    Family(
        "keyfront_ldap_checkouts_queued", COUNTER, "of these, those that had to wait", "ldap", _POOL
    ),
    Family(
        "keyfront_ldap_checkouts_failed", COUNTER, "of these, those that got none", "ldap", _POOL
    ),
    Family("keyfront_ldap_wait_seconds", COUNTER, "seconds waited, in all", "ldap", _POOL),
    Family("keyfront_ldap_opened", COUNTER, "connections opened", "ldap", _POOL),
    Family(
        "keyfront_ldap_open_errors", COUNTER, "connections that could not be opened", "ldap", _POOL
    ),
    Family("keyfront_ldap_lost", COUNTER, "connections found dead", "ldap", _POOL),
    Family("keyfront_heartbeat_processes", GAUGE, "processes with a heartbeat", "heartbeat"),
    Family(
        "keyfront_heartbeat_connections", GAUGE, "AMQP connections kept alive", "heartbeat"
    ),
    Family("keyfront_heartbeats_sent", COUNTER, "heartbeats sent", "heartbeat"),
    Family(
        "keyfront_heartbeat_not_sent", COUNTER,
        "heartbeats not sent, as bytes were flowing or as the send buffer was full", "heartbeat",
        (("reason", "flowing, full"),),
    ),
    Family(
        "keyfront_heartbeat_dead_peers", COUNTER, "peers found gone or silent", "heartbeat"
    ),
    Family(
        "keyfront_heartbeat_reconnections", COUNTER, "connections that were replaced", "heartbeat"
    ),
    Family(
        "keyfront_heartbeat_stopped", COUNTER,
        "connections given up after an interrupted write", "heartbeat",
    ),
    Family(
        "keyfront_heartbeat_late_seconds", GAUGE,
        "the latest that a heartbeat of a living process ever was", "heartbeat",
    ),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}


def table() -> str:
    """Return the metrics as the tables of docs/metrics.md, one for each part that counts."""
    lines = []
    for source, where in SOURCES.items():
        lines += [f"### {source}", "", f"Counted by {where}.", ""]
        lines += ["| name | kind | labels | |", "|---|---|---|---|"]
        for family in FAMILIES:
            if family.source == source:
                labels = "; ".join(f"`{name}`: {values}" for name, values in family.labels)
                lines.append(f"| `{family.sample}` | {family.kind} | {labels} | {family.text} |")
        lines.append("")
    return "\n".join(lines)
