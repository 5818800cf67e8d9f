"""Apache and HAProxy read what is rendered, for every machine, profile and version."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest

from keyfront.common.machine import Machine
from keyfront.gateway.plan.compute import Plan, plan
from keyfront.gateway.plan.workload import PROFILES, Workload, profile_named
from keyfront.gateway.render import certificates, versions
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.render.versions import HYBRID, Versions
from support.programs import program

MIB = 2**20
CORES = (1, 2, 8, 128)
MEMORY = (256 * MIB, 2048 * MIB, 524288 * MIB)
SERVERS = ("apache+uwsgi", "mod_wsgi", "prefork+mod_wsgi")
NODES = ("192.0.2.1:5000", "[2001:db8::2]:5000")


@pytest.fixture(scope="module")
def found() -> Versions:
    return versions.find(Path(sys.prefix))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    certificates.make(made, "localhost")
    (made / "run").mkdir()
    (made / "log").mkdir()
    return made


def _write(folder: Path, computed: Plan, found: Versions, server: str, **options: object) -> None:
    certificate, key = certificates.paths(folder)
    tls: dict[str, object] = {}
    if options.pop("tls"):
        tls = {"certificate": certificate, "key": key, "hsts": 300, "redirect": True}
    # a user that every system has
    settings = Settings(
        folder=folder, server=server, listen="127.0.0.1:5000", user="daemon", group="daemon",
        web_user="daemon", web_group="daemon", run_directory=folder / "run" / "app",
        log_directory=folder / "log", **tls, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    for file in render(computed, settings, found):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)


def _machines() -> Iterator[tuple[Plan, str]]:
    for cores, memory, profile in product(CORES, MEMORY, PROFILES):
        machine = Machine(cores=cores, memory=memory)
        yield (
            plan(machine, Workload(nodes=2), profile_named(profile)),
            f"{cores} cores, {machine.memory_mib} MiB, {profile}",
        )


def _checked(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr + done.stdout
    assert done.returncode == 0, said
    return said


@pytest.mark.parametrize("server", SERVERS)
def test_apache_reads_it_for_every_machine(folder: Path, found: Versions, server: str) -> None:
    apache = str(program("apache2", "apache2-bin"))
    for number, (computed, name) in enumerate(_machines()):
        _write(folder, computed, found, server, tls=number % 2 == 0, json_logs=number % 3 == 0)
        said = _checked(apache, "-t", "-f", str(folder / "apache.conf"))
        # it would say where it cuts a number down
        assert said.strip() == "Syntax OK", (name, said)


@pytest.mark.parametrize("server", SERVERS)
def test_apache_reads_where_logins_have_workers_of_their_own(
    folder: Path, found: Versions, server: str
) -> None:
    apache = str(program("apache2", "apache2-bin"))
    made = plan(Machine(cores=2, memory=4096 * MIB), Workload(login_processes=2))
    _write(folder, made, found, server, tls=True)
    said = _checked(apache, "-t", "-f", str(folder / "apache.conf"))
    assert said.strip() == "Syntax OK", said


def test_haproxy_reads_it_for_every_machine(folder: Path, found: Versions) -> None:
    haproxy = str(program("haproxy", "haproxy"))
    for number, (computed, name) in enumerate(_machines()):
        _write(
            folder, computed, found, "nginx+uwsgi", tls=number % 2 == 0, json_logs=number % 3 == 0,
            haproxy=NODES,
        )
        config = folder / "haproxy.cfg"
        # not installed here, its user may not be there either
        config.write_text(config.read_text().replace(" haproxy\n", " daemon\n"))
        said = _checked(haproxy, "-c", "-f", str(config))
        assert "[WARNING]" not in said, (name, said)


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_the_hybrid_group_is_named_where_it_can_be(
    folder: Path, found: Versions, name: str
) -> None:
    """Apache's ``-t`` does not look at groups; it is started by test_serving.py."""
    run = str(program(name, name))
    made = plan(Machine(cores=2, memory=2048 * MIB))
    _write(
        folder, made, found, "nginx+uwsgi", tls=True, haproxy=NODES,
        cache_directory=folder / "run",
    )  # fmt: skip
    path = folder / ("nginx.conf" if name == "nginx" else "haproxy.cfg")
    if name == "nginx":
        command = [run, "-t", "-c", str(path), "-e", str(folder / "log" / "error.log")]
    else:
        command = [run, "-c", "-f", str(path)]
    text = path.read_text().replace(" haproxy\n", " daemon\n")
    path.write_text(text)
    _checked(*command)
    groups = f"{'?' + HYBRID + ':' if found[name].has(HYBRID) else ''}X25519:prime256v1:secp384r1"
    assert f" {groups}" in text
    path.write_text(text.replace(groups, f"{HYBRID}:X25519"))
    takes = subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert takes == found[name].has(HYBRID)


