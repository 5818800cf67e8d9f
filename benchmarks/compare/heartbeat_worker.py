"""The process that a heartbeat benchmark measures: patched or not, with the heartbeat or without.

    python -m keyfront.benchmarks.compare.heartbeat_worker ROLE '{"port": ...}'

Everything is patched before it is imported, so each combination needs a process of its own; the
benchmarks start it and read the line of JSON that it ends with. ROLE is one of :data:`ROLES`; what
the other argument holds is said at :class:`Task`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from keyfront.errors import MissingPartError, ServerError

PATCHES = ("none", "eventlet", "gevent")
WRITERS = 8
# Seconds; what RabbitMQ offers and oslo.messaging asks for.
NEGOTIATED = 60
SMALL, LARGE = 1_000, 100_000
# Every so many-th body is a large one where they are mixed.
MIX = 10
# How often what is counted is counted: the least is meant.
ROUNDS = 5
# Seconds; nothing here takes that long, however busy the machine.
PATIENCE = 300


class Task(NamedTuple):
    """The task of a worker.

    :ivar patch: ``none``, ``eventlet`` or ``gevent``
    :ivar over: the way of messages: ``eight`` connections, ``one`` for all eight threads, or
        ``oslo``, by oslo.messaging and its pool
    :ivar messages: to send, or writes to time
    :ivar interval: seconds between beats, or ``None`` for the default
    :ivar seconds: the time for which an idle process is looked at
    :ivar thread: ``none`` to have nobody beat, ``idle`` for a thread that waits and does nothing
    """

    port: int
    patch: str = "none"
    installed: bool = False
    over: str = "eight"
    messages: int = 1000
    connections: int = WRITERS
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


def publish(task: Task) -> dict[str, float]:
    """Send messages, as many threads at once; gives ``rate`` (per second) and ``cpu`` (us each).

    Nobody gets them: RabbitMQ drops what no queue is bound for. The last answer is waited for, so
    all has arrived.
    """
    import threading

    if task.over == "oslo":
        sends, finish = _oslo_senders(task)
    else:
        sends, finish = _amqp_senders(task)
    failures: list[str] = []

    def run(send: Callable[[int], object], numbers: range) -> None:
        try:
            for number in numbers:
                send(number)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    def all_at_once(count: int) -> None:
        threads = [
            threading.Thread(target=run, args=(send, range(first, count, WRITERS)))
            for first, send in enumerate(sends)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # what is made once is made now
    all_at_once(max(WRITERS, task.messages // 20))
    start, cpu = time.perf_counter(), time.process_time()
    all_at_once(task.messages)
    finish()
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu
    if failures:
        raise ServerError(f"a message was not sent: {failures[0]}")
    return {"rate": task.messages / spent, "cpu": cpu / task.messages * 1e6}


Senders = tuple[list[Callable[[int], object]], Callable[[], object]]


def _amqp_senders(task: Task) -> Senders:
    import amqp

    from ..worlds.rabbitmq import connect

    made = [connect(task.port, heartbeat=NEGOTIATED) for _ in range(_connections(task))]
    channels = [made[number % len(made)].channel() for number in range(WRITERS)]
    small, large = amqp.Message(b"s" * SMALL), amqp.Message(b"l" * LARGE)
    mixed = task.over == "one"

    def sender(channel: Any) -> Callable[[int], object]:
        def send(number: int) -> None:
            body = large if mixed and number // WRITERS % MIX == 0 else small
            channel.basic_publish(body, exchange="amq.fanout")

        return send

    def finish() -> None:
        for channel in channels:
            # nothing changes, but it is answered after all that was sent before
            channel.basic_qos(0, 0, False)

    return [sender(channel) for channel in channels], finish


def _connections(task: Task) -> int:
    return 1 if task.over == "one" else WRITERS


def _oslo_senders(task: Task) -> Senders:
    client = oslo_client(task.port)

    def send(number: int) -> None:
        client.cast({}, "nothing", payload="s" * SMALL)

    return [send] * WRITERS, lambda: None


def oslo_client(port: int) -> Any:
    """Return an RPC client of oslo.messaging; nobody listens to its topic."""
    try:
        import oslo_messaging
        from oslo_config import cfg
    except ImportError:
        raise MissingPartError(
            "oslo.messaging is missing: run pip install oslo.messaging"
        ) from None
    from ..worlds.rabbitmq import url

    # parts of it read the global configuration, whichever they are given
    cfg.CONF([])
    transport = oslo_messaging.get_rpc_transport(cfg.CONF, url(port))
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

    from ..worlds.rabbitmq import connect

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


def writes(task: Task) -> dict[str, list[float]]:
    """Return microseconds of CPU for a ``transport.write`` of a small frame, ``kept`` and ``left``.

    Both are connections of this one process, which takes turns: one has a heartbeat and so is
    kept, the other has none and so is left as it comes. The frame is a heartbeat, which RabbitMQ
    only takes note of.
    """
    from ..worlds.rabbitmq import connect

    frame = memoryview(b"\x08\0\0\0\0\0\0\xce")
    install()
    sides = {
        "kept": connect(task.port, heartbeat=NEGOTIATED),
        "left": connect(task.port, heartbeat=0),
    }
    each = 1000
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(max(4, task.messages // each)):
        for name in reversed(sides) if number % 2 else sides:
            write = sides[name].transport.write
            write(frame)
            cpu = time.process_time()
            for _ in range(each):
                write(frame)
            found[name].append((time.process_time() - cpu) / each * 1e6)
            # RabbitMQ gets to read all of it, or the send buffer fills
            sides[name].channel().close()
    return found


def restart(task: Task) -> None:
    """Publish when told to, a line each time, with nothing running in between.

    It waits in C for that line, so no greenlet runs meanwhile, as in a uWSGI worker that has no
    request. Answers with ``milliseconds`` of the first publish.
    """
    client = oslo_client(task.port)
    client.cast({}, "nothing", payload="warm")
    print("{}", flush=True)
    while sys.stdin.readline():
        start = time.perf_counter()
        client.cast({}, "nothing", payload="first")
        print(json.dumps({"milliseconds": (time.perf_counter() - start) * 1000}), flush=True)


def counted(task: Task) -> dict[str, Any]:
    """Publish from one thread, several times over; gives what it took apart from time.

    Under valgrind ``dumps``, the numbers of callgrind's. Otherwise of each time ``own``, how often
    this thread waited for something, and ``others``, how often any other of the process did.
    """
    import threading

    from ..gate.worker import callgrind

    if task.thread == "idle":
        wait_for_ever()
    sends, _ = _oslo_senders(task) if task.over == "oslo" else _amqp_senders(task)
    send = functools.partial(sends[0], 0)
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


ROLES = {"counted": counted, "publish": publish, "idle": idle, "writes": writes, "restart": restart}


def start(
    role: str,
    task: Task,
    log: IO[str] | int = subprocess.PIPE,
    *,
    under: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a worker.

    :param log: a file for what it logs, if it lives long
    :param under: the command of a program that runs it
    """
    return subprocess.Popen(
        [*under, sys.executable, "-W", "ignore", "-m", __name__, role, json.dumps(task._asdict())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        process_group=0,
    )


def run(role: str, task: Task, *, under: Sequence[str] = ()) -> dict[str, Any]:
    """Run a worker to its end and give what it found.

    :param under: the command of a program that runs it
    :raises ServerError: it failed, or hangs; names the end of what it printed
    """
    process = start(role, task, under=under)
    try:
        out, err = process.communicate(timeout=PATIENCE + task.seconds)
    except subprocess.TimeoutExpired:
        raise ServerError(f"a worker ({role}, {task.patch}) hangs") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise ServerError(f"a worker ({role}, {task.patch}) failed: {err[-600:]}")
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
