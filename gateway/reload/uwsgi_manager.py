"""Runs uWSGI so that a reload stops nobody: a second uWSGI loads the new application first.

uWSGI's own reload ends all workers, starts itself anew and loads the application; for so long
nobody is answered. The manager keeps the sockets, so that two uWSGIs can have them. On SIGHUP it
starts another one, waits until each of its workers accepts, and only then tells the former to end
after its running requests. If the new one ends before that, the former goes on.

Each uWSGI reads a copy of the ini file (``NAME.0.ini`` or ``NAME.1.ini`` beside the statistics
socket ``NAME.sock``) and has a statistics socket of its own (``NAME.0``, ``NAME.1``), which
``NAME.sock`` leads to. ``NAME.reload`` is where :func:`reload` asks for a reload.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from json import loads
from pathlib import Path

from keyfront.common import unix_sockets
from keyfront.common.programs import stop_with_parent
from keyfront.common.signals import taken
from keyfront.errors import KeyfrontError, ServerError

from . import uwsgi_ini
from .uwsgi_ini import IniFile

#: Seconds that a reload gives an application to load; systemd gives a reload 90 in all.
LOAD_SECONDS = 80.0
# Seconds between looks at the workers of a uWSGI that loads.
_LOOK = 0.05
# Seconds beyond the mercy after which what is left is killed: uWSGI looks once a second.
_LAST_CALL = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_DONE = "reloaded"


@dataclass(eq=False)
class _Uwsgi:
    """A running uWSGI.

    :param slot: 0 or 1, the number in the names of its files
    :param mercy: seconds that its running requests get when it ends
    """

    process: subprocess.Popen[bytes]
    slot: int
    mercy: float
    began: float = field(default_factory=time.monotonic)
    deadline: float = float("inf")
    """When it is killed, once it is ending."""

    def end(self) -> None:
        """Tell this uWSGI to end after its running requests; it may be called again."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + self.mercy + _LAST_CALL
            self.process.terminate()

    def kill(self) -> None:
        """End it and its workers now."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Manager:
    """Runs the uWSGI of an ini file in the foreground.

    :param ini: the file, read anew for each reload
    :param program: the path of uWSGI
    :raises KeyfrontError: the file cannot be run, or its sockets cannot be had
    """

    def __init__(self, ini: Path, program: str) -> None:
        self._path = ini
        self._program = program
        first = uwsgi_ini.read(ini)
        self._stats = first.stats
        self._own: list[Path] = []  # socket files that are ours to remove
        self._sockets = _handed_over(first) or self._opened(first)
        self._notify_address = os.environ.pop("NOTIFY_SOCKET", "")
        self._control = _listening(self._file("reload"))
        self._serving: _Uwsgi | None = None
        self._coming: _Uwsgi | None = None
        self._leaving: _Uwsgi | None = None
        self._wanted = False
        self._asking: list[socket.socket] = []  # who asked for the reload that is wanted
        self._waiting: list[socket.socket] = []  # for the one under way
        self._stopping = False
        self._received: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reloads. Returns the exit status: 0, or uWSGI's.

        :raises KeyfrontError: the first uWSGI cannot be started
        """
        with taken(_SIGNALS, self._note, self._wake_write), ExitStack() as cleaning:
            cleaning.callback(self._clean)
            self._show(0)
            self._coming = self._start(0)
            while self._coming or self._serving or self._leaving:
                self._wait()
                status = self._step()
                if status is not None:
                    return status
        return 0

    def _step(self) -> int | None:
        """Do what is due; returns the exit status if uWSGI has ended by itself."""
        now = time.monotonic()
        # Not cleared: a signal that comes in between would be forgotten.
        received, self._received = self._received, set()
        if received & {signal.SIGTERM, signal.SIGINT}:
            self._stop()
        if signal.SIGHUP in received and not self._stopping:
            self._wanted = True
        if self._leaving and self._is_over(self._leaving, now):
            self._leaving = None
        if self._coming:
            self._look(self._coming, now)
        if self._serving and self._is_over(self._serving, now):
            ended, self._serving = self._serving, None
            if not self._stopping and not self._coming:
                return self._failed_status(ended, "ended by itself")
            if not self._stopping:
                self._say(f"uWSGI {ended.process.pid} ended; the next one is being loaded")
        if not (self._coming or self._serving or self._leaving or self._stopping):
            return 1
        if self._wanted and self._serving and not (self._coming or self._leaving):
            self._reload()
        return None

    def _look(self, coming: _Uwsgi, now: float) -> None:
        """Check the state of the uWSGI that loads, and act on it."""
        if self._is_over(coming, now):
            self._coming = None
            if self._stopping:
                return
            if self._serving is None:
                raise _EndedError(self._failed_status(coming, "ended before it served"))
            ended = f"uWSGI ended with {_status(coming.process)}; its log says why"
            self._fail(f"the new application did not load, {ended}")
        elif self._stopping:
            return
        elif all(_accepting(self._file(coming.slot))):
            self._take_over(coming, now - coming.began)
        elif self._serving is not None and now > coming.began + LOAD_SECONDS:
            coming.kill()
            self._coming = None
            self._fail(f"the new application did not load in {LOAD_SECONDS:.0f} s")

    def _take_over(self, coming: _Uwsgi, seconds: float) -> None:
        self._coming, self._leaving, self._serving = None, self._serving, coming
        try:
            self._show(coming.slot)
        except OSError as error:  # no reason to serve nobody
            self._say(f"{self._stats}: leads to the former statistics: {error.strerror}")
        self._notify("READY=1\nSTATUS=serving")
        if self._leaving is not None:
            self._leaving.end()
        self._say(f"uWSGI {coming.process.pid} serves, after {seconds:.1f} s")
        self._answer(f"{_DONE} in {seconds:.1f} s")

    def _show(self, slot: int) -> None:
        """Make the statistics socket of the ini file a link to that of a uWSGI."""
        link = self._file("new")
        link.unlink(missing_ok=True)
        link.symlink_to(self._file(slot).name)
        link.replace(self._stats)

    def _reload(self) -> None:
        assert self._serving is not None
        self._wanted = False
        self._waiting, self._asking = self._asking, []
        self._notify("RELOADING=1\nSTATUS=loading the new application")
        try:
            self._coming = self._start(1 - self._serving.slot)
        except (KeyfrontError, OSError) as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        text = f"not reloaded, the former goes on: {reason}"
        self._say(text)
        self._notify(f"READY=1\nSTATUS={text}")
        self._answer(text)

    def _failed_status(self, ended: _Uwsgi, what: str) -> int:
        self._say(f"uWSGI {ended.process.pid} {what}, with {_status(ended.process)}")
        code = ended.process.returncode
        return code if code > 0 else 1

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._wanted = False
        self._notify("STOPPING=1")
        for uwsgi in (self._serving, self._leaving):
            if uwsgi is not None:
                uwsgi.end()
        if self._coming is not None:
            # It serves nobody yet, and may not hear of a stop while it loads; but when it has just
            # begun to accept, it ends as the others do.
            if any(_accepting(self._file(self._coming.slot))):
                self._coming.end()
            else:
                self._coming.kill()
                self._coming = None

    @staticmethod
    def _is_over(uwsgi: _Uwsgi, now: float) -> bool:
        if uwsgi.process.poll() is not None:
            uwsgi.kill()  # workers that outlived their master
            return True
        if now < uwsgi.deadline:
            return False
        uwsgi.kill()
        return True

    def _start(self, slot: int) -> _Uwsgi:
        ini = uwsgi_ini.read(self._path)
        if len(ini.addresses) != len(self._sockets) or ini.stats != self._stats:
            raise ServerError(f"{self._path}: other sockets than before need a restart")
        self._file(slot).unlink(missing_ok=True)
        copy = self._file(f"{slot}.ini")
        copy.unlink(missing_ok=True)
        descriptors = [opened.fileno() for opened in self._sockets]
        stats = self._file(slot)
        with ExitStack() as stack:
            inherited = list(descriptors)
            if unix_sockets.length(stats) > unix_sockets.UWSGI_LIMIT:
                folder = os.open(stats.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                inherited.append(folder)
                stats = Path(f"/proc/self/fd/{folder}", stats.name)
            made = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(made, "w", encoding="utf-8") as file:
                file.write(ini.with_sockets(descriptors, stats))
            try:
                process = subprocess.Popen(
                    [self._program, "--ini", str(copy)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    start_new_session=True,
                    preexec_fn=stop_with_parent(),
                )
            except OSError as error:
                raise ServerError(f"{self._program}: cannot be run: {error.strerror}") from None
        return _Uwsgi(process, slot, ini.mercy)

    def _file(self, name: object) -> Path:
        return self._stats.with_suffix(f".{name}")

    def _opened(self, ini: IniFile) -> list[socket.socket]:
        opened = []
        for address in ini.addresses:
            opened.append(ini.open(address))
            if ":" not in address:
                self._own.append(Path(address))
        return opened

    def _note(self, number: int, frame: object) -> None:
        self._received.add(number)

    def _wait(self) -> None:
        """Sleep until a signal, somebody who asks for a reload, or the next deadline."""
        until = [x.deadline for x in (self._serving, self._coming, self._leaving) if x]
        pause = max(min(until) - time.monotonic(), 0)
        if self._coming:
            pause = min(pause, _LOOK)
        timeout = None if pause == float("inf") else pause
        if not self._received:
            select.select([self._wake_read, self._control.fileno()], [], [], timeout)
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with suppress(OSError):
            asking, _ = self._control.accept()
            asking.setblocking(False)
            self._asking.append(asking)
            self._wanted = True

    def _answer(self, text: str) -> None:
        for asking in self._waiting:
            with suppress(OSError):
                asking.sendall(text.encode())
            asking.close()
        self._waiting = []

    def _notify(self, text: str) -> None:
        """Tell systemd, where it asked to be told (sd_notify(3))."""
        if not self._notify_address:
            return
        address = self._notify_address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, suppress(OSError):
            told.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)

    def _clean(self) -> None:
        for uwsgi in (self._coming, self._serving, self._leaving):
            if uwsgi is not None:
                uwsgi.kill()
        self._waiting += self._asking
        self._answer("not reloaded: the server was stopped")
        for opened in (self._control, *self._sockets):
            opened.close()
        names = ("reload", 0, 1, "0.ini", "1.ini")
        for path in (self._stats, *map(self._file, names), *self._own):
            path.unlink(missing_ok=True)

    @staticmethod
    def _say(text: str) -> None:
        # Nobody is to go unserved over a line, as on a full disk; and what could not be written is
        # not to lie in a buffer that fails again at the end.
        with suppress(OSError):
            os.write(2, f"keyfront uwsgi: {text}\n".encode(errors="replace"))


class _EndedError(Exception):
    """The first uWSGI ended; with the exit status."""


def run(ini: Path, program: str) -> int:
    """Run the uWSGI of an ini file until SIGTERM or SIGINT; SIGHUP reloads.

    :param ini: the file; it has ``stats`` with a path, in a folder that this user may write to
    :param program: the path of uWSGI
    :returns: the exit status: 0, or uWSGI's if it ended by itself
    :raises KeyfrontError: the file cannot be run, or its sockets cannot be had
    """
    manager = Manager(ini, program)
    try:
        return manager.run()
    except _EndedError as ended:
        return int(ended.args[0])


def reload(ini: Path) -> str:
    """Tell the manager that runs an ini file to reload, and wait until the new application serves.

    :param ini: the ini file
    :returns: a sentence that says that it serves
    :raises ServerError: nobody runs the file, or the former application goes on; the message says
        why
    """
    path = uwsgi_ini.read(ini).stats.with_suffix(".reload")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            unix_sockets.connect(asking, path)
        except OSError as error:
            raise ServerError(
                f"{ini}: no keyfront uwsgi runs it ({path}: {error.strerror})"
            ) from None
        answer = b""
        with suppress(ConnectionError):
            while part := asking.recv(4096):
                answer += part
    text = answer.decode("utf-8", "replace")
    if not text.startswith(_DONE):
        raise ServerError(text or "the server ended before it had reloaded")
    return text


def _handed_over(ini: IniFile) -> list[socket.socket]:
    """Return the sockets that systemd holds for this process (sd_listen_fds(3)), if it does.

    :raises ServerError: they are not those of the file
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or count == "0":
        return []
    found = [socket.socket(fileno=3 + number) for number in range(int(count))]
    if len(found) != len(ini.addresses):
        raise ServerError(
            f"systemd holds {len(found)} sockets, {ini.path} names {len(ini.addresses)}: make the "
            "socket's unit and the file agree"
        )
    for opened in found:
        opened.set_inheritable(False)
    return found


def _listening(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            unix_sockets.bind(listening, path)
        finally:
            os.umask(before)
        listening.listen()
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ServerError(f"{path}: cannot be listened at: {error.strerror}") from None
    return listening


def _accepting(stats: Path) -> list[bool]:
    """Return of each worker of a uWSGI whether it accepts; ``[False]`` if uWSGI is silent."""
    told = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            unix_sockets.connect(client, stats)
            while part := client.recv(65536):
                told += part
        return [bool(worker["accepting"]) for worker in loads(told)["workers"]] or [False]
    except (OSError, ValueError, LookupError, TypeError):
        return [False]


def _status(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is None:
        return "no status"
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
