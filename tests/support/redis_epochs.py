"""Epoch tables in a real Redis, for tests: where it is, and a clock on which nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.coordinator.redis import coordinator, lease, scripts
from keyfront.middleware.tokens.coordinator.redis.address import Address
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
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


@contextmanager
def hanging(server: RedisServer, *coordinators: Redis) -> Iterator[None]:
    """Have a Redis do nothing while the block runs, for which these need not wait for long.

    No answer can come meanwhile, however busy the machine is.
    """
    server.stop()
    try:
        for one in coordinators:
            _wait_for_answers(one, 0.2)
        yield
        for one in coordinators:
            _wait_for_answers(one, TIMEOUT)
    finally:
        server.resume()


def _wait_for_answers(one: Redis, seconds: float) -> None:
    """Have it wait for so long, also by the connections that it has."""
    connections = one._contact._server
    connections._timeout = seconds
    for link in connections._idle:
        link._connection._sock.settimeout(seconds)


def program_by(now: str, program: bytes = scripts.TABLE.text) -> bytes:
    """What Redis runs for the coordinator, by another clock than the machine's.

    :param now: microseconds, as Lua has them
    """
    of_machine = (
        b"local time = redis.call('TIME')\n"
        b"local now = tonumber(time[1]) * 1000000 + tonumber(time[2])"
    )
    assert program.count(of_machine) == 1
    return program.replace(of_machine, f"local now = {now}".encode())


class RedisClock(Clock):
    """For the place of ``time`` in the coordinator: whoever sleeps on it moves Redis' clock on.

    :param runs: whether it goes on by itself as well, as the clock of Redis does
    :ivar server: the Redis, settable
    """

    def __init__(self, server: RedisServer, key: str = KEY, *, runs: bool = True) -> None:
        super().__init__(runs=runs)
        self.server = server
        self._key = key

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have coordinators go by it.

        Leases, too: by the machine's clock the lease on what was asked in its future would never
        end, or have always ended where the machine has been up for long.
        """
        for module in (coordinator, lease):
            monkeypatch.setattr(module, "time", self)

    def later(self, seconds: float) -> None:
        super().later(seconds)
        # Of all versions' tables.
        client = self.server.client
        for key in client.scan_iter(f"{self._key.rpartition(':')[0]}:*"):
            client.eval(_LATER, 1, key, round(seconds * 1e6))


#: Seconds that coordinators wait for Redis at most: on a busy machine one that is well may take
#: more than they have by default, and then it counts as lost.
TIMEOUT = 10.0


def values(url: str, **others: Any) -> dict[str, Any]:
    """The options of a coordinator, by name."""
    defaults = {option.dest: option.default for option in options.COORDINATOR}
    return {**defaults, "coordinator": url, "coordinator_timeout": TIMEOUT, **others}


def address(url: str, **others: Any) -> Address:
    """An address as the options would give it."""
    return Address.of(values(url, **others))
