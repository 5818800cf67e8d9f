"""What ``keyfront tokens stats`` and ``keyfront tokens flush`` do."""

from __future__ import annotations

import glob
import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from keyfront.errors import CoordinatorError, KeyfrontError, MissingPartError, OptionError

if TYPE_CHECKING:
    from keyfront.middleware.tokens.coordinator.local import SharedMemory
    from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis

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


class Cache(NamedTuple):
    """A token cache of this machine."""

    folder: Path
    #: Where its epochs are, if they are not in the folder.
    redis: Redis | None = None

    @property
    def where(self) -> str:
        """How it is named to the operator."""
        return f"{self.folder}, epochs in {self.redis.address}" if self.redis else f"{self.folder}"

    @property
    def coordinator(self) -> SharedMemory | Redis:
        """What keeps the epochs.

        :raises CoordinatorError: there are none
        """
        if self.redis is not None:
            return self.redis
        from keyfront.middleware.tokens.coordinator.local import NAME, SharedMemory

        if not (self.folder / NAME).exists():
            raise CoordinatorError(
                f"{self.folder}: there is no token cache; is the service running?"
            )
        return SharedMemory(self.folder, create=False)


def cache(*, path: Path | None, config_file: Path | None) -> Cache:
    """Return the cache that is meant.

    :param path: the folder itself
    :param config_file: Keystone's configuration, which says where it is
    :raises OptionError: neither is given and there are several caches on this machine
    :raises CoordinatorError: there is none, or the configuration cannot be read
    """
    if path is not None:
        return Cache(path)
    if config_file is not None:
        return _configured(config_file)
    from keyfront.middleware.tokens.coordinator.local import PLACE

    names = [*glob.glob("/dev/shm/keyfront-*"), *glob.glob(f"{PLACE}/tokens-*")]
    found = [Cache(Path(name)) for name in names if _is_cache(Path(name))]
    served = _served()
    if served is not None and served.folder not in [one.folder for one in found]:
        found.append(served)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CoordinatorError(
            f"no token cache in {PLACE} or /dev/shm, and none of keyfront serve; is the service "
            "running? If "
            "its option path names another folder, give it with --path or --config-file"
        )
    folders = ", ".join(sorted(str(one.folder) for one in found))
    raise OptionError("--path", "(not given)", f"one of {folders}")


def _served() -> Cache | None:
    """Return the cache of ``keyfront serve`` in its usual state folder, if there is one."""
    from keyfront.gateway.serve.state import State, default_path

    try:
        config = State(default_path()).config
        served = _configured(config) if config.is_file() else None
    except (KeyfrontError, OSError):
        return None  # no home, or another user's: then there is none of this user
    return served if served is not None and served.folder.is_dir() else None


def _is_cache(folder: Path) -> bool:
    """Whether the folder is a cache's, and not that of another part; another user's may be."""
    from keyfront.middleware.tokens.coordinator.local import NAME

    try:
        return stat.S_ISREG((folder / NAME).stat().st_mode)
    except PermissionError:
        from keyfront.gateway.heartbeat.counters import PREFIX

        return not folder.name.startswith(PREFIX)
    except OSError:
        return False


def _configured(config_file: Path) -> Cache:
    if not config_file.is_file():
        raise OptionError("--config-file", config_file, "a keystone.conf that exists")
    try:
        from oslo_config import cfg
        from oslo_db import options as database
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"{error.name} is not installed; run keyfront from the environment of Keystone"
        ) from None

    from keyfront.middleware.tokens import options
    from keyfront.middleware.tokens.coordinator.factory import coordinator_of
    from keyfront.middleware.tokens.invalidation.change_log import folder_of

    conf = cfg.ConfigOpts()
    database.set_defaults(conf)
    try:
        conf([], project="keystone", default_config_files=[str(config_file)])
        return Cache(folder_of(conf), coordinator_of(options.token_cache(conf), True))
    except cfg.ConfigFilesPermissionDeniedError:
        raise CoordinatorError(f"{config_file}: Permission denied") from None
    except cfg.Error as error:
        raise CoordinatorError(f"{config_file}: {error}") from None


def stats(cache: Cache, out: TextIO, *, as_json: bool = False) -> int:
    """Print what the cache did.

    :raises CoordinatorError: there is no cache in the folder
    """
    from keyfront.middleware.tokens import node_cache as node

    counts = {**cache.coordinator.statistics(), **node.statistics(cache.folder)}
    if as_json:
        where = {"folder": str(cache.folder)}
        if cache.redis is not None:
            where["coordinator"] = str(cache.redis.address)
        out.write(json.dumps({**where, **counts}, indent=2) + "\n")
        return 0
    out.write(f"token cache in {cache.where}\n")
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


def flush(cache: Cache, out: TextIO) -> int:
    """Make every answer stale.

    :raises CoordinatorError: there is no cache in the folder
    """
    cache.coordinator.flush()
    out.write(f"flushed {cache.where}: every answer is now asked of Keystone anew\n")
    return 0
