"""Load on a deployment: one run of wrk that tells answers and failures by kind.

As in :mod:`.load.wrk` the loop is closed and secrets are in a file of mode 0600. The status of each
answer is looked at, which costs wrk some of its speed, the same for all.
"""

from __future__ import annotations

import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from keyfront.errors import ServerError

from .load import wrk
from .load.measured import percentile

# Seconds until an answer that does not come is a timeout.
PATIENCE = 30

_SCRIPT = """\
{headers}
{print_latencies}
local threads = {{}}
function setup(thread) table.insert(threads, thread) end
function init(args) kinds = {{}} end
function response(status, headers, body)
  local kind = tostring(status)
  if status == 503 then
    for name, _ in pairs(headers) do
      if name:lower() == "retry-after" then kind = "shed" end
    end
  end
  kinds[kind] = (kinds[kind] or 0) + 1
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("seconds %d\\n", summary.duration))
  for name, count in pairs({{connect=e.connect, read=e.read, write=e.write, timeout=e.timeout}}) do
    io.write(string.format("socket %s %d\\n", name, count))
  end
  for _, thread in ipairs(threads) do
    for kind, count in pairs(thread:get("kinds")) do
      io.write(string.format("status %s %d\\n", kind, count))
    end
  end
  print_latencies(latency, summary.requests)
end
"""


class Seen(NamedTuple):
    """What one run saw."""

    seconds: float
    statuses: Counter[str]
    """Answers by status; 503 with Retry-After is ``shed``."""
    sockets: Counter[str]
    """Connections that were refused (``connect``), reset (``read``, ``write``) or timed out."""
    latencies: Counter[int]
    """Answers by their microseconds, whatever their status."""
    generator_cpu: float

    @property
    def good(self) -> int:
        return self.statuses["200"]

    @property
    def shed(self) -> int:
        return self.statuses["shed"]

    @property
    def failures(self) -> dict[str, int]:
        """By kind: another status, or what went wrong with the connection."""
        others = {k: n for k, n in self.statuses.items() if k not in ("200", "shed")}
        return dict(sorted({**others, **{k: n for k, n in self.sockets.items() if n}}.items()))

    def described(self) -> dict[str, Any]:
        """For a file."""
        return {
            "rate": round(self.good / self.seconds, 1),
            "good": self.good,
            "shed": self.shed,
            "failures": self.failures,
            "p50": percentile(self.latencies, 0.5),
            "p99": percentile(self.latencies, 0.99),
            "generator_cpu": round(self.generator_cpu, 2),
        }


def run(url: str, headers: Mapping[str, str], *, seconds: int, connections: int) -> Seen:
    """Send GET requests for ``seconds``, over ``connections`` kept ones at a time.

    :raises MissingPartError: wrk is not installed
    :raises ServerError: wrk failed
    """
    lines = [
        f"wrk.headers[{wrk.quote(name)}] = {wrk.quote(value)}" for name, value in headers.items()
    ]
    command = [wrk.program(), "--threads", "1", "--connections", str(connections)]
    command += ["--duration", f"{seconds}s", "--timeout", f"{PATIENCE}s"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="ascii") as script:
        script.write(
            _SCRIPT.format(headers="\n".join(lines), print_latencies=wrk.PRINT_LATENCIES)
        )
        script.flush()
        try:
            done = subprocess.run(
                [*command, "--script", script.name, url],
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + 4 * PATIENCE,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(f"wrk hangs; is the server at {url} still there?") from None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or "\nseconds " not in done.stdout:
        raise ServerError(f"wrk failed on {url}: {done.stderr[-300:] or done.stdout[-300:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return parse(done.stdout, cpu)


def parse(output: str, generator_cpu: float) -> Seen:
    """Read what the script printed behind wrk's own report."""
    seconds = 0.0
    statuses: Counter[str] = Counter()
    sockets: Counter[str] = Counter()
    latencies: Counter[int] = Counter()
    for line in output.splitlines():
        match line.split():
            case ["seconds", microseconds]:
                seconds = int(microseconds) / 1e6
            case ["socket", kind, count]:
                sockets[kind] += int(count)
            case ["status", kind, count]:
                statuses[kind] += int(count)
            case ["latency", value, count]:
                latencies[int(value)] += int(count)
    return Seen(seconds, statuses, sockets, latencies, generator_cpu)
