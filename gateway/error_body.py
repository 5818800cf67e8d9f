"""The body of an error that is answered before Keystone sees the request, in Keystone's form."""

from __future__ import annotations

import json
from http import HTTPStatus


def error_body(status: int, message: str) -> bytes:
    """JSON as Keystone's own errors have it.

    :param status: of HTTP
    :param message: for who sent the request; no secret
    """
    error = {"code": status, "message": message, "title": HTTPStatus(status).phrase}
    return json.dumps({"error": error}).encode()
