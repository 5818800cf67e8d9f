"""What services share through memcached, and what they do not take from it.

A client in this process stands for memcached; tests/integration has the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from keystonemiddleware.auth_token import _cache

from keyfront.middleware.tokens.authtoken import identity, validations
from keyfront.middleware.tokens.authtoken import memcached as shared
from keyfront.middleware.tokens.authtoken.memcached import LocalClient
from support.authtoken_world import (
    NONE,
    STOCK,
    TAGS,
    Answer,
    Epochs,
    Keystone,
    World,
    environ,
    token_data,
)
from support.clocks import Clock

SECURITY = [
    {},
    {"memcache_security_strategy": "MAC", "memcache_secret_key": "secret"},
    {"memcache_security_strategy": "ENCRYPT", "memcache_secret_key": "secret"},
]


class Node:
    """Services that share a memcached and a Keystone."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self.keystone = Keystone(self.epochs)
        self.keystone.says = TAGS
        self.memcached = _cache._FakeClient()
        self.worlds: list[World] = []

    def service(self, *, sees: bool = True, original: bool = False, **options: Any) -> World:
        coordinator = self.epochs if sees and not original else None
        world = World(
            self.keystone, original=original, coordinator=coordinator, cache="memcached", **options
        )
        self.worlds.append(world)
        return world

    def get(self, world: World, token: str = "t", **more: Any) -> Answer:
        return Answer(world.middleware, environ(token, memcached=self.memcached, **more))


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for world in made.worlds:
        world.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (validations, shared, identity):
        monkeypatch.setattr(module, "time", made)
    return made


def informed(node: Node, **options: Any) -> World:
    """A service that has heard of Keystone how long answers stand."""
    world = node.service(**options)
    node.get(world, "unknown")
    return world


@pytest.mark.parametrize("security", SECURITY, ids=str)
def test_services_share_what_stands(node: Node, security: dict[str, str]) -> None:
    first, second = informed(node, **security), informed(node, **security)
    before = len(node.keystone.asked)
    for world in (first, second):
        assert node.get(world).status == 200
    assert len(node.keystone.asked) == before + 1
    a, b = (world.service.seen[-1] for world in (first, second))
    assert a["keystone.token_info"] == b["keystone.token_info"]
    assert a["HTTP_X_SERVICE_CATALOG"] == b["HTTP_X_SERVICE_CATALOG"]
    node.keystone.revoke("t")
    for world in (first, second, informed(node, **security)):
        assert node.get(world).status == 401


def test_what_does_not_stand_is_asked_about_again(node: Node) -> None:
    node.get(informed(node))
    node.keystone.change()
    second = informed(node)
    node.keystone.statuses.clear()
    assert node.get(second).status == 200
    assert node.keystone.statuses == [304]


def test_without_epochs_it_is_only_asked_about_again(node: Node) -> None:
    node.get(informed(node, sees=False))
    second = informed(node, sees=False)
    node.keystone.statuses.clear()
    assert node.get(second).status == 200
    assert node.keystone.statuses == [304]
    node.keystone.revoke("t")
    assert node.get(informed(node, sees=False)).status == 401


def test_what_keystone_does_not_keep_is_not_shared(node: Node) -> None:
    first, second = informed(node), informed(node)
    node.keystone.says = NONE
    node.get(first)
    assert not node.memcached.cache
    node.keystone.tokens.clear()
    assert node.get(second).status == 401


@pytest.mark.parametrize("security", SECURITY, ids=str)
def test_stock_services_neither_read_nor_feed_it(node: Node, security: dict[str, str]) -> None:
    ours, stock = informed(node, **security), node.service(original=True, **security)
    node.get(ours)
    node.keystone.revoke("t")
    assert node.get(stock).status == 401
    node.keystone.tokens["u"] = token_data("u")
    assert node.get(stock, "u").status == 200
    node.keystone.tokens.pop("u")
    # as promised by nobody, but so it is
    assert node.get(stock, "u").status == 200
    assert node.get(ours, "u").status == 401
    # nor does a worker that has just begun
    assert node.get(node.service(**security), "u").status == 401


