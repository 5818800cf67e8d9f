# ruff: noqa: E501 - the lines of others' files are as long as they are
"""What deployment tools write and an expert would leave: nothing is said of it, or it is a note."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.doctor.deployments import (
    CHARM,
    DEBIAN_NGINX,
    DEVSTACK,
    DEVSTACK_WHOLE,
    KOLLA,
    KOLLA_HOST,
    LOOPBACK,
    NGINX_COHOSTED,
    OPENSTACK_HELM,
    OSA,
    PUPPET_COHOSTED,
    RDO_PUPPET,
)
from support.doctor.machines import Machine

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"
_SITE = "/etc/nginx/sites-enabled/keystone"
_STACK_INI = "/etc/keystone/keystone-api-uwsgi.ini"
_STACK = "/etc/apache2/sites-enabled/keystone-api.conf"
_PUPPET = "/etc/httpd/conf.d/10-keystone_wsgi.conf"
_CHARM = "/etc/apache2/sites-enabled/wsgi-openstack-api.conf"
_HAPROXY = "/etc/haproxy/haproxy.cfg"
_HELM = "/etc/httpd/conf/httpd.conf"
_SET = 'RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"\n'
_FORWARDED = "        uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;\n"
_PREFORK = "LoadModule mpm_prefork_module modules/mod_mpm_prefork.so\n"

#: An Apache that serves the dashboard alone, as beside a Keystone behind HAProxy or nginx.
_DASHBOARD = {
    "/etc/httpd/conf/httpd.conf": 'ServerRoot "/etc/httpd"\nInclude conf.modules.d/*.conf\n'
    "MaxRequestsPerChild 100\nServerLimit 4\nMaxRequestWorkers 400\nIncludeOptional conf.d/*.conf\n",
    "/etc/httpd/conf.modules.d/00-mpm.conf": _PREFORK,
    "/etc/httpd/conf.d/dashboard.conf": "<VirtualHost *:80>\n  WSGIDaemonProcess horizon\n"
    "  WSGIProcessGroup horizon\n  WSGIScriptAlias /dashboard /usr/share/openstack-dashboard/"
    "openstack_dashboard/wsgi/django.wsgi\n</VirtualHost>\n",
}
#: nginx that serves Grafana alone, as beside a Keystone behind Apache.
_GRAFANA = {
    "/etc/nginx/nginx.conf": "events {\n    worker_connections 768;\n}\nhttp {\n    server {\n"
    "        listen 3000;\n        server_name grafana.example.org;\n        location / {\n"
    "            proxy_pass http://127.0.0.1:3001;\n        }\n    }\n}\n"
}


def _with(machine: Machine, files: dict[str, str]) -> Machine:
    for path, text in files.items():
        machine = machine.put(path, text)
    return machine


def _balancer(*lines: str, members: int = 1) -> Machine:
    """devstack whose pass goes to a balancer."""
    said = "".join(f"    BalancerMember uwsgi://127.0.0.{x}:35358\n" for x in range(1, members + 1))
    more = "".join(f"    {x}\n" for x in lines)
    text = (
        f"{_SET}<Proxy balancer://keystone>\n{said}{more}</Proxy>\n"
        'ProxyPass "/identity" balancer://keystone\n'
    )
    return DEVSTACK.put(_STACK, text)


#: kolla-ansible's httpd-keystone.conf for federated logins, on its host.
_KOLLA_HTTPD = """\
LoadModule proxy_module /usr/lib/apache2/modules/mod_proxy.so
LoadModule proxy_uwsgi_module /usr/lib/apache2/modules/mod_proxy_uwsgi.so
Listen 192.0.2.21:5000
TimeOut 60
KeepAliveTimeout 60
LimitRequestFieldSize 16380
<VirtualHost *:5000>
    LogFormat "%{X-Forwarded-For}i %l %u %t \\"%r\\" %>s %b %D" logformat
    CustomLog "/var/log/kolla/keystone/keystone-apache-public-access.log" logformat
    ProxyPass / "uwsgi://localhost:5001/"
    OIDCClaimPrefix "OIDC-"
    OIDCMetadataDir /etc/apache2/metadata
    <Location /v3/auth/OS-FEDERATION/websso/openid>
      Require valid-user
      AuthType openid-connect
    </Location>
