"""Looks at key repositories: which keys there are, since when, and who may read them."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field

from .readers.files import Files


@dataclass(frozen=True)
class Key:
    """A key of a repository.

    :param digest: the beginning of its SHA-256, for comparing nodes; empty if it cannot be read
    """

    number: int
    mode: int
    changed: float
    digest: str


@dataclass
class KeyRepository:
    """A folder of keys.

    :param kind: ``fernet_tokens`` or ``credential``
    :param mode: the folder's permission bits; ``None`` if it cannot be looked at
    """

    kind: str
    path: str
    mode: int | None = None
    keys: list[Key] = field(default_factory=list)

    @property
    def digests(self) -> list[str]:
        """The digests of all keys in their order; empty if one cannot be read."""
        found = [key.digest for key in self.keys]
        return found if all(found) else []

    @property
    def primary(self) -> Key | None:
        """The key that encrypts: the one with the highest number."""
        staged = [key for key in self.keys if key.number]
        return max(staged, key=lambda key: key.number, default=None)


def look(files: Files, kind: str, path: str) -> KeyRepository | None:
    """Look at a repository; ``None`` if there is none."""
    real = files.resolved(path)
    try:
        found = KeyRepository(kind, path, stat.S_IMODE(real.stat().st_mode))
    except FileNotFoundError:
        return None
    except OSError as error:
        files.cannot(path, error)
        return None
    try:
        names = [name for name in os.listdir(real) if name.isdigit()]
    except OSError as error:
        files.cannot(path, error)
        return found
    for name in sorted(names, key=int):
        try:
            known = (real / name).stat()
        except OSError:
            continue
        digest = ""
        try:
            with (real / name).open("rb") as file:
                digest = hashlib.sha256(file.read(4096).strip()).hexdigest()[:16]
        except OSError as error:
            files.cannot(f"{path.rstrip('/')}/{name}", error)
        found.keys.append(Key(int(name), stat.S_IMODE(known.st_mode), known.st_mtime, digest))
    return found
