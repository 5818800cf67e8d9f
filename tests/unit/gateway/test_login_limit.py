"""Logins have turns: few run at a time, others wait in an order, and nobody is kept out."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway import login_limit
from keyfront.gateway.login_limit import from_environment, limit_logins, login_of, room, shares
from keyfront.gateway.node import login_turns
from keyfront.gateway.node.login_turns import Login, LoginTurns, Refusal, Turn, network

LONG = 1000.0


class Clock:
    """Time that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = LONG
        self.meanwhile: list[Callable[[], object]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def no_rush(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than there are turns is a flood at once."""
    monkeypatch.setattr(login_turns, "RUSH", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def _slots(folder: Path | None, clock: Clock, running: int, waiting: int) -> LoginTurns:
    return LoginTurns(folder, running=running, waiting=waiting, clock=clock, sleep=clock.sleep)


def _turn(slots: LoginTurns, login: Login) -> Turn:
    turn = slots.begin(login)
    assert isinstance(turn, Turn), turn
    return turn


def _known(slots: LoginTurns, clock: Clock, *logins: Login) -> None:
    for login in logins:
        slots.end(_turn(slots, login), right=True)
    # what it cost is forgotten, that it succeeded is not
    clock.now += LONG


ALICE = Login("192.0.2.1", "alice", "p")
STRANGERS = [Login(f"198.51.100.{number}", f"user{number}") for number in range(200)]


@pytest.mark.parametrize("shared", (True, False), ids=("shared", "alone"))
def test_as_many_run_as_may(folder: Path, clock: Clock, shared: bool) -> None:
    slots = _slots(folder if shared else None, clock, 2, 0)
    first, _ = _turn(slots, STRANGERS[0]), _turn(slots, STRANGERS[1])
    assert slots.begin(STRANGERS[2]) == Refusal(much=False)
    slots.end(first, right=False)
    clock.now += login_turns.PRESSED
    _turn(slots, STRANGERS[2])


def test_processes_share_turns(folder: Path, clock: Clock) -> None:
    ours, theirs = _slots(folder, clock, 1, 0), _slots(folder, clock, 1, 0)
    turn = _turn(ours, STRANGERS[0])
    assert isinstance(theirs.begin(STRANGERS[1]), Refusal)
    ours.end(turn, right=False)
    _turn(theirs, STRANGERS[1])


def test_who_waits_gets_the_turn_that_ends(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 1)
    turn = _turn(slots, STRANGERS[0])
    clock.meanwhile = [lambda: None, lambda: slots.end(turn, right=False)]
    _turn(slots, STRANGERS[1])
    assert clock.now == pytest.approx(LONG + 0.02)


def test_who_waits_in_vain_is_refused_and_leaves_the_place(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 1)
    _turn(slots, STRANGERS[0])
    for stranger in STRANGERS[1:4]:
        began = clock.now
        assert isinstance(slots.begin(stranger), Refusal)
        assert clock.now - began == pytest.approx(login_turns.WAIT, abs=0.05)
        # in a flood strangers do not even wait
        began = clock.now
        assert isinstance(slots.begin(stranger), Refusal)
        assert clock.now == began
        clock.now += login_turns.PRESSED


def test_a_known_user_waits_behind_no_stranger(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 1)
    _known(slots, clock, ALICE)
    turn = _turn(slots, STRANGERS[0])
    outcomes: list[Any] = []

    def alice_comes() -> None:
        clock.meanwhile = [lambda: slots.end(turn, right=False)]
        outcomes.append(slots.begin(ALICE))

    clock.meanwhile = [alice_comes]
    assert isinstance(slots.begin(STRANGERS[1]), Refusal)
    assert isinstance(outcomes[0], Turn)


def test_half_of_the_turns_are_kept_for_the_known_while_somebody_is_refused(
    folder: Path, clock: Clock
) -> None:
    slots = _slots(folder, clock, 4, 0)
    _known(slots, clock, ALICE)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:4]]
    assert isinstance(slots.begin(STRANGERS[4]), Refusal)
    for turn in turns[1:]:
        slots.end(turn, right=False)
    _turn(slots, STRANGERS[5])
    assert isinstance(slots.begin(STRANGERS[6]), Refusal)
    _turn(slots, ALICE)
    # and once nobody was for a while, there is room for everybody
    clock.now += login_turns.PRESSED
    _turn(slots, STRANGERS[7])


def test_an_address_that_has_taken_much_comes_last(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 1)
    for name in ("a", "b", "c"):  # other users each time
        turn = _turn(slots, Login("203.0.113.9", name))
        clock.now += 1
        slots.end(turn, right=False)
    turn = _turn(slots, STRANGERS[0])
    outcomes: list[Any] = []

    def another_comes() -> None:
        clock.meanwhile = [lambda: slots.end(turn, right=False)]
        outcomes.append(slots.begin(STRANGERS[1]))

    clock.meanwhile = [another_comes]
    began = clock.now
    assert slots.begin(Login("203.0.113.9", "d")) == Refusal(much=True)
    assert clock.now - began < 0.1, "it makes place, and is told at once"
    assert isinstance(outcomes[0], Turn)


def test_failures_elsewhere_cost_a_user_nothing(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, ALICE)
    for number in range(50):
        turn = _turn(slots, Login(f"198.51.100.{number}", "alice", "p"))
        clock.now += 1
        slots.end(turn, right=False)
    _turn(slots, STRANGERS[0])
    _turn(slots, ALICE)


def test_nobody_who_may_not_log_in_makes_a_project_pay(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, ALICE)
    for stranger in STRANGERS[:50]:
        turn = _turn(slots, stranger._replace(project="p"))
        clock.now += 1
        slots.end(turn, right=False)
    _turn(slots, STRANGERS[60])
    _turn(slots, ALICE)


def test_a_user_of_many_addresses_has_a_turn_like_another(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    robots = [Login(f"198.51.100.{number}", "robot", "robots") for number in range(8)]
    _known(slots, clock, *robots)
    for robot in robots:
        turn = _turn(slots, robot)
        clock.now += 0.5
        slots.end(turn, right=True)
    _turn(slots, STRANGERS[0])
    assert slots.begin(robots[0]) == Refusal(much=True)


def test_a_flood_of_addresses_does_not_make_the_known_forgotten(
    folder: Path, clock: Clock
) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, ALICE)
    _turn(slots, STRANGERS[0])
    for number in range(3000):
        login = Login(f"10.0.{number // 250}.{number % 250}", f"user{number}")
        assert isinstance(slots.begin(login), Refusal)
    _turn(slots, ALICE)


def _told(folder: Path, clock: Clock, *logins: Login) -> tuple[bytes, list[int]]:
    """Return the hashes by which a node tells others of users who have logged in."""
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, *logins)
    return slots.news()


def test_a_machine_that_was_just_started_learns_who_logged_in_before(
    folder: Path, clock: Clock
) -> None:
    """Its clock begins with it, so those logins were before the beginning of time."""
    logins = [Login("192.0.2.1", f"u{number}") for number in range(500)]
    (folder / "other").mkdir()
    key, hashes = _told(folder / "other", clock, *logins)
    clock.now = 60.0
    slots = _slots(folder, clock, 1, 0)
    slots.learn(key, [(number, 86400.0) for number in hashes])
    forgotten = []
    for login in logins:
        turn = _turn(slots, login)
        slots.end(turn, right=None)
        forgotten += [] if turn.known else [login]
    assert forgotten == []


def test_who_was_seen_earlier_elsewhere_makes_nobody_forgotten(folder: Path, clock: Clock) -> None:
    """A node that asks for the first time hears of all, the oldest as well."""
    (folder / "other").mkdir()
    login, day = Login("192.0.2.1", "u"), 86400.0
    key, (pair,) = _told(folder / "other", clock, login)
    slots = _slots(folder, clock, 1, 0)
    alike = [((pair + (number << 15)) % (1 << 64), number) for number in range(1, 10)]
    slots.learn(key, [(pair, day), *((one, 60.0) for one, number in alike if number < 8)])
    slots.learn(key, [(one, 3 * day) for one, number in alike if number >= 8])
    assert _turn(slots, login).known


def test_in_a_rush_everybody_runs(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_turns, "RUSH", 4.0)
    slots = _slots(folder, clock, 1, 0)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:9]]
    clock.now += login_turns.RUSH / 2
    turns.append(_turn(slots, STRANGERS[9]))
    clock.now += login_turns.RUSH / 2
    assert isinstance(slots.begin(STRANGERS[10]), Refusal)
    for turn in turns:
        slots.end(turn, right=True)
    # After a refusal there is no other rush for a while.
    _turn(slots, STRANGERS[11])
    assert isinstance(slots.begin(STRANGERS[12]), Refusal)
    clock.now += login_turns.RUSH
    _turn(slots, STRANGERS[13])


@pytest.fixture
def rush(monkeypatch: pytest.MonkeyPatch) -> float:
    """A rush lasts for so many seconds."""
    monkeypatch.setattr(login_turns, "RUSH", 4.0)
    return login_turns.RUSH


def _end(slots: LoginTurns, clock: Clock, turns: list[Turn], *, right: bool | None) -> None:
    """End turns, all of which took as long as a hash does."""
    clock.now += HASH
    for turn in turns:
        slots.end(turn, right=right)


HASH = 0.3


@pytest.mark.parametrize("right", (True, None))
def test_a_rush_lasts_until_passwords_are_known_to_be_wrong(
    folder: Path, clock: Clock, rush: float, right: bool | None
) -> None:
    """They may take long to be checked; and that a directory is away does not make them wrong."""
    slots = _slots(folder, clock, 1, 0)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:5]]
    clock.now += rush - 1
    _end(slots, clock, turns[1:], right=right)
    _turn(slots, STRANGERS[5])


@pytest.mark.parametrize(
    ("right", "wrong", "seconds", "is_rush"),
    (
        (0, 2, 0.0, True),
        (0, 3, 0.0, False),
        (3, 4, 0.0, False),
        (4, 4, 0.0, True),
        # too few to tell at once, and a mistake
        (0, 2, login_turns.DOUBTFUL, False),
        (0, 1, login_turns.DOUBTFUL, True),
    ),
)
def test_wrong_passwords_end_a_rush(
    folder: Path, clock: Clock, rush: float, right: int, wrong: int, seconds: float, is_rush: bool
) -> None:
    """A spray of passwords does not have all threads for as long as a rush may."""
    slots = _slots(folder, clock, 1, 0)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[: right + wrong]]
    _turn(slots, STRANGERS[20])
    _turn(slots, STRANGERS[21])
    _end(slots, clock, turns[:right], right=True)
    _end(slots, clock, turns[right:], right=False)
    clock.now += seconds
    assert isinstance(slots.begin(STRANGERS[22]), Turn) == is_rush


def test_wrong_passwords_of_other_times_end_no_rush(
    folder: Path, clock: Clock, rush: float
) -> None:
    """A few of them every minute would have everybody refused who comes at once with others."""
    slots = _slots(folder, clock, 1, 0)
    for number in range(9):
        _end(slots, clock, [_turn(slots, Login("203.0.113.9", f"user{number}"))], right=False)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:5]]
    # nor do those of another rush
    _end(slots, clock, turns, right=False)
    assert isinstance(slots.begin(Login("203.0.113.9", "again")), Turn)
    assert isinstance(slots.begin(STRANGERS[5]), Refusal)
    clock.now += rush
    for stranger in STRANGERS[10:15]:
        _turn(slots, stranger)


def test_what_takes_no_time_ends_no_rush(folder: Path, clock: Clock, rush: float) -> None:
    """Names that there are not cost nothing: whoever sends them would end it at will."""
    slots = _slots(folder, clock, 1, 0)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:3]]
    for stranger in STRANGERS[20:60]:
        turn = _turn(slots, stranger)
        clock.now += 0.002
        slots.end(turn, right=False)
    _end(slots, clock, turns, right=True)
    clock.now += login_turns.DOUBTFUL
    _turn(slots, STRANGERS[3])
    _turn(slots, STRANGERS[4])


def test_known_users_who_are_wrong_end_no_rush(folder: Path, clock: Clock, rush: float) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, *STRANGERS[:9])
    turns = [_turn(slots, known) for known in STRANGERS[:9]]
    _turn(slots, STRANGERS[20])
    _end(slots, clock, turns, right=False)
    _turn(slots, STRANGERS[21])
    _turn(slots, STRANGERS[22])


def test_who_waits_in_a_rush_is_not_refused(folder: Path, clock: Clock, rush: float) -> None:
    """Those who come after him and find no place run at once, and take the turns that he waits for.

    Refused, he would end the rush for them as well.
    """
    slots = _slots(folder, clock, 1, 1)
    _turn(slots, STRANGERS[0])
    clock.meanwhile = [lambda: _turn(slots, STRANGERS[2])]
    _turn(slots, STRANGERS[1])
    assert clock.now - LONG == pytest.approx(login_turns.WAIT, abs=0.05)


def test_the_known_are_refused_only_if_they_have_taken_much(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 1)
    _known(slots, clock, ALICE, *STRANGERS)
    turns = [_turn(slots, stranger) for stranger in STRANGERS[:20]]
    assert clock.now - LONG * 2 >= login_turns.WAIT  # the second of them waited, in vain
    for turn in turns[:8]:
        slots.end(turn, right=True)


@pytest.mark.parametrize("rush", (0.0, LONG), ids=("flood", "rush"))
def test_with_very_many_threads_the_known_log_in(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, rush: float
) -> None:
    """As of eight workers with a hundred greenlets each: more than the table has places."""
    running, waiting = shares(2, room(8, 200))
    slots = _slots(folder, clock, running, waiting)
    _known(slots, clock, ALICE)
    monkeypatch.setattr(login_turns, "RUSH", rush)
    table = slots._table()
    for number in range(login_turns._MOST + 1):
        with table.lock:
            found = table.ask(Login(f"10.0.{number // 256}.{number % 256}", "x"))
    assert isinstance(found, Refusal)
    turn = _turn(slots, ALICE)
    slots.end(turn, right=True)
    assert isinstance(slots.begin(ALICE), Turn)
    assert sum(table._found()[:3:2]) == login_turns._MOST


def test_many_who_wait_look_seldom(folder: Path, clock: Clock) -> None:
    """Each looks at all of them: hundreds, a hundred times a second, would take all cores."""
    slots = _slots(folder, clock, 1, 300)
    _turn(slots, STRANGERS[0])
    table = slots._table()
    for number in range(200):
        with table.lock:
            table.ask(Login(f"10.0.0.{number}", "x"))
    began, looks = clock.now, [0]

    def look() -> None:
        looks[0] += 1
        clock.meanwhile = [look]

    look()
    assert isinstance(slots.begin(STRANGERS[1]), Refusal)
    assert clock.now - began == pytest.approx(login_turns.WAIT, abs=0.2)
    assert looks[0] < 20


def test_who_guesses_known_users_passwords_behind_their_address_is_no_known_user(
    folder: Path, clock: Clock
) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, ALICE)
    slots.end(_turn(slots, ALICE), right=False)
    _turn(slots, STRANGERS[0])
    assert slots.begin(ALICE) == Refusal(much=True)
    # and she has to wait for little longer than half a minute
    clock.now += 2 * login_turns.HALVED
    _turn(slots, ALICE)


_HOLDS = """
import sys, time
from pathlib import Path
from keyfront.gateway.node.login_turns import Login, LoginTurns, Turn
slots = LoginTurns(Path(sys.argv[1]), running=1, waiting=0)
assert isinstance(slots.begin(Login("192.0.2.9", "killed")), Turn)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _HOLDS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process
        process.kill()


def test_a_killed_process_gives_its_turn_back(
    folder: Path, clock: Clock, holder: subprocess.Popen[bytes]
) -> None:
    clock.now = time.monotonic()  # the holder's
    slots = _slots(folder, clock, 1, 0)
    assert isinstance(slots.begin(ALICE), Refusal)
    clock.now += login_turns.PRESSED
    assert isinstance(slots.begin(ALICE), Refusal)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    clock.now += login_turns.PRESSED
    _turn(slots, ALICE)


def test_nobody_waits_for_a_process_that_is_stopped_inside_the_lock(
    folder: Path, clock: Clock
) -> None:
    slots = _slots(folder, clock, 1, 0)
    other = _slots(folder, clock, 1, 0)
    with other._lock:
        turn = _turn(slots, ALICE)
        assert isinstance(slots.begin(STRANGERS[0]), Refusal)
        slots.end(turn, right=True)
    _turn(slots, ALICE)


@pytest.mark.parametrize("content", (b"\xff", b"\x00\x7f", b"\x01", b"\x02", b"\x03"), ids=repr)
def test_a_damaged_file_is_used_again_within_a_moment(
    folder: Path, clock: Clock, content: bytes
) -> None:
    slots = _slots(folder, clock, 1, 1)
    slots.end(_turn(slots, ALICE), right=True)
    file = folder / login_turns.NAME
    size = file.stat().st_size
    with file.open("r+b") as written:
        written.write((content * size)[:size])
    for _ in range(3):
        clock.now += 1
        turn = slots.begin(ALICE)
        if isinstance(turn, Turn):
            slots.end(turn, right=True)
    slots.end(_turn(slots, ALICE), right=True)


def test_a_file_that_was_removed_is_made_anew(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    turn = _turn(slots, ALICE)
    (folder / login_turns.NAME).unlink()
    slots.end(turn, right=True)
    _turn(slots, ALICE)
    assert isinstance(_slots(folder, clock, 1, 0).begin(STRANGERS[0]), Refusal)


def test_the_file_tells_no_names(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, Login("192.0.2.1", "alice-the-user", "the-project"))
    content = (folder / login_turns.NAME).read_bytes()
    assert not any(word in content for word in (b"alice", b"project", b"192.0"))
    assert (folder / login_turns.NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    (
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8::1", "2001:db8::2:3:4", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("", "unix:", False),
    ),
)
def test_addresses_of_one_client_are_one(one: str, other: str, same: bool) -> None:
    assert (network(one) == network(other)) is same


# The wrapper.


def _environ(body: object, path: str = "/v3/auth/tokens", **more: Any) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return {
        "REQUEST_METHOD": "POST", "PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1",
        "CONTENT_LENGTH": str(len(data)), "wsgi.input": io.BytesIO(data), **more,
    }  # fmt: skip


def _password(user: object, scope: object = None, *methods: str) -> dict[str, object]:
    identity = {"methods": ["password", *methods], "password": {"user": user}}
    return {"auth": {"identity": identity, "scope": scope}}


_DOMAIN = {"domain": {"id": "default"}}
_CREDENTIAL = {"id": "c", "secret": "s"}


@pytest.mark.parametrize(
    "environ",
    (
        _environ(_password({"id": "u", "password": "p"})),
        _environ(_password({"name": "u", "password": "p", **_DOMAIN}), "/v3/auth/tokens/"),
        _environ(_password({"id": "u"}, None, "totp"), "/identity/v3/auth/tokens"),
        _environ(
            {"auth": {"identity": {"methods": ["application_credential"],
                                   "application_credential": _CREDENTIAL}}}
        ),
        _environ(json.dumps(_password({"id": "u"})).replace("password", "p\\u0061ssword").encode()),
        _environ(json.dumps(_password({"id": "u"})).encode("utf-16")),
        _environ(b"x" * 200000),
        _environ(b"", CONTENT_LENGTH="", HTTP_TRANSFER_ENCODING="chunked"),
        _environ({"user": {}}, "/v3/users/abc/password"),
        _environ(b"grant_type=client_credentials", "/v3/OS-OAUTH2/token",
                 HTTP_AUTHORIZATION="Basic YzpzZWNyZXQ="),
        _environ({"auth": {"identity": {"methods": ["password"], "password": []}, "scope": 1}}),
    ),
)
def test_what_is_a_login(environ: dict[str, Any]) -> None:
    before = environ["wsgi.input"].getvalue()
    login = login_of(environ)
    assert login is not None and login.address == "192.0.2.1"
    assert environ["wsgi.input"].read() == before
    assert "secret" not in repr(login)


@pytest.mark.parametrize(
    "environ",
    (
        _environ({"auth": {"identity": {"methods": ["token"], "token": {"id": "t"}}}}),
        _environ({"auth": {"identity": {"methods": ["totp"]}}}),
        _environ({"auth": {"identity": {"methods": None}}}),
        _environ({"auth": {"identity": {"methods": [["password"]]}}}),
        _environ({"auth": []}),
        _environ(b"{"),
        _environ(b"\xff\xfe\xff"),
        _environ(b"[" * 100000),
        _environ(b"", CONTENT_LENGTH=""),
        _environ({"credentials": {}}, "/v3/ec2tokens"),
        _environ(_password({"id": "u"}), "/v3/users"),
    ),
)
def test_what_is_none(environ: dict[str, Any]) -> None:
    before = environ["wsgi.input"].getvalue()
    assert login_of(environ) is None
    assert environ["wsgi.input"].read() == before


def test_a_user_is_the_same_however_it_is_written() -> None:
    one = b'{"auth":{"identity":{"methods":["password"],"password":{"user":{"id":"\\u0075"}}}}}'
    assert login_of(_environ(one)) == login_of(_environ(_password({"password": "p", "id": "u"})))
    names = [_password({"name": "u", "domain": {"id": x}}) for x in ("a", "b")]
    assert login_of(_environ(names[0])) != login_of(_environ(names[1]))


ME: dict[str, object] = {"name": "me", "domain": {"name": "d"}}


@pytest.mark.parametrize(
    "more",
    [{"id": "other"}, {"domain": {"name": "d", "id": "other"}}, {"id": "other", "x": 1}],
    ids=("id", "domain's id", "anything"),
)
def test_what_keystone_does_not_look_at_makes_nobody_else(more: dict[str, object]) -> None:
    """Where there is a name Keystone goes by it, so an id beside it may be that of anybody."""

    def credential(user: dict[str, object]) -> dict[str, object]:
        identity = {
            "methods": ["application_credential"],
            "application_credential": {"name": "c", "user": user, "secret": "s"},
        }
        return {"auth": {"identity": identity}}

    forms: tuple[Callable[[dict[str, object]], object], ...] = (
        _password,
        lambda project: _password({"name": "u"}, {"project": project}),
        lambda domain: _password({"name": "u"}, {"domain": {**domain, "name": "d"}}),
        credential,
    )
    for form in forms:
        found = [login_of(_environ(form(given))) for given in (ME, {**ME, **more})]
        assert found[0] == found[1] is not None


def _basic(client: bytes) -> str:
    return f"Basic {base64.b64encode(client).decode()}"


MINE = b"client_id=me&client_secret=s&client_id=other"


@pytest.mark.parametrize(
    ("authorization", "body", "kind"),
    (
        (_basic(b"me:s"), b"", ""),
        (_basic(b"me:s").replace("Basic", "bASIC  "), b"client_id=other", "x-www-form-urlencoded"),
        ("", MINE, "X-WWW-Form-Urlencoded; charset=utf-8"),
        (_basic(b"other:s").replace("Basic", "Bearer"), MINE, "x-www-form-urlencoded"),
        (_basic(b"other:\xff"), MINE, "x-www-form-urlencoded"),
        (_basic(b"other:s") + "!", MINE, "x-www-form-urlencoded"),
        ("", b"client_id=&client_id=other", "x-www-form-urlencoded"),
        ("", b"client_id=other", "json"),
        ("", b"\xff&client_id=other", "x-www-form-urlencoded"),
    ),
)
def test_a_client_is_the_one_that_keystone_finds(
    authorization: str, body: bytes, kind: str
) -> None:
    """In the form there may be another one than in the header, and the header may be no client's.
    """
    wrappers = pytest.importorskip("werkzeug.wrappers")
    environ = _environ(
        body, "/v3/OS-OAUTH2/token", HTTP_AUTHORIZATION=authorization,
        CONTENT_TYPE=kind and f"application/{kind}",
    )  # fmt: skip
    login = login_of(environ)
    request = wrappers.Request(environ)
    # As keystone/api/os_oauth2.py does.
    try:
        client = request.form.get("client_id")
    except UnicodeDecodeError:
        client = None
    if request.authorization and request.authorization.type == "basic":
        client = request.authorization.username
    assert login == Login("192.0.2.1", repr(("client", client)) if client else "")


class _Served:
    """A limited application, and what it answered."""

    def __init__(self, slots: LoginTurns | None, status: str = "201 Created") -> None:
        self.status = status
        self.headers: list[tuple[str, str]] = []
        self.refused = 0
        self.inside: Callable[[], object] = lambda: None
        self.application = limit_logins(self._answer, turns=slots, refused=self._count)

    def _answer(self, environ: Any, start_response: Any) -> list[bytes]:
        self.inside()
        start_response(self.status, self.headers)
        return [environ["wsgi.input"].read()]

    def _count(self) -> None:
        self.refused += 1

    def ask(self, environ: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
        seen: list[Any] = []
        body = b"".join(self.application(environ, lambda *told: seen.append(told)))
        return seen[0][0], dict(seen[0][1]), body


def test_a_refusal_is_keystones_own_error_and_the_rest_passes(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    slots = _slots(folder, clock, 1, 0)
    served = _Served(slots)
    login, other = _password({"id": "u"}), {"auth": {"identity": {"methods": ["token"]}}}
    turn = _turn(slots, ALICE)
    for _ in range(5):
        status, headers, body = served.ask(_environ(login))
        assert status == "503 Service Unavailable" and headers["Retry-After"] == "2"
        assert json.loads(body)["error"]["code"] == 503
    assert served.refused == 5
    assert len([x for x in caplog.records if x.levelname == "WARNING"]) == 1
    assert served.ask(_environ(other))[0] == "201 Created"
    slots.end(turn, right=True)
    assert json.loads(served.ask(_environ(login))[2]) == login


def test_a_turn_comes_back_from_an_application_that_raises(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    served = _Served(slots)

    def fail() -> None:
        raise RuntimeError("broken")

    served.inside = fail
    with pytest.raises(RuntimeError):
        served.ask(_environ(_password({"id": "u"})))
    _turn(slots, ALICE)


@pytest.mark.parametrize(
    ("status", "headers", "right"),
    (
        ("201 Created", [], True),
        ("204 No Content", [], True),
        ("401 Unauthorized", [], False),
        ("401 Unauthorized", [("Openstack-Auth-Receipt", "gAAAAA")], True),
        ("400 Bad Request", [], None),
        ("500 Internal Server Error", [], None),
        ("503 Service Unavailable", [("Retry-After", "1")], None),
    ),
)
def test_whether_a_password_was_right(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch,
    status: str, headers: list[tuple[str, str]], right: bool | None,
) -> None:  # fmt: skip
    """It is not wrong because something is away, or another factor is asked for."""
    ended: list[object] = []
    slots = _slots(folder, clock, 1, 0)
    monkeypatch.setattr(slots, "end", lambda turn, right: ended.append(right))
    served = _Served(slots, status)
    served.headers = headers
    served.ask(_environ(_password({"id": "u"})))
    assert ended == [right]


def test_a_known_user_whose_directory_is_away_stays_known(folder: Path, clock: Clock) -> None:
    slots = _slots(folder, clock, 1, 0)
    _known(slots, clock, ALICE)
    for _ in range(3):
        slots.end(_turn(slots, ALICE), right=None)
    _turn(slots, STRANGERS[0])
    _turn(slots, ALICE)


def test_without_turns_it_is_the_application_itself() -> None:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        return []

    assert limit_logins(application, turns=None) is application


@pytest.mark.parametrize("text", ("-1", "257", "two", "1.5", ""))
def test_what_cannot_be_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(login_limit.VARIABLE, text)
    with pytest.raises(OptionError, match=r"1 to 256, or 0"):
        from_environment()


@pytest.mark.parametrize(
    ("limit", "processes", "threads", "expected"),
    (
        (0, 2, 2, (0, 0)),
        (2, 2, 2, (2, 1)),
        (2, 2, 8, (2, 10)),
        (99, 2, 2, (3, 0)),
        (4, 1, 1, (1, 0)),
        (2, 2, 100, (2, 148)),
    ),
)
def test_a_quarter_of_the_threads_has_no_login(
    limit: int, processes: int, threads: int, expected: tuple[int, int]
) -> None:
    assert shares(limit, room(processes, threads)) == expected


def test_processes_of_their_own_have_logins_in_all_threads() -> None:
    assert shares(2, room(5, 4, own=1)) == (2, 2)
    assert shares(0, room(5, 4, own=1)) == (0, 0)


@pytest.mark.parametrize("text", ("-1", "4097", "two", ""))
def test_what_cannot_be_a_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(login_limit.OWN, text)
    with pytest.raises(OptionError, match="0 to 4096"):
        login_limit.own_processes()
