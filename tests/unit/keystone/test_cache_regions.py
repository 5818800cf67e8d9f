"""The state that a request begins in, and what it shares of what Keystone keeps elsewhere."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dogpile")

from dogpile.cache import api, make_region
from dogpile.cache.proxy import ProxyBackend

from keyfront.errors import CoordinatorError
from keyfront.gateway.keystone import worker_memory
from keyfront.gateway.keystone.cache_regions import CacheViews, name_of
from keyfront.gateway.keystone.worker_memory import KeystoneMemory
from keyfront.middleware.tokens import directory_leases, epochs
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation.rules import ANY
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.request import Request, current
from support.alike_calls import ALIKE, computed

PROJECT = "keystone.resource.core:get_project|p"
USER = "keystone.identity.core:get_user|u"
CREDENTIAL = "keystone.credential.core:_get_credential|c"
TOKEN = "keystone.token.provider:_validate_token|secret-token"
OTHER = "keystone.new.core:get|x"


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    return SharedMemory(tmp_path / "shared")


@pytest.fixture(params=["objects", "bytes"])
def form(request: pytest.FixtureRequest) -> str:
    """How a backend takes values: memcached's libraries pickle by themselves."""
    return str(request.param)


class Caches:
    """A cache region of Keystone's in a backend that others share, and requests."""

    def __init__(
        self, coordinator: Any, form: str = "objects", settle: float = 0.0, manager: Any = None
    ) -> None:
        self._coordinator = coordinator
        self.region = make_region().configure("dogpile.cache.memory")
        self.kept: dict[str, Any] = self.region.actual_backend._cache
        if form == "bytes":
            self.region.serializer, self.region.deserializer = pickle.dumps, pickle.loads
        self.region.wrap(ProxyBackend)
        if manager is not None:
            self.region.region_invalidator._region_manager = manager  # type: ignore[attr-defined]
        self.region.key_mangler = lambda key: f"hash of {key}"
        worker_memory.use(
            [self.region], KeystoneMemory(1 << 20, 30.0), lambda: self._coordinator is None
        )
        self._views = CacheViews([self.region], self._find, settle)

    def _find(self) -> Any:
        if isinstance(self._coordinator, Exception):
            raise self._coordinator
        return self._coordinator

    @contextlib.contextmanager
    def request(self) -> Iterator[Request]:
        request = Request()
        self._views.begin(request)
        token = current.set(request)
        try:
            yield request
        finally:
            current.reset(token)

    def get(
        self, key: str, *tags: str, value: Any = "x", followed: str = "",
        lasts: float | None = None,
    ) -> Any:
        """Return a value, computed of rows with these tags, the first of which is the family.

        :param lasts: seconds after which one that is found is too old
        """

        def compute() -> Any:
            request = current.get()
            if request is not None:
                known = frozenset({followed} if followed else ())
                request.note(Reads(frozenset(tags[:1]), frozenset(tags[1:]), known))
            return value

        return self.region.get_or_create(key, compute, lasts)

    def is_kept(self, key: str) -> bool:
        """Whether a request that begins now finds it."""
        with self.request():
            return self.region.get(key) is not api.NO_VALUE


def touch(coordinator: SharedMemory, *tags: str) -> None:
    coordinator.touch(slots(["any", "content", *tags], coordinator.slot_count))


def test_a_value_is_found_as_long_as_its_rows_stand(coordinator: SharedMemory, form: str) -> None:
    caches = Caches(coordinator, form)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p", value={"id": "p"})
        caches.get(USER, "users", "users")
    # as memcached wants them, and without a token
    assert len(caches.kept) == 2
    assert all(len(key) == 40 and key.isalnum() for key in caches.kept)
    # what others change of their own
    for tags in (("appcreds", "appcred:a"), ("trusts", "trust:t"), ("projects", "project:q")):
        touch(coordinator, *tags)
    with caches.request() as request:
        request.reading = True
        assert caches.region.get(PROJECT) == {"id": "p"}
        assert (request.reads, request.families) == ({"project:p"}, {"projects"})
    touch(coordinator, "users", "user:another")
    assert not caches.is_kept(USER)
    assert caches.is_kept(PROJECT)
    touch(coordinator, "projects", "project:p")
    assert not caches.is_kept(PROJECT)


