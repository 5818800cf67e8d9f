"""The user of a login is the one whom Keystone's driver would have read."""

from __future__ import annotations

import contextlib
import datetime
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keystone")

import sqlalchemy
from sqlalchemy import event, orm

from keyfront.gateway.keystone import kept_grants, repeated_work, user_reads
from keyfront.middleware.tokens.invalidation.rules import NAMES, name_tag, tag
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach
from keyfront.middleware.tokens.request import Fill, Request, current

NOW = datetime.datetime(2026, 11, 28, 12, 0, 0)


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
        compliance.lockout_failure_attempts, compliance.lockout_duration = 2, None
        monkeypatch.setattr(backend, "CONF", conf)
        monkeypatch.setattr(sql, "session_for_write", self.session_for_write)
        monkeypatch.setattr(
            backend.Identity, "_check_password", lambda self, given, row: row.password == given
        )
        self.disabled, self.locked = exception.UserDisabled, exception.AccountLocked
        self._session: Any = None

        def driver(owner: Any, *names: str) -> Any:
            methods = {name: inspect.unwrap(getattr(owner, name)) for name in names}
            return type("Driver", (owner,), {"__init__": lambda self: None, **methods})

        identity = (
            *("get_user", "get_user_by_name", "_get_user", "authenticate"),
            "list_groups_for_user",
        )
        shadowed = ("get_user", "_get_user", "get_federated_objects")
        self.stock: Any = driver(backend.Identity, *identity)()
        self.stock_shadow: Any = driver(shadow.ShadowUsers, *shadowed)()
        kept, kept_shadow = (
            driver(backend.Identity, *identity), driver(shadow.ShadowUsers, *shadowed)
        )  # fmt: skip
        user_reads.find_by_name(kept, sql, exception.UserNotFound, sql_model)
        repeated_work.tell_of_users_once(kept, kept_shadow)
        for one in (kept, kept_shadow):
            repeated_work.read_at_once(one, "_get_user", sql_model.User)
        user_reads.compare_with_known_row(kept)
        kept_grants.list_groups_at_once(kept, sql_model, sql)
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

    @contextlib.contextmanager
    def session_for_write(self) -> Iterator[Any]:
        with orm.Session(self.engine) as session:
            yield session
            session.commit()

    def _count(self, *given: Any) -> None:
        self.statements += 1

    def user(
        self, user: str, name: str | None, *, domain: str = "d", federated: bool = False,
        password: str = "secret",
    ) -> None:  # fmt: skip
        model = self.model
        with orm.Session(self.engine) as session:
            one = model.User(id=user, domain_id=domain, enabled=True, extra={})
            if name is not None:
                one.local_user = model.LocalUser(name=name, domain_id=domain)
                hashed = model.Password(password_hash=password, created_at=NOW)
                one.local_user.passwords.append(hashed)
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


def test_who_has_a_password_here_is_known_to_be_no_newcomer(keystone: Keystone) -> None:
    keystone.user("local", "name")
    keystone.user("both", "other", federated=True)
    keystone.user("federated", None, federated=True)
    for driver in (keystone.kept, keystone.kept_shadow):
        with login() as one:
            for user in ("local", "both", "federated"):
                driver.get_user(user)
            # who has none is looked at: rows of his may just be written
            assert one.newcomers == {"local": False, "both": False}
            assert one.of_here == {"local"}


def test_who_is_looked_for_by_name_is_read_by_his_id(keystone: Keystone) -> None:
    keystone.user("u", "name")
    keystone.user("v", "other")
    with login() as one:
        keystone.statements = 0
        found = keystone.kept.get_user_by_name("name", "d")
        # who it is, and he with all that is his
        assert keystone.statements == 1
        # as the statement that is left out
        assert one.fills[-1].tags == {tag("user", "u"), name_tag("name"), NAMES}
        assert one.fills[-1].families == {"users"}
        assert found == keystone.kept.get_user("u")
        assert keystone.statements == 1
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


