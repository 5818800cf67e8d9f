"""What keyfront renders is found right by its own doctor: every line-up, every profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfront.common.machine import Machine as Hardware
from keyfront.gateway.doctor.redaction import masked
from keyfront.gateway.doctor.registry import LEVELS
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import PROFILES, Workload
from keyfront.gateway.render.lineups import SERVERS, render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.render.versions import NEWEST, Version, Versions
from support.doctor.machines import Machine

# What the rendered files name and do not bring.
_SURROUNDINGS = (
    "/opt/keyfront/bin/keyfront",
    "/opt/keyfront/bin/uwsgi",
    "/usr/sbin/nginx",
    "/usr/sbin/apache2",
    "/usr/sbin/haproxy",
    "/usr/bin/keyfront",
    "/bin/install",
    "/opt/keyfront/bin/python",
)
_OPERATORS_OWN = """\
[DEFAULT]
public_endpoint = https://cloud.example.org:5000
[database]
connection = mysql+pymysql://keystone:secret@localhost/keystone?plugin=keyfront
"""
_FEATURES = {
    "nginx": frozenset({"http_ssl_module", "http_v2_module", "http_realip_module"}),
    "uwsgi": frozenset({"https-socket", "route-run"}),
}


_WORKLOAD = Workload()


def rendered(
    server: str, profile: str, *, workload: Workload = _WORKLOAD, **values: object
) -> Machine:
    """A machine with what ``keyfront render`` wrote, in its places."""
    made = plan(Hardware(cores=4, memory=8 * 2**30), workload, PROFILES[profile])
    known = Versions(
        by_name={
            name: Version(
                name=name, text=text, how="assumed", features=_FEATURES.get(name, frozenset())
            )
            for name, text in NEWEST.items()
        }
    )
    settings = Settings(
        folder=Path("/etc/keyfront"),
        server=server,
        virtualenv=Path("/opt/keyfront"),
        web_user="www-data",
        web_group="www-data",
        command="keyfront render /etc/keyfront",
        **values,  # type: ignore[arg-type]
    )
    machine = Machine(
        files={"/etc/keystone/keystone.conf": _OPERATORS_OWN, **dict.fromkeys(_SURROUNDINGS, "")},
        somaxconn=made.numbers["sysctl.somaxconn"].value,  # type: ignore[arg-type]
        assumed=NEWEST,
    )
    for file in render(made, settings, known):
        machine = machine.put(f"/etc/keyfront/{file.path}", file.text)
        if file.goes_to:
            machine = machine.put(file.goes_to, file.text)
    return machine


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("server", SERVERS)
def test_no_finding(server: str, profile: str, tmp_path: Path) -> None:
    found = rendered(server, profile).diagnosis(tmp_path)
    assert [(x.check.code, x.finding.what) for x in found.results] == []
    assert len(found.right) > 40


@pytest.mark.parametrize("server", [x for x in SERVERS if x != "uwsgi"])
def test_no_finding_with_balancer_and_names(server: str, tmp_path: Path) -> None:
    machine = rendered(
        server,
        "standard",
        haproxy=("192.0.2.1:5000", "192.0.2.2:5000"),
        public_host="cloud.example.org",
        public_endpoint="https://cloud.example.org",
        memcached=("192.0.2.3:11211",),
    )
    found = machine.diagnosis(tmp_path)
    assert [(x.check.code, x.finding.what) for x in found.results] == []


@pytest.mark.parametrize("server", sorted(set(SERVERS) - {"uwsgi"}))
def test_no_finding_where_logins_have_workers_of_their_own(server: str, tmp_path: Path) -> None:
    machine = rendered(server, "standard", workload=Workload(login_processes=2))
    found = machine.diagnosis(tmp_path)
    assert [(x.check.code, x.finding.what) for x in found.results] == []


@pytest.mark.parametrize("server", SERVERS)
def test_nothing_rendered_is_taken_for_a_secret(server: str) -> None:
    machine = rendered(server, "standard", memcached=("192.0.2.3:11211",))
    for path, text in machine.files.items():
        for line in text.splitlines() if path.startswith("/etc/keyfront/") else ():
            assert masked(line, ours=True) == line, path


def test_every_level_is_counted(tmp_path: Path) -> None:
    machine = rendered("nginx+uwsgi", "standard").swap(
        "/etc/keyfront/uwsgi.ini", "harakiri = 60", ""
    )
    found = machine.diagnosis(tmp_path)
    assert {x.check.code for x in found.results} == {"U05", "R01"}
    assert sum(found.count(level) for level in LEVELS) == 2
