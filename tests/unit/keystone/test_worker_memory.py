"""What Keystone has computed, kept in the worker's memory."""

from __future__ import annotations

import contextlib
import importlib
import marshal
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dogpile")

from dogpile.cache import api, make_region
from dogpile.cache.backends.memory import MemoryPickleBackend
from dogpile.cache.proxy import ProxyBackend

from keyfront.gateway.keystone import worker_memory
from keyfront.gateway.keystone.cache_regions import CacheViews
from keyfront.gateway.keystone.worker_memory import (
    DRIVERS,
    FUNCTIONS,
    LEFT_OUT,
    KeystoneMemory,
    NotKept,
)
from keyfront.middleware.tokens import epochs, keys_and_entries
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.directory_leases import leases as process_leases
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation import rules
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.request import Request, current
from support.alike_calls import ALIKE, computed

PROJECT = "keystone.resource.core:get_project|p"
USER = "keystone.identity.core:get_user|u"
TOKEN = "keystone.token.provider:_validate_token|secret-token"
REVOKED = "keystone.token.provider:check_revocation_v3|{}"


class Model:
    """As Keystone's TokenModel."""

    def __init__(self, token: str) -> None:
        self.id: str | None = token
        self.audit_ids = ["a"]
        self.access_token_id: str | None = None


class Caches:
    """A cache region of Keystone's in the memory of a worker, and requests."""

    def __init__(
        self, coordinator: SharedMemory, memory: KeystoneMemory, *, wrapped: bool = True
    ) -> None:
        self.coordinator = coordinator
        self.memory = memory
        self.region = make_region().configure("dogpile.cache.null")
        if wrapped:
            # A proxy of the operator's; the memory is asked itself without one.
            self.region.wrap(ProxyBackend)
        worker_memory.use([self.region], memory)
        self.settle(0.0)

    def settle(self, seconds: float) -> None:
        self._names = CacheViews([self.region], lambda: self.coordinator, seconds)

    @contextlib.contextmanager
    def request(self) -> Iterator[Request]:
        one = Request()
        self._names.begin(one)
        token = current.set(one)
        try:
            yield one
        finally:
            current.reset(token)

    def get(self, key: str, *tags: str, family: str = "projects", value: Any = "x") -> Any:
        """Return a value, computed of rows with these tags."""

        def compute() -> Any:
            self.read(*tags, family=family)
            return value

        return self.region.get_or_create(key, compute)

    def read(self, *tags: str, family: str) -> None:
        """Do as the database hooks for a statement."""
        request = current.get()
        if request is not None:
            request.note(Reads(frozenset({family}), frozenset(tags)))

    def change(self, *tags: str) -> None:
        found = {rules.ANY, rules.CONTENT, *tags}
        self.coordinator.touch(slots(found, self.coordinator.slot_count))

    def is_kept(self, key: str) -> bool:
        with self.request():
            return self.region.get(key) is not api.NO_VALUE


@pytest.fixture
def memory() -> KeystoneMemory:
    return KeystoneMemory(1 << 20, 30.0)


