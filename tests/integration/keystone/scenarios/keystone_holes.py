"""Play one scenario against one Keystone application and print what it answered, as JSON.

Called as ``python keystone_holes.py {stock|ours} {NAME} CONFIG_FILE``; a process of its own
because Keystone's configuration is global to a process. ``OS_KEYSTONE_CONFIG_FILES`` names the
configuration for the stock application, the paste option for ours.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import wsgiref.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PASSWORD = "scenario-secret"
MEMBER = "scenario-member"
# Longer than any step takes; only reached when a scenario is broken.
PATIENCE = 60.0


def build(which: str, config_file: str) -> Any:
    if which == "stock":
        os.environ["OS_KEYSTONE_CONFIG_FILES"] = config_file
        from keystone.server import wsgi

        return wsgi.initialize_public_application()
    os.environ.pop("OS_KEYSTONE_CONFIG_FILES", None)
    from keyfront.gateway.keystone.application import app_factory

    return app_factory({}, config_files=config_file)


class Client:
    """Calls a WSGI application in this process."""

    def __init__(self, application: Any) -> None:
        self.application = application

    def __call__(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        data = b"" if body is None else json.dumps(body).encode()
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "wsgi.input": io.BytesIO(data),
            "CONTENT_LENGTH": str(len(data)),
            "CONTENT_TYPE": "application/json",
            "REMOTE_ADDR": "127.0.0.1",
        }
        environ.update({"HTTP_" + name.upper(): value for name, value in headers.items()})
        wsgiref.util.setup_testing_defaults(environ)
        seen: dict[str, Any] = {}

        def start_response(status: str, fields: list[tuple[str, str]], _: Any = None) -> None:
            seen["status"] = int(status.split()[0])
            seen["headers"] = {name.lower(): value for name, value in fields}

        chunks = self.application(environ, start_response)
        try:
            content = b"".join(chunks)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()
        return seen["status"], seen["headers"], json.loads(content) if content else None

    def login(self, user: str) -> str:
        identity = {
            "methods": ["password"],
            "password": {"user": {"name": user, "domain": {"id": "default"}, "password": PASSWORD}},
        }
        scope = {"project": {"name": "admin", "domain": {"id": "default"}}}
        status, headers, body = self(
            "POST", "/v3/auth/tokens", {"auth": {"identity": identity, "scope": scope}}
        )
        assert status == 201, (status, body)
        return headers["x-subject-token"]

    def make_member(self) -> None:
        """Make a user who may do nothing but be there; once per state."""
        admin = self.login("admin")
        _, _, found = self("GET", "/v3/users", x_auth_token=admin)
        if any(user["name"] == MEMBER for user in found["users"]):
            return
        user = {"name": MEMBER, "password": PASSWORD, "domain_id": "default"}
        _, _, made = self("POST", "/v3/users", {"user": user}, x_auth_token=admin)
        _, _, roles = self("GET", "/v3/roles", x_auth_token=admin)
        role = next(r["id"] for r in roles["roles"] if r["name"] == "member")
        _, _, projects = self("GET", "/v3/projects", x_auth_token=admin)
        project = next(p["id"] for p in projects["projects"] if p["name"] == "admin")
        grant = f"/v3/projects/{project}/users/{made['user']['id']}/roles/{role}"
        status, _, body = self("PUT", grant, x_auth_token=admin)
        assert status == 204, (status, body)


def revoked(client: Client) -> dict[str, Any]:
    """A token is revoked by one worker and then shown to another that has validated it before."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        admin = second.submit(client.login, "admin").result(PATIENCE)
        token = second.submit(client.login, "admin").result(PATIENCE)

        def on(worker: ThreadPoolExecutor, method: str, path: str, **headers: str) -> int:
            return worker.submit(client, method, path, **headers).result(PATIENCE)[0]

        tokens = "/v3/auth/tokens"
        return {
            "validated": on(first, "GET", tokens, x_auth_token=admin, x_subject_token=token),
            "revoked": on(second, "DELETE", tokens, x_auth_token=admin, x_subject_token=token),
            "once": on(first, "GET", "/v3/auth/projects", x_auth_token=token),
            "twice": on(first, "GET", "/v3/auth/projects", x_auth_token=token),
        }


def crossed(client: Client) -> dict[str, Any]:
    """While a member's token is between validation and use, an administrator's is validated."""
    from keystone.server.flask.request_processing.middleware import auth_context

    client.make_member()
    admin, member = client.login("admin"), client.login(MEMBER)
    validated, overwritten = threading.Event(), threading.Event()
    members_thread = threading.local()
    render_token = auth_context.render_token

    class PausingRenderToken:
        """fetch_token() looks this up after it wrote self.token and before it reads it."""

        @property
        def render_token_response_from_model(self) -> Any:
            if getattr(members_thread, "pause", False):
                members_thread.pause = False
                validated.set()
                assert overwritten.wait(PATIENCE)
            return render_token.render_token_response_from_model

    def as_member() -> int:
        members_thread.pause = True
        return client("GET", "/v3/users", x_auth_token=member)[0]

    alone = client("GET", "/v3/users", x_auth_token=member)[0]
    auth_context.render_token = PausingRenderToken()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        answer = first.submit(as_member)
        assert validated.wait(PATIENCE)
        try:
            by_admin = second.submit(client, "GET", "/v3/users", x_auth_token=admin)
            admins = by_admin.result(PATIENCE)[0]
        finally:
            overwritten.set()
        return {"alone": alone, "admin": admins, "crossed": answer.result(PATIENCE)}


def service_token(client: Client) -> dict[str, Any]:
    """Both tokens on one request: whose rights count, and whose token the context holds."""
    from keystone.server.flask.request_processing.middleware import auth_context

    client.make_member()
    admin, member = client.login("admin"), client.login(MEMBER)
    held: list[str] = []
    original = auth_context.AuthContextMiddleware._keystone_specific_values

    def spy(self: Any, token: Any, request_context: Any) -> Any:
        held.append(token.user["name"])
        return original(self, token, request_context)

    auth_context.AuthContextMiddleware._keystone_specific_values = spy
    users = "/v3/users"
    return {
        "member_by_admin": client("GET", users, x_auth_token=member, x_service_token=admin)[0],
        "admin_by_member": client("GET", users, x_auth_token=admin, x_service_token=member)[0],
        "bad_by_admin": client("GET", users, x_auth_token="bad", x_service_token=admin)[0],
        "none_by_admin": client("GET", users, x_service_token=admin)[0],
        "held": held,
    }


def main() -> None:
    which, name, config_file = sys.argv[1:]
    del sys.argv[1:]  # oslo.config reads them too
    client = Client(build(which, config_file))
    scenarios = {"revoked": revoked, "crossed": crossed, "service_token": service_token}
    print(json.dumps(scenarios[name](client)))


if __name__ == "__main__":
    main()
