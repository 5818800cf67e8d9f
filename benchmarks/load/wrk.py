"""Load on an HTTP server: one run of wrk, its latencies as counts that can be added up.

wrk (Debian's package of that name) keeps ``connections`` requests in flight and starts the next
when one is answered (a closed loop), in one thread of C. It is told what to send by a Lua file
with mode 0600, so secrets in headers are never among the arguments of a process.
"""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping

from keyfront.common import programs
from keyfront.errors import ServerError

from ..worlds import processes
from .measured import CLOSED, Load

# Seconds until an answer that does not come counts as an error. Generous: what is slow shall show
# as slow.
PATIENCE = 30

#: A Lua function that prints how many answers took how long. wrk finds one of its values by walking
#: from the first microsecond, so where an overload has left many, and long ones, printing all takes
#: it minutes; then it is asked for each half percent of the answers.
PRINT_LATENCIES = """\
local function print_latencies(latency, answers)
  local function line(microseconds, count)
    io.write(string.format("latency %d %d\\n", microseconds, count))
  end
  if #latency * latency.max < 1e9 then
    for index = 1, #latency do line(latency(index)) end
    return
  end
  local before = 0
  for step = 1, 200 do
    local until_here = math.ceil(answers * step / 200)
    -- of 100 percent wrk knows none
    line(step < 200 and latency:percentile(step / 2) or latency.max, until_here - before)
    before = until_here
  end
end
"""

_SCRIPT = """\
{headers}
{request}
{response}
{print_latencies}
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("summary %d %d %d\\n", summary.requests, summary.duration, e.status))
  for _, kind in ipairs({{"connect", "read", "write", "timeout"}}) do
    io.write(string.format("failed %s %d\\n", kind, e[kind]))
  end
  {told}
  print_latencies(latency, summary.requests)
end
"""
# Its one thread notes each answer: 503 with Retry-After is "refused", any other failure its status.
_RESPONSE = """\
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init(args) kinds = {} end
function response(status, headers, body)
  if status < 400 then return end
  local kind = "status_" .. status
  if status == 503 then
    for name, _ in pairs(headers) do
      if name:lower() == "retry-after" then kind = "refused" end
    end
  end
  kinds[kind] = (kinds[kind] or 0) + 1
end
"""
_TOLD = """\
for _, thread in ipairs(threads) do
    for kind, count in pairs(thread:get("kinds")) do
      io.write(string.format("answered %s %d\\n", kind, count))
    end
  end"""

# wrk sleeps for its whole time unless it is interrupted; then it tells what there was until then.
_COUNTED = """\
local ffi = require("ffi")
ffi.cdef("int getpid(void); int kill(int, int);")
function init(args) left = {most} end
function response(status)
  if status >= 400 then return end
  left = left - 1
  if left == 0 then
    wrk.thread:stop()
    ffi.C.kill(ffi.C.getpid(), {interrupt})
  end
end
"""

_VARIED = """\
local number = 0
request = function()
  number = number + 1
  return wrk.format(nil, wrk.path .. {prefix} .. number)
end
"""


def program() -> str:
    """:raises MissingPartError: wrk is not installed; names the Debian package"""
    return programs.system_program(("wrk",), "wrk")


def run(
    url: str,
    headers: Mapping[str, str],
    *,
    seconds: int,
    connections: int,
    vary: str | None = None,
    cores: Collection[int] | None = None,
    statuses: bool = False,
    most: int | None = None,
) -> Load:
    """Send GET requests for ``seconds``, over ``connections`` at a time.

    :param headers: sent with each request
    :param vary: a query (``?name=value``) that is added to the URL with a number behind it, which
        is another one in each request
    :param cores: those that wrk may run on; default: all
    :param statuses: true if failures are told by the status of each answer, which slows wrk:
        ``status 502``, and ``refused`` for 503 with ``Retry-After``; default: ``status`` for all
    :param most: good answers after which it ends before its time, at least 1; not with
        ``statuses``
    :raises MissingPartError: wrk is not installed
    :raises ServerError: wrk failed
    """
    lines = [f"wrk.headers[{quote(name)}] = {quote(value)}" for name, value in headers.items()]
    request = _VARIED.format(prefix=quote(vary)) if vary else ""
    response, told = (_RESPONSE, _TOLD) if statuses else ("", "")
    if most is not None:
        assert not statuses
        response = _COUNTED.format(most=most, interrupt=int(signal.SIGINT))
    command = [program(), "--threads", "1", "--connections", str(connections)]
    command += ["--duration", f"{seconds}s", "--timeout", f"{PATIENCE}s"]
    # made with mode 0600
    with tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="ascii") as script:
        script.write(
            _SCRIPT.format(
                headers="\n".join(lines),
                request=request,
                response=response,
                told=told,
                print_latencies=PRINT_LATENCIES,
            )
        )
        script.flush()
        process = processes.Process("wrk", [*command, "--script", script.name, url], cores=cores)
        try:
            output, errors, cpu = processes.finished(process, seconds + 2 * PATIENCE)
        except ServerError as error:
            raise ServerError(f"{error}; is the server at {url} still there?") from None
    if "\nsummary " not in output:
        raise ServerError(f"wrk failed on {url}: {errors[-300:] or output[-300:]}")
    return parse(output, cpu)


def parse(output: str, generator_cpu: float) -> Load:
    """Read what the script printed behind wrk's own report."""
    answers = microseconds = 0
    failures: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    latencies: Counter[int] = Counter()
    for line in output.splitlines():
        match line.split():
            case ["summary", *numbers]:
                answers, microseconds, failures["status"] = map(int, numbers)
            case ["failed", kind, number]:
                failures[kind] = int(number)
            case ["answered", kind, number]:
                kinds[kind.replace("_", " ")] += int(number)
            case ["latency", value, count]:
                latencies[int(value)] += int(count)
    refused = failures["status"]
    if kinds:
        del failures["status"]
    return Load(
        generator="wrk",
        loop=CLOSED,
        good=answers - refused,
        failures=+(failures + kinds),
        seconds=microseconds / 1e6,
        latencies=latencies,
        mixed=bool(refused),
        generator_cpu=generator_cpu,
    )


def quote(text: str) -> str:
    """Return a Lua string, whatever is in it."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'
