"""Real Redis or Valkey servers and sentinels for tests: private, killed when the block ends.

They listen on a free port of 127.0.0.1 and on a socket in a folder of their own, and write nothing
to disk unless told to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from keyfront.benchmarks.servers import redis as worlds
from keyfront.errors import MissingPartError
from support import processes, programs
from support.certificates import Certificates
from support.served import PATIENCE, free_port

# No test lasts as long.
_DOWN_AFTER_MS = 600_000
_NOT_YET = (redis.ConnectionError, redis.TimeoutError, OSError)

# redis-py 7 counts errors by host and port, which its connection by a socket does not have.
for _name in ("host", "port"):
    if not hasattr(redis.UnixDomainSocketConnection, _name):
        setattr(redis.UnixDomainSocketConnection, _name, "")


class RedisServer:
    """A server, or a sentinel; :func:`redis_server` and :func:`sentinels` make it.

    It may be killed, started again, stopped and resumed.
    """

    def __init__(
        self,
        folder: Path,
        config: Sequence[str],
        *,
        port: int = 0,
        tls: Certificates | None = None,
        kind: str = "server",
        socket: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        program = folder / "redis-server"
        program.unlink(missing_ok=True)
        try:
            program.symlink_to(worlds.program())
        except MissingPartError as error:
            pytest.skip(error.message)
        self.folder = folder
        self.port = port or free_port()
        self.tls = tls
        self.socket = socket or folder / "socket"
        self._environment = dict(environment or {})
        self._config = folder / "redis.conf"
        lines = [
            "bind 127.0.0.1",
            f"dir {folder}",
            f"unixsocket {self.socket}",
            "unixsocketperm 700",
        ]
        if tls is None:
            lines.append(f"port {self.port}")
        else:
            lines += [
                "port 0",
                f"tls-port {self.port}",
                f"tls-cert-file {tls.server.certificate}",
                f"tls-key-file {tls.server.key}",
                f"tls-ca-cert-file {tls.ca_file}",
                "tls-auth-clients optional",
            ]
        if kind == "server":
            lines += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        self._config.write_text("\n".join([*lines, *config]) + "\n")
        self._config.chmod(0o600)
        self._command = [str(program), str(self._config)]
        if kind == "sentinel":
            self._command.append("--sentinel")
        self._log = folder / "log"
        self._running: contextlib.ExitStack | None = None
        self._clients: list[Any] = []
        self.pid = 0

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What the option ``coordinator`` takes."""
        return self.url_of("")

    def url_of(self, who: str) -> str:
        """The same for ``user:password``."""
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{who}{'@' if who else ''}{self.address}"

    def start(self) -> None:
        """Start it, and wait until it answers and has loaded what it saved."""
        stack = contextlib.ExitStack()
        process = stack.enter_context(
            programs.running(
                self._command, self._log, signal.SIGKILL, environment=self._environment
            )
        )
        self._running, self.pid = stack, process.pid
        try:
            programs.ready(lambda: self.client.ping(), process, self._log, _NOT_YET)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill it with SIGKILL, if it runs."""
        stack, self._running = self._running, None
        if stack is not None:
            stack.close()
            self.client.connection_pool.disconnect()

    def restart(self) -> None:
        """Kill it, and start it with what it last saved."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Have it do nothing, as a machine that hangs."""
        processes.stop(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def client(self) -> Any:
        """A client that may do everything, by the socket."""
        if not self._clients:
            self._clients.append(
                redis.Redis(
                    unix_socket_path=str(self.socket),
                    socket_timeout=PATIENCE,
                    decode_responses=True,
                    retry=Retry(NoBackoff(), 0),
                )
            )
        return self._clients[0]

    def close(self) -> None:
        """Kill it and close the client."""
        self.kill()
        for client in self._clients:
            client.close()

    def wait(self, holds: Callable[[Any], bool]) -> None:
        """Wait until the client sees something; look every hundredth of a second."""
        deadline = time.monotonic() + PATIENCE
        while not holds(self.client):
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.01)


