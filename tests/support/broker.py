"""A real RabbitMQ for tests, that of the benchmarks; it takes little of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from keyfront.benchmarks.worlds import rabbitmq
from keyfront.benchmarks.worlds.certificates import Certificates
from keyfront.benchmarks.worlds.rabbitmq import Broker, Seen
from support.programs import or_skip

__all__ = ["Broker", "Seen", "broker"]


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
    world = rabbitmq.broker(folder, tls=tls, port=port, extra=extra, small=True)
    with or_skip(world) as running:
        yield running
