"""Keystone's own caches in Redis, which takes bytes, as memcached's libraries do not.

The filter is told to leave each validation to Keystone, so that what is shown is what Keystone has
made, or found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

pytest.importorskip("keystone")
pytest.importorskip("redis")

from support.keystone_world import VALIDATE, Answer, Client, Person, World, grant, random_name
from support.keystones import keystone_state, serve_as_is
from support.redis_servers import RedisServer, redis_server

pytestmark = pytest.mark.slow

EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[cache]
enabled = true
backend = dogpile.cache.redis
backend_argument = url:{url}
[keyfront_token_cache]
path = {folder}/shared
"""
# Enough for both workers to have been asked.
READS = 6


@dataclass
class Place:
    """A Keystone, and where its caches are."""

    world: World
    redis: RedisServer

    def ask(self, token: str) -> list[Answer]:
        """What each worker answers, by connections of their own."""
        found = []
        for _ in range(READS):
            client = Client(self.world.base_url)
            headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
            try:
                found.append(
                    client.request("GET", VALIDATE, {**headers, "Authorization": "none"})
                )
            finally:
                client.close()
        return found

    def counts(self) -> tuple[int, int]:
        """How often something was found there, and stored."""
        found = self.redis.client.info("stats")["keyspace_hits"]
        commands = self.redis.client.info("commandstats")
        stored = sum(
            int(commands[f"cmdstat_{name}"]["calls"])
            for name in ("set", "setex") if f"cmdstat_{name}" in commands
        )  # fmt: skip
        return int(found), stored


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("bytes")
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        extra = EXTRA.format(url=redis.url, folder=folder)
        state = keystone_state(folder / "state", extra=extra)
        served = stack.enter_context(serve_as_is(state, "uwsgi"))
        yield Place(World(served.url, served.password), redis)


def test_what_was_stored_is_found(place: Place) -> None:
    token = place.world.person().token
    place.ask(token)
    found, stored = place.counts()
    assert {answer.status for answer in place.ask(token)} == {200}
    after = place.counts()
    assert after[0] - found >= READS
    assert after[1] == stored


def _renamed(kind: str) -> Callable[[World, Person], Callable[[Answer], bool]]:
    def rename(world: World, person: Person) -> Callable[[Answer], bool]:
        name = random_name()
        path = f"/users/{person.user.id}" if kind == "user" else f"/projects/{person.project}"
        world.patch(kind, path, name=name)
        return lambda answer: bool(answer.token()[kind]["name"] == name)

    return rename


def _role_taken(world: World, person: Person) -> Callable[[Answer], bool]:
    path = grant("projects", person.project, "users", person.user.id, world.second_role)
    world.call("DELETE", path)
    left = {world.still_role}
    return lambda answer: {role["id"] for role in answer.token()["roles"]} == left


def _disabled(world: World, person: Person) -> Callable[[Answer], bool]:
    world.flag("project", f"/projects/{person.project}", False)
    return lambda answer: answer.status == 404


def _revoked(world: World, person: Person) -> Callable[[Answer], bool]:
    world.revoke(person.token)
    return lambda answer: answer.status == 404


@pytest.mark.parametrize(
    "change",
    [_renamed("user"), _renamed("project"), _role_taken, _disabled, _revoked],
    ids=["user renamed", "project renamed", "role taken", "project disabled", "revoked"],
)
def test_a_change_is_seen(
    place: Place, change: Callable[[World, Person], Callable[[Answer], bool]]
) -> None:
    world = place.world
    person = world.person(world.still_role, world.second_role, project=world.project())
    assert {answer.status for answer in place.ask(person.token)} == {200}
    is_seen = change(world, person)
    assert all(is_seen(answer) for answer in place.ask(person.token))
