"""Requests that waited too long are refused; others never are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway import queue_limit
from keyfront.gateway.queue_limit import by_queue, from_environment, limit_queue, refuse_late
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


def test_a_clock_that_is_set_back() -> None:
    """What waited counts at once, not when the clock has come to the time of the first request."""
    times = [NOW]
    limited = limit_queue(_application, seconds=5, clock=lambda: times[-1])
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW - 1}")[0] == "200 OK"
    times.append(NOW - 7200)
    # one that came before that, by the clock of then
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW}")[0] == "200 OK"
    times.append(NOW - 7100)
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW - 7104}")[0] == "200 OK"
    assert _ask(limited, HTTP_X_REQUEST_START=f"t={NOW - 7106}")[0].startswith("503 ")


@pytest.mark.parametrize("began", (None, "", "t=", "soon", "t=nan", "t=inf", "t=1e999", "-"))
def test_serves_what_says_nothing(began: str | None) -> None:
    limited = _limited(5)
    environ = {} if began is None else {"HTTP_X_REQUEST_START": began}
    assert _ask(limited, **environ)[0] == "200 OK"


class Rush:
    """An application behind the limit of 8 seconds, whose first request is long ago."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, knows: bool = False, behind: float = 0
    ) -> None:
        monkeypatch.setattr(queue_limit, "behind_caches", [])
        self.now, self.shed = NOW - 1000.0, 0
        inner = refuse_late(_application) if knows else _application

        def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ["PATH_INFO"] == "/v3/known":
                return _application(environ, start)
            return inner(environ, start)

        def shed() -> None:
            self.shed += 1

        self._limited = limit_queue(
            application, seconds=8, clock=lambda: self.now, shed=shed
        )
        assert self.waits(behind)
        self.now = NOW

    def waits(self, seconds: float, method: str = "PUT", path: str = "/v3/users/1") -> bool:
        """Send a request that has waited so long; true if it is answered."""
        before = self.shed
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path}
        environ["HTTP_X_REQUEST_START"] = f"t={self.now - seconds:.3f}"
        status = _ask(self._limited, **environ)[0]
        assert self.shed - before == status.startswith("503 ")
        return status == "200 OK"


_CHANGES = (("POST", "/v3/users"), ("DELETE", "/v3/users/1"), ("PATCH", "/v3/authors/"))
_READS = (
    ("GET", "/v3/users"), ("HEAD", "/v3/users"), ("GET", "/v3/authors"), ("OPTIONS", "/v3/users"),
    ("GET", "/identity/v3/users"),
)  # fmt: skip
_NEEDED = (
    ("GET", "/v3/auth/tokens"), ("POST", "/v3/auth/tokens"), ("DELETE", "/v3/auth/tokens"),
    ("GET", "/"), ("GET", "/v3/"), ("GET", ""), ("POST", "/v3/ec2tokens"),
    ("POST", "/v3/OS-OAUTH2/token"), ("GET", "/healthcheck"), ("OPTIONS", "/"),
    ("GET", "/identity"), ("GET", "/identity/v3/"), ("POST", "/identity/v3/auth/tokens"),
    ("GET", "/v3/OS-FEDERATION/identity_providers/a/protocols/b/auth"),
)  # fmt: skip


def test_while_the_queue_stands_what_is_needed_most_may_wait_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rush = Rush(monkeypatch)
    for _ in range(9):  # nobody has waited for less than half of the limit, for longer than that
        assert rush.waits(4.1)
        rush.now += 1
    for kind, most in ((_NEEDED, 8), (_READS, 4), (_CHANGES, 2)):
        for request in kind:
            assert not rush.waits(most + 0.1, *request), request
            assert kind is not _NEEDED or rush.waits(most - 0.1, *request), request
    # It stands until it is short, as for as long as it is refused so much it gets no longer.
    for _ in range(30):
        rush.now += 1
        assert rush.waits(3.9, *_READS[0]) and rush.waits(1.9, *_CHANGES[0])
    assert not rush.waits(4.1, *_READS[0]) and not rush.waits(2.1, *_CHANGES[0])
    assert rush.waits(0.9, *_READS[0])
    assert rush.waits(7.9, *_READS[0]) and not rush.waits(2.1, *_CHANGES[0])
    assert rush.waits(0.4, *_CHANGES[0])
    assert rush.waits(7.9, *_CHANGES[0])


