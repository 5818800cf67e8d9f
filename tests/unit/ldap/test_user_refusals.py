"""How often a user may be refused at an address, before nothing more is sent."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import CredentialsError, DirectoryTimeoutError, PoolTimeoutError, Verdict
from keyfront.middleware.ldap import LDAPPool, service_refusals
from keyfront.middleware.ldap import user_refusals as module
from keyfront.middleware.ldap.user_refusals import UserRefusals
from support.served import PATIENCE

SERVERS = ("ldap://one:389",)
DN = "uid=jane,ou=People,dc=x"


@pytest.fixture(params=["shared", "alone"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    found = tmp_path if request.param == "shared" else None
    monkeypatch.setattr(module, "shared_folder", lambda: found)
    return found


def login(limit: UserRefusals, name: str = DN, address: str = "a", *, right: bool = False) -> None:
    with limit.attempt(name, address, 0.0):
        if not right:
            raise CredentialsError(Verdict.WRONG_PASSWORD)


def is_sent(limit: UserRefusals, name: str = DN, address: str = "a") -> bool:
    try:
        with limit.attempt(name, address, 0.0):
            raise DirectoryTimeoutError("nothing is learnt")
    except DirectoryTimeoutError:
        return True
    except CredentialsError as error:
        assert error.verdict is Verdict.LOCKED and "nothing was sent" in str(error)
        return False


def refuse(limit: UserRefusals, times: int, name: str = DN, address: str = "a") -> None:
    for _ in range(times):
        with pytest.raises(CredentialsError, match="wrong password"):
            login(limit, name, address)


def test_no_more_than_may_be_refused(folder: Path | None) -> None:
    limit = UserRefusals(3, 60.0, SERVERS)
    refuse(limit, 3)
    assert not is_sent(limit)
    assert not is_sent(limit, "UID=jane, ou=People, dc=x")
    # of others, and of him elsewhere, they are
    assert is_sent(limit, address="b")
    assert is_sent(limit, "uid=joe,ou=People,dc=x")


def test_a_right_password_begins_anew(folder: Path | None) -> None:
    limit = UserRefusals(3, 60.0, SERVERS)
    for _ in range(3):
        refuse(limit, 2)
        login(limit, right=True)
    assert is_sent(limit)
    assert is_sent(limit)  # an outage counts for nothing


def test_the_time_ends(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    limit = UserRefusals(2, 60.0, SERVERS)
    refuse(limit, 1)
    now[0] += 50
    refuse(limit, 1)
    assert not is_sent(limit)
    now[0] += 59  # since the last one
    assert not is_sent(limit)
    now[0] += 1
    assert is_sent(limit)
    refuse(limit, 2)
    assert not is_sent(limit)


def test_one_at_a_time_is_counted_as_directories_do(
    folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the time after the one before: Active Directory adds them all up. And not twice
    as many, before and after the end of a time that began with the first."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    limit = UserRefusals(3, 60.0, SERVERS)
    for _ in range(3):
        refuse(limit, 1)
        now[0] += 59
    for _ in range(4):
        assert not is_sent(limit)
        now[0] += 0.2


def test_a_worker_that_is_killed_in_a_login_takes_no_place_for_long(
    folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if others log in all the time; what it took is over in twice as long as a BIND takes."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    limit = UserRefusals(2, 7 * 86400.0, SERVERS)
    killed = [limit.attempt(DN, "a", 0.0) for _ in range(3)]  # without a word of how they ended
    for each in killed[:2]:
        each.__enter__()
    with pytest.raises(PoolTimeoutError):
        login(limit, right=True)
    now[0] += 2 * module.BIND_SECONDS
    login(limit, right=True)
    killed[2].__enter__()
    for _ in range(21):
        login(limit, right=True)
        now[0] += module.BIND_SECONDS / 10
    with limit.attempt(DN, "a", 0.0), limit.attempt(DN, "a", 0.0):
        now[0] += module.BIND_SECONDS  # what goes on for long counts for this long at least
        with pytest.raises(PoolTimeoutError):
            login(limit, right=True)
    refuse(limit, 2)
    assert not is_sent(limit)


SPELLINGS = [
    (DN, "uid=JANE , ou = people,DC=X"),
    (DN, "UID=\uff4aane,ou=People,dc=x"),  # in full width
    (DN, r"uid=\6aane,ou=People,dc=x"),
    (DN, r"uid=j\61\6Ee,ou=People,dc=x"),
    (DN, "0.9.2342.19200300.100.1.1=jane,ou=People,dc=x"),
    (DN, "userid=#04046A616e65,ou=People,dc=x"),
    (DN, 'uid="jane";ou=People;dc=x'),
    (DN, "uid=ja\u00adne,ou=People,dc=x"),  # a hyphen that is not there
    ("cn=Jane Doe,dc=x", "cn=  Jane    doe\\20,dc=x"),
    ("cn=Jane Doe,dc=x", "cn=Jane\u3000Doe,dc=x"),
    ("cn=Stra\u00dfe,dc=x", "cn=STRASSE,dc=x"),
    ("cn=zo\u00eb,dc=x", "cn=zoe\u0308,dc=x"),
    ("cn=doe\\, jane,dc=x", "cn=Doe\\2C Jane,dc=x"),
    ("cn=jane+uid=j,dc=x", "UID=j+CN=jane,dc=x"),
    ("jane@example.org", "Jane@EXAMPLE.org"),
    ("EXAMPLE\\adam", "example\\Adam"),
]


@pytest.mark.parametrize(("name", "spelled"), SPELLINGS)
def test_a_name_counts_however_it_is_spelled(folder: Path | None, name: str, spelled: str) -> None:
    limit = UserRefusals(1, 60.0, SERVERS)
    refuse(limit, 1, spelled)
    assert not is_sent(limit, name)


OTHERS = ["jan", "uid=janet,ou=People,dc=x", "", "\\", "\udcff", "=", "uid=#,dc=x", "#0", "\\zz"]


@pytest.mark.parametrize("other", OTHERS)
def test_another_name_is_another(folder: Path | None, other: str) -> None:
    limit = UserRefusals(1, 60.0, SERVERS)
    refuse(limit, 1)
    assert is_sent(limit, other)


def test_it_counts_with_others_again_after_a_file_could_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or each process had its own limit for good, and an account could be locked by their sum."""
    monkeypatch.setattr(module, "shared_folder", lambda: tmp_path)
    limit, other = UserRefusals(3, 60.0, SERVERS), UserRefusals(3, 60.0, SERVERS)
    refuse(other, 2)
    (path,) = tmp_path.glob("*-lock")
    with FileLock(path):
        # Who holds it is stopped.
        monkeypatch.setattr(limit._lock, "_seconds", 0.01)
        refuse(limit, 1)
        refuse(limit, 1)  # and he waits for it no second time
    assert is_sent(limit)
    monkeypatch.setattr(module, "ALONE_SECONDS", 0.0)
    limit._alone_until = 0.0
    refuse(limit, 1)
    assert not is_sent(limit) and not is_sent(other)
    lines = [x for x in caplog.records if x.levelno == logging.WARNING]
    assert len(lines) == 1 and "not free within" in lines[0].getMessage()


