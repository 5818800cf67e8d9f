"""A Keystone on each of the real servers that other tests build on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import servers
from keystones import MEMCACHE_POOL, PYMEMCACHE, keystone_state, serve_as_is
from served import Served


def _log_in(served: Served) -> str:
    user = {"name": "admin", "domain": {"id": "default"}, "password": served.password}
    scope = {"project": {"name": "admin", "domain": {"id": "default"}}}
    identity = {"methods": ["password"], "password": {"user": user}}
    body = json.dumps({"auth": {"identity": identity, "scope": scope}})
    status, headers, answer = _ask(served, "POST", {"Content-Type": "application/json"}, body)
    assert status == 201, answer
    return headers["x-subject-token"]


def _validate(served: Served, token: str) -> dict[str, object]:
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}
    status, _, answer = _ask(served, "GET", headers)
    assert status == 200, answer
    content: dict[str, object] = json.loads(answer)["token"]
    return content


def _ask(
    served: Served, method: str, headers: dict[str, str], body: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = served.connect()
    try:
        connection.request(method, "/v3/auth/tokens", body, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read()
    finally:
        connection.close()


def _check(state: Path) -> None:
    with serve_as_is(state, "uwsgi") as served:
        token = _validate(served, _log_in(served))
        urls = [e["url"] for s in token["catalog"] for e in s["endpoints"]]
        assert urls == [served.url] * 3


def test_keystone_on_sqlite(tmp_path: Path) -> None:
    _check(keystone_state(tmp_path / "state", extra="[token]\nexpiration = 60\n"))


@pytest.mark.parametrize("server", [servers.mariadb, servers.postgresql])
def test_keystone_on_a_database_server(tmp_path: Path, server: object) -> None:
    with server(tmp_path) as database:
        url = database.fresh_database("keystone")
        _check(keystone_state(tmp_path / "state", database_url=url))
        assert not list(tmp_path.glob("state/*.sqlite*"))


@pytest.mark.parametrize("backend", [PYMEMCACHE, MEMCACHE_POOL])
def test_keystone_caching_in_memcached(tmp_path: Path, backend: str) -> None:
    with servers.memcached() as cache:
        _check(keystone_state(tmp_path / "state", memcached=cache.address, cache_backend=backend))
        assert int(cache.stats()["cmd_set"]) > 0
