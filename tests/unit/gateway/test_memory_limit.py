"""A worker that has grown too much is replaced once, and no request pays for looking."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.gateway import memory_limit
from keyfront.gateway.memory_limit import FIRST_LOOK, INTERVAL, from_environment, limit_memory
from support.served import PATIENCE

MIB = 1 << 20


class Process:
    """A clock, a size, and what was done."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.size = 50 * MIB
        self.looks = self.reloads = self.requests = 0
        self.application: Any = limit_memory(
            self._answer, mebibytes=100, reload=self._reload, look=self._look,
            clock=lambda: self.now,
        )  # fmt: skip
        self.looks = 0

    def _answer(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.requests += 1
        return [b"done"]

    def _reload(self) -> None:
        self.reloads += 1

    def _look(self) -> int:
        self.looks += 1
        return self.size

    def ask(self, after: float = 0.0) -> None:
        self.now += after
        assert self.application({}, None) == [b"done"]


def test_looks_once_a_second() -> None:
    process = Process()
    for _ in range(5):
        process.ask()
    assert process.looks == 0
    process.ask(FIRST_LOOK)
    for _ in range(10):
        process.ask(INTERVAL / 5)
    assert (process.looks, process.reloads, process.requests) == (3, 0, 16)


def test_a_worker_that_grew_is_replaced_once(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    process.ask()
    process.ask(FIRST_LOOK)
    process.size = 100 * MIB
    process.ask(INTERVAL / 2)
    assert process.reloads == 0
    for _ in range(3):
        process.ask(INTERVAL)
    assert (process.looks, process.reloads, process.requests) == (2, 1, 6)
    assert "has 100 MiB in memory and is replaced after its requests" in caplog.text
    assert "KEYFRONT_RELOAD_ON_RSS = 100" in caplog.text


def test_a_worker_that_is_too_large_from_the_start_answers_for_a_while() -> None:
    process = Process()
    process.size = 500 * MIB
    process.ask()
    process.ask(FIRST_LOOK - 0.1)
    assert process.reloads == 0
    process.ask(0.1)
    assert process.reloads == 1


def test_two_threads_look_once() -> None:
    looking, done, main = threading.Event(), threading.Event(), threading.main_thread()
    process = Process()

    def look() -> int:
        if threading.current_thread() is not main:
            looking.set()
            assert done.wait(PATIENCE)
        return 50 * MIB

    application: Any = limit_memory(
        process._answer, mebibytes=10, reload=process._reload, look=look,
        clock=lambda: process.now,
    )  # fmt: skip
    assert application({}, None) == [b"done"]
    process.now += FIRST_LOOK
    other = threading.Thread(target=application, args=({}, None))
    other.start()
    assert looking.wait(PATIENCE)
    # meanwhile this one goes on
    assert application({}, None) == [b"done"]
    assert process.reloads == 0
    done.set()
    other.join(PATIENCE)
    assert process.reloads == 1


def test_a_look_that_fails_costs_no_request() -> None:
    process = Process()
    answers = iter((50 * MIB, None, 200 * MIB))

    def look() -> int:
        answer = next(answers)
        if answer is None:
            raise OSError(24, "Too many open files")
        return answer

    application: Any = limit_memory(
        process._answer, mebibytes=100, reload=process._reload, look=look,
        clock=lambda: process.now,
    )  # fmt: skip
    for wait in (0, FIRST_LOOK, INTERVAL):
        process.now += wait
        assert application({}, None) == [b"done"]
    assert process.reloads == 1


def test_no_limit_is_the_application_itself() -> None:
    process = Process()
    assert limit_memory(process._answer, mebibytes=0, reload=process._reload) == process._answer


def test_a_system_that_does_not_tell() -> None:
    def look() -> int:
        raise FileNotFoundError(2, "No such file", "/proc/self/statm")

    process = Process()
    with pytest.raises(OptionError, match="KEYFRONT_RELOAD_ON_RSS = 5: must be 0 here"):
        limit_memory(process._answer, mebibytes=5, reload=process._reload, look=look)


def test_what_is_resident() -> None:
    before = memory_limit.resident()
    held = bytearray(64 * MIB)
    held[::4096] = b"1" * len(held[::4096])
    assert before + 48 * MIB < memory_limit.resident() < before + 160 * MIB


@pytest.mark.parametrize(("text", "wanted"), [("0", 0), ("1", 1), ("1048576", 1048576)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, wanted: int) -> None:
    monkeypatch.setenv("KEYFRONT_RELOAD_ON_RSS", text)
    assert from_environment() == wanted


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYFRONT_RELOAD_ON_RSS", raising=False)
    assert from_environment() == 0


@pytest.mark.parametrize(
    "text", ["-1", "1.5", "250M", "1048577", "99999999999999999999", "", " 5", "٣", "nan"]
)
def test_a_variable_out_of_range(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KEYFRONT_RELOAD_ON_RSS", text)
    with pytest.raises(OptionError, match=r"KEYFRONT_RELOAD_ON_RSS.* 1 to 1048576"):
        from_environment()
