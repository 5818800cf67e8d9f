"""Two nodes behind HAProxy, as rendered, are restarted one after the other: nobody is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from keyfront.gateway.node.counters import read
from keyfront.gateway.plan.workload import Workload
from support import APPS
from support.deployments import Deployment, deployed
from support.programs import own_folder, running
from support.served import PATIENCE, wait_for

CLIENTS = 4
# Seconds between an answer and its client's next request: without, clients alone occupy all cores.
BREATH = 0.01
_GET = b"GET /metrics HTTP/1.0\r\n\r\n"


@dataclass
class Load:
    """Clients that send one request after the other through HAProxy, and who answered them."""

    balancer: Deployment
    workers: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def send(self) -> None:
        connection = self.balancer.connect()
        while not self.over.is_set():
            try:
                connection.request("GET", "/")
                answer = connection.getresponse()
                body = answer.read()
                if answer.status == 200:
                    self.workers.append(int(body))
                else:
                    self.failures.append(f"{answer.status} {body!r}")
            except (OSError, HTTPException) as error:
                self.failures.append(repr(error))
            self.over.wait(BREATH)
        connection.close()

    def recent(self) -> set[int]:
        """The workers of many answers from now on."""
        before = len(self.workers)
        wait_for(
            lambda: self.failures or len(self.workers) > before + 20 * CLIENTS,
            "they are answered",
        )
        assert self.failures == []
        return set(self.workers[before + CLIENTS :])


@pytest.fixture(scope="module")
def again() -> Iterator[ExitStack]:
    """What is started anew, until the last test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def site(again: ExitStack) -> Iterator[tuple[Deployment, Deployment, Deployment]]:
    """HAProxy and its two nodes."""
    with ExitStack() as stack:
        made: list[Deployment] = []
        for name in ("nginx+uwsgi", "nginx+uwsgi", "haproxy"):
            folder = stack.enter_context(own_folder("drain"))
            folder.chmod(0o711)
            environment = {"PYTHONPATH": str(APPS), "HOLD_FOLDER": str(folder)}
            deployment = stack.enter_context(
                deployed(
                    folder, name, target="waiting_app:application", environment=environment,
                    pair=made[0].folder if made else None, trusted=("127.0.0.1",),
                    nodes=tuple(made) if name == "haproxy" else (),
                    # On a busy machine requests wait for more than the second of the usual
                    # workload here, and one is held for as long as the nodes take to notice.
                    workload=Workload(latency=60),
                )
            )
            made.append(deployment)
        for deployment in made:
            wait_for(lambda x=deployment: _asked(x, "/readyz")[0] == 200, "it is ready")
        yield made[0], made[1], made[2]


def _asked(deployment: Deployment, path: str, source: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = deployment.connect(source)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def _drain(node: Deployment, *words: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.prefix, "bin", "keyfront")), "drain", str(node.folder / "uwsgi.ini")]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _workers(node: Deployment) -> set[int]:
    """The processes that serve a node's application."""
    return set(read(node.folder / "run/app/node").workers)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_rolling_restart_loses_nobody(
    site: tuple[Deployment, Deployment, Deployment], again: ExitStack
) -> None:
    *nodes, balancer = site
    load = Load(balancer)
    clients = [_in_thread(load.send) for _ in range(CLIENTS)]
    with ExitStack() as stack:
        stack.callback(load.over.set)
        load.recent()
        for number, node in enumerate(nodes):
            before = _workers(node)
            wait_for(lambda x=before: load.recent() & x, "HAProxy asks this node")
            # a request that lasts: no drain ends before it
            held: list[tuple[int, bytes]] = []
            holding = _in_thread(lambda x=node, y=held: y.append(_asked(x, "/hold/long")))
            wait_for((node.folder / "long.held").exists, "it is held")
            with _drain(node) as draining:
                wait_for(lambda x=node: _asked(x, "/readyz")[0] == 503, "it is not ready")
                wait_for(lambda x=before: not load.recent() & x, "HAProxy sends it nothing more")
                assert _asked(node, "/livez")[0] == 200
                assert draining.poll() is None
                (node.folder / "long.go").touch()
                output, _ = draining.communicate(timeout=PATIENCE)
            holding.join()
            assert held[0][0] == 200
            assert (draining.returncode, output.splitlines()[-1]) == (0, b"nothing runs any more")
            process = node.processes[0]
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
            uwsgi = [str(Path(sys.prefix, "bin", "uwsgi")), "--ini", f"{node.folder}/uwsgi.ini"]
            environment = {"PYTHONPATH": str(APPS), "HOLD_FOLDER": str(node.folder)}
            log = node.folder / "log" / f"again-{number}.out"
            again.enter_context(running(uwsgi, log, signal.SIGTERM, environment=environment))
            # a worker that is started while the node is drained does not end the drain
            wait_for(lambda x=node: b"draining" in _asked(x, "/readyz")[1], "it answers, drained")
            with _drain(node, "--undo") as undone:
                assert undone.wait(PATIENCE) == 0
            wait_for(lambda x=node: _asked(x, "/readyz")[0] == 200, "it is ready again")
            assert not _workers(node) & before
            wait_for(lambda x=node: load.recent() & _workers(x), "HAProxy asks the new workers")
        load.over.set()
        for client in clients:
            client.join()
        assert load.failures == []


