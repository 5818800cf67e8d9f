"""The broker of the heartbeat benchmarks: a RabbitMQ of its own, and AMQP connections to it.

It is Debian's rabbitmq-server, started here on loopback with free ports, never as a service, and
gone when the block ends, with its data. It keeps to the defaults but for what would make a
benchmark of the disk out of one of the client.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfront.common import programs
from keyfront.errors import MissingPartError, ServerError

from .processes import HOST, free_port

# Seconds, for a machine that is busy.
START_PATIENCE = 120

# Debian's wrapper in /usr/sbin changes to another user; this is what it runs.
PROGRAMS = ("/usr/lib/rabbitmq/bin/rabbitmq-server",)
_CONFIGURATION = """\
listeners.tcp.local = {host}:{port}
loopback_users = none
log.console = true
log.console.level = info
log.file = false
disk_free_limit.absolute = 1MB
"""
_STARTED = b"Server startup complete"
_RESETS = re.compile(
    r"closing AMQP connection [^\n]*?- ([^)\n]*)\)[^(]*missed heartbeats from client"
)


def rabbitmq_program() -> str:
    """:raises MissingPartError: RabbitMQ is not installed; names the command"""
    for program in PROGRAMS:
        if os.access(program, os.X_OK):
            return program
    raise MissingPartError("rabbitmq-server is not installed: run apt install rabbitmq-server")


class Broker:
    """A RabbitMQ that can be killed and started again; made by :func:`broker`.

    :ivar port: of AMQP, on loopback; the same after a restart
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._log = folder / "log"
        self._programs = [programs.system_program(("epmd",), "erlang-base"), rabbitmq_program()]
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        epmd_port = free_port()
        configuration, plugins = folder / "rabbitmq.conf", folder / "plugins"
        configuration.write_text(_CONFIGURATION.format(host=HOST, port=self.port))
        plugins.write_text("[].\n")
        home = folder / "home"
        home.mkdir(mode=0o700)
        self._environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            # the cookie, which lets nobody else in, lies there
            "HOME": str(home),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(configuration),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            # the script becomes the server then, and is no parent that outlives it
            "RUNNING_UNDER_SYSTEMD": "1",
        }

    def start(self) -> None:
        """Run it, and come back when it takes connections.

        :raises ServerError: it did not start; names the end of its log
        """
        if self._epmd is None:
            # by itself Erlang starts one that stays behind
            self._epmd = self._run([self._programs[0]])
        mark = self._log.stat().st_size if self._log.exists() else 0
        self._server = self._run([self._programs[1]])
        deadline = time.monotonic() + START_PATIENCE
        while _STARTED not in self._log.read_bytes()[mark:]:
            if self._server.poll() is not None or time.monotonic() > deadline:
                end = self._log.read_text(errors="replace")[-600:]
                raise ServerError(f"RabbitMQ did not start: {end}")
            time.sleep(0.05)

    def restart(self) -> None:
        """Kill it, as a crash would, and start it again with its data on its port.

        :raises ServerError: it did not start
        """
        self._kill(self._server)
        self.start()

    def stop(self) -> None:
        """Kill all of it; nothing of the data is kept."""
        self._kill(self._server)
        self._kill(self._epmd)
        self._server = self._epmd = None

    def resets(self) -> int:
        """How many connections RabbitMQ has closed for missed heartbeats, by its log."""
        return self._log.read_bytes().count(b"missed heartbeats from client")

    def reset_names(self) -> list[str]:
        """What the clients of those connections call themselves."""
        return reset_names(self._log.read_text(encoding="utf-8", errors="replace"))

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as out:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _kill(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            return
        # its helpers (inet_gethost, erl_child_setup) are of its session
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def reset_names(log: str) -> list[str]:
    """The names of clients whose connections RabbitMQ closed for missed heartbeats, by its log."""
    return _RESETS.findall(log)


@contextmanager
def broker(folder: Path) -> Iterator[Broker]:
    """Run a RabbitMQ until the block ends.

    :param folder: an empty one of this user only; the caller deletes it
    :raises MissingPartError: RabbitMQ is not installed; names the command
    :raises ServerError: it did not start
    """
    made = Broker(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def url(port: int) -> str:
    """What oslo.messaging connects to; the password is RabbitMQ's own, for this broker only."""
    return f"rabbit://guest:guest@{HOST}:{port}//"


def connect(port: int, *, heartbeat: float, name: str = "") -> Any:
    """A py-amqp connection to a broker of loopback.

    :param heartbeat: seconds that are asked for; the broker takes what is below its own 60
    :param name: as the broker's log shall call it
    """
    try:
        import amqp
    except ImportError:
        raise MissingPartError("amqp is missing: run pip install oslo.messaging") from None
    made = amqp.Connection(
        f"{HOST}:{port}",
        heartbeat=heartbeat,
        connect_timeout=START_PATIENCE,
        client_properties={"connection_name": name} if name else {},
    )
    made.connect()
    return made
