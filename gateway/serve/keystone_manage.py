"""Runs ``keystone-manage`` commands one after the other with one import of Keystone.

Importing Keystone takes longer than most commands do. So one process imports it, and each command
runs in a fork of it, as fresh as a program that was started by itself. The process ends with the
one that started it.

Started as a program it is that process: it reads a command as a line of JSON on standard input and
answers by one on standard output.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from keyfront.errors import MissingPartError, ServerError

from ..keystone import needless_imports

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Done(NamedTuple):
    """The end of a command: its exit status, and all that it printed."""

    status: int
    output: str


class KeystoneManage:
    """A process that runs ``keystone-manage`` commands; a context manager.

    :param config: keystone.conf
    :param folder: the working folder of the commands
    """

    def __init__(self, config: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            text=True,
            errors="replace",
        )

    def run(self, *arguments: str, **environment: str) -> Done:
        """Run one command.

        :param environment: variables for it besides this process's environment
        :raises MissingPartError: Keystone is not installed
        :raises ServerError: the process ended
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([arguments, environment]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said is read below
        printed = []
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer = json.loads(line.removeprefix(_ANSWER))
                return Done(answer["status"], answer["output"])
            printed.append(line)
        output = "".join(printed).strip()
        if "No module named 'keystone'" in output:
            raise MissingPartError(
                "Keystone is not installed here: run pip install 'keyfront[keystone]'"
            )
        last = output.rpartition("\n")[2] or "it printed nothing"
        raise ServerError(f"keystone-manage {arguments[0]} could not be run: {last}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # a command that was never read

    def __enter__(self) -> KeystoneManage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# Answers begin with it: what libraries print while they are imported goes the same way.
_ANSWER = "keyfront-manage: "


def main() -> None:
    """Import Keystone, then run commands until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    needless_imports.leave_out_warnings()
    needless_imports.build_schemas_on_demand()
    # That nobody hears of what is changed, and where: nobody serves yet.
    for name in ("folder", "invalidation.change_log"):
        logging.getLogger(f"keyfront.middleware.tokens.{name}").setLevel(logging.ERROR)
    # What is imported stays, for all commands, and none looks through it for garbage.
    gc.disable()
    with needless_imports.without_resolver():
        from keystone.cmd import manage
    gc.freeze()
    gc.enable()

    config = sys.argv[1]
    for line in sys.stdin:
        arguments, environment = json.loads(line)
        status, output = _forked(manage.main, config, arguments, environment)
        answer = json.dumps({"status": status, "output": output.decode("utf-8", "replace")})
        sys.stdout.write(f"{_ANSWER}{answer}\n")
        sys.stdout.flush()


def _forked(
    manage: object, config: str, arguments: list[str], environment: dict[str, str]
) -> tuple[int, bytes]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run(manage, writing, ["keystone-manage", "--config-file", config, *arguments], environment)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output


def _run(manage: object, output: int, argv: list[str], environment: dict[str, str]) -> None:
    """Run a command in this process, which ends with it."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        sys.argv = argv
        assert callable(manage)
        manage()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
