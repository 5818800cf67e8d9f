"""Let two first logins of one user cross, and print how each was answered, as JSON.

Called as ``python simultaneous_logins.py {stock|ours} NAME[,NAME] CONFIG_FILE``. The user comes
from an identity provider that believes two request headers. The first login is held where the
scenario says, until the second one has its answer.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keystone_holes import PATIENCE, Client, build


class Provider:
    """An identity provider, and two groups that its users may be in."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.admin = client.login("admin")
        name, mapping = uuid.uuid4().hex, uuid.uuid4().hex
        path = f"/v3/OS-FEDERATION/identity_providers/{name}"
        self._ask("PUT", path, {"identity_provider": {"enabled": True}})
        rule = {
            "local": [{"user": {"name": "{0}"}, "group": {"id": "{1}"}}],
            "remote": [{"type": "HTTP_X_TEST_USER"}, {"type": "HTTP_X_TEST_GROUP"}],
        }
        rules = {"mapping": {"rules": [rule]}}
        self._ask("PUT", f"/v3/OS-FEDERATION/mappings/{mapping}", rules)
        self._ask("PUT", f"{path}/protocols/mapped", {"protocol": {"mapping_id": mapping}})
        self._path = f"{path}/protocols/mapped/auth"
        roles = self._ask("GET", "/v3/roles")["roles"]
        self._role = next(role["id"] for role in roles if role["name"] == "member")
        self._project = self._ask("GET", "/v3/projects")["projects"][0]["id"]
        self.groups = (self._group(), self._group())
        self.user = uuid.uuid4().hex

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        status, _, answer = self._client(method, path, body, x_auth_token=self.admin)
        assert status < 300, (status, answer)
        return answer

    def _group(self) -> str:
        body = {"group": {"name": uuid.uuid4().hex, "domain_id": "default"}}
        made: str = self._ask("POST", "/v3/groups", body)["group"]["id"]
        self._ask("PUT", f"/v3/projects/{self._project}/groups/{made}/roles/{self._role}")
        return made

    def login(self, group: int) -> tuple[int, str]:
        """The status, and the token if there is one."""
        status, headers, _ = self._client(
            "GET", self._path, x_test_user=self.user, x_test_group=self.groups[group]
        )
        return status, headers.get("x-subject-token", "")

    def scoped(self, token: str) -> str:
        """A token for the project, which the user has by a group."""
        identity = {"methods": ["token"], "token": {"id": token}}
        auth = {"identity": identity, "scope": {"project": {"id": self._project}}}
        status, headers, body = self._client("POST", "/v3/auth/tokens", {"auth": auth})
        assert status == 201, (status, body)
        return headers["x-subject-token"]

    def status(self, token: str) -> int:
        """How a validation is answered."""
        headers = {"x_auth_token": self.admin, "x_subject_token": token}
        return self._client("GET", "/v3/auth/tokens", **headers)[0]


class Hold:
    """Calls something before a method is called the next time, once.

    Keystone's managers remember the methods of their drivers: so it is put there once.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self.next: list[Callable[[], None]] = []
        deed = getattr(owner, method)

        def held(*values: Any, **named: Any) -> Any:
            if self.next:
                self.next.pop()()
            return deed(*values, **named)

        setattr(owner, method, held)


def cross(client: Client, hold: Hold, *, groups: tuple[int, int]) -> dict[str, Any]:
    """Both logins have not found the user; the second one makes him."""
    provider = Provider(client)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        other: dict[str, Any] = {}

        def log_in() -> None:
            other["status"], token = provider.login(groups[1])
            other["token"] = provider.scoped(token)
            # What Keystone revokes are the tokens of whole seconds before, so that the login that
            # has it do so keeps its own.
            issued = int(time.time())
            while time.time() < issued + 2:
                time.sleep(0.1)

        hold.next.append(lambda: second.submit(log_in).result(PATIENCE))
        status, token = first.submit(provider.login, groups[0]).result(PATIENCE)
        own = provider.scoped(token) if token else ""
    return {
        "first": status,
        "second": other["status"],
        "works": bool(own) and provider.status(own) == 200,
        "others": provider.status(other["token"]),
    }


def main() -> None:
    which, names, config_file = sys.argv[1:]
    del sys.argv[1:]  # oslo.config reads them too
    client = Client(build(which, config_file))
    from keystone.identity.shadow_backends.sql import ShadowUsers

    hold = Hold(ShadowUsers, "create_federated_user")
    groups = {"same": (0, 0), "another": (0, 1)}
    print(json.dumps([cross(client, hold, groups=groups[name]) for name in names.split(",")]))


if __name__ == "__main__":
    main()
