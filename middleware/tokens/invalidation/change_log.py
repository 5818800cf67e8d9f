"""The epoch table that belongs to a database, in which each process announces its changes.

Workers with the ``token_cache`` filter make the table. Any other process that writes to the same
database finds it in the folder that belongs to that (``folder.py``) and takes part; where there is
no table, nobody has cached anything.

Where Keystone's configuration names a coordinator on Redis, every process that reads it takes part
in that one instead.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keyfront.errors import CoordinatorError

from ..coordinator.factory import coordinator_of
from ..coordinator.local import LEASE_SECONDS, NAME, SharedMemory, end_others
from ..coordinator.mark_owners import (
    HERE,
    UNKNOWN,
    Settled,
    given_up,
    left,
    owner,
    under_way,
)
from ..counters import CHANGES_REFUSED
from ..epochs import ALL_SLOT, Coordinator, Mark, Slots, slots
from ..folder import check_folder, is_by_database
from ..node_cache import nodes

LOG = logging.getLogger(__name__)

_ALL = Slots((ALL_SLOT,))


def _configured(folder: Path) -> tuple[Coordinator | None, float | None]:
    """Return the coordinator that Keystone's configuration names, and ``commit_timeout`` there.

    ``None`` if this is no process of Keystone's.

    :raises OptionError: an option has a value out of its range
    """
    keystone: Any = sys.modules.get("keystone.conf")
    if keystone is None or "database" not in keystone.CONF:
        return None, None
    from .. import options

    values = options.token_cache(keystone.CONF)
    return coordinator_of(values, True, folder=folder), values["commit_timeout"]


def _removed(folder: Path) -> bool:
    return not (folder / NAME).exists()


class Coordinators:
    """The coordinators of this process by folder: the one place that keeps them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coordinators: dict[Path, Coordinator] = {}
        self._attached: set[Path] = set()
        # Folders of which it is known that the configuration names no coordinator.
        self._local: set[Path] = set()
        #: The function that tells whether the commits of marks are over.
        self.settled = Settled()

    def get(
        self, folder: Path, trusted: Callable[[], set[int] | None] = lambda: None
    ) -> Coordinator | None:
        """Return the coordinator of a folder, attached if there is a table; else ``None``.

        :param folder: the folder of the epoch table
        :param trusted: a function that returns the users in whose tables root takes part, see
            :func:`.trusted_users`; by default all
        :raises CoordinatorError: there is a table, and it cannot be used
        :raises OptionError: an option has a value out of its range
        """
        coordinator = self._coordinators.get(folder)
        if coordinator is None and folder not in self._local:
            with self._lock:
                coordinator = self._coordinators.get(folder)
                if coordinator is None:
                    coordinator, timeout = _configured(folder)
                    if timeout is not None:
                        self.settled.timeout = timeout
                    if coordinator is None:
                        self._local.add(folder)
                    else:
                        coordinator.settled = self.settled
                        self._coordinators[folder] = coordinator
        if coordinator is None and (folder / NAME).exists():
            with self._lock:
                coordinator = self._coordinators.get(folder)
                if coordinator is None:
                    coordinator = SharedMemory(
                        folder, create=False, trusted=trusted(), settled=self.settled
                    )
                    self._coordinators[folder] = coordinator
                    self._attached.add(folder)
        return coordinator

    def set(self, folder: Path, coordinator: Coordinator) -> None:
        """Use ``coordinator`` for ``folder`` from now on, with :attr:`settled`."""
        coordinator.settled = self.settled
        with self._lock:
            self._coordinators[folder] = coordinator
            self._attached.discard(folder)

    def all(self) -> list[Coordinator]:
        """Return the coordinators that this process has."""
        with self._lock:
            return list(self._coordinators.values())

    def only_takes_part(self, folder: Path) -> bool:
        """Return whether this process found the table of ``folder``, and brought no coordinator."""
        return folder in self._attached

    def forget(self, folder: Path) -> None:
        """Close the coordinator of ``folder``, if there is one."""
        with self._lock:
            coordinator = self._coordinators.pop(folder, None)
            self._attached.discard(folder)
        if coordinator is not None:
            coordinator.close()


coordinators = Coordinators()
"""The coordinators of this process."""