class _Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "bytes_of_another",
    [
        b"", b"\x01", b"\xff" * 12, b"\x02\x00\x00\x00[]rest", b"\x04\x00\x00\x00nullrest",
        struct.pack("<I", len(pickle.dumps(_Evil()))) + pickle.dumps(_Evil()) + b"rest",
        b"\x13\x00\x00\x00[1, [\"no\"], [], []]rest", b"\x0f\x00\x00\x00[\"1\", 2, 3, 4]rest",
    ],
)  # fmt: skip
def test_what_others_put_into_its_place_is_no_value(
    coordinator: SharedMemory, bytes_of_another: bytes
) -> None:
    caches = Caches(coordinator, "bytes")
    with caches.request():
        caches.get(PROJECT, "projects", "project:p", value={"id": "p"})
    assert caches.is_kept(PROJECT)
    (key,) = caches.kept
    caches.kept[key] = bytes_of_another
    assert not caches.is_kept(PROJECT)


def test_a_value_ends_with_those_that_it_is_made_of(coordinator: SharedMemory, form: str) -> None:
    caches = Caches(coordinator, form)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    with caches.request():
        caches.region.get_or_create(USER, lambda: caches.region.get(PROJECT) + "y")
    assert caches.is_kept(USER)
    touch(coordinator, "projects", "project:p")
    assert not caches.is_kept(USER)


@pytest.mark.parametrize("issued", [True, False], ids=["issued", "validated"])
def test_a_token_ends_with_what_a_validation_depends_on(
    coordinator: SharedMemory, monkeypatch: pytest.MonkeyPatch, form: str, issued: bool
) -> None:
    """One that was issued is stored without having been read."""
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(["audit:a"]))
    caches = Caches(coordinator, form)
    token = SimpleNamespace(audit_ids=["a"])
    with caches.request():
        if issued:
            caches.region.set(TOKEN, token)
        else:
            caches.get(TOKEN, "users", "user:u", value=token)
    touch(coordinator, "audit:b")
    assert caches.is_kept(TOKEN)
    touch(coordinator, "audit:a")
    assert not caches.is_kept(TOKEN)


def test_a_value_that_was_too_old_is_made_of_what_is_read_now(
    coordinator: SharedMemory, form: str
) -> None:
    """As where a section of Keystone's has a shorter ``cache_time`` than ``[cache]``."""
    caches = Caches(coordinator, form)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    with caches.request():
        assert caches.get(PROJECT, "roles", "roles", value="y", lasts=-2.0) == "y"
        assert caches.get(PROJECT, value="z") == "y"
    touch(coordinator, "roles", "roles")
    assert not caches.is_kept(PROJECT)


def test_nothing_is_stored_that_was_not_seen_to_be_made(
    coordinator: SharedMemory, form: str
) -> None:
    """What the value before it was made of says nothing of it."""
    caches = Caches(coordinator, form)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    before = dict(caches.kept)
    with caches.request():
        assert caches.region.get(PROJECT) == "x"
        caches.region.set(PROJECT, "y")
    assert caches.kept == before


def test_nothing_is_stored_of_which_is_not_known_what_it_is_made_of(
    coordinator: SharedMemory, form: str
) -> None:
    caches = Caches(coordinator, form)
    with caches.request():
        caches.region.set(PROJECT, "x")
    assert not caches.kept
    # What an unknown function reads besides the database any change may be of.
    with caches.request():
        caches.get(OTHER, "limits", "limits")
        caches.get(CREDENTIAL, "credentials", "credentials")
    assert caches.is_kept(OTHER)
    touch(coordinator, "trust:t")
    assert not caches.is_kept(OTHER)
    assert caches.is_kept(CREDENTIAL)


