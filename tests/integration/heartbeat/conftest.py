"""What the heartbeat's tests share: workers, a broker, and scripts in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from support.amqp_worker import HEARTBEAT, Crew
from support.broker import Broker, broker
from support.served import PATIENCE

# Seconds.
IDLE = 4 * HEARTBEAT

# What each process has: connect() and publish() by py-amqp, transport() and client() by
# oslo.messaging, idle() without a hub, and say() for the test.
COMMON = """
import _socket, atexit, json, os, signal, sys, urllib.parse
from keyfront.gateway import heartbeat
import logging
logging.basicConfig(stream=sys.stderr, format="LOG %(levelname)s %(name)s %(message)s", level=10)
for chatty in ("amqp", "amqp.connection.Connection.heartbeat_tick"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
settings = json.loads(sys.argv[1])
sys.argv[0] = settings["name"]  # with which oslo.messaging's names of connections begin

def hang_up():
    "No heartbeat is sent any more, and beside others it takes an interpreter seconds to end."
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = _socket.socket(fileno=os.dup(number))
            if copy.getpeername()[1] in (settings["port"], settings["tls_port"]):
                copy.shutdown(_socket.SHUT_RDWR)
        except OSError:  # none of the broker's
            pass

# called after the heartbeat's own, which is registered later
atexit.register(hang_up)

def say(**found):
    print(json.dumps(found), flush=True)

def connect(heartbeat=settings["heartbeat"]):
    import amqp
    name = settings["name"]
    connection = amqp.Connection(
        "127.0.0.1:%d" % settings["port"], heartbeat=heartbeat, login_method="PLAIN",
        client_properties={"connection_name": name})
    connection.connect()
    return connection.channel()

def publish(channel):
    import amqp
    channel.basic_publish(amqp.Message("x" * 20), "", routing_key="nobody")
    # an answer: the broker has read all of it
    channel.queue_declare("", exclusive=True)

def transport(tls=False, **options):
    import oslo_messaging
    from oslo_config import cfg
    cfg.CONF([], project="service", default_config_files=[])
    port = settings["tls_port" if tls else "port"]
    options = {"heartbeat_timeout_threshold": settings["heartbeat"], **options}
    if tls:
        options |= {"ssl": True, "ssl_ca_file": settings["ca"]}
    query = urllib.parse.urlencode(options)
    return oslo_messaging.get_rpc_transport(
        cfg.CONF, "rabbit://guest:guest@127.0.0.1:%d//?%s" % (port, query))

def client(transport):
    import oslo_messaging
    return oslo_messaging.get_rpc_client(transport, oslo_messaging.Target(topic="nobody"))

def burst(transport, number):
    "So many connections of the pool at once, and back."
    lent = [transport._driver._get_connection() for _ in range(number)]
    for context in lent:
        context.close()

def idle(seconds=settings["idle"]):
    signal.sigtimedwait([], seconds)  # natively: no hub runs

def idle_until_beats(number):
    while heartbeat.statistics()["beats"] < number:
        idle(0.02)
"""


class Ended:
    """What a process said and logged."""

    def __init__(self, done: subprocess.CompletedProcess[str], name: str) -> None:
        assert done.returncode == 0, done.stdout + done.stderr
        self._name = name
        self.said: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            self.said |= json.loads(line)
        self.lines = [x for x in done.stderr.splitlines() if x.startswith("LOG ")]
        self.ours = [x for x in self.lines if " keyfront.gateway.heartbeat" in x]
        self.warnings = [x for x in self.ours if x.startswith("LOG WARNING")]
        self.printed = done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert "guest:guest" not in done.stderr

    @property
    def connections(self) -> str:
        """How the names of oslo.messaging's connections begin; a number alone comes again."""
        return f"{self._name}:{self.said['pid']}:"


@pytest.fixture
def run(rabbit: Broker, request: pytest.FixtureRequest) -> Any:
    """Runs a script and gives what it said; the broker's counts are of its name only."""

    def run(script: str, *, patch: str = "none", **settings: object) -> Ended:
        patches = {
            "none": "",
            "eventlet": "import warnings; warnings.simplefilter('ignore')\n"
                        "import eventlet; eventlet.monkey_patch()",
            "gevent": "import gevent.monkey; gevent.monkey.patch_all(); import gevent",
        }
        chosen = {
            "port": rabbit.port, "tls_port": rabbit.tls_port, "heartbeat": HEARTBEAT, "idle": IDLE,
            "ca": str(rabbit.certificates.ca_file) if rabbit.certificates else "",
            "name": request.node.name, **settings,
        }
        # What oslo.messaging imports of eventlet without its being used is half of the start.
        quick = {} if patch == "eventlet" else {"EVENTLET_NO_GREENDNS": "yes"}
        return Ended(subprocess.run(
            [sys.executable, "-c", f"{patches[patch]}\n{COMMON}\n{textwrap.dedent(script)}",
             json.dumps(chosen)],
            capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
            env={**os.environ, "PYTHONWARNINGS": "ignore", **quick},
        ), chosen["name"])

    return run


@pytest.fixture(scope="session")
def everybody() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    for worker in crew.values():
        worker.kill()


@pytest.fixture
def crew(everybody: Crew, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Workers without connections, whose hubs stand still; close what you open in them."""
    everybody.fill(lambda: tmp_path_factory.mktemp("worker"))
    everybody.ask("mode", hub=False)
    yield everybody
    everybody.weed()


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that may be killed, stopped and blocked, if it runs as before afterwards."""
    with broker(tmp_path_factory.mktemp("own")) as running:
        yield running
