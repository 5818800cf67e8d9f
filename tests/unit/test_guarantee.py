"""Which databases are warned about: those that can answer from the past."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.middleware.tokens import guarantee


class Cursor:
    """Gives rows for whatever is asked."""

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self.rows = list(rows)
        self.asked: list[str] = []

    def execute(self, statement: str) -> None:
        self.asked.append(statement)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self.rows

    def fetchone(self) -> tuple[Any, ...]:
        return self.rows[0]

    def close(self) -> None:
        self.asked.append("closed")


@pytest.mark.parametrize(
    ("dialect", "rows", "doubted"),
    [
        ("sqlite", [], ""),
        ("mysql", [], ""),
        ("mysql", [("wsrep_on", "OFF"), ("wsrep_sync_wait", "0")], ""),
        ("mysql", [("wsrep_on", "ON"), ("wsrep_sync_wait", "0")], "mysql_wsrep_sync_wait = 1"),
        ("mariadb", [("wsrep_on", "ON"), ("wsrep_sync_wait", "6")], "mysql_wsrep_sync_wait = 1"),
        ("mysql", [("wsrep_on", "ON"), ("wsrep_sync_wait", "1")], ""),
        ("mysql", [("wsrep_on", "ON"), ("wsrep_sync_wait", "7")], ""),
        ("postgresql", [(False,)], ""),
        ("postgresql", [(True,)], "standby"),
    ],
)
def test_doubts(dialect: str, rows: list[tuple[Any, ...]], doubted: str) -> None:
    found = guarantee.doubts(dialect, Cursor(*rows))
    assert len(found) == bool(doubted)
    assert doubted in "".join(found)


def test_a_replica_for_reads_is_doubted() -> None:
    conf = SimpleNamespace(database=SimpleNamespace(slave_connection=None))
    assert guarantee.replica_doubts(conf) == []
    conf.database.slave_connection = "mysql://keystone:hush@replica/keystone"
    (found,) = guarantee.replica_doubts(conf)
    assert "slave_connection" in found
    assert "hush" not in found


def test_the_first_connection_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    cursor = Cursor(("wsrep_on", "ON"))
    connection = SimpleNamespace(cursor=lambda: cursor)
    look = guarantee.FirstConnection("mysql")
    with caplog.at_level(logging.WARNING):
        look(connection, None)
        look(connection, None)
    assert len(cursor.asked) == 2
    assert [record.getMessage().count("Galera") for record in caplog.records] == [1]


def test_a_database_that_refuses_to_say_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def cursor() -> Any:
        raise PermissionError("secret")

    guarantee.FirstConnection("mysql")(SimpleNamespace(cursor=cursor), None)
    assert "could not find out" in caplog.text
    assert "secret" not in caplog.text
