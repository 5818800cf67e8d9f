"""The token cache: a hit, a miss, a fill, and the key of an entry."""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import token_hit
from keyfront.benchmarks.compare.token_stand_in import request
from keyfront.benchmarks.micro.subjects import ENTRIES, Cache, Step, bare, served
from keyfront.middleware.tokens.keys_and_entries import Entry, Lifetime, entry_of

# Keystone warns at each request of what its own policies do.
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@QUIET
def test_hit_against_stock_keystone(paired: Any, cache: Cache, stock: Step) -> None:
    """A hit answers a validation at least 40 times as fast."""
    paired(cache.hit(), stock, limit=1 / 40)


def test_hit_against_a_bare_application(paired: Any, cache: Cache) -> None:
    """What a hit costs beside the least that any answer costs."""
    before = cache.keystone.calls
    paired(cache.hit(), served(bare()), limit=25)
    assert cache.keystone.calls == before


@QUIET
def test_miss_against_stock_keystone(paired: Any, cache: Cache, stock: Step) -> None:
    """A miss adds at most 5 % to what Keystone takes: the stand-in behind it is included."""
    asked, first = cache.keystone.calls, next(cache.numbers)
    paired(cache.miss(), stock, limit=0.05)
    assert cache.keystone.calls - asked == next(cache.numbers) - first - 1


def test_fill_against_dogpile(paired: Any, cache: Cache) -> None:
    """Keeping an answer for all workers, beside what stock Keystone's cache does in one of them."""
    region = pytest.importorskip("dogpile.cache").make_region()
    region.configure("dogpile.cache.memory_pickle")
    entry = _entry(cache)
    keys = [hashlib.blake2b(bytes([number]), digest_size=16).digest() for number in range(200)]
    numbers = itertools.cycle(keys)
    names = itertools.cycle([key.hex() for key in keys])
    headers, body = entry.answer(request(0))
    value = {"headers": headers, "body": body}

    def fill() -> None:
        key = next(numbers)
        cache.filter.answers.put(key, entry)
        cache.filter._node.keep(key, entry)

    paired(fill, lambda: region.set(next(names), value), limit=25)


def test_key_against_dogpile(paired: Any, cache: Cache) -> None:
    """The key of a request: all of it that matters, against dogpile's mangled two tokens."""
    util = pytest.importorskip("dogpile.cache.util")
    environ = request(0)
    tokens = environ["HTTP_X_AUTH_TOKEN"], environ["HTTP_X_SUBJECT_TOKEN"]

    def theirs() -> str:
        mangled: str = util.sha1_mangle_key(f"validate|{tokens[0]}|{tokens[1]}".encode())
        return mangled

    paired(lambda: cache.filter._keys.key(environ), theirs, limit=8)


def test_counts(counted: Any, cache: Cache) -> None:
    """A hit asks Keystone nothing and the kernel nothing; a miss asks Keystone once."""
    hit, miss = cache.hit(), cache.miss()
    asked = []
    for step in (hit, miss):
        before = cache.keystone.calls
        for _ in range(10):
            step()
        asked.append(cache.keystone.calls - before)
    counted(
        keystone_calls_of_10_hits=asked[0],
        keystone_calls_of_10_misses=asked[1],
        syscalls_of_10_hits=counted.syscalls(hit),
    )


@pytest.mark.slow
def test_hit_in_instructions(instructions: Any, cache: Cache) -> None:
    instructions(cache.hit())


@pytest.mark.slow
def test_key_in_instructions(instructions: Any, cache: Cache) -> None:
    environ = request(0)
    instructions(lambda: cache.filter._keys.key(environ))


def _entry(cache: Cache) -> Entry:
    """Return an entry like any other, of the cache's own epoch."""
    token_hit.call(cache.filter, request(ENTRIES - 1))
    known = cache.filter.answers.get(cache.filter._keys.key(request(ENTRIES - 1)) or b"")
    assert known is not None
    headers, body = known.answer(request(0))
    made = entry_of(
        request(0),
        known.status,
        headers,
        body,
        epoch=known.epoch,
        slots=known.slots,
        lifetime=Lifetime(time.monotonic() + 3600, time.time() + 3600),
    )
    assert made is not None
    return made
