"""What the benchmarks of the heartbeat compare and call missed; no server is started."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import (
    goals,
    heartbeat,
    heartbeat_worker,
)
from keyfront.benchmarks.compare.goals import (
    HEARTBEAT_GOALS,
    HEARTBEAT_PERCENT,
    MET,
    MISSED,
)
from keyfront.benchmarks.compare.heartbeat import CASES, Count, Idle
from keyfront.benchmarks.compare.heartbeat_worker import PATCHES, Task
from keyfront.benchmarks.gate.worker import callgrind
from keyfront.benchmarks.servers import rabbitmq
from keyfront.errors import MissingPartError, ServerError
from support.served import PATIENCE

# Instructions and switches


def test_every_goal_is_of_cases_that_are_measured_and_every_case_has_one() -> None:
    measured = {(f"kept, {name}", f"stock, {name}") for name in CASES}
    assert {(goal.first, goal.second) for goal in HEARTBEAT_GOALS} == measured
    assert {goal.figure for goal in HEARTBEAT_GOALS} == {"instructions"}
    assert not set(HEARTBEAT_GOALS) & {*goals.GOALS, *goals.LDAP_GOALS}


def test_goals_are_those_that_were_set() -> None:
    bounds = {goal.first.split(", ")[1]: goal.bound for goal in HEARTBEAT_GOALS}
    assert bounds == {"cast": 1.01, "own": 1.01, "shared": 1.05}
    assert HEARTBEAT_PERCENT == 0.1


def test_one_connection_is_not_shared_by_plain_threads() -> None:
    assert ("shared", "none") not in CASES.values()
    assert {case.patch for case in CASES.values()} == set(PATCHES)


def counts(more: float) -> dict[str, Count]:
    """What was counted of a case, each variant with so much more than the one before."""
    return {
        side: Count(1000.0 + number * more, 500.0, 0)
        for number, side in enumerate(heartbeat.VARIANTS)
    }


def test_the_table_of_instructions_is_whole() -> None:
    report = heartbeat.counted({name: counts(1) for name in CASES})
    (table,) = report.tables
    assert table.rows[0] == ["cast, none: stock", 1000, "", 500, 0]
    assert table.rows[3] == ["cast, none: kept", 1003, "+0.3 %", 500, 0]
    assert max(map(len, results.plain(table).splitlines())) <= 80
    assert {verdict for _, verdict in report.verdicts} == {MET}
    assert len(report.verdicts) == len(CASES)


def test_what_costs_more_is_missed() -> None:
    ((text, verdict),) = heartbeat.counted({"shared, gevent": counts(17)}).verdicts
    assert verdict == MISSED
    assert text.startswith(
        "instructions of kept, shared, gevent / stock, shared, gevent <= 1.05: 1.05"
    )


def test_without_valgrind_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callgrind.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(callgrind.platform, "machine", lambda: callgrind.MACHINE)
    assert heartbeat.main(["instructions"]) == 2
    assert "apt install valgrind" in capsys.readouterr().err


# Idle connections


class Broker:
    """A RabbitMQ, as far as its port is asked for."""

    port = 5

    def __init__(self, folder: Path) -> None:
        pass

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_thread_is_judged_at_both_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at(port: int, patch: str, seconds: float) -> dict[str, Idle]:
        """Nothing costs much, but with gevent: 0.02 % of a core."""
        often = 0.11 if patch == "gevent" else 0.02
        return {
            f"every 30 s, {patch}": Idle(0.02, 10.0, 20.0),
            f"often, {patch}": Idle(often, 10.0, 20.0),
        }

    monkeypatch.setattr(rabbitmq, "broker", Broker)
    monkeypatch.setattr(heartbeat, "look_at", look_at)
    report = heartbeat.idle(20)
    missed = [text for text, verdict in report.verdicts if verdict == MISSED]
    assert missed == ["often, gevent <= 0.1 % of a core: 0.11"]
    (table,) = report.tables
    assert len(table.rows) == 2 * len(PATCHES)
    assert table.rows[0] == ["every 30 s, none", "0.0200", "10.00", "20.0"]


def test_what_beats_a_hundred_times_as_often_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def run(role: str, task: Task) -> dict[str, float]:
        assert role == "idle"
        asked.append(task)
        return {"percent": 2.0, "beats": 1000.0, "microseconds": 20.0}

    monkeypatch.setattr(heartbeat_worker, "run", run)
    found = heartbeat.look_at(5, "gevent", 64)
    assert found == {
        "every 30 s, gevent": (2.0, 1000.0, 20.0),
        "every 0.3 s / 100, gevent": (0.02, 10.0, 20.0),
    }
    assert [(task.interval, task.seconds, task.connections) for task in asked] == [
        (30.0, 64, 300),
        (0.3, 8, 300),
    ]


# The worker


def test_the_clock_of_a_thread_is_its_own() -> None:
    before = heartbeat_worker.threads()
    working, done = threading.Event(), threading.Event()

    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            sum(range(1000))
        working.set()
        done.wait(PATIENCE)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert working.wait(PATIENCE)
        added = heartbeat_worker.threads() - before
        assert added == {thread.native_id}
        assert 0.05 <= heartbeat_worker.thread_seconds(added.pop()) < PATIENCE
    finally:
        done.set()
        thread.join()


class Connection:
    """One of py-amqp, as far as a publisher needs it; notes what is sent."""

    def __init__(self, sent: list[int]) -> None:
        self._sent = sent

    def channel(self) -> Connection:
        return self

    def basic_publish(self, message: Any, exchange: str) -> None:
        assert exchange == "amq.fanout"
        if len(self._sent) == 200:
            raise ConnectionResetError("gone")
        self._sent.append(len(message.body))


@pytest.mark.parametrize(("over", "small", "large"), [("own", 1, 0), ("shared", 72, 8)])
def test_a_step_sends_its_messages(
    over: str, small: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def connect(port: int, *, heartbeat: float) -> Connection:
        assert (port, heartbeat) == (5, 60)
        return Connection(sent)

    monkeypatch.setattr(rabbitmq, "connect", connect)
    step = heartbeat_worker.sender(Task(5, over=over))
    assert not sent
    step()
    assert (sent.count(1000), sent.count(100_000)) == (small, large)
    assert len(sent) == heartbeat.MESSAGES[over]


def test_a_message_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq, "connect", lambda port, *, heartbeat: Connection([1] * 200))
    step = heartbeat_worker.sender(Task(5, over="shared"))
    with pytest.raises(ServerError, match="was not sent: ConnectionResetError: gone"):
        step()


def test_a_task_crosses_to_a_worker_and_back() -> None:
    task = Task(5, "gevent", True, "shared", 7, 300, 0.3, 12.5, "none")
    assert Task(**json.loads(json.dumps(task._asdict()))) == task


# The commands


@pytest.mark.parametrize("kind", heartbeat.COMPARISONS)
def test_without_rabbitmq_its_package_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(names: tuple[str, ...], packages: str) -> str:
        if packages == "rabbitmq-server":
            raise MissingPartError(f"{names[0]} is not installed: run apt install {packages}")
        return "/bin/true"

    monkeypatch.setattr(rabbitmq, "_DEBIAN", Path("/does/not/exist"))
    monkeypatch.setattr(callgrind, "absent", lambda: "")
    monkeypatch.setattr("keyfront.common.programs.system_program", find)
    monkeypatch.setattr("keyfront.common.programs.uwsgi_program", lambda: "/bin/true")
    assert heartbeat.main([kind]) == 2
    assert "apt install rabbitmq-server" in capsys.readouterr().err


def test_a_case_that_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callgrind, "absent", lambda: "")
    assert heartbeat.main(["instructions", "--only", "nothing"]) == 2
    assert "--only = nothing: must be in the name of a case" in capsys.readouterr().err
