"""What a directory refused of a service: its file, who may read it, and what is in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
import types
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import CredentialsError, Verdict
from keyfront.middleware.ldap import service_refusals
from keyfront.middleware.ldap.service_refusals import ServiceRefusals
from support.served import PATIENCE

ACCOUNT = ("cn=service", "ldap://one:389", "ldap://two:389")
SECRET = b"of the service"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "shared"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(service_refusals, "shared_folder", lambda: made)
    # Longer than any test takes, on a busy machine too.
    monkeypatch.setattr(service_refusals, "HOLD_SECONDS", service_refusals.MAX_HOLD_SECONDS)
    return made


def refused() -> CredentialsError:
    return CredentialsError(Verdict.LOCKED, 19, "constraintViolation", "too often", server="x")


def test_others_know_what_was_refused_and_not_the_password(folder: Path) -> None:
    one, other = ServiceRefusals(ACCOUNT), ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused())
    one.note(b"another", refused(), "ldap://two:389")
    told = other.held(SECRET)
    assert told is not None
    assert (told.verdict, told.code, told.server) == (Verdict.LOCKED, 19, "x")
    assert re.search(r"too often; it is not offered again for (300|[12]\d\d) s", str(told))
    assert other.held(SECRET, "ldap://two:389") is not None
    assert other.held(b"another") is None
    assert other.held(b"another", "ldap://two:389") is not None
    assert other.held(b"a third", "ldap://two:389") is None
    assert ServiceRefusals((*ACCOUNT, "more")).held(SECRET) is None
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert SECRET not in path.read_bytes()
    other.forget(b"another", "ldap://two:389")
    other.forget(SECRET, "ldap://one:389")
    assert one.held(SECRET) is None
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"salt": 1}', '{"salt": "", "refused": 1}'])
def test_a_broken_file_is_written_anew(folder: Path, content: str) -> None:
    one = ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused())
    (path,) = folder.glob("*.json")
    path.write_text(content)
    assert one.held(SECRET) is None
    one.note(SECRET, refused())
    assert ServiceRefusals(ACCOUNT).held(SECRET) is not None


def test_a_file_that_others_may_read_is_not_believed(folder: Path) -> None:
    one = ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused())
    (path,) = folder.glob("*.json")
    path.chmod(0o644)
    assert one.held(SECRET) is None


def test_without_a_folder_it_goes_on_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_refusals, "ALONE_SECONDS", PATIENCE)
    one = ServiceRefusals(ACCOUNT)
    folder.rename(folder.with_name("gone"))
    with one.turn(1.0) as mine:
        assert mine
    one.note(SECRET, refused())
    assert one.held(SECRET) is not None
    assert not one.shared


def test_it_tells_others_again_after_a_file_could_not_be_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or each process offered a wrong password by itself for good, and the account was locked."""
    monkeypatch.setattr(service_refusals, "ALONE_SECONDS", PATIENCE)
    one, other = ServiceRefusals(ACCOUNT), ServiceRefusals(ACCOUNT)
    other.note(b"another", refused())
    (path,) = folder.glob("*.lock")
    with FileLock(path):
        # Who holds it is stopped.
        monkeypatch.setattr(one._lock, "_seconds", 0.01)
        one.note(SECRET, refused())
        one.note(SECRET, refused(), "ldap://one:389")
        assert not one.shared
        # What others know it knows as well.
        assert one.held(SECRET) is not None and one.held(b"another") is not None
        assert other.held(SECRET) is None
    one._alone_until = 0.0
    one.note(SECRET, refused())
    assert one.shared and other.held(SECRET) is not None
    one.forget(SECRET, "ldap://one:389")
    assert one.held(SECRET) is None and other.held(SECRET) is None
    assert one.held(SECRET, "ldap://one:389") is None
    assert len(caplog.records) == 1 and "not free within" in caplog.text


