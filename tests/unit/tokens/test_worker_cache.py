"""The entries of one process: bounded by bytes, least recently used first."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

import pytest

from keyfront.middleware.tokens.epochs import Epoch, Slots
from keyfront.middleware.tokens.keys_and_entries import Entry, Lifetime
from keyfront.middleware.tokens.worker_cache import LRUCache


def entry(size: int = 2000) -> Entry:
    made = Entry(
        "200 OK",
        [],
        b"",
        request_id=0,
        subject=-1,
        split=-1,
        epoch=Epoch(1, 1),
        slots=Slots([0]),
        lifetime=Lifetime(0.0, 0.0),
    )
    made.size = size
    return made


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_what_is_kept_is_found() -> None:
    memory, kept = LRUCache(100_000), entry()
    memory.put(key(1), kept)
    assert memory.get(key(1)) is kept
    assert memory.get(key(2)) is None
    assert (len(memory), memory.size, memory.evicted) == (1, 2000, 0)


def test_the_least_recently_used_goes_first() -> None:
    memory = LRUCache(10_000)
    for number in range(5):
        memory.put(key(number), entry())
    assert memory.size == 10_000
    memory.get(key(0))
    memory.get(key(2))
    memory.put(key(9), entry())
    memory.put(key(10), entry())
    assert [number for number in range(11) if memory.get(key(number))] == [0, 2, 4, 9, 10]
    assert memory.evicted == 2
    assert memory.size == 10_000


def test_one_large_entry_takes_the_place_of_several() -> None:
    memory = LRUCache(10_000)
    for number in range(10):
        memory.put(key(number), entry(1000))
    memory.put(key(99), entry(2500))
    assert len(memory) == 8
    assert memory.size == 9500


def test_an_entry_that_is_too_large_is_not_kept() -> None:
    memory = LRUCache(10_000)
    memory.put(key(1), entry(2501))
    assert memory.get(key(1)) is None
    assert memory.size == 0


def test_the_same_key_again_replaces() -> None:
    memory = LRUCache(10_000)
    memory.put(key(1), entry(2000))
    last = entry(500)
    memory.put(key(1), last)
    assert memory.get(key(1)) is last
    assert (len(memory), memory.size) == (1, 500)


def test_drop_and_clear() -> None:
    memory = LRUCache(10_000)
    memory.put(key(1), entry())
    memory.put(key(2), entry())
    memory.drop(key(1))
    memory.drop(key(1))
    assert (len(memory), memory.size) == (1, 2000)
    assert memory.get(key(1)) is None
    memory.clear()
    assert (len(memory), memory.size) == (0, 0)
    assert memory.get(key(2)) is None


@pytest.mark.parametrize("seed", range(3))
def test_it_never_grows_over_its_limit(seed: int) -> None:
    dice, memory = random.Random(seed), LRUCache(50_000)
    for _ in range(3000):
        memory.put(key(dice.randrange(200)), entry(dice.randrange(1, 20_000)))
        memory.drop(key(dice.randrange(200)))
        assert memory.size <= memory.limit
    held = [memory.get(key(number)) for number in range(200)]
    assert sum(found.size for found in held if found) == memory.size


def test_threads() -> None:
    memory = LRUCache(20_000)
    errors: list[Exception] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(2000):
                number = key(dice.randrange(30))
                memory.put(number, entry(dice.randrange(100, 3000)))
                memory.get(key(dice.randrange(30)))
                memory.drop(key(dice.randrange(30)))
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00001)
    try:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    held = [memory.get(key(number)) for number in range(30)]
    assert sum(found.size for found in held if found) == memory.size <= memory.limit


def test_the_size_of_an_entry_is_no_less_than_what_it_takes() -> None:
    """The bound is in bytes of memory, so the estimate must not be too small."""
    headers = [(f"header-{number}", f"value-{number}" * 3) for number in range(8)]
    made = Entry(
        "200 OK",
        headers,
        b"x" * 5000,
        request_id=0,
        subject=-1,
        split=-1,
        epoch=Epoch(2**62, 2**40),
        slots=Slots(range(1000, 1020)),
        lifetime=Lifetime(1e9, 2e9),
    )
    parts = [made, made.body, made.headers, made.epoch, *made.epoch, made.slots, *made.slots]
    parts += [made.slots.read, made.slots.__dict__, made.deadline, made.expires, made.size]
    parts += [part for header in headers for part in (header, *header)]
    taken = sum(sys.getsizeof(part) for part in parts) + sys.getsizeof(key(1)) + 150
    assert 0.9 * taken < made.size < 2 * taken


def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    memory: LRUCache[Entry] = LRUCache(100_000)
    memory.put(key(1), entry())
    with memory._lock:  # held by a thread that is not in the child
        child = os.fork()
        if not child:
            signal.alarm(60)
            memory.put(key(2), entry())
            sizes = sum(kept.size for kept in memory._entries.values())
            os._exit(0 if memory.get(key(2)) is not None and memory.size == sizes else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.get(key(1)) is not None
