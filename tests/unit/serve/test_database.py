"""What ``keyfront serve --database`` takes, and that it shows no password."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("keystone")

from keyfront.errors import KeyfrontError, MissingPartError, OptionError, ServerError
from keyfront.gateway.serve import database

SECRET = "s3cret/$@word"
QUOTED = "s3cret%2F$%40word"
URL = f"mysql+pymysql://keystone:{QUOTED}@127.0.0.1:1/keystone"


@pytest.fixture(autouse=True)
def _newest_keystone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "30.0.0")


def file_with(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "database"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return f"@{file}"


def test_a_password_comes_in_a_file_of_our_own(tmp_path: Path) -> None:
    found = database.read(file_with(tmp_path, f"{URL}\nmore\n"))
    assert found.url.password == SECRET
    assert (found.title, repr(found)) == ("MariaDB or MySQL", URL.replace(QUOTED, "***"))
    # oslo.config reads $$ as $
    assert found.connection == f"{URL.replace('$', '$$')}?plugin=keyfront"
    more = database.read("postgresql+psycopg2://keystone@/keystone?host=/run/postgresql")
    assert more.connection.endswith("/keystone?host=/run/postgresql&plugin=keyfront")


def test_an_older_keystone_takes_no_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "29.1.0")
    with pytest.raises(OptionError) as caught:
        database.read(file_with(tmp_path, URL))
    assert "Keystone 29.1.0 (OpenStack 2026.1) takes none" in caught.value.message
    assert QUOTED not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (URL, "--database = (a URL with a password): must be without one"),
        ("sqlite:///keystone.sqlite", "--database = (a URL): must be mysql+pymysql://USER@"),
        ("mysql+pymysql://keystone@host", "--database = (a URL): must be mysql+pymysql://USER@"),
        ("here", "--database = (a URL): must be mysql+pymysql://USER@"),
        ("mysql+pymysql://host:port/keystone", "--database = (a URL): must be mysql+pymysql://"),
        ("@/nonexistent/file", "must be a file that can be read (No such file or directory)"),
    ],
)
def test_what_it_does_not_take(text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        database.read(text)
    assert said in caught.value.message
    assert QUOTED not in caught.value.message


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (URL, 0o640, "must be a file of mode 0600, not 0640"),
        ("", 0o600, "must be mysql+pymysql://"),
        ("\x00", 0o600, "must be mysql+pymysql://"),
    ],
)
def test_files_it_does_not_take(tmp_path: Path, content: str, mode: int, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        database.read(file_with(tmp_path, content, mode))
    assert said in caught.value.message
    assert QUOTED not in caught.value.message


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyfrontError) as caught:
        database.read("mysql+mysqlconnector://keystone@host/keystone")
    assert isinstance(caught.value, (MissingPartError, OptionError))
    assert "mysqlconnector" in caught.value.message


def test_a_server_that_is_not_there_is_told_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("pymysql")
    found = database.read(file_with(tmp_path, URL))
    with pytest.raises(ServerError) as caught:
        database.look(found)
    assert "keystone:***@127.0.0.1:1/keystone cannot be used: " in caught.value.message
    assert SECRET not in caught.value.message
    assert QUOTED not in caught.value.message
