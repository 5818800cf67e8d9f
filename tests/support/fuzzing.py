"""Cases of hostile input: the same few in each run, or for as long as is asked for.

``KEYFRONT_FUZZ_SECONDS``
    seconds that each test goes on, from a seed of its own; by default it tries a fixed number of
    cases that are the same each time
``KEYFRONT_FUZZ_SEED``
    the seed to begin from
``KEYFRONT_FUZZ_CASE``
    the one case to try, as a failure named it
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import struct
import time
from collections.abc import Callable, Sequence

#: What a number of eight bytes is replaced by.
_WORDS = (
    *(0, 1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62),
    *(2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1),
    # Not a number, both infinities and the largest number there is, as doubles.
    *(0x7FF8000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FEFFFFFFFFFFFFF),
)
_BYTES = (0, 1, 0x0A, 0x0D, 0x20, 0x22, 0x25, 0x30, 0x7F, 0x80, 0xFF)


def seconds() -> float:
    """Return the seconds that a test is to go on; 0: a fixed number of cases."""
    return float(os.environ.get("KEYFRONT_FUZZ_SECONDS", "0"))


def each_case(name: str, count: int, check: Callable[[random.Random], None]) -> None:
    """Try cases until one fails, which is named in the error.

    :param name: of what is tried
    :param count: cases, where no time is given
    :param check: tries one, with what all of its choices come from
    """
    only = os.environ.get("KEYFRONT_FUZZ_CASE")
    if only is not None:
        if only.startswith(f"{name} "):
            check(random.Random(only))
        return
    asked = seconds()
    seed = os.environ.get("KEYFRONT_FUZZ_SEED") or (secrets.token_hex(4) if asked else "0")
    if asked:
        print(f"{name}: KEYFRONT_FUZZ_SEED={seed}", flush=True)
    ends = time.monotonic() + asked
    for number in itertools.count():
        if time.monotonic() >= ends if asked else number >= count:
            return
        case = f"{name} {seed} {number}"
        try:
            check(random.Random(case))
        except BaseException as error:
            error.add_note(f"again with KEYFRONT_FUZZ_CASE='{case}'")
            raise


def damaged(data: bytes, dice: random.Random, pieces: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to three accidents: a flipped bit, another word, a piece lost, doubled,
    moved or put in, or an end that is cut off.

    :param pieces: what may be put in
    """
    for _ in range(dice.choice((1, 1, 2, 3))):
        data = _ACCIDENTS[dice.randrange(len(_ACCIDENTS))](data, dice, pieces)
    return data


def _flip(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = dice.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << dice.randrange(8),)) + data[at + 1 :]


def _byte(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + bytes((dice.choice(_BYTES),)) + data[at + dice.randrange(2) :]


def _word(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    at = dice.randrange(len(data) + 1) & ~7
    word = struct.pack(dice.choice("<>") + "Q", dice.choice(_WORDS))
    return data[:at] + word[: max(len(data) - at, 0)] + data[at + 8 :]


def _cut(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _lose(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    begin, end = _span(data, dice)
    return data[:begin] + data[end:]


def _double(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    begin, end = _span(data, dice)
    return data[:end] + data[begin:end] * dice.choice((1, 1, 2, 30)) + data[end:]


def _move(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    begin, end = _span(data, dice)
    rest = data[:begin] + data[end:]
    at = dice.randrange(len(rest) + 1)
    return rest[:at] + data[begin:end] + rest[at:]


def _put_in(data: bytes, dice: random.Random, pieces: Sequence[bytes]) -> bytes:
    if not pieces:
        return _flip(data, dice, pieces)
    begin, end = _span(data, dice)
    return data[:begin] + dice.choice(pieces) + data[dice.choice((begin, end)) :]


def _span(data: bytes, dice: random.Random) -> tuple[int, int]:
    begin = dice.randrange(len(data) + 1)
    return begin, min(begin + dice.choice((1, 2, 4, 8, 24, 200)), len(data))


_ACCIDENTS = (_flip, _flip, _byte, _word, _word, _cut, _lose, _double, _move, _put_in, _put_in)
