"""The readers: what they follow, and what they say of files that are not what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfront.gateway.doctor.readers import systemd, uwsgi
from keyfront.gateway.doctor.readers.files import Files
from keyfront.gateway.doctor.settings import Place, seconds, size
from support.doctor.deployments import DEBIAN_NGINX, DEVSTACK, KOLLA, LDAP_GALERA, LOOPBACK
from support.doctor.machines import Machine

_INI = "/etc/keystone/keystone-uwsgi.ini"


def read(tmp_path: Path, files: dict[str, str], path: str, words: list[str] | None = None):  # type: ignore[no-untyped-def]
    Machine(files=files).make(tmp_path)
    found = Files(tmp_path)
    return uwsgi.read(found, path, words), found


@pytest.mark.parametrize(
    "path",
    ["/here/file", "//here/file", "/here/../../here/./file", "/there/file", "/down/up/there/file"],
)
def test_no_path_leads_out_of_the_root(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    (root / "here").mkdir(parents=True)
    (root / "down").mkdir()
    (root / "here/file").write_text("its own")
    (root / "there").symlink_to("//here")
    (root / "down/up").symlink_to("../../..")
    assert Files(root).text(path) == "its own"
    assert Files(root).glob(f"{path[:-1]}?") == [str(Path(path))]


def test_uwsgi_inherits_fills_in_and_loops(tmp_path: Path) -> None:
    conf, found = read(
        tmp_path,
        {
            "/etc/uwsgi/keystone.ini": """\