def test_no_token_is_in_an_envelope(node: Node) -> None:
    token = "gAAAAA-of-a-user"
    node.keystone.tokens[token] = token_data()
    first, second = informed(node), informed(node)
    for world in (first, second):
        assert node.get(world, token).status == 200
    node.keystone.change()
    assert node.get(first, token).status == 200  # by 304
    assert node.memcached.cache and token not in repr(node.memcached.cache)
    a, b = (world.service.seen[-1]["keystone.token_info"] for world in (first, second))
    assert a == b and a["token"]["auth_token"] == token


def test_an_envelope_is_no_token_under_any_key(node: Node) -> None:
    node.get(informed(node))
    (content,) = (value for _, value in node.memcached.cache.values())
    stock = node.service(original=True)
    node.get(stock, "x")
    key, _ = stock.middleware._token_cache._get_cache_key("forged")
    node.memcached.set(key, content)
    assert node.get(stock, "forged").status == 401


def test_a_stock_keystones_answers_are_shared_as_ever(node: Node) -> None:
    node.keystone.says = STOCK
    stock, ours = node.service(original=True), node.service()
    node.get(stock)
    node.keystone.tokens["u"] = token_data("u")
    node.get(ours, "u")
    node.keystone.tokens.clear()
    assert node.get(ours).status == 200
    assert node.get(stock, "u").status == 200


def test_of_what_has_no_age_no_more_is_kept_than_a_look(node: Node, clock: Clock) -> None:
    node.keystone.says = STOCK
    stock, ours = node.service(original=True), node.service()
    node.get(stock)
    node.keystone.tokens["u"] = token_data("u")
    node.get(ours, "u")
    assert node.get(ours).status == 200
    node.memcached.cache.clear()
    node.keystone.tokens.clear()
    assert node.get(ours).status == 200
    clock.later(1.1)
    assert node.get(ours).status == 401


def test_sharing_does_not_add_up_token_cache_time(node: Node, clock: Clock) -> None:
    node.get(informed(node))
    clock.later(200)
    second = informed(node)
    node.keystone.statuses.clear()
    node.get(second)
    assert node.keystone.statuses == []
    clock.later(99)
    node.get(second)
    assert node.keystone.statuses == []
    clock.later(2)
    node.get(second)
    assert node.keystone.statuses == [304]


def test_it_is_kept_by_what_the_answer_varies_on(node: Node) -> None:
    node.get(informed(node))
    without = informed(node, include_service_catalog="false")
    node.keystone.statuses.clear()
    assert node.get(without).status == 200
    assert node.keystone.statuses == [200]
    assert "catalog" not in without.service.seen[-1]["keystone.token_info"]["token"]


def test_token_cache_time_below_zero_shares_nothing(node: Node) -> None:
    node.get(informed(node, token_cache_time="-1"))
    assert not node.memcached.cache


class Broken:
    """A memcached client that fails."""

    def get(self, key: str) -> Any:
        raise OSError("away")

    def set(self, key: str, value: Any, time: int = 0) -> Any:
        raise OSError("away")


@pytest.mark.parametrize("content", [b"{}", b"[]", b"not JSON", b"[2,1,1,1,{}]", b'[1,"","",0,1]'])
def test_junk_is_not_read(node: Node, content: bytes) -> None:
    ours = informed(node)
    node.get(ours)
    (key,) = node.memcached.cache
    node.memcached.set(key, content)
    other = informed(node)
    node.keystone.statuses.clear()
    assert node.get(other).status == 200
    assert node.keystone.statuses == [200]


def test_without_memcached_it_goes_on(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.memcached = Broken()
    world = node.service()
    # of the stock cache an error is keystonemiddleware's own business; this is not it
    node.keystone.says = TAGS
    world.middleware.validations.tells = True
    assert node.get(world).status == 200
    assert [x.message for x in caplog.records if "OSError" in x.message]


def test_the_cache_of_one_process_is_bounded() -> None:
    client = LocalClient()
    for number in range(3000):
        client.set(f"key-{number}", b"value", time=300)
    assert len(client.cache) == LocalClient.LIMIT
    assert client.get("key-2999") == b"value" and client.get("key-0") is None
    client.set("ended", b"value", time=-1)
    assert client.get("ended") is None
