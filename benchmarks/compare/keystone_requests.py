"""What a benchmark asks of a Keystone while it is set up."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any

from keyfront.errors import ServerError

from ..lineups.uwsgi_server import Server


def ask(
    server: Server,
    method: str,
    path: str,
    token: str | None,
    body: dict[str, Any] | None = None,
    *,
    subject: str | None = None,
) -> dict[str, Any]:
    """Make one request; returns the body, and of a login the token alone.

    :param path: behind ``/v3/``
    :param subject: the token that it is about
    :raises ServerError: the answer is none, or an error
    """
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["X-Auth-Token"] = token
    if subject is not None:
        headers["X-Subject-Token"] = subject
    connection = server.connect()
    try:
        connection.request(method, f"/v3/{path}", json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"{method} /v3/{path}: {error!r}") from None
    finally:
        connection.close()
    if not 200 <= answer.status < 300:
        raise ServerError(f"{method} /v3/{path}: Keystone answers {answer.status}")
    if method == "POST" and path == "auth/tokens":
        return {"token": answer.headers["X-Subject-Token"]}
    content: dict[str, Any] = json.loads(text or b"{}")
    return content


def log_in(server: Server, name: str, password: str, project: str | None) -> str:
    """Return a token of a user of the domain Default.

    :param project: what it is scoped to; ``None`` for nothing
    :raises ServerError: there is none to be had
    """
    domain = {"id": "default"}
    user = {"name": name, "domain": domain, "password": password}
    scope: object = "unscoped"
    if project is not None:
        scope = {"project": {"name": project, "domain": domain}}
    identity = {"methods": ["password"], "password": {"user": user}}
    login = {"auth": {"identity": identity, "scope": scope}}
    token: str = ask(server, "POST", "auth/tokens", None, login)["token"]
    return token
