"""The process that a heartbeat benchmark measures: patched or not, with the heartbeat or without.

    python -m keyfront.benchmarks.compare.heartbeat_worker ROLE '{"port": ...}'

Everything is patched before it is imported, so each combination needs a process of its own; the
benchmarks start it and read the line of JSON that it ends with. ROLE is one of :data:`ROLES`; what
the other argument holds is said at :class:`Task`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common import programs
from keyfront.errors import ServerError

from ..servers.processes import Process, finished

PATCHES = ("none", "eventlet", "gevent")
WRITERS = 8
# Messages of each of those, one of them large, one after the other.
EACH = 10
# Seconds; what RabbitMQ offers and oslo.messaging asks for.
NEGOTIATED = 60
SMALL, LARGE = 1_000, 100_000
# How often what is counted is counted: the least is meant.
ROUNDS = 5
# Seconds; nothing here takes that long, however busy the machine.
PATIENCE = 300


class Task(NamedTuple):
    """The task of a worker.

    :ivar patch: ``none``, ``eventlet`` or ``gevent``
    :ivar over: the way of messages: ``own``, a connection of py-amqp for one thread, ``shared``,
        one for :data:`WRITERS` green threads at once, or ``oslo``, by oslo.messaging and its pool
    :ivar messages: steps that are taken of :func:`sender`
    :ivar interval: seconds between beats, or ``None`` for the default
    :ivar seconds: the time for which an idle process is looked at
    :ivar thread: ``none`` to have nobody beat, ``idle`` for a thread that waits and does nothing
    """

    port: int
    patch: str = "none"
    installed: bool = False
    over: str = "own"
    messages: int = 1000
    connections: int = 1
    interval: float | None = None
    seconds: float = 60.0
    thread: str = ""


def patch(name: str) -> None:
    """Patch this process, before anything that shall be patched is imported."""
    if name == "gevent":
        from gevent import monkey

        monkey.patch_all()
    elif name == "eventlet":
        import eventlet

        eventlet.monkey_patch()


def install(interval: float | None = None, *, threaded: bool = True) -> None:
    """Keep this process's connections alive.

    :param threaded: false to go without the thread, as where uWSGI's timer beats
    :raises ServerError: it could not; the log says why
    """
    from keyfront.gateway import heartbeat
    from keyfront.gateway.heartbeat import uwsgi_timer

    if not threaded:
        # as in a uWSGI without threads, whose timer never comes
        for name in ("is_needed", "start"):
            setattr(uwsgi_timer, name, lambda *_: True)
    if not heartbeat.install(interval=interval):
        raise ServerError("the heartbeat is not in force; see the warning above")


def sender(task: Task) -> Callable[[], object]:
    """Return what sends a message, or of ``shared`` connections one of each of :data:`WRITERS`.

    Nobody gets them: RabbitMQ drops what no queue is bound for.
    """
    import threading

    from ..servers.rabbitmq import connect, url

    if task.over == "oslo":
        client = oslo_client(url(task.port))
        return lambda: client.cast({}, "nothing", payload="s" * SMALL)
    import amqp

    connection = connect(task.port, heartbeat=NEGOTIATED)
    small, large = amqp.Message(b"s" * SMALL), amqp.Message(b"l" * LARGE)
    if task.over == "own":
        send = connection.channel().basic_publish
        return lambda: send(small, exchange="amq.fanout")
    channels = [connection.channel() for _ in range(WRITERS)]
    failures: list[str] = []

    def several(channel: Any) -> None:
        try:
            for message in (large, *[small] * (EACH - 1)):
                channel.basic_publish(message, exchange="amq.fanout")
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    def at_once() -> None:
        threads = [threading.Thread(target=several, args=(channel,)) for channel in channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise ServerError(f"a message was not sent: {failures[0]}")

    return at_once


def oslo_client(url: str) -> Any:
    """Return an RPC client of oslo.messaging; nobody listens to its topic.

    :param url: RabbitMQ's, as :func:`.rabbitmq.url` returns it
    """
    programs.require_module("oslo_messaging", "experiments")
    import oslo_messaging
    from oslo_config import cfg

    # parts of it read the global configuration, whichever they are given
    cfg.CONF([])
    transport = oslo_messaging.get_rpc_transport(cfg.CONF, url)
    target = oslo_messaging.Target(topic="benchmark", version="1.0")
    return oslo_messaging.get_rpc_client(transport, target)


def threads() -> set[int]:
    """Return the kernel's ids of the threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def thread_seconds(thread: int) -> float:
    """Return the CPU time that a thread of this process has taken, exact to the nanosecond.

    Its clock's number is made of its id as in the kernel's ``posix-timers.h``: all bits of the id
    turned, then ``CPUCLOCK_PERTHREAD`` and ``CPUCLOCK_SCHED``.
    """
    return time.clock_gettime((~thread << 3) | 4 | 2)


