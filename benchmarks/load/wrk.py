"""Load on an HTTP server: one run of wrk, its latencies as counts that can be added up.

wrk (Debian's package of that name) keeps ``connections`` requests in flight and starts the next
when one is answered (a closed loop), in one thread of C. It is told what to send by a Lua file
with mode 0600, so secrets in headers are never among the arguments of a process.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from keyfront.common import programs
from keyfront.errors import ServerError

from ..servers import processes
from .measured import CLOSED, Load

# Seconds until an answer that does not come counts as an error. Generous: what is slow shall show
# as slow.
PATIENCE = 30

#: What it does beside sending.
LUA = Path(__file__).with_name("wrk.lua")


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
    """
    assert most is None or not statuses
    chosen = {"vary": vary and quote(vary), "statuses": statuses and "true", "most": most}
    settings = ", ".join(f"{name} = {value}" for name, value in chosen.items() if value)
    lines = [f"wrk.headers[{quote(name)}] = {quote(value)}" for name, value in headers.items()]
    lines += [f"settings = {{{settings}}}", f"dofile({quote(str(LUA))})"]
    command = [program(), "--threads", "1", "--connections", str(connections)]
    command += ["--duration", f"{seconds}s", "--timeout", f"{PATIENCE}s"]
    # made with mode 0600
    with tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="ascii") as script:
        script.write("\n".join(lines))
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