</VirtualHost>
"""
_KOLLA_FEDERATED = KOLLA_HOST.append(
    "/etc/kolla/keystone/keystone.conf", "[openid]\nremote_id_attribute = HTTP_OIDC_ISS\n"
).put("/etc/kolla/keystone-httpd/httpd-keystone.conf", _KOLLA_HTTPD)

#: What it is, the codes that have nothing to say of it, the machine.
QUIET = [
    ("the dashboard's Apache beside HAProxy", "A01 A02 A03 A15", _with(KOLLA, _DASHBOARD)),
    ("the dashboard's Apache beside nginx", "A01 A02 A03", _with(DEBIAN_NGINX, _DASHBOARD)),
    ("another's nginx beside Apache", "N01 X12", _with(RDO_PUPPET, _GRAFANA)),
    ("children that live for thousands", "A02", RDO_PUPPET.append(_PUPPET, "MaxRequestsPerChild 4000\n")),
    (
        "what stands in a condition for another MPM",
        "A01 A02 A03",
        RDO_PUPPET.append(
            _PUPPET,
            "<IfModule mpm_prefork_module>\n  MaxRequestsPerChild 100\n  ServerLimit 4\n"
            "  MaxRequestWorkers 4000\n</IfModule>\n",
        ),
    ),
    (
        "the same in a part of a configuration",
        "A01 A02",
        OPENSTACK_HELM.put(
            _HELM,
            "<IfModule mpm_prefork_module>\n  MaxRequestsPerChild 100\n</IfModule>\n"
            "<IfModule prefork.c>\n  MaxRequestsPerChild 100\n</IfModule>\n"
            "IncludeOptional /etc/httpd/conf.d/*.conf\n",
        ),
    ),
    # 15 s is mod_wsgi's own.
    ("graceful-timeout's default", "A06", RDO_PUPPET.swap(_PUPPET, " graceful-timeout=30", "")),
    # Measured: httpd tries them all the same once all have failed.
    ("a balancer's only member", "A11", _balancer()),
    ("a balancer's members", "A11", _balancer(members=3)),
    ("members that come back at once", "A11", _balancer("BalancerMember uwsgi://127.0.0.9:1 retry=0", "ProxySet forcerecovery=Off", members=0)),
    ("HAProxy in TCP mode, which H01 tells of", "A15", CHARM.swap(_HAPROXY, "    mode http\n", "").swap(_CHARM, f"  {_SET}", "")),
    ("the default rounds", "K11", LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 13\n")),
    ("rounds of another algorithm", "K11", LOOPBACK.append(_CONF, "[identity]\npassword_hash_algorithm = scrypt\npassword_hash_rounds = 32\n")),
    (
        "no header is handed on",
        "N06",
        DEBIAN_NGINX.swap(_SITE, _FORWARDED, "        uwsgi_pass_request_headers off;\n"),
    ),
    (
        "HAProxy of this machine appends the address",
        "N06",
        _with(
            DEBIAN_NGINX.swap(_SITE, _FORWARDED, ""),
            {_HAPROXY: "defaults\n    mode http\nlisten keystone\n    bind *:5000\n"
             "    option forwardfor\n    server one 127.0.0.1:5001 check\n"},
        ),
    ),
    # To name the balancer for everybody would be the wrong remedy.
    (
        "HAProxy of this machine is told by H01",
        "N06",
        _with(
            DEBIAN_NGINX.swap(_SITE, _FORWARDED, ""),
            {_HAPROXY: "defaults\n    mode http\nlisten keystone\n    bind *:5000\n"
             "    server one 127.0.0.1:5001 check\n"},
        ),
    ),
    # nginx and Apache tell uWSGI the client's address by its own protocol.
    ("logs behind the uwsgi protocol", "U23", DEBIAN_NGINX.swap(_INI, "disable-logging = true\n", "")),
    ("libpq verifies by an authority", "D05", LOOPBACK.swap(_CONF, "mysql+pymysql", "postgresql+psycopg2").swap(_CONF, "ssl_ca=/etc/ssl/ca.pem", "sslmode=require&sslrootcert=/etc/ssl/ca.pem")),
    ("HAProxy before the database alone", "H01 H03 H05 X04 X16", _with(
        DEBIAN_NGINX, {_HAPROXY: "listen galera\n    bind 127.0.0.1:3306\n    mode tcp\n    server db1 192.0.2.10:3306\n"},
    )),
    ("Debian's vassals", "U02 U03", LOOPBACK.without(_INI).put("/etc/uwsgi-emperor/vassals/keystone.ini", "[uwsgi]\nmodule = keystone.wsgi.api:application\n")),
    ("verified TLS to the database", "D05", LOOPBACK.swap(_CONF, "mysql+pymysql", "postgresql+psycopg2").swap(_CONF, "ssl_ca=/etc/ssl/ca.pem", "sslmode=verify-full")),
    (
        "the address is appended",
        "N06",
        DEBIAN_NGINX.swap(_SITE, "$remote_addr", "$proxy_add_x_forwarded_for"),
    ),
    # devstack's write_local_uwsgi_http_config has both.
    (
        "chmod-socket without a socket",
        "U14",
        LOOPBACK.append(_INI, "chmod-socket = 666\n"),
    ),
    (
        "a socket in a folder that others may not enter",
        "U14",
        replace(
            DEVSTACK.put("/var/run/uwsgi/", "").swap(_STACK_INI, "chmod-socket = 660", "chmod-socket = 666"),
            modes={**DEVSTACK.modes, "/var/run/uwsgi": 0o750},
        ),
    ),
    # The charms' nginx has three slashes.
    (
        "a socket by another spelling",
        "X13 X14 X02",
        DEBIAN_NGINX.swap(_SITE, "unix:/run/uwsgi", "unix:///var/run/uwsgi"),
    ),
    (
        "a script that Debian brings although Keystone does not",
        "U20",
        replace(KOLLA, assumed={**KOLLA.assumed, "keystone": "29.0.0"})
        .put("/usr/bin/keystone-wsgi-public", "")
        .swap(_INI, "module = keystone.wsgi.api:application", "wsgi-file = /usr/bin/keystone-wsgi-public"),
    ),
    (
        "a part of a machine's files",
        "U20 U24 S04",
        replace(OSA, whole=False).without("/openstack/venvs/keystone-31.0.0/bin/uwsgi"),
    ),
    (
        "a part of a machine with mod_wsgi",
        "A19 F02",
        replace(RDO_PUPPET, whole=False)
        .without("/var/www/cgi-bin/keystone/keystone")
        .append(_PUPPET, "SSLCertificateFile /opt/stack/data/CA/int-ca/devstack-cert.crt\n"),
    ),
    # mod_auth_openidc with several providers, as kolla has it, takes its headers from clients.
    ("kolla's federated logins", "A14 A15 A18 H07", _KOLLA_FEDERATED),
    ("other services' ways", "A02 A03 A06 A11 A15", PUPPET_COHOSTED),
    ("other services' passes", "N01 N03 N06 U14 X12 X18", NGINX_COHOSTED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "machine"),
    [pytest.param(x, machine, id=f"{x} {what}") for what, codes, machine in QUIET for x in codes.split()],
)  # fmt: skip
def test_nothing_is_said(code: str, machine: Machine, tmp_path: Path) -> None:
    made = machine.diagnosis(tmp_path, code)
    assert [x.finding.what for x in made.results] == []


#: What it is, the code, the machine, the level, and a part of what is said.
SAID = [
    # What stands behind a balancer elsewhere, which appends the address: OSA, puppet, openstack-helm.
    (
        "A15", "info", "past the balancer; write its address",
        OPENSTACK_HELM.swap("/etc/httpd/conf.d/wsgi-keystone.conf", f"    {_SET}", "").append(
            "/etc/httpd/conf.d/wsgi-keystone.conf",
            'SetEnvIf X-Forwarded-For "^.*\\..*\\..*\\..*" forwarded\n',
        ),
    ),
    ("A15", "info", "past the balancer", DEVSTACK_WHOLE.swap(_STACK, _SET, "")),
    ("A15", "warning", "as the client sent it", DEVSTACK.swap(_STACK, _SET, "")),
    (
        "A15", "warning", "as the client sent it",
        CHARM.swap(_HAPROXY, "    mode http\n", "")
        .swap(_HAPROXY, "4980 check", "4980 check send-proxy-v2")
        .swap(_CHARM, f"  {_SET}", ""),
    ),
    (
        "N06", "info", "past the balancer",
        DEBIAN_NGINX.swap(
            _SITE, _FORWARDED, ""
        ).swap(_SITE, "    location", "    set_real_ip_from 192.0.2.1;\n    real_ip_header X-Forwarded-For;\n    location"),
    ),
    # The PROXY protocol leaves the client's own header as it is.
    (
        "N06", "error", "as the client sent it",
        DEBIAN_NGINX.swap(
            _SITE, _FORWARDED, ""
        ).swap(_SITE, "    location", "    set_real_ip_from 192.0.2.1;\n    real_ip_header proxy_protocol;\n    location"),
    ),
    (
        "A03", "info", "which mod_php needs",
        RDO_PUPPET.put("/etc/httpd/conf.modules.d/00-mpm.conf", _PREFORK + "LoadModule php_module modules/libphp.so\n"),
    ),
    ("A06", "warning", "without request-timeout", RDO_PUPPET.swap(_PUPPET, "request-timeout=45", "request-timeout=0")),
    ("A06", "warning", "without graceful-timeout", RDO_PUPPET.swap(_PUPPET, "graceful-timeout=30", "graceful-timeout=0")),
    ("A11", "error", "without retry=0", _balancer("ProxySet forcerecovery=Off", members=2)),
    (
        "A11", "error", "without retry=0",
        DEVSTACK.put(_STACK, "<Proxy balancer://keystone>\n  BalancerMember uwsgi://127.0.0.1:35358\n</Proxy>\n"
                     'ProxyPass "/identity" balancer://keystone forcerecovery=Off\n'),
    ),
    ("K11", "info", "password_hash_rounds = 14", LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 14\n")),
    ("K11", "warning", "password_hash_rounds = 4", LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 4\n")),
    # kolla's file on a machine without that folder: uWSGI goes on with what is built in.
    ("U24", "info", "plugins-dir = /usr/lib/uwsgi/plugins is not there",
     KOLLA.append(_INI, "plugins-dir = /usr/lib/uwsgi/plugins\nplugins = python3\n")),
    ("U24", "error", "plugins-dir = /usr/lib/uwsgi/plugins is not there",
     KOLLA.append(_INI, "plugins-dir = /usr/lib/uwsgi/plugins\nneed-plugin = python3\n")),
    # Nothing logs in there, so nothing takes the header away.
    ("A18", "error", "HTTP_OIDC_ISS is what the client sends",
     _KOLLA_FEDERATED.put("/etc/kolla/keystone-httpd/httpd-keystone.conf", re.sub(
         r"    (OIDC|<Loc|  Req|  Auth|</Loc).*\n", "", _KOLLA_HTTPD))),
    # TLS that takes any certificate.
    ("D05", "warning", "sslmode=require: whoever answers",
     LOOPBACK.swap(_CONF, "mysql+pymysql", "postgresql+psycopg2").swap(_CONF, "ssl_ca=/etc/ssl/ca.pem", "sslmode=require")),
    ("D05", "warning", "ssl_verify_cert=false: whoever answers",
     LOOPBACK.swap(_CONF, "ssl_ca=/etc/ssl/ca.pem", "ssl_ca=/etc/ssl/ca.pem&ssl_verify_cert=false")),
    ("U14", "info", "chmod-socket = 666",
     LOOPBACK.append(_INI, "http-socket = /run/uwsgi/k.sock\nchmod-socket = 666\n")),
    ("A02", "warning", "MaxConnectionsPerChild 128",
     OPENSTACK_HELM.append(_HELM, "<IfModule mpm_event_module>\n  MaxRequestsPerChild 128\n</IfModule>\n")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "level", "said", "machine"), SAID)
def test_it_is_said_as_what_it_is(
    code: str, level: str, said: str, machine: Machine, tmp_path: Path
) -> None:
    told = [(x.level, x.finding.what) for x in machine.diagnosis(tmp_path, code).results]
    assert [x for x, _ in told] == [level] * len(told) != []
    assert all(said in what for _, what in told), told


def test_the_pass_to_itself_says_who_the_balancer_is(tmp_path: Path) -> None:
    made = DEVSTACK_WHOLE.swap(_STACK, _SET, "").diagnosis(tmp_path, "A15")
    assert "RemoteIPInternalProxy 10.0.0.5" in made.results[0].finding.lines


def test_what_a_part_of_a_machine_leaves_out_is_named(tmp_path: Path) -> None:
    machine = replace(OSA, whole=False).without("/openstack/venvs/keystone-31.0.0/bin/uwsgi")
    made = machine.diagnosis(tmp_path)
    (said,) = [x for x in made.unread if x.what.startswith("/openstack/venvs/")]
    assert "a part of the machine's files" in said.why
    assert made.status == 0
    # A folder beside it is there, so this one is really gone.
    beside = machine.put("/openstack/venvs/keystone-30.0.0/bin/uwsgi", "")
    assert {x.check.code for x in beside.diagnosis(tmp_path, "U24").results} == {"U24"}
