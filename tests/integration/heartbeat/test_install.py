"""``install()``: what it takes and refuses, and that nothing of it outlives its owner."""

from __future__ import annotations

import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.amqp_worker import HEARTBEAT, MODELS, Crew, at_once
from support.broker import Broker
from support.served import wait_for

# Seconds.
IDLE = 4 * HEARTBEAT

# What it is told


@pytest.mark.parametrize("interval", ["0", "-1", "float('nan')", "float('inf')", "'soon'"])
def test_interval_out_of_range(run: Any, interval: str) -> None:
    """One line that names it; the service goes on."""
    ended = run(f"""
        import amqp
        done = heartbeat.install(interval={interval})
        channel = connect()
        publish(channel)
        say(done=done)
    """)
    assert len(ended.warnings) == 1, ended.printed
    assert "interval" in ended.warnings[0]


def test_interval_over_half(run: Any, rabbit: Broker, request: pytest.FixtureRequest) -> None:
    """Cut to half, with one line however many connections there are."""
    ended = run("""
        say(done=heartbeat.install(interval=50.0))
        channels = [connect() for _ in range(3)]
        idle_until_beats(3)  # one of 50 s would not send any
        for channel in channels:
            publish(channel)
    """)
    assert ended.said["done"] is True
    assert len(ended.warnings) == 1, ended.printed
    assert "50" in ended.warnings[0]
    assert rabbit.missed(request.node.name) == 0


def test_twice(run: Any, rabbit: Broker, request: pytest.FixtureRequest) -> None:
    ended = run("""
        import time
        first = heartbeat.install()
        channel = connect()
        from keyfront.gateway.heartbeat.registry import writer_of
        start = writer_of(channel.connection._transport).kept.written
        second = heartbeat.install(interval=0.3)
        idle_until_beats(3)
        say(seconds=time.monotonic() - start)
        publish(channel)
        say(first=first, second=second)
    """, patch="gevent")
    assert ended.said["first"] is True and ended.said["second"] is True
    again = [x for x in ended.ours if "already" in x or "again" in x or "twice" in x]
    assert len(again) == 1, ended.printed
    assert rabbit.missed(request.node.name) == 0
    # one each half heartbeat, by one thread and as was said first: every 0.3 s would take 0.9
    assert ended.said["seconds"] > 2.6 * HEARTBEAT / 2


def test_again_after_fork(run: Any, rabbit: Broker, request: pytest.FixtureRequest) -> None:
    """As a server does whose workers load what its master has loaded."""
    script = """
        say(parent=heartbeat.install())
        before = connect()
        child = os.fork()
        if not child:
            import amqp
            if "eventlet" in sys.modules:
                import eventlet.hubs
                eventlet.hubs.use_hub()
            try:
                publish(before)
                say(error="none")
            except amqp.exceptions.RecoverableConnectionError as error:
                say(error=str(error))
            say(child=heartbeat.install())
            channel = connect()
            idle()
            publish(channel)
            say(kept=heartbeat.statistics()["connections"])
            os._exit(0)
        idle(settings["idle"] + 1)
        assert os.waitpid(child, 0)[1] == 0
        publish(before)
        say(kept_by_parent=heartbeat.statistics()["connections"])
    """
    with ThreadPoolExecutor() as pool:
        running = {model: pool.submit(run, script, patch=model) for model in MODELS}
        for model, future in running.items():
            ended = future.result()
            said = ended.said
            assert said["parent"] is True and said["child"] is True, model
            assert said["error"] not in ("none", ""), model
            assert said["kept"] == 1 and said["kept_by_parent"] == 1, model
            assert len(ended.ours) <= 3, ended.printed
    assert rabbit.accepted(request.node.name) == 2 * len(MODELS)
    assert rabbit.missed(request.node.name) == 0
    assert rabbit.frame_errors(request.node.name) == 0


