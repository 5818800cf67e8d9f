"""uWSGI loads the application before it forks, and the application connects while it is loaded.

Neither may a worker use that connection, nor may the master keep it for nobody.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfront.common import programs as machine
from support.broker import Broker
from support.programs import running
from support.served import PATIENCE, wait_for

# Seconds; a broker closes a connection two to three of them after the last byte.
HEARTBEAT = 3
_SERVICE = """{patch}
import json
import os
import sys

from oslo_config import cfg
import oslo_messaging

{install}
cfg.CONF([], project="preloaded", default_config_files=[{config!r}])
transport = oslo_messaging.get_notification_transport(cfg.CONF, {url!r})
notifier = oslo_messaging.Notifier(
    transport, publisher_id="x", driver="messaging", topics=["preload"]
)
notifier.info({{}}, "loaded", {{}})
loaded_in = os.getpid()


def application(environ, start_response):
    notifier.info({{}}, "served", {{}})
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([loaded_in, os.getpid()]).encode()]
"""
_CONFIG = f"""
[keyfront_heartbeat]
enabled = true

[oslo_messaging_rabbit]
heartbeat_timeout_threshold = {HEARTBEAT}
"""
# Its master's hub stands still. An unpatched one's own heartbeats would connect again.
_PATCH = """
import warnings

warnings.simplefilter("ignore")
import eventlet

eventlet.monkey_patch()
"""
_INSTALL = "import keyfront.gateway.heartbeat\nkeyfront.gateway.heartbeat.install()"


@pytest.fixture(params=["the service's own wsgi file", "keyfront's entrypoint"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, rabbit: Broker
) -> Iterator[tuple[int, Path]]:
    """The port and the log of two workers, forked after the application was loaded."""
    own = request.param.startswith("the service")
    config, log = tmp_path / "service.conf", tmp_path / "log"
    config.write_text(_CONFIG)
    (tmp_path / "preloaded.py").write_text(
        _SERVICE.format(
            patch=_PATCH if own else "",
            install=_INSTALL if own else "",
            config=str(config),
            url=rabbit.url(),
        )
    )
    module = "preloaded" if own else "keyfront.gateway.uwsgi"
    command = [
        machine.uwsgi_program(), "--http-socket", "127.0.0.1:0", "--master", "--processes", "2",
        "--need-app", "--die-on-term", "--module", f"{module}:application",
        "--pythonpath", str(tmp_path), "--py-call-uwsgi-fork-hooks", "--virtualenv", sys.prefix,
    ]
    environment = {**os.environ, "KEYFRONT_APP": "preloaded:application"}
    with running(command, log, signal.SIGTERM, environment=environment):
        told = re.compile(r"bound to TCP address 127\.0\.0\.1:(\d+)")
        wait_for(
            lambda: "spawned uWSGI worker 2" in log.read_text(errors="replace"), "it serves"
        )
        found = told.search(log.read_text(errors="replace"))
        assert found, log.read_text(errors="replace")
        yield int(found[1]), log


def ask(port: int) -> tuple[int, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        master, worker = json.loads(body)
        return master, worker
    finally:
        connection.close()


def test_workers_have_connections_of_their_own(
    service: tuple[int, Path], rabbit: Broker
) -> None:
    port, log = service
    workers: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    while len(workers) < 2:
        assert time.monotonic() < deadline
        master, worker = ask(port)
        workers.add(worker)
    assert master not in workers
    # the master's is closed, and not reopened
    wait_for(lambda: not rabbit.connections(f"uwsgi:{master}:"), "the master's is closed")
    time.sleep(4 * HEARTBEAT)  # idle for longer than a connection lives without a beat
    for worker in workers:
        assert len(rabbit.connections(f"uwsgi:{worker}:")) == 1
    assert rabbit.accepted(f"uwsgi:{master}:") == 1
    for name in (master, *workers):
        assert rabbit.missed(f"uwsgi:{name}:") == 0
        assert rabbit.frame_errors(f"uwsgi:{name}:") == 0
    ask(port)
    assert "Traceback" not in log.read_text(errors="replace")
