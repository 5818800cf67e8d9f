"""What the heartbeat does when a part fails: the broker, the network, the process itself.

Every case runs in workers that are not patched, or patched by eventlet or gevent, and in the same
with oslo.messaging as it comes: what that does is the control, without which a test would not
know whether it tests anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

import pytest

from support.amqp_worker import HEARTBEAT, MODELS, Crew, Worker, at_once
from support.broker import Broker
from support.fault_proxy import FaultProxy
from support.processes import stop
from support.served import wait_for

pytestmark = pytest.mark.slow

# Seconds.
IDLE = 4 * HEARTBEAT
# A heartbeat that ends no connection, where that is not the subject; rate 1: oslo.messaging's own
# thread looks every 30 s, and does not repair in the meantime what the test has broken.
LONG = {"threshold": 60, "rate": 1}
SLOW = os.environ.get("KEYFRONT_HEARTBEAT_SLOW") == "1"
GREEN = ("eventlet", "gevent")
# Seconds that a hub may stand still while its process runs, or twice what it does without us. What
# it writes into its log may have to wait for the disk.
STANDSTILL = 0.2


@pytest.fixture
def proxies(crew: Crew, rabbit: Broker) -> Iterator[dict[Worker, FaultProxy]]:
    """A network of its own for each worker."""
    with contextlib.ExitStack() as stack:
        yield {x: stack.enter_context(FaultProxy(rabbit.port)) for x in crew.values()}


def open_through(proxies: dict[Worker, FaultProxy], rabbit: Broker, **heartbeat: int) -> None:
    """A transport each through its own proxy, with a connection that was used."""
    for worker, proxy in proxies.items():
        url = rabbit.url(port=proxy.port)
        worker.tell("open", name="it", url=url, **(heartbeat or {"threshold": HEARTBEAT}))
    for worker in proxies:
        worker.answer()
    at_once(proxies, "publish", name="it")


def missed(rabbit: Broker, worker: Worker) -> int:
    return rabbit.missed(f":{worker.pid}:")


def marks(workers: Iterable[Worker]) -> dict[Worker, int]:
    """Where the logs end now."""
    return {x: x.log.stat().st_size for x in workers}


def listen(crew: Crew, urls: dict[Worker, str]) -> None:
    """In each worker an RPC server, and who has called it."""
    for name in ("server", "caller"):
        for worker, url in urls.items():
            worker.ask("open", name=name, url=url, threshold=HEARTBEAT)
    for worker in crew.values():
        worker.ask("listen", name="server", topic=f"heard-{worker}-{worker.pid}")
    check_calls(crew)


def check_calls(crew: Crew) -> None:
    for worker in crew.values():
        worker.tell("call", name="caller", topic=f"heard-{worker}-{worker.pid}")
    for worker in crew.values():
        worker.answer()


def check_replaced_at_once(
    crew: Crew, seconds: dict[Worker, list[float]], models: Iterable[str] = MODELS
) -> None:
    for model, ours, stock in crew.pairs(seconds):
        if model not in models:
            continue
        assert stock[0] >= 1.0, f"{model}: nothing was broken: {stock}"
        assert ours[0] < stock[0] / 2, f"{model}: {ours} against {stock}"


def check_log(crew: Crew, before: dict[Worker, int]) -> None:
    """With ours, nobody is told that a server is unreachable which is not."""
    for worker in crew.of(ours=True):
        assert " ERROR " not in worker.logged(before[worker]), worker.name
    for worker in crew.of(ours=False):
        assert "is unreachable" in worker.logged(before[worker]), worker.name


def check_hub(crew: Crew) -> None:
    """No hub stood still because of us, and all write on into their logs."""
    first = crew.ask("stall")
    for model, ours, stock in crew.pairs(first):
        allowed = max(STANDSTILL, 2 * stock["stall"])
        assert ours["stall"] < allowed, f"{model}: {ours} against {stock}"
    for worker, later in crew.ask("stall").items():
        assert later["records"] > first[worker]["records"], f"{worker} logs no more"


# The process


def test_computing_in_a_request(crew: Crew, rabbit: Broker) -> None:
    before = {x: missed(rabbit, x) for x in crew.values()}
    crew.open(rabbit.url())
    crew.ask("burn", seconds=IDLE)
    crew.ask("publish", name="it")
    for worker in crew.of(ours=True):
        assert missed(rabbit, worker) == before[worker], worker
    for worker in crew.of(*GREEN, ours=False):
        wait_for(
            lambda x=worker: missed(rabbit, x) > before[x],
            f"{worker} is lost, or nothing is tested",
        )
    crew.ask("close", name="it")


def test_idle_and_stopped(
    crew: Crew, rabbit: Broker, proxies: dict[Worker, FaultProxy]
) -> None:
    """All kinds of connections, idle; then the process stopped, as a suspended machine is."""
    before = {x: missed(rabbit, x) for x in crew.values()}
    crew.open(rabbit.url())
    listen(crew, {x: rabbit.url() for x in crew.values()})
    ours, publisher = crew.of(ours=True), crew["none", False]
    for worker, proxy in proxies.items():
        url = rabbit.amqp_url(port=proxy.port)
        worker.ask("kombu", name="pool", url=url, heartbeat=HEARTBEAT)
        worker.ask("kombu_publish", name="pool")
    reads = [(x, f"read-{x}-{tls}", tls) for x in ours for tls in (False, True)]
    for worker, name, tls in reads:
        # who waits for messages without end: over TLS inside OpenSSL, where not patched
        port = rabbit.tls_port if tls else rabbit.port
        worker.ask("amqp", name=name, port=port, heartbeat=HEARTBEAT, tls=tls)
        receive = {"do": "amqp_receive", "name": name, "number": 2}
        worker.ask("start", job=name, command=receive)
        publisher.ask("amqp", name=name, port=rabbit.port, heartbeat=60)
        publisher.ask("amqp_publish", name=name)
    # whoever is green begins to read, and is left in the middle of it
    at_once(ours, "sleep", seconds=0.2)
    time.sleep(IDLE)

    # before any hub runs again
    for worker in ours:
        assert missed(rabbit, worker) == before[worker], worker
    for worker in crew.of(*GREEN, ours=False):
        # the publisher's connection, the caller's two and the listener's two or three
        wait_for(
            lambda x=worker: missed(rabbit, x) >= before[x] + 4,
            f"{worker} is lost, or nothing is tested",
        )
    seconds = crew.publish_after_a_fault()
    for model in GREEN:
        assert seconds[crew[model, True]][0] < seconds[crew[model, False]][0] / 2, model
    for worker, name, _ in reads:
        publisher.ask("amqp_publish", name=name)
        assert worker.ask("join", job=name) == 2
        assert rabbit.accepted(f":{worker.pid}:{name}") == 1, name
        publisher.ask("amqp_close", name=name)
        worker.ask("amqp_close", name=name)
    check_pools_of_kombu(proxies)
    check_calls(crew)

    for worker in crew.values():
        stop(worker.process.pid)
    time.sleep(IDLE)
    for worker in crew.values():
        worker.process.send_signal(signal.SIGCONT)
    check_replaced_at_once(crew, crew.publish_after_a_fault(), GREEN)
    for worker in ours:
        assert rabbit.missed(f":{worker.pid}:pool") <= 1, worker
    check_calls(crew)
    for name in ("it", "caller", "server"):
        crew.ask("close", name=name)
    crew.ask("kombu_close", name="pool")


def check_pools_of_kombu(proxies: dict[Worker, FaultProxy]) -> None:
    """Kept alive; one that was lost is replaced when it is borrowed."""
    for worker, proxy in proxies.items():
        if worker.ours:
            worker.ask("kombu_publish", name="pool")
            assert proxy.accepted == 1, worker
            proxy.reset()
            wait_for(lambda x=worker, y=proxy: y.port not in x.brokers(), "it is reset")
            worker.ask("kombu_publish", name="pool")
            assert proxy.accepted == 2, worker
        else:
            # nobody sends a heartbeat for kombu itself, in no model
            with pytest.raises(AssertionError, match=r"ConnectionReset|BrokenPipe"):
                worker.ask("kombu_publish", name="pool")


# The broker


def test_broker_killed(crew: Crew, own: Broker) -> None:
    """And started again, while all are idle."""
    crew.open(own.url(), **LONG)
    crew.open(own.url(), "impatient", **LONG)
    own.kill()
    try:
        crew.ask("fail", name="impatient")
        failed = crew.ask("fail", name="impatient")
    finally:
        own.start()
    for model, ours, stock in crew.pairs(failed):
        # a service that does not try again is told as soon as ever
        assert ours < stock + 0.5, model
    before = marks(crew.values())
    check_replaced_at_once(crew, crew.publish_after_a_fault())
    check_log(crew, before)
    for name in ("it", "impatient"):
        crew.ask("close", name=name)


def test_second_broker(crew: Crew, own: Broker, rabbit: Broker) -> None:
    """The one they are connected to dies: the next message goes to the other."""
    both = f"{own.url().rstrip('/')},{rabbit.url().partition('://')[2]}"
    crew.ask("open", name="it", url=both, **LONG)
    left = set(crew.values())
    for _ in range(20):
        # oslo.messaging begins with one of them at random
        at_once(left, "publish", name="it")
        left = {x for x in left if own.port not in x.brokers()}
        if not left:
            break
        at_once(left, "close", name="it")
        at_once(left, "open", name="it", url=both, **LONG)
    assert not left
    own.kill()
    try:
        check_replaced_at_once(crew, crew.publish_after_a_fault())
        for worker in crew.values():
            assert worker.brokers() == {rabbit.port}, worker
    finally:
        own.start()
    crew.ask("close", name="it")


def test_connection_closed_by_the_broker(crew: Crew, own: Broker) -> None:
    crew.open(own.url(), **LONG)
    before = marks(crew.values())
    opened = {x: own.accepted(f":{x.pid}:") for x in crew.values()}
    own.ask('[rabbit_networking:close_connection(X, "a test") || X <- '
               "rabbit_networking:connections()]")
    check_replaced_at_once(crew, crew.publish_after_a_fault())
    check_log(crew, before)
    for worker in crew.values():
        assert own.accepted(f":{worker.pid}:") == opened[worker] + 1, worker
    crew.ask("close", name="it")


def test_broker_stopped(crew: Crew, own: Broker) -> None:
    """For a while nobody answers, and every connection stays."""
    crew.ask("mode", hub=True)
    crew.open(own.url())
    crew.ask("open", name="caller", url=own.url(), threshold=HEARTBEAT)
    crew.ask("open", name="listener", url=own.url(), threshold=HEARTBEAT)
    for worker in crew.values():
        worker.ask("listen", name="listener", topic=f"topic-{worker}")
        worker.ask("call", name="caller", topic=f"topic-{worker}")
    crew.ask("stall")
    own.pause()
    try:
        time.sleep(30 if SLOW else 2.5 * HEARTBEAT)
        for worker in crew.values():
            call = {"do": "call", "name": "caller", "topic": f"topic-{worker}"}
            worker.ask("start", job="call", command=call)
            worker.ask("start", job="cast", command={"do": "publish", "name": "it"})
        time.sleep(HEARTBEAT)
        # how long a hub stood still, while nobody answers it
        check_hub(crew)
    finally:
        own.resume()
    crew.ask("join", job="cast")
    crew.ask("join", job="call")
    check_hub(crew)
    for name in ("it", "caller", "listener"):
        crew.ask("close", name=name)


def test_memory_alarm(crew: Crew, own: Broker) -> None:
    """A broker that reads no more from who publishes, for long, still keeps the connection."""
    ports = {}
    for worker in crew.of(ours=True):
        ports[worker] = worker.ask(
            "amqp", name=f"blocked-{worker}", port=own.port, heartbeat=HEARTBEAT
        )
    own.block()
    try:
        for worker in ports:
            worker.ask("amqp_publish", name=f"blocked-{worker}")
        time.sleep(IDLE)
    finally:
        own.unblock()
    for worker, port in ports.items():
        name = f"blocked-{worker}"
        worker.ask("amqp_publish", name=name)
        worker.ask("amqp_receive", name=name, number=2)
        assert port in own.connections(f":{worker.pid}:{name}"), worker
        worker.ask("amqp_close", name=name)


# The network


def test_silence_is_noticed(
    crew: Crew, rabbit: Broker, proxies: dict[Worker, FaultProxy]
) -> None:
    """Where green threads run nobody has to publish for it: a new connection is made."""
    crew.ask("mode", hub=True)
    open_through(proxies, rabbit)
    crew.ask("stall")
    for proxy in proxies.values():
        proxy.half_open()
    started = time.monotonic()
    for worker in crew.of(ours=True):
        proxies[worker].wait_for_accepted(2)
    time.sleep(max(0.0, started + 5 * HEARTBEAT - time.monotonic()))
    for worker in crew.of(ours=False):
        assert proxies[worker].accepted == 1, f"{worker}: has oslo.messaging been mended?"
    check_hub(crew)
    check_replaced_at_once(crew, crew.publish_after_a_fault())
    crew.ask("close", name="it")


def test_reset(crew: Crew, rabbit: Broker, proxies: dict[Worker, FaultProxy]) -> None:
    listen(crew, {x: rabbit.url(port=proxy.port) for x, proxy in proxies.items()})
    open_through(proxies, rabbit, **LONG)
    for proxy in proxies.values():
        proxy.reset()
    check_replaced_at_once(crew, crew.publish_after_a_fault())
    # those who listen come back by themselves, and may have to wait for it
    check_calls(crew)
    for name in ("it", "caller", "server"):
        crew.ask("close", name=name)


def test_cut_while_publishing(
    crew: Crew, rabbit: Broker, proxies: dict[Worker, FaultProxy]
) -> None:
    """Half a frame on its way is the end of that connection; the next one is kept as well."""
    open_through(proxies, rabbit)
    received = {x: proxy.received("request") for x, proxy in proxies.items()}
    # more than all buffers on the way take while nothing is passed on
    for worker, proxy in proxies.items():
        proxy.stall()
        worker.tell("publish", name="it", size=24_000_000)
    for worker, proxy in proxies.items():
        proxy.wait_for_bytes("request", received[worker] + 2_000_000)
        proxy.reset()
        proxy.forward()
    for worker in crew.values():
        worker.answer()
    for worker in crew.of(ours=True):
        now = worker.ask("stats")
        assert now["connections"] == 1, worker
        wait_for(
            lambda worker=worker, beats=now["beats"]: worker.ask("stats")["beats"] > beats,
            f"{worker} beats on the new connection",
        )
        assert rabbit.frame_errors(f":{worker.pid}:") == 0, worker
    crew.ask("close", name="it")


def test_silence(crew: Crew, rabbit: Broker) -> None:
    """A peer that is gone and did not say so, while no hub runs; found out before it matters."""
    ways = ("half_open", "stall", "black_hole")
    with contextlib.ExitStack() as stack:
        lost = {
            (x, way): stack.enter_context(FaultProxy(rabbit.port))
            for way in ways for x in crew.values() if x.ours or way == "half_open"
        }
        for (worker, way), proxy in lost.items():
            url = rabbit.url(port=proxy.port)
            worker.ask("open", name=way, url=url, threshold=HEARTBEAT)
            worker.ask("publish", name=way)
        for (_, way), proxy in lost.items():
            getattr(proxy, way)()
        time.sleep(3 * HEARTBEAT)
        for proxy in lost.values():
            proxy.forward()
        stock = at_once(crew.of(*GREEN, ours=False), "publish", name="half_open")
        for worker, way in lost:
            if worker.ours and worker.patch in GREEN:
                control = stock[crew[worker.patch, False]][0]
                assert control >= 1.0, f"{worker}: nothing was broken: {control}"
                seconds = worker.ask("publish", name=way)[0]
                assert seconds < control / 2, f"{worker}, {way}: {seconds} against {control}"
        for worker, way in lost:
            worker.ask("close", name=way)
