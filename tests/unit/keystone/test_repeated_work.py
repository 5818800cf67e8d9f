"""What Keystone leaves out, and what it must not."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import inspect
import itertools
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("dogpile")

import sqlalchemy
from dogpile.cache import make_region
from sqlalchemy import event, orm

from keyfront.gateway.keystone import repeated_work, worker_memory
from keyfront.gateway.keystone.worker_memory import KeystoneMemory
from keyfront.middleware.tokens.epochs import Epoch, View
from keyfront.middleware.tokens.invalidation.rules import ANY, FIXED, REVOKED
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.request import Fill, Request, current

# The numbers of the last change before a request.
SHARED, LATER, NEWEST = 5, 6, 7
TODAY = datetime.date(2026, 11, 23)


@contextlib.contextmanager
def request(number: int | None = SHARED) -> Iterator[Request]:
    """A request; one without a number shares nothing with others."""
    one = Request()
    if number is not None:
        coordinator: Any = SimpleNamespace(slot_count=65536, fresh_now=lambda epoch, slots: False)
        seen = Epoch(1, number)
        one.view = View(coordinator, (number,) * len(FIXED), seen, seen)
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Users:
    """Keystone's drivers for users."""

    def __init__(self) -> None:
        class Identity:
            def _check_password(self, password: str, user_ref: Any) -> bool:
                return password == "right"

        class ShadowUsers:
            written: list[str] = []

            def set_last_active_at(self, user_id: str) -> None:
                self.written.append(user_id)

            def _get_user(self, session: Any, user_id: str) -> Any:
                return session[user_id]

        repeated_work.know_who_is_active(Identity, ShadowUsers)
        self._identity, self._shadow = Identity(), ShadowUsers()

    def compare(self, user: str, day: object) -> bool:
        row = SimpleNamespace(id=user, last_active_at=day)
        return self._identity._check_password("right", row)

    def read(self, user: str, day: object) -> None:
        row = SimpleNamespace(id=user, last_active_at=day)
        assert self._shadow._get_user({user: row}, user) is row

    def write(self, user: str) -> bool:
        """Say that he was active today; whether that was written."""
        before = len(self._shadow.written)
        self._shadow.set_last_active_at(user)
        return len(self._shadow.written) > before


def test_the_day_of_a_login_is_written_unless_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_work, "_today", lambda: TODAY)
    users = Users()
    with request():
        assert users.compare("a", TODAY)
        assert not users.write("a")
        # what was read is of one login only
        assert users.write("a")
    for day in (None, TODAY - datetime.timedelta(1), TODAY + datetime.timedelta(1)):
        with request():
            users.compare("a", day)
            assert users.write("a")
    with request():
        users.compare("a", TODAY)
        assert users.write("b")
        assert users.write("a")
    with request() as one:
        users.compare("a", TODAY)
        one.writes()
        assert users.write("a")
    with request():
        users.compare("a", TODAY)
    with request():
        assert users.write("a")
    users.compare("a", TODAY)
    assert users.write("a")


def test_so_it_is_of_a_user_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_work, "_today", lambda: TODAY)
    users = Users()
    with request() as one:
        users.read("a", TODAY)
        assert not users.write("a")
        users.read("a", TODAY - datetime.timedelta(1))
        assert users.write("a")
        users.read("a", TODAY)
        users.read("b", TODAY)
        assert users.write("a")
        users.read("a", TODAY)
        one.writes()
        assert users.write("a")
    users.read("a", TODAY)
    assert users.write("a")


