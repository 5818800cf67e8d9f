"""A release to compare with, put into a folder of its own: only it, nothing it requires.

What it requires is taken from this environment, so that both sides stand on the same versions and
nothing is downloaded. A release that needs other versions can be given as a virtual environment.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common import programs
from keyfront.errors import BenchmarkError, MissingPartError, OptionError

from .. import proc
from .child_processes import Place

if TYPE_CHECKING:
    from .session import GateSession

_ARCHIVES = (".tar.gz", ".tar.bz2", ".zip")
_NOT_SOURCES = (".tox", ".nox", ".venv*", "venv", "build", "dist", "node_modules", "__pycache__")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^]]*\])?==[A-Za-z0-9.!+_-]+")
# Seconds for pip; building an extension module may take long.
_PATIENCE = 900


class Release:
    """The release that ``--gate-baseline`` names; installed when it is asked for first.

    :param name: a wheel, a source archive, a folder, a virtual environment, ``NAME==VERSION``, or
        a revision of the git repository ``root``
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self._root = root
        self._place: Place | None = None
        self._error: BenchmarkError | None = None

    def check(self, option: str) -> None:
        """Find out, before anything is measured, that the name can be one of a release.

        :param option: the option that gives it
        :raises OptionError: it cannot
        :raises MissingPartError: git is not installed
        """
        given = Path(self.name)
        is_file = given.is_file() and self.name.endswith((".whl", *_ARCHIVES))
        if is_file or given.is_dir() or _REQUIREMENT.fullmatch(self.name):
            return
        if self._commit() is None:
            raise OptionError(option, self.name, self._allowed())

    def place(self, session: GateSession) -> Place:
        """Return where tests run with this release; made once.

        :raises BenchmarkError: it is none of these, or cannot be installed
        :raises MissingPartError: pip or git is not installed
        """
        if self._error is not None:
            raise self._error
        if self._place is None:
            try:
                self._place = self._made(session.folder)
            except BenchmarkError as error:
                self._error = error
                raise
        return self._place

    def _made(self, folder: Path) -> Place:
        given = Path(self.name)
        if (given / "pyvenv.cfg").is_file():
            return Place(self.name, str(given.absolute() / "bin" / "python"))
        target = folder / "release"
        if given.is_file() and self.name.endswith((".whl", *_ARCHIVES)):
            self._install(str(given.absolute()), target, offline=self.name.endswith(".whl"))
        elif given.is_dir():
            sources, ignored = folder / "sources", shutil.ignore_patterns(*_NOT_SOURCES)
            shutil.copytree(given, sources, symlinks=True, ignore=ignored)
            self._install(str(sources), target)
        elif _REQUIREMENT.fullmatch(self.name):
            self._install(self.name, target)
        else:
            self._install(str(self._revision(folder)), target)
        return Place(self.name, sys.executable, target, _tops(target))

    def _allowed(self) -> str:
        return (
            "a wheel, a source archive, a folder, NAME==VERSION, or a revision of the git "
            f"repository {self._root}"
        )

    def _commit(self) -> str | None:
        """Return the commit of a revision; ``None`` if it is none."""
        wanted = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{self.name}^{{commit}}"]
        found = _run([programs.system_program(("git",), "git"), "-C", str(self._root), *wanted])
        return found.stdout.strip() if found.returncode == 0 else None

    def _revision(self, folder: Path) -> Path:
        commit = self._commit()
        if commit is None:
            raise BenchmarkError(f"--gate-baseline = {self.name}: must be {self._allowed()}")
        git = programs.system_program(("git",), "git")
        # with its history, which some projects take their version from
        sources = folder / "sources"
        top = _run([git, "-C", str(self._root), "rev-parse", "--show-toplevel"]).stdout.strip()
        quiet = ["-c", "advice.detachedHead=false"]
        for command in (
            [git, "clone", "--quiet", "--no-checkout", "--shared", top, str(sources)],
            [git, *quiet, "-C", str(sources), "checkout", "--quiet", commit],
        ):
            done = _run(command)
            if done.returncode != 0:
                raise BenchmarkError(f"--gate-baseline = {self.name}: {_last(done.stderr)}")
        return _project(sources, self._root.relative_to(top).parts)

    def _install(self, what: str, target: Path, *, offline: bool = False) -> None:
        if importlib.util.find_spec("pip") is None:
            raise MissingPartError("pip is not installed: run python -m ensurepip")
        base = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        base += ["--no-deps", "--no-warn-script-location", "--target", str(target)]
        # at first with what is installed here, then with whatever the project asks for
        attempts = [] if "==" in what else [["--no-index", "--no-build-isolation"]]
        for more in attempts if offline else [*attempts, []]:
            done = _run([*base, *more, what])
            if done.returncode == 0:
                return
            shutil.rmtree(target, ignore_errors=True)
        raise BenchmarkError(
            f"--gate-baseline = {self.name}: pip cannot install it: {_last(done.stderr)}"
        )


def _project(top: Path, parts: Sequence[str]) -> Path:
    """Return the innermost folder of a path below ``top`` that can be built; else ``top``."""
    for count in range(len(parts), 0, -1):
        folder = top.joinpath(*parts[:count])
        if (folder / "pyproject.toml").is_file() or (folder / "setup.py").is_file():
            return folder
    return top


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return proc.ran(command, _PATIENCE)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{Path(command[0]).name} took more than {_PATIENCE} s") from None


def _last(text: str) -> str:
    """Return the line of a program's errors that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1]


def _tops(target: Path) -> frozenset[str]:
    """Return the modules a release brings."""
    found = set()
    for path in target.iterdir():
        if path.is_dir() and path.suffix not in (".dist-info", ".egg-info", ".data"):
            if path.name not in ("bin", "__pycache__"):
                found.add(path.name)
        elif path.suffix == ".py":
            found.add(path.stem)
        elif path.suffix == ".so":
            found.add(path.name.partition(".")[0])
    return frozenset(found)
