"""The table of the cloud's mix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy as sa

from keyfront.benchmarks.compare import cloud_mix
from keyfront.benchmarks.compare.cloud_mix import NAMES, PHASES, Phase, Sample
from keyfront.errors import ServerError


def sample(seconds: float) -> Sample:
    return dict.fromkeys(PHASES, Phase(100, seconds, seconds / 2))


def test_rates_and_ratios_are_medians_round_by_round() -> None:
    samples = {
        "keystone": [sample(10), sample(20), sample(40)],
        "memcached": [sample(1), sample(4), sample(2)],
        "keyfront": [sample(0.5), sample(1), sample(1)],
    }
    assert tuple(samples) == NAMES
    rates, parts, times = cloud_mix.table(samples).split("\n\n")
    head, _, *lines = rates.split("\n")
    assert head == "| | logins/s | first/s | repeated/s | re-scopes/s | whole |"
    assert lines[0].startswith("| Keystone | 5 (0.1 times) | 5 (0.1 times) | ")
    assert lines[0].endswith("| 80.0 s (0.1 times as fast) |")
    assert lines[1].endswith("| 8.0 s (1 times as fast) |")
    assert lines[2].endswith("| 4.0 s (2 times as fast) |")
    assert lines[2].startswith("| Keystone + keyfront | 100 (2 times) |")

    assert parts.startswith("First validations as a part of repeated ones: Keystone 1, ")

    head, _, *lines = times.split("\n")
    assert head == "| CPU of a request | logins | first | repeated | re-scopes | whole |"
    assert lines[1].startswith("| Keystone + memcached | 11.67 ms (1) | ")
    assert lines[2].startswith("| Keystone + keyfront | 4.17 ms (0.36) | ")
    assert lines[2].endswith("| 4.17 ms (0.36) |")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sa.Engine]:
    """The tables of Keystone that are changed."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'keystone.sqlite'}")
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
        cloud_mix.changed(str(database.url), 1000) as thread,
    ):
        thread.join(60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--database", "oracle"], "invalid choice: 'oracle'"),
        (["--database-delay", "1"], "needs --database mariadb"),
        (["--database", "mariadb", "--database-delay", "-1"], "not between 0 and 1000"),
        (["--changes", "1e6"], "not between 0 and 1000"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cloud_mix.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
