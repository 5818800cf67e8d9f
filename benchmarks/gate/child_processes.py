"""Runs tests again in processes of their own: of a release, under strace, or under valgrind."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.errors import BenchmarkError

from . import worker

if TYPE_CHECKING:
    from .session import GateSession

PACKAGE = "keyfront_gate_worker"
# Seconds until a test has called its fixture: it may start servers first.
PATIENCE = 300.0
# Lines of what a process said that a failure shows.
_TAIL = 15
# Nanoseconds of a batch: longer than within one process, since asking costs as well.
_BATCH = 1_000_000


@dataclass(frozen=True)
class Place:
    """The place where a test is run.

    :param name: for a reader
    :param python: the interpreter
    :param folder: put before everything else on the module path; ``None`` for nothing
    :param tops: modules that have to come from ``folder``
    """

    name: str
    python: str
    folder: Path | None = None
    tops: frozenset[str] = frozenset()


HERE = Place("the candidate", sys.executable)


def started(
    session: GateSession,
    place: Place,
    nodes: Sequence[str],
    mode: Mapping[str, str],
    *,
    log: Path,
    pipes: Sequence[int],
    before: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start some tests with the worker's fixtures in place of the gate's.

    :param mode: the variables that tell the worker what to do
    :param log: the file that takes what it says
    :param pipes: the descriptors that it uses; they are closed here
    :param before: words before the command
    """
    with log.open("wb") as out:
        try:
            return subprocess.Popen(
                [*before, *_command(session, place, nodes)],
                env=_environment(session, place, mode),
                cwd=session.config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=pipes,
            )
        finally:
            for one in pipes:
                os.close(one)


def _command(session: GateSession, place: Place, nodes: Sequence[str]) -> list[str]:
    config = session.config
    given = [place.python, "-m", "pytest", "-p", PACKAGE, "-p", "no:keyfront_gate"]
    arguments = list(config.invocation_params.args)
    for number, argument in enumerate(arguments):
        if argument == "-p" and number + 1 < len(arguments):
            given += ["-p", str(arguments[number + 1])]
        elif str(argument).startswith("-p") and argument != "-p":
            given.append(str(argument))
    given += ["-p", "no:cacheprovider", "-q", "--no-header", f"--rootdir={config.rootpath}"]
    given.append(f"--import-mode={config.getoption('importmode')}")
    if config.inipath is not None:
        given += ["-c", str(config.inipath)]
    for setting in (*(config.getoption("override_ini") or ()), "addopts="):
        given += ["-o", setting]
    if place.tops:
        kept = [
            path
            for path in config.getini("pythonpath")
            if not any((path / x).is_dir() or (path / f"{x}.py").is_file() for x in place.tops)
        ]
        given += ["-o", f"pythonpath={' '.join(map(str, kept))}"]
    return [*given, *nodes]


def _environment(session: GateSession, place: Place, more: Mapping[str, str]) -> dict[str, str]:
    plugins = session.folder / "plugins"
    if not plugins.is_dir():
        source, ignored = Path(worker.__file__).parent, shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, plugins / PACKAGE, ignore=ignored)
    paths = [*([str(place.folder)] if place.folder else []), str(plugins)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # else -m puts the current folder, with the sources in it, before all of that
        "PYTHONSAFEPATH": "1",
        # the order of hashes is the same in all of them
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        worker.TOPS: ",".join(sorted(place.tops)),
        **more,
    }


def tail(path: Path) -> str:
    """Return the end of what a process has said."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.strip().splitlines()[-_TAIL:])


class StartError(BenchmarkError):
    """A test did not come to its ``paired()`` in a worker; ``text`` has several lines."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text

    def __reduce__(self) -> tuple[type[StartError], tuple[str, str]]:
        return type(self), (self.message, self.text)


class Worker:
    """A test that waits in a process of its own and times its candidate when asked; a ``Side``.

    It ends by itself when the pipe it is asked by does, so also with this process. Ask it for
    nothing before :meth:`wait`.
    """

    def __init__(self, session: GateSession, place: Place, node: str) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._log = session.folder / f"worker-{self._requests}"
        mode = {worker.MODE: "serve", worker.REQUESTS: str(requests), worker.ANSWERS: str(answers)}
        pipes = (requests, answers)
        self._process = started(session, place, [node], mode, log=self._log, pipes=pipes)
        self.pid = self._process.pid
        self._reader = os.fdopen(self._answers, "rb", closefd=False)
        self._node = node
        self._place = place

    def wait(self) -> None:
        """Wait until the test has come to its ``paired()``.

        :raises StartError: it did not get that far, or has other modules than it should
        """
        place = self._place
        ready, _, _ = select.select([self._answers], [], [], PATIENCE)
        line = self._reader.readline() if ready else b""
        if not line:
            what = "said nothing" if not ready else "ended"
            message = f"{place.name}: {self._node} {what} before it was timed"
            raise StartError(message, tail(self._log))
        for top, path in json.loads(line).items():
            if place.folder is not None and not Path(path).is_relative_to(place.folder):
                raise StartError(
                    f"{place.name}: {top} comes from {path}, not from the release: install the "
                    "project instead of putting its sources on the path, or use "
                    "--import-mode=importlib",
                    "",
                )

    def calibrate(self) -> int:
        return self._ask(f"calibrate {_BATCH}")

    def batch(self, calls: int) -> int:
        return self._ask(f"time {calls}")

    def _ask(self, what: str) -> int:
        try:
            os.write(self._requests, what.encode() + b"\n")
            line = self._reader.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise StartError(f"{self._node} ended while it was timed", tail(self._log))
        return int(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the test end, and wait for it."""
        os.close(self._requests)
        self._reader.close()
        os.close(self._answers)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
