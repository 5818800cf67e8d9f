"""The candidates of a measurement: the computed plan and its neighbours within the budgets."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from ..budgets import fits
from ..compute import Plan
from ..reasons import count

#: Greenlets of a worker in the candidate with gevent.
GREENLETS = 100


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A number of workers to try.

    :param processes: worker processes
    :param threads: threads of each
    :param greenlets: greenlets of each, with one thread; 0 for threads alone
    """

    processes: int
    threads: int
    greenlets: int = 0

    @property
    def slots(self) -> int:
        """The number of requests that are answered at a time."""
        return self.processes * max(self.threads, self.greenlets)

    def __str__(self) -> str:
        each = (
            f"{self.greenlets} greenlets" if self.greenlets else count(self.threads, "thread")
        )
        return f"{count(self.processes, 'process')} x {each}"


def candidates(plan: Plan) -> list[Candidate]:
    """Return the computed plan and, behind it, its neighbours that keep the budgets."""
    found: list[Candidate] = []
    for candidate in _wanted(plan):
        if candidate not in found and (not found or _allowed(candidate, plan)):
            found.append(candidate)
    return found


def _wanted(plan: Plan) -> Iterator[Candidate]:
    processes, threads = int(plan["uwsgi.processes"].value), int(plan["uwsgi.threads"].value)
    yield Candidate(processes=processes, threads=threads)
    yield Candidate(processes=processes, threads=2 * threads)
    yield Candidate(processes=processes, threads=4 * threads)
    yield Candidate(processes=2 * processes, threads=threads)
    yield Candidate(processes=max(1, processes // 2), threads=threads)
    if importlib.util.find_spec("gevent") is not None:
        yield Candidate(processes=processes, threads=1, greenlets=GREENLETS)


def _allowed(candidate: Candidate, plan: Plan) -> bool:
    more = candidate.processes - int(plan["uwsgi.processes"].value)
    worker = int(plan["uwsgi.reload_on_rss"].value)
    room = int(plan["memory.limit"].value) - int(plan["memory.total_estimate"].value)
    # greenlets take turns on the pools that threads would have
    threads = min(candidate.threads, int(plan["uwsgi.threads"].value) * 4)
    return more * worker <= room and fits(plan.workload, candidate.processes, threads)
