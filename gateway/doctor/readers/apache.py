"""Reads Apache's configuration: includes, conditions and variables followed, as at its start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..settings import Directive, Place, Tree
from .files import Files, Unread

_DEEPEST = 32
_WORD = re.compile(r"\s*(?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|(\S+))")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_EXPORT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*$", re.MULTILINE)
# In every build, or so usual that a condition on them is taken to hold.
_BUILT_IN = frozenset(
    (
        "core.c",
        "mod_so.c",
        "http_core.c",
        "so_module",
        "core_module",
        "version_module",
        "mod_version.c",
        "unixd_module",
        "mod_unixd.c",
        "log_config_module",
        "mod_log_config.c",
        "logio_module",
        "mod_logio.c",
        "watchdog_module",
        "mod_watchdog.c",
    )
)
# Of a part of a configuration that loads none: event is what distributions load.
_OTHER_MPMS = ("mpm_prefork_module", "mpm_worker_module", "prefork.c", "worker.c")
_CONDITIONS = ("ifmodule", "ifdefine", "ifversion", "iffile", "ifdirective", "ifsection")


class _Reader:
    def __init__(self, files: Files, path: str, all_modules: bool) -> None:
        self.files = files
        self.tree = Tree(path)
        self.all_modules = all_modules
        self.modules: set[str] = set(_BUILT_IN)
        self.loaded = False
        folder = path.rpartition("/")[0]
        self.root = folder.rpartition("/")[0] if folder.endswith("/conf") else folder
        self.variables: dict[str, str] = {}
        envvars = f"{folder}/envvars"
        if files.exists(envvars):
            text = files.text(envvars) or ""
            for name, value in _EXPORT.findall(text):
                self.variables[name] = value.strip("\"'").replace("$SUFFIX", "")

    def run(self) -> bool:
        return self.file(self.tree.path, [], ())

    def file(self, path: str, within: list[Directive], open_: tuple[Directive, ...]) -> bool:
        """Read a file into the innermost of the open blocks."""
        if len(within) > _DEEPEST:
            return False
        text = self.files.text(path)
        if text is None:
            return False
        stack: list[Directive] = []
        # How many conditions that do not hold are open, and all blocks' names.
        skipped: list[str] = []
        for number, line in _joined(text):
            place = Place(path, number)
            if line.startswith("</"):
                name = line[2:].rstrip().removesuffix(">").strip()
                self.close(name, place, stack, skipped)
                continue
            if line.startswith("<"):
                if not line.endswith(">"):
                    self.files.broken(place, f"a > at the end of {line.split()[0]}")
                    line += ">"
                name, _, rest = line[1:-1].partition(" ")
                if skipped:
                    skipped.append(name.lower())
                    continue
                directive = Directive(
                    name, tuple(self.words(rest)), place, [], (*open_, *_real(stack))
                )
                if not self.holds(directive):
                    skipped.append(name.lower())
                    continue
                if name.lower() not in _CONDITIONS:
                    self.enter(directive)
                stack.append(directive)
                continue
            if skipped:
                continue
            name, *arguments = self.words(line) or [""]
            around = (*open_, *_real(stack))
            directive = Directive(name, tuple(arguments), place, None, around)
            self.plain(directive, within)
        for left in stack:
            self.files.broken(left.place, f"</{left.name}> before the end of the file")
        return True

    def close(self, name: str, place: Place, stack: list[Directive], skipped: list[str]) -> None:
        if skipped:
            if skipped[-1] == name.lower():
                skipped.pop()
            return
        if not stack:
            self.files.broken(place, f"<{name}> before </{name}>")
        elif stack[-1].name.lower() != name.lower():
            wanted = stack[-1]
            self.files.broken(place, f"</{wanted.name}>, which line {wanted.place.line} opened")
            if any(x.name.lower() == name.lower() for x in stack):
                while stack.pop().name.lower() != name.lower():
                    pass
        else:
            stack.pop()

    def plain(self, directive: Directive, within: list[Directive]) -> None:
        name, arguments = directive.name.lower(), directive.args
        if name in ("include", "includeoptional") and arguments:
            self.include(directive, name == "include", within)
            return
        if name == "define" and arguments:
            self.variables[arguments[0]] = arguments[1] if len(arguments) > 1 else ""
        elif name == "undefine" and arguments:
            self.variables.pop(arguments[0], None)
        elif name == "serverroot" and arguments:
            self.root = arguments[0].rstrip("/")
        elif name == "loadmodule" and len(arguments) == 2:
            self.loaded = True
            module = arguments[0].removesuffix("_module")
            self.modules |= {arguments[0], f"mod_{module}.c", f"{module}.c"}
            self.modules.add(f"{module.removeprefix('mpm_')}.c")
        self.enter(directive)

    def enter(self, directive: Directive) -> None:
        around = directive.around
        into = self.tree.top if not around else around[-1].inside
        assert into is not None
        into.append(directive)

    def include(self, directive: Directive, needed: bool, within: list[Directive]) -> None:
        pattern = directive.args[0]
        if not pattern.startswith("/"):
            pattern = f"{self.root}/{pattern}"
        found = self.files.glob(pattern)
        if not found and needed:
            if any(x in pattern for x in "*?["):
                self.files.broken(
                    directive.place, f"a file that fits {pattern} (or IncludeOptional)"
                )
            else:
                self.files.broken(directive.place, f"a file at {pattern}, which Include names")
        for path in found:
            if os.path.isdir(self.files.resolved(path)):
                self.files.unread.append(Unread(path, "a folder is included; not followed"))
                continue
            self.file(path, [*within, directive], directive.around)

    def holds(self, directive: Directive) -> bool:
        """Return whether what is in a condition counts."""
        name = directive.name.lower()
        if name not in _CONDITIONS or not directive.args:
            return True
        word = directive.args[0]
        wanted = not word.startswith("!")
        word = word.removeprefix("!")
        if name == "ifmodule":
            held = word in self.modules or (self.all_modules and word not in _OTHER_MPMS)
            return held is wanted
        if name == "ifdefine":
            return (word in self.variables) is wanted
        if name == "iffile":
            path = word if word.startswith("/") else f"{self.root}/{word}"
            return self.files.exists(path) is wanted
        # Every Apache that is in use is newer than what configurations ask about.
        return not (name == "ifversion" and directive.args[0].startswith("<"))

    def words(self, text: str) -> list[str]:
        """Return the words of a line, quotes and variables resolved."""
        found = []
        for match in _WORD.finditer(text):
            quoted = match[1] if match[1] is not None else match[2]
            word = match[3] if quoted is None else re.sub(r"\\([\"'\\])", r"\1", quoted)
            found.append(_VARIABLE.sub(lambda x: self.variables.get(x[1], x[0]), word))
        return found


def _real(stack: list[Directive]) -> tuple[Directive, ...]:
    return tuple(x for x in stack if x.name.lower() not in _CONDITIONS)


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Give the lines with their numbers, continued ones joined, without comments."""
    pending, begun = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        begun = begun if pending else number
        if raw.endswith("\\"):
            pending += raw[:-1]
            continue
        line = (pending + raw).strip()
        pending = ""
        if line and not line.startswith("#"):
            yield begun, line


def read(files: Files, path: str) -> Tree | None:
    """Read a configuration; ``None`` if its first file cannot be read.

    A file that loads no module is taken for a part of a configuration, with all modules loaded.
    """
    reader = _Reader(files, path, all_modules=False)
    noted = len(files.malformed), len(files.unread)
    if not reader.run():
        return None
    if not reader.loaded:
        del files.malformed[noted[0] :], files.unread[noted[1] :]
        reader = _Reader(files, path, all_modules=True)
        reader.run()
    return reader.tree
