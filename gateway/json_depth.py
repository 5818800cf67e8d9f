"""Refuses JSON bodies that are nested deeper than anything Keystone knows, before it parses them.

Python's parser recurses. A hundred kilobytes of ``[`` bring it to the interpreter's limit, and
Keystone answers 500 with a traceback of a thousand lines in its log; no token is needed for that.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from .error_body import error_body

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

# Levels; the deepest body of Keystone's API has nine, and Python's limit is at some 900 there.
DEPTH = 100
# A string, or a bracket outside of one. Where a string does not end Keystone's parser gives up.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def refuse_deep(
    application: WSGIApplication, *, limit: int, depth: int = DEPTH
) -> WSGIApplication:
    """Wrap an application so that a JSON body which is nested too deep is answered 400.

    :param application: the WSGI application
    :param limit: bytes of the largest body that the application reads; it refuses larger ones
    :param depth: levels that a body may have, 1 or more
    """
    body = error_body(400, f"The request body is nested deeper than {depth} levels.")

    def checking(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        content = _read(environ, limit)
        if content is None or not is_deeper(content, depth):
            return application(environ, start_response)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response("400 Bad Request", headers)
        return [body]

    return checking


def is_deeper(content: bytes, depth: int) -> bool:
    """Return whether a JSON text has more levels than ``depth``; other texts may or may not.

    :param content: the text, in the encodings that ``json.loads`` accepts
    :param depth: levels, 1 or more
    """
    # most bodies have a few brackets, whatever is in their strings
    if content.count(b"[") + content.count(b"{") <= depth:
        return False
    # as json.loads() does; what cannot be decoded it refuses by itself
    text = content.decode(json.detect_encoding(content), "replace")
    level = 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            level += 1
            if level > depth:
                return True
        elif token[0] in "]}":
            level -= 1
    return False


def _read(environ: dict[str, Any], limit: int) -> bytes | None:
    """Return the body, which the application can read again; ``None`` if none is to be checked."""
    length = environ.get("CONTENT_LENGTH") or ""
    if length:
        if not (length.isascii() and length.isdigit()) or not 0 < int(length) <= limit:
            return None
        size = int(length)
    elif environ.get("wsgi.input_terminated"):
        size = limit + 1  # in chunks, which the server puts together; one too many is refused
    else:
        return None
    content: bytes = environ["wsgi.input"].read(size)
    environ["wsgi.input"] = io.BytesIO(content)
    return content
