"""Gives an application behind uWSGI the bodies that clients send in chunks.

uWSGI reads a chunked body only through its own call (docs: Chunked input API), so to a WSGI
application the body looks empty, and closing the connection over unread bytes resets it before
the client has read the answer. Here the body is read whole before the application runs, and is
presented with its length, as nginx does in front of uWSGI.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Bytes. The ini file's limit-post, for the same reason: a body is held while its request waits.
LIMIT = 10 * 1024 * 1024

_TOO_LARGE = b"The request body is larger than this server takes.\n"
_BROKEN = b"The request body is not well-formed chunks.\n"


def _refuse(start_response: StartResponse, status: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def read_chunked(
    application: WSGIApplication, read_chunk: Callable[[], bytes], limit: int = LIMIT
) -> WSGIApplication:
    """Wrap an application so that chunked request bodies reach it.

    :param read_chunk: returns the next chunk, ``b""`` at the end, raises ``OSError`` on bad input
    :param limit: bytes of a body; a longer one is refused with 413
    """

    def reading(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_TRANSFER_ENCODING" not in environ:
            return application(environ, start_response)
        if environ["HTTP_TRANSFER_ENCODING"].strip().lower() != "chunked":
            return application(environ, start_response)
        body = io.BytesIO()
        try:
            while chunk := read_chunk():
                if body.tell() + len(chunk) > limit:
                    return _refuse(start_response, "413 Content Too Large", _TOO_LARGE)
                body.write(chunk)
        except OSError:
            return _refuse(start_response, "400 Bad Request", _BROKEN)
        environ["CONTENT_LENGTH"] = str(body.tell())
        del environ["HTTP_TRANSFER_ENCODING"]
        body.seek(0)
        environ["wsgi.input"] = body
        return application(environ, start_response)

    return reading