def test_a_fork_while_a_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_folder", lambda: None)
    with LDAPPool(SERVERS, min_size=0, max_refused_logins=1) as pool:
        limit = pool._user_refusals
        assert limit is not None
        with limit._threads:
            pool._after_fork()
            refuse(limit, 1)
        assert not is_sent(limit)


def test_many_names_push_out_nobody_who_was_refused_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_folder", lambda: None)
    monkeypatch.setattr(module, "_PLACES", 1)
    limit = UserRefusals(2, 60.0, None)
    refuse(limit, 2)
    for n in range(50):
        refuse(limit, 1, f"uid=u{n}")
    assert not is_sent(limit)


def test_those_under_way_count(folder: Path | None) -> None:
    """As many wrong passwords at once as one likes do not lock an account either."""
    limit = UserRefusals(2, 60.0, SERVERS)
    with limit.attempt(DN, "a", 0.0), limit.attempt(DN, "a", 0.0):
        with pytest.raises(PoolTimeoutError), limit.attempt(DN, "a", 0.01):
            pass
        assert is_sent(limit, address="b")
    # and right ones wait for each other, however many
    done: list[int] = []

    def log_in(number: int) -> None:
        with limit.attempt(DN, "a", PATIENCE):
            done.append(number)

    threads = [threading.Thread(target=log_in, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 20


def test_all_processes_of_a_node_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "shared_folder", lambda: tmp_path)
    limit, other = UserRefusals(3, 60.0, SERVERS), UserRefusals(3, 60.0, SERVERS)
    refuse(limit, 2)
    refuse(other, 1)
    assert not is_sent(limit) and not is_sent(other)
    assert is_sent(UserRefusals(3, 60.0, ("ldap://another:389",)))
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"jane" not in path.read_bytes()
        path.unlink()  # as one who tidies up
    assert is_sent(limit)


def test_a_file_in_use_is_not_taken_for_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts removes what nobody has written for a day."""
    monkeypatch.setattr(module, "shared_folder", lambda: tmp_path)
    refuse(UserRefusals(2, 60.0, SERVERS), 1)
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    for each in files:
        os.utime(each, (0, 0))
    limit = UserRefusals(2, 60.0, SERVERS)
    refuse(limit, 1)
    service_refusals._remove_old(tmp_path)
    assert list(tmp_path.iterdir()) == files
    assert not is_sent(UserRefusals(2, 60.0, SERVERS))


def test_many_names_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_folder", lambda: None)
    monkeypatch.setattr(module, "_PLACES", 4)
    limit = UserRefusals(1, 60.0, None)
    for n in range(100):
        refuse(limit, 1, f"uid=u{n}")
    assert not is_sent(limit, "uid=u99")
