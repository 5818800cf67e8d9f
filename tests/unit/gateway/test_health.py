"""What /livez and /readyz answer: to whom, how long they take, and what they leave alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.node import drain, health
from keyfront.gateway.node.counters import NodeCounts, count_requests
from keyfront.gateway.node.health import KEPT, Checks
from support.served import PATIENCE, wait_for


def _application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"the application"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Part:
    """A part that is asked: it hangs, raises or answers as it is told."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self) -> None:
        self.asked += 1
        assert self.answers.wait(PATIENCE)
        if self.error is not None:
            raise self.error


def _checks(clock: Clock | None = None, limit: float = PATIENCE, **parts: Part) -> Checks:
    asks = {name: (part, limit) for name, part in parts.items()}
    return Checks(asks, described=str, **({"clock": clock} if clock else {}))


def _health(checks: Checks, folder: Path | None = None) -> Any:
    answers = health.answers(settings=health.from_environment(), checks=checks, folder=folder)
    return count_requests(_application, NodeCounts(), answers)


def _ask(
    application: Any, path: str, method: str = "GET", address: str | None = "192.0.2.1",
    **environ: str,
) -> tuple[str, Any]:
    seen: list[str] = []
    asked = {"PATH_INFO": path, "REQUEST_METHOD": method, **environ}
    if address is not None:
        asked["REMOTE_ADDR"] = address
    body = b"".join(application(asked, lambda status, headers: seen.append(status)))
    return seen[0][:3], json.loads(body) if body.startswith(b"{") else body


def test_alive_and_ready() -> None:
    application = _health(_checks(database=Part()))
    assert _ask(application, "/livez") == ("200", {"status": "alive"})
    assert _ask(application, "/readyz") == ("200", {"status": "ready"})
    assert _ask(application, "/readyz", "HEAD") == ("200", b"")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/readyz"), ("DELETE", "/livez"), ("GET", "/readyz/"), ("GET", "/healthcheck"),
        ("GET", "/v3/livez"), ("GET", "/"), ("GET", ""),
    ],
)  # fmt: skip
def test_all_else_is_the_applications(method: str, path: str) -> None:
    assert _ask(_health(_checks()), path, method) == ("200", b"the application")


def test_junk_is_the_applications() -> None:
    assert b"".join(_health(_checks())({}, lambda *_: None)) == b"the application"


def test_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYFRONT_HEALTH", "/keyfront/")
    application = _health(_checks())
    assert _ask(application, "/keyfront/readyz")[1] == {"status": "ready"}
    assert _ask(application, "/readyz")[1] == b"the application"
    monkeypatch.setenv("KEYFRONT_HEALTH", "off")
    assert _ask(_health(_checks()), "/readyz")[1] == b"the application"


def test_a_part_that_is_away() -> None:
    part = Part()
    part.error = RuntimeError("it is away")
    application = _health(_checks(database=part, keys=Part()))
    assert _ask(application, "/livez")[0] == "200"
    assert _ask(application, "/readyz") == ("503", {"status": "not ready"})
    status, told = _ask(application, "/readyz", address="127.0.0.1")
    assert status == "503"
    assert told["parts"]["database"]["error"] == "it is away"
    assert told["parts"]["keys"]["ok"]


def test_a_part_is_asked_again_after_no_thread_could_be_had() -> None:
    clock, part = Clock(), Part()
    checks = _checks(clock, database=part)
    before = threading.stack_size(1 << 47)  # more than a process has addresses for
    try:
        found = checks.findings()["database"]
    finally:
        threading.stack_size(before)
    assert not found.ok
    assert "thread" in found.error
    assert part.asked == 0
    clock.now += KEPT
    assert checks.findings()["database"].ok


def test_an_answer_is_kept_for_a_second() -> None:
    clock, part = Clock(), Part()
    checks = _checks(clock, database=part)
    for _ in range(3):
        assert checks.findings()["database"].ok
    assert part.asked == 1
    part.error = RuntimeError("gone")
    clock.now += KEPT
    assert not checks.findings()["database"].ok
    assert part.asked == 2


