"""Slow requests are told of with the time of their parts, and with nothing of a client's."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from keyfront.common.request_phases import DIRECTORY, HASH, STATEMENTS, current, timed
from keyfront.errors import OptionError
from keyfront.gateway import slow_requests
from keyfront.gateway.slow_requests import from_environment, route, tell_slow
from support.served import PATIENCE

REQUEST = {"REQUEST_METHOD": "GET", "PATH_INFO": "/v3/auth/tokens"}
ID = "req-00000000-0000-0000-0000-000000000000"


class World:
    """An application that takes as long as it is told, by clocks that stand still meanwhile."""

    def __init__(self, *, seconds: float = 1.0) -> None:
        self.now = 100.0
        self.takes: dict[str | int, float] = {}
        self.application: Any = tell_slow(
            self._serve, seconds=seconds, clock=lambda: self.now, wall=lambda: 1e9 + self.now
        )

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        phases = current.get()
        assert phases is not None
        for name, seconds in self.takes.items():
            self.now += seconds
            if name == "cache":
                phases.cache = "misses"
            elif isinstance(name, int):
                phases.add(name, seconds)
        start("200 OK", [("X-OpenStack-Request-Id", ID), ("X-Subject-Token", "gAAAA-secret")])
        return [b"done"]

    def ask(self, **environ: Any) -> None:
        body = self.application({**REQUEST, **environ}, lambda *_: None)
        assert list(body) == [b"done"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_slow_one_is_told_of_with_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.takes = {DIRECTORY: 0.1, STATEMENTS: 0.25, HASH: 0.2, "cache": 0.0, "rest": 0.6}
    world.ask(HTTP_X_REQUEST_START=f"t={1e9 + world.now - 0.5}")
    assert lines(caplog) == [
        "slow request: GET /v3/auth/tokens 200 took 1150 ms: queue 500, directory 100 (1), "
        f"statements 250 (1), hash 200 (1), rest 600; cache misses; {ID}"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert current.get() is None


def test_a_quick_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.takes = {"rest": 0.9}
    world.ask()
    assert not lines(caplog)


def test_without_a_limit_nothing_is_wrapped() -> None:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        return []

    assert tell_slow(application, seconds=0) is application
    assert timed(HASH) is timed(STATEMENTS)


def test_an_application_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((1.0, 5.0, 5.0))

    def application(environ: Any, start_response: Any) -> list[bytes]:
        raise ValueError

    with pytest.raises(ValueError):
        tell_slow(application, seconds=1, clock=lambda: next(times))(REQUEST, lambda *_: None)
    (line,) = lines(caplog)
    assert line.startswith("slow request: GET /v3/auth/tokens unanswered took 4000 ms")
    assert current.get() is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v3/auth/tokens", "/v3/auth/tokens"),
        ("/v3/OS-TRUST/trusts/0b2c7f4e9d1f4d6ea1b1a2c3d4e5f607", "/v3/OS-TRUST/trusts/{id}"),
        ("/v3/users/deadbeef/groups", "/v3/users/{id}/groups"),
        ("/v2.0/tokens/gAAAAABm-secret_of_a_person", "/v2.0/tokens/{id}"),
        ("/v3/users/a\nERROR forged line", "/v3/users/{id}"),
        ("/v3/users/caf\u00e9", "/v3/users/{id}"),
        ("//x//", "//x//"),
    ],
)
def test_what_may_be_a_secret_is_no_part_of_a_line(path: str, told: str) -> None:
    assert route(path) == told


def test_nothing_of_a_client_forges_a_line(caplog: pytest.LogCaptureFixture) -> None:
    world = World(seconds=0.5)
    world.takes = {"rest": 1}
    hostile = "x\n2026 ERROR"
    world.ask(
        REQUEST_METHOD=hostile, PATH_INFO=f"/{hostile}", QUERY_STRING="token=gAAAA-secret",
        HTTP_X_REQUEST_START=hostile, HTTP_X_AUTH_TOKEN="gAAAA-secret",
    )  # fmt: skip
    (line,) = lines(caplog)
    assert line.startswith("slow request: - /{id} 200 took 1000 ms: queue 0,")
    assert "\n" not in line and "secret" not in line and "ERROR" not in line


def test_a_flood_is_told_of_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    world = World(seconds=0.01)
    world.takes = {"rest": 0.02}
    for _ in range(40):
        world.ask()
    assert len(lines(caplog)) == 10
    world.now += 1
    world.ask()
    assert lines(caplog)[-1].endswith("; 30 more were slow, and are not told of")
    world.ask()
    assert not lines(caplog)[-1].endswith("told of")


def test_threads_have_phases_of_their_own() -> None:
    seen: list[Any] = []
    both = threading.Barrier(2)

    def application(environ: Any, start_response: Any) -> list[bytes]:
        both.wait(PATIENCE)
        with timed(HASH):
            seen.append(current.get())
        both.wait(PATIENCE)
        return []

    slow = tell_slow(application, seconds=3600)
    threads = [threading.Thread(target=slow, args=(REQUEST, None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(set(map(id, seen))) == 2
    assert [phases.counts[HASH] for phases in seen] == [1, 1]


def test_statements_are_counted_also_those_that_fail() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    slow_requests.watch_database()
    engine = sqlalchemy.create_engine("sqlite://")
    found: list[Any] = []

    def application(environ: Any, start_response: Any) -> list[bytes]:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("select 1"))
            with pytest.raises(sqlalchemy.exc.OperationalError):
                connection.execute(sqlalchemy.text("select nothing from nowhere"))
        found.append(current.get())
        return []

    tell_slow(application, seconds=3600)(REQUEST, lambda *_: None)
    engine.dispose()
    (phases,) = found
    assert phases.counts[STATEMENTS] == 2
    assert phases.seconds[STATEMENTS] > 0


def test_fields_for_programs() -> None:
    formatters = pytest.importorskip("oslo_log.formatters")
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatters.JSONFormatter())
    slow_requests.LOG.addHandler(handler)
    try:
        world = World()
        world.takes = {STATEMENTS: 2.0}
        world.ask()
    finally:
        slow_requests.LOG.removeHandler(handler)
    extra = json.loads(handler.stream.getvalue())["extra"]
    assert (extra["route"], extra["ms"], extra["statements_ms"]) == ("/v3/auth/tokens", 2000, 2000)
    assert extra["request_id"] == ID


@pytest.mark.parametrize("text", ("0.0001", "3601", "-1", "soon", "nan"))
def test_a_limit_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KEYFRONT_SLOW_REQUEST", text)
    with pytest.raises(OptionError, match=r"KEYFRONT_SLOW_REQUEST.*0\.001 to 3600"):
        from_environment()


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("1.5", 1.5)])
def test_a_limit(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("KEYFRONT_SLOW_REQUEST", text)
    assert from_environment() == seconds
