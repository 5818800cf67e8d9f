"""The load suite with real servers: every generator, the sender's times, a sweep, and its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.lineups.keystone import Keystone
from keyfront.benchmarks.load import generators, sender, wrk
from keyfront.benchmarks.load.measured import Load, Request, percentile
from keyfront.benchmarks.servers import processes
from keyfront.cli.main import main
from keyfront.errors import MissingPartError, ServerError
from support.processes import command_line
from support.served import free_port

SECRET = "a-secret-token"
PATIENCE = 60.0
CONNECTIONS = 3
# Of a load: longer than a machine stands still.
SECONDS = 3


class Answers(BaseHTTPRequestHandler):
    """Answers by the path: ``/status/503``, ``/held``, ``/chunked``, ``/drop``; else 200.

    ``/slow`` and ``/status`` keep a closed loop from taking all of the machine.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    seen: list[tuple[float, str, str | None, str]]
    go_on: threading.Event

    def do_GET(self) -> None:
        place = (time.monotonic(), self.path, self.headers["X-Auth-Token"], self.client_address[0])
        self.seen.append(place)
        what = self.path.split("/")[1]
        if what == "drop":
            self.close_connection = True
            return
        if what == "held":
            number = int(self.path.split("/")[2])
            if len(self.seen) >= number:
                self.go_on.set()
            self.go_on.wait(PATIENCE)
        if what in ("slow", "status"):
            time.sleep(0.01)
        self.send_response(int(self.path.split("/")[2]) if what == "status" else 200)
        if what == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nhello\r\n0\r\n\r\n")
            return
        if what == "end":
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"until the end")
            return
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[tuple[str, list[tuple[float, str, str | None, str]]]]:
    """A server that answers: its URL, and what it saw."""
    seen: list[tuple[float, str, str | None, str]] = []
    handler = type("Handler", (Answers,), {"seen": seen, "go_on": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["wrk", "ab", "siege"])
def test_generators_agree_with_what_the_server_saw(name: str) -> None:
    try:
        generators.check(name)
    except MissingPartError as error:
        pytest.skip(str(error))
    with answering() as (url, seen):
        request = Request(f"{url}/slow", {"X-Auth-Token": SECRET})
        found = generators.closed(name, request, connections=CONNECTIONS, seconds=SECONDS)
        answered = len(seen)
    assert {one[1:3] for one in seen} == {("/slow", SECRET)}
    assert found.failed == 0
    assert found.good <= answered
    if name == "siege":
        # its trials go before, each of less than half of the next one's requests
        assert answered <= 2 * found.good
    else:
        # those under way at the end are not counted
        assert answered <= found.good + CONNECTIONS
    assert found.generator_cpu > 0


@pytest.mark.parametrize("name", ["wrk", "ab", "siege"])
def test_generators_end_with_so_many_answers(name: str) -> None:
    try:
        generators.check(name)
    except MissingPartError as error:
        pytest.skip(str(error))
    with answering() as (url, seen):
        request = Request(f"{url}/slow", {})
        found = generators.closed(
            name, request, connections=CONNECTIONS, seconds=30, most=4 * CONNECTIONS
        )
        answered = len(seen)
    assert found.failed == 0
    # wrk has sent as many again as were under way; thirty seconds would have been thousands
    assert 4 * CONNECTIONS <= found.good <= answered <= 6 * CONNECTIONS
    assert found.seconds > 0


@pytest.mark.parametrize("name", ["wrk", "ab"])
def test_generators_count_refusals_as_failures(name: str) -> None:
    try:
        generators.check(name)
    except MissingPartError as error:
        pytest.skip(str(error))
    with answering() as (url, _):
        request = Request(f"{url}/status/503", {})
        found = generators.closed(name, request, connections=2, seconds=SECONDS)
    assert found.good == 0
    assert found.failed > 0
    # nothing of good answers
    assert found.percentile(0.5) is None


# A table of latencies as wrk's: N answers, one each N microseconds, and all in it asked for.
TABLE = """
done = function(summary, latency, requests)
  local table, last = newproxy(true), {last}
  getmetatable(table).__len = function() return 1000 end
  getmetatable(table).__call = function(_, index) return index * last / 1000, 1 end
  getmetatable(table).__index = function(_, name)
    if name == "max" then return last end
    return function(_, percent) return percent < 100 and percent * last / 100 or 0 end
  end
  print_latencies(table, 1000)
end
"""


@pytest.mark.parametrize(("last", "lines"), [(900_000, 1000), (30_000_000, 200)])
def test_latencies_of_an_overload_are_told_by_the_half_percent(
    tmp_path: Path, last: int, lines: int
) -> None:
    """wrk took minutes to tell many long ones."""
    script = tmp_path / "script.lua"
    script.write_text(f'settings = {{}} dofile("{wrk.LUA}")' + TABLE.replace("{last}", str(last)))
    with answering() as (url, _):
        done = subprocess.run(
            [wrk.program(), "-t1", "-c1", "-d1s", "-s", str(script), url],
            capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("latency ")]
    assert len(told) == lines
    seen = wrk.parse("\n".join(["summary 1000 1000000 0", *told]), 0.0)
    assert seen.latencies.total() == 1000
    for fraction in (0.5, 0.95, 0.99, 1.0):
        assert percentile(seen.latencies, fraction) == pytest.approx(fraction * last / 1000)


def sent(
    url: str, paths: list[str], times: list[float], **options: object
) -> tuple[Load, dict[str, object]]:
    host, _, port = url.removeprefix("http://").partition(":")
    wires = [generators.wire("GET", url + path, {"X-Auth-Token": SECRET}) for path in paths]
    schedule = [(at, place % len(paths)) for place, at in enumerate(times)]
    start = time.monotonic() + 0.5
    job = sender.job((host, int(port)), wires, schedule, start=start, **options)
    out, _, _ = processes.finished(generators.sending(job, "sender", None), PATIENCE)
    found = json.loads(out)
    return generators.parse_sent(found), {**found, "start": start}


def test_a_slow_server_delays_no_request() -> None:
    """It answers none before it has got all: a closed loop would wait for its first answers."""
    times = [place * 0.05 for place in range(20)]
    with answering() as (url, seen):
        found, told = sent(url, [f"/held/{len(times)}"], times, patience=PATIENCE)
    assert (found.good, found.failed) == (20, 0)
    arrived = sorted(one[0] - told["start"] for one in seen)
    # none before it is due
    assert all(due - 0.01 <= at for due, at in zip(times, arrived, strict=True))
    # what it was delayed counts from then, to the three digits that are kept
    assert found.percentile(1.0) >= 0.99 * 1000 * times[-1]


def test_every_kind_of_answer_and_failure_is_told() -> None:
    paths = ["/x", "/chunked", "/end", "/status/503", "/status/404", "/drop"]
    with answering() as (url, _):
        found, told = sent(url, paths, [place * 0.02 for place in range(12)])
        kept, _ = sent(url, paths, [0.0] * 6, limit=500)
    assert found.good == 6
    assert found.failures == {"status 503": 2, "status 404": 2, "closed": 2}
    assert told["statuses"] == {"200": 6, "503": 2, "404": 2}
    assert sum(good + bad for _, good, bad in told["timeline"]) == 12
    assert kept.failures == {"status 503": 1, "closed": 1}


def test_nobody_there_and_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found, _ = sent(url, ["/x"], [0.0, 0.1], patience=0.3)
    assert found.failures == {"timeout": 2}
    found, _ = sent(f"http://127.0.0.1:{free_port()}", ["/x"], [0.0, 0.1])
    assert found.failures == {"refused": 2}


def test_connections_come_from_the_sources_in_turn() -> None:
    with answering() as (url, seen):
        sources = ["127.0.0.2", "127.0.0.3"]
        found, _ = sent(url, ["/x"], [0.0, 0.1, 0.2, 0.3], sources=sources, kept=False)
    assert found.good == 4
    assert [one[3] for one in seen].count("127.0.0.2") == 2
    assert {one[3] for one in seen} == set(sources)


def test_kept_connections_are_used_again() -> None:
    with answering() as (url, seen):
        found, _ = sent(url, ["/x"], [place * 0.1 for place in range(5)])
        assert found.good == len(seen) == 5
        assert found.failed == 0


@pytest.fixture
def keystone(keystone_state: tuple[Path, int]) -> Keystone:
    return Keystone(keystone_state[0])


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["bench", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_sweep(
    keystone: Keystone, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # by their clock they are tested above: for whole seconds they would take the machine
    monkeypatch.setattr(generators, "closed", partial(generators.closed, most=200))
    options = (
        "sweep", "--topology", "nginx+uwsgi", "--tuning", "tuned", "--cache", "on", "--rates", "20",
        "--seconds", "1", "--warm-up", "1", "--pause", "0", "--state", keystone.state.path,
        "--results", tmp_path,
    )  # fmt: skip
    status, out = bench(capsys, *options, "--points", "2")
    assert status == 0, out
    # a line may be folded anywhere
    assert "points and" in " ".join(out.split())
    (closed, constant) = results.read(tmp_path / "sweep-keystone.json").samples
    assert (closed["loop"], closed["connections"], closed["failed"]) == ("closed", 2, 0)
    assert (constant["loop"], constant["good"], constant["failed"]) == ("open", 20, 0)
    assert set(closed["cpu_cores"]) == {"nginx", "uwsgi"}
    # started again, it measures what is missing and nothing else
    status, out = bench(capsys, *options, "--points", "2,3")
    assert status == 0, out
    found = results.read(tmp_path / "sweep-keystone.json").samples
    assert found[:2] == [closed, constant]
    assert [one["connections"] for one in found] == [2, None, 3]
    commands = [" ".join(command_line(one)) for one in psutil.Process().children()]
    assert [one for one in commands if "keyfront-bench-" in one] == []


_KILLED = """\
import sys, time
from pathlib import Path
from keyfront.benchmarks.lineups import lineup
from keyfront.benchmarks.servers import processes
from keyfront.benchmarks.lineups.keystone import Keystone
wanted = lineup.Lineup("nginx+uwsgi", "tuned")
with lineup.served(wanted, Keystone(Path(sys.argv[1])), processes.split()) as found:
    print(*[process.pid for process in found.processes], flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder that a web server's own user can reach, for what a killed process leaves."""
    with tempfile.TemporaryDirectory(prefix="keyfront-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def test_servers_end_with_a_measurement_that_is_killed(
    keystone: Keystone, temporary: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(keystone.state.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        leaders = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(leaders) == 2
        started = [*leaders, *(one for top in leaders for one in top.children(recursive=True))]
        # each has workers
        assert len(started) >= 4
        process.kill()
        process.wait(PATIENCE)
    _, alive = psutil.wait_procs(started, timeout=PATIENCE)
    assert alive == []


def test_a_hanging_generator_is_ended() -> None:
    process = processes.Process("sleeper", ["sleep", "60"])
    with pytest.raises(ServerError, match="sleeper hangs: it was ended after 0 s"):
        processes.finished(process, 0.2)
    assert process.poll() is not None
