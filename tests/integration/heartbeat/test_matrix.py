"""The heartbeat in every server, patching and use: connections survive idle times, on a RabbitMQ.

Idling costs no processor time, so many servers idle at the same time, each with connections of its
own at one broker. The tests below only judge what one run of all of them found.

By default the telling cells; all of them, with and without the heartbeat, in some minutes::

    KEYFRONT_HEARTBEAT_MATRIX=full pytest tests/integration/heartbeat/test_matrix.py

``KEYFRONT_HEARTBEAT_RESULTS`` names a file for what was found (see ``heartbeat_table.py``), and
``KEYFRONT_UWSGI_WITHOUT_THREADS`` a uWSGI 2.0.26.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import pytest

from keyfront.errors import MissingPartError
from support.broker import Broker, broker
from support.certificates import Certificates, certificates
from support.heartbeat_servers import (
    SHAPES,
    Running,
    Shape,
    running,
    starting,
    uwsgi_without_threads,
)
from support.heartbeat_table import IDLES, Outcome, save
from support.served import wait_for

# Seconds. RabbitMQ hangs up after three times as long in which it heard nothing, and a busy machine
# stands still for a part of that.
HEARTBEAT = 3
IDLE = 3 * HEARTBEAT + 3
# A reset costs oslo.messaging 1 s (kombu_reconnect_delay), which it sleeps. The first publish after
# the better one of the idle times may always take half of that, as this machine does other things.
NOISE = 0.5
IDLE_FREE = 9
# Whoever waits for the thread of the beats waits for half a minute, until its next one.
STOP_THRESHOLD, STOP_NOISE = 60, 15.0
# Servers at a time: what fits into 4 GB.
BATCH = 45
# Servers that start, or are measured without ours (they sleep), at a time.
STARTING, SLEEPING = 3, 8
FULL = os.environ.get("KEYFRONT_HEARTBEAT_MATRIX") == "full"
RESULTS = os.environ.get("KEYFRONT_HEARTBEAT_RESULTS")
CONNECTIONS = {"publish": 1, "call": 2, "server": 2}
# Of an Apache's log, with its own words before it, too.
_WARNING = re.compile(r"WARNING keyfront\.gateway\.heartbeat: (.*)")


class Cell(NamedTuple):
    shape: Shape
    patch: str = "none"
    kind: str = "publish"
    tls: bool = False
    install: str = "code"

    def __str__(self) -> str:
        name = re.sub(r"[^A-Za-z0-9.=]+", "_", self.shape.name)
        return "-".join((name, self.patch, self.kind, *(["TLS"] if self.tls else []), self.install))

    @property
    def unsafe(self) -> bool:
        return self.shape.unsafe(self.patch)


def _quick() -> Iterator[Cell]:
    for patch in ("none", "eventlet", "gevent"):
        yield Cell(SHAPES["uWSGI"], patch)
    for patch in ("eventlet", "gevent"):
        yield Cell(SHAPES["uWSGI"], patch, tls=True)
        yield Cell(SHAPES["uWSGI"], patch, "call")
        yield Cell(SHAPES["mod_wsgi daemon, event"], patch, install="filter")
        yield Cell(SHAPES["mod_wsgi embedded, event"], patch)
    yield Cell(SHAPES["uWSGI lazy-apps"], "eventlet", install="entry")
    yield Cell(SHAPES["uWSGI"], "eventlet", "server")
    yield Cell(SHAPES["uWSGI threads=4"])
    yield Cell(SHAPES["uWSGI threads=4"], "eventlet")
    yield Cell(SHAPES["uWSGI gevent=20"], "gevent")
    if uwsgi_without_threads():
        yield Cell(SHAPES["uWSGI without threads"], "none")
        yield Cell(SHAPES["uWSGI without threads"], "eventlet")
        yield Cell(SHAPES["uWSGI without threads, lazy-apps"], "gevent")
    else:
        yield Cell(SHAPES["uWSGI, told without threads"], "eventlet")
        yield Cell(SHAPES["uWSGI, told without threads, lazy-apps"], "gevent")
    # without it they fail, so these tests can fail
    yield Cell(SHAPES["uWSGI"], "eventlet", install="none")
    yield Cell(SHAPES["uWSGI"], "gevent", install="none")
    yield Cell(SHAPES["uWSGI"], "eventlet", "call", install="none")


def _full() -> Iterator[Cell]:
    for shape in SHAPES.values():
        # what is only told to have no threads stands in for what has none
        if shape.name == "wsgiref" or (
            shape.preface if uwsgi_without_threads() else shape.starved
        ):
            continue
        for patch in shape.patches:
            for kind in CONNECTIONS:
                for tls in (False, True):
                    yield Cell(shape, patch, kind, tls)
                    # told only, it is uWSGI
                    if not shape.unsafe(patch) and not shape.preface:
                        yield Cell(shape, patch, kind, tls, "none")
            if shape.entry:
                yield Cell(shape, patch, install="entry")
            if not shape.starved:
                yield Cell(shape, patch, install="filter")


CELLS = list(dict.fromkeys([*_full(), *_quick()] if FULL else _quick()))
SAFE = [x for x in CELLS if not x.unsafe]
OURS = [x for x in SAFE if x.install != "none"]
STOCK = [x for x in SAFE if x.install == "none"]
UNSAFE = [x for x in CELLS if x.unsafe]


class Trial:
    """One server, from its start to its end."""

    def __init__(self, cell: Cell, server: Running, outside: Running, outcome: Outcome) -> None:
        self.cell, self.server, self.outside, self.outcome = cell, server, outside, outcome

    def operate(self) -> float:
        """Publish, call or be called once; how many seconds that took."""
        if self.cell.kind == "publish":
            return float(self.server.get("/publish")["seconds"][0])
        if self.cell.kind == "call":
            return float(self.server.get("/call")["seconds"][0])
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(self.outside.get, "/call", topic=str(self.cell))
            # a server whose hub stands still answers as soon as it has a request
            while not called.done():
                self.server.get("/sleep", seconds=0.05 if self.cell.patch != "none" else 0)
            return float(called.result()["seconds"][0])

    def warm_up(self) -> None:
        if self.cell.kind == "server":
            self.server.get("/serve")
        self.operate()
        self.outcome.free = [self.operate() for _ in range(IDLE_FREE)]

    def after_idle(self) -> None:
        self.outcome.first.append(self.operate())
        self.outcome.free += [self.operate() for _ in range(2)]

    def end(self) -> None:
        self.outcome.delays = float(self.server.get("/pid")["delays"])
        if self.cell.install != "none":
            self.outcome.statistics = self.server.get("/stats")
        self.outcome.warnings = _WARNING.findall(self.server.said())


class Laboratory:
    """Runs many cells against one broker."""

    def __init__(self, rabbit: Broker, folder: Path, authority: Path) -> None:
        self.rabbit, self.folder, self.authority = rabbit, folder, authority

    def run(self, cells: list[Cell]) -> dict[Cell, Outcome]:
        """A batch of servers after the other, each from its start to its end."""
        found: dict[Cell, Outcome] = {}
        with running(SHAPES["wsgiref"], self.folder / "echo", self._environment(None)) as outside:
            outside.get("/serve")
            outside.get("/call")
            for start in range(0, len(cells), BATCH):
                found.update(self._batch(cells[start : start + BATCH], outside))
        return found

    def _environment(self, cell: Cell | None) -> dict[str, str]:
        tls = cell is not None and cell.tls
        return {
            "HB_URL": self.rabbit.url(tls=tls),
            "HB_THRESHOLD": str(HEARTBEAT),
            "HB_NAME": str(cell or "echo"),
            "HB_PATCH": cell.patch if cell else "none",
            "HB_INSTALL": cell.install if cell else "none",
            **({"HB_CA": str(self.authority)} if tls else {}),
        }

    def _batch(self, cells: list[Cell], outside: Running) -> dict[Cell, Outcome]:
        found = {
            x: Outcome(x.shape.name, x.patch, x.tls, x.kind, x.install, x.unsafe) for x in cells
        }
        with contextlib.ExitStack() as stack:
            trials = [
                Trial(cell, server, outside, found[cell])
                for cell, server in self._start(cells, stack, found)
            ]
            # an unsafe one would do it badly: it is only to say so
            at_work = [x for x in trials if not x.cell.unsafe]
            self._each(at_work, Trial.warm_up, STARTING)
            self._count(at_work, lambda x, seen: setattr(x, "connections", len(seen)))
            for number in range(1, IDLES + 1):
                time.sleep(IDLE)
                self._wait_for_losses(at_work, number)
                # one after the other: each is to be measured alone
                self._each([x for x in at_work if x.cell.install != "none"], Trial.after_idle, 1)
                stock = [x for x in at_work if x.cell.install == "none"]
                self._each(stock, Trial.after_idle, SLEEPING)
            self._each(trials, Trial.end, 1)
            self._count(at_work, _judge)
        return found

    def _wait_for_losses(self, trials: list[Trial], number: int) -> None:
        """Wait until RabbitMQ has ended what it must, so many times; it may be slow, too."""
        doomed = [
            x.server.client_name for x in trials
            if x.cell in STOCK and x.cell.shape.resets(x.cell.patch) and not x.outcome.error
        ]
        # else each of them tells
        with contextlib.suppress(AssertionError):
            wait_for(lambda: all(self.rabbit.missed(x) >= number for x in doomed), "they are lost")

    def _start(
        self, cells: list[Cell], stack: contextlib.ExitStack, found: dict[Cell, Outcome]
    ) -> list[tuple[Cell, Running]]:
        started: list[tuple[Cell, Running]] = []
        waiting: deque[tuple[Cell, Callable[[], Running]]] = deque()

        def wait() -> None:
            cell, ready = waiting.popleft()
            try:
                started.append((cell, ready()))
            except AssertionError as error:
                found[cell].error = f"{error}"

        for cell in cells:
            server = starting(
                cell.shape, self.folder / str(cell), self._environment(cell), stop=signal.SIGKILL
            )
            try:
                waiting.append((cell, stack.enter_context(server)))
            except (pytest.skip.Exception, MissingPartError) as error:
                found[cell].skipped = str(error)
            if len(waiting) == STARTING:
                wait()
        while waiting:
            wait()
        return started

    def _each(self, trials: list[Trial], do: Callable[[Trial], None], at_a_time: int) -> None:
        """Do it for those without a failure; one is kept with the outcome."""

        def attempt(trial: Trial) -> None:
            try:
                if not trial.outcome.error:
                    do(trial)
            except (AssertionError, OSError, HTTPException) as error:
                trial.outcome.error = f"{do.__name__}: {error}"

        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(attempt, trials))

    def _count(self, trials: list[Trial], tell: Callable[..., None]) -> None:
        seen = self.rabbit.seen()
        for trial in trials:
            tell(trial.outcome, [x for x in seen if trial.server.client_name in x.name])


def _judge(outcome: Outcome, seen: list) -> None:
    outcome.accepted = len(seen)
    outcome.ended = sum(x.says("^closing AMQP connection") for x in seen)
    outcome.missed = sum(x.says("missed heartbeats from client") for x in seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def made(folder: Path) -> Certificates:
    return certificates(folder / "certificates")


@pytest.fixture(scope="module")
def rabbit(folder: Path, made: Certificates) -> Iterator[Broker]:
    with broker(folder, tls=made) as rabbit:
        yield rabbit


@pytest.fixture(scope="module")
def outcomes(
    rabbit: Broker, folder: Path, made: Certificates, request: pytest.FixtureRequest
) -> dict[Cell, Outcome]:
    """What all the cells that are asked for did."""
    parameters = [getattr(x, "callspec", None) for x in request.session.items]
    asked = {x.params["cell"] for x in parameters if x and "cell" in x.params}
    found = Laboratory(rabbit, folder, made.ca_file).run([x for x in CELLS if x in asked])
    if RESULTS:
        save(found.values(), Path(RESULTS))
    return found


@pytest.fixture
def outcome(cell: Cell, outcomes: dict[Cell, Outcome]) -> Outcome:
    """What this one did."""
    found = outcomes[cell]
    if found.skipped:
        pytest.skip(found.skipped)
    assert not found.error
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cell", OURS, ids=str)
def test_no_connection_is_lost(cell: Cell, outcome: Outcome) -> None:
    assert outcome.missed == outcome.ended == 0, outcome
    if cell.kind != "server":
        assert outcome.connections == outcome.accepted == CONNECTIONS[cell.kind], outcome
    # two calls right after each other may be answered on two connections, if threads are slow
    assert outcome.accepted >= CONNECTIONS[cell.kind]
    assert outcome.statistics["connections"] == outcome.accepted
    assert outcome.statistics["beats"] > 0
    assert outcome.statistics["reconnections"] == outcome.statistics["dead_peers"] == 0, outcome
    assert not outcome.warnings


@pytest.mark.slow
@pytest.mark.parametrize("cell", OURS, ids=str)
def test_the_first_after_an_idle_time_is_not_slow(cell: Cell, outcome: Outcome) -> None:
    usual = statistics.median(outcome.free)
    assert len(outcome.first) == IDLES
    assert outcome.delays == 0, outcome
    assert min(outcome.first) <= max(2 * usual, max(outcome.free), NOISE), outcome


@pytest.mark.slow
@pytest.mark.parametrize("cell", STOCK, ids=str)
def test_without_it_connections_are_lost_where_they_must(cell: Cell, outcome: Outcome) -> None:
    if not cell.shape.resets(cell.patch):
        assert outcome.missed == 0, outcome
        return
    assert outcome.missed >= IDLES, outcome
    assert outcome.accepted > outcome.connections
    assert outcome.delays >= IDLES, outcome
    if cell.kind == "publish" and cell.patch != "none":
        assert min(outcome.first) > NOISE, outcome


@pytest.mark.slow
@pytest.mark.parametrize("cell", UNSAFE, ids=str)
def test_what_is_broken_at_the_base_is_warned_of(cell: Cell, outcome: Outcome) -> None:
    (line,) = outcome.warnings
    server = " ".join(cell.shape.name.replace(",", "").split()[: 2 if "mod" in line else 1])
    assert server.lower() in line.lower()
    assert f"{cell.shape.threads} threads" in line
    assert cell.patch in line
    assert outcome.statistics["unsafe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "patch"),
    [(x.name, y) for x in SHAPES.values() for y in x.patches if x.entry and not x.unsafe(y)]
    if FULL
    else [("uWSGI", "eventlet"), ("mod_wsgi daemon, event", "gevent")],
)
def test_a_server_stops_as_it_does_without(
    name: str, patch: str, rabbit: Broker, tmp_path: Path
) -> None:
    seconds = {}
    for install in ("none", "code"):
        environment = {
            "HB_URL": rabbit.url(), "HB_PATCH": patch, "HB_INSTALL": install,
            "HB_THRESHOLD": str(STOP_THRESHOLD),
        }
        with running(SHAPES[name], tmp_path / install, environment) as server:
            server.get("/publish")
            client = server.client_name
            assert rabbit.connections(client)
            start = time.monotonic()
        seconds[install] = time.monotonic() - start
        rabbit.wait_for(lambda rabbit, x=client: not rabbit.connections(x), "it hung up")
    # a thread that is waited for would wait until it beats, or for good
    assert seconds["code"] <= seconds["none"] + STOP_NOISE, seconds
