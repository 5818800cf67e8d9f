"""What Prometheus is told: all that was counted, under the names of the one list, and no secret."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from keyfront.errors import CoordinatorError
from keyfront.gateway.heartbeat import counters as heartbeat
from keyfront.gateway.heartbeat.counters import ProcessSums
from keyfront.gateway.metrics import collector
from keyfront.gateway.metrics.collector import NodeCollector
from keyfront.gateway.node.counters import GROWN, SHED, NodeCounts, count_requests
from keyfront.gateway.node.health import PARTS
from keyfront.middleware.ldap import pool_counters
from keyfront.middleware.tokens.counters import CAUSES, NAMES, REASONS

DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"
TOKENS = {
    **{name: 10 + place for place, name in enumerate(NAMES)},
    **dict.fromkeys(("changes", "changes_under_way", "changes_recovered", "flushes"), 1),
    **{f"{kind}_bytes{limit}": 5 for kind in ("answers", "refusals") for limit in ("", "_limit")},
    **{f"ended_{cause}": 3 for cause in CAUSES},
    **{f"bypassed_{reason}": 4 + place for place, reason in enumerate(REASONS)},
    "processes": 2,
    "directory_leases": 3,
}


class Pool:
    """What the publisher asks of an LDAP pool."""

    def __init__(self) -> None:
        self.stats: dict[str, int | float] = dict.fromkeys(
            (*pool_counters.PRESENT, *pool_counters.SUMS), 0
        )

    def get_stats(self) -> dict[str, int | float]:
        return dict(self.stats)


class World:
    """A node, with all its parts counting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "node"
        self.counts = NodeCounts()
        self.counts.share(self.folder)
        self.counts.begin()
        self.pool = Pool()
        self.beats = heartbeat.Counts(folder / "beats")
        self.tokens: Mapping[str, int] | None = TOKENS
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(
            NodeCollector(self.folder, self._tokens_of, lambda: [folder / "beats"])
        )

    def _tokens_of(self) -> Mapping[str, int] | None:
        if self.tokens == {}:
            raise CoordinatorError("it is broken")
        return self.tokens

    @cached_property
    def publisher(self) -> pool_counters.Publisher:
        return pool_counters.Publisher(self.folder)

    def publish(self, *pools: Any) -> None:
        self.publisher.publish(list(pools or (self.pool,)))

    def told(self) -> dict[str, float]:
        text = generate_latest(self.registry).decode()
        return {
            sample.name + "".join(f" {x}={y}" for x, y in sorted(sample.labels.items())):
            sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples
        }  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.beats.close()


def _serve(world: World, times: int = 1) -> None:
    application = count_requests(lambda *_: [], world.counts)
    for _ in range(times):
        application({}, lambda *_: None)


def test_requests_and_workers(world: World) -> None:
    _serve(world, 3)
    world.counts.count(SHED)
    world.counts.count(GROWN)
    world.counts.found(PARTS.index("database"), True)
    world.counts.found(PARTS.index("keys"), False)
    told = world.told()
    assert told["keyfront_requests_total"] == 3
    assert told["keyfront_requests_in_progress"] == 0
    assert told["keyfront_requests_shed_total"] == told["keyfront_workers_outgrown_total"] == 1
    assert told["keyfront_workers"] == told["keyfront_workers_started_total"] == 1
    assert told["keyfront_application_loads_total"] == 1
    assert told["keyfront_worker_memory_bytes statistic=max"] > 1 << 20
    assert told["keyfront_application_loaded_timestamp_seconds"] > 1e9
    assert told["keyfront_part_ok part=database"] == 1
    assert told["keyfront_part_ok part=keys"] == 0
    assert "keyfront_part_ok part=redis" not in told
    assert told["keyfront_draining"] == 0
    (world.folder / "draining").touch()
    assert world.told()["keyfront_draining"] == 1


def test_the_queue(world: World) -> None:
    for seconds in (0.0, 0.0005, 0.0015, 3.0, 300.0):
        world.counts.queued(seconds)
    told = world.told()
    assert told["keyfront_queue_seconds_bucket le=0.001024"] == 2
    assert told["keyfront_queue_seconds_bucket le=0.002048"] == 3
    assert told["keyfront_queue_seconds_bucket le=4.194304"] == 4
    assert told["keyfront_queue_seconds_bucket le=+Inf"] == 5
    assert told["keyfront_queue_seconds_count"] == 5
    assert told["keyfront_queue_seconds_sum"] == pytest.approx(303.002)


