"""The token cache in front of a stand-in for Keystone that tests tell what it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from keyfront.middleware.tokens.cache import TokenCache
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.directory_leases import Leases, leases
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.keys_and_entries import AUTH_CONTEXT, new_request_id
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.request import ENVIRON_KEY, Request
from keyfront.middleware.tokens.routes import Routes

FAR = "2099-01-01T00:00:00.000000Z"


def model(name: str, **changed: Any) -> Any:
    """A stand-in for Keystone's TokenModel."""
    fields: dict[str, Any] = {
        "audit_ids": [f"audit-{name}"],
        "user_id": f"user-{name}",
        "user": {"domain_id": "default"},
        "domain_id": None,
        "project_id": "project",
        "project_domain": {"id": "default"},
        "trust_id": None,
        "trust": None,
        "application_credential_id": None,
        "application_credential": None,
        "access_token_id": None,
        "expires_at": FAR,
    }
    return SimpleNamespace(**{**fields, **changed})


class Keystone:
    """Answers from ``known`` and says what it looked at."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {name: model(name) for name in ("admin", "t", "u")}
        self.garbage: set[str] = {"junk"}
        self.asked = 0
        self.records = True
        self.reads: set[str] = set()
        #: What must be followed for its answers to stand.
        self.followed: set[str] = set()
        #: Whether its database may answer from the past.
        self.unvouched = False
        self.while_answering: Callable[[], None] = lambda: None
        self.body = "body of {}"
        self.headers: list[tuple[str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.asked += 1
        caller = environ.get("HTTP_X_AUTH_TOKEN", "")
        subject = environ.get("HTTP_X_SUBJECT_TOKEN", "")
        request: Request | None = environ.get(ENVIRON_KEY)
        status = "200 OK"
        for token, refused in ((caller, "401 UNAUTHORIZED"), (subject, "404 NOT FOUND")):
            if not token:
                continue
            found = self.known.get(token)
            if request is not None and self.records:
                request.recorded = True
                request.unvouched = self.unvouched
                if found is not None:
                    request.accepted[token] = found
                elif token in self.garbage:
                    request.garbage.add(token)
                else:
                    request.unsure.add(token)
            if found is None:
                status = refused
                break
            environ.setdefault(AUTH_CONTEXT, {"token": found})
            if request is not None:
                request.reading = True
                reads = frozenset(self.reads)
                request.note(Reads(reads, reads, frozenset(self.followed)))
        self.while_answering()
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else self.body.format(subject).encode()
        headers = [("Content-Length", str(len(body)))]
        if status == "200 OK":
            headers.append(("X-Subject-Token", subject))
        headers += [("x-openstack-request-id", new_request_id()), *self.headers]
        start_response(status, headers)
        return [body]


class World:
    """The filter, what is behind it, and a client."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.keystone = Keystone()
        self.folder = folder
        self.coordinator = SharedMemory(folder)
        self.options = options
        self.cache = self.worker()

    def worker(self, coordinator: Any = None) -> TokenCache:
        """One more process's filter on the same node.

        :param coordinator: its own, instead of the node's
        """
        options = {"ttl": 30.0, "negative_ttl": 30.0, "memory": 1 << 20, **self.options}
        routes = Routes(options.pop("routes", ()))
        timeout = options.pop("flight_timeout", 5.0)
        return TokenCache(
            self.keystone,
            coordinator or SharedMemory(self.folder),
            NodeCache(self.folder, size=1 << 20, flight_timeout=timeout),
            routes=routes,
            **options,
        )

    def get(
        self,
        caller: str = "admin",
        subject: str = "t",
        *,
        by: TokenCache | None = None,
        **more: str,
    ) -> tuple[str, dict[str, str], bytes]:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/v3/auth/tokens",
            "SCRIPT_NAME": "",
            "QUERY_STRING": "",
            "SERVER_NAME": "keystone",
            "SERVER_PORT": "5000",
            "HTTP_HOST": "keystone:5000",
            "wsgi.url_scheme": "http",
            "HTTP_X_AUTH_TOKEN": caller,
            "HTTP_X_SUBJECT_TOKEN": subject,
            **more,
        }
        given: list[Any] = []
        body = (by or self.cache)(environ, lambda status, headers: given.extend((status, headers)))
        return given[0], dict(given[1]), b"".join(body)

    def change(self, *tags: str) -> None:
        self.coordinator.touch(slots(tags, self.coordinator.slot_count))

    @property
    def counts(self) -> dict[str, int]:
        return self.cache._node.statistics()


@contextmanager
def own_leases(folder: Path) -> Iterator[Leases]:
    """Give this process leases of directories until the block ends."""
    made = leases.make(folder)
    assert made is not None
    try:
        yield made
    finally:
        leases.leases = None