def test_what_waits_in_a_queue_of_its_own_says_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of logins, whose workers have little to do while all others have too much."""
    everything, logins = Rush(monkeypatch), Rush(monkeypatch)
    chosen = [0]
    both = by_queue([everything._limited, logins._limited], lambda: chosen[0])
    everything._limited = logins._limited = both
    for _ in range(9):
        chosen[0] = 0
        assert everything.waits(4.1)
        chosen[0] = 1
        assert logins.waits(0, "POST", "/v3/auth/tokens")
        everything.now += 1
        logins.now += 1
    assert logins.waits(7)
    chosen[0] = 0
    assert not everything.waits(4.1)


def test_in_a_short_rush_all_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rush = Rush(monkeypatch)
    for _ in range(8):
        assert rush.waits(7)
        rush.now += 1
    assert rush.waits(0)
    for _ in range(8):
        assert rush.waits(7)
        rush.now += 1


def test_who_comes_now_and_then_makes_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    rush = Rush(monkeypatch)
    for _ in range(5):
        assert rush.waits(7)
        rush.now += 8.5
    for _ in range(9):
        assert rush.waits(7)
        rush.now += 1
    assert not rush.waits(7)
    rush.now -= 20  # the clock was set back
    assert rush.waits(7)


def test_a_web_server_whose_clock_is_behind_makes_no_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rush = Rush(monkeypatch, behind=3)
    for _ in range(30):
        assert rush.waits(3)
        rush.now += 1
    assert rush.waits(0)  # the clock was mended
    for _ in range(9):
        assert rush.waits(3)
        rush.now += 1
    assert not rush.waits(3)


def test_nor_does_one_whose_clock_is_set_back_for_longer_than_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rush = Rush(monkeypatch)
    answered = []
    for _ in range(700):
        answered.append(rush.waits(3))
        rush.now += 1
    assert answered[:9] == [True] * 9
    assert not any(answered[9:600]) and all(answered[600:])


def test_the_order_in_which_workers_look_at_the_clock_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rush = Rush(monkeypatch)
    for _ in range(9):
        assert rush.waits(7)
        rush.now -= 0.001  # who looked before the other comes here after him
        assert rush.waits(7)
        rush.now += 1.001
    assert not rush.waits(7)


def test_an_end_that_another_worker_saw_meanwhile_is_not_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reads when it began, decides, and writes; in between another may do all of that."""

    class Memory(list[float]):
        meanwhile = False

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            if place == 1 and self.meanwhile:
                self[0] = 0.0
            return found

    memory = Memory((0.0, 0.0))
    queue = queue_limit._Queue(memory, 2, 8)  # type: ignore[arg-type]
    for second in range(9):
        assert not queue.stands(7, NOW + second)
    memory.meanwhile = True
    queue.stands(7, NOW + 9)
    memory.meanwhile = False
    assert not queue.stands(7, NOW + 10)


def test_what_a_cache_knows_is_answered_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    rush = Rush(monkeypatch, knows=True)
    assert rush.waits(9, "GET", "/v3/known") and rush.waits(7, "GET", "/v3/users")
    assert not rush.waits(9, "GET", "/v3/users") and not rush.waits(9, "PUT", "/v3/known")
    assert not rush.waits(9, "OPTIONS", "/v3/known")
    assert rush.shed == 3


def test_another_application_beside_keystone_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One paste file may have both; no token cache answers for the other."""
    rush = Rush(monkeypatch)
    refuse_late(_application)
    assert not rush.waits(9, "GET", "/metric/resource") and not rush.waits(9, "HEAD", "/")


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


def test_refuses_also_whose_body_a_filter_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_limit, "behind_caches", [])
    behind = refuse_late(_application)
    shed: list[int] = []

    def reads(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        assert environ["wsgi.input"].read() == b"{}"
        return behind(environ, start_response)

    times = iter((NOW - 6, NOW))
    limited = limit_queue(
        read_whole(reads), seconds=5, refusing=read_whole, clock=lambda: next(times),
        shed=lambda: shed.append(1),
    )  # fmt: skip
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/v3/users", "CONTENT_LENGTH": "2"}
    for status in ("200", "503"):
        body = {"wsgi.input": io.BytesIO(b"{}"), "HTTP_X_REQUEST_START": "t=1"}
        assert _ask(limited, **environ, **body)[0].startswith(status)
    assert shed == [1]


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
