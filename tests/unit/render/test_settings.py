"""What an operator may tell of a deployment, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.common.machine import Machine
from keyfront.errors import OptionError
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import Workload
from keyfront.gateway.render.lineups import SERVERS, check
from keyfront.gateway.render.settings import Settings

MACHINE = Machine(cores=4, memory=8 * 2**30, somaxconn=4096)
PLAN = plan(MACHINE, Workload())
TLS: dict[str, object] = {"certificate": Path("/c.crt"), "key": Path("/c.key")}


def settings(**values: object) -> Settings:
    given: dict[str, object] = {"folder": Path("/etc/keyfront"), **values}
    return Settings(**given)  # type: ignore[arg-type]


def test_without_tls_only_this_machine_is_served() -> None:
    assert settings().listen == "127.0.0.1:5000"
    assert settings(**TLS).listen == "*:5000"
    assert settings(**TLS).tls and not settings().tls


def test_what_follows_from_the_rest() -> None:
    assert settings().target == "config:/etc/keyfront/keystone.ini"
    assert settings(user="glance").group == "glance"
    assert settings().socket == "/run/keyfront/uwsgi.sock"
    assert settings(server="nginx+uwsgi-tcp").socket == "127.0.0.1:35357"
    assert settings(web_user="root").web_group == "root"
    assert settings().pid_directory == Path("/run")


def test_balancers_are_where_the_nodes_are_unless_told() -> None:
    nodes = ("192.0.2.1:5000", "[2001:db8::1]:5000")
    assert settings(haproxy=nodes).trusted_proxies == (
        "127.0.0.1", "::1", "192.0.2.1", "2001:db8::1",
    )
    told = settings(haproxy=("node1:5000",), trusted_proxies=("192.0.2.0/24",))
    assert told.trusted_proxies == ("192.0.2.0/24",)
    assert settings().trusted_proxies == ()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--listen", {"listen": "5000"}),
        ("--listen", {"listen": "127.0.0.1:0"}),
        ("--listen", {"listen": "127.0.0.1:70000"}),
        ("--listen", {"listen": "a b:80"}),
        ("--listen", {"listen": "x;\n:80"}),
        ("--upstream", {"upstream": "127.0.0.1"}),
        ("--login-upstream", {"login_upstream": "127.0.0.1"}),
        ("--user", {"user": "root; rm"}),
        ("--user", {"user": ""}),
        ("--group", {"group": "a b"}),
        ("--web-user", {"web_user": "Www"}),
        ("--public-host", {"public_host": 'x"; y'}),
        ("--public-host", {"public_host": "-x"}),
        ("--public-host", {"public_host": "x", "other_hosts": ("",)}),
        ("--public-endpoint", {"public_endpoint": "cloud.example.org"}),
        ("--public-endpoint", {"public_endpoint": "https://cloud.example.org:5000/v3"}),
        ("--public-endpoint", {"public_endpoint": "https://cloud.example.org/%s"}),
        ("--app", {"target": "a b"}),
        ("--app", {"target": "config:/x\nuid = root"}),
        ("--run-directory", {"run_directory": Path("run")}),
        ("--run-directory", {"run_directory": Path("/run/" + "x" * 80)}),
        ("--log-directory", {"log_directory": Path("/var/log/a b")}),
        ("--config", {"config": Path('/etc/"')}),
        ("--virtualenv", {"virtualenv": Path("/opt/\n")}),
        ("DIR", {"folder": Path("/etc/$(x)")}),
        ("--tls-key", {"certificate": Path("/c")}),
        ("--tls-certificate", {"key": Path("/k")}),
        ("--hsts", {"hsts": 60}),
        ("--hsts", {**TLS, "hsts": -1}),
        ("--hsts", {**TLS, "hsts": 10**9}),
        ("--http-redirect", {"redirect": True}),
        ("--haproxy", {"haproxy": ("192.0.2.1",)}),
        ("--haproxy", {"haproxy": ("",)}),
        ("--haproxy", {"haproxy": ("node1:5000",)}),
        ("--haproxy", {"haproxy": ("[192.0.2.1]:5000",)}),
        ("--memcached", {"memcached": ("192.0.2.1:0",)}),
        ("--trusted-proxy", {"trusted_proxies": ("everyone",)}),
    ],
)
def test_what_is_refused(option: str, values: dict[str, object]) -> None:
    with pytest.raises(OptionError) as caught:
        settings(**values)
    assert caught.value.option == option
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("listen", ["*:443", "[::]:443", "[2001:db8::1]:5000", "cloud.example:80"])
def test_addresses_to_listen_at(listen: str) -> None:
    assert settings(listen=listen).port == int(listen.rpartition(":")[2])


def test_line_ups() -> None:
    for server in SERVERS:
        check(settings(server=server), PLAN)
    with pytest.raises(OptionError, match="--server = apache: must be one of"):
        check(settings(server="apache"), PLAN)
    with pytest.raises(OptionError, match="left out with --server uwsgi"):
        check(settings(server="uwsgi", **TLS), PLAN)


def test_logins_have_workers_of_their_own_where_they_can_be_told() -> None:
    made = plan(MACHINE, Workload(login_processes=2))
    assert made["mod_wsgi.login_processes"].value == 2
    for server in set(SERVERS) - {"uwsgi"}:
        check(settings(server=server), made)
    with pytest.raises(OptionError, match="--login-processes = 2: must be left out with"):
        check(settings(server="uwsgi"), made)
    same = settings(server="nginx+uwsgi-tcp", upstream="127.0.0.1:35358")
    with pytest.raises(OptionError, match=r"--login-upstream = .*: must be another"):
        check(same, made)
    check(same, plan(MACHINE, Workload()))
    tight = plan(replace(MACHINE, memory=2**29), Workload(login_processes=1))
    check(settings(server="nginx+uwsgi"), tight)
    with pytest.raises(OptionError, match=r"--login-processes = 1: .*memory holds . daemons"):
        check(settings(server="mod_wsgi"), tight)


def test_links_begin_with_the_foremost_server_if_that_is_known() -> None:
    def endpoint(**values: object) -> str:
        return settings(public_host="cloud.example.org", **values).public_endpoint

    assert endpoint(**TLS) == "https://cloud.example.org:5000"
    assert endpoint(**TLS, listen="*:443") == "https://cloud.example.org"
    assert endpoint(listen="*:80") == "http://cloud.example.org"
    assert endpoint(listen="*:5000") == "http://cloud.example.org:5000"
    assert endpoint(**TLS, trusted_proxies=("192.0.2.1",)) == ""
    told = "https://cloud.example.org/identity"
    assert endpoint(trusted_proxies=("192.0.2.1",), public_endpoint=told) == told
    assert settings(**TLS).public_endpoint == ""


def test_several_names() -> None:
    named = settings(public_host="cloud.example.org", other_hosts=("192.0.2.1",))
    assert named.hosts == ("cloud.example.org", "192.0.2.1")
    assert settings().hosts == ()
