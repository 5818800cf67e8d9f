"""Makes Keystones of other configurations than ``keyfront serve`` does by itself.

They are made by its own code, the first time from nothing and then by copying that one. All have
the administrator's password and the keys in common: two of them on one database are one Keystone
on two hosts.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sqlalchemy

from keyfront.gateway.serve.state import State
from support.programs import program
from support.served import Served, free_port, serve

PYMEMCACHE = "dogpile.cache.pymemcache"
MEMCACHE_POOL = "oslo_cache.memcache_pool"
# Which nothing is sent by, unless a driver is set as well: for any other one each worker imports a
# library at its first change, for half as long as that takes.
_NO_TRANSPORT = "\n[oslo_messaging_notifications]\ntransport_url = fake:/\n"


def keystone_state(
    folder: Path,
    *,
    database_url: str | None = None,
    memcached: str | None = None,
    cache_backend: str = PYMEMCACHE,
    extra: str = "",
) -> Path:
    """Make a Keystone in a state folder of ``keyfront serve``; :func:`serve_as_is` runs it.

    :param folder: the state folder; absent or empty
    :param database_url: an empty database, or one that another state folder filled, which becomes
        one more host of that Keystone; SQLite in the folder if ``None``
    :param memcached: ``HOST:PORT`` that it caches in; its cache is off if ``None``
    :param cache_backend: the client library of ``memcached``
    :param extra: more of keystone.conf; of an option set twice the last is meant
    :returns: the folder
    """
    shutil.copytree(_template(), folder, dirs_exist_ok=True)
    state = State(folder)
    endpoint = _endpoint(free_port())
    state.write_configuration(endpoint)
    text = state.config.read_text(encoding="utf-8")
    if database_url is not None:
        line = "connection = " + database_url.replace("$", "$$")
        text, count = re.subn(r"^connection = .*$", lambda _: line, text, flags=re.MULTILINE)
        assert count == 1, text
    if memcached is not None:
        text += (
            "\n[cache]\nenabled = true\n"
            f"backend = {cache_backend}\nmemcache_servers = {memcached}\n"
            # After a second, by default, a server that is busy would count as dead for long. By the
            # name of this release, and of older ones.
            "socket_timeout = 10\nmemcache_socket_timeout = 10\n"
        )
    state.write("keystone.conf", f"{text}{_NO_TRANSPORT}\n{extra}")
    if database_url is not None:
        # nothing may fall back on it
        for file in folder.glob("keystone.sqlite*"):
            file.unlink()
    url = sqlalchemy.make_url(database_url or f"sqlite:///{folder / 'keystone.sqlite'}")
    if not _move_catalog(url, endpoint):
        _fill(state, url, endpoint)
    return folder


@contextmanager
def serve_as_is(state: Path, server: str, **options: object) -> Iterator[Served]:
    """:func:`served.serve` at the port that the catalog names.

    At any other one ``keyfront serve`` moves the catalog.
    """
    before = (state / "keystone.conf").read_bytes()
    with serve(state, server, port=port_of(state), **options) as served:
        assert (state / "keystone.conf").read_bytes() == before
        yield served


def port_of(state: Path) -> int:
    """The port that a Keystone's catalog names."""
    endpoint = State(state).endpoint()
    assert endpoint is not None, state
    return int(endpoint.rpartition(":")[2].partition("/")[0])


