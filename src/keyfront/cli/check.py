"""``keyfront check``: a login and a validation against a Keystone that ``keyfront serve`` made."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from typing import Any, TextIO

from keyfront.errors import ServerError
from keyfront.gateway.serve.state import State, default_path

from .parser import add_state_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Log in to the Keystone that keyfront serve runs, validate the token, and print what came "
        "back."
    )
    add_state_argument(parser)


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Check the Keystone of a state folder; returns the exit status.

    :raises KeyfrontError: see :func:`check`
    """
    return check(State(arguments.state or default_path()), out)


def check(folder: State, out: TextIO) -> int:
    """Log in as the administrator, validate the token, and print what came back (no secret).

    :returns: 0
    :raises StateError: there is no usable state folder
    :raises ServerError: Keystone does not answer, or answers otherwise than it should
    """
    endpoint = folder.endpoint() if folder.check() else None
    if endpoint is None:
        raise ServerError(f"{folder.path}: there is no Keystone here yet; run keyfront serve first")
    password = folder.password_file.read_text(encoding="utf-8").strip()
    domain = {"id": "default"}
    login = {
        "auth": {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": "admin", "domain": domain, "password": password}},
            },
            "scope": {"project": {"name": "admin", "domain": domain}},
        }
    }
    url = f"{endpoint}/auth/tokens"
    _, token, issued = _exchange(url, {}, login)
    content, _, validated = _exchange(url, {"X-Auth-Token": token, "X-Subject-Token": token})
    found = content["token"]
    services = ", ".join(sorted(service["type"] for service in found["catalog"]))
    rows = [
        ("login", f"ok, {issued:.0f} ms"),
        ("validation", f"ok, {validated:.0f} ms"),
        ("user", f"{found['user']['name']} in {found['user']['domain']['name']}"),
        ("project", found["project"]["name"]),
        ("roles", ", ".join(sorted(role["name"] for role in found["roles"]))),
        ("catalog", services),
        ("expires", found["expires_at"]),
    ]
    for name, value in rows:
        out.write(f"{name:<12}{value}\n")
    return 0


def _exchange(
    url: str, headers: dict[str, str], body: dict[str, Any] | None = None
) -> tuple[dict[str, Any], str, float]:
    """Send one request; returns the answer's JSON, its token header and the milliseconds taken."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json", **headers}
    )
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = json.load(answer)
            token = answer.headers.get("X-Subject-Token", "")
    except urllib.error.HTTPError as error:
        error.close()
        raise ServerError(f"{url}: answers {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{url}: {reason}; is keyfront serve running?") from None
    return content, token, (time.perf_counter() - start) * 1000