def test_tokens(world: World) -> None:
    told = world.told()
    assert told["keyfront_token_cache_changes_refused_total"] == TOKENS["changes_refused"]
    assert told["keyfront_token_cache_directory_changes_total"] == TOKENS["directory_changes"]
    assert told["keyfront_token_cache_directory_leases"] == TOKENS["directory_leases"]
    assert told["keyfront_token_cache_ended_total cause=catalog"] == TOKENS["ended_catalog"]
    for reason in REASONS:
        name = f"keyfront_token_cache_bypassed_total reason={reason}"
        assert told[name] == TOKENS[f"bypassed_{reason}"]
    for name in set(NAMES) - {"changes_refused", "directory_changes"}:
        assert told[f"keyfront_token_cache_requests_total result={name}"] == TOKENS[name]
    assert told["keyfront_source_up source=tokens"] == 1
    world.tokens = None
    assert not [name for name in world.told() if "token" in name]
    world.tokens = {}
    assert world.told()["keyfront_source_up source=tokens"] == 0
    assert world.told()["keyfront_source_up source=node"] == 1


def test_ldap(world: World) -> None:
    assert not [name for name in world.told() if "ldap_" in name and "source" not in name]
    world.pool.stats |= {
        "servers_up": 1, "servers_down": 1, "logins": 6, "logins_accepted": 3,
        "credentials_refused": 2, "logins_failed": 1, "auth_size": 4, "auth_idle": 2,
        "auth_lent": 1, "auth_requests_wait_ms": 1500,
    }  # fmt: skip
    world.publish()
    told = world.told()
    assert told["keyfront_ldap_servers state=down"] == 1
    outcomes = [told[f"keyfront_ldap_logins_total outcome={x}"] for x in ("accepted", "refused")]
    assert outcomes == [3, 2]
    assert told["keyfront_ldap_connections pool=auth state=other"] == 1
    assert told["keyfront_ldap_wait_seconds_total pool=auth"] == 1.5


def test_ldap_sums_do_not_fall(world: World) -> None:
    """Nor when a pool is closed, popped, or ends with its process."""
    other = Pool()
    world.pool.stats["logins_accepted"] = other.stats["logins_accepted"] = 5
    world.pool.stats["servers_up"] = 1
    world.publish(world.pool, other)
    world.publish(world.pool)
    world.pool.stats["logins_accepted"] = 2  # popped, and two since
    world.publish(world.pool)
    child = os.fork()
    if not child:
        try:
            mine = Pool()
            mine.stats["logins_accepted"] = 1
            mine.stats["servers_up"] = 1
            world.publish(mine)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = world.told()
    assert told["keyfront_ldap_logins_total outcome=accepted"] == 13
    assert told["keyfront_ldap_servers state=up"] == 1


def test_heartbeats(world: World) -> None:
    world.beats.row[heartbeat.BEATS] = 7
    assert world.told()["keyfront_heartbeats_sent_total"] == 7
    assert world.told()["keyfront_heartbeat_processes"] == 1
    world.beats.close()
    told = world.told()
    assert told["keyfront_heartbeat_processes"] == 0
    assert told["keyfront_heartbeats_sent_total"] == 7


def test_sums_over_processes_that_end() -> None:
    ended = ProcessSums()
    one, other = ("a", 1), ("b", 2)
    assert ended.add({one: {"x": 5}, other: {"x": 1}}) == {"x": 6}
    assert ended.add({other: {"x": 2}}) == {"x": 7}
    # another process of the same number
    assert ended.add({other: {"x": 1}}) == {"x": 8}
    assert ended.add({}) == {"x": 8}


def test_every_name_is_in_the_list_and_bounded(world: World) -> None:
    """Labels are ours: nothing of a request, a user or a process becomes one."""
    _serve(world)
    world.publish()
    known = {label for family in collector.FAMILIES for label, _ in family.labels}
    assert known <= {"source", "statistic", "part", "result", "kind", "state", "outcome", "pool",
                     "reason", "cause"}  # fmt: skip
    text = generate_latest(world.registry).decode()
    told = {family.name for family in text_string_to_metric_families(text)}
    assert told <= set(collector.BY_NAME)
    # what is left is of parts that nobody has asked yet
    assert set(collector.BY_NAME) - told == {"keyfront_part_ok"}
    assert len(text.splitlines()) < 300


def test_the_document_has_the_list() -> None:
    assert collector.table() in DOCUMENT.read_text(encoding="utf-8")


def test_a_node_that_is_not_there(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(tmp_path / "none", lambda: None, list))
    told = [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    assert told == [({"source": "node"}, 0.0)]


def test_nothing_is_published_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYFRONT_NODE", raising=False)
    started: list[object] = []
    monkeypatch.setattr(
        pool_counters, "threading",
        SimpleNamespace(Thread=lambda **_: started.append(1), Lock=pool_counters.threading.Lock),
    )  # fmt: skip
    pool_counters._Thread().start()
    assert not started
