"""Signals that wait until what they would interrupt is over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from keyfront.common.signals import held_back


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_until_the_block_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt) as caught:
        with held_back(signal.SIGTERM, signal.SIGINT):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("all of it")
        done.append("more")
    assert caught.value.args == (signal.SIGTERM,)
    assert done == ["all of it"]
    # and is as before then
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 60)


def test_without_a_signal_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with held_back(signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_changes_nothing() -> None:
    seen = []

    def look() -> None:
        with held_back(signal.SIGTERM):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
