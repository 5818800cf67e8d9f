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
