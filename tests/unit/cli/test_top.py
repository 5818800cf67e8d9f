"""keyfront top: the frame of two snapshots, and what the command says of its options."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keyfront.cli import top
from keyfront.cli.parser import Parser
from keyfront.cli.top_frame import Snapshot, frame, per_second, short, span
from keyfront.errors import KeyfrontError, MissingPartError, OptionError, ServerError
from keyfront.gateway.heartbeat.counters import NAMES as BEATS
from keyfront.gateway.heartbeat.counters import ProcessSums
from keyfront.gateway.node.counters import NodeCounts
from keyfront.middleware.ldap import pool_counters
from keyfront.middleware.tokens import counters as tokens

SIZES = [(80, 24), (79, 24), (120, 40), (200, 60), (40, 24), (20, 5), (1, 1)]


def _found(**counts: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is found of a node with all parts, each count of which is 0 unless it is given."""
    causes = [f"ended_{cause}" for cause in tokens.CAUSES]
    found: dict[str, Any] = {
        "node": "/run/keyfront/node",
        "draining": False,
        "ok": True,
        "requests": {
            "workers": [{"pid": 100 + x, "memory_bytes": (150 + x) << 20} for x in range(8)],
            "loaded_seconds_ago": 300,
            **dict.fromkeys(
                ("requests", "in_progress", "shed", "workers_started", "workers_outgrown"), 0
            ),
            "parts": {"database": {"ok": True, "seconds_ago": 1}},
        },
        "queue": {"requests": 0, "by_microseconds": {str(2**x): 0 for x in range(32)}},
        "tokens": {
            **dict.fromkeys((*tokens.NAMES, *causes), 0),
            **dict.fromkeys(("changes", "changes_under_way", "changes_recovered", "flushes"), 0),
            "answers_bytes": 10,
            "answers_bytes_limit": 100,
        },
        "ldap": dict.fromkeys(("processes", *pool_counters.PRESENT, *pool_counters.SUMS), 0),
        "heartbeat": {**dict.fromkeys(BEATS, 0), "processes": 1, "late_seconds": 0.01},
    }
    for part, given in counts.items():
        if given is None:
            found[part] = None
        else:
            found[part] |= given
    return found


def _lines(before: Mapping[str, Any] | None, now: Mapping[str, Any], **size: int) -> list[str]:
    earlier = None if before is None else Snapshot(10.0, before)
    wanted = {"width": 80, "height": 24, **size}
    text = frame(earlier, Snapshot(12.0, now), note="q ends", **wanted)  # type: ignore[arg-type]
    return text.plain.split("\n")


def _row(lines: list[str], label: str) -> list[str]:
    """The words behind a label, in its column."""
    (line,) = [line for line in lines if label in line]
    start = line.index(label)
    return line[start + len(label) : start + 38].split()


def test_rates_of_an_interval() -> None:
    before = _found(
        requests={"requests": 100}, tokens={"hits": 90, "known": 5, "misses": 5, "ended_rows": 1},
        ldap={"logins_accepted": 1}, heartbeat={"beats": 7},
    )  # fmt: skip
    now = _found(
        requests={"requests": 300, "in_progress": 3, "shed": 1},
        tokens={
            "hits": 190, "node_hits": 10, "known": 45, "misses": 55, "bypassed": 2,
            "ended_rows": 5, "ended_time": 2, "changes": 3, "changes_under_way": 1,
        },
        ldap={
            "logins_accepted": 5, "credentials_refused": 2, "logins_failed": 1, "auth_size": 4,
            "auth_lent": 3, "auth_waiting": 2, "auth_max_size": 50, "servers_up": 3,
            "servers_down": 1,
        },
        heartbeat={"beats": 9, "connections": 6},
    )  # fmt: skip
    lines = _lines(before, now)
    assert _row(lines, "requests ") == ["100.0", "300"]
    assert _row(lines, "in progress") == ["3"]
    assert _row(lines, "shed") == ["0.5", "1"]
    assert _row(lines, "repeated, worker") == ["50.0", "190"]
    assert _row(lines, "repeated, node") == ["5.0", "10"]
    assert _row(lines, "first, known") == ["20.0", "45"]
    assert _row(lines, "misses") == ["25.0", "55"]
    assert _row(lines, "bypassed") == ["1.0", "2"]
    assert _row(lines, "hit ratio") == ["75.00", "%", "81.67", "%"]
    assert _row(lines, "rows") == ["2.0", "5"]
    assert _row(lines, "time") == ["1.0", "2"]
    assert _row(lines, "committed") == ["1.5", "3"]
    assert _row(lines, "under way") == ["1"]
    assert _row(lines, "login pool") == ["4", "3", "2", "50"]
    assert _row(lines, "servers") == ["3", "up,", "1", "DOWN"]
    assert _row(lines, "accepted") == ["2.0", "5"]
    assert _row(lines, "refused") == ["1.0", "2"]
    assert _row(lines, "failed, outage") == ["0.5", "1"]
    assert _row(lines, "connections, in a process") == ["6"]
    assert _row(lines, "sent") == ["1.0", "9"]
    assert "in service" in lines[0] and "in the last 2 s" in lines[0]