; a comment
[other]
processes = 99
[uwsgi]
set-ph = base=/run/uwsgi
ini = common.ini
socket = %(base)/%n.sock
for = one two
pythonpath = /opt/%(_)
endfor =
if-env = MISSING
threads = 99
endif =
if-not-env = MISSING
threads = 4
endif =
workers = 2
listen = %(processes * 10)
env = A=B
logger = $(A)
need-app
""",
            "/etc/uwsgi/common.ini": "[uwsgi]\nprocesses = 8\nharakiri = @(/etc/uwsgi/limit)\n",
            "/etc/uwsgi/limit": "45\n",
        },
        "/etc/uwsgi/keystone.ini",
        ["/usr/bin/uwsgi", "--ini", "/etc/uwsgi/keystone.ini", "--buffer-size=65535", "--strict"],
    )
    settings = conf.settings
    assert (conf.processes, conf.threads) == (2, 4)
    assert settings.last("socket").value == "/run/uwsgi/keystone.sock"
    assert settings.number("harakiri", default=0) == 45
    assert settings.last("harakiri").place == Place("/etc/uwsgi/common.ini", 3)
    assert [x.value for x in settings.all("pythonpath")] == ["/opt/one", "/opt/two"]
    assert settings.number("listen", default=0) == 80
    assert settings.last("logger").value == "B"
    assert settings.on("need-app")
    assert settings.on("strict")
    assert found.malformed == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "keystone.yaml",
            "uwsgi:\n  processes: 3\n  socket: [/run/a, /run/b]\n  lazy-apps: true\n",
        ),
        (
            "keystone.json",
            '{"uwsgi": {\n "processes": 3,\n "socket": ["/run/a", "/run/b"], "lazy-apps": true}}',
        ),
    ],
)
def test_uwsgi_in_yaml_and_json(name: str, text: str, tmp_path: Path) -> None:
    conf, _ = read(tmp_path, {f"/etc/uwsgi/{name}": text}, f"/etc/uwsgi/{name}")
    assert conf.processes == 3
    assert [x.value for x in conf.settings.all("socket")] == ["/run/a", "/run/b"]
    assert conf.settings.on("lazy-apps")
    assert conf.settings.last("processes").place.line == 2


def test_a_file_that_inherits_from_itself_ends(tmp_path: Path) -> None:
    _, found = read(tmp_path, {"/a.ini": "[uwsgi]\nini = /a.ini\n"}, "/a.ini")
    assert "itself" in found.unread[0].why


def test_drop_ins_add_and_take_away(tmp_path: Path) -> None:
    Machine(
        files={
            "/usr/lib/systemd/system/nginx.service": "[Service]\n"
            "ExecStart=/usr/sbin/nginx -g 'daemon on; \\\n    master_process on;'\n"
            "TimeoutStopSec=5\n",
            "/etc/systemd/system/nginx.service.d/10-a.conf": "[Service]\nExecStart=\n"
            "ExecStart=/usr/sbin/nginx -c /x\n",
            "/etc/systemd/system/nginx.service.d/20-b.conf": "[Service]\nTimeoutStopSec=1min 30s\n",
        }
    ).make(tmp_path)
    unit = systemd.read(Files(tmp_path), "nginx.service")
    assert unit is not None
    assert unit.command == "/usr/sbin/nginx -c /x"
    assert len(unit.service.all("ExecStart")) == 1
    stop = unit.service.last("TimeoutStopSec")
    assert stop is not None
    assert seconds(stop.value) == 90
    assert stop.place == Place("/etc/systemd/system/nginx.service.d/20-b.conf", 2)


def test_what_systemctl_cat_printed(tmp_path: Path) -> None:
    Machine(
        files={
            "/tmp/unit": "# /lib/systemd/system/uwsgi.service\n[Service]\n"
            "ExecStart=/usr/bin/uwsgi --ini /x.ini\n\n"
            "# /etc/systemd/system/uwsgi.service.d/a.conf\n[Service]\nKillMode=process\n"
        }
    ).make(tmp_path)
    unit = systemd.read_file(Files(tmp_path), "/tmp/unit")
    assert unit is not None
    assert unit.name == "uwsgi.service"
    mode = unit.service.last("KillMode")
    assert mode is not None
    assert mode.place == Place("/etc/systemd/system/uwsgi.service.d/a.conf", 3)


def test_apache_follows_includes_conditions_and_variables(tmp_path: Path) -> None:
    machine = DEVSTACK.append(
        "/etc/apache2/apache2.conf",
        "Define port 5000\n<IfModule !mpm_event_module>\nMaxRequestWorkers 1\n</IfModule>\n"
        "<IfDefine port>\nListen ${port}\n</IfDefine>\n<IfModule nowhere_module>\n<IfModule "
        "x>\nListen 1\n"
        "</IfModule>\n</IfModule>\n",
    )
    found = machine.found(tmp_path)
    assert found.apache is not None
    assert [x.value for x in found.apache.all("listen")] == ["80", "5000"]
    workers = found.apache.last("maxrequestworkers")
    assert workers is not None
    assert workers.place == Place("/etc/apache2/mods-enabled/mpm_event.conf", 5)
    user = found.apache.last("user")
    assert user is not None
    assert user.value == "www-data"
    assert found.malformed == []


#: A machine, a file of it, what is written there, the line, a part of what is expected.
MALFORMED = [
    (KOLLA, "/etc/keystone/keystone.conf", "[DEFAULT]\ndebug\n", 2, "NAME = VALUE"),
    (KOLLA, "/etc/keystone/keystone.conf", "[DEFAULT\n", 1, "must end with ]"),
    (KOLLA, _INI, "[uwsgi]\nmaster = true\n[uwsgi2\n", 3, "a ] at the end"),
    (KOLLA, _INI, "master = true\n", 1, "[uwsgi] first"),
    (KOLLA, _INI, "[uwsgi]\nini = gone.ini\n", 2, "a file at /etc/keystone/gone.ini"),
    (
        DEBIAN_NGINX,
        "/etc/nginx/sites-enabled/keystone",
        "server {\n    listen 80\n}\n",
        2,
        "a ; at the end",
    ),
    (DEBIAN_NGINX, "/etc/nginx/sites-enabled/keystone", "server {\n    listen 80;\n", 2, '"}"'),
    (DEVSTACK, "/etc/apache2/apache2.conf", "<VirtualHost *:80>\nListen 80\n", 1, "</VirtualHost>"),
    (
        DEVSTACK,
        "/etc/apache2/apache2.conf",
        "Listen 80\n</VirtualHost>\n",
        2,
        "<VirtualHost> before",
    ),
    (
        DEVSTACK,
        "/etc/apache2/apache2.conf",
        "<Location />\n</Directory>\n</Location>\n",
        2,
        "</Location>",
    ),
    (
        DEVSTACK,
        "/etc/apache2/apache2.conf",
        "Include gone.conf\n",
        1,
        "a file at /etc/apache2/gone.conf",
    ),
    (KOLLA, "/etc/haproxy/haproxy.cfg", "maxconn 5\n", 1, "a section first"),
    (KOLLA, "/etc/haproxy/haproxy.cfg", 'global\n    description "open\n', 2, "closing quote"),
    (
        DEBIAN_NGINX,
        "/etc/systemd/system/keystone-uwsgi.service",
        "[Service]\nType\n",
        2,
        "NAME = VALUE",
    ),
    (LDAP_GALERA, "/etc/my.cnf.d/galera.cnf", "[mysqld\nwsrep_on = ON\n", 1, "a ] at the end"),
    (LOOPBACK, "/etc/keystone/keystone-uwsgi.yaml", "uwsgi: [\n", 2, "YAML"),
    (LOOPBACK, "/etc/keystone/keystone.conf", "\ufeff[DEFAULT]\n", 1, "no byte order mark"),
]


@pytest.mark.parametrize(("machine", "path", "text", "line", "expected"), MALFORMED)
def test_malformed(
    machine: Machine, path: str, text: str, line: int, expected: str, tmp_path: Path
) -> None:
    made = machine.put(path, text).diagnosis(tmp_path)
    told = [x.finding for x in made.results if x.check.code == "F01"]
    assert any(
        x.where[0].path == path and x.where[0].line == line and expected in x.what for x in told
    ), told
    # The other layers are looked at all the same.
    assert len(made.right) > 10
    assert made.status == 1


@pytest.mark.parametrize(
    "path",
    [
        _INI,
        "/etc/keystone/keystone.conf",
        "/etc/nginx/nginx.conf",
        "/etc/systemd/system/keystone-uwsgi.service",
    ],
)
@pytest.mark.parametrize(
    "text", ["\x00\xff\x1b[2J", "[" * 2000, "{" * 500, "a = b\\\n" * 50, "%(" * 300, ""]
)
def test_no_file_ends_the_doctor(path: str, text: str, tmp_path: Path) -> None:
    made = DEBIAN_NGINX.put(path, text).diagnosis(tmp_path)
    assert made.right


@pytest.mark.parametrize(
    ("text", "value"),
    [("60", 60), ("1m 30s", 90), ("500ms", 0.5), ("infinity", None), ("1h", 3600), ("x", None)],
)
def test_seconds(text: str, value: float | None) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("64k", 65536), ("1G", 1 << 30), ("0", 0), ("off", None)]
)
def test_size(text: str, value: int | None) -> None:
    assert size(text) == value


def test_comments_before_the_end_of_a_block_are_none_of_nginxs_directives(tmp_path: Path) -> None:
    """As Debian's nginx.conf has them."""
    machine = DEBIAN_NGINX.swap(
        "/etc/nginx/nginx.conf", "worker_connections 4096;",
        "worker_connections 4096;\n    # multi_accept on;",
    )
    assert machine.found(tmp_path).malformed == []


def test_debians_script_that_starts_uwsgi_belongs_to_its_unit(tmp_path: Path) -> None:
    machine = LOOPBACK.put(
        "/lib/systemd/system/keystone.service",
        "[Service]\nExecStart=/etc/init.d/keystone systemd-start\nTimeoutStopSec=15\n",
    ).put("/etc/init.d/keystone", f"#!/bin/sh\nUWSGI_INI_PATH={_INI}\n")
    made = machine.diagnosis(tmp_path, "X05")
    assert [x.finding.what for x in made.results] == [
        "TimeoutStopSec 15 s is not above worker-reload-mercy 60"
    ]
