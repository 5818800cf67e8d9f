"""Which process follows directories, and what their changes end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

pytest.importorskip("keystone")

from keystone.resource.config_backends import sql as config_backend

from keyfront.errors import CoordinatorError, DirectoryUnavailableError
from keyfront.gateway.keystone import directory_invalidation as module
from keyfront.gateway.keystone import readiness
from keyfront.gateway.keystone.directory_invalidation import (
    Directories,
    Followed,
    _Listener,
    _Manager,
)
from keyfront.middleware.ldap import change_notifications, directory
from keyfront.middleware.ldap.keystone import changed_entries
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.tokens.directory_leases import SECONDS, Leases
from keyfront.middleware.tokens.directory_leases import leases as process_leases
from keyfront.middleware.tokens.epochs import Epoch, slots
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.request import Request, current
from support.token_worlds import own_leases

FOUND = Followed(
    "domain", "name", SimpleNamespace(ttl=None, subscription=()),
    Reads(frozenset({"users"}), frozenset({"directory:name"})),
)  # fmt: skip
COUNT = 65536


class Coordinator:
    """Notes the slots that are touched."""

    slot_count = COUNT

    def __init__(self) -> None:
        self.touched: list[set[int]] = []

    def touch(self, touched: Any) -> None:
        self.touched.append(set(touched))


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[Leases]:
    with own_leases(tmp_path) as made:
        yield made


def made(folder: Path, coordinator: Any = None) -> Directories:
    return Directories(lambda: coordinator, lambda: None, lambda: folder)


def manager(folder: Path) -> _Manager:
    found = _Manager(made(folder, Coordinator()), lambda: folder)
    found._looked = time.monotonic() + 1000  # it has nothing to look for
    return found


def test_one_follows_and_the_next_takes_over(leases: Leases, tmp_path: Path) -> None:
    def said(seconds_ago: float) -> None:
        """Have the follower have said so long ago that it lives: this machine may stand still."""
        assert leases.until("follower") > 0
        leases.deadlines[leases._place("follower")] = time.monotonic() - seconds_ago

    first, second = manager(tmp_path), manager(tmp_path)
    first._turn()
    said(-60)
    second._turn()
    assert first._held is not None and second._held is None
    # It stands still: its lock is held, and it says nothing any more.
    said(10)
    second._turn()
    assert second._held is not None and second._held is not first._held
    said(-60)
    third = manager(tmp_path)
    third._turn()
    assert third._held is None  # somebody lives
    first._held.__exit__(None, None, None)  # it is killed: the kernel lets go of its lock
    third._turn()
    assert third._held is not None


def test_without_a_token_cache_nobody_follows(tmp_path: Path) -> None:
    alone = manager(tmp_path)
    alone._turn()
    assert alone._held is None


def is_touched(touched: set[int], *tags: str) -> bool:
    return set(slots(tags, COUNT)) <= touched


def test_a_user_ends_his_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator()
    mapping = SimpleNamespace(generator="sha256")
    ids = SimpleNamespace(generate_public_ID=lambda what: f"id of {what['local_id']}")
    keystone = SimpleNamespace(
        CONF=SimpleNamespace(identity_mapping=mapping),
        ProviderAPIs=SimpleNamespace(id_generator_api=ids),
    )
    monkeypatch.setattr(module, "import_keystone", lambda name: keystone)
    found = made(Path(), coordinator)
    found.changed(FOUND, None)
    (all_of_it,) = coordinator.touched
    assert is_touched(all_of_it, "any", "users", "project:domain", "directory:name")
    # One with an id of its own here, and as one of a driver whose ids are the directory's.
    found.changed(FOUND, ["jane"])
    assert is_touched(coordinator.touched[-1], "user:jane", "user:id of jane", "directory:name")
    assert not is_touched(coordinator.touched[-1], "project:domain")
    # However his id was written when he came, by which his tokens go on.
    mappings = {"id of Jane": {"local_id": "Jane"}, "id of joe": {"local_id": "joe"}}
    keystone.ProviderAPIs.id_mapping_api = SimpleNamespace(get_id_mapping=mappings.get)
    monkeypatch.setattr(found, "of_domain", lambda domain: FOUND)
    monkeypatch.setattr(found, "_may_be_any", lambda: True)

    def entries(user: str) -> set[str]:
        request, of = Request(), {"id": user, "domain_id": "domain"}
        found.note(request, SimpleNamespace(user_id=user, user=of, trust_id=None))
        return request.entries

    assert is_touched(coordinator.touched[-1], *entries("id of Jane"))
    assert is_touched(coordinator.touched[-1], *entries("jane"))  # whom no mapping is made for
    assert not is_touched(coordinator.touched[-1], *entries("id of joe"))
    found.changed(FOUND, [str(x) for x in range(module._USERS + 1)])
    assert coordinator.touched[-1] == all_of_it
    mapping.generator = "of.another.kind"
    found.changed(FOUND, ["jane"])
    assert coordinator.touched[-1] == all_of_it


@pytest.fixture
def options() -> Iterator[Session]:
    """Keystone's tables of domains' options: one of them is secret, and has none that is not."""
    tables: Any = [config_backend.WhiteListedConfig, config_backend.SensitiveConfig]
    engine = sqlalchemy.create_engine("sqlite://")
    with Session(engine) as session:
        for table, domain in zip(tables, ("broken", "secret"), strict=True):
            table.__table__.create(engine)
            for option in ("one", "other"):
                session.add(table(domain_id=domain, group="ldap", option=option, value="x"))
        session.commit()
        yield session
    engine.dispose()


def loading(
    monkeypatch: pytest.MonkeyPatch, driver: Any, session: Any = None
) -> tuple[Directories, list[str]]:
    """Directories of a Keystone whose domains' options are in its database, and those it loads."""
    loaded: list[str] = []

    class Configs(dict[str, Any]):
        configured = True

        def get_domain_driver(self, domain: str) -> None:
            if domain == "broken":
                raise ImportError("there is no such driver")
            loaded.append(domain)

    identity = SimpleNamespace(
        domain_specific_drivers_enabled=True, domain_configurations_from_database=True
    )
    domains = [{"id": name} for name in ("broken", "secret", "loaded", "without options")]
    resource = SimpleNamespace(list_domains=lambda: domains)
    config = SimpleNamespace(driver=driver)
    keystone = SimpleNamespace(
        CONF=SimpleNamespace(identity=identity),
        ProviderAPIs=SimpleNamespace(resource_api=resource, domain_config_api=config),
        session_for_read=lambda: nullcontext(session),
    )
    monkeypatch.setattr(module, "import_keystone", lambda name: keystone)
    found = made(Path(), Coordinator())
    found._identity = SimpleNamespace(domain_configs=Configs(loaded={}))
    return found, loaded


