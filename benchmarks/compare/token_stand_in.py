"""Validations without a Keystone: requests of many tokens, and a stand-in that answers them."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from keyfront.middleware.tokens.keys_and_entries import AUTH_CONTEXT
from keyfront.middleware.tokens.request import ENVIRON_KEY

# Of the length that Fernet tokens have.
TOKEN = "gAAAAAB{:0>177}"
_CALLER = TOKEN.format("caller")


class Answers:
    """Stands in for Keystone: a validation for whatever token is asked for, each its own user."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """Answer one request (PEP 3333), and note what the answer depends on."""
        self.calls += 1
        token = environ["HTTP_X_SUBJECT_TOKEN"]
        noted = environ.get(ENVIRON_KEY)
        if noted is not None:
            noted.recorded = True
            caller = noted.accepted[environ["HTTP_X_AUTH_TOKEN"]] = _model("caller")
            environ[AUTH_CONTEXT] = {"token": caller}
            noted.accepted[token] = _model(token[-12:])
        body = validation(int(token[-12:]))
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Subject-Token", token),
            ("Vary", "X-Auth-Token"),
            ("x-openstack-request-id", "req-00000000-0000-0000-0000-000000000000"),
        ]
        start_response("200 OK", headers)
        return [body]


def _model(name: str) -> Any:
    """Return what Keystone knows of a token scoped to a project, as far as answers depend on it."""
    return SimpleNamespace(
        audit_ids=[f"audit-{name}"],
        user_id=f"user-{name}",
        user={"domain_id": "default"},
        domain_id=None,
        project_id=f"project-{name[-3:]}",
        project_domain={"id": "default"},
        trust_id=None,
        trust=None,
        application_credential_id=None,
        application_credential=None,
        access_token_id=None,
        expires_at="2099-01-01T00:00:00.000000Z",
    )


def validation(number: int, *, services: int = 1) -> bytes:
    """Return what Keystone says of a token scoped to a project.

    :param services: the services of its catalog
    """
    now = time.time()
    stamps = [time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(t)) for t in (now, now + 3600)]
    endpoint = {"region": "RegionOne", "region_id": "RegionOne", "url": "http://127.0.0.1:5000/v3"}
    domain = {"id": "default", "name": "Default"}
    token = {
        "methods": ["password"],
        "user": {
            "domain": domain,
            "id": f"{number:032x}",
            "name": f"user-{number}",
            "password_expires_at": None,
        },
        "audit_ids": [f"{number:022x}"],
        "expires_at": stamps[1],
        "issued_at": stamps[0],
        "project": {"domain": domain, "id": f"{number % 1000:032x}", "name": "project"},
        "is_domain": False,
        "roles": [{"id": f"{role:032x}", "name": f"role-{role}"} for role in range(4)],
        "catalog": [
            {
                "endpoints": [
                    {"id": f"{place:032x}", "interface": name, **endpoint}
                    for place, name in enumerate(("public", "internal", "admin"))
                ],
                "id": f"{one:032x}",
                "type": f"type-{one}" if one else "identity",
                "name": f"service-{one}" if one else "keystone",
            }
            for one in range(services)
        ],
    }
    return json.dumps({"token": token}).encode()


def environ(method: str, path: str, host: str, **more: Any) -> dict[str, Any]:
    """Return the environ of a request (PEP 3333), as uWSGI makes it.

    :param path: the path, and the query behind a question mark
    :param host: ``HOST:PORT`` of the server
    :param more: its other keys: ``HTTP_X_AUTH_TOKEN`` and so on
    """
    plain, _, query = path.partition("?")
    name, _, port = host.partition(":")
    return {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": plain,
        "QUERY_STRING": query,
        "REQUEST_URI": path,
        "SERVER_NAME": name,
        "SERVER_PORT": port,
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "REMOTE_PORT": "40000",
        "CONTENT_TYPE": "",
        "CONTENT_LENGTH": "",
        "HTTP_HOST": host,
        "HTTP_ACCEPT": "application/json",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        **more,
    }


def request(number: int) -> dict[str, Any]:
    """Return the environ of one token's validation."""
    return environ(
        "GET",
        "/v3/auth/tokens",
        "127.0.0.1:5000",
        HTTP_USER_AGENT="python-keystoneclient",
        HTTP_X_AUTH_TOKEN=_CALLER,
        HTTP_X_SUBJECT_TOKEN=TOKEN.format(number),
    )
