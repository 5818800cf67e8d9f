"""``--live`` logs in once and tells its phases: a served Keystone, and silent ports."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from keyfront.cli import doctor
from keyfront.cli.main import main
from support.doctor.deployments import LOOPBACK
from support.keystones import keystone_state, serve_as_is
from support.served import PATIENCE, free_port

_VARIABLES = ("CLOUD", "AUTH_URL", "USERNAME", "PASSWORD", "PROJECT_NAME", "CACERT", "TOKEN")
_PASSWORD = "hunter2-very-secret"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in _VARIABLES:
        monkeypatch.delenv(f"OS_{name}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no state"))
    monkeypatch.setenv("KEYFRONT_STATE", str(tmp_path / "none"))
    folder = tmp_path / "root"
    # Its memcached is asked for the time otherwise, and is nowhere.
    LOOPBACK.swap(
        "/etc/keystone/keystone.conf", "192.0.2.11:11211,192.0.2.12:11211", "127.0.0.1:1"
    ).make(folder)
    return folder


def openrc(monkeypatch: pytest.MonkeyPatch, url: str, password: str) -> None:
    values = {"AUTH_URL": url, "USERNAME": "admin", "PASSWORD": password, "PROJECT_NAME": "admin"}
    for name, value in values.items():
        monkeypatch.setenv(f"OS_{name}", value)


def told(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["doctor", "--root", str(root), "--assume", "uwsgi=2.0.31", "--live", *words])
    said = capsys.readouterr()
    assert said.err == ""
    return status, said.out


def test_a_served_keystone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Beside others a login may take long.
    monkeypatch.setattr(doctor, "_PATIENCE", PATIENCE)
    state = keystone_state(tmp_path / "state")
    with serve_as_is(state, "uwsgi") as served:
        # As one of the environment, of clouds.yaml, and of keyfront serve.
        openrc(monkeypatch, served.url, served.password)
        _, page = told(root, capsys)
        lines = page[page.index("A login and a validation, in milliseconds") :].splitlines()
        assert lines[1].split() == ["login", "validation", "repeated"]
        rows = {line[2:22].strip(): line[22:].split() for line in lines[2:7]}
        assert list(rows) == ["name lookup", "TCP", "first byte", "the rest", "together"]
        assert float(rows["first byte"][0]) > float(rows["first byte"][2]) > 0
        for number in (0, 1, 2):
            parts = [float(x[number]) for x in list(rows.values())[:-1] if x[number] != "-"]
            assert float(rows["together"][number]) == pytest.approx(sum(parts), abs=0.3)
        assert "the login in Keystone's log: req-" in page
        assert served.password not in page
        _, text = told(root, capsys, "--json")
        content = json.loads(text)
        assert "P11" in content["right"] or "P11" in {x["code"] for x in content["findings"]}
        assert list(content["login_phases"]) == ["login", "first_validation", "repeated_validation"]
        assert content["request_ids"]["login"].startswith("req-")
        assert served.password not in text
        assert "gAAAAA" not in text + page  # a fernet token
        for name in _VARIABLES:
            monkeypatch.delenv(f"OS_{name}", raising=False)
        auth = {"auth_url": served.url, "username": "admin", "password": served.password}
        clouds = {"clouds": {"here": {"auth": {**auth, "project_name": "admin"}}}}
        (tmp_path / "clouds.yaml").write_text(yaml.safe_dump(clouds), encoding="utf-8")
        monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(tmp_path / "clouds.yaml"))
        for words in (("--os-cloud", "here"), ("--state", str(state))):
            _, page = told(root, capsys, *words)
            assert "first byte" in page, words
        # The wrong password is a finding, and is not printed.
        monkeypatch.delenv("OS_CLIENT_CONFIG_FILE")
        openrc(monkeypatch, served.url, _PASSWORD)
        status, page = told(root, capsys)
        words = " ".join(page.split())
        assert status == 1
        assert "ERROR P11 " in page
        assert "answers 401" in words
        assert "(before: name lookup" in words
        assert _PASSWORD not in page


@contextmanager
def silent() -> Iterator[int]:
    """A port at which connections are made by the kernel, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(("scheme", "phase"), [("http", "first byte"), ("https", "TLS")])
def test_a_frozen_port(
    scheme: str,
    phase: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE", 0.2)
    with silent() as port:
        openrc(monkeypatch, f"{scheme}://127.0.0.1:{port}", _PASSWORD)
        status, page = told(root, capsys)
    words = " ".join(page.split())
    assert status == 1
    assert "no answer within 0.2 s" in words
    assert f"it ended while waiting for: {phase} (before: name lookup" in words
    assert "TCP" in words
    assert _PASSWORD not in page


def test_a_name_that_nobody_knows(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openrc(monkeypatch, "http://keystone.invalid:5000", _PASSWORD)
    status, page = told(root, capsys)
    assert status == 1
    assert "it ended while waiting for: name lookup" in " ".join(page.split())
    assert _PASSWORD not in page


def test_nobody_listens(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openrc(monkeypatch, f"http://127.0.0.1:{free_port()}", _PASSWORD)
    status, page = told(root, capsys)
    words = " ".join(page.split())
    assert status == 1
    assert "Connection refused" in words
    assert "it ended while waiting for: TCP (before: name lookup" in words


@pytest.mark.parametrize(
    ("variable", "words"), [("", "set OS_AUTH_URL"), ("OS_PASSWORD", "OS_PASSWORD = (not set)")]
)
def test_without_credentials_it_is_not_looked_at(
    variable: str,
    words: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if variable:
        openrc(monkeypatch, "http://127.0.0.1:1", _PASSWORD)
        monkeypatch.delenv(variable)
        _, page = told(root, capsys)
    else:
        _, page = told(root, capsys, "--state", str(tmp_path / "none"))
    rest = page[page.index("Could not be looked at") :]
    assert "a login: " in rest
    assert words in " ".join(rest.split())
    assert "P11 A login and a validation work" in " ".join(rest.split())
    assert _PASSWORD not in page
