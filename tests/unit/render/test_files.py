"""What ``keyfront render`` puts into files: numbers with reasons, headers, the same every time."""

from __future__ import annotations

import configparser
import importlib.resources
import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from keyfront import deploy
from keyfront.common.machine import Machine
from keyfront.gateway.node import drain
from keyfront.gateway.plan.compute import Plan, plan
from keyfront.gateway.plan.reasons import Number
from keyfront.gateway.plan.workload import PROFILES, Workload
from keyfront.gateway.render.lineups import SERVERS, TEMPLATES, render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.render.versions import HYBRID, NEWEST, Version, Versions
from keyfront.gateway.render.writer import File, body, fill, is_untouched, with_header

TEMPLATE_FOLDER = Path(str(importlib.resources.files(deploy)))
PLAN = plan(Machine(cores=2, memory=4 * 2**30), Workload())
TLS: dict[str, object] = {
    "certificate": Path("/etc/keyfront/tls/keyfront.crt"),
    "key": Path("/etc/keyfront/tls/keyfront.key"),
}
NGINX = frozenset({"http_ssl_module", "http_v2_module", "http_realip_module"})
UWSGI = frozenset({"route-run", "https-socket"})


def versions(**texts: str) -> Versions:
    built = {"nginx": NGINX, "uwsgi": UWSGI}
    return Versions(
        by_name={
            name: Version(
                name=name, text=texts.get(name, newest), how="assumed",
                features=built.get(name, frozenset()),
            )
            for name, newest in NEWEST.items()
        }
    )


def settings_of(server: str = "nginx+uwsgi", **values: object) -> Settings:
    given: dict[str, object] = {
        "folder": Path("/etc/keyfront"), "server": server, "virtualenv": Path("/opt/keyfront"),
        "web_user": "www-data", "web_group": "www-data", **values,
    }
    return Settings(**given)  # type: ignore[arg-type]


def files(
    server: str = "nginx+uwsgi", *, made: Plan = PLAN, asked: Versions | None = None,
    **values: object,
) -> dict[str, File]:
    return {
        file.path: file for file in render(made, settings_of(server, **values), asked or versions())
    }


def lines(file: File) -> list[str]:
    """The lines that are not comments."""
    found = (line.strip() for line in file.text.splitlines())
    return [line for line in found if line and not line.startswith("#")]


def prose(text: str) -> str:
    """The comments as one line."""
    return " ".join(
        line.strip().lstrip("#").strip() for line in text.splitlines() if line.strip()[:1] == "#"
    )


def uwsgi(**values: object) -> list[str]:
    return lines(files(**values)["uwsgi.ini"])  # type: ignore[arg-type]


def source_of(path: Path) -> str:
    """A template with those that it extends or includes."""
    text = path.read_text(encoding="utf-8")
    others = re.findall(r'{%-? *(?:extends|include) "([^"]+)"', text)
    return "\n".join([text, *(source_of(TEMPLATE_FOLDER / other) for other in others)])


