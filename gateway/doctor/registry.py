"""The registry of checks, and what a check says.

A check is a function that looks at :class:`~.found.Found` and gives a :class:`Finding` for each
place that is wrong. :func:`check` enters it here, by its code; :mod:`.checks` imports all of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .settings import Place

if TYPE_CHECKING:
    from .found import Found

ERROR, WARNING, INFO = "error", "warning", "info"
#: The levels, worst first.
LEVELS = (ERROR, WARNING, INFO)
#: Layers that are a part of another one: what of it is Keystone's.
WITHIN = {"location": "nginx", "mod_wsgi": "apache", "pass": "apache", "backend": "haproxy"}
#: The layers that checks look at, in the order of a request: the part that has to be found for a
#: check to be made, and what it is called.
LAYERS = {
    "haproxy": "HAProxy",
    "nginx": "nginx",
    "apache": "Apache",
    "uwsgi": "uWSGI",
    "keystone": "keystone.conf",
    "ldap": "LDAP",
    "database": "the database's URL",
    "mysql": "MariaDB's configuration",
    "memcached": "memcached",
    "redis": "Redis' configuration",
    "keys": "key repositories",
    "server": "uWSGI or mod_wsgi",
    "location": "nginx's locations of Keystone",
    "mod_wsgi": "Apache's WSGIScriptAlias of Keystone",
    "pass": "Apache's ProxyPass to Keystone",
    "backend": "HAProxy's backends of Keystone",
    "systemd": "units of systemd",
    "kernel": "the kernel's settings",
    "versions": "versions",
    "rendered": "files of keyfront render",
    "files": "files",
    "live": "the running machine (--live)",
    "schema": "the database itself (--live)",
    "node": "another node (--compare)",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault that a check has found.

    :param what: the fault in one line, with the values that were found
    :param where: the places that it was read from, the first the one to change
    :param lines: the exact lines to be written instead, or the command to be run
    :param level: a level other than the check's own
    :param file: the file that the lines belong into, if that is not the first place's
    :param harm: the harm that this one does to users, if it is not the check's
    """

    what: str
    where: tuple[Place, ...] = ()
    lines: tuple[str, ...] = ()
    level: str = ""
    file: str = ""
    harm: str = ""


class UnknownError(Exception):
    """A check cannot be made for want of a figure; the text says of which and how to tell it."""


def fault(error: Exception) -> str:
    """Return the kind of an error and where it was raised; its text may hold a secret."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ""
    if frame is not None:
        name = frame.tb_frame.f_code.co_filename.rpartition("/")[2]
        where = f" at {name}:{frame.tb_lineno}"
    return f"{type(error).__name__}{where}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of the doctor.

    :param code: a letter for the layer, and two digits
    :param level: the level of its findings
    :param layers: the layers that must be found for it to be made, see :data:`LAYERS`
    :param holds: the state in which nothing is wrong, in one line
    :param harm: the harm that any other state does to users, in one sentence
    :param explanation: the reason, in a few sentences
    :param source: the document that says so, or the measurement that shows it
    """

    code: str
    level: str
    layers: tuple[str, ...]
    holds: str
    harm: str
    explanation: str
    source: str
    function: Callable[[Found], Iterator[Finding]]

    @property
    def link(self) -> str:
        """The command that explains the check; it comes with keyfront and needs no network."""
        return f"keyfront doctor --explain {self.code}"


#: All checks by code: the one registry of this package, filled when :mod:`.checks` is imported.
CHECKS: dict[str, Check] = {}

_CODE = re.compile(r"[A-Z][0-9]{2}")
Function = Callable[["Found"], Iterator[Finding]]


def check(
    code: str, level: str, *layers: str, holds: str, harm: str, source: str
) -> Callable[[Function], Function]:
    """Enter a function into the registry; its docstring is the explanation.

    The parameters are those of :class:`Check`.

    :raises ValueError: the code is taken, or a part of it is not one
    """
    if not _CODE.fullmatch(code) or code in CHECKS:
        raise ValueError(f"{code} is no code, or taken")
    if level not in LEVELS or not set(layers) <= set(LAYERS):
        raise ValueError(f"{code}: {level}, {layers}")

    def enter(function: Function) -> Function:
        explanation = " ".join((inspect.getdoc(function) or "").split())
        CHECKS[code] = Check(
            code=code,
            level=level,
            layers=layers,
            holds=holds,
            harm=harm,
            explanation=explanation,
            source=source,
            function=function,
        )
        return function

    return enter
