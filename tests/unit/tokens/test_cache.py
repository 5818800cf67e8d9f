"""The filter in front of a stand-in for Keystone: what it keeps, for whom, and how long."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.common import file_lock, late_requests, request_phases
from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError
from keyfront.gateway.queue_limit import refuse_late
from keyfront.middleware.tokens import cache as keystone_filter
from keyfront.middleware.tokens import epochs, keys_and_entries, node_cache, request
from keyfront.middleware.tokens.cache import TokenCache
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.counters import CAUSES
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.keys_and_entries import AUTH_CONTEXT
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.routes import Routes
from support.clocks import Clock
from support.served import PATIENCE
from support.token_worlds import World, model


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "shared")


def test_the_second_answer_is_the_first_with_a_request_id_of_its_own(world: World) -> None:
    first, second = world.get(), world.get()
    assert world.keystone.asked == 1
    assert first[0] == second[0] == "200 OK"
    assert first[2] == second[2] == b"body of t"
    ids = [headers.pop("x-openstack-request-id") for _, headers, _ in (first, second)]
    assert len(set(ids)) == 2
    assert first[1] == second[1]
    assert second[1]["X-Subject-Token"] == "t"


def test_workers_share_answers(world: World) -> None:
    other = world.worker()
    world.get()
    assert world.get(by=other)[2] == b"body of t"
    assert world.keystone.asked == 1
    world.get(by=other)
    counts = world.counts
    assert (counts["misses"], counts["node_hits"], counts["hits"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "tag",
    [
        *("all", "roles", "catalog", "federation", "grants:group"),
        *("user:user-t", "grants:user:user-t", "members:user-t", "audit:audit-t"),
        *("user:user-admin", "grants:user:user-admin", "members:user-admin", "audit:audit-admin"),
        *("project:project", "project:default"),
    ],
)
def test_a_change_of_what_it_depends_on_ends_an_answer(world: World, tag: str) -> None:
    world.get()
    world.change(tag)
    world.get()
    assert world.keystone.asked == 2
    world.get()
    assert world.keystone.asked == 2


@pytest.mark.parametrize(
    ("tag", "cause"),
    [
        *(("all", "all"), ("catalog", "catalog"), ("grants:group", "grants:group")),
        *(("user:user-t", "rows"), ("audit:audit-t", "rows"), ("project:project", "rows")),
    ],
)
def test_what_ended_an_answer_is_counted_when_keystone_is_asked_again(
    world: World, tag: str, cause: str
) -> None:
    other = world.worker()
    world.get()
    world.get(by=other)
    world.change(tag)
    world.get()
    world.get(by=other)  # it finds what the first has asked for
    assert _ended(world) == {cause: 1}


def test_under_a_change_its_family_is_counted(world: World) -> None:
    world.get()
    mark = world.coordinator.mark(slots(["catalog"], world.coordinator.slot_count))
    world.get()
    world.coordinator.stamp(mark)
    assert _ended(world) == {"catalog": 1}


def _ended(world: World) -> dict[str, int]:
    ended = {cause: world.counts[f"ended_{cause}"] for cause in CAUSES}
    return {cause: count for cause, count in ended.items() if count}


@pytest.mark.parametrize("tag", ["any", "content", "users", "audit:other", "user:user-u", "oauth"])
def test_a_change_of_anything_else_does_not(world: World, tag: str) -> None:
    world.get()
    world.change(tag)
    world.get()
    assert world.keystone.asked == 1


def test_while_a_change_is_under_way_keystone_is_asked(world: World) -> None:
    world.get()
    mark = world.coordinator.mark(slots(["user:user-t"], world.coordinator.slot_count))
    for _ in range(3):
        world.get()
    assert world.keystone.asked == 4
    world.coordinator.stamp(mark)
    world.get()
    world.get()
    assert world.keystone.asked == 5


def test_an_answer_that_was_made_during_a_change_is_not_kept(world: World) -> None:
    """The slow fill: it read the old rows, and comes back after the change."""
    world.keystone.while_answering = lambda: world.change("user:user-t")
    world.get()
    world.keystone.while_answering = lambda: None
    world.get()
    assert world.keystone.asked == 2


def test_an_answer_that_may_be_from_the_past_is_not_kept(world: World) -> None:
    world.keystone.unvouched = True
    for _ in range(2):
        assert world.get(HTTP_X_KEYFRONT_EPOCHS="1")[1]["X-Keyfront-Epochs"] == "none"
    assert world.counts["not_kept"] == world.keystone.asked == 2
    world.keystone.unvouched = False
    assert world.get(HTTP_X_KEYFRONT_EPOCHS="1")[1]["X-Keyfront-Epochs"] != "none"
    world.get()
    assert world.keystone.asked == 3


def test_what_a_change_touched_is_kept_when_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be behind by three seconds."""
    now = 1000.0
    monkeypatch.setattr(epochs, "time", SimpleNamespace(monotonic=lambda: now))
    world = World(tmp_path / "shared", settle=3.0)

    def asked(subject: str = "t") -> int:
        before = world.keystone.asked
        world.get(subject=subject)
        return world.keystone.asked - before

    assert [asked(), asked()] == [1, 1]  # what changed before it began it does not know
    now += 3.0
    assert [asked(), asked()] == [1, 0]
    world.change("user:user-t")
    assert [asked(), asked(), asked("u"), asked("u")] == [1, 1, 1, 0]

    def settle() -> None:
        nonlocal now
        now += 3.0

    # One that was asked for while it was doubtful, and comes when it is not any more.
    world.keystone.while_answering = settle
    assert asked() == 1
    world.keystone.while_answering = lambda: None
    assert [asked(), asked()] == [1, 0]


