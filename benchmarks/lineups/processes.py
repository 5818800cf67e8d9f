"""Servers and generators as processes: on cores of their own, and none outlives the measurement.

Each leads a session of its own, so that Ctrl-C in a terminal reaches only the measurement, which
then ends them; should it be killed, the kernel tells them to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from keyfront.errors import ServerError

from .. import surroundings

_PR_SET_PDEATHSIG = 1
# Seconds that a server gets to end; it has no requests left to answer.
STOP_PATIENCE = 5.0
#: Descriptors of a login shell or a unit without settings, which stock servers get.
STOCK_FILES = 1024
#: Descriptors for everything else; enough for 5000 connections through a web server.
FILES = 65536


class Cores(NamedTuple):
    """Which cores serve, and which send the load."""

    servers: frozenset[int]
    generator: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether the generator takes no time from the servers."""
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


class HangError(ServerError):
    """A program did not end by itself."""


class Process:
    """A process that runs until the ``with`` block ends, or until it ends itself.

    :param name: what results call it
    :param log: where its output goes; default: a file without a name, see :meth:`output`
    :param stop: the signal that ends it at once, also if this process dies
    :param cores: those it may run on; default: all
    :param user: user and group it runs as, if this process is root's
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
        user: tuple[str, str] | None = None,
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
                user=user[0] if user else None,
                group=user[1] if user else None,
                extra_groups=[] if user else None,
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerError(f"{command[0]}: cannot be run: {reason}") from None
        finally:
            if given is not None:
                given.close()

    def _prepare(self) -> None:
        # in the child, after it gave up root: a change of user forgets the signal
        self._prctl(_PR_SET_PDEATHSIG, int(self._stop))
        if os.getppid() != self._parent:
            os.kill(os.getpid(), self._stop)
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, hard))

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or ``None`` while it runs."""
        return self._process.poll()

    def cpu(self) -> float:
        """CPU seconds of it and its descendants until now, or until it was stopped."""
        if self._ended_cpu is not None:
            return self._ended_cpu
        return surroundings.tree_seconds([self.pid])

    def wait(self, seconds: float) -> int:
        """Wait until it ends; returns its exit status, and closes :meth:`cpu`.

        :raises ServerError: it runs for longer; it was killed
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise HangError(f"{self.name} hangs: it was ended after {seconds:.0f} s") from None
        if self._ended_cpu is None:
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._ended_cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return status

    def output(self) -> tuple[str, str]:
        """What it wrote to standard output and standard error, without ``log``."""
        self._out.seek(0)
        self._errors.seek(0)
        return _text(self._out.read()), _text(self._errors.read())

    def stop(self) -> None:
        """End it and all in its session that it left behind; the second time nothing happens."""
        if self._process.poll() is None:
            if self._ended_cpu is None:
                self._ended_cpu = surroundings.tree_seconds([self.pid])
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
