"""Changes at one Keystone node are seen at the other, and by services of both, in time.

In time is at once where they share a Redis, within the lease where they were told to go by leases,
and within ``revalidate`` for services that share nothing with Keystone. Every kind of change is in
``test_token_exactness``; here are those that write to tables of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from support.cluster import FIRST, Cluster, Shared, cluster, service
from support.exactness import check
from support.keystone_world import Client, World
from support.redis_servers import redis_server
from support.served import Served, answered
from support.token_changes import KINDS

pytest.importorskip("keystone")
pytest.importorskip("keystonemiddleware")

# The quick form proves that every way is looked at; more rounds by environment prove exactness.
ROUNDS = int(os.environ.get("KEYFRONT_EXACTNESS_ROUNDS", "1"))
QUICK = ROUNDS == 1
_BY_NAME = {kind.name: kind for kind in KINDS}
TELLING = (
    "token revoked without its chain",
    "user disabled; enabling revives nothing",
    "only grant of a user on a project",
    "user renamed",
    "project disabled and enabled",
    "endpoint moved",
    "user removed from a group",
    "only role deleted",
    "domain deleted",
    "trust deleted",
)


@dataclass(frozen=True)
class Way:
    """How nodes and services hear of changes.

    :param grace: seconds in which they need not have
    :param quick: how many kinds the quick form looks at
    """

    name: str
    grace: float
    quick: int
    options: str = ""
    service_options: str = ""


LEASE = 0.5
REVALIDATE = 0.5
STRICT = Way("strict", 0.0, 6)
WAYS = (
    STRICT,
    Way(
        "lease",
        LEASE,
        2,
        options=f"consistency = lease\nlease = {LEASE}",
        service_options=f"keyfront_consistency = lease\nkeyfront_lease = {LEASE}",
    ),
    Way(
        "revalidate",
        REVALIDATE,
        2,
        service_options=f"keyfront_revalidate = {REVALIDATE}",
    ),
)
CASES = [
    pytest.param(way, name, id=f"{way.name}-{name.replace(' ', '-')}")
    for way in WAYS
    for name in TELLING[: way.quick if QUICK else None]
]


class _Running(dict[str, Cluster]):
    """A cluster by the way, started when it is first asked for and the one before stopped.

    What is strict is there for all modules; a service that hears of nothing may ask any node.
    """

    def __init__(
        self, shared: Shared, factory: pytest.TempPathFactory, stack: ExitStack
    ) -> None:
        self._shared, self._factory, self._stack = shared.running, factory, stack

    def of(self, way: Way) -> Cluster:
        if way is STRICT:
            return self._shared
        if way.name not in self:
            self._stack.close()
            self.clear()
            self[way.name] = self._start(way, self._factory.mktemp(way.name))
        return self[way.name]

    def _start(self, way: Way, folder: Path) -> Cluster:
        if not way.options:
            asked = self._shared.nodes[:1]
            started = service(folder, asked[0], FIRST + way.service_options)
            return replace(
                self._shared, nodes=asked, services=[self._stack.enter_context(started)]
            )
        redis = self._stack.enter_context(redis_server(folder / "redis"))
        return self._stack.enter_context(
            cluster(
                folder, coordinator=redis.url, options=way.options,
                service_options=way.service_options, database=self._shared.database,
            )
        )


@pytest.fixture(scope="module")
def running(
    shared_cluster: Shared, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Running]:
    with ExitStack() as stack:
        yield _Running(shared_cluster, tmp_path_factory, stack)


def _asked(node: Served) -> int:
    """How many requests a node's workers have answered."""
    return sum(answered(node).values())


@pytest.mark.slow
def test_services_keep_what_they_are_told(running: _Running) -> None:
    """Where each request asks Keystone, nothing is ever stale, and nothing is proved."""
    served = running.of(STRICT)
    token = World(served.nodes[0].url, served.nodes[0].password).person().token
    for asking, node in zip(served.services, served.nodes, strict=True):
        client = Client(asking.url.removesuffix("/v3"))
        asked = []
        for _ in range(2):  # after the first of them, all workers of the service know the token
            before = _asked(node)
            for _ in range(40):
                assert client.request("GET", "/", {"X-Auth-Token": token}).status == 200
            asked.append(_asked(node) - before)
        client.close()
        assert asked[0] >= 1
        assert asked[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), CASES)
def test_no_answer_is_stale(running: _Running, way: Way, name: str) -> None:
    served = running.of(way)
    first = served.nodes[0]
    report = check(
        first.url, first.password, served.watch(_BY_NAME[name]), rounds=ROUNDS, readers=1,
        world=World(first.url, first.password), enough=1 if QUICK else 3, grace=way.grace,
    )
    print(report)
    assert report.exact, str(report)
    where = {read.rpartition(" at ")[2] for read in report.reads}
    assert where >= served.everywhere.keys() - {"node 1"}


def test_the_kinds_are_there() -> None:
    assert set(TELLING) <= _BY_NAME.keys()
