"""The files of measured servers: stock is stock, tuned is keyfront's, and neither is mixed up."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfront.benchmarks.lineups import lineup, stock_servers
from keyfront.benchmarks.lineups.keystone import Keystone
from keyfront.benchmarks.lineups.lineup import TOPOLOGIES, TUNED, TUNINGS, Lineup
from keyfront.common import programs as machine
from keyfront.common import unix_sockets
from keyfront.errors import MissingPartError, OptionError


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is; nothing is started."""
    monkeypatch.setattr(machine, "system_program", lambda names, packages: f"/usr/bin/{names[0]}")
    monkeypatch.setattr(machine, "apache_modules", lambda needed, packages: "/modules")
    monkeypatch.setattr(machine, "mod_wsgi_module", lambda: "/modules/mod_wsgi.so")
    monkeypatch.setattr(machine, "uwsgi_program", lambda: "/usr/bin/uwsgi")
    monkeypatch.setattr(machine, "require_module", lambda module, extra: None)
    monkeypatch.setattr(lineup, "somaxconn", lambda: 4096)
    monkeypatch.setattr(stock_servers, "as_ordinary_user", lambda: ())


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a path that is short enough for the sockets of servers."""
    with tempfile.TemporaryDirectory(dir=unix_sockets.temporary_parent()) as folder:
        yield Path(folder)


def made(
    folder: Path, topology: str, tuning: str, *, cached: bool = False, processes: int = 0
) -> tuple[dict[str, str], list[lineup.Program]]:
    """The text of each file, by its name, and the programs."""
    folder.mkdir(exist_ok=True)
    keystone = Keystone(folder / "state")
    environment = keystone.environment(folder, folder / "shared" if cached else None)
    room = lineup.Room(folder / "room", environment)
    place = lineup.Place(
        room=room, listen="127.0.0.1:5000", upstream="127.0.0.1:5001", cached=cached, cores=3,
        processes=processes,
    )  # fmt: skip
    programs = lineup.made(Lineup(topology, tuning, cached), place)
    found = {path.name: path.read_text() for path in room.run.iterdir() if path.is_file()}
    found["keystone"] = (folder / "more.conf").read_text()
    return found, programs


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_stock_has_no_line_of_keyfront(topology: str, tmp_path: Path) -> None:
    found, programs = made(tmp_path, topology, "stock")
    for text in found.values():
        # folders may have any name
        for folder in (str(tmp_path), sys.prefix):
            written = json.dumps(folder)[1:-1]
            # in Python, as in the script that mod_wsgi loads, with its backslashes doubled
            for form in (folder, written, written.replace("\\", "\\\\")):
                text = text.replace(form, "")
        assert "keyfront" not in text
    names = [program.name for program in programs]
    assert names == [name for name in ("uwsgi", "nginx", "apache") if name in names]
    assert all("KEYFRONT_APP" not in program.environment for program in programs)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_cache_is_there_when_it_is_on(topology: str, tuning: str, tmp_path: Path) -> None:
    on, _ = made(tmp_path / "on", topology, tuning, cached=True)
    off, _ = made(tmp_path / "off", topology, tuning)
    assert "plugin=keyfront" in on["keystone"]
    assert "routes = /v3/projects" in on["keystone"]
    assert "keyfront_token_cache" not in off["keystone"]
    assert "plugin" not in off["keystone"]
    application = stock_servers.WSGI_SCRIPT if "mod_wsgi" in topology else "uwsgi.ini"
    if tuning != TUNED:
        assert "keyfront.gateway" in on[application]
        assert "keystone.wsgi.api" in off[application]
    else:
        assert "pipeline = keystone" in off["plain.ini"]
        assert "plain.ini" not in on


def test_debians_and_keystones_numbers(tmp_path: Path) -> None:
    nginx, _ = made(tmp_path / "n", "nginx+uwsgi", "stock")
    assert "worker_connections 768;" in nginx["nginx.conf"]
    assert "rlimit" not in nginx["nginx.conf"]
    assert "\nprocesses = 4\n" in nginx["uwsgi.ini"]
    assert "\nlazy-apps = true\n" in nginx["uwsgi.ini"]
    assert "\nlisten = " not in nginx["uwsgi.ini"]
    event, _ = made(tmp_path / "e", "mod_wsgi-event", "stock")
    assert "\nMaxRequestWorkers 150\n" in event["apache.conf"]
    assert "processes=5 threads=1" in event["apache.conf"]
    prefork, _ = made(tmp_path / "p", "mod_wsgi-prefork", "stock")
    assert "mod_mpm_prefork.so" in prefork["apache.conf"]
    assert "MaxSpareServers 10" in prefork["apache.conf"]


def test_the_published_settings(tmp_path: Path) -> None:
    stock, _ = made(tmp_path / "s", "nginx+uwsgi", "published-stock")
    assert "\nprocesses = 10\nthreads = 2\n" in stock["uwsgi.ini"]
    tuned, _ = made(tmp_path / "t", "nginx+uwsgi", "published-tuned")
    assert "\nprocesses = 38\nthreads = 5\n" in tuned["uwsgi.ini"]
    # 5000 as published, where the kernel gives that
    assert "\nlisten = 4096\n" in tuned["uwsgi.ini"]
    assert "worker_rlimit_nofile 30000;" in tuned["nginx.conf"]
    assert "worker_connections 7000;" in tuned["nginx.conf"]
    apache, _ = made(tmp_path / "a", "mod_wsgi-event", "published-tuned")
    assert "processes=38 threads=4" in apache["apache.conf"]
    assert "\nThreadsPerChild 35\n" in apache["apache.conf"]
    assert "\nMaxKeepAliveRequests 500\nKeepAliveTimeout 20\n" in apache["apache.conf"]


@pytest.mark.parametrize("tuning", ["published-stock", "published-tuned", lineup.SERVE])
def test_fewer_processes_than_as_published_or_served(tuning: str, tmp_path: Path) -> None:
    threads = {"published-stock": "2", "published-tuned": "5"}.get(tuning, "")
    nginx, _ = made(tmp_path / "n", "nginx+uwsgi", tuning, processes=1)
    assert "\nprocesses = 1\n" in nginx["uwsgi.ini"]
    assert f"\nthreads = {threads}" in nginx["uwsgi.ini"]
    if tuning == lineup.SERVE:
        more, _ = made(tmp_path / "m", "nginx+uwsgi", tuning)
        assert "\nprocesses = 3\n" in more["uwsgi.ini"]
    else:
        apache, _ = made(tmp_path / "a", "mod_wsgi-event", tuning, processes=1)
        assert "processes=1 threads=" in apache["apache.conf"]


def test_tuned_is_what_keyfront_render_writes(tmp_path: Path) -> None:
    found, _ = made(tmp_path / "u", "nginx+uwsgi", "tuned")
    assert "keyfront render" in found["uwsgi.ini"]
    assert f"server unix:{tmp_path}/u/room/run/app/" in found["nginx.conf"]
    tcp, _ = made(tmp_path / "t", "nginx+uwsgi-tcp", "tuned")
    assert "server 127.0.0.1:5001" in tcp["nginx.conf"]
    assert "\nsocket = 127.0.0.1:5001\n" in tcp["uwsgi.ini"]
    prefork, _ = made(tmp_path / "p", "mod_wsgi-prefork", "tuned")
    assert "mod_mpm_prefork.so" in prefork["apache.conf"]
    assert "ThreadsPerChild" not in prefork["apache.conf"]


def test_secrets_are_for_this_user_only(tmp_path: Path) -> None:
    made(tmp_path / "x", "mod_wsgi-event", "stock")
    for path in (tmp_path / "x").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path


def test_what_is_unknown_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="--topology = iis: must be one of uwsgi"):
        Lineup("iis", "stock").check()
    with pytest.raises(OptionError, match="--tuning = best: must be one of stock, tuned"):
        Lineup("uwsgi", "best").check()

    def missing(*_: object) -> str:
        raise MissingPartError("nginx is not installed: run apt install nginx")

    monkeypatch.setattr(machine, "system_program", missing)
    with pytest.raises(MissingPartError, match="apt install nginx"):
        Lineup("nginx+uwsgi", "stock").check()
    Lineup("uwsgi", "stock").check()
