"""The database that ``keyfront serve`` gives its Keystone, where it is not SQLite in a file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keyfront.errors import MissingPartError, OptionError, ServerError
from keyfront.gateway.keystone import series

if TYPE_CHECKING:
    from sqlalchemy import URL

OPTION = "--database"

# The servers that Keystone is run with, and what installs the driver that a URL names.
_SERVERS = {"mysql": "MariaDB or MySQL", "postgresql": "PostgreSQL"}
_PACKAGES = {"pymysql": "PyMySQL", "psycopg2": "psycopg2-binary", "mysqldb": "mysqlclient"}
_FORM = "mysql+pymysql://USER@HOST/NAME, postgresql+psycopg2://USER@HOST/NAME, or @FILE with one"
# Seconds for a connection; a server that is there answers in one.
_PATIENCE = 10
# Older ones give the URL to alembic as it is, which refuses "%" and prints all of it.
_TAKES_PERCENT = 30


class Database(NamedTuple):
    """A database of a server.

    :ivar url: the URL as SQLAlchemy reads it
    :ivar text: the URL as the operator wrote it, with the password
    """

    url: URL
    text: str

    @classmethod
    def of(cls, text: str) -> Database:
        """Return the database of a URL.

        :raises sqlalchemy.exc.ArgumentError: it is no URL
        :raises ValueError: its port is no number
        """
        from sqlalchemy import make_url

        return cls(make_url(text), text)

    def __repr__(self) -> str:
        """Return it without the password."""
        return self.url.render_as_string()

    @property
    def title(self) -> str:
        """The kind of server that it is on."""
        return _SERVERS[self.url.get_backend_name()]

    @property
    def connection(self) -> str:
        """The value of ``[database] connection`` in keystone.conf, with the password.

        The plugin tells the token cache of what keystone-manage changes.
        """
        text = f"{self.text}{'&' if self.url.query else '?'}plugin=keyfront"
        # oslo.config substitutes $name
        return text.replace("$", "$$")


def read(text: str) -> Database:
    """Return the database that an operator gave with ``--database``; nothing is connected to.

    :param text: a URL without a password, for a command line is readable by every user of the
        machine, or ``@FILE``: a file that nobody else may read, whose first line is the URL
    :raises OptionError: it is no such URL or file
    :raises MissingPartError: Keystone or the driver is not installed
    """
    try:
        from sqlalchemy.exc import ArgumentError

        version = importlib.metadata.version("keystone")
    except ImportError:
        said = "Keystone is not installed: pip install 'keyfront[keystone]'"
        raise MissingPartError(said) from None
    shown = text if text.startswith("@") else "(a URL)"
    given = _first_line(Path(text[1:])) if text.startswith("@") else text
    try:
        database = Database.of(given)
    except (ArgumentError, ValueError):
        raise OptionError(OPTION, shown, _FORM) from None
    url = database.url
    if url.password is not None and not text.startswith("@"):
        raise OptionError(
            OPTION, "(a URL with a password)",
            "without one, which every user of this machine could read: write the URL to a file of "
            "mode 0600 and give @FILE",
        )  # fmt: skip
    if url.get_backend_name() not in _SERVERS or not url.database:
        raise OptionError(OPTION, shown, _FORM)
    driver = url.get_driver_name()
    if importlib.util.find_spec("MySQLdb" if driver == "mysqldb" else driver) is None:
        package = _PACKAGES.get(driver, driver)
        raise MissingPartError(f"{OPTION}: {driver} is not installed: pip install {package}")
    if "%" in given and int(version.partition(".")[0]) < _TAKES_PERCENT:
        raise OptionError(
            OPTION, shown, "without %: keystone-manage of Keystone "
            f"{series.described(version)} takes none; give its user a password that needs none",
        )  # fmt: skip
    return database


def _first_line(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise OptionError(OPTION, f"@{path}", f"a file of mode 0600, not {mode & 0o777:04o}")
        with path.open(encoding="utf-8") as file:
            return file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(OPTION, f"@{path}", f"a file that can be read ({said})") from None


def look(database: Database) -> None:
    """Find out that the database is there and lets us in.

    :raises ServerError: it does not; says what its server or driver said
    """
    import sqlalchemy

    url = database.url
    # of all three drivers
    options: dict[str, Any] = {"connect_timeout": _PATIENCE}
    engine = sqlalchemy.create_engine(url, connect_args=options, poolclass=sqlalchemy.NullPool)
    try:
        with engine.connect() as connected:
            connected.execute(sqlalchemy.text("SELECT 1"))
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise ServerError(
            f"{OPTION}: {database} cannot be used: {_reason(error, url)}; it has to exist, and its "
            "user to be allowed to make tables"
        ) from None


def _reason(error: Exception, url: URL) -> str:
    said = str(getattr(error, "orig", None) or error).strip().splitlines() or ["no reason told"]
    secret = str(url.password or "")
    return said[0].replace(secret, "***") if secret else said[0]
