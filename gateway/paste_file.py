"""Finds what is wrong in a paste file, and on which line.

PasteDeploy's own messages name neither line nor, at times, file. The checks here run before a
load (can the file be read and parsed) and after a load that failed (what does it name that is not
there), so a good file pays next to nothing.
"""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from keyfront.errors import PasteFileError

_SECTION = re.compile(r"^\[(?P<name>[^\]]+)\]")
_KEY = re.compile(r"^(?P<key>[^\s=:#;][^=:]*?)\s*[=:]")
_SCHEME = re.compile(r"^[a-zA-Z]+:")
_FACTORY = re.compile(r"^(?P<module>\w+(\.\w+)*)(:(?P<attribute>\w+(\.\w+)*))?$")
APP_GROUPS = ("paste.app_factory", "paste.composite_factory", "paste.composit_factory")
_FILTER_GROUPS = ("paste.filter_factory", "paste.filter_app_factory")
_APP_KINDS = ("app", "application", "composite", "composit", "pipeline", "filter-app")
_FILTER_KINDS = ("filter",)


def check(path: Path) -> None:
    """Find out that a paste file can be read and parsed.

    :raises PasteFileError: it is missing, unreadable or not an INI file
    """
    _parse(path, _read(path))


def find_fault(path: Path, name: str, *, imports: bool = True) -> PasteFileError | None:
    """Find the first thing that application ``name`` of a paste file names and that is not there.

    :param imports: import the modules it names, to see whether they have what is named in them
    :returns: an error with file and line, or ``None`` where the file is not to blame
    """
    try:
        return next(_Search(imports).named(_File(path), name, _APP_KINDS), None)
    except RecursionError:
        return PasteFileError(f"{path}: {name} leads through too many sections, one to the next")


def egg_fault(uri: str, *groups: str) -> str | None:
    """Return the fault of ``egg:DISTRIBUTION[#NAME]`` as an entry point of these groups, if any."""
    distribution, _, name = uri.removeprefix("egg:").partition("#")
    name = name or "main"
    try:
        entry_points = metadata.distribution(distribution).entry_points
    except metadata.PackageNotFoundError:
        return f"the distribution {distribution} is not installed"
    except ValueError:
        return "a distribution must be named after egg:"
    if not any(entry.group in groups and entry.name == name for entry in entry_points):
        return f"{distribution} has no entry point {name} in {' or '.join(groups)}"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PasteFileError(f"{path}: there is no such paste file") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PasteFileError(f"{path}, line {line}: the paste file is not UTF-8 text") from None
    except OSError as error:
        raise PasteFileError(f"{path}: the paste file cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL
        raise PasteFileError(f"{str(path)!r}: is no path of a file") from None


def _parse(path: Path, text: str) -> configparser.ConfigParser:
    # as PasteDeploy does, so that both see the same
    absolute = path.absolute()
    if "%" in str(absolute):  # it puts the path among the values, where % begins a name
        raise PasteFileError(f"{path}: PasteDeploy reads no path with % in it; use another")
    parser = configparser.ConfigParser({"here": str(absolute.parent), "__file__": str(absolute)})
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text, source=str(path))
    except configparser.MissingSectionHeaderError as error:
        raise PasteFileError(
            f"{path}, line {error.lineno}: a line before the first [section]"
        ) from None
    except configparser.ParsingError as error:
        line = error.errors[0][0]
        raise PasteFileError(
            f"{path}, line {line}: neither a [section] nor a key = value"
        ) from None
    except configparser.DuplicateSectionError as error:
        raise PasteFileError(
            f"{path}, line {error.lineno}: there is a [{error.section}] already"
        ) from None
    except configparser.DuplicateOptionError as error:
        raise PasteFileError(
            f"{path}, line {error.lineno}: [{error.section}] has a {error.option} already"
        ) from None
    return parser


