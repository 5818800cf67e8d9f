"""What nodes and services show while Redis, its sentinels and the ways to them fail, as a whole.

A database in memory is changed and read through real coordinators, whose connections a proxy each
cuts, forgets, delays and holds, while Redis is killed, stopped, emptied and failed over to a
replica that had not heard of everything. What was shown is judged by ``support/history.py``. More
of it::

    KEYFRONT_HISTORY_READS=100000 pytest -s tests/integration/tokens/test_redis_recorded.py
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.mark_owners import begins
from keyfront.middleware.tokens.coordinator.redis import outages, sentinels
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.epochs import ALL_SLOT, DIGEST, Epoch, Slots
from support.fault_proxy import FaultProxy
from support.history import History
from support.redis_epochs import KEY, SLOTS, address
from support.redis_servers import RedisServer, fail_over, redis_server
from support.redis_servers import sentinels as redis_sentinels
from support.served import PATIENCE, wait_for

READS = int(os.environ.get("KEYFRONT_HISTORY_READS", "2000"))
OTHER = "0123456789ab"
ROWS = tuple(f"row {number}" for number in range(4))
#: Slots of what a change of a row touches, and of an answer that shows it.
CHANGED = {row: Slots((200 + number,)) for number, row in enumerate(ROWS)}
SHOWN = {row: Slots((ALL_SLOT, 200 + number)) for number, row in enumerate(ROWS)}
# So that a new generation can be used soon; each is as much shorter as the others.
TRUST, LEASE, SETTLE = 0.1, 0.25, 0.5

Fault = Callable[[], object]


class Database:
    """Rows with a version each, and who is about to change one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(ROWS, 0)
        self._writers: set[str] = set()
        self._numbers = iter(range(1, 10**9))

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def read(self, row: str) -> int:
        with self._lock:
            return self._values[row]

    def commit(self, row: str, value: int) -> None:
        with self._lock:
            self._values[row] = value

    @contextmanager
    def transaction(self, owner: str) -> Iterator[None]:
        with self._lock:
            self._writers.add(owner)
        try:
            yield
        finally:
            with self._lock:
                self._writers.discard(owner)

    def settled(self, owner: str, age: float) -> bool:
        with self._lock:
            return not self._writers if begins(owner) else owner not in self._writers


class Recorded:
    """Nodes that change and read, and services that read, until told to end."""

    def __init__(self, stack: ExitStack, servers: list[RedisServer], watchers: list[RedisServer]):
        self.servers = servers
        self.watchers = watchers
        self.history = History()
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.proxies: list[FaultProxy] = []
        #: The version whose nodes change anything. Each change takes the other one's table away, so
        #: where both did all the time nothing would ever be kept.
        self.writes = DIGEST
        self._stack = stack
        self._database = Database()
        self._nodes: list[Redis] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        for row in ROWS:
            self.history.start(row, 0)

    def attach(self, name: str, **options: Any) -> None:
        """Add a node, or with ``create=False`` a service, with several threads."""
        targets = self.watchers or self.servers
        proxies = [self._stack.enter_context(FaultProxy(one.port)) for one in targets]
        self.proxies += proxies
        url = "redis://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        master = {"coordinator_sentinel_master": "keyfront"} if self.watchers else {}
        made = Redis(address(url, **master), timeout=0.5, slot_count=SLOTS, **options)
        made.settled = self._database.settled
        self._stack.callback(made.close)
        kept: dict[str, tuple[Epoch, int]] = {}
        if options.get("create", True):
            self._nodes.append(made)
            self._start(self._change, name, made)
        for _ in range(2):
            self._start(self._read, name, made, kept)

    @property
    def versions(self) -> int:
        """How many versions there are."""
        return len({digest_of(node) for node in self._nodes})

    def _start(self, *deed: Any) -> None:
        self._threads.append(threading.Thread(target=self._loop, args=deed))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads)

    def _loop(self, deed: Callable[..., None], *arguments: Any) -> None:
        dice = random.Random()
        while not self._over.is_set():
            try:
                deed(dice, *arguments)
            except BaseException as failure:
                self.failures.append(failure)
                return

    def _change(self, dice: random.Random, name: str, node: Redis) -> None:
        self._over.wait(dice.random() * 0.1)
        if digest_of(node) != self.writes:
            return
        row, value = dice.choice(ROWS), self._database.number()
        owner = f"{name}#{value}"
        with suppress(CoordinatorError), self.history.change(row, value, name):
            with self._database.transaction(owner):
                mark = node.mark(CHANGED[row], owner)
                self._over.wait(dice.random() * 0.01)
                self._database.commit(row, value)
            with suppress(CoordinatorError):  # what it marked stays so until it is told
                node.stamp(mark)
            self.counts["changes"] += 1

    def _read(
        self, dice: random.Random, name: str, mine: Redis, kept: dict[str, tuple[Epoch, int]]
    ) -> None:
        row = dice.choice(ROWS)
        began = time.monotonic()
        found = kept.get(row)
        if found is not None and mine.fresh(found[0], SHOWN[row]):
            value = found[1]
            self.counts["hits"] += 1
        else:
            node = mine if mine in self._nodes else dice.choice(self._nodes)
            epoch: Epoch | None = None
            with suppress(CoordinatorError):
                epoch = node.now()
            value = self._database.read(row)
            if dice.random() < 0.2:
                self._over.wait(dice.random() * 0.05)
            if epoch is not None and (node is mine or node.fresh_now(epoch, SHOWN[row])):
                mine.follow(digest_of(node))
                kept[row] = epoch, value
        self.history.read(began - mine.lease, name, [(row, value)])
        self._over.wait(dice.random() * 0.004)


