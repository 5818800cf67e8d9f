"""The state folder: one Keystone with its database, keys, configuration and administrator.

It is made whole or not at all: the marker file says whether the set-up ended, and a folder whose
set-up was interrupted is made again. A folder that keyfront did not make is never written to.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from keyfront import __version__
from keyfront.common import json_text
from keyfront.common.templates import render
from keyfront.errors import ServerError, StateError

from .database import Database
from .keystone_manage import KeystoneManage

MARKER = "keyfront-state.json"
# Read before keystone.conf, which is the operator's after it was made.
_ENDPOINT = "endpoint.conf"
# Raised when a folder of this version can no longer be used by an older keyfront.
FORMAT = 1


def default_path() -> Path:
    """Return ``$XDG_STATE_HOME/keyfront`` or ``~/.local/state/keyfront``."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(base).expanduser() / "keyfront"
    except RuntimeError:
        raise StateError(
            "this user has no home folder to keep the state in; name a folder with --state"
        ) from None


class State:
    """A state folder.

    :param path: the folder; made with mode 0700 by :meth:`create`
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._process: KeystoneManage | None = None

    @property
    def config(self) -> Path:
        return self.path / "keystone.conf"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def node(self) -> Path:
        """The folder of what the server's processes count (``KEYFRONT_NODE``)."""
        return self.run / "node"

    @property
    def openrc(self) -> Path:
        return self.path / "openrc"

    @property
    def clouds(self) -> Path:
        return self.path / "clouds.yaml"

    @property
    def password_file(self) -> Path:
        return self.path / "admin-password"

    def check(self) -> bool:
        """Return whether a usable Keystone is here; ``False`` if one has to be made.

        :raises StateError: the folder is not ours to use
        """
        return self._is_made() and self._check_marker(self.path / MARKER)

    def _is_made(self) -> bool:
        """Return whether some version of keyfront made the folder; ``False`` if it may do so now.

        :raises StateError: the folder is not ours to use
        """
        try:
            return self._look()
        except OSError as error:
            raise StateError(
                f"{self.path}: cannot be looked at: {error.strerror}; name another folder with "
                "--state"
            ) from None

    def _look(self) -> bool:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise StateError(f"{self.path}: is not a folder; name another with --state")
        if found.st_uid != os.geteuid():
            raise StateError(
                f"{self.path}: belongs to user {_user_name(found.st_uid)}; run as that user or "
                "name another folder with --state"
            )
        if (self.path / MARKER).exists():
            return True
        if any(self.path.iterdir()):
            raise StateError(
                f"{self.path}: is not empty and was not made by keyfront serve; name another "
                "folder with --state"
            )
        return False

    def _check_marker(self, marker: Path) -> bool:
        try:
            content = json_text.parse(marker.read_text(encoding="utf-8"))
            form, complete = int(content["format"]), bool(content["complete"])
        except OSError as error:
            raise StateError(f"{marker}: cannot be read: {error.strerror}") from None
        except (ValueError, OverflowError, KeyError, TypeError):
            raise StateError(
                f"{marker}: is damaged; start over with --fresh, which deletes {self.path}"
            ) from None
        if form > FORMAT:
            raise StateError(
                f"{self.path}: was made by keyfront {content.get('keyfront', 'of a later version')}"
                f" (format {form}, this one reads up to {FORMAT}); use that version, name another "
                "folder with --state, or start over with --fresh"
            )
        return complete

    def remove(self) -> None:
        """Delete the folder, if keyfront made it; an empty one stays.

        :raises StateError: the folder is not ours to delete
        """
        if self._is_made():
            shutil.rmtree(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one ``keyfront serve``.

        :raises StateError: another one runs on it, or it is not ours to use
        """
        # nothing is written beside a folder that is not ours
        self._is_made()
        lock = self._lock_file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(
                f"{self.path.parent}: cannot be written to: {error.strerror}; name another folder "
                "with --state"
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
                raise StateError(
                    f"{self.path}: is in use by keyfront serve with pid {holder}; stop that one or "
                    "name another folder with --state"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """Return the process of the ``keyfront serve`` that runs on the folder, if one does."""
        lock = self._lock_file
        try:
            pid = int(lock.read_text(encoding="ascii"))
            wanted = lock.stat()
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    if os.path.samestat(descriptor.stat(), wanted):
                        return pid
        except (OSError, ValueError):
            pass
        return None

    @property
    def _lock_file(self) -> Path:
        return self.path.parent / f".{self.path.name}.lock"

    def _mark(self, *, complete: bool) -> None:
        content = {"keyfront": __version__, "format": FORMAT, "complete": complete}
        self.write(MARKER, json.dumps(content) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of this folder whole, with mode 0600.

        :param name: the file's path below the folder
        :param text: its whole text
        :raises StateError: it cannot be written, as on a full disk
        """
        path = self.path / name
        temporary = path.with_name(f".{path.name}.new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StateError(f"{path}: cannot be written: {error.strerror}") from None
        return path

    def create(self, endpoint: str, database: Database | None = None) -> Iterator[str]:
        """Make a Keystone here, telling each step before it is taken.

        :param endpoint: the URL of the identity service, for its catalog
        :param database: the database of its tables; ``None``: SQLite, in this folder
        :raises StateError: the folder cannot be written
        :raises ServerError: the database cannot be used, or keystone-manage failed
        """
        self.remove()
        previous = os.umask(0o077)
        try:
            yield f"state folder {self.path}"
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._mark(complete=False)
            for folder in ("fernet-keys", "credential-keys", "log", "run"):
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
            self.write("admin-password", secrets.token_hex(16) + "\n")
            self.write_configuration(endpoint, database)
            yield f"database ({database.title if database else 'SQLite'})"
            if database is None:
                self._make_sqlite()
            with self.keystone_imported():
                self.keystone_manage("db_sync")
                yield "keys for tokens and credentials"
                self.keystone_manage("fernet_setup", *_owner_arguments())
                self.keystone_manage("credential_setup", *_owner_arguments())
                yield "administrator, roles and catalog"
                self.bootstrap(endpoint)
            self._mark(complete=True)
        finally:
            os.umask(previous)

    def _make_sqlite(self) -> None:
        # readers and a writer at once; the mode stays with the file
        try:
            with closing(sqlite3.connect(self._sqlite)) as database:
                database.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            raise StateError(f"{self._sqlite}: cannot be made: {error}") from None

    @property
    def _sqlite(self) -> Path:
        return self.path / "keystone.sqlite"

    def connection(self, database: Database | None) -> str:
        """Return ``[database] connection`` as :meth:`write_configuration` writes it."""
        if database is not None:
            return database.connection
        # oslo.config substitutes $name
        return f"sqlite:///{self._sqlite}?plugin=keyfront".replace("$", "$$")

    def uses(self, database: Database) -> bool:
        """Return whether keystone.conf names this database.

        :raises StateError: keystone.conf cannot be read
        """
        try:
            lines = self.config.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(f"{self.config}: cannot be read: {error}") from None
        return f"connection = {self.connection(database)}" in lines

    def write_configuration(self, endpoint: str, database: Database | None = None) -> None:
        """Write keystone.conf, and what :meth:`write_endpoint` does."""
        # oslo.config substitutes $name
        dollars: dict[str, object] = {
            "state": str(self.path).replace("$", "$$"),
            "log": str(self.log).replace("$", "$$"),
            "connection": self.connection(database),
        }
        self._render(self.config.name, {"version": __version__, **dollars})
        self.write_endpoint(endpoint)

    def write_endpoint(self, endpoint: str) -> None:
        """Write openrc, clouds.yaml and endpoint.conf for an endpoint; keystone.conf stays."""
        password = self.password_file.read_text(encoding="utf-8").strip()
        values: dict[str, object] = {"endpoint": endpoint, "password": password}
        for path in (self.openrc, self.clouds):
            self._render(path.name, {"path": path, **values})
        # Keystone adds the version.
        self._render(_ENDPOINT, {"url": endpoint.removesuffix("/v3")})

    def _render(self, name: str, values: dict[str, object]) -> None:
        self.write(name, render(f"serve/keystone/{name}.j2", **values))

    def bootstrap(self, endpoint: str) -> None:
        """Run ``keystone-manage bootstrap``; on a second run it moves the endpoints."""
        password = self.password_file.read_text(encoding="utf-8").strip()
        # by environment: a command line is readable by every user of the machine
        self.keystone_manage(
            "bootstrap",
            OS_BOOTSTRAP_PASSWORD=password,
            OS_BOOTSTRAP_REGION_ID="RegionOne",
            OS_BOOTSTRAP_PUBLIC_URL=endpoint,
            OS_BOOTSTRAP_INTERNAL_URL=endpoint,
            OS_BOOTSTRAP_ADMIN_URL=endpoint,
        )

    def endpoint(self) -> str | None:
        """Return the URL that the catalog names, as it was last bootstrapped; ``None`` if never."""
        try:
            lines = self.openrc.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        for line in lines:
            if line.startswith("export OS_AUTH_URL="):
                return line.partition("=")[2]
        return None

    @contextmanager
    def keystone_imported(self) -> Iterator[None]:
        """Import Keystone once for all that :meth:`keystone_manage` runs meanwhile."""
        with KeystoneManage(self.config, self.path) as self._process:
            try:
                yield
            finally:
                self._process = None

    def keystone_manage(self, *arguments: str, **environment: str) -> None:
        """Run ``keystone-manage`` on this Keystone.

        :raises MissingPartError: Keystone is not installed
        :raises ServerError: it failed; names the log with all it printed
        """
        with nullcontext() if self._process is not None else self.keystone_imported():
            assert self._process is not None
            done = self._process.run(*arguments, **environment)
        if done.status == 0:
            return
        log = self.write("log/keystone-manage.log", done.output)
        last = (done.output.strip().splitlines() or ["it printed nothing"])[-1]
        raise ServerError(f"keystone-manage {arguments[0]} failed: {last}; all of it: {log}")

    def environment(self) -> dict[str, str]:
        """Return the variables that name this Keystone's configuration to a process."""
        files = f"{_ENDPOINT};{self.config.name}" if (self.path / _ENDPOINT).exists() else ""
        return {"OS_KEYSTONE_CONFIG_DIR": str(self.path), "OS_KEYSTONE_CONFIG_FILES": files}


def _owner_arguments() -> list[str]:
    # keystone-manage asks root whom the keys shall belong to
    if os.geteuid() != 0:
        return []
    return ["--keystone-user", "root", "--keystone-group", "root"]


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
