"""Applications whose best plan is known: who waits gains by threads, who locks by processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

TOKEN = "the-only-good-token"
_LOCK = threading.Lock()


def _answer(status: str, start_response: StartResponse) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", "0")])
    return [b""]


def sleeping(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """Waits as for a database; tells a test that it was asked."""
    if environ.get("HTTP_X_AUTH_TOKEN") != TOKEN:
        return _answer("401 Unauthorized", start_response)
    told = os.environ.get("TELL")
    if told:
        with open(told, "ab", buffering=0) as file:
            file.write(b"asked\n")
    time.sleep(0.02)
    return _answer("200 OK", start_response)


def locked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """One request at a time in each process."""
    with _LOCK:
        time.sleep(0.005)
    return _answer("200 OK", start_response)
