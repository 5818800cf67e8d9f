"""The heartbeat under whatever release of oslo.messaging is installed; tox has some older ones.

Nothing but that release, what it needs, eventlet and gevent have to be there: no Keystone and no
database. Workers stand still between commands, as in uWSGI and mod_wsgi between requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from support.amqp_worker import MODELS, Worker, at_once
from support.broker import Broker, broker
from support.served import wait_for

pytestmark = pytest.mark.slow

RELEASE = tuple(map(int, metadata.version("oslo.messaging").split(".")[:2]))
# Seconds. A broker closes a connection two to three of them after the last byte: on a busy machine
# a process stands still for a part of that.
HEARTBEAT = 3
IDLE = 4 * HEARTBEAT
# oslo.messaging's own thread then looks every 30 s, and connects nobody again in the meantime.
LONG = {"threshold": 60, "rate": 1}
# oslo.config takes what no file has from the environment; releases without the option ignore it.
IN_PTHREAD = "OS_OSLO_MESSAGING_RABBIT__HEARTBEAT_IN_PTHREAD"
WARNED = "heartbeat_in_pthread = true in a process patched by {}"
TOPIC = "releases"

Start = Callable[..., list[Worker]]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that may be restarted."""
    with broker(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
def start(own: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a worker for each model, with a connection that was used."""
    with contextlib.ExitStack() as stack:

        def begin(
            *models: str, ours: bool, in_pthread: bool = False, **heartbeat: int
        ) -> list[Worker]:
            monkeypatch.setenv(IN_PTHREAD, str(in_pthread).lower())
            workers = [Worker(tmp_path, model, ours=ours) for model in models]
            for worker in workers:
                stack.callback(worker.kill)
            heartbeat = heartbeat or {"threshold": HEARTBEAT}
            at_once(workers, "open", name="it", url=own.url(), **heartbeat)
            at_once(workers, "publish", name="it")
            return workers

        yield begin


def accepted(rabbit: Broker, worker: Worker) -> int:
    return rabbit.accepted(f":{worker.pid}:")


def missed(rabbit: Broker, worker: Worker) -> int:
    return rabbit.missed(f":{worker.pid}:")


def warnings(worker: Worker) -> list[str]:
    """What the heartbeat warned of."""
    lines = worker.logged().splitlines()
    return [x for x in lines if " WARNING keyfront.gateway.heartbeat " in x]


def check_kept(rabbit: Broker, worker: Worker, connections: int) -> None:
    assert missed(rabbit, worker) == 0, worker
    assert accepted(rabbit, worker) == connections, worker
    found = worker.ask("stats")
    assert found["connections"] == connections, found
    assert found["beats"] >= connections, found
    assert found["stopped"] == found["dead_peers"] == found["reconnections"] == 0, found


def test_connections_survive_idle_times(own: Broker, start: Start) -> None:
    ours = start(*MODELS, ours=True)
    stock = start("eventlet", "gevent", ours=False)
    (server,) = start("none", ours=False)
    server.ask("listen", name="it", topic=TOPIC)
    at_once(ours, "call", name="it", topic=TOPIC)
    for worker in ours:
        # the publisher's, and that of the answers to its calls
        assert accepted(own, worker) == 2, worker
    for number in range(2):
        time.sleep(IDLE)
        for worker in stock:
            wait_for(lambda x=worker, y=number: missed(own, x) > y, f"{worker} is lost")
        lost = at_once(stock, "publish", name="it")
        for worker in ours:
            worker.ask("publish", name="it")
        assert min(min(x) for x in lost.values()) >= 1.0, f"nothing was lost: {lost}"
        at_once(ours, "call", name="it", topic=TOPIC)
    for worker in ours:
        check_kept(own, worker, 2)
        assert warnings(worker) == []
    for worker in stock:
        assert missed(own, worker) >= 2, worker


@pytest.mark.skipif(
    RELEASE >= (18,), reason="oslo.messaging 18.0 took out heartbeat_in_pthread; 10.1 to 17 have it"
)
def test_with_heartbeat_in_pthread(own: Broker, start: Start) -> None:
    workers = start(*MODELS, ours=True, in_pthread=True)
    time.sleep(IDLE)
    at_once(workers, "publish", name="it", number=3)
    for worker in workers:
        check_kept(own, worker, 1)
        lines = warnings(worker)
        if worker.patch == "none":
            assert lines == []
        else:
            assert len(lines) == 1, lines
            assert WARNED.format(worker.patch) in lines[0]


def test_a_connection_that_the_broker_lost_is_replaced_when_it_is_taken(
    own: Broker, start: Start
) -> None:
    ours, stock = start(*MODELS, ours=True, **LONG), start(*MODELS, ours=False, **LONG)
    before = {worker: worker.log.stat().st_size for worker in ours}
    own.kill()
    own.start()
    lost = at_once(stock, "publish", name="it")
    for worker in stock:
        assert lost[worker][0] >= 1.0, f"{worker}: nothing was lost: {lost}"
    for worker in ours:
        worker.ask("publish", name="it", number=2)
        # stock logs an error and sleeps before it connects again
        assert " ERROR " not in worker.logged(before[worker]), worker
        assert accepted(own, worker) == 2, worker
        found = worker.ask("stats")
        assert (found["connections"], found["dead_peers"], found["reconnections"]) == (1, 1, 1)
        assert found["stopped"] == 0, found