def test_a_value_has_the_number_of_the_beginning_of_its_request(
    coordinator: SharedMemory, form: str
) -> None:
    """A login that took one late outlived what had been disabled meanwhile."""
    caches = Caches(coordinator, form)
    with caches.request():
        touch(coordinator, "projects", "project:p")
        caches.get(PROJECT, "projects", "project:p", value="old")
        caches.get(USER, "users", "user:u")
    assert not caches.is_kept(PROJECT)
    assert caches.is_kept(USER)


def test_what_is_found_is_of_no_earlier_state(coordinator: SharedMemory, form: str) -> None:
    caches = Caches(coordinator, form)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p", value="old")
    touch(coordinator, "projects", "project:p")
    with caches.request():
        assert caches.get(PROJECT, "projects", "project:p", value="new") == "new"
    with caches.request():
        assert caches.get(PROJECT) == "new"


def test_after_its_own_change_a_request_is_alone(coordinator: SharedMemory, form: str) -> None:
    caches = Caches(coordinator, form)
    with caches.request() as request:
        caches.get(PROJECT, "projects", "project:p", value="old")
        before = dict(caches.kept)
        touch(coordinator, "users", "user:u")
        request.end_sharing()  # as its own change does
        assert caches.get(PROJECT, "projects", "project:p", value="own") == "own"
        caches.get(USER, "users", "user:u")
        caches.region.delete(PROJECT)
    assert caches.kept == before
    assert not caches.is_kept(USER)


def test_only_another_keystone_empties_a_region(coordinator: SharedMemory, form: str) -> None:
    """As at each revocation: under keyfront the rows tell, others have nothing but the name."""

    class Manager:
        """As Keystone's ``RegionInvalidationManager``."""

        _region_key = "name"

        def __init__(self) -> None:
            self._invalidation_region = make_region().configure("dogpile.cache.memory")
            self.invalidate_region()

        @property
        def region_id(self) -> bytes:
            name = self._invalidation_region.get(self._region_key)
            assert isinstance(name, bytes) and len(name) == 10
            return name

        def invalidate_region(self) -> None:
            self._invalidation_region.set(self._region_key, secrets.token_bytes(10))

    other = Manager()
    mine = Manager()
    mine._invalidation_region = other._invalidation_region
    caches = Caches(coordinator, form, manager=mine)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    before = other.region_id
    mine.invalidate_region()
    assert other.region_id != before
    assert caches.is_kept(PROJECT)
    other.invalidate_region()
    assert not caches.is_kept(PROJECT)


