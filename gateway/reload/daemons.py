"""Replaces mod_wsgi's daemon processes one after the other, so that the others go on answering.

A graceful restart of Apache ends all daemons at once, and starts as many that first load the
application. Here each is ended by itself, after its running requests, when its predecessor's
successor has loaded the application: a process that has done so is named ``keyfront-loaded``, and
one whose application failed to load ``keyfront-failed`` (:data:`LOADED`, :data:`FAILED`).

Before the first one is ended, a process of its own loads the application: what does not load ends
the reload, and nobody is replaced. A reload that is asked for meanwhile begins when this one is
over: two at once would end all daemons, and each would take the other's for its own.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError, OptionError, ServerError

from .uwsgi_manager import LOAD_SECONDS

#: The names (``ps -o comm``) of processes in which the application is loaded, or failed to be.
LOADED, FAILED = "keyfront-loaded", "keyfront-failed"
# Seconds between looks at processes.
_LOOK = 0.05
_DIRECTIVE = re.compile(
    r"^[ \t]*((?:PidFile|WSGIScriptAlias|WSGIDaemonProcess)[ \t].*)$", re.MULTILINE
)
_TRIAL = "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['failed'])"


def tell(*, failed: bool) -> None:
    """Give this process the name by which others see that its application is loaded."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(FAILED if failed else LOADED, encoding="ascii")


@dataclass(frozen=True)
class Apache:
    """A running Apache with one group of daemons, by its configuration.

    :param pid: its first process
    :param pid_file: the file that says so, which a reload locks
    :param script: the file of the application that its daemons serve
    :param options: the options of ``WSGIDaemonProcess``, by name
    """

    pid: int
    pid_file: Path
    script: str
    options: dict[str, str]

    def daemons(self) -> dict[int, str]:
        """Return the names of its daemon processes, by process number."""
        found = {}
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii")
        for pid in map(int, children.split()):
            with suppress(OSError):  # it has just ended
                process = Path(f"/proc/{pid}")
                if process.joinpath("cmdline").read_bytes().startswith(b"(wsgi:"):
                    found[pid] = process.joinpath("comm").read_text(encoding="utf-8").strip()
        return found


def read(path: Path) -> Apache:
    """Find the Apache that runs with a configuration file.

    :raises OptionError: the file cannot be read, or has no daemons with names
    :raises ServerError: no Apache runs with it
    """
    try:
        text = re.sub(r"\\\n", " ", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError("FILE", path, f"a configuration of Apache: {reason}") from None
    found = {}
    for line in _DIRECTIVE.findall(text):
        with suppress(ValueError):
            name, *words = shlex.split(line)
            found[name] = words
    try:
        (pid_file,), script = found["PidFile"], found["WSGIScriptAlias"][1]
        options = dict(word.partition("=")[::2] for word in found["WSGIDaemonProcess"][1:])
    except (KeyError, ValueError, IndexError):
        raise OptionError(
            "FILE", path, "Apache's with PidFile, WSGIScriptAlias and WSGIDaemonProcess"
        ) from None
    if options.get("display-name") != "%{GROUP}" or "python-home" not in options:
        raise OptionError(
            "WSGIDaemonProcess", path, "one with display-name=%{GROUP} and python-home"
        )
    try:
        pid = int(Path(pid_file).read_text(encoding="ascii"))
        os.stat(f"/proc/{pid}")
    except (OSError, ValueError):
        raise ServerError(f"{path}: no Apache runs with it ({pid_file})") from None
    return Apache(pid, Path(pid_file), script, options)


def reload(path: Path) -> str:
    """Load the application anew in every daemon of the Apache with a configuration file.

    :returns: a sentence that it is
    :raises OptionError: the file cannot be used
    :raises ServerError: the application does not load, and the former goes on, or not everywhere
    """
    asked = time.monotonic()
    with _alone(read(path)):
        began = time.monotonic()
        # read again: the reload before this one may have taken long
        _replace(path, read(path))
    waited = began - asked
    after = f", after {waited:.1f} s of another reload" if waited >= 0.1 else ""
    return f"reloaded in {time.monotonic() - began:.1f} s{after}"


@contextmanager
def _alone(apache: Apache) -> Iterator[None]:
    """Let no other reload of this Apache begin while the block runs.

    :raises ServerError: another one does not end
    """
    lock = FileLock(apache.pid_file, create=False)
    deadline = time.monotonic() + LOAD_SECONDS
    try:
        while not lock.attempt():
            if time.monotonic() > deadline:
                raise ServerError(
                    f"not reloaded: another reload of Apache {apache.pid} has not ended in "
                    f"{LOAD_SECONDS:.0f} s; try again when it has"
                )
            time.sleep(_LOOK)
    except CoordinatorError as error:
        raise ServerError(f"not reloaded: {error}") from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
        lock.close()


def _replace(path: Path, apache: Apache) -> None:
    former = apache.daemons()
    if not former:
        raise ServerError(f"{path}: Apache {apache.pid} has no daemons")
    _try(apache)
    known = set(former)
    for position, pid in enumerate(former):
        with suppress(ProcessLookupError):
            # documented by mod_wsgi ("Restarting Daemon Processes"): SIGINT lets requests finish
            os.kill(pid, signal.SIGINT)
        known.add(_successor(apache, known, pid, f"{position} of {len(former)} are replaced"))


def _try(apache: Apache) -> None:
    """Load the application in a process of its own, as the daemons' user.

    :raises ServerError: it does not load
    """
    user, group = apache.options.get("user", ""), apache.options.get("group", "")
    drops = os.geteuid() == 0 and user
    environment = {
        key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET",)
    }
    try:
        done = subprocess.run(
            [f"{apache.options['python-home']}/bin/python", "-c", _TRIAL, apache.script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LOAD_SECONDS,
            check=False,
            cwd="/",
            user=pwd.getpwnam(user).pw_uid if drops else None,
            group=grp.getgrnam(group).gr_gid if drops else None,
            extra_groups=os.getgrouplist(user, grp.getgrnam(group).gr_gid) if drops else None,
        )
    except subprocess.TimeoutExpired:
        raise ServerError(
            "not reloaded, the former goes on: the new application did not load in "
            f"{LOAD_SECONDS:.0f} s"
        ) from None
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        raise ServerError(
            "not reloaded, the former goes on: the application cannot be tried"
            f"{f' as {user}' if drops else ''}: {error}"
        ) from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        own = [line for line in lines if line.startswith("keyfront: ")] or lines[-1:]
        raise ServerError(
            "not reloaded, the former goes on: " + own[0].removeprefix("keyfront: ")
        )


def _successor(apache: Apache, known: set[int], former: int, so_far: str) -> int:
    """Wait until a daemon has ended and another has loaded the application; returns its number.

    :raises ServerError: it does not load
    """
    deadline = None
    while True:
        try:
            daemons = apache.daemons()
        except OSError:
            raise ServerError(f"not reloaded: Apache ended; {so_far}") from None
        if former not in daemons:
            # running requests have ended in their own time
            deadline = deadline or time.monotonic() + LOAD_SECONDS
            for pid, name in daemons.items():
                if pid not in known and name == LOADED:
                    return pid
                if pid not in known and name == FAILED:
                    raise ServerError(f"not reloaded: a new daemon failed to load it; {so_far}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"not reloaded: a new daemon did not load it in {LOAD_SECONDS:.0f} s; {so_far}"
                )
        time.sleep(_LOOK)
