"""Answers 500 where an application raises, under a server that would not answer at all.

uWSGI closes the connection without a byte when an application raises, and a client, or nginx in
front (502), cannot tell that from a server that is gone. Keystone raises what its database says
while it looks at the caller's token, before its own error pages. The error is logged as uWSGI
would have.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .error_body import answer_error, error_body
from .unwritten_lines import UnwrittenLines

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# In the form of Keystone's errors, and with nothing of what was raised.
_BODY = error_body(500, "The request could not be answered; the server's log says why.")
_BROKEN = error_body(400, "The request body could not be read.")


def answer_errors(
    application: WSGIApplication,
    *,
    client_gone: Callable[[Exception], bool] = lambda error: False,
) -> WSGIApplication:
    """Wrap an application so that an error it raises is logged and answered 500.

    One that comes after its status was given stays the server's: uWSGI takes no second one (its
    start_response raises whatever ``exc_info`` is, python/wsgi_headers.c).

    :param client_gone: tells of an error whether the client went while its body was read; that is
        answered 400, as nobody will hear, and not logged
    """
    lines = UnwrittenLines()

    def answering(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        started = False

        def start(*arguments: Any) -> Any:
            nonlocal started
            started = True
            return start_response(*arguments)

        try:
            return application(environ, start)
        except Exception as error:
            if started:
                raise
            if client_gone(error):
                return answer_error(start_response, "400 Bad Request", _BROKEN)
            lines.write(environ["wsgi.errors"], traceback.format_exc())
            answer = answer_error(start_response, "500 Internal Server Error", _BODY)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else answer

    return answering
