"""A secret of this node, for what its workers share; it is never sent anywhere."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from keyfront.errors import CoordinatorError

from .local import check_folder

NAME = "secret"
_SIZE = 32


def node_secret(folder: Path) -> bytes:
    """Return the 32 random bytes in ``folder``, made with mode 0600 by the first who asks.

    :raises CoordinatorError: the folder or the file cannot be used
    """
    check_folder(folder, make=True)
    path = folder / NAME
    try:
        with suppress(FileNotFoundError):
            return _read(path)
        new = folder / f"{NAME}.{secrets.token_hex(8)}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(_SIZE))
        finally:
            os.close(fd)
        try:
            with suppress(FileExistsError):  # another was first
                os.link(new, path)
        finally:
            new.unlink()
        return _read(path)
    except OSError as error:
        raise CoordinatorError(f"{path}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise CoordinatorError(f"{path}: others may read it; remove it, then restart")
        secret = os.read(fd, _SIZE + 1)
    finally:
        os.close(fd)
    if len(secret) != _SIZE:
        raise CoordinatorError(f"{path}: is not {_SIZE} bytes long; remove it, then restart")
    return secret
