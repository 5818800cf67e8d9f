"""Requests that waited too long are refused; others never are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.queue_limit import from_environment, limit_queue
from keyfront.gateway.request_body import read_whole

NOW = 1_795_362_235.5


def _application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"done"]


def _limited(seconds: float, *, first: float = NOW - 1000, **options: Any) -> Any:
    """The application behind the limit, which began a request at that time; now it is ``NOW``."""
    times = iter((first,))
    limited = limit_queue(_application, seconds=seconds, clock=lambda: next(times, NOW), **options)
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={first - 1000}")[0] == "200 OK"
    return limited


def _ask(application: Any, **environ: object) -> tuple[str, dict[str, str], bytes]:
    seen: list[Any] = []
    body = b"".join(application(environ, lambda status, headers: seen.append((status, headers))))
    status, headers = seen[0]
    return status, dict(headers), body


@pytest.mark.parametrize(
    "began",
    ("t={:.3f}", "{:.3f}", "t={:.0f}e3", "t={:.0f}e6"),
    ids=("nginx", "bare", "milliseconds", "Apache"),
)
def test_refuses_what_waited_too_long(began: str) -> None:
    limited = _limited(5)
    status, _, body = _ask(limited, HTTP_X_REQUEST_START=began.format(NOW - 4))
    assert (status, body) == ("200 OK", b"done")
    status, headers, body = _ask(limited, HTTP_X_REQUEST_START=began.format(NOW - 6))
    assert status.startswith("503 ")
    assert headers["Retry-After"] == "5"
    assert headers["Content-Length"] == str(len(body))


def test_does_not_count_the_servers_own_pause() -> None:
    """Who came while the server was replaced is served, if only then his turn comes in time."""
    for ago, status in ((4, "200 OK"), (6, "503 Service Unavailable")):
        limited = _limited(5, first=NOW - ago)
        assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW - 100}")[0] == status


def test_counts_from_the_first_request_of_any_worker() -> None:
    """Forking takes its time, too; and a worker that replaces another is no pause of the server."""
    times = [NOW]
    limited = limit_queue(_application, seconds=5, clock=lambda: times[-1])
    child = os.fork()
    if not child:
        came = f"t={NOW - 100}"
        os._exit(0 if _ask(limited, HTTP_X_REQUEST_START=came)[0] == "200 OK" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    times.append(NOW + 6)
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW + 2}")[0] == "200 OK"
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW - 100}")[0].startswith("503 ")


@pytest.mark.parametrize("began", (None, "", "t=", "soon", "t=nan", "t=inf", "t=1e999", "-"))
def test_serves_what_says_nothing(began: str | None) -> None:
    limited = _limited(5)
    environ = {} if began is None else {"HTTP_X_REQUEST_START": began}
    assert _ask(limited, **environ)[0] == "200 OK"


def test_serves_what_comes_from_the_future() -> None:
    limited = _limited(0.1)
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW + 100}")[0] == "200 OK"


def test_reads_the_body_of_what_it_refuses() -> None:
    """Closing over unread bytes would lose the answer."""
    limited = _limited(5, refusing=read_whole)
    body = io.BytesIO(b"x" * 1000)
    environ = {"CONTENT_LENGTH": "1000", "wsgi.input": body, "HTTP_X_REQUEST_START": "t=1.0"}
    environ["REQUEST_METHOD"] = "POST"
    assert _ask(limited, **environ)[0].startswith("503 ")
    assert body.tell() == 1000


def test_costs_nothing_without_a_limit() -> None:
    assert limit_queue(_application, seconds=0) is _application


@pytest.mark.parametrize("text", ("soon", "-1", "0.05", "3601", "nan", "inf"))
def test_names_a_bad_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KEYFRONT_QUEUE_TIMEOUT", text)
    with pytest.raises(OptionError, match=r"KEYFRONT_QUEUE_TIMEOUT.*0\.1 to 3600"):
        from_environment()


@pytest.mark.parametrize(("text", "seconds"), (("0", 0), ("5", 5), ("0.5", 0.5), ("3600", 3600)))
def test_reads_a_good_limit(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("KEYFRONT_QUEUE_TIMEOUT", text)
    assert from_environment() == seconds
