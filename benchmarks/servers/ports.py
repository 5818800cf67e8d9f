"""Ports for servers that cannot take a free one from the kernel, or that must get theirs again.

They lie outside the range that the kernel gives to clients and to servers at port 0: from it a port
could be gone as soon as nobody listens there, even to a client that connects to itself. And each
process takes them from blocks of its own: no two that run at a time choose the same, however long
it takes until the one's server listens, or starts again.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from keyfront.errors import ServerError

from .. import proc

HOST = "127.0.0.1"
_LOWEST = 10000
_BLOCK = 100


def free_port(host: str = HOST) -> int:
    """Return a port that stays this process's own until it ends, and that nobody listens at.

    :raises ServerError: all are taken
    """
    with bind_stable(host) as bound:
        port: int = bound.getsockname()[1]
        return port


def bind_stable(host: str = HOST) -> socket.socket:
    """Return a socket that is bound to a port of its own, see :func:`free_port`.

    It does not listen: until it does, a server can listen there as well.

    :raises ServerError: all are taken
    :raises OSError: ``host`` is no address of this machine
    """
    while True:
        port = _next_port()
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        # as servers do: a port in TIME_WAIT is free
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            return bound
        except OSError as error:
            bound.close()
            # somebody who claims none
            if error.errno != errno.EADDRINUSE:
                raise


def listening() -> set[int]:
    """Return the ports of 127.0.0.1 that somebody listens at; no server sees this question."""
    here = "0100007F"
    found = proc.sockets()
    return {one.port for one in found if one.state == proc.LISTEN and one.address == here}


# The ports of this process: none is given twice.
_lock = threading.Lock()
_ports: Iterator[int] = iter(())


def _next_port() -> int:
    global _ports
    with _lock:
        port = next(_ports, None)
        if port is None:
            _ports = iter(_claim_block())
            port = next(_ports)
        return port


def _claim_block() -> range:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    low, high = map(int, text.split())
    blocks = [range(first, first + _BLOCK) for first in range(_LOWEST, 65536 - _BLOCK, _BLOCK)]
    # unless all are the kernel's
    stable = [x for x in blocks if x.stop <= low or x.start > high] or blocks
    # not the random that a test may have seeded
    for block in random.Random().sample(stable, len(stable)):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0keyfront-ports-{block.start}")
            except OSError:
                continue
            # the name is taken as long as this process has the descriptor
            claim.detach()
            return block
    raise ServerError(f"all ports above {_LOWEST} that are not the kernel's are taken")


def _begin_anew() -> None:
    """A child's ports are others than its parent's."""
    global _lock, _ports
    _lock, _ports = threading.Lock(), iter(())


os.register_at_fork(after_in_child=_begin_anew)
