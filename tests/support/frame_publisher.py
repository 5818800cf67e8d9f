"""Programs that find out whether an AMQP stream stays whole while heartbeats go through it.

    python frame_publisher.py publish|consume|consume-casts '{"patch": "gevent", ...}'

The publisher (patched or not) sends bodies that carry their number and a checksum, eight at once:
over a connection each, or all over one. Its sockets have small send buffers, so that most writes
are sent in parts, and heartbeats are due every millisecond. The consumer, another process that
nothing is patched in, says what came; ``consume-casts`` does it for what ``amqp_service``
publishes. Each ends by printing a line of JSON; what the fields of the argument mean is said at
:class:`Task`.

``beats`` is ``ours`` or, for a control, ``none`` or ``raw``: a native thread that writes heartbeats
without asking anybody, which is what must never be done.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
WRITERS = 8
SEND_BUFFER = 8192
# Seconds; asked of the broker. Beats are due far more often here.
NEGOTIATED = 30
# Seconds that the consumer waits for the next message before it says that the rest is lost.
SILENCE = 20.0
_HEAD = struct.Struct("!III")
LEAST, MOST = 20, 300_000
_END = b"end"


# Of its own: pytest changes the process's between tests, and an exec in another thread fails then.
_ENVIRONMENT = dict(os.environ)


@dataclass(frozen=True)
class Task:
    """What a program does."""

    patch: str
    """``none``, ``eventlet`` or ``gevent``."""
    port: int
    queue: str
    """Also the name of the connections, in the broker's log."""
    count: int
    shared: bool = False
    """Whether all writers share one connection, with a channel each."""
    ca_file: str | None = None
    """Connect by TLS and trust this."""
    beats: str = "ours"
    interval: float = 0.001
    host: str = "127.0.0.1"
    folder: str | None = None
    """For the counts of ``keyfront heartbeat status``; ``None`` for the usual one."""

    def program(self, role: str) -> subprocess.Popen[str]:
        """Start it."""
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, role, json.dumps(asdict(self))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )


def body(number: int) -> bytes:
    """The body of a message: of 20 B to 300 kB, the same in every process."""
    chance = random.Random(number)
    match chance.randrange(10):
        case 0:
            size = chance.randint(60_000, MOST)
        case 1 | 2:
            size = chance.randint(2_000, 60_000)
        case _:
            size = chance.randint(LEAST, 2_000)
    block = _block()
    size -= _HEAD.size
    start = chance.randrange(len(block) - size)
    content = block[start : start + size]
    return _HEAD.pack(number, size, zlib.crc32(content)) + content


def verify(data: bytes) -> int | None:
    """The number of a message whose body is what :func:`body` made, or ``None``."""
    if len(data) < _HEAD.size:
        return None
    number, size, checksum = _HEAD.unpack_from(data)
    content = data[_HEAD.size :]
    return number if len(content) == size and zlib.crc32(content) == checksum else None


def verify_cast(data: bytes) -> int | None:
    """The same of a cast of oslo.messaging with a message of ``amqp_service``."""
    message = json.loads(json.loads(data)["oslo.message"])["args"]["message"]
    whole = zlib.crc32(message["text"].encode()) == message["crc"]
    return message["number"] if whole else None


_blocks: list[bytes] = []


def _block() -> bytes:
    if not _blocks:
        _blocks.append(random.Random(5).randbytes(2 * MOST))
    return _blocks[0]


def _connect(task: Task) -> Any:
    import socket

    import amqp

    ssl: Any = False
    if task.ca_file:
        ssl = {"ca_certs": task.ca_file, "cert_reqs": 2, "server_hostname": "localhost"}
    made = amqp.Connection(
        f"{task.host}:{task.port}",
        heartbeat=NEGOTIATED if task.beats == "ours" else 0,
        ssl=ssl,
        connect_timeout=60,
        client_properties={"connection_name": task.queue},
    )
    made.connect()
    made.transport.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return made


