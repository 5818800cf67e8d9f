"""What ``keyfront tokens stats`` and ``keyfront tokens flush`` do."""

from __future__ import annotations

import glob
import json
import stat
from pathlib import Path
from typing import TextIO

from keyfront.errors import CoordinatorError, KeyfrontError, MissingPartError, OptionError

#: What is printed, in this order: name, label, meaning.
_LINES = (
    ("hits", "hits", "answered from a worker's own memory"),
    ("node_hits", "node hits", "answered from what the workers share"),
    ("misses", "misses", "asked of Keystone"),
    ("waits", "waits", "waited for another request that asked the same"),
    ("not_kept", "not kept", "misses whose answer was not kept"),
    ("bypassed", "bypassed", "not to be answered from a cache"),
    ("changes", "changes", "committed changes that made answers stale"),
    ("changes_under_way", "under way", "changes being committed now"),
    ("changes_recovered", "recovered", "changes completed for writers that died"),
    ("flushes", "flushes", "keyfront tokens flush"),
    ("processes", "processes", "that share it, the master included"),
)


def folder(*, path: Path | None, config_file: Path | None) -> Path:
    """Return the folder of the cache that is meant.

    :param path: the folder itself
    :param config_file: Keystone's configuration, which says where it is
    :raises OptionError: neither is given and there are several caches on this machine
    :raises CoordinatorError: there is none, or the configuration cannot be read
    """
    if path is not None:
        return path
    if config_file is not None:
        return _configured(config_file)
    found = [Path(name) for name in glob.glob("/dev/shm/keyfront-*") if _is_cache(Path(name))]
    found += [one for one in _served() if one not in found]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CoordinatorError(
            "no token cache in /dev/shm, and none of keyfront serve; is the service running? If "
            "its option path names another folder, give it with --path or --config-file"
        )
    names = ", ".join(sorted(map(str, found)))
    raise OptionError("--path", "(not given)", f"one of {names}")


def _served() -> list[Path]:
    """Return the cache of ``keyfront serve`` in its usual state folder, if there is one."""
    from keyfront.gateway.serve.state import State, default_path

    try:
        config = State(default_path()).config
        served = _configured(config) if config.is_file() else None
    except (KeyfrontError, OSError):
        return []  # no home, or another user's: then there is none of this user
    return [served] if served is not None and served.is_dir() else []


def _is_cache(folder: Path) -> bool:
    """Whether the folder is a cache's, and not that of another part; another user's may be."""
    from keyfront.middleware.tokens.coordinators.shared_memory import NAME

    try:
        return stat.S_ISREG((folder / NAME).stat().st_mode)
    except PermissionError:
        from keyfront.gateway.heartbeat.counts import PREFIX

        return not folder.name.startswith(PREFIX)
    except OSError:
        return False


def _configured(config_file: Path) -> Path:
    if not config_file.is_file():
        raise OptionError("--config-file", config_file, "a keystone.conf that exists")
    try:
        from oslo_config import cfg
        from oslo_db import options as database
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"{error.name} is not installed; run keyfront from the environment of Keystone"
        ) from None

    from keyfront.middleware.tokens.changes import folder_of

    conf = cfg.ConfigOpts()
    database.set_defaults(conf)
    try:
        conf([], project="keystone", default_config_files=[str(config_file)])
        return folder_of(conf)
    except cfg.ConfigFilesPermissionDeniedError:
        raise CoordinatorError(f"{config_file}: Permission denied") from None
    except cfg.Error as error:
        raise CoordinatorError(f"{config_file}: {error}") from None


def _check(folder: Path) -> None:
    from keyfront.middleware.tokens.coordinators.shared_memory import NAME

    if not (folder / NAME).exists():
        raise CoordinatorError(f"{folder}: there is no token cache; is the service running?")


def stats(folder: Path, out: TextIO, *, as_json: bool = False) -> int:
    """Print what the cache did.

    :raises CoordinatorError: there is no cache in the folder
    """
    from keyfront.middleware.tokens import node
    from keyfront.middleware.tokens.coordinators.shared_memory import SharedMemory

    _check(folder)
    counts = {**SharedMemory(folder, create=False).statistics(), **node.statistics(folder)}
    if as_json:
        out.write(json.dumps({"folder": str(folder), **counts}, indent=2) + "\n")
        return 0
    out.write(f"token cache in {folder}\n")
    for name, label, meaning in _LINES:
        out.write(f"{label:<12}{counts[name]:>14}  {meaning}\n")
    for kind in ("answers", "refusals"):
        taken, limit = counts[f"{kind}_bytes"] / 2**20, counts[f"{kind}_bytes_limit"] / 2**20
        out.write(f"{kind:<12}{taken:>10.1f} MiB  of {limit:.0f} MiB that the workers share\n")
    hits = counts["hits"] + counts["node_hits"]
    asked = hits + counts["misses"]
    if asked:
        out.write(f"{'hit ratio':<12}{100 * hits / asked:>12.2f} %  of what may be cached\n")
    return 0


def flush(folder: Path, out: TextIO) -> int:
    """Make every answer stale.

    :raises CoordinatorError: there is no cache in the folder
    """
    from keyfront.middleware.tokens.coordinators.shared_memory import SharedMemory

    _check(folder)
    SharedMemory(folder, create=False).flush()
    out.write(f"flushed {folder}: every answer is now asked of Keystone anew\n")
    return 0
