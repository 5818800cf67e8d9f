"""Keeps answers from being lost where a log cannot be written.

On a full disk a write to a log raises. uWSGI's error stream raises in its caller, and so does
``WatchedFileHandler``, by which Keystone logs, if its file was rotated meanwhile: the request fails
for a line of log. Here such a line is counted instead. Once a line can be written again, another
line after it, or in a stream before it, says how many could not.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Protocol

LOG = logging.getLogger("keyfront.gateway")

# On a handler that is guarded already.
_GUARDED = "keyfront_unwritten"


class Stream(Protocol):
    """A stream such as WSGI's ``wsgi.errors`` and ``sys.stderr``."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class UnwrittenLines:
    """The count of lines that one log could not take, since it was last told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._reason = ""

    def note(self, count: int, reason: str) -> None:
        """Count lines that were not written.

        :param reason: the system's words, ``No space left on device``
        """
        with self._lock:
            self._count += count
            self._reason = reason

    def take(self) -> tuple[int, str]:
        """Return the count and the last reason, and begin to count anew."""
        with self._lock:
            count, self._count = self._count, 0
            return count, self._reason

    def write(self, stream: Stream, text: str) -> None:
        """Write to a stream, whatever comes of it.

        :param text: whole lines
        """
        count, reason = self.take()
        told = f"keyfront: {sentence(count, reason)}\n" if count else ""
        try:
            stream.write(told + text)
            stream.flush()  # uWSGI keeps it otherwise
        except (OSError, ValueError) as error:  # of a closed file
            self.note(count + text.count("\n"), reason_of(error))


def sentence(count: int, reason: str) -> str:
    """Return a sentence for the operator.

    :param count: the number of lines that were lost, at least 1
    :param reason: the system's words
    """
    return f"{count} lines of this log could not be written when they came: {reason}"


def reason_of(error: BaseException) -> str:
    """Return the system's words for an error."""
    return getattr(error, "strerror", None) or type(error).__name__


def guard_handlers() -> None:
    """Guard the handlers of all loggers there are, once each.

    Entrypoints call it when the application is loaded, and so has set up its logging.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a placeholder has none
            guard(handler)


def guard(handler: logging.Handler) -> None:
    """Make a handler count lines that it cannot write, in place of errors or standard error.

    The handler's own buffer may keep the first of these lines and write them later.

    :param handler: the handler
    """
    if hasattr(handler, _GUARDED):
        return
    lines = UnwrittenLines()
    emit, handle_error = handler.emit, handler.handleError
    reason = ""  # why the line that is being written is not

    # Handlers are called with their lock held.
    def why_not(record: logging.LogRecord) -> str:
        nonlocal reason
        reason = ""
        try:
            emit(record)
        except OSError as error:
            reason = reason_of(error)
        return reason

    def counting(record: logging.LogRecord) -> None:
        if why := why_not(record):
            lines.note(1, why)
            return
        count, before = lines.take()
        if count:
            text = sentence(count, before)
            if why_not(LOG.makeRecord(LOG.name, logging.WARNING, "", 0, text, (), None)):
                lines.note(count, before)

    def noting(record: logging.LogRecord) -> None:
        nonlocal reason
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            reason = reason_of(error)
        else:
            handle_error(record)

    handler.emit = counting  # type: ignore[method-assign]
    handler.handleError = noting  # type: ignore[method-assign]
    setattr(handler, _GUARDED, lines)
