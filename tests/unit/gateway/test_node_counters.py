"""What the processes of a node count: exactly, whatever their threads do, and however they end."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.common.counters import node_folder
from keyfront.errors import CoordinatorError, OptionError
from keyfront.gateway.node import counters
from keyfront.gateway.node.counters import NodeCounts, count_requests, logins_silent, read

THREADS = 8
REQUESTS = 400


@pytest.fixture
def counts(tmp_path: Path) -> NodeCounts:
    made = NodeCounts()
    made.share(tmp_path / "node")
    made.begin()
    return made


def _application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    if environ.get("fails"):
        raise RuntimeError("it fails")
    environ.get("meanwhile", lambda: None)()
    return environ.get("answer", [b"done"])


def _ignored(*_: object) -> None:
    """Stands for start_response."""


def test_what_runs_is_what_has_not_ended(tmp_path: Path, counts: NodeCounts) -> None:
    seen: list[int] = []
    application = count_requests(_application, counts)
    application({"meanwhile": lambda: seen.append(read(tmp_path / "node").under_way)}, _ignored)
    assert seen == [1]
    with pytest.raises(RuntimeError):
        application({"fails": True}, _ignored)
    found = read(tmp_path / "node")
    assert (found.requests, found.under_way) == (2, 0)
    assert found.workers == (os.getpid(),)


def test_what_loads_the_application_is_counted_for_all_time(tmp_path: Path) -> None:
    child = (
        "import sys; from pathlib import Path\n"
        "from keyfront.gateway.node.counters import NodeCounts\n"
        "counts = NodeCounts(); counts.share(Path(sys.argv[1])); counts.begin(); counts.begin()"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", child, str(tmp_path / "node")], check=True)
    NodeCounts().share(tmp_path / "node")
    found = read(tmp_path / "node")
    assert (found.loads, found.started) == (3, 4)


def test_whether_who_takes_logins_runs(tmp_path: Path, counts: NodeCounts) -> None:
    folder = tmp_path / "node"
    assert logins_silent(folder, new=-60) == math.inf
    assert logins_silent(folder, new=60) == 0, "it may have begun just now"
    counts.sign()
    assert 0 <= logins_silent(folder, new=60) < 60
    assert logins_silent(tmp_path, new=-60) == 0, "nobody knows"


def test_an_answer_in_pieces_ends_when_it_is_closed(tmp_path: Path, counts: NodeCounts) -> None:
    closed: list[bool] = []

    class Answer:
        def __iter__(self) -> Iterator[bytes]:
            return iter((b"a", b"b"))

        def close(self) -> None:
            closed.append(True)

    answer: Any = count_requests(_application, counts)({"answer": Answer()}, _ignored)
    assert b"".join(answer) == b"ab"
    assert read(tmp_path / "node").under_way == 1
    answer.close()
    answer.close()
    assert closed
    assert read(tmp_path / "node").under_way == 0


def test_no_thread_loses_a_count(tmp_path: Path, counts: NodeCounts) -> None:
    application = count_requests(_application, counts)

    def run() -> None:
        for _ in range(REQUESTS):
            application({}, _ignored)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    found = read(tmp_path / "node")
    assert (found.requests, found.under_way) == (THREADS * REQUESTS, 0)


def test_what_was_under_way_in_a_process_that_ended_is_not(
    tmp_path: Path, counts: NodeCounts
) -> None:
    application = count_requests(_application, counts)
    for _ in range(2):
        child = os.fork()
        if not child:
            counts.begin()
            application({"meanwhile": lambda: os._exit(0)}, _ignored)
        os.waitpid(child, 0)
        assert read(tmp_path / "node").under_way == 0
    application({}, _ignored)
    found = read(tmp_path / "node")
    assert (found.requests, found.started, len(found.workers)) == (3, 3, 1)


def test_a_number_that_another_process_has_by_now(tmp_path: Path, counts: NodeCounts) -> None:
    """The row of a process is not another's that has its number."""
    count_requests(_application, counts)({"answer": iter(())}, _ignored)
    assert read(tmp_path / "node").under_way == 1
    counts.row[1] += 1  # it began at another time
    found = read(tmp_path / "node")
    assert (found.requests, found.under_way, found.workers) == (1, 0, ())


def test_the_time_in_the_queue(tmp_path: Path, counts: NodeCounts) -> None:
    for seconds in (0.003, 0.003, 40.0, -1.0, float("inf"), float("-inf"), float("nan")):
        counts.queued(seconds)
    found = read(tmp_path / "node")
    assert found.waited[(3000).bit_length()] == 2
    assert sum(found.waited) == 7
    assert found.waited_seconds == pytest.approx(40.006)


def test_a_damaged_file_serves_on(tmp_path: Path, counts: NodeCounts) -> None:
    for place in range(len(counts.row)):
        counts.row[place] = 2**64 - 1
    application = count_requests(_application, counts)
    assert application({}, _ignored) == [b"done"]
    counts.queued(1.0)
    counts.count(counters.SHED)


def test_without_a_folder_nothing_is_shared(tmp_path: Path) -> None:
    counts = NodeCounts()
    counts.begin()
    assert count_requests(_application, counts)({}, _ignored) == [b"done"]
    counts.share(tmp_path / "nowhere" / "node")  # logged, and no more
    assert count_requests(_application, counts)({}, _ignored) == [b"done"]
    with pytest.raises(CoordinatorError, match="node"):
        read(tmp_path / "node")


@pytest.mark.parametrize("text", ("node", "./node", " /node"))
def test_a_folder_is_an_absolute_path(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYFRONT_NODE", text)
    with pytest.raises(OptionError, match="KEYFRONT_NODE"):
        node_folder()
