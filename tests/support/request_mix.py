"""Requests to Keystone of every form that a client may send, for comparing two servers.

:class:`People` makes who asks and what is asked about; :func:`mix` lists the requests, each with
what the token cache is expected to do with it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
from cryptography.fernet import Fernet

from keyfront.middleware.tokens.keys_and_entries import WAYS
from support.keystone_world import VALIDATE, World, grant, random_name

HOST = "keystone.example:5000"
TOKENS = f"/v3{VALIDATE}"
DASHBOARD = "https://dashboard.example"

#: The routes that the server with the cache is given besides validation.
ROUTES = (
    *("/v3/projects", "/v3/projects/{id}", "/v3/auth/projects", "/v3/auth/domains"),
    *("/v3/auth/system", "/v3/auth/catalog", "/v3/users/{id}", "/v3/users", "/v3/roles"),
    *("/v3/services", "/v3/endpoints", "/v3/regions", "/v3/domains"),
)

#: What keystone.conf needs so that the requests here make a difference.
CONFIGURATION = f"""
[identity]
password_hash_rounds = 4
[cors]
allowed_origin = {DASHBOARD}
[oslo_middleware]
enable_proxy_headers_parsing = true
[cache]
enabled = true
# Keystone's own, in each process: what it answers is the same, ten times as fast.
backend = dogpile.cache.memory_pickle
"""


class Cached(Enum):
    """What the token cache is expected to do with a request that is sent again and again."""

    KEPT = "asked once, then answered from the cache"
    SHARED = "answered from the cache at once, by the answer to another request"
    ASKED = "asked each time"
    ANYHOW = "no matter what, if only the answer is right"


Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ask:
    """One request, as it is on the wire."""

    name: str
    method: str
    target: str
    headers: Headers
    cached: Cached = Cached.KEPT
    body: bytes = b""
    version: str = "HTTP/1.1"

    def wire(self) -> bytes:
        lines = [f"{self.method} {self.target} {self.version}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


@dataclass
class People:
    """Who asks and what is asked about, made by a :class:`World`.

    :param keys: the folder of Keystone's Fernet keys
    """

    world: World
    keys: Path
    #: Valid tokens by their kind.
    tokens: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    #: Tokens of one administrator: of each only so many ways of asking are kept.
    admins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world
        person = world.person(world.still_role, world.second_role)
        other = world.person()
        self.tokens["admin"] = world.admin
        self.tokens["service"] = world.person(world.own_role["service"]).token
        self.tokens["member"] = person.token
        self.tokens["other"] = other.token
        self.tokens["unscoped"] = world.issue(person.user)
        self.tokens["rescoped"] = world.rescope(self.tokens["unscoped"], person.project)

        domain, child = world.domain(), world.project(parent=world.still_project)
        reader, user = world.own_role["reader"], world.user(domain)
        world.call("PUT", grant("domains", domain, "users", user.id, world.own_role["admin"]))
        world.call("PUT", grant("system", "", "users", user.id, reader))
        above = grant("projects+", world.still_project, "users", user.id, world.still_role)
        world.call("PUT", above)
        self.tokens["domain"] = world.issue(user, domain=domain)
        self.tokens["system"] = world.issue(user, system=True)
        self.tokens["inherited"] = world.issue(user, project=child)

        grouped = world.user()
        for role in (world.still_role, world.second_role):
            group = world.group(grouped)
            world.call("PUT", grant("projects", world.still_project, "groups", group, role))
        self.tokens["by group"] = world.issue(grouped, project=world.still_project)

        for name, impersonation in (("trust", True), ("trust, as trustee", False)):
            trust = world.trust(
                person, other.user, [world.still_role, world.second_role],
                impersonation=impersonation,
            )
            self.tokens[name] = world.issue(other.user, trust=trust)
        rules = [
            {"service": "identity", "method": "GET", "path": path}
            for path in ("/v3/projects", TOKENS)
        ]
        self.tokens["credential"] = world.issue_for(world.credential(person))
        self.tokens["credential with rules"] = world.issue_for(
            world.credential(person, access_rules=rules)
        )
        administrator = world.person(world.own_role["admin"])
        _, _, self.tokens["oauth1"] = world.oauth1(administrator, world.own_role["admin"])
        self.admins = [
            world.issue(administrator.user, project=administrator.project) for _ in range(10)
        ]
        federation, group = world.federation(), world.group()
        for role in (world.still_role, world.second_role):
            world.call("PUT", grant("projects", world.still_project, "groups", group, role))
        self.tokens["federated, unscoped"] = federation.login(group)
        self.tokens["federated"] = world.rescope(
            self.tokens["federated, unscoped"], world.still_project
        )
        provider = {"auth_url": "http://a/", "sp_url": "http://s/", "enabled": True}
        world.call(
            "PUT", f"/OS-FEDERATION/service_providers/{random_name()}",
            {"service_provider": provider},
        )
        for _ in range(2):
            world.endpoint()
        self.ids |= {
            "project": world.still_project, "child": child, "domain": domain,
            "user": person.user.id, "user name": person.user.name, "other": other.user.id,
            "federated user": str(
                world.call("GET", VALIDATE, headers={"X-Subject-Token": self.tokens["federated"]})
                .token()["user"]["id"]
            ),
        }  # fmt: skip
        self._forget()
        self.expired = self._ended(self.tokens["rescoped"], 3600)
        self.long_expired = self._ended(self.tokens["rescoped"], 4 * 24 * 3600)

    def fresh(self) -> str:
        """A new token of the same person for the same project."""
        token = self.world.rescope(self.tokens["unscoped"], self.ids["project"])
        self._forget()
        return token

    def _forget(self) -> None:
        """Have the Keystone that issued the tokens forget how it did.

        It would show their methods in another order than one that decodes them: what it issues it
        keeps, whatever cache_on_issue says, until any token with its chain is revoked.
        """
        self.world.revoke(self.world.issue(self.world.bystander.user))

    def _ended(self, token: str, seconds: int) -> str:
        """The token as if it had been issued long ago and had ended ``seconds`` ago."""
        # The file with the highest number is the key that signs.
        key = max(self.keys.iterdir(), key=lambda x: int(x.name)).read_bytes()
        fernet = Fernet(key.strip())
        content = msgpack.unpackb(fernet.decrypt(token + "=" * (-len(token) % 4)))
        moment = time.time() - seconds
        content = [float(int(moment)) if isinstance(x, float) else x for x in content]
        made = fernet.encrypt_at_time(msgpack.packb(content), int(moment) - 3600)
        assert struct.unpack(">Q", _raw(made)[1:9])[0] < moment
        return made.rstrip(b"=").decode()


def _raw(token: bytes) -> bytes:
    import base64

    return base64.urlsafe_b64decode(token)


def mix(people: People) -> list[Ask]:
    """All requests that change nothing."""
    asks = [
        *_kinds(people), *_callers(people), *_access_rules(people), *_expired(people),
        *_forms(people), *_routes(people), *_headers(people), *_others(people),
    ]
    names = [ask.name for ask in asks]
    assert len(names) == len(set(names)), sorted(x for x in names if names.count(x) > 1)
    return asks


def ask(
    name: str, target: str = TOKENS, *, auth: str | None = None, subject: str | None = None,
    method: str = "GET", more: Mapping[str, str] | Headers = (), **options: Any,
) -> Ask:
    """A request with the usual headers."""
    headers = [("Host", HOST), ("User-Agent", "mix"), ("Accept", "application/json")]
    if auth is not None:
        headers.append(("X-Auth-Token", auth))
    if subject is not None:
        headers.append(("X-Subject-Token", subject))
    headers += more.items() if isinstance(more, Mapping) else more
    return Ask(f"{method} {name}", method, target, tuple(headers), **options)


def _kinds(people: People) -> Iterator[Ask]:
    """Every kind of token, looked at by those who may and by those who may not."""
    for kind, token in people.tokens.items():
        for by in ("admin", "service", "other", "system"):
            yield ask(f"{kind} by {by}", auth=people.tokens[by], subject=token)
        for by in ("admin", "other"):
            yield ask(f"{kind} by {by}", auth=people.tokens[by], subject=token, method="HEAD")
        if kind not in ("admin", "service", "other", "system"):
            yield ask(f"{kind} by itself", auth=token, subject=token)
        yield ask(f"{kind}, nocatalog", f"{TOKENS}?nocatalog", auth=token, subject=token)


def _callers(people: People) -> Iterator[Ask]:
    """Callers and subjects that are none."""
    token, admin = people.tokens["member"], people.tokens["admin"]
    changed = token[:-8] + ("AAAAAAAA" if token[-8:] != "AAAAAAAA" else "BBBBBBBB")
    for method in ("GET", "HEAD"):
        yield ask("no caller", subject=token, method=method)
        yield ask("no token at all", method=method)
        yield ask("junk caller", auth="junk-of-caller", subject=token, method=method)
        yield ask("junk subject", auth=admin, subject="junk-of-subject", method=method)
        yield ask("tampered subject", auth=admin, subject=changed, method=method)
        yield ask("tampered caller", auth=changed, subject=token, method=method)
        yield ask("junk by other", auth=people.tokens["other"], subject="junk", method=method)
        yield ask("no subject", auth=admin, method=method)
        yield ask("no subject by other", auth=people.tokens["other"], method=method)
        yield ask("junk for junk", auth="junk-1", subject="junk-2", method=method)
    # An empty header is not one that is missing: beside another one it makes a difference.
    empty = Cached.ANYHOW
    yield ask("empty caller", auth="", subject=token, cached=empty)
    yield ask("empty subject", auth=admin, subject="", cached=empty)
    yield ask("one letter as subject", auth=admin, subject="q")
    yield ask("markup as subject", auth=admin, subject='"<b>&\\u0041%41{}')
    yield ask("latin-1 as subject", auth=admin, subject="caf\xe9")
    yield ask("latin-1 as caller", auth="caf\xe9", subject=token)
    yield ask("long junk as subject", auth=admin, subject="z" * 5000)
    # Keystone takes the blanks behind it away, so the token that it looked at is another string.
    blanks = Cached.ANYHOW
    yield ask("caller with blanks around", auth=f"  {admin}  ", subject=token, cached=blanks)
    yield ask("subject with blanks around", auth=admin, subject=f"  {token}  ")
    yield ask("caller with a tab behind", auth=f"{admin}\t", subject=token, cached=blanks)
    storage = {"X-Storage-Token": admin}
    yield ask("caller by X-Storage-Token", subject=token, more=storage)
    yield ask("junk by X-Storage-Token", subject=token, more={"X-Storage-Token": "junk"})
    yield ask(
        "both caller's headers", auth=people.tokens["other"], subject=token, more=storage
    )
    yield ask(
        "empty caller beside X-Storage-Token", auth="", subject=token, more=storage, cached=empty
    )
    service = people.tokens["service"]
    for name, value in (("good", service), ("junk", "junk"), ("weak", people.tokens["other"])):
        more = {"X-Service-Token": value}
        yield ask(f"X-Service-Token, {name}", auth=admin, subject=token, more=more)
        yield ask(f"X-Service-Token, {name}, no caller", subject=token, more=more)
        yield ask(
            f"X-Service-Token, {name}, weak caller", auth=people.tokens["other"], subject=token,
            more=more,
        )
    twice = (("X-Subject-Token", people.tokens["other"]),)
    yield ask("two subjects", auth=admin, subject=token, more=twice)
    yield ask(
        "two callers", auth=admin, subject=token,
        more=(("X-Auth-Token", people.tokens["other"]),),
    )


def _access_rules(people: People) -> Iterator[Ask]:
    """Application credentials, by what the client says it knows of access rules."""
    admin = people.admins[0]
    for kind in ("credential", "credential with rules"):
        token = people.tokens[kind]
        for value in ("1.0", "0.9", "junk", "2", "1.0, 0.9", "nan", "", "-1"):
            more = {"OpenStack-Identity-Access-Rules": value}
            for name, caller in (("", admin), (" calls", token)):
                yield ask(
                    f"{kind}{name}, access rules {value!r}", auth=caller, subject=token, more=more,
                    cached=_kept_with(kind, value),
                )
        yield ask(f"{kind} calls", auth=token, subject=token, method="HEAD")
        yield ask(f"{kind} lists projects", "/v3/projects", auth=token)
        yield ask(f"{kind} lists users", "/v3/users", auth=token)
        yield ask(
            f"{kind} lists users with a service's token", "/v3/users", auth=token,
            more={"X-Service-Token": people.tokens["service"]},
        )


def _kept_with(kind: str, value: str) -> Cached:
    if not value:
        return Cached.ANYHOW
    try:
        float(value)
    except ValueError:
        # Keystone fails, and errors of the moment are not kept.
        return Cached.KEPT if kind == "credential" else Cached.ASKED
    return Cached.KEPT


def _expired(people: People) -> Iterator[Ask]:
    admin = people.tokens["admin"]
    expired = {"expired": people.expired, "long expired": people.long_expired}
    for name, token in expired.items():
        for query in ("", "?allow_expired=1", "?allow_expired=true&nocatalog", "?allow_expired=0"):
            cached = Cached.ASKED if query.endswith("=0") else Cached.KEPT
            yield ask(f"{name}{query}", TOKENS + query, auth=admin, subject=token, cached=cached)
        yield ask(
            f"{name}?allow_expired=1", f"{TOKENS}?allow_expired=1", auth=admin, subject=token,
            method="HEAD",
        )
        yield ask(f"{name} as caller", auth=token, subject=people.tokens["member"])
        yield ask(
            f"{name} as caller?allow_expired=1", f"{TOKENS}?allow_expired=1", auth=token,
            subject=token,
        )
        yield ask(
            f"{name} as caller beside a service", f"{TOKENS}?allow_expired=1", auth=token,
            subject=token, more={"X-Service-Token": people.tokens["service"]},
        )


_QUERIES = (
    *("?nocatalog", "?allow_expired=1", "?allow_expired=1&nocatalog"),
    "?nocatalog&allow_expired=1",
)


def _forms(people: People) -> Iterator[Ask]:
    """The same question in other words: paths, queries, versions of HTTP."""
    tokens = {"auth": people.tokens["admin"], "subject": people.tokens["member"]}
    for query in (
        "?", "?nocatalog", "?nocatalog=0", "?nocatalog=%00", "?allow_expired=1",
        "?allow_expired=1&nocatalog", "?nocatalog&allow_expired=1", "?allow_expired=junk",
        "?allow_expired=1&allow_expired=0", "?%6eocatalog", "?nocatalog;allow_expired=1",
        "?NOCATALOG", "?&&&", "?=", "?%", "?%ff", "?x=%zz", "?x=\xe9", "?x=" + "y" * 4000, "?a?b",
        "?x#nocatalog", "?nocatalog#x", "?token=1&auth=2", "?user_id=" + people.ids["other"],
    ):
        name = query if len(query) < 100 else query[:5] + "..."
        # Others than clients send are not kept, since everybody can make as many as he likes.
        cached = Cached.KEPT if query in _QUERIES else Cached.ASKED
        if query == "?":
            cached = Cached.SHARED
        for method in ("GET", "HEAD") if len(name) < 15 else ("GET",):
            yield ask(f"query {name!r}", TOKENS + query, **tokens, method=method, cached=cached)
    for path in (
        "/v3/auth/tokens/", "/v3/auth/tokens//", "/v3//auth/tokens", "//v3/auth/tokens",
        "/V3/auth/tokens", "/v3/auth/tokens/x", "/v3/auth/tokens;x=1",
        "/v3/auth/tokens/OS-PKI/revoked", "/v3/auth", "/v3", "/v3/", "/",
        "/v2.0/tokens", "/healthcheck", "/identity/v3/auth/tokens", "/v3/auth/tokens%2F",
        "/v3/auth/tokens%00",
    ):
        for method in ("GET", "HEAD"):
            yield ask(f"path {path}", path, **tokens, method=method, cached=Cached.ASKED)
    # The server takes the path apart, so Keystone and the cache see the usual one.
    for path in ("/v3/auth/%74okens", "/v3/auth/./tokens", "/v3/auth/x/../tokens"):
        yield ask(f"path {path}", path, **tokens, cached=Cached.SHARED)
    yield ask("path, whole URL", f"http://{HOST}{TOKENS}", **tokens, cached=Cached.ASKED)
    for version in ("HTTP/1.0", "HTTP/1.1"):
        # Same answer, but for HTTP/1.0 the host may be missing.
        for method in ("GET", "HEAD"):
            yield ask(
                f"by {version}", **tokens, version=version, method=method, cached=Cached.SHARED
            )
            headers = (("X-Auth-Token", people.admins[1]), ("X-Subject-Token", tokens["subject"]))
            yield Ask(
                f"{method} without host by {version}", method, TOKENS, headers, version=version,
                cached=Cached.KEPT if version == "HTTP/1.0" else Cached.SHARED,
            )
            yield Ask(
                f"{method} without host and caller by {version}", method, TOKENS, headers[1:],
                version=version, cached=Cached.KEPT if version == "HTTP/1.0" else Cached.SHARED,
            )


def _headers(people: People) -> Iterator[Ask]:
    """Headers that make a difference, might, or do not."""
    tokens = {"auth": people.tokens["admin"], "subject": people.tokens["member"]}
    admin_id = people.ids["other"]
    ours: list[tuple[str, str]] = [
        ("Accept-Language", "de"), ("Accept-Language", "fr-FR, de;q=0.5"), ("Accept-Language", "*"),
        ("Content-Type", "application/json"), ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "junk"),
        ("Origin", DASHBOARD), ("Origin", "https://evil.example"), ("Origin", "null"),
        ("X-Forwarded-Proto", "https"), ("X-Forwarded-Host", "front.example"),
        ("X-Forwarded-Port", "8443"), ("X-Forwarded-Prefix", "/identity"),
        ("Forwarded", "for=10.0.0.1;proto=https;host=front.example"),
        ("If-Modified-Since", "Thu, 01 Jan 2037 00:00:00 GMT"), ("Range", "bytes=0-9"),
        ("Cookie", "session=1"), ("X-Roles", "admin"), ("X-User-Id", admin_id),
        ("X-Service-Roles", "service"), ("OpenStack-System-Scope", "all"),
        ("X-Project-Id", people.ids["project"]), ("X-Domain-Id", "default"),
        ("X-Is-Admin-Project", "True"), ("X-Identity-Status", "Confirmed"),
        ("X-HTTP-Method-Override", "DELETE"), ("X-Rewrite-Url", "/v3/users"),
        ("X-Original-Url", "/v3/users"), ("X-Scheme", "https"), ("OpenStack-API-Version", "3"),
        ("Accept-Charset", "utf-16"), ("X-Unknown", "x"), ("Sec-Fetch-Site", "cross-site"),
        ("Access-Control-Request-Method", "GET"), ("Referer", "http://r.example/"),
    ]
    asked = {
        ("Authorization", "Basic eDp5"), ("X-Trace-Info", "x"), ("Expect", "junk"),
        ("Upgrade", "h2c"), ("X-SSL-Client-Verify", "SUCCESS"),
        ("Transfer-Encoding", "identity"), ("Content-Length", "2"),
    }
    shared = [
        ("User-Agent", "python-keystoneclient"), ("Accept", "*/*"), ("Accept", "text/html"),
        ("Accept", "application/xml"), ("Accept", "junk"), ("Accept-Encoding", "gzip, br"),
        ("Cache-Control", "no-cache"), ("Pragma", "no-cache"), ("Connection", "keep-alive"),
        ("Connection", "close"), ("X-Forwarded-For", "10.1.2.3"), ("X-Real-IP", "10.1.2.3"),
        ("X-Openstack-Request-Id", "req-01234567-89ab-4cde-8f01-23456789abcd"),
        ("X-Openstack-Request-Id", "junk"), ("Via", "1.1 x"), ("Traceparent", "00-a-b-01"),
        ("Content-Length", "0"), ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ("If-None-Match", "*"), ("If-None-Match", '"x"'),
    ]
    listed = [
        *((x, Cached.KEPT) for x in ours),
        *((x, Cached.ASKED) for x in sorted(asked)),
        *((x, Cached.SHARED) for x in shared),
    ]
    for place, ((name, value), cached) in enumerate(listed):
        body = b"{}" if (name, value) == ("Content-Length", "2") else b""
        more = {name: value}
        by = tokens if cached is not Cached.KEPT else {
            "auth": people.admins[2 + place // WAYS], "subject": tokens["subject"],
        }  # fmt: skip
        yield ask(f"{name}: {value}", **by, more=more, cached=cached, body=body)
        if cached is Cached.SHARED and name != "Accept":
            continue
        # A refusal, and a list with links in it, may say what a description of a token does not.
        yield ask(
            f"refused, {name}: {value}", subject=tokens["subject"], more=more, cached=cached,
            body=body,
        )
        yield ask(
            f"projects, {name}: {value}", "/v3/projects", auth=tokens["auth"], more=more,
            cached=cached, body=body,
        )
    for host in ("keystone.example", "KEYSTONE.example:5000", "[::1]:5000", "x", "", "a b", "<b>"):
        for name, target, caller in (
            ("", TOKENS, people.admins[-1]), ("refused, ", TOKENS, None),
            ("projects, ", "/v3/projects", tokens["auth"]),
        ):  # fmt: skip
            headers: list[tuple[str, str]] = [("Host", host)]
            if caller is not None:
                headers.append(("X-Auth-Token", caller))
            headers.append(("X-Subject-Token", tokens["subject"]))
            yield Ask(
                f"GET {name}Host: {host}", "GET", target, tuple(headers),
                cached=Cached.KEPT if host else Cached.ANYHOW,
            )
    auth, subject = tokens["auth"], tokens["subject"]
    for style in (str.lower, str.upper):
        headers = [
            (style(name), value)
            for name, value in (
                ("Host", HOST), ("X-Auth-Token", auth), ("X-Subject-Token", subject)
            )
        ]
        yield Ask(
            f"GET names of headers by {style.__name__}", "GET", TOKENS, tuple(headers),
            cached=Cached.SHARED,
        )
    more = {"X-Roles": "admin", "X-User-Id": admin_id, "OpenStack-System-Scope": "all"}
    yield ask("forged without a caller", subject=subject, more=more)
    yield ask("forged by other", auth=people.tokens["other"], subject=subject, more=more)
    yield ask("users, forged without a caller", "/v3/users", more=more)
    yield ask(
        "chunked body", **tokens, more={"Transfer-Encoding": "chunked"}, cached=Cached.ASKED,
        body=b"2\r\n{}\r\n0\r\n\r\n",
    )


def _others(people: People) -> Iterator[Ask]:
    """Methods that are never answered from a cache."""
    tokens = {"auth": people.tokens["admin"], "subject": people.tokens["member"]}
    asked: dict[str, Any] = {"cached": Cached.ASKED}
    preflight = {"Origin": DASHBOARD, "Access-Control-Request-Method": "GET"}
    yield ask("plain", **tokens, method="OPTIONS", **asked)
    yield ask("preflight", method="OPTIONS", more=preflight, **asked)
    for method in ("PATCH", "PUT", "TRACE", "get", "JUNK"):
        yield ask("plain", **tokens, method=method, **asked)
    for body in (b"", b"{}", b"junk", b'{"auth": {}}'):
        more = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        name = body.decode() or "nothing"
        yield ask(f"{name}", **tokens, method="POST", more=more, body=body, **asked)
    yield ask("without a subject", auth=tokens["auth"], method="DELETE", **asked)
    yield ask("junk", auth=tokens["auth"], subject="junk", method="DELETE", **asked)
    yield ask("without a caller", subject=tokens["subject"], method="DELETE", **asked)


def _routes(people: People) -> Iterator[Ask]:
    """The other routes, by those who may and those who may not."""
    ids = people.ids
    targets = [
        "/v3/projects", "/v3/projects?domain_id=default", "/v3/projects?name=admin",
        "/v3/projects?name__contains=a&sort_key=name", "/v3/projects?enabled=0",
        "/v3/projects?limit=2", "/v3/projects?limit=2&marker=x", "/v3/projects?tags=a,b",
        "/v3/projects?name=%41dmin", "/v3/projects?is_domain=true", "/v3/projects?junk=1",
        f"/v3/projects/{ids['project']}", f"/v3/projects/{ids['child']}?parents_as_list",
        f"/v3/projects/{ids['child']}?parents_as_ids", "/v3/projects/none",
        f"/v3/projects/{ids['project']}?subtree_as_list&parents_as_ids", "/v3/projects/default",
        "/v3/auth/projects", "/v3/auth/domains", "/v3/auth/system", "/v3/auth/catalog",
        f"/v3/users/{ids['user']}", f"/v3/users/{ids['federated user']}", "/v3/users/none",
        "/v3/users", "/v3/users?domain_id=default", f"/v3/users?name={ids['user name']}",
        "/v3/users?limit=1", "/v3/users?password_expires_at=lt:2099-01-01T00:00:00Z",
        "/v3/roles", "/v3/roles?name=admin", "/v3/services", "/v3/services?type=identity",
        "/v3/endpoints", "/v3/endpoints?interface=public", "/v3/regions",
        "/v3/regions?parent_region_id=x", "/v3/domains", "/v3/domains?name=Default",
    ]  # fmt: skip
    for target in targets:
        yield ask(target, target, auth=people.tokens["admin"])
        yield ask(f"{target} by member", target, auth=people.tokens["member"])
        if "?" not in target:
            yield ask(target, target, auth=people.tokens["admin"], method="HEAD")
            yield ask(f"{target} by no one", target)
            yield ask(f"{target} by junk", target, auth="junk")
            yield ask(f"{target} by system", target, auth=people.tokens["system"])
            yield ask(f"{target} by domain", target, auth=people.tokens["domain"])
            yield ask(f"{target} by unscoped", target, auth=people.tokens["unscoped"])
    for target in (
        "/v3/projects/", f"/v3/projects/{ids['project']}/tags", "/v3/credentials",
        f"/v3/users/{ids['user']}/projects", "/v3/roles/none", "/v3/groups", "/v3/policies",
        f"/v3/users/{ids['user']}/", "/v3/users/", "/v3/none",
    ):  # fmt: skip
        yield ask(target, target, auth=people.tokens["admin"], cached=Cached.ASKED)
    yield ask("projects with a subject", "/v3/projects", auth=people.tokens["admin"],
              subject=people.tokens["member"])
    yield ask("projects with a junk subject", "/v3/projects", auth=people.tokens["admin"],
              subject="junk")
