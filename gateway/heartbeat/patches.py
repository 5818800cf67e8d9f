"""Methods of other people's classes that are replaced for the whole process, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacements:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._made: list[tuple[type, str, Any]] = []

    def put(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by what ``make`` makes of it; again is no harm.

        :raises TypeError: the class is compiled and cannot be changed
        """
        if any(one is owner and other == name for one, other, _ in self._made):
            return
        original = getattr(owner, name)
        replacement = make(original)
        replacement.__name__ = name
        replacement.__doc__ = original.__doc__
        replacement.__wrapped__ = original
        own = vars(owner).get(name)
        setattr(owner, name, replacement)
        self._made.append((owner, name, own))

    def take_out(self) -> None:
        """Put the originals back."""
        while self._made:
            owner, name, own = self._made.pop()
            if own is None:
                delattr(owner, name)  # it was a base class's
            else:
                setattr(owner, name, own)
