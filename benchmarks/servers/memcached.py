"""A memcached: empty, on loopback or at a socket, gone when the block ends."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keyfront.common import programs

from .processes import HOST, Process


@dataclass(frozen=True)
class Memcached:
    """A running memcached."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """``HOST:PORT``, as oslo.cache's ``memcache_servers`` wants it."""
        return f"{self.host}:{self.port}"


@contextmanager
def memcached() -> Iterator[Memcached]:
    """Run a memcached with 64 MB at a port of loopback until the block ends."""
    with tempfile.TemporaryDirectory(prefix="keyfront-memcached-") as folder:
        ports = Path(folder, "ports")
        # it takes a free port itself and, listening, moves this file in place
        with _process("-l", HOST, "-p", "-1", "-U", "0", MEMCACHED_PORT_FILENAME=ports) as process:
            process.wait_until(ports.exists)
            line = next(x for x in ports.read_text().splitlines() if x.startswith("TCP"))
            yield Memcached(HOST, int(line.rpartition(":")[2]))


@contextmanager
def memcached_at(path: Path) -> Iterator[str]:
    """Run a memcached at a Unix socket until the block ends; gives ``unix:PATH``."""
    with _process("-s", str(path)) as process:
        process.wait_until(path.exists)
        yield f"unix:{path}"


def _process(*options: str, **environment: Path) -> Process:
    # without a user it refuses to run as root
    user = ["-u", pwd.getpwuid(0).pw_name] if os.geteuid() == 0 else []
    names = {name: str(value) for name, value in environment.items()}
    return Process("memcached", [program(), "-m", "64", *user, *options], environment=names)


def program() -> str:
    """Return where memcached is."""
    return programs.system_program(("memcached",), "memcached")
