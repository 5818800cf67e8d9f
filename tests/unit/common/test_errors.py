"""The error tree: one line each, and whole after crossing a process border."""

from __future__ import annotations

import copy
import pickle

import pytest

from keyfront import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KeyfrontError)
]
ARGUMENTS: dict[type, tuple[object, ...]] = {
    errors.OptionError: ("--listen", "x\ny", "HOST:PORT"),
    errors.DirectoryAnswerError: (32, "noSuchObject", "gone\n  for good", "dc=x", ["ldap://y"]),
    errors.CredentialsError: (errors.Verdict.LOCKED, 49, "invalidCredentials", "data\n  775"),
}


def make(kind: type[errors.KeyfrontError]) -> errors.KeyfrontError:
    return kind(*ARGUMENTS.get(kind, ("what is wrong\n  and  where",)))  # type: ignore[arg-type]


def test_the_tree_is_looked_at() -> None:
    assert len(KINDS) > 8
    assert errors.OptionError in KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_line(kind: type[errors.KeyfrontError]) -> None:
    made = make(kind)
    assert "\n" not in str(made)
    assert "  " not in str(made)
    assert made.message == str(made) != ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_all(kind: type[errors.KeyfrontError], protocol: int) -> None:
    made = make(kind)
    for again in (pickle.loads(pickle.dumps(made, protocol)), copy.copy(made)):
        assert type(again) is kind
        assert str(again) == str(made)
        assert again.args == made.args
        assert vars(again) == vars(made)


def test_option_error_says_what_is_allowed() -> None:
    error = errors.OptionError("--stop-timeout", 0, "a number of seconds, 1 to 3600")
    assert str(error) == "--stop-timeout = 0: must be a number of seconds, 1 to 3600"
    assert (error.option, error.value, error.allowed) == (
        "--stop-timeout",
        0,
        "a number of seconds, 1 to 3600",
    )


DIRECTORY = [kind for kind in KINDS if issubclass(kind, errors.DirectoryError)]


@pytest.mark.parametrize("kind", DIRECTORY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_directory_errors_name_the_server_once(
    kind: type[errors.DirectoryError], protocol: int
) -> None:
    made = kind(*ARGUMENTS.get(kind, ("it\nis gone",)), server="ldap://a:389")  # type: ignore[arg-type]
    assert str(made).startswith("ldap://a:389: ")
    again = pickle.loads(pickle.dumps(made, protocol))
    assert (str(again), again.server, vars(again)) == (str(made), "ldap://a:389", vars(made))


def test_an_outage_is_not_a_verdict_on_the_user() -> None:
    for kind in DIRECTORY:
        assert not (
            issubclass(kind, errors.DirectoryUnavailableError)
            and issubclass(kind, errors.DirectoryAnswerError)
        )


def test_an_answer_keeps_what_the_server_said() -> None:
    error = errors.DirectoryAnswerError(
        10, "referral", "elsewhere", "dc=x", ["ldap://b"], server="ldap://a", advice="ask there"
    )
    assert str(error) == "ldap://a: referral (10): elsewhere: ask there"
    assert (error.code, error.name, error.diagnostic) == (10, "referral", "elsewhere")
    assert (error.matched_dn, error.referrals) == ("dc=x", ("ldap://b",))


def test_a_verdict_is_told_and_kept() -> None:
    error = pickle.loads(pickle.dumps(errors.CredentialsError(errors.Verdict.LOCKED)))
    assert error.verdict is errors.Verdict.LOCKED
    assert str(error) == "invalidCredentials (49): account locked"


def test_a_servers_words_are_bounded_and_harmless() -> None:
    error = errors.DirectoryAnswerError(80, "other", "\x1b[2J\x00red\r\nline" + "x" * 10_000_000)
    assert "\x1b" not in str(error)
    assert "\x00" not in str(error)
    assert "?[2J?red line" in str(error)
    assert len(str(error)) < 400
