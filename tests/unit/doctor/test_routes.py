"""What of each server leads to Keystone, where others are served beside it, and what follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.gateway.doctor import routes
from keyfront.gateway.doctor.found import Serving, Told
from support.doctor.cases import CASES
from support.doctor.deployments import (
    CHARM,
    DEBIAN_NGINX,
    DEVSTACK,
    DEVSTACK_WHOLE,
    KOLLA,
    KOLLA_HOST,
    LOOPBACK,
    NGINX_COHOSTED,
    OSA,
    PUPPET_COHOSTED,
    RDO_PUPPET,
)
from support.doctor.machines import Machine

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"
_HAPROXY = "/etc/haproxy/haproxy.cfg"
_NOVA = "/etc/httpd/conf.d/10-nova_api_wsgi.conf"
_STACK = "/etc/keystone/keystone-api-uwsgi.ini"
_PROXY = "/etc/apache2/sites-enabled/keystone-api.conf"
_PUPPET = "/etc/httpd/conf.d/10-keystone_wsgi.conf"
_SITE = "/etc/nginx/sites-enabled/keystone"
_BACKEND = "/etc/haproxy/services.d/keystone.cfg"


def told(machine: Machine, folder: Path, *codes: str) -> list[tuple[str, str, str]]:
    made = machine.diagnosis(folder, *codes)
    return [(x.level, x.check.code, x.finding.what) for x in made.results]


def test_only_keystones_parts_are_taken(tmp_path: Path) -> None:
    found = DEVSTACK_WHOLE.found(tmp_path / "a")
    assert [x.args[0] for x in routes.apache_passes(found)] == ["/identity"]
    found = NGINX_COHOSTED.found(tmp_path / "b")
    assert [x.value for x in routes.nginx_passes(found)] == ["unix:/run/uwsgi/keystone.sock"]
    assert [x.path for x in found.uwsgi] == [_INI]
    found = PUPPET_COHOSTED.found(tmp_path / "c")
    assert [x.args[0] for x in routes.aliases(found)] == ["/"]
    assert [x.args[0] for x, _ in found.daemons] == ["keystone"]
    assert found.serving == [Serving(4, 2)]
    found = CHARM.found(tmp_path / "d")
    assert [x.value for x in routes.backends(found)] == ["public-port_192.0.2.41"]


def test_a_pass_to_keystones_uwsgi_counts_whatever_it_is_called(tmp_path: Path) -> None:
    machine = DEBIAN_NGINX.put(
        _SITE,
        "server {\n    listen 443;\n    server_name api.example.org;\n    location /id/ {\n"
        "        uwsgi_pass unix:/run/uwsgi/one.sock;\n    }\n"
        "    location /x/ {\n        proxy_pass http://127.0.0.1:3000;\n    }\n}\n",
    ).swap(_INI, "/run/uwsgi/keystone.sock", "/run/uwsgi/one.sock")
    found = machine.found(tmp_path)
    assert [x.value for x in routes.nginx_passes(found)] == ["unix:/run/uwsgi/one.sock"]


def _two_files(budget: int) -> Machine:
    """Keystone's public and admin uWSGI, as deployments of long ago have them."""
    ini = LOOPBACK.files[_INI]
    machine = LOOPBACK.without(_INI)
    for name, port in (("public", 5000), ("admin", 35357)):
        machine = machine.put(
            f"/etc/keystone/keystone-uwsgi-{name}.ini", ini.replace("5000", str(port))
        )
    return replace(machine, told=Told(database_connections=budget))


def test_all_processes_of_keystone_are_added(tmp_path: Path) -> None:
    assert _two_files(12).found(tmp_path).workers == (8, 2)
    (one,) = told(_two_files(12), tmp_path, "X07")
    assert one[2] == (
        "1 nodes x 8 processes x up to 2 connections = 16, above 80% of max_connections 12"
    )
    assert told(_two_files(20), tmp_path, "X07") == []


def test_of_several_files_those_count_that_are_started(tmp_path: Path) -> None:
    machine = DEBIAN_NGINX.put("/etc/uwsgi/keystone-old.ini", DEBIAN_NGINX.files[_INI])
    assert machine.found(tmp_path).workers == (4, 2)
    linked = DEBIAN_NGINX.found(tmp_path / "b")
    assert len(linked.uwsgi) == 1


