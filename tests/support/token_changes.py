"""Every kind of change by HTTP that changes what Keystone answers about a token.

Each :class:`Kind` makes what it needs with random names, so kinds share one Keystone and never meet
each other. It names the reads that show the change and says of an answer whether it shows the state
before or after; ``exactness`` reads while it makes the change and counts answers that are too old.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from support.keystone_world import (
    VALIDATE,
    Answer,
    Federation,
    Person,
    User,
    World,
    grant,
    random_name,
)

# A token that no longer holds: 401 as the caller's; 404, or 403 for a broken trust, as the subject.
GONE = frozenset({401, 403, 404})

Change = Callable[[], object]


Shows = Callable[[Answer], bool]


@dataclass(frozen=True, kw_only=True)
class Read:
    """A request whose answer shows a change.

    :param before: whether an answer shows the state before the change
    :param after: whether it shows the state after it; an answer that shows neither is an error
    :param base_url: where it is asked, if not where the change is made
    :param body: what is sent with it
    :param also_by: the token of another caller, who asks every other time: what the one was
        answered is known then when the other asks for the first time
    """

    name: str
    method: str
    path: str
    headers: dict[str, str]
    before: Shows
    after: Shows
    base_url: str | None = None
    body: object = None
    also_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One change that can be made now.

    :param change: makes it, and returns when Keystone has answered that it is made
    :param undo: brings the state before back, in the answers too; ``None`` if nothing does
    :param keep: after ``change``, something that looks like undoing it and must not be
    """

    reads: list[Read]
    change: Change
    undo: Change | None = None
    keep: Change | None = None


# What an answer shows


def alive(answer: Answer) -> bool:
    """The token holds."""
    return answer.status == 200


def gone(answer: Answer) -> bool:
    """The token does not hold, or the caller may not."""
    return answer.status in GONE


def says(value: object, *path: str) -> Shows:
    """The token's description has this value at this path."""

    def shows(answer: Answer) -> bool:
        found: Any = answer.token()
        for step in path:
            found = found.get(step) if isinstance(found, dict) else None
        return bool(found == value)

    return shows


def _both(value: object, other: object, *path: str) -> tuple[Shows, Shows]:
    return says(value, *path), says(other, *path)


def has_role(role: str, *, name: str | None = None) -> Shows:
    """The token holds and has the role, by this name if one is given."""

    def shows(answer: Answer) -> bool:
        roles = {x["id"]: x["name"] for x in answer.token().get("roles", ())}
        return role in roles and name in (None, roles[role])

    return shows


def lacks_role(role: str) -> Shows:
    """The token holds without the role."""
    return lambda answer: alive(answer) and not has_role(role)(answer)


def catalog_has(value: str) -> Shows:
    """The catalog names this id, name or URL."""
    return lambda answer: f'"{value}"' in json.dumps(answer.token().get("catalog", []))


def catalog_lacks(value: str) -> Shows:
    """The token holds and its catalog does not name it."""
    return lambda answer: "catalog" in answer.token() and not catalog_has(value)(answer)


def provider_says(provider: str, url: str | None) -> Shows:
    """The token lists this service provider with this URL; ``None``: does not list it."""

    def shows(answer: Answer) -> bool:
        listed = {x["id"]: x["sp_url"] for x in answer.token().get("service_providers", ())}
        return alive(answer) and listed.get(provider) == url

    return shows


# Reads


def as_subject(
    world: World, token: str, before: Shows, after: Shows, *, name: str = "subject",
    method: str = "GET", query: str = "", by: str | None = None, **headers: str,
) -> Read:
    """Someone, by default the administrator, validates the token."""
    return Read(
        name=f"{name} {method}{query}", method=method, path=VALIDATE + query, before=before,
        after=after, also_by=None if by or method != "GET" else world.service.token,
        headers={"X-Auth-Token": by or world.admin, "X-Subject-Token": token, **headers},
    )


def content(world: World, token: str, shows: tuple[Shows, Shows]) -> list[Read]:
    """The reads of a token that goes on to hold with another description."""
    return [
        as_subject(world, token, *shows),
        as_subject(world, token, *shows, name="caller", by=token),
    ]


def life(world: World, token: str, before: Shows = alive, after: Shows = gone) -> list[Read]:
    """The reads of a token that ceases to hold."""
    return [
        *content(world, token, (before, after)),
        as_subject(world, token, before, after, name="caller", by=token, method="HEAD"),
    ]


def lives(world: World, **tokens: str) -> list[Read]:
    """The same for several tokens: all as subjects, the first as the caller too."""
    first, *others = tokens.items()
    return [
        *life(world, first[1]),
        *(as_subject(world, token, alive, gone, name=f"subject {x}") for x, token in others),
    ]


# The catalogue


@dataclass(frozen=True)
class Kind:
    """A kind of change.

    :param skip: why it cannot be made by HTTP on this Keystone
    """

    name: str
    prepare: Callable[[World], Prepared]
    skip: str = ""


