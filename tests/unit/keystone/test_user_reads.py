"""The user of a login is the one whom Keystone's driver would have read."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keystone")

import sqlalchemy
from sqlalchemy import event, orm

from keyfront.gateway.keystone import repeated_work, user_reads
from keyfront.middleware.tokens.invalidation.rules import NAMES, name_tag, tag
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach
from keyfront.middleware.tokens.request import Fill, Request, current


@contextlib.contextmanager
def login() -> Iterator[Request]:
    one = Request()
    one.users = {}
    one.fills.append(Fill("keystone.identity.core:get_user_by_name|"))
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)


class Keystone:
    """Keystone's drivers for users on a database of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import keystone.federation.backends.sql  # noqa: F401  (a table that others name)
        from keystone import exception
        from keystone.common import sql
        from keystone.identity.backends import sql as backend
        from keystone.identity.backends import sql_model
        from keystone.identity.shadow_backends import sql as shadow

        self.not_found = exception.UserNotFound
        self.engine = sqlalchemy.create_engine(
            "sqlite://", poolclass=sqlalchemy.pool.StaticPool
        )
        sql.ModelBase.metadata.create_all(self.engine)
        self.model = sql_model
        attach(self.engine, folder / "nobody")
        self.statements = 0
        event.listen(self.engine, "before_cursor_execute", self._count)
        monkeypatch.setattr(sql, "session_for_read", self.session_for_read)
        compliance = SimpleNamespace(disable_user_account_days_inactive=None)
        conf = SimpleNamespace(security_compliance=compliance)
        monkeypatch.setattr(sql_model, "CONF", conf)
        self._session: Any = None

        def driver(owner: Any, *names: str) -> Any:
            methods = {name: inspect.unwrap(getattr(owner, name)) for name in names}
            return type("Driver", (owner,), {"__init__": lambda self: None, **methods})

        identity = ("get_user", "get_user_by_name", "_get_user", "authenticate")
        shadowed = ("get_user", "_get_user", "get_federated_objects")
        self.stock: Any = driver(backend.Identity, *identity)()
        self.stock_shadow: Any = driver(shadow.ShadowUsers, *shadowed)()
        kept, kept_shadow = (
            driver(backend.Identity, *identity), driver(shadow.ShadowUsers, *shadowed)
        )  # fmt: skip
        user_reads.find_by_name(kept, sql, exception.UserNotFound)
        repeated_work.tell_of_users_once(kept, kept_shadow)
        for one in (kept, kept_shadow):
            repeated_work.read_at_once(one, "_get_user", sql_model.User)
        user_reads.tell_who_is_of_here(kept, kept_shadow)
        self.kept, self.kept_shadow = kept(), kept_shadow()

    @contextlib.contextmanager
    def session_for_read(self) -> Iterator[Any]:
        # One within another is the same, as with oslo.db's.
        if self._session is not None:
            yield self._session
            return
        with orm.Session(self.engine) as session:
            self._session = session
            try:
                yield session
            finally:
                self._session = None

    def _count(self, *given: Any) -> None:
        self.statements += 1

    def user(
        self, user: str, name: str | None, *, domain: str = "d", federated: bool = False
    ) -> None:
        model = self.model
        with orm.Session(self.engine) as session:
            one = model.User(id=user, domain_id=domain, enabled=True, extra={})
            if name is not None:
                one.local_user = model.LocalUser(name=name, domain_id=domain)
            if federated:
                one.federated_users.append(
                    model.FederatedUser(
                        idp_id="i", protocol_id="p", unique_id=user, display_name=user
                    )
                )
            session.add(one)
            session.commit()

    def execute(self, text: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(sqlalchemy.text(text))

    def told(self, driver: Any, name: str, domain: str) -> Any:
        try:
            return driver.get_user_by_name(name, domain)
        except self.not_found as error:
            return str(error)


@pytest.fixture
def keystone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keystone]:
    one = Keystone(tmp_path, monkeypatch)
    yield one
    one.engine.dispose()


