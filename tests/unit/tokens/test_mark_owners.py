"""Who owns a mark, and when his commit is taken for over."""

from __future__ import annotations

import logging
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.middleware.tokens.coordinator import mark_owners
from keyfront.middleware.tokens.coordinator.mark_owners import (
    COMMIT_TIMEOUT,
    HERE,
    UNKNOWN,
    Settled,
)
from keyfront.middleware.tokens.epochs import MARK_SECONDS, OWNER_BYTES
from support.clocks import Clock

LONG = 2 * COMMIT_TIMEOUT


#: A program that prints its name.
TELL = (
    "import os; from keyfront.common.process import name_of;"
    "print(name_of(os.getpid()), flush=True)"
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(mark_owners, "time", made)
    return made


@pytest.fixture
def dead() -> str:
    """A process that was and is no more."""
    return subprocess.check_output([sys.executable, "-c", TELL], text=True).strip()


class Server:
    """A database server as its drivers show it."""

    def __init__(self, number: int = 7, name: str = "a") -> None:
        self.number = number
        self.greeted = number
        self.name = name
        #: What it shows of sessions: what they are at, and for how many seconds.
        self.sessions = {5: ("Query", 1)}
        #: What it lists of transactions: sessions; ``None``: the user may not see them.
        self.transactions: list[int] | None = None
        self.bounds_idleness = True
        self.asked: list[str] = []
        self.away = False
        self.info = SimpleNamespace(backend_pid=self.greeted)
        self.open = 0

    def connect(self) -> Server:
        if self.away:
            raise OSError("away")
        self.open += 1
        return self

    def thread_id(self) -> int:
        return self.greeted

    def cursor(self) -> Any:
        return SimpleNamespace(
            execute=self.execute, fetchall=lambda: self._found, close=lambda: None
        )

    def execute(self, statement: str, values: Any = None) -> None:
        self.asked.append(statement)
        self._found: list[tuple[object, ...]] = [(self.number, self.name, 1)]
        if "processlist" in statement and values:
            self._found = [seen for number, seen in self.sessions.items() if number == values[0]]
        elif "innodb_trx" in statement:
            if self.transactions is None:
                raise PermissionError
            self._found = [(f"{x} 421", x == self.number, 0) for x in self.transactions]
        elif "idle_write_transaction_timeout" in statement and not self.bounds_idleness:
            raise LookupError

    def rollback(self) -> None:
        pass

    def close(self) -> None:
        self.open -= 1


def settled(server: Server | None = None) -> Settled:
    made = Settled()
    if server is not None:
        made.connections.append(("mysql", server.connect))
    return made


def test_an_owner_fits_into_a_mark() -> None:
    assert len(mark_owners.owner("0123456789ab/18446744073709551615")) <= OWNER_BYTES


def test_who_lives_says_it_himself(clock: Clock) -> None:
    command = [sys.executable, "-c", f"{TELL}; input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        server = Server()
        for session in (HERE, UNKNOWN, "0123456789ab/5"):
            assert not settled(server)(f"{name} {session}#7", LONG)
        assert not server.asked
        other.kill()


def test_what_a_process_is_not_at_any_more_it_settles_itself(clock: Clock) -> None:
    """The answer to its mark was lost, so that it made no change; or that to its stamp."""
    me = mark_owners.owner(HERE)
    assert me != mark_owners.owner(HERE)
    assert settled()(me, MARK_SECONDS)
    mark_owners.under_way.add(me)
    try:
        assert not settled()(me, LONG)
    finally:
        mark_owners.under_way.discard(me)


def test_a_dead_process_that_commits_itself_has_settled(clock: Clock, dead: str) -> None:
    assert settled()(f"{dead} {HERE}", MARK_SECONDS)
    assert settled()("", MARK_SECONDS)


def test_a_session_that_is_there_may_still_commit(clock: Clock, dead: str) -> None:
    server = Server()
    session = mark_owners.session_of("mysql", Server(number=5))
    judge = settled(server)
    for _ in range(3):
        assert not judge(f"{dead} {session}", LONG)
        clock.later(2)
    server.sessions.clear()
    assert judge(f"{dead} {session}", MARK_SECONDS)
    assert judge._told == f"{dead} {session}"
    assert server.open == 0


@pytest.mark.parametrize(
    ("seen", "transactions", "is_mariadb", "over"),
    [
        # The commit is over, and who has sent it is gone without the server knowing.
        (("Sleep", 9), [7], False, True),
        (("Sleep", 9), [5, 7], False, False),
        # At a statement, which may be the commit.
        (("Query", 9000), [7], False, False),
        # An older list, or none: MariaDB ends transactions that wait for long.
        (("Sleep", 31), [6], True, False),
        (("Sleep", 32), [6], True, True),
        (("Sleep", 31), None, True, False),
        (("Sleep", 32), None, True, True),
        (("Sleep", 9000), None, False, False),
    ],
)
def test_a_session_in_no_transaction_commits_no_more(
    clock: Clock, dead: str, seen: tuple[str, int], transactions: list[int] | None,
    is_mariadb: bool, over: bool,
) -> None:  # fmt: skip
    server = Server()
    server.sessions[5] = seen
    server.transactions, server.bounds_idleness = transactions, is_mariadb
    session = mark_owners.session_of("mysql", Server(number=5))
    assert settled(server)(f"{dead} {session}", LONG) == over
    assert server.open == 0


def test_of_a_writer_elsewhere_the_session_counts(clock: Clock) -> None:
    server = Server()
    session = mark_owners.session_of("mysql", Server(number=5))
    judge = settled(server)
    assert not judge(f"0123456789ab:1:5 {session}", LONG)
    server.sessions.clear()
    clock.later(2)
    assert judge(f"0123456789ab:1:5 {session}", MARK_SECONDS)


def test_what_a_process_has_given_up_is_over_with_its_session(clock: Clock) -> None:
    server = Server()
    me = mark_owners.owner(mark_owners.session_of("mysql", Server(number=5)))
    mark_owners.given_up.add(me)
    judge = settled(server)
    assert not judge(me, LONG)
    server.sessions.clear()
    clock.later(2)
    assert judge(me, MARK_SECONDS)
    assert me not in mark_owners.given_up


def test_a_commit_that_failed_is_over_with_its_session(clock: Clock) -> None:
    server = Server()
    session = mark_owners.session_of("mysql", Server(number=5))
    judge = settled(server)
    assert not judge(mark_owners.left(session), LONG)
    server.sessions.clear()
    clock.later(2)
    assert judge(mark_owners.left(session), MARK_SECONDS)


def test_the_database_is_not_asked_all_the_time(clock: Clock, dead: str) -> None:
    server = Server()
    session = mark_owners.session_of("mysql", Server(number=5))
    judge = settled(server)
    for _ in range(50):
        assert not judge(f"{dead} {session}", LONG)
        clock.later(0.01)
    assert len(server.asked) == 2


@pytest.mark.parametrize("why", ["another server", "not known"])
def test_what_cannot_be_found_out_is_waited_for(
    clock: Clock, dead: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(name="b" if why == "another server" else "a")
    session = UNKNOWN if why == "not known" else mark_owners.session_of("mysql", Server(number=5))
    judge = settled(server)
    for age in (MARK_SECONDS, MARK_SECONDS + 10, COMMIT_TIMEOUT - 1):
        assert not judge(f"{dead} {session}", age)
        clock.later(2)
    assert judge(f"{dead} {session}", COMMIT_TIMEOUT + 1)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 2
    assert "cannot be looked for; until 300 s have passed, what it changes is asked of" in told[0]
    assert "taken for complete after 301 s ([keyfront_token_cache] commit_timeout)" in told[1]


@pytest.mark.parametrize("session", [UNKNOWN, "0123456789ab/5", HERE])
@pytest.mark.parametrize("owner", ["dead", "new"])
def test_while_the_database_does_not_answer_nothing_is_over(
    clock: Clock, dead: str, session: str, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor can anything be read of it that would be kept."""
    server = Server()
    server.away = True
    judge = settled(server)
    name = mark_owners.beginning(7) if owner == "new" else f"0123456789ab:1:5 {session}"
    for _ in range(3):
        assert not judge(name, 10 * COMMIT_TIMEOUT)
        clock.later(2)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert not settled()(name, 10 * COMMIT_TIMEOUT)  # who has no database leaves it to others


def test_each_is_asked_about_in_turn(clock: Clock, dead: str) -> None:
    """One whose commit never ends keeps nobody from being settled."""
    server = Server()
    ends, stays = (mark_owners.session_of("mysql", Server(number=n)) for n in (4, 5))
    judge = settled(server)
    found = []
    for _ in range(40):
        found += [x for x in (stays, ends) if judge(f"{dead} {x}", LONG)]
        clock.later(0.1)
    assert set(found) == {ends}
    assert 3 <= len([x for x in server.asked if "processlist" in x]) <= 5


def sqlite(path: Path) -> Settled:
    made = Settled()
    made.connections.append(("sqlite", lambda: sqlite3.connect(path)))
    return made


def test_on_sqlite_a_commit_is_over_when_nobody_writes(clock: Clock, tmp_path: Path) -> None:
    """Of a process of which nothing is known: in another container, or kept from us."""
    judge = sqlite(tmp_path / "db")
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as writer:
        writer.execute("CREATE TABLE t (x)")
        writer.execute("BEGIN IMMEDIATE")
        for owner in (f"0123456789ab:1:5 {HERE}", mark_owners.beginning(7)):
            assert not judge(owner, LONG)
            clock.later(2)
        writer.execute("COMMIT")
    for owner in (f"0123456789ab:1:5 {HERE}", mark_owners.beginning(7)):
        assert judge(owner, MARK_SECONDS)
        clock.later(2)
    assert judge(mark_owners.beginning(8), 0.0)  # at once, at the start


def test_sessions_of_servers_are_told_apart() -> None:
    a, b = Server(5), Server(5, name="b")
    sessions = (("mysql", a), ("postgresql", a), ("mysql", b))
    names = [mark_owners.session_of(kind, server) for kind, server in sessions]
    assert all(re.fullmatch("[0-9a-f]{12}/5", name) for name in names)
    assert names[0] == names[1] != names[2]


def test_the_session_behind_a_proxy_is_not_known() -> None:
    server = Server(5)
    server.greeted = 99
    assert mark_owners.session_of("mysql", server) == UNKNOWN
    assert mark_owners.session_of("oracle", server) == UNKNOWN
    assert mark_owners.session_of("mysql", object()) == UNKNOWN


def test_a_cluster_of_which_a_node_hangs_is_left_alone_for_a_while(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks it is in a request, and waits until it gives up."""
    hung: list[tuple[str, int]] = []

    def connect(host: str = "", port: int = 0) -> Any:
        if host:
            hung.append((host, port))
        return SimpleNamespace(host=host, close=lambda: None)

    status = {
        "wsrep_incoming_addresses": "10.0.0.1:3306,10.0.0.2:3306", "wsrep_cluster_size": "2",
        "wsrep_cluster_status": "Primary",
    }  # fmt: skip

    def node(connection: Any) -> dict[str, str]:
        if connection.host:
            raise TimeoutError
        return status

    monkeypatch.setattr(mark_owners, "session_of", lambda dialect, connection: "server/1")
    monkeypatch.setattr(mark_owners, "_rows", lambda connection, statement: [("size", "2")])
    monkeypatch.setattr(mark_owners, "_galera_node", node)
    judge = Settled()
    judge.connections.append(("mysql", connect))
    new = mark_owners.beginning(5)
    for age in range(3, 10):
        assert not judge(new, float(age))
        clock.later(1)
    assert hung == [("10.0.0.1", 3306)]
    clock.later(20)
    assert not judge(new, 40.0)
    assert len(hung) == 2
    clock.later(2)
    assert judge(new, COMMIT_TIMEOUT + 1)
