"""The tables of the cloud's mix side by side, and what changes meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy as sa

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import cloud_mix
from keyfront.benchmarks.compare.cloud_mix import NAMES
from keyfront.benchmarks.load.cloud_round import PHASES, REPEATED, Phase, Round, most_in_words
from keyfront.benchmarks.results import Table
from keyfront.errors import ServerError


def one(seconds: float) -> Round:
    answers = Counter({round(1e6 * seconds / 100): 100})
    return dict.fromkeys(PHASES, Phase(answers, Counter(), seconds, seconds / 2))


FOUND = {
    "keystone": [one(10), one(20), one(40)],
    "memcached": [one(1), one(4), one(2)],
    "keyfront": [one(0.5), one(1), one(1)],
}


def lines(table: Table) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in table.rows]


def test_rates_and_ratios_are_medians_round_by_round() -> None:
    assert tuple(FOUND) == NAMES
    stock, memcached, ours = lines(cloud_mix.rates(FOUND))
    assert (stock[1], stock[-1]) == ("5 (0.1)", "80.0 s (0.1)")
    assert memcached[-1] == "8.0 s (1)"
    assert ours == ["Keystone + keyfront", *["100 (2)"] * 4, "4.0 s (2)"]
    words = cloud_mix.first_in_words(FOUND)
    assert words.startswith("First validations as a part of repeated ones: Keystone 1, ")


def test_cpu_is_of_all_rounds_and_without_the_hash() -> None:
    _, memcached, ours = lines(cloud_mix.cpu(FOUND, 1.0))
    assert memcached[1:4] == ["11.7", "10.7", "11.7"]
    assert ours[1:] == ["4.17", "3.17", *["4.17"] * 4]


def test_how_much_can_be_asked_is_told_and_what_it_bounds() -> None:
    def asked(name: str, seconds: float, asking: float) -> Phase:
        return Phase(Counter({1000: 100}), Counter(), seconds, None, asking)

    # 500 a second would take a core: 100 and 400 were asked
    slow = {name: asked(name, 1.0, 0.2) for name in PHASES}
    fast = {**slow, REPEATED: asked(REPEATED, 0.25, 0.2)}
    most = "Who asks takes a whole core for 500 repeated validations a second"
    assert most_in_words([slow]) == f"{most}."
    assert most_in_words([fast, fast]) == f"{most}; the server may do more repeated ones than told."
    assert most_in_words([dict.fromkeys(PHASES, Phase())]) == ""
    assert fast[REPEATED].sample()["asking_cpu"] == 0.2


def test_latencies_are_of_all_rounds() -> None:
    _, _, p50, p99, *_ = lines(cloud_mix.latencies(FOUND))
    assert (p50[:2], p99[:2]) == (
        ["Keystone + memcached, p50", "20.0"],
        ["Keystone + memcached, p99", "40.0"],
    )


def test_what_fits_80_columns() -> None:
    for table in (cloud_mix.rates(FOUND), cloud_mix.cpu(FOUND, 1.0), cloud_mix.latencies(FOUND)):
        assert max(map(len, results.plain(table).splitlines())) <= 80


def test_what_keyfront_changes() -> None:
    changes, words = cloud_mix.what_changes(FOUND, quick=False, quiet=True)
    assert [row[0] for row in changes.rows] == [row[0] for row in words.rows]
    assert changes.rows[0][-2:] == [2.0, "better"]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sa.Engine]:
    """The tables of Keystone that are changed."""
    # A commit may wait for a slow disk, and all others for it.
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'keystone.sqlite'}?timeout=60")
    with engine.begin() as connection:
        for statement in (
            "CREATE TABLE user (id TEXT, domain_id TEXT, enabled BOOLEAN, created_at DATETIME)",
            "CREATE TABLE role (id TEXT)",
            "CREATE TABLE assignment (type TEXT, actor_id TEXT, target_id TEXT, role_id TEXT, "
            "inherited BOOLEAN)",
            "INSERT INTO role VALUES ('member')",
        ):
            connection.execute(sa.text(statement))
    yield engine
    engine.dispose()


def count(engine: sa.Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar() or 0)


def test_others_are_changed_meanwhile(database: sa.Engine) -> None:
    with cloud_mix.changed(str(database.url), 200):
        deadline = time.monotonic() + 60
        while not count(database, "assignment") and time.monotonic() < deadline:
            time.sleep(0.005)
    users, grants = count(database, "user"), count(database, "assignment")
    assert grants and 0 <= users - grants <= 1
    with cloud_mix.changed(str(database.url), 0):
        pass
    assert count(database, "user") == users


def test_what_could_not_be_changed_is_said(database: sa.Engine) -> None:
    with database.begin() as connection:
        connection.execute(sa.text("CREATE TRIGGER t BEFORE INSERT ON user BEGIN "
                                   "SELECT RAISE(ABORT, 'not today'); END"))  # fmt: skip
    with (
        pytest.raises(ServerError, match="not today"),
        cloud_mix.changed(str(database.url), 1000) as running,
    ):
        futures.wait(running, 60)
