"""Answers how a server is, in front of its application: ``/livez`` and ``/readyz``.

``/livez`` says that a worker answers. ``/readyz`` says whether this node should be sent requests:
not while it is draining, and not while a part is away that it needs. Balancers get a status, 200 or
503, and a word; who may see more also gets what is known of each part.

Only GET and HEAD of exactly these two paths are answered here; all else is the application's, such
as Keystone's own ``/healthcheck``. Settings come from the environment:

``KEYFRONT_HEALTH``
    what the two paths begin with, for example ``/keyfront``; empty by default; ``off`` for neither
``KEYFRONT_HEALTH_DETAIL``
    networks whose clients see the detail, divided by commas. ``local``, the default, is this
    machine; ``nobody``
``KEYFRONT_READY``
    the parts that are asked, each with the seconds it has, and divided by blanks:
    ``database:2 directory:2 redis:1 keys:1 logins:5`` by default. ``logins`` are the processes
    that take nothing else, where there are any: one of them has to be seen to run each second, and
    has these seconds more

Each part is asked in a thread of its own, within its own time. What it said is good for a second,
so that however many ask for the health of a node, its database is asked once a second by each
process. One that has not answered in its time counts as away; nobody waits for it again until it
has answered.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfront.errors import OptionError

from .drain import is_draining

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PREFIX_VARIABLE = "KEYFRONT_HEALTH"
DETAIL_VARIABLE = "KEYFRONT_HEALTH_DETAIL"
READY_VARIABLE = "KEYFRONT_READY"

#: The parts that can be asked.
PARTS = ("database", "directory", "redis", "keys", "logins")
_READY = "database:2 directory:2 redis:1 keys:1 logins:5"
_LONGEST = 60.0
_PREFIX = re.compile(r"(/[\w.~-]+)*", re.ASCII)
#: Seconds for which a part's answer is good.
KEPT = 1.0
_LOCAL = ("127.0.0.0/8", "::1/128", "::ffff:127.0.0.0/104")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: A question to a part, which raises where it is not there.
Ask = Callable[[], None]


@dataclass(frozen=True)
class Settings:
    """The settings of ``/livez`` and ``/readyz``.

    :param prefix: the beginning of the paths; ``None``: they are not answered
    :param networks: the networks whose clients see the detail
    :param local: true if clients of this machine see it, also over a unix socket
    :param limits: the seconds of each part that is asked, above 0
    """

    prefix: str | None
    networks: tuple[_Network, ...]
    local: bool
    limits: dict[str, float]

    def may_see(self, environ: WSGIEnvironment) -> bool:
        """Return whether a client may see the detail: its address, and those it forwards for.

        :param environ: the request's WSGI environment
        """
        # A web server in front names the client that it asks for.
        addresses = [environ.get("REMOTE_ADDR")]
        forwarded = environ.get("HTTP_X_FORWARDED_FOR")
        if forwarded:
            addresses += forwarded.split(",")
        return all(self._knows(address) for address in addresses)

    def _knows(self, address: Any) -> bool:
        if address is None:
            return False
        text = address.strip()
        if text in ("", "unix:"):
            return self.local
        try:
            found = ipaddress.ip_address(text)
        except ValueError:
            return False
        return any(found in network for network in self.networks)


def from_environment() -> Settings:
    """Return the settings that the environment makes.

    :raises OptionError: a value cannot be used
    """
    prefix: str | None = os.environ.get(PREFIX_VARIABLE, "").rstrip("/")
    if prefix == "off":
        prefix = None
    elif not _PREFIX.fullmatch(prefix or ""):
        raise OptionError(PREFIX_VARIABLE, prefix, "off, or a path such as /keyfront")
    networks: list[_Network] = []
    local = False
    detail = os.environ.get(DETAIL_VARIABLE, "") or "local"
    for text in detail.split(",") if detail != "nobody" else ():
        if text.strip() == "local":
            local = True
            networks += map(ipaddress.ip_network, _LOCAL)
            continue
        try:
            networks.append(ipaddress.ip_network(text.strip()))
        except ValueError:
            allowed = "local, nobody, or networks such as 192.0.2.0/24, divided by commas"
            raise OptionError(DETAIL_VARIABLE, detail, allowed) from None
    return Settings(prefix, tuple(networks), local, _limits())


def _limits() -> dict[str, float]:
    given = os.environ.get(READY_VARIABLE)
    found = {}
    for word in (_READY if given is None else given).split():
        name, _, seconds = word.partition(":")
        try:
            found[name] = float(seconds)
            if name not in PARTS or not 0.01 <= found[name] <= _LONGEST:
                raise ValueError
        except ValueError:
            allowed = f"PART:SECONDS with 0.01 to {_LONGEST:g}, parts are {', '.join(PARTS)}"
            raise OptionError(READY_VARIABLE, given, allowed) from None
    return found


def answers(
    *,
    settings: Settings,
    checks: Checks,
    folder: Path | None,
    found: Callable[[int, bool], object] = lambda place, ok: None,
    draining: Callable[[Path | None], bool] = is_draining,
) -> dict[str, WSGIApplication]:
    """Return the applications that answer questions for health, by path.

    :param checks: the parts that the application needs
    :param folder: the node's folder, which tells whether it is draining; ``None`` without one
    :param found: told of each part, by its place in :data:`PARTS`, whether it is there
    """
    if settings.prefix is None:
        return {}

    def live(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return _answer(environ, start_response, True, {"status": "alive"})

    def ready(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if draining(folder):
            return _answer(environ, start_response, False, {"status": "draining"})
        findings = checks.findings()
        for name, finding in findings.items():
            if name in PARTS:
                found(PARTS.index(name), finding.ok)
        is_ready = all(finding.ok for finding in findings.values())
        told: dict[str, Any] = {"status": "ready" if is_ready else "not ready"}
        if settings.may_see(environ):
            told["parts"] = {
                name: {
                    "ok": one.ok,
                    "seconds": round(one.seconds, 4),
                    **({"error": one.error} if one.error else {}),
                }
                for name, one in findings.items()
            }
        return _answer(environ, start_response, is_ready, told)

    return {f"{settings.prefix}/livez": live, f"{settings.prefix}/readyz": ready}


def _answer(
    environ: WSGIEnvironment, start_response: StartResponse, ok: bool, told: dict[str, Any]
) -> list[bytes]:
    body = json.dumps(told).encode()
    headers = [
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    start_response("200 OK" if ok else "503 Service Unavailable", headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


@dataclass(frozen=True)
class PartState:
    """The state of a part, as it was last seen.

    :param ok: true if it is there
    :param seconds: the time that its answer took, or has taken so far
    :param error: the reason for which it is not there, in one line for an operator
    """

    ok: bool
    seconds: float
    error: str = ""


@dataclass
class _Part:
    """A part, with what it said last and the question that is under way."""

    ask: Ask
    limit: float
    described: Callable[[BaseException], str]
    clock: Callable[[], float]
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_at: float | None = None
    answered: threading.Event | None = None
    finding: PartState | None = None
    found_at: float = 0.0

    def begin(self) -> None:
        """Ask, unless it is being asked or said something within the last second."""
        with self.lock:
            now = self.clock()
            fresh = self.finding is not None and now - self.found_at < KEPT
            if self.answered is not None or fresh:
                return
            answered = self.answered = threading.Event()
            self.asked_at = now
            asking = threading.Thread(
                target=self._ask, args=(now, answered), name="keyfront-check", daemon=True
            )
        try:
            asking.start()
        except RuntimeError as raised:  # there are too many; it is tried again
            self._found(self.described(raised), now, answered)

    def end(self) -> PartState:
        """Return the part's state, or that it does not answer within its time."""
        with self.lock:
            answered, asked_at = self.answered, self.asked_at
        if answered is not None and asked_at is not None:
            left = asked_at + self.limit - self.clock()
            if not answered.wait(max(left, 0.0)):
                seconds = self.clock() - asked_at
                return PartState(False, seconds, f"no answer for {seconds:.1f} s")
        assert self.finding is not None
        return self.finding

    def _ask(self, began: float, answered: threading.Event) -> None:
        error = ""
        try:
            self.ask()
        except BaseException as raised:
            error = self.described(raised)
        self._found(error, began, answered)

    def _found(self, error: str, began: float, answered: threading.Event) -> None:
        with self.lock:
            now = self.clock()
            self.finding, self.found_at = PartState(not error, now - began, error), now
            self.answered = None
        answered.set()


class Checks:
    """The parts that a server needs.

    :param parts: by name, what raises where the part is not there, and the seconds it has
    :param described: makes a line of what it raised, without a secret
    :param clock: seconds that never go back
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[Ask, float]],
        *,
        described: Callable[[BaseException], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._made = parts, described, clock
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew in a child: the threads that ask are its parent's."""
        parts, described, clock = self._made
        self._parts = {
            name: _Part(ask, limit, described, clock) for name, (ask, limit) in parts.items()
        }

    def findings(self) -> dict[str, PartState]:
        """Ask all parts at once, and return what is known of each by its name."""
        for part in self._parts.values():
            part.begin()
        return {name: part.end() for name, part in self._parts.items()}
