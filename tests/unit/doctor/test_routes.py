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


#: An emperor as Fedora's uwsgi.service starts it, and as uWSGI's own guide has it.
_EMPEROR = {
    "/etc/uwsgi.ini": "[uwsgi]\nemperor = /etc/uwsgi.d\nemperor-tyrant = true\n"
    "pidfile = /run/uwsgi/uwsgi.pid\n"
}
_BLOG = "[uwsgi]\nmodule = blog:app\nprocesses = 16\nsocket = /run/uwsgi/blog.sock\n"


def _vassals(command: str, files: dict[str, str]) -> Machine:
    """Keystone's public and admin uWSGI and a blog's, started by an emperor."""
    unit = DEBIAN_NGINX.files["/etc/systemd/system/keystone-uwsgi.service"]
    machine = _two_files(16)
    for name in ("public", "admin"):
        path = f"/etc/keystone/keystone-uwsgi-{name}.ini"
        text = machine.files[path].replace("die-on-term = true\n", "")
        text = text.replace("hook-master-start = unix_signal:15 gracefully_kill_them_all\n", "")
        machine = machine.without(path).put(f"/etc/uwsgi.d/keystone-{name}.ini", text)
    for path, text in files.items():
        machine = machine.put(path, text)
    return (
        machine.put("/etc/uwsgi.d/blog.ini", _BLOG)
        .put("/usr/bin/uwsgi", "")
        .put(
            "/etc/systemd/system/uwsgi.service",
            unit.replace("--ini /etc/keystone/keystone-uwsgi.ini", command).replace(
                "{program} --ini {ini}", f"/usr/bin/uwsgi {command}"
            ),
        )
    )


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("--ini /etc/uwsgi.ini", _EMPEROR),
        ("--emperor /etc/uwsgi.d", {}),
        ("--master --emperor=/etc/uwsgi.d/*.ini", {}),
    ],
)
def test_an_emperors_vassals_are_added(
    command: str, files: dict[str, str], tmp_path: Path
) -> None:
    machine = _vassals(command, files)
    found = machine.found(tmp_path)
    assert [x.path for x in found.uwsgi] == [
        "/etc/uwsgi.d/keystone-admin.ini", "/etc/uwsgi.d/keystone-public.ini",
    ]  # fmt: skip
    assert {x.unit for x in found.uwsgi} == {"uwsgi.service"}
    assert found.workers == (8, 2)
    # 16 connections are above 80% of 16, and within 80% of 20.
    assert len(told(machine, tmp_path, "X07")) == 1
    more = replace(machine, told=Told(database_connections=20))
    # An emperor ends them without a signal, so they need no hook of SIGTERM.
    assert told(more, tmp_path, "X07", "U02", "U03", "U25") == []


def test_somebodys_own_uwsgi_is_left_alone(tmp_path: Path) -> None:
    unit = DEBIAN_NGINX.files["/etc/systemd/system/keystone-uwsgi.service"]
    beside = DEBIAN_NGINX.put("/srv/blog/blog.ini", _BLOG).put(
        "/etc/systemd/system/uwsgi-blog.service",
        unit.replace("/etc/keystone/keystone-uwsgi.ini", "/srv/blog/blog.ini"),
    )
    assert told(beside, tmp_path, *(x for x in CASES if x[0] in "UXS")) == told(
        DEBIAN_NGINX, tmp_path / "b", *(x for x in CASES if x[0] in "UXS")
    )


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
    # Of the server or host that serves Keystone, whatever is said around it.
    (
        DEBIAN_NGINX.swap(_SITE, "        uwsgi_read_timeout 75s;\n", "")
        .swap(_SITE, "    location", "    uwsgi_read_timeout 30s;\n    location")
        .swap("/etc/nginx/nginx.conf", "    sendfile on;", "    uwsgi_read_timeout 300s;"),
        "X03",
        "uwsgi_read_timeout of 30 s",
    ),
    (
        OSA.append("/etc/apache2/apache2.conf", "ProxyTimeout 300\n").swap(
            "/etc/apache2/sites-enabled/keystone.conf", "LogLevel info", "ProxyTimeout 20"
        ),
        "X03",
        "ProxyTimeout of 20 s",
    ),
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
    (
        OSA.swap(
            "/etc/apache2/sites-enabled/keystone.conf", "LogLevel info", "ProxyTimeout 300"
        ).append("/etc/apache2/sites-enabled/keystone.conf", "ProxyTimeout 20\n"),
        "X03",
    ),
    (NGINX_COHOSTED, "X03"),
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


