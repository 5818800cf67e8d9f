"""How long a service goes by what Keystone said of a token, whatever Keystone says of that."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from keyfront.errors import NoEpochTableError
from keyfront.middleware.tokens.authtoken import validations
from keyfront.middleware.tokens.epochs import Epoch, Slots
from support.authtoken_world import (
    NONE,
    STOCK,
    TAGS,
    Epochs,
    Keystone,
    World,
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


@pytest.fixture
def shared(worlds: list[World]) -> World:
    worlds.append(shared_world())
    return worlds[0]


def lone(worlds: list[World], **options: Any) -> World:
    worlds.append(lone_world(**options))
    return worlds[-1]


def plain(worlds: list[World], says: str = STOCK, **options: Any) -> World:
    keystone = Keystone(Epochs())
    keystone.says = says
    worlds.append(World(keystone, **options))
    return worlds[-1]


# With the epochs of Keystone.


def test_nothing_is_asked_as_long_as_nothing_changes(shared: World, clock: Clock) -> None:
    for _ in range(5):
        assert shared.get().status == 200
        clock.later(50)
    assert shared.asked == 1


def test_a_revoked_token_is_refused_at_once(shared: World, clock: Clock) -> None:
    shared.keystone.tokens["other"] = token_data("other")
    assert [shared.get(x).status for x in ("t", "other")] == [200, 200]
    shared.keystone.revoke("t")
    assert [shared.get(x).status for x in ("t", "other")] == [401, 200]
    assert shared.asked == 3


def test_the_same_after_a_change_is_told_without_a_body(shared: World, clock: Clock) -> None:
    shared.get()
    shared.keystone.change()
    assert [shared.get().status for _ in range(2)] == [200, 200]
    assert shared.keystone.statuses == [200, 304]
    shared.keystone.tokens["t"]["roles"] = [{"id": "r", "name": "other"}]
    shared.keystone.change()
    shared.get()
    assert shared.keystone.statuses == [200, 304, 200]
    assert shared.service.seen[-1]["HTTP_X_ROLES"] == "other"


def test_it_ends_with_token_cache_time(shared: World, clock: Clock) -> None:
    shared.get()
    clock.later(299)
    shared.get()
    assert shared.asked == 1
    clock.later(2)
    shared.get()
    assert shared.keystone.statuses == [200, 304]


@pytest.mark.parametrize("kept", [True, False])
def test_a_revocation_overtakes_a_slow_validation(shared: World, kept: bool) -> None:
    if not kept:
        shared.keystone.says = NONE
    shared.keystone.after = lambda token: shared.keystone.revoke(token)
    # began before the revocation, and may be told either
    assert shared.get().status == 200
    shared.keystone.after = lambda token: None
    assert shared.get().status == 401


def test_what_keystone_does_not_keep_is_for_one_request(shared: World, clock: Clock) -> None:
    shared.keystone.says = NONE
    for _ in range(3):
        assert shared.get().status == 200
    assert shared.asked == 3
    shared.keystone.says = TAGS
    for _ in range(3):
        shared.get()
    assert shared.asked == 4


def test_while_the_coordinator_is_away_keystone_is_asked(shared: World, clock: Clock) -> None:
    shared.get()
    epochs = shared.keystone.coordinator
    assert isinstance(epochs, Epochs)
    epochs.lost = True
    shared.keystone.says = NONE
    assert [shared.get().status for _ in range(3)] == [200] * 3
    assert shared.asked == 4
    shared.keystone.tokens.clear()
    assert shared.get().status == 401
    epochs.lost = False


def test_another_generation_ends_all(shared: World, clock: Clock) -> None:
    shared.get()
    shared.keystone.coordinator.generation += 1  # type: ignore[union-attr]
    shared.keystone.tokens.clear()
    assert shared.get().status == 401


def test_another_coordinator_is_told_once(
    worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    keystone = Keystone(Epochs())
    keystone.says = TAGS
    mine = Epochs()
    mine.generation = 2
    worlds.append(World(keystone, coordinator=mine))
    for _ in range(30):
        assert worlds[0].get().status == 200
    assert len(keystone.asked) == 30
    assert keystone.statuses == [200] + [304] * 29
    told = [x.message for x in caplog.records if "same coordinator" in x.message]
    assert len(told) == 1


class NoTable(Epochs):
    """Where no Keystone keeps any."""

    def now(self) -> Epoch:
        raise NoEpochTableError("redis://r:6379/0: no Keystone has begun a table T there")

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        return False


def test_a_table_that_no_keystone_keeps_is_told_once(
    worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """Keystone keeps its epochs on its node, or in another Redis: each request is asked about."""
    keystone = Keystone(Epochs())
    keystone.says = TAGS
    worlds.append(World(keystone, coordinator=NoTable()))
    for _ in range(30):
        assert worlds[0].get().status == 200
    assert keystone.statuses == [200] + [304] * 29
    told = [x.message for x in caplog.records if "about each request" in x.message]
    assert len(told) == 1
    assert "elsewhere, redis://r:6379/0: no Keystone has begun a table T there" in told[0]
    assert "name the same coordinator" in told[0]
    keystone.tokens.clear()
    assert worlds[0].get().status == 401


def test_no_table_and_a_stock_keystone_are_told_once(
    worlds: list[World], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It validates as keystonemiddleware does, and says that nobody there has keyfront."""
    keystone = Keystone(Epochs())
    keystone.says = STOCK
    worlds.append(World(keystone, coordinator=NoTable()))
    for _ in range(30):
        assert worlds[0].get().status == 200
    assert len(keystone.asked) == 1
    told = [x.message for x in caplog.records if x.message.startswith("authtoken")]
    assert len(told) == 1
    assert "no Keystone with keyfront's token_cache is there (redis://r:6379/0" in told[0]
    assert "up to token_cache_time, as with keystonemiddleware alone" in told[0]
    clock.later(301)
    known = worlds[0].middleware.validations
    assert known.find(known.key("t")) is None


