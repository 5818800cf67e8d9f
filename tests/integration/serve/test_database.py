"""``keyfront serve --database``: Keystone on the database servers that people deploy."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from keystoneauth1 import session
from keystoneauth1.identity import v3

from support import APPS, servers
from support.served import PATIENCE, Served, serve


@pytest.fixture(params=["mariadb", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    with getattr(servers, request.param)(tmp_path) as server:
        yield server.fresh_database("served")


def command(state: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """``keyfront serve`` that is expected to end by itself."""
    words = [sys.executable, "-m", "keyfront", "serve", "--listen", "127.0.0.1:0"]
    return subprocess.run(
        [*words, "--state", str(state), *more], capture_output=True, text=True, timeout=PATIENCE
    )


def administrator(served: Served) -> session.Session:
    """A client that logs in as the administrator."""
    names = {"user_domain_id": "default", "project_domain_id": "default", "project_name": "admin"}
    return session.Session(
        v3.Password(auth_url=served.url, username="admin", password=served.password, **names)
    )


def projects(served: Served) -> list[str]:
    answer = administrator(served).get(f"{served.url}/projects")
    return sorted(one["name"] for one in answer.json()["projects"])


def add_project(url: str, name: str) -> None:
    """Write it beside the administrator's, as Keystone does."""
    copied = "extra, description, enabled, domain_id, parent_id, is_domain"
    statement = sqlalchemy.text(
        f"INSERT INTO project (id, name, {copied}) "
        f"SELECT :id, :name, {copied} FROM project WHERE name = 'admin'"
    )
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        done = connection.execute(statement, {"id": uuid.uuid4().hex, "name": name})
        assert done.rowcount == 1


@pytest.mark.slow
def test_keystone_is_made_in_it_and_stays(url: str, tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "database"
    file.write_text(f"{url}\n")
    file.chmod(0o600)
    # What Keystone finds there the third run tells.
    small = {"KEYFRONT_APP": "waiting_app:application", "PYTHONPATH": str(APPS)}
    with serve(
        state, "uwsgi", arguments=("--database", f"@{file}"), environment=small
    ) as served:
        add_project(url, "kept")
    assert b"administrator" in served.output
    assert b"database (SQLite)" not in served.output
    assert not list(state.glob("*.sqlite*"))
    for name in ("keystone.conf", "openrc", "clouds.yaml", "admin-password"):
        assert (state / name).stat().st_mode & 0o777 == 0o600
    # a second run goes on with it
    made = (state / "keystone.conf").read_bytes()
    with serve(
        state, "uwsgi", arguments=("--database", f"@{file}"), port=served.port, environment=small
    ) as served:
        assert b"as it is" in served.output
    assert (state / "keystone.conf").read_bytes() == made

    # another database is not taken for this state's, and nothing is touched
    file.write_text(url.replace("/served", "/another"))
    refused = command(state, "--database", f"@{file}")
    assert refused.returncode == 2
    assert "cannot be used" in refused.stderr
    assert "Traceback" not in refused.stderr

    # over a state that is lost, the tables are Keystone's as they are
    file.write_text(url)
    with serve(state, "uwsgi", arguments=("--fresh", "--database", f"@{file}")) as served:
        assert projects(served) == ["admin", "kept"]


def test_a_state_keeps_its_database(url: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "keyfront-state.json").write_text('{"keyfront": "1", "format": 1, "complete": true}')
    (state / "keystone.conf").write_text("[database]\nconnection = sqlite:///elsewhere\n")
    file = tmp_path / "database"
    file.write_text(url)
    file.chmod(0o600)
    refused = command(state, "--database", f"@{file}")
    assert refused.returncode == 2
    assert f"must be the one of {state / 'keystone.conf'}" in refused.stderr
