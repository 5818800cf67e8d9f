"""Reads files of sections with ``name = value``: systemd, MySQL, MaxScale, sysctl and their kin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..settings import Place, Setting, Settings
from .files import Files


class Line(NamedTuple):
    """A setting and the section that it is in."""

    section: str
    setting: Setting


def lines(
    files: Files, path: str, text: str, *, bare: bool = False, continued: bool = False
) -> Iterator[Line]:
    """Give the settings of a text, and note what is none.

    :param bare: true if a name may stand without a value
    :param continued: true if a backslash at the end continues a line
    """
    section, pending, begun = "", "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not pending:
            begun = number
        if not line or line[0] in "#;":
            continue
        if continued and line.endswith("\\"):
            pending += f"{line[:-1].rstrip()} "
            continue
        line, pending = pending + line, ""
        if line[0] == "[":
            if not line.endswith("]"):
                files.broken(Place(path, number), "a ] at the end of the section's name")
                continue
            section = line[1:-1].strip()
            continue
        name, equals, value = line.partition("=")
        if not equals and not bare:
            files.broken(Place(path, begun), "NAME = VALUE, a [section] or a comment")
            continue
        setting = Setting(name.strip(), value.strip(), Place(path, begun))
        yield Line(section, setting)


def read(files: Files, path: str, *sections: str, bare: bool = False) -> Settings | None:
    """Read one file.

    :param sections: those whose settings are wanted; none are all
    :returns: ``None`` if the file cannot be read
    """
    text = files.text(path)
    if text is None:
        return None
    found = [
        line.setting
        for line in lines(files, path, text, bare=bare)
        if not sections or line.section in sections
    ]
    return Settings(path, found)


def mysql(files: Files, path: str) -> Settings | None:
    """Read MariaDB's or MySQL's configuration, its includes followed; names with ``_``."""
    found = Settings(path)
    if not _mysql(files, path, found, set()):
        return None
    return found


def _mysql(files: Files, path: str, found: Settings, seen: set[str]) -> bool:
    text = None if path in seen else files.text(path)
    seen.add(path)
    if text is None:
        return False
    plain = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "!includedir":
            for one in files.glob(f"{rest.strip()}/*.cnf"):
                _mysql(files, one, found, seen)
        elif word == "!include":
            _mysql(files, rest.strip(), found, seen)
        plain.append("" if word.startswith("!") else line)
    for section, setting in lines(files, path, "\n".join(plain), bare=True):
        if section in ("mysqld", "server", "mariadb", "mariadbd", "galera", "mysqld_safe"):
            name = setting.name.replace("-", "_").lower()
            value = setting.value.strip("\"'") or "1"
            found.settings.append(Setting(name, value, setting.place))
    return True


def words(files: Files, path: str) -> Settings | None:
    """Read a file of ``name value`` or ``-o value`` lines: memcached.conf, redis.conf."""
    text = files.text(path)
    if text is None:
        return None
    found = Settings(path)
    for number, line in enumerate(text.splitlines(), 1):
        name, _, value = line.strip().partition(" ")
        if name and not name.startswith("#"):
            found.settings.append(Setting(name, value.strip().strip('"'), Place(path, number)))
    return found
