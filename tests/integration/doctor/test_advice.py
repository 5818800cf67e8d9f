"""What the doctor advises for nginx, Apache and HAProxy is taken by them, and is the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from keyfront.gateway.doctor import advice
from keyfront.gateway.doctor.diagnosis import diagnose
from support.doctor.applied import apply, refused
from support.doctor.cases import CASES
from support.doctor.deployments import (
    CHARM,
    DEBIAN_NGINX,
    DEVSTACK_WHOLE,
    NGINX_COHOSTED,
    PUPPET_COHOSTED,
)
from support.doctor.machines import Machine

_SITE = "/etc/nginx/sites-enabled/keystone"
_CONF = "/etc/keystone/keystone.conf"
_PARAMS = "        include /etc/nginx/uwsgi_params;\n        uwsgi_param HTTP_X_FORWARDED_FOR "
_FORWARDED = _PARAMS + "$remote_addr;\n        uwsgi_param HTTP_X_FORWARDED_PROTO $scheme;\n"
#: A server whose parameters the location inherits, as nginx's own guide has it.
INHERITS = DEBIAN_NGINX.swap(_SITE, _FORWARDED, "").swap(
    _SITE, "    location", "    include /etc/nginx/uwsgi_params;\n    location"
)
# Of an nginx that closes its connections to an upstream.
_OLD = {**DEBIAN_NGINX.assumed, "nginx": "1.22.1"}
_HTTP = replace(DEBIAN_NGINX, assumed=_OLD).swap(
    _SITE, "uwsgi_pass unix:/run/uwsgi/keystone.sock", "proxy_pass http://keystone"
).swap(_SITE, "server {\n", "upstream keystone {\n    server 127.0.0.1:5001;\n}\nserver {\n")
_ONE_LINE = DEBIAN_NGINX.put(
    _SITE,
    "server { listen 5000; server_name keystone; proxy_set_header Host $host;\n"
    "  location / { proxy_pass http://127.0.0.1:5001; } }\n",
)
_TLS = CHARM.swap("/etc/haproxy/haproxy.cfg", "    mode http\n", "").swap(
    "/etc/haproxy/haproxy.cfg", "    option forwardfor\n", ""
)
#: By code and what is special about it: machines whose advice depends on more than the fault.
MORE = {
    "N06 inherited": INHERITS,
    "N12 inherited": INHERITS.append(_CONF, "[oidc_corp]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
    "N06 one line": _ONE_LINE,
    "N03 one line": _ONE_LINE,
    "N07 one line": _ONE_LINE,
    "N08 upstream": _HTTP,
    "N08 old": _HTTP.swap(_SITE, "proxy_pass", "proxy_http_version 1.0;\n        proxy_pass"),
    "X18 cohosted": NGINX_COHOSTED.swap(
        "/etc/nginx/nginx.conf", "client_max_body_size 114688", "client_max_body_size 0"
    ),
    "A15 itself": DEVSTACK_WHOLE.swap(
        "/etc/apache2/sites-enabled/keystone-api.conf",
        'RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"\n',
        "",
    ),
    "A15 balanced": PUPPET_COHOSTED.swap(
        "/etc/httpd/conf.d/10-keystone_wsgi.conf",
        "  RemoteIPHeader X-Forwarded-For\n  RemoteIPInternalProxy 192.0.2.1\n",
        "",
    ),
    "A05 cohosted": PUPPET_COHOSTED.swap(
        "/etc/httpd/conf.d/10-keystone_wsgi.conf", "  WSGIPassAuthorization On\n", ""
    ),
    "A06 cohosted": PUPPET_COHOSTED.swap(
        "/etc/httpd/conf.d/10-keystone_wsgi.conf",
        "request-timeout=45 queue-timeout=45 graceful-timeout=30",
        "",
    ),
    "X03 mod_wsgi": PUPPET_COHOSTED.swap(
        "/etc/httpd/conf.d/10-keystone_wsgi.conf", "request-timeout=45", "request-timeout=300"
    ),
    "H01 plain": _TLS,
    "H01 tls": _TLS.swap(
        "/etc/apache2/sites-enabled/wsgi-openstack-api.conf",
        "  ServerName controller.example.org\n",
        "  ServerName controller.example.org\n  SSLEngine on\n",
    ),
    "X04 client": CHARM.swap(
        "/etc/haproxy/haproxy.cfg", "timeout client 90000", "timeout client 30000"
    ),
}


def _marked() -> dict[str, Machine]:
    """Machines whose advice is for a web server or balancer: the first line says where it goes."""
    marked = {}
    for code, (machine, _) in CASES.items():
        if code[0] not in "XNAH":
            continue
        machine = machine if code != "N08" else replace(machine, assumed=_OLD)
        with TemporaryDirectory() as folder:
            findings = [x.finding for x in machine.diagnosis(Path(folder), code).results]
        if any(advice.mark(x.lines[0]) for x in findings):
            marked[code] = machine
    return {**marked, **MORE}


_MARKED = _marked()


def test_all_layers_have_advice_that_is_tried() -> None:
    assert {x[0] for x in _MARKED} == set("XNAH")
    assert len(_MARKED) >= 50


@pytest.mark.parametrize("name", _MARKED)
def test_the_server_takes_it_and_the_fault_is_gone(name: str, tmp_path: Path) -> None:
    code = name.split()[0]
    machine = _MARKED[name]
    findings = [x.finding for x in machine.diagnosis(tmp_path, code).results]
    assert findings
    changed = []
    # From the last line on, so that the numbers of the others stay.
    for finding in sorted(findings, key=lambda x: x.where[0].line, reverse=True)[:1]:
        changed += apply(tmp_path, finding)
    after = [x.finding for x in diagnose(_again(machine, tmp_path), [code]).results]
    assert len(after) == len(findings) - 1, after
    assert refused(tmp_path, changed) == ""


def _again(machine: Machine, folder: Path):  # type: ignore[no-untyped-def]
    from keyfront.gateway.doctor import config_files
    from support.doctor.machines import NOW

    return config_files.look(folder, config_files.Given(assumed=machine.assumed), machine.told, NOW)