def digest_of(node: Redis) -> str:
    return OTHER if OTHER in repr(node) else DIGEST


def faults(of: Recorded, dice: random.Random) -> dict[str, Fault]:
    """What happens to it, by name."""

    def slow() -> None:
        one = dice.choice(of.proxies)
        one.delay = 0.05
        wait_for_more(of, "hits")
        one.delay = 0.0

    def held() -> None:
        one = dice.choice(of.proxies)
        one.stall()
        wait_for_more(of, "hits")
        one.forward()

    def all_of_them(deed: Callable[[FaultProxy], None]) -> Fault:
        return lambda: [deed(proxy) for proxy in of.proxies]

    def stopped(servers: list[RedisServer]) -> None:
        one = dice.choice(servers)
        one.stop()
        time.sleep(dice.random())
        one.resume()

    def killed(saved: bool) -> None:
        if saved:
            of.servers[0].client.save()
            wait_for_more(of, "changes")
        of.servers[0].restart()

    def failed_over(lags: bool) -> None:
        master, replica = of.servers
        if lags:  # it does not hear of these, nor the former master that there is another
            replica.stop()
            wait_for_more(of, "changes")
            master.stop()
            replica.resume()
        fail_over(of.watchers, replica)
        if lags:
            master.resume()
        of.servers = [replica, master]

    found: dict[str, Fault] = {
        "slow": slow,
        "held": held,
        "reset": lambda: dice.choice(of.proxies).reset(),
        "forgotten": lambda: dice.choice(of.proxies).half_open(),
        "all reset": all_of_them(FaultProxy.reset),
        "all forgotten": all_of_them(FaultProxy.half_open),
        "emptied": lambda: of.servers[0].client.flushall(),
        "stopped": lambda: stopped(of.servers[:1]),
    }
    if of.versions == 2:

        def other() -> None:
            of.writes = OTHER if of.writes == DIGEST else DIGEST

        found["the other version writes"] = other
    if of.watchers:
        found |= {
            "failed over": lambda: failed_over(False),
            "failed over, late": lambda: failed_over(True),
            "a sentinel stopped": lambda: stopped(of.watchers),
        }
    else:
        found |= {
            "killed": lambda: killed(False),
            "killed, and loaded": lambda: killed(True),
            "evicted": lambda: of.servers[0].client.delete(KEY),
            "forgot the list": lambda: of.servers[0].client.delete("keyfront:digests"),
        }
    return found


def wait_for_more(of: Recorded, what: str) -> None:
    before = of.counts[what]
    wait_for(lambda: of.counts[what] > before or of.failures, f"more {what}")


@pytest.mark.parametrize("what", ["one Redis", "two versions", "sentinels"])
def test_nothing_is_shown_that_cannot_have_been(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(sentinels, "TRUST_SECONDS", TRUST)
    monkeypatch.setattr(outages, "SETTLE_SECONDS", SETTLE)
    seed = random.randrange(10**9)
    dice = random.Random(seed)
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server())]
        watchers: list[RedisServer] = []
        if what == "sentinels":
            servers.append(stack.enter_context(redis_server(replica_of=servers[0])))
            watchers = stack.enter_context(redis_sentinels(servers[0]))
        of = Recorded(stack, servers, watchers)
        for number in (1, 2):
            of.attach(f"node {number}")
        if what == "two versions":
            of.attach("node of another version", digest=OTHER)
        of.attach("service", create=False)
        of.attach("service under a lease", create=False, lease=LEASE)
        happened: Counter[str] = Counter()
        with of.running():
            while not happened or of.history.reads < READS:
                kinds = list(faults(of, dice).items())
                dice.shuffle(kinds)
                for name, fault in kinds:
                    fault()
                    happened[name] += 1
                    for counted in ("changes", "hits"):
                        wait_for_more(of, counted)
    print(f"{what}, seed {seed}: {of.history.reads} answers, {of.counts}, {happened}")
    assert not of.failures, of.failures
    assert of.history.faults() == []
