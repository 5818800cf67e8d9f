"""The authtoken filter of services: a hit against keystonemiddleware's own with its caches."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keystonemiddleware.auth_token")

import keystonemiddleware.auth_token as stock
import requests
from oslo_config import cfg
from requests.adapters import BaseAdapter

from keyfront.benchmarks.compare.token_hit import call
from keyfront.benchmarks.compare.token_stand_in import TOKEN, environ, validation
from keyfront.benchmarks.micro.subjects import Step
from keyfront.benchmarks.servers.memcached import memcached_at
from keyfront.errors import MissingPartError
from keyfront.middleware.tokens.authtoken.middleware import AuthProtocol

# keystonemiddleware warns that its cache in the process is deprecated.
QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
def test_hit_against_keystonemiddleware(paired: Any) -> None:
    """A known token, with 15 services in its catalog, in a tenth of the time."""
    paired(hit(15), hit(15, ours=False), limit=1 / 10)


@QUIET
def test_hit_against_memcached(paired: Any, tmp_path: Path) -> None:
    """The same where keystonemiddleware has a memcached at a socket of this machine."""
    try:
        with memcached_at(tmp_path / "socket") as address:
            paired(hit(15), hit(15, ours=False, memcached=address), limit=1 / 10)
    except MissingPartError as error:
        pytest.skip(error.message)


@QUIET
def test_hit_whatever_the_catalog(paired: Any) -> None:
    """With sixty services in the catalog as with one."""
    paired(hit(60), hit(1), limit=1.25)


def hit(services: int, *, ours: bool = True, memcached: str = "") -> Step:
    """Return a request with a token that the filter knows."""
    keystone = Keystone(services)
    filtered = pipeline(keystone, ours=ours, memcached=memcached)
    call(filtered, request(1))
    asked = keystone.calls

    def step() -> None:
        call(filtered, request(1))

    step()
    assert keystone.calls == asked
    return step


class Keystone(BaseAdapter):  # type: ignore[misc, unused-ignore]
    """Answers each validation, beneath keystoneauth's session.

    :param services: the services of each catalog
    """

    def __init__(self, services: int) -> None:
        super().__init__()
        self.calls = 0
        self._services = services

    def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
        """Answer one request."""
        self.calls += 1
        answer = requests.Response()
        answer.request, answer.url, answer.status_code = request, request.url, 200
        answer.raw = io.BytesIO()
        token = request.headers["X-Subject-Token"]
        answer._content = validation(int(token[-12:]), services=self._services)
        answer.headers["Content-Type"] = "application/json"
        return answer

    def close(self) -> None:
        """There is nothing to close."""


def request(number: int) -> dict[str, Any]:
    """Return a request with a token, as a server makes it."""
    return environ(
        "GET",
        "/v2.1/servers/detail",
        "127.0.0.1:8774",
        HTTP_USER_AGENT="python-novaclient",
        HTTP_X_AUTH_TOKEN=TOKEN.format(number),
    )


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answer a request, as the application behind authtoken."""
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


def pipeline(keystone: Keystone, *, ours: bool, memcached: str = "") -> Any:
    """Return a filter in front of the service, which does not know any token yet.

    :param ours: true for keyfront's
    :param memcached: its address; default: the cache in the process
    """
    conf = cfg.ConfigOpts()
    conf([], project="micro", default_config_files=[], default_config_dirs=[])
    options = {
        "oslo_config_config": conf,
        "www_authenticate_uri": "http://keystone.example.org",
        "auth_version": "v3",
        "auth_type": "admin_token",
        "endpoint": "http://keystone.example.org/v3",
        "token": "service",
        "token_cache_time": "3600",
        **({"memcached_servers": memcached} if memcached else {}),
    }
    made = (AuthProtocol if ours else stock.AuthProtocol)(service, options)
    made._session.session.mount("http://", keystone)
    return made
