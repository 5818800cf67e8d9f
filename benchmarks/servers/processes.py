"""Servers and generators as processes on loopback: none outlives the measurement.

Each leads a session of its own, so that Ctrl-C in a terminal reaches only the measurement, which
then ends them; should it be killed, the kernel tells them to end. They can be given cores of their
own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common.programs import first_error
from keyfront.errors import ServerError

from .. import proc
from ..proc import family as family
from ..proc import memory as memory

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
# Seconds, for a busy machine: 38 processes on one core load Keystone one after the other.
START_PATIENCE = 300.0
# Seconds that a server gets to end; it has no requests left to answer.
STOP_PATIENCE = 5.0
# Seconds until a process has ended that is told to by the end of its input.
_LINE_PATIENCE = 90.0
#: Descriptors of a login shell or a unit without settings, which stock servers get.
STOCK_FILES = 1024
#: Descriptors for everything else; enough for 5000 connections through a web server.
FILES = 65536


def status(
    port: int, path: str = "/", body: object = None, *, source: str = "", patience: float = 60.0
) -> int:
    """Return the status of one request on loopback, 0 if there is no answer within ``patience``.

    :param body: the content of a POST; ``None`` for a GET
    :param source: the address that it comes from; empty: the kernel's choice
    """
    given = (source, 0) if source else None
    client = HTTPConnection(HOST, port, timeout=patience, source_address=given)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        client.request(method, path, data, headers={"Connection": "close"})
        answer = client.getresponse()
        answer.read()
        return answer.status
    except (OSError, HTTPException):
        return 0
    finally:
        client.close()


class Cores(NamedTuple):
    """Which cores serve, and which send the load."""

    servers: frozenset[int]
    generator: frozenset[int]

    @property
    def apart(self) -> bool:
        """True if the generator takes no time from the servers."""
        return self.servers.isdisjoint(self.generator)

    def __str__(self) -> str:
        if not self.apart:
            return "servers and generator share one core"
        return f"servers on {_plural(self.servers)}, generator on {_plural(self.generator)}"


def split(allowed: Collection[int] | None = None) -> Cores:
    """Give a quarter of the cores, one at least, to the generator, and the others to the servers.

    :param allowed: default: those that this process may use
    """
    ordered = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    if len(ordered) == 1:
        return Cores(frozenset(ordered), frozenset(ordered))
    count = max(len(ordered) // 4, 1)
    return Cores(frozenset(ordered[:-count]), frozenset(ordered[-count:]))


def _plural(cores: Collection[int]) -> str:
    return f"{len(cores)} core{'' if len(cores) == 1 else 's'}"


def freeze(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs.

    kill() returns before they have stopped: one that is on another processor may answer once more.

    :raises ServerError: it does not stop within a minute
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    threads = Path(f"/proc/{pid}/task")
    while not all(proc.state(int(one.name)) in ("T", "") for one in threads.iterdir()):
        if time.monotonic() > deadline:
            raise ServerError(f"{pid} does not stop")
        time.sleep(0.001)


class Process:
    """A process that runs until the ``with`` block ends, or until it ends itself.

    :param name: the name that results call it by
    :param log: the file of its output; default: a file without a name, see :meth:`output`
    :param stop: the signal that ends it at once, also if this process dies
    :param cores: those it may run on; default: all
    :param files: descriptors it may have, unless the system allows fewer
    :raises ServerError: it cannot be run
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stop: signal.Signals = signal.SIGKILL,
        cores: Collection[int] | None = None,
        files: int = FILES,
        stdin: bytes = b"",
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._stop = stop
        self._ended_cpu: float | None = None
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._parent = os.getpid()
        self._cores = cores
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        # closed when it ends
        self._out = log.open("ab") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = self._out if log else tempfile.TemporaryFile()  # noqa: SIM115
        given = tempfile.TemporaryFile() if stdin else None  # noqa: SIM115
        if given is not None:
            given.write(stdin)
            given.seek(0)
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=given or subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._errors,
                env=None if environment is None else {**os.environ, **environment},
                cwd=folder,
                start_new_session=True,
                preexec_fn=self._prepare,
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerError(f"{command[0]}: cannot be run: {reason}") from None
        finally:
            if given is not None:
                given.close()

    def _prepare(self) -> None:
        # in the child
        self._prctl(_PR_SET_PDEATHSIG, int(self._stop))
        if os.getppid() != self._parent:
            os.kill(os.getpid(), self._stop)
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, hard))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, or ``None`` while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def check(self) -> None:
        """Find out that it runs.

        :raises ServerError: it has ended; says why, as well as its log tells
        """
        if self.poll() is not None:
            raise ServerError(f"{self.name} ended: {self._cause()}")

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` returns true.

        :raises ServerError: it ended, or was not ready within five minutes
        """
        deadline = time.monotonic() + START_PATIENCE
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} is not ready after {START_PATIENCE:.0f} s: {self._cause()}"
                )
            time.sleep(0.02)

    def wait_for_answer(self, port: int, path: str = "/") -> None:
        """Wait until ``GET path`` is answered with a status below 500.

        :raises ServerError: it ended, or does not answer so
        """
        self.wait_until(lambda: 0 < status(port, path) < 500)

    def _cause(self) -> str:
        return first_error(self.log) if self.log else "it has no log"

    def cpu(self) -> float:
        """Return CPU seconds of it and its descendants until now, or until it was stopped."""
        if self._ended_cpu is not None:
            return self._ended_cpu
        return proc.tree_seconds(self.pid)

    def wait(self, seconds: float) -> int:
        """Wait until it ends; returns its exit status, and closes :meth:`cpu`.

        :raises ServerError: it runs for longer; it was killed
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise ServerError(f"{self.name} hangs: it was ended after {seconds:.0f} s") from None
        if self._ended_cpu is None:
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._ended_cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return status

    def output(self) -> tuple[str, str]:
        """Return what it wrote to standard output and standard error, without ``log``."""
        self._out.seek(0)
        self._errors.seek(0)
        return _text(self._out.read()), _text(self._errors.read())

    def stop(self) -> None:
        """End it and all in its session that it left behind; the second time nothing happens."""
        if self._process.poll() is None:
            if self._ended_cpu is None:
                self._ended_cpu = proc.tree_seconds(self.pid)
            self._process.send_signal(self._stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_PATIENCE)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._errors.close()


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def finished(process: Process, seconds: float) -> tuple[str, str, float]:
    """Wait for a generator; returns its output, its errors, and the CPU seconds it took.

    :raises ServerError: it hangs or failed
    """
    started = time.monotonic()
    with process:
        status = process.wait(seconds)
        out, errors = process.output()
        if status != 0:
            raise ServerError(
                f"{process.name} failed with status {status} after "
                f"{time.monotonic() - started:.0f} s: {errors[-300:] or out[-300:]}"
            )
        return out, errors, process.cpu()


def streamed(
    command: Sequence[str], say: Callable[[str], object], *, stdin: str = "", **how: Any
) -> int:
    """Run a command that dies with this process; return its exit status.

    :param say: takes each line that it writes, with its end
    :param how: more arguments of :class:`subprocess.Popen`
    """
    pipe = subprocess.PIPE
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, errors="replace", **how
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(stdin)
            process.stdin.close()
            for line in process.stdout:
                say(line)
            return process.wait()
        finally:
            process.kill()


class LineProcess:
    """A process of ours that answers each line of standard input with one, from :func:`told`.

    :param name: the process, in errors
    :param log: the file of its standard error; ``None`` for that of this process
    """

    def __init__(self, process: subprocess.Popen[str], name: str, log: Path | None) -> None:
        self.name = name
        self._process = process
        self._log = log

    def ask(self, *words: object) -> str:
        """Write words in a line, and return the next one that it writes.

        :raises ServerError: it has ended; names the end of its log
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(*words, file=self._process.stdin, flush=True)
        return self.line()

    def line(self) -> str:
        """Return the next line that it writes.

        :raises ServerError: it has ended; names the end of its log
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ServerError(f"{self.name} has ended: {self.tail()}")
        return line

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-600:] if self._log else ""


@contextlib.contextmanager
def told(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    name: str = "",
    log: Path | None = None,
) -> Iterator[LineProcess]:
    """Run a process that ends with its standard input, until the block ends.

    :param environment: its environment; default: that of this process
    :param name: the process, in errors; default: its command
    :param log: the file of its standard error; default: that of this process
    """
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("wb")) if log else None
        process = stack.enter_context(
            subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment,
                process_group=0,
            )
        )  # fmt: skip
        try:
            yield LineProcess(process, name or " ".join(command), log)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_LINE_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
