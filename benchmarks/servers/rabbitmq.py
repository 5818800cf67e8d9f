"""A RabbitMQ: private, on loopback only, without plugins, gone when the block ends.

It is Debian's own program, run here and never as a service: one process of Erlang, which
listens for AMQP and for nothing else. It has a node name, which its database wants, but neither a
distribution port nor an epmd. What ``rabbitmqctl`` would be asked in seconds is typed into its
Erlang shell, a named pipe, and answered in milliseconds.

What clients did is told by RabbitMQ's own log, with the names that they give their connections
(``client_properties={"connection_name": …}``; oslo.messaging's is ``PROGRAM:PID:UUID``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keyfront.common import programs
from keyfront.errors import ServerError

from .. import proc
from .ports import free_port
from .processes import HOST, Process, freeze

# Seconds; a bound on a hang, not an expectation.
PATIENCE = 90.0
_CONNECT_PATIENCE = 120
# Debian's at /usr/sbin changes to user rabbitmq and reads /etc/rabbitmq.
_DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_SETTINGS = """
listeners.tcp.1 = 127.0.0.1:{port}
num_acceptors.tcp = 2
log.file = {log}
log.file.level = info
log.connection.level = info
log.console = false
disk_free_limit.absolute = 1MB
vm_memory_high_watermark.absolute = 1GB
"""
# Names are looked up by Erlang itself; else it starts two processes of inet_gethost.
_NAMES = '{lookup, [file]}. {host, {127,0,0,1}, ["localhost"]}.\n'
_SMALL = "+sbwt none +sbwtdcpu none +sbwtdio none +S 1:1 +A 1 "
_STARTED = b"Server startup complete;"
_ENTRY = re.compile(r"\[\w+\] (?P<pid><[\d.]+>) (?P<text>.*)")
_ACCEPTED = re.compile(r"accepting AMQP connection <[\d.]+> \(\S+:(\d+) -> ")
_NAMED = re.compile(r"[Cc]onnection <[\d.]+> \(.*\) has a client-provided name: (.*)")


@dataclass
class Seen:
    """One connection, from RabbitMQ's log."""

    port: int
    """The client's."""
    name: str = ""
    """What the client called it; empty if it did not."""
    lines: list[str] = field(default_factory=list)
    """What the log says of it, without time and level."""

    def says(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)