def test_connections_of_before(run: Any, rabbit: Broker, request: pytest.FixtureRequest) -> None:
    """And a library that is imported afterwards; one that wants no heartbeat is left alone."""
    ended = run("""
        before, without = connect(), connect(heartbeat=0)
        say(done=heartbeat.install())
        after = connect()
        idle_until_beats(4)  # one alone would take as long again
        say(kept=heartbeat.statistics()["connections"])
        for channel in (before, without, after):
            publish(channel)
    """, patch="eventlet")
    assert ended.said["done"] is True and ended.said["kept"] == 2
    assert rabbit.missed(request.node.name) == 0
    assert rabbit.accepted(request.node.name) == 3


# What it stands on


def test_without_amqp(run: Any) -> None:
    ended = run("""
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("amqp", "kombu", "oslo_messaging"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Blocker())
        say(done=heartbeat.install(), beats=heartbeat.statistics().get("beats", 0))
    """)
    assert ended.said == {"done": False, "beats": 0}
    assert len(ended.warnings) == 1 and "amqp" in ended.warnings[0], ended.printed


DIFFERENT = {
    "transport.write does not go through _write": """
        def write(self, data):
            socket = self.sock
            socket.sendall(data)
        amqp.transport._AbstractTransport.write = write
    """,
    "_write has another name": """
        def set_up(self):
            self._write = self._put = self.sock.sendall
            self._read_buffer = b""
            self._quick_recv = self.sock.recv
        amqp.transport.TCPTransport._setup_transport = set_up
        amqp.transport._AbstractTransport.write = lambda self, data: self._put(data)
    """,
    "no heartbeat_tick": """
        del amqp.Connection.heartbeat_tick
    """,
    "a frame in two writes": """
        make = amqp.method_framing.frame_writer
        def halves(connection, transport):
            class Halves:
                def write(self, data):
                    data = bytes(data)
                    transport.write(data[:5])
                    idle(0.02)
                    transport.write(data[5:])
            return make(connection, Halves())
        amqp.method_framing.frame_writer = halves
        begin = amqp.Connection.__init__
        def init(self, *args, **named):
            begin(self, *args, frame_writer=halves, **named)
        amqp.Connection.__init__ = init
    """,
}


@pytest.mark.parametrize("difference", list(DIFFERENT))
def test_amqp_that_looks_different(
    run: Any, rabbit: Broker, request: pytest.FixtureRequest, difference: str
) -> None:
    """No beat is sent where a beat could come between the bytes of a frame."""
    ended = run(f"""
        import amqp, amqp.method_framing, amqp.transport
        {textwrap.indent(textwrap.dedent(DIFFERENT[difference]), " " * 8).strip()}
        say(done=heartbeat.install(interval=0.005))
        channel = connect()
        for _ in range(20):
            publish(channel)
        say(beats=heartbeat.statistics().get("beats", 0))
    """)
    assert ended.said["beats"] == 0
    assert len(ended.warnings) == 1, ended.printed
    assert rabbit.frame_errors(request.node.name) == 0


@pytest.mark.parametrize("patch", ["eventlet", "gevent"])
def test_killed_in_the_middle_of_a_frame(
    run: Any, rabbit: Broker, request: pytest.FixtureRequest, patch: str
) -> None:
    """Nothing is put after half a frame: a beat there would be read as its content."""
    ended = run("""
        import amqp, socket, time
        from keyfront.gateway.heartbeat.registry import writer_of
        heartbeat.install(interval=0.01)
        channel = connect(heartbeat=60)
        channel.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        spawn, kill = (gevent.spawn, gevent.kill) if "gevent" in sys.modules else (
            eventlet.spawn, eventlet.kill)
        def publish_for_ever():
            while True:
                channel.basic_publish(amqp.Message("x" * 3_000_000), "", routing_key="nobody")
        thread = spawn(publish_for_ever)
        kept = writer_of(channel.connection._transport).kept
        def free():
            return kept.lock.acquire() and not kept.lock.give(None)
        while free() or kept.beating:  # until it stands in the middle of a frame
            time.sleep(0.01)
        kill(thread)
        time.sleep(0.01)
        before = heartbeat.statistics()
        idle(0.3)
        after = heartbeat.statistics()
        say(stopped=after["stopped"], beats=after["beats"] - before["beats"])
    """, patch=patch)
    assert ended.said == {"stopped": 1, "beats": 0}
    assert rabbit.frame_errors(request.node.name) == 0


