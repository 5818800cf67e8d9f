"""Whose logins may wait on, and whose may not, while nobody answers for a part of a directory."""

from __future__ import annotations

import types

import pytest

from keyfront.errors import CredentialsError, DirectoryTimeoutError, PoolFullError, Verdict
from keyfront.middleware.ldap import logins as module
from keyfront.middleware.ldap.logins import SLOW_SECONDS, BindAttempt, SlowBinds

PEOPLE, REMOTE = "ou=People,dc=x", "ou=Remote,dc=x"
SIZE = 10


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=made.monotonic))
    return made


class Site:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waited_for = True
        self.binds = SlowBinds(SIZE, lambda: self.waited_for)

    def begin(self, name: str, times: int = 1) -> list[BindAttempt]:
        made = [self.binds.attempt(name) for _ in range(times)]
        for each in made:
            each.__enter__()
            assert each.first(30.0) == SLOW_SECONDS
        return made

    def answered(self, name: str) -> None:
        (made,) = self.begin(name)
        made.__exit__(None, None, None)

    def later(self, seconds: float = SLOW_SECONDS) -> None:
        self.clock.now += seconds

    def stay(self, attempts: list[BindAttempt]) -> int:
        """Return how many wait on; the others end."""
        staying = 0
        for each in attempts:
            if each.more():
                staying += 1
            else:
                each.__exit__(DirectoryTimeoutError, DirectoryTimeoutError("no answer"), None)
        return staying


@pytest.fixture
def site(clock: Clock) -> Site:
    return Site(clock)


def test_a_part_that_does_not_answer_keeps_half(site: Site) -> None:
    running = site.begin(f"uid=a,{REMOTE}", SIZE)
    site.later()
    site.waited_for = False
    assert site.stay(running) == SIZE  # nobody is kept out
    site.waited_for = True
    assert site.stay(running) == SIZE // 2
    site.answered(f"uid=b,{PEOPLE}")
    with pytest.raises(PoolFullError, match="ou=remote,dc=x"):
        site.binds.check("uid=c, OU=Remote , dc=x")
    site.binds.check(f"uid=c,{PEOPLE}")


def test_parts_of_a_part(site: Site) -> None:
    running = [x for n in range(SIZE) for x in site.begin(f"uid=a,ou={n},{REMOTE}")]
    site.later()
    assert site.stay(running) == SIZE // 2
    site.binds.check(f"uid=a,ou=10,{REMOTE}")  # nothing is known yet of the rest
    site.answered(f"uid=b,{PEOPLE}")
    with pytest.raises(PoolFullError, match="ou=remote,dc=x"):
        site.binds.check(f"uid=a,ou=10,{REMOTE}")


@pytest.mark.parametrize(
    "name", ["uid=a,ou=People,dc=x", "jane@example.org", "EXAMPLE\\jane", "jane", "cn=D\\, J,dc=x"]
)
def test_what_is_slow_and_answers_has_all_of_it(site: Site, name: str) -> None:
    running = site.begin(name, SIZE - 1)
    site.later()
    site.answered(name)
    assert site.stay(running) == SIZE - 1
    site.binds.check(name)
    # and not for ever
    site.later()
    (last, *_) = running
    last.__exit__(CredentialsError, CredentialsError(Verdict.WRONG_PASSWORD), None)
    assert site.stay(running[1:]) == SIZE - 2
    running = running[1:] + site.begin(name, 2)
    assert site.stay(running[-2:]) == 2  # there is room for two that have just begun
    site.later(10.0)
    assert site.stay(running) == SIZE // 2


def test_others_are_not_meant(site: Site) -> None:
    dead = site.begin("jane@dead.example.org", SIZE // 2 + 2)
    (well,) = site.begin("jane@example.org")
    site.later()
    assert site.stay([well]) == 0  # of all of them, nobody was answered
    site.answered("joe@example.org")
    (well,) = site.begin("jane@example.org")
    site.later(0.5)
    assert site.stay([well]) == 1
    assert site.stay(dead) == SIZE // 2


def test_the_end_of_a_login_is_its_own(site: Site) -> None:
    site.waited_for = False
    (one,) = site.begin(f"uid=a,{REMOTE}")
    assert one.first(0.5) == 0.5
    site.later(0.5)
    assert one.more() == 0.0
    assert one.first(None) == SLOW_SECONDS
    site.later(1000)
    assert one.more() > 0
