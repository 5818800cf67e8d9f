"""Which database connections are not vouched for, and when they are asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.gateway.keystone import stale_reads
from keyfront.gateway.keystone.stale_reads import (
    Connections,
    mysql_doubt,
    postgresql_doubt,
)
from keyfront.middleware.tokens.epochs import Epoch
from keyfront.middleware.tokens.request import Request, current

GALERA = {"wsrep_on": "1"}
GROUP = {"group_replication_group_name": "5a1f"}
ONE = "group_replication_single_primary_mode"
LEVEL = "group_replication_consistency"
POSITION = {"gtid_slave_pos": "0-1-3"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"read_only": "0", "super_read_only": "0", "innodb_read_only": "0"}, ""),
        ({"read_only": "1"}, "read_only"),
        ({"read_only": "NO_LOCK"}, "read_only"),
        ({"read_only": "0", "innodb_read_only": "1"}, "read_only"),
        ({"read_only": "0", "super_read_only": "ON"}, "read_only"),
        ({"wsrep_on": "0", "wsrep_sync_wait": "0"}, ""),
        ({**GALERA, "wsrep_sync_wait": "0"}, "mysql_wsrep_sync_wait = 1"),
        ({**GALERA, "wsrep_sync_wait": "6"}, "mysql_wsrep_sync_wait = 1"),
        (GALERA, "mysql_wsrep_sync_wait = 1"),
        ({**GALERA, "wsrep_sync_wait": "1"}, ""),
        ({**GALERA, "wsrep_sync_wait": "0", "wsrep_cluster_size": "1"}, ""),
        ({**GALERA, "wsrep_sync_wait": "0", "wsrep_cluster_size": "2"}, "mysql_wsrep_sync_wait"),
        ({**GALERA, "wsrep_sync_wait": "7"}, ""),
        ({**GALERA, "wsrep_sync_wait": "1", **POSITION, "gtid_current_pos": "0-1-3"}, ""),
        ({"group_replication_group_name": ""}, ""),
        (GROUP, "EVENTUAL"),
        ({**GROUP, LEVEL: "EVENTUAL", ONE: "1"}, "EVENTUAL"),
        ({**GROUP, LEVEL: "AFTER"}, "AFTER"),
        ({**GROUP, LEVEL: "AFTER", ONE: "1"}, ""),
        ({**GROUP, LEVEL: "BEFORE_ON_PRIMARY_FAILOVER", ONE: "1"}, ""),
        (
            {**GROUP, LEVEL: "BEFORE_ON_PRIMARY_FAILOVER", ONE: "1", "super_read_only": "1"},
            "BEFORE",
        ),
        ({**GROUP, LEVEL: "BEFORE", "read_only": "1"}, ""),
        ({**GROUP, LEVEL: "BEFORE_AND_AFTER"}, ""),
    ],
)
def test_what_is_known_of_mysql(variables: dict[str, str], said: str) -> None:
    doubt = mysql_doubt((7, 7), variables)
    assert (doubt is not None) == bool(said)
    if doubt is not None:
        assert said in doubt.reason
        assert doubt.certain


@pytest.mark.parametrize(
    ("variables", "numbers", "said"),
    [
        ({"gtid_slave_pos": "", "gtid_current_pos": ""}, (7, 7), ""),
        ({"gtid_slave_pos": "", "gtid_current_pos": "0-2-9"}, (7, 7), ""),
        ({**POSITION, "gtid_current_pos": "0-2-4", "slaves_running": "0"}, (7, 7), ""),
        ({**POSITION, "gtid_current_pos": "0-1-3"}, (7, 7), "RESET SLAVE ALL"),
        ({**POSITION, "gtid_current_pos": "0-2-4", "slaves_running": "2"}, (7, 7), "RESET SLAVE"),
        ({**GALERA, "wsrep_sync_wait": "1", "slaves_running": "1"}, (7, 7), "RESET SLAVE ALL"),
        ({}, (7, 8), "proxy"),
        ({}, (None, 8), "proxy"),
    ],
)
def test_what_cannot_be_known_of_mysql(
    variables: dict[str, str], numbers: tuple[Any, Any], said: str
) -> None:
    doubt = mysql_doubt(numbers, variables)
    assert (doubt is not None) == bool(said)
    if doubt is not None:
        assert said in doubt.reason
        assert not doubt.certain


def test_postgresql() -> None:
    assert postgresql_doubt((7, 7), "off") is None
    for numbers in ((7, 7), (7, 8)):
        standby = postgresql_doubt(numbers, "on")
        assert standby is not None and standby.certain and "standby" in standby.reason
    proxy = postgresql_doubt((7, 8), "off")
    assert proxy is not None and not proxy.certain and "proxy" in proxy.reason


class Server:
    """A connection to a PostgreSQL, as far as it is asked."""

    def __init__(self) -> None:
        self.reads_only = "on"
        self.asked: list[str] = []
        self.info = SimpleNamespace(backend_pid=7)
        self.error: Exception | None = None

    def cursor(self) -> Any:
        return self

    def execute(self, statement: str) -> None:
        self.asked.append(statement)
        if self.error is not None:
            raise self.error

    def fetchone(self) -> tuple[int, str]:
        return 7, self.reads_only

    def close(self) -> None:
        pass

    def rollback(self) -> None:
        self.asked.append("ROLLBACK")

    @property
    def times(self) -> int:
        """How often it was asked."""
        return self.asked.count("ROLLBACK")


class Ended(Exception):
    """What a driver says of a connection that the server has ended."""


def listener(name: str, *, bounded: bool = False) -> Connections:
    dialect: Any = SimpleNamespace(
        name=name, is_disconnect=lambda error, connection, cursor: isinstance(error, Ended)
    )
    return Connections(dialect, bounded=bounded)


@contextmanager
def request(since: object | None) -> Iterator[Request]:
    made = Request(since=since)
    before = current.set(made)
    try:
        yield made
    finally:
        current.reset(before)


def unvouched(look: Connections, server: Server, record: Any, since: object = "1.5") -> bool:
    with request(since) as made:
        look(server, record, None)
    return made.unvouched


@pytest.mark.parametrize(("since", "later"), [("1.5", "1.6"), (Epoch(1, 5), Epoch(1, 6))])
def test_a_connection_is_asked_again_after_a_change(since: object, later: object) -> None:
    look, server, record = listener("postgresql"), Server(), SimpleNamespace(info={})
    server.reads_only = "off"
    assert not unvouched(look, server, record, since)
    server.reads_only = "on"  # no change since: what it has said holds
    assert not unvouched(look, server, record, since)
    assert server.times == 1
    assert unvouched(look, server, record, later)


def test_each_connection_is_asked() -> None:
    look, first, second = listener("postgresql"), Server(), Server()
    first.reads_only = "off"
    with request("1.5") as made:
        look(first, SimpleNamespace(info={}), None)
        assert not made.unvouched
        look(second, SimpleNamespace(info={}), None)
        assert made.unvouched
        look(first, SimpleNamespace(info={}), None)
        assert made.unvouched, "what the request has read of the second is in it"


def test_one_that_is_not_vouched_for_is_asked_again_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(stale_reads, "time", clock)
    look, server, record = listener("postgresql"), Server(), SimpleNamespace(info={})
    assert unvouched(look, server, record)
    server.reads_only = "off"
    assert unvouched(look, server, record)
    assert server.times == 1
    now[0] = 6.0
    assert not unvouched(look, server, record)


def test_what_is_not_kept_need_not_be_vouched_for() -> None:
    look, server, record = listener("postgresql"), Server(), SimpleNamespace(info={})
    look(server, record, None)  # no request at all
    assert not unvouched(look, server, record, None)
    assert server.asked == []


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    look = listener("postgresql")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert unvouched(look, Server(), SimpleNamespace(info={}), f"1.{number}")
    (record,) = caplog.records
    assert "standby" in record.getMessage()


def test_a_database_that_refuses_to_say_is_not_vouched_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    server.error = PermissionError("secret")
    assert unvouched(listener("postgresql"), server, SimpleNamespace(info={}))
    assert "could not be asked" in caplog.text
    assert "secret" not in caplog.text


def test_one_that_has_ended_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.error = Ended()
    assert unvouched(listener("postgresql"), server, SimpleNamespace(info={}))
    assert caplog.text == ""


def test_an_unknown_kind_is_not_vouched_for() -> None:
    assert unvouched(listener("oracle"), Server(), SimpleNamespace(info={}))


def test_a_bound_covers_what_cannot_be_known_only() -> None:
    record = SimpleNamespace(info={})
    assert not unvouched(listener("oracle", bounded=True), Server(), record)
    record = SimpleNamespace(info={})
    assert unvouched(listener("postgresql", bounded=True), Server(), record)


def test_requests_at_the_same_time_do_not_mix() -> None:
    look, server, record = listener("postgresql"), Server(), SimpleNamespace(info={})
    found = []
    with request("1.5") as made:
        look(server, record, None)
        other = threading.Thread(target=lambda: found.append(current.get()))
        other.start()
        other.join()
    assert made.unvouched
    assert found == [None]
