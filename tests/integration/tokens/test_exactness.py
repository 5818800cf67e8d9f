"""No token validation shows the state before a change whose response was received: every kind.

A real Keystone in several worker processes; the last tests are of the checker itself.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support import listing_changes, servers
from support.exactness import Report, check
from support.keystone_world import World
from support.keystones import keystone_state, serve_as_is
from support.served import Served, answered
from support.token_changes import KINDS, Kind, Prepared, Read, alive, gone

pytest.importorskip("keystone")

# The quick form proves that every kind is looked at; more rounds by environment prove exactness.
ROUNDS = int(os.environ.get("KEYFRONT_EXACTNESS_ROUNDS", "1"))
QUICK = ROUNDS == 1
READERS = 1 if QUICK else 2
# A reader's next read shows what its read beside the change left in a cache, and that of another
# caller what was known of the token.
ENOUGH = 2 if QUICK else 3


def _cases() -> Iterator[object]:
    """The quick form makes each kind of change once: every fourth with memcached, the rest alone.

    With memcached, Keystone's own caches, which are stale in stock Keystone, must not show through.
    """
    for number, kind in enumerate([*KINDS, *listing_changes.KINDS]):
        for cache in ("alone", "memcached"):
            if not QUICK or (cache == "memcached") == (number % 4 == 0):
                yield pytest.param(cache, kind, id=f"{cache}-{kind.name.replace(' ', '-')}")


CASES = sorted(_cases(), key=lambda case: str(case.id))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A Keystone of its own: these tests change its catalog, which every token shows."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("keyfront serve starts one worker per core, and there is one core")
    with ExitStack() as stack:
        address = None
        if request.param == "memcached":
            address = stack.enter_context(servers.memcached()).address
        state = keystone_state(
            tmp_path_factory.mktemp("exactness") / "state",
            memcached=address,
            # The cheapest that bcrypt takes: passwords are not what is tested.
            extra="[identity]\npassword_hash_rounds = 4\n"
            f"[keyfront_token_cache]\nroutes = {','.join(listing_changes.ROUTES)}\n",
        )
        yield stack.enter_context(serve_as_is(state, "uwsgi"))


# The tokens of a world live for an hour, which many rounds of all kinds exceed.
@pytest.fixture(scope="module" if QUICK else "function")
def world(served: Served) -> World:
    return World(served.url, served.password)


@pytest.mark.slow
@pytest.mark.parametrize(("served", "kind"), CASES, indirect=["served"], scope="module")
def test_no_answer_is_stale(served: Served, world: World, kind: Kind) -> None:
    if kind.skip:
        pytest.skip(kind.skip)
    report = check(
        served.url, served.password, kind, rounds=ROUNDS, readers=READERS, world=world,
        enough=ENOUGH,
    )
    print(report)
    assert report.exact, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("served", ["memcached"], indirect=True, scope="module")
def test_several_processes_answered(served: Served, world: World) -> None:
    """What is exact in one process proves nothing: a cache in its memory would be, too."""
    check(served.url, served.password, KINDS[0], rounds=1, readers=2, world=world, enough=2)
    assert len([x for x in answered(served).values() if x > 0]) >= 2


class _Pretender(ThreadingHTTPServer):
    """Answers 200 or 404 as it was told last.

    :param late: of this many connections one shows what it was told the time before; 0: none
    :param nonsense: it answers 500 instead of 404
    """

    daemon_threads = True

    def __init__(self, late: int, nonsense: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.late, self.nonsense = late, nonsense
        self.now = self.last = True
        self.readers = 0

    def tell(self, enabled: bool) -> None:
        with self.lock:
            self.last, self.now = self.now, enabled

    def number(self) -> int:
        """The number of a connection that reads."""
        with self.lock:
            self.readers += 1
            return self.readers

    def status(self, reader: int) -> int:
        with self.lock:
            shown = self.last if self.late and reader % self.late == 0 else self.now
        return 200 if shown else 500 if self.nonsense else 404


class _Handler(BaseHTTPRequestHandler):
    server: _Pretender
    protocol_version = "HTTP/1.1"
    number = 0

    def do_GET(self) -> None:
        self.number = self.number or self.server.number()
        self._answer(self.server.status(self.number))

    def do_PATCH(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.tell(json.loads(self.rfile.read(length))["user"]["enabled"])
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def _pretender(late: int = 0, nonsense: bool = False) -> Iterator[str]:
    with _Pretender(late, nonsense) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v3"
        finally:
            server.shutdown()
            thread.join()


class _NobodysWorld(World):
    """One without a token: the pretender asks for none."""

    admin = "none"


def _pretended(world: World, *, undo: bool = True, keep: bool = False) -> Prepared:
    read = Read(
        name="subject GET", method="GET", path="/auth/tokens", headers={}, before=alive, after=gone
    )
    return Prepared(
        reads=[read],
        change=lambda: world.flag("user", "/users/x", False),
        undo=(lambda: world.flag("user", "/users/x", True)) if undo else None,
        keep=(lambda: world.flag("user", "/users/x", True)) if keep else None,
    )


ROUNDS_OF_PRETENCE = 3


def _check_pretender(url: str, kind: Kind, rounds: int = ROUNDS_OF_PRETENCE) -> Report:
    return check(url, "", kind, rounds=rounds, readers=2, world=_NobodysWorld(url, ""))


def test_checker_passes_what_is_exact() -> None:
    with _pretender() as url:
        report = _check_pretender(url, Kind("exact", _pretended))
    assert report.exact, str(report)
    assert report.changes == 2 * ROUNDS_OF_PRETENCE
    # Two readers, three reads each: in the state at the beginning and after each change.
    assert report.judged >= 2 * 3 * (report.changes + 1)
    assert re.match(r"exact: 6 changes, \d+ reads judged, 0 stale, 0 strange", str(report))


@pytest.mark.parametrize("late", [1, 2])
def test_checker_finds_what_is_stale(late: int) -> None:
    """Also when only one of two connections shows it, as with a cache in one process."""
    with _pretender(late) as url:
        report = _check_pretender(url, Kind("stale", _pretended))
    assert not report.exact
    # That reader's three reads after every change.
    assert report.stale >= 3 * report.changes
    assert report.stale < report.judged
    assert report.strange == 0
    assert "stale: subject GET, begun " in str(report)


def test_checker_finds_what_was_revived() -> None:
    """What looks like undoing a change and must not be, is watched like the change."""
    with _pretender() as url:
        kind = Kind("revived", lambda world: _pretended(world, undo=False, keep=True))
        report = _check_pretender(url, kind, rounds=1)
    assert report.stale > 0
    assert "after what must not undo change 1, was answered 200" in str(report)


def test_checker_finds_what_is_strange() -> None:
    with _pretender(nonsense=True) as url:
        report = _check_pretender(url, Kind("strange", _pretended))
    assert not report.exact
    assert report.strange > 0
    assert report.stale == 0
    assert "was answered 500" in str(report)


def test_checker_wants_the_state_before_first() -> None:
    """A change that is not shown because nothing was there to change proves nothing."""
    with _pretender() as url:
        world = _NobodysWorld(url, "")
        world.flag("user", "/users/x", False)
        report = _check_pretender(url, Kind("unprepared", _pretended), rounds=1)
    assert report.strange > 0
    assert "before any change, was answered 404" in str(report)


def test_kinds_have_names_of_their_own() -> None:
    kinds = [*KINDS, *listing_changes.KINDS]
    assert len({kind.name for kind in kinds}) == len(kinds)