def test_the_day_is_written_by_one_statement(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as Keystone writes it, who reads the user first."""
    pytest.importorskip("keystone")
    import keystone.federation.backends.sql  # noqa: F401  (for its tables)
    from keystone.identity.backends import sql_model
    from keystone.identity.shadow_backends import sql as shadow

    engine = sqlalchemy.create_engine("sqlite://")
    stack.callback(engine.dispose)
    sql_model.sql.ModelBase.metadata.create_all(engine)
    with orm.Session(engine) as session:
        session.add(sql_model.User(id="u", domain_id="d"))
        session.add(sql_model.User(id="other", domain_id="d"))
        session.commit()
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))

    @contextlib.contextmanager
    def session_for_write() -> Iterator[Any]:
        with orm.Session(engine) as session, session.begin():
            yield session

    class Identity:
        def _check_password(self, password: str, user_ref: Any) -> bool:
            return True

    stock = inspect.unwrap(shadow.ShadowUsers.set_last_active_at)

    class ShadowUsers:
        set_last_active_at = stock

        def _get_user(self, session: Any, user_id: str) -> Any:
            return session[user_id]

    ours = type("ShadowUsers", (ShadowUsers,), {})
    sql: Any = SimpleNamespace(session_for_write=session_for_write)
    monkeypatch.setattr(shadow.sql, "session_for_write", session_for_write)
    repeated_work.know_who_is_active(Identity, ours, sql=sql, user=sql_model.User)

    def written(driver: Any) -> list[Any]:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("UPDATE user SET last_active_at = NULL"))
        del statements[:]
        with request():
            driver.set_last_active_at("u")
            driver.set_last_active_at("nobody")
        how = [statement.partition(" ")[0] for statement in statements]
        with engine.connect() as connection:
            table = sql_model.User.__table__
            rows = connection.execute(sqlalchemy.select(table).order_by(table.c.id)).all()
        return [how, rows]

    monkeypatch.setattr(repeated_work, "inactivity_counts", lambda: False)
    as_stock, as_ours = written(ShadowUsers()), written(ours())
    assert as_ours == [["UPDATE", "UPDATE"], as_stock[1]]
    assert as_stock[0].count("SELECT") > 1
    # where it may enable somebody, others are told of whom: it is Keystone's own
    monkeypatch.setattr(repeated_work, "inactivity_counts", lambda: True)
    assert written(ours()) == as_stock


def test_a_time_is_read_once() -> None:
    read: list[object] = []

    def parse_isotime(timestr: Any) -> datetime.datetime:
        read.append(timestr)
        return datetime.datetime.fromisoformat(timestr)

    timeutils = SimpleNamespace(parse_isotime=parse_isotime)
    repeated_work.read_times_once(timeutils)
    repeated_work.read_times_once(timeutils)
    for _ in range(3):
        assert timeutils.parse_isotime("2026-11-23T12:00:00") == THEN
    assert len(read) == 1
    for wrong in ([], None, "x" * 1000):
        for _ in range(2):  # what is no time is refused each time
            with pytest.raises((TypeError, ValueError)):
                timeutils.parse_isotime(wrong)
    assert len(read) == 7


def outcome(deed: Callable[..., Any], *values: Any) -> Any:
    """Return what a call returns, or the type of what it raises."""
    try:
        return deed(*values)
    except Exception as error:
        return type(error)


def test_identifiers_of_tokens_are_turned_once() -> None:
    payload = pytest.importorskip("keystone.token.token_formatters").BasePayload
    theirs = {name: vars(payload)[name].__func__ for name in repeated_work._UUIDS}
    copied = SimpleNamespace(
        BasePayload=type("Copied", (), {name: classmethod(one) for name, one in theirs.items()})
    )
    repeated_work.turn_identifiers_once(copied)
    ours = copied.BasePayload
    before = dict(vars(ours))
    repeated_work.turn_identifiers_once(copied)
    assert dict(vars(ours)) == before
    ids = [uuid.uuid4() for _ in range(3)]
    values = [
        *(form for one in ids for form in (one.hex, one.hex.upper(), str(one), one.bytes)),
        *("", "default", "{" + ids[0].hex + "}", "é" * 32, b"", b"x" * 15, "a" * 1000),
        *(None, 7, [], bytearray(ids[0].bytes), type("Text", (str,), {})(ids[0].hex)),
    ]
    for name, turn in theirs.items():
        made = 0
        for value in values * 2:
            assert outcome(getattr(ours, name), value) == outcome(turn, payload, value), value
            made += type(outcome(turn, payload, value)) in (str, bytes)
        assert made
    counted: list[str] = []

    class Other:
        @classmethod
        def convert_uuid_hex_to_bytes(cls, value: str) -> bytes:
            counted.append(value)
            return uuid.UUID(value).bytes

    repeated_work.turn_identifiers_once(SimpleNamespace(BasePayload=Other))
    for _ in range(2):
        Other.convert_uuid_hex_to_bytes(ids[0].hex)
    assert len(counted) == 2, "it does more than it is known to do"


def test_what_is_a_coroutine_is_asked_once_of_each_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flask = pytest.importorskip("flask")
    asked: list[object] = []

    def is_one(function: object) -> bool:
        asked.append(function)
        return inspect.iscoroutinefunction(function)

    monkeypatch.setattr("flask.app.iscoroutinefunction", is_one)
    application = flask.Flask("one")
    application.async_to_sync = lambda function: "made"
    repeated_work.know_what_is_a_coroutine(application)

    def plain() -> None: ...

    async def coroutine() -> None: ...

    method = TODAY.isoformat
    for _ in range(3):
        assert application.ensure_sync(plain) is plain
        assert application.ensure_sync(coroutine) == "made"
        assert application.ensure_sync(method) is method
    assert asked.count(plain) == 1
    assert asked.count(coroutine) == asked.count(method) == 3

    class Other(flask.Flask):  # type: ignore[misc, name-defined]
        def ensure_sync(self, function: Any) -> Any:
            return super().ensure_sync(function)

    other = Other("two")
    repeated_work.know_what_is_a_coroutine(other)
    assert "ensure_sync" not in vars(other)
    repeated_work.know_what_is_a_coroutine(SimpleNamespace())


def test_signatures_are_looked_up_once() -> None:
    module = SimpleNamespace(inspect=inspect, getfullargspec=inspect.getfullargspec)
    repeated_work.look_at_signatures_once(module)

    class Check:
        def __call__(self, target: Any, creds: Any, enforcer: Any, rule: Any = None) -> None: ...

    for _ in range(2):
        for look in (module.inspect.getfullargspec, module.getfullargspec):
            assert look(Check().__call__) == inspect.getfullargspec(Check().__call__)
            assert look(request) == inspect.getfullargspec(request)
    assert module.inspect.signature is inspect.signature
    other = SimpleNamespace()
    repeated_work.look_at_signatures_once(other)
    assert not vars(other)


def test_a_user_is_read_by_one_statement(stack: ExitStack) -> None:
    pytest.importorskip("keystone")
    import keystone.federation.backends.sql  # noqa: F401  (for its tables)
    from keystone.identity.backends import sql_model

    engine = sqlalchemy.create_engine("sqlite://")
    stack.callback(engine.dispose)
    sql_model.sql.ModelBase.metadata.create_all(engine)
    with orm.Session(engine) as session:
        user = sql_model.User(id="u", domain_id="d", _enabled=True)
        session.add(user)
        for number, value in (("1000", True), ("1001", False)):
            user._resource_option_mapper[number] = sql_model.UserOption(
                option_id=number, option_value=value
            )
        session.commit()
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))

    class Driver:
        def _get_user(self, session: Any, user_id: str) -> Any:
            return session.get(sql_model.User, user_id)

    def read(user: str) -> Any:
        with orm.Session(engine) as session:
            found = Driver()._get_user(session, user)
        if found is None:
            return None
        options = {n: o.option_value for n, o in found._resource_option_mapper.items()}
        return found.id, found._enabled, found.local_user, options

    expected = read("u")
    assert expected == ("u", True, None, {"1000": True, "1001": False})
    assert len(statements) > 1
    repeated_work.read_at_once(Driver, "_get_user", sql_model.User)
    statements.clear()
    assert read("u") == expected
    assert len(statements) == 1
    assert read("nobody") is None
    # who is read to be changed is one object
    with orm.Session(engine) as session:
        first = Driver()._get_user(session, "u")
        first._enabled = False
        assert Driver()._get_user(session, "u") is first
        assert not first._enabled


class People:
    """Keystone's drivers for users, one of whom is there."""

    def __init__(self) -> None:
        asked: list[str] = []
        self.asked = asked

        def read(user_id: str) -> Any:
            asked.append(user_id)
            if user_id == "nobody":
                raise LookupError
            return {"id": user_id, "options": {}}

        class ShadowUsers:
            def get_user(self, user_id: str) -> Any:
                return read(user_id)

        class Identity:
            def authenticate(self, user_id: str, password: str) -> Any:
                return read(user_id)

            def get_user_by_name(self, name: str, domain: str) -> Any:
                return read(name)

            def get_user(self, user_id: str) -> Any:
                return read(user_id)

        self.shadow = ShadowUsers()
        self.identity = Identity()
        repeated_work.tell_of_users_once(Identity, ShadowUsers)
        self.asked.clear()


@pytest.mark.parametrize("first", ["authenticate", "get_user_by_name", "get_user", "shadow"])
def test_a_user_is_told_of_once_in_a_login(first: str) -> None:
    people = People()
    tell = {
        "authenticate": lambda: people.identity.authenticate("u", "secret"),
        "get_user_by_name": lambda: people.identity.get_user_by_name("u", "d"),
        "get_user": lambda: people.identity.get_user("u"),
        "shadow": lambda: people.shadow.get_user("u"),
    }
    with request() as one:
        one.users = {}
        told = tell[first]()
        told["options"]["changed"] = True
        people.asked.clear()
        for driver in (people.identity, people.shadow):
            again = driver.get_user("u")
            assert again == {"id": "u", "options": {}}
            again["options"]["changed"] = True
        assert people.asked == []
        # others are read, and who logs in always is
        people.identity.get_user("other")
        people.identity.authenticate("u", "secret")
        people.identity.get_user_by_name("u", "d")
        assert people.asked == ["other", "u", "u"]
        with pytest.raises(LookupError):
            people.shadow.get_user("nobody")
    with request() as one:
        one.users = {}
        people.asked.clear()
        people.shadow.get_user("u")
        assert people.asked == ["u"]


def test_no_user_is_remembered_but_in_a_login_that_has_written_nothing() -> None:
    people = People()
    with request() as one:
        for _ in range(2):
            people.identity.get_user("u")
        one.users = {}
        people.identity.get_user("u")
        one.writes()
        for _ in range(2):
            people.identity.get_user("u")
    assert people.asked == ["u"] * 5


def test_what_is_made_of_a_remembered_user_goes_by_him() -> None:
    people = People()
    with request() as one:
        one.users = {}
        people.identity.get_user("u")
        fill = Fill("a value")
        one.fills.append(fill)
        people.identity.get_user("u")
        assert fill.families == {"users"}
        assert fill.tags == {"user:u"}
    assert people.asked == ["u"]


@pytest.fixture
def memory() -> KeystoneMemory:
    return KeystoneMemory(1 << 20, 30.0)


class Roles:
    """As Keystone's driver for roles."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.implied = ["one"]

    def list_implied_roles(self, prior_role_id: str) -> list[str]:
        self.asked.append(prior_role_id)
        if prior_role_id == "none":
            raise LookupError
        request = current.get()
        if request is not None:  # as the database hooks do
            request.note(Reads(frozenset({"roles"}), frozenset({"roles"})))
        return list(self.implied)


Roles.list_implied_roles.__module__ = "keystone.assignment.role_backends.sql"


def test_what_is_the_same_for_all_users_is_kept(memory: KeystoneMemory) -> None:
    class Driver(Roles):
        pass

    repeated_work.keep(memory, Driver, "list_implied_roles")
    repeated_work.keep(memory, Driver, "list_implied_roles")
    roles = Driver()
    for _ in range(2):
        with request() as one:
            found = roles.list_implied_roles("r")
            assert found == ["one"]
            found.append("changed")
            assert one.reads == set()
    assert roles.asked == ["r"]
    roles.implied = ["other"]
    with request(LATER):
        assert roles.list_implied_roles("r") == ["other"]
    # what others do not share, or may be from the past, is nobody else's
    for number, unvouched in ((None, False), (NEWEST, True)):
        for _ in range(2):
            roles.asked.clear()
            with request(number) as one:
                one.unvouched = unvouched
                roles.list_implied_roles("r")
            assert roles.asked == ["r"]
    roles.asked.clear()
    assert roles.list_implied_roles("r") == ["other"]
    assert roles.asked == ["r"]
    for _ in range(2):
        with request(), pytest.raises(LookupError):
            roles.list_implied_roles("none")
    # what a route shows goes by what it is made of
    with request(LATER) as one:
        one.reading = True
        assert roles.list_implied_roles("r") == ["other"]
        assert one.reads == {"roles"}


def test_what_a_change_of_its_own_came_between_is_not_kept(memory: KeystoneMemory) -> None:
    class Driver(Roles):
        def list_implied_roles(self, prior_role_id: str) -> list[str]:
            own = current.get()
            assert own is not None
            own.end_sharing()
            return super().list_implied_roles(prior_role_id)

    Driver.list_implied_roles.__module__ = Roles.list_implied_roles.__module__
    repeated_work.keep(memory, Driver, "list_implied_roles")
    roles = Driver()
    for _ in range(2):
        with request():
            roles.list_implied_roles("r")
    assert roles.asked == ["r", "r"]


@pytest.mark.parametrize(
    ("url", "shared"),
    [
        ("http://a/", True),
        ("http://a/$(project_id)s", True),
        ("http://a/$(user_id)s", False),
        ("http://a/%(user_id).1s", False),
        ("http://a/%(user_id)r", False),
        ("http://a/%(user_id)a", False),
    ],
)
def test_a_catalog_that_names_no_user_is_for_all(
    memory: KeystoneMemory, url: str, shared: bool
) -> None:
    asked = []

    class Catalog:
        def get_v3_catalog(self, user_id: str, project_id: str) -> list[str]:
            asked.append(str.__str__(user_id))
            # as keystone.common.utils.format_url()
            values = {"user_id": user_id, "project_id": project_id}
            return [url.replace("$(", "%(") % values]

    compute, expecting = Catalog.get_v3_catalog, Catalog()
    Catalog.get_v3_catalog.__module__ = "keystone.catalog.backends.sql"
    driver = Catalog()
    repeated_work.keep_catalogs_of_projects(memory, Catalog)
    for user, project in (("ua", "p"), ("vb", "p"), ("ua", "q"), ("vb", "q")):
        with request():
            found = driver.get_v3_catalog(user, project)
        assert found == compute(expecting, user, project)
        assert [type(one) for one in found] == [str]
    # four of them are asked for to compare with
    assert len(asked) == 4 + (2 if shared else 4)


class Revocations:
    """Keystone's driver for revocations on a database; it finds ``found``."""

    def __init__(self, memory: KeystoneMemory | None = None) -> None:
        metadata = sqlalchemy.MetaData()
        column = sqlalchemy.Column("issued_before", sqlalchemy.DateTime)
        self._table = sqlalchemy.Table("revocation_event", metadata, column)
        self.engine = sqlalchemy.create_engine(
            "sqlite://", poolclass=sqlalchemy.pool.StaticPool
        )
        metadata.create_all(self.engine)
        self.questions = 0
        event.listen(self.engine, "before_cursor_execute", self._count)

        class Revoke:
            def _list_token_events(self, token: Any) -> list[str]:
                return ["found"]

        backend = SimpleNamespace(
            Revoke=Revoke, RevocationEvent=SimpleNamespace(__table__=self._table)
        )
        self.is_younger = repeated_work.skip_empty_lists(backend, self, 30.0, memory)
        assert repeated_work.skip_empty_lists(backend, self, 30.0) is self.is_younger
        self._driver = Revoke()

    def _count(self, *given: Any) -> None:
        self.questions += 1

    def __enter__(self) -> Revocations:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def session_for_read(self) -> Iterator[Any]:
        with orm.Session(self.engine) as session:
            yield session

    def revoke(self, moment: datetime.datetime) -> None:
        with self.engine.begin() as connection:
            connection.execute(self._table.insert(), {"issued_before": moment})

    def looked_for(self, issued: datetime.datetime) -> bool:
        """Whether the database was asked for what revokes a token of that age."""
        found = self._driver._list_token_events({"issued_at": issued})
        assert found in ([], ["found"])
        return bool(found)


THEN = datetime.datetime(2026, 11, 23, 12, 0, 0)
SECOND = datetime.timedelta(seconds=1)


def test_no_revocations_are_looked_for_that_are_older_than_the_token(stack: ExitStack) -> None:
    revocations = stack.enter_context(Revocations())
    with request():
        assert not revocations.looked_for(THEN)
        assert revocations.questions == 1
    with request() as one:
        one.fills.append(Fill("a value"))
        assert not revocations.looked_for(THEN)
        assert revocations.questions == 1
        # what is made of it goes by it though no statement was executed
        assert one.fills[0].tags == {ANY}
    revocations.revoke(THEN)
    revocations.questions = 0
    with request(LATER):
        # to the second, and one more, since databases round
        for seconds, looks in ((-1, True), (0, True), (1, True), (2, False)):
            assert revocations.looked_for(THEN + seconds * SECOND) is looks
        assert revocations.questions == 1


def test_a_change_that_revokes_nothing_has_nothing_asked(stack: ExitStack) -> None:
    """Of ten a second in a cloud: each would cost each worker a statement."""
    revocations = stack.enter_context(Revocations())
    coordinator: Any = SimpleNamespace(slot_count=65536, fresh_now=lambda epoch, slots: False)
    revoked = FIXED.index(REVOKED)

    def looked_for(revocation: int, other: int) -> bool:
        """In a state of which these are the numbers of the last changes."""
        numbers = [other] * len(FIXED)
        numbers[0] = 1
        numbers[revoked] = revocation
        seen = Epoch(1, other)
        one = Request()
        one.view = View(coordinator, tuple(numbers), seen, seen)
        token = current.set(one)
        try:
            return revocations.looked_for(THEN)
        finally:
            current.reset(token)

    assert not looked_for(5, 5)
    assert not looked_for(5, 6)
    assert not looked_for(5, 7)
    assert revocations.questions == 1
    revocations.revoke(THEN)
    assert looked_for(8, 8)
    assert revocations.questions > 1


def test_what_is_known_of_revocations_goes_by_its_name(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    revocations = stack.enter_context(Revocations())
    with request():
        assert not revocations.looked_for(THEN)
    revocations.revoke(THEN)
    with request(LATER):
        assert revocations.looked_for(THEN)
    # of a state that is not known by a name others share, nothing is known
    with request(None):
        assert revocations.looked_for(THEN + 9 * SECOND)
    assert revocations.looked_for(THEN + 9 * SECOND)
    now = time.monotonic()
    with request(LATER) as one:
        assert not revocations.looked_for(THEN + 9 * SECOND)
        # what is made of it ends with it
        assert now < one.until < now + 31
    # and not by name alone
    with revocations.engine.begin() as connection:
        connection.execute(sqlalchemy.text("DELETE FROM revocation_event"))
    monkeypatch.setattr(repeated_work.time, "monotonic", lambda: now + 31)
    with request(LATER):
        assert not revocations.looked_for(THEN)


def test_what_may_be_from_the_past_is_not_kept(stack: ExitStack) -> None:
    revocations = stack.enter_context(Revocations())
    with request() as one:
        one.unvouched = True
        assert not revocations.looked_for(THEN)
    revocations.revoke(THEN)
    with request():
        assert revocations.looked_for(THEN)


@pytest.fixture
def workers(tmp_path: Path, stack: ExitStack) -> Callable[..., Revocations]:
    """Makes workers of one node, each with a database of its own."""
    (tmp_path / "node").mkdir(mode=0o700)

    def make(form: str = "") -> Revocations:
        node = NodeCache(tmp_path / "node", size=1 << 20, values=1 << 18, flight_timeout=1)
        node.start(bytes(32))
        memory = KeystoneMemory(1 << 20, 30.0, lambda: node, form)
        return stack.enter_context(Revocations(memory))

    return make


def test_a_fresh_worker_is_told_of_revocations_by_others(
    workers: Callable[..., Revocations], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, fresh, stranger = workers(), workers(), workers("of another version")
    one.revoke(THEN)
    with request():
        assert one.looked_for(THEN)
    with request() as asking:
        asking.fills.append(Fill("a value"))
        assert fresh.looked_for(THEN)
        assert not fresh.looked_for(THEN + 9 * SECOND)
        assert fresh.questions == 0
        # what it decides goes by revocations, and ends with what it was told
        assert asking.fills[0].tags == {ANY}
        assert asking.until < time.monotonic() + 31
        assert not stranger.looked_for(THEN)
        assert stranger.questions == 1
    # of another state it knows nothing
    with request(LATER):
        assert not fresh.looked_for(THEN + 9 * SECOND)
        assert fresh.questions == 1
    # nor when it is too long ago, whoever has asked
    now = time.monotonic()
    late = workers()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    with request():
        assert not late.looked_for(THEN)
        assert late.questions == 1


def test_what_may_be_from_the_past_is_told_to_nobody(
    workers: Callable[..., Revocations],
) -> None:
    one, fresh = workers(), workers()
    one.revoke(THEN)
    with request() as doubtful:
        doubtful.unvouched = True
        assert one.looked_for(THEN)
    with request(None):  # of a state without a name
        assert one.looked_for(THEN)
    with request():
        assert not fresh.looked_for(THEN)
        assert fresh.questions == 1


def _positional(a: int, b: int = 2, c: int = 3) -> None: ...


def _only(a: int, /, b: int = 2) -> None: ...


def _many(a: int, *more: int) -> None: ...


def _named(a: int, *, b: int = 2) -> None: ...


def _any(a: int, **more: int) -> None: ...


def _none() -> None: ...


@pytest.mark.parametrize("function", [_positional, _only, _many, _named, _any, _none])
def test_arguments_are_bound_as_by_the_package(function: Any) -> None:
    asked = []

    def fix(args: Any, kwargs: Any, sig: inspect.Signature) -> Any:
        asked.append(args)
        bound = sig.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    package = SimpleNamespace(fix=fix)
    repeated_work.bind_at_once(package)
    ours = package.fix
    repeated_work.bind_at_once(package)
    assert package.fix is ours
    signature = inspect.signature(function)
    for given in itertools.product(
        [(), (1,), (1, 5), (1, 5, 6), (1, 5, 6, 7)],
        [{}, {"a": 1}, {"b": 8}, {"x": 9}, {"a": 1, "b": 8}, {"b": 8, "c": 9}, {"b": 8, "": 9}],
    ):
        outcomes = []
        for one in (fix, ours):
            try:
                outcomes.append(one(*given, signature))
            except TypeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], given
    if function is _positional:
        asked.clear()
        assert ours((1, 5, 6), {}, signature) == ((1, 5, 6), {})
        assert ours((1,), {}, signature) == ((1, 2, 3), {})
        assert ours((1,), {"c": 6}, signature) == ((1, 2, 6), {})
        assert ours((), {"b": 5, "a": 1}, signature) == ((1, 5, 3), {})
        assert not asked
    # Other releases are left alone.
    older = SimpleNamespace()
    repeated_work.bind_at_once(older)
    assert not vars(older)


def test_a_session_gives_way_to_greenlets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    engines = SimpleNamespace(_thread_yield=lambda connection, record: given.append(record))
    repeated_work.yield_to_greenlets_only(engines)
    ours = engines._thread_yield
    repeated_work.yield_to_greenlets_only(engines)
    assert engines._thread_yield is ours
    ours(None, 1)
    assert not given
    # As gevent and eventlet do.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    ours(None, 2)
    assert given == [2]


def test_it_is_the_name_that_oslo_db_listens_with() -> None:
    engines: Any = pytest.importorskip("oslo_db.sqlalchemy.engines")
    kept = engines._thread_yield
    try:
        repeated_work.yield_to_greenlets_only(engines)
        engine = engines.create_engine("sqlite://")
        listeners = list(engine.pool.dispatch.checkin)
        assert engines._thread_yield in listeners and kept not in listeners
        engine.dispose()
    finally:
        engines._thread_yield = kept


class Token:
    """As Keystone's TokenModel."""

    asked = 0

    def __init__(self, user: str, project: str) -> None:
        self.user_id, self.project_id = user, project

    def _get_project_roles(self) -> list[str]:
        PROVIDERS.get_role(self)
        return [f"{self.user_id} on {self.project_id}"]


class OtherToken(Token):
    def _get_project_roles(self) -> list[str]:
        return [f"{self.user_id} on {self.project_id} {self.asked}"]


def _count(token: Token) -> None:
    type(token).asked += 1


PROVIDERS = SimpleNamespace(get_role=_count)


def test_roles_on_a_project_are_kept_for_user_and_project() -> None:
    memory = KeystoneMemory(1 << 20, 30.0)
    model: Any = type("Model", (Token,), {"_get_project_roles": Token._get_project_roles})
    model._get_project_roles.__module__ = "keystone.models.token_model"
    repeated_work.keep_roles_on_projects(memory, model)
    ours = model._get_project_roles
    repeated_work.keep_roles_on_projects(memory, model)
    assert model._get_project_roles is ours
    with request():
        for _ in range(3):
            for user, project in itertools.product("uv", "pq"):
                found = model(user, project)._get_project_roles()
                assert found == [f"{user} on {project}"]
                # It is the token's own.
                found.append("more")
    assert model.asked == 4
    with request(LATER):
        model("u", "p")._get_project_roles()
    assert model.asked == 5
    # Outside of a request.
    assert model("u", "p")._get_project_roles() == ["u on p"]
    assert model.asked == 6


def test_roles_of_another_keystone_are_left_alone() -> None:
    method = OtherToken._get_project_roles
    repeated_work.keep_roles_on_projects(KeystoneMemory(1 << 20, 30.0), OtherToken)
    assert OtherToken._get_project_roles is method


def test_roles_of_this_keystone_are_kept() -> None:
    models: Any = pytest.importorskip("keystone.models.token_model")
    names = inspect.unwrap(models.TokenModel._get_project_roles).__code__.co_names
    assert set(names) <= repeated_work._ROLES_GO_BY


def test_a_token_that_is_being_issued_is_looked_for_without_a_key() -> None:
    asked = []

    def compute(self: Any, values: str) -> None:
        asked.append(("at once", values))

    def check_revocation_v3(self: Any, values: str) -> None:
        asked.append(("by its key", values))

    check_revocation_v3.original = compute  # type: ignore[attr-defined]
    manager: Any = type("Manager", (), {"check_revocation_v3": check_revocation_v3})
    repeated_work.look_for_new_tokens_at_once(manager)
    ours = manager.check_revocation_v3
    repeated_work.look_for_new_tokens_at_once(manager)
    assert manager.check_revocation_v3 is ours
    assert ours.original is compute
    with request() as one:
        manager().check_revocation_v3("given")
        one.accepting = True
        manager().check_revocation_v3("new")
        one.view = None
        manager().check_revocation_v3("alone")
    manager().check_revocation_v3("outside")
    assert asked == [
        ("by its key", "given"), ("at once", "new"), ("by its key", "alone"),
        ("by its key", "outside"),
    ]  # fmt: skip
    other: Any = type("Manager", (), {"check_revocation_v3": compute})
    repeated_work.look_for_new_tokens_at_once(other)
    assert other.check_revocation_v3 is compute


def test_a_token_that_is_younger_than_all_revocations_is_looked_for_without_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is made of the check ends with what the token depends on, as if it were kept."""
    monkeypatch.setattr(worker_memory, "token_tags", lambda model: iter(model))
    asked = []

    def compute(self: Any, values: Any) -> None:
        asked.append("at once")
        one = current.get()
        assert one is not None
        one.note(Reads(frozenset({ANY}), frozenset({ANY})))
        if values["issued_at"] == "refused":
            raise KeyError("refused")

    def check_revocation_v3(self: Any, values: Any) -> None:
        asked.append("by its key")

    check_revocation_v3.original = compute  # type: ignore[attr-defined]
    manager: Any = type("Manager", (), {"check_revocation_v3": check_revocation_v3})
    repeated_work.look_for_new_tokens_at_once(manager, lambda one, issued: issued != "old")
    with request() as one:
        one.checked = ["audit:a", "user:u"]
        one.fills.append(Fill("a value"))
        manager().check_revocation_v3({"issued_at": "young"})
        assert one.fills[-1].tags == {"audit:a", "user:u"}
        with pytest.raises(KeyError, match="refused"):
            manager().check_revocation_v3({"issued_at": "refused"})
        assert [fill.key for fill in one.fills] == ["a value"]
        manager().check_revocation_v3({"issued_at": "old"})
        manager().check_revocation_v3("of another kind")
        one.view = None
        manager().check_revocation_v3({"issued_at": "young"})
    assert asked == ["at once", "at once", "by its key", "by its key", "by its key"]


def test_a_token_is_known_to_be_younger_in_the_state_that_was_asked_for_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    revocations = stack.enter_context(Revocations())
    younger = revocations.is_younger
    with request() as one:
        assert not younger(one, THEN), "nobody has asked yet"
        assert not revocations.looked_for(THEN)
        assert younger(one, THEN)
        revocations.revoke(THEN)
    with request(LATER) as one:
        assert not younger(one, THEN + 3 * SECOND), "nobody has asked in this state"
        assert revocations.looked_for(THEN)
        assert younger(one, THEN + 3 * SECOND)
        assert not younger(one, THEN + SECOND)
        later = time.monotonic() + 31
        monkeypatch.setattr(repeated_work.time, "monotonic", lambda: later)
        assert not younger(one, THEN + 3 * SECOND)
        one.view = None
        assert not younger(one, THEN + 3 * SECOND)


def test_times_are_written_once() -> None:
    """As Keystone writes them, which keeps the zone of each."""
    utils: Any = pytest.importorskip("keystone.common.utils")
    write = inspect.unwrap(utils.isotime)
    asked = []

    def isotime(at: Any = None, subsecond: bool = False) -> Any:
        asked.append(at)
        return write(at, subsecond)

    of_another = SimpleNamespace(isotime=isotime)
    repeated_work.write_times_once(of_another)
    assert of_another.isotime is isotime, "it uses names that are not known"
    ours = SimpleNamespace(isotime=write)
    repeated_work.write_times_once(ours)
    once = ours.isotime
    repeated_work.write_times_once(ours)
    assert ours.isotime is once
    there = datetime.timezone(datetime.timedelta(hours=2), "THERE")
    times = [
        *(THEN, THEN.replace(microsecond=7), THEN.replace(tzinfo=datetime.UTC)),
        *(THEN.replace(tzinfo=datetime.UTC).astimezone(there), THEN + SECOND),
        THEN.replace(tzinfo=datetime.timezone(datetime.timedelta(0), "ZERO")),
    ]
    for at in [*times, *reversed(times)]:
        for subsecond in (False, True):
            assert once(at, subsecond=subsecond) == write(at, subsecond)
    assert once() >= once(datetime.datetime(2026, 11, 28)), "the present"


class Traced:
    """As much of Keystone's module of managers as traces its calls."""

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("keystone.common.manager")
        self.lines: list[str] = []

    def manager(self) -> Any:
        class One(self.module.Manager):  # type: ignore[misc, name-defined]
            driver_namespace = "none"
            _provides_api = "none"

            def __init__(self) -> None:
                """Do without a driver."""

            def deed(self, number: int, *, more: int = 0) -> int:
                if number < 0:
                    raise ValueError(number)
                return number + more

            deed.original = "kept"

        return One


def test_methods_of_managers_are_called_themselves_unless_they_are_traced(
    caplog: pytest.LogCaptureFixture, stack: ExitStack
) -> None:
    pytest.importorskip("keystone")
    traced = Traced()
    kind = traced.manager()
    wrapped = kind.deed
    repeated_work.call_at_once(traced.module)
    ours = kind.deed
    assert ours is not wrapped
    repeated_work.call_at_once(traced.module)
    assert kind.deed is ours
    assert ours.original == "kept" and ours.__name__ == "deed"
    logger = traced.module.LOG.logger
    steps: list[str] = []

    def follow(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            steps.append(frame.f_code.co_name)

    sys.setprofile(follow)
    try:
        found = kind().deed(1, more=2)
    finally:
        sys.setprofile(None)
    assert found == 3
    assert "deed" in steps and "wrapped" not in steps
    with pytest.raises(ValueError, match="-1"):
        kind().deed(-1)
    before = logger.level
    stack.callback(logger.setLevel, before)
    caplog.set_level(traced.module.log.TRACE, logger.name)
    assert kind().deed(1, more=2) == 3
    told = [record.getMessage() for record in caplog.records if "deed" in record.getMessage()]
    assert [line.startswith("CALL =>") for line in told] == [True, False]


def test_managers_that_are_traced_otherwise_are_left_alone() -> None:
    module = SimpleNamespace(Manager=type("Manager", (), {"deed": lambda self: 1}))
    deed = module.Manager.deed
    repeated_work.call_at_once(module)

    class _TraceMeta(type):
        @staticmethod
        def wrapper(method: Any, name: str) -> Any:
            def wrapped(*values: Any) -> Any:
                return audit(method, *values)  # type: ignore[name-defined]  # noqa: F821

            return wrapped

    module._TraceMeta = _TraceMeta
    module.LOG = SimpleNamespace(logger=logging.getLogger("a"))
    module.log = SimpleNamespace(TRACE=5)
    module.Manager.deed = wrapped = _TraceMeta.wrapper(deed, "")
    repeated_work.call_at_once(module)
    assert module.Manager.deed is wrapped


def test_how_long_values_last_is_looked_up_once() -> None:
    asked = []

    def lasts() -> int:
        asked.append(1)
        return 7

    region = make_region().configure("dogpile.cache.memory")
    seen: list[Any] = []

    def get_or_create(
        key: str, creator: Any, expiration_time: Any = None, *others: Any
    ) -> Any:
        seen.append(expiration_time)
        return creator(*others[-1][0])

    region.get_or_create = get_or_create
    memoize = region.cache_on_arguments(expiration_time=lasts)
    other = region.cache_on_arguments(expiration_time=lasts)
    fixed = region.cache_on_arguments(expiration_time=5)
    module = SimpleNamespace(MEMOIZE=memoize, FIXED=fixed, number=1, lasts=lasts)

    @memoize
    def one(value: int) -> int:
        return value

    @other
    def two(value: int) -> int:
        return value

    @fixed
    def three(value: int) -> int:
        return value

    for _ in range(2):
        repeated_work.look_up_expiration_once([module])
    assert asked == [1]
    assert (one(1), one(2), three(3)) == (1, 2, 3)
    assert asked == [1]
    assert two(2) == 2
    assert asked == [1, 1]
    assert seen == [7, 7, 5, 7]


def test_this_keystones_functions_look_it_up_in_the_known_way() -> None:
    core: Any = pytest.importorskip("keystone.identity.core")
    ask = repeated_work._cells(core.MEMOIZE)["get_or_create_for_user_func"].cell_contents
    assert tuple(sorted(repeated_work._cells(ask))) == repeated_work._LOOKS_UP
