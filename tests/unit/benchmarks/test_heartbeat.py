"""What the benchmarks of the heartbeat compare and call missed; no server is started."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.benchmarks.compare import (
    goals,
    heartbeat_idle,
    heartbeat_instructions,
    heartbeat_publish,
    heartbeat_restart,
    heartbeat_worker,
)
from keyfront.benchmarks.compare.goals import (
    HEARTBEAT_GOALS,
    HEARTBEAT_PERCENT,
    HEARTBEAT_REQUESTS,
    MET,
    MISSED,
    UNCLEAR,
)
from keyfront.benchmarks.compare.heartbeat_idle import Idle, Results
from keyfront.benchmarks.compare.heartbeat_publish import CASES, SIDES, Sample, Samples
from keyfront.benchmarks.compare.heartbeat_worker import PATCHES, Task
from keyfront.benchmarks.compare.ratios import ratio
from keyfront.benchmarks.gate.worker import callgrind
from keyfront.benchmarks.load.measured import CLOSED, Load
from keyfront.benchmarks.worlds import rabbitmq
from keyfront.errors import KeyfrontError, MissingPartError, ServerError
from support.served import PATIENCE

# Messages


@pytest.fixture
def samples() -> Samples:
    """Two rounds: nothing is slower with the heartbeat than without."""
    return {
        case.name(side): [Sample(1000.0, 30.0), Sample(500.0, 60.0)]
        for case in CASES
        for side in SIDES
    }


def test_every_goal_is_of_cases_that_are_measured_and_every_case_has_one() -> None:
    measured = {(case.name("kept"), case.name("stock")) for case in CASES}
    assert {(goal.first, goal.second) for goal in HEARTBEAT_GOALS} == measured
    assert {goal.figure for goal in HEARTBEAT_GOALS} == {"rate"}
    assert not set(HEARTBEAT_GOALS) & {*goals.GOALS, *goals.LDAP_GOALS, *HEARTBEAT_REQUESTS}


def test_goals_are_those_that_were_set() -> None:
    bounds = {goal.first.split(", ")[1]: goal.bound for goal in HEARTBEAT_GOALS}
    assert bounds == {"eight": 0.99, "one": 0.95, "oslo": 0.99}
    assert {goal.bound for goal in HEARTBEAT_REQUESTS} == {0.99}
    assert HEARTBEAT_PERCENT == 0.1


def test_one_connection_is_not_shared_by_plain_threads() -> None:
    assert ("one", "none") not in CASES
    assert {case.patch for case in CASES} == set(PATCHES)


def test_a_ratio_is_taken_in_each_round(samples: Samples) -> None:
    goal = HEARTBEAT_GOALS[0]
    samples[goal.first] = [Sample(990.0, 30.0), Sample(400.0, 60.0)]
    assert ratio(samples, *goal[:3]).pairs == (0.99, 0.8)


@pytest.mark.parametrize(
    ("kept", "verdict"), [((1000, 500), MET), ((900, 500), UNCLEAR), ((900, 450), MISSED)]
)
def test_goals_are_judged_by_the_pairs(
    samples: Samples, kept: tuple[float, float], verdict: str
) -> None:
    assert {found for _, found in heartbeat_publish.judge(samples)} == {MET}
    goal = HEARTBEAT_GOALS[0]
    samples[goal.first] = [Sample(rate, 30.0) for rate in kept]
    text, found = heartbeat_publish.judge(samples)[0]
    assert found == verdict
    assert text.startswith("kept, eight, none / stock, eight, none >= 0.99: ")


def test_only_what_was_measured_is_judged_and_shown(samples: Samples) -> None:
    some: Samples = {name: each for name, each in samples.items() if "one, gevent" in name}
    assert len(heartbeat_publish.judge(some)) == 1
    assert "eventlet" not in heartbeat_publish.table(some, {})


def test_the_table_of_messages_is_whole(samples: Samples) -> None:
    writes = {patch: {"left": [2.0, 3.0], "kept": [2.5, 3.5]} for patch in PATCHES}
    lines = heartbeat_publish.table(samples, writes).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + len(CASES) + 2 + len(PATCHES)
    assert lines[1].split() == [
        "eight,", "none", "750", "750", "1.000", "(1.000", "to", "1.000)", "45.0", "45.0",
    ]  # fmt: skip
    assert lines[-1].split() == ["gevent", "2.50", "3.00", "0.50", "(0.50", "to", "0.50)"]


def measured(monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[tuple[str, Task]]:
    """The workers that a measurement starts, in their order."""
    started: list[tuple[str, Task]] = []

    def run(role: str, task: Task) -> dict[str, Any]:
        started.append((role, task))
        return {"rate": 1.0, "cpu": 1.0} if role == "publish" else {"kept": [1.0], "left": [1.0]}

    class Broker:
        port = 5

        def __init__(self, folder: Path) -> None:
            pass

        def __enter__(self) -> Broker:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(rabbitmq, "broker", Broker)
    monkeypatch.setattr(heartbeat_worker, "run", run)
    samples, writes = heartbeat_publish.measure(rounds, CASES, part=10)
    assert {len(each) for each in samples.values()} == {rounds}
    assert set(writes) == set(PATCHES)
    return started


def test_pairs_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    started = measured(monkeypatch, 2)
    processes = [task for role, task in started if role == "publish"]
    assert len(processes) == 2 * 2 * len(CASES)
    # ABBA: without, with; with, without
    first, second = processes[: 2 * len(CASES)], processes[2 * len(CASES) :]
    assert [task.installed for task in first] == [False, True] * len(CASES)
    assert [task.installed for task in second] == [True, False] * len(CASES)
    # the two of a pair are the same otherwise
    for pair in zip(processes[::2], processes[1::2], strict=True):
        assert pair[0]._replace(installed=True) == pair[1]._replace(installed=True)


# Idle connections


@pytest.fixture
def results() -> Results:
    """Nothing costs much: 0.02 % of a core, and every request is answered as before."""
    idle = {patch: Idle(0.02, 10.0, 20.0) for patch in PATCHES}
    names = [name for goal in HEARTBEAT_REQUESTS for name in (goal.first, goal.second)]
    return Results(dict(idle), dict(idle), {name: [1000.0, 500.0] for name in names})


def test_the_thread_is_judged_at_both_intervals(results: Results) -> None:
    assert {verdict for _, verdict in heartbeat_idle.judge(results)} == {MET}
    results.scaled["gevent"] = Idle(0.11, 10.0, 110.0)
    missed = [text for text, verdict in heartbeat_idle.judge(results) if verdict == MISSED]
    assert missed == ["CPU of the thread, gevent, scaled <= 0.1 %: 0.1100"]


def test_requests_are_judged_by_the_pairs(results: Results) -> None:
    results.rates["kept, eventlet"] = [900.0, 450.0]
    missed = [text for text, verdict in heartbeat_idle.judge(results) if verdict == MISSED]
    assert missed == ["requests, kept, eventlet / bare, eventlet >= 0.99: 0.900 (0.900 to 0.900)"]


def test_the_table_of_idle_connections_is_whole(results: Results) -> None:
    lines = heartbeat_idle.table(results).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + 2 * len(PATCHES) + 2 + len(HEARTBEAT_REQUESTS)
    assert lines[1].split() == ["every", "30", "s,", "none", "0.0200", "10.00", "20.0"]
    assert "every 0.3 s / 100, none" in lines[4]


def test_what_beats_a_hundred_times_as_often_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def run(role: str, task: Task) -> dict[str, float]:
        assert role == "idle"
        asked.append(task)
        return {"percent": 2.0, "beats": 1000.0, "microseconds": 20.0}

    monkeypatch.setattr(heartbeat_worker, "run", run)
    direct, scaled = heartbeat_idle.look_at(5, "gevent", seconds=60, fast_seconds=3)
    assert direct == (2.0, 1000.0, 20.0)
    assert scaled == (0.02, 10.0, 20.0)
    assert [(task.interval, task.seconds, task.connections) for task in asked] == [
        (30.0, 60, 300),
        (0.3, 3, 300),
    ]


def test_services_are_loaded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def run(url: str, headers: dict[str, str], *, seconds: int, connections: int) -> Load:
        loaded.append(url)
        # it gets slower all the time
        return Load(
            generator="wrk", loop=CLOSED, good=1000 - 100 * len(loaded), seconds=1.0,
            failures=Counter(read=len(loaded) // 9), generator_cpu=0.0,
        )  # fmt: skip

    monkeypatch.setattr("keyfront.benchmarks.load.wrk.run", run)
    urls = {"bare": "A", "kept": "B"}
    assert heartbeat_idle.in_turns(urls, odd=False) == {"bare": 750.0, "kept": 750.0}
    heartbeat_idle.in_turns(urls, odd=True)
    assert loaded == list("ABBABAAB")
    with pytest.raises(ServerError, match="1 requests of bare failed"):
        heartbeat_idle.in_turns(urls, odd=False)


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
    """One of py-amqp, as far as a publisher needs it; notes what is done."""

    def __init__(self, done: list[tuple[int, str]], number: int) -> None:
        self._done = done
        self._number = number

    def channel(self) -> Connection:
        return self

    def basic_publish(self, message: Any, exchange: str) -> None:
        assert exchange == "amq.fanout"
        self._done.append((self._number, str(len(message.body))))

    def basic_qos(self, *_: object) -> None:
        self._done.append((self._number, "answered"))


@pytest.mark.parametrize(("over", "connections", "large"), [("eight", 8, 0), ("one", 1, 16)])
def test_all_messages_are_sent_and_their_arrival_is_waited_for(
    over: str, connections: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Connection] = []
    done: list[tuple[int, str]] = []

    def connect(port: int, *, heartbeat: float) -> Connection:
        assert (port, heartbeat) == (5, 60)
        made.append(Connection(done, len(made)))
        return made[-1]

    monkeypatch.setattr(rabbitmq, "connect", connect)
    found = heartbeat_worker.publish(Task(5, over=over, messages=160))
    assert len(made) == connections
    sizes = [size for _, size in done]
    # and 8 before it begins, of which each writer's first is a large one, too
    assert sizes.count("1000") + sizes.count("100000") == 168
    assert sizes.count("100000") == large + (8 if large else 0)
    assert sizes[-8:] == ["answered"] * 8
    assert found["rate"] > 0 and found["cpu"] > 0


def test_a_message_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise ConnectionResetError("gone")

    senders: tuple[list[Callable[[int], None]], Any] = ([fail], lambda: None)
    monkeypatch.setattr(heartbeat_worker, "_amqp_senders", lambda task: senders)
    with pytest.raises(ServerError, match="was not sent: ConnectionResetError: gone"):
        heartbeat_worker.publish(Task(5, messages=8))


def test_a_task_crosses_to_a_worker_and_back() -> None:
    task = Task(5, "gevent", True, "one", 7, 300, 0.3, 12.5, "none")
    assert Task(**json.loads(json.dumps(task._asdict()))) == task


# The first message after a restart


def test_the_table_of_restarts_is_whole() -> None:
    times = {f"{side}, {patch}": [1.0, 1007.0, 5.0] for patch in PATCHES for side in SIDES}
    lines = heartbeat_restart.table(times).splitlines()
    assert len(lines) == 7
    assert lines[1].split() == ["stock,", "none", "5.0", "1.0", "1007.0"]


def test_a_publisher_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("it broke\n")
    process: Any = SimpleNamespace(stdout=io.StringIO())
    with pytest.raises(ServerError, match=r"\(kept, gevent\) ended: it broke"):
        heartbeat_restart.Publisher("kept, gevent", process, log)


# Instructions and switches


def test_the_table_of_instructions_is_whole() -> None:
    counts = {
        case: {
            side: heartbeat_instructions.Count(1000.0 + number * 10, 500.0, 0)
            for number, side in enumerate(heartbeat_instructions.SIDES)
        }
        for case in heartbeat_instructions.CASES
    }
    lines = heartbeat_instructions.table(counts).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + 4 * 2 * len(PATCHES)
    assert lines[1].split() == ["cast,", "none", "stock", "1000", "500", "0"]
    assert lines[4].split() == ["kept", "1030", "+3.0", "%", "500", "0"]


def test_without_valgrind_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callgrind.shutil, "which", lambda _: None)
    monkeypatch.setattr(callgrind.platform, "machine", lambda: callgrind.MACHINE)
    assert heartbeat_instructions.main(["--quick"]) == 2
    assert "apt install valgrind" in capsys.readouterr().err


# The commands


@pytest.mark.parametrize(
    "module", [heartbeat_publish, heartbeat_idle, heartbeat_instructions, heartbeat_restart]
)
def test_without_rabbitmq_its_package_is_named(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(names: tuple[str, ...], packages: str) -> str:
        if packages == "rabbitmq-server":
            raise MissingPartError(f"{names[0]} is not installed: run apt install {packages}")
        return "/bin/true"

    monkeypatch.setattr(rabbitmq, "_DEBIAN", Path("/does/not/exist"))
    monkeypatch.setattr(callgrind, "absent", lambda: "")
    monkeypatch.setattr("keyfront.common.programs.system_program", find)
    monkeypatch.setattr("keyfront.common.programs.uwsgi_program", lambda: "/bin/true")
    assert module.main([]) == 2
    assert "apt install rabbitmq-server" in capsys.readouterr().err


def test_without_wrk_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise MissingPartError("wrk is not installed: run apt install wrk")

    monkeypatch.setattr("keyfront.benchmarks.load.wrk.program", missing)
    assert heartbeat_idle.main([]) == 2
    assert "apt install wrk" in capsys.readouterr().err


def test_a_case_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert heartbeat_publish.main(["--only", "nothing"]) == 2
    assert "--only = nothing: must be in the name of a case" in capsys.readouterr().err


@pytest.mark.parametrize("verdict", [MET, UNCLEAR, MISSED])
def test_only_a_goal_that_is_missed_fails(
    verdict: str,
    samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heartbeat_publish, "measure", lambda *_, **__: (samples, {}))
    monkeypatch.setattr(heartbeat_publish, "judge", lambda _: [("a goal", verdict)])
    assert heartbeat_publish.main([]) == (verdict == MISSED)
    assert f"{verdict:<8} a goal" in capsys.readouterr().out


def test_a_broker_that_cannot_be_found_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ServerError("RabbitMQ did not start: no room")

    monkeypatch.setattr(heartbeat_restart, "measure", fail)
    assert issubclass(ServerError, KeyfrontError)
    assert heartbeat_restart.main(["--rounds", "1"]) == 2
