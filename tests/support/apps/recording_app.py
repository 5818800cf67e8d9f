"""Writes down each request that comes to it, and answers with its mark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answer 200 with what was seen; a line of it goes to the file that RECORDED names."""
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    seen = {
        "method": environ["REQUEST_METHOD"],
        "target": environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", ""),
        "mark": environ.get("HTTP_X_MARK", ""),
        "body": body.decode("latin-1")[:2000],
    }
    file = os.open(os.environ["RECORDED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(seen).encode() + b"\n")
    finally:
        os.close(file)
    answer = f"mark={seen['mark']};".encode()
    start_response("200 OK", [("Content-Length", str(len(answer))), ("Content-Type", "text/plain")])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else answer]
