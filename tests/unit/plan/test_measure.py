"""Which candidates are tried, what the generator counts, and what is concluded."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keyfront.cli import plan as plan_command
from keyfront.common.machine import MIB, Machine
from keyfront.errors import ServerError
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.measure import generator, rounds
from keyfront.gateway.plan.measure import server as candidate_server
from keyfront.gateway.plan.measure.candidates import Candidate, candidates
from keyfront.gateway.plan.measure.results import CandidateResult, choose_candidate, greenlets
from keyfront.gateway.plan.workload import Workload

TWO = Candidate(processes=2, threads=2)
FOUR = Candidate(processes=2, threads=4)
GREEN = Candidate(processes=2, threads=1, greenlets=100)
MACHINE = Machine(cores=2, memory=8192 * MIB)


def result(
    candidate: Candidate, *rates: float, p99: float = 0.01, failed: int = 0
) -> CandidateResult:
    latencies = (0.001, p99, p99)
    return CandidateResult(candidate=candidate, rates=rates, latencies=latencies, failed=failed)


@pytest.fixture
def no_gevent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_gevent")
def test_the_computed_plan_comes_first_and_its_neighbours_follow() -> None:
    found = [str(candidate) for candidate in candidates(plan(MACHINE))]
    assert found == [
        "2 processes x 2 threads",
        "2 processes x 4 threads",
        "2 processes x 8 threads",
        "4 processes x 2 threads",
        "1 process x 2 threads",
    ]


def test_gevent_is_tried_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert candidates(plan(MACHINE))[-1] == GREEN


@pytest.mark.usefixtures("no_gevent")
def test_neighbours_keep_the_budgets() -> None:
    # 80% of 10 connections: eight for the four threads of the plan and as many again
    made = plan(MACHINE, Workload(database_connections=10))
    assert candidates(made) == [
        TWO, FOUR, Candidate(processes=4, threads=2), Candidate(processes=1, threads=2)
    ]
    made = plan(MACHINE, Workload(memcached_connections=4))
    assert candidates(made) == [TWO, Candidate(processes=1, threads=2)]
    made = plan(MACHINE, Workload(ldap_connections=16, threads=2))
    assert Candidate(processes=2, threads=4) in candidates(made)
    assert Candidate(processes=2, threads=8) not in candidates(made)


@pytest.mark.usefixtures("no_gevent")
def test_neighbours_fit_into_memory() -> None:
    made = plan(Machine(cores=2, memory=600 * MIB))
    assert not made.conflicts
    assert max(candidate.processes for candidate in candidates(made)) == 2


def test_a_clear_winner() -> None:
    verdict = choose_candidate([result(TWO, 100, 110, 90), result(FOUR, 200, 210, 190)], 1.0)
    assert verdict.taken == FOUR
    assert verdict.met
    assert verdict.margin == pytest.approx(1.0, abs=0.01)
    assert "2 processes x 4 threads is the best, 2.00 times" in verdict.text


@pytest.mark.parametrize(
    "rates",
    [
        (130, 130, 130, 95),  # behind in one round
        (190, 105, 105, 105),  # ahead in each, by less than it varies
        (101, 101, 101, 101),  # steady, but not worth it
    ],
)
def test_no_clear_winner(rates: tuple[float, ...]) -> None:
    verdict = choose_candidate([result(TWO, 100, 100, 100, 100), result(FOUR, *rates)], 1.0)
    assert verdict.taken == TWO
    assert verdict.met
    assert verdict.text.startswith("no clear winner, keep the computed plan: ")
    assert "noise" in verdict.text


def test_the_computed_plan_is_the_best() -> None:
    verdict = choose_candidate([result(TWO, 100, 100), result(FOUR, 90, 90)], 1.0)
    assert verdict.taken == TWO
    assert verdict.text.startswith("the computed plan is the best")


def test_what_answers_too_late_or_fails_does_not_win() -> None:
    verdict = choose_candidate([result(TWO, 100, 100), result(FOUR, 900, 900, p99=1.5)], 1.0)
    assert verdict.taken == TWO
    verdict = choose_candidate([result(TWO, 100, 100), result(FOUR, 900, 900, failed=1)], 1.0)
    assert verdict.taken == TWO


def test_the_computed_plan_does_not_answer_in_time() -> None:
    verdict = choose_candidate([result(TWO, 100, 100, p99=2.0), result(FOUR, 50, 50)], 1.0)
    assert verdict.taken == FOUR
    assert "does not answer within 1 s" in verdict.text


def test_nobody_answers_in_time() -> None:
    nobody = CandidateResult(candidate=FOUR, rates=(0, 0), latencies=(), failed=0)
    verdict = choose_candidate([result(TWO, 100, 100, p99=2.0), nobody], 1.0)
    assert verdict.taken == TWO
    assert not verdict.met
    assert "none of them answers within 1 s" in verdict.text


def test_greenlets_are_spoken_of_and_not_taken() -> None:
    results = [result(TWO, 100, 100), result(FOUR, 90, 90), result(GREEN, 500, 500)]
    verdict = choose_candidate(results, 1.0)
    assert verdict.taken == TWO
    words = greenlets(results, verdict, 1.0)
    assert words is not None
    assert "5.00 times as many" in words
    assert "--server gevent" in words
    results[-1] = result(GREEN, 99, 500)
    assert greenlets(results, choose_candidate(results, 1.0), 1.0) is None
    results[-1] = result(GREEN, 500, 500, p99=2.0)
    assert greenlets(results, choose_candidate(results, 1.0), 1.0) is None


@pytest.mark.parametrize(("left", "tried"), [(9, 6), (50, 6), (3000, 2), (5, 5)])
def test_the_time_is_divided(left: float, tried: int) -> None:
    number, each = rounds._divide(left, tried, left + 5)
    assert number % 2 == 0
    assert number >= 4
    assert number * each * tried == pytest.approx(left)


def test_too_little_time() -> None:
    with pytest.raises(ServerError, match="--seconds = 10: leaves no time"):
        rounds._divide(2, 6, 10)


@contextmanager
def server(answer: bytes, delay: float = 0.0) -> Iterator[int]:
    """Answers each connection with the same bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    received = b""
                    while not received.endswith(b"\r\n\r\n") and (part := connection.recv(4096)):
                        received += part
                    time.sleep(delay)
                    if received:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def order(port: int, *, seconds: float = 0.2) -> generator.Order:
    return {
        "port": port,
        "request": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "connections": 2,
        "warm": 0.05,
        "seconds": seconds,
    }