@cache
def _templates() -> Path:
    """The folder of what is made once for this process.

    Once for all processes that are given the same folder in ``KEYFRONT_TEST_KEYSTONE``.
    """
    shared = os.environ.get("KEYFRONT_TEST_KEYSTONE")
    if shared:
        folder = Path(shared)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="keyfront-template-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _alone(name: str) -> Iterator[Path]:
    """A path among the templates that no other process makes meanwhile."""
    with (_templates() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _templates() / name


@cache
def _template() -> Path:
    """A Keystone as ``keyfront serve`` makes it."""
    with _alone("state") as path:
        state = State(path)
        if not state.check():
            for _ in state.create(_endpoint(free_port())):
                pass
    return path


def _fill(state: State, url: sqlalchemy.URL, endpoint: str) -> None:
    """Fill an empty database as Keystone does, from the second time on by copying."""
    copying = _COPYING.get(url.get_backend_name())
    if copying is None:
        _make(state, endpoint)
        return
    read, write = copying
    with _alone(url.get_backend_name()) as path:
        if not path.exists():
            _make(state, endpoint)
            path.with_suffix(".new").write_bytes(read(url))
            path.with_suffix(".new").rename(path)
            return
    write(url, path)
    assert _move_catalog(url, endpoint)


def _make(state: State, endpoint: str) -> None:
    with state.keystone_imported():
        state.keystone_manage("db_sync")
        state.bootstrap(endpoint)


def _read_mariadb(url: sqlalchemy.URL) -> bytes:
    """Of each table: the statement that makes it, its columns, its rows."""
    found = []
    with _connection(url) as connection:
        for (table,) in connection.exec_driver_sql("SHOW TABLES").all():
            create = connection.exec_driver_sql(f"SHOW CREATE TABLE `{table}`").one()[1]
            rows = connection.exec_driver_sql(f"SELECT * FROM `{table}`")
            found.append((create, list(rows.keys()), [tuple(row) for row in rows]))
    return pickle.dumps(found)


def _write_mariadb(url: sqlalchemy.URL, path: Path) -> None:
    with _connection(url) as connection:
        connection.exec_driver_sql("SET foreign_key_checks = 0")
        for create, columns, rows in pickle.loads(path.read_bytes()):
            connection.exec_driver_sql(create)
            if rows:
                values = ", ".join(["%s"] * len(columns))
                table = create.split("`")[1]
                names = ", ".join(f"`{column}`" for column in columns)
                insert = f"INSERT INTO `{table}` ({names}) VALUES ({values})"
                connection.exec_driver_sql(insert, rows)


def _read_postgresql(url: sqlalchemy.URL) -> bytes:
    # Beside the server: what is on the path is Debian's, which would choose one by itself.
    dump = program("postgres", "postgresql").with_name("pg_dump")
    command = [dump, "--no-owner", _for_programs(url)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def _write_postgresql(url: sqlalchemy.URL, path: Path) -> None:
    restore = program("postgres", "postgresql").with_name("psql")
    command = [restore, "--no-psqlrc", "--quiet", "--single-transaction"]
    command += ["--set=ON_ERROR_STOP=1", f"--file={path}", _for_programs(url)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def _for_programs(url: sqlalchemy.URL) -> str:
    """The same as PostgreSQL's own programs take it."""
    plain = url.difference_update_query(["plugin"]).set(drivername="postgresql")
    return plain.render_as_string(hide_password=False)


_COPYING = {
    "mysql": (_read_mariadb, _write_mariadb),
    "postgresql": (_read_postgresql, _write_postgresql),
}


@contextmanager
def _connection(url: sqlalchemy.URL) -> Iterator[sqlalchemy.Connection]:
    """One that the token cache is not told of: nothing caches what is being made."""
    bare = url.difference_update_query(["plugin"])
    engine = sqlalchemy.create_engine(bare, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        yield connection


def _endpoint(port: int) -> str:
    return f"http://127.0.0.1:{port}/v3"


def _move_catalog(database_url: sqlalchemy.URL, endpoint: str) -> bool:
    """As a second bootstrap would, but at once; ``False`` if there is no Keystone yet."""
    engine = sqlalchemy.create_engine(database_url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        if not sqlalchemy.inspect(connection).has_table("endpoint"):
            return False
        # Tests that share a database may have made others.
        update = sqlalchemy.text(
            "UPDATE endpoint SET url = :url"
            " WHERE service_id IN (SELECT id FROM service WHERE type = 'identity')"
        )
        # public, internal and admin
        assert connection.execute(update, {"url": endpoint}).rowcount == 3
    return True