def idle(task: Task) -> dict[str, float]:
    """Keep connections and do nothing; gives the ``percent`` of a core that the thread took.

    Also ``beats`` a second, and ``microseconds`` of each.

    :raises ServerError: there is not one thread more than before, or it does not beat
    """
    from keyfront.gateway import heartbeat

    from ..servers.rabbitmq import connect

    # with a connection come threads of others, such as those that gevent looks up names in
    made_before = connect(task.port, heartbeat=0)
    before = threads()
    install(task.interval)
    kept = [connect(task.port, heartbeat=NEGOTIATED) for _ in range(task.connections)]
    made_before.close()
    added = threads() - before
    if len(added) != 1:
        raise ServerError(f"the heartbeat has {len(added)} threads of its own, not one")
    thread = added.pop()
    # the first interval is over when each has been looked at once
    time.sleep(min(task.interval or NEGOTIATED / 2, task.seconds))
    beats, cpu, start = _beats(heartbeat), thread_seconds(thread), time.perf_counter()
    time.sleep(task.seconds)
    spent = time.perf_counter() - start
    beats, cpu = _beats(heartbeat) - beats, thread_seconds(thread) - cpu
    if not beats:
        raise ServerError(f"{len(kept)} connections were kept, and there was no beat")
    return {"percent": cpu / spent * 100, "beats": beats / spent, "microseconds": cpu / beats * 1e6}


def _beats(heartbeat: Any) -> int:
    return int(heartbeat.statistics()["beats"])


def restart(task: Task) -> None:
    """Publish when told to, a line each time, with nothing running in between.

    It waits in C for that line, so no greenlet runs meanwhile, as in a uWSGI worker that has no
    request. Answers with the milliseconds of the publish.
    """
    from ..servers.rabbitmq import url

    client = oslo_client(url(task.port))
    client.cast({}, "nothing", payload="warm")
    print("{}", flush=True)
    while sys.stdin.readline():
        start = time.perf_counter()
        client.cast({}, "nothing", payload="first")
        print((time.perf_counter() - start) * 1000, flush=True)


def counted(task: Task) -> dict[str, Any]:
    """Send messages, several times over; gives what it took apart from time.

    Under valgrind ``dumps``, the numbers of callgrind's. Otherwise of each time ``own``, how often
    this thread waited for something, and ``others``, how often any other of the process did.
    """
    import threading

    from ..gate.worker import callgrind

    if task.thread == "idle":
        wait_for_ever()
    send = sender(task)
    if callgrind.running():
        if task.installed:
            from keyfront.gateway.heartbeat import pool_hooks

            # So much slower, two messages may be further apart than those of a busy sender are.
            pool_hooks._RECENT = math.inf
        return {"dumps": callgrind.measure(send, task.messages, ROUNDS)}
    send()
    found: dict[str, list[int]] = {"own": [], "others": []}
    for _ in range(ROUNDS):
        before = switches()
        for _ in range(task.messages):
            send()
        waited = {thread: number - before.get(thread, 0) for thread, number in switches().items()}
        found["own"].append(waited.pop(threading.get_native_id()))
        found["others"].append(sum(waited.values()))
    return found


def switches() -> dict[int, int]:
    """Return how often each thread of this process has waited, by the kernel's ids (proc(5))."""
    found = {}
    for thread in threads():
        text = Path(f"/proc/self/task/{thread}/status").read_text()
        found[thread] = int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def wait_for_ever() -> None:
    """Start a thread that waits as that of the heartbeat does between two beats, and no more."""
    from keyfront.gateway.heartbeat import native

    bell = native.allocate_lock()
    bell.acquire()
    native.start_new_thread(bell.acquire, ())


ROLES = {"counted": counted, "idle": idle, "restart": restart}


def command(role: str, task: Task) -> list[str]:
    """Return the command of a worker."""
    told = json.dumps(task._asdict())
    return [sys.executable, "-W", "ignore", "-m", __name__, role, told]


def run(role: str, task: Task, *, under: Sequence[str] = ()) -> dict[str, Any]:
    """Run a worker to its end and give what it found.

    :param under: the command of a program that runs it
    """
    process = Process(f"a worker ({role}, {task.patch})", [*under, *command(role, task)])
    out, _, _ = finished(process, PATIENCE + task.seconds)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    """Do what a benchmark asks for."""
    role, text = arguments
    task = Task(**json.loads(text))
    patch(task.patch)
    if task.installed:
        install(task.interval, threaded=task.thread != "none")
    found = ROLES[role](task)
    if found is not None:
        print(json.dumps(found), flush=True)
    # connections are not closed one by one: the kernel does it
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
