"""Files that answers depend on besides the database: keys, policies, configuration.

Keystone reads keys and policies anew by itself. Answers that were made with the old ones must
become stale, too: else a token stays refused whose key had not arrived yet, and an operation that a
policy now forbids stays allowed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


class WatchedFiles:
    """Notices, once for all workers of a node, that files have changed.

    :param paths: files, and folders whose files count
    :param folder: the folder that the workers share. The state last seen is noted there for each
        set of paths, and for each container, which may have other files by the same names
    """

    def __init__(self, paths: Iterable[Path], folder: Path) -> None:
        self._paths = sorted(set(paths))
        container = ""
        with suppress(OSError):
            container = os.readlink("/proc/self/ns/mnt")
        what = repr((container, list(map(str, self._paths))))
        digest = hashlib.blake2b(what.encode("utf-8", "surrogateescape"), digest_size=6)
        self._note = folder / f"watched-{digest.hexdigest()}"

    def changed(self) -> bytes | None:
        """Return the state of the files, to be noted, if it is another than the noted one.

        Where nothing was noted, no worker of this node has answered anything before.

        :returns: the result of :meth:`look`; ``None`` if nothing has changed
        :raises OSError: the note cannot be read or written
        """
        seen = self.look()
        try:
            return None if self._note.read_bytes() == seen else seen
        except FileNotFoundError:
            self.note(seen)
            return None

    def note(self, seen: bytes) -> None:
        """Note the state that :meth:`changed` returned.

        :raises OSError: the note cannot be written
        """
        new = self._note.with_name(f"{self._note.name}.{os.getpid()}.{threading.get_ident()}")
        new.write_bytes(seen)
        new.replace(self._note)

    def look(self) -> bytes:
        """Return a digest of the files' present state: device, inode, time of change and size."""
        found = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            for name, where in self._files(path):
                try:
                    stat = os.stat(where)
                except OSError as error:
                    seen: tuple[Any, ...] = (error.errno,)
                else:
                    seen = stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
                found.update(repr((str(path), name, seen)).encode("utf-8", "surrogateescape"))
        return found.digest()

    @staticmethod
    def _files(path: Path) -> list[tuple[str, Path]]:
        try:
            return [(name, path / name) for name in sorted(os.listdir(path))]
        except OSError:  # it is no folder
            return [("", path)]


def of_keystone(conf: Any) -> set[Path]:
    """Return the files and folders that a Keystone reads besides its database, or would read.

    oslo.config looks for a name in several folders. A file may come into each of them later, as
    does the first policy of a Keystone that runs.

    :param conf: Keystone's ``oslo.config`` configuration, loaded
    """
    files = [Path(name).absolute() for name in conf.config_file or ()]
    folders = [Path(name).absolute() for name in conf.config_dir or ()]
    own = {*files, *folders}
    # As ConfigOpts.find_file() says; and the present one, by which the others are opened.
    home, project = Path(os.path.expanduser("~")), conf.project or ""
    folders += [*(file.parent for file in files), home / f".{project}", home]
    folders = [path.absolute() for path in (*folders, Path("/etc", project), Path("/etc"), Path())]
    names: list[str | None] = []
    for group, option in _OPTIONS:
        # Not every release of Keystone has each.
        found = getattr(getattr(conf, group, None), option, None)
        names += found if isinstance(found, list) else [found]
    return {*own, *(folder / name for folder in folders for name in names if name)}


_OPTIONS = (
    ("fernet_tokens", "key_repository"),
    ("jwt_tokens", "jws_public_key_repository"),
    ("catalog", "template_file"),
    ("identity", "domain_config_dir"),
    ("oslo_policy", "policy_file"),
    ("oslo_policy", "policy_dirs"),
)
