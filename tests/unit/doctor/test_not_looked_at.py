"""What was never looked at is not found right: it is named, with what would tell it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.gateway.doctor import config_files, machine_state
from keyfront.gateway.doctor.diagnosis import diagnose
from keyfront.gateway.doctor.machine_state import Live
from keyfront.gateway.doctor.schema import Schema
from support.doctor.deployments import (
    CHARM,
    DEBIAN_NGINX,
    DEVSTACK,
    KOLLA,
    LOOPBACK,
    NGINX_COHOSTED,
    PUPPET_COHOSTED,
)
from support.doctor.machines import NOW, Machine
from support.programs import own_folder

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"
_EMPTY = replace(LOOPBACK, live=Live())
_UNKNOWN = replace(LOOPBACK, assumed={})

#: The code, the machine, a part of the reason.
ABSENT = [
    *(
        (code, _EMPTY, said)
        for code, said in {
            "P01": "/proc/net/netstat",
            "P02": "listening sockets",
            "P03": "nf_conntrack_max",
            "P04": "/proc/net/sockstat",
            "P05": "no process of Keystone",
            "P06": "no process of Keystone",
            "P07": "neither the kernel nor another machine",
            "P08": "packages",
            "P09": "free space",
            "P10": "none is here",
            "P12": "run this as root",
            "P13": "ready in N seconds",
        }.items()
    ),
    ("D08", replace(LOOPBACK, schema=Schema(missing_indexes=None)), "Keystone's models"),
    ("D09", replace(LOOPBACK, schema=Schema(unknown="SLAVE MONITOR")), "SLAVE MONITOR"),
    ("V01", replace(_UNKNOWN, assumed={"nginx": "1.22.1"}), "--assume keystone="),
    ("V02", replace(_UNKNOWN, assumed={"keystone": "30.0.0"}), "--assume uwsgi="),
    ("U06", replace(_UNKNOWN, assumed={"keystone": "30.0.0"}), "--assume uwsgi="),
    ("A13", DEVSTACK, "--assume apache="),
    ("M01", LOOPBACK, "memcached's own configuration"),
    ("M02", LOOPBACK, "local_settings"),
    ("F02", LOOPBACK, "no web server's"),
    ("F03", Machine(files={_INI: LOOPBACK.files[_INI]}), "neither keystone.conf"),
    ("S01", LOOPBACK, "sysctl.d"),
    ("S02", DEBIAN_NGINX, "limits.conf"),
    ("X10", LOOPBACK, "control group"),
    ("X05", KOLLA.put("/.dockerenv", ""), "--stop-seconds"),
    ("X04", KOLLA.swap(_INI, "harakiri = 60\n", ""), "harakiri"),
]


@pytest.mark.parametrize(("code", "machine", "said"), ABSENT)
def test_it_is_named(code: str, machine: Machine, said: str, tmp_path: Path) -> None:
    made = machine.diagnosis(tmp_path, code)
    assert [x.check.code for x in made.results] == []
    assert [x.code for x in made.right] == []
    (why,) = [x.why for x in made.unread if x.what.startswith(f"{code} ")]
    assert said in why


#: What of a server is Keystone's, a machine whose server serves something else, the server.
OTHERS = [
    ("H01", "backend", "/etc/haproxy/haproxy.cfg", "listen mariadb\n bind :3306\n server a b:3306\n"
     "listen rabbit\n bind :5672\n server a b:5672\n"),
    ("N06", "location", "/etc/nginx/nginx.conf",
     "http { server { listen 80; location / { proxy_pass http://grafana:3000; } } }\n"),
    ("A04", "mod_wsgi", "/etc/apache2/apache2.conf",
     "WSGIScriptAlias / /usr/share/openstack-dashboard/django.wsgi\n"),
    ("A12", "pass", "/etc/apache2/apache2.conf", "ProxyPass / http://127.0.0.1:3000/\n"
     "ProxyPass /b http://127.0.0.1:3001/\n"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "layer", "path", "text"), OTHERS)
def test_a_server_of_others_is_not_keystones(
    code: str, layer: str, path: str, text: str, tmp_path: Path
) -> None:
    machine = LOOPBACK.put(path, text)
    found = machine.found(tmp_path)
    assert not found.has(layer)
    made = diagnose(found, [code])
    assert [x.code for x in made.skipped] == [code]
    assert made.right == []


@pytest.mark.parametrize(
    ("server", "code", "path", "text"),
    [
        ("nginx", "N10", "/etc/nginx/nginx.conf",
         "http { ssl_protocols TLSv1 TLSv1.2;\n server { listen 443 ssl; location / {\n"
         "  proxy_pass http://grafana:3000; } } }\n"),
        ("apache", "A02", "/etc/apache2/apache2.conf", "ProxyPass / http://127.0.0.1:3000/\n"
         "ProxyPass /b http://127.0.0.1:3001/\n"),
        ("haproxy", "H02", "/etc/haproxy/haproxy.cfg", "listen mariadb\n bind :3306\n"),
    ],
)  # fmt: skip
def test_a_server_where_there_is_no_keystone(
    server: str, code: str, path: str, text: str, tmp_path: Path
) -> None:
    machine = Machine(files={path: text})
    made = machine.diagnosis(tmp_path)
    assert [x.code for x in made.skipped if x.code == code] == [code]
    assert made.results == []
    assert any("leads to no Keystone here" in x.why for x in made.unread)
    named = {server: (path,) if server == "haproxy" else path}
    made = diagnose(config_files.look(tmp_path, config_files.Given(**named)))  # type: ignore[arg-type]
    assert code not in [x.code for x in made.skipped], "what is named is looked at"


def test_counters_of_an_empty_proc(tmp_path: Path) -> None:
    found = LOOPBACK.found(tmp_path)
    seen = machine_state.look(found)
    assert seen.counters == {}
    assert seen.processes == []
    assert seen.logs == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_another_user_may_read() -> None:
    """keystone.conf and the only site may not be read: that is said, and nothing of them right."""
    with own_folder("doctor") as root:
        NGINX_COHOSTED.without("/etc/nginx/sites-enabled/others").make(root)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (root / "etc/keystone").chmod(0o700)
        (root / "etc/nginx/sites-enabled/keystone").chmod(0o600)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                status = _as_another(root)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_another(root: Path) -> int:
    """Return 0 if what a user who may read little is told is true."""
    from keyfront.gateway.doctor import config_files

    given = config_files.Given(assumed={"uwsgi": "2.0.31"})
    made = diagnose(config_files.look(root, given, None, NOW))
    said = {x.what: x.why for x in made.unread}
    right = {x.code for x in made.right}
    wrong = [x for x in said.values() if "fault of keyfront" in x]
    denied = f"{_CONF} may not be read: run this as root"
    holds = (
        not wrong
        and not {"F02", "F03"} & right
        and said["keystone.conf"].startswith(denied)
        and "not found" not in said["keystone.conf"]
    )
    if not holds:
        print(said, right)
    return 0 if holds else 1


def test_what_was_found_before_something_unknown_is_told(tmp_path: Path) -> None:
    """A check gives its findings, and says at its end what it could not see."""
    machine = CHARM.swap("/etc/haproxy/haproxy.cfg", "timeout client 90000", "timeout client 30000")
    made = machine.diagnosis(tmp_path, "X04")
    assert [x.finding.what for x in made.results] == [
        "timeout client 30000 is below timeout server 90000"
    ]
    made = PUPPET_COHOSTED.diagnosis(tmp_path, "X10")
    assert made.right == []
