"""The database hooks: what a transaction is seen to change, and when that is told."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy as sa

from keyfront.common.process import name_of
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import folder as folders
from keyfront.middleware.tokens.coordinator import local, mark_owners
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import Mark, Slots, slots
from keyfront.middleware.tokens.invalidation import change_log, rules, sqlalchemy_plugin
from keyfront.middleware.tokens.request import Request, current

METADATA = sa.MetaData()
USER = sa.Table(
    "user",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("extra", sa.Text),
    sa.Column("last_active_at", sa.Integer),
)
LOCAL = sa.Table(
    "local_user",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("user_id", sa.String(64)),
    sa.Column("name", sa.String(255)),
    sa.Column("domain_id", sa.String(64), default="d"),
    sa.Column("failed_auth_count", sa.Integer),
)
PASSWORD = sa.Table(
    "password",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("local_user_id", sa.Integer),
    sa.Column("password_hash", sa.String(255)),
)
MEMBERSHIP = sa.Table(
    "user_group_membership",
    METADATA,
    sa.Column("user_id", sa.String(64), primary_key=True),
    sa.Column("group_id", sa.String(64), primary_key=True),
)
FEDERATED = sa.Table(
    "federated_user",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("user_id", sa.String(64)),
)
RENEWED = sa.Table(
    "expiring_user_group_membership",
    METADATA,
    sa.Column("user_id", sa.String(64), primary_key=True),
    sa.Column("group_id", sa.String(64), primary_key=True),
    sa.Column("last_verified", sa.Integer),
)
TRUST = sa.Table(
    "trust",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("remaining_uses", sa.Integer),
)
GRANT = sa.Table(
    "assignment",
    METADATA,
    sa.Column("type", sa.String(64), primary_key=True),
    sa.Column("actor_id", sa.String(64), primary_key=True),
)
SERVICE = sa.Table("service", METADATA, sa.Column("id", sa.String(64), primary_key=True))


class Recorder:
    """Stands in for the coordinator: keeps what was told, in order."""

    slot_count = 4096

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.owners: list[str] = []
        self.failing = ""
        self.late = False

    def _tell(self, what: str, found: Any) -> Any:
        if what == self.failing:
            raise CoordinatorError("the lock is held")
        self.told.append((what, found))
        return found

    def mark(self, found: Slots, owner: str = "", *, late: bool = False) -> Any:
        self.owners.append(owner)
        self.late = late
        return Mark(1, len(self.owners), self._tell("mark", found))

    def stamp(self, mark: Any) -> None:
        self._tell("stamp", mark.slots)

    def touch(self, found: Slots) -> None:
        self._tell("touch", found)

    def close(self) -> None:
        pass


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder()
    (tmp_path / local.NAME).touch()
    change_log.coordinators.set(tmp_path, recorder)  # type: ignore[arg-type]
    yield recorder
    change_log.coordinators.forget(tmp_path)


@pytest.fixture
def engine(tmp_path: Path, recorder: Recorder) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/db")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(USER), [{"id": "u1"}, {"id": "u2"}])
        connection.execute(
            sa.insert(LOCAL),
            [{"id": 1, "user_id": "u1", "name": "old"}, {"id": 2, "user_id": "u2", "name": "two"}],
        )
        connection.execute(sa.insert(PASSWORD), [{"id": 7, "local_user_id": 2}])
        members = [{"user_id": "u1", "group_id": "g"}, {"user_id": "u2", "group_id": "g"}]
        connection.execute(sa.insert(MEMBERSHIP), members)
    sqlalchemy_plugin.attach(engine, tmp_path)
    yield engine
    engine.dispose()


def told(*tags: str) -> list[tuple[str, Slots]]:
    found = slots(tags, Recorder.slot_count)
    return [("mark", found), ("stamp", found)]


EVERYTHING = tuple(rules.EVERYTHING)
COMMON = (rules.ANY, rules.CONTENT)


@pytest.mark.parametrize(
    ("statement", "tags"),
    [
        (sa.insert(USER).values(id="u9"), (*COMMON, "users", "user:u9")),
        (sa.update(USER).where(USER.c.id == "u1").values(extra="x"), (*COMMON, "users", "user:u1")),
        (sa.delete(USER).where(USER.c.id == "u1"), (*COMMON, "users", "user:u1")),
        # by a column that is not the key: looked up before it is written
        (
            sa.delete(MEMBERSHIP).where(MEMBERSHIP.c.group_id == "g"),
            (*COMMON, "members", "members:u1", "members:u2"),
        ),
        (
            sa.update(LOCAL).where(LOCAL.c.id == 2).values(name="new"),
            (*COMMON, "users", "user:u2", "name:neu"),
        ),
        (
            sa.insert(LOCAL).values(id=3, user_id="u2", name="B C"),
            (*COMMON, "users", "user:u2", "name:b c"),
        ),
        # a name that the database alone knows
        (
            sa.update(LOCAL).where(LOCAL.c.id == 2).values(name=sa.func.lower("X")),
            (*COMMON, "users", "user:u2", rules.NAMES),
        ),
        (
            sa.insert(LOCAL).values(id=3, user_id="u2", name="Zoë"),
            (*COMMON, "users", "user:u2", rules.NAMES),
        ),
        (
            sa.update(LOCAL).where(LOCAL.c.name == "old").values(name="new"),
            (*COMMON, "users", "user:u1", "name:neu"),
        ),
        (
            sa.update(USER).where(USER.c.id.in_(["u1", "u2"])).values(extra="x"),
            (*COMMON, "users", "user:u1", "user:u2"),
        ),
        # its owner is in another table
        (
            sa.insert(PASSWORD).values(local_user_id=2, password_hash="h"),
            (*COMMON, "users", "user:u2"),
        ),
        (sa.delete(PASSWORD).where(PASSWORD.c.id == 7), (*COMMON, "users", "user:u2")),
        (sa.insert(PASSWORD).values(local_user_id=99), EVERYTHING),
        # of no row alone
        (sa.insert(SERVICE).values(id="s"), (*COMMON, "catalog")),
        # all rows, moved rows, computed values, text, DDL: of everything
        (sa.delete(USER), EVERYTHING),
        (sa.update(USER).where(USER.c.id == "u1").values(id="u5"), EVERYTHING),
        (sa.insert(USER).values(id=sa.func.lower("U7")), EVERYTHING),
        (sa.insert(USER).from_select(["id"], sa.select(sa.literal("u8"))), EVERYTHING),
        (sa.insert(USER).values([{"id": "u8"}, {"id": "u9"}]), EVERYTHING),
        (sa.text("UPDATE user SET extra = 'x'"), EVERYTHING),
        (sa.text("CREATE TABLE more (id INTEGER)"), EVERYTHING),
        (sa.text("INSERT INTO service VALUES ('t')"), EVERYTHING),
    ],
)
def test_what_a_statement_changes(
    engine: sa.Engine, recorder: Recorder, statement: Any, tags: tuple[str, ...]
) -> None:
    with engine.begin() as connection:
        connection.execute(statement)
        assert recorder.told == []
    assert recorder.told == told(*tags)


@pytest.mark.parametrize(
    "statement",
    [
        sa.select(USER),
        sa.text("SELECT 1"),
        sa.text("PRAGMA user_version"),
        # a failed login
        sa.update(LOCAL).where(LOCAL.c.id == 1).values(failed_auth_count=3),
        # nothing is there
        sa.delete(USER).where(USER.c.id == "nobody"),
        sa.update(LOCAL).where(LOCAL.c.id == 77).values(name="x"),
        sa.delete(MEMBERSHIP).where(MEMBERSHIP.c.group_id == "none"),
    ],
)
def test_what_changes_nothing(engine: sa.Engine, recorder: Recorder, statement: Any) -> None:
    with engine.begin() as connection:
        connection.execute(statement)
    assert recorder.told == []


BY_NAME = sa.select(USER.c.id, PASSWORD.c.password_hash).select_from(
    USER.join(LOCAL, USER.c.id == LOCAL.c.user_id).outerjoin(
        PASSWORD, LOCAL.c.id == PASSWORD.c.local_user_id
    )
).where(LOCAL.c.name == sa.bindparam("wanted"), LOCAL.c.domain_id == "d")


def asked(engine: sa.Engine, request: Request, name: str) -> set[str]:
    """Return what it depends on who has a name."""
    token = current.set(request)
    request.reading, request.reads = True, set()
    try:
        with engine.connect() as connection:
            connection.execute(BY_NAME, {"wanted": name}).all()
        return request.reads
    finally:
        current.reset(token)


def test_whose_name_it_is_is_asked_once(engine: sa.Engine) -> None:
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    request = Request()
    assert asked(engine, request, "two") == {"name:tuo", rules.NAMES, "user:u2"}
    assert len(statements) == 2
    assert asked(engine, request, "two") == {"name:tuo", rules.NAMES, "user:u2"}
    assert len(statements) == 3
    assert asked(engine, request, "nobody") == {"name:nobodi", rules.NAMES}
    assert asked(engine, Request(), "Zoë") == {"users"}
    # After a write of its own it may be another one.
    request.writes()
    with engine.begin() as connection:
        connection.execute(sa.update(LOCAL).where(LOCAL.c.id == 1).values(name="two"))
    assert asked(engine, request, "two") == {"name:tuo", rules.NAMES, "user:u1", "user:u2"}


def test_one_name_of_too_many_is_the_whole_table(engine: sa.Engine) -> None:
    many = [{"user_id": f"x{number}", "name": "many"} for number in range(rules.LIMIT)]
    with engine.begin() as connection:
        connection.execute(sa.insert(LOCAL), many)
    assert "users" not in asked(engine, Request(), "many")
    with engine.begin() as connection:
        connection.execute(sa.insert(LOCAL).values(user_id="more", name="MANY"))
        connection.execute(sa.insert(LOCAL).values(user_id="more", name="many"))
    assert "users" in asked(engine, Request(), "many")


NEW = sa.insert(USER).values(id="u9")
OF_NEW = sa.insert(FEDERATED).values(user_id="u9")
GROUP_OF_NEW = sa.insert(RENEWED).values(user_id="u9", group_id="g")
RENEWAL = sa.update(RENEWED).where(RENEWED.c.user_id == "u1")


@pytest.mark.parametrize(
    ("statements", "late"),
    [
        ([NEW], True),
        ([NEW, OF_NEW, GROUP_OF_NEW], True),
        ([NEW, sa.insert(GRANT).values(type="UserProject", actor_id="u9")], True),
        ([NEW, sa.insert(GRANT).values(type="UserProject", actor_id="u1")], False),
        ([NEW, sa.insert(GRANT).values(type="GroupProject", actor_id="u9")], False),
        ([NEW, sa.delete(GRANT).where(GRANT.c.actor_id == "u1")], False),
        ([OF_NEW], False),
        ([GROUP_OF_NEW], False),
        ([NEW, sa.insert(FEDERATED).values(user_id="u1")], False),
        ([NEW, sa.insert(LOCAL).values(user_id="u9")], False),
        ([NEW, sa.insert(SERVICE).values(id="s")], False),
        ([sa.insert(SERVICE).values(id="s"), NEW], False),
        ([RENEWAL.values(last_verified=2)], True),
        ([RENEWAL.values(last_verified=2, group_id="h")], False),
        ([sa.delete(RENEWED)], False),
        ([sa.insert(USER).values([{"id": "u8"}, {"id": "u9"}])], False),
        ([sa.update(USER).where(USER.c.id == "u1").values(extra="x")], False),
    ],
)
def test_what_may_be_told_of_late(
    engine: sa.Engine, recorder: Recorder, statements: list[Any], late: bool
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(RENEWED).values(user_id="u1", group_id="g"))
        connection.execute(sa.insert(GRANT).values(type="UserDomain", actor_id="u1"))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(statement)
    assert recorder.late is late


def test_who_is_new_in_a_request(engine: sa.Engine, recorder: Recorder) -> None:
    """A federated user's first login is of several transactions."""

    def log_in() -> None:
        for statements in ([NEW, OF_NEW], [GROUP_OF_NEW]):
            with engine.begin() as connection:
                for statement in statements:
                    connection.execute(statement)
            assert recorder.late

    assert in_request(log_in).created == {"u9"}

    def log_in_again() -> None:
        with engine.begin() as connection:
            connection.execute(sa.insert(RENEWED).values(user_id="u9", group_id="h"))

    in_request(log_in_again)
    assert not recorder.late


