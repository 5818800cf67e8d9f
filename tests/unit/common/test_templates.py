"""Every packaged template renders, in each of its branches, and nothing is left undefined."""

from __future__ import annotations

import ast
import configparser
import importlib.resources
import re
from pathlib import Path

import jinja2
import pytest

from keyfront import deploy
from keyfront.common.templates import render, unit_word
from keyfront.gateway.serve import lineups, state

FOLDER = Path(str(importlib.resources.files(deploy)))
# Those of `keyfront serve`; those of `keyfront render` (production/) have tests of their own.
TEMPLATES = sorted(
    name
    for name in (path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.j2"))
    if not name.startswith("production/")
)

VALUES: dict[str, object] = {
    "version": "1.2.3",
    "target": "config:/etc/keyfront/keystone.ini",
    "listen": "127.0.0.1:5000",
    "run": "/run/keyfront",
    "log": "/var/log/keyfront",
    "virtualenv": "/opt/keyfront",
    "processes": 3,
    "threads": 2,
    "gevent": None,
    "harakiri": 60,
    "stop_timeout": 17,
    "backlog": 128,
    "somaxconn": 4096,
    "unix_socket": None,
    "socket_group": None,
    "user": None,
    "group": None,
    "stats_socket": "/run/keyfront/stats.sock",
    "modules": "/usr/lib/apache2/modules",
    "mod_wsgi": "/opt/keyfront/mod_wsgi.so",
    "script": "/run/keyfront/keyfront.wsgi",
    "environment": {"OS_KEYSTONE_CONFIG_DIR": '/srv/a "b"', "OS_KEYSTONE_CONFIG_FILES": ""},
    "connection": "sqlite:////srv/keystone.sqlite?plugin=keyfront",
    "state": "/srv",
    "endpoint": "http://127.0.0.1:5000/v3",
    "url": "http://127.0.0.1:5000/",
    "password": "pass-word",
    "path": "/srv/openrc",
}
FRONT = {"unix_socket": "/run/keyfront/uwsgi.sock"}
ROOT = {"user": "www-data", "group": "www-data", "socket_group": "www-data"}
BRANCHES: list[dict[str, object]] = [
    {},
    {"gevent": 100},
    FRONT,
    {**FRONT, **ROOT},
    {**FRONT, **ROOT, "gevent": 100},
    ROOT,
]


def filled(template: str, **values: object) -> str:
    return render(template, **{**VALUES, **values})


def uwsgi(**values: object) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters=("=",))
    # Of hooks there may be several; anything else is there once.
    lines = filled("serve/uwsgi/keyfront.ini.j2", **values).splitlines()
    parser.read_string("\n".join(line for line in lines if not line.startswith("hook-")))
    assert parser.sections() == ["uwsgi"]
    return dict(parser["uwsgi"])


