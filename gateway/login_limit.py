"""Limits the logins that run at a time, so that a flood of them stops nobody else.

Keystone checks a password by a hash that takes a core for a quarter of a second, and everybody may
ask for it. With ``KEYFRONT_LOGIN_LIMIT`` (logins at a time on this node; unset or 0 for no limit)
the others wait for their turn, two seconds at most and as far as there are threads for it, or are
answered 503 or 429 with ``Retry-After`` at once. In a flood a quarter of the server's threads, and
at least one, has no login of strangers, so what the token cache knows is answered; or logins have
processes of their own (``KEYFRONT_LOGIN_PROCESSES``), to which the web server in front sends them.
Who is next, and that nobody can keep others out, is told in :mod:`.node.login_turns`.

A login is a request for which Keystone hashes something or asks a directory: a token by password or
application credential, an OAuth 2.0 token, a change of one's own password. Everything else passes,
and so does what Keystone refuses before it looks at a password.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from keyfront.common import json_text, ranges

from .error_body import answer_error, error_body
from .log_limit import LogLimit
from .node.login_turns import Login, LoginTurns, Refusal

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LOG = logging.getLogger("keyfront.gateway")

VARIABLE = "KEYFRONT_LOGIN_LIMIT"
#: The variable that tells of processes that take nothing but logins.
OWN = "KEYFRONT_LOGIN_PROCESSES"
#: The process group of mod_wsgi's daemons that take nothing but logins.
GROUP = "keyfront-logins"
#: The ends of the paths of logins, with any number of slashes behind them.
ENDS = ("/auth/tokens", "/password", "/OS-OAUTH2/token")
MOST = 256
_ALLOWED = f"an integer, 1 to {MOST}, or 0 for no limit"

# Bytes; Keystone refuses larger bodies, unless it is told otherwise.
_READ = 114688
# Fields of a form, of which Keystone reads three.
_FIELDS = 100
_HASHED = frozenset({"password", "application_credential"})
_RECEIPT = "openstack-auth-receipt"
_WAIT = ("Retry-After", "2")
_BUSY = error_body(503, "Too many logins are under way. The login was not tried.")
_MUCH = error_body(429, "Too many logins from this address. The login was not tried.")


def from_environment() -> int:
    """Return the limit that ``KEYFRONT_LOGIN_LIMIT`` names; 0 for none.

    :raises OptionError: it is not a whole number from 0 to 256
    """
    return ranges.whole(VARIABLE, os.environ.get(VARIABLE, "0"), 0, MOST, _ALLOWED)


def own_processes() -> int:
    """Return how many processes take nothing but logins, as ``KEYFRONT_LOGIN_PROCESSES`` says.

    :raises OptionError: it is not a whole number from 0 to 4096
    """
    return ranges.whole(OWN, os.environ.get(OWN, "0"), 0, 4096)


def room(processes: int, threads: int, *, own: int = 0) -> int:
    """Return how many threads of a server may have a login, at least 1.

    :param processes: processes of the server
    :param threads: requests that each of them answers at a time
    :param own: those of the processes that take nothing but logins
    """
    if own:
        return own * threads
    of_all = processes * threads
    # A quarter of them, and at least one, has no login.
    return max(1, of_all - max(1, of_all // 4))


def shares(limit: int, can_run: int) -> tuple[int, int]:
    """Return how many logins may run, and how many may wait, on a server.

    :param limit: logins that may run, as the operator has it; 0 for no limit, which is returned
    :param can_run: the threads that may have a login, see :func:`room`
    """
    if not limit:
        return 0, 0
    running = min(limit, can_run)
    return running, can_run - running


def limit_logins(
    application: WSGIApplication,
    *,
    turns: LoginTurns | None,
    refused: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> WSGIApplication:
    """Wrap an application so that its logins have turns.

    A body without a length has to be read whole before, as :mod:`.request_body` does.

    :param turns: the turns; ``None`` returns the application itself
    :param refused: called for each login that is refused
    :param clock: seconds that never go back
    """
    if turns is None:
        return application
    lines = LogLimit(clock=clock)

    def limiting(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("REQUEST_METHOD") != "POST":
            return application(environ, start_response)
        login = login_of(environ)
        if login is None:
            return application(environ, start_response)
        turn = turns.begin(login)
        if isinstance(turn, Refusal):
            refused()
            left_out = lines.admit()
            if left_out is not None:
                text = "logins were refused, as too many were under way: %d (%s)"
                LOG.warning(text, left_out + 1, VARIABLE)
            if turn.much:
                return answer_error(start_response, "429 Too Many Requests", _MUCH, _WAIT)
            return answer_error(start_response, "503 Service Unavailable", _BUSY, _WAIT)
        right: bool | None = None

        def start(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            nonlocal right
            right = _was_right(status, headers)
            return start_response(status, headers, *error)

        try:
            return application(environ, start)
        finally:
            turns.end(turn, right=right)

    return limiting


def _was_right(status: str, headers: list[tuple[str, str]]) -> bool | None:
    """Tell from an answer whether the password was right; ``None`` if it was not checked."""
    if status[:1] == "2":
        return True
    if status[:3] != "401":
        return None  # an error, or a directory or database that is away: nobody's fault
    # of several methods one was right, and others are asked for
    return any(name.lower() == _RECEIPT for name, _ in headers)


def login_of(environ: WSGIEnvironment) -> Login | None:
    """Return who logs in by a POST; ``None`` if it is no login.

    A body that is read is put back.
    """
    path = environ.get("PATH_INFO", "").rstrip("/")
    if not path.endswith(ENDS):
        return None
    tokens, password, _ = ENDS
    address = environ.get("REMOTE_ADDR") or ""
    if path.endswith(tokens):
        body = _body(environ)
        return Login(address) if body is None else _of_token(address, body)
    if path.endswith(password):
        return Login(address, _text("id", path.split("/")[-2]))
    client = _client(environ)
    return Login(address, _text("client", client) if client else "")


def _of_token(address: str, body: bytes) -> Login | None:
    try:
        # as Keystone reads it, whatever its type is said to be
        auth = json_text.parse(body)["auth"]
        identity = auth["identity"]
        methods = _HASHED.intersection(identity["methods"])
    except (ValueError, TypeError, LookupError):
        return None
    if not methods:
        return None
    user = ""
    if "password" in methods:
        user = _reference(_within(identity, "password", "user"))
    else:
        given = _within(identity, "application_credential")
        named = given.get("name"), _reference(_within(given, "user"))
        user = _text("credential", given.get("id") or named)
    scope = _within(auth, "scope")
    # A domain is in no other one.
    domain = {**_within(scope, "domain"), "domain": None}
    return Login(address, user, _reference(_within(scope, "project")) or _reference(domain))


def _within(value: Any, *names: str) -> dict[str, Any]:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _reference(given: dict[str, Any]) -> str:
    """Return the same text for the same user or project, however the JSON was written."""
    kind, value = _name_or_id(given)
    if not value:
        return ""
    return _text(kind, value, *(_name_or_id(_within(given, "domain")) if kind == "name" else ()))


def _name_or_id(given: dict[str, Any]) -> tuple[str, Any]:
    # Keystone goes by the name if there is one, so an id beside it may be anybody's.
    name = given.get("name")
    return ("name", name) if name else ("id", given.get("id"))


def _text(*parts: Any) -> str:
    # Passwords are not among them.
    return repr(parts)[:1000]


def _client(environ: WSGIEnvironment) -> str:
    """Return the client of OAuth 2.0 that Keystone finds; empty if it is not known.

    That is the one of HTTP's basic authentication (RFC 7617), or else of the form.
    """
    scheme, _, word = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    try:
        if scheme.lower() == "basic" and not environ.get("SSL_CLIENT_CERT"):
            with suppress(ValueError):
                word = base64.b64decode(word.strip(" \t"), validate=True).decode()
                return word.partition(":")[0]
        kind = environ.get("CONTENT_TYPE", "").partition(";")[0]
        if kind.strip().lower() != "application/x-www-form-urlencoded":
            return ""
        form = (_body(environ) or b"").decode()
        fields = parse_qsl(form, keep_blank_values=True, max_num_fields=_FIELDS)
    except ValueError:
        return ""
    return next((value for name, value in fields if name == "client_id"), "")


def _body(environ: WSGIEnvironment) -> bytes | None:
    """Return the body, which stays to be read; ``None`` if it is too long or of no known length."""
    length = environ.get("CONTENT_LENGTH") or ""
    if not length and not environ.get("HTTP_TRANSFER_ENCODING"):
        return b""
    if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > _READ:
        return None
    body: bytes = environ["wsgi.input"].read(int(length))
    environ["wsgi.input"] = io.BytesIO(body)
    return body