def test_who_is_looked_for_by_name_is_read_by_his_id(keystone: Keystone) -> None:
    keystone.user("u", "name")
    keystone.user("v", "other")
    with login() as one:
        keystone.statements = 0
        found = keystone.kept.get_user_by_name("name", "d")
        # who it is, and he with all that is his
        assert keystone.statements == 2
        # as the statement that is left out
        assert one.fills[-1].tags == {tag("user", "u"), name_tag("name"), NAMES}
        assert one.fills[-1].families == {"users"}
        assert found == keystone.kept.get_user("u")
        assert keystone.statements == 2
    assert found == keystone.stock.get_user_by_name("name", "d")
    # what is no login asks as Keystone does
    with login() as one:
        one.users = None
        keystone.statements = 0
        assert keystone.kept.get_user_by_name("name", "d") == found
        assert keystone.statements == 3


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("name", "d"), ("NAME", "d"), ("name ", "d"), ("nobody", "d"), ("name", "e"), ("name", "D"),
        ("né", "d"), ("ne", "d"), ("", "d"), ("alone", "d"), ("torn", "d"), ("elsewhere", "d"),
        ("n" * 300, "d"),
    ],
)  # fmt: skip
def test_each_name_finds_whom_keystone_finds(
    keystone: Keystone, name: str, domain: str
) -> None:
    keystone.user("u", "name")
    keystone.user("v", "name", domain="e")
    keystone.user("w", "né")
    keystone.user("x", None, federated=True)
    keystone.user("y", "torn")
    keystone.user("z", "elsewhere")
    # a name whose user is gone, and one of a user of another domain: SQLite holds nobody to it
    keystone.execute("INSERT INTO local_user (user_id, domain_id, name) VALUES ('a', 'd', 'alone')")
    keystone.execute("UPDATE local_user SET domain_id = 'e' WHERE name = 'torn'")
    keystone.execute("UPDATE user SET domain_id = 'e' WHERE id = 'z'")
    wanted = keystone.told(keystone.stock, name, domain)
    with login():
        assert keystone.told(keystone.kept, name, domain) == wanted


def test_a_change_within_a_login_has_the_name_looked_for_again(keystone: Keystone) -> None:
    keystone.user("u", "name")
    with login() as one:
        assert keystone.kept.get_user_by_name("name", "d")["id"] == "u"
        one.writes()
        keystone.execute("UPDATE local_user SET name = 'former' WHERE user_id = 'u'")
        keystone.user("v", "name")
        assert keystone.kept.get_user_by_name("name", "d")["id"] == "v"


def test_whose_row_has_no_identities_of_other_places_is_not_asked_for_them(
    keystone: Keystone,
) -> None:
    keystone.user("u", "name")
    keystone.user("f", None, federated=True)
    with login() as one:
        keystone.kept.get_user("u")
        keystone.kept_shadow.get_user("f")
        one.fills.append(Fill("a value"))
        keystone.statements = 0
        assert keystone.kept_shadow.get_federated_objects("u") == []
        assert keystone.statements == 0
        # what is made of it ends when he gets one
        assert one.fills[-1].tags == {tag("user", "u")}
        found = keystone.kept_shadow.get_federated_objects("f")
        assert found == keystone.stock_shadow.get_federated_objects("f") != []
        # and whose row was not read, or may have been written since
        keystone.statements = 0
        keystone.kept_shadow.get_federated_objects("nobody")
        one.writes()
        keystone.kept_shadow.get_federated_objects("u")
        assert keystone.statements == 2
    with login():
        keystone.kept_shadow.get_federated_objects("u")
    assert keystone.statements == 3


def test_drivers_that_read_otherwise_are_left_alone() -> None:
    class Driver:
        def get_user_by_name(self, user_name: str, domain_id: str) -> Any:
            return self.elsewhere(user_name)  # type: ignore[attr-defined]

        def get_federated_objects(self, user_id: str) -> Any:
            return self.elsewhere(user_id)  # type: ignore[attr-defined]

        def _get_user(self, session: Any, user_id: str) -> Any:
            return None

    before = dict(vars(Driver))
    user_reads.find_by_name(Driver, None, LookupError)
    user_reads.tell_who_is_of_here(Driver, Driver)
    assert dict(vars(Driver)) == before
