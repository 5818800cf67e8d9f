"""Puts a node's health and counts in front of an application, for the entrypoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common.counters import node_folder
from keyfront.common.poller import Poller
from keyfront.errors import ServerError

from ..application import FailedApplication, describe
from . import health
from .counters import GROWN, LOGINS_REFUSED, SHED, NodeCounts, count_requests, logins_silent
from .known_logins import KnownLogins
from .login_turns import LoginTurns

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from keyfront.common.fork import ForkRegistry

# Characters of an error that are shown.
_LONGEST = 300
# Seconds between two signs of a process that takes nothing but logins.
_SIGNS = 1.0


class Node:
    """The parts that this process shares with the others of its node.

    Make it before the application is loaded; :meth:`install` comes after ``registry.install()``.

    :raises OptionError: a variable of the environment has a value that cannot be used
    """

    def __init__(self) -> None:
        self.folder: Path | None = node_folder()
        self._settings = health.from_environment()
        self.counts = NodeCounts()

    def install(self, registry: ForkRegistry) -> None:
        """Begin to count, in this process and in each of its workers."""
        if self.folder is not None:
            self.counts.share(self.folder)
        registry.register("node counters", after=self.counts.begin)
        self._registry = registry

    def queued(self, seconds: float) -> None:
        """Count a request that waited for its turn."""
        self.counts.queued(seconds)

    def shed(self) -> None:
        """Count a request that is refused as it waited too long."""
        self.counts.count(SHED)

    def login_refused(self) -> None:
        """Count a login that is refused as too many are under way."""
        self.counts.count(LOGINS_REFUSED)

    def login_turns(self, *, running: int, waiting: int, processes: int) -> LoginTurns | None:
        """Return the turns of logins, shared by all processes of the node.

        :param running: logins that may run at a time; 0: ``None`` is returned
        :param waiting: logins that may wait at a time
        :param processes: processes of the server
        """
        if not running:
            return None
        turns = LoginTurns(self.folder, running=running, waiting=waiting, processes=processes)
        if self.folder is not None:
            known = KnownLogins(turns, self.folder)
            self._registry.register("known logins", after=known.start)
        return turns

    def grown(self) -> None:
        """Count a worker that is replaced as it has grown."""
        self.counts.count(GROWN)

    def wrap(
        self,
        application: WSGIApplication,
        loaded: WSGIApplication,
        takes_logins: Callable[[], bool] | None = None,
    ) -> WSGIApplication:
        """Return an application that answers for health, and counts all other requests.

        :param application: the whole chain
        :param loaded: the innermost, which may stand for one that failed to load
        :param takes_logins: tells whether this process takes nothing but logins; ``None`` where
            none does
        """
        limits = self._settings.limits
        if isinstance(loaded, FailedApplication):
            asks: dict[str, health.Ask] = {"application": partial(_fail, loaded.error)}
            limits = {"application": 1.0}
        else:
            from ..keystone.readiness import parts

            asks = parts()
            if takes_logins is not None and self.folder is not None and "logins" in limits:
                asks["logins"] = partial(_ask_logins, self.folder, limits["logins"])
                signs = _LoginSigns(self.counts, takes_logins)
                self._registry.register("logins", after=signs.start)
        checks = health.Checks(
            {name: (asks[name], limits[name]) for name in limits if name in asks},
            described=lambda error: describe(error)[:_LONGEST],
        )
        self._registry.register("health", after=checks.after_fork)
        questions = health.answers(
            settings=self._settings, checks=checks, folder=self.folder, found=self.counts.found
        )
        return count_requests(application, self.counts, questions)


class _LoginSigns:
    """The signs by which others see that a process which takes nothing but logins runs.

    :param counts: the counts of this process, in which they are noted
    :param takes_logins: tells whether this process is one
    """

    def __init__(self, counts: NodeCounts, takes_logins: Callable[[], bool]) -> None:
        self._counts = counts
        self._takes_logins = takes_logins
        self._poller = Poller(self.give, _SIGNS, name="keyfront-logins")

    def start(self) -> None:
        """Begin, in a process that was forked or has loaded."""
        self._poller.after_fork()
        self._poller.start()

    def give(self) -> None:
        """Give a sign; in a process that takes everything, end."""
        # Asked only now: uWSGI numbers its workers after their first handlers have run.
        if self._takes_logins():
            self._counts.sign()
        else:
            self._poller.stop()


def _ask_logins(folder: Path, seconds: float) -> None:
    """Check that a process which takes nothing but logins runs.

    :param seconds: the seconds that the next sign may be late
    :raises ServerError: none does
    """
    silent = logins_silent(folder, new=_SIGNS + seconds)
    if silent == math.inf:
        raise ServerError("no process for logins runs")
    if silent > _SIGNS + seconds:
        raise ServerError(f"no process for logins was seen to run for {silent:.1f} s")


def _fail(error: BaseException) -> None:
    raise ServerError(f"the application did not load: {describe(error)}")
