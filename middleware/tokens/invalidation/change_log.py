"""The epoch table that belongs to a database, in which each process announces its changes.

Workers with the ``token_cache`` filter make the table. Any other process that writes to the same
database finds it by the database's URL (or by the option ``path``) and takes part; where there is
no table, nobody has cached anything.

Where Keystone's configuration names a coordinator on Redis, every process that reads it takes part
in that one instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyfront.errors import CoordinatorError, OptionError

from ..coordinator.factory import coordinator_of
from ..coordinator.local import (
    LEASE_SECONDS,
    NAME,
    PLACE,
    SharedMemory,
    check_folder,
    end_others,
)
from ..coordinator.mark_owners import HERE, UNKNOWN, Settled, left, owner, under_way
from ..counters import CHANGES_REFUSED
from ..epochs import ALL_SLOT, Coordinator, Mark, Slots, slots
from ..node_cache import registry as nodes

LOG = logging.getLogger(__name__)

#: In a database URL's query: the folder of the epoch table, where it is not the usual one.
PATH_PARAMETER = "keyfront_path"

_ALL = Slots((ALL_SLOT,))

#: Folders for the service's own without :data:`PLACE`: the first one into which it may write.
BASES = (Path("/dev/shm"), Path("/tmp"))

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"mysql": 3306, "mariadb": 3306, "postgresql": 5432}

# A folder that is named after a database.
_BY_DATABASE = re.compile("(tokens|keyfront)-[0-9a-f]{16}(-[0-9]+)?")

# Parts of a URL's query that tell databases apart, besides host and name.
_WHICH = ("host", "port", "unix_socket", "service", "read_default_file")


def default_folder(url: Any, conf: Any = None) -> Path:
    """Return the folder of a database's epoch table, the same for all processes that write to it.

    It is in :data:`PLACE`, if root has made that for the service's user: nobody else can make
    anything there. Else it is in /dev/shm, where a mapped file is memory and nothing else, or in
    /tmp if the service may not write there. Its name is a digest of the database, without user and
    password. Anybody may make a folder of that name first: then it is passed over, for one with a
    number behind the name. A folder of the service's own that is there is used by all, even if a
    better place appears later.

    :param url: a ``sqlalchemy.engine.URL``
    :param conf: Keystone's configuration, read; by default this process's, if it is one of
        Keystone's
    """
    name = _name(url)
    found = _present.get(name)
    if found is None or not os.path.lexists(found):
        found = _usual(name, _owners(url, conf))
        if _owner(found) == os.geteuid():
            _present[name] = found
    return found


# Of each database, the folder that this process has found: it stays with that.
_present: dict[str, Path] = {}


def _usual(name: str, owners: set[int]) -> Path:
    me, service = os.geteuid(), _place_owner()
    shared = _shared(name, owners if service is None else owners | {service})
    private = PLACE / f"tokens-{name}"
    if service is None:
        found = shared
    elif os.path.lexists(private):
        return private
    # A service that was started before the place was made goes on where it is.
    elif _owner(shared) in (me, service) or me not in (service, 0):
        found = shared
    else:
        found = private
    for other in dict.fromkeys(_anybodys(name)):
        there, used = _owner(other), _owner(found)
        if other != found and there not in (None, me if used is None else used):
            LOG.warning(
                "%s belongs to user %d and is not used, but %s: if a Keystone of the same "
                "database runs as that user, neither hears of the other's changes",
                *(other, there, found),
            )
    return found


def _shared(name: str, owners: set[int] | None = None) -> Path:
    """Return the folder that the service has, or would make, if it has no :data:`PLACE`.

    Root, who may write everywhere, takes a folder where everybody may write, or one that is there:
    a stranger's may be the service's after all.

    :param name: the digest of the database
    :param owners: numbers of the users whose folders are the service's; by default this process's
        user
    """
    owners = {os.geteuid()} if owners is None else owners
    folders = _anybodys(name)
    root = os.geteuid() == 0
    known = [one for folder in folders for one in _beside(folder) if _owner(one) in owners]
    if known:
        # Root's own may be left from a Keystone that was tried as root; the service passes it over
        # as it does a stranger's.
        return next((one for one in known if _owner(one)), known[0])
    for folder in folders:
        there = _beside(folder)
        if root and there:
            return there[0]
        if _may_write(folder.parent, anybody=root):
            return folder if root else _free(folder)
    return next((_free(folder) for folder in folders if _may_write(folder.parent)), folders[-1])


def _beside(folder: Path) -> list[Path]:
    """Return the existing folders of a name, and of the name with a number, in order."""
    try:
        names = [one for one in os.listdir(folder.parent) if _without_number(one) == folder.name]
    except OSError:
        return []
    return [folder.parent / one for one in sorted(names, key=lambda one: (len(one), one))]


def _free(folder: Path) -> Path:
    """Return the first folder of a name, or of the name with a number, that does not exist."""
    there = {one.name for one in _beside(folder)}
    names = (folder.name, *(f"{folder.name}-{number}" for number in range(1, len(there) + 1)))
    return folder.parent / next(one for one in names if one not in there)


def _without_number(name: str) -> str:
    found = _BY_DATABASE.fullmatch(name)
    return name[: found.start(2)] if found and found[2] else name


def _anybodys(name: str) -> list[Path]:
    """Return the folders of a database in places where anybody may make one."""
    return [base / f"keyfront-{name}" for base in (*BASES, Path(tempfile.gettempdir()))]


def _may_write(base: Path, *, anybody: bool = False) -> bool:
    """Whether this process may make files in a folder, or with ``anybody`` everybody may."""
    try:
        mode = base.stat().st_mode
    except OSError:
        return False
    return mode & 0o003 == 0o003 if anybody else os.access(base, os.W_OK | os.X_OK)


def _place_owner() -> int | None:
    """Return the number of the user who alone can write into :data:`PLACE`; ``None`` for root."""
    try:
        found = PLACE.lstat()
    except OSError:
        return None
    # Of root's nobody knows whether the service is root, too.
    own = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o022
    return found.st_uid if own and found.st_uid else None


def _owner(folder: Path) -> int | None:
    try:
        return folder.lstat().st_uid
    except OSError:
        return None


def _name(url: Any) -> str:
    """Return a digest that names a database, the same whoever connects to it."""
    database, backend = url.database, url.get_backend_name()
    if backend == "sqlite" and database:
        database = os.path.realpath(database)  # by a link it is the same
    host = (url.host or "localhost").lower()
    # One server has several names; two that are taken for one share a table, which costs hits.
    which = [
        "mysql" if backend == "mariadb" else backend,
        "localhost" if host in _LOCAL else host,
        url.port or _PORTS.get(backend),
        database,
    ]
    which += [f"{key}={url.query[key]}" for key in _WHICH if key in url.query]
    return hashlib.blake2b(repr(which).encode(), digest_size=8).hexdigest()


def folder_of(conf: Any, url: Any = None) -> Path:
    """Return the folder of the files that all processes share which write to a Keystone's database.

    :param conf: Keystone's ``oslo.config`` configuration, loaded
    :param url: the database's ``sqlalchemy.engine.URL``, if ``[database] connection`` has none
    :raises OptionError: an option has a value out of its range, or the option ``path`` and the
        database's URL name two folders
    """
    from sqlalchemy.engine import make_url

    from .. import options

    path = options.token_cache(conf)["path"]
    here = make_url(conf.database.connection) if conf.database.connection else url
    other = here.query.get(PATH_PARAMETER) if here is not None else None
    if path and other and Path(path) != Path(str(other)):
        raise OptionError(
            "[keyfront_token_cache] path", path, f"{other}, as the database URL has it, or unset"
        )
    if path or other:
        return Path(path or str(other))
    return default_folder(url or here, conf)


def folder_here(url: Any) -> Path:
    """Return the same folder in any process, by Keystone's configuration if it is loaded here.

    :param url: the database's ``sqlalchemy.engine.URL``
    :raises OptionError: as :func:`folder_of`
    """
    keystone: Any = sys.modules.get("keystone.conf")
    # A process that has imported it need not have configured it.
    if keystone is None or "database" not in keystone.CONF:
        return default_folder(url)
    return folder_of(keystone.CONF, url)


def trusted_users(url: Any, folder: Path, conf: Any = None) -> set[int] | None:
    """Return the users whose epoch table root takes part in: root itself, and the service's user.

    Anybody may make a folder of that name in one of :data:`BASES`, and could hold its lock or cut
    its file under root's ``keystone-manage``. A folder in :data:`PLACE` belongs to the user for
    whom root made that.

    :param url: the database's ``sqlalchemy.engine.URL``
    :param folder: the folder of the table
    :param conf: Keystone's configuration, loaded; by default this process's, if it has one
    :returns: numbers of users; ``None``, for all users, if only root and the service can have made
        the folder
    """
    # Wherever it would lie now: a folder that was found stays the one.
    if folder.with_name(_without_number(folder.name)) not in _anybodys(_name(url)):
        return None
    return _trusted(url, conf)


def _owners(url: Any, conf: Any) -> set[int]:
    """Return numbers of the users whose folders count, in places where anybody may make one."""
    me = os.geteuid()
    return {me} if me else _trusted(url, conf)


def _trusted(url: Any, conf: Any) -> set[int]:
    keystone: Any = sys.modules.get("keystone.conf")
    if conf is None and keystone is not None:
        conf = keystone.CONF
    found = {0}
    paths = [url.database] if url.get_backend_name() == "sqlite" else []
    if conf is not None and "fernet_tokens" in conf:
        paths.append(conf.fernet_tokens.key_repository)
    for path in paths:
        with suppress(OSError, TypeError):
            found.add(os.stat(path).st_uid)
    return found


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


class Registry:
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
            :func:`trusted_users`; by default all
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
        """Whether this process did not bring the coordinator of ``folder``, but found a table."""
        return folder in self._attached

    def forget(self, folder: Path) -> None:
        """Close the coordinator of ``folder``, if there is one."""
        with self._lock:
            coordinator = self._coordinators.pop(folder, None)
            self._attached.discard(folder)
        if coordinator is not None:
            coordinator.close()


registry = Registry()
"""The coordinators of this process."""


class Changes:
    """Announces the changes of one database.

    :param find: a function that returns the folder of the epoch table; called at the first change,
        when the configuration has been read
    :param trusted: a function that returns the users in whose tables root takes part, see
        :func:`trusted_users`; by default all
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
        coordinator = registry.get(self.folder, self._trusted)
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
        coordinator = registry.get(self.folder)
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
        coordinator = registry.get(self.folder)
        if coordinator is not None:
            coordinator.touch(slots(tags, coordinator.slot_count))

    def leave(self, mark: Mark, session: str) -> None:
        """Leave a mark to the end of a session: its commit failed, and may still come about.

        An error of the coordinator is logged, and the mark left again with the next change.

        :param mark: the result of :meth:`begin`
        :param session: the session, which nobody uses any more; ``-``: the commit is over
        """
        coordinator = registry.get(self.folder)
        if coordinator is None:
            return
        try:
            if session != HERE:
                coordinator.mark(mark.slots, left(session))
            self._is_over(mark)
            coordinator.stamp(mark)
        except CoordinatorError as error:
            LOG.error("a change could not be completed: %s", error)
            self._unstamped.append((mark, session))

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
        named = "" if _BY_DATABASE.fullmatch(self.folder.name) else ", though path names it"
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
        if not (registry.only_takes_part(self.folder) and _removed(self.folder)):
            raise
        registry.forget(self.folder)