def _write_raw(connections: list[Any], interval: float) -> None:
    """What must never be done; the primitives are those of an unpatched Python."""
    from importlib.util import module_from_spec, spec_from_loader

    def fresh(name: str) -> Any:
        from importlib.machinery import BuiltinImporter

        return module_from_spec(spec_from_loader(name, BuiltinImporter))  # type: ignore[arg-type]

    import _socket
    import os

    sleep = fresh("time").sleep
    sockets = [
        _socket.socket(fileno=os.dup(one.transport.sock.fileno()), family=2, type=1, proto=6)
        for one in connections
    ]

    def run() -> None:
        while True:
            sleep(interval)
            for one in sockets:
                try:
                    one.send(HEARTBEAT, 0x40)  # MSG_DONTWAIT
                except OSError:
                    pass

    fresh("_thread").start_new_thread(run, ())


def publish(task: Task) -> dict[str, Any]:
    """Send all messages; gives ``published``, ``errors`` and the heartbeat's own counts."""
    if task.patch == "gevent":
        from gevent import monkey

        monkey.patch_all()
    elif task.patch == "eventlet":
        import eventlet

        eventlet.monkey_patch()
    import threading
    import time

    import amqp

    in_force = None
    if task.beats == "ours":
        from keyfront.gateway import heartbeat

        in_force = heartbeat.install(interval=task.interval, path=task.folder)
    connections = [_connect(task) for _ in range(1 if task.shared else WRITERS)]
    channels = [connections[number % len(connections)].channel() for number in range(WRITERS)]
    for each in channels:
        each.open()
    if task.beats == "raw":
        _write_raw(connections, task.interval)
    errors: list[str] = []
    published = 0

    def write(writer: int) -> None:
        nonlocal published
        try:
            for number in range(writer, task.count, WRITERS):
                message = amqp.Message(body(number))
                channels[writer].basic_publish(message, routing_key=task.queue)
                published += 1
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])

    start = time.monotonic()
    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    seconds = time.monotonic() - start
    counts = heartbeat.statistics() if task.beats == "ours" else {}
    if not errors:
        try:
            # what the broker has said yes to, it has got all that was before
            for each in channels:
                each.close()
            last = connections[0].channel()
            last.open()
            last.basic_publish(amqp.Message(_END), routing_key=task.queue)
            last.close()
            for each in connections:
                each.close()
        except Exception as error:
            errors.append(f"at the end: {type(error).__name__}: {error}"[:300])
    return {
        "in_force": in_force,
        "published": published,
        "seconds": seconds,
        "errors": errors,
        "counts": counts,
    }


def consume(task: Task, *, casts: bool = False) -> dict[str, int]:
    """Take all messages, and say what they were; prints a line when it can begin.

    :param casts: they are what ``amqp_service`` publishes, all but the first, in any order
    """
    import amqp

    connection = amqp.Connection(f"{task.host}:{task.port}", heartbeat=0, connect_timeout=60)
    connection.connect()
    channel = connection.channel()
    channel.queue_declare(task.queue, auto_delete=True)
    if casts:
        channel.queue_bind(task.queue, "openstack", task.queue)
    seen: set[int] = set()
    found = {"verified": 0, "bad": 0, "twice": 0, "disordered": 0}
    newest = [-1] * WRITERS
    # nobody says so where it is a service that publishes
    ended = casts
    expected = range(2, task.count + 2) if casts else range(task.count)

    def take(message: Any) -> None:
        nonlocal ended
        data = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
        if data == _END:
            ended = True
            return
        number = verify_cast(data) if casts else verify(data)
        if number not in expected:
            found["bad"] += 1
            return
        assert number is not None
        writer = number % WRITERS
        found["twice"] += number in seen
        found["disordered"] += number < newest[writer] and not casts
        newest[writer] = number
        seen.add(number)
        found["verified"] += 1

    channel.basic_consume(task.queue, no_ack=True, callback=take)
    print("ready", flush=True)
    while len(seen) < task.count or not ended:
        try:
            connection.drain_events(timeout=1 if ended and not casts else SILENCE)
        except TimeoutError:
            break
    return {**found, "lost": task.count - len(seen)}


def main() -> None:
    role, text = sys.argv[1:]
    task = Task(**json.loads(text))
    if role == "publish":
        found: dict[str, Any] = publish(task)
    else:
        found = consume(task, casts=role == "consume-casts")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    # this folder has modules of names that libraries may look for
    here = str(Path(__file__).parent)
    sys.path[:] = [each for each in sys.path if each != here]
    main()
