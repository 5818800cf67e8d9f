"""What somebody is granted, picked out of all of it, is what Keystone's driver reads."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keystone")

import sqlalchemy
from sqlalchemy import event, orm

from keyfront.gateway.keystone import kept_grants
from keyfront.gateway.keystone.kept_grants import Newcomers
from keyfront.gateway.keystone.worker_memory import DRIVERS, KeystoneMemory
from keyfront.middleware.tokens.epochs import Epoch, View
from keyfront.middleware.tokens.invalidation.rules import FIXED, GRANTS_GROUP, tag
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach
from keyfront.middleware.tokens.request import Fill, Request, current

NOW = datetime.datetime(2026, 11, 27, 12, 0, 0)
SHARED, LATER = 5, 6
# What computes roles, and what lists assignments for a route.
ROLES = "keystone.assignment.core:get_roles_for_user_and_project|u:p"
LISTING = "keystone.assignment.core:list_role_assignments|u:p"


@contextlib.contextmanager
def request(number: int | None = SHARED, within: str = ROLES) -> Iterator[Request]:
    """A request in which a value is being computed; one without a number shares nothing."""
    one = Request()
    if number is not None:
        coordinator: Any = SimpleNamespace(slot_count=65536, fresh_now=lambda epoch, slots: False)
        seen = Epoch(1, number)
        one.view = View(coordinator, (number,) * len(FIXED), seen, seen)
    one.fills.append(Fill(within))
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)


class Keystone:
    """Keystone's drivers on a database of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from keystone.assignment.backends import sql as backend
        from keystone.common import sql
        from keystone.identity.backends import sql_model as users

        self.engine = sqlalchemy.create_engine(
            "sqlite://", poolclass=sqlalchemy.pool.StaticPool
        )
        self.grants = backend.RoleAssignment.__table__
        self.users, self.local_users = users.User.__table__, users.LocalUser.__table__
        for table in (self.grants, self.users, self.local_users):
            table.create(self.engine)
        attach(self.engine, folder / "nobody")
        self.statements = 0
        event.listen(self.engine, "before_cursor_execute", self._count)
        monkeypatch.setattr(sql, "session_for_read", self.session_for_read)
        compute = inspect.unwrap(backend.Assignment.list_role_assignments)
        #: As Keystone has it.
        self.stock: Any = type("Stock", (backend.Assignment,), {"list_role_assignments": compute})()
        kept: Any = type("Kept", (backend.Assignment,), {"list_role_assignments": compute})
        self.memory = KeystoneMemory(1 << 20, 30.0)
        self.newcomers = Newcomers(sql, users.User, users.LocalUser, lambda: NOW)
        kept_grants.keep_grants(self.memory, kept, backend.RoleAssignment, sql, self.newcomers)
        once = kept.list_role_assignments
        kept_grants.keep_grants(self.memory, kept, backend.RoleAssignment, sql, self.newcomers)
        assert kept.list_role_assignments is once
        assert once is not compute
        self.kept: Any = kept()

    @contextlib.contextmanager
    def session_for_read(self) -> Iterator[Any]:
        with orm.Session(self.engine) as session:
            yield session

    def _count(self, *given: Any) -> None:
        self.statements += 1

    def write(self, *statements: Any) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)

    def user(self, user: str, *, local: bool, created: datetime.datetime | None = None) -> None:
        row = {"id": user, "domain_id": "d", "enabled": True, "created_at": created}
        self.write(self.users.insert().values(**row))
        if local:
            named = {"user_id": user, "domain_id": "d", "name": user}
            self.write(self.local_users.insert().values(**named))

    def grant(self, kind: str, actor: str, target: str, role: str, below: bool = False) -> None:
        row = {"type": kind, "actor_id": actor, "target_id": target, "role_id": role}
        self.write(self.grants.insert().values(**row, inherited=below))

    def asked(self, **what: Any) -> int:
        """Statements for one question, whose answer is as Keystone's."""
        wanted = self.stock.list_role_assignments(**what)
        self.statements = 0
        found = self.kept.list_role_assignments(**what)
        statements = self.statements

        def order(one: dict[str, str]) -> list[tuple[str, str]]:
            return sorted(one.items())

        assert sorted(found, key=order) == sorted(wanted, key=order), what
        return statements