def test_the_queue_of_the_interval() -> None:
    """Not of all time: who waited long before is not shown for ever."""
    long_ago = {str(2**x): 1000 if x == 24 else 0 for x in range(32)}
    before = _found(queue={"by_microseconds": long_ago})
    now = copy.deepcopy(before)
    assert _row(_lines(before, now), "queue: nobody waited") == ["-"]
    now["queue"]["by_microseconds"][str(2**12)] += 99
    assert _row(_lines(before, now), "queue, 99 of 100 within") == ["4.1", "ms"]
    now["queue"] = None
    assert not any("queue" in line for line in _lines(before, now))


def test_counts_that_begin_anew_have_no_negative_rate() -> None:
    before = _found(
        requests={"requests": 9000, "shed": 9}, heartbeat={"beats": 100},
        tokens={"hits": 8000, "misses": 50, "changes": 4, "ended_rows": 3},
    )  # fmt: skip
    now = _found(requests={"requests": 10}, tokens={"hits": 8, "misses": 2, "ended_rows": 1})
    for size in SIZES:
        text = "\n".join(_lines(before, now, width=size[0], height=size[1]))
        assert " -" not in text.replace("    -", ""), text
    lines = _lines(before, now)
    assert _row(lines, "requests ") == ["0", "10"]
    assert _row(lines, "hit ratio")[0] == "-"
    # and go on from there
    later = _found(requests={"requests": 30})
    assert _row(_lines(now, later), "requests ") == ["10.0", "30"]


def test_each_part_has_its_own_interval() -> None:
    """A part that is read late, as behind one that took long, has no higher rate by it."""
    before = Snapshot(14.0, _found(), times={"requests": 10.0, "tokens": 14.0})
    later = _found(requests={"requests": 40}, tokens={"hits": 40})
    now = Snapshot(15.0, later, times={"requests": 14.0, "tokens": 15.0})
    lines = frame(before, now, width=80).plain.split("\n")
    assert _row(lines, "requests ") == ["10.0", "40"]
    assert _row(lines, "repeated, worker") == ["40.0", "40"]


def test_the_first_frame_knows_no_rate() -> None:
    lines = _lines(None, _found(requests={"requests": 12}))
    assert _row(lines, "requests ") == ["-", "12"]
    assert "in the last" not in lines[0]


@pytest.mark.parametrize("part", ("tokens", "ldap", "heartbeat", "queue"))
def test_a_part_that_is_not_in_use_is_left_out(part: str) -> None:
    words = {"tokens": "TOKEN CACHE", "ldap": "LDAP", "heartbeat": "HEARTBEAT", "queue": "queue"}
    there, gone = _found(), _found(**{part: None})
    assert any(words[part] in line for line in _lines(there, there))
    assert not any(words[part] in line for line in _lines(gone, gone))
    # one that comes has no rate yet, and one that goes hurts nobody
    assert any(words[part] in line for line in _lines(gone, there))
    assert not any(words[part] in line for line in _lines(there, gone))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("workers", (0, 1, 8, 300))
