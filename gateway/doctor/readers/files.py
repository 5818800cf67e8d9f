"""The files of a machine, or of another root: read once, with what could not be read noted."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..settings import Malformed, Place

# Bytes; configuration is smaller, and a log or a device is not read by mistake.
_LARGEST = 8 << 20
_LINKS = 32
_WILD = frozenset("*?[")
_SHELLS = ("/bin/sh", "/usr/bin/sh", "/bin/bash", "/bin/busybox")


@dataclass(frozen=True)
class Unread:
    """Something that could not be looked at, and why."""

    what: str
    why: str
    #: True if another user may look at it.
    denied: bool = False


@dataclass
class Files:
    """The files below a root.

    :param root: ``/``, or a folder that holds another machine's or a container's files
    """

    root: Path = Path("/")
    unread: list[Unread] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)
    #: The paths that were read.
    read: list[str] = field(default_factory=list)
    #: The paths that are named and lie in folders that these files leave out.
    apart: dict[str, None] = field(default_factory=dict)

    def real(self, path: str | Path) -> Path:
        """Return the path here of a path of the machine."""
        return self.root / str(path).lstrip("/")

    def exists(self, path: str | Path) -> bool:
        """Return whether there is something; what cannot be looked at is taken to be there."""
        try:
            self.resolved(path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    def lacks(self, path: str | Path) -> bool:
        """Return whether something that ought to be there is not.

        A folder with a part of a machine's files, as a support's archive is one, tells nothing of
        those that lie in folders which it leaves out.
        """
        if self.exists(path):
            return False
        if self._whole or self.exists(Path(path).parent):
            return True
        self.apart.setdefault(str(path))
        return False

    @property
    def _whole(self) -> bool:
        """True if these are all of a machine's files: such have a shell."""
        return self.root == Path("/") or any(self.exists(x) for x in _SHELLS)

    def resolved(self, path: str | Path) -> Path:
        """Return the end of a path, its links followed within the root."""
        # No file has such a name, and no call of the system takes it.
        path = str(path).replace("\0", "?")
        if self.root == Path("/"):
            return self.real(path)
        # Text, of which a report resolves some hundred paths: to build each as a path takes longer.
        root, real = str(self.root), list[str]()
        left = path.split("/")[::-1]
        links = 0
        while left:
            part = left.pop()
            if part == "..":
                del real[-1:]
            elif part not in ("", "."):
                target = _target("/".join((root, *real, part))) if links < _LINKS else ""
                if not target:
                    real.append(part)
                    continue
                links += 1
                if target.startswith("/"):
                    real.clear()
                left += target.split("/")[::-1]
        return Path(root, *real)

    def _listed(self, base: Path, real: Path) -> bool:
        """Return whether this is a folder; one whose files another user may list is noted."""
        try:
            os.scandir(real).close()
        except PermissionError as error:
            self.cannot(str(base), error)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def glob(self, *patterns: str) -> list[str]:
        """Return the sorted paths that fit, pattern by pattern; none twice."""
        found: dict[str, None] = {}
        for pattern in patterns:
            parts = Path(pattern.replace("\0", "?")).parts
            plain = next((x for x, part in enumerate(parts) if _WILD & set(part)), len(parts))
            base, rest = Path(*parts[:plain]), parts[plain:]
            if not rest:
                if self.exists(base):
                    found[str(base)] = None
                continue
            real = self.resolved(base)
            if not self._listed(base, real):
                continue
            try:
                for path in sorted(real.glob("/".join(rest))):
                    found[str(base / path.relative_to(real))] = None
            except (OSError, ValueError, NotImplementedError):
                continue
        return list(found)

    def text(self, path: str | Path, *, wanted: bool = True) -> str | None:
        """Return the text of a file; ``None`` if it cannot be read, which is noted if
        ``wanted``."""
        name = str(path)
        try:
            real = self.resolved(path)
            if not real.is_file():
                if wanted and real.exists():
                    self.unread.append(Unread(name, "it is no plain file"))
                elif wanted:
                    self.unread.append(Unread(name, "it is not there"))
                return None
            with real.open("rb") as file:
                # In pieces: /proc takes no large ones.
                pieces = iter(lambda: file.read(1 << 16), b"")
                content = b"".join(itertools.islice(pieces, (_LARGEST >> 16) + 1))
        except OSError as error:
            self.cannot(name, error)
            return None
        if len(content) > _LARGEST:
            self.unread.append(Unread(name, f"it is larger than {_LARGEST >> 20} MiB"))
            return None
        if name not in self.read:
            self.read.append(name)
        if content.startswith(b"\xef\xbb\xbf"):
            self.broken(Place(name, 1), "no byte order mark: it becomes a part of the first line")
            content = content[3:]
        return content.decode("utf-8", errors="replace")

    def cannot(self, what: str, error: OSError) -> None:
        """Note that something cannot be looked at."""
        why = (error.strerror or str(error)).lower()
        if isinstance(error, PermissionError):
            why += ": run this as root, or as the service's user"
        note = Unread(what, why, isinstance(error, PermissionError))
        if note not in self.unread:
            self.unread.append(note)

    def broken(self, place: Place, expected: str) -> None:
        """Note that a file is not what it should be."""
        self.malformed.append(Malformed(place, expected))


def _target(path: str) -> str:
    """Return the target of a link; empty if it is none, or may not be looked at."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