def test_a_yes_gives_way_to_a_no_and_back(world: World) -> None:
    world.get()
    known = world.keystone.known.pop("t")
    world.change("user:user-t", "any")
    assert [world.get()[0] for _ in range(3)] == ["404 NOT FOUND"] * 3
    assert world.keystone.asked == 2
    world.keystone.known["t"] = known
    world.change("any")  # a refusal ends with any change: who knows which makes it good
    assert [world.get()[0] for _ in range(3)] == ["200 OK"] * 3
    assert world.keystone.asked == 3


def test_garbage_is_garbage_whatever_changes(world: World) -> None:
    for _ in range(3):
        assert world.get(caller="junk")[0] == "401 UNAUTHORIZED"
        world.change("any", "users")
    assert world.keystone.asked == 1


def test_garbage_has_room_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path / "shared")
    world.get()
    for number in range(500):
        world.keystone.garbage.add(f"junk{number}")
        world.get(caller=f"junk{number}")
    asked = world.keystone.asked
    assert world.cache.refusals.evicted > 0
    assert world.cache.refusals.size <= world.cache.refusals.limit
    world.get()
    assert world.keystone.asked == asked


def test_callers_do_not_share(world: World) -> None:
    world.get(caller="admin")
    world.get(caller="u")
    assert world.keystone.asked == 2


def test_a_body_that_repeats_the_token_is_kept_without_it(world: World) -> None:
    token = "gAAAAABsecret"
    world.keystone.garbage.add(token)
    world.keystone.body = '{{"message": "Could not find token: {}."}}'
    first, second = world.get(subject=token), world.get(subject=token)
    assert world.keystone.asked == 1
    assert first[2] == second[2]
    assert token.encode() in second[2]
    for file in world.folder.iterdir():
        assert token.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    "more",
    [
        {"CONTENT_LENGTH": "3"},
        {"HTTP_TRANSFER_ENCODING": "chunked"},
        {"REMOTE_USER": "joe"},
        {"SSL_CLIENT_S_DN": "CN=joe"},
    ],
)
def test_what_is_not_to_be_cached_goes_to_keystone(world: World, more: dict[str, str]) -> None:
    world.get(**more)
    world.get(**more)
    assert world.keystone.asked == 2
    assert world.counts["bypassed"] == world.counts["bypassed_request"] == 2


