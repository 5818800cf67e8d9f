"""Apache's prefork and event modules under an OpenStack API, as H. Beraud compared them in 2019.

A service like nova-api runs behind each module, as it comes and with keyfront's heartbeat.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from ssl import CERT_NONE, create_default_context
from typing import Any, NamedTuple

from keyfront.errors import ServerError

from .. import results
from ..lineups import stock_servers
from ..load import generators
from ..load.measured import Request
from ..servers import rabbitmq
from ..servers.certificates import Pair, certificates
from ..servers.ports import free_port
from ..servers.processes import HOST, Process
from . import timelines
from .experiment import Conclusions, Experiment, World
from .findings import Change, Finding, alike, less_is_better, number, paired_change

NAME = "apache-mpm"
SOURCE = (
    "H. Beraud, 2019-07-24, herve.beraud.io: Compare apache MPM engine module on openstack; its "
    "figures are pictures and not known to us"
)
MODULES = ("prefork", "event")
SIDES = ("stock", "keyfront")
CLIENTS = 10
# Seconds; 60 by default, after which an idle experiment would take minutes.
HEARTBEAT = 4
# RabbitMQ closes a connection three of them after the last beat, and may be late itself.
IDLE, QUICK_IDLE = 60, 20
ROUNDS, QUICK_ROUNDS = 6, 1
_PUBLISH = "/publish"
# Never imported here: it patches its process.
SERVICE = f"{__package__}.mpm_service:application"


class Size(NamedTuple):
    """The requests of a load, and the processes of a service."""

    requests: int
    processes: int


FULL, QUICK = Size(requests=1000, processes=2), Size(requests=200, processes=1)


@dataclass(frozen=True, kw_only=True)
class Server:
    """One Apache with the service behind it.

    :ivar pids: the numbers of the processes that run Python
    """

    module: str
    side: str
    port: int
    running: Process
    processes: int
    pids: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.module}, {'as it comes' if self.side == 'stock' else 'with keyfront'}"

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}/"

    def publish(self) -> list[float]:
        """Have every process send a message; gives the milliseconds of each one's first."""
        found: dict[int, float] = {}
        deadline = time.monotonic() + 60
        while len(found) < self.processes:
            answer = self._get(_PUBLISH)
            if answer is not None:
                found.setdefault(answer["pid"], answer["milliseconds"])
            elif time.monotonic() > deadline:
                self.running.check()
                raise ServerError(f"{self.name}: no answer")
        self.pids.update(found)
        return list(found.values())

    def _get(self, path: str) -> dict[str, Any] | None:
        context = create_default_context()
        context.check_hostname = False
        context.verify_mode = CERT_NONE
        with closing(HTTPSConnection(HOST, self.port, timeout=30, context=context)) as client:
            try:
                client.request("GET", path, headers={"Connection": "close"})
                answer = client.getresponse()
                text = answer.read()
            except (OSError, HTTPException):
                time.sleep(0.05)
                return None
        found: dict[str, Any] | None = json.loads(text) if answer.status == 200 else None
        return found


def started(
    stack: ExitStack, folder: Path, module: str, side: str, broker: int, tls: Pair, processes: int
) -> Server:
    """Run an Apache with the service until a stack is closed."""
    port = free_port()
    environment = {
        "MPM_BROKER": f"{rabbitmq.url(broker)}?heartbeat_timeout_threshold={HEARTBEAT}",
        "MPM_KEPT": "1" if side == "keyfront" else "0",
    }
    mpm = stock_servers.STOCK_EVENT if module == "event" else stock_servers.STOCK_PREFORK
    program = stock_servers.apache(
        folder,
        f"{HOST}:{port}",
        mpm=module,
        directives={**mpm, **stock_servers.STOCK_APACHE},
        loaded=["socache_shmcb", "ssl"],
        content=[
            *stock_servers.mod_wsgi(
                folder, SERVICE, processes=processes, threads=1, environment=environment
            ),
            "SSLEngine on",
            f"SSLCertificateFile {tls.certificate}",
            f"SSLCertificateKeyFile {tls.key}",
        ],
        ordinary=True,
    )
    running = stack.enter_context(stock_servers.started(program))
    return Server(module=module, side=side, port=port, running=running, processes=processes)


def resets(names: list[str], pids: set[int]) -> int:
    """Return how many of the connections that were reset belonged to these processes.

    :param names: oslo.messaging's names of its connections: ``program:pid:uuid``
    """
    return sum(int(number_) in pids for name in names for number_ in re.findall(r":(\d+):", name))


def measure(world: World, record: results.Record, size: Size) -> None:
    """Idle and load all four."""
    quick = world.options.quick
    idle = QUICK_IDLE if quick else IDLE
    start = time.monotonic()
    pair = certificates(world.folder()).server
    world.say("RabbitMQ and four Apaches are started")
    with rabbitmq.broker(world.folder(), small=quick) as broker, ExitStack() as stack:
        running = [
            started(stack, world.folder(), module, side, broker.port, pair, size.processes)
            for module in MODULES
            for side in SIDES
        ]
        for server in running:
            server.publish()
        before = timelines.clients(broker.port)
        world.say(f"all are idle for {idle} s; RabbitMQ expects a beat every {HEARTBEAT} s")
        probes = {("AMQP connections", "sockets"): lambda: float(timelines.clients(broker.port))}
        with timelines.Watch(start, probes) as watch:
            time.sleep(idle)
        record.timelines += watch.timelines("idle")
        after, names = timelines.clients(broker.port), rabbitmq.missed_names(broker.log_text())
        for server in running:
            first = server.publish()
            record.sample(
                what="idle",
                module=server.module,
                side=server.side,
                seconds=idle,
                processes=size.processes,
                resets=resets(names, server.pids),
                first_message_ms=round(statistics.median(first), 2),
            )
        last = timelines.clients(broker.port)
        record.conditions["amqp_connections"] = {"before": before, "idle": after, "after": last}
        for number_ in range(QUICK_ROUNDS if quick else ROUNDS):
            for server in reversed(running) if number_ % 2 else running:
                request = Request(server.url, {})
                with timelines.Watch(start) as watch:
                    load = generators.closed(
                        "ab", request, connections=CLIENTS, seconds=300, most=size.requests
                    )
                who = {"module": server.module, "side": server.side, "round": number_}
                record.sample(what="load", **who, **load.sample(), cpu=watch.cpu)