def places(one: ServiceRefusals, *, of: str = "abcd") -> str:
    """Return the servers that a password is held back from; ``*`` if from all."""
    if one.held(SECRET) is not None:
        return "*"
    return "".join(x for x in of if one.held(SECRET, x) is not None)


def test_one_that_lags_stops_nobody_else(folder: Path) -> None:
    """Not even if nobody of the node has been taken yet."""
    one, other = ServiceRefusals(ACCOUNT), ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused(), "a")
    assert places(other) == "a"
    other.forget(SECRET, "b")
    # b has taken it: two that lag are no proof
    one.note(SECRET, refused(), "c")
    assert places(other) == "ac"
    # three are
    one.note(SECRET, refused(), "d")
    assert places(other) == "*"


def test_refused_by_the_second_server_it_is_wrong(folder: Path) -> None:
    one, other = ServiceRefusals(ACCOUNT), ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused(), "a")
    other.note(SECRET, refused(), "b")
    assert places(one) == places(other) == "*"
    other.forget(SECRET, "b")
    assert places(one) == "a"


def test_who_took_it_and_refuses_it_now_is_no_witness(folder: Path) -> None:
    one = ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused(), "a")
    one.forget(SECRET, "b")
    one.note(SECRET, refused(), "b")
    assert places(one) == "*"


def test_another_server_is_asked_first_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(service_refusals, "time", clock)
    monkeypatch.setattr(service_refusals, "HOLD_SECONDS", 10.0)
    one = ServiceRefusals(ACCOUNT)
    one.note(SECRET, refused(), "a")
    one.note(SECRET, refused(), "b")
    assert places(one) == "*"
    now[0] += 10.5
    # c has not been heard
    assert places(one) == "ab"
    one.note(SECRET, refused(), "c")
    assert places(one) == "*"
    # by now one refusal at a time is enough, and they are rarer and rarer
    offered = []
    for _ in range(600):
        now[0] += 1
        if (held := places(one)) not in ("*", "abcd"):
            free = next(x for x in "abcd" if x not in held)
            offered.append(free)
            one.note(SECRET, refused(), free)
    assert "d" in offered and len(offered) <= 5, offered


def test_one_who_stands_still_in_his_turn_does_not_stop_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_refusals, "_TURN_SECONDS", 0.05)
    accounts = [ServiceRefusals(ACCOUNT) for _ in range(service_refusals._TURNS + 1)]
    with contextlib.ExitStack() as stack:
        for one in accounts[:-1]:
            assert stack.enter_context(one.turn(PATIENCE))
        # So many at a time, whoever stands still.
        with accounts[-1].turn(0.5) as mine:
            assert not mine
    with accounts[-1].turn(0.0) as mine:
        assert mine


def test_a_turn_is_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever waits for longer takes the next, as one does who stands still for as long.
    monkeypatch.setattr(service_refusals, "_TURN_SECONDS", PATIENCE)
    one, other = ServiceRefusals(ACCOUNT), ServiceRefusals(ACCOUNT)
    with one.turn(0.0) as mine:
        assert mine
        with other.turn(0.01) as theirs:
            assert not theirs
    with other.turn(0.0) as mine:
        assert mine


def test_a_folder_of_others_is_not_used_and_old_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    place.mkdir(mode=0o755)
    monkeypatch.setattr(service_refusals, "PLACE", place)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    if os.getuid() == 0:
        os.chown(place, 1234, 1234)
        (place / "ldap").mkdir(mode=0o700)
        os.chown(place / "ldap", 1234, 1234)
        for name, age in (("new", 0), ("old", 90_000)):
            (place / "ldap" / name).touch()
            os.utime(place / "ldap" / name, (0, os.path.getmtime(place) - age))
        assert service_refusals.shared_folder() == place / "ldap"
        assert [each.name for each in (place / "ldap").iterdir()] == ["new"]
        (place / "ldap").chmod(0o750)
        assert service_refusals.shared_folder() is None