# What it leaves behind


@pytest.mark.slow
def test_fork(crew: Crew, rabbit: Broker) -> None:
    """A child may neither use its parent's connections nor harm them by ending."""
    ours = crew.of(ours=True)
    at_once(ours, "open", name="it", url=rabbit.url(), threshold=HEARTBEAT)
    at_once(ours, "publish", name="it")
    ports = at_once(ours, "amqp", name="raw", port=rabbit.port, heartbeat=HEARTBEAT)
    at_once(ours, "amqp", name="load", port=rabbit.port, heartbeat=HEARTBEAT)
    accepted = rabbit.accepted()
    before = {x: rabbit.missed(f":{x.pid}:") for x in ours}
    load = {"do": "amqp_publish", "name": "load", "number": 2000, "size": 2000}
    at_once(ours, "start", job="load", command=load)
    refused = at_once(ours, "fork", command={"do": "amqp_publish", "name": "raw"})
    closed = at_once(ours, "fork", command={"do": "amqp_close", "name": "raw"})
    published = at_once(ours, "fork", command={"do": "publish", "name": "it"})
    at_once(ours, "join", job="load")
    for worker in ours:
        assert "RecoverableConnectionError" in refused[worker].get("error", ""), worker
        assert closed[worker] is not None, worker
        assert "value" in published[worker], (worker, published[worker])
    # each child has made one connection, and nobody else any
    assert rabbit.accepted() == accepted + len(ours)
    time.sleep(IDLE)
    at_once(ours, "amqp_publish", name="raw")
    at_once(ours, "publish", name="it")
    for worker in ours:
        assert ports[worker] in rabbit.connections(), worker
        assert rabbit.missed(f":{worker.pid}:") == before[worker], worker
        assert rabbit.frame_errors(f":{worker.pid}:") == 0, worker
    assert rabbit.accepted() == accepted + len(ours)
    for name in ("raw", "load"):
        at_once(ours, "amqp_close", name=name)
    at_once(ours, "close", name="it")


def test_nothing_outlives_its_owner(crew: Crew, rabbit: Broker) -> None:
    """Behind the others: it ends the workers."""
    workers, ours = crew.values(), crew.of(ours=True)
    # a connection that is dropped and not closed
    ports = at_once(workers, "amqp", name="dropped", port=rabbit.port, heartbeat=60)
    assert {x["connections"] for x in at_once(ours, "stats").values()} == {1}
    at_once(workers, "forget", name="dropped")
    at_once(workers, "sleep", seconds=0.01)  # eventlet's own hub forgets a socket when it runs
    at_once(workers, "descriptors")
    wait_for(lambda: not set(ports.values()) & set(rabbit.connections()), "all have gone")
    assert {x["connections"] for x in at_once(ours, "stats").values()} == {0}
    # 40 that are opened and closed
    at_once(workers, "churn", number=5, port=rabbit.port, heartbeat=60)
    before = at_once(workers, "descriptors")
    at_once(ours, "churn", number=40, port=rabbit.port, heartbeat=60)
    assert {x["connections"] for x in at_once(ours, "stats").values()} == {0}
    after = at_once(workers, "descriptors")
    for worker in ours:
        assert after[worker] == before[worker], worker
    # closed ones over TLS, long before their next beat would find out
    at_once(workers, "churn", number=10, port=rabbit.tls_port, heartbeat=60, tls=True)
    assert set(at_once(workers, "tls_objects").values()) == {0}
    # the end of the process, with connections that are open
    for worker in workers:
        worker.ask("open", name="it", url=rabbit.url(), threshold=60)
        worker.ask("publish", name="it")
        worker.ask("amqp", name="open", port=rabbit.port, heartbeat=60)
    seconds = {worker: worker.end() for worker in workers}
    crew.clear()
    with_ours, stock = (sum(t for x, t in seconds.items() if x.ours is y) for y in (True, False))
    # whoever waited for the thread of the beats would wait for half a minute, until the next one
    assert with_ours < 2 * stock + 15, seconds
