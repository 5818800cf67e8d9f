"""Connections that lie in oslo.messaging's pool live no longer than it was told, nor shorter.

``conn_pool_ttl`` is a second here, ``conn_pool_min_size`` one.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.broker import Broker

# The heartbeat is one that ends nothing here; beats, and looks at what has expired, are frequent.
BEGIN = """
    import gc, time
    say(done=heartbeat.install(interval=0.2), pid=os.getpid())
    pooled = transport(tls=settings["tls"], conn_pool_ttl=1, conn_pool_min_size=1,
        heartbeat_timeout_threshold=6)
    caller = client(pooled)

    def expired():
        return heartbeat.statistics()["expired"]

    def descriptors():
        gc.collect()
        return sum(os.readlink("/proc/self/fd/" + x).startswith("socket")
                   for x in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + x))
"""


def check(rabbit: Broker, ended: Any, *, accepted: int) -> None:
    name = ended.connections
    assert rabbit.accepted(name) == accepted, ended.printed
    assert rabbit.missed(name) == 0
    assert rabbit.frame_errors(name) == 0
    # all of them with a goodbye
    assert rabbit.closed_unexpectedly(name) <= 1, "that which was open at the end"
    assert not [x for x in ended.lines if "LOG ERROR" in x], ended.printed
    assert ended.warnings == [], ended.printed


@pytest.mark.parametrize(
    ("patch", "tls"), [("eventlet", False), ("eventlet", True), ("gevent", False), ("gevent", True)]
)
def test_a_burst_ends_while_no_hub_runs(run: Any, rabbit: Broker, patch: str, tls: bool) -> None:
    """All but one, and never one that is lent; then the hub runs, and nobody connects again."""
    ended = run(BEGIN + """
    burst(pooled, 1)
    # lent before others lie there, of which a slow process may have one expire at once
    held = pooled._driver._get_connection()
    burst(pooled, 4)
    while expired() < 3:
        idle(0.05)
    idle(1)  # the others stay
    say(expired=expired(), kept=heartbeat.statistics()["connections"])
    # oslo.messaging's own heartbeats find out first, before anybody borrows
    time.sleep(2.5)
    while len(pooled._driver._connection_pool._items) > 1:
        time.sleep(0.05)
    say(left=len(pooled._driver._connection_pool._items), open=descriptors())
    caller.cast({}, "note")
    held.close()
    caller.cast({}, "note")
    time.sleep(0.5)
    say(stopped=heartbeat.statistics()["stopped"], dead=heartbeat.statistics()["dead_peers"])
    pooled.cleanup()
    """, patch=patch, tls=tls)
    said = ended.said
    assert (said["expired"], said["kept"], said["left"]) == (3, 2, 1)
    assert (said["stopped"], said["dead"]) == (0, 0)
    check(rabbit, ended, accepted=5)


@pytest.mark.parametrize("patch", ["eventlet", "gevent"])
def test_a_burst_ends_and_somebody_borrows_at_once(run: Any, rabbit: Broker, patch: str) -> None:
    """He drops what has expired, and gets one that has not."""
    ended = run(BEGIN + """
    before = descriptors()
    burst(pooled, 5)
    while expired() < 4:
        idle(0.05)
    caller.cast({}, "note")
    say(left=len(pooled._driver._connection_pool._items),
        size=pooled._driver._connection_pool._current_size)
    # each was two: ours is a duplicate
    while descriptors() - before > 2:
        time.sleep(0.2)
    say(open=descriptors() - before, kept=heartbeat.statistics()["connections"])
    pooled.cleanup()
    """, patch=patch, tls=False)
    said = ended.said
    assert (said["left"], said["size"], said["kept"]) == (1, 1, 1)
    assert said["open"] == 2
    check(rabbit, ended, accepted=5)


@pytest.mark.parametrize("patch", ["none", "eventlet", "gevent"])
def test_a_burst_ends_while_a_hub_runs(run: Any, rabbit: Broker, patch: str) -> None:
    """There oslo.messaging's pool does it, though nobody borrows."""
    ended = run(BEGIN + """
    burst(pooled, 5)
    while len(pooled._driver._connection_pool._items) > 1:
        time.sleep(0.05)
    time.sleep(2)
    say(left=len(pooled._driver._connection_pool._items))
    say(kept=heartbeat.statistics()["connections"])
    caller.cast({}, "note")
    pooled.cleanup()
    """, patch=patch, tls=False)
    assert (ended.said["left"], ended.said["kept"]) == (1, 1)
    check(rabbit, ended, accepted=5)


@pytest.mark.parametrize("patch", ["none", "eventlet", "gevent"])
def test_what_was_leaked_ends_as_well(run: Any, rabbit: Broker, patch: str) -> None:
    """A transport that is dropped without being closed: its heartbeats would keep it for ever."""
    ended = run(BEGIN + """
    before = descriptors()
    burst(pooled, 3)
    del pooled, caller
    gc.collect()
    while heartbeat.statistics()["connections"]:
        idle(0.05)
    while descriptors() > before:
        time.sleep(0.5)  # each look collects all garbage
    time.sleep(1.5)
    say(kept=heartbeat.statistics()["connections"])
    """, patch=patch, tls=False)
    assert ended.said["kept"] == 0
    check(rabbit, ended, accepted=3)


@pytest.mark.parametrize(("patch", "tls"), [("eventlet", False), ("gevent", True)])
def test_borrowed_in_the_moment_it_expires(
    run: Any, rabbit: Broker, patch: str, tls: bool
) -> None:
    """No message pays for it, whoever is first."""
    often = BEGIN.replace("interval=0.2", "interval=0.1")
    ended = run(often + """
    import random
    pool = pooled._driver._connection_pool
    pool._item_ttl, pool._min_size = 0.02, 0
    for number in range(60):
        caller.cast({}, "note")
        idle(random.uniform(0.1, 0.25))
    say(expired=expired())
    pooled.cleanup()
    """, patch=patch, tls=tls)
    assert ended.said["expired"] > 10
    assert not [x for x in ended.lines if "unreachable" in x or "LOG ERROR" in x], ended.printed
    name = ended.connections
    assert rabbit.frame_errors(name) == rabbit.missed(name) == 0


def test_a_child_does_not_end_its_parents(run: Any, rabbit: Broker) -> None:
    """Nor does it wait for the threads that its parent has for them, nor wake them in its hub."""
    ended = run(BEGIN + """
    pool = pooled._driver._connection_pool
    pool._min_size = 9
    burst(pooled, 3)
    child = os.fork()
    if not child:
        import eventlet.hubs
        eventlet.hubs.use_hub()
        pool._min_size = 0
        idle(1.5)
        burst(pooled, 2)
        burst(pooled, 2)
        time.sleep(2)
        pool.expire()
        say(left=len(pool._items))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    burst(pooled, 3)
    say(kept=heartbeat.statistics()["connections"])
    """, patch="eventlet", tls=False)
    assert ended.said["kept"] == 3
    assert ended.said["left"] == 0
    name = ended.connections
    assert rabbit.accepted(name) == 3
    assert rabbit.frame_errors(name) == rabbit.missed(name) == 0
    assert not [x for x in ended.lines if "LOG ERROR" in x], ended.printed
