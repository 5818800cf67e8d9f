"""Heartbeats between the frames of a busy connection: nothing is torn, lost or closed.

Each case has a publisher whose beats are due every millisecond, or more often, and a consumer that
checks what comes, both processes of their own; two cases run at a time. The whole form is

    KEYFRONT_HEARTBEAT_FRAMES=10000 pytest tests/integration/heartbeat/test_frames.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.broker import Broker, Seen
from support.certificates import Certificates
from support.frame_publisher import Task
from support.heartbeat_servers import SHAPES, running
from support.served import PATIENCE

COUNT = int(os.environ.get("KEYFRONT_HEARTBEAT_FRAMES", "600"))
# Seconds for a case; a bound on a hang. All over one connection is slow with and without beats.
BOUND = PATIENCE + COUNT / 20
# Seconds between beats. Eight writers on one connection leave it idle for less than one of them.
INTERVAL = 0.001
SHARED_INTERVAL = 0.00005
# Some between the frames; a fast machine is done with them soon.
LEAST_BEATS = COUNT // 200
# Messages of one request.
EACH = 10
# What RabbitMQ logs of a connection that is closed as AMQP wants it.
_GOOD = re.compile(
    r"^(accepting AMQP connection|[Cc]onnection .* has a client-provided name"
    r"|connection .*authenticated and granted access|closing AMQP connection <.*user: 'guest'\)$)"
)


@dataclass(frozen=True)
class Case:
    """A publisher."""

    patch: str
    tls: bool = False
    shared: bool = False
    beats: str = "ours"

    def __str__(self) -> str:
        transport, connections = "tls" if self.tls else "plain", "one" if self.shared else "eight"
        return f"{self.patch}-{transport}-{connections}-{self.beats}"


# py-amqp itself does not bear that one connection is used by plain threads, nor by green threads of
# eventlet if it has TLS ("Second simultaneous read"): both fail the same way without a heartbeat.
CASES = [
    Case("none"),
    Case("none", tls=True),
    Case("eventlet"),
    Case("eventlet", shared=True),
    Case("eventlet", tls=True),
    Case("gevent"),
    Case("gevent", shared=True),
    Case("gevent", tls=True),
    Case("gevent", tls=True, shared=True),
]
RAW = [Case(patch, beats="raw") for patch in ("none", "eventlet", "gevent")]


class Result(NamedTuple):
    """What came of a case."""

    publisher: dict[str, Any]
    consumer: dict[str, int]
    connections: int
    complaints: list[str]
    """What RabbitMQ's log says of them beyond their coming and going."""


@pytest.fixture(scope="module")
def made(rabbit: Broker) -> Certificates:
    """The certificates that the broker shows."""
    assert rabbit.certificates is not None
    return rabbit.certificates


def _end(program: subprocess.Popen[str], seconds: float = BOUND) -> dict[str, Any]:
    try:
        out, err = program.communicate(timeout=seconds)
    finally:
        program.kill()
    assert program.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _complaints(seen: Seen) -> list[str]:
    """Lines of a connection that was not made, named, used and closed in good order."""
    return [line for line in seen.lines if not _GOOD.search(line)]


def run(case: Case, rabbit: Broker, ca_file: Path, folder: Path, count: int = COUNT) -> Result:
    """Let a case run to its end."""
    task = Task(
        patch=case.patch,
        host=rabbit.host,
        port=(case.tls and rabbit.tls_port) or rabbit.port,
        queue=f"frames-{case}",
        count=count,
        shared=case.shared,
        ca_file=str(ca_file) if case.tls else None,
        beats=case.beats,
        interval=SHARED_INTERVAL if case.shared else INTERVAL,
        folder=str(folder),
    )
    # the consumer has nothing to prove about TLS
    consumer = replace(task, port=rabbit.port).program("consume")
    try:
        assert consumer.stdout is not None
        started = consumer.stdout.readline()
        assert started == "ready\n", consumer.communicate()
        sent = _end(task.program("publish"))
        # what was torn is not waited for
        received = _end(consumer) if not sent["errors"] else {}
    finally:
        consumer.kill()
        consumer.communicate()
    seen = rabbit.seen(task.queue)
    return Result(sent, received, len(seen), [line for each in seen for line in _complaints(each)])


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, rabbit: Broker, made: Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Case, Future[Result]]]:
    """All cases that are asked for, two at a time."""
    wanted = {
        item.callspec.params.get("case")  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    folder = tmp_path_factory.mktemp("counts")
    with ThreadPoolExecutor(2) as pool:
        futures = {
            case: pool.submit(run, case, rabbit, made.ca_file, folder)
            for case in CASES
            if case in wanted
        }
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_frame_arrives_whole(case: Case, results: dict[Case, Future[Result]]) -> None:
    result = results[case].result()
    sent = result.publisher
    assert sent["errors"] == []
    assert sent["in_force"] is True
    assert sent["published"] == COUNT
    assert result.consumer == {"verified": COUNT, "bad": 0, "twice": 0, "disordered": 0, "lost": 0}
    assert result.complaints == []
    assert result.connections == sent["counts"]["opened"] == (1 if case.shared else 8)
    assert sent["counts"]["stopped"] == 0
    # without them it would prove nothing
    assert sent["counts"]["beats"] >= LEAST_BEATS, sent


@dataclass(frozen=True)
class Served:
    """A service that publishes in concurrent requests."""

    shape: str
    patch: str
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.shape}-{self.patch}-{'tls' if self.tls else 'plain'}"


