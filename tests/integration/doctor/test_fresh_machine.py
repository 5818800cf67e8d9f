
"""A Debian on which nginx, Apache, uWSGI and Keystone were just installed is told its real faults.

The files are those that the packages of this machine brought, Keystone's own (httpd/ of its
repository, the install guide's settings), and the Keystone that is installed here.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from keyfront.cli.main import main
from keyfront.gateway.render import versions
from support.doctor.applied import refused
from support.doctor.deployments import APACHE_CONF, APACHE_FILES
from support.programs import program

#: Keystone's httpd/keystone-uwsgi-public.ini, 2026-07-17.
_PUBLIC = """\
[uwsgi]
module = keystone.wsgi.api:application

# Versions of mod_proxy_uwsgi>=2.0.6 should use a UNIX socket, see
# http://uwsgi-docs.readthedocs.org/en/latest/Apache.html#mod-proxy-uwsgi
uwsgi-socket = 127.0.0.1:5001

# Override the default size for headers from the 4k default.
buffer-size = 65535

# This is running standalone
master = true

enable-threads = true

# Tune this to your environment.
processes = 4

# uwsgi recommends this to prevent thundering herd on accept.
thunder-lock = true

plugins = python

# This ensures that file descriptors aren't shared between keystone processes.
lazy-apps = true
"""
#: Its httpd/uwsgi-keystone.conf.
_HTTPD = """\
Listen 5000
Listen 35357

<VirtualHost *:5000>
    ProxyPass / uwsgi://127.0.0.1:5001/
</VirtualHost>

<VirtualHost *:35357>
    ProxyPass / uwsgi://127.0.0.1:35358/
</VirtualHost>

ProxyPass /identity uwsgi://127.0.0.1:5001/
ProxyPass /identity_admin uwsgi://127.0.0.1:35358/
"""
#: As uWSGI's and nginx's own guides have it.
_SITE = """\
server {
    listen 5000;
    server_name controller;
    location / {
        include uwsgi_params;
        uwsgi_pass 127.0.0.1:5001;
    }
}
"""
_GUIDE = """\
[DEFAULT]
log_dir = /var/log/keystone
[database]
connection = mysql+pymysql://keystone:KEYSTONE_DBPASS@controller/keystone
[token]
provider = fernet
"""
_UNIT = """\
[Unit]
Description=Keystone
[Service]
User=keystone
ExecStart=/opt/keystone/bin/uwsgi --ini /etc/keystone/keystone-uwsgi-public.ini
[Install]
WantedBy=multi-user.target
"""
#: Debian's own package of Keystone 22 (2:22.0.2-0+deb12u6): /etc/keystone/keystone-uwsgi.ini
#: without its comments, and what its unit and its script for the start say.
_DEBIAN_INI = """\
[uwsgi]
buffer-size = 65535
rem-header = Content-Length
master = true
thunder-lock = true
plugins = python3,apparmor
apparmor-profile = keystone
lazy-apps = true
paste-logger = true
no-orphans = true
die-on-term = true
enable-threads = true
processes = 8
threads = 32
listen = 100
logto = /var/log/keystone/keystone.log
name = keystone-api
uid = keystone
gid = keystone
chdir = /var/lib/keystone
wsgi-file = /usr/bin/keystone-wsgi-public
"""
_DEBIAN_UNIT = """\
[Service]
User=keystone
Group=keystone
Type=simple
WorkingDirectory=~
ExecStart=/etc/init.d/keystone systemd-start
Restart=on-failure
LimitNOFILE=65535
TimeoutStopSec=15
"""
_COPIED = (
    "/etc/nginx", "/etc/haproxy", "/etc/memcached.conf", "/etc/debian_version", "/etc/sysctl.conf",
    "/etc/sysctl.d", "/usr/lib/sysctl.d", "/etc/security/limits.conf",
    "/lib/systemd/system/nginx.service", "/lib/systemd/system/haproxy.service",
    "/lib/systemd/system/memcached.service", "/lib/systemd/system/apache2.service",
)  # fmt: skip


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        real = root / path.lstrip("/")
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(text, encoding="utf-8")
        real.chmod(0o640)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What the packages brought, and Keystone's own package as pip left it in a virtualenv."""
    program("nginx", "nginx")
    for path in _COPIED:
        here, there = Path(path), tmp_path / path.lstrip("/")
        if here.is_dir():
            shutil.copytree(here, there, symlinks=True)
        elif here.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
    site = Path(next(x for x in sys.path if x.endswith("site-packages")))
    packages = tmp_path / "opt/keystone/lib/python3.11/site-packages"
    for pattern in ("keystone-*.dist-info", "uwsgi-*.dist-info", "keystone/wsgi"):
        for found in site.glob(pattern):
            shutil.copytree(found, packages / found.relative_to(site))
    write(
        tmp_path,
        {
            "/etc/keystone/keystone.conf": _GUIDE,
            "/etc/keystone/fernet-keys/0": "a",
            "/etc/keystone/fernet-keys/1": "b",
            "/opt/keystone/bin/uwsgi": "",
            "/usr/sbin/nginx": "",
            "/usr/sbin/haproxy": "",
            "/usr/bin/memcached": "",
            "/usr/share/memcached/scripts/systemd-memcached-wrapper": "",
            "/proc/sys/net/core/somaxconn": "4096\n",
        },
    )
    (tmp_path / "etc/keystone/fernet-keys").chmod(0o700)
    for key in (tmp_path / "etc/keystone/fernet-keys").iterdir():
        key.chmod(0o600)
    return tmp_path