class Changes:
    """Announces the changes of one database.

    :param find: a function that returns the folder of the epoch table; called at the first change,
        when the configuration has been read
    :param trusted: a function that returns the users in whose tables root takes part, see
        :func:`.trusted_users`; by default all
    """

    def __init__(
        self, find: Callable[[], Path], trusted: Callable[[], set[int] | None] = lambda: None
    ) -> None:
        self._find = find
        self._trusted = trusted
        self._said = False
        self._ended = False  # whether tables of another version were taken away
        self._folder: Path | None = None
        self._known = False  # whether there ever was a table
        # Changes that were allowed without a coordinator have one mark for all.
        self._owners: dict[Mark, list[str]] = {}
        # Marks whose stamp failed, to be left with the next change.
        self._unstamped: list[tuple[Mark, str]] = []

    @property
    def folder(self) -> Path:
        """The folder of the epoch table."""
        if self._folder is None:
            self._folder = self._find()
        return self._folder

    def begin(
        self, tags: Iterable[str], session: str = UNKNOWN, *, late: bool = False
    ) -> Mark | None:
        """Mark ``tags`` before the commit.

        :param tags: the tags of the change, at least one
        :param session: the session of the database connection, as ``mark_owners.py`` names it
        :param late: true if others may be told of it late, see :func:`.rules.may_wait`
        :returns: the mark, for :meth:`end` or :meth:`leave`; ``None`` if there is no table
        :raises CoordinatorError: nobody could be told; the change must not be committed
        :raises OptionError: an option has a value out of its range
        """
        coordinator = coordinators.get(self.folder, self._trusted)
        if coordinator is None:
            self._ended |= self._end_others()
            self._say_that_nobody_hears()
            return None
        self._known = True
        unstamped, self._unstamped = self._unstamped, []
        for one in unstamped:
            self.leave(*one)
        me = owner(session)
        under_way.add(me)
        try:
            try:
                found = slots(tags, coordinator.slot_count)
            except CoordinatorError:
                found = _ALL  # whether it may be made all the same, the coordinator says
            mark = coordinator.mark(found, me, late=late)
        except BaseException as error:
            under_way.discard(me)
            if not isinstance(error, CoordinatorError):
                raise
            try:
                self._forget_removed()
            except CoordinatorError:
                self._count_refusal()
                raise
            return None
        self._owners.setdefault(mark, []).append(me)
        return mark

    def end(self, mark: Mark | None, tags: Iterable[str]) -> None:
        """Stamp a change after its commit.

        :param mark: the result of :meth:`begin`
        :param tags: the tags of the change
        :raises CoordinatorError: the table cannot be reached; the mark stays
        """
        if mark is not None:
            self._is_over(mark)
        coordinator = coordinators.get(self.folder)
        if mark is not None and coordinator is not None:
            try:
                coordinator.stamp(mark)
                return
            except CoordinatorError:
                self._unstamped.append((mark, HERE))
                self._forget_removed()
        # There was no table before the commit. One that was made since has to know, and one that
        # was removed may still be trusted for a moment.
        if self._ended | self._end_others():
            self._ended = False
            time.sleep(LEASE_SECONDS)
        if _removed(self.folder):
            if not self._known and not self.folder.exists():
                return
            time.sleep(LEASE_SECONDS)
        coordinator = coordinators.get(self.folder)
        if coordinator is not None:
            coordinator.touch(slots(tags, coordinator.slot_count))

    def leave(self, mark: Mark, session: str) -> None:
        """Leave a mark to the end of a session: its commit failed, and may still come about.

        An error of the coordinator is logged. This process then takes the mark away when it meets
        it and the session is over; or it completes it with the next change, if only that failed.

        :param mark: the result of :meth:`begin`
        :param session: the session, which nobody uses any more; ``-``: the commit is over
        """
        coordinator = coordinators.get(self.folder)
        if coordinator is None:
            return
        try:
            if session != HERE:
                coordinator.mark(mark.slots, left(session))
        except CoordinatorError as error:
            LOG.error("a change could not be completed: %s", error)
            # In this order: in between it would count as made by whoever meets the mark.
            given_up.update(self._owners.get(mark, ())[-1:])
            self._is_over(mark)
            return
        self._is_over(mark)
        try:
            coordinator.stamp(mark)
        except CoordinatorError as error:
            LOG.error("a change could not be completed: %s", error)
            self._unstamped.append((mark, HERE))

    def _end_others(self) -> bool:
        """Remove the tables of other versions; return whether there were any."""
        try:
            check_folder(self.folder, make=False, trusted=self._trusted())
        except CoordinatorError:
            return False  # there is none, or one in which nobody is believed
        return end_others(self.folder)

    def _say_that_nobody_hears(self) -> None:
        """Log once that there is no table: a cache elsewhere could not be found from here."""
        if self._said:
            return
        self._said = True
        named = "" if is_by_database(self.folder) else ", though path names it"
        LOG.warning(
            "%s: there is no token cache to be told of changes%s: harmless where no Keystone runs "
            "yet; one that has it elsewhere, as in another container, may go on with what was "
            "before until its ttl ends",
            *(self.folder, named),
        )

    def _is_over(self, mark: Mark) -> None:
        owners = self._owners.pop(mark, [])
        if owners:
            under_way.discard(owners.pop())
        if owners:
            self._owners[mark] = owners

    def _count_refusal(self) -> None:
        """Count a change that is refused, where this process counts at all."""
        node = nodes.get(self.folder)
        if node is not None:
            node.counters.count(CHANGES_REFUSED)

    def _forget_removed(self) -> None:
        """Go on without a table that was removed, with the service or to be made anew.

        :raises CoordinatorError: the error being handled, if the table is there or this process's
        """
        if not (coordinators.only_takes_part(self.folder) and _removed(self.folder)):
            raise
        coordinators.forget(self.folder)
