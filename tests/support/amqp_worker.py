"""A process that uses AMQP on command, patched or not, with our heartbeat or without.

Run as a program it reads commands from standard input, one JSON object a line, and answers each
with one. Between commands it stands in a read of the operating system, so that no green thread of
its own runs, as in a worker of uWSGI or mod_wsgi between requests; after ``mode(hub=True)`` they
do run. :class:`Worker` is the other end, for tests.

Two threads of it (green ones, when it is patched) never stop: one sleeps and notes by how much it
overslept, the other writes log lines through oslo.log. A native one tells how much of that the
process did not run at all.

What an operation took is told as the seconds that oslo.messaging and kombu slept in it before they
tried again: a busy machine adds nothing to them.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

# Seconds; a bound on a hang, not an expectation.
PATIENCE = 120.0
# Seconds. A broker closes a connection two to three of them after the last byte: on a busy machine
# a process stands still for a part of that.
HEARTBEAT = 3
MODELS = ("none", "eventlet", "gevent")
_TICK = 0.02
# Seconds between log lines: six workers that write often are a load of their own.
_CHATTER = 0.2
_read, _write = os.read, os.write
_start_native, _sleep_natively = _thread.start_new_thread, time.sleep
# The seconds that each thread has asked to sleep, once they are counted.
_slept: defaultdict[int, float] = defaultdict(float)


class Worker:
    """A running worker.

    :param folder: where its log and what it prints are left
    :param patch: one of :data:`MODELS`
    :param ours: whether it calls ``install()``
    """

    def __init__(self, folder: Path, patch: str, *, ours: bool, name: str = "") -> None:
        self.patch, self.ours = patch, ours
        self.name = name or f"{patch}-{'ours' if ours else 'stock'}"
        self.log = folder / f"{self.name}.log"
        self._printed = folder / f"{self.name}.out"
        command = [sys.executable, __file__, "--patch", patch, "--log", str(self.log)]
        with self._printed.open("wb") as output:
            self.process = subprocess.Popen(
                command + ["--install"] * ours,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )
        self._waiting = 1  # the line that says it is ready
        self._data = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def __repr__(self) -> str:
        return self.name

    def tell(self, command: str, /, **arguments: object) -> None:
        """Give it a command; :meth:`answer` waits for the answer."""
        while self._waiting:
            self.answer()
        assert self.process.stdin is not None
        line = json.dumps({"do": command, **arguments}).encode() + b"\n"
        self.process.stdin.write(line)
        self.process.stdin.flush()
        self._waiting += 1

    def answer(self) -> Any:
        """What it answers to the last command; an exception there fails the test."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._data:
            left = max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([descriptor], [], [], left)
            part = _read(descriptor, 65536) if ready else b""
            if not part:
                self.process.send_signal(signal.SIGUSR1)
                self.process.send_signal(signal.SIGCONT)
                time.sleep(0.5)
                raise AssertionError(
                    f"{self} {'ended' if ready else 'hangs'}; it printed: {self.printed()}"
                )
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        self._waiting -= 1
        answer = json.loads(line)
        assert "error" not in answer, f"{self}: {answer['error']}; it printed: {self.printed()}"
        return answer["value"]

    def ask(self, command: str, /, **arguments: object) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def printed(self) -> str:
        return self._printed.read_text(errors="replace")[-6000:]

    def brokers(self) -> set[int]:
        """The ports that it is connected to."""
        found = psutil.Process(self.pid).net_connections("tcp")
        return {x.raddr.port for x in found if x.status == psutil.CONN_ESTABLISHED}

    def logged(self, since: int = 0) -> str:
        """Its log, from this place in it; without the lines that it writes all the time."""
        lines = self.log.read_bytes()[since:].decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if "worker [-] and on" not in line)

    def end(self) -> float:
        """Have it end by itself; how many seconds that took."""
        while self._waiting:
            self.answer()
        started = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            status = self.process.wait(PATIENCE)
        finally:
            self.kill()
        assert status == 0, f"{self} ended with {status}: {self.printed()}"
        return time.monotonic() - started

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def at_once(
    workers: Iterable[Worker], command: str, /, **arguments: object
) -> dict[Worker, Any]:
    """Have all do the same at the same time; what each answered."""
    workers = list(workers)
    for worker in workers:
        worker.tell(command, **arguments)
    return {worker: worker.answer() for worker in workers}