def findings(
    root: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, list[dict[str, object]]]:
    """What the doctor tells of a root, by code and level."""
    known = versions.find(Path(sys.prefix)).by_name
    assumed = [
        word
        for name in ("nginx", "apache")
        if known[name].how == "found"
        for word in ("--assume", f"{name}={known[name].text}")
    ]
    main(["doctor", "--root", str(root), "--json", *assumed, *options])
    page = json.loads(capsys.readouterr().out)
    found: dict[str, list[dict[str, object]]] = {}
    for one in page["findings"]:
        found.setdefault(f"{one['level']} {one['code']}", []).append(one)
    assert "KEYSTONE_DBPASS" not in json.dumps(page)
    assert not [x for x in page["not_looked_at"] if "fault" in x["why"]]
    return found


#: Of uWSGI and Keystone as they come, whatever is in front.
_ALWAYS = {
    "error U02",  # SIGTERM reloads
    "warning K05",  # no public_endpoint
    "warning K10",  # no cache
    "warning S03",  # not started again
    "warning U05",  # no harakiri
    "warning U10",  # not strict
    "warning U15",  # no need-app
    "info D05",  # no TLS to the database
    "info S05",  # Type=simple
    "info U18",  # nothing replaces a worker that grows
    "info U27",  # no single-interpreter
}


def test_nginx_and_keystones_own_uwsgi_file(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        root,
        {
            "/etc/keystone/keystone-uwsgi-public.ini": _PUBLIC,
            "/etc/systemd/system/keystone.service": _UNIT,
            "/etc/nginx/sites-enabled/keystone": _SITE,
        },
    )
    told = findings(root, capsys)
    assert set(told) == _ALWAYS | {
        "error N06",  # X-Forwarded-For of the client
        "error N10",  # Debian's TLSv1 and TLSv1.1
        "error X12",  # Debian's 768 connections, 1024 files
        "warning N01",  # Debian's worker_connections 768
        "warning N03",  # uwsgi_buffer_size
        "warning N07",  # nothing limits logins
    }
    (tls,) = told["error N10"]
    assert tls["where"][0]["file"] == "/etc/nginx/nginx.conf"  # type: ignore[index]
    (forwarded,) = told["error N06"]
    # In the block that has include uwsgi_params, whose lines would else be lost.
    assert forwarded["lines"] == [
        "# in location / of /etc/nginx/sites-enabled/keystone:4",
        "uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;",
    ]
    # nginx takes what is there: the faults are not of its syntax.
    shutil.rmtree(root / "etc/nginx/modules-enabled")
    assert refused(root, [root / "etc/nginx/nginx.conf"]) == ""


def test_apache_and_keystones_own_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "etc/nginx")
    write(
        root,
        {
            **APACHE_FILES,
            "/etc/apache2/apache2.conf": APACHE_CONF.replace("Timeout 90", "Timeout 300"),
            "/etc/apache2/sites-enabled/uwsgi-keystone.conf": _HTTPD,
            "/etc/keystone/keystone-uwsgi-public.ini": _PUBLIC,
            "/etc/systemd/system/keystone.service": _UNIT,
        },
    )
    told = findings(root, capsys)
    assert set(told) == _ALWAYS | {"warning A12", "warning A15"}
    assert len(told["warning A12"]) == 4
    assert refused(root, [root / "etc/apache2/apache2.conf"]) == ""


def test_debians_own_keystone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its package serves by itself at all addresses, with 256 requests at a time."""
    shutil.rmtree(root / "etc/nginx")
    shutil.rmtree(root / "opt")
    write(
        root,
        {
            "/usr/lib/python3/dist-packages/keystone-22.0.2.egg-info/PKG-INFO": "",
            "/usr/bin/keystone-wsgi-public": "",
            "/var/lib/keystone/x": "",
            "/lib/systemd/system/keystone.service": _DEBIAN_UNIT,
            "/etc/init.d/keystone": "#!/bin/sh\nUWSGI_PORT=5000\n"
            "UWSGI_INI_PATH=/etc/keystone/keystone-uwsgi.ini\n",
            "/etc/keystone/keystone-uwsgi.ini": _DEBIAN_INI,
        },
    )
    told = findings(
        root, capsys, "--assume", "uwsgi=2.0.21", "--database-connections", "151",
        "--memcached-connections", "1024",
    )  # fmt: skip
    assert {
        "error V01",  # of 22.0.2
        "error X05",  # 15 s, and requests have 60
        "error X07",  # 8 x 32 connections
        "warning U03",  # requests are cut off
        "warning U05",
    } <= set(told)
    (stop,) = told["error X05"]
    assert stop["what"] == "TimeoutStopSec 15 s is not above worker-reload-mercy 60"
    assert "error U20" not in told