def test_who_was_not_created_is_not_new(engine: sa.Engine, recorder: Recorder) -> None:
    def fail() -> None:
        recorder.failing = "mark"
        with pytest.raises(CoordinatorError), engine.begin() as connection:
            connection.execute(NEW)

    assert in_request(fail).created == set()
    recorder.failing = ""
    with engine.connect() as connection:
        connection.execute(NEW)
        connection.rollback()
        connection.execute(GROUP_OF_NEW)
        connection.commit()
    assert not recorder.late


@pytest.mark.parametrize(
    ("active", "values", "late"),
    [
        ("u1", {"last_active_at": 2}, True),
        ("u2", {"last_active_at": 2}, False),
        (None, {"last_active_at": 2}, False),
        ("u1", {"last_active_at": 2, "extra": "x"}, False),
    ],
)
def test_the_day_of_a_login_may_be_told_late(
    engine: sa.Engine,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    active: str | None,
    values: dict[str, Any],
    late: bool,
) -> None:
    """Where inactivity counts; to enable somebody the administrator writes the same column."""
    monkeypatch.setattr(sqlalchemy_plugin, "inactivity_counts", lambda: True)

    def log_in() -> None:
        request = current.get()
        assert request is not None
        request.active = active
        with engine.begin() as connection:
            connection.execute(sa.update(USER).where(USER.c.id == "u1").values(**values))
        assert recorder.late is late
        # He is not new for that.
        with engine.begin() as connection:
            connection.execute(sa.insert(RENEWED).values(user_id="u1", group_id="h"))
        assert not recorder.late

    assert in_request(log_in).created == set()


