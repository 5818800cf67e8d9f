"""Under gevent hashes run in native threads, and all else about them is as without."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from keyfront.gateway.keystone.password_hashing import give_way


class _Hasher:
    @staticmethod
    def hash(password: bytes) -> int:
        return threading.get_ident()

    verify = hash


def test_without_gevent_a_hash_stays_in_its_thread() -> None:
    give_way([_Hasher])
    assert _Hasher.hash(b"p") == threading.get_ident()


@pytest.mark.parametrize("hashers", ((), [object]))
def test_without_gevent_an_unknown_keystone_is_nothing_to_tell(
    hashers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    give_way(hashers)
    assert not caplog.text


@pytest.mark.parametrize("hashers", ((), [object]))
def test_a_keystone_that_hashes_otherwise_is_left_alone(
    hashers: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Monkey:
        @staticmethod
        def is_module_patched(name: str) -> bool:
            return name == "threading"

    monkeypatch.setitem(sys.modules, "gevent.monkey", Monkey)  # type: ignore[arg-type]
    give_way(hashers)
    assert "passwords are hashed in the workers' only thread" in caplog.text


_GREEN = """
from gevent import monkey
monkey.patch_all()
import gc, os, traceback, weakref
import gevent
from keyfront.gateway.keystone import password_hashing
from keyfront.gateway.keystone.password_hashing import give_way, run_aside
native = monkey.get_original("_thread", "get_ident")
steps = []
# threading's own events are made of what gevent patched
over = monkey.get_original("_thread", "allocate_lock")()
over.acquire()

class Hasher:
    @staticmethod
    def hash(password, rounds=12, **more):
        over.acquire(timeout=60)
        steps.append("hashed")
        return native(), password, rounds, more

    @staticmethod
    def verify(password, hashed):
        if hashed == "malformed":
            raise ValueError("malformed password hash")
        return hashed == password

give_way([Hasher])
give_way([Hasher])  # once only
one = gevent.spawn(Hasher.hash, b"p", rounds=4, salt_size=2)

def other():
    steps.append("other")
    over.release()

gevent.spawn_later(0.01, other)
ident, *given = one.get()
assert steps == ["other", "hashed"], steps
assert ident != native() and given == [b"p", 4, {"salt_size": 2}], given
assert Hasher.verify(b"p", b"p") is True and Hasher.verify(b"p", b"q") is False

# the hub tells of what its threads raise, with a traceback
told = []
gevent.get_hub().print_exception = lambda *error: told.append(error)

class Password(str):
    pass

def attempt():
    password = Password("a-password-nobody-may-see")
    try:
        Hasher.verify(password, "malformed")
    except ValueError as error:
        assert error.args == ("malformed password hash",), error
        assert error.__cause__ is None and error.__context__ is None
        assert "nobody-may-see" not in "".join(traceback.format_exception(error))
    else:
        raise SystemExit("nothing was raised")
    return weakref.ref(password)

gc.disable()
assert attempt()() is None, "something waits for the garbage collector"
gc.enable()
assert not told, told

# without a further thread it runs in this one, once
password_hashing._pools.clear()
runs = []

def no_thread(*given):
    raise RuntimeError("can't start new thread")

def count():
    runs.append(native())
    return "hashed"

from gevent.threadpool import ThreadPool
add, ThreadPool._add_thread = ThreadPool._add_thread, no_thread
assert run_aside(count) == "hashed" and runs == [native()], runs
ThreadPool._add_thread = add
assert run_aside(count) == "hashed" and len(runs) == 2 and runs[1] != native(), runs
child = os.fork()
if not child:
    gevent.reinit()
    os._exit(0 if run_aside(lambda: 7) == 7 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_other_greenlets_go_on_meanwhile() -> None:
    pytest.importorskip("gevent")
    done = subprocess.run([sys.executable, "-c", _GREEN], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
