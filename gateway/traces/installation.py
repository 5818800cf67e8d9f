"""Switches traces on, where ``KEYFRONT_TRACES`` says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyfront.common import ranges, request_phases
from keyfront.errors import MissingPartError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from keyfront.common.fork import ForkRegistry

VARIABLE = "KEYFRONT_TRACES"


def from_environment() -> bool:
    """Return whether ``KEYFRONT_TRACES`` switches traces on.

    :raises OptionError: it is neither ``on`` nor ``off``
    """
    text = os.environ.get(VARIABLE) or "off"
    ranges.one_of(VARIABLE, text, "on", "off")
    return text == "on"


def install(registry: ForkRegistry) -> Callable[[WSGIApplication], WSGIApplication]:
    """Trace requests from now on if the options say so; call it before the application is loaded.

    :param registry: the hooks after forks, by which each worker starts to send spans
    :returns: a function that wraps the whole application; without traces it returns it unchanged
    :raises OptionError: ``KEYFRONT_TRACES``, or a variable of OpenTelemetry's that would have
        nothing sent, has a value out of its range
    :raises MissingPartError: OpenTelemetry is not installed
    """
    if not from_environment():
        return _as_it_is
    try:
        from . import export, spans
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise MissingPartError(
            f"{VARIABLE} = on needs OpenTelemetry, and there is no {error.name}; install it with: "
            "pip install 'keyfront[otel]'"
        ) from error
    sender = export.Sender()
    registry.register("traces", before=sender.stop, after=sender.start)
    request_phases.watches["token cache"] = spans.watch_token_cache
    request_phases.watches["keystone"] = spans.watch_keystone

    def trace(application: WSGIApplication) -> WSGIApplication:
        return spans.trace_requests(application, sender)

    return trace


def _as_it_is(application: Any) -> Any:
    return application