@pytest.mark.parametrize("header", [("Set-Cookie", "a=b"), ("Cache-Control", "no-store")])
def test_an_answer_that_is_for_once_is_not_kept(world: World, header: tuple[str, str]) -> None:
    world.keystone.headers = [header]
    world.get()
    world.get()
    assert world.keystone.asked == 2
    assert world.counts["not_kept"] == 2


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_go_through(world: World, method: str) -> None:
    world.get()
    world.get(REQUEST_METHOD=method)
    assert world.keystone.asked == 2


def test_head_is_not_get(world: World) -> None:
    world.get()
    assert world.get(REQUEST_METHOD="HEAD")[2] == b""
    assert world.get(REQUEST_METHOD="HEAD")[2] == b""
    assert world.keystone.asked == 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(wall=4_000_000_000.0, monotonic=1000.0)
    monkeypatch.setattr(keystone_filter.time, "time", lambda: clock.wall)
    monkeypatch.setattr(keystone_filter.time, "monotonic", lambda: clock.monotonic)
    return clock


def in_seconds(clock: SimpleNamespace, seconds: float) -> str:
    return datetime.datetime.fromtimestamp(clock.wall + seconds, datetime.UTC).isoformat()


def test_an_answer_ends_with_its_ttl(world: World, clock: SimpleNamespace) -> None:
    for name in world.keystone.known:
        world.keystone.known[name].expires_at = in_seconds(clock, 3600)
    world.get()
    clock.monotonic += 29.9
    world.get()
    assert world.keystone.asked == 1
    clock.monotonic += 0.2
    world.get()
    assert world.keystone.asked == 2
    assert _ended(world) == {"time": 1}


@pytest.mark.parametrize("whose", ["t", "admin"])
def test_an_answer_ends_with_its_tokens(
    world: World, clock: SimpleNamespace, whose: str
) -> None:
    for name in world.keystone.known:
        world.keystone.known[name].expires_at = in_seconds(clock, 3600)
    world.keystone.known[whose].expires_at = in_seconds(clock, 10)
    world.get()
    clock.wall += 9
    world.get()
    assert world.keystone.asked == 1
    clock.wall += 2  # a clock that is set, or that goes on while the other stands still
    world.get()
    assert world.keystone.asked == 2


def test_a_frozen_wall_clock_does_not_keep_an_answer(
    world: World, clock: SimpleNamespace
) -> None:
    for name in world.keystone.known:
        world.keystone.known[name].expires_at = in_seconds(clock, 10)
    world.get()
    clock.monotonic += 11
    world.get()
    assert world.keystone.asked == 2


@pytest.mark.parametrize("basis", ["trust", "application_credential"])
def test_an_answer_ends_with_what_its_token_stands_on(
    world: World, clock: SimpleNamespace, basis: str
) -> None:
    ends = datetime.datetime.fromtimestamp(clock.wall + 10, datetime.UTC).replace(tzinfo=None)
    for name in world.keystone.known:
        world.keystone.known[name].expires_at = in_seconds(clock, 3600)
    setattr(world.keystone.known["t"], basis, {"expires_at": ends})
    world.get()
    clock.wall += 11
    world.get()
    assert world.keystone.asked == 2


def test_without_a_ttl_refusals_are_not_kept(tmp_path: Path) -> None:
    world = World(tmp_path / "shared", negative_ttl=0.0)
    world.get(caller="junk")
    world.get(caller="junk")
    assert world.keystone.asked == 2


def test_an_application_that_says_nothing_is_not_cached(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.keystone.records = False
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.get()
    assert world.keystone.asked == 3
    (record,) = caplog.records
    assert record.getMessage().startswith("token_cache keeps nothing")


def test_what_came_too_late_makes_nobody_wait_and_waits_for_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "shared", flight_timeout=1.0)
    world.cache.application = refuse_late(world.keystone)
    world.get()
    assert _late(world) == "200 OK"  # it is known
    world.change("user:user-t")
    seen: list[str] = []
    world.keystone.while_answering = lambda: seen.append(_late(world))
    assert _late(world) == "503 Late"
    world.get()  # while Keystone answers this
    assert seen == ["503 Late"]
    counts = world.counts
    assert (counts["misses"], counts["not_kept"], counts["waits"]) == (2, 0, 0)
    assert _ended(world) == {"rows": 1}
    assert not caplog.records


