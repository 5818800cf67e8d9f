"""Logins have workers of their own, where the operator says so: nothing else waits behind them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from keyfront.gateway import login_limit
from keyfront.gateway.node import drain
from support import APPS
from support.deployments import MACHINE, NAME, WORKLOAD, Deployment, deployed, observed
from support.programs import own_folder
from support.served import PATIENCE, wait_for

if not Path(sys.prefix, "bin", "uwsgi").exists():
    pytest.skip("no uWSGI", allow_module_level=True)

SERVERS = ("nginx+uwsgi", "nginx+uwsgi-tcp", "apache+uwsgi", "mod_wsgi")
# More than all workers have threads.
LOGINS = 16
# Also of no route of Keystone's: what the limit takes for a login waits for a turn wherever it is.
PATHS = (
    *("/v3/auth/tokens", "/v3/users/0123/password", "/v3/OS-OAUTH2/token"),
    *("/v3/other/auth/tokens//", "/v3/a%0Ab/password", "/auth/tokens"),
)
METHODS = ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "post", "POSTED")
# What clients may write for a path, so that web servers and applications read it differently.
TARGETS = (
    *PATHS,
    "/v3/auth/tokens/", "//v3//auth//tokens", "/v3/auth//tokens", "/v3/auth/./tokens",
    "/v3/x/../auth/tokens", "/v3/auth/tokens/..", "/v3/auth/tokens/.",
    "/v3/auth/tokens?a=/password", "/v3?/auth/tokens", "/v3/%61uth/%74okens", "/v3/auth%2Ftokens",
    "/v3/auth%2ftokens", "/v3/auth%252Ftokens", "/v3/auth/tokens%2F",
    "/v3/auth/tokens%20", "/v3/auth/tokens%0A",
    "/v3/auth/tokens%0D%0A", "/v3/auth/tokens%3F", "/v3/%3F/auth/tokens", "/v3/a%3Fb=c/password",
    "/v3/%23/auth/tokens", "/v3/auth/tokens%23", "/v3/auth/tokens;a=b", "/v3/a;b/auth/tokens",
    "/v3/AUTH/TOKENS", "/v3/Auth/tokens", "/v3/auth/tokensx", "/v3/xauth/tokens", "/v3/mypassword",
    "/v3/users/%C3%A9/password", "/v3/users/%FF/password", "/v3/users/a%20b/password",
    "/v3/users/a+b/password", "/v3/users/%25/password", "/v3/users/%2525/password",
    "/v3/users/$1/password", "/v3/users/%24%7BPATH%7D/password", "/v3/users/a|b/password",
    "/password", "/v3/OS-OAUTH2/token///", "/v3/os-oauth2/token", "/v3/OS-OAUTH2/tokens", "/", "*",
    "http://localhost/v3/auth/tokens", "/v3/auth/tokens/OS-FEDERATION/saml2",
    "/logins/v3/auth/tokens", "v3/auth/tokens", "@elsewhere/auth/tokens", ":80/v3/auth/tokens",
    "%2Fv3/auth/tokens", "/%2F/auth/tokens", "/v3/%00/auth/tokens",
    "/v3/auth/tokens%5C", "/v3/auth%5Ctokens",
)  # fmt: skip


# What the application has to be told of a login, whoever decoded it before.
TOLD = {
    "/v3/auth/tokens?nocatalog": ("/v3/auth/tokens", "nocatalog"),
    "/v3/auth/tokens?a=%2F%3Fb&c=+": ("/v3/auth/tokens", "a=%2F%3Fb&c=+"),
    "/v3/users/a%20b/password?": ("/v3/users/a b/password", ""),
    "/v3/users/%2525/password": ("/v3/users/%25/password", ""),
    "/v3/users/%C3%A9%24%3B/password": ("/v3/users/\u00c3\u00a9$;/password", ""),
    "/v3/users/%24%7BPATH%7D%26/password?x": ("/v3/users/${PATH}&/password", "x"),
}


def _environment(held: Path) -> dict[str, str]:
    return {"HELD_LOGINS": str(held), "PYTHONPATH": str(APPS)}


@contextlib.contextmanager
def _site(server: str, held: Path) -> Iterator[Deployment]:
    with own_folder("logins") as folder:
        folder.chmod(0o711)
        held.chmod(0o777)
        workload = replace(WORKLOAD, login_processes=1)
        with deployed(
            folder, server, target="held_logins_app:application", manager=True,
            machine=replace(MACHINE, memory=2**31), workload=workload,
            environment=_environment(held),
        ) as site:  # fmt: skip
            site.wait()
            yield site


def _log_in(site: Deployment, number: int) -> tuple[int, object]:
    with closing(site.connect(f"127.9.{number}.1")) as connection:
        connection.request("POST", PATHS[number % len(PATHS)], b"{}")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()).get("worker")


def _is_for_logins(worker: object) -> bool:
    """Whether a worker is the third of uWSGI, or a daemon of mod_wsgi for logins."""
    return worker in (3, "keyfront-logins")


def _ask(site: Deployment) -> object:
    # By a connection of its own: Apache closes kept ones while logins have all of its threads.
    with closing(site.connect()) as connection:
        return observed(connection)["worker"]


def _sees_workers_of_their_own(site: Deployment, held: Path) -> None:
    """As many logins as there can be are held, and others that come meanwhile are answered."""
    for file in held.iterdir():
        file.unlink()
    with ThreadPoolExecutor(LOGINS) as pool:
        logins = [pool.submit(_log_in, site, number) for number in range(LOGINS)]
        try:
            threads = site.plan["uwsgi.threads"].value
            wait_for(lambda: len(list(held.glob("begun-*"))) == threads, "all threads have one")
            others = {_ask(site) for _ in range(20)}
            assert len(list(held.glob("begun-*"))) == threads
        finally:
            (held / "go").touch()
        answers = [one.result() for one in logins]
    # Those who waited for longer than the second that the line-up is planned for.
    assert {status for status, _ in answers} <= {200, 503}, answers
    workers = [worker for status, worker in answers if status == 200]
    assert workers and all(map(_is_for_logins, workers))
    assert not any(map(_is_for_logins, others))


@pytest.mark.parametrize("server", SERVERS)
def test_nothing_waits_behind_logins(server: str) -> None:
    with own_folder("held") as held, _site(server, held) as site:
        assert site.plan["uwsgi.processes"].value == 3
        _sees_workers_of_their_own(site, held)
        site.reload(_environment(held))
        _sees_workers_of_their_own(site, held)


@pytest.mark.parametrize("server", SERVERS)
def test_a_drain_waits_for_logins(server: str) -> None:
    with own_folder("held") as held, _site(server, held) as site:
        name = "apache.conf" if server == "mod_wsgi" else "uwsgi.ini"
        node = drain.folder_of(site.folder / name)
        drain.begin(node)
        with ThreadPoolExecutor(1) as pool:
            login = pool.submit(_log_in, site, 1)
            try:
                wait_for(lambda: list(held.glob("begun-*")), "it is under way")
                assert drain.wait(node, notice=0, timeout=0.1).under_way == 1
            finally:
                (held / "go").touch()
            assert login.result()[0] == 200
        assert drain.wait(node, notice=0, timeout=PATIENCE).under_way == 0


def _answer(
    site: Deployment, number: int, method: str, target: str, host: str = NAME
) -> dict[str, Any] | int:
    """What the application saw, or the status by which the web server refused."""
    version = "HTTP/1.0" if number % 3 == 0 else "HTTP/1.1"
    head = f"{method} {target} {version}\r\nHost: {host}\r\nContent-Length: 2\r\n"
    # Each is a client of its own, so that nobody is refused for what others sent.
    source = f"127.8.{number // 250}.{1 + number % 250}"
    with closing(site.raw(source)) as raw:
        raw.sendall(f"{head}Connection: close\r\n\r\n{{}}".encode())
        answer = HTTPResponse(raw, method=method)
        answer.begin()
        body = answer.read()
    if answer.status != 200 or not body:
        return answer.status
    told: dict[str, Any] = json.loads(body)
    return told


@pytest.mark.parametrize("server", SERVERS)
def test_the_web_server_takes_for_a_login_what_the_limit_does(server: str) -> None:
    """Otherwise one would wait for a turn among all others, or these among logins."""
    asked = [("POST", target) for target in TARGETS]
    asked += [(method, target) for method in METHODS for target in PATHS]
    with own_folder("held") as held, _site(server, held) as site:
        (held / "go").touch()
        seen = dict.fromkeys((True, False), 0)
        for number, (method, target) in enumerate(asked):
            told = _answer(site, number, method, target)
            if isinstance(told, int):
                # What the web server takes for malformed, or for nothing that could be there.
                assert told in (400, 403, 404, 405), (method, target, told)
                continue
            path = told["path"].rstrip("/")
            is_login = told["method"] == "POST" and path.endswith(login_limit.ENDS)
            assert _is_for_logins(told["worker"]) == is_login, (method, target, told)
            seen[is_login] += 1
        assert min(seen.values()) > 20, seen
        for number, (target, expected) in enumerate(TOLD.items(), len(asked)):
            told = _answer(site, number, "POST", target)
            assert isinstance(told, dict), (target, told)
            assert _is_for_logins(told["worker"])
            assert (told["path"], told["query"]) == expected, target
        assert _answer(site, 999, "POST", PATHS[0], "elsewhere") == 421
