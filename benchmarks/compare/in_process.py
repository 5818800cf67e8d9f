"""A client of a Keystone in this process, which calls the application as a web server does."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .token_stand_in import environ


class Answer(NamedTuple):
    """An answer.

    :ivar headers: by their names in small letters
    :ivar cpu: CPU seconds that this process took for it
    """

    status: int
    headers: dict[str, str]
    body: bytes
    cpu: float

    @property
    def token(self) -> str:
        """The token that it issues; empty without one."""
        return self.headers.get("x-subject-token", "")


def request(
    application: Callable[..., Any],
    method: str,
    path: str,
    token: str | None = None,
    body: object = None,
    *,
    subject: str | None = None,
) -> Answer:
    """Make one request of a WSGI application, to the last byte of its answer.

    :param path: the path, and the query behind a question mark
    :param subject: the token that the request is about
    """
    data = b"" if body is None else json.dumps(body).encode()
    given: dict[str, Any] = {"wsgi.input": io.BytesIO(data)}
    if data:
        given |= {"CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(data))}
    if token:
        given["HTTP_X_AUTH_TOKEN"] = token
    if subject:
        given["HTTP_X_SUBJECT_TOKEN"] = subject
    asked = environ(method, path, "127.0.0.1:5000", **given)
    seen: list[Any] = []

    def start_response(status: str, headers: Any, exc_info: object = None) -> None:
        seen[:] = status, headers

    begun = time.process_time()
    answer = application(asked, start_response)
    text = b"".join(answer)
    close = getattr(answer, "close", None)
    if close is not None:
        close()
    spent = time.process_time() - begun
    status, headers = seen
    return Answer(int(status[:3]), {name.lower(): x for name, x in headers}, text, spent)
