"""A Keystone as seen by its administrator: a client, and what is made through it by HTTP."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPMessage, HTTPSConnection
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oauthlib import oauth1

from keyfront.middleware.tokens import tags_header
from support.served import PATIENCE, wait_for

VALIDATE = "/auth/tokens"


@dataclass(frozen=True)
class Answer:
    """What a server answered; ``body`` is ``None`` when it is empty."""

    status: int
    headers: HTTPMessage
    body: Any

    def token(self) -> dict[str, Any]:
        """The token that the body describes; empty when it describes none."""
        if self.status not in (200, 201) or not isinstance(self.body, dict):
            return {}
        found: dict[str, Any] = self.body.get("token", {})
        return found


class Client:
    """HTTP by one kept connection, opened again when the server ended it; for one thread.

    :param base_url: what every path is appended to, e.g. ``http://127.0.0.1:5000/v3``; by
        ``https`` whom ``SSL_CERT_FILE`` trusts is trusted
    :param timeout: seconds that an answer may take
    :param source: the address to come from; default: any
    """

    def __init__(self, base_url: str, timeout: float = PATIENCE, source: str = "") -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        self._prefix = parts.path
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(
            parts.hostname, parts.port, timeout=timeout,
            source_address=(source, 0) if source else None,
        )  # fmt: skip

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: object = None
    ) -> Answer:
        """Send one request and read its whole answer."""
        data = None if body is None else json.dumps(body)
        sent = dict(headers)
        if data is not None:
            sent["Content-Type"] = "application/json"
        self._connection.request(method, self._prefix + path, body=data, headers=sent)
        answer = self._connection.getresponse()
        content = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        parsed = json.loads(content) if content and is_json else content.decode() or None
        return Answer(answer.status, answer.headers, parsed)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class User:
    id: str
    name: str
    password: str
    domain: str


@dataclass(frozen=True)
class Person:
    """A user with roles on a project, and a token for it."""

    user: User
    project: str
    token: str


@dataclass(frozen=True)
class Endpoint:
    id: str
    service: str
    url: str


def random_name() -> str:
    return f"t-{uuid.uuid4().hex[:16]}"


class World:
    """The administrator of a Keystone, who makes what the changes need; for one thread.

    :param base_url: Keystone's URL, ``/v3`` included
    :param password: of the user ``admin``
    """

    def __init__(self, base_url: str, password: str) -> None:
        self.base_url = base_url
        self._password = password

    @cached_property
    def admin(self) -> str:
        """The administrator's token, for the project ``admin``."""
        user = {"name": "admin", "domain": {"id": "default"}, "password": self._password}
        scope = {"project": {"name": "admin", "domain": {"id": "default"}}}
        return self._issue({"methods": ["password"], "password": {"user": user}}, scope)

    def wait_until_kept(self) -> None:
        """Wait until the token cache keeps what it is asked.

        In a new folder it does so when the database has no transaction from before left.
        """
        own = {"X-Subject-Token": self.admin, tags_header.NAME: tags_header.ASK}

        def is_kept() -> bool:
            answer = self.call("GET", VALIDATE, headers=own)
            return answer.headers[tags_header.NAME] != tags_header.NONE

        wait_for(is_kept, "something is kept")

    def call(
        self, method: str, path: str, body: object = None, *, token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request that has to succeed, as the administrator if no token is given."""
        sent = {"X-Auth-Token": self.admin if token is None else token, **(headers or {})}
        return self.send(method, path, sent, body)

    def send(self, method: str, path: str, headers: Mapping[str, str], body: object) -> Answer:
        """Send a request that has to succeed, with these headers only."""
        # Its own connection: a server may end one that was idle, and a change is not sent twice.
        client = Client(self.base_url)
        try:
            answer = client.request(method, path, headers, body)
        finally:
            client.close()
        assert answer.status in (200, 201, 204), f"{method} {path}: {answer.status} {answer.body}"
        return answer

    def make(self, kind: str, collection: str, **values: object) -> str:
        """Create a resource of Keystone's usual form and return its id."""
        answer = self.call("POST", collection, {kind: values})
        made: str = answer.body[kind]["id"]
        return made

    def patch(self, kind: str, path: str, **values: object) -> Answer:
        """Change a resource of Keystone's usual form."""
        return self.call("PATCH", path, {kind: values})

    def flag(self, kind: str, path: str, enabled: bool) -> Answer:
        return self.patch(kind, path, enabled=enabled)

    # Who and what

    def domain(self) -> str:
        return self.make("domain", "/domains", name=random_name())

    def project(self, domain: str = "default", parent: str | None = None) -> str:
        above = {} if parent is None else {"parent_id": parent}
        return self.make("project", "/projects", name=random_name(), domain_id=domain, **above)

    def role(self) -> str:
        return self.make("role", "/roles", name=random_name())

    def user(self, domain: str = "default") -> User:
        name, password = random_name(), uuid.uuid4().hex
        made = self.make("user", "/users", name=name, password=password, domain_id=domain)
        return User(made, name, password, domain)

    def group(self, *members: User, domain: str = "default") -> str:
        group = self.make("group", "/groups", name=random_name(), domain_id=domain)
        for user in members:
            self.call("PUT", f"/groups/{group}/users/{user.id}")
        return group

    def person(
        self, *roles: str, domain: str = "default", project: str | None = None
    ) -> Person:
        """A new user; without ``project`` on one that nothing changes, with a role likewise."""
        user = self.user(domain)
        project = project or self.still_project
        for role in roles or (self.still_role,):
            self.call("PUT", grant("projects", project, "users", user.id, role))
        return Person(user, project, self.issue(user, project=project))

    @cached_property
    def still_project(self) -> str:
        """A project that no kind changes."""
        return self.project()

    @cached_property
    def still_role(self) -> str:
        """A role that no kind changes, and that gives no right."""
        return self.role()

    @cached_property
    def second_role(self) -> str:
        """Another such role, for grants that come and go."""
        return self.role()

    @cached_property
    def bystander(self) -> Person:
        """Whose token nothing changes."""
        return self.person()

    @cached_property
    def service(self) -> Person:
        """A service, that nothing changes."""
        return self.person(self.own_role["service"])

    @cached_property
    def own_role(self) -> dict[str, str]:
        """The ids of the roles that Keystone itself knows, by name."""
        return {x["name"]: x["id"] for x in self.call("GET", "/roles").body["roles"]}

    @cached_property
    def endpoints(self) -> tuple[Endpoint, Endpoint]:
        """Two services with an endpoint each, that no kind changes."""
        return self.endpoint(), self.endpoint()

    def endpoint(self, service: str | None = None) -> Endpoint:
        service = service or self.make("service", "/services", name=random_name(), type="test")
        url = f"http://127.0.0.1/{random_name()}"
        made = self.make(
            "endpoint", "/endpoints", service_id=service, interface="public", url=url,
            region_id="RegionOne",
        )
        return Endpoint(made, service, url)

    # Tokens

    def issue(
        self, user: User, *, project: str | None = None, domain: str | None = None,
        trust: str | None = None, system: bool = False,
    ) -> str:
        """A token by password; unscoped if no scope is given."""
        who = {"id": user.id, "password": user.password}
        scope: dict[str, object] | None = None
        if project:
            scope = {"project": {"id": project}}
        elif domain:
            scope = {"domain": {"id": domain}}
        elif trust:
            scope = {"OS-TRUST:trust": {"id": trust}}
        elif system:
            scope = {"system": {"all": True}}
        return self._issue({"methods": ["password"], "password": {"user": who}}, scope)

    def rescope(self, token: str, project: str) -> str:
        """Another token of the same chain."""
        identity = {"methods": ["token"], "token": {"id": token}}
        return self._issue(identity, {"project": {"id": project}})

    def issue_for(self, credential: Mapping[str, str]) -> str:
        """A token by application credential."""
        secret = {"id": credential["id"], "secret": credential["secret"]}
        return self._issue(
            {"methods": ["application_credential"], "application_credential": secret}, None
        )

    def _issue(
        self, identity: object, scope: object, headers: Mapping[str, str] | None = None
    ) -> str:
        auth = {"identity": identity} if scope is None else {"identity": identity, "scope": scope}
        answer = self.send("POST", VALIDATE, headers or {}, {"auth": auth})
        token: str = answer.headers["X-Subject-Token"]
        return token

    def revoke(self, token: str, *, by: str | None = None, query: str = "") -> Answer:
        return self.call("DELETE", VALIDATE + query, token=by, headers={"X-Subject-Token": token})

    # Delegation

    def trust(self, giver: Person, taker: User, roles: Iterable[str], **more: object) -> str:
        """A trust; ``giver.token`` may be one of a trust that may be passed on."""
        trust = {
            "trustor_user_id": giver.user.id, "trustee_user_id": taker.id,
            "project_id": giver.project, "roles": [{"id": x} for x in roles],
            "impersonation": True, **more,
        }
        made = self.call("POST", "/OS-TRUST/trusts", {"trust": trust}, token=giver.token)
        found: str = made.body["trust"]["id"]
        return found

    def credential(self, person: Person, **more: object) -> dict[str, str]:
        """An application credential, as Keystone describes it."""
        kind = "application_credential"
        path = f"/users/{person.user.id}/application_credentials"
        body = {kind: {"name": random_name(), **more}}
        made: dict[str, str] = self.call("POST", path, body, token=person.token).body[kind]
        return made

    def oauth1(self, person: Person, role: str) -> tuple[str, str, str]:
        """A consumer, its access token for a person's role, and Keystone's token for that.

        :param person: an administrator, because only those may authorize
        """
        made = self.call("POST", "/OS-OAUTH1/consumers", {"consumer": {}}).body["consumer"]
        consumer = {"client_key": made["id"], "client_secret": made["secret"]}
        project = {"Requested-Project-Id": person.project}
        request = self._signed("/OS-OAUTH1/request_token", project, callback_uri="oob", **consumer)
        verifier = self.call(
            "PUT", f"/OS-OAUTH1/authorize/{request['oauth_token']}", {"roles": [{"id": role}]},
            token=person.token,
        ).body["token"]["oauth_verifier"]
        access = self._signed(
            "/OS-OAUTH1/access_token", {}, verifier=verifier, **_owner(request), **consumer
        )
        headers = self._signature(VALIDATE, **_owner(access), **consumer)
        token = self._issue({"methods": ["oauth1"], "oauth1": {}}, None, headers)
        return made["id"], access["oauth_token"], token

    def _signature(self, path: str, **client: str) -> dict[str, str]:
        _, headers, _ = oauth1.Client(**client).sign(self.base_url + path, http_method="POST")
        return dict(headers)

    def _signed(self, path: str, headers: dict[str, str], **client: str) -> dict[str, str]:
        answer = self.send("POST", path, {**headers, **self._signature(path, **client)}, None)
        return {name: values[0] for name, values in parse_qs(str(answer.body)).items()}

    def federation(self) -> Federation:
        """An identity provider that believes two request headers.

        uWSGI passes headers as ``HTTP_...`` and Keystone takes any such variable for an assertion.
        """
        provider, mapping = random_name(), random_name()
        path = f"/OS-FEDERATION/identity_providers/{provider}"
        self.call("PUT", path, {"identity_provider": {"enabled": True}})
        rule = {
            "local": [{"user": {"name": "{0}"}, "group": {"id": "{1}"}}],
            "remote": [{"type": "HTTP_X_TEST_USER"}, {"type": "HTTP_X_TEST_GROUP"}],
        }
        self.call("PUT", f"/OS-FEDERATION/mappings/{mapping}", {"mapping": {"rules": [rule]}})
        self.call("PUT", f"{path}/protocols/mapped", {"protocol": {"mapping_id": mapping}})
        return Federation(self, provider, random_name())


@dataclass(frozen=True)
class Federation:
    """An identity provider and a user who comes from it."""

    world: World
    provider: str
    user: str

    @property
    def path(self) -> str:
        return f"/OS-FEDERATION/identity_providers/{self.provider}"

    def login(self, group: str, *, method: str = "GET") -> str:
        """An unscoped token, as a member of this group and no other."""
        headers = {"X-Test-User": self.user, "X-Test-Group": group}
        path, body = f"{self.path}/protocols/mapped/auth", None
        if method == "POST":
            mapped = {"identity_provider": self.provider, "protocol": "mapped"}
            path = VALIDATE
            body = {"auth": {"identity": {"methods": ["mapped"], "mapped": mapped}}}
        answer = self.world.send(method, path, headers, body)
        token: str = answer.headers["X-Subject-Token"]
        return token


def _owner(answer: Mapping[str, str]) -> dict[str, str]:
    return {
        "resource_owner_key": answer["oauth_token"],
        "resource_owner_secret": answer["oauth_token_secret"],
    }


def grant(scope: str, target: str, actors: str, actor: str, role: str) -> str:
    """The path of a grant.

    :param scope: ``projects``, ``domains`` or ``system``; with ``+`` behind, inherited from there
    :param target: the id of the project or domain; empty for the system
    """
    if scope == "system":
        return f"/system/{actors}/{actor}/roles/{role}"
    if scope.endswith("+"):
        inherited = f"/OS-INHERIT/{scope[:-1]}/{target}/{actors}/{actor}/roles/{role}"
        return f"{inherited}/inherited_to_projects"
    return f"/{scope}/{target}/{actors}/{actor}/roles/{role}"