def _rates(samples: list[results.Sample], module: str, side: str) -> list[float]:
    found = results.matching(samples, what="load", module=module, side=side)
    return [one["rate"] for one in found]


def _idle(samples: list[results.Sample], module: str, side: str) -> results.Sample:
    return results.matching(samples, what="idle", module=module, side=side)[0]


def findings(samples: list[results.Sample], size: Size = FULL) -> list[Finding]:
    """Return what was proposed, and what is true of it here."""
    rates = {module: statistics.median(_rates(samples, module, "stock")) for module in MODULES}
    lost = {module: _idle(samples, module, "stock")["resets"] for module in MODULES}
    kept = {module: _idle(samples, module, "keyfront")["resets"] for module in MODULES}
    told = {module: f"{lost[module]} reset of {_services(size)}" for module in MODULES}
    requests = f"ab -n {size.requests} -c {CLIENTS} over TLS: requests a second"
    measured = ", ".join(f"{name} {number(rate)}" for name, rate in rates.items())
    times = rates["event"] / rates["prefork"]
    fast = times >= 1 or alike(rates["event"], rates["prefork"])
    idle = "prefork: an idle service loses its AMQP connections"
    again = ", ".join(f"{name}: {count} reset" for name, count in kept.items())
    return [
        Finding(requests, "the modules compared; figures not known to us", measured),
        Finding("event is as fast as prefork", "hoped for", f"{number(times)} times", fast),
        Finding(idle, "it does", told["prefork"], lost["prefork"] > 0),
        Finding("event mends that", "proposed, not fully tested", told["event"], not lost["event"]),
        Finding("the same with keyfront's heartbeat", "-", again),
    ]


def changes(samples: list[results.Sample], size: Size = FULL) -> list[Change]:
    """Return what keyfront's heartbeat changes, against the better module."""
    best = min(MODULES, key=lambda one: _idle(samples, one, "stock")["resets"])
    fast = max(MODULES, key=lambda one: statistics.median(_rates(samples, one, "stock")))
    stock, ours = (_rates(samples, fast, side) for side in SIDES)
    before, after = (_idle(samples, best, side) for side in SIDES)
    name, of = f"Apache with {best}, as it comes", f"of {_services(size)}"
    found = [
        less_is_better(what, before[key], name, after[key], unit)
        for what, key, unit in (
            ("AMQP connections that an idle service loses", "resets", of),
            ("The first message of a service that was idle", "first_message_ms", "ms"),
        )
    ]
    requests = "Requests of a service with AMQP connections, over TLS"
    return [*found, paired_change(requests, f"Apache with {fast}, as it comes", stock, ours)]


def _services(size: Size) -> str:
    return f"{size.processes} process{'es' if size.processes > 1 else ''}"


def _tables(samples: list[results.Sample], size: Size) -> list[results.Table]:
    who: dict[str, Any] = {
        "module": "module",
        "service": lambda one: "keyfront" if one["side"] == "keyfront" else "as it comes",
    }
    idle = {"idle, s": "seconds", "resets": "resets", "first message, ms": "first_message_ms"}
    load: dict[str, Any] = {
        "a second": lambda one: round(one["rate"]),
        "failed": "failed",
        "p50 ms": "p50_ms",
        "p99 ms": "p99_ms",
    }
    beats = f"RabbitMQ expects a beat every {HEARTBEAT} s (60 by default); {_services(size)} of "
    asked = f"ab -n {size.requests} -c {CLIENTS} over TLS."
    return [
        results.tabled(name, results.matching(samples, what=name), who | more, caption)
        for name, more, caption in (
            ("idle", idle, f"{beats}each service: a connection each."),
            ("load", load, asked),
        )
    ]


def run(world: World, record: results.Record) -> Conclusions:
    """Measure."""
    size = QUICK if world.options.quick else FULL
    record.conditions |= {"heartbeat": HEARTBEAT, "requests": size.requests, "clients": CLIENTS}
    measure(world, record, size)
    record.tables += _tables(record.samples, size)
    return Conclusions(
        findings=findings(record.samples, size),
        changes=changes(record.samples, size),
        notes=[
            "A small service with an RPC client instead of nova-api in a container of an "
            f"undercloud; {_services(size)} of mod_wsgi, of one thread.",
            f"RabbitMQ expects a beat every {HEARTBEAT} s instead of every 60 s, so that idling "
            "takes seconds; what is lost is the same.",
        ],
    )


TITLE = "Apache's prefork and event modules under a service with AMQP connections"
EXPERIMENT = Experiment(NAME, TITLE, SOURCE, run)
