"""Reads uWSGI's configuration: ini, YAML or JSON, inherited files, placeholders, loops.

Source: uWSGI 2.0.31, ``core/ini.c``, ``core/config.c``, ``core/uwsgi.c`` (the magic variables).
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from ..settings import Place, Setting, Settings
from .files import Files, Unread

_DEEPEST = 16
_PLACEHOLDER = re.compile(r"%\(([^()]+)\)|@\(([^()]+)\)|\$\(([^()]+)\)|%(%|[a-zA-Z])")
_INHERIT = ("ini", "yaml", "yml", "json", "include", "inherit", "config")
_ALIASES = {
    "p": "processes",
    "workers": "processes",
    "s": "socket",
    "uwsgi-socket": "socket",
    "venv": "virtualenv",
    "home": "virtualenv",
    "pyhome": "virtualenv",
    "H": "virtualenv",
    "l": "listen",
    "M": "master",
    "b": "buffer-size",
    "t": "harakiri",
    "w": "module",
    "wsgi": "module",
    "file": "wsgi-file",
    "R": "max-requests",
    "C": "chmod-socket",
    "L": "disable-logging",
    "pp": "pythonpath",
    "python-path": "pythonpath",
    "lazy-app": "lazy-apps",
    "sharedsocket": "shared-socket",
    "reload-mercy": "reload-mercy",
}
_CONDITIONS = (
    "if-env",
    "if-not-env",
    "if-opt",
    "if-not-opt",
    "if-file",
    "if-not-file",
    "if-dir",
    "if-not-dir",
    "if-exists",
    "if-not-exists",
    "if-reload",
    "if-hostname",
    "if-hostname-match",
)
_YAML = "PyYAML is not installed here: run pip install 'keyfront[doctor]'"


@dataclass
class UwsgiConf:
    """The configuration of a uWSGI.

    :param path: its first file
    :param settings: all options, those of its command line included, aliases by one name
    :param unit: the unit of systemd that starts it; empty if none was found
    """

    path: str
    settings: Settings
    unit: str = ""
    #: True if an emperor starts it, and ends it by a word of its own instead of a signal.
    vassal: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """The workers; with ``cheaper`` the most that there are."""
        return max(1, self.settings.number("processes", default=1))

    @property
    def threads(self) -> int:
        """The requests that a worker computes at a time: threads, greenlets or coroutines."""
        greenlets = self.settings.number("gevent", "async", default=0)
        return max(1, greenlets, self.settings.number("threads", default=1))


class _Reader:
    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.settings = Settings(path)
        self.variables: dict[str, str] = {}

    def file(self, name: str, depth: int = 0) -> bool:
        """Read a file, perhaps with ``:section``, and all that it inherits."""
        path, _, section = name.partition(":") if not self.files.exists(name) else (name, "", "")
        if depth > _DEEPEST:
            self.files.unread.append(Unread(path, "it inherits from itself"))
            return False
        text = self.files.text(path)
        if text is None:
            return False
        entries = self.entries(path, text, section or "uwsgi")
        loops: list[tuple[str, list[str]]] = []
        skipping: list[bool] = []
        for key, value, line in entries:
            place = Place(path, line)
            if key in _CONDITIONS:
                skipping.append(not self.condition(key, self.filled(value, path)))
                continue
            if key in ("endif", "end-if"):
                if skipping:
                    skipping.pop()
                continue
            if any(skipping):
                continue
            if key == "for":
                loops.append((value, self.filled(value, path).split()))
                continue
            if key in ("endfor", "end-for"):
                if loops:
                    loops.pop()
                continue
            if key == "for-glob":
                loops.append((value, self.files.glob(self.filled(value, path))))
                continue
            turns = loops[-1][1] if loops else [""]
            for turn in turns:
                given = value.replace("%(_)", turn) if loops else value
                self.option(key, self.filled(given, path), place, depth)
        return True

    def option(self, key: str, value: str, place: Place, depth: int) -> None:
        if key in ("set", "set-placeholder", "set-ph"):
            name, _, rest = value.partition("=")
            self.variables[name.strip()] = rest.strip()
            return
        if key == "env":
            name, _, rest = value.partition("=")
            self.variables.setdefault(f"$({name})", rest)
        if key in _INHERIT and not value.startswith(("http:", "https:", "data:", "exec:", "fd:")):
            wanted = value if value.startswith("/") else f"{_folder(place.path)}/{value}"
            if not self.file(wanted, depth + 1):
                self.files.broken(place, f"a file at {wanted}, which {key} names")
            return
        name = _ALIASES.get(key, key)
        self.variables[key] = value
        self.settings.settings.append(Setting(name, value or "true", place))

    def condition(self, key: str, value: str) -> bool:
        kind = key.removeprefix("if-").removeprefix("not-")
        if kind == "env":
            holds = f"$({value})" in self.variables
        elif kind == "opt":
            name, _, wanted = value.partition("=")
            found = self.settings.last(_ALIASES.get(name, name))
            holds = found is not None and (not wanted or found.value == wanted)
        elif kind in ("file", "dir", "exists"):
            holds = self.files.exists(value)
        else:
            holds = False
        return holds is not key.startswith("if-not-")

    def filled(self, value: str, path: str) -> str:
        """Return a value with its placeholders filled in; those that are unknown stay."""

        def one(match: re.Match[str]) -> str:
            if match[1] is not None:
                return self.variables.get(match[1], _computed(match[1], self.variables) or match[0])
            if match[2] is not None:
                return (self.files.text(match[2]) or "").strip()
            if match[3] is not None:
                return self.variables.get(f"$({match[3]})", match[0])
            if match[4] == "%":
                return "%"
            return _magic(match[4], path) or match[0]

        return _PLACEHOLDER.sub(one, value)

    def entries(self, path: str, text: str, section: str) -> list[tuple[str, str, int]]:
        """Return the keys, values and lines of a section."""
        if path.endswith((".yaml", ".yml")):
            return self.yaml(path, text, section)
        if path.endswith((".json", ".js")):
            return self.json(path, text, section)
        if path.endswith(".xml"):
            self.files.unread.append(Unread(path, "uWSGI's XML is not read here"))
            return []
        found: list[tuple[str, str, int]] = []
        asked, current, pending, begun = False, None, "", 0
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            begun = begun if pending else number
            if not line or line[0] in "#;":
                continue
            # uWSGI joins a line that ends with a backslash.
            if line.endswith("\\"):
                pending += line[:-1]
                continue
            line, pending = pending + line, ""
            if line[0] == "[":
                if not line.endswith("]"):
                    self.files.broken(Place(path, number), "a ] at the end of the section's name")
                    continue
                current = line[1:-1].strip()
                asked = asked or current == section
                continue
            if current is None:
                self.files.broken(
                    Place(path, number), f"[{section}] first: uWSGI ignores what stands before it"
                )
                continue
            if current == section:
                key, _, value = line.partition("=")
                found.append((key.strip(), value.strip(), begun))
        if not asked:
            self.files.broken(Place(path, 0), f"a section [{section}]: uWSGI does not start")
        return found

    def yaml(self, path: str, text: str, section: str) -> list[tuple[str, str, int]]:
        try:
            import yaml
        except ImportError:
            self.files.unread.append(Unread(path, _YAML))
            return []
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            pairs = {key.value: value for key, value in node.value}[section].value
            found = []
            for key, value in pairs:
                values = value.value if isinstance(value.value, list) else [value]
                found += [(key.value, one.value, key.start_mark.line + 1) for one in values]
            return found
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            self.files.broken(Place(path, mark.line + 1 if mark else 0), f"YAML: {error.problem}")
        except (AttributeError, KeyError, TypeError, ValueError):
            self.files.broken(Place(path), f"a mapping {section}: with options in it")
        return []

    def json(self, path: str, text: str, section: str) -> list[tuple[str, str, int]]:
        try:
            content: Any = json.loads(text)[section]
            found = []
            for key, value in content.items():
                number = text.count("\n", 0, max(0, text.find(f'"{key}"'))) + 1
                for one in value if isinstance(value, list) else [value]:
                    word = str(one).lower() if isinstance(one, bool) else str(one)
                    found.append((key, word, number))
            return found
        except json.JSONDecodeError as error:
            self.files.broken(Place(path, error.lineno), f"JSON: {error.msg}")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            self.files.broken(Place(path), f'an object "{section}" with options in it')
        return []


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _computed(text: str, variables: dict[str, str]) -> str:
    """Return the sum or product of ``%(processes * 2)``; empty if it is none."""
    match = re.fullmatch(r"([\w-]+)\s*([-+*/])\s*(\d+)", text)
    if match is None or not variables.get(match[1], "").isdigit():
        return ""
    left, right = int(variables[match[1]]), int(match[3])
    if match[2] == "/":
        return str(left // right) if right else ""
    return str({"+": left + right, "-": left - right, "*": left * right}[match[2]])


def _magic(letter: str, path: str) -> str:
    """Return a magic variable as far as it follows from the file's name or the machine."""
    name = path.rpartition("/")[2]
    stem, _, extension = name.rpartition(".")
    return {
        "p": path,
        "s": name,
        "d": f"{_folder(path)}/",
        "e": extension,
        "n": stem or name,
        "c": _folder(path).rpartition("/")[2],
        "o": path,
        "h": os.uname().nodename,
        "k": str(os.cpu_count() or 1),
        "x": "uwsgi",
        "t": "0",
        "u": str(os.getuid()),
    }.get(letter.lower() if letter not in "kK" else "k", "")


def read(files: Files, path: str, words: list[str] | None = None) -> UwsgiConf | None:
    """Read a configuration.

    :param words: the options of the command line that stand besides the file
    :returns: ``None`` if the file cannot be read
    """
    reader = _Reader(files, path)
    if not reader.file(path):
        return None
    for name, value in _options(words or []):
        if name not in _INHERIT:
            reader.option(name, value, Place(path), 0)
    return UwsgiConf(path.partition(":")[0], reader.settings)


def _options(words: list[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found.append((name, value))
        elif found and not found[-1][1] and not word.startswith("-"):
            found[-1] = (found[-1][0], word)
    return found


def of_command(command: str) -> tuple[str, list[str]] | None:
    """Return the file that a command gives to uWSGI, and its words; ``None`` if it is no uWSGI."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    names = [word.rpartition("/")[2] for word in words[:2]]
    if not names or not (names[0].startswith("uwsgi") or names == ["keyfront", "uwsgi"]):
        return None
    for name, value in _options(words):
        if name in _INHERIT and value:
            return value, words
    files = [x for x in words[1:] if re.search(r"\.(ini|ya?ml|json)(:\w+)?$", x)]
    return (files[0], words) if files else None
