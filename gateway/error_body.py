"""Errors that are answered before Keystone sees the request, in the form of Keystone's own."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse


# Words for clients, where an answer has none of its own.
_MESSAGES = {
    404: "There is nothing at this address.",
    405: "This method is not allowed.",
    413: "The request is too large.",
}


def plain_error_body(status: int) -> bytes:
    """Return an error in the JSON of Keystone's own errors, with the usual words.

    :param status: the HTTP status
    """
    return error_body(status, _MESSAGES.get(status) or f"{_title(status)}.")


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def error_body(status: int, message: str) -> bytes:
    """Return an error in the JSON of Keystone's own errors.

    :param status: the HTTP status
    :param message: words for the client; no secret
    """
    error = {"code": status, "message": message, "title": _title(status)}
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