#: A server, a directive and a part of its value, whether it may hold for requests to Keystone.
CONCERNS = [
    (NGINX_COHOSTED, "nginx", "listen", "5000", True),
    (NGINX_COHOSTED, "nginx", "listen", "9292", False),
    (NGINX_COHOSTED, "nginx", "client_max_body_size", "0", False),
    # Outside of all servers: for all of them.
    (NGINX_COHOSTED, "nginx", "ssl_protocols", "TLSv1.2", True),
    (PUPPET_COHOSTED, "apache", "servername", "controller.example.org", None),
    (PUPPET_COHOSTED, "apache", "servername", "dashboard.example.org", False),
    (PUPPET_COHOSTED, "apache", "wsgipassauthorization", "On", True),
    (PUPPET_COHOSTED, "apache", "wsgipassauthorization", "Off", False),
    # A host that leads to itself serves all of them, Keystone among them.
    (DEVSTACK_WHOLE, "apache", "proxytimeout", "20", True),
    (CHARM, "haproxy", "bind", "5000", True),
    (
        CHARM.append(_HAPROXY, "frontend stats_in\n    bind *:8888\n    default_backend stats\n"),
        "haproxy", "bind", "8888", False,
    ),
    # Where nothing leads to Keystone all may.
    (
        CHARM.put(_HAPROXY, "frontend one\n    bind *:1\n    default_backend two\n"),
        "haproxy", "bind", ":1", True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "server", "name", "value", "wanted"), CONCERNS)
def test_what_concerns_keystone(
    machine: Machine, server: str, name: str, value: str, wanted: bool | None, tmp_path: Path
) -> None:
    found = machine.found(tmp_path)
    those = [x for x in getattr(found, server).all(name) if value in x.value]
    assert those
    said = [routes.concerns(found, x) for x in those]
    if wanted is None:  # Keystone's host and nova's have one name
        assert sorted(said) == [False, True]
    else:
        assert said == [wanted] * len(said)


#: A machine, and whether a web server or a balancer of it leads to Keystone.
FRONTS = [
    (LOOPBACK, False),
    (DEBIAN_NGINX, True),
    (DEVSTACK, True),
    (KOLLA, True),
    (CHARM, True),
    # mod_wsgi is Keystone's server itself: nothing stands before it.
    (RDO_PUPPET, False),
    (
        LOOPBACK.put(
            "/etc/nginx/nginx.conf",
            "events {\n}\nhttp {\n    server {\n        listen 3000;\n"
            "        server_name grafana.example.org;\n        location / {\n"
            "            proxy_pass http://127.0.0.1:3001;\n        }\n    }\n}\n",
        ),
        False,
    ),
    (
        LOOPBACK.put(_HAPROXY, "listen rabbitmq\n    bind *:5672\n    server a 192.0.2.1:5672\n"),
        False,
    ),
    (
        LOOPBACK.put(_HAPROXY, "listen mariadb\n    bind *:3306\n    server a 192.0.2.1:3306\n"),
        False,
    ),
]


@pytest.mark.parametrize(("machine", "wanted"), FRONTS)
def test_whether_there_is_a_front(machine: Machine, wanted: bool, tmp_path: Path) -> None:
    assert routes.has_front(machine.found(tmp_path)) is wanted


def test_passes_of_apache_to_itself(tmp_path: Path) -> None:
    def told_of(machine: Machine, name: str) -> list[str]:
        tree = machine.found(tmp_path / name).apache
        assert tree is not None
        return [x.args[-3] for x in routes.to_itself(tree)]

    assert told_of(DEVSTACK_WHOLE, "a") == ["http://10.0.0.5:80/"]
    # The charms' TLS hosts lead to the port of mod_wsgi, which the same Apache has.
    frontend = (
        "Listen 4990\nListen 4980\n<VirtualHost *:4990>\n  SSLEngine on\n"
        "  ProxyPass / http://localhost:4980/ a b\n  ProxyPass /x http://localhost:4999/ a b\n"
        "</VirtualHost>\n"
    )
    charm = CHARM.put("/etc/apache2/sites-enabled/openstack_https_frontend.conf", frontend)
    assert told_of(charm, "b") == ["http://localhost:4980/"]
    assert told_of(DEVSTACK, "c") == []
    assert told_of(OSA, "d") == []  # uwsgi://127.0.0.1:35358 is uWSGI's
