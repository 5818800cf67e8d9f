"""authtoken in front of a stand-in for a service, behind a stand-in for Keystone.

The stand-in for Keystone takes the place of the network beneath keystoneauth's session, so all of
keystonemiddleware and its clients is the real one.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keystonemiddleware.auth_token as stock
import requests
from oslo_config import cfg
from requests.adapters import BaseAdapter

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.authtoken.middleware import AuthProtocol
from keyfront.middleware.tokens.epochs import (
    Coordinator,
    Epoch,
    Mark,
    Slots,
    settled_by_age,
    slots,
)

URL = "http://keystone.example/v3"
FAR = "2099-01-01T00:00:00.000000Z"

STOCK, NONE, TAGS = "stock", "none", "tags"


def at(seconds: float) -> str:
    """A time of the wall clock as Keystone writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(time.time() + seconds))


def catalog(services: int) -> list[dict[str, Any]]:
    return [
        {
            "endpoints": [
                {
                    "id": f"{number}-{interface}",
                    "interface": interface,
                    "region": "RegionOne",
                    "region_id": "RegionOne",
                    "url": f"http://{number}.example/v3",
                }
                for interface in ("public", "internal", "admin")
            ],
            "id": f"{number:032x}",
            "type": f"type-{number}",
            "name": f"name-{number}",
        }
        for number in range(services)
    ]


def token_data(user: str = "user", **changed: Any) -> dict[str, Any]:
    """What Keystone says of a token for a project; a change to ``None`` leaves something out."""
    domain = {"id": "default", "name": "Default"}
    data = {
        "methods": ["password"],
        "user": {"domain": domain, "id": f"id-{user}", "name": user, "password_expires_at": None},
        "audit_ids": [f"audit-{user}"],
        "expires_at": FAR,
        "issued_at": "2026-01-01T00:00:00.000000Z",
        "project": {"domain": domain, "id": "id-project", "name": "project"},
        "is_domain": False,
        "roles": [{"id": "id-member", "name": "member"}, {"id": "id-reader", "name": "reader"}],
        "catalog": catalog(2),
        **changed,
    }
    return {name: value for name, value in data.items() if value is not None}


class Epochs:
    """A coordinator in this process, which can be lost and made anew."""

    slot_count = 65536

    def __init__(self) -> None:
        self.generation = 1
        self.lost = False
        #: How often it was asked whether something is fresh.
        self.looks = 0
        self._sequence = 0
        self._numbers: dict[int, int] = {}

    def now(self) -> Epoch:
        if self.lost:
            raise CoordinatorError("lost")
        return Epoch(self.generation, self._sequence)

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        self.looks += 1
        if self.lost or epoch.generation != self.generation:
            return False
        return all(self._numbers.get(slot, 0) <= epoch.sequence for slot in slots)

    def follow(self, digest: str) -> None:
        """Do nothing: there is one table."""

    def touch(self, slots: Slots) -> None:
        self._sequence += 1
        self._numbers.update(dict.fromkeys(slots, self._sequence))

    settled = staticmethod(settled_by_age)

    def mark(self, slots: Slots, owner: str = "", *, late: bool = False) -> Mark:
        raise NotImplementedError

    def stamp(self, mark: Mark) -> None:
        raise NotImplementedError

    def recover(self) -> int:
        raise NotImplementedError

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class Keystone(BaseAdapter):
    """Answers ``GET /v3/auth/tokens`` from :attr:`tokens`.

    :param coordinator: the epochs of its token cache
    """

    def __init__(self, coordinator: Coordinator | None = None) -> None:
        super().__init__()
        self.coordinator = coordinator
        self.tokens: dict[str, dict[str, Any]] = {"t": token_data()}
        #: What it says of how long an answer stands.
        self.says = STOCK
        #: Unix time that it gives as an answer's end.
        self.ends = math.inf
        self.asked: list[requests.PreparedRequest] = []
        self.statuses: list[int] = []
        #: What it fails with, instead of answering.
        self.down: Exception | None = None
        self.refuses: int | None = None
        #: Called with the token before and after the answer is made.
        self.before: Callable[[str], None] = lambda token: None
        self.after: Callable[[str], None] = lambda token: None

    def revoke(self, token: str) -> None:
        """Take a token away, as Keystone does: the epochs show it when this returns."""
        data = self.tokens.pop(token)
        if self.coordinator is not None:
            tags = [f"user:{data['user']['id']}"]
            self.coordinator.touch(slots(tags, self.coordinator.slot_count))

    def change(self) -> None:
        """Commit what concerns everybody."""
        assert self.coordinator is not None
        self.coordinator.touch(slots(["all"], self.coordinator.slot_count))

    def send(
        self, request: requests.PreparedRequest, *arguments: Any, **options: Any
    ) -> requests.Response:
        self.asked.append(request)
        token = request.headers["X-Subject-Token"]
        if isinstance(token, bytes):
            token = token.decode("latin-1")
        self.before(token)
        if self.down is not None:
            raise self.down
        answer = self._answer(request, token)
        self.after(token)
        self.statuses.append(answer.status_code)
        return answer

    def close(self) -> None:
        pass

    @staticmethod
    def _tags(data: dict[str, Any] | None) -> list[str]:
        return ["all", f"user:{data['user']['id']}"] if data else ["all"]

    def _answer(self, request: requests.PreparedRequest, token: str) -> requests.Response:
        answer = requests.Response()
        answer.request, answer.url = request, request.url or ""
        answer.raw = io.BytesIO()
        # before anything is looked up
        epoch = self.coordinator.now() if self.coordinator and self.says == TAGS else None
        data = self.tokens.get(token)
        if data is not None and "allow_expired" not in (request.url or ""):
            data = data if data["expires_at"] > at(0) else None
        if self.refuses is not None:
            answer.status_code, content = self.refuses, {"error": {"message": "refused"}}
        elif data is None:
            answer.status_code, content = 404, {"error": {"message": "no such token"}}
        else:
            answer.status_code, content = 200, {"token": dict(data)}
            if "nocatalog" in (request.url or ""):
                content["token"].pop("catalog", None)
        answer._content = json.dumps(content).encode()
        answer.headers["Content-Type"] = "application/json"
        if tags_header.NAME not in request.headers or self.says == STOCK:
            return answer
        assert request.headers[tags_header.NAME] == tags_header.ASK
        if self.says == NONE:
            answer.headers[tags_header.NAME] = tags_header.NONE
            return answer
        assert epoch is not None and self.coordinator is not None
        found = slots(self._tags(data), self.coordinator.slot_count)
        answer.headers[tags_header.NAME] = tags_header.compose(
            tags_header.ASK, epoch, found, self.ends
        )
        if answer.status_code == 200:
            answer.headers["ETag"] = etag = f'"{hashlib.sha256(answer._content).hexdigest()}"'
            if request.headers.get("If-None-Match") == etag:
                answer.status_code, answer._content = 304, b""
                del answer.headers["Content-Type"]
        return answer