@pytest.fixture(params=[False, True], ids=["", "behind a proxy"])
def caches(
    memory: KeystoneMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Caches:
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    return Caches(SharedMemory(tmp_path / "shared"), memory, wrapped=request.param)


def test_a_value_ends_with_what_it_was_made_of(caches: Caches) -> None:
    with caches.request():
        caches.get(PROJECT, "project:p")
    caches.change("projects", "project:q")
    caches.change("users", "user:u")
    assert caches.is_kept(PROJECT)
    caches.change("projects", "project:p")
    assert not caches.is_kept(PROJECT)


def test_a_value_of_a_whole_table_ends_with_each_of_its_rows(caches: Caches) -> None:
    with caches.request():
        caches.get(PROJECT, "projects")
    caches.change("users", "user:u")
    assert caches.is_kept(PROJECT)
    caches.change("projects", "project:q")
    assert not caches.is_kept(PROJECT)


@pytest.mark.parametrize("found", [False, True], ids=["computed", "found"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_value_ends_with_those_that_it_was_made_of(
    caches: Caches, found: bool, twice: bool
) -> None:
    """Whether they were computed for it or were there, also earlier in the same request."""
    if found:
        with caches.request():
            caches.get(PROJECT, "project:p")

    def compute() -> str:
        caches.get(PROJECT, "project:p")
        caches.read("user:u", family="users")
        return "user"

    with caches.request():
        if twice:
            caches.get(PROJECT, "project:p")
        caches.region.get_or_create(USER, compute)
    caches.change("projects", "project:q")
    assert caches.is_kept(USER)
    caches.change("projects", "project:p")
    assert not caches.is_kept(USER)


def test_a_value_ends_with_one_whose_computation_failed(caches: Caches) -> None:
    """Who catches the error has learned from it."""

    def fail() -> str:
        caches.read("project:p", family="projects")
        raise KeyError

    def compute() -> str:
        with contextlib.suppress(KeyError):
            caches.region.get_or_create(PROJECT, fail)
        caches.read("user:u", family="users")
        return "user"

    with caches.request():
        caches.region.get_or_create(USER, compute)
    assert caches.is_kept(USER)
    caches.change("projects", "project:p")
    assert not caches.is_kept(USER)


def test_what_is_read_before_and_after_is_of_others(caches: Caches) -> None:
    with caches.request():
        caches.read("user:before", family="users")
        caches.get(PROJECT, "project:p")
        caches.read("user:after", family="users")
    caches.change("users", "user:before", "user:after")
    assert caches.is_kept(PROJECT)


def test_a_change_during_the_computation_ends_the_value(caches: Caches) -> None:
    with caches.request():
        caches.change("projects", "project:p")
        caches.get(PROJECT, "project:p")
        caches.get(USER, "user:u", family="users")
    assert not caches.is_kept(PROJECT), "it may be from before"
    assert caches.is_kept(USER)


def test_while_a_change_is_under_way_only_what_it_concerns_is_asked_for(caches: Caches) -> None:
    with caches.request():
        caches.get(PROJECT, "project:p")
        caches.get(USER, "user:u", family="users")
    tags = (rules.ANY, rules.CONTENT, "projects", "project:p")
    mark = caches.coordinator.mark(slots(tags, caches.coordinator.slot_count))
    assert caches.is_kept(USER)
    assert not caches.is_kept(PROJECT)
    with caches.request():
        caches.get(PROJECT, "project:p", value="from before the commit")
    caches.coordinator.stamp(mark)
    assert caches.is_kept(USER)
    assert not caches.is_kept(PROJECT)


def test_an_unrelated_change_costs_one_look(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With epochs in Redis each look is a round trip."""
    with caches.request():
        caches.get(PROJECT, "project:p")
    looks = []
    fresh = caches.coordinator.fresh_now

    def fresh_now(*arguments: Any) -> bool:
        looks.append(arguments)
        return fresh(*arguments)

    monkeypatch.setattr(caches.coordinator, "fresh_now", fresh_now)
    caches.change("users", "user:u")
    assert caches.is_kept(PROJECT)
    assert not looks, "nothing of its tables has changed"
    caches.change("projects", "project:q")
    assert caches.is_kept(PROJECT)
    assert caches.is_kept(PROJECT)
    assert len(looks) == 1
    caches.change("projects", "project:p")
    assert not caches.is_kept(PROJECT)


def test_nothing_stands_that_a_database_behind_may_not_have_shown(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(epochs, "time", SimpleNamespace(monotonic=lambda: now))
    caches.settle(3.0)
    with caches.request():
        caches.get(PROJECT, "project:p")
    assert not caches.is_kept(PROJECT), "nobody knows how old the last change is"
    now += 3.0
    with caches.request():
        caches.get(PROJECT, "project:p")
        caches.get(USER, "user:u", family="users")
    caches.change("projects", "project:p")
    with caches.request():
        caches.get(PROJECT, "project:p", value="of the replica, from before the change")
    assert not caches.is_kept(PROJECT)
    assert caches.is_kept(USER)
    now += 3.0
    with caches.request():
        caches.get(PROJECT, "project:p")
    assert caches.is_kept(PROJECT)


def test_another_epoch_table_ends_all(caches: Caches) -> None:
    with caches.request():
        caches.get(PROJECT, "project:p")
    (table,) = caches.coordinator.folder.glob("epochs-*")
    table.unlink()
    caches.change("users")
    assert not caches.is_kept(PROJECT)


def test_in_one_request_nothing_is_looked_for_twice(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what only this request may know: it belongs to no function that is known."""
    with caches.request():
        caches.get(PROJECT, "project:p", value={"a": 1})
    looks: list[str] = []
    found = caches.memory._found

    def look(request: Request, key: str) -> Any:
        looks.append(key)
        return found(request, key)

    monkeypatch.setattr(caches.memory, "_found", look)
    with caches.request():
        first = caches.get(PROJECT, value="computed")
        first["a"] = 2  # what Keystone does to it
        assert caches.get(PROJECT, value="computed") == {"a": 1}
        assert looks == [PROJECT]
        assert caches.get("another.function|x", value="once") == "once"
        assert caches.get("another.function|x", value="twice") == "once"
    with caches.request():
        assert caches.get("another.function|x", value="twice") == "twice"


def test_a_value_that_is_older_than_its_region_lets_it_be_is_computed(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keystone's [cache] expiration_time and cache_time."""
    caches.region.expiration_time = 10
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with caches.request():
        caches.get(PROJECT, "project:p", value="old")
    monkeypatch.setattr(time, "time", lambda: now + 9)
    with caches.request():
        assert caches.get(PROJECT, value="new") == "old"
    monkeypatch.setattr(time, "time", lambda: now + 11)
    with caches.request():
        assert caches.get(PROJECT, "project:p", value="new") == "new"
    with caches.request():
        assert caches.get(PROJECT, value="newer") == "new"
        # and what one call asks for wins
        assert caches.region.get_or_create(PROJECT, lambda: "newest", -1) == "new"
    caches.change("projects", "project:p")
    assert not caches.is_kept(PROJECT)


def test_what_is_not_to_be_cached_is_not(caches: Caches) -> None:
    with caches.request():
        for number in range(2):
            got = caches.region.get_or_create(
                PROJECT, lambda n=number: n, None, lambda value: False
            )
            assert got == number


def test_after_its_own_change_a_request_is_alone(caches: Caches) -> None:
    with caches.request() as one:
        caches.get(PROJECT, "project:p", value="before")
        one.end_sharing()
        assert caches.get(PROJECT, "project:p", value="own") == "own"
        caches.get(USER, "user:u", family="users")
    assert not caches.is_kept(USER)
    with caches.request():
        assert caches.get(PROJECT) == "before"


def test_a_lookup_among_revocations_ends_with_those_of_its_token(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(model))
    with caches.request() as one:
        one.checked = ["audit:a", "user:u"]
        caches.get(REVOKED.format("a"), rules.ANY, family=rules.ANY)
        one.checked = None
        caches.get(REVOKED.format("b"), rules.ANY, family=rules.ANY)
    assert caches.is_kept(REVOKED.format("b"))
    caches.change("audit:b")
    assert caches.is_kept(REVOKED.format("a"))
    assert not caches.is_kept(REVOKED.format("b")), "it is not known whose it is"
    caches.change("audit:a")
    assert not caches.is_kept(REVOKED.format("a"))


def test_what_nobody_saw_computed_is_not_kept(caches: Caches) -> None:
    with caches.request():
        caches.region.set(PROJECT, "x")
    assert not caches.is_kept(PROJECT)


CATALOG = "keystone.catalog.backends.sql:get_v3_catalog"


def test_what_a_driver_computes_is_kept_by_what_it_reads(caches: Caches) -> None:
    asked = []

    def compute() -> str:
        asked.append(1)
        caches.read("catalog", family="catalog")
        return "catalog"

    def look() -> Any:
        return caches.memory.computed(CATALOG, "p", compute)

    with caches.request():
        caches.region.get_or_create(PROJECT, look)
    with caches.request():
        assert look() == "catalog"
        caches.region.get_or_create(USER, look)
    caches.change("projects", "project:p")
    with caches.request():
        assert look() == "catalog"
    assert len(asked) == 1
    assert caches.is_kept(PROJECT) and caches.is_kept(USER)
    caches.change("catalog")
    assert not caches.is_kept(PROJECT) and not caches.is_kept(USER)
    with caches.request() as one:
        assert look() == "catalog"
        one.end_sharing()
        assert look() == "catalog"
    assert len(asked) == 3


def test_what_a_driver_computes_for_one_is_not_kept(caches: Caches) -> None:
    def look() -> Any:
        return caches.memory.computed(CATALOG, "p", lambda: NotKept("of one user"))

    with caches.request():
        assert look() == "of one user"
    with caches.request() as one:
        one.unvouched = True
        assert caches.memory.computed(CATALOG, "p", lambda: "of the past") == "of the past"
    with caches.request():
        assert caches.memory.computed(CATALOG, "p", lambda: "new") == "new"


def test_what_was_found_is_noted_for_the_answer(caches: Caches) -> None:
    with caches.request() as one:
        caches.get(PROJECT, "project:p")
        assert not one.reads  # it may be the token's
    with caches.request() as one:
        one.reading = True
        caches.get(PROJECT)
        caches.get(USER, "user:u", family="users")
        assert one.reads == {"project:p", "user:u"}
        assert one.families == {"projects", "users"}


def test_what_keystone_does_to_a_value_is_not_kept(caches: Caches) -> None:
    project = {"id": "p", "tags": []}
    with caches.request():
        caches.get(PROJECT, "project:p", value=project)
        project["id"] = "changed"
        caches.region.get(PROJECT)["tags"].append("more")
        assert caches.region.get(PROJECT) == {"id": "p", "tags": []}


def test_nothing_is_kept_outside_of_requests(caches: Caches) -> None:
    caches.get(PROJECT, "project:p")
    assert not caches.is_kept(PROJECT)
    with caches.request():
        caches.get(PROJECT, "project:p")
    assert caches.region.get(PROJECT) is api.NO_VALUE


def test_without_a_token_cache_nothing_is_kept(memory: KeystoneMemory) -> None:
    region = make_region().configure("dogpile.cache.null")
    worker_memory.use([region], memory)
    names = CacheViews([region], lambda: None)
    for _ in range(2):
        one = Request()
        names.begin(one)
        token = current.set(one)
        try:
            assert region.get_or_create(PROJECT, lambda: "x") == "x"
        finally:
            current.reset(token)
    assert not len(memory._values)


def _node(folder: Path) -> NodeCache:
    folder.mkdir(mode=0o700, exist_ok=True)
    node = NodeCache(folder, size=1 << 20, values=1 << 18, flight_timeout=1)
    node.start(bytes(32))
    return node


@pytest.fixture
def worker(caches: Caches, tmp_path: Path) -> Callable[..., Caches]:
    """Makes workers of one node: each has its memory, and what it has mapped of what they share."""

    def make(form: str = "") -> Caches:
        node = _node(tmp_path / "node")
        return Caches(caches.coordinator, KeystoneMemory(1 << 20, 30.0, lambda: node, form))

    return make


def test_workers_share_values(
    worker: Callable[..., Caches], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(worker_memory.time, "monotonic", lambda: now)
    one, other, stranger = worker(), worker(), worker("of another version")
    with one.request():
        one.get(PROJECT, "project:p", value={"id": "p"})
    with other.request() as request:
        assert other.get(PROJECT) == {"id": "p"}
        # It ends when it would where it was made.
        assert request.until == 1030.0
    other.memory._node = lambda: None
    assert other.is_kept(PROJECT), "by itself from then on"
    assert not stranger.is_kept(PROJECT)
    now = 1031.0
    assert not any(each.is_kept(PROJECT) for each in (one, other, worker()))


def test_workers_share_the_age_of_a_value(
    worker: Callable[..., Caches], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Keystone's [cache] expiration_time and cache_time are about."""
    one, other, another = worker(), worker(), worker()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with one.request():
        one.get(PROJECT, "project:p", value="old")
    monkeypatch.setattr(time, "time", lambda: now + 11)
    with other.request():
        assert other.region.get(PROJECT, 10) is api.NO_VALUE
        assert other.region.get(PROJECT, 12) == "old"
    another.region.expiration_time = 10
    with another.request():
        assert another.get(PROJECT, "project:p", value="new") == "new"


def test_a_proxy_of_the_operators_is_asked(caches: Caches) -> None:
    seen = []

    class Proxy(ProxyBackend):
        def get(self, key: Any) -> Any:
            seen.append(key)
            return self.proxied.get(key)

    caches.region.wrap(Proxy)
    for _ in range(2):
        with caches.request():
            caches.get(PROJECT, "project:p")
    assert seen == [PROJECT, PROJECT]


def test_what_workers_share_ends_with_what_it_was_made_of(
    worker: Callable[..., Caches],
) -> None:
    one, other = worker(), worker()
    with one.request():
        one.get(PROJECT, "project:p")
    one.change("projects", "project:q")
    assert other.is_kept(PROJECT)
    with other.request() as request:
        request.reading = True
        other.get(PROJECT)
        assert request.reads == {"project:p"}
    one.change("projects", "project:p")
    assert not any(each.is_kept(PROJECT) for each in (one, other, worker()))
    with other.request():
        other.get(PROJECT, "project:p", value="new")
    with one.request():
        assert one.get(PROJECT) == "new", "though it has an old one itself"


def test_workers_share_no_token(
    worker: Callable[..., Caches], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(["audit:a"]))
    one, other = worker(), worker()
    with one.request():
        one.region.set(TOKEN, Model("secret-token"))
    with other.request():
        assert other.region.get(TOKEN).id == "secret-token"
    (kept,) = (tmp_path / "node").glob("values-*")
    assert b"audit_ids" in kept.read_bytes()
    assert b"secret-token" not in kept.read_bytes()


def test_what_was_deleted_is_not_taken_from_others(worker: Callable[..., Caches]) -> None:
    one, other = worker(), worker()
    with one.request():
        one.get(PROJECT, "project:p")
    with one.request() as request:
        request.end_sharing()
        one.region.delete(PROJECT)
    assert not one.is_kept(PROJECT)
    assert other.is_kept(PROJECT)
    with one.request():
        one.get(PROJECT, "project:p", value="new")
    assert one.is_kept(PROJECT)


def test_after_its_own_change_a_request_gives_nothing_to_others(
    worker: Callable[..., Caches],
) -> None:
    one, other = worker(), worker()
    with one.request() as request:
        request.end_sharing()
        one.get(PROJECT, "project:p")
    assert not other.is_kept(PROJECT)


def test_what_workers_share_may_be_damaged(
    worker: Callable[..., Caches], tmp_path: Path
) -> None:
    one, other = worker(), worker()
    with one.request():
        one.get(PROJECT, "project:p")
    (path,) = (tmp_path / "node").glob("values-*")
    at = path.read_bytes().index(b"\x80", 64 + 256 * 64)  # where a pickle begins
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"junk")
    assert not other.is_kept(PROJECT)
    assert one.is_kept(PROJECT)


# A value as the commit before this test packed it, whose number of the version was the same.
FORMER = pickle.dumps((b"x", 1e9, (1, 2), ({"projects"}, {"project:p"}, set()), (0, 9)))


@pytest.mark.parametrize(
    "packed",
    [FORMER, b"", marshal.dumps(None), marshal.dumps((b"x", {}, 1e9)), marshal.dumps(("",) * 6)],
    ids=["pickled", "nothing", "none", "short", "strings"],
)
def test_what_another_build_has_shared_is_computed_anew(
    worker: Callable[..., Caches], packed: bytes
) -> None:
    one, other = worker(), worker()
    node = one.memory._node()
    assert node is not None
    node.keep_value(PROJECT, packed)
    with one.request():
        assert one.get(PROJECT, "project:p", value="own") == "own"
    assert other.is_kept(PROJECT), "as it has replaced it"


# As processes of form 5 pack it. A change by which this cannot be read, or is read otherwise, needs
# a new ``FORM``, which names the files: builds of one version may run beside each other.
OF_FORM = (
    "5",
    "a906f30100000078fbda026374e7000000000000f83fda0176e90100000030e70000000000004a40"
    "29027206000000e9020000002903be01000000da0870726f6a65637473be01000000fa0970726f6a"
    "6563743a70be000000002902e900000000e909000000",
)  # fmt: skip


def test_a_new_form_of_values_has_a_new_number() -> None:
    form, packed = OF_FORM
    assert str(keys_and_entries.FORM) == form
    value = worker_memory._Value.unpack(bytes.fromhex(packed))
    reads = Reads(frozenset({"projects"}), frozenset({"project:p"}))
    expected = (b"x", {"ct": 1.5, "v": 1}, 52.0, (1, 2), reads, (0, 9))
    found = value.data, value.metadata, value.deadline, value.epoch, value.reads, value.slots
    assert found == expected
    assert marshal.loads(value.pack()) == marshal.loads(bytes.fromhex(packed))


def test_a_value_ends(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(worker_memory, "time", clock)
    with caches.request():
        caches.get(PROJECT, "project:p")
    clock.monotonic = lambda: 129.9
    assert caches.is_kept(PROJECT)
    clock.monotonic = lambda: 130.1
    assert not caches.is_kept(PROJECT)


def test_no_token_is_kept(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(["audit:a"]))
    model = Model("secret-token")
    with caches.request():
        # As a login does, with the token that it has issued.
        caches.region.set(TOKEN, model)
    assert model.id == "secret-token"
    with caches.request():
        assert caches.region.get(TOKEN).id == "secret-token"
    ((key, value),) = caches.memory._values._entries.items()
    assert b"secret-token" not in key + value.data
    caches.change("audit:b")
    assert caches.is_kept(TOKEN)
    caches.change("audit:a")
    assert not caches.is_kept(TOKEN)


def test_a_token_that_was_issued_stands_while_its_directory_is_followed(
    caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model holds the user, as the login has read him."""
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(["audit:a"]))
    monkeypatch.setattr(process_leases, "leases", None)
    leases = process_leases.make(tmp_path)
    assert leases is not None
    with caches.request() as request:
        request.note(Reads(frozenset(), frozenset(), frozenset({"directory"})))
        caches.region.set(TOKEN, Model("secret-token"))
    assert not caches.is_kept(TOKEN)
    leases.grant("directory", time.monotonic() + 60)
    assert caches.is_kept(TOKEN)
    with caches.request() as request:
        caches.region.get(TOKEN)
    assert request.followed == {"directory"}


def test_a_token_of_another_shape_is_kept_only_by_what_was_read(caches: Caches) -> None:
    with caches.request():
        caches.region.set(TOKEN, Model("secret-token"))
    assert not caches.is_kept(TOKEN)


def test_a_token_under_another_key_is_not_kept(caches: Caches) -> None:
    with caches.request():
        caches.get(TOKEN, "user:u", value=Model("another"))
    assert not caches.is_kept(TOKEN)


def test_no_token_of_oauth_is_kept(caches: Caches) -> None:
    """Keystone's model of it holds the secret of the access token."""
    model = Model("secret-token")
    model.access_token_id = "a"
    with caches.request():
        caches.get(TOKEN, "user:u", value=model)
    assert not caches.is_kept(TOKEN)


def test_only_what_is_known_is_kept(caches: Caches) -> None:
    for function in (*LEFT_OUT, "keystone.new.core:get_secret"):
        with caches.request():
            caches.get(f"{function}|x", "project:p")
        assert not caches.is_kept(f"{function}|x")


def test_memory_is_bounded(caches: Caches) -> None:
    with caches.request():
        for number in range(2000):
            key = f"keystone.resource.core:get_project|{number}"
            caches.get(key, "project:p", value="x" * 1000)
    assert caches.memory._values.size <= 1 << 20
    assert caches.is_kept("keystone.resource.core:get_project|1999")
    assert not caches.is_kept("keystone.resource.core:get_project|0")


@contextlib.contextmanager
def request() -> Iterator[Request]:
    """A request of a Keystone without a token cache."""
    one = Request()
    one.as_it_is = True
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_may_be_from_the_past_is_not_stored(wrapped: bool) -> None:
    """In no backend, whichever it is; nor is what is stored already taken away."""
    region = make_region().configure("dogpile.cache.memory")
    if wrapped:
        region.wrap(ProxyBackend)
    worker_memory.use([region], KeystoneMemory(1 << 20, 30.0), lambda: True)
    kept = region.actual_backend._cache
    with request() as one:
        region.set("before", "x")
        one.unvouched = True
        region.set("after", "x")
        region.set_multi({"after": "x"})
        region.get_or_create("after", lambda: "x")
        assert region.get("before") == "x"
    assert set(kept) == {"before"}
    with request():
        region.set_multi({"another": "x"})
    assert set(kept) == {"before", "another"}


def test_what_may_be_from_the_past_is_not_stored_as_bytes_either() -> None:
    backend = MemoryPickleBackend({})
    region = make_region().configure("dogpile.cache.null")
    region.serializer = backend.serializer
    region.backend = backend
    worker_memory.use([region], KeystoneMemory(1 << 20, 30.0))
    with request() as one:
        region.set("before", "x")
        one.unvouched = True
        region.set("after", "x")
        region.set_multi({"after": "x"})
    assert set(backend._cache) == {"before"}


def test_each_function_that_keystone_caches_was_thought_of() -> None:
    """A new one is not kept until somebody has looked at it."""
    pytest.importorskip("keystone")
    import keystone.server.flask.core  # noqa: F401  (with all its managers)

    found = set()
    modules = [module for name, module in sys.modules.items() if name.startswith("keystone.")]
    for owner in [x for module in modules for x in vars(module).values() if isinstance(x, type)]:
        for value in vars(owner).values():
            original = getattr(value, "__wrapped__", None)
            if hasattr(value, "refresh") and original is not None:
                found.add(f"{original.__module__}:{original.__name__}")
    assert found == FUNCTIONS | LEFT_OUT.keys()
    assert not FUNCTIONS & LEFT_OUT.keys()
    for function in DRIVERS:
        module, _, name = function.partition(":")
        owners = [x for x in vars(importlib.import_module(module)).values() if isinstance(x, type)]
        assert any(name in vars(owner) for owner in owners), function
    assert not FUNCTIONS & DRIVERS


ASSIGNMENT = "keystone.assignment.core:{}"
OF_TOKEN = "keystone.models.token_model:_get_project_roles"


def test_what_is_found_in_another_value_is_not_kept_itself(
    caches: Caches, memory: KeystoneMemory
) -> None:
    listed = f"{ASSIGNMENT.format('list_role_assignments')}|u p"
    roles = f"{ASSIGNMENT.format('get_roles_for_user_and_project')}|u p"
    on_domain = f"{ASSIGNMENT.format('get_roles_for_user_and_domain')}|u d"

    def by_roles(key: str) -> Any:
        def compute() -> Any:
            caches.get(listed, "grants:user:u", family="grants")
            return "roles"

        return caches.region.get_or_create(key, compute)

    with caches.request():
        memory.computed(OF_TOKEN, ("u", "p"), lambda: by_roles(roles))
        by_roles(on_domain)
    assert not caches.is_kept(listed)
    assert not caches.is_kept(roles)
    assert caches.is_kept(on_domain)
    # each goes by what those in it go by
    caches.change("grants", "grants:user:u")
    assert not caches.is_kept(on_domain)
    asked = []
    with caches.request():
        memory.computed(OF_TOKEN, ("u", "p"), lambda: asked.append(1))
    assert asked
    # where they are asked for by themselves, they are kept
    with caches.request():
        by_roles(roles)
        assert not caches.is_kept(listed)
        caches.get(listed, "grants:user:u", family="grants")
    assert caches.is_kept(roles)
    assert caches.is_kept(listed)


def test_the_catalog_of_a_user_is_that_of_the_project(
    caches: Caches, memory: KeystoneMemory
) -> None:
    of_project = "keystone.catalog.backends.sql:get_v3_catalog"

    def catalog(user: str, project: str, found: Any = "catalog") -> Any:
        def compute() -> Any:
            def read() -> Any:
                caches.read("catalog", family="catalog")
                return found

            return memory.computed(of_project, project, read)

        key = f"keystone.catalog.core:get_v3_catalog|{user} {project}"
        assert caches.region.get_or_create(key, compute) == "catalog"
        return key

    for _ in range(2):
        with caches.request():
            key = catalog("u", "p")
        assert not caches.is_kept(key)
    # one that names him is his own
    with caches.request():
        key = catalog("u", "q", NotKept("catalog"))
    assert caches.is_kept(key)
    caches.change("catalog")
    assert not caches.is_kept(key)


def test_what_is_made_of_a_value_ends_with_it(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(worker_memory.time, "monotonic", lambda: now)
    with caches.request():
        caches.get(PROJECT, "project:p")
    now = 1029.0
    with caches.request() as made_of:
        caches.get(PROJECT, "project:p")
        caches.get(USER, "user:u", family="users")
        assert made_of.until == 1030.0
    now = 1031.0
    assert not caches.is_kept(PROJECT)
    assert not caches.is_kept(USER)


@pytest.mark.parametrize("calls", ALIKE)
def test_calls_with_other_arguments_are_told_apart(
    caches: Caches, calls: tuple[tuple[Any, Any], ...]
) -> None:
    def read() -> None:
        caches.read("grants:user:u", family="grants")

    assert computed(caches.region, caches.request, read, calls) == [*calls], "and each is kept"
