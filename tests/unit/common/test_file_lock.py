"""A lock over processes, after a fork that Python was not told of."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from keyfront.common.file_lock import FileLock

PATIENCE = 60


def raw_fork() -> int:
    """Fork as uWSGI does without its hooks: Python's are not called."""
    return ctypes.PyDLL(None).fork()


def test_a_child_that_nobody_told_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    tried, over = os.pipe(), os.pipe()
    middle = os.fork()
    if not middle:
        signal.alarm(PATIENCE)
        lock.attempt()
        child = raw_fork()
        if child:
            os.write(tried[1], child.to_bytes(8, "little"))
            signal.pause()
        # Its parent holds it, and the attempt lets go of what was inherited.
        os.write(tried[1], b"got it!!" if lock.attempt() else b"not free")
        os.read(over[0], 1)
        os._exit(0)
    try:
        heard = b""
        while len(heard) < 16:
            heard += os.read(tried[0], 16)
        assert b"not free" in heard
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)
        # The child lives.
        assert lock.attempt()
        lock.__exit__(None, None, None)
    finally:
        os.write(over[1], b"x")
        for end in (*tried, *over):
            os.close(end)


def test_a_number_that_is_something_else_by_now_stays_open(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with lock:
        pass
    number = lock._fd
    with (tmp_path / "other").open("w") as other:
        os.dup2(other.fileno(), number)
        lock._pid = -1  # as in a child
        with lock:
            assert lock._fd != number
        os.fstat(number)
        os.close(number)
