"""The protocol as a whole on Redis: the machine of
tests/unit/tokens/test_epoch_protocol.py, on a server.

There is trouble of its own: a key that is lost, a table from another life of the server, and
connections that are closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import pytest

pytest.register_assert_rewrite("unit.test_epoch_protocol")
pytest.importorskip("redis")

from keyfront.middleware.tokens.coordinator.redis import coordinator as module  # noqa: E402
from keyfront.middleware.tokens.coordinator.redis import outages as redis_contact  # noqa: E402
from keyfront.middleware.tokens.coordinator.redis import scripts as redis_scripts  # noqa: E402
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis  # noqa: E402
from keyfront.middleware.tokens.coordinator.redis.rollback_detection import History  # noqa: E402
from support.clocks import Clock  # noqa: E402
from support.redis_epochs import (  # noqa: E402
    KEY,
    TIMEOUT,
    address,
    head,
    program_by,
    set_head,
)
from support.redis_servers import RedisServer, redis_server  # noqa: E402
from unit.tokens.test_epoch_protocol import TAG_SETS, Protocol, run  # noqa: E402

LONG_CHANGES = ("fill_at_once", "begin_a_change", "commit", "stamp_and_respond")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class MachineClock(Clock):
    """The clock of the machine, by which Redis goes as well."""

    now = "MOMENT"

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server
        self._tell()

    def later(self, seconds: float) -> None:
        super().later(seconds)
        self._tell()

    def _tell(self) -> None:
        self.server.client.set(self.now, self.monotonic_ns() // 1000)


class OnRedis(Protocol):
    """Two workers that make tables, and one process that only changes."""

    server: ClassVar[RedisServer]
    program: ClassVar[bytes] = redis_scripts.TABLE.text
    settle: ClassVar[float] = redis_contact.SETTLE_SECONDS
    lease: ClassVar[float | None] = None
    troubles: ClassVar[tuple[str, ...]] = (
        *("recover", "restart", "flush"),
        *("lose_the_store", "lose_the_table", "damage_the_table", "cut_connections"),
    )

    def __init__(self) -> None:
        self.server.client.flushall()
        super().__init__()
        self.clock = MachineClock(self.server)
        self.undo.enter_context(mock.patch.object(module, "time", self.clock))
        # Redis' own clock cannot be set: its program asks the machine's.
        now = f"tonumber(redis.call('GET', '{MachineClock.now}'))"
        program = redis_scripts.Program(program_by(now, self.program))
        self.undo.enter_context(mock.patch.object(redis_contact, "TABLE", program))
        self.undo.enter_context(mock.patch.object(redis_contact, "SETTLE_SECONDS", self.settle))
        self.processes = [self.attach() for _ in self.processes]

    def attach(self, *, create: bool = True) -> Any:
        return Redis(address(self.server.url), slot_count=1024, timeout=TIMEOUT)

    def lose_the_table(self, worker: int) -> None:
        self.server.client.delete(KEY)

    def damage_the_table(self, worker: int) -> None:
        """As if its numbers had been loaded by another server."""
        if self.server.client.exists(KEY):
            life = head(self.server.client)["life"]
            set_head(self.server.client, life=f"{life}0")

    def cut_connections(self, worker: int) -> None:
        self.server.client.client_kill_filter(_type="normal", skipme=True)


def machine(server: RedisServer, **attributes: Any) -> type[Protocol]:
    return type("Machine", (OnRedis,), {"server": server, "hits": 0, **attributes})


def test_no_answer_is_from_before_a_response(server: RedisServer) -> None:
    sound = machine(server)
    run(sound, 15)
    assert sound.hits > 100


def without(pattern: str, instead: str = "") -> bytes:
    """The program with one line of it changed."""
    changed, times = re.subn(pattern.encode(), instead.encode(), redis_scripts.TABLE.text)
    assert times == 1
    return changed


@contextmanager
def forgetful() -> Iterator[None]:
    """Every table has the same generation, and no process knows what it saw in the last one."""
    with (
        mock.patch.object(redis_contact.secrets, "randbelow", lambda limit: 7),
        mock.patch.object(History, "note", lambda *arguments: None),
    ):
        yield


MUTATIONS: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[None]]]] = {
    "a table of another life counts": (
        {
            "program": without(r"if life_ ~= run or back", "if not life_ or back"),
            "troubles": ("lose_the_table",),
        },
        forgetful,
    ),
    "the first stamp cleans": (
        {"program": without(r"value < 0 and text\(value\) or number", "number")},
        nullcontext,
    ),
    "a late stamp is forgotten": (
        {
            "program": without(
                r"complete\(line and list\(line\) or known\(slots\), line ~= nil\)",
                "if line then complete(list(line), true) end",
            ),
            "troubles": ("recover",),
        },
        nullcontext,
    ),
    "a mark does nothing": (
        {"program": without(r"or 0\) - 1\)", "or 0) - 0)"), "troubles": ()},
        nullcontext,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_machine_finds_what_is_wrong(server: RedisServer, mutation: str) -> None:
    attributes, patched = MUTATIONS[mutation]
    wrong = machine(
        server, **{"deeds": LONG_CHANGES, "tag_sets": TAG_SETS[:1], "troubles": (), **attributes}
    )
    with patched(), pytest.raises(AssertionError) as caught:
        run(wrong, 100, seeded=True)
    assert "kept.seen" in str(caught.traceback[-1].statement)
