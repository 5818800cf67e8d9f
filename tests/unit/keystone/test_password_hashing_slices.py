"""A hash has long slices of its core, as the kernel tells, and what the thread had before after it.

The kernel is asked; on one that knows no slices of a thread's own there is nothing to see.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from keyfront.gateway.keystone import password_hashing
from keyfront.gateway.keystone.password_hashing import (
    LONGEST,
    give_way,
    in_long_slices,
    slice_of,
)

pytestmark = pytest.mark.skipif(not slice_of(), reason="the kernel has no slices of a thread's own")


def _in_thread(deed: Callable[[], Any]) -> Any:
    """Return what a function returns in a thread that ends then, with what it has changed."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(deed()))
    thread.start()
    thread.join()
    return found[0]


def test_a_function_has_long_slices_and_its_thread_what_it_had() -> None:
    seen: list[int] = []

    def hashing(password: bytes, rounds: int = 12) -> tuple[bytes, int]:
        seen.append(slice_of())
        if not password:
            raise ValueError("no password")
        return password, rounds

    def attempt() -> tuple[int, int]:
        before = slice_of()
        call = in_long_slices(hashing)
        assert call(b"p", rounds=4) == (b"p", 4)
        with pytest.raises(ValueError, match="no password"):
            call(b"")
        return before, slice_of()

    before, after = _in_thread(attempt)
    assert seen == [LONGEST, LONGEST]
    assert before == after != LONGEST


def test_other_threads_keep_theirs() -> None:
    before = slice_of()
    assert _in_thread(in_long_slices(slice_of)) == LONGEST
    me, seen = threading.get_native_id(), []
    _in_thread(in_long_slices(lambda: seen.append(slice_of(me))))
    assert seen == [before] == [slice_of()]


def test_what_somebody_has_given_the_thread_stays() -> None:
    def attempt() -> tuple[int, int, int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        password_hashing._ask(3_000_000)
        during = in_long_slices(slice_of)()
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return during, slice_of(), nice, os.sched_getscheduler(0)

    assert _in_thread(attempt) == (LONGEST, 3_000_000, 7, os.SCHED_OTHER)


@pytest.mark.parametrize("policy", ("SCHED_IDLE", "SCHED_BATCH"))
def test_a_policy_stays(policy: str) -> None:
    number = getattr(os, policy)

    def attempt() -> tuple[int, int]:
        os.sched_setscheduler(0, number, os.sched_param(0))
        return in_long_slices(lambda: os.sched_getscheduler(0))(), os.sched_getscheduler(0)

    assert _in_thread(attempt) == (number, number)


# A filter of system calls that answers sched_setattr or sched_getattr with an error.
_REFUSED = """
import ctypes, struct, sys
from keyfront.gateway.keystone import password_hashing
from keyfront.gateway.keystone.password_hashing import in_long_slices, slice_of
import platform
number = password_hashing._NUMBERS[platform.machine()][int(sys.argv[1])]
before = slice_of()
code = b"".join(struct.pack("<HBBI", *one) for one in (
    (0x20, 0, 0, 0),                               # load the number of the call
    (0x15, 0, 1, number),                          # if it is that one
    (0x06, 0, 0, 0x00050000 | int(sys.argv[2])),   # it fails
    (0x06, 0, 0, 0x7fff0000),                      # all others are made
))
kept = ctypes.create_string_buffer(code, len(code))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(kept))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
print(in_long_slices(lambda: "hashed")(), slice_of() in (0, before))
"""


@pytest.mark.parametrize("which", (0, 1), ids=("set", "get"))
@pytest.mark.parametrize("error", (errno.EPERM, errno.ENOSYS))
def test_a_sandbox_may_refuse_it(which: int, error: int) -> None:
    command = [sys.executable, "-c", _REFUSED, str(which), str(error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "hashed True\n"), done.stderr


@pytest.mark.parametrize("machine", ("riscv64", "armv7l", ""))
def test_a_machine_of_unknown_calls_is_left_alone(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(password_hashing, "_sched_attr", lambda *_: pytest.fail("asked the kernel"))
    assert in_long_slices(slice_of)() == 0


def test_all_of_keystones_hashes_do_it() -> None:
    class Hasher:
        @staticmethod
        def hash(password: bytes, rounds: int = 12) -> tuple[int, bytes, int]:
            return slice_of(), password, rounds

        @staticmethod
        def verify(password: bytes, hashed: str) -> tuple[int, bool]:
            return slice_of(), hashed == password.decode()

    give_way([Hasher])
    once = Hasher.hash
    give_way([Hasher])
    assert Hasher.hash is once
    assert Hasher.hash(b"p", rounds=4) == (LONGEST, b"p", 4)
    assert Hasher().verify(b"p", "q") == (LONGEST, False)