@pytest.fixture
def keystone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keystone]:
    one = Keystone(tmp_path, monkeypatch)
    yield one
    one.engine.dispose()


# Identifiers as Keystone makes them, and such as a database may take for another.
TARGETS = ("default", "a1", "A1", "a1 ", "b2", "jo", "io", "é", "x" * 64)


def test_each_question_is_answered_as_by_the_driver(keystone: Keystone) -> None:
    chance = random.Random(7)
    for user in ("u", "v"):
        keystone.user(user, local=True)
    combinations = list(itertools.product(
        ("UserProject", "UserDomain", "GroupProject", "GroupDomain"), ("u", "v", "g", "h"),
        TARGETS, ("r", "s"), (False, True),
    ))  # fmt: skip
    for kind, actor, target, role, below in chance.sample(combinations, len(combinations) // 2):
        keystone.grant(kind, actor, target, role, below)
    actors = [{"user_id": "u"}, {"user_id": "U"}, {"user_id": "nobody"}]
    actors += [{"group_ids": ["g"]}, {"group_ids": ["g", "h"]}]  # type: ignore[dict-item]
    targets: list[dict[str, Any]] = [{"domain_id": one} for one in TARGETS]
    targets += [{"project_ids": [one]} for one in TARGETS]
    targets += [{"project_ids": ["a1", "b2"]}, {"project_ids": ["b2"], "domain_id": "a1"}]
    targets += [{}, {"project_ids": []}]
    for number, within in ((SHARED, ROLES), (SHARED, LISTING), (None, ROLES)):
        for who, what, inherited in itertools.product(actors, targets, (None, False, True)):
            with request(number, within):
                keystone.asked(**who, **what, inherited_to_projects=inherited)
    # Those that Keystone asks in no such way.
    for more in ({"role_id": "r", "user_id": "u"}, {"group_ids": ["g"], "user_id": "u"}, {}):
        with request():
            keystone.asked(**more, project_ids=["b2"])
    # Outside of a request.
    keystone.asked(user_id="u", project_ids=["b2"], inherited_to_projects=False)


def test_all_grants_are_read_once(keystone: Keystone) -> None:
    keystone.user("u", local=True)
    keystone.grant("UserProject", "u", "p", "r")
    keystone.grant("UserDomain", "u", "d", "r", True)
    with request() as one:
        # who he is, and all that he is granted
        assert keystone.asked(user_id="u", project_ids=["p"], inherited_to_projects=False) == 2
        assert keystone.asked(user_id="u", domain_id="d", inherited_to_projects=True) == 0
        assert one.fills[-1].tags == {tag("grants:user", "u"), GRANTS_GROUP}
    with request() as one:
        assert keystone.asked(user_id="u", project_ids=["q"], inherited_to_projects=False) == 0
        # what is computed of it ends with it
        assert one.fills[-1].tags == {tag("grants:user", "u"), GRANTS_GROUP}
        assert one.fills[-1].families == {"grants"}
        assert keystone.asked(group_ids=["g"], project_ids=["q"], inherited_to_projects=True) == 1
    # in a later state, where it may have changed
    keystone.grant("UserProject", "u", "q", "r")
    with request(LATER):
        assert keystone.asked(user_id="u", project_ids=["q"], inherited_to_projects=False) == 2
    # who shares nothing with others, or lists for a route, asks the database
    for number, within in ((None, ROLES), (LATER, LISTING)):
        for _ in range(2):
            with request(number, within):
                assert keystone.asked(user_id="u", project_ids=["q"]) == 1


def test_who_has_many_grants_is_asked_about_each(keystone: Keystone) -> None:
    keystone.user("u", local=True)
    for number in range(kept_grants.LIMIT):
        keystone.grant("UserProject", "u", f"p{number}", "r")
    what = {"user_id": "u", "project_ids": ["p7"], "inherited_to_projects": False}
    with request():
        assert keystone.asked(**what) == 2
        assert keystone.asked(**what) == 0
    keystone.grant("UserProject", "u", "p", "r")
    with request(LATER):
        assert keystone.asked(**what) == 3
    # and it is known that he has
    with request(LATER):
        assert keystone.asked(**what) == 1


def test_what_may_be_from_the_past_is_not_kept(keystone: Keystone) -> None:
    keystone.user("u", local=True)
    for _ in range(2):
        with request() as one:
            one.unvouched = True
            assert keystone.asked(user_id="u", project_ids=["p"]) == 2


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("seconds", "long_here"), [(None, True), (121, True), (120, False), (0, False), (-9, False)]
)
def test_of_who_comes_from_elsewhere_nothing_is_kept_at_first(
    keystone: Keystone, seconds: int | None, long_here: bool, local: bool
) -> None:
    """His first login writes his grants one after the other, and may tell of them late."""
    created = None if seconds is None else NOW - datetime.timedelta(seconds=seconds)
    keystone.user("u", local=local, created=created)
    kept = local or long_here
    what = {"user_id": "u", "project_ids": ["p"], "inherited_to_projects": False}
    with request():
        assert keystone.newcomers.include("u") is not kept
        keystone.statements = 0
        assert keystone.newcomers.include("u") is not kept
        assert keystone.statements == 0
    with request():
        keystone.asked(**what)
    keystone.grant("UserProject", "u", "p", "r")
    with request():
        found = keystone.kept.list_role_assignments(**what)
    assert len(found) == (0 if kept else 1)


