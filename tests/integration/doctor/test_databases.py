"""Whether real databases are behind another one, by how much, and what their clocks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfront.gateway.doctor import schema
from keyfront.gateway.doctor.diagnosis import diagnose
from support import replicas
from support.doctor.deployments import LOOPBACK
from support.served import PATIENCE, wait_for

_CONF = "/etc/keystone/keystone.conf"
_KNOWN = "mysql+pymysql://keystone:secret@192.0.2.10/keystone?ssl_ca=/etc/ssl/ca.pem"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_ANSWER", int(PATIENCE))


def told(url: str, folder: Path) -> tuple[schema.Schema, list[str]]:
    found = LOOPBACK.swap(_CONF, _KNOWN, url).found(folder)
    # Keystone's models are loaded, too.
    found.schema = schema.look(found, patience=2 * PATIENCE)
    assert found.schema is not None, found.unread
    made = diagnose(found, ["D09"])
    return found.schema, [x.finding.what for x in made.results] or [x.code for x in made.right]


def test_a_replica_of_mariadb(tmp_path: Path) -> None:
    with replicas.mariadb_pair(tmp_path) as pair:
        pair.primary.ask("CREATE DATABASE keystone")
        pair.let_go()
        here = tmp_path / "root"
        first, right = told(pair.primary.url("keystone"), here)
        assert right == ["D09"]
        assert first.ahead is not None
        assert abs(first.ahead) < 2
        second, whats = told(pair.replica.url("keystone"), here)
        assert second.lag == 0
        assert whats == ["the database is a replica (SHOW REPLICA STATUS), 0 s behind"]
        # One that applies nothing does not say by how much it is behind.
        pair.hold()
        _, whats = told(pair.replica.url("keystone"), here)
        assert whats == ["the database is a replica (SHOW REPLICA STATUS)"]
        # What was one once, and takes writes, is none.
        pair.replica.ask("STOP SLAVE")
        _, right = told(pair.replica.url("keystone"), here)
        assert right == ["D09"]
        pair.refuse_writes(True)
        _, whats = told(pair.replica.url("keystone"), here)
        assert whats == ["the database is a replica (SHOW REPLICA STATUS)"]


def test_a_standby_of_postgresql(tmp_path: Path) -> None:
    with replicas.postgresql_pair(tmp_path) as pair:
        here = tmp_path / "root"
        url = "postgresql+psycopg2://keystone@/postgres?host={}"
        first, right = told(url.format(pair.primary.folder), here)
        assert right == ["D09"]
        assert first.ahead is not None
        assert abs(first.ahead) < 2
        pair.primary.fresh_database("one")
        pair.let_go()
        second, (what,) = told(url.format(pair.replica.folder), here)
        assert second.lag is not None
        assert what.startswith("the database is a standby (pg_is_in_recovery), ")


def test_a_node_of_galera_that_is_behind(tmp_path: Path) -> None:
    with replicas.galera_pair(tmp_path) as pair:
        here = tmp_path / "root"
        pair.primary.ask("CREATE DATABASE keystone", "CREATE TABLE keystone.one (id INTEGER)")
        url = pair.replica.url("keystone")
        wait_for(lambda: told(url, here)[1] == ["D09"], "the second node is in step")
        pair.hold()
        try:
            for _ in range(14):
                pair.primary.ask("INSERT INTO keystone.one VALUES (1)")
            # They come to it by themselves.
            wait_for(
                lambda: "node of Galera" in told(url, here)[1][0], "the second node is behind"
            )
        finally:
            pair.let_go()