class Crew(dict[tuple[str, bool], Worker]):
    """A worker for each model, with our heartbeat and without; kept from test to test."""

    def of(self, *models: str, ours: bool | None = None) -> list[Worker]:
        return [x for (model, with_ours), x in self.items()
                if model in (models or MODELS) and ours in (None, with_ours)]

    def fill(self, folder: Callable[[], Path]) -> None:
        """Start those that are missing, each in a folder of its own."""
        for model in MODELS:
            for ours in (True, False):
                if (model, ours) not in self:
                    self[model, ours] = Worker(folder(), model, ours=ours)

    def weed(self) -> None:
        """End those that a test has left something in, as one that failed does."""
        for who, worker in list(self.items()):
            with contextlib.suppress(AssertionError, OSError, ValueError):
                if worker.ask("left") == []:
                    continue
            worker.kill()
            del self[who]

    def ask(self, command: str, /, **arguments: object) -> dict[Worker, Any]:
        return at_once(self.values(), command, **arguments)

    def open(self, url: str, name: str = "it", **heartbeat: int) -> None:
        """A transport each, with a connection that was used."""
        self.ask("open", name=name, url=url, **(heartbeat or {"threshold": HEARTBEAT}))
        self.ask("publish", name=name)

    def publish_after_a_fault(self) -> dict[Worker, list[float]]:
        """One message each; how long was waited before it was tried again.

        With ours once the others are done: whoever is first may be quicker than the fault.
        """
        seconds = at_once(self.of(ours=False), "publish", name="it")
        return seconds | at_once(self.of(ours=True), "publish", name="it")

    def pairs(self, answers: dict[Worker, Any]) -> Iterator[tuple[str, Any, Any]]:
        """By model: with ours, without."""
        for model in MODELS:
            yield model, answers[self[model, True]], answers[self[model, False]]