@contextlib.contextmanager
def redis_server(
    folder: Path | None = None,
    *,
    port: int = 0,
    tls: Certificates | None = None,
    acl: Sequence[str] = (),
    replica_of: RedisServer | None = None,
    config: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[RedisServer]:
    """Run a server until the block ends.

    :param folder: for its files, made if missing; by default one of its own in /tmp
    :param acl: users, as in ``user NAME on >PASSWORD ~keyfront:* +hmget``
    :param config: more lines of its configuration
    :param environment: more of its environment
    """
    with contextlib.ExitStack() as stack:
        # A socket's path must be short.
        own = stack.enter_context(programs.own_folder("redis"))
        (folder or own).mkdir(exist_ok=True)
        lines = [*acl, *config]
        if replica_of is not None:
            lines.append(f"replicaof 127.0.0.1 {replica_of.port}")
        server = RedisServer(
            folder or own, lines, port=port, tls=tls, socket=own / "socket",
            environment=environment,
        )  # fmt: skip
        stack.callback(server.close)
        server.start()
        if replica_of is not None:
            server.wait(lambda client: client.info("replication")["master_link_status"] == "up")
        yield server


@contextlib.contextmanager
def sentinels(
    master: RedisServer, *, count: int = 3, name: str = "keyfront"
) -> Iterator[list[RedisServer]]:
    """Run sentinels that watch a master until the block ends.

    They bear its silence: another takes its place when :func:`fail_over` says so.
    """
    with contextlib.ExitStack() as stack:
        made = []
        # They would tell each other within seconds.
        them = [(secrets.token_hex(20), free_port()) for _ in range(count)]
        for me, port in them:
            folder = stack.enter_context(programs.own_folder("sentinel"))
            lines = [
                f"sentinel myid {me}",
                f"sentinel monitor {name} 127.0.0.1 {master.port} {count // 2 + 1}",
                f"sentinel down-after-milliseconds {name} {_DOWN_AFTER_MS}",
                f"sentinel failover-timeout {name} {_DOWN_AFTER_MS}",
            ]
            lines += [
                f"sentinel known-sentinel {name} 127.0.0.1 {other_port} {other}"
                for other, other_port in them
                if other != me
            ]
            sentinel = RedisServer(folder, lines, port=port, kind="sentinel")
            stack.callback(sentinel.close)
            sentinel.start()
            made.append(sentinel)
        for sentinel in made:
            sentinel.wait(lambda client: _knows(client, name, count - 1))
        yield made


def fail_over(
    watchers: Sequence[RedisServer], replica: RedisServer, name: str = "keyfront"
) -> None:
    """Have sentinels put a replica in the place of its master; return when all of them name it.

    The first one is told to, whether or not the master answers. By themselves they would have to be
    short of patience, and take none whose own link to the master has been down for ten times that
    longer than the master by their count: never again one that had noticed it some seconds before
    them, on a busy machine. What it is told it may give up, while the replica is silent.
    """
    first = watchers[0]

    def done(client: Any) -> bool:
        facts = _facts(client, name)
        if int(facts["port"]) == replica.port:
            return True
        if "failover_in_progress" not in facts["flags"]:
            # Nobody else begins one: it cannot have ended since.
            with contextlib.suppress(redis.ResponseError):  # it knows of no good replica yet
                client.execute_command("SENTINEL", "FAILOVER", name)
        return False

    first.wait(done)
    for watcher in watchers:
        watcher.wait(lambda client: int(_facts(client, name)["port"]) == replica.port)


def _knows(client: Any, name: str, others: int) -> bool:
    facts = _facts(client, name)
    return int(facts["num-other-sentinels"]) == others and int(facts["num-slaves"]) > 0


def _facts(client: Any, name: str) -> dict[str, Any]:
    said = client.execute_command("SENTINEL", "MASTER", name)
    return said if isinstance(said, dict) else dict(zip(said[::2], said[1::2], strict=True))
