"""A service that keeps a MiB of each request, up to 200, and answers with its process's number."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keyfront.gateway import memory_limit

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_MIB = 1 << 20
_kept: list[bytes] = []

# The first look of a worker would come later than a test should take.
memory_limit.FIRST_LOOK = 0


def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """Keep a MiB, all of it in memory."""
    if len(_kept) < 200:
        _kept.append(b"x" * _MIB)
    body = str(os.getpid()).encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