# The first ones always, all in the whole form. Threads in a patched process are broken at the base.
SERVED = [
    Served("uWSGI", "none"),
    Served("uWSGI", "eventlet"),
    Served("uWSGI", "gevent"),
    Served("mod_wsgi daemon, event", "eventlet"),
    Served("uWSGI threads=4", "none"),
    Served("uWSGI gevent=20", "gevent"),
    Served("uWSGI gevent=20", "gevent", tls=True),
    Served("uWSGI", "eventlet", tls=True),
    Served("uWSGI", "gevent", tls=True),
    Served("mod_wsgi daemon, prefork", "eventlet"),
    Served("mod_wsgi daemon, event", "gevent"),
    Served("mod_wsgi daemon, event, threads=5", "none"),
    Served("mod_wsgi embedded, event", "eventlet"),
    Served("eventlet.wsgi", "eventlet"),
    Served("gevent.pywsgi", "gevent"),
][: None if COUNT >= 10_000 else 4]


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVED, ids=str)
def test_every_frame_of_a_server_arrives_whole(
    service: Served, rabbit: Broker, made: Certificates, tmp_path: Path
) -> None:
    name = f"served-{service}".replace(" ", "").replace(",", "-").replace("=", "")
    environment = {
        "HB_URL": rabbit.url(tls=service.tls),
        "HB_PATCH": service.patch,
        "HB_INSTALL": "code",
        "HB_INTERVAL": str(INTERVAL),
        "HB_NAME": name,
        # nobody else beats meanwhile
        "HB_THRESHOLD": "60",
        **({"HB_CA": str(made.ca_file)} if service.tls else {}),
    }
    with running(SHAPES[service.shape], tmp_path / "server", environment) as server:
        # it makes the exchange; nobody gets it
        server.get("/publish")
        task = Task("none", rabbit.port, name, COUNT, host=rabbit.host)
        consumer = task.program("consume-casts")
        try:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "ready\n", consumer.communicate()

            def publish(number: int) -> int:
                size = 150_000 if number % 10 == 0 else 20 + number * 37 % 3000
                return len(server.get("/publish", n=EACH, size=size)["seconds"])

            with ThreadPoolExecutor(8) as pool:
                sent = sum(pool.map(publish, range(COUNT // EACH)))
            received = _end(consumer)
        finally:
            consumer.kill()
            consumer.communicate()
        counts = server.get("/stats")
        seen = rabbit.seen(server.client_name)
        complaints = [line for each in seen for line in _complaints(each)]
    assert sent == COUNT
    assert received == {"verified": COUNT, "bad": 0, "twice": 0, "disordered": 0, "lost": 0}
    assert complaints == []
    # none was lost and made again
    assert counts["connections"] == counts["opened"] == len(seen)
    assert counts["stopped"] == counts["reconnections"] == 0
    assert counts["beats"] >= LEAST_BEATS, counts


@pytest.mark.parametrize("case", RAW, ids=str)
def test_beats_that_ask_nobody_are_found_out(
    case: Case, rabbit: Broker, made: Certificates, tmp_path: Path
) -> None:
    result = run(case, rabbit, made.ca_file, tmp_path, 10_000)
    assert result.publisher["errors"]
    assert result.publisher["published"] < 10_000
    assert result.complaints