KINDS: list[Kind] = []
# Rows of the table that are no kinds here, and why.
LEFT_OUT = {
    "domain config": "changes the backend of users, only with domain_specific_drivers_enabled",
    "web single sign-on": "the same login as the other two; wants [federation] trusted_dashboard",
    "region create, patch, delete": "no token shows a region of its own; see endpoint moved",
    "endpoint group create": "shown once a project is associated, which is a kind",
    "access rule delete": "only unused rules can be deleted, and no token shows them",
    "identity provider disable; mapping and protocol": "issued tokens go on to hold unchanged",
    "group rename": "no token shows a group's name",
    "EC2 and other credentials, MFA rules, receipts, OAuth2 tokens": "issued tokens are unaffected",
}

_Prepare = Callable[[World], Prepared]


def _keystone() -> int:
    """The major version of the Keystone of this environment."""
    return int(version("keystone").partition(".")[0])


def _kind(name: str, *, since: int = 0) -> Callable[[_Prepare], _Prepare]:
    """Register a kind of change.

    :param since: the Keystone with which it came; an earlier one does not change anything
    """

    def register(prepare: _Prepare) -> _Prepare:
        if _keystone() >= since:
            KINDS.append(Kind(name, prepare))
        return prepare

    return register


# Tokens


@_kind("token revoked")
def _token_revoked(world: World) -> Prepared:
    # Here also every form of the question, because a cache may hold an answer to each.
    person = world.person(world.own_role["service"])
    token, other = person.token, world.bystander.token
    return Prepared(
        reads=[
            *life(world, token),
            as_subject(world, token, alive, gone, method="HEAD"),
            as_subject(world, token, alive, gone, query="?nocatalog"),
            as_subject(world, token, alive, gone, query="?allow_expired=1"),
            as_subject(world, other, alive, gone, name="caller, another", by=token),
            Read(
                name="caller by X-Storage-Token GET", method="GET", path=VALIDATE, before=alive,
                after=gone, headers={"X-Storage-Token": token, "X-Subject-Token": token},
            ),
            Read(
                name="caller, elsewhere GET", method="GET", path="/auth/projects", before=alive,
                after=gone, headers={"X-Auth-Token": token},
            ),
        ],
        change=lambda: world.revoke(token),
    )


@_kind("token revoked by its user")
def _token_revoked_by_user(world: World) -> Prepared:
    token = world.rescope(world.issue(world.bystander.user), world.bystander.project)
    return Prepared(reads=life(world, token), change=lambda: world.revoke(token, by=token))


@_kind("token revoked without its chain")
def _token_revoked_alone(world: World) -> Prepared:
    token = world.issue(world.bystander.user)
    return Prepared(
        reads=life(world, token), change=lambda: world.revoke(token, query="?cascade=false")
    )


@_kind("token's parent revoked", since=30)
def _parent_revoked(world: World) -> Prepared:
    parent = world.issue(world.bystander.user)
    token = world.rescope(parent, world.bystander.project)
    return Prepared(
        reads=lives(world, rescoped=token, parent=parent), change=lambda: world.revoke(parent)
    )


@_kind("all tokens of a user revoked", since=30)
def _all_revoked(world: World) -> Prepared:
    person = world.person()
    return Prepared(
        reads=lives(world, scoped=person.token, unscoped=world.issue(person.user)),
        change=lambda: world.call("DELETE", f"/users/{person.user.id}/tokens"),
    )


# Users


@_kind("user disabled; enabling revives nothing")
def _user_disabled(world: World) -> Prepared:
    person = world.person()
    path = f"/users/{person.user.id}"
    return Prepared(
        reads=lives(world, scoped=person.token, unscoped=world.issue(person.user)),
        change=lambda: world.flag("user", path, False),
        keep=lambda: world.flag("user", path, True),
    )


@_kind("user renamed")
def _user_renamed(world: World) -> Prepared:
    person, name = world.person(), random_name()
    path = f"/users/{person.user.id}"
    return Prepared(
        reads=content(world, person.token, _both(person.user.name, name, "user", "name")),
        change=lambda: world.patch("user", path, name=name),
        undo=lambda: world.patch("user", path, name=person.user.name),
    )


def _login(
    user: dict[str, object], project: dict[str, object] | None, shows: tuple[Shows, Shows]
) -> Read:
    """Someone logs in; users and projects are said as Keystone takes them."""
    scope: object = "unscoped" if project is None else {"project": project}
    identity = {"methods": ["password"], "password": {"user": user}}
    before, after = shows
    return Read(
        name="login", method="POST", path=VALIDATE, headers={}, before=before, after=after,
        body={"auth": {"identity": identity, "scope": scope}},
    )


@_kind("name of a user given to another")
def _name_given_away(world: World) -> Prepared:
    password, (name, away, aside) = uuid.uuid4().hex, [random_name() for _ in range(3)]
    one, other = (
        world.make("user", "/users", name=mine, password=password, domain_id="default")
        for mine in (name, aside)
    )
    for user in (one, other):
        world.issue(User(user, "", password, "default"))

    def rename(user: str, name: str) -> None:
        world.patch("user", f"/users/{user}", name=name)

    def give() -> None:
        rename(one, away)
        rename(other, name)

    def take() -> None:
        rename(other, aside)
        rename(one, name)

    who = {"name": name, "domain": {"id": "default"}, "password": password}
    return Prepared(
        reads=[_login(who, None, _both(one, other, "user", "id"))], change=give, undo=take
    )