#: A machine, the code that has to speak, a part of what it says.
TOLD = [
    # The charms' backends are known by their ports.
    (
        CHARM.swap(_HAPROXY, "    timeout server 90000\n", ""),
        "H03",
        "backend public-port_192.0.2.41 without timeout server",
    ),
    (CHARM.swap(_HAPROXY, "41:4980 check", "41:4980"), "H05", "without check"),
    (CHARM.swap(_HAPROXY, "    mode http\n", ""), "H01", "is in mode tcp"),
    (
        CHARM.swap(_HAPROXY, "    option forwardfor\n", "").swap(
            "/etc/apache2/sites-enabled/wsgi-openstack-api.conf",
            '  RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"\n',
            "",
        ),
        "H01",
        "without option forwardfor",
    ),
    # The chain of timeouts.
    (RDO_PUPPET.swap(_PUPPET, "request-timeout=45", "request-timeout=300"), "X03", "Timeout 60"),
    (
        CHARM.swap(
            "/etc/apache2/sites-enabled/wsgi-openstack-api.conf",
            "request-timeout=45",
            "request-timeout=300 socket-timeout=310",
        ),
        "X04",
        "timeout server 90000 is not above request-timeout 300 s",
    ),
    (
        KOLLA_HOST.swap(
            "/etc/systemd/system/kolla-keystone-container.service", "-t 90", "-t 60"
        ).swap(
            "/etc/kolla/keystone/keystone-uwsgi.ini",
            "worker-reload-mercy = 60",
            "worker-reload-mercy = 80",
        ),
        "X05",
        "docker -t 60 is not above worker-reload-mercy 80",
    ),
    (
        replace(KOLLA, told=Told(stop_seconds=30)),
        "X05",
        "--stop-seconds 30 s is not above worker-reload-mercy 60",
    ),
    # Control groups of version 2 and 1.
    (KOLLA.put("/sys/fs/cgroup/memory.max", "268435456\n"), "X10", "the control group has 256"),
    (
        RDO_PUPPET.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
        "X10",
        "4 workers need 428 MiB, the control group has 256",
    ),
    # What is served is there.
    (
        replace(KOLLA, assumed={**KOLLA.assumed, "keystone": "26.0.1"}),
        "U20",
        "Keystone 26.0.1 has no such module",
    ),
    (
        OSA.put("/openstack/venvs/keystone-31.0.0/lib/python3.12/site-packages/oslo/x.py", ""),
        "U20",
        "there is no keystone in /openstack/venvs/keystone-31.0.0",
    ),
    (
        replace(
            RDO_PUPPET.swap(
                _PUPPET, "/var/www/cgi-bin/keystone/keystone", "/usr/bin/keystone-wsgi-public"
            ),
            assumed={"keystone": "29.0.0"},
        ),
        "A19",
        "/usr/bin/keystone-wsgi-public is not there: gone since keystone 28",
    ),
    # Federation by a section of any name.
    (
        DEBIAN_NGINX.append(_CONF, "[oidc_corp]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
        "N12",
        "[oidc_corp] remote_id_attribute HTTP_OIDC_ISS",
    ),
    (
        RDO_PUPPET.append(_CONF, "[oidc_corp]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
        "A18",
        "[oidc_corp] remote_id_attribute HTTP_OIDC_ISS",
    ),
    # Of the host that serves Keystone, not of the last one.
    (
        PUPPET_COHOSTED.swap(_PUPPET, "WSGIPassAuthorization On", "WSGIPassAuthorization Off").swap(
            _NOVA, "PassAuthorization Off", "PassAuthorization On"
        ),
        "A05",
        "WSGIPassAuthorization is not On",
    ),
    (PUPPET_COHOSTED.swap(_PUPPET, "  WSGIProcessGroup keystone\n", ""), "A07", "embedded mode"),
    # One of two options is one.
    (
        DEVSTACK.swap(
            _PROXY, " connectiontimeout=5", ""
        ),
        "A12",
        "ProxyPass without connectiontimeout",
    ),
    # The check has patience, and checks nothing.
    (KOLLA.swap(_CONF, "backends = disable_by_file\n", ""), "X16", "checks nothing"),
    # Old pages.
    *(
        (CASES["S01"][1].put("/etc/sysctl.d/90-x.conf", f"{line}\n"), "S01", line.partition(" ")[0])
        for line in (
            "net.ipv4.tcp_mem = 32768 196608 8388608",
            "net.ipv4.tcp_max_orphans = 262144",
            "net.core.somaxconn = 262144",
            "net.ipv4.tcp_max_syn_backlog = 262144",
        )
    ),
    (
        CASES["S01"][1].put(
            "/etc/sysctl.d/90-x.conf", "net.ipv4.ip_local_port_range = 1024 65535\n"
        ),
        "S01",
        "has Keystone's ports 5000, 35357",
    ),
    (
        DEBIAN_NGINX.put("/etc/security/limits.conf", "* soft nofile 65535\n"),
        "S02",
        "keystone-uwsgi.service has no LimitNOFILE",
    ),
    (
        replace(CASES["X08"][1], told=Told(nodes=100)),
        "X08",
        "above 1024, slapd's files",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "code", "said"), TOLD)
def test_it_is_told(machine: Machine, code: str, said: str, tmp_path: Path) -> None:
    whats = [x[2] for x in told(machine, tmp_path, code)]
    assert any(said in x for x in whats), whats


#: A machine, the code that has nothing to say of it.
QUIET = [
    # Reserved for Keystone.
    (
        CASES["S01"][1].put(
            "/etc/sysctl.d/90-x.conf",
            "net.ipv4.ip_local_port_range = 1024 65535\n"
            "net.ipv4.ip_local_reserved_ports = 5000,35300-35400\n",
        ),
        "S01",
    ),
    (KOLLA.put("/sys/fs/cgroup/memory.max", "max\n"), "X10"),
    (RDO_PUPPET.append(_PUPPET, "MaxRequestsPerChild 4000\n"), "A02"),
    (CHARM.swap(_HAPROXY, "timeout client 90000", "timeout client 90s"), "X04"),
    (
        CHARM.swap(_HAPROXY, "    mode http\n", "").swap(
            _HAPROXY, "4980 check", "4980 check send-proxy-v2"
        ),
        "H01",
    ),
    # An editable install.
    (
        OSA.put(
            "/openstack/venvs/keystone-31.0.0/lib/python3.12/site-packages/"
            "__editable__.keystone-30.0.0.pth",
            "",
        ),
        "U20",
    ),
]


@pytest.mark.parametrize(("machine", "code"), QUIET)
def test_it_is_not_told(machine: Machine, code: str, tmp_path: Path) -> None:
    assert told(machine, tmp_path, code) == []


def test_the_harm_is_that_of_the_finding(tmp_path: Path) -> None:
    weak = LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 4\n")
    slow = LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 15\n")
    assert "guesses" in weak.diagnosis(tmp_path, "K11").results[0].harm
    assert "take seconds" in slow.diagnosis(tmp_path, "K11").results[0].harm
    noted = DEVSTACK.swap(_PROXY, "acquire=1", "acquire=1 retry=0")
    (result,) = noted.diagnosis(tmp_path, "A11").results
    assert result.harm.startswith("None:")


#: A machine, a code, lines that are advised, and lines that are not.
ADVISED = [
    (RDO_PUPPET.put("/etc/httpd/conf.modules.d/00-mpm.conf",
                    "LoadModule mpm_prefork_module modules/mod_mpm_prefork.so\n"),
     "A03", "LoadModule mpm_event_module modules/mod_mpm_event.so", "a2dismod"),
    (replace(OSA, assumed={**OSA.assumed, "apache": "2.4.52"}), "A13", "apt install", "dnf"),
    (DEVSTACK.swap(_STACK, "chmod-socket = 660", "chmod-socket = 666"),
     "U14", "usermod -a -G keystone www-data", "chown-socket"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "code", "there", "not_there"), ADVISED)
def test_what_is_advised_fits_the_machine(
    machine: Machine, code: str, there: str, not_there: str, tmp_path: Path
) -> None:
    lines = " ".join(x for y in machine.diagnosis(tmp_path, code).results for x in y.finding.lines)
    assert there in lines
    assert not_there not in lines