def test_a_domain_with_a_broken_configuration_keeps_no_other_from_being_followed(
    options: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, loaded = loading(monkeypatch, config_backend.DomainConfig(), options)
    for _ in range(2):
        found.load()
    assert sorted(loaded) == ["loaded", "loaded", "secret", "secret"]
    (said,) = caplog.messages
    assert said == "domain broken is not followed: ImportError: there is no such driver"


def test_domains_without_options_are_not_asked_for_them(
    options: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, loaded = loading(monkeypatch, config_backend.DomainConfig(), options)
    found.load()
    assert "without options" not in loaded
    # Of another backend it is not known which have any.
    found, loaded = loading(monkeypatch, object())
    found.load()
    assert sorted(loaded) == ["loaded", "secret", "without options"]


def test_who_knows_users_by_another_attribute_does_not_vouch_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is replaced, the follower takes the users for others."""
    monkeypatch.setattr(
        changed_entries, "Reading",
        lambda driver: SimpleNamespace(pool=driver.pool, subscription=(), ttl=None),
    )  # fmt: skip
    directories = made(tmp_path)

    def name(attribute: str) -> str:
        conf = SimpleNamespace(ldap=SimpleNamespace(url="ldap://a"))
        user = SimpleNamespace(id_attr=attribute)
        found = directories._made("domain", SimpleNamespace(pool=object(), conf=conf, user=user))
        assert found is not None
        return found.name

    assert name("cn") == name("cn") != name("uid")


def test_what_nobody_can_be_told_is_an_error() -> None:
    with pytest.raises(CoordinatorError):
        made(Path()).changed(FOUND, None)


def test_a_search_is_noted_with_its_server(leases: Leases, tmp_path: Path) -> None:
    directories, pool = made(tmp_path), object()
    directories._of_pool[id(pool)] = FOUND
    request = Request(recording=True, since=Epoch(1, 1))
    before = current.set(request)
    try:
        directories._searched(pool, "ldap://a 127.0.0.1")
        assert request.followed == {"name", "name ldap://a 127.0.0.1"}
        assert not request.unvouched
        directories._searched(object(), "ldap://a 127.0.0.1")
        assert request.unvouched, "nobody knows whose it is"
        FOUND.reading.ttl = 5.0
        directories._searched(pool, None)
        assert request.until <= time.monotonic() + 5
    finally:
        FOUND.reading.ttl = None
        current.reset(before)


def listener(directories: Directories) -> _Listener:
    reading = SimpleNamespace(ttl=None, subscription=(), kind=None, identity=None)
    return _Listener(directories, FOUND._replace(reading=reading))


def test_what_cannot_be_followed_stands_for_a_while_only(
    leases: Leases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directories = made(Path(), Coordinator())
    monkeypatch.setattr(directories, "changed", lambda found, users: None)
    one = listener(directories)
    for _ in range(3):
        one.impossible("s", "it offers none")
    assert len(caplog.records) == 1
    names = ("name", "name s")
    end = process_leases.until(names)
    # If its process is killed, that is over soon; another one that looks goes on.
    assert time.monotonic() + 5 < end < time.monotonic() + 60
    # Now it is followed, and what stood for longer than that ends.
    one.begins("s")
    assert process_leases.until(names) == 0.0
    now = time.monotonic()
    one.alive("s", now)
    assert process_leases.until(names) == now + SECONDS


def test_what_was_followed_before_is_not_trusted_unfollowed(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = made(Path(), Coordinator())
    monkeypatch.setattr(directories, "changed", lambda found, users: None)
    listener(directories).begins("s")
    # also not by another process, after the first is gone
    process_leases.leases = Leases(leases._path.parent)
    other = listener(directories)
    with pytest.raises(DirectoryUnavailableError, match="follow = never"):
        other.impossible("s", "its answer: insufficientAccessRights")
    assert process_leases.until(("name s",)) == 0.0
    other.impossible("another", "it offers none")
    assert process_leases.until(("name another",)) > time.monotonic()


class Pool:
    """A pool whose servers DNS names."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.addresses_are_told = True
        self.lookup_failures: list[str] = []

    def look_up(self) -> list[ServerURL]:
        if not self.hosts:
            raise DirectoryUnavailableError("no answer to the lookup")
        return [ServerURL.parse(f"ldaps://{host}") for host in self.hosts]

    def addresses(self, url: ServerURL) -> list[tuple[str, int]]:
        if not self.addresses_are_told:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [("192.0.2.1", url.port)]

    @property
    def servers(self) -> list[Any]:
        return [
            SimpleNamespace(url=ServerURL.parse(f"ldap://{x}"), state="down", last_error="away")
            for x in self.hosts
        ]


def test_those_are_followed_that_dns_names_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Follower(SimpleNamespace):
        running = True

        def __init__(self, name: str, *arguments: Any) -> None:
            super().__init__(name=name, is_stopped=False)

        def start(self) -> None: ...

        def stop(self) -> None:
            self.is_stopped = True

    monkeypatch.setattr(change_notifications, "Follower", Follower)
    pool = Pool("a", "b")
    reading = SimpleNamespace(
        ttl=None, subscription=(), pool=SimpleNamespace(get=lambda: pool), kind=None, identity=None
    )
    directories = made(tmp_path)
    of_domain = [FOUND._replace(reading=reading)]
    monkeypatch.setattr(directories, "drivers", lambda: [("domain", None)])
    monkeypatch.setattr(directories, "of_domain", lambda domain: of_domain[-1])
    chosen = _Manager(directories, lambda: tmp_path)

    def followed() -> dict[str, Any]:
        chosen._choose()
        return {x.name.partition(" ")[0]: x for x in chosen._followers.values()}

    first = followed()
    assert first.keys() == {"ldaps://a:636", "ldaps://b:636"}
    pool.hosts = ("b", "c")
    second = followed()
    assert second.keys() == {"ldaps://b:636", "ldaps://c:636"}
    assert first["ldaps://a:636"].is_stopped
    assert second["ldaps://b:636"] is first["ldaps://b:636"]
    # By another driver, whose password is another one: the former one's may be wrong by now.
    others = SimpleNamespace(get=lambda: pool)
    of_domain.append(FOUND._replace(reading=SimpleNamespace(**{**vars(reading), "pool": others})))
    third = followed()
    assert third.keys() == second.keys()
    assert all(x.is_stopped for x in second.values())
    assert not any(x.is_stopped for x in third.values())
    second = third
    # Who is followed stays so while nobody tells where he is.
    pool.addresses_are_told = False
    assert followed() == second
    # Where nobody is known, nobody can be followed.
    pool.hosts = ()
    assert followed() == {}
    assert "domain domain is not followed: no answer to the lookup" in caplog.text


def test_what_was_not_looked_up_yet_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(directory, "open_pools", lambda: [pool])
    readiness._ask_directories()
    pool.lookup_failures = ["ldap+srv://x: no answer"]
    with pytest.raises(DirectoryUnavailableError, match="no answer"):
        readiness._ask_directories()
    pool.hosts = ("a",)
    with pytest.raises(DirectoryUnavailableError, match=r"ldap://a:389: away; ldap\+srv://x"):
        readiness._ask_directories()