@pytest.mark.parametrize("server", SERVERS)
def test_apache_keeps_within_its_own_bounds(found: Versions, tmp_path: Path, server: str) -> None:
    """What ``-t`` does not look at: numbers that Apache would cut down when it starts."""
    certificates.make(tmp_path, "localhost")
    for computed, name in _machines():
        _write(tmp_path, computed, found, server, tls=True)
        text = (tmp_path / "apache.conf").read_text()
        set_to = dict(
            line.split(None, 1) for line in text.splitlines() if line and line[0].isalpha()
        )
        if server.startswith("prefork"):
            assert set_to["ServerLimit"] == set_to["MaxRequestWorkers"], name
            assert int(set_to["MinSpareServers"]) < int(set_to["MaxSpareServers"]), name
            continue
        threads, servers = int(set_to["ThreadsPerChild"]), int(set_to["ServerLimit"])
        workers = int(set_to["MaxRequestWorkers"])
        assert threads <= int(set_to["ThreadLimit"]) <= 20000, name
        assert threads <= workers <= servers * threads, name
        assert int(set_to["StartServers"]) <= servers, name
        low, high = int(set_to["MinSpareThreads"]), int(set_to["MaxSpareThreads"])
        # Apache raises the upper one to the lower one and a process
        assert low + threads <= high or servers == 1, name


@pytest.mark.parametrize(
    ("server", "text", "scale"),
    (("4.9.4", "the mean over the threads", "mod_wsgi 4"), ("6.1.1", "1 + ln(threads)", "from 6")),
)
def test_says_what_the_version_makes_of_a_timeout(
    folder: Path, server: str, text: str, scale: str
) -> None:
    assumed = versions.find(Path(sys.prefix), {"mod_wsgi": server})
    _write(folder, plan(Machine(cores=2, memory=2048 * MIB)), assumed, "mod_wsgi", tls=False)
    rendered = " ".join((folder / "apache.conf").read_text().replace("\n#", "").split())
    assert text in rendered
    assert scale in rendered


@pytest.mark.parametrize("server", SERVERS)
def test_haproxy_leaves_places_for_checks(folder: Path, found: Versions, server: str) -> None:
    """What Apache has no thread for would wait in its kernel, and HAProxy would not refuse it."""
    for computed, name in _machines():
        _write(folder, computed, found, server, tls=False, haproxy=NODES)
        limit = re.search(r"maxconn (\d+) check", (folder / "haproxy.cfg").read_text())
        most = re.search(r"^MaxRequestWorkers (\d+)", (folder / "apache.conf").read_text(), re.M)
        assert limit and most, name
        assert 0 < int(limit[1]) < int(most[1]), name


def test_newer_haproxy_has_its_certificates_in_a_store(folder: Path) -> None:
    assumed = versions.find(Path(sys.prefix), {"haproxy": "3.2.0"})
    computed = plan(Machine(cores=2, memory=2048 * MIB))
    _write(folder, computed, assumed, "nginx+uwsgi", tls=True, haproxy=NODES)
    text = (folder / "haproxy.cfg").read_text()
    assert "crt-store" in text
    assert "ssl-load-extra-del-ext" not in text


def test_every_number_says_why(folder: Path, found: Versions) -> None:
    computed = plan(Machine(cores=2, memory=2048 * MIB), Workload(nodes=2))
    for server in SERVERS:
        _write(folder, computed, found, server, tls=True, haproxy=NODES)
        for name in ("apache.conf", "haproxy.cfg"):
            lines = (folder / name).read_text().splitlines()
            assert not [x for x in lines if x.lstrip().startswith("#") and len(x) > 100], name
            explained = False
            for before, line in pairwise(lines):
                is_number = re.fullmatch(r" *[a-zA-Z][\w.-]*( [a-z-]+)? \d+s?", line) is not None
                # lines of one paragraph share a reason
                explained = before.lstrip().startswith("#") or (explained and before != "")
                assert explained or not is_number, (name, line)