def test_every_number_that_a_template_names_has_its_reason_there() -> None:
    for path in sorted(TEMPLATE_FOLDER.glob("production/**/*.j2")):
        if path.name in ("daemon.j2", "event.j2"):
            continue  # parts of others
        text = source_of(path)
        comments = "\n".join(re.findall(r"^ *#.*$", text, re.MULTILINE))
        code = re.sub(r"{%.*?%}|^ *#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        used = set(re.findall(r"\bn\.(\w+\.\w+)\.value", code))
        # by its reason, or in words that name it
        explained = set(re.findall(r"\bn\.(\w+\.\w+) \| why", text))
        explained |= set(re.findall(r"\b(\w+\.\w+)\b", comments))
        assert used <= explained, path


@pytest.mark.parametrize("server", SERVERS)
def test_the_reasons_are_in_the_rendered_files(server: str) -> None:
    told = files(server, **(TLS if server != "uwsgi" else {}), haproxy=("192.0.2.1:5000",))
    everything = prose("\n".join(file.text for file in told.values()))
    for source in {x.source for x in TEMPLATES if x.path in told and x.when(settings_of(server))}:
        text = (TEMPLATE_FOLDER / source).read_text(encoding="utf-8")
        for name in re.findall(r"^[^%]*{{ n\.(\w+\.\w+) \| why", text, re.MULTILINE):
            if name.startswith(("uwsgi.gevent", "uwsgi.max_", "uwsgi.login_p", "nginx.login",
                                "mod_wsgi.login_p", "memcached")):
                continue  # in branches
            assert PLAN[name].why in everything, (source, name)


@pytest.mark.parametrize("path", ["uwsgi.ini", "system/etc/keystone/keystone.conf.d/keyfront.conf",
                                  "system/etc/sysctl.d/60-keyfront.conf"])
def test_every_number_stands_below_a_comment(path: str) -> None:
    explained = False
    for line in files(memcached=("192.0.2.9:11211",))[path].text.splitlines():
        if line.startswith("#"):
            explained = True
        elif not line or line.startswith("["):
            explained = False
        elif re.match(r"[\w.-]+ ?= ?\d", line):
            assert explained, line


@pytest.mark.once
@pytest.mark.parametrize(
    ("server", "profile", "tls", "balanced", "memory"),
    list(itertools.product(SERVERS, PROFILES, (False, True), (False, True), (1, 512))),
)
def test_every_combination_renders(
    server: str, profile: str, tls: bool, balanced: bool, memory: int
) -> None:
    if server == "uwsgi" and tls:
        return
    made = plan(Machine(cores=2, memory=memory * 2**30), Workload(), PROFILES[profile])
    options = TLS | {"hsts": 60, "redirect": True, "public_host": "cloud.example.org"}
    told = files(
        server, made=made, json_logs=balanced,
        **(options if tls else {}), **({"haproxy": ("192.0.2.1:5000",)} if balanced else {}),
    )
    for file in told.values():
        assert is_untouched(file.text)
        assert file.text.endswith("\n") and not file.text.endswith("\n\n")
        assert not re.search(r"\{\{|\{%|\{#", file.text)
        settings = re.sub(r"(AllowOverride|Options) None", "", "\n".join(lines(file)))
        assert not re.search(r"\b(None|Undefined|True|False)\b", settings)
        long = [x for x in file.text.splitlines() if x.strip()[:1] == "#" and len(x) > 100]
        assert not long


def test_the_same_bytes_every_time() -> None:
    again = plan(Machine(cores=2, memory=4 * 2**30), Workload())
    assert files() == files(made=again)


def test_the_header_has_the_command_and_fits_in_a_comment() -> None:
    command = "keyfront render /etc/keyfront " + "--nodes 3 " * 20
    text = files(command=command)["nginx.conf"].text
    head = text.partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") and len(line) <= 100 for line in head)
    assert " ".join(command.split()) in prose("\n".join(head))
    assert f"nginx {NEWEST['nginx']}, as told by --assume" in prose("\n".join(head))


def test_a_server_that_is_not_here_is_said_to_be_assumed() -> None:
    asked = versions()
    newest = replace(asked["nginx"], how="newest")
    asked = Versions(by_name={**asked.by_name, "nginx": newest})
    assert "as none was found on this machine" in prose(files(asked=asked)["nginx.conf"].text)


def test_a_digest_notices_any_change() -> None:
    text = with_header("[a]\nb = 1\n", title="A file.", command="keyfront render /x", versions="x")
    assert is_untouched(text)
    assert body(text) == "[a]\nb = 1\n"
    assert is_untouched(text.replace("b = 1", "b = 2")) is False
    assert is_untouched(text + "\n") is False
    assert is_untouched(text.replace("/x", "/y")) is False
    assert is_untouched("[a]\nb = 1\n") is None


def test_long_comments_are_wrapped_and_nothing_else(tmp_path: Path) -> None:
    reason = "word " * 40 + "end"
    number = Number(name="uwsgi.listen", value=1, unit="", source=reason, breaks="It breaks")
    template = "production/systemd/keyfront-uwsgi.socket.j2"
    numbers = {"uwsgi.listen": number, "uwsgi.login_processes": PLAN["uwsgi.login_processes"]}
    text = fill(template, numbers, settings=settings_of())
    assert number.why in prose(text)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "ListenStream=/run/keyfront/uwsgi.sock" in text.splitlines()


def test_logins_have_workers_of_their_own() -> None:
    made = plan(Machine(cores=4, memory=8 * 2**30, somaxconn=4096), Workload(login_processes=2))
    told = files(made=made)
    ini, nginx = lines(told["uwsgi.ini"]), lines(told["nginx.conf"])
    assert ini[ini.index("socket = /run/keyfront/uwsgi.sock") + 1] == (
        "socket = /run/keyfront/logins.sock"
    )
    assert {"processes = 6", "map-socket = 0:1,2,3,4", "map-socket = 1:5,6"} <= set(ini)
    assert "env = KEYFRONT_LOGIN_PROCESSES=2" in ini and "env = KEYFRONT_LOGIN_LIMIT=4" in ini
    assert "thunder-lock = true" in uwsgi() and "thunder-lock = true" not in ini
    bound = made["nginx.login_in_flight"].value
    assert f"server unix:/run/keyfront/logins.sock max_conns={bound};" in nginx
    assert "uwsgi_pass $workers;" in nginx
    assert "uwsgi_pass application;" in lines(files()["nginx.conf"])
    unit = told["system/etc/systemd/system/keyfront-uwsgi.socket"].text
    assert re.findall("^ListenStream=(.*)$", unit, re.MULTILINE) == [
        "/run/keyfront/uwsgi.sock", "/run/keyfront/logins.sock",
    ]


def test_logins_have_a_port_of_their_own() -> None:
    made = plan(Machine(cores=4, memory=8 * 2**30, somaxconn=4096), Workload(login_processes=2))
    told = files("nginx+uwsgi-tcp", made=made, login_upstream="192.0.2.1:7000")
    assert "socket = 192.0.2.1:7000" in lines(told["uwsgi.ini"])
    assert any(x.startswith("server 192.0.2.1:7000 max_conns=") for x in lines(told["nginx.conf"]))
    unit = told["system/etc/systemd/system/keyfront-uwsgi.socket"].text
    assert "ListenStream=192.0.2.1:7000" in unit.splitlines()


def test_apache_sends_logins_to_workers_of_their_own() -> None:
    made = plan(Machine(cores=2, memory=8 * 2**30, somaxconn=4096), Workload(login_processes=1))
    threads = made["apache.threads_per_child"].value
    apache = files(made=made, server="apache+uwsgi")["apache.conf"].text
    # A quarter stays free to refuse what is more than both may have.
    bounds = [int(bound) for bound in re.findall(r" max=(\d+) ", apache)]
    assert bounds == [threads // 2, threads // 4]
    alone = files(server="apache+uwsgi")["apache.conf"].text
    assert "RewriteRule" in apache and "RewriteRule" not in alone and "mod_rewrite" not in alone


@pytest.mark.parametrize("server", ["mod_wsgi", "prefork+mod_wsgi"])
def test_mod_wsgi_has_daemons_for_logins(server: str) -> None:
    made = plan(Machine(cores=2, memory=8 * 2**30, somaxconn=4096), Workload(login_processes=2))
    told = files(made=made, server=server)
    apache = re.sub(r"\\\n +", "", told["apache.conf"].text)
    one, other = re.findall("^WSGIDaemonProcess (.*)$", apache, re.MULTILINE)
    assert other == one.replace("keyfront ", "keyfront-logins ", 1)
    assert 'environ.setdefault("KEYFRONT_LOGIN_PROCESSES", "2")' in told["keyfront.wsgi"].text
    alone = files(server=server)
    assert "keyfront-logins" not in alone["apache.conf"].text
    assert "LOGIN_PROCESSES" not in alone["keyfront.wsgi"].text


def test_nginx_says_http2_as_its_version_does() -> None:
    old = lines(files(asked=versions(nginx="1.22.1"), listen="*:443", **TLS)["nginx.conf"])
    new = lines(files(asked=versions(nginx="1.25.1"), listen="*:443", **TLS)["nginx.conf"])
    backlog = PLAN["sysctl.somaxconn"].value
    assert f"listen *:443 ssl http2 backlog={backlog};" in old and "http2 on;" not in old
    assert f"listen *:443 ssl backlog={backlog};" in new and "http2 on;" in new


def test_nginx_without_http2_built_in() -> None:
    asked = versions()
    bare = replace(asked["nginx"], features=frozenset({"http_ssl_module"}))
    asked = Versions(by_name={**asked.by_name, "nginx": bare})
    assert not [x for x in lines(files(asked=asked, **TLS)["nginx.conf"]) if "http2" in x]


def test_uwsgi_takes_one_thread_where_more_do_not_stop() -> None:
    assert f"threads = {PLAN['uwsgi.threads'].value}" in uwsgi()
    for broken in ("2.0.25", "2.0.26"):
        assert "threads = 1" in uwsgi(asked=versions(uwsgi=broken))
    assert "threads = 1" not in uwsgi(asked=versions(uwsgi="2.0.27"))


def test_uwsgi_with_greenlets_loads_after_the_fork() -> None:
    greenlets = replace(PLAN["uwsgi.gevent"], value=100)
    made = replace(PLAN, numbers={**PLAN.numbers, "uwsgi.gevent": greenlets})
    found = uwsgi(made=made)
    assert "gevent = 100" in found and "lazy-apps = true" in found
    assert not [line for line in found if line.startswith("threads")]


@pytest.mark.parametrize("server", ["nginx+uwsgi", "nginx+uwsgi-tcp", "apache+uwsgi", "uwsgi"])
def test_uwsgi_always(server: str) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    text = files(server)["uwsgi.ini"].text
    parser.read_string(text)
    options = parser["uwsgi"]
    for name in ("strict", "master", "need-app", "die-on-term", "no-orphans", "stats-no-cores"):
        assert options[name] == "true"
    held = re.findall("^hook-asap = (.*)$", text, re.MULTILINE)
    assert held == ["callint:sighold 15", "callint:sighold 1"]
    for name, number in (("master-start", "15 gracefully_kill_them_all"), ("post-fork", "40 ")):
        hooks = re.findall(f"^hook-{name} = (.*)$", text, re.MULTILINE)
        assert "callint:sigrelse 15" in hooks
        assert any(hook.startswith(f"unix_signal:{number}") for hook in hooks)
    assert int(options["worker-reload-mercy"]) < int(PLAN["timeout.stop"].value)
    # reached by nobody but this machine's user
    assert options["stats"].startswith("/run/keyfront/")
    assert ("http-socket" in options) == (server == "uwsgi")


def test_uwsgi_alone_logs_and_believes_nobody() -> None:
    alone = uwsgi(server="uwsgi", json_logs=True)
    assert "route-run = addvar:HTTP_X_FORWARDED_FOR=${REMOTE_ADDR}" in alone
    assert "logto2 = /var/log/keyfront/uwsgi.log" in alone
    assert not [line for line in alone if line.startswith("disable-logging")]
    # no header is in the format, so no token
    assert not [line for line in alone if line.startswith("logformat") and "var." in line]
    plain = replace(versions()["uwsgi"], features=frozenset())
    asked = Versions(by_name={**versions().by_name, "uwsgi": plain})
    assert not [line for line in uwsgi(server="uwsgi", asked=asked) if "route" in line]


def test_a_queue_at_a_socket_of_its_own_is_bounded_before_it() -> None:
    """The queue of a unix socket refuses at once when it is full: 503 must come earlier."""
    nginx = " ".join(lines(files()["nginx.conf"]))
    in_flight = PLAN["nginx.in_flight"].value
    assert f"server unix:/run/keyfront/uwsgi.sock max_conns={in_flight};" in nginx
    assert "zone application" in nginx
    assert "error_page 502 503 = @later;" in nginx
    listen = int(PLAN["uwsgi.listen"].value)
    threads = int(PLAN["uwsgi.processes"].value) * int(PLAN["uwsgi.threads"].value)
    assert int(in_flight) <= listen + threads


def test_what_a_client_may_not_say_is_dropped() -> None:
    nginx = lines(files()["nginx.conf"])
    for name in ("X_FORWARDED_HOST", "FORWARDED", "X_USER_ID", "X_ROLES", "X_SERVICE_ROLES",
                 "X_IDENTITY_STATUS", "OPENSTACK_SYSTEM_SCOPE", "OIDC_ISS", "PROXY"):
        assert f'uwsgi_param HTTP_{name} "";' in nginx
    assert "uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;" in nginx
    assert not [line for line in nginx if line.startswith("underscores_in_headers")]


def test_only_the_balancers_word_counts() -> None:
    nginx = lines(files(haproxy=("192.0.2.1:5000", "192.0.2.2:5000"))["nginx.conf"])
    trusted = {x.split()[1].rstrip(";") for x in nginx if x.startswith("set_real_ip_from")}
    assert trusted == {"127.0.0.1", "::1", "192.0.2.1", "192.0.2.2"}
    assert not [x for x in lines(files()["nginx.conf"]) if "real_ip" in x]


def test_logs_never_hold_a_header_that_is_a_secret() -> None:
    for json_logs in (False, True):
        text = files(json_logs=json_logs)["nginx.conf"].text
        formats = re.findall(r"log_format.*?;\n", text, re.DOTALL)
        assert len(formats) == 1
        variables = set(re.findall(r"\$(http_\w+|sent_http_\w+|upstream_http_\w+)", formats[0]))
        assert variables == {"http_user_agent", "upstream_http_x_openstack_request_id"}
        assert "$request " not in formats[0] and "$request_uri" not in formats[0]


@pytest.mark.parametrize("hybrid", [False, True])
def test_groups_of_key_exchange(hybrid: bool) -> None:
    """A server does not start with a group that its OpenSSL has not."""
    by_name = {
        name: replace(one, features=one.features | ({HYBRID} if hybrid else set()))
        for name, one in versions().by_name.items()
    }
    asked = Versions(by_name=by_name)
    made = files(asked=asked, **TLS, haproxy=("192.0.2.1:5000",))
    made |= {"apache.conf": files("mod_wsgi", asked=asked, **TLS)["apache.conf"]}
    groups = f"{'?X25519MLKEM768:' if hybrid else ''}X25519:prime256v1:secp384r1"
    assert f"ssl_ecdh_curve {groups};" in lines(made["nginx.conf"])
    assert f"ssl-default-bind-curves {groups}" in lines(made["haproxy.cfg"])
    assert f"SSLOpenSSLConfCmd Groups {groups}" in lines(made["apache.conf"])


def test_hsts_is_in_every_answer_or_in_none() -> None:
    """An ``add_header`` of a location hides those around it."""
    text = files(**TLS, hsts=60)["nginx.conf"].text
    assert 'add_header Strict-Transport-Security "max-age=60" always;' in text
    # in each location that adds a header of its own
    for block in re.findall(r"location @\w+ {(.*?)\n        }", text, re.DOTALL):
        assert "Strict-Transport-Security" in block
    assert "Strict-Transport" not in "\n".join(lines(files(**TLS)["nginx.conf"]))


def test_units_stop_after_the_mercy_and_are_hardened() -> None:
    unit = lines(files()["system/etc/systemd/system/keyfront-uwsgi.service"])
    assert f"TimeoutStopSec={PLAN['timeout.stop'].value}" in unit
    assert int(PLAN["timeout.stop"].value) > int(PLAN["timeout.mercy"].value)
    for line in ("KillMode=mixed", "NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes",
                 "CapabilityBoundingSet=", "SystemCallFilter=@system-service", "ProtectHome=yes",
                 f"LimitNOFILE={PLAN['limits.nofile'].value}", "RuntimeDirectoryPreserve=yes"):
        assert line in unit
    socket = lines(files()["system/etc/systemd/system/keyfront-uwsgi.socket"])
    assert f"Backlog={PLAN['uwsgi.listen'].value}" in socket and "SocketMode=0660" in socket


def test_a_unit_sees_what_lies_in_a_home_or_in_tmp() -> None:
    path = "system/etc/systemd/system/keyfront-uwsgi.service"
    unit = lines(files(virtualenv=Path("/home/op/venv"))[path])
    assert "ProtectHome=read-only" in unit and "ProtectHome=yes" not in unit
    unit = lines(files(folder=Path("/tmp/try"))[path])
    assert "PrivateTmp=yes" not in unit


def test_a_low_port_is_the_only_capability() -> None:
    path = "system/etc/systemd/system/keyfront-uwsgi.service"
    assert "CapabilityBoundingSet=" in lines(files("uwsgi")[path])
    low = lines(files("uwsgi", listen="*:80")[path])
    assert "CapabilityBoundingSet=CAP_NET_BIND_SERVICE" in low


def test_old_advice_is_refused_and_explained() -> None:
    kernel = files()["system/etc/sysctl.d/60-keyfront.conf"]
    assert {line.split()[0] for line in lines(kernel)} == {
        "net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog",
    }
    for old in ("tcp_tw_recycle", "tcp_max_tw_buckets = 5000", "tcp_syncookies = 0", "tcp_mem",
                "somaxconn = 262144", "limits.conf"):
        assert old in kernel.text
    every = "\n".join(line for file in files().values() for line in lines(file))
    for old in ("use epoll", "accept_mutex", "ssl_stapling", "copytruncate", "limits.conf"):
        assert old not in every


def test_keystone_is_told_where_its_snippet_is() -> None:
    beside = files(config=Path("/srv/keystone"))
    assert "keystone.conf" in beside
    assert ("env = OS_KEYSTONE_CONFIG_FILES=keystone.conf;/etc/keyfront/keystone.conf"
            in lines(beside["uwsgi.ini"]))
    assert "keystone.conf" not in files()
    assert not [line for line in uwsgi() if "CONFIG_FILES" in line]


def test_keystones_caches_are_where_memcached_is() -> None:
    path = "system/etc/keystone/keystone.conf.d/keyfront.conf"
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(files(memcached=("192.0.2.9:11211", "[2001:db8::9]:11211"))[path].text)
    assert parser["cache"]["memcache_servers"] == "192.0.2.9:11211,[2001:db8::9]:11211"
    assert parser["cache"]["memcache_pool_maxsize"] == str(PLAN["memcached.pool_maxsize"].value)
    # what the operator set himself is not undone
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(files()[path].text)
    assert "cache" not in parser
    assert parser["database"]["max_pool_size"] == str(PLAN["database.max_pool_size"].value)


def test_the_command_cannot_end_its_comment() -> None:
    text = files(command=f"keyfront render {shlex.quote('/a b')}")["uwsgi.ini"].text
    assert lines(File(path="x", text=text))[0] == "[uwsgi]"


@pytest.mark.parametrize("server", ("nginx+uwsgi", "mod_wsgi"))
def test_a_node_behind_a_balancer_drains_when_it_is_stopped(server: str) -> None:
    unit = "keyfront-apache" if server == "mod_wsgi" else "keyfront-uwsgi"
    path = f"system/etc/systemd/system/{unit}.service"
    commands = [line for line in lines(files(server)[path]) if " drain " in line]
    assert commands == []
    balanced = files(server, trusted_proxies=("192.0.2.10",))
    start, stop = (line for line in lines(balanced[path]) if " drain " in line)
    assert start.startswith("ExecStartPre=-") and start.endswith(" --undo")
    assert stop.startswith("ExecStop=-") and " --timeout " in stop
    # before anything is told to end
    (limit,) = (line for line in lines(balanced[path]) if line.startswith("TimeoutStopSec="))
    assert int(limit.partition("=")[2]) > int(stop.rpartition(" ")[2])


def test_haproxy_asks_who_is_ready_and_else_who_lives() -> None:
    text = files(haproxy=("192.0.2.1:5000",))["haproxy.cfg"].text
    ready, living = text.split("\nbackend keyfront_")[-2:]
    assert "uri /readyz " in ready
    assert "uri /livez " in living
    assert "use_backend keyfront_living if { nbsrv(keyfront_nodes) eq 0 }" in text


@pytest.mark.parametrize("server", ("nginx+uwsgi", "mod_wsgi"))
def test_the_node_is_found_by_the_servers_own_file(server: str, tmp_path: Path) -> None:
    made = files(server)
    for name in ("uwsgi.ini", "apache.conf", "keyfront.wsgi"):
        if name in made:
            (tmp_path / name).write_text(made[name].text.replace("/etc/keyfront/", f"{tmp_path}/"))
    file = tmp_path / ("apache.conf" if server == "mod_wsgi" else "uwsgi.ini")
    assert drain.folder_of(file) == Path("/run/keyfront/node")