def directives(text: str) -> list[str]:
    """The lines of a configuration that are not comments, without indentation."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_the_templates_are_found() -> None:
    assert len(TEMPLATES) >= 9
    assert "serve/uwsgi/keyfront.ini.j2" in TEMPLATES


@pytest.mark.parametrize("values", BRANCHES, ids=lambda values: "+".join(values) or "plain")
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders(template: str, values: dict[str, object]) -> None:
    # never without uWSGI behind them
    if template.startswith(("serve/nginx/", "serve/apache/proxy")):
        values = {**FRONT, **values}
    text = filled(template, **values)
    assert text.endswith("\n")
    assert not re.search(r"\{\{|\{%|\{#", text)
    assert not re.search(r"\b(None|Undefined)\b", "\n".join(directives(text)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_value_left_out_is_an_error(template: str) -> None:
    with pytest.raises(jinja2.UndefinedError):
        render(template)


# What a folder may be called, and how each server is told of it.
ODD = "/opt/key front ü/50% \"x\""
ODD_QUOTED = '/opt/key front ü/50% \\"x\\"'


@pytest.mark.parametrize(
    ("template", "lines"),
    [
        (
            "serve/uwsgi/keyfront.ini.j2",
            [
                'virtualenv = /opt/key front ü/50%% "x"',
                'socket = /opt/key front ü/50%% "x"/uwsgi.sock',
                'stats = /opt/key front ü/50%% "x"/stats.sock',
            ],
        ),
        (
            "serve/nginx/nginx.conf.j2",
            [
                f'pid "{ODD_QUOTED}/nginx.pid";',
                f'error_log "{ODD_QUOTED}/nginx.error.log" warn;',
                f'access_log "{ODD_QUOTED}/nginx.access.log" combined buffer=32k flush=1s;',
                f'uwsgi_temp_path "{ODD_QUOTED}/nginx-uwsgi";',
                f'uwsgi_pass "unix:{ODD_QUOTED}/uwsgi.sock";',
            ],
        ),
        (
            "serve/apache/mod_wsgi.conf.j2",
            [
                f'ServerRoot "{ODD_QUOTED}"',
                f'ErrorLog "{ODD_QUOTED}/apache.error.log"',
                f'LoadModule wsgi_module "{ODD_QUOTED}/mod_wsgi.so"',
                f'python-home="{ODD_QUOTED}" display-name=%{{GROUP}} lang=C.UTF-8 '
                "locale=C.UTF-8 \\",
                f'WSGISocketPrefix "{ODD_QUOTED}/wsgi"',
                f'WSGIScriptAlias / "{ODD_QUOTED}/a.wsgi" process-group=keyfront '
                "application-group=%{GLOBAL}",
            ],
        ),
    ],
)
def test_folders_of_any_name(template: str, lines: list[str]) -> None:
    values: dict[str, object] = dict.fromkeys(("run", "log", "virtualenv"), ODD)
    files = {
        "unix_socket": "uwsgi.sock", "stats_socket": "stats.sock", "mod_wsgi": "mod_wsgi.so",
        "script": "a.wsgi",
    }
    values |= {name: f"{ODD}/{file}" for name, file in files.items()}
    found = directives(filled(template, **values))
    assert [line for line in lines if line not in found] == []


@pytest.mark.parametrize("template", ("serve/keystone/openrc.j2", "serve/keystone/clouds.yaml.j2"))
def test_a_command_to_copy_is_quoted(template: str) -> None:
    assert "'/srv/a b/openrc'" in filled(template, path="/srv/a b/openrc").splitlines()[0]


def test_words_of_units() -> None:
    assert unit_word("/opt/keyfront/bin/uwsgi") == "/opt/keyfront/bin/uwsgi"
    assert unit_word('/o p/50%/$x/"') == '"/o p/50%%/$$x/\\""'


def test_no_such_template() -> None:
    with pytest.raises(FileNotFoundError):
        render("serve/uwsgi/absent.j2")


def test_plan_names_all_that_the_uwsgi_template_takes(tmp_path: Path) -> None:
    folder = state.State(tmp_path)
    lineup = lineups.Lineup(
        state=folder,
        listen="127.0.0.1:5000",
        target="config:x",
        runtime=tmp_path,
        stop_timeout=17,
    )
    folder.run.mkdir()
    text = lineup.render("uwsgi.ini", "serve/uwsgi/keyfront.ini.j2").read_text(encoding="utf-8")
    assert "worker-reload-mercy = 17\n" in text


@pytest.mark.parametrize("values", BRANCHES, ids=lambda values: "+".join(values) or "plain")
def test_uwsgi_always(values: dict[str, object]) -> None:
    options = uwsgi(**values)
    # statistics without the headers of running requests, which hold tokens
    assert options["stats"] == "/run/keyfront/stats.sock"
    assert options["stats-no-cores"] == "true"
    for name in ("strict", "master", "need-app", "enable-threads", "py-call-uwsgi-fork-hooks"):
        assert options[name] == "true"
    assert options["env"] == "KEYFRONT_APP=config:/etc/keyfront/keystone.ini"
    assert options["processes"] == "3"
    assert options["harakiri"] == "60"
    assert options["worker-reload-mercy"] == "17"
    assert options["listen"] == "128"
    assert not {"lazy", "http", "http-to", "cheaper"} & set(options)


def test_uwsgi_threads_or_greenlets() -> None:
    threads, greenlets = uwsgi(), uwsgi(gevent=100)
    assert (threads["threads"], threads["lazy-apps"]) == ("2", "false")
    assert "gevent" not in threads
    assert (greenlets["gevent"], greenlets["lazy-apps"]) == ("100", "true")
    assert "threads" not in greenlets


def test_pyuwsgi_is_told_what_to_start_again() -> None:
    assert "binary-path" not in uwsgi()
    assert uwsgi(python="/opt/keyfront/bin/python")["binary-path"] == "/opt/keyfront/bin/python"


def test_uwsgi_alone_or_behind_a_web_server() -> None:
    alone, behind = uwsgi(**ROOT), uwsgi(**FRONT)
    assert alone["http-socket"] == "127.0.0.1:5000"
    assert alone["add-header"] == "Connection: close"
    assert not {"socket", "chmod-socket", "chown-socket", "log-x-forwarded-for"} & set(alone)
    assert behind["socket"] == "/run/keyfront/uwsgi.sock"
    assert behind["chmod-socket"] == "660"
    assert behind["log-x-forwarded-for"] == "true"
    assert not {"http-socket", "add-header", "chown-socket"} & set(behind)
    assert uwsgi(**FRONT, **ROOT)["chown-socket"] == ":www-data"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("serve/nginx/nginx.conf.j2", "user www-data;"),
        ("serve/apache/proxy_uwsgi.conf.j2", "User www-data"),
        ("serve/apache/mod_wsgi.conf.j2", "User www-data"),
    ],
)
def test_a_web_server_drops_to_a_user_only_from_root(template: str, line: str) -> None:
    assert line in directives(filled(template, **FRONT, **ROOT))
    rootless = directives(filled(template, **FRONT))
    assert not [found for found in rootless if found.lower().startswith(("user ", "group "))]


@pytest.mark.parametrize(
    ("template", "lines"),
    [
        (
            "serve/nginx/nginx.conf.j2",
            [
                "listen 127.0.0.1:5000 backlog=128;",
                'uwsgi_pass "unix:/run/keyfront/uwsgi.sock";',
                "uwsgi_read_timeout 65s;",
                "worker_shutdown_timeout 17s;",
                "uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;",
                'uwsgi_param HTTP_X_FORWARDED_HOST "";',
            ],
        ),
        (
            "serve/apache/proxy_uwsgi.conf.j2",
            [
                "LoadModule proxy_uwsgi_module /usr/lib/apache2/modules/mod_proxy_uwsgi.so",
                "Listen 127.0.0.1:5000",
                "Timeout 65",
                "GracefulShutdownTimeout 17",
                "RequestHeader unset X-Forwarded-Host",
            ],
        ),
        (
            "serve/apache/mod_wsgi.conf.j2",
            [
                'LoadModule wsgi_module "/opt/keyfront/mod_wsgi.so"',
                "WSGIPassAuthorization On",
                "RequestHeader unset Forwarded",
            ],
        ),
        ("serve/keystone/keystone.conf.j2", ["connection = sqlite:////srv/keystone.sqlite?plugin=keyfront"]),
        ("serve/keystone/openrc.j2", ["export OS_PASSWORD='pass-word'"]),
        ("serve/keystone/clouds.yaml.j2", ['password: "pass-word"']),
    ],
)
def test_lines(template: str, lines: list[str]) -> None:
    found = directives(filled(template, **FRONT))
    assert [line for line in lines if line not in found] == []


def test_wsgi_script_is_python_whatever_the_values() -> None:
    text = filled("serve/apache/keyfront.wsgi.j2", target='config:/a "b"\\c')
    literals = {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {'config:/a "b"\\c', '/srv/a "b"', "OS_KEYSTONE_CONFIG_FILES"} <= literals