class Service:
    """Keeps the environments it is called with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.status = "200 OK"
        self.headers = [("Content-Type", "text/plain"), ("Content-Length", "2")]
        self.during: Callable[[dict[str, Any]], None] = lambda environ: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.seen.append(environ)
        self.during(environ)
        start_response(self.status, list(self.headers))
        return [b"ok"]


def app_factory(global_conf: Any, **local_conf: Any) -> Service:
    """For paste files."""
    return Service()


def environ(token: str | None = "t", **more: Any) -> dict[str, Any]:
    """A request as a server makes it; keywords of headers begin with ``HTTP_``."""
    made: dict[str, Any] = {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/things",
        "QUERY_STRING": "",
        "SERVER_NAME": "service.example",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "service.example",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        **more,
    }
    if token is not None:
        made["HTTP_X_AUTH_TOKEN"] = token
    return made


class Answer:
    """What a request was answered."""

    def __init__(self, application: Any, request: dict[str, Any]) -> None:
        started: list[Any] = []
        parts = application(request, lambda *arguments: started.append(arguments))
        self.body = b"".join(parts)
        ((self.line, self.headers, *_),) = started
        self.status = int(self.line.split()[0])

    def header(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found.lower() == name.lower()]


def configuration(folder: Path | None = None, text: str = "") -> cfg.ConfigOpts:
    """A service's configuration, loaded."""
    made = cfg.ConfigOpts()
    files = []
    if folder is not None:
        path = folder / "service.conf"
        path.write_text(text)
        files = [str(path)]
    made([], project="service", default_config_files=files, default_config_dirs=[])
    return made


class World:
    """One worker of a service.

    :param original: whether keystonemiddleware's own class is used
    :param section: options of its paste section
    """

    def __init__(
        self,
        keystone: Keystone | None = None,
        *,
        original: bool = False,
        coordinator: Coordinator | None = None,
        conf: cfg.ConfigOpts | None = None,
        made_by: Any = None,
        **section: Any,
    ) -> None:
        self.keystone = keystone or Keystone()
        self.service = Service()
        options = {
            "oslo_config_config": conf or configuration(),
            "www_authenticate_uri": "http://keystone.example",
            "auth_version": "v3",
            "auth_type": "admin_token",
            "endpoint": URL,
            "token": "token-of-the-service",
            "http_request_max_retries": "0",
            **section,
        }
        if original:
            self.middleware = stock.AuthProtocol(self.service, options)
        else:
            made_by = made_by or AuthProtocol
            self.middleware = made_by(self.service, options, coordinator=coordinator)
        self.middleware._session.session.mount("http://", self.keystone)

    def get(self, token: str | None = "t", **more: Any) -> Answer:
        return Answer(self.middleware, environ(token, **more))

    def close(self) -> None:
        self.middleware._session.session.close()

    @property
    def asked(self) -> int:
        """How often Keystone was asked."""
        return len(self.keystone.asked)


def shared_world(**options: Any) -> World:
    """A service that goes by the epochs of its Keystone."""
    epochs = Epochs()
    keystone = Keystone(epochs)
    keystone.says = TAGS
    return World(keystone, coordinator=epochs, **options)


def lone_world(**options: Any) -> World:
    """A service that does not see the epochs of its Keystone."""
    keystone = Keystone(Epochs())
    keystone.says = TAGS
    return World(keystone, **options)