class _File:
    """A paste file, parsed, with the line numbers of its sections and keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = _read(path)
        self.parser = _parse(path, text)
        self._sections: dict[str, int] = {}
        self._keys: dict[tuple[str, str], int] = {}
        section = ""
        for number, line in enumerate(text.split("\n"), 1):
            if match := _SECTION.match(line):
                section = match["name"]
                self._sections[section] = number
            elif match := _KEY.match(line):
                self._keys[section, match["key"]] = number

    def section(self, name: str, kinds: tuple[str, ...]) -> str | None:
        """Return the header of the section that defines ``name``."""
        for section in self.parser.sections():
            kind, colon, rest = section.partition(":")
            if colon and kind in kinds and rest.strip() == name:
                return section
        return None

    def fault(self, section: str, key: str, text: str) -> PasteFileError:
        """Return an error with this file and the line of a key, or of its section without one.

        :param section: the header of the section
        :param key: the key in it, or an empty text
        :param text: the words that say what is wrong
        """
        line = self._keys.get((section, key), self._sections.get(section, 1))
        where = f"[{section}] {key}".strip()
        return PasteFileError(f"{self.path}, line {line}: {where}: {text}")


class _Search:
    """Follows an application through its sections, and yields what they name in vain."""

    def __init__(self, imports: bool) -> None:
        self._imports = imports
        self._seen: set[tuple[Path, str]] = set()

    def named(self, file: _File, name: str, kinds: tuple[str, ...]) -> Iterator[PasteFileError]:
        """Yield the faults of an application or filter of a file, by its name."""
        section = file.section(name, kinds)
        if section is not None:
            yield from self._section(file, section)
        elif kinds == _FILTER_KINDS:
            yield PasteFileError(f"{file.path}: has no filter {name} ([filter:{name}])")
        else:
            yield PasteFileError(
                f"{file.path}: has no application {name} ([app:{name}] or [pipeline:{name}])"
            )

    def _section(self, file: _File, section: str) -> Iterator[PasteFileError]:
        if (file.path, section) in self._seen:
            return
        self._seen.add((file.path, section))
        items: dict[str, str] = {}
        for where in (file.parser.default_section, section):
            for key in file.parser.defaults() if where != section else file.parser[section]:
                try:
                    items[key] = file.parser.get(where, key)
                except configparser.InterpolationMissingOptionError as error:
                    text = f"%({error.reference})s is not defined; a plain % is written %%"
                    yield file.fault(where, key, text)
                    return
                except configparser.InterpolationError:
                    yield file.fault(where, key, "a plain % is written %%")
                    return
        own = {key: value for key, value in items.items() if key not in file.parser.defaults()}
        kind = section.partition(":")[0]
        if kind == "pipeline":
            yield from self._pipeline(file, section, own)
        else:
            yield from self._single(file, section, kind, own)

    def _pipeline(
        self, file: _File, section: str, items: dict[str, str]
    ) -> Iterator[PasteFileError]:
        for key in items:
            known = ("pipeline", "filter-with", "require")
            if key not in known and not key.startswith("set "):
                yield file.fault(section, key, "a pipeline has no such setting")
        names = items.get("pipeline", "").split()
        if not names:
            yield file.fault(section, "pipeline", "names no application")
            return
        for name in names[:-1]:
            yield from self._reference(file, section, "pipeline", name, _FILTER_KINDS)
        yield from self._reference(file, section, "pipeline", names[-1], _APP_KINDS)
        if "filter-with" in items:
            with_ = items["filter-with"]
            yield from self._reference(file, section, "filter-with", with_, _FILTER_KINDS)

    def _single(
        self, file: _File, section: str, kind: str, items: dict[str, str]
    ) -> Iterator[PasteFileError]:
        is_filter = kind in ("filter", "filter-app")
        kinds, groups = (_FILTER_KINDS, _FILTER_GROUPS) if is_filter else (_APP_KINDS, APP_GROUPS)
        if "filter-with" in items:
            with_ = items["filter-with"]
            yield from self._reference(file, section, "filter-with", with_, _FILTER_KINDS)
        if "next" in items and kind == "filter-app":
            yield from self._reference(file, section, "next", items["next"], _APP_KINDS)
        elif kind == "filter-app":
            yield file.fault(section, "", "has no next = APPLICATION")
        if "use" in items:
            yield from self._reference(file, section, "use", items["use"], kinds)
        elif not any(group in items for group in groups):
            yield file.fault(
                section, "", f"has neither use = ... nor {groups[0]} = MODULE:CALLABLE"
            )
        for group in groups:
            fault = self._factory_fault(items[group]) if group in items else None
            if fault:
                yield file.fault(section, group, fault)
        if kind in ("composite", "composit"):
            for key, value in items.items():
                if key.startswith("/"):
                    yield from self._reference(file, section, key, value, _APP_KINDS)

    def _reference(
        self, file: _File, section: str, key: str, name: str, kinds: tuple[str, ...]
    ) -> Iterator[PasteFileError]:
        if not _SCHEME.match(name):
            target = file.section(name, kinds)
            if target is not None:
                yield from self._section(file, target)
                return
            wanted = "filter" if kinds == _FILTER_KINDS else "app"
            yield file.fault(section, key, f"{name} is not defined: there is no [{wanted}:{name}]")
            return
        scheme, _, rest = name.partition(":")
        scheme = scheme.lower()
        fault: str | None = None
        if scheme == "egg":
            groups = _FILTER_GROUPS if kinds == _FILTER_KINDS else APP_GROUPS
            fault = egg_fault(f"egg:{rest}", *groups)
        elif scheme == "call":
            fault = self._factory_fault(rest)
        elif scheme == "config":
            path_text, _, other_name = rest.partition("#")
            try:
                other = _File(file.path.absolute().parent / unquote(path_text))
            except PasteFileError as error:
                yield file.fault(section, key, str(error))
                return
            yield from self.named(other, other_name or "main", kinds)
        else:
            fault = "must begin with egg:, call: or config:, or be the name of a section"
        if fault:
            yield file.fault(section, key, f"{name}: {fault}")

    def _factory_fault(self, value: str) -> str | None:
        match = _FACTORY.match(value)
        if match is None:
            return f"{value} is not of the form MODULE:CALLABLE"
        return module_fault(match["module"], match["attribute"], imports=self._imports)


def module_fault(module: str, attribute: str | None, *, imports: bool) -> str | None:
    """Return the reason why a module has no such attribute, or ``None``.

    :param imports: import the module, else only look whether there is one
    """
    found: object = None
    try:
        if imports:
            found = importlib.import_module(module)
        elif importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(f"{missing}."):
            return f"there is no module {missing}"
        return None
    except (Exception, SystemExit):  # the module's own failure: the caller raises that one
        return None
    for part in (attribute or "").split(".") if imports and attribute else ():
        if not hasattr(found, part):
            return f"module {module} has no {attribute}"
        found = getattr(found, part)
    return None
