"""The native thread cannot be started, or fails later: stock's own heartbeat goes on meanwhile."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keyfront.benchmarks.compare import heartbeat_worker
from support.amqp_worker import MODELS
from support.broker import Broker

# More than three heartbeats, in a process whose hub runs.
SCRIPT = """
    import time
    from keyfront.gateway.heartbeat import native, thread
    caller = client(transport())
    {before}
    say(pid=os.getpid(), done=heartbeat.install())
    caller.cast({{}}, "note")
    {after}
    time.sleep(settings["idle"])
    caller.cast({{}}, "note")
    found = heartbeat.statistics()
    say(beats=found["beats"], failures=found["failures"], kept=found["connections"])
"""

NO_THREAD = """
def no_thread(*_):
    raise RuntimeError("can't start new thread")
native.start_new_thread = no_thread
"""

# At its second turn, before it has beaten.
DIES = """
turns = []
def die(*_):
    turns.append(1)
    if len(turns) > 1:
        raise SystemExit
    return 0.1
thread.HeartbeatThread.turn = die
"""

DAMAGED = """
from keyfront.gateway.heartbeat import amqp_connection
def fail(*_):
    raise MemoryError
amqp_connection.KeptConnection._send = fail
"""

# A uWSGI that cannot call its workers: no threads between requests, no master.
NO_TIMER = """
from types import SimpleNamespace
sys.modules["uwsgi"] = SimpleNamespace(
    opt={}, has_threads=0, masterpid=lambda: 0, worker_id=lambda: 1)
"""


@pytest.mark.parametrize(
    ("before", "after", "words", "models"),
    [
        (NO_THREAD, "", "cannot be started", MODELS),
        (DIES, "", "ended by a SystemExit", MODELS),
        (DAMAGED, "", "MemoryError", ["gevent"]),
        (NO_TIMER, "", "no timer", ["eventlet"]),
    ],
    ids=["start", "death", "error", "timer"],
)
def test_stock_goes_on(
    run: Any, rabbit: Broker, before: str, after: str, words: str, models: Sequence[str]
) -> None:
    def indented(text: str) -> str:
        return textwrap.indent(text.strip(), "    ").strip()

    script = SCRIPT.format(before=indented(before), after=indented(after))
    with ThreadPoolExecutor() as pool:
        running = {model: pool.submit(run, script, patch=model) for model in models}
        for model, future in running.items():
            ended = future.result()
            said, name = ended.said, ended.connections
            assert said["done"] is True, model
            assert said["kept"] == 1, model
            assert said["beats"] == 0, f"{model}: nothing was tested"
            assert said["failures"] >= 1, model
            assert rabbit.missed(name) == 0, model
            assert rabbit.accepted(name) == 1, model
            assert len([x for x in ended.warnings if words in x]) == 1, ended.printed


@pytest.mark.parametrize("patch", MODELS)
def test_the_thread_sleeps_while_messages_are_sent(rabbit: Broker, patch: str) -> None:
    """Between two beats it takes no processor from those who send: it does not even wake."""
    task = heartbeat_worker.Task(rabbit.port, patch, installed=True, messages=100)
    found = heartbeat_worker.run("counted", task)
    assert min(found["others"]) == 0
    assert len(found["own"]) == len(found["others"]) == heartbeat_worker.ROUNDS
