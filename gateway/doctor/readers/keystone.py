"""Reads keystone.conf and its snippets, with oslo.config's own parser, which knows the lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..settings import Place, Setting
from .files import Files, Unread

_INSTALL = "oslo.config is not installed here: run pip install 'keyfront[doctor]'"


@dataclass
class KeystoneConf:
    """Keystone's configuration.

    :param paths: the files, each over those before it
    """

    paths: list[str] = field(default_factory=list)
    settings: dict[tuple[str, str], list[Setting]] = field(default_factory=dict)

    def last(self, section: str, *names: str) -> Setting | None:
        """Return the setting that counts; ``None`` if none of the names is set."""
        for name in names:
            found = self.settings.get((section.lower(), name))
            if found:
                return found[-1]
        return None

    def text(self, section: str, name: str, default: str = "") -> str:
        """Return a value."""
        found = self.last(section, name)
        return default if found is None else found.value

    def number(self, section: str, name: str, default: int) -> int:
        """Return a whole number, or the default where there is none."""
        found = self.last(section, name)
        number = found.number if found else None
        return default if number is None else number

    def on(self, section: str, name: str, default: bool = False) -> bool:
        """Return whether something is switched on."""
        found = self.last(section, name)
        return default if found is None else found.on

    def place(self, section: str, name: str) -> Place:
        """Return the place where it is set, or else the last file."""
        found = self.last(section, name)
        return found.place if found else Place(self.path)

    @property
    def path(self) -> str:
        """The file into which a line should be written: the first, which is the operator's."""
        return self.paths[0] if self.paths else "keystone.conf"


def read(files: Files, paths: Sequence[str]) -> KeystoneConf | None:
    """Read files of Keystone's configuration.

    :param paths: the files, in the order in which Keystone reads them
    :returns: the configuration; ``None`` if no file can be read
    """
    try:
        from oslo_config import iniparser
    except ImportError:
        files.unread.append(Unread("keystone.conf", _INSTALL))
        return None

    class Parser(iniparser.BaseParser):
        """Notes each assignment with the line that it begins at."""

        def __init__(self, path: str) -> None:
            self.path = path
            self.section = "default"
            self.found: list[tuple[str, Setting]] = []
            self.begun = 0

        def _split_key_value(self, line: str) -> Any:
            self.begun = self.lineno
            return super()._split_key_value(line)

        def new_section(self, section: str) -> None:
            self.section = section.lower()

        def assignment(self, key: str, value: list[str]) -> None:
            joined = "\n".join(value).strip()
            self.found.append((self.section, Setting(key, joined, Place(self.path, self.begun))))

    conf = KeystoneConf()
    for path in paths:
        text = files.text(path)
        if text is None:
            continue
        conf.paths.append(path)
        parser = Parser(path)
        try:
            parser.parse(text.splitlines())
        except iniparser.ParseError as error:
            expected = "NAME = VALUE, a [section] or a comment"
            said = error.msg[:1].lower() + error.msg[1:]
            files.broken(Place(path, error.lineno), f"{expected}; oslo.config says: {said}")
        for section, setting in parser.found:
            conf.settings.setdefault((section, setting.name), []).append(setting)
    return conf if conf.paths else None
