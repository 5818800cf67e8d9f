"""Hashes run in threads of a lower priority, and nothing else about them is different."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import traceback
import weakref
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.keystone import password_threads
from keyfront.gateway.keystone.password_threads import from_environment, hash_aside, run_aside

SECRET = "a-password-nobody-may-see"


class _Hasher:
    """Hashes as Keystone's do."""

    @staticmethod
    def hash(password: bytes, rounds: int = 12, **more: Any) -> str:
        return f"{password.decode()} {rounds} {more} {_niceness()}"

    @staticmethod
    def verify(password: bytes, hashed: str) -> bool:
        if hashed == "malformed":
            raise ValueError("malformed password hash")
        return hashed == password.decode()


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_hash_has_a_lower_priority_and_the_request_keeps_its_own() -> None:
    before = _niceness()
    hash_aside([_Hasher], 3)
    hash_aside([_Hasher], 3)  # once only
    assert _Hasher.hash(b"p", rounds=4, salt_size=2) == f"p 4 {{'salt_size': 2}} {before + 3}"
    assert _Hasher.verify(b"p", "p") is True and _Hasher.verify(b"p", "q") is False
    with pytest.raises(ValueError, match="malformed password hash"):
        _Hasher.verify(b"p", "malformed")
    assert _niceness() == before


def test_no_priority_is_lower_than_the_lowest() -> None:
    lowest = min(19, _niceness() + 19)
    assert run_aside(_niceness, 19) == lowest


def test_zero_changes_nothing() -> None:
    class Hasher:
        hash = verify = staticmethod(_niceness)

    hash_aside([Hasher], 0)
    assert Hasher.hash is _niceness


@pytest.mark.parametrize("hashers", ((), [object]))
def test_a_keystone_that_hashes_otherwise_is_left_alone(
    hashers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hash_aside(hashers, 10)
    assert "passwords are hashed in requests' own threads" in caplog.text


def test_what_is_raised_is_raised_here_and_nothing_keeps_the_password() -> None:
    class Password(str):
        """One that tells when it is gone."""

    class Error(BaseException):
        pass

    def fail(password: str) -> None:
        raise Error("no")

    def attempt() -> weakref.ref[Password]:
        password = Password(SECRET)
        try:
            run_aside(lambda: fail(password), 1)
        except Error as error:
            assert error.args == ("no",) and error.__cause__ is None and error.__context__ is None
            assert SECRET not in "".join(traceback.format_exception(error))
        else:
            pytest.fail("it was not raised")
        return weakref.ref(password)

    gc.disable()
    try:
        assert attempt()() is None, "something waits for the garbage collector"
    finally:
        gc.enable()


def test_no_thread_is_told_of_the_password() -> None:
    def look() -> list[str]:
        return [repr(thread) for thread in threading.enumerate()]

    before = look()
    assert run_aside(look, 1) == before


def test_without_a_further_thread_it_runs_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(password_threads._thread, "start_new_thread", fail)
    assert run_aside(threading.get_ident, 1) == threading.get_ident()


def test_where_the_priority_cannot_be_lowered_it_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: Any) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "setpriority", fail)
    assert run_aside(lambda: "done", 5) == "done"


def test_many_at_once_each_have_their_own() -> None:
    together = threading.Barrier(8)
    found: dict[int, tuple[int, int]] = {}

    def deed(number: int) -> int:
        together.wait(60)  # all of them run at the same time
        return number

    def ask(number: int) -> None:
        found[number] = run_aside(lambda: deed(number), 1), number

    threads = [threading.Thread(target=ask, args=(one,)) for one in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == other for one, other in found.values()) and len(found) == 8


def test_a_fork_takes_no_thread_with_it() -> None:
    run_aside(_niceness, 1)
    child = os.fork()
    if not child:
        os._exit(0 if run_aside(lambda: 7, 1) == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_GREEN = """
from gevent import monkey
monkey.patch_all()
import os, gevent, threading, hashlib
from keyfront.gateway.keystone.password_threads import run_aside
native = monkey.get_original("_thread", "get_ident")
sleep = monkey.get_original("time", "sleep")
steps = []
over = monkey.get_original("threading", "Event")()

def deed():
    over.wait(60)
    steps.append("hashed")
    return native(), os.getpriority(os.PRIO_PROCESS, 0)

before = os.getpriority(os.PRIO_PROCESS, 0)
one = gevent.spawn(run_aside, deed, 4)

def other():
    steps.append("other")
    over.set()

gevent.spawn_later(0.01, other)
ident, niceness = one.get()
assert steps == ["other", "hashed"], steps
assert ident != native() and niceness == before + 4, (ident, niceness)
assert os.getpriority(os.PRIO_PROCESS, 0) == before

def fail():
    raise KeyError("as it is")

# the hub tells of what its threads raise, with a traceback
told = []
gevent.get_hub().print_exception = lambda *error: told.append(error)

try:
    run_aside(fail, 4)
except KeyError as error:
    assert error.args == ("as it is",)
else:
    raise SystemExit("nothing was raised")
assert not told, told
# of a thread of the pool it is not lowered further
assert {run_aside(lambda: os.getpriority(os.PRIO_PROCESS, 0), 4) for _ in range(9)} == {before + 4}
# without a further thread it runs in this one, once
from keyfront.gateway.keystone import password_threads
password_threads._pools.clear()
runs = []

def no_thread(*given):
    raise RuntimeError("can't start new thread")

def count():
    runs.append(native())
    return "hashed"

from gevent.threadpool import ThreadPool
add, ThreadPool._add_thread = ThreadPool._add_thread, no_thread
assert run_aside(count, 4) == "hashed" and runs == [native()], runs
ThreadPool._add_thread = add
assert run_aside(count, 4) == "hashed" and len(runs) == 2 and runs[1] != native(), runs
child = os.fork()
if not child:
    gevent.reinit()
    os._exit(0 if run_aside(lambda: 7, 4) == 7 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_other_greenlets_go_on_meanwhile() -> None:
    pytest.importorskip("gevent")
    done = subprocess.run([sys.executable, "-c", _GREEN], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("text", ("-1", "20", "low", "1.5", ""))
def test_what_cannot_be_a_niceness_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(password_threads.VARIABLE, text)
    with pytest.raises(OptionError, match="0 to 19"):
        from_environment()


def test_it_is_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(password_threads.VARIABLE, raising=False)
    assert from_environment() == password_threads.DEFAULT > 0
