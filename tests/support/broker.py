"""A real RabbitMQ for tests, that of the benchmarks, and what it is told and asked.

It takes little of the machine. A broker may be shared: each count takes a part of the name of a
connection to count only those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from keyfront.benchmarks import proc
from keyfront.benchmarks.servers import rabbitmq
from keyfront.benchmarks.servers.ports import free_port
from keyfront.benchmarks.servers.rabbitmq import Seen, connections_in
from support.certificates import Certificates
from support.programs import or_skip

__all__ = ["Broker", "Seen", "broker"]

_TLS_SETTINGS = """
listeners.ssl.1 = 127.0.0.1:{port}
num_acceptors.ssl = 2
ssl_options.cacertfile = {ca}
ssl_options.certfile = {pair.certificate}
ssl_options.keyfile = {pair.key}
ssl_options.verify = verify_none
ssl_options.fail_if_no_peer_cert = false
"""
_MEMORY_ALARM = "{resource_limit, memory, node()}"
# What it calls the connection exceptions of AMQP 0-9-1 that a damaged or misplaced frame causes.
_DAMAGE = "frame_error|syntax_error|command_invalid|channel_error|unexpected_frame|not_implemented"


class Broker(rabbitmq.Broker):
    """That of the benchmarks, with TLS if wanted.

    :ivar tls_port: where it shows :attr:`certificates`
    """

    tls_port: int | None = None
    certificates: Certificates | None = None

    # Where it is

    def url(
        self, user: str | None = None, *, tls: bool = False, vhost: str = "/",
        port: int | None = None,
    ) -> str:
        """Return what oslo.messaging's ``transport_url`` takes.

        :param port: the port of a proxy in front of it, instead of its own
        """
        return self._url("rabbit", user, tls, vhost, port)

    def amqp_url(
        self, user: str | None = None, *, tls: bool = False, vhost: str = "/",
        port: int | None = None,
    ) -> str:
        """Return what kombu takes; with `tls` its ``ssl`` argument is needed, too."""
        return self._url("amqp", user, tls, vhost.replace("/", "%2F"), port)

    def _url(
        self, scheme: str, user: str | None, tls: bool, vhost: str, port: int | None
    ) -> str:
        assert self.tls_port or not tls, "made without tls="
        own = self.tls_port if tls else self.port
        who = f"{user or self.user}:{self.password}"
        return f"{scheme}://{who}@{self.host}:{port or own}/{vhost}"

    # What it does

    def block(self) -> None:
        """Raise its memory alarm: who publishes gets connection.blocked, and is read no more."""
        self.ask(f"rabbit_alarm:set_alarm({{{_MEMORY_ALARM}, []}})")
        assert "memory" in self.ask("rabbit_alarm:get_alarms()")

    def unblock(self) -> None:
        """Clear its memory alarm: who was blocked gets connection.unblocked."""
        self.ask(f"rabbit_alarm:clear_alarm({_MEMORY_ALARM})")
        assert "memory" not in self.ask("rabbit_alarm:get_alarms()")

    def add_vhost(self, name: str) -> None:
        """Make a virtual host that guest may use."""
        host, user = f'<<"{name}">>', f'<<"{self.user}">>'
        self.ask(f"rabbit_vhost:add({host}, {user})")
        every = '<<".*">>'
        allowed = f"{user}, {host}, {every}, {every}, {every}, {user}"
        done = self.ask(f"rabbit_auth_backend_internal:set_permissions({allowed})")
        assert done == "ok", done

    # What clients did, in all its lives

    def seen(self, name: str = "") -> list[Seen]:
        """Return all connections ever made to it, in order, whose name has `name` in it."""
        return [x for x in connections_in(self.log_text()) if name in x.name]

    def accepted(self, name: str = "") -> int:
        """Return how many connections were made."""
        return len(self.seen(name))

    def missed(self, name: str = "") -> int:
        """Return how many it closed because no heartbeat came."""
        return sum(x.says("missed heartbeats from client") for x in self.seen(name))

    def closed_unexpectedly(self, name: str = "") -> int:
        """Return how many clients hung up without AMQP's connection.close."""
        return sum(x.says("client unexpectedly closed TCP connection") for x in self.seen(name))

    def frame_errors(self, name: str = "") -> int:
        """Return the number of connections closed for a broken or misplaced frame of the client."""
        damage = f"(connection|channel) exception ({_DAMAGE})|bad_header|invalid_frame"
        return sum(x.says(damage) for x in self.seen(name))

    def connections(self, name: str = "") -> list[int]:
        """Return the clients' ports of connections open now, by the kernel; also if paused."""
        open_, here = proc.ESTABLISHED, (self.port, self.tls_port)
        found = {x.peer for x in proc.sockets() if x.port in here and x.state == open_}
        if name:
            named = {x.port: x.name for x in connections_in(self.log_text())}
            found = {x for x in found if name in named.get(x, "")}
        return sorted(found)

    def wait_for(self, condition: Callable[[Broker], bool], what: str) -> None:
        """Wait until it is so: ``wait_for(lambda b: b.missed() == 1, "one is missed")``."""
        rabbitmq.wait_until(lambda: condition(self), what)


@contextlib.contextmanager
def broker(
    folder: Path, *, tls: Certificates | None = None, port: int = 0, extra: str = ""
) -> Iterator[Broker]:
    """Run a RabbitMQ until the block ends; two seconds of CPU pass before it is ready.

    :param folder: where its log is left, ``rabbitmq-PORT.log``
    :param tls: what it shows at a second port; it asks clients for no certificate
    :param port: to listen at, if it matters
    :param extra: lines for rabbitmq.conf (``heartbeat = 10``)
    """
    tls_port = free_port() if tls else None
    if tls:
        extra += _TLS_SETTINGS.format(port=tls_port, ca=tls.ca_file, pair=tls.server)
    with or_skip(rabbitmq.running(Broker, folder, port=port, extra=extra, small=True)) as running:
        running.tls_port, running.certificates = tls_port, tls
        yield running