def measured(port: int) -> generator.Result:
    """What is found in a time long enough for an answer: of a short one nothing may be left."""
    seconds = 0.2
    while True:
        result = generator.run(order(port, seconds=seconds))
        if result["answers"] or result["failed"] or seconds > 60:
            return result
        seconds *= 2


def test_good_answers_are_counted_with_their_time() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\nok", delay=0.01) as port:
        result = measured(port)
    assert result["answers"] == len(result["latencies"]) > 0
    assert result["failed"] == 0
    assert min(result["latencies"]) >= 0.01
    assert 0 < result["busy"] <= 1.1


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 503 Busy\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n", b""]
)
def test_other_answers_are_failed(answer: bytes) -> None:
    with server(answer) as port:
        result = measured(port)
    assert result["failed"] > 0
    assert result["answers"] == 0


def test_answers_that_do_not_come_are_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "PATIENCE", 0.05)
    monkeypatch.setattr(generator, "_LOOK", 0.02)
    monkeypatch.setattr(generator, "_DRAIN", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        result = measured(listening.getsockname()[1])
    assert result["failed"] > 0


def test_nothing_is_left_for_the_next_order() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\nok", delay=0.1) as port:
        before = time.perf_counter()
        generator.run(order(port, seconds=0.05))
        # the two under way when the time was over were awaited
        assert time.perf_counter() - before >= 0.2


def test_what_is_interrupted_while_it_starts_a_server_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the process is there, and nobody knows it yet."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(real(["sleep", "600"], start_new_session=True))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(candidate_server, "uwsgi_program", lambda: "uwsgi")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    application = candidate_server.Application(target="x:y", environment={}, path="/", headers={})
    with pytest.raises(KeyboardInterrupt), plan_command._interrupted_by_sigterm():
        rounds.measure(
            [Candidate(processes=1, threads=2)], application, 60, lambda done, step: None
        )
    assert [one.returncode for one in started] in ([-signal.SIGTERM], [-signal.SIGKILL])
    assert not list(tmp_path.iterdir())