@pytest.mark.parametrize("left", [2, 1, 0, -1, None, TRUST.c.remaining_uses - 1])
def test_the_last_use_of_a_trust_alone_is_told(
    engine: sa.Engine, recorder: Recorder, left: Any
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(TRUST).values(id="t", remaining_uses=3))
    recorder.told.clear()
    with engine.begin() as connection:
        # As Keystone writes it.
        unused = (TRUST.c.id == "t", TRUST.c.remaining_uses == 3)
        connection.execute(sa.update(TRUST).where(*unused).values(remaining_uses=left))
    quiet = left in (1, 2) if isinstance(left, int) else False
    assert recorder.told == ([] if quiet else told(*COMMON, "trusts", "trust:t"))
    with engine.begin() as connection:
        connection.execute(sa.update(TRUST).values(remaining_uses=2, id="t"))
    assert recorder.told[-2:] == told(*EVERYTHING)


def test_many_executions_of_one_statement(engine: sa.Engine, recorder: Recorder) -> None:
    statement = sa.update(USER).where(USER.c.id == sa.bindparam("who")).values(extra="x")
    with engine.begin() as connection:
        connection.execute(statement, [{"who": "u1"}, {"who": "u2"}])
    assert recorder.told == told(*COMMON, "users", "user:u1", "user:u2")


