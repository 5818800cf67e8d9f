"""The subjects of micro-benchmarks: a token cache, a bare application, a stock Keystone."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from keyfront.benchmarks.compare import in_process, token_hit
from keyfront.benchmarks.compare.token_stand_in import Answers, request, validation
from keyfront.benchmarks.lineups.keystone import VALIDATION, temporary
from keyfront.errors import ServerError
from keyfront.middleware.tokens.cache import TokenCache

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Step = Callable[[], object]

# Entries: what a small service has in use.
ENTRIES = 1000


class Cache(NamedTuple):
    """A token cache that is filled, and the stand-in behind it.

    :ivar keystone: counts the requests that reach it
    :ivar numbers: the numbers of tokens that were never asked about
    """

    filter: TokenCache
    keystone: Answers
    numbers: Iterator[int]

    def hit(self) -> Step:
        """Return a validation that it knows."""
        environ = request(0)
        return lambda: token_hit.call(self.filter, environ.copy())

    def miss(self) -> Step:
        """Return a validation that it does not know, another one each time."""
        return lambda: token_hit.call(self.filter, request(next(self.numbers)))


def bare() -> Application:
    """Return a WSGI application that answers the same few bytes; nothing can be quicker."""
    body = [validation(0)]
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body[0])))]

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", list(headers))
        return body

    return application


def served(application: Application, environ: dict[str, Any] | None = None) -> Step:
    """Make one request of an application, to the last byte; a validation by default."""
    given = environ or request(0)
    return lambda: token_hit.call(application, given.copy())


@contextmanager
def stock_validation() -> Iterator[Step]:
    """Return a validation by stock Keystone in this process, on SQLite, its caches as packaged.

    A process has one Keystone: its configuration is global.

    :raises ServerError: it cannot be set up, or does not validate its own token
    """
    with temporary() as (folder, keystone):
        before = dict(os.environ)
        arguments = sys.argv[1:]
        try:
            os.environ.update(keystone.environment(folder, None))
            # Keystone reads them, too
            del sys.argv[1:]
            application = importlib.import_module("keystone.wsgi.api").application
        finally:
            sys.argv[1:] = arguments
            os.environ.clear()
            os.environ.update(before)
        answer = in_process.request(application, "POST", VALIDATION, None, keystone.login())
        if answer.status != 201 or not answer.token:
            raise ServerError(f"the administrator's login is answered {answer.status}")
        tokens = dict.fromkeys(("HTTP_X_AUTH_TOKEN", "HTTP_X_SUBJECT_TOKEN"), answer.token)
        yield served(application, request(0) | tokens)


def bare_factory(global_conf: dict[str, str], **local_conf: str) -> Application:
    """:func:`bare`, for a paste file."""
    return bare()
