"""One stream of requests for Apache and for nginx, from 1 to 5 sources, as NetEase had it in 2012.

A log is sent at its own times (an open loop) from as many addresses, each request on a connection
of its own, with three kinds of the kernel's settings.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keyfront.common.machine import cores
from keyfront.gateway.serve.lineups import Program

from .. import results
from ..lineups import lineup, stock_servers
from ..load import generators, sender
from ..load.measured import Load
from ..servers.ports import free_port
from ..servers.processes import HOST, Process
from . import isolation, timelines, tiny_application
from .experiment import Conclusions, Experiment, World
from .findings import Change, Finding, alike, less_is_better, number

NAME = "live-replay"
SOURCE = (
    "NetEase, 2012-12-05, in github.com/session-replay-tools/tcpcopy: Apache 2.4.1 and nginx "
    "1.1.17 under live requests copied by TCPCopy"
)
APACHE, NGINX, KEYFRONT = TARGETS = (
    "Apache, as published",
    "nginx, as published",
    "nginx + uWSGI by keyfront",
)
DEFAULT, THEN, NOW = "as they come", "as advised then", "as keyfront advises"
KERNELS: dict[str, Mapping[str, str]] = {
    DEFAULT: {},
    THEN: {
        "net.core.somaxconn": "262144",
        "net.ipv4.tcp_max_syn_backlog": "262144",
        "net.ipv4.tcp_syncookies": "0",
        "net.ipv4.tcp_tw_recycle": "1",
        "net.ipv4.tcp_tw_reuse": "1",
        "net.ipv4.tcp_fin_timeout": "3",
        "net.ipv4.tcp_max_tw_buckets": "5000",
        "net.ipv4.tcp_no_metrics_save": "1",
    },
    NOW: {"net.core.somaxconn": "4096", "net.ipv4.tcp_max_syn_backlog": "4096"},
}
SOURCES, QUICK_SOURCES = (1, 2, 3, 4, 5), (1, 5)
QUICK_KERNELS = (DEFAULT, NOW)
# Requests a second from each source; 1675 were published, on four cores that did nothing else.
RATE, QUICK_RATE = 600, 100
SECONDS, QUICK_SECONDS = 20, 1
# Seconds until a request without an answer is lost: its user has gone.
PATIENCE = 5.0
# Threads of Apache in all, and in a process; 10 000 are as published.
THREADS_EACH = 100
PROCESSES, QUICK_PROCESSES = 100, 5
SEED = 20121205
_PAGES = 200


def schedule(rate: float, seconds: float, sources: int) -> list[tuple[float, int]]:
    """Return when each request is due and its page: each source sends the same, at its times.

    Arrivals are those of clients that know nothing of each other; the seed makes them the same in
    each run.
    """
    dice, due = random.Random(SEED), 0.0
    found: list[tuple[float, int]] = []
    while True:
        due += dice.expovariate(rate)
        if due >= seconds:
            return found
        # few pages take most requests
        page = min(int(dice.paretovariate(0.8)), _PAGES) - 1
        found += [(due, page)] * sources


def application(folder: Path, port: int) -> Program:
    """Return what both published servers pass on to: an nginx that answers 13 bytes at once."""
    folder.mkdir(mode=0o711)
    return stock_servers.nginx(
        folder,
        f"{HOST}:{port}",
        location=[f'return 200 "{tiny_application.BODY.decode()}"'],
        events={"worker_connections": 16384},
        http={"keepalive_requests": 1_000_000},
        main={"worker_rlimit_nofile": 65536},
        access_log="off",
    )


@contextmanager
def served(folder: Path, name: str, port: int, behind: int, processes: int) -> Iterator[Process]:
    """Run a target until the block ends; gives its foremost server."""
    listen = f"{HOST}:{port}"
    if name == APACHE:
        threads = THREADS_EACH * processes
        directives = {
            "ListenBacklog": 5000,
            "ServerLimit": processes,
            "ThreadLimit": THREADS_EACH,
            "ThreadsPerChild": THREADS_EACH,
            "StartServers": processes,
            "MinSpareThreads": THREADS_EACH,
            "MaxSpareThreads": threads,
            # 8000 of 10000, as published
            "MaxRequestWorkers": threads * 8 // 10,
            "MaxConnectionsPerChild": 0,
            "KeepAlive": "On",
            "KeepAliveTimeout": 12,
        }
        content = [f'ProxyPass "/" "http://{HOST}:{behind}/" keepalive=On']
        apache = stock_servers.apache(
            folder, listen, directives=directives, loaded=["proxy", "proxy_http"], content=content
        )
        programs = [apache]
    elif name == NGINX:
        passed = f"proxy_pass http://{HOST}:{behind}", "proxy_http_version 1.1"
        programs = [
            stock_servers.nginx(
                folder,
                listen,
                location=[*passed, 'proxy_set_header Connection ""'],
                main={"worker_rlimit_nofile": 65536},
                events={"worker_connections": 8192, "accept_mutex": "off"},
                http={"keepalive_timeout": 12},
                access_log="off",
            )
        ]
    else:
        target = f"{tiny_application.__name__}:application"
        room = lineup.Room(folder / "state", {})
        programs = lineup.served_files("nginx+uwsgi", room, listen, target, cores())
    with ExitStack() as stack:
        yield [stack.enter_context(stock_servers.started(one)) for one in programs][-1]


def replay(port: int, found: Sequence[tuple[float, int]], sources: int, seconds: float) -> Load:
    """Send the stream to a server, from so many addresses."""
    wires = [
        generators.wire("GET", f"http://{HOST}:{port}/page/{page}", {"Connection": "close"})
        for page in range(_PAGES)
    ]
    # all of 127/8 is this machine's
    addresses = [f"127.0.1.{one + 1}" for one in range(sources)]
    job = sender.job(
        (HOST, port), wires, found, start=time.monotonic() + 0.7, patience=PATIENCE,
        sources=addresses, kept=False,
    )  # fmt: skip
    return generators.sent(generators.sending(job, "sender", None), seconds + 60)


def measure(world: World, record: results.Record) -> None:
    """Measure each target with each kernel's settings and number of sources."""
    quick = world.options.quick
    start = time.monotonic()
    seconds = world.seconds(QUICK_SECONDS, SECONDS)
    rate = QUICK_RATE if quick else RATE
    processes_ = QUICK_PROCESSES if quick else PROCESSES
    refused: dict[str, dict[str, str]] = {}
    for kernel in QUICK_KERNELS if quick else KERNELS:
        with isolation.settings(KERNELS[kernel]) as settings:
            refused[kernel] = settings.refused
            if kernel != DEFAULT and not settings.applied:
                continue
            for name in TARGETS:
                folder = world.folder()
                port, behind = (free_port() for _ in range(2))
                with (
                    stock_servers.started(application(folder / "behind", behind)) as backend,
                    served(folder, name, port, behind, processes_) as running,
                ):
                    backend.wait_for_answer(behind)
                    running.wait_for_answer(port)
                    # connections and buffers are there then
                    replay(port, schedule(rate, 0.5, 1), 1, 0.5)
                    lost = []
                    for sources in QUICK_SOURCES if quick else SOURCES:
                        with timelines.Watch(start) as watch:
                            load = replay(port, schedule(rate, seconds, sources), sources, seconds)
                        record.sample(
                            target=name,
                            kernel=kernel,
                            sources=sources,
                            offered=rate * sources,
                            **load.sample(),
                            loss=round(load.failed_share, 5),
                            cpu=watch.cpu,
                            peaks=watch.peaks,
                        )
                        lost.append(f"{sources}: {load.failed_share:.2%}")
                    title = f"{name}, kernel {kernel}, {sources} sources"
                    record.timelines += watch.timelines(title)
                world.say(f"{name}, kernel {kernel}: lost {', '.join(lost)}")
    record.conditions["kernel_refused"] = refused