def test_what_is_deleted_is_gone(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
        caches.region.delete(PROJECT)
    assert not caches.kept


def test_while_a_change_is_under_way_only_what_it_concerns_is_not_shared(
    coordinator: SharedMemory,
) -> None:
    caches = Caches(coordinator)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
        caches.get(USER, "users", "user:u")
    found = slots(["any", "content", "projects", "project:p"], coordinator.slot_count)
    mark = coordinator.mark(found)
    assert not caches.is_kept(PROJECT)
    assert caches.is_kept(USER)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    assert not caches.is_kept(PROJECT)
    coordinator.stamp(mark)
    assert not caches.is_kept(PROJECT), "it may be from before the commit"


@pytest.mark.parametrize("lost", [True, False], ids=["epochs lost", "no request"])
def test_nothing_is_shared_of_which_no_beginning_is_known(
    coordinator: SharedMemory, form: str, lost: bool
) -> None:
    caches = Caches(CoordinatorError("gone") if lost else coordinator, form)
    with caches.request() if lost else contextlib.nullcontext():
        assert caches.get(PROJECT, "projects", "project:p") == "x"
        assert caches.region.get(PROJECT) is api.NO_VALUE
    assert not caches.kept


def test_tables_have_values_of_their_own(
    coordinator: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of another one, as of another node without Redis, mean something else."""
    caches, another = Caches(coordinator), Caches(SharedMemory(tmp_path / "another"))
    another.kept = caches.kept
    another.region.actual_backend._cache = caches.kept
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    assert not another.is_kept(PROJECT)
    with another.request():
        another.get(PROJECT, "projects", "project:p")
    assert len(caches.kept) == 2


def test_what_a_directory_has_said_stands_while_it_is_followed(
    coordinator: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = Caches(coordinator)
    stands = True
    known = SimpleNamespace(stand=lambda names: stands and names == {"directory"})
    monkeypatch.setattr(directory_leases.leases, "leases", known)
    with caches.request():
        caches.get(USER, "users", "user:u", followed="directory")
    with caches.request() as request:
        assert caches.region.get(USER) == "x"
        assert request.followed == {"directory"}
    stands = False
    assert not caches.is_kept(USER)


def test_a_value_of_another_form_is_none(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    with caches.request():
        caches.get(PROJECT, "projects", "project:p")
    (key,) = caches.kept
    for junk in (api.CachedValue("x", {"ct": 0.0, "v": 2}), "x", None):
        caches.kept[key] = junk
        assert not caches.is_kept(PROJECT)


def test_a_request_says_since_when_it_reads(coordinator: SharedMemory) -> None:
    """Its connections are judged by that, also after a change of its own."""
    caches = Caches(coordinator)
    with caches.request() as first:
        assert first.since == first.view.seen
    touch(coordinator, "audit:a")
    with caches.request() as second:
        assert second.since != first.since
        second.end_sharing()
        assert second.since is not None
    with Caches(None).request() as third:
        assert third.since is None


def test_a_state_has_a_name_while_nothing_is_under_way(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    with caches.request() as one, caches.request() as two:
        assert name_of(one, ANY) == name_of(two, ANY) != ""
    touch(coordinator, "audit:a")
    with caches.request() as later:
        assert name_of(later, ANY) not in ("", name_of(one, ANY))
        later.end_sharing()
        assert name_of(later, ANY) == ""
    mark = coordinator.mark(slots(["any"], coordinator.slot_count))
    with caches.request() as doubtful:
        assert name_of(doubtful, ANY) == ""
    coordinator.stamp(mark)
    assert name_of(None, ANY) == ""


def test_nothing_is_shared_before_the_last_change_has_settled(
    coordinator: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of a database that is behind may lack the change whose number it has."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(epochs, "time", clock)
    caches = Caches(coordinator, settle=3.0)

    def kept(*tags: str) -> bool:
        with caches.request():
            caches.get(PROJECT, *tags)
        return caches.is_kept(PROJECT)

    assert not kept("projects", "project:p")
    now += 3.0
    assert kept("projects", "project:p")
    touch(coordinator, "projects", "project:p")
    assert not kept("projects", "project:p")
    now += 2.9
    assert not kept("projects", "project:p")
    now += 0.1
    assert kept("projects", "project:p")


def test_without_the_token_cache_everything_is_as_it_was(form: str) -> None:
    caches = Caches(None, form)
    for around in (caches.request, contextlib.nullcontext):
        with around():
            caches.get(PROJECT, "projects", "project:p")
            assert list(caches.kept) == [f"hash of {PROJECT}"]
            assert caches.region.get(PROJECT) == "x"
            request = current.get()
            if request is not None:
                request.end_sharing()  # as a change of its own does
                assert caches.region.get(PROJECT) == "x"
            caches.region.delete(PROJECT)
            assert not caches.kept


def test_caches_that_keep_nothing_cost_no_look() -> None:
    class NullBackend:
        pass

    def find() -> Any:
        raise AssertionError("asked")

    region = SimpleNamespace(key_mangler=None, actual_backend=NullBackend())
    request = Request()
    CacheViews([region], find).begin(request)
    assert request.view is None


@pytest.mark.parametrize("calls", ALIKE)
def test_calls_with_other_arguments_are_told_apart(
    coordinator: SharedMemory, form: str, calls: tuple[tuple[Any, Any], ...]
) -> None:
    def read() -> None:
        request = current.get()
        assert request is not None
        request.note(Reads(frozenset({"grants"}), frozenset({"grants:user:u"})))

    caches = Caches(coordinator, form)
    assert computed(caches.region, caches.request, read, calls) == [*calls], "and each is kept"
