"""Errors that are answered before Keystone sees the request, in the form of Keystone's own."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse


def error_body(status: int, message: str) -> bytes:
    """Return an error in the JSON of Keystone's own errors.

    :param status: the HTTP status
    :param message: words for the client; no secret
    """
    error = {"code": status, "message": message, "title": HTTPStatus(status).phrase}
    return json.dumps({"error": error}).encode()


def answer_error(
    start_response: StartResponse, status: str, body: bytes, *headers: tuple[str, str]
) -> list[bytes]:
    """Begin an answer (PEP 3333); returns its body.

    :param status: number and words, ``503 Service Unavailable``
    :param body: from :func:`error_body`
    :param headers: further headers, ``("Retry-After", "10")``
    """
    length = ("Content-Length", str(len(body)))
    start_response(status, [("Content-Type", "application/json"), length, *headers])
    return [body]