def _pick(samples: Sequence[results.Sample], **wanted: object) -> results.Sample | None:
    return next(iter(results.matching(samples, **wanted)), None)


def _said(one: results.Sample | None) -> str:
    if one is None:
        return "not tried"
    return f"{number(one['rate'])} a second, {100 * one['loss']:.2f} % lost"


def findings(samples: Sequence[results.Sample]) -> list[Finding]:
    """Return what was published, and what is true of it here."""
    most = max(one["sources"] for one in samples)
    found = []
    for sources, published in (
        (1, "the same: 100 500 a minute answered by both"),
        (2, "Apache 72 000 a minute, nginx 203 000"),
        (most, f"Apache {'3547' if most == 5 else '?'} a second at 5; its load grows to 23"),
    ):
        apache, nginx = (
            _pick(samples, target=name, kernel=DEFAULT, sources=sources) for name in (APACHE, NGINX)
        )
        holds = None
        if apache and nginx:
            same = alike(apache["rate"], nginx["rate"])
            holds = same if sources == 1 else not same
        what = f"answered, {sources} source{'s' if sources > 1 else ''}"
        measured = f"Apache {_said(apache)}; nginx {_said(nginx)}"
        found.append(Finding(what, published, measured, holds))
    cpu = {
        name: _front_cpu(_pick(samples, target=name, kernel=DEFAULT, sources=most))
        for name in (APACHE, NGINX)
    }
    what = f"cores that the web server takes, {most} sources"
    measured = f"Apache {cpu[APACHE]:.2f}, nginx (with the one behind it) {cpu[NGINX]:.2f}"
    found.append(Finding(what, "Apache far more than nginx", measured, cpu[APACHE] > cpu[NGINX]))
    for kernel in (THEN, NOW):
        pairs = [
            (_pick(samples, target=name, kernel=DEFAULT, sources=most), one)
            for name in TARGETS
            if (one := _pick(samples, target=name, kernel=kernel, sources=most))
        ]
        helped = [before["loss"] - after["loss"] > 0.01 for before, after in pairs if before]
        what = f"kernel settings {kernel}: what they mend"
        published = "needed by Apache, not by nginx" if kernel == THEN else "-"
        measured = f"{sum(helped)} of {len(helped)} servers lose less"
        if not helped:
            measured = "not tried: they cannot be set here"
        holds = any(helped) if helped and kernel == THEN else None
        found.append(Finding(what, published, measured, holds))
    return found