class _Program:
    """The worker's own side; each method ``do_NAME`` is a command."""

    def __init__(self, patch: str, log: Path) -> None:
        import threading

        from oslo_config import cfg
        from oslo_log import log as logging

        self._patch = patch
        self._threading = threading
        self._hub = False
        self._stop = False
        self._things: dict[str, Any] = {}
        self._jobs: dict[str, tuple[Any, list[Any]]] = {}
        # releases from 18.3 on read options that they register only here
        conf = cfg.CONF
        logging.register_options(conf)
        conf([], project="amqp_worker", default_config_files=[])
        conf.set_override("log_file", str(log))
        logging.setup(conf, "worker")
        self._log = logging.getLogger("worker")
        self._records = 0
        self._stall = 0.0
        self._ran = 0
        _start_native(self._run, ())
        for function in (self._tick, self._chatter):
            threading.Thread(target=function, daemon=True).start()

    # The two threads that never stop

    def _run(self) -> None:
        """Count, natively, the ticks for which the process runs."""
        while not self._stop:
            _sleep_natively(_TICK)
            self._ran += 1

    def _tick(self) -> None:
        """Note the longest time between two wake-ups in which the process ran."""
        before = self._ran
        while not self._stop:
            time.sleep(_TICK)
            ran = self._ran
            self._stall = max(self._stall, (ran - before - 1) * _TICK)
            before = ran

    def _chatter(self) -> None:
        while not self._stop:
            self._log.info("and on")
            self._records += 1
            time.sleep(_CHATTER)

    # Commands of the process

    def do_mode(self, hub: bool) -> None:
        self._hub = hub

    def do_install(self, **options: Any) -> bool:
        from keyfront.gateway import heartbeat

        return heartbeat.install(**options)

    def do_stats(self) -> dict[str, Any]:
        from keyfront.gateway import heartbeat

        return heartbeat.statistics()

    def do_stall(self) -> dict[str, float]:
        """The worst since it was asked last; seconds, and how often the log was written to."""
        before, deadline = self._records, time.monotonic() + PATIENCE / 2
        time.sleep(4 * _TICK)  # what stood still for long is noted on waking up
        while self._records == before and time.monotonic() < deadline:
            time.sleep(_TICK)
        answer = {"stall": self._stall, "records": self._records}
        time.sleep(4 * _TICK)
        self._stall = 0.0
        return answer

    def do_descriptors(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def do_left(self) -> list[str]:
        """What was opened and not closed."""
        return sorted(self._things)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_burn(self, seconds: float) -> None:
        """Compute, as far as other threads can tell: the interpreter's lock is kept.

        Most of the time in a function of C that gives no lock away and takes no processor, since
        six that really compute keep all cores from others.
        """
        keep = ctypes.PyDLL(None).usleep
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(2000))
            keep(int(1e6 * sys.getswitchinterval()))

    def do_start(self, job: str, command: dict[str, Any]) -> None:
        """Carry out a command in a thread; ``join`` has its answer."""
        answer: list[Any] = []
        thread = self._threading.Thread(
            target=lambda: answer.append(self.obey(command)), daemon=True
        )
        self._jobs[job] = thread, answer
        thread.start()

    def do_join(self, job: str) -> Any:
        thread, answer = self._jobs.pop(job)
        thread.join()
        if "error" in answer[0]:
            raise RuntimeError(answer[0]["error"])
        return answer[0]["value"]

    # oslo.messaging

    def do_open(self, name: str, url: str, threshold: int, rate: int = 3) -> None:
        """A transport of oslo.messaging, connected by its first use.

        The heartbeat is that of all connections made from now on.
        """
        import oslo_messaging
        from oslo_config import cfg

        self._things[name] = oslo_messaging.get_rpc_transport(cfg.CONF, url=url)
        for option, value in (("heartbeat_timeout_threshold", threshold), ("heartbeat_rate", rate)):
            cfg.CONF.set_override(option, value, "oslo_messaging_rabbit")

    def do_publish(self, name: str, number: int = 1, size: int = 20) -> list[float]:
        """Cast messages that nobody hears; the seconds that were slept in each."""
        client = self._client(name, "nobody")
        body = "x" * size
        return [self._timed(lambda: client.cast({}, "note", body=body)) for _ in range(number)]

    def do_fail(self, name: str) -> float:
        """A cast that is not tried again; the seconds slept until it fails, as it must."""
        import oslo_messaging

        client = self._client(name, "nobody", retry=0)

        def cast() -> None:
            with contextlib.suppress(oslo_messaging.MessageDeliveryFailure):
                client.cast({}, "note", body="x")
                raise AssertionError("it did not fail")

        return self._timed(cast)

    def do_call(self, name: str, topic: str) -> float:
        client = self._client(name, topic, timeout=PATIENCE)
        return self._timed(lambda: client.call({}, "echo", what="here"))

    def do_listen(self, name: str, topic: str) -> None:
        """Answer calls, in threads."""
        import oslo_messaging

        class Endpoint:
            def echo(self, context: object, what: str) -> str:
                return what

        target = oslo_messaging.Target(topic=topic, server=f"{self._patch}-{os.getpid()}")
        server = oslo_messaging.get_rpc_server(self._things[name], target, [Endpoint()])
        server.start()
        self._things[f"{name}-server"] = server

    def do_close(self, name: str) -> None:
        """End a transport, and the server that listens on it."""
        server = self._things.pop(f"{name}-server", None)
        if server is not None:
            server.stop()
            server.wait()
        self._things.pop(name).cleanup()

    # kombu and py-amqp

    def do_amqp(self, name: str, port: int, heartbeat: float, tls: bool = False) -> int:
        """A connection of py-amqp with a queue of its name; its local port."""
        import amqp

        connection = amqp.Connection(
            f"127.0.0.1:{port}", heartbeat=heartbeat, ssl={"cert_reqs": 0} if tls else False,
            client_properties={"connection_name": f"amqp_worker.py:{os.getpid()}:{name}"},
        )
        connection.connect()
        channel = connection.channel()
        channel.queue_declare(name, durable=False, auto_delete=False)
        self._things[name] = channel
        local: int = connection.sock.getsockname()[1]
        return local

    def do_amqp_publish(self, name: str, number: int = 1, size: int = 20) -> list[float]:
        import amqp

        channel = self._things[name]
        return [
            self._timed(
                lambda: channel.basic_publish(amqp.Message("x" * size), "", routing_key=name)
            )
            for _ in range(number)
        ]

    def do_amqp_receive(self, name: str, number: int) -> int:
        """Wait for so many messages inside drain_events, without a timeout."""
        channel = self._things[name]
        got: list[int] = []
        channel.basic_consume(name, no_ack=True, callback=lambda message: got.append(1))
        while len(got) < number:
            channel.connection.drain_events()
        return len(got)

    def do_amqp_close(self, name: str) -> None:
        self._things.pop(name).connection.close()

    def do_forget(self, name: str) -> None:
        """Drop what has this name, and do not close it."""
        del self._things[name]
        gc.collect()

    def do_churn(self, number: int, port: int, heartbeat: float, tls: bool = False) -> None:
        """So many connections, one after the other."""
        for _ in range(number):
            self.do_amqp("churned", port, heartbeat, tls)
            self.do_amqp_close("churned")
        gc.collect()

    def do_tls_objects(self) -> int:
        """How many objects of OpenSSL's there are, of 80 kB each."""
        gc.collect()
        return sum(type(x).__name__ == "_SSLSocket" for x in gc.get_objects())

    def do_kombu(self, name: str, url: str, heartbeat: float) -> None:
        """A pool of kombu's, with one connection."""
        import kombu

        options = {
            "confirm_publish": True,
            "client_properties": {"connection_name": f"amqp_worker.py:{os.getpid()}:{name}"},
        }
        connection = kombu.Connection(url, heartbeat=heartbeat, transport_options=options)
        self._things[name] = connection.Pool(1)

    def do_kombu_close(self, name: str) -> None:
        self._things.pop(name).force_close_all()

    def do_kombu_publish(self, name: str) -> float:
        """A message, which is not sent again if that fails."""

        def publish() -> None:
            with self._things[name].acquire(block=True) as connection:
                connection.ensure_connection(max_retries=3)
                with connection.Producer() as producer:
                    producer.publish("x", routing_key="nobody")

        return self._timed(publish)

    # fork

    def do_fork(self, command: dict[str, Any], seconds: int = int(PATIENCE)) -> Any:
        """Carry out a command in a child, which then collects garbage and ends."""
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.alarm(seconds)
                if self._patch == "eventlet":
                    import eventlet.hubs

                    # as oslo.service does in its children: not the parent's epoll
                    eventlet.hubs.use_hub()
                _write(theirs, json.dumps(self.obey(command)).encode())
                self._things.clear()
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        data, part = b"", b"."
        while part:
            # meanwhile its other threads go on, where they are green
            select.select([ours], [], [])
            part = _read(ours, 65536)
            data += part
        os.close(ours)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"the child ended with {status} after {data!r}")
        return json.loads(data)

    # Its life

    def _client(self, name: str, topic: str, **options: Any) -> Any:
        import oslo_messaging

        # oslo.messaging before 14.1 has only the class, later ones warn of it
        make = getattr(oslo_messaging, "get_rpc_client", None) or oslo_messaging.RPCClient
        return make(self._things[name], oslo_messaging.Target(topic=topic), **options)

    def _timed(self, action: Callable[[], object]) -> float:
        me = self._threading.get_ident()
        before = _slept[me]
        action()
        return _slept[me] - before

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(command)
        function = getattr(self, f"do_{arguments.pop('do')}")
        try:
            return {"value": function(**arguments)}
        except Exception as error:
            kinds = " ".join(x.__name__ for x in type(error).__mro__[:-1])
            return {"error": f"{error!r} ({kinds})"}

    def run(self, output: int) -> None:
        _write(output, b'{"value": "ready"}\n')
        for line in self._lines():
            _write(output, json.dumps(self.obey(json.loads(line))).encode() + b"\n")
        self._stop = True

    def _lines(self) -> Iterator[bytes]:
        data = b""
        source = os.dup(0)  # eventlet's select does not take 0
        while True:
            if self._hub:
                select.select([source], [], [])
            part = _read(source, 65536)
            if not part:
                return
            data += part
            *lines, data = data.split(b"\n")
            yield from lines


def _count_sleeps() -> None:
    """Note what is slept from now on, by those who have not imported it yet."""
    import threading

    sleep = time.sleep

    def counted(seconds: float = 0) -> None:
        _slept[threading.get_ident()] += seconds
        sleep(seconds)

    time.sleep = counted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--patch", choices=MODELS, required=True)
    parser.add_argument("--install", action="store_true", help="our heartbeat")
    parser.add_argument("--log", type=Path, required=True, help="file")
    options = parser.parse_args()
    if options.patch == "eventlet":
        import warnings

        warnings.simplefilter("ignore")
        import eventlet

        eventlet.monkey_patch()
    else:
        # oslo.messaging imports it all the same: without a resolver that nobody asks, in half of
        # the time.
        os.environ["EVENTLET_NO_GREENDNS"] = "yes"
        if options.patch == "gevent":
            import gevent.monkey

            gevent.monkey.patch_all()
    _count_sleeps()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # nothing but answers to standard output
    output = os.dup(1)
    os.dup2(2, 1)
    program = _Program(options.patch, options.log)
    if options.install:
        program.do_install()
    import oslo_messaging  # noqa: F401  (now, and not while somebody measures)

    program.run(output)


if __name__ == "__main__":
    main()
