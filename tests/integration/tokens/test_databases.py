"""The token cache is exact on every database, server line-up and cache that Keystone may have.

``test_token_exactness`` looks at every kind of change on SQLite with uWSGI; here are those kinds
that could differ elsewhere. Where Keystone alone is stale, a test shows that it is.
"""

from __future__ import annotations

import os
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from keyfront.middleware.tokens.coordinator.local import NAME
from keyfront.middleware.tokens.folder import default_folder
from keyfront.middleware.tokens.invalidation import rules
from support import servers
from support.exactness import Report, check
from support.keystone_world import World
from support.keystones import keystone_state, serve_as_is
from support.served import Served
from support.token_changes import KINDS, Kind

pytest.importorskip("keystone")

# The quick form takes the first of each list of kinds; more rounds by environment take all.
ROUNDS = int(os.environ.get("KEYFRONT_EXACTNESS_ROUNDS", "1"))
QUICK = 3
STOCK = "keystone.wsgi.api:application"
# path: the usual folder, named after the database.
EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[keyfront_token_cache]
path =
"""
_BY_NAME = {kind.name: kind for kind in KINDS}

# Each writes to other tables, or by other statements, than the rest.
TELLING = (
    "token revoked without its chain",
    # takes rows of other tables along by ON DELETE CASCADE, which SQLite does not
    "identity provider deleted",
    "only role deleted",
    "endpoint moved",
    "user renamed",
    "user disabled; enabling revives nothing",
    "user removed from a group",
    "only grant of a user on a project",
    "project disabled and enabled",
    "domain deleted",
    "name of a user given to another",
)
# What Keystone with memcached shows long after it was changed.
STALE_ON_MEMCACHED = (
    "only grant of a user on a project",
    "only grant of a user on the system",
    "user renamed",
    "endpoint group deleted",
    "only grant of a group on a project",
    "only grant of a user on a domain",
    "only grant of a user inherited from a project",
    "project disabled and enabled",
    "project renamed",
    "domain renamed",
    "endpoint group patched",
)
ON_EACH_LINE_UP = ("token revoked without its chain", "user renamed")


def _kinds(names: tuple[str, ...]) -> list[Kind]:
    return [_BY_NAME[name] for name in names[: QUICK if ROUNDS == 1 else None]]


@contextmanager
def _serving(state: Path, server: str = "uwsgi", **environment: str) -> Iterator[Served]:
    """A Keystone in two worker processes; the folder of its cache is gone when the block ends."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("keyfront serve starts one worker per core, and there is one core")
    folder = _folder(state)
    try:
        with serve_as_is(state, server, environment=environment) as served:
            yield served
            assert (folder / NAME).exists() == (not environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(state: Path) -> Path:
    lines = (state / "keystone.conf").read_text(encoding="utf-8").splitlines()
    url = next(x.partition(" = ")[2] for x in lines if x.startswith("connection = "))
    return default_folder(make_url(url.replace("$$", "$")))


def _check_all(served: Served, names: tuple[str, ...]) -> None:
    world = World(served.url, served.password)
    reports = []
    for kind in _kinds(names):
        report = check(
            served.url, served.password, kind, rounds=ROUNDS, readers=1, enough=1, world=world
        )
        print(report)
        reports.append(report)
    assert all(report.exact for report in reports), _wrong(reports)


def _wrong(reports: list[Report]) -> str:
    return "\n".join(str(report) for report in reports if not report.exact)


@pytest.mark.slow
@pytest.mark.parametrize("server", [servers.mariadb, servers.postgresql])
def test_no_answer_is_stale_on_a_database_server(tmp_path: Path, server: object) -> None:
    with server(tmp_path) as database:
        url = database.fresh_database("keystone")
        state = keystone_state(tmp_path / "state", database_url=url, extra=EXTRA)
        with _serving(state) as served:
            _check_all(served, TELLING)


def test_names_that_mariadb_takes_for_one_have_one_tag(tmp_path: Path) -> None:
    """Else who was looked for by one spelling would not be told of by the other."""
    printable = [chr(code) for code in range(32, 127)]
    letters = string.ascii_lowercase
    texts = [*printable, *(f"a{x}b" for x in printable), *map("".join, product(letters, letters))]
    texts += [f"{x}{blanks}" for x in "ab" for blanks in (" ", "  ")] + ["cH", "Ij", "SS", "é", "ß"]
    rows = ", ".join(f"(x'{text.encode().hex()}')" for text in texts)
    with servers.mariadb(tmp_path) as database:
        database.ask("CREATE DATABASE names", "CREATE TABLE names.names (name VARCHAR(8))")
        database.ask(f"INSERT INTO names.names VALUES {rows}")
        collations = database.ask(
            "SELECT COLLATION_NAME AS name, CHARACTER_SET_NAME AS charset "
            "FROM information_schema.COLLATIONS "
            "WHERE CHARACTER_SET_NAME IN ('utf8mb3', 'utf8mb4')"
        )
        seen = 0
        for collation in collations:
            equal = database.ask(
                "SELECT GROUP_CONCAT(HEX(name)) AS names FROM (SELECT CONVERT(name USING "
                f"{collation['charset']}) AS name FROM names.names) AS converted "
                f"GROUP BY name COLLATE {collation['name']} HAVING COUNT(*) > 1"
            )
            for row in equal:
                names = [bytes.fromhex(x).decode() for x in row["names"].split(",")]
                told = rules.names("local_user", "insert", (), names)
                # A write of any of them tells who has asked for any other.
                for name in filter(str.isascii, names):
                    tags = {rules.name_tag(name)} if name.strip(" ") else {rules.NAMES}
                    assert tags == told or rules.NAMES in told, (collation, names)
                    seen += 1
    assert seen > len(collations) > 50


@pytest.mark.slow
@pytest.mark.parametrize("line_up", ["gevent", "mod_wsgi"])
def test_no_answer_is_stale_on_another_server(tmp_path: Path, line_up: str) -> None:
    state = keystone_state(tmp_path / "state", extra=EXTRA)
    with _serving(state, line_up) as served:
        _check_all(served, ON_EACH_LINE_UP)


@pytest.mark.slow
def test_no_answer_is_stale_with_memcached(tmp_path: Path) -> None:
    with servers.memcached() as cache:
        state = keystone_state(tmp_path / "state", memcached=cache.address, extra=EXTRA)
        with _serving(state) as served:
            _check_all(served, STALE_ON_MEMCACHED)
        assert int(cache.stats()["get_hits"]) > 0, "Keystone did not use its cache"


@pytest.mark.slow
def test_keystone_alone_with_memcached_is_stale(tmp_path: Path) -> None:
    """Else the test before this one would show nothing."""
    with servers.memcached() as cache:
        state = keystone_state(tmp_path / "state", memcached=cache.address, extra=EXTRA)
        with _serving(state, KEYFRONT_APP=STOCK) as served:
            world = World(served.url, served.password)
            kind = _BY_NAME[STALE_ON_MEMCACHED[0]]
            for _ in range(20):
                report = check(served.url, served.password, kind, rounds=2, readers=1, world=world)
                # One worker that happens to have the changes and the reads shows nothing stale.
                if report.stale:
                    break
    print(report)
    assert report.stale > 0, str(report)