@_kind("name of a project given to another")
def _project_name_given_away(world: World) -> Prepared:
    one, other = world.project(), world.project()
    person = world.person(project=one)
    world.call("PUT", grant("projects", other, "users", person.user.id, world.still_role))
    name, away, aside = (random_name() for _ in range(3))

    def rename(project: str, name: str) -> None:
        world.patch("project", f"/projects/{project}", name=name)

    def give() -> None:
        rename(one, away)
        rename(other, name)

    def take() -> None:
        rename(other, aside)
        rename(one, name)

    take()
    who = {"id": person.user.id, "password": person.user.password}
    where = {"name": name, "domain": {"id": "default"}}
    return Prepared(
        reads=[_login(who, where, _both(one, other, "project", "id"))], change=give, undo=take
    )


@_kind("user deleted")
def _user_deleted(world: World) -> Prepared:
    person = world.person()
    return Prepared(
        reads=life(world, person.token),
        change=lambda: world.call("DELETE", f"/users/{person.user.id}"),
    )


@_kind("password changed by the user")
def _password_changed(world: World) -> Prepared:
    person = world.person()
    body = {"user": {"original_password": person.user.password, "password": uuid.uuid4().hex}}
    return Prepared(
        reads=life(world, person.token),
        change=lambda: world.call(
            "POST", f"/users/{person.user.id}/password", body, token=person.token
        ),
    )


@_kind("password set by the administrator")
def _password_set(world: World) -> Prepared:
    person = world.person()
    return Prepared(
        reads=life(world, person.token),
        change=lambda: world.patch(
            "user", f"/users/{person.user.id}", password=uuid.uuid4().hex
        ),
    )


# Groups


def _with_group(world: World, *members: User) -> tuple[str, str]:
    """A group that has a role of its own on the project that stays."""
    group, role = world.group(*members), world.second_role
    world.call("PUT", grant("projects", world.still_project, "groups", group, role))
    return group, role


@_kind("user added to a group")
def _group_joined(world: World) -> Prepared:
    person = world.person()
    group, role = _with_group(world)
    return Prepared(
        reads=content(world, person.token, (lacks_role(role), has_role(role))),
        change=lambda: world.call("PUT", f"/groups/{group}/users/{person.user.id}"),
    )


@_kind("user removed from a group")
def _group_left(world: World) -> Prepared:
    user = world.user()
    group, _ = _with_group(world, user)
    token = world.issue(user, project=world.still_project)
    return Prepared(
        reads=life(world, token),
        change=lambda: world.call("DELETE", f"/groups/{group}/users/{user.id}"),
    )


@_kind("group deleted")
def _group_deleted(world: World) -> Prepared:
    user = world.user()
    group, _ = _with_group(world, user)
    token = world.issue(user, project=world.still_project)
    return Prepared(
        reads=life(world, token), change=lambda: world.call("DELETE", f"/groups/{group}")
    )


# Grants


def _granted(world: World, *, scope: str, actors: str, only: bool) -> Prepared:
    """A grant removed and made again, where it is the only one, or beside another."""
    user = world.user()
    actor = user.id if actors == "users" else world.group(user)
    domain = world.domain() if scope in ("domains", "domains+") else ""
    parent = world.project() if scope == "projects+" else None
    project = world.still_project
    if scope.endswith("+"):
        project = world.project(domain or "default", parent)
    target = {"system": "", "projects": project, "projects+": parent or ""}.get(scope, domain)
    path = grant(scope, target, actors, actor, world.second_role)
    world.call("PUT", path)
    where: dict[str, Any] = {"project": project}
    direct, at = "projects", project
    if scope == "system":
        where, direct, at = {"system": True}, "system", ""
    elif scope == "domains":
        where, direct, at = {"domain": domain}, "domains", domain
    if not only:
        world.call("PUT", grant(direct, at, "users", user.id, world.still_role))
    token = world.issue(user, **where)
    reads = (
        life(world, token)
        if only
        else content(world, token, (has_role(world.second_role), lacks_role(world.second_role)))
    )
    return Prepared(
        reads=reads, change=lambda: world.call("DELETE", path),
        undo=lambda: world.call("PUT", path),
    )


_SCOPES = {
    "projects": "on a project", "domains": "on a domain", "system": "on the system",
    "projects+": "inherited from a project", "domains+": "inherited from a domain",
}
for _scope, _where in _SCOPES.items():
    for _actors in ("users", "groups"):
        for _only in (True, False):
            KINDS.append(Kind(
                f"{'only' if _only else 'second'} grant of a {_actors[:-1]} {_where}",
                partial(_granted, scope=_scope, actors=_actors, only=_only),
            ))


# What logins and re-scopes show of groups and grants that were read for another project


