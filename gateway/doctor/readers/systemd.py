"""Reads units of systemd with their drop-ins, or what ``systemctl cat`` printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..settings import Setting, Settings
from .files import Files
from .sections import lines

#: The folders of units; the first unit of a name counts.
FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_CAT = re.compile(r"^# (/\S+)$", re.MULTILINE)


@dataclass
class Unit:
    """A unit.

    :param name: ``nginx.service``
    :param sections: the settings of each section
    """

    name: str
    path: str
    sections: dict[str, Settings] = field(default_factory=dict)

    def section(self, name: str) -> Settings:
        """Return a section, empty if the unit has none of that name."""
        return self.sections.setdefault(name, Settings(self.path))

    @property
    def service(self) -> Settings:
        """The section ``[Service]``."""
        return self.section("Service")

    @property
    def command(self) -> str:
        """The command that the unit starts; of several commands the last."""
        found = self.service.last("ExecStart")
        return found.value.lstrip("@-:+!") if found else ""

    def add(self, section: str, setting: Setting) -> None:
        """Add a setting; one without a value takes away those before it."""
        settings = self.section(section)
        if setting.value:
            settings.settings.append(setting)
        else:
            kept = [one for one in settings.settings if one.name != setting.name]
            settings.settings = kept


def read(files: Files, name: str) -> Unit | None:
    """Read a unit by its name; ``None`` if there is none of that name."""
    path = next((f"{x}/{name}" for x in FOLDERS if files.exists(f"{x}/{name}")), "")
    drop_ins: dict[str, str] = {}
    # An instance has its template's file and drop-ins as well.
    template = re.sub(r"@[^.]*\.", "@.", name)
    if not path and template != name:
        path = next((f"{x}/{template}" for x in FOLDERS if files.exists(f"{x}/{template}")), "")
    for folder in FOLDERS:
        for owner in (name, template):
            for one in files.glob(f"{folder}/{owner}.d/*.conf"):
                drop_ins.setdefault(one.rpartition("/")[2], one)
    if not path and not drop_ins:
        return None
    paths = [path] if path else []
    return _of(files, name, paths + [drop_ins[key] for key in sorted(drop_ins)])


def _of(files: Files, name: str, paths: Sequence[str]) -> Unit:
    unit = Unit(name, paths[0])
    for path in paths:
        text = files.text(path)
        if text is not None:
            _enter(files, unit, path, text)
    return unit


def _enter(files: Files, unit: Unit, path: str, text: str) -> None:
    for section, setting in lines(files, path, text, continued=True):
        unit.add(section, setting)


def read_file(files: Files, path: str) -> Unit | None:
    """Read a file that holds a unit, or what ``systemctl cat UNIT`` printed."""
    text = files.text(path)
    if text is None:
        return None
    unit = Unit(path.rpartition("/")[2], path)
    parts = _CAT.split(text)
    _enter(files, unit, path, parts[0])
    for named, part in zip(parts[1::2], parts[2::2], strict=True):
        if unit.path == path and not unit.service.settings:
            unit.path, unit.name = named, named.rpartition("/")[2]
        _enter(files, unit, named, part)
    return unit
