"""Tokens that Keystone does not know: refused from memory for a while, and bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from keystoneauth1.exceptions import NotFound
from keystonemiddleware.auth_token import InvalidToken

from keyfront.middleware.tokens.authtoken import validations
from keyfront.middleware.tokens.authtoken.validations import (
    Prepared,
    Question,
    Validations,
)
from support.authtoken_world import (
    NONE,
    STOCK,
    TAGS,
    Epochs,
    Keystone,
    World,
    at,
    lone_world,
    shared_world,
    token_data,
)
from support.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(validations, "time", made)
    return made


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_a_refusal_is_kept_for_negative_ttl(
    worlds: list[World], clock: Clock, says: str
) -> None:
    world = shared_world()
    worlds.append(world)
    world.keystone.says = says
    assert [world.get("x").status for _ in range(3)] == [401] * 3
    assert world.asked == 1
    clock.later(5.1)
    assert world.get("x").status == 401
    assert world.asked == 2


@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_0_keeps_none(worlds: list[World], clock: Clock, says: str) -> None:
    world = shared_world(keyfront_negative_ttl="0")
    worlds.append(world)
    world.keystone.says = says
    assert [world.get("x").status for _ in range(3)] == [401] * 3
    assert world.asked == 3


def test_a_token_may_come_back_to_life(worlds: list[World], clock: Clock) -> None:
    world = shared_world()
    worlds.append(world)
    world.get()
    project = world.keystone.tokens["t"]
    world.keystone.revoke("t")
    assert world.get().status == 401
    # as when its project is enabled again
    world.keystone.tokens["t"] = project
    world.keystone.change()
    assert world.get().status == 200


def test_without_epochs_a_refusal_is_looked_at_again_as_soon(
    worlds: list[World], clock: Clock
) -> None:
    world = lone_world(keyfront_negative_ttl="60")
    worlds.append(world)
    world.get("x")
    world.keystone.tokens["x"] = world.keystone.tokens["t"]
    assert world.get("x").status == 401
    clock.later(1.1)
    assert world.get("x").status == 200


@pytest.mark.parametrize(("shared", "asked"), [(True, 2), (False, 1)])
def test_a_refusal_that_keystone_does_not_keep(
    worlds: list[World], clock: Clock, shared: bool, asked: int
) -> None:
    world = shared_world() if shared else lone_world()
    worlds.append(world)
    world.keystone.says = NONE
    assert [world.get("x").status for _ in range(2)] == [401] * 2
    assert world.asked == asked


def test_a_404_of_something_else_is_not_kept(worlds: list[World]) -> None:
    world = World(Keystone(Epochs()), token_cache_time="300")
    worlds.append(world)

    def moved(token: str) -> None:
        # as when the login that is needed first is answered so
        raise NotFound(
            method="POST",
            url="http://keystone.example/v3/auth/tokens",
            response=requests.Response(),
        )

    world.keystone.before = moved
    assert world.get().status == 401
    world.keystone.before = lambda token: None
    assert world.get().status == 200


def test_a_refusal_with_an_ended_token_allowed_is_another(worlds: list[World]) -> None:
    world = shared_world()
    worlds.append(world)
    world.keystone.tokens["s"] = {
        **world.keystone.tokens["t"], "roles": [{"id": "r", "name": "service"}]
    }  # fmt: skip
    world.keystone.tokens["t"]["expires_at"] = "2020-01-01T00:00:00.000000Z"
    assert world.get().status == 401
    assert world.get(HTTP_X_SERVICE_TOKEN="s").status == 200
    assert world.get().status == 401


def test_garbage_is_bounded_and_pushes_out_no_good_token(worlds: list[World]) -> None:
    world = shared_world(keyfront_memory="1")
    worlds.append(world)
    world.get()
    for number in range(300):
        assert world.get(f"garbage-{number}" * 500).status == 401
    kept = world.middleware.validations
    assert world.get().status == 200
    assert world.asked == 301
    assert kept.refused.size <= kept.refused.limit == (1 << 20) // 8
    assert kept.refused.evicted > 0


def test_a_million_tokens_of_garbage_take_no_more(clock: Clock) -> None:
    """What each of them does to what is kept; Keystone's part of it is the same as for one."""
    kept = Validations(
        lambda data, token: Prepared({}, True, 1e12),
        memory=1 << 20, cache_time=300, negative_ttl=5.0, revalidate=1.0, coordinator=None,
    )  # fmt: skip
    good = Question(kept.key("t"))
    kept.confirm(good, {"token": {}}, "t")
    for number in range(100_000):
        kept.refuse(Question(kept.key(f"garbage-{number}")))
    assert kept.find(good.key) is not None
    assert len(kept.refused) < 400
    assert kept.refuses(kept.key("garbage-99999"))


@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_what_was_not_asked_is_not_refused(worlds: list[World], says: str) -> None:
    """keystonemiddleware asks again, after a 401 of its own, without allow_expired."""
    world = shared_world()
    worlds.append(world)
    keystone = world.keystone
    keystone.says = says
    keystone.tokens["t"] = token_data(expires_at=at(-60))
    keystone.refuses = 401
    keystone.after = lambda token: setattr(keystone, "refuses", None)
    world.middleware._token_cache.initialize({})
    with pytest.raises(InvalidToken):
        world.middleware.fetch_token("t", allow_expired=True)
    assert keystone.statuses == [401, 404]
    assert world.middleware.fetch_token("t", allow_expired=True)["token"]["user"]["name"] == "user"
