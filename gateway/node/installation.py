"""Puts a node's health and counts in front of an application, for the entrypoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common.counters import node_folder
from keyfront.errors import ServerError

from ..application import FailedApplication, describe
from . import health
from .counters import GROWN, LOGINS_REFUSED, SHED, NodeCounts, count_requests
from .known_logins import KnownLogins
from .login_turns import LoginTurns

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from keyfront.common.fork import ForkRegistry

# Characters of an error that are shown.
_LONGEST = 300


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

    def wrap(self, application: WSGIApplication, loaded: WSGIApplication) -> WSGIApplication:
        """Return an application that answers for health, and counts all other requests.

        :param application: the whole chain
        :param loaded: the innermost, which may stand for one that failed to load
        """
        limits = self._settings.limits
        if isinstance(loaded, FailedApplication):
            asks: dict[str, health.Ask] = {"application": partial(_fail, loaded.error)}
            limits = {"application": 1.0}
        else:
            from ..keystone.readiness import parts

            asks = parts()
        checks = health.Checks(
            {name: (asks[name], limits[name]) for name in limits if name in asks},
            described=lambda error: describe(error)[:_LONGEST],
        )
        self._registry.register("health", after=checks.after_fork)
        questions = health.answers(
            settings=self._settings, checks=checks, folder=self.folder, found=self.counts.found
        )
        return count_requests(application, self.counts, questions)


def _fail(error: BaseException) -> None:
    raise ServerError(f"the application did not load: {describe(error)}")
