"""The condition: nobody runs while its lock is held, and what must be done is done."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from keyfront.common.condition import Condition
from support.served import PATIENCE


class Killed(BaseException):
    pass


class Unsteady:
    """A lock whose holder may be interrupted while it waits, so many times."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.interruptions = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.interruptions:
            self.interruptions -= 1
            raise Killed
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()


def waiter(condition: Condition, seconds: float, found: list[Any]) -> threading.Thread:
    def wait() -> None:
        with condition:
            found.append(condition.wait(seconds))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_who_waits_is_woken() -> None:
    condition = Condition()
    found: list[Any] = []
    threads = [waiter(condition, PATIENCE, found) for _ in range(3)]
    deadline = time.monotonic() + PATIENCE
    while len(condition._waiters) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with condition:
        condition.notify_all()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [True] * 3
    assert not condition._waiters


@pytest.mark.parametrize("seconds", [0.01, 0, -1])
def test_or_not_in_time(seconds: float) -> None:
    condition = Condition()
    with condition:
        assert not condition.wait(seconds)
        assert not condition.wait_for(lambda: False, seconds)
        assert condition.wait_for(lambda: True, seconds)
        assert condition.lock.acquire(False) is False
    assert not condition._waiters


def test_taking_may_be_interrupted_and_giving_back_may_not() -> None:
    lock = Unsteady()
    condition = Condition(lock)
    done = []
    lock.interruptions = 1
    with pytest.raises(Killed), condition:
        done.append("taken")
    assert not done
    lock.interruptions = 2
    with pytest.raises(Killed), condition.surely():
        done.append("given back")
    assert done == ["given back"]
    assert not lock.lock.locked()


def test_an_error_of_the_block_stays_seen() -> None:
    lock = Unsteady()
    lock.interruptions = 1
    with pytest.raises(Killed) as caught, Condition(lock).surely():
        raise ValueError("its own")
    assert str(caught.value.__context__) == "its own"
    with pytest.raises(ValueError, match="its own"), Condition(lock).surely():
        raise ValueError("its own")


def test_a_wait_ends_with_its_lock_whatever_is_raised() -> None:
    lock = Unsteady()
    condition = Condition(lock)
    with pytest.raises(Killed), condition:
        lock.interruptions = 2  # as it takes its lock again
        condition.wait(0)
    assert not lock.lock.locked()
    assert not condition._waiters
