"""The rendered files, checked by the programs that read them: for machines from the smallest to the
largest, in every profile, for uWSGI, nginx, systemd, the kernel and what keeps their logs.

What Apache and HAProxy say of theirs is in test_apache.py; what all of them do when clients
come, in test_serving.py.
"""

from __future__ import annotations

import grp
import itertools
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from keyfront.common.machine import Machine
from keyfront.gateway.plan.compute import Plan, plan
from keyfront.gateway.plan.workload import PROFILES, Workload
from keyfront.gateway.render import certificates, versions
from keyfront.gateway.render import writer as folder
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.render.writer import File
from support.programs import own_folder, program
from support.served import free_port

SERVERS = ("nginx+uwsgi", "nginx+uwsgi-tcp", "uwsgi")
CORES = (1, 2, 8, 128)
MEMORIES = (256 * 2**20, 2 * 2**30, 512 * 2**30)
UNITS = "system/etc/systemd/system"
SYSCTL = "system/etc/sysctl.d/60-keyfront.conf"


@dataclass(frozen=True)
class Point:
    """One machine with one line-up, rendered."""

    name: str
    server: str
    plan: Plan
    folder: Path
    files: dict[str, File]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with own_folder("files") as made:
        made.chmod(0o755)
        yield made


@pytest.fixture(scope="module")
def points(root: Path) -> list[Point]:
    """All of them; TLS, JSON and balancers by turns."""
    certificates.make(root, "localhost")
    certificate, key = certificates.paths(root)
    found = versions.find(Path(sys.prefix))
    me = pwd.getpwuid(os.geteuid()).pw_name
    mine = grp.getgrgid(os.getegid()).gr_name
    for name in ("log", "run", "cache"):
        (root / name).mkdir()
    ports = free_port(), free_port(), free_port()
    made = []
    for number, (server, profile, cores, memory) in enumerate(
        itertools.product(SERVERS, PROFILES, CORES, MEMORIES)
    ):
        computed = plan(
            Machine(cores=cores, memory=memory),
            Workload(nodes=1 + number % 3, ldap_connections=100000 if number % 2 else None),
            PROFILES[profile],
        )
        tls: dict[str, object] = {}
        if server != "uwsgi" and number % 3:
            tls = {"certificate": certificate, "key": key, "hsts": 60 * (number % 2),
                   "redirect": False, "public_host": "localhost"}  # fmt: skip
        where = root / f"{number:03}"
        settings = Settings(
            folder=where, server=server, listen=f"127.0.0.1:{ports[0]}", user=me, group=mine,
            upstream=f"127.0.0.1:{ports[1]}", web_user=me, web_group=mine, target="app:application",
            run_directory=root / "run", log_directory=root / "log", cache_directory=root / "cache",
            json_logs=bool(number % 2), virtualenv=Path(sys.prefix),
            haproxy=("192.0.2.1:5000", "[2001:db8::1]:5000") if number % 5 == 0 else (),
            memcached=("192.0.2.9:11211",) if number % 2 else (), **tls,  # type: ignore[arg-type]
        )  # fmt: skip
        files = render(computed, settings, found)
        folder.write(files, where)
        made.append(
            Point(
                name=f"{server}, {profile}, {cores} cores, {memory >> 20} MiB", server=server,
                plan=computed, folder=where, files={file.path: file for file in files},
            )
        )  # fmt: skip
    return made


def once(points: list[Point], path: str) -> Iterator[tuple[Point, File]]:
    """The points that have a file, without those where its settings are another's."""
    seen = set()
    for point in points:
        file = point.files.get(path)
        if file is None:
            continue
        settings = re.sub(r"^ *#.*\n", "", file.text, flags=re.M).replace(str(point.folder), "")
        if settings not in seen:
            seen.add(settings)
            yield point, file


def run(*command: object, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        timeout=120,
        check=False,
    )
    printed = done.stdout.decode(errors="replace")
    assert done.returncode == 0, (command, printed)
    return printed


def test_nginx_takes_every_file(points: list[Point], root: Path) -> None:
    nginx = program("nginx", "nginx")
    taken = 0
    for point, file in once(points, "nginx.conf"):
        printed = run(nginx, "-t", "-c", point.folder / file.path, "-e", root / "log/error.log")
        warned = [line for line in printed.splitlines() if "[" in line and '"user" dir' not in line]
        assert not warned, (point.name, warned)
        taken += 1
    assert taken > 30


