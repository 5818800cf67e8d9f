"""The heartbeat under whatever release of oslo.messaging is installed; tox has some older ones.

Nothing but that release, what it needs, eventlet and gevent have to be there: no Keystone and no
database. Workers stand still between commands, as in uWSGI and mod_wsgi between requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from support.amqp_worker import HEARTBEAT, MODELS, Crew, Worker, at_once
from support.broker import Broker
from support.served import wait_for

pytestmark = pytest.mark.slow

RELEASE = tuple(map(int, metadata.version("oslo.messaging").split(".")[:2]))
# Seconds.
IDLE = 4 * HEARTBEAT
# oslo.messaging's own thread then looks every 30 s, and connects nobody again in the meantime.
LONG = {"threshold": 60, "rate": 1}
# oslo.config takes what no file has from the environment; releases without the option ignore it.
IN_PTHREAD = "OS_OSLO_MESSAGING_RABBIT__HEARTBEAT_IN_PTHREAD"
WARNED = "heartbeat_in_pthread = true in a process patched by {}"
TOPIC = "releases"

COUNTS = ("beats", "stopped", "dead_peers", "reconnections")


def warnings(logged: str) -> list[str]:
    """What the heartbeat warned of."""
    return [x for x in logged.splitlines() if " WARNING keyfront.gateway.heartbeat " in x]


class Since:
    """What workers and their broker tell of the time since this was made.

    The workers are those of other tests as well, without any connection then.
    """

    def __init__(self, rabbit: Broker, workers: Iterable[Worker]) -> None:
        self._rabbit = rabbit
        self._before = {x: (self._numbers(x), x.log.stat().st_size) for x in workers}

    def _numbers(self, worker: Worker) -> dict[str, int]:
        name = f":{worker.pid}:"
        found = worker.ask("stats") if worker.ours else {}
        assert not found.get("connections"), worker
        return {
            "accepted": self._rabbit.accepted(name), "missed": self._rabbit.missed(name),
            **{count: found.get(count, 0) for count in COUNTS},
        }

    def accepted(self, worker: Worker) -> int:
        return self._rabbit.accepted(f":{worker.pid}:") - self._before[worker][0]["accepted"]

    def missed(self, worker: Worker) -> int:
        return self._rabbit.missed(f":{worker.pid}:") - self._before[worker][0]["missed"]

    def stats(self, worker: Worker) -> dict[str, int]:
        """The heartbeat's counts, and the connections that there are now."""
        found = worker.ask("stats")
        before = self._before[worker][0]
        return {x: found[x] - before[x] for x in COUNTS} | {"connections": found["connections"]}

    def logged(self, worker: Worker) -> str:
        return worker.logged(self._before[worker][1])

    def check_kept(self, worker: Worker, connections: int) -> None:
        assert self.missed(worker) == 0, worker
        assert self.accepted(worker) == connections, worker
        found = self.stats(worker)
        assert found["connections"] == connections, found
        assert found["beats"] >= connections, found
        assert found["stopped"] == found["dead_peers"] == found["reconnections"] == 0, found


def test_connections_survive_idle_times(own: Broker, crew: Crew) -> None:
    since = Since(own, crew.values())
    crew.open(own.url())
    ours, stock = crew.of(ours=True), crew.of("eventlet", "gevent", ours=False)
    crew["none", False].ask("listen", name="it", topic=TOPIC)
    at_once(ours, "call", name="it", topic=TOPIC)
    for worker in ours:
        # the publisher's, and that of the answers to its calls
        assert since.accepted(worker) == 2, worker
    for number in range(2):
        time.sleep(IDLE)
        for worker in stock:
            wait_for(lambda x=worker, y=number: since.missed(x) > y, f"{worker} is lost")
        lost = at_once(stock, "publish", name="it")
        for worker in ours:
            worker.ask("publish", name="it")
        assert min(min(x) for x in lost.values()) >= 1.0, f"nothing was lost: {lost}"
        at_once(ours, "call", name="it", topic=TOPIC)
    for worker in ours:
        since.check_kept(worker, 2)
        assert warnings(since.logged(worker)) == []
    for worker in stock:
        assert since.missed(worker) >= 2, worker
    crew.ask("close", name="it")


@pytest.fixture
def in_pthread(
    own: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Worker]]:
    """A worker for each model that is told so from its start, without connections."""
    monkeypatch.setenv(IN_PTHREAD, "true")
    made: list[Worker] = []
    try:
        made += [Worker(tmp_path, model, ours=True) for model in MODELS]
        yield made
    finally:
        for worker in made:
            worker.kill()


@pytest.mark.skipif(
    RELEASE >= (18,), reason="oslo.messaging 18.0 took out heartbeat_in_pthread; 10.1 to 17 have it"
)
def test_with_heartbeat_in_pthread(own: Broker, in_pthread: list[Worker]) -> None:
    since = Since(own, in_pthread)
    at_once(in_pthread, "open", name="it", url=own.url(), threshold=HEARTBEAT)
    at_once(in_pthread, "publish", name="it")
    time.sleep(IDLE)
    at_once(in_pthread, "publish", name="it", number=3)
    for worker in in_pthread:
        since.check_kept(worker, 1)
        lines = warnings(worker.logged())
        if worker.patch == "none":
            assert lines == []
        else:
            assert len(lines) == 1, lines
            assert WARNED.format(worker.patch) in lines[0]


def test_a_connection_that_the_broker_lost_is_replaced_when_it_is_taken(
    own: Broker, crew: Crew
) -> None:
    since = Since(own, crew.values())
    crew.open(own.url(), **LONG)
    ours, stock = crew.of(ours=True), crew.of(ours=False)
    before = {worker: worker.log.stat().st_size for worker in ours}
    own.kill()
    own.start()
    lost = at_once(stock, "publish", name="it")
    for worker in stock:
        # the second that stock sleeps; a difference of two times may lack the last digits
        assert lost[worker][0] > 0.99, f"{worker}: nothing was lost: {lost}"
    for worker in ours:
        worker.ask("publish", name="it", number=2)
        # stock logs an error and sleeps before it connects again
        assert " ERROR " not in worker.logged(before[worker]), worker
        assert since.accepted(worker) == 2, worker
        found = since.stats(worker)
        assert (found["connections"], found["dead_peers"], found["reconnections"]) == (1, 1, 1)
        assert found["stopped"] == 0, found
    crew.ask("close", name="it")
