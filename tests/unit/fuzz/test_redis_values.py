"""What somebody else wrote into a table in Redis: nothing is fresh by it, and nothing fails."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.epochs import DIGEST, Epoch, Slots
from support.fuzzing import damaged, each_case
from support.redis_epochs import address

SLOTS = Slots((0, 100))
LIFE = b"0123456789abcdef"
HEAD = LIFE + b" 7 1024 10 c0ffee"
PIECES = (
    *(b"9" * 25, b"-1", b"9" * 5000, b" ", b"0", b"18446744073709551616", b"nan", b"\xff", b"1e3"),
    *(b"9007199254740993", b"+5", b"1_0"),
)


def reader(head: bytes | None, numbers: list[bytes | None], line: bytes | None) -> Redis:
    """A coordinator whose Redis says this."""
    made = Redis(address("redis://127.0.0.1:1/0"), create=False)

    def read(register: Any, command: str, key: str, *fields: Any) -> tuple[list[Any], list[Any]]:
        known = {"head": head, **dict(zip(SLOTS, numbers, strict=True))}
        return [DIGEST.encode(), DIGEST.encode()], [known.get(field, line) for field in fields]

    link = SimpleNamespace(life=LIFE, read=read)
    contact: Any = made._contact
    contact.do = lambda ask, **_: ask(link)
    return made


def test_it_is_read_as_it_is_meant() -> None:
    node = reader(HEAD, [b"3", b"9"], None)
    assert node.fresh(Epoch(7, 9), SLOTS)
    assert not reader(HEAD, [b"3", b"9"], None).fresh(Epoch(7, 8), SLOTS)


@pytest.mark.parametrize("count", [b"0", b"-5", b"17000000", b"9" * 25])
def test_a_table_of_impossible_size_is_none(count: bytes) -> None:
    node = reader(LIFE + b" 7 " + count + b" 10 c0ffee", [b"3", b"9"], None)
    assert not node.fresh(Epoch(7, 10), SLOTS)
    with pytest.raises(CoordinatorError):
        node.now()


@pytest.mark.parametrize("number", [b"18446744073709551616", b"9" * 25, b"9" * 5000])
def test_a_number_that_no_change_has(number: bytes) -> None:
    assert not reader(HEAD, [b"3", number], None).fresh(Epoch(7, 10), SLOTS)


def test_values_that_were_damaged() -> None:
    def check(dice: random.Random) -> None:
        head: bytes | None = damaged(HEAD, dice, PIECES) if dice.random() < 0.5 else HEAD
        numbers: list[bytes | None] = [
            damaged(b"9", dice, PIECES) if dice.random() < 0.6 else b"3" for _ in SLOTS
        ]
        node = reader(head, numbers, damaged(b"5:c0ffee", dice, PIECES))
        for _ in range(2):
            fresh = node.fresh(Epoch(7, 8), SLOTS)
            if fresh:
                assert all(not one or int(one) <= 8 for one in numbers)
            try:
                node.now()
            except CoordinatorError:
                pass

    each_case("values of Redis", 200, check)
