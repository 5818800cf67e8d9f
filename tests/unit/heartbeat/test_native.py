"""The interpreter's own primitives, before and after patching, and what is told of a process."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from keyfront.common import interpreter, process
from keyfront.gateway.heartbeat import concurrency, native, uwsgi_timer


def fake(name: str, **parts: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(parts)
    return module


def uwsgi(**parts: Any) -> ModuleType:
    usual = {"opt": {}, "has_threads": 1, "masterpid": lambda: 7, "worker_id": lambda: 1}
    return fake("uwsgi", **{**usual, **parts})


def test_a_lock_is_the_interpreters_and_times_out() -> None:
    lock = native.allocate_lock()
    # each copy of the module has a type of its own
    assert type(lock).__name__ == type(_thread.allocate_lock()).__name__ == "lock"
    assert lock.acquire(False)
    assert not lock.acquire(True, 0.001)
    lock.release()


def test_a_lock_that_is_tried() -> None:
    lock = native.TryLock()
    assert lock.acquire()
    assert not lock.acquire()
    with pytest.raises(IndexError):
        lock.take()
    lock.give(None)
    lock.take()


@pytest.mark.parametrize("make", [native.mark, process._NumberMark])
def test_a_mark_tells_a_process_from_its_children(make: Any) -> None:
    mark = make()
    assert mark[0] == 1
    child = os.fork()
    if not child:
        os._exit(7 if mark[0] == 0 and make()[0] == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert mark[0] == 1


def test_a_mark_where_the_kernel_cannot_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WIPE_ON_FORK", 9999)
    assert type(native.mark()) is process._NumberMark


def test_a_thread_is_started_that_nobody_joins() -> None:
    ran = threading.Event()
    native.start_new_thread(ran.set, ())
    assert ran.wait(60)


def test_originals_are_found_whatever_stands_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def patched(*_: object) -> None:
        raise AssertionError("the patched one was taken")

    for module, name in (("_thread", "allocate_lock"), ("_thread", "start_new_thread"),
                         ("time", "sleep"), ("select", "poll")):
        monkeypatch.setattr(sys.modules[module], name, patched)
    assert interpreter.fresh("_thread").allocate_lock().acquire(False)
    interpreter.fresh("time").sleep(0)
    interpreter.fresh("select").poll().poll(0)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ImportError, match="no_such_module"):
        interpreter.fresh("no_such_module")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("uwsgi", "mod_wsgi", "eventlet.patcher", "gevent.monkey"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def add(module: ModuleType) -> None:
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return add


EVENTLET = fake("eventlet.patcher", is_monkey_patched=lambda name: name == "socket")
GEVENT = fake("gevent.monkey", is_module_patched=lambda name: name == "socket")
UNPATCHED = fake("eventlet.patcher", is_monkey_patched=lambda name: False)


@pytest.mark.parametrize(
    ("present", "server", "threads", "patching"),
    [
        ([], None, None, "none"),
        ([UNPATCHED], None, None, "none"),
        ([uwsgi(), EVENTLET], "uwsgi", 1, "eventlet"),
        ([uwsgi(opt={"threads": b"4"})], "uwsgi", 4, "none"),
        ([uwsgi(opt={"gevent": b"20"}), GEVENT], "uwsgi gevent", 1, "gevent"),
        ([fake("mod_wsgi", process_group="x", threads_per_process=5), EVENTLET],
         "mod_wsgi daemon", 5, "eventlet"),
        ([fake("mod_wsgi", process_group="", threads_per_process=25)],
         "mod_wsgi embedded", 25, "none"),
        ([fake("mod_wsgi")], None, None, "none"),  # the package, not Apache's
        ([EVENTLET, GEVENT], None, None, "eventlet and gevent"),
    ],
)
def test_what_a_process_runs_under(
    modules: Any, present: list[ModuleType], server: str | None, threads: int | None, patching: str
) -> None:
    for module in present:
        modules(module)
    around = concurrency.surroundings()
    assert around.threads == threads
    assert around.patching == patching
    assert server is None or around.server == server


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ([uwsgi(opt={"threads": b"4"}), EVENTLET], ["uwsgi with 4 threads", "eventlet"]),
        ([fake("mod_wsgi", process_group="", threads_per_process=25), GEVENT],
         ["mod_wsgi embedded with 25 threads", "gevent"]),
        ([uwsgi(opt={"gevent": b"20"}), EVENTLET], ["uWSGI's gevent loop"]),
        ([EVENTLET, GEVENT], ["both patched"]),
        ([uwsgi(has_threads=0, masterpid=lambda: 0)], ["without a master"]),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    modules: Any, present: list[ModuleType], words: list[str]
) -> None:
    for module in present:
        modules(module)
    (line,) = concurrency.unsafe(concurrency.surroundings())
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "present",
    [
        [uwsgi(opt={"threads": b"4"})],
        [uwsgi(), EVENTLET],
        [uwsgi(opt={"gevent": b"20", "threads": b"4"}), GEVENT],
        [uwsgi(has_threads=0), EVENTLET],
        [fake("mod_wsgi", process_group="x", threads_per_process=1), GEVENT],
    ],
)
def test_what_works_is_not_warned_of(modules: Any, present: list[ModuleType]) -> None:
    for module in present:
        modules(module)
    assert concurrency.unsafe(concurrency.surroundings()) == []


@pytest.mark.parametrize(
    ("parts", "threads"),
    [
        ({"has_threads": 0}, False),
        ({"has_threads": 1}, True),
        ({"has_threads": None, "version_info": (2, 0, 26, 0, b"")}, False),
        ({"has_threads": None, "version_info": (2, 0, 31, 0, b"")}, True),
        ({"has_threads": None, "version_info": (2, 0, 26), "opt": {"enable-threads": True}}, True),
    ],
)
def test_whether_uwsgi_has_threads(parts: dict[str, Any], threads: bool) -> None:
    assert concurrency.has_threads(uwsgi(**parts)) is threads


def test_the_sleep_goes_by_the_socket() -> None:
    class Green:
        pass

    Green.__module__ = "eventlet.greenio.base"
    sleep = object()
    known = sys.modules.get("eventlet")
    sys.modules["eventlet"] = SimpleNamespace(sleep=sleep)  # type: ignore[assignment]
    try:
        assert concurrency.pause_of(Green()) is sleep
        assert concurrency.pause_of(type("Own", (Green,), {})()) is sleep
    finally:
        if known is None:
            del sys.modules["eventlet"]
        else:
            sys.modules["eventlet"] = known
    assert concurrency.pause_of(object()) is native.sleep


class Timers:
    """What uWSGI offers for timers, as far as the timer uses it."""

    def __init__(self, worker: int, *, taken: tuple[int, ...] = (), master: int = 7) -> None:
        self.handlers: dict[int, tuple[str, Any]] = {}
        self.timers: list[tuple[int, int]] = []
        self.taken = set(taken)
        self.module = uwsgi(
            has_threads=0, masterpid=lambda: master, worker_id=lambda: worker,
            signal_registered=lambda number: number in self.taken,
            register_signal=self.register, add_timer=lambda *x: self.timers.append(x),
        )

    def register(self, number: int, receiver: str, handler: Any) -> None:
        self.handlers[number] = (receiver, handler)


def test_the_timer_gives_every_worker_a_turn(modules: Any) -> None:
    timers = Timers(0, taken=(254,))
    modules(timers.module)
    assert uwsgi_timer.is_needed()
    turns: list[int] = []
    assert uwsgi_timer.start(lambda: turns.append(1))
    ((number, (receiver, handler)),) = timers.handlers.items()
    assert (number, receiver) == (253, "workers")
    assert timers.timers == [(253, 1)]
    handler(number)
    assert turns == [1]


def test_a_lazy_worker_has_a_signal_of_its_own_and_one_timer(modules: Any) -> None:
    timers = Timers(3, taken=(251,))  # its predecessor's
    modules(timers.module)
    assert uwsgi_timer.start(lambda: None)
    assert timers.handlers[251][0] == "worker3"
    assert timers.timers == []


def test_without_a_master_there_is_no_timer(modules: Any) -> None:
    modules(Timers(1, master=0).module)
    assert not uwsgi_timer.start(lambda: None)
