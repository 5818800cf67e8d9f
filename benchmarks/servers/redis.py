"""A Redis or Valkey: private, on loopback, nothing on disk, gone when the block ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keyfront.common import programs

from .ports import free_port, listening
from .processes import HOST, Process

# The last is the same program: what it does goes by the name it is called by. It is in a package
# that starts no service.
_NAMES = ("redis-server", "valkey-server", "redis-check-rdb")


def program() -> Path:
    """Return where the server's program is, to be called as ``redis-server``."""
    return Path(programs.system_program(_NAMES, "redis-tools")).resolve()


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run one until the block ends; gives its URL, with a password.

    :param folder: an existing one of this user only, for its files
    """
    link, config, log = folder / "redis-server", folder / "redis.conf", folder / "redis.log"
    link.symlink_to(program())
    port, password = free_port(), secrets.token_hex(16)
    lines = [f"bind {HOST}", f"port {port}", f"dir {folder}", f"requirepass {password}"]
    config.touch(mode=0o600)
    config.write_text("\n".join([*lines, 'save ""', "appendonly no", ""]))
    with Process("Redis", [str(link), str(config)], log=log) as process:
        process.wait_until(lambda: port in listening())
        yield f"redis://:{password}@{HOST}:{port}"