def _late(world: World) -> str:
    """Send a request that is refused where Keystone would be asked; return the status."""

    def refuse(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("503 Late", [])
        return []

    late: Any = {late_requests.ENVIRON_KEY: refuse}
    return world.get(**late)[0]


def test_a_model_of_another_shape_is_not_cached(world: World) -> None:
    del world.keystone.known["t"].audit_ids
    world.get()
    world.get()
    assert world.keystone.asked == 2


def test_who_has_an_identifier_that_is_not_ascii_depends_on_every_change(world: World) -> None:
    """As in a directory whose users are named by it."""
    world.keystone.known["t"] = model("t", user_id="j\u00f6rg")
    world.get()
    world.get()
    assert world.keystone.asked == 1
    world.change("any", "user:jorg")
    world.get()
    assert world.keystone.asked == 2


def test_other_routes_depend_on_what_they_show(tmp_path: Path) -> None:
    world = World(tmp_path / "shared", routes=["/v3/projects", "/v3/users/{id}", "/v3/limits"])

    def ask(path: str, *reads: str) -> int:
        world.keystone.reads = set(reads)
        world.get(subject="", PATH_INFO=path)
        return world.keystone.asked

    assert [ask("/v3/projects", "projects"), ask("/v3/projects", "projects")] == [1, 1]
    world.change("users", "user:x")
    assert ask("/v3/projects", "projects") == 1
    world.change("projects", "project:new")
    assert ask("/v3/projects", "projects", "limits") == 2
    world.change("limits")
    assert ask("/v3/projects", "projects", "limits") == 3
    joe, jim = (("/v3/users/" + name, "users", "projects") for name in ("joe", "jim"))
    assert [ask(*joe), ask(*joe), ask(*jim)] == [4, 4, 5]
    # what ends by the clock, and what is not wanted
    assert [ask("/v3/limits", "trusts"), ask("/v3/limits", "trusts")] == [6, 7]
    assert [ask("/v3/roles"), ask("/v3/roles")] == [8, 9]


def test_lists_push_out_no_validation(tmp_path: Path) -> None:
    """Whoever may list something can do so in any number of ways."""
    world = World(tmp_path / "shared", routes=["/v3/projects"], memory=8 << 20)
    other = world.worker()
    world.get()
    body, world.keystone.body = world.keystone.body, "x" * 40_000
    for number in range(250):
        world.get(subject="", PATH_INFO="/v3/projects", QUERY_STRING=f"name={number}")
    world.keystone.body = "x" * 100_000
    world.get(subject="", PATH_INFO="/v3/projects", QUERY_STRING="long")
    asked = world.keystone.asked
    world.get(subject="", PATH_INFO="/v3/projects", QUERY_STRING="long")
    assert world.keystone.asked == asked  # it is kept here
    world.get(subject="", PATH_INFO="/v3/projects", QUERY_STRING="long", by=other)
    assert world.keystone.asked == asked + 1  # and not shared
    world.keystone.body = body
    world.get()
    assert world.keystone.asked == asked + 1
    # Nor is it pushed out of what the workers share.
    world.get(by=world.worker())
    assert world.keystone.asked == asked + 1


@pytest.mark.parametrize("name", ["QUERY_STRING", "HTTP_X_MINE", "HTTP_ACCEPT_LANGUAGE"])
def test_one_caller_is_kept_few_answers_to_the_same(world: World, name: str) -> None:
    """Each with another key, of which he can make as many as he likes."""

    def asked(value: str, caller: str = "t") -> int:
        before = world.keystone.asked
        for _ in range(2):
            assert world.get(caller, **{name: value})[0] == "200 OK"
        return world.keystone.asked - before

    known = ["nocatalog", "allow_expired=1"] if name == "QUERY_STRING" else list("abcdefgh")
    assert [asked(value) for value in known] == [1] * len(known)
    stored = world.cache._node.statistics()["answers_stored"]
    for number in range(50):
        assert asked(f"name={number}&allow_expired={number}") == 2
    assert world.cache._node.statistics()["answers_stored"] == stored
    assert len(world.cache.answers) == len(known)
    assert world.counts["bypassed"] == world.counts["bypassed_variants"] == 100
    assert world.get("t", **{name: "name=1", "HTTP_X_KEYFRONT_EPOCHS": "1"})[1][
        "X-Keyfront-Epochs"
    ] == "none"
    # others are not concerned, and what he asked before is there
    assert [asked(value) for value in known] == [0] * len(known)
    assert asked(known[-1], caller="u") == 1


def test_a_way_of_asking_makes_room_when_it_is_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a service token, which is another one each hour."""
    now = 1000.0
    monkeypatch.setattr(keys_and_entries.time, "monotonic", lambda: now)
    for letter in "abcdefgh":
        world.get(HTTP_X_MINE=letter)
        now += 1.0
    world.get(HTTP_X_MINE="a", REQUEST_METHOD="HEAD")  # it is in use
    asked = world.keystone.asked
    now = 1030.9
    for _ in range(2):
        world.get(HTTP_X_MINE="new")
    assert world.keystone.asked == asked + 2
    now = 1031.1
    for _ in range(2):
        world.get(HTTP_X_MINE="new")
    assert world.keystone.asked == asked + 3


def test_of_a_number_of_callers_is_known_how_they_ask(world: World) -> None:
    made = keys_and_entries.Variants(30.0)
    for number in range(keys_and_entries._CALLERS + 10):
        made.note(keys_and_entries.Way(b"%d" % number, b"x"))
    assert len(made._callers) == keys_and_entries._CALLERS
    assert b"0" not in made._callers


@pytest.mark.parametrize("context", [{}, {"user_id": "of a certificate"}, {"token": object()}, ""])
def test_a_caller_who_was_let_in_by_something_else_is_looked_at_each_time(
    world: World, context: object
) -> None:
    """By whatever stands between the cache and Keystone."""
    inner = world.cache.application

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        environ[AUTH_CONTEXT] = context
        return inner(environ, start_response)

    world.cache.application = application
    world.get()
    world.get()
    assert world.keystone.asked == 2


def test_concurrent_misses_ask_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long they stand still, with a lock or without.
    monkeypatch.setattr(node_cache, "_LOCK_SECONDS", PATIENCE)
    world = World(tmp_path / "shared", flight_timeout=PATIENCE)
    answering, go = threading.Event(), threading.Event()

    def slow() -> None:
        answering.set()
        assert go.wait(PATIENCE)

    world.keystone.while_answering = slow
    other = world.worker()
    results: list[bytes] = []

    def ask(by: TokenCache) -> None:
        results.append(world.get(by=by)[2])

    threads = [threading.Thread(target=ask, args=(by,)) for by in (world.cache, other, other)]
    threads[0].start()
    assert answering.wait(PATIENCE)
    for thread in threads[1:]:
        thread.start()
    while world.counts["waits"] < 2:
        threads[1].join(0.01)
    go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [b"body of t"] * 3
    assert world.keystone.asked == 1


def test_who_waits_in_vain_asks_himself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other's question must not have ended before this one is asked.
    monkeypatch.setattr(node_cache, "time", Clock())
    world = World(tmp_path / "shared", flight_timeout=5.0)
    world.get()
    world.change("all")
    (key,) = world.cache.answers._entries
    assert world.cache._node.ask(key)  # by one that will never answer
    world.get()
    assert world.keystone.asked == 2
    assert world.counts["waits"] == 1


def test_a_worker_that_begins_waits_for_one_who_makes_the_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes a busy machine longer than a request would wait."""
    clock = Clock()
    monkeypatch.setattr(file_lock, "time", clock)
    node = NodeCache(world.folder, size=1 << 20, flight_timeout=5.0)
    making = FileLock(world.folder / "node-lock")
    making.__enter__()
    over = clock.monotonic() + 2.0

    def sleep(seconds: float) -> None:
        clock.later(seconds)
        if clock.monotonic() > over and making._threads.locked():
            making.__exit__(None, None, None)

    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(CoordinatorError, match=r"not free within 0\.1 s"):
        node.start(world.coordinator.secret)
    assert clock.monotonic() < over
    other = TokenCache(
        world.keystone, world.coordinator, node,
        ttl=30.0, negative_ttl=30.0, memory=1 << 20, routes=Routes(()),
    )  # fmt: skip
    assert clock.monotonic() > over
    assert world.get(by=other)[0] == "200 OK"


@pytest.mark.parametrize("views", [True, False])
def test_what_keystone_caches_goes_by_the_state_from_before_it_is_asked(
    tmp_path: Path, views: bool
) -> None:
    world = World(tmp_path / "shared", views=views)
    seen: list[request.Request] = []

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        world.change("users")
        seen.append(environ[request.ENVIRON_KEY])
        return world.keystone(environ, start_response)

    world.cache.application = application
    generation, numbers = world.coordinator.snapshot()
    world.get()
    (noted,) = seen
    if views:
        assert noted.view is not None
        assert noted.view.numbers == numbers
        assert noted.since == noted.view.seen == (generation, max(numbers))
        assert noted.view.coordinator is world.cache.coordinator
    else:
        assert noted.view is None
        assert noted.since is not None


def test_a_lost_table_makes_it_slower_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.get()
    now = world.cache.coordinator
    now._looked = 0  # its lease has ended
    for file in world.folder.iterdir():
        file.unlink()
    world.folder.rmdir()
    world.folder.write_text("in the way")
    assert world.get()[0] == "200 OK"
    assert world.keystone.asked == 2
    world.folder.unlink()
    now._looked = 0
    world.folder.mkdir(mode=0o700)
    assert [world.get()[0] for _ in range(3)] == ["200 OK"] * 3


def test_tags_of_a_trust_and_of_a_chain_of_trusts() -> None:
    users = [{"id": name, "domain_id": f"domain-{name}"} for name in ("giver", "taker")]
    token = model("t", trust_id="T1", trust={"id": "T1"}, trustor=users[0], trustee=users[1])
    tags = set(request.token_tags(token))
    assert {"trust:t1", "user:giver", "user:taker", "grants:user:giver", "members:giver"} <= tags
    assert {"project:domain-giver", "project:domain-taker"} <= tags
    assert "trusts" not in tags
    token.trust["redelegated_trust_id"] = "T0"
    assert {"trusts", "grants", "members", "users"} <= set(request.token_tags(token))


def test_tags_of_other_tokens() -> None:
    def tags(**changed: Any) -> set[str]:
        return set(request.token_tags(model("t", **changed)))

    assert "appcred:ac" in tags(application_credential_id="AC")
    assert "oauth" in tags(access_token_id="x")
    assert "project:d" in tags(domain_id="D", project_id=None)
    assert {"audit:a", "audit:b"} <= tags(audit_ids=["A", "B"])
    with pytest.raises(ValueError, match="user"):
        tags(user_id="ü")


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here trusts an older table, for which a new one would wait."""
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)


@pytest.mark.parametrize("when", ["first", "then"])
def test_keystone_is_not_asked_amid_an_exception(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It would be part of each line that it logs, and of each error."""
    found: list[BaseException | None] = []
    world.keystone.while_answering = lambda: found.append(sys.exception())
    now, left = world.cache.coordinator.now, [when == "then"]

    def lost() -> Any:
        if left.pop():
            left.append(False)
            return now()
        raise CoordinatorError("lost")

    monkeypatch.setattr(world.cache.coordinator, "now", lost)
    assert world.get()[0] == "200 OK"
    assert found == [None]


def test_epochs_that_cannot_be_read_are_a_reason_to_ask_keystone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> Any:
        raise CoordinatorError("lost")

    monkeypatch.setattr(world.cache.coordinator, "now", lost)
    phases = request_phases.RequestPhases()  # as where slow requests are told
    token = request_phases.current.set(phases)
    assert world.get()[0] == "200 OK"
    request_phases.current.reset(token)
    assert (phases.cache, phases.cache_reason) == ("bypassed", "coordinator")
    assert world.keystone.asked == 1
    assert world.counts["bypassed"] == world.counts["bypassed_coordinator"] == 1
