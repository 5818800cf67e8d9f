"""A Python that has imported what takes long, and runs programs in forks of itself.

Importing Keystone takes two seconds of a processor, and most of what tests run after it takes a
tenth of that. Each program has a process of its own, with its own arguments, environment and
output, that ends as a program does; nothing of one is there for the next.

Started as a program it is that Python: it reads a command as a line of JSON on standard input, and
writes its exit status as a line on standard output.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from support.readable import readable

# Seconds; a bound on a hang, not an expectation.
_PATIENCE = 600.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Imported:
    """Runs Python programs, all with one import of some modules; a context manager.

    :param modules: what is imported before the first
    """

    def __init__(self, *modules: str) -> None:
        before = os.environ.get("PYTHONPATH")
        found = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": found},
        )  # fmt: skip
        self._lock = threading.Lock()

    def run(
        self, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end.

        :param arguments: as Python has them: a script, ``-c`` with code or ``-m`` with a module,
            and the program's own
        :param environment: all variables it has; those of this process if ``None``
        :returns: its status and what it printed
        """
        words = list(map(str, arguments))
        with tempfile.TemporaryDirectory() as folder, self._lock:
            files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
            variables = dict(os.environ if environment is None else environment)
            assert self._process.stdin is not None and self._process.stdout is not None
            command = json.dumps([words, variables, files, os.getcwd()])
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
            assert readable(self._process.stdout.fileno(), _PATIENCE), f"it hangs: {words}"
            status = int(self._process.stdout.readline())
            printed = [Path(file).read_text(encoding="utf-8", errors="replace") for file in files]
        return subprocess.CompletedProcess(words, status, *printed)

    def __enter__(self) -> Imported:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def main() -> None:
    """Import, then run commands until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported
    # What is there is for all forks, and nobody looks through it.
    gc.disable()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    parent = os.getpid()
    while line := sys.stdin.readline():
        words, variables, files, folder = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _begin(parent, variables, files, folder)
            _run(words)
            return  # and ends as a program does
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _begin(parent: int, variables: dict[str, str], files: list[str], folder: str) -> None:
    """Make this process one of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)


def _run(words: list[str]) -> None:
    """Run a program as the interpreter would."""
    kind, *rest = words
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[0] = ""
        made = ModuleType("__main__")
        sys.modules["__main__"] = made
        exec(compile(rest[0], "<string>", "exec"), made.__dict__)
    elif kind == "-m":
        sys.argv[:] = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