def test_it_fits(width: int, height: int, workers: int) -> None:
    many = [{"pid": 4_000_000 + x, "memory_bytes": 5 << 30} for x in range(workers)]
    causes = {f"ended_{cause}": 10**12 for cause in tokens.CAUSES}
    huge = _found(
        requests={"workers": many, "requests": 2**63}, tokens={"hits": 2**63, **causes},
        ldap={"search_size": 2**40, "auth_waiting": 10**7, "servers_down": 99},
    )  # fmt: skip
    lines = _lines(_found(), huge, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_all_that_is_important_is_on_the_smallest_screen() -> None:
    """With everything in use, many workers and every cause, nothing is cut at 80x24."""
    workers = [{"pid": 4_000_000 + x, "memory_bytes": 300 << 20} for x in range(64)]
    causes = {f"ended_{cause}": 1 for cause in tokens.CAUSES}
    found = _found(
        requests={
            "workers": workers, "workers_outgrown": 2,
            "parts": {name: {"ok": True, "seconds_ago": 1} for name in ("database", "keys")},
        },
        tokens={**causes, "changes_refused": 1},
    )  # fmt: skip
    lines = _lines(found, found, width=79)
    assert not any("lines more" in line for line in lines), "\n".join(lines)
    text = "\n".join(lines)
    for words in ("64", "19200 MiB", "hit ratio", "ENDED ANSWERS", "login pool", "failed, outage",
                  "HEARTBEAT", "in progress", "there: database keys"):  # fmt: skip
        assert words in text, words
    # where there is room, all workers and causes are named
    large = "\n".join(_lines(found, found, width=120, height=60))
    assert all(str(worker["pid"]) in large for worker in workers)
    assert all(cause in large for cause in tokens.CAUSES)


def test_what_is_wrong_is_said_at_the_top() -> None:
    away = {"redis": {"ok": False, "seconds_ago": 3}, "keys": {"ok": True, "seconds_ago": 1}}
    found = _found(requests={"parts": away, "workers": []})
    found |= {"ok": False, "draining": True, "ldap": {"error": "/run/x: Permission\n denied ü"}}
    lines = _lines(_found(), found)
    assert "DRAINING" in lines[0]
    assert lines[1] == "ldap: /run/x: Permission denied ?"
    assert _row(lines, "redis AWAY") == ["3", "s", "ago"]
    assert any("NO WORKER RUNS" in line for line in lines)
    assert "NOT SERVING" in _lines(None, {**found, "draining": False})[0]
    found["requests"] = {**_found()["requests"], "parts": away}
    assert "in service, NOT OK" in _lines(None, {**found, "draining": False})[0]
    gone = frame(Snapshot(1.0, found), Snapshot(2.0, {}, "no node in /run"), width=80, height=24)
    assert "NOT READ" in gone.plain and "no node in /run" in gone.plain


def test_numbers_are_short() -> None:
    assert [per_second(x) for x in (0, 0.01, 0.05, 999.94, 12345.6)] == [
        "0", "<0.1", "0.1", "999.9", "12346",
    ]  # fmt: skip
    assert [short(x) for x in (999_999, 1_000_000, 2**63)] == ["999999", "1000k", "9223P"]
    assert [span(x) for x in (0, 5e-6, 0.0041, 1.5, 119, 300, 7300, 200_000)] == [
        "0 s", "5 us", "4.1 ms", "1.5 s", "119 s", "5 min", "2 h 1 min", "2 d 7 h",
    ]  # fmt: skip


def _run(*words: str) -> tuple[int, str]:
    parser = Parser()
    top.add_arguments(parser)
    out = io.StringIO()
    return top.run(parser.parse_args(words), out, io.StringIO()), out.getvalue()


@pytest.mark.parametrize("seconds", ("0", "0.1", "61", "nan", "-1", "x"))
def test_an_interval_out_of_its_range(seconds: str) -> None:
    with pytest.raises(OptionError, match=rf"--interval = {seconds}: must be a number, 0\.2 to 60"):
        _run("--interval", seconds)


def test_without_rich_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[top\]'"):
        _run("--once")


def test_without_a_terminal_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(OptionError, match=r"--once .* keyfront status --json"):
        _run()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node with one worker, this process."""
    monkeypatch.setattr("keyfront.cli.tokens.caches", list)
    made = NodeCounts()
    made.share(tmp_path / "node")
    made.begin()
    (tmp_path / "beats").mkdir(mode=0o700)
    return tmp_path


def test_one_frame(node: Path) -> None:
    words = ("--once", "--interval", "0.2", "--node", str(node / "node"))
    status, text = _run(*words, "--heartbeat", str(node / "beats"))
    assert status == 0
    assert "WORKERS" in text and "TOKEN CACHE" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    (node / "node/requests").write_bytes(b"junk")
    status, text = _run(*words, "--heartbeat", str(node / "beats"))
    assert status == 1
    assert "requests: " in text and "has 4 bytes instead of" in " ".join(text.split())


def test_no_node_is_an_error_and_no_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(ended: ProcessSums, times: dict[str, float]) -> dict[str, Any]:
        raise ServerError("no node here")

    from rich.console import Console

    with pytest.raises(KeyfrontError, match="no node here"):
        top.once(top.Reader(missing), Console(file=io.StringIO()), 0.0)
