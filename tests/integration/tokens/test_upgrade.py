"""Workers of two versions of keyfront beside each other on one database, as in a rolling upgrade.

The other version has one tag more, so that it numbers slots otherwise. On one node the two share
the folder of the token cache; on two nodes they share Redis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from keyfront.middleware.tokens import tags_header
from support.keystone_world import VALIDATE, Client, Person, World
from support.keystones import keystone_state, serve_as_is
from support.redis_servers import redis_server
from support.served import wait_for

pytest.importorskip("keystone")

EXTRA = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
ttl = 600
path = {path}
coordinator = {coordinator}
# One that is well takes no longer on a busy machine.
coordinator_timeout = 10
"""
# Python imports it in each process before anything else.
ANOTHER_VERSION = """\
from keyfront.middleware.tokens.invalidation import rules

rules.FIXED = (*rules.FIXED, "of another version")
"""
# Each worker of a Keystone is met in so many requests by new connections, as good as surely.
ASKS = 6


class Versions(NamedTuple):
    """The administrator, as he uses the workers of each version."""

    old: World
    new: World


@pytest.fixture(scope="module", params=["one folder", "Redis"])
def versions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Versions]:
    folder = tmp_path_factory.mktemp("upgrade")
    another = folder / "another"
    another.mkdir()
    (another / "sitecustomize.py").write_text(ANOTHER_VERSION)
    with ExitStack() as stack:
        redis = request.param == "Redis"
        url = stack.enter_context(redis_server(folder / "redis")).url if redis else ""
        database = f"sqlite:///{folder / 'old' / 'keystone.sqlite'}?plugin=keyfront"
        worlds = []
        for name, environment in (("old", {}), ("new", {"PYTHONPATH": str(another)})):
            tokens = folder / (f"tokens of {name}" if redis else "tokens")
            state = keystone_state(
                folder / name, database_url=None if name == "old" else database,
                extra=EXTRA.format(path=tokens, coordinator=url),
            )  # fmt: skip
            served = serve_as_is(state, "uwsgi", environment=environment)
            running = stack.enter_context(served)
            worlds.append(World(running.url, running.password))
            # A change waits for a table that has just begun, on a busy machine for too long.
            worlds[-1].wait_until_kept()
        yield Versions(*worlds)


def _status(world: World, token: str) -> int:
    client = Client(world.base_url)
    try:
        headers = {"X-Auth-Token": world.admin, "X-Subject-Token": token}
        return client.request("GET", VALIDATE, headers).status
    finally:
        client.close()


def _told(world: World, token: str) -> tags_header.Told | None:
    own = {"X-Subject-Token": token, tags_header.NAME: tags_header.ASK}
    return tags_header.parse(world.call("GET", VALIDATE, headers=own).headers[tags_header.NAME])


def _disable(world: World, person: Person) -> None:
    world.flag("project", f"/projects/{person.project}", False)


def _revoke(world: World, person: Person) -> None:
    world.revoke(person.token)


def test_each_version_hears_the_other(versions: Versions) -> None:
    old, new = versions
    for changed, other in ((old, new), (new, old)):
        for change in (_revoke, _disable):
            person = changed.person(project=changed.project())
            told = []
            for world in (changed, other):
                # Of an answer that is not kept nobody could be told too late.
                wait_for(lambda w=world, p=person: _told(w, p.token), "answers are kept")
                assert {_status(world, person.token) for _ in range(ASKS)} == {200}
                told.append(_told(world, person.token))
            assert None not in told, "no table was taken away meanwhile"
            assert len({(one.digest, one.slots) for one in told if one}) == 2
            change(changed, person)
            found = [_status(other, person.token) for _ in range(ASKS)]
            assert found == [404] * ASKS, change.__name__
            assert _status(changed, person.token) == 404


def test_logins_and_validations_go_on(versions: Versions) -> None:
    """While both versions change something, and take each other's tables away."""
    old, new = versions
    bystander = old.bystander
    over = threading.Event()
    failed: list[str] = []
    done = dict.fromkeys(("old", "new"), 0)

    def use(name: str, world: World) -> None:
        try:
            while not over.is_set():
                token = world.issue(bystander.user, project=bystander.project)
                for one in (token, bystander.token):
                    world.call("GET", VALIDATE, headers={"X-Subject-Token": one})
                done[name] += 1
                # The changes beside it wait for seconds, which two at full speed make longer.
                over.wait(0.02)
        except (AssertionError, OSError) as error:
            failed.append(f"{name}: {error}")

    users = [
        threading.Thread(target=use, args=(name, World(world.base_url, world._password)))
        for name, world in (("old", old), ("new", new))
    ]
    for one in users:
        one.start()
    try:
        for world in (old, new):
            before = dict(done)
            person = world.person()
            _revoke(world, person)
            for other in (old, new):
                assert _status(other, person.token) == 404
            wait_for(
                lambda b=before: failed or all(done[name] > b[name] for name in done),
                "both are used",
            )
    finally:
        over.set()
        for one in users:
            one.join()
    assert not failed
