"""The dynamic endpoint of ``small-nginx``, and an application for other places: 13 bytes."""

from __future__ import annotations

from typing import Any

BODY = b"Hello, world!"
_HEADERS = [("Content-Type", "text/plain"), ("Content-Length", str(len(BODY)))]


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answer at once."""
    start_response("200 OK", _HEADERS)
    return [BODY]
