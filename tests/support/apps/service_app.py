"""A service behind authtoken: it answers with what it was told of the token."""

from __future__ import annotations

import json
from typing import Any


def app_factory(global_conf: Any, **local_conf: str) -> Any:
    return application


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    body = json.dumps(environ["keystone.token_info"]).encode()
    start_response(
        "200 OK",
        [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Seen-User", environ["HTTP_X_USER_ID"]),
        ],
    )
    return [body]