def test_the_detail_is_for_this_machine_only(
    site: tuple[Deployment, Deployment, Deployment],
) -> None:
    node, _, balancer = site
    status, body = _asked(node, "/readyz")
    assert status == 200
    assert "parts" in json.loads(body)
    # HAProxy tells for whom it asks
    for asked in (_asked(balancer, "/readyz"), _asked(balancer, "/livez")):
        assert asked[0] == 200
    assert os.listdir(node.folder / "run/app/node")


def test_prometheus_reads_what_a_node_counts(
    site: tuple[Deployment, Deployment, Deployment], tmp_path: Path
) -> None:
    """Served at a unix socket, and printed: the requests of this test among others."""
    node = site[0]
    keyfront = str(Path(sys.prefix, "bin", "keyfront"))
    command = [keyfront, "metrics", str(node.folder / "uwsgi.ini"), "--tokens", str(tmp_path)]
    path = node.folder / "metrics.sock"

    def number(name: str) -> float:
        (line,) = [line for line in _raw(path, _GET).splitlines() if line.startswith(f"{name} ")]
        return float(line.rpartition(" ")[2])

    listening = [*command, "--listen", f"unix:{path}"]
    with running(listening, tmp_path / "metrics.out", signal.SIGTERM) as process:
        # it is there before it listens
        wait_for(lambda: _listens(path), "it listens")
        assert path.stat().st_mode & 0o777 == 0o660
        before = number("keyfront_requests_total")
        for _ in range(5):
            assert _asked(node, "/")[0] == 200
        assert number("keyfront_requests_total") >= before + 5
        assert number("keyfront_workers") == len(_workers(node))
        assert number("keyfront_queue_seconds_count") > 0
        assert "404" in _raw(path, b"GET /v3 HTTP/1.0\r\n\r\n")
        # a client that says nothing keeps nobody waiting
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(path))
            assert number("keyfront_workers") > 0
    assert process.returncode == 0
    text = subprocess.check_output(command, text=True)
    assert 'keyfront_source_up{source="node"} 1.0' in text
    # what names the folder of no token cache is told of, and takes nothing else away
    assert 'keyfront_source_up{source="tokens"} 0.0' in text


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def _raw(path: Path, request: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(request)
        with client.makefile("rb") as file:
            return file.read().decode()


def test_without_a_ready_node_those_that_live_answer(
    site: tuple[Deployment, Deployment, Deployment],
) -> None:
    """What all nodes share takes none of them away: a drain of both stands for it."""
    *nodes, balancer = site
    for node in nodes:
        with _drain(node, "--notice", "0", "--timeout", "0") as draining:
            assert draining.wait(PATIENCE) in (0, 1)
    stats = balancer.folder / "run/keyfront-haproxy.sock"
    wait_for(lambda: _servers_up(stats, "keyfront_nodes") == 0, "HAProxy sees no ready node")
    load = Load(balancer)
    client = _in_thread(load.send)
    try:
        load.recent()
    finally:
        load.over.set()
        client.join()
        for node in nodes:
            with _drain(node, "--undo") as undone:
                assert undone.wait(PATIENCE) == 0
    assert load.failures == []


def _servers_up(path: Path, backend: str) -> int:
    told = _raw(path, b"show stat\n")
    rows = [line.split(",") for line in told.splitlines() if line.startswith(backend)]
    return sum(row[1].startswith("node") and row[17].startswith("UP") for row in rows)
