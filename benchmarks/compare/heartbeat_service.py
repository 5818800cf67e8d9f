"""The WSGI service of ``heartbeat_idle``: it answers with two bytes and may have connections.

Set in the environment: ``HEARTBEAT_TASK``, the JSON of a ``heartbeat_worker.Task``; with
``installed`` the process has that many connections and keeps them alive, without it has none.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .heartbeat_worker import NEGOTIATED, Task, install, patch

_HEADERS = [("Content-Type", "text/plain"), ("Content-Length", "2")]


def _load() -> list[Any]:
    task = Task(**json.loads(os.environ["HEARTBEAT_TASK"]))
    patch(task.patch)
    if not task.installed:
        return []
    install(task.interval)
    from ..worlds.rabbitmq import connect

    return [connect(task.port, heartbeat=NEGOTIATED) for _ in range(task.connections)]


kept = _load()


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answer at once."""
    start_response("200 OK", _HEADERS)
    return [b"ok"]
