"""Every kind of change that shows in lists of projects and grants and in what there is of a user.

As :mod:`support.token_changes`, for the paths in :data:`ROUTES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from support.keystone_world import Answer, World, grant, random_name
from support.token_changes import Change, Kind, Prepared, Read, Shows

#: As the option ``routes`` of the token cache has them.
ROUTES = ("/v3/projects", "/v3/users/{id}", "/v3/role_assignments")

#: All of them.
KINDS: list[Kind] = []


def _kind(name: str) -> Callable[[Callable[[World], Prepared]], None]:
    def register(prepare: Callable[[World], Prepared]) -> None:
        KINDS.append(Kind(name, prepare))

    return register


def _has(value: str) -> Shows:
    """The answer names it, as a JSON value or key."""
    return lambda answer: answer.status == 200 and f'"{value}"' in json.dumps(answer.body)


def _lacks(value: str) -> Shows:
    def shows(answer: Answer) -> bool:
        return answer.status == 200 and not _has(value)(answer)

    return shows


def _prepared(
    world: World, path: str, value: str, change: Change, undo: Change, *, shown: bool = True
) -> Prepared:
    """A change by which an answer names a value, or by which it does not any more."""
    before, after = (_lacks(value), _has(value)) if shown else (_has(value), _lacks(value))
    headers = {"X-Auth-Token": world.admin}
    read = Read(
        name=path.partition("?")[0], method="GET", path=path, headers=headers, before=before,
        after=after,
    )
    return Prepared(reads=[read], change=change, undo=undo)


def _renamed(world: World, listed: str, kind: str, path: str) -> Prepared:
    old, new = random_name(), random_name()
    world.patch(kind, path, name=old)
    return _prepared(
        world, listed, new,
        change=lambda: world.patch(kind, path, name=new),
        undo=lambda: world.patch(kind, path, name=old),
    )


@_kind("list: project renamed")
def _project_renamed(world: World) -> Prepared:
    return _renamed(world, "/projects", "project", f"/projects/{world.project()}")


@_kind("list: project made and deleted")
def _project_made(world: World) -> Prepared:
    name, made = random_name(), []

    def make() -> None:
        made.append(world.make("project", "/projects", name=name, domain_id="default"))

    # Asked for by a name that no row has.
    return _prepared(
        world, f"/projects?name={name}", name, make,
        lambda: world.call("DELETE", f"/projects/{made.pop()}"),
    )


@_kind("list: tag of a project")
def _project_tagged(world: World) -> Prepared:
    tag, path = random_name(), f"/projects/{world.project()}/tags"
    return _prepared(
        world, "/projects", tag,
        change=lambda: world.call("PUT", f"{path}/{tag}"),
        undo=lambda: world.call("DELETE", f"{path}/{tag}"),
    )


@_kind("user shown: renamed")
def _user_renamed(world: World) -> Prepared:
    path = f"/users/{world.user().id}"
    return _renamed(world, path, "user", path)


@_kind("user shown: option")
def _user_option(world: World) -> Prepared:
    path, option = f"/users/{world.user().id}", "ignore_password_expiry"
    return _prepared(
        world, path, option,
        change=lambda: world.patch("user", path, options={option: True}),
        undo=lambda: world.patch("user", path, options={option: None}),
    )


@_kind("list: grant of a user on a project")
def _granted(world: World) -> Prepared:
    user = world.user().id
    path = grant("projects", world.still_project, "users", user, world.still_role)
    return _prepared(
        world, "/role_assignments", user,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("list: grant of a group, by its user")
def _granted_by_group(world: World) -> Prepared:
    user = world.user()
    group = world.group(user)
    path = grant("projects", world.still_project, "groups", group, world.still_role)
    return _prepared(
        world, f"/role_assignments?effective&user.id={user.id}", world.still_role,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("list: member of a group with a grant")
def _member(world: World) -> Prepared:
    user = world.user()
    group = world.group()
    world.call("PUT", grant("projects", world.still_project, "groups", group, world.still_role))
    path = f"/groups/{group}/users/{user.id}"
    return _prepared(
        world, f"/role_assignments?effective&user.id={user.id}", world.still_role,
        change=lambda: world.call("PUT", path),
        undo=lambda: world.call("DELETE", path),
    )


@_kind("list: names of who is granted")
def _names_of_grants(world: World) -> Prepared:
    person = world.person()
    return _renamed(
        world, f"/role_assignments?include_names&user.id={person.user.id}", "user",
        f"/users/{person.user.id}",
    )