def test_whose_row_was_read_with_a_password_is_not_looked_for(keystone: Keystone) -> None:
    with request() as one:
        one.newcomers["u"] = False
        keystone.statements = 0
        assert not keystone.newcomers.include("u")
        assert keystone.statements == 0
        assert keystone.newcomers.include("nobody")


def test_the_groups_of_a_user_are_kept(keystone: Keystone) -> None:
    asked = []

    class Manager:
        def _get_group_ids_for_user_id(self, user_id: str) -> list[str]:
            asked.append(user_id)
            own = current.get()
            if own is not None:
                own.note(Reads(frozenset({"members"}), frozenset({tag("members", user_id)})))
            return ["g"]

    Manager._get_group_ids_for_user_id.__module__ = "keystone.assignment.core"
    kept_grants.keep_groups(keystone.memory, Manager, keystone.newcomers)
    once = Manager._get_group_ids_for_user_id
    kept_grants.keep_groups(keystone.memory, Manager, keystone.newcomers)
    assert Manager._get_group_ids_for_user_id is once
    keystone.user("u", local=True)
    keystone.user("v", local=False, created=NOW)
    for _ in range(2):
        for user in ("u", "v"):
            with request() as one:
                found = Manager()._get_group_ids_for_user_id(user)
                assert found == ["g"]
                found.append("more")
                # what is computed of it ends with it
                assert one.fills[-1].tags == {tag("members", user)}
    assert asked == ["u", "v", "v"]
    with request(LATER):
        Manager()._get_group_ids_for_user_id("u")
    assert Manager()._get_group_ids_for_user_id("u") == ["g"]
    assert asked == ["u", "v", "v", "u", "u"]


def test_both_are_among_what_is_kept(keystone: Keystone) -> None:
    from keystone.assignment import core

    assert "keystone.assignment.backends.sql:list_role_assignments" in DRIVERS
    assert f"{core.__name__}:_get_group_ids_for_user_id" in DRIVERS


def test_a_driver_that_lists_otherwise_is_left_alone(keystone: Keystone) -> None:
    class Driver:
        def list_role_assignments(self, **what: Any) -> Any:
            def denormalize_role(ref: Any) -> dict[str, str]:
                return {"role_id": ref.role_id}

            return [denormalize_role(ref) for ref in what["session"].ordered()]

    for method in (Driver.list_role_assignments, len):
        driver = type("Other", (), {"list_role_assignments": method})
        before = driver.list_role_assignments  # type: ignore[attr-defined]
        kept_grants.keep_grants(keystone.memory, driver, None, None, keystone.newcomers)
        assert driver.list_role_assignments is before  # type: ignore[attr-defined]
