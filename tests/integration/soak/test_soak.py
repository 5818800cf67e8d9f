"""A whole site under faults: nothing stale, nothing wrong, and it takes no more than before.

``tox -e soak -- --minutes 60`` lets it go on; in a run of all tests each fault is had once, and
clients ask eight times less often: what they ask takes most of the processors, and an answer that
lives for three seconds too long is found all the same, in several places.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.served import PATIENCE
from support.soak import report
from support.soak.clients import Clients
from support.soak.faults import SILENT, Faults
from support.soak.resources import Rest, look
from support.soak.site import Site, site

pytest.importorskip("keystone")
pytest.importorskip("keystonemiddleware")
pytestmark = pytest.mark.slow

#: Seconds from a rest to the next in a run of minutes, and of a rest until what runs has ended.
RESTS, ENDS = 120.0, 1.0
#: What a process may have more at the last rest than at one before. Pools and caches are filled
#: bit by bit: of few minutes only the bounds are known.
MORE = {"descriptors": 40.0, "threads": 6.0, "MiB": 60.0}
#: Connections that all processes together may have more: those of pools that were not used before.
CONNECTIONS = 24.0


def test_a_site_under_faults(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    minutes = pytestconfig.getoption("--minutes", default=None)
    page = pytestconfig.getoption("--report", default=None) or tmp_path / "soak.html"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    pace, pause = (8.0, 0.2) if minutes is None else (1.0, 2.0)
    rests: list[Rest] = []
    failed: list[str] = []
    with site(tmp_path) as made:
        clients = Clients(made, random.Random(seed), pace)
        faults = Faults(made, clients, random.Random(seed + 1), pause)
        began = time.monotonic()
        clients.start()
        try:
            _soak(made, clients, faults, rests, 60 * (minutes or 0.0))
        except AssertionError as error:
            failed.append(str(error))  # the page tells what had been found until then
        finally:
            for part in (faults, clients):
                try:
                    part.end()
                except AssertionError as error:
                    failed.append(str(error))
        found = report.Found(
            began, time.monotonic(), clients.seen, faults.had, rests, clients.changes,
            clients.doubtful, impossible=clients.history.faults(),
            wrong=[*failed, *clients.wrong, *_noticed(clients, faults)], grown=_grown(rests),
            absent=[f"Not had, as no file system can be mounted: {x}." for x in faults.absent],
        )  # fmt: skip
    report.write(found, page)
    print(f"{found.text()}\n{page}")
    assert found.good, found.text()
    assert set(clients.changes) == set(clients.KINDS)


def _soak(
    made: Site, clients: Clients, faults: Faults, rests: list[Rest], seconds: float
) -> None:
    """Let faults be had for so long, and each once at least; look at what it takes meanwhile."""
    end = time.monotonic() + seconds
    _wait(clients, faults, clients.has_asked_everywhere)
    rests.append(_rest(clients, made))
    faults.start()
    while time.monotonic() < end or faults.rounds < 1:
        until = min(end, time.monotonic() + RESTS)
        _wait(
            clients, faults,
            lambda until=until: time.monotonic() >= until and faults.rounds >= 1,
        )  # fmt: skip
        if clients.over.is_set() or faults.over.is_set():
            return
        with faults.none():
            rests.append(_rest(clients, made))


def _wait(clients: Clients, faults: Faults, condition: Callable[[], bool]) -> None:
    """Wait until something is so, or somebody has failed."""
    hangs = time.monotonic() + 10 * PATIENCE + RESTS
    while not (condition() or clients.over.is_set() or faults.over.is_set()):
        assert time.monotonic() < hangs, "the soak hangs"
        time.sleep(0.1)


def _rest(clients: Clients, made: Site) -> Rest:
    with clients.resting():
        time.sleep(ENDS)
        return look(made)


def _noticed(clients: Clients, faults: Faults) -> list[str]:
    """What users saw of what nobody is to see: they come in by HAProxy."""
    return [
        f"{fault.name}: {seen.kind} at {seen.where}: {seen.judged} ({seen.status})"
        for fault in faults.had
        if fault.name in SILENT
        for seen in clients.seen
        if fault.began <= seen.moment <= fault.ended
        and seen.where == "balancer"
        and seen.judged != "good"
    ]


def _grown(rests: list[Rest]) -> list[str]:
    if not rests:
        return []
    # The first is before any fault: what faults use is not there yet.
    first, last = rests[1 if len(rests) > 2 else 0], rests[-1]
    found = []
    for name, before in first.figures.items():
        after = last.figures[name]
        kind = name.rpartition(": ")[2]
        allowed = CONNECTIONS if name.startswith("connections") else MORE.get(kind, 0.0)
        if after > before + allowed and kind != "processes":
            found.append(f"{name}: {before:.0f} at rest before, {after:.0f} at the end")
    return found
