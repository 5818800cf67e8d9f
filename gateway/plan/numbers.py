"""A number of the plan with its reason, a conflict between two, and the sheet they are put on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Number:
    """One setting and why it is what it is.

    :param name: dotted, as the server or library names it, for example ``uwsgi.processes``
    :param unit: ``processes``, ``seconds``, ``bytes``, ``MiB`` …; empty for a switch
    :param source: what it was computed from, with the figures, in one line
    :param breaks: what breaks beyond it or without it, a sentence in one line
    """

    name: str
    value: int | float | str | bool
    unit: str
    source: str
    breaks: str

    @property
    def why(self) -> str:
        """Source and what breaks, as a comment says it."""
        return f"{self.source}. {self.breaks}"


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Something that cannot be met.

    :param name: the number that is wanted
    :param wanted: what it comes to
    :param limit: what there is
    :param gives: which number must give, and how far, in one line
    """

    name: str
    wanted: float
    limit: float
    gives: str


class Sheet:
    """Numbers and conflicts in the order in which they are put down; each number only once."""

    def __init__(self) -> None:
        self._numbers: dict[str, Number] = {}
        self._conflicts: list[Conflict] = []

    def put(self, name: str, value: int, unit: str, source: str, breaks: str) -> int:
        """Put a number down and return its value.

        :raises ValueError: it is there already
        """
        if name in self._numbers:
            raise ValueError(f"{name} is computed twice")
        number = Number(name=name, value=value, unit=unit, source=source, breaks=breaks)
        self._numbers[name] = number
        return value

    def refuse(self, name: str, wanted: float, limit: float, gives: str) -> None:
        """Put down what cannot be met."""
        self._conflicts.append(Conflict(name=name, wanted=wanted, limit=limit, gives=gives))

    def __getitem__(self, name: str) -> int:
        value = self._numbers[name].value
        assert isinstance(value, int)
        return value

    @property
    def numbers(self) -> Mapping[str, Number]:
        return MappingProxyType(dict(self._numbers))

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        return tuple(self._conflicts)


def count(number: float, noun: str) -> str:
    """``1 core``, ``2 cores``, ``0.5 logins``: a number with its noun."""
    return f"{number:g} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of the regular nouns that the plan uses."""
    if noun.endswith(("s", "x")):
        return f"{noun}es"
    return f"{noun}s"
