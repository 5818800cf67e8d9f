"""The metrics of a node: mapped files are read and become samples for ``prometheus_client``.

:data:`FAMILIES` is the one list of their names, from which docs/metrics.md is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from keyfront.errors import KeyfrontError
from keyfront.middleware.ldap import pool_counters as ldap
from keyfront.middleware.tokens import counters as tokens

from ..heartbeat import counters as heartbeat
from ..memory_limit import resident
from ..node import counters as node
from ..node.drain import is_draining
from ..node.health import PARTS

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Family(NamedTuple):
    """A metric.

    :param name: with its unit at the end; a counter's sample adds ``_total``
    :param kind: :data:`COUNTER`, :data:`GAUGE` or :data:`HISTOGRAM`
    :param text: its help text, as Prometheus shows it
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
    Family(
        "keyfront_application_loads", COUNTER,
        "times that the application was loaded, for a start or a reload: once by uWSGI, by each "
        "worker with lazy-apps, and by each daemon of mod_wsgi", "node",
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
        "within the last minute; else 0", "node",
        (("part", "database, directory, redis, keys, logins"),),
    ),
    Family("keyfront_requests", COUNTER, "requests, but for /livez and /readyz", "node"),
    Family("keyfront_requests_in_progress", GAUGE, "requests that have not ended", "node"),
    Family(
        "keyfront_requests_shed", COUNTER,
        "requests refused with 503, as they had waited too long (KEYFRONT_QUEUE_TIMEOUT)", "node",
    ),
    Family(
        "keyfront_logins_refused", COUNTER,
        "logins refused with 503 or 429, as too many were under way (KEYFRONT_LOGIN_LIMIT)",
        "node",
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
        "keyfront_token_cache_bypassed", COUNTER,
        "requests that were asked of Keystone without a look at what is kept", "tokens",
        (("reason", "request, variants, coordinator"),),
    ),
    Family(
        "keyfront_token_cache_directory_changes", COUNTER,
        "changes that directories told of which are followed", "tokens",
    ),
    Family(
        "keyfront_token_cache_directory_leases", GAUGE,
        "leases that stand, by which answers made of directories are kept: one of the process that "
        "follows these, and one for each domain and each server whose changes are known, or which "
        "offers no way to follow it", "tokens",
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
    Family("keyfront_ldap_lookups", COUNTER, "lookups of servers by SRV records", "ldap"),
    Family("keyfront_ldap_lookups_failed", COUNTER, "of these, those that failed", "ldap"),
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


# Seconds after which nobody knows any more whether a part is there.
_FORGOTTEN = 60.0
# The bounds of the histogram, in bits of microseconds: 1 ms to 33 s.
_BITS = range(10, 26)
# Counts of the token cache that are of no request.
_NO_REQUESTS = frozenset({"changes_refused", "directory_changes"})
_POOLS = ("search", "auth")
_CHECKOUTS = (
    ("keyfront_ldap_checkouts", "requests"),
    ("keyfront_ldap_checkouts_queued", "requests_queued"),
    ("keyfront_ldap_checkouts_failed", "requests_errors"),
    ("keyfront_ldap_opened", "opened"),
    ("keyfront_ldap_open_errors", "open_errors"),
    ("keyfront_ldap_lost", "lost"),
)
_BEATS = (
    ("keyfront_heartbeats_sent", "beats", None),
    ("keyfront_heartbeat_not_sent", "flowing", "flowing"),
    ("keyfront_heartbeat_not_sent", "full", "full"),
    ("keyfront_heartbeat_dead_peers", "dead_peers", None),
    ("keyfront_heartbeat_reconnections", "reconnections", None),
    ("keyfront_heartbeat_stopped", "stopped", None),
)

Sample = tuple[str, tuple[str, ...], float]


class NodeCollector(Collector):
    """The metrics of a node.

    :param folder: the node's folder; ``None`` without one
    :param tokens_of: returns the counts of the token cache by name; ``None`` if none is in use
    :param heartbeats: the folders of heartbeats' counts
    """

    def __init__(
        self,
        folder: Path | None,
        tokens_of: Callable[[], Mapping[str, int] | None],
        heartbeats: Callable[[], Iterable[Path]],
    ) -> None:
        self._folder = folder
        self._tokens_of = tokens_of
        self._heartbeats = heartbeats
        self._ended = heartbeat.ProcessSums()
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what is collected depends on what is in use."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with all its samples."""
        samples: list[Sample] = []
        histograms: list[Metric] = []
        parts: dict[str, Callable[[], Iterator[Sample]]] = {
            "node": lambda: self._node(histograms),
            "tokens": self._tokens,
            "ldap": self._ldap,
            "heartbeat": self._heartbeat,
        }
        for source, read in parts.items():
            try:
                found = list(read())
                samples += found
                if found:
                    samples.append(("keyfront_source_up", (source,), 1))
            except (KeyfrontError, OSError):
                samples.append(("keyfront_source_up", (source,), 0))
        yield from _metrics(samples)
        yield from histograms

    def _node(self, histograms: list[Metric]) -> Iterator[Sample]:
        if self._folder is None:
            return
        found = node.read(self._folder)
        yield from (
            ("keyfront_workers", (), len(found.workers)),
            ("keyfront_application_loads", (), found.loads),
            ("keyfront_workers_started", (), found.started),
            ("keyfront_workers_outgrown", (), found.grown),
            ("keyfront_application_loaded_timestamp_seconds", (), found.loaded),
            ("keyfront_draining", (), is_draining(self._folder)),
            ("keyfront_requests", (), found.requests),
            ("keyfront_requests_in_progress", (), found.under_way),
            ("keyfront_requests_shed", (), found.shed),
            ("keyfront_logins_refused", (), found.logins_refused),
        )
        memory = []
        for pid in found.workers:
            with suppress(OSError, IndexError):  # it has just ended
                memory.append(resident(pid))
        yield "keyfront_worker_memory_bytes", ("sum",), sum(memory)
        yield "keyfront_worker_memory_bytes", ("max",), max(memory, default=0)
        for part, (when, ok) in zip(PARTS, found.found, strict=False):
            if time.time() - when < _FORGOTTEN:
                yield "keyfront_part_ok", (part,), ok
        histograms.append(_queue(found))

    def _tokens(self) -> Iterator[Sample]:
        counts = self._tokens_of()
        if counts is None:
            return
        for name in tokens.NAMES:
            if name not in _NO_REQUESTS:
                yield "keyfront_token_cache_requests", (name,), counts[name]
        for cause in tokens.CAUSES:
            yield "keyfront_token_cache_ended", (cause,), counts[f"ended_{cause}"]
        for reason in tokens.REASONS:
            yield "keyfront_token_cache_bypassed", (reason,), counts[f"bypassed_{reason}"]
        yield "keyfront_token_cache_changes_refused", (), counts["changes_refused"]
        yield "keyfront_token_cache_directory_changes", (), counts["directory_changes"]
        yield "keyfront_token_cache_directory_leases", (), counts["directory_leases"]
        yield "keyfront_token_cache_changes", (), counts["changes"]
        yield "keyfront_token_cache_changes_under_way", (), counts["changes_under_way"]
        yield "keyfront_token_cache_changes_recovered", (), counts["changes_recovered"]
        yield "keyfront_token_cache_flushes", (), counts["flushes"]
        yield "keyfront_token_cache_processes", (), counts["processes"]
        for kind in ("answers", "refusals"):
            yield "keyfront_token_cache_bytes", (kind,), counts[f"{kind}_bytes"]
            yield "keyfront_token_cache_limit_bytes", (kind,), counts[f"{kind}_bytes_limit"]

    def _ldap(self) -> Iterator[Sample]:
        if self._folder is None or not ldap.is_in_use(self._folder):
            return
        counts = ldap.read(self._folder)
        yield "keyfront_ldap_processes", (), counts["processes"]
        for state in ("up", "down"):
            yield "keyfront_ldap_servers", (state,), counts[f"servers_{state}"]
        for outcome, name in (
            ("accepted", "logins_accepted"),
            ("refused", "credentials_refused"),
            ("failed", "logins_failed"),
        ):
            yield "keyfront_ldap_logins", (outcome,), counts[name]
        for name in (
            *("binds", "searches", "searches_retried", "searches_failed"),
            *("lookups", "lookups_failed"),
        ):
            yield f"keyfront_ldap_{name}", (), counts[name]
        for pool in _POOLS:
            size, idle, lent = (counts[f"{pool}_{name}"] for name in ("size", "idle", "lent"))
            yield "keyfront_ldap_connections", (pool, "idle"), idle
            yield "keyfront_ldap_connections", (pool, "lent"), lent
            yield "keyfront_ldap_connections", (pool, "other"), max(size - idle - lent, 0)
            yield "keyfront_ldap_connections_limit", (pool,), counts[f"{pool}_max_size"]
            yield "keyfront_ldap_waiting", (pool,), counts[f"{pool}_waiting"]
            yield "keyfront_ldap_wait_seconds", (pool,), counts[f"{pool}_requests_wait_ms"] / 1000
            for name, counted in _CHECKOUTS:
                yield name, (pool,), counts[f"{pool}_{counted}"]

    def _heartbeat(self) -> Iterator[Sample]:
        found = heartbeat.read_all(self._heartbeats())
        names = [name for _, name, _ in _BEATS]
        living = {
            (str(one["path"]), int(one["pid"])): {name: int(one[name]) for name in names}
            for one in found
        }
        if not living and not self._ended.seen:
            return
        with self._lock:
            sums = self._ended.add(living)
        for family, name, label in _BEATS:
            yield family, (label,) if label else (), sums.get(name, 0)
        yield "keyfront_heartbeat_processes", (), len(found)
        yield "keyfront_heartbeat_connections", (), sum(one["connections"] for one in found)
        late = max((one["lateness_worst"] for one in found), default=0.0)
        yield "keyfront_heartbeat_late_seconds", (), late


def _queue(found: node.Count) -> Metric:
    family = BY_NAME["keyfront_queue_seconds"]
    buckets = [(str(2**bits / 1e6), float(sum(found.waited[: bits + 1]))) for bits in _BITS]
    buckets.append(("+Inf", float(sum(found.waited))))
    return HistogramMetricFamily(
        family.name, family.text, buckets=buckets, sum_value=found.waited_seconds
    )


def _metrics(samples: Iterable[Sample]) -> Iterator[Metric]:
    made: dict[str, Any] = {}
    for name, labels, value in samples:
        family = BY_NAME[name]
        assert family.kind != HISTOGRAM
        if name not in made:
            kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
            made[name] = kind(name, family.text, labels=[label for label, _ in family.labels])
        made[name].add_metric(list(labels), float(value))
    yield from made.values()
