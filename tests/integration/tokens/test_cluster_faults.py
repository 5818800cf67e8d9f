"""Redis is killed, paused, emptied, cut off or fails over under two nodes and two services.

Whatever happens to it: a token that was revoked is refused everywhere from the revocation's answer
on, a good one is accepted everywhere all the time, and changes go on by themselves once it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import pytest

from support.cluster import Cluster, Shared, cluster, one_more_node
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, Answer, Client, World
from support.redis_servers import RedisServer, fail_over, redis_server, sentinels
from support.served import PATIENCE, answered

pytest.importorskip("keystone")
pytest.importorskip("keystonemiddleware")
pytestmark = pytest.mark.slow

REFUSED = frozenset({401, 404})
# Seconds between one request and the next of who asks for as long as something lasts. Without Redis
# each is Keystone's own work, which is twenty times as much.
PAUSE = 0.25


class Place:
    """A node or service that is shown tokens; for one thread."""

    def __init__(self, name: str, url: str, admin: str) -> None:
        self.name = name
        self._admin = admin
        self._client = Client(url)

    def status(self, token: str) -> int:
        if self.name.startswith("node"):
            headers = {"X-Auth-Token": self._admin, "X-Subject-Token": token}
            return self._client.request("GET", VALIDATE, headers).status
        return self._client.request("GET", "/", {"X-Auth-Token": token}).status

    def close(self) -> None:
        self._client.close()


class Cloud:
    """A cluster and what happens in it.

    :param redis: the server whose faults they are
    """

    def __init__(self, running: Cluster, redis: RedisServer) -> None:
        self.running = running
        self.redis = redis
        self.first = running.nodes[0]
        self.world = World(self.first.url, self.first.password)
        # by another chain than those that are revoked
        self.steady = self.world.person().token

    def places(self) -> list[Place]:
        return [
            Place(name, url, self.world.admin) for name, url in self.running.everywhere.items()
        ]

    def try_to_revoke(self, token: str) -> Answer:
        """Ask once."""
        client = Client(self.first.url)
        try:
            headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
            return client.request("DELETE", VALIDATE, headers)
        finally:
            client.close()

    def revoke(self, token: str) -> int:
        """Ask until it is done; returns how often it was refused before."""
        deadline = time.monotonic() + PATIENCE
        refused = 0
        while (answer := self.try_to_revoke(token)).status != 204:
            assert answer.status == 503, f"{answer.status} {answer.body}"
            assert int(answer.headers["Retry-After"]) > 0
            assert time.monotonic() < deadline, "changes are not taken up again"
            refused += 1
            time.sleep(PAUSE)
        return refused

    def taken_up(self) -> None:
        """Wait until all workers make changes: each looks for Redis again by itself."""
        deadline = time.monotonic() + PATIENCE
        before = answered(self.first)
        waits = set(before)
        while waits:
            client = Client(self.first.url)
            try:
                headers = {"X-Auth-Token": self.world.admin}
                answer = client.request("POST", "/regions", headers, {"region": {}})
            finally:
                client.close()
            # By whom that was.
            now = answered(self.first)
            if answer.status == 201:
                waits -= {worker for worker in now if now[worker] != before[worker]}
            else:
                assert answer.status == 503, f"{answer.status} {answer.body}"
                time.sleep(PAUSE)
            before = now
            assert not waits or time.monotonic() < deadline, "changes are not taken up again"

    def known(self) -> str:
        """A new token that all places, and all their workers, have seen."""
        token = self.world.person().token
        assert self.answers(token) == {200}
        return token

    def answers(self, token: str) -> set[int]:
        """What all workers everywhere answer."""
        return {status for statuses in self.everywhere(token).values() for status in statuses}

    def everywhere(self, token: str) -> dict[str, list[int]]:
        """What each place answers six times; all at once, as any may wait for Redis for long.

        By new connections: so often both workers are met, as good as surely.
        """

        def ask(place: Place) -> list[int]:
            try:
                return [place.status(token) for _ in range(6)]
            finally:
                place.close()

        places = self.places()
        with ThreadPoolExecutor(len(places)) as threads:
            found = threads.map(ask, places)
            return {place.name: each for place, each in zip(places, found, strict=True)}

    def assert_refused(self, token: str) -> None:
        """Everywhere, by all workers."""
        found = self.everywhere(token)
        assert {status for each in found.values() for status in each} <= REFUSED, found

    @contextmanager
    def nothing_lost(self) -> Iterator[None]:
        """A good token is accepted everywhere meanwhile."""
        over = threading.Event()
        failures: list[str] = []
        counts: list[int] = []

        def ask(place: Place) -> None:
            count = 0
            try:
                while not over.is_set() or not count:
                    status = place.status(self.steady)
                    if status != 200:
                        failures.append(f"{place.name} answered {status}")
                    count += 1
                    over.wait(PAUSE)
            except (OSError, HTTPException) as error:
                failures.append(f"{place.name}: {error!r}")
            finally:
                place.close()
                counts.append(count)

        threads = [threading.Thread(target=ask, args=(place,)) for place in self.places()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        assert not failures, f"{len(failures)} lost: {failures[:5]}"
        assert min(counts) > 0


@pytest.fixture(scope="module")
def cloud(shared_cluster: Shared) -> Cloud:
    return Cloud(shared_cluster.running, shared_cluster.redis)


@pytest.fixture
def redis(cloud: Cloud, proxy: FaultProxy) -> Iterator[RedisServer]:
    """It answers, before and after."""
    try:
        yield cloud.redis
    finally:
        proxy.forward()
    cloud.taken_up()
    cloud.revoke(cloud.known())


@pytest.fixture
def proxy(shared_cluster: Shared) -> FaultProxy:
    """By which nodes and services get to Redis; ``redis`` mends it."""
    return shared_cluster.proxy


def test_nothing_is_amiss(cloud: Cloud, redis: RedisServer) -> None:
    with cloud.nothing_lost():
        for _ in range(5):
            token = cloud.known()
            assert cloud.revoke(token) == 0
            cloud.assert_refused(token)


def test_killed_and_started_again(cloud: Cloud, redis: RedisServer, proxy: FaultProxy) -> None:
    token, other = cloud.known(), cloud.known()
    with cloud.nothing_lost():
        redis.kill()
        proxy.cut()  # nobody listens
        assert cloud.try_to_revoke(token).status == 503
        assert cloud.answers(token) == {200}
        redis.start()
        proxy.forward()
        cloud.revoke(token)
        cloud.assert_refused(token)
    cloud.revoke(other)
    cloud.assert_refused(other)


def test_started_again_with_what_it_knew_before_a_change(
    cloud: Cloud, redis: RedisServer
) -> None:
    """Its numbers go back; what was kept since must not stand by them."""
    token = cloud.known()
    redis.client.save()
    with cloud.nothing_lost():
        assert cloud.revoke(token) == 0
        redis.restart()
        cloud.assert_refused(token)


def test_paused(cloud: Cloud, redis: RedisServer) -> None:
    token = cloud.known()
    with cloud.nothing_lost():
        redis.stop()
        try:
            # one request of each process waits for it, the next ones do not
            assert cloud.answers(token) == {200}
            assert cloud.try_to_revoke(token).status == 503
        finally:
            redis.resume()
        cloud.revoke(token)
        cloud.assert_refused(token)


def test_emptied(cloud: Cloud, redis: RedisServer) -> None:
    token, other = cloud.known(), cloud.known()
    with cloud.nothing_lost():
        assert cloud.revoke(token) == 0
        redis.client.flushall()
        cloud.assert_refused(token)
        cloud.revoke(other)
        cloud.assert_refused(other)


@pytest.mark.parametrize("fault", ["reset", "half_open", "cut", "stall", "black_hole", "garbage"])
def test_cut_off(cloud: Cloud, redis: RedisServer, proxy: FaultProxy, fault: str) -> None:
    token = cloud.known()
    with cloud.nothing_lost():
        getattr(proxy, fault)(*([b"+what?\r\n"] if fault == "garbage" else []))
        cloud.try_to_revoke(cloud.steady[:-1])  # a change that is none
        proxy.forward()
        cloud.revoke(token)
        cloud.assert_refused(token)


def test_failover(tmp_path: Path, shared_cluster: Shared) -> None:
    """The replica that takes over may not have heard of the last change."""
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(tmp_path / "master"))
        replica = stack.enter_context(redis_server(tmp_path / "replica", replica_of=master))
        watch = stack.enter_context(sentinels(master))
        url = "redis://" + ",".join(sentinel.address for sentinel in watch)
        options = "coordinator_sentinel_master = keyfront"
        running = stack.enter_context(
            cluster(
                tmp_path, coordinator=url, options=options,
                service_options=f"keyfront_{options}", database=shared_cluster.running.database,
            )
        )
        cloud = Cloud(running, master)
        token, other = cloud.known(), cloud.known()
        # from now on the replica hears of nothing
        replica.stop()
        assert cloud.revoke(token) == 0
        cloud.assert_refused(token)
        with cloud.nothing_lost(), ThreadPoolExecutor() as pool:
            master.kill()
            replica.resume()
            # asked for all the time until the other has taken over
            revoked = pool.submit(cloud.revoke, other)
            fail_over(watch, replica)
            revoked.result()
            cloud.assert_refused(other)
            cloud.assert_refused(token)


def test_changes_may_be_let_through(
    shared_cluster: Shared, redis: RedisServer, tmp_path: Path
) -> None:
    """At a node with on_loss = allow; what was changed meanwhile everybody is told of as soon as
    Redis is back."""
    running = shared_cluster.running
    with one_more_node(running, tmp_path, "on_loss = allow") as allowing:
        World(allowing.url, allowing.password).wait_until_kept()
        cloud = Cloud(replace(running, nodes=[allowing, *running.nodes]), redis)
        token, other = cloud.known(), cloud.known()
        redis.stop()
        try:
            assert cloud.try_to_revoke(token).status == 204
        finally:
            redis.resume()
        # a change before that is found out is let through as well
        cloud.revoke(other)
        deadline = time.monotonic() + PATIENCE
        while 200 in cloud.answers(token) | cloud.answers(other):
            assert time.monotonic() < deadline, "nobody was told"
            time.sleep(PAUSE)
        cloud.assert_refused(token)
        cloud.assert_refused(other)
        assert "changes are made all the same" in allowing.log("keystone.log")
