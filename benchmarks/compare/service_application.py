"""The service that ``service_rates`` loads: it answers with the id of the token's user.

It does nothing else, so that a rate tells of what is in front of it. Where nothing is, it answers
with as many bytes: uWSGI sends a body by a system call of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from paste import deploy

#: Names the paste file, in the environment.
PASTE_FILE = "SERVICE_RATES_PASTE"
#: Stands for the id of a user where no ``authtoken`` tells it.
NOBODY = "0" * 32


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer one request (PEP 3333)."""
    body = environ.get("HTTP_X_USER_ID", NOBODY).encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def app_factory(global_conf: Any, **local_conf: str) -> Any:
    """Build it (``paste.app_factory``)."""
    return service


def load() -> Any:
    """Load what the paste file says, as uWSGI calls it."""
    return deploy.loadapp(f"config:{os.environ[PASTE_FILE]}")