def test_a_transaction_is_told_once_with_all_it_changed(
    engine: sa.Engine, recorder: Recorder
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
        with connection.begin_nested():
            connection.execute(sa.insert(USER).values(id="u9"))
    assert recorder.told == told(*COMMON, "catalog", "users", "user:u9")


def test_what_is_rolled_back_is_not_told(engine: sa.Engine, recorder: Recorder) -> None:
    with engine.connect() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
        connection.rollback()
        connection.execute(sa.insert(USER).values(id="u9"))
        connection.commit()
    with engine.connect() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
    with engine.begin() as connection:
        connection.execute(sa.select(USER))
    assert recorder.told == told(*COMMON, "users", "user:u9")


def test_the_orm_is_seen_as_well(engine: sa.Engine, recorder: Recorder) -> None:
    orm = pytest.importorskip("sqlalchemy.orm")

    class Base(orm.DeclarativeBase):
        metadata = METADATA

    class User(Base):
        __table__ = USER

    with orm.Session(engine) as session, session.begin():
        session.get(User, "u1").extra = "x"
    assert recorder.told == told(*COMMON, "users", "user:u1")
    recorder.told.clear()
    with orm.Session(engine) as session, session.begin():
        session.query(User).filter(User.extra == "x").delete(synchronize_session=False)
    assert recorder.told == told(*COMMON, "users", "user:u1")


def in_request(action: Callable[[], None]) -> Request:
    request = Request()
    token = current.set(request)
    try:
        action()
    finally:
        current.reset(token)
    return request


def test_a_change_that_nobody_can_be_told_of_does_not_happen(
    engine: sa.Engine, recorder: Recorder
) -> None:
    recorder.failing = "mark"

    def change() -> None:
        with pytest.raises(CoordinatorError), engine.begin() as connection:
            connection.execute(sa.insert(SERVICE).values(id="s"))

    assert in_request(change).refused
    with engine.connect() as connection:
        assert connection.execute(sa.select(SERVICE)).all() == []
    recorder.failing = ""
    with engine.begin() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
    assert recorder.told == told(*COMMON, "catalog")


def test_a_request_knows_that_a_part_of_its_change_is_made(engine: sa.Engine) -> None:
    def read() -> None:
        with engine.begin() as connection:
            connection.execute(sa.select(SERVICE)).all()

    def change() -> None:
        with engine.begin() as connection:
            connection.execute(sa.insert(SERVICE).values(id="s"))

    def fail() -> None:
        with pytest.raises(sa.exc.IntegrityError):
            change()

    assert [in_request(x).committed for x in (read, change, fail)] == [False, True, False]


def test_a_change_whose_end_cannot_be_told_has_happened_and_stays_marked(
    engine: sa.Engine, recorder: Recorder
) -> None:
    recorder.failing = "stamp"
    with engine.begin() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
    assert [what for what, _ in recorder.told] == ["mark"]
    with engine.connect() as connection:
        assert len(connection.execute(sa.select(SERVICE)).all()) == 1


def test_a_commit_that_fails_is_stamped_in_sqlite(
    engine: sa.Engine, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
        raw = connection.connection.dbapi_connection

        class Failing:
            def __getattr__(self, name: str) -> Any:
                if name == "commit":
                    raise OSError("disk full")
                return getattr(raw, name)

        monkeypatch.setattr(connection.connection, "dbapi_connection", Failing())
        with pytest.raises(OSError, match="disk full"):
            connection.commit()
        monkeypatch.undo()
    assert recorder.told == told(*COMMON, "catalog")


class Error(Exception):
    """As a driver's."""

    def __init__(self, *values: object, sqlstate: str = "") -> None:
        super().__init__(*values)
        self.sqlstate = sqlstate


def failed_commit(
    tmp_path: Path,
    dialect: str,
    error: BaseException,
    request: Request | None = None,
    **info: object,
) -> tuple[bool, bool]:
    """Let a commit fail; whether its connection was closed, and what became of it is unknown.

    :param request: the request that it is made for; by default a new one
    :param info: what is noted of the transaction; by default a change that is told of
    """
    closed = threading.Event()

    def commit(connection: Any) -> None:
        raise error

    noted = info or {"tags": {"catalog"}, "session": "server/5", "wrote": True}
    driver = SimpleNamespace(close=closed.set)
    connection = SimpleNamespace(
        info={f"keyfront.{name}": value for name, value in noted.items()}, dbapi_connection=driver
    )
    told_of = change_log.Changes(lambda: tmp_path)
    request = request or Request()
    before = current.set(request)
    try:
        with pytest.raises(type(error)):
            sqlalchemy_plugin._commit(connection, commit, told_of, dialect)
    finally:
        current.reset(before)
    assert connection.info.keys() <= {"keyfront.session"}
    return closed.is_set(), request.unknown_commit


@pytest.mark.parametrize(
    ("dialect", "error"),
    [
        *(("mysql", Error(number, "...")) for number in (1213, 1205, 3101, 1290, 1836, 1047)),
        ("mariadb", Error(1213, "Deadlock found")),
        *(("postgresql", Error("...", sqlstate=x)) for x in ("40001", "40P01", "23505")),
    ],
)
def test_what_a_server_refused_to_commit_is_stamped_at_once(
    recorder: Recorder, tmp_path: Path, dialect: str, error: BaseException
) -> None:
    assert failed_commit(tmp_path, dialect, error) == (False, False)
    assert recorder.told == told("catalog")


@pytest.mark.parametrize(
    ("dialect", "error"),
    [
        ("mysql", Error(2013, "Lost connection to MySQL server during query")),
        ("mysql", Error()),
        ("mysql", KeyboardInterrupt()),
        ("postgresql", Error("...", sqlstate="40003")),
        ("postgresql", Error("...", sqlstate="57P01")),
        ("postgresql", Error("server closed the connection unexpectedly")),
        ("oracle", Error(1213)),
    ],
)
def test_a_commit_of_which_nothing_is_known_is_left_to_its_session(
    recorder: Recorder, tmp_path: Path, dialect: str, error: BaseException
) -> None:
    """In which nothing comes any more."""
    assert failed_commit(tmp_path, dialect, error) == (True, True)
    found = slots(["catalog"], Recorder.slot_count)
    assert [what for what, _ in recorder.told] == ["mark", "mark", "stamp"]
    assert recorder.owners[0].startswith(f"{name_of(os.getpid())} server/5#")
    assert recorder.owners[1:] == [mark_owners.left("server/5")]
    assert not mark_owners.under_way
    assert {tuple(getattr(x, "slots", x)) for _, x in recorder.told} == {tuple(found)}


@pytest.mark.parametrize(
    ("wrote", "error", "unknown"),
    [(True, OSError("gone"), True), (True, Error(1213), False), (False, OSError("gone"), False)],
)
def test_of_a_commit_that_nobody_has_to_be_told_of_it_is_known_as_well_whether_it_is_made(
    recorder: Recorder, tmp_path: Path, wrote: bool, error: Exception, unknown: bool
) -> None:
    assert failed_commit(tmp_path, "mysql", error, wrote=wrote) == (False, unknown)
    assert recorder.told == []


@pytest.mark.parametrize("info", [{}, {"wrote": True}])
def test_a_later_commit_that_is_refused_tells_nothing_of_the_one_before(
    recorder: Recorder, tmp_path: Path, info: dict[str, object]
) -> None:
    """Keystone repeats some changes by itself."""
    request = Request()
    assert failed_commit(tmp_path, "mysql", OSError("gone"), request, **info)[1]
    assert failed_commit(tmp_path, "mysql", Error(1213), request, **info)[1]


def test_nothing_is_asked_in_a_transaction_that_is_to_be_committed(
    recorder: Recorder, tmp_path: Path
) -> None:
    """PostgreSQL would answer its COMMIT by a rollback, without an error, had it refused that."""
    committed = []
    connection = SimpleNamespace(info={"keyfront.tags": {"catalog"}})  # no driver to be asked
    told_of = change_log.Changes(lambda: tmp_path)
    sqlalchemy_plugin._commit(connection, committed.append, told_of, "postgresql")
    assert committed == [connection]
    assert recorder.owners[0].startswith(f"{name_of(os.getpid())} {mark_owners.UNKNOWN}#")


def test_a_folder_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who makes it first does not have root remove what he likes."""
    folder = tmp_path / "shared"
    folder.mkdir(0o700)
    (folder / "epochs-0123456789ab").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    told_of = change_log.Changes(lambda: folder, lambda: {os.stat(folder).st_uid + 1})
    told_of.end(told_of.begin(["users"]), ["users"])
    assert (folder / "epochs-0123456789ab").exists()
    told_of = change_log.Changes(lambda: folder, lambda: {os.stat(folder).st_uid})
    told_of.end(told_of.begin(["users"]), ["users"])
    assert not (folder / "epochs-0123456789ab").exists()


def test_a_mark_that_could_not_be_stamped_is_with_the_next_change(
    recorder: Recorder, tmp_path: Path
) -> None:
    """Its process lives, so nobody else takes it away."""
    told_of = change_log.Changes(lambda: tmp_path)
    mark = told_of.begin(["catalog"], mark_owners.HERE)
    recorder.failing = "stamp"
    with pytest.raises(CoordinatorError):
        told_of.end(mark, ["catalog"])
    recorder.failing = ""
    recorder.told.clear()
    told_of.end(told_of.begin(["users"], mark_owners.HERE), ["users"])
    assert mark is not None
    assert recorder.told[0] == ("stamp", mark.slots)
    assert len(recorder.told) == 3
    assert not mark_owners.under_way


def test_a_commit_that_fails_with_the_coordinator_is_given_up(
    recorder: Recorder, tmp_path: Path
) -> None:
    """This process then takes the mark away itself, when the session is over."""
    told_of = change_log.Changes(lambda: tmp_path)
    mark = told_of.begin(["catalog"], "server/5")
    assert mark is not None
    (me,) = mark_owners.under_way
    recorder.failing = "mark"
    told_of.leave(mark, "server/5")
    assert not mark_owners.under_way
    assert mark_owners.given_up == {me}
    mark_owners.given_up.clear()
    recorder.failing = ""
    recorder.told.clear()
    told_of.end(told_of.begin(["users"], "server/5"), ["users"])
    assert recorder.told == told("users"), "it is not made complete by the next change"


def test_a_change_that_is_under_way_is_known_to_be(recorder: Recorder, tmp_path: Path) -> None:
    told_of = change_log.Changes(lambda: tmp_path)
    one, other = told_of.begin(["catalog"]), told_of.begin(["catalog"])
    assert mark_owners.under_way == set(recorder.owners)
    told_of.end(one, ["catalog"])
    assert mark_owners.under_way == {recorder.owners[1]}
    told_of.end(other, ["catalog"])
    recorder.failing = "mark"
    with pytest.raises(CoordinatorError):
        told_of.begin(["catalog"])
    assert not mark_owners.under_way


def test_what_keystone_caches_is_found_anew_after_a_change(
    engine: sa.Engine, recorder: Recorder
) -> None:
    def change() -> None:
        request = current.get()
        assert request is not None
        request.view = "old"
        with engine.begin() as connection:
            connection.execute(sa.insert(SERVICE).values(id="s"))

    done = in_request(change)
    assert done.view is None
    assert done.own_name


def test_what_is_read_after_a_write_is_shared_with_nobody(
    engine: sa.Engine, recorder: Recorder
) -> None:
    """The write may be taken back, which is no change."""

    def change() -> None:
        request = current.get()
        assert request is not None
        request.view = "old"
        with engine.connect() as connection:
            connection.execute(sa.update(LOCAL).values(failed_auth_count=3))
            assert request.view == "old"
            connection.execute(sa.insert(SERVICE).values(id="s"))
            assert request.view is None
            connection.rollback()

    assert in_request(change).view is None
    assert recorder.told == []


def test_attaching_twice_tells_once(
    engine: sa.Engine, recorder: Recorder, tmp_path: Path
) -> None:
    sqlalchemy_plugin.attach(engine, tmp_path)
    with engine.begin() as connection:
        connection.execute(sa.insert(SERVICE).values(id="s"))
    assert recorder.told == told(*COMMON, "catalog")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its own", "another node"])
def test_a_server_that_hangs_is_not_asked_for_ever(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel takes the connection; nothing comes. Who asks is in somebody's request."""
    pymysql = pytest.importorskip("pymysql")
    monkeypatch.setattr(sqlalchemy_plugin, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        url = f"mysql+pymysql://k:secret@127.0.0.1:{1 if elsewhere else port}/k"
        sqlalchemy_plugin.attach(sa.create_engine(url))
        _, connect = change_log.coordinators.settled.connections.pop()
        ended: queue.SimpleQueue[Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                connect(*(("127.0.0.1", port) if elsewhere else ()))
            except pymysql.OperationalError as error:
                ended.put(error)

        threading.Thread(target=ask, daemon=True).start()
        assert "timed out" in str(ended.get(timeout=60))


def test_an_unknown_sqlalchemy_costs_hits_only(caplog: pytest.LogCaptureFixture) -> None:
    class Context:
        isinsert = True

    assert sqlalchemy_plugin.describe(Context(), "INSERT") is sqlalchemy_plugin.UNKNOWN
    assert "change of everything" in caplog.text


def test_a_keystone_that_is_imported_only_has_no_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = pytest.importorskip("oslo_config.cfg")
    imported = types.SimpleNamespace(CONF=cfg.ConfigOpts())
    monkeypatch.setitem(sys.modules, "keystone.conf", imported)
    url = sa.make_url(f"sqlite:///{tmp_path}/db")
    assert folders.folder_here(url) == folders.default_folder(url)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mysql://a@localhost/k", "mariadb+pymysql://b:c@127.0.0.1:3306/k"),
        ("postgresql://LocalHost/k", "postgresql+psycopg2://[::1]:5432/k"),
        ("mysql://db.Example.org/k", "mysql://DB.example.org/k"),
    ],
)
def test_one_database_has_one_folder(one: str, other: str) -> None:
    folder = folders.default_folder(sa.make_url(one))
    assert folder == folders.default_folder(sa.make_url(other))
    for differs in ("mysql://localhost/x", "mysql://localhost:3307/k", "mysql://elsewhere/k"):
        assert folder != folders.default_folder(sa.make_url(differs))


def test_a_link_to_a_database_is_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    one, other = (sa.make_url(f"sqlite:///{tmp_path}/{name}/db") for name in ("data", "link"))
    assert folders.default_folder(one) == folders.default_folder(other)


def test_whose_table_root_trusts(tmp_path: Path) -> None:
    database = tmp_path / "db"
    database.touch()
    url = sa.make_url(f"sqlite:///{database}")
    assert folders.trusted_users(url, folders.default_folder(url)) == {0, os.geteuid()}
    assert folders.trusted_users(url, tmp_path) is None
    name = f"keyfront-{folders._name(url)}"
    for base in folders.BASES:  # wherever it would lie now
        assert folders.trusted_users(url, base / name) == {0, os.geteuid()}
    server = sa.make_url("mysql://localhost/keystone")
    trusted = folders.trusted_users(server, folders.default_folder(server))
    assert trusted is not None and 0 in trusted


def test_changes_that_nobody_hears_are_mentioned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = tmp_path / folders.default_folder(sa.make_url("mysql://localhost/k")).name
    for folder, named in ((usual, False), (tmp_path / "named", True)):
        told_of = change_log.Changes(lambda folder=folder: folder)
        caplog.clear()
        for _ in range(2):
            told_of.end(told_of.begin(["users"]), ["users"])
        (said,) = [r for r in caplog.records if "no token cache" in r.getMessage()]
        assert said.levelname == "WARNING"
        assert ("though path names it" in said.getMessage()) is named
        # Who installs a Keystone reads it at db_sync and at bootstrap.
        assert "harmless where no Keystone runs yet" in said.getMessage()
        assert said.getMessage().startswith(
            f"{folder}: there is no token cache to be told of changes"
        )


@pytest.mark.parametrize("path", [True, False])
def test_the_plugin_of_a_url(tmp_path: Path, path: bool) -> None:
    url = sa.make_url(f"sqlite:///{tmp_path}/db?plugin=keyfront")
    folder = folders.default_folder(url)
    if path:
        folder = tmp_path / "shared"
        url = url.update_query_dict({"keyfront_path": str(folder)})
    # entry points of an installed keyfront; registered here so that the test needs none
    sa.dialects.plugins.register(
        "keyfront", "keyfront.middleware.tokens.invalidation.sqlalchemy_plugin", "Plugin"
    )
    engine = sa.create_engine(url)
    try:
        assert sqlalchemy_plugin.is_attached(engine)
        assert dict(engine.url.query) == {}
        METADATA.create_all(engine)  # no table, nobody to tell, and none is made
        assert not folder.exists()
        coordinator = SharedMemory(folder)
        epoch, everything = coordinator.now(), slots(["all"], coordinator.slot_count)
        services = slots(["catalog"], coordinator.slot_count)
        with engine.begin() as connection:
            connection.execute(sa.insert(SERVICE).values(id="s"))
        assert coordinator.fresh(epoch, everything)
        assert not coordinator.fresh(epoch, services)
        assert coordinator.statistics()["changes"] == 1
    finally:
        engine.dispose()
        change_log.coordinators.forget(folder)
        if folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def test_a_table_made_during_a_commit_hears_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    source = change_log.Changes(lambda: folder)
    mark = source.begin(["catalog"])
    assert mark is None
    coordinator = SharedMemory(folder)
    epoch, services = coordinator.now(), slots(["catalog"], coordinator.slot_count)
    try:
        source.end(mark, ["catalog"])
        assert not coordinator.fresh(epoch, services)
    finally:
        change_log.coordinators.forget(folder)


def test_a_table_made_anew_during_a_commit_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark was in the table that was removed; who only takes part cannot make another."""
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    folder = tmp_path / "shared"
    SharedMemory(folder).touch(slots(["all"], 4096))
    monkeypatch.setattr(local.Table, "settled", 0)
    source = change_log.Changes(lambda: folder)
    made: list[SharedMemory] = []

    def wait(seconds: float) -> None:
        made.append(SharedMemory(folder))  # a worker, meanwhile

    monkeypatch.setattr(change_log.time, "sleep", wait)
    try:
        mark = source.begin(["catalog"])
        assert mark is not None
        (folder / local.NAME).unlink()
        source.end(mark, ["catalog"])
        (worker,) = made
        assert worker.statistics()["changes"] == 1
    finally:
        change_log.coordinators.forget(folder)


def test_one_database_has_one_folder_whoever_connects() -> None:
    def folder(url: str) -> Path:
        return folders.default_folder(sa.make_url(url))

    one = folder("mysql+pymysql://keystone:a@db:3306/keystone")
    assert one == folder("mysql://other:b@db:3306/keystone?charset=utf8&plugin=keyfront")
    assert one != folder("mysql://keystone@db:3306/other")
    assert one != folder("mysql://keystone@db2:3306/keystone")
    assert folder("mysql:///k?unix_socket=/a") != folder("mysql:///k?unix_socket=/b")
    assert folder("sqlite:////tmp/x/../db") == folder("sqlite:////tmp/db")