def test_nobody_waits_for_what_hangs() -> None:
    """Once, for as long as it has; then not at all, nor is it asked again, until it answers."""
    part, other = Part(), Part()
    part.answers.clear()
    checks = _checks(limit=0.01, database=part, keys=other)
    for _ in range(3):
        findings = checks.findings()
        assert not findings["database"].ok
        assert "no answer" in findings["database"].error
    assert part.asked == 1
    part.answers.set()
    # seen once: a slow thread may not answer in its hundredth of a second the next time
    wait_for(lambda: checks.findings()["database"].ok, "it has answered")


def test_many_at_once_ask_once() -> None:
    part = Part()
    part.answers.clear()
    # by a clock that stands: a thread that comes a second late would ask again
    checks = _checks(Clock(), database=part)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(checks.findings()["database"].ok))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    part.answers.set()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert part.asked == 1


def test_a_child_asks_for_itself() -> None:
    part = Part()
    part.answers.clear()
    checks = _checks(limit=0.01, database=part)
    assert not checks.findings()["database"].ok
    checks.after_fork()
    part.answers.set()
    checks = _checks(database=part)
    assert checks.findings()["database"].ok


def test_a_draining_node_is_alive_and_not_ready(tmp_path: Path) -> None:
    part = Part()
    application = _health(_checks(database=part), tmp_path)
    drain.begin(tmp_path)
    assert _ask(application, "/readyz") == ("503", {"status": "draining"})
    assert part.asked == 0
    assert _ask(application, "/livez")[0] == "200"
    assert drain.undo(tmp_path)
    assert not drain.undo(tmp_path)
    assert _ask(application, "/readyz")[0] == "200"


@pytest.mark.parametrize(
    ("detail", "address", "forwarded", "sees"),
    [
        ("", "127.0.0.1", None, True),
        ("", "::1", None, True),
        ("", "::ffff:127.0.0.1", None, True),
        ("", "", None, True),  # a unix socket
        ("", "unix:", None, True),
        ("", None, None, False),
        ("", "192.0.2.1", None, False),
        ("", "nonsense", None, False),
        # a web server on this machine asks for somebody else
        ("", "127.0.0.1", "192.0.2.1", False),
        ("", "127.0.0.1", "127.0.0.1, 192.0.2.1", False),
        ("", "192.0.2.1", "127.0.0.1", False),
        ("", "127.0.0.1", "127.0.0.1", True),
        ("nobody", "127.0.0.1", None, False),
        ("192.0.2.0/24", "192.0.2.1", None, True),
        ("192.0.2.0/24", "127.0.0.1", None, False),
        ("local,192.0.2.0/24", "127.0.0.1", "192.0.2.9", True),
        ("0.0.0.0/0", "198.51.100.7", None, True),
    ],
)
def test_who_sees_the_detail(
    detail: str, address: str | None, forwarded: str | None, sees: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if detail:
        monkeypatch.setenv("KEYFRONT_HEALTH_DETAIL", detail)
    environ = {"HTTP_X_FORWARDED_FOR": forwarded} if forwarded else {}
    told = _ask(_health(_checks(keys=Part())), "/readyz", address=address, **environ)[1]
    assert ("parts" in told) == sees


def test_the_parts_that_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(health.from_environment().limits) == set(health.PARTS)
    monkeypatch.setenv("KEYFRONT_READY", "database:0.5 keys:1")
    assert health.from_environment().limits == {"database": 0.5, "keys": 1.0}
    monkeypatch.setenv("KEYFRONT_READY", "")
    assert health.from_environment().limits == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("KEYFRONT_READY", "database"), ("KEYFRONT_READY", "disk:1"),
        ("KEYFRONT_READY", "keys:nan"), ("KEYFRONT_READY", "keys:0"), ("KEYFRONT_READY", "keys:61"),
        ("KEYFRONT_HEALTH", "keyfront"), ("KEYFRONT_HEALTH", "/key front"),
        ("KEYFRONT_HEALTH_DETAIL", "everybody"), ("KEYFRONT_HEALTH_DETAIL", "192.0.2.1/24"),
    ],
)  # fmt: skip
def test_errors_name_the_option(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(option, value)
    with pytest.raises(OptionError, match=option):
        health.from_environment()