def _front_cpu(one: results.Sample | None) -> float:
    if one is None:
        return 0.0
    return float(one["cpu"].get("Apache", 0.0) + one["cpu"].get("nginx", 0.0))


def changes(samples: Sequence[results.Sample]) -> list[Change]:
    """Return the change by keyfront's line-up at the most sources, against the better other one."""
    most = max(one["sources"] for one in samples)
    at_most = [one for one in samples if one["sources"] == most and one["kernel"] == DEFAULT]
    stock = [one for one in at_most if one["target"] != KEYFRONT]
    (ours,) = (one for one in at_most if one["target"] == KEYFRONT)
    best = min(stock, key=lambda one: (one["loss"], one["p95_ms"] or 0.0))
    because = "It runs Python behind it, the other an nginx that answers at once."
    of, target = f"a live stream from {most} sources", best["target"]
    lost = f"Requests lost of {of}"
    found = [less_is_better(lost, 100 * best["loss"], target, 100 * ours["loss"], "%")]
    if best["p95_ms"] and ours["p95_ms"]:
        times = best["p95_ms"], target, ours["p95_ms"]
        what = f"95th percentile of answers to {of}"
        found.append(less_is_better(what, *times, "ms", because=because))
    return found


def _table(samples: Sequence[results.Sample]) -> results.Table:
    return results.tabled(
        "points",
        samples,
        {
            "server": "target",
            "kernel": "kernel",
            "sources": "sources",
            "offered/s": "offered",
            "answered/s": lambda one: round(one["rate"]),
            "lost %": lambda one: round(100 * one["loss"], 2),
            "p50 ms": "p50_ms",
            "p95 ms": "p95_ms",
            "cores": lambda one: round(sum(one["cpu"].values()), 2),
        },
        "An open loop: requests are sent at their times, and times are counted from then. "
        f"Lost is what has no good answer within {PATIENCE:g} s.",
    )


def run(world: World, record: results.Record) -> Conclusions:
    """Measure."""
    quick = world.options.quick
    record.conditions |= {
        "rate_of_a_source": QUICK_RATE if quick else RATE,
        "seconds": world.seconds(QUICK_SECONDS, SECONDS),
        "apache_processes": QUICK_PROCESSES if quick else PROCESSES,
        "patience": PATIENCE,
    }
    measure(world, record)
    record.tables.append(_table(record.samples))
    notes = [
        f"A stream of {record.conditions['rate_of_a_source']} requests a second from each source "
        "instead of live users' (1675): generator, servers and application share the cores of one "
        "machine.",
        "Sources are addresses of loopback instead of servers; requests are copied by their times, "
        "each on a connection of its own, not packet by packet.",
        "Today's Apache, nginx and kernel; what was advised then and no longer exists is left out.",
    ]
    if quick:
        notes.append(
            f"Apache has {QUICK_PROCESSES} processes of {THREADS_EACH} threads instead of "
            f"{PROCESSES}."
        )
    if any(one["generator_limit"] for one in record.samples):
        notes.append("At some points the generator was late: it was the limit, not the server.")
    return Conclusions(findings(record.samples), changes(record.samples), notes)


TITLE = "A live stream of requests for Apache and nginx, with 1 to 5 sources"
EXPERIMENT = Experiment(NAME, TITLE, SOURCE, run)
