"""Raises at one path, and answers at any other."""

from __future__ import annotations

from typing import Any


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    if environ["PATH_INFO"] == "/raise":
        raise RuntimeError("what the database said")
    start_response("200 OK", [("Content-Length", "4")])
    return [b"good"]


def app_factory(global_conf: object) -> Any:
    return application