class Broker:
    """A RabbitMQ that can be stopped, killed, paused and started again at its own ports."""

    host = HOST
    user = password = "guest"

    def __init__(
        self, program: Path, own: Path, folder: Path, port: int, extra: str, small: bool
    ) -> None:
        self.port = port
        #: RabbitMQ's log, of all its lives; it stays when the broker is gone.
        self.log = folder / f"rabbitmq-{port}.log"
        self._program = program
        self._own = own
        self._output = folder / f"rabbitmq-{port}.out"
        self._node = f"keyfront-{port}@localhost"
        self._pipe = own / "shell"
        self._small = small
        self._process: Process | None = None
        self._life = contextlib.ExitStack()
        self._paused = False
        self._asking = threading.Lock()
        self._questions = itertools.count()
        self._configure(extra)

    def _configure(self, extra: str) -> None:
        text = _SETTINGS.format(port=self.port, log=self.log)
        (self._own / "rabbitmq.conf").write_text(text + extra)
        (self._own / "plugins").write_text("[].\n")
        _make_home(self._own / "rabbitmq", self._program.parent)
        (self._own / "names").write_text(_NAMES)
        os.mkfifo(self._pipe, 0o600)

    def _environment(self) -> dict[str, str]:
        own = self._own
        return {
            "HOME": str(own),
            "RABBITMQ_SCRIPTS_DIR": str(own / "rabbitmq" / "sbin"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_MNESIA_BASE": str(own / "data"),
            "RABBITMQ_LOG_BASE": str(own / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(own / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(own / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(own / "advanced.config"),
            # missing, or it would be Debian's
            "RABBITMQ_CONF_ENV_FILE": str(own / "rabbitmq-env.conf"),
            "RABBITMQ_PID_FILE": str(own / "pid"),
            # the shell reads its input, and the script becomes Erlang instead of starting it
            "RABBITMQ_ALLOW_INPUT": "1",
            # SIGINT ignored; small: no waiting in circles, few threads
            "RABBITMQ_SERVER_ERL_ARGS": f"{_SMALL if self._small else ''}+B i",
            # no distribution
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-sname {self._node} -setcookie keyfront -dist_listen false -start_epmd false "
                "-erl_epmd_port 1"
            ),
            **dict.fromkeys(("ERL_AFLAGS", "ERL_FLAGS", "ERL_ZFLAGS"), ""),
            "ERL_INETRC": str(own / "names"),
            "ERL_CRASH_DUMP_SECONDS": "0",
            "ERL_MAX_PORTS": "4096",
        }

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it at the ports it had, with what it stored.

        Only from a thread that lives on: the kernel ends it with the thread that started it.
        """
        assert self._process is None, "it runs"
        before = self.log.stat().st_size if self.log.exists() else 0
        # open at both ends, so that neither waits for the other
        pipe = os.open(self._pipe, os.O_RDWR | os.O_CLOEXEC)
        self._life.callback(os.close, pipe)
        self._drain(pipe)
        command = ["sh", "-c", 'exec "$0" <"$1"', str(self._program), str(self._pipe)]
        process = Process(
            "RabbitMQ", command, log=self._output, environment=self._environment(),
            folder=Path("/"), stop=signal.SIGKILL,
        )  # fmt: skip
        self._life.enter_context(process)

        def started() -> bool:
            with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
                log.seek(before)
                return _STARTED in log.read()
            return False

        try:
            process.wait_until(started)
        except BaseException:
            self._life.close()
            raise
        self._process = process
        # it would look for an epmd each minute, and start programs
        self.ask("supervisor:terminate_child(rabbit_sup, rabbit_epmd_monitor_sup)")

    def stop(self) -> None:
        """End it in good order: it closes its connections with AMQP's connection.close."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; the kernel closes its connections."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it, as a crash would, and start it again with its data on its ports."""
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        helpers: list[int] = []
        if self._process.poll() is None:
            helpers = proc.family(self._process.pid)[1:]
            with contextlib.suppress(AssertionError):
                self._finish_log()
        # what is sent to a stopped process waits, but for SIGKILL
        self._process.send(number)
        if self._paused and number != signal.SIGKILL:
            self.resume()
        self._paused = False
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process = None
            self._life.close()
        # they end by themselves when it has
        wait_until(
            lambda: all(proc.state(pid) in ("", "Z") for pid in helpers), f"of {helpers} none lives"
        )

    def pause(self) -> None:
        """Stop its process: connections stay, new ones are made by the kernel, nobody answers."""
        assert self._process is not None
        self._finish_log()
        freeze(self._process.pid)
        self._paused = True

    def resume(self) -> None:
        assert self._process is not None
        self._process.send(signal.SIGCONT)
        self._paused = False

    def output(self) -> str:
        """Return what it printed."""
        return self._output.read_text(errors="replace")

    def ask(self, expression: str) -> str:
        """Return the value of an Erlang expression, on one line; for what has no method here."""
        process = self._process
        assert process is not None and not self._paused, "it does not run"
        with self._asking:
            mark = f"answer-{next(self._questions)}"
            start = self._output.stat().st_size
            line = f'io:format("~n~s ~0p~n", ["{mark}", catch ({expression})]).\n'
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, line.encode())
            finally:
                os.close(pipe)
            answer = re.compile(rb"^" + mark.encode() + rb" (.*)\n", re.MULTILINE)
            found: list[bytes] = []

            def look() -> bool:
                assert process.poll() is None, f"it has ended; see {self._output}"
                with self._output.open("rb") as output:
                    output.seek(start)
                    found.extend(answer.findall(output.read()))
                return bool(found)

            wait_until(look, f"it answers {expression}; see {self._output}")
        return found[0].decode(errors="replace")

    def log_text(self) -> str:
        """Return its log, with all that it has written so far."""
        self._finish_log()
        return self.log.read_text(errors="replace")

    def _finish_log(self) -> None:
        """Have it write what it would keep for two seconds."""
        if self._process is None or self._paused or self._process.poll() is not None:
            return
        module = "rabbit_logger_std_h"
        handlers = f"#{{id := X, module := {module}}} <- logger:get_handler_config()"
        self.ask(f"[{module}:filesync(X) || {handlers}]")

    def _drain(self, pipe: int) -> None:
        """Forget what an earlier life was asked and did not read."""
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(pipe, 65536):
                pass


B = TypeVar("B", bound=Broker)


@contextlib.contextmanager
def broker(folder: Path, *, small: bool = False) -> Iterator[Broker]:
    """Run a RabbitMQ until the block ends, see :func:`running`."""
    with running(Broker, folder, small=small) as made:
        yield made


@contextlib.contextmanager
def running(
    kind: type[B], folder: Path, *, port: int = 0, extra: str = "", small: bool = False
) -> Iterator[B]:
    """Run a RabbitMQ until the block ends; two seconds of CPU pass before it is ready.

    :param kind: the class of what is given
    :param folder: the folder of its log, ``rabbitmq-PORT.log``
    :param port: to listen at, if it matters
    :param extra: lines for rabbitmq.conf (``heartbeat = 10``)
    :param small: true if it shall take little of the machine, and be slower
    """
    program = _DEBIAN
    if not program.exists():
        program = Path(programs.system_program(("rabbitmq-server",), "rabbitmq-server"))
    while True:
        # a socket's path is short
        with tempfile.TemporaryDirectory(prefix="keyfront-rabbitmq-", dir="/tmp") as name:
            own = Path(name)
            server = kind(program.resolve(), own, folder, port or free_port(), extra, small)
            try:
                server.start()
            except ServerError:
                # somebody took the port since we looked
                if port or "eaddrinuse" not in server.output():
                    raise
                continue
            try:
                yield server
            finally:
                server.kill()
            return


def _make_home(home: Path, scripts: Path) -> None:
    """RabbitMQ as it is installed, without its plugins.

    Erlang looks for each module in the folder of each plugin, which made starting half as long
    again.
    """
    home.mkdir()
    (home / "sbin").symlink_to(scripts)
    parts = home / "plugins"
    parts.mkdir()
    for part in (scripts.parent / "plugins").iterdir():
        if not part.name.startswith("rabbitmq_") or part.name.startswith("rabbitmq_prelaunch"):
            (parts / part.name).symlink_to(part)


def connections_in(log: str) -> list[Seen]:
    """Return all connections ever made, in order, by a broker's log.

    Each line begins with the Erlang process that wrote it, and a connection has one. After a
    restart these are given anew, so the last that was accepted is meant.
    """
    found: list[Seen] = []
    current: dict[str, Seen] = {}
    for entry in _ENTRY.finditer(log):
        pid, text = entry["pid"], entry["text"]
        if accepted := _ACCEPTED.match(text):
            current[pid] = Seen(int(accepted[1]))
            found.append(current[pid])
        if pid in current:
            current[pid].lines.append(text)
            if named := _NAMED.match(text):
                current[pid].name = named[1]
    return found


def missed_names(log: str) -> list[str]:
    """Return the names of clients whose connections it closed for missed heartbeats."""
    return [x.name for x in connections_in(log) if x.says("missed heartbeats from client")]


def url(port: int) -> str:
    """Return what oslo.messaging connects to, by RabbitMQ's own user and password."""
    return f"rabbit://{Broker.user}:{Broker.password}@{HOST}:{port}//"


def connect(port: int, *, heartbeat: float) -> Any:
    """Return a py-amqp connection to a broker of loopback.

    :param heartbeat: seconds that are asked for; the broker takes what is below its own 60
    """
    programs.require_module("amqp", "experiments")
    import amqp

    made = amqp.Connection(f"{HOST}:{port}", heartbeat=heartbeat, connect_timeout=_CONNECT_PATIENCE)
    made.connect()
    return made


def wait_until(condition: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < PATIENCE, f"waited in vain until {what}"
        # Most conditions read all of the log: what takes long is looked at less often.
        time.sleep(min(max(0.01, waited / 20), 0.2))
