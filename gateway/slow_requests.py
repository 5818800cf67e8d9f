"""Logs one line for each slow request, with the parts in which it spent its time.

With ``KEYFRONT_SLOW_REQUEST`` seconds set, a request that takes longer is logged as::

    slow request: POST /v3/auth/tokens 201 took 1834 ms: queue 12, directory 0 (0 calls),
    statements 31 (9), hash 204 (1), rest 1587; cache -; req-6f1c...

``queue`` is the time before its turn, by the header ``X-Request-Start`` of the web server in front;
it is no part of the time that the request took. ``rest`` is the time in none of the parts:
Keystone's own work, and waiting for the processor. Whatever looks like an identifier in a path is
logged as ``{id}``, and no query, header or body is logged, so no line holds a token. With
oslo.log's ``use_json`` the parts are fields of ``extra``.

The application is timed, not the transfer of the body from a slow client or of the answer to it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from keyfront.common import ranges
from keyfront.common.request_phases import HASH, STATEMENTS, TIMED, RequestPhases, current, timed

from .log_limit import LogLimit
from .queue_limit import since_1970

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LOG = logging.getLogger(__name__)

VARIABLE = "KEYFRONT_SLOW_REQUEST"

# Lines of a process in a second: when everything is slow, more say no more.
_LINES = 10
_ID_HEADER = "x-openstack-request-id"
_REQUEST_ID = re.compile(r"req-[0-9a-f-]{36}")
# A part of a path as an API has it; others are names, identifiers, or from an attacker.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,23}")
_IDENTIFIER = re.compile(r"[0-9a-f-]{8,}|.*[0-9].*[0-9].*[0-9].*")
_METHOD = re.compile(r"[A-Z]{1,16}")


def from_environment() -> float:
    """Return the limit that ``KEYFRONT_SLOW_REQUEST`` names, in seconds; 0 for none.

    :raises OptionError: it is not 0 or a number of seconds from 0.001 to 3600
    """
    return ranges.limit(VARIABLE, os.environ.get(VARIABLE, "0"), 0.001, 3600, "no line")


def tell_slow(
    application: WSGIApplication,
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    wall: Callable[[], float] = time.time,
) -> WSGIApplication:
    """Wrap an application so that requests which take longer than ``seconds`` are told of.

    :param seconds: 0.001 to 3600; 0 returns the application itself
    :param clock: seconds of a clock that only goes forward
    :param wall: seconds since 1970
    """
    if not seconds:
        return application
    lines = LogLimit(_LINES, clock=clock)

    def telling(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        began = clock()
        phases = current.get() or RequestPhases()  # those of its trace
        token = current.set(phases)
        told: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            told[:] = status, headers
            return start_response(status, headers, *error)

        try:
            return application(environ, start)
        finally:
            current.reset(token)
            took = clock() - began
            if took > seconds and (left_out := lines.admit()) is not None:
                _tell(environ, told, phases, took, wall() - took, left_out)

    return telling


def _tell(
    environ: WSGIEnvironment,
    told: list[Any],
    phases: RequestPhases,
    took: float,
    began: float,
    left_out: int,
) -> None:
    status, headers = told or ("unanswered", [])
    came = environ.get("HTTP_X_REQUEST_START")
    queue = max(began - since_1970(came), 0.0) if came else 0.0
    rest = max(took - sum(phases.seconds), 0.0)
    found = {
        "method": _known(_METHOD, environ["REQUEST_METHOD"]),
        "route": route(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")),
        "status": status.partition(" ")[0],
        "ms": round(took * 1000),
        "queue_ms": round(min(queue, 86400) * 1000),
        **{f"{name}_ms": round(phases.seconds[part] * 1000) for part, name in enumerate(TIMED)},
        **{f"{name}_count": phases.counts[part] for part, name in enumerate(TIMED)},
        "rest_ms": round(rest * 1000),
        "cache": phases.cache or "-",
        "request_id": request_id(headers) or "-",
    }
    more = f"; {left_out} more were slow, and are not told of" if left_out else ""
    parts = ", ".join(f"{name} {found[f'{name}_ms']} ({found[f'{name}_count']})" for name in TIMED)
    LOG.warning(
        "slow request: %s %s %s took %d ms: queue %d, %s, rest %d; cache %s; %s%s",
        found["method"], found["route"], found["status"], found["ms"], found["queue_ms"], parts,
        found["rest_ms"], found["cache"], found["request_id"], more,
        extra={"extra": found},
    )  # fmt: skip


def route(path: str) -> str:
    """Return a path with ``{id}`` for each part that may be an identifier or a secret."""
    return "/".join(
        part if not part or (_WORD.fullmatch(part) and not _IDENTIFIER.fullmatch(part)) else "{id}"
        for part in path[:1000].split("/")
    )


def _known(form: re.Pattern[str], text: str) -> str:
    return text if form.fullmatch(text) else "-"


def request_id(headers: list[tuple[str, str]]) -> str:
    """Return the request id among an answer's headers, empty without one in OpenStack's form."""
    for name, value in headers:
        if name.lower() == _ID_HEADER:
            return value if _REQUEST_ID.fullmatch(value) else ""
    return ""


def watch_database() -> None:
    """Measure the time of SQLAlchemy's statements, for all engines of this process."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def begin(*details: Any) -> None:
        phases = current.get()
        if phases is not None:
            phases.began = time.perf_counter()

    def end(*details: Any) -> None:
        phases = current.get()
        if phases is not None and phases.began:
            phases.add(STATEMENTS, time.perf_counter() - phases.began)
            phases.began = 0.0

    event.listen(Engine, "before_cursor_execute", begin)
    event.listen(Engine, "after_cursor_execute", end)
    event.listen(Engine, "handle_error", end)


def watch_hashes(module: Any) -> None:
    """Measure the time of password hashes.

    :param module: ``keystone.common.password_hashing``, whose functions are called by its name
    """
    for name in ("check_password", "hash_password"):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _timing(original))


def _timing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*values: Any, **named: Any) -> Any:
        with timed(HASH):
            return original(*values, **named)

    return call
