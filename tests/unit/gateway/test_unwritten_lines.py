"""What a log cannot take is counted, told once, and no trouble of whoever logs."""

from __future__ import annotations

import io
import logging
import logging.handlers
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.gateway import unwritten_lines
from keyfront.gateway.server_error import answer_errors
from keyfront.gateway.unwritten_lines import UnwrittenLines, guard, guard_handlers

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[logging.Logger]:
    """As Keystone's: it looks at each line whether its file was replaced."""
    found = logging.Logger("test")
    handler = logging.handlers.WatchedFileHandler(tmp_path / "log", delay=True)
    found.addHandler(handler)
    yield found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "raiseExceptions", False)
        try:
            handler.close()
        except OSError:
            pass  # still full


def test_an_error_is_answered_over_a_full_disk() -> None:
    def raising(environ: Any, start_response: Any) -> list[bytes]:
        raise ValueError

    started: list[Any] = []
    application = answer_errors(raising)
    with FULL.open("w", buffering=1) as errors:
        environ = {"REQUEST_METHOD": "GET", "wsgi.errors": errors}
        body = b"".join(application(environ, lambda *words: started.append(words)))
        with pytest.raises(OSError):
            errors.flush()
        with pytest.raises(OSError):
            errors.close()
    assert started[0][0] == "500 Internal Server Error"
    assert b'"code": 500' in body
    again = io.StringIO()
    application({"REQUEST_METHOD": "GET", "wsgi.errors": again}, lambda *words: None)
    first = again.getvalue().splitlines()[0]
    assert "lines of this log could not be written" in first
    assert "No space left on device" in first


def test_a_closed_stream_is_no_error() -> None:
    lines, stream = UnwrittenLines(), io.StringIO()
    stream.close()
    lines.write(stream, "one\ntwo\n")
    lines.write(stream, "three\n")
    assert lines.take()[0] == 3
    assert lines.take()[0] == 0


def test_a_full_log_is_counted_and_told(
    logger: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (handler,) = logger.handlers
    (tmp_path / "log").symlink_to(FULL)
    guard(handler)
    guard(handler)
    for _ in range(5):
        logger.error("lost %s", "x" * 3000)
    (tmp_path / "log").unlink()
    # Its file was replaced, and what the handler still has cannot be flushed: it raises that out of
    # the call of the logger.
    logger.error("lost, too")
    assert isinstance(handler, logging.handlers.WatchedFileHandler)
    assert handler.stream is not None
    with pytest.raises(OSError):
        handler.stream.close()
    handler.stream = None  # type: ignore[assignment]
    logger.error("written")
    logger.error("and so is this")
    text = (tmp_path / "log").read_text()
    assert text.count("could not be written") == 1, text
    assert text.splitlines()[0] == "written"
    assert "6 lines of this log could not be written when they came: No space left" in text
    assert text.splitlines()[2] == "and so is this"
    assert capfd.readouterr().err == "", "nothing of it goes to standard error"


def test_what_is_told_in_vain_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"first", unwritten_lines.sentence(1, "why")}
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() in failing:
                raise OSError(28, "why")
            written.append(record.getMessage())

    logger = logging.Logger("test")
    logger.addHandler(Handler())
    guard(logger.handlers[0])
    for word in ("first", "second", "third"):
        if word == "third":
            failing.clear()
        logger.error(word)
    assert written == ["second", "third", unwritten_lines.sentence(1, "why")]


def test_other_errors_are_the_handlers_own() -> None:
    told: list[logging.LogRecord] = []
    handler = logging.StreamHandler(io.StringIO())
    handler.handleError = told.append  # type: ignore[method-assign]
    guard(handler)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.error("%d", "no number")
    assert len(told) == 1


def test_the_handlers_of_all_loggers_are_guarded() -> None:
    handler = logging.NullHandler()
    logger = logging.getLogger("keyfront.test.unwritten.below")
    logger.addHandler(handler)
    try:
        guard_handlers()
        assert hasattr(handler, unwritten_lines._GUARDED)
    finally:
        logger.removeHandler(handler)
        for other in logging.root.handlers:  # pytest's own
            for name in ("emit", "handleError", unwritten_lines._GUARDED):
                vars(other).pop(name, None)