def test_a_password_is_compared_with_the_row_that_the_name_has_led_to(keystone: Keystone) -> None:
    keystone.user("u", "name")
    keystone.user("v", "other", password="another")
    for one in (keystone.stock, keystone.kept):
        with login() as request:
            one.get_user_by_name("name", "d")
            keystone.statements = 0
            assert one.authenticate("u", "secret") == one.get_user("u")
            assert (keystone.statements == 0) == (one is keystone.kept)
            # once: whoever compares again reads him again
            assert not request.rows
    with login() as request:
        keystone.kept.get_user_by_name("name", "d")
        # neither another's,
        keystone.statements = 0
        assert keystone.kept.authenticate("v", "another")["id"] == "v"
        with pytest.raises(AssertionError):
            keystone.kept.authenticate("v", "secret")
        assert keystone.statements > 1
        # nor is anything left for a read that compares nothing
        assert request.row is None
        with orm.Session(keystone.engine) as session:
            assert keystone.kept._get_user(session, "u").password == "secret"
    # another login reads him again, and so does one of which nothing is noted
    keystone.execute("UPDATE password SET password_hash = 'new'")
    for noted in (login(), contextlib.nullcontext()):
        with noted:
            keystone.statements = 0
            with pytest.raises(AssertionError):
                keystone.kept.authenticate("u", "secret")
            assert keystone.statements > 0
    keystone.execute("UPDATE local_user SET failed_auth_count = 0")
    with login():
        keystone.kept.get_user_by_name("name", "d")
        with pytest.raises(AssertionError):
            keystone.kept.authenticate("u", "secret")
        # and the failure was written
        keystone.execute("UPDATE local_user SET failed_auth_count = 0")
        keystone.execute("UPDATE password SET password_hash = 'newer'")
        assert keystone.kept.authenticate("u", "newer")["id"] == "u"


def test_after_a_write_of_the_login_the_row_is_read_again(keystone: Keystone) -> None:
    keystone.user("u", "name")
    with login() as one:
        keystone.kept.get_user_by_name("name", "d")
        one.writes()
        assert not one.rows
        keystone.execute("UPDATE user SET enabled = 0")
        with pytest.raises(keystone.disabled):
            keystone.kept.authenticate("u", "secret")


def test_a_row_that_is_changed_or_in_use_is_read_again(keystone: Keystone) -> None:
    keystone.user("u", "name")
    with login() as one:
        # two sessions at once: what is in one cannot be in the other
        with keystone.session_for_read():
            keystone.kept.get_user_by_name("name", "d")
            row = one.rows["u"]
            keystone._session = None
            keystone.statements = 0
            assert keystone.kept.authenticate("u", "secret")["id"] == "u"
            assert keystone.statements == 1
        # as Keystone marks whom inactivity disables: a session might write that
        one.rows["u"] = row
        row._enabled = False
        keystone.statements = 0
        assert keystone.kept.authenticate("u", "secret")["enabled"]
        assert keystone.statements == 1


def test_failures_are_counted_and_lock_as_ever(keystone: Keystone) -> None:
    keystone.user("u", "name")
    for number in (1, 2):
        with login():
            keystone.kept.get_user_by_name("name", "d")
            with pytest.raises(AssertionError):
                keystone.kept.authenticate("u", "wrong")
        with keystone.engine.connect() as connection:
            query = sqlalchemy.text("SELECT failed_auth_count FROM local_user")
            assert connection.execute(query).scalar() == number
    with login():
        keystone.kept.get_user_by_name("name", "d")
        with pytest.raises(keystone.locked):
            keystone.kept.authenticate("u", "secret")


def test_whose_name_is_not_there_is_asked_for_once(keystone: Keystone) -> None:
    with login() as one:
        keystone.statements = 0
        with pytest.raises(keystone.not_found):
            keystone.kept.get_user_by_name("nobody", "d")
        # ours, and Keystone's
        assert keystone.statements == 2
        assert one.fills[-1].tags == {name_tag("nobody"), NAMES}


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


GROUPS = "keystone.assignment.core:_get_group_ids_for_user_id|'u'"


