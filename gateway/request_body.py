"""Reads request bodies whole before an application behind uWSGI runs.

uWSGI closes the connection after each answer. Closing over unread bytes resets it, and the client
may lose the answer: a login refused for its headers alone then looks like a broken server. uWSGI's
own ``post-buffering`` reads bodies too, but moves the worker's harakiri clock (core/reader.c,
inc_harakiri), which other threads and greenlets have meanwhile set to zero, so that workers are
killed in the middle of good requests.

uWSGI also hands on chunked bodies only through a call of its own (docs: Chunked input API); to a
WSGI application they look empty. Here they are read as well and presented with their length, as
nginx does in front of uWSGI.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .error_body import answer_error, error_body

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Bytes; the ini file's limit-post is the same. A body is held while its request runs.
LIMIT = 10 * 1024 * 1024

_TOO_LARGE = error_body(413, "The request body is larger than this server takes.")
_NO_REQUEST = error_body(400, "The request is malformed.")
_BROKEN = error_body(400, "The request body could not be read.")


class _TooLargeError(Exception):
    """The body is longer than the limit."""


def read_whole(
    application: WSGIApplication,
    *,
    read_chunk: Callable[[], bytes] | None = None,
    limit: int = LIMIT,
) -> WSGIApplication:
    """Wrap an application so that its request bodies are read before it runs.

    A body that is longer than the limit is answered 413, one that breaks off or is not well-formed
    400, and so is what has no method; the application sees none of them.

    :param read_chunk: returns the next chunk of a chunked body, ``b""`` at its end, and raises
        ``OSError`` on bad input; without it chunked bodies are left alone
    :param limit: bytes of a body
    """

    def reading(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "REQUEST_METHOD" not in environ:  # what uWSGI took for a request is none
            return answer_error(start_response, "400 Bad Request", _NO_REQUEST)
        length = environ.get("CONTENT_LENGTH")
        if not length and (read_chunk is None or not _is_chunked(environ)):
            return application(environ, start_response)
        try:
            if length:
                body = _read_length(environ, length, limit)
            else:
                assert read_chunk is not None
                body = _read_chunks(read_chunk, limit)
                environ["CONTENT_LENGTH"] = str(len(body))
                del environ["HTTP_TRANSFER_ENCODING"]
        except _TooLargeError:
            return answer_error(start_response, "413 Content Too Large", _TOO_LARGE)
        except OSError:
            return answer_error(start_response, "400 Bad Request", _BROKEN)
        environ["wsgi.input"] = io.BytesIO(body)
        return application(environ, start_response)

    return reading


def _is_chunked(environ: WSGIEnvironment) -> bool:
    coding = environ.get("HTTP_TRANSFER_ENCODING")
    return coding is not None and coding.strip().lower() == "chunked"


def _read_length(environ: WSGIEnvironment, text: str, limit: int) -> bytes:
    if not (text.isascii() and text.isdigit()):
        raise OSError("Content-Length is no number")
    # Python reads no number of more than 4300 digits.
    length = int(text) if len(text) < 20 else limit + 1
    if length > limit:
        raise _TooLargeError
    body: bytes = environ["wsgi.input"].read(length) if length else b""
    if len(body) != length:
        raise OSError("the body broke off")
    return body


def _read_chunks(read_chunk: Callable[[], bytes], limit: int) -> bytes:
    body = io.BytesIO()
    while chunk := read_chunk():
        if body.tell() + len(chunk) > limit:
            raise _TooLargeError
        body.write(chunk)
    return body.getvalue()
