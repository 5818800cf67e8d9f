"""The WSGI service of ``apache-mpm``: patched by eventlet, with an RPC client of oslo.messaging.

It stands for nova-api, which the publication measured. Set in the environment: ``MPM_BROKER`` (the
URL of RabbitMQ) and ``MPM_KEPT`` (``1``: keyfront keeps the connections). ``GET /publish`` sends a
message and gives the milliseconds it took; every other path is answered at once.
"""

from __future__ import annotations

import eventlet

eventlet.monkey_patch()

# ruff: noqa: E402
import json
import os
import time
from functools import cache
from typing import Any

if os.environ.get("MPM_KEPT") == "1":
    from keyfront.gateway import heartbeat

    heartbeat.install()

from ..compare.heartbeat_worker import oslo_client


@cache
def _client() -> Any:
    return oslo_client(os.environ["MPM_BROKER"])


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Publish, or answer as an API's root does."""
    found: dict[str, Any] = {"versions": [{"id": "v2.1", "status": "CURRENT"}]}
    if environ["PATH_INFO"] == "/publish":
        start = time.perf_counter()
        _client().cast({}, "nothing", payload="s" * 1000)
        milliseconds = 1000 * (time.perf_counter() - start)
        found = {"pid": os.getpid(), "milliseconds": milliseconds}
    body = json.dumps(found).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    start_response("200 OK", headers)
    return [body]