def test_the_ids_of_groups_are_read_at_once(keystone: Keystone) -> None:
    from keystone.common.driver_hints import Hints

    keystone.user("u", "name")
    keystone.user("v", "other")
    for group in ("g", "h", "i"):
        keystone.execute(
            'INSERT INTO "group" (id, domain_id, name, extra)'
            f" VALUES ('{group}', 'd', '{group}', '{{}}')"
        )
    notes = []

    def listed(driver: Any, key: str = GROUPS, hints: Any = None) -> tuple[list[Any], int]:
        """What a driver lists, and the statements of it, besides the one that finds the user."""
        with login() as one:
            driver.get_user("u")
            one.fills.append(Fill(key))
            keystone.statements = 0
            found = driver.list_groups_for_user("u", hints or Hints())
            notes.append((one.fills[-1].tags, one.fills[-1].families))
            return found, keystone.statements

    def compare() -> int:
        notes.clear()
        wanted, _ = listed(keystone.stock)
        found, statements = listed(keystone.kept)
        assert sorted(one["id"] for one in found) == sorted(one["id"] for one in wanted)
        assert {(one["id"], one["domain_id"]) for one in found} == {
            (one["id"], one["domain_id"]) for one in wanted
        }
        assert notes[0] == notes[1]
        return statements

    assert compare() == 1
    member = "INSERT INTO user_group_membership (user_id, group_id) VALUES"
    for row in ("('u', 'g')", "('u', 'i')", "('v', 'h')", "('u', 'gone')"):
        keystone.execute(f"{member} {row}")
        assert compare() == 1
    assert len(listed(keystone.kept)[0]) == 2
    # whoever asks for more than the ids, or for some of them, is given that
    hints = Hints()
    hints.add_filter("id", "g")
    wanted, _ = listed(keystone.stock, "a value")
    assert listed(keystone.kept, "a value")[0] == wanted
    assert listed(keystone.kept, GROUPS, hints)[0] == [one for one in wanted if one["id"] == "g"]
    # and memberships that end are Keystone's
    keystone.execute(
        "INSERT INTO identity_provider (id, enabled, domain_id, authorization_ttl)"
        " VALUES ('p', 1, 'd', 60)"
    )
    for group, last in (("h", "2999-01-01 00:00:00.0"), ("g", "2000-01-01 00:00:00.0")):
        keystone.execute(
            "INSERT INTO expiring_user_group_membership (user_id, group_id, idp_id, last_verified)"
            f" VALUES ('u', '{group}', 'p', '{last}')"
        )
        compare()
    with login(), pytest.raises(keystone.not_found):
        keystone.kept.list_groups_for_user("nobody", Hints())


def test_who_is_in_many_groups_is_told_of_all(keystone: Keystone) -> None:
    from keystone.common.driver_hints import Hints

    keystone.user("u", "name")
    keystone.execute(
        "INSERT INTO user_group_membership (user_id, group_id)"
        " WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 299)"
        " SELECT 'u', i FROM n"
    )
    keystone.execute(
        "INSERT INTO \"group\" (id, domain_id, name, extra) SELECT group_id, 'd', group_id, '{}'"
        " FROM user_group_membership"
    )
    with login() as one:
        one.fills.append(Fill(GROUPS))
        assert len(keystone.kept.list_groups_for_user("u", Hints())) == 300
        # which is no longer told by each of them
        assert "groups" in one.fills[-1].tags


def test_drivers_that_read_otherwise_are_left_alone() -> None:
    class Driver:
        def get_user_by_name(self, user_name: str, domain_id: str) -> Any:
            return self.elsewhere(user_name)  # type: ignore[attr-defined]

        def authenticate(self, user_id: str, password: str) -> Any:
            return self.elsewhere(user_id)  # type: ignore[attr-defined]

        def list_groups_for_user(self, user_id: str, hints: Any) -> Any:
            return self.elsewhere(user_id, hints)  # type: ignore[attr-defined]

        def get_federated_objects(self, user_id: str) -> Any:
            return self.elsewhere(user_id)  # type: ignore[attr-defined]

        def _get_user(self, session: Any, user_id: str) -> Any:
            return None

    before = dict(vars(Driver))
    user_reads.find_by_name(Driver, None, LookupError, None)
    user_reads.compare_with_known_row(Driver)
    kept_grants.list_groups_at_once(Driver, None, None)
    user_reads.tell_who_is_of_here(Driver, Driver)
    assert dict(vars(Driver)) == before
