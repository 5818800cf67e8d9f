"""The content of a configuration file: settings and directives, each with its place.

Two shapes hold for all servers: :class:`Settings` are names with values, as in an ini file, and
:class:`Directive` a tree of them, as nginx, Apache and HAProxy have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_TRUE = frozenset(("1", "true", "yes", "on", "t", "y"))
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_SECONDS = {
    "us": 1e-6,
    "usec": 1e-6,
    "ms": 1e-3,
    "msec": 1e-3,
    "": 1,
    "s": 1,
    "sec": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
    "w": 604800,
}
_SIZE = re.compile(r"(\d+)\s*([kKmMgGtT]?)(?:i?[bB])?")
_SIZES = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, order=True)
class Place:
    """A place in a file.

    :param path: the file's path on the machine
    :param line: from 1; 0 for the file as a whole
    """

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Malformed:
    """A file that cannot be read as what it is.

    :param place: the place of the first fault
    :param expected: the text that should be there, in words
    """

    place: Place
    expected: str


@dataclass(frozen=True)
class Setting:
    """A name with a value."""

    name: str
    value: str
    place: Place

    @property
    def on(self) -> bool:
        """True if it is switched on; in uWSGI and systemd a name without a value is, too."""
        return self.value.strip().lower() in _TRUE

    @property
    def number(self) -> int | None:
        """The value as a whole number; ``None`` if it is none."""
        text = self.value.strip()
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


@dataclass
class Settings:
    """Settings in their order; of several with one name the last one counts.

    :param path: the file that they begin in
    """

    path: str
    settings: list[Setting] = field(default_factory=list)

    def all(self, *names: str) -> list[Setting]:
        """Return the settings with one of these names, in their order."""
        return [setting for setting in self.settings if setting.name in names]

    def last(self, *names: str) -> Setting | None:
        """Return the one that counts; ``None`` if there is none."""
        found = self.all(*names)
        return found[-1] if found else None

    def number(self, *names: str, default: int) -> int:
        """Return a number, or the default where it is not set or none."""
        found = self.last(*names)
        number = found.number if found else None
        return default if number is None else number

    def on(self, *names: str, default: bool = False) -> bool:
        """Return whether one is switched on."""
        found = self.last(*names)
        return default if found is None else found.on

    def place(self, *names: str) -> Place:
        """Return the place where it is set, or else the file."""
        found = self.last(*names)
        return found.place if found else Place(self.path)


@dataclass(eq=False)
class Directive:
    """A directive with its arguments, and what is inside it.

    :param name: the name as written; Apache's are compared in lower case, see :meth:`is_`
    :param inside: the directives of its block; ``None`` if it has no block
    :param around: the directives it is in, the innermost last
    """

    name: str
    args: tuple[str, ...]
    place: Place
    inside: list[Directive] | None = None
    around: tuple[Directive, ...] = field(default=(), repr=False)

    def is_(self, *names: str) -> bool:
        """Return whether it has one of these names, in whatever case."""
        return self.name.lower() in names

    @property
    def value(self) -> str:
        """The arguments with blanks between them."""
        return " ".join(self.args)

    def __str__(self) -> str:
        return f"{self.name} {self.value}".strip()


@dataclass
class Tree:
    """The directives of a server, includes followed.

    :param path: the file that they begin in
    """

    path: str
    top: list[Directive] = field(default_factory=list)

    def walk(self, inside: Sequence[Directive] | None = None) -> Iterator[Directive]:
        """Give all directives, a block before what is in it."""
        stack = list(reversed(self.top if inside is None else inside))
        while stack:
            directive = stack.pop()
            yield directive
            stack.extend(reversed(directive.inside or ()))

    def all(self, *names: str, inside: Directive | None = None) -> list[Directive]:
        """Return the directives with one of these names (lower case), in a block or everywhere."""
        where = None if inside is None else inside.inside or ()
        return [directive for directive in self.walk(where) if directive.is_(*names)]

    def last(self, *names: str, inside: Directive | None = None) -> Directive | None:
        """Return the last of :meth:`all`."""
        found = self.all(*names, inside=inside)
        return found[-1] if found else None

    def effective(self, of: Directive, *names: str) -> Directive | None:
        """Return the directive of a name that holds for a block: its own, or of those around it."""
        for block in (of, *reversed(of.around)):
            for directive in reversed(block.inside or ()):
                if directive.is_(*names):
                    return directive
        for directive in reversed(self.top):
            if directive.is_(*names):
                return directive
        return None


def seconds(text: str, unit: str = "s") -> float | None:
    """Return a span of time in seconds: ``60``, ``1m 30s``, ``500ms``; ``None`` if it is none.

    :param unit: the unit of a bare number
    """
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        return None
    total = 0.0
    for number, given in parts:
        factor = _SECONDS.get(given or unit)
        if factor is None:
            return None
        total += float(number) * factor
    return total


def size(text: str) -> int | None:
    """Return a size in bytes: ``64k``, ``1G``; ``None`` if it is none."""
    match = _SIZE.fullmatch(text.strip())
    return int(match[1]) << _SIZES[match[2].lower()] if match else None