def _issued_for(
    world: World, user: User, scope: dict[str, Any], role: str, *, rescope: bool = True
) -> list[Read]:
    """A login and a re-scope to where the user has a role, and then a second one.

    :param rescope: whether the change leaves tokens of the user that can be exchanged
    """
    # Whatever is kept of the user is read for it.
    elsewhere = world.project()
    world.call("PUT", grant("projects", elsewhere, "users", user.id, world.still_role))
    token = world.issue(user, project=elsewhere)
    has = has_role(role)

    def lacks(answer: Answer) -> bool:
        return answer.status == 201 and not has(answer)

    who = {"id": user.id, "password": user.password}
    ways: dict[str, dict[str, Any]] = {
        "login": {"methods": ["password"], "password": {"user": who}},
        "re-scope": {"methods": ["token"], "token": {"id": token}},
    }
    if not rescope:
        del ways["re-scope"]
    return [
        Read(
            name=name, method="POST", path=VALIDATE, headers={}, before=lacks, after=has,
            body={"auth": {"identity": identity, "scope": scope}},
        )
        for name, identity in ways.items()
    ]


def _granted_elsewhere(world: World, *, scope: str, actors: str) -> Prepared:
    user = world.user()
    actor = user.id if actors == "users" else world.group(user)
    domain = world.domain() if scope in ("domains", "domains+") else "default"
    parent = world.project(domain) if scope == "projects+" else None
    project = world.project(domain, parent)
    target = {"system": "", "projects": project, "projects+": parent}.get(scope, domain)
    where: dict[str, Any] = {"project": {"id": project}}
    direct, at = "projects", project
    if scope == "system":
        where, direct, at = {"system": {"all": True}}, "system", ""
    elif scope == "domains":
        where, direct, at = {"domain": {"id": domain}}, "domains", domain
    world.call("PUT", grant(direct, at, "users", user.id, world.still_role))
    path = grant(scope, target or "", actors, actor, world.second_role)
    # From a token of a project none of the system is to be had.
    reads = _issued_for(world, user, where, world.second_role, rescope=scope != "system")
    return Prepared(
        reads=reads,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


for _scope, _where in _SCOPES.items():
    for _actors in ("users", "groups"):
        KINDS.append(Kind(
            f"grant of a {_actors[:-1]} {_where}, for logins",
            partial(_granted_elsewhere, scope=_scope, actors=_actors),
        ))


@_kind("user put into a group and taken out, for logins")
def _member_elsewhere(world: World) -> Prepared:
    person = world.person()
    group, role = _with_group(world)
    path = f"/groups/{group}/users/{person.user.id}"
    # Who leaves a group has no tokens left.
    return Prepared(
        reads=_issued_for(
            world, person.user, {"project": {"id": person.project}}, role, rescope=False
        ),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("group deleted, for logins")
def _group_gone_elsewhere(world: World) -> Prepared:
    person = world.person()
    group, role = _with_group(world, person.user)
    (read,) = _issued_for(
        world, person.user, {"project": {"id": person.project}}, role, rescope=False
    )
    return Prepared(
        reads=[replace(read, before=read.after, after=read.before)],
        change=lambda: world.call("DELETE", f"/groups/{group}"),
    )


@_kind("role implied, for logins")
def _implied_elsewhere(world: World) -> Prepared:
    role, implied = world.role(), world.second_role
    person = world.person(role)
    path = f"/roles/{role}/implies/{implied}"
    return Prepared(
        reads=_issued_for(world, person.user, {"project": {"id": person.project}}, implied),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


# Roles


@_kind("role renamed")
def _role_renamed(world: World) -> Prepared:
    role, old, new = world.role(), random_name(), random_name()
    path = f"/roles/{role}"
    world.patch("role", path, name=old)
    return Prepared(
        reads=content(
            world, world.person(role).token, (has_role(role, name=old), has_role(role, name=new))
        ),
        change=lambda: world.patch("role", path, name=new),
        undo=lambda: world.patch("role", path, name=old),
    )


@_kind("only role deleted")
def _only_role_deleted(world: World) -> Prepared:
    role = world.role()
    return Prepared(
        reads=life(world, world.person(role).token),
        change=lambda: world.call("DELETE", f"/roles/{role}"),
    )


@_kind("second role deleted")
def _second_role_deleted(world: World) -> Prepared:
    role = world.role()
    token = world.person(world.still_role, role).token
    return Prepared(
        reads=content(world, token, (has_role(role), lacks_role(role))),
        change=lambda: world.call("DELETE", f"/roles/{role}"),
    )


@_kind("implied role deleted")
def _implied_role_deleted(world: World) -> Prepared:
    role, implied = world.role(), world.role()
    world.call("PUT", f"/roles/{role}/implies/{implied}")

    def after(answer: Answer) -> bool:
        # SQLite keeps the implication, and Keystone no longer finds the role: then it answers 404.
        return gone(answer) or lacks_role(implied)(answer)

    return Prepared(
        reads=content(world, world.person(role).token, (has_role(implied), after)),
        change=lambda: world.call("DELETE", f"/roles/{implied}"),
    )


def _implied(world: World, *, scope: str) -> Prepared:
    role, implied = world.role(), world.second_role
    user, at = world.user(), {"projects": world.still_project, "system": ""}
    world.call("PUT", grant(scope, at[scope], "users", user.id, role))
    token = (
        world.issue(user, system=True)
        if scope == "system"
        else world.issue(user, project=world.still_project)
    )
    path = f"/roles/{role}/implies/{implied}"
    return Prepared(
        reads=content(world, token, (lacks_role(implied), has_role(implied))),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


for _scope in ("projects", "system"):
    KINDS.append(Kind(f"role implied {_SCOPES[_scope]}", partial(_implied, scope=_scope)))


# Projects and domains


@_kind("project disabled and enabled")
def _project_disabled(world: World) -> Prepared:
    project = world.project()
    path = f"/projects/{project}"
    return Prepared(
        reads=life(world, world.person(project=project).token),
        change=lambda: world.flag("project", path, False),
        undo=lambda: world.flag("project", path, True),
    )


@_kind("project renamed")
def _project_renamed(world: World) -> Prepared:
    project, old, new = world.project(), random_name(), random_name()
    path = f"/projects/{project}"
    world.patch("project", path, name=old)
    return Prepared(
        reads=content(
            world, world.person(project=project).token, _both(old, new, "project", "name")
        ),
        change=lambda: world.patch("project", path, name=new),
        undo=lambda: world.patch("project", path, name=old),
    )


@_kind("project deleted")
def _project_deleted(world: World) -> Prepared:
    project = world.project()
    return Prepared(
        reads=life(world, world.person(project=project).token),
        change=lambda: world.call("DELETE", f"/projects/{project}"),
    )


def _of_domain(world: World, domain: str) -> dict[str, str]:
    """Tokens in three ways of a domain: of its project, of its user, for the domain itself."""
    guest = world.person(project=world.project(domain))
    native = world.person(domain=domain)
    world.call("PUT", grant("domains", domain, "users", guest.user.id, world.still_role))
    return {
        "of its project": guest.token,
        "of its user": native.token,
        "for it": world.issue(guest.user, domain=domain),
    }


@_kind("domain disabled and enabled")
def _domain_disabled(world: World) -> Prepared:
    domain = world.domain()
    tokens = _of_domain(world, domain)
    # Keystone does not look whether the domain of a domain-scoped token is enabled.
    del tokens["for it"]
    return Prepared(
        reads=lives(world, **tokens),
        change=lambda: world.flag("domain", f"/domains/{domain}", False),
        undo=lambda: world.flag("domain", f"/domains/{domain}", True),
    )


@_kind("domain renamed")
def _domain_renamed(world: World) -> Prepared:
    domain, old, new = world.domain(), random_name(), random_name()
    path = f"/domains/{domain}"
    world.patch("domain", path, name=old)
    places = {
        "of its project": ("project", "domain", "name"),
        "of its user": ("user", "domain", "name"),
        "for it": ("domain", "name"),
    }
    reads = []
    for what, token in _of_domain(world, domain).items():
        shows = _both(old, new, *places[what])
        reads.append(as_subject(world, token, *shows, name=f"subject {what}"))
        reads.append(as_subject(world, token, *shows, name=f"caller {what}", by=token))
    return Prepared(
        reads=reads,
        change=lambda: world.patch("domain", path, name=new),
        undo=lambda: world.patch("domain", path, name=old),
    )


@_kind("domain deleted")
def _domain_deleted(world: World) -> Prepared:
    domain = world.domain()
    tokens = _of_domain(world, domain)

    def change() -> None:
        # Keystone deletes only what is disabled.
        world.flag("domain", f"/domains/{domain}", False)
        world.call("DELETE", f"/domains/{domain}")

    return Prepared(reads=lives(world, **tokens), change=change)


# Trusts


def _trusted(world: World, **more: object) -> tuple[Person, User, str, str]:
    """A trustor, a trustee, their trust, and a token for it."""
    service = world.own_role["service"]
    giver, taker = world.person(world.still_role, world.second_role, service), world.user()
    trust = world.trust(giver, taker, [world.second_role, service], **more)
    return giver, taker, trust, world.issue(taker, trust=trust)


def _trust_life(world: World, **tokens: str) -> list[Read]:
    """The reads of tokens for trusts that hand on the role ``service``.

    Only with a right of its own can such a token be the caller: it speaks for its trustor, so for
    Keystone's policy it is not the subject of itself. The right is to GET and not to HEAD.
    """
    reads = []
    for name, token in tokens.items():
        reads.append(as_subject(world, token, alive, gone, name=f"subject {name}"))
        reads.append(as_subject(world, token, alive, gone, name=f"subject {name}", method="HEAD"))
        reads.append(as_subject(world, token, alive, gone, name=f"caller {name}", by=token))
    return reads


@_kind("trust deleted")
def _trust_deleted(world: World) -> Prepared:
    giver, _, trust, token = _trusted(world)
    path = f"/OS-TRUST/trusts/{trust}"
    return Prepared(
        reads=_trust_life(world, trust=token),
        change=lambda: world.call("DELETE", path, token=giver.token),
    )


@_kind("trust without impersonation deleted")
def _plain_trust_deleted(world: World) -> Prepared:
    giver, _, trust, token = _trusted(world, impersonation=False)
    path = f"/OS-TRUST/trusts/{trust}"
    return Prepared(
        reads=_trust_life(world, trust=token),
        change=lambda: world.call("DELETE", path, token=giver.token),
    )


@_kind("trust used up")
def _trust_consumed(world: World) -> Prepared:
    _, taker, trust, token = _trusted(world, remaining_uses=2)
    return Prepared(
        reads=_trust_life(world, trust=token), change=lambda: world.issue(taker, trust=trust)
    )


@_kind("parent of a redelegated trust deleted")
def _redelegated(world: World) -> Prepared:
    giver, _, trust, token = _trusted(world, allow_redelegation=True, redelegation_count=1)
    last, roles = world.user(), [world.second_role, world.own_role["service"]]
    again = world.trust(
        Person(giver.user, giver.project, token), last, roles,
        redelegated_trust_id=trust,
    )
    path = f"/OS-TRUST/trusts/{trust}"
    return Prepared(
        reads=_trust_life(world, redelegated=world.issue(last, trust=again), parent=token),
        change=lambda: world.call("DELETE", path, token=giver.token),
    )


@_kind("trustor's role removed and given back")
def _trustor_role(world: World) -> Prepared:
    giver, _, _, token = _trusted(world)
    path = grant("projects", giver.project, "users", giver.user.id, world.second_role)
    return Prepared(
        reads=_trust_life(world, trust=token),
        change=lambda: world.call("DELETE", path),
        undo=lambda: world.call("PUT", path),
    )


def _trust_party(world: World, *, trustor: bool, change: str) -> Prepared:
    giver, taker, _, token = _trusted(world)
    path = f"/users/{giver.user.id if trustor else taker.id}"
    changes: dict[str, Change] = {
        "disabled": lambda: world.flag("user", path, False),
        "deleted": lambda: world.call("DELETE", path),
        "password set": lambda: world.patch("user", path, password=uuid.uuid4().hex),
    }
    return Prepared(reads=_trust_life(world, trust=token), change=changes[change])


for _change in ("disabled", "deleted", "password set"):
    KINDS.append(Kind(f"trustor {_change}", partial(_trust_party, trustor=True, change=_change)))
KINDS.append(Kind("trustee disabled", partial(_trust_party, trustor=False, change="disabled")))


@_kind("trustor's domain disabled and enabled")
def _trustor_domain(world: World) -> Prepared:
    domain = world.domain()
    service = world.own_role["service"]
    giver, taker = world.person(service, domain=domain), world.user()
    trust = world.trust(giver, taker, [service])
    path = f"/domains/{domain}"
    return Prepared(
        reads=_trust_life(world, trust=world.issue(taker, trust=trust)),
        change=lambda: world.flag("domain", path, False),
        undo=lambda: world.flag("domain", path, True),
    )


# Application credentials


@_kind("application credential deleted")
def _credential_deleted(world: World) -> Prepared:
    person = world.person()
    credential = world.credential(person)
    path = f"/users/{person.user.id}/application_credentials/{credential['id']}"
    return Prepared(
        reads=life(world, world.issue_for(credential)),
        change=lambda: world.call("DELETE", path, token=person.token),
    )


@_kind("application credential with access rules deleted")
def _ruled_credential_deleted(world: World) -> Prepared:
    person = world.person()
    rule = {"path": "/v2.1/servers", "method": "GET", "service": "compute"}
    credential = world.credential(person, access_rules=[rule])
    token = world.issue_for(credential)
    path = f"/users/{person.user.id}/application_credentials/{credential['id']}"
    # Only who says that it understands the rules is told of the token.
    header = {"OpenStack-Identity-Access-Rules": "1.0"}
    return Prepared(
        reads=[
            as_subject(world, token, alive, gone, **header),
            as_subject(world, token, alive, gone, method="HEAD", **header),
        ],
        change=lambda: world.call("DELETE", path, token=person.token),
    )


@_kind("application credential's second role removed")
def _credential_second_role(world: World) -> Prepared:
    person, role = world.person(world.still_role, world.second_role), world.second_role
    token = world.issue_for(world.credential(person))
    path = grant("projects", person.project, "users", person.user.id, role)
    return Prepared(
        reads=content(world, token, (has_role(role), lacks_role(role))),
        change=lambda: world.call("DELETE", path),
        undo=lambda: world.call("PUT", path),
    )


@_kind("application credential's only role removed")
def _credential_only_role(world: World) -> Prepared:
    person = world.person()
    token = world.issue_for(world.credential(person))
    path = grant("projects", person.project, "users", person.user.id, world.still_role)
    return Prepared(reads=life(world, token), change=lambda: world.call("DELETE", path))


@_kind("application credential's user disabled")
def _credential_user(world: World) -> Prepared:
    person = world.person()
    token = world.issue_for(world.credential(person))
    path = f"/users/{person.user.id}"
    return Prepared(reads=life(world, token), change=lambda: world.flag("user", path, False))


# OAuth1


def _authorizer(world: World) -> Person:
    return world.person(world.own_role["admin"], world.still_role)


@_kind("OAuth1 consumer deleted")
def _consumer_deleted(world: World) -> Prepared:
    consumer, _, token = world.oauth1(_authorizer(world), world.still_role)
    return Prepared(
        reads=life(world, token),
        change=lambda: world.call("DELETE", f"/OS-OAUTH1/consumers/{consumer}"),
    )


@_kind("OAuth1 access token deleted")
def _access_token_deleted(world: World) -> Prepared:
    person = _authorizer(world)
    _, access, token = world.oauth1(person, world.still_role)
    path = f"/users/{person.user.id}/OS-OAUTH1/access_tokens/{access}"
    return Prepared(
        reads=life(world, token), change=lambda: world.call("DELETE", path, token=person.token)
    )


# Federation


def _federated(world: World) -> tuple[Federation, str, str]:
    """An identity provider, and an unscoped and a scoped token of its user."""
    federation = world.federation()
    group, _ = _with_group(world)
    unscoped = federation.login(group)
    return federation, unscoped, world.rescope(unscoped, world.still_project)


@_kind("identity provider deleted")
def _provider_deleted(world: World) -> Prepared:
    federation, unscoped, token = _federated(world)
    return Prepared(
        reads=lives(world, scoped=token, unscoped=unscoped),
        change=lambda: world.call("DELETE", federation.path),
    )


def _moved_by_login(world: World, *, method: str) -> Prepared:
    federation, unscoped, token = _federated(world)
    group, _ = _with_group(world)
    # Keystone spares the tokens of the last whole second, so that the login's own is not revoked.
    time.sleep(2)
    return Prepared(
        reads=lives(world, scoped=token, unscoped=unscoped),
        change=lambda: federation.login(group, method=method),
    )


for _method in ("GET", "POST"):
    # Before it, who logs in by federation stays in the groups of former logins.
    _kind(f"federated login by {_method} into another group", since=29)(
        partial(_moved_by_login, method=_method)
    )


def _service_provider(world: World) -> tuple[str, str]:
    url = f"http://127.0.0.1/{random_name()}"
    return random_name(), url


def _describe(url: str, *, enabled: bool = True) -> dict[str, Any]:
    return {"service_provider": {"auth_url": url, "sp_url": url, "enabled": enabled}}


@_kind("service provider made and deleted")
def _service_provider_made(world: World) -> Prepared:
    name, url = _service_provider(world)
    path = f"/OS-FEDERATION/service_providers/{name}"
    return Prepared(
        reads=content(
            world, world.bystander.token, (provider_says(name, None), provider_says(name, url))
        ),
        change=lambda: world.call("PUT", path, _describe(url)),
        undo=lambda: world.call("DELETE", path),
    )


def _service_provider_patched(
    world: World, *, moved: bool
) -> Prepared:
    name, url = _service_provider(world)
    path = f"/OS-FEDERATION/service_providers/{name}"
    world.call("PUT", path, _describe(url))
    other = f"{url}-moved"
    after = provider_says(name, other if moved else None)
    new = _describe(other) if moved else _describe(url, enabled=False)
    return Prepared(
        reads=content(world, world.bystander.token, (provider_says(name, url), after)),
        change=lambda: world.call("PATCH", path, new),
        undo=lambda: world.call("PATCH", path, _describe(url)),
    )


for _moved, _done in ((True, "moved"), (False, "disabled and enabled")):
    KINDS.append(Kind(
        f"service provider {_done}", partial(_service_provider_patched, moved=_moved)
    ))


# The catalog


def _catalog(world: World, before: Shows, after: Shows, token: str | None = None) -> list[Read]:
    return content(world, token or world.bystander.token, (before, after))


@dataclass
class _Remake:
    """Makes something, and deletes it by the id that it got."""

    world: World
    kind: str
    collection: str
    values: dict[str, object] = field(default_factory=dict)
    made: str = ""

    def make(self) -> None:
        self.made = self.world.make(self.kind, self.collection, **self.values)

    def delete(self) -> None:
        self.world.call("DELETE", f"{self.collection}/{self.made}")


@_kind("service made and deleted")
def _service_made(world: World) -> Prepared:
    name = random_name()
    service = _Remake(world, "service", "/services", {"name": name, "type": "test"})
    return Prepared(
        reads=_catalog(world, catalog_lacks(name), catalog_has(name)),
        change=service.make, undo=service.delete,
    )


@_kind("service renamed")
def _service_renamed(world: World) -> Prepared:
    old, new = random_name(), random_name()
    path = f"/services/{world.make('service', '/services', name=old, type='test')}"
    return Prepared(
        reads=_catalog(world, catalog_has(old), catalog_has(new)),
        change=lambda: world.patch("service", path, name=new),
        undo=lambda: world.patch("service", path, name=old),
    )


@_kind("service disabled and enabled")
def _service_disabled(world: World) -> Prepared:
    service = world.make("service", "/services", name=random_name(), type="test")
    path = f"/services/{service}"
    return Prepared(
        reads=_catalog(world, catalog_has(service), catalog_lacks(service)),
        change=lambda: world.flag("service", path, False),
        undo=lambda: world.flag("service", path, True),
    )


@_kind("service with an endpoint deleted")
def _service_deleted(world: World) -> Prepared:
    endpoint = world.endpoint()
    return Prepared(
        reads=_catalog(world, catalog_has(endpoint.url), catalog_lacks(endpoint.url)),
        change=lambda: world.call("DELETE", f"/services/{endpoint.service}"),
    )


@_kind("endpoint made and deleted")
def _endpoint_made(world: World) -> Prepared:
    url = f"http://127.0.0.1/{random_name()}"
    service = world.endpoints[0].service
    values = {"service_id": service, "interface": "internal", "url": url}
    endpoint = _Remake(world, "endpoint", "/endpoints", {**values, "region_id": "RegionOne"})
    return Prepared(
        reads=_catalog(world, catalog_lacks(url), catalog_has(url)),
        change=endpoint.make, undo=endpoint.delete,
    )


def _endpoint_patched(world: World, *, what: str) -> Prepared:
    endpoint = world.endpoint(world.endpoints[0].service)
    path = f"/endpoints/{endpoint.id}"
    old, new = {"url": endpoint.url}, {"url": f"{endpoint.url}-moved"}
    before, after = catalog_has(endpoint.url), catalog_has(new["url"])
    changes: tuple[dict[str, Any], dict[str, Any]] = (new, old)
    if what == "region":
        region = random_name()
        world.call("POST", "/regions", {"region": {"id": region}})
        changes = ({"region_id": region}, {"region_id": "RegionOne"})
        before, after = catalog_lacks(region), catalog_has(region)
    elif what == "enabled":
        changes = ({"enabled": False}, {"enabled": True})
        after = catalog_lacks(endpoint.url)
    return Prepared(
        reads=_catalog(world, before, after),
        change=lambda: world.patch("endpoint", path, **changes[0]),
        undo=lambda: world.patch("endpoint", path, **changes[1]),
    )


_PATCHES = {"url": "moved", "region": "moved to another region", "enabled": "disabled and enabled"}
for _what, _done in _PATCHES.items():
    KINDS.append(Kind(f"endpoint {_done}", partial(_endpoint_patched, what=_what)))


def _filtered(world: World) -> tuple[str, list[Read]]:
    """A project, and reads of its catalog: all endpoints, then only the first of two."""
    project = world.project()
    other = world.endpoints[1].url
    token = world.person(project=project).token
    return project, _catalog(world, catalog_has(other), catalog_lacks(other), token)


@_kind("endpoint associated with a project, and no more")
def _endpoint_filter(world: World) -> Prepared:
    project, reads = _filtered(world)
    path = f"/OS-EP-FILTER/projects/{project}/endpoints/{world.endpoints[0].id}"
    return Prepared(
        reads=reads,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


def _endpoint_group(world: World) -> str:
    values = {"name": random_name(), "filters": {"service_id": world.endpoints[0].service}}
    return world.make("endpoint_group", "/OS-EP-FILTER/endpoint_groups", **values)


@_kind("endpoint group associated with a project, and no more")
def _endpoint_group_associated(world: World) -> Prepared:
    project, reads = _filtered(world)
    path = f"/OS-EP-FILTER/endpoint_groups/{_endpoint_group(world)}/projects/{project}"
    return Prepared(
        reads=reads,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("endpoint group patched")
def _endpoint_group_patched(world: World) -> Prepared:
    project = world.project()
    token = world.person(project=project).token
    first, second = world.endpoints
    group = f"/OS-EP-FILTER/endpoint_groups/{_endpoint_group(world)}"
    world.call("PUT", f"{group}/projects/{project}")
    filters = [{"service_id": x.service} for x in (second, first)]
    return Prepared(
        reads=_catalog(world, catalog_has(first.url), catalog_has(second.url), token),
        change=lambda: world.patch("endpoint_group", group, filters=filters[0]),
        undo=lambda: world.patch("endpoint_group", group, filters=filters[1]),
    )


@_kind("endpoint group deleted")
def _endpoint_group_deleted(world: World) -> Prepared:
    project = world.project()
    token = world.person(project=project).token
    other = world.endpoints[1].url
    group = f"/OS-EP-FILTER/endpoint_groups/{_endpoint_group(world)}"
    world.call("PUT", f"{group}/projects/{project}")
    return Prepared(
        reads=_catalog(world, catalog_lacks(other), catalog_has(other), token),
        change=lambda: world.call("DELETE", group),
    )


# What the caller may


def _by_caller(
    world: World, caller: str, *, methods: tuple[str, ...] = ("GET", "HEAD")
) -> list[Read]:
    """Reads of another's token by a caller who may not, and then may."""
    subject = world.bystander.token
    return [
        as_subject(
            world, subject, lambda answer: answer.status == 403, alive, name="by caller",
            by=caller, method=method,
        )
        for method in methods
    ]


def _caller_granted(world: World, *, role: str, actors: str) -> Prepared:
    person = world.person()
    actor = person.user.id if actors == "users" else world.group(person.user)
    path = grant("projects", person.project, actors, actor, world.own_role[role])
    methods = ("GET",) if role == "service" else ("GET", "HEAD")  # a service may not HEAD
    return Prepared(
        reads=_by_caller(world, person.token, methods=methods),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


for _role, _actors in (("admin", "users"), ("service", "users"), ("service", "groups")):
    KINDS.append(Kind(
        f"caller's {_actors[:-1]} made {_role}",
        partial(_caller_granted, role=_role, actors=_actors),
    ))


@_kind("caller made reader of the system")
def _caller_system(world: World) -> Prepared:
    user = world.user()
    world.call("PUT", grant("system", "", "users", user.id, world.still_role))
    path = grant("system", "", "users", user.id, world.own_role["reader"])
    return Prepared(
        reads=_by_caller(world, world.issue(user, system=True)),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("caller's role implies service")
def _caller_implied(world: World) -> Prepared:
    role = world.role()
    path = f"/roles/{role}/implies/{world.own_role['service']}"
    return Prepared(
        reads=_by_caller(world, world.person(role).token, methods=("GET",)),
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )
