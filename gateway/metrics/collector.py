"""Reads the mapped files of a node and makes samples of them, for ``prometheus_client``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from keyfront.errors import KeyfrontError
from keyfront.middleware.ldap import published as ldap
from keyfront.middleware.tokens import counters as tokens

from ..heartbeat import counters as heartbeat
from ..memory_limit import resident
from ..node import counters as node
from ..node.drain import is_draining
from ..node.health import PARTS
from .ended import Ended
from .families import BY_NAME, COUNTER, HISTOGRAM

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

    :param folder: of the node; ``None`` without one
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
        self._ended = Ended()
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
            ("keyfront_workers_started", (), found.started),
            ("keyfront_workers_outgrown", (), found.grown),
            ("keyfront_application_loaded_timestamp_seconds", (), found.loaded),
            ("keyfront_draining", (), is_draining(self._folder)),
            ("keyfront_requests", (), found.requests),
            ("keyfront_requests_in_progress", (), found.under_way),
            ("keyfront_requests_shed", (), found.shed),
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
        yield "keyfront_token_cache_changes_refused", (), counts["changes_refused"]
        yield "keyfront_token_cache_directory_changes", (), counts["directory_changes"]
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
        for name in ("binds", "searches", "searches_retried", "searches_failed"):
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
