"""Epoch tables in a real Redis, for tests: where it is, and a clock on which nobody waits."""

from __future__ import annotations

from typing import Any

from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.coordinator.redis.address import Address
from keyfront.middleware.tokens.epochs import DIGEST
from support.clocks import Clock
from support.redis_servers import RedisServer

SLOTS = 1024
KEY = f"keyfront:epochs:{DIGEST}"

# Lets time pass by moving every deadline in the table; Redis goes by its own clock.
_LATER = """
local fields = redis.call('HGETALL', KEYS[1])
for index = 1, #fields, 2 do
  local name, value = fields[index], fields[index + 1]
  local moment, rest = string.match(value, '^(%d+)(.*)$')
  if name == 'until' or string.find(name, '^m%d+$') then
    redis.call('HSET', KEYS[1], name, string.format('%.0f', moment - ARGV[1]) .. rest)
  end
end
"""


_HEAD = ("life", "generation", "slots", "sequence", "change")


def head(client: Any, key: str = KEY) -> dict[str, str]:
    """What the table says of itself: life, generation, slots, sequence and change."""
    text = client.hget(key, "head")
    words = (text.decode() if isinstance(text, bytes) else text).split(" ")
    return dict(zip(_HEAD, words, strict=True))


def set_head(client: Any, key: str = KEY, **words: str) -> None:
    """Write other words there."""
    client.hset(key, "head", " ".join({**head(client, key), **words}.values()))


class RedisClock(Clock):
    """For the place of ``time`` in the coordinator: whoever sleeps on it moves Redis' clock on."""

    def __init__(self, server: RedisServer, key: str = KEY) -> None:
        super().__init__(runs=True)
        self._server = server
        self._key = key

    def later(self, seconds: float) -> None:
        super().later(seconds)
        # Of all versions' tables.
        for key in self._server.client.scan_iter(f"{self._key.rpartition(':')[0]}:*"):
            self._server.client.eval(_LATER, 1, key, round(seconds * 1e6))


def values(url: str, **others: Any) -> dict[str, Any]:
    """The options of a coordinator, by name."""
    defaults = {option.dest: option.default for option in options.COORDINATOR}
    return {**defaults, "coordinator": url, **others}


def address(url: str, **others: Any) -> Address:
    """An address as the options would give it."""
    return Address.of(values(url, **others))
