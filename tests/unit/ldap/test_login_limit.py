"""How often a user may be refused at an address, before nothing more is sent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from keyfront.errors import CredentialsError, DirectoryTimeoutError, PoolTimeoutError, Verdict
from keyfront.middleware.ldap import login_limit as module
from keyfront.middleware.ldap.login_limit import LoginLimit
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


def login(limit: LoginLimit, name: str = DN, address: str = "a", *, right: bool = False) -> None:
    with limit.attempt(name, address, 0.0):
        if not right:
            raise CredentialsError(Verdict.WRONG_PASSWORD)


def is_sent(limit: LoginLimit, name: str = DN, address: str = "a") -> bool:
    try:
        with limit.attempt(name, address, 0.0):
            raise DirectoryTimeoutError("nothing is learnt")
    except DirectoryTimeoutError:
        return True
    except CredentialsError as error:
        assert error.verdict is Verdict.LOCKED and "nothing was sent" in str(error)
        return False


def refuse(limit: LoginLimit, times: int, name: str = DN, address: str = "a") -> None:
    for _ in range(times):
        with pytest.raises(CredentialsError, match="wrong password"):
            login(limit, name, address)


def test_no_more_than_may_be_refused(folder: Path | None) -> None:
    limit = LoginLimit(3, 60.0, SERVERS)
    refuse(limit, 3)
    assert not is_sent(limit)
    assert not is_sent(limit, "UID=jane, ou=People, dc=x")
    # of others, and of him elsewhere, they are
    assert is_sent(limit, address="b")
    assert is_sent(limit, "uid=joe,ou=People,dc=x")


def test_a_right_password_begins_anew(folder: Path | None) -> None:
    limit = LoginLimit(3, 60.0, SERVERS)
    for _ in range(3):
        refuse(limit, 2)
        login(limit, right=True)
    assert is_sent(limit)
    assert is_sent(limit)  # an outage counts for nothing


def test_the_time_ends(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    limit = LoginLimit(2, 60.0, SERVERS)
    refuse(limit, 1)
    now[0] += 50
    refuse(limit, 1)
    assert not is_sent(limit)
    now[0] += 11  # since the first one
    assert is_sent(limit)
    refuse(limit, 2)
    assert not is_sent(limit)


def test_those_under_way_count(folder: Path | None) -> None:
    """As many wrong passwords at once as one likes do not lock an account either."""
    limit = LoginLimit(2, 60.0, SERVERS)
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
    limit, other = LoginLimit(3, 60.0, SERVERS), LoginLimit(3, 60.0, SERVERS)
    refuse(limit, 2)
    refuse(other, 1)
    assert not is_sent(limit) and not is_sent(other)
    assert is_sent(LoginLimit(3, 60.0, ("ldap://another:389",)))
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"jane" not in path.read_bytes()
        path.unlink()  # as one who tidies up
    assert is_sent(limit)


def test_many_names_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_folder", lambda: None)
    monkeypatch.setattr(module, "_PLACES", 4)
    limit = LoginLimit(1, 60.0, None)
    for n in range(100):
        refuse(limit, 1, f"uid=u{n}")
    assert not is_sent(limit, "uid=u99")