def test_uwsgi_knows_every_option(points: list[Point]) -> None:
    """As ``strict`` would look at them, for all points at once."""
    said = run(Path(sys.prefix, "bin", "uwsgi"), "--help")
    known = set(re.findall(r"--([\w-]+)", said))
    looked_at = 0
    for point, file in once(points, "uwsgi.ini"):
        options = re.findall(r"^([\w-]+) = ", file.text, re.MULTILINE)
        assert not set(options) - known, point.name
        # an option given twice is a list, or a mistake
        twice = {option for option in options if options.count(option) > 1}
        assert twice <= {
            *("env", "route-run", "log-req-encoder", "hook-asap", "hook-master-start"),
            "hook-post-fork",
        }
        # 16 bits hold these
        values = dict(re.findall(r"^([\w-]+) = (\d+)$", file.text, re.MULTILINE))
        assert int(values["buffer-size"]) <= 65535
        assert 1 <= int(values["listen"]) <= point.plan.machine.somaxconn
        looked_at += 1
    assert looked_at > 30


def test_a_misspelt_option_is_found(points: list[Point], root: Path) -> None:
    """uWSGI itself does not start with it: what ``strict`` is for."""
    point = points[0]
    bad = root / "bad.ini"
    bad.write_text(f"{point.files['uwsgi.ini'].text}\nharakri = 30\n")
    done = subprocess.run(
        [Path(sys.prefix, "bin", "uwsgi"), "--ini", bad], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"harakri" in done.stdout + done.stderr


def test_systemd_takes_every_unit(points: list[Point], root: Path) -> None:
    """All points' units beside each other under names of their own, in one run."""
    analyze = program("systemd-analyze", "systemd")
    units = root / "units"
    units.mkdir()
    names = []
    several = [point for point, _ in once(points, f"{UNITS}/keyfront-uwsgi.service")]
    ours = ("keyfront-uwsgi.service", "keyfront-uwsgi.socket", "nginx.service.d/keyfront.conf")
    for path in ours:
        for number, point in enumerate(several):
            if f"{UNITS}/{path}" not in point.files:
                continue
            text = point.files[f"{UNITS}/{path}"].text.replace("keyfront-uwsgi.", f"kf{number}.")
            if path.startswith("nginx"):
                target = units / f"nginx{number}.service.d" / "keyfront.conf"
                target.parent.mkdir()
                (units / f"nginx{number}.service").write_text("[Service]\nExecStart=/bin/true\n")
                names.append(f"nginx{number}.service")
            else:
                target = units / path.replace("keyfront-uwsgi.", f"kf{number}.")
                names.append(target.name)
            target.write_text(text)
    assert len(names) > 30
    printed = run(
        analyze, "verify", "--man=no", *(units / name for name in names),
        environment={"SYSTEMD_UNIT_PATH": f"{units}:", "SYSTEMD_LOG_LEVEL": "info"},
    )  # fmt: skip
    # units of the system itself may be in disorder here
    assert not [line for line in printed.splitlines() if "kf" in line or "nginx" in line]


def test_systemd_finds_a_broken_unit(points: list[Point], root: Path) -> None:
    """That the run above would say so."""
    analyze = program("systemd-analyze", "systemd")
    text = points[0].files[f"{UNITS}/keyfront-uwsgi.service"].text
    broken = root / "broken.service"
    broken.write_text(text.replace("keyfront-uwsgi.socket", "").replace("KillMode=", "KillMood="))
    done = subprocess.run([analyze, "verify", "--man=no", broken], capture_output=True, check=False)
    assert b"KillMood" in done.stderr


def test_the_unit_is_hardened(points: list[Point]) -> None:
    """systemd's own mark, from 0 (nothing is allowed) to 10; its units without hardening get 9."""
    analyze = program("systemd-analyze", "systemd")
    for point in (points[0], points[-1]):
        unit = point.folder / UNITS / "keyfront-uwsgi.service"
        printed = run(analyze, "security", "--offline=yes", "--no-pager", unit)
        mark = re.search(r"Overall exposure level for \S+: ([\d.]+)", printed)
        assert mark is not None and float(mark[1]) < 3, printed


def test_the_kernel_knows_every_setting(points: list[Point]) -> None:
    sysctl = program("sysctl", "procps")
    for point, file in once(points, SYSCTL):
        printed = run(sysctl, "--dry-run", "-p", point.folder / file.path)
        told = dict(line.split(" = ") for line in printed.splitlines())
        assert told == {
            "net.core.somaxconn": str(point.plan["sysctl.somaxconn"].value),
            "net.ipv4.tcp_max_syn_backlog": str(point.plan["sysctl.tcp_max_syn_backlog"].value),
        }
        for name in told:
            assert Path("/proc/sys", name.replace(".", "/")).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_tmpfiles_makes_what_the_servers_need(points: list[Point], root: Path) -> None:
    tmpfiles = program("systemd-tmpfiles", "systemd")
    for server in SERVERS:
        point = next(x for x in points if x.server == server)
        system = root / f"system-{server}"
        (system / "etc").mkdir(parents=True)
        for name in ("passwd", "group"):
            shutil.copy(Path("/etc", name), system / "etc" / name)
        for name in (root / "log", root / "cache", root / "run"):
            (system / name.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        config = point.folder / "system/etc/tmpfiles.d/keyfront.conf"
        run(tmpfiles, "--create", f"--root={system}", config)
        inside = system / root.relative_to("/")
        expected = {"log", "run"} | ({"cache"} if server != "uwsgi" else set())
        assert {path.name for path in inside.iterdir()} == expected
        assert (inside / "log/uwsgi.log").exists() == (server == "uwsgi")


def test_sysusers_takes_the_user(points: list[Point]) -> None:
    sysusers = program("systemd-sysusers", "systemd")
    run(sysusers, "--dry-run", points[0].folder / "system/etc/sysusers.d/keyfront.conf")


def test_logrotate_takes_every_file(points: list[Point], root: Path) -> None:
    logrotate = program("logrotate", "logrotate")
    for server in SERVERS:
        point = next(x for x in points if x.server == server)
        config = point.folder / "system/etc/logrotate.d/keyfront"
        printed = run(logrotate, "-d", "-s", root / "state", config)
        assert "Handling 1 logs" in printed
        assert "error" not in printed.replace("nginx.error.log", "")


def test_keystone_takes_every_snippet(points: list[Point]) -> None:
    """Read as Keystone does: every option is registered, every value in its range."""
    checked = """
import configparser
import sys
from keystone.conf import CONF, configure
from oslo_cache import core
from oslo_db import options as database
from oslo_middleware import opts as middleware
from keyfront.middleware.tokens import options
configure()
core.configure(CONF)
CONF.register_opts(options.TOKEN_CACHE, group=options.TOKEN_CACHE_GROUP)
for group, listed in middleware.list_opts():
    if group == "oslo_middleware":
        CONF.register_opts(listed, group=group)
CONF.register_opts(database.database_opts, group="database")
for path in sys.argv[1:]:
    CONF([], project="keystone", default_config_files=[path], default_config_dirs=[])
    parser = configparser.ConfigParser(interpolation=None, default_section="none")
    parser.read(path)
    for section in parser.sections():
        for name in parser[section]:
            getattr(CONF if section == "DEFAULT" else CONF[section], name)
"""
    path = "system/etc/keystone/keystone.conf.d/keyfront.conf"
    files = [point.folder / path for point, _ in once(points, path)]
    assert len(files) > 5
    run(sys.executable, "-W", "ignore", "-c", checked, *files)


def test_paste_files_load_what_they_name(points: list[Point]) -> None:
    from configparser import ConfigParser
    from importlib.metadata import entry_points

    filters = {entry.name for entry in entry_points(group="paste.filter_factory")}
    for name in ("keystone.ini", "service-paste.ini"):
        parser = ConfigParser(interpolation=None)
        parser.read(points[0].folder / name)
        used = [parser[section]["use"] for section in parser.sections() if "use" in parser[section]]
        assert used
        for use in used:
            assert use.startswith("egg:keyfront#")
            assert use.partition("#")[2] in filters | {"keystone"}
