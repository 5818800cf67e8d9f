"""What is read from each load generator, and what is made of it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from keyfront.benchmarks.load import generators
from keyfront.benchmarks.load.measured import CLOSED, OPEN, Load, percentile
from keyfront.benchmarks.servers.processes import split
from keyfront.errors import MissingPartError, OptionError, ServerError

AB = """\
Concurrency Level:      20
Time taken for tests:   2.000 seconds
Complete requests:      1000
Failed requests:        {failed}
{broken}{status}Total transferred:      269750 bytes
"""
PERCENTILES = "Percentage served,Time in ms\n0,0.05\n" + "".join(
    f"{percent},{percent / 10}\n" for percent in range(1, 101)
)


def test_ab_without_failures_tells_latencies() -> None:
    found = generators.parse_ab(AB.format(failed=0, broken="", status=""), PERCENTILES, 0.5)
    assert (found.good, found.failed, found.rate, found.loop) == (1000, 0, 500.0, CLOSED)
    assert found.latencies.total() == 1000
    assert (found.percentile(0.5), found.percentile(0.99)) == (5.0, 9.9)


def test_ab_with_failures_tells_their_kinds_and_no_latencies() -> None:
    broken = "   (Connect: 0, Receive: 3, Length: 0, Exceptions: 7)\n"
    status = "Non-2xx responses:      250\n"
    found = generators.parse_ab(AB.format(failed=10, broken=broken, status=status), PERCENTILES, 0)
    assert found.failures == Counter(status=250, receive=3, exceptions=7)
    assert found.good == 740
    assert found.latencies is None


def test_siege() -> None:
    text = """New configuration template added
{ "transactions": 75, "availability": 75.0, "elapsed_time": 1.50, "longest_transaction": 0.25,
  "successful_transactions": 75, "failed_transactions": 25 }"""
    found = generators.parse_siege(text, 0.1)
    assert (found.good, found.failures, found.seconds) == (75, Counter(failed=25), 1.5)
    assert found.sample()["longest_ms"] == 250
    assert found.sample()["p95_ms"] is None
    with pytest.raises(ServerError, match="siege printed no result"):
        generators.parse_siege("unable", 0.1)


# Stands in for siege: notes how many requests a connection is to send, and tells how long two of
# them take for that, of a server with a hundred answers a second.
SIEGE = """#!{python}
import json, sys
each = int(sys.argv[sys.argv.index("-r") + 1])
with open({calls!r}, "a") as calls:
    calls.write(f"{{each}} ")
print(json.dumps({{"elapsed_time": 2 * each / 100, "longest_transaction": 0.25,
                  "successful_transactions": 2 * each, "failed_transactions": 0}}))
"""


def test_siege_is_told_as_many_requests_as_take_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, calls = tmp_path / "siege", tmp_path / "calls"
    program.write_text(SIEGE.format(python=sys.executable, calls=str(calls)))
    program.chmod(0o700)
    monkeypatch.setattr("keyfront.common.programs.system_program", lambda *_: str(program))
    request = generators.Request("http://127.0.0.1:1/", {})
    found = generators.closed("siege", request, connections=2, seconds=3)
    assert (found.good, found.seconds, found.rate) == (300, 3.0, 100.0)
    assert calls.read_text().split() == ["1", "50", "150"]
    # or so many, and no trial
    found = generators.closed("siege", request, connections=2, seconds=3, most=5)
    assert (found.good, calls.read_text().split()[3:]) == (6, ["3"])


def sent(**changes: object) -> Load:
    values = {
        "good": 3, "failures": {"timeout": 1}, "seconds": 2.0, "cpu": 0.2,
        "latencies": [[1000, 2], [5000, 1]], "late": [[100, 4]],
    }  # fmt: skip
    return generators.parse_sent({**values, **changes})


def test_a_sender() -> None:
    found = sent()
    assert (found.loop, found.rate, found.failed_share) == (OPEN, 1.5, 0.25)
    assert found.sample()["p50_ms"] == 1.0
    assert not found.at_limit


def test_a_generator_that_is_the_limit_says_so() -> None:
    assert sent(late=[[20000, 4]]).at_limit
    # late, but little to what is measured
    assert not sent(late=[[20000, 4]], latencies=[[1_000_000, 3]]).at_limit
    assert sent(cpu=1.9).at_limit
    assert Load(generator="wrk", loop=CLOSED, good=1, seconds=1, generator_cpu=0.95).at_limit
    two = Load(generator="siege", loop=CLOSED, good=1, seconds=1, generator_cpu=1, threads=2)
    assert not two.at_limit


def test_percentiles() -> None:
    latencies = {1000: 98, 5000: 1, 70000: 1}
    assert [percentile(latencies, one) for one in (0.5, 0.99, 1.0)] == [1.0, 5.0, 70.0]
    assert percentile({}, 0.5) == 0.0


def test_nothing_at_all_has_no_rate() -> None:
    empty = Load(generator="wrk", loop=CLOSED, good=0, seconds=0, generator_cpu=0)
    assert (empty.rate, empty.failed_share, empty.generator_cores) == (0, 0, 0)
    assert empty.sample()["longest_ms"] is None


def test_an_unknown_or_missing_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="--generator = hey: must be one of wrk, ab, siege"):
        generators.check("hey")

    def missing(names: tuple[str, ...], packages: str) -> str:
        raise MissingPartError(f"apt install {packages}")

    monkeypatch.setattr("keyfront.common.programs.system_program", missing)
    with pytest.raises(MissingPartError, match="apt install apache2-utils"):
        generators.check("ab")
    generators.check("constant")


@pytest.mark.parametrize(
    ("cores", "servers", "generator"),
    [({0}, {0}, {0}), ({0, 1}, {0}, {1}), (range(8), set(range(6)), {6, 7}), ({3, 5}, {3}, {5})],
)
def test_cores(cores: set[int], servers: set[int], generator: set[int]) -> None:
    found = split(cores)
    assert (found.servers, found.generator) == (servers, generator)
    assert found.apart == (len(cores) > 1)


def test_a_request_on_the_wire() -> None:
    found = generators.wire("POST", "http://h:1/v3?x=1", {"A": "b"}, b"{}")
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /v3?x=1 HTTP/1.1", b"Host: h:1", b"A: b", b"Content-Type: application/json",
        b"Content-Length: 2",
    ]  # fmt: skip
    assert body == b"{}"
