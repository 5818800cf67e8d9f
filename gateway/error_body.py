"""The body of an error that is answered before Keystone sees the request, in Keystone's form."""

from __future__ import annotations

import json
from http import HTTPStatus


def error_body(status: int, message: str) -> bytes:
    """Return an error in the JSON of Keystone's own errors.

    :param status: the HTTP status
    :param message: words for the client; no secret
    """
    error = {"code": status, "message": message, "title": HTTPStatus(status).phrase}
    return json.dumps({"error": error}).encode()