def test_a_new_generation_alone_is_not_told(
    shared: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        shared.get()
        shared.keystone.coordinator.generation += 1  # type: ignore[union-attr]
    assert not [x for x in caplog.records if "same coordinator" in x.message]


# Without.


def test_it_is_asked_again_after_revalidate(worlds: list[World], clock: Clock) -> None:
    world = lone(worlds, keyfront_revalidate="2")
    for _ in range(4):
        world.get()
        clock.later(0.9)
    assert world.keystone.statuses == [200, 304]
    world.keystone.revoke("t")
    clock.later(1.2)
    assert world.get().status == 401


def test_the_time_counts_from_before_the_question(worlds: list[World], clock: Clock) -> None:
    world = lone(worlds)

    def slow(token: str) -> None:
        clock.later(0.7)

    world.keystone.before = world.keystone.after = slow
    world.get()
    # the answer is 0.7 s old, the question 1.4 s: what was revoked meanwhile may be in neither
    world.get()
    assert world.asked == 2


def test_what_keystone_does_not_keep_is_used_as_long(worlds: list[World], clock: Clock) -> None:
    world = plain(worlds, NONE)
    world.get()
    world.get()
    assert world.asked == 1
    clock.later(1.1)
    world.get()
    assert world.keystone.statuses == [200, 200]


def test_a_slow_answer_of_before_is_bounded_by_its_question(
    worlds: list[World], clock: Clock
) -> None:
    world = lone(worlds)
    world.get()
    clock.later(1.1)
    world.keystone.after = lambda token: (world.keystone.tokens.pop(token, None), clock.later(5))
    assert world.get().status == 200
    world.keystone.after = lambda token: None
    assert world.get().status == 401


# Of a stock Keystone.


def test_a_stock_keystone_is_believed_for_token_cache_time(
    worlds: list[World], clock: Clock
) -> None:
    world = plain(worlds)
    world.get()
    world.keystone.tokens.clear()
    clock.later(299)
    assert world.get().status == 200
    clock.later(2)
    assert world.middleware.validations.find(world.middleware.validations.key("t")) is None


@pytest.mark.parametrize("says", [NONE, TAGS])
def test_the_first_that_keystone_says_ends_what_it_did_not(
    worlds: list[World], clock: Clock, says: str
) -> None:
    world = plain(worlds)
    world.keystone.tokens["other"] = token_data("other")
    world.get()
    assert world.middleware._token_cache.get("t")
    world.keystone.says = says
    world.get("other")
    world.keystone.tokens.pop("t")
    assert world.get().status == 401
    assert world.middleware._token_cache.get("t") is None
    # and of what says nothing there is no more than a look
    world.keystone.says = STOCK
    world.keystone.tokens["new"] = token_data()
    asked = world.asked
    assert [world.get("new").status for _ in range(2)] == [200, 200]
    assert world.asked == asked + 1
    world.keystone.tokens.pop("new")
    clock.later(1.1)
    assert world.get("new").status == 401


def test_an_answer_that_says_nothing_is_not_kept_if_another_did_meanwhile(
    worlds: list[World],
) -> None:
    world = shared_world()
    worlds.append(world)
    world.keystone.tokens["other"] = token_data("other")

    def first(token: str) -> None:
        world.keystone.before = world.keystone.after = lambda token: None
        world.keystone.says = TAGS
        thread = threading.Thread(target=world.get, args=("other",))
        thread.start()
        thread.join()

    world.keystone.says = STOCK
    world.keystone.after = first
    assert world.get().status == 200
    world.keystone.tokens.pop("t")
    assert world.get().status == 401


def test_nor_if_it_does_while_the_answer_is_being_kept(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = plain(worlds)
    kept = world.middleware.validations
    put = kept.confirmed.put

    def meanwhile(*arguments: Any) -> None:
        told = validations.Question(b"another")
        told.told = NONE
        kept._heard(told)
        put(*arguments)

    monkeypatch.setattr(type(kept.confirmed), "put", lambda self, *given: meanwhile(*given))
    assert world.get().status == 200
    monkeypatch.undo()
    assert kept.tells and len(kept.confirmed) == 0


def test_a_first_none_does_not_pass_for_a_stock_keystone(
    worlds: list[World], clock: Clock
) -> None:
    world = plain(worlds, NONE)
    world.get()
    assert (world.middleware.validations.tells, world.middleware.validations.stock) == (True, False)


def test_silence_is_told_once(worlds: list[World], caplog: pytest.LogCaptureFixture) -> None:
    world = shared_world()
    worlds.append(world)
    world.keystone.says = STOCK
    world.get()
    world.get()
    assert len([x for x in caplog.records if "up to token_cache_time" in x.message]) == 1
    world.keystone.says = TAGS
    world.keystone.tokens["u"] = token_data("u")
    world.get("u")
    world.keystone.says = STOCK
    for _ in range(3):
        world.keystone.change()
        world.get()
    assert len([x for x in caplog.records if "and now does not" in x.message]) == 1


# Whatever it says.


@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_no_validation_outlives_its_token(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(validations, "time", clock)
    world = shared_world()
    worlds.append(world)
    world.keystone.says = says
    world.keystone.tokens["t"] = token_data(expires_at="2060-01-01T00:00:00.000000Z")
    world.get()
    found = world.middleware.validations
    key = found.key("t")
    assert found.find(key) is not None
    # a wall clock that is set forward, and a monotonic one that is not
    monkeypatch.setattr(clock, "time", lambda: 2_900_000_000.0)
    assert found.find(key) is None


def test_an_ended_token_is_good_until_the_end_that_keystone_gives(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trust ends earlier than the time for which a service may go on with it."""
    clock = Clock()
    monkeypatch.setattr(validations, "time", clock)
    shared.keystone.tokens["t"] = token_data(expires_at="2020-01-01T00:00:00.000000Z")
    for ends in (3_000_000_000.0, 3_100_000_000.0):
        shared.keystone.ends = ends
        monkeypatch.setattr(clock, "time", lambda ends=ends: ends - 100)
        shared.middleware.fetch_token("t", allow_expired=True)
        found = shared.middleware.validations
        key = found.key("t", allow_expired=True)
        assert found.find(key) is not None
        monkeypatch.setattr(clock, "time", lambda ends=ends: ends + 1)
        assert found.find(key) is None


@pytest.mark.parametrize(("seconds", "asked"), [("-1", 3), ("0", 1)])
@pytest.mark.parametrize("says", [STOCK, TAGS])
def test_token_cache_time_says_what_it_said(
    worlds: list[World], clock: Clock, seconds: str, asked: int, says: str
) -> None:
    world = shared_world(token_cache_time=seconds)
    worlds.append(world)
    world.keystone.says = says
    for _ in range(3):
        world.get()
        clock.later(4000)
    assert world.asked == asked


@pytest.mark.parametrize("says", [STOCK, NONE, TAGS])
@pytest.mark.parametrize(("refuses", "status"), [(500, 503), (403, 503), (401, 503), (429, 503)])
def test_an_error_is_not_kept(
    worlds: list[World], says: str, refuses: int, status: int
) -> None:
    world = shared_world()
    worlds.append(world)
    world.keystone.says = says
    world.keystone.refuses = refuses
    assert [world.get().status for _ in range(2)] == [status] * 2
    world.keystone.refuses = None
    assert world.get().status == 200


def test_a_keystone_that_is_away_ends_nothing_that_stands(shared: World) -> None:
    shared.get()
    shared.keystone.down = requests.exceptions.ConnectionError("away")
    assert shared.get().status == 200
    assert shared.get("other").status == 503
    shared.keystone.change()
    assert shared.get().status == 503
    shared.keystone.down = None
    assert shared.get().status == 200
    assert shared.get("other").status == 401


def test_a_keystone_that_is_away_is_missed_after_revalidate(
    worlds: list[World], clock: Clock
) -> None:
    world = lone(worlds)
    world.get()
    world.keystone.down = requests.exceptions.ConnectionError("away")
    assert world.get().status == 200
    clock.later(1.1)
    assert [world.get().status for _ in range(2)] == [503, 503]
    world.keystone.down = None
    assert world.get().status == 200
    assert world.keystone.statuses == [200, 304]


@pytest.mark.parametrize(
    "told", ["", "1", "1.2", "x.1.1", "1.2.3,", "1.2.3 ", "-1.2.3", "1.2." + "1," * 3000 + "1"]
)
def test_what_is_not_understood_is_not_kept(
    worlds: list[World], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = shared_world()
    worlds.append(world)
    send = world.keystone.send

    def changed(*arguments: Any, **options: Any) -> Any:
        answer = send(*arguments, **options)
        answer.headers["X-Keyfront-Epochs"] = told
        return answer

    monkeypatch.setattr(world.keystone, "send", changed)
    world.get()
    world.keystone.tokens.clear()
    assert world.get().status == 401


def test_not_modified_without_having_asked_is_an_error(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = shared_world()
    worlds.append(world)
    send = world.keystone.send

    def changed(*arguments: Any, **options: Any) -> Any:
        answer = send(*arguments, **options)
        answer.status_code, answer._content = 304, b""
        return answer

    monkeypatch.setattr(world.keystone, "send", changed)
    assert world.get().status == 503
    monkeypatch.undo()
    assert world.get().status == 200


def test_the_question_is_keystonemiddlewares_with_two_headers_more(worlds: list[World]) -> None:
    asked = []
    for original in (True, False):
        world = World(original=original, include_service_catalog="false")
        worlds.append(world)
        world.get()
        (question,) = world.keystone.asked
        asked.append((question.method, question.url, question.body, dict(question.headers)))
    *same, headers = asked[0]
    *same_too, more = asked[1]
    assert same == same_too
    assert more == {**headers, "X-Keyfront-Epochs": "2"}


def test_a_hit_writes_no_log(shared: World, caplog: pytest.LogCaptureFixture) -> None:
    shared.get()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        shared.get()
    assert not caplog.records
