"""Starts the programs of a line-up, watches them, and leaves nothing running.

Every program leads a session of its own, so that Ctrl-C in a terminal reaches only the
supervisor, and is told by the kernel to stop should the supervisor be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import BinaryIO

from keyfront.common.programs import first_error, stop_with_parent
from keyfront.common.signals import taken
from keyfront.errors import ServerError

from .lineups import Program

# Seconds until the first answer; Keystone takes some three to load, on a busy machine many more.
_START_TIMEOUT = 90.0
# prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
# Seconds beyond the stop timeout after which what is left is killed. Workers end at the timeout;
# uWSGI's master looks for them once a second.
_LAST_CALL = 0.6
# Seconds before the timeout at which an application is told to stop whose web server still waits
# for requests; those have had their time by then.
_EARLIER = 0.5


class Supervisor:
    """Runs the programs of a line-up in the foreground.

    :param programs: the programs, in the order in which they start
    :param stop_timeout: seconds that running requests get on a stop
    """

    def __init__(self, programs: list[Program], *, stop_timeout: float) -> None:
        self._programs = programs
        self._stop_timeout = stop_timeout
        self._running: list[tuple[Program, subprocess.Popen[bytes]]] = []
        #: The offset in each log from which on it is of this run.
        self._log_starts: dict[Path, int] = {}
        self._received: list[int] = []
        self._reloading: subprocess.Popen[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM, SIGHUP and SIGCHLD for the supervisor while the block runs."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        with taken(numbers, self._note, self._wake_write):
            yield

    def _note(self, number: int, frame: object) -> None:
        self._received.append(number)

    def _wait_signal(self, seconds: float | None) -> None:
        """Sleep until a signal arrives or the time is over."""
        # one that asks for a second reload waits for the first
        if not self._received or self._received == [signal.SIGHUP]:
            select.select([self._wake_read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    @property
    def stop_requested(self) -> bool:
        return signal.SIGINT in self._received or signal.SIGTERM in self._received

    def start(self) -> None:
        """Start every program; does not wait for them to answer.

        :raises ServerError: a program cannot be run
        """
        # what a killed server leaves behind becomes ours to end, not init's
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        prepare = stop_with_parent()
        for program in self._programs:
            with self._open_log(program.log) as log:
                self._log_starts[program.log] = os.fstat(log.fileno()).st_size
                try:
                    process = subprocess.Popen(
                        program.command,
                        env={**os.environ, **program.environment},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=prepare,
                    )
                except OSError as error:
                    raise ServerError(
                        f"{program.command[0]}: cannot be run: {error.strerror}"
                    ) from None
            self._running.append((program, process))

    @staticmethod
    def _open_log(path: Path) -> BinaryIO:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "ab")

    def wait_ready(self, host: str, port: int, path: str) -> bool:
        """Wait until ``GET path`` is answered below 500.

        :param host: the address that the front listens at
        :param port: its port
        :param path: the path of the request, with its leading slash
        :returns: ``False`` if a stop was asked for meanwhile
        :raises ServerError: a program ended, or no answer came in time; names the log
        """
        deadline = time.monotonic() + _START_TIMEOUT
        pause = 0.05
        while not self.stop_requested:
            self._check_running()
            status = _status(host, port, path)
            if status is not None and status < 500:
                return True
            if time.monotonic() > deadline:
                state = f"answers {status}" if status else "does not answer"
                logs = ", ".join(str(program.log) for program in self._programs)
                raise ServerError(f"Keystone {state} after {_START_TIMEOUT:.0f} s; see {logs}")
            self._wait_signal(pause)
            pause = min(pause * 1.5, 0.5)
            self._forget(signal.SIGCHLD, signal.SIGHUP)
        return False

    def _forget(self, *numbers: int) -> None:
        self._received = [number for number in self._received if number not in numbers]

    def watch(self) -> None:
        """Return when a stop is asked for; reload on SIGHUP.

        :raises ServerError: a program ended by itself
        """
        while not self.stop_requested:
            self._forget(signal.SIGCHLD)
            self._check_running()
            self._look_at_reload()
            if signal.SIGHUP in self._received and self._reloading is None:
                self._forget(signal.SIGHUP)
                self._reload()
                continue
            self._wait_signal(None)

    def _reload(self) -> None:
        """Start the command that reloads the application; what it says, it says by itself."""
        for program, _ in self._running:
            if program.reload is not None:
                self._reload_log = program.log
                self._reload_start = program.log.stat().st_size
                self._reloading = subprocess.Popen(
                    program.reload, stdin=subprocess.DEVNULL, preexec_fn=stop_with_parent()
                )

    def _look_at_reload(self) -> None:
        """Say why a reload failed, once it did."""
        if self._reloading is None or self._reloading.poll() is None:
            return
        if self._reloading.returncode:
            cause = first_error(self._reload_log, self._reload_start)
            sys.stderr.write(f"keyfront: {cause}; all of it: {self._reload_log}\n")
        self._reloading = None

    def _check_running(self) -> None:
        for program, process in self._running:
            status = process.poll()
            if status is not None:
                ended = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
                cause = first_error(program.log, self._log_starts[program.log])
                raise ServerError(
                    f"{program.name} ended with {ended}: {cause}; all of it: {program.log}"
                )

    def stop(self) -> None:
        """Stop every program, the foremost first; after the timeout what is left is killed."""
        deadline = time.monotonic() + self._stop_timeout
        for position, (program, process) in reversed(list(enumerate(self._running))):
            if process.poll() is None:
                process.send_signal(program.stop)
            # the application stops once the web server in front of it has no more requests for it
            until = deadline + _LAST_CALL if position == 0 else deadline - _EARLIER
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
        for _, process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()
        _end_orphans()


def _end_orphans() -> None:
    """Kill and collect every child there is, and the children it leaves."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        for pid in map(int, children.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _status(host: str, port: int, path: str) -> int | None:
    connection = HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def connect_host(host: str) -> str:
    """Return the host at which a server is reached: loopback if it listens at every address."""
    if host == "0.0.0.0":
        return "127.0.0.1"
    if host == "::":
        return "::1"
    return host


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens at a host.

    :param host: an address or a name, without brackets; one that means nothing is not loopback
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    return all(
        (getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses
    )


def hostname_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in brackets."""
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return f"{host}:{port}"
    return f"[{host}]:{port}"
