"""How tests run programs of the system as servers: private ones, which end when the test does.

It imports no client of theirs, so that tests that need none run without.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from keyfront.errors import MissingPartError
from support.served import PATIENCE

T = TypeVar("T")


@cache
def _find(name: str) -> Path | None:
    """A program, also where Debian puts servers."""
    versions = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    newest_first = sorted(versions, key=lambda x: float(x.parent.name), reverse=True)
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", *newest_first]
    found = shutil.which(name, path=os.pathsep.join(map(str, folders)))
    # what a link points to has its companions beside it
    return Path(found).resolve() if found else None


def program(name: str, package: str) -> Path:
    """Where a program is; skips the test if this machine does not have it."""
    found = _find(name)
    if found is None:
        pytest.skip(f"{name} is not installed; on Debian: apt-get install {package}")
    return found


@contextlib.contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """A folder right in /tmp: a socket's path is short, and pytest's are for this user only."""
    folder = Path(tempfile.mkdtemp(prefix=f"keyfront-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def remove(folder: Path) -> None:
    """Take a folder away from under those who write into it, at once.

    They could make files in it while it is emptied, and then it could not be removed.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as aside:
        folder.rename(Path(aside, folder.name))


@contextlib.contextmanager
def running(
    command: list[str], log: Path, stop: signal.Signals, *,
    environment: dict[str, str] | None = None, user: list[str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends, or this process does, however it ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*setpriv(stop, user or []), *command],
            env={**os.environ, **(environment or {})},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(stop)
        try:
            process.wait(PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def setpriv(last: signal.Signals, user: list[str]) -> list[str]:
    """Puts a command under this process and, by its options, another user.

    One setpriv does both: what is sent when the parent ends is forgotten with the user.
    """
    return ["setpriv", "--pdeathsig", last.name, *user]


def ready(
    look: Callable[[], T],
    process: subprocess.Popen[bytes],
    log: Path,
    not_yet: tuple[type[Exception], ...],
) -> T:
    """Ask the server until it answers; beside others a start takes minutes."""
    deadline = time.monotonic() + 3 * PATIENCE
    while True:
        ended = process.poll() is not None
        try:
            return look()
        except not_yet as error:
            if ended or time.monotonic() > deadline:
                printed = log.read_text(errors="replace")
                raise AssertionError(f"{process.args}: {error}; it printed: {printed}") from error
        time.sleep(0.02)


@contextlib.contextmanager
def or_skip(world: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    """Enter a world of the benchmarks, or skip the test if this machine does not have it."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(world)
        except MissingPartError as error:
            pytest.skip(str(error))
        yield found
