"""A number of the plan with its reason, a conflict between two, and the table of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Number:
    """A setting of the plan, with the reason for its value.

    :param name: the dotted name that the server or library gives it, such as ``uwsgi.processes``
    :param value: the value, in ``unit``
    :param unit: ``processes``, ``seconds``, ``bytes``, ``MiB`` …; empty for a switch
    :param source: the figures it was computed from, in one line
    :param breaks: the consequence of going beyond it or without it, a sentence in one line
    """

    name: str
    value: int | float | str | bool
    unit: str
    source: str
    breaks: str

    @property
    def why(self) -> str:
        """The reason in one line: what it was computed from, and what breaks beyond it."""
        return f"{self.source}. {self.breaks}"


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A demand of the plan that the machine or a budget cannot meet.

    :param name: the name of the number that is too large
    :param wanted: its value
    :param limit: the largest value for which there is room
    :param gives: the number that must give and how far, in one line
    """

    name: str
    wanted: float
    limit: float
    gives: str


class Numbers:
    """The table that a plan is computed in: numbers and conflicts in the order of their making."""

    def __init__(self) -> None:
        self._numbers: dict[str, Number] = {}
        self._conflicts: list[Conflict] = []

    def put(self, name: str, value: int, unit: str, source: str, breaks: str) -> int:
        """Add a number; returns its value. The parameters are those of :class:`Number`.

        :raises ValueError: there is a number of that name already
        """
        if name in self._numbers:
            raise ValueError(f"{name} is computed twice")
        number = Number(name=name, value=value, unit=unit, source=source, breaks=breaks)
        self._numbers[name] = number
        return value

    def refuse(self, name: str, wanted: float, limit: float, gives: str) -> None:
        """Add a conflict; the parameters are those of :class:`Conflict`."""
        self._conflicts.append(Conflict(name=name, wanted=wanted, limit=limit, gives=gives))

    def __getitem__(self, name: str) -> int:
        """Return the value of a number that was added.

        :raises KeyError: there is no such number yet
        """
        value = self._numbers[name].value
        assert isinstance(value, int)
        return value

    @property
    def by_name(self) -> Mapping[str, Number]:
        """The numbers so far, by name."""
        return MappingProxyType(dict(self._numbers))

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The conflicts so far."""
        return tuple(self._conflicts)


def count(number: float, noun: str) -> str:
    """Return a number with its noun: ``1 core``, ``2 cores``, ``0.5 logins``."""
    return f"{number:g} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    """Return the _plural of a regular noun."""
    if noun.endswith(("s", "x")):
        return f"{noun}es"
    return f"{noun}s"
