"""The folder of the files that the processes of a node share: its place, and whether it is safe.

Workers with the ``token_cache`` filter make it. Any other process that writes to the same database
finds it by the database's URL, or by the option ``path``. The epoch table is in it
(``coordinator/local.py``), and what the workers share (``node_cache.py``, ``directory_leases.py``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyfront.errors import CoordinatorError, OptionError

LOG = logging.getLogger(__name__)

#: The name in a database URL's query of the epoch table's folder, if that is not the usual one.
PATH_PARAMETER = "keyfront_path"

#: The folder in which root makes room for the service's user: in /dev/shm, anybody could make the
#: service's folder first.
PLACE = Path("/run/keyfront")

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


def is_by_database(folder: Path) -> bool:
    """Return whether a folder is named after a database, and not by the option ``path``."""
    return bool(_BY_DATABASE.fullmatch(folder.name))


def _without_number(name: str) -> str:
    found = _BY_DATABASE.fullmatch(name)
    return name[: found.start(2)] if found and found[2] else name


def _anybodys(name: str) -> list[Path]:
    """Return the folders of a database in places where anybody may make one."""
    return [base / f"keyfront-{name}" for base in (*BASES, Path(tempfile.gettempdir()))]


def _may_write(base: Path, *, anybody: bool = False) -> bool:
    """Return whether this process may make files in a folder, or with ``anybody`` everybody may."""
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

    from . import options

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


def check_folder(
    folder: Path, *, make: bool, trusted: set[int] | None = None
) -> os.stat_result:
    """Check that only one user, this one unless this is root, can enter ``folder``.

    :param folder: the folder
    :param make: if true, make it with mode 0700 if it is missing
    :param trusted: numbers of the users whose folder it may be where this is root; ``None``: all
    :returns: the result of ``lstat``
    :raises CoordinatorError: it is another user's, or open to others, or cannot be made
    """
    try:
        if make:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise CoordinatorError(f"{folder}: cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise CoordinatorError(f"{folder}: is no folder; remove it or set path to another")
    # Root takes part in the service user's, and makes none in it.
    if found.st_uid != os.geteuid() and (make or os.geteuid() != 0):
        raise CoordinatorError(
            f"{folder}: belongs to user {found.st_uid}, not to this process's user "
            f"{os.geteuid()}; remove it, or have root make {PLACE} for this process's user, or set "
            "path to another"
        )
    if trusted is not None and os.geteuid() == 0 and found.st_uid not in trusted:
        raise CoordinatorError(
            f"{folder}: belongs to user {found.st_uid}, and neither to root nor to the owner of "
            "Keystone's database file or fernet keys; remove it, or set path to another"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise CoordinatorError(f"{folder}: others may enter it; its mode must be 0700")
    return found
