"""Counts of the LDAP pools of all processes of a node, in a mapped file of its folder.

A pool counts for itself, under locks that it needs anyway. Each process with a pool copies the
numbers of all its pools to its row once a second, in a thread that does nothing else, so that no
login is slower for it. Where ``KEYFRONT_NODE`` names no folder, there is no thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common.counters import Layout, NodeCounters, node_folder, owners
from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError, KeyfrontError

if TYPE_CHECKING:
    from .directory import LDAPPool

LOG = logging.getLogger(__name__)

_KINDS = ("search", "auth")
#: Present numbers, over all pools, by the names of :meth:`.directory.LDAPPool.get_stats`.
PRESENT = (
    *("servers_up", "servers_down"),
    *(f"{kind}_{name}" for kind in _KINDS for name in ("size", "idle", "lent", "waiting")),
    *(f"{kind}_max_size" for kind in _KINDS),
)
#: Counts, over all pools, closed ones included.
SUMS = (
    *("searches", "searches_retried", "searches_failed"),
    *("logins", "logins_accepted", "binds", "credentials_refused", "logins_failed"),
    *(
        f"{kind}_{name}"
        for kind in _KINDS
        for name in (
            *("requests", "requests_queued", "requests_wait_ms", "requests_errors", "opened"),
            *("open_errors", "closed", "lost", "expired", "idle_evicted", "usage_ms"),
        )
    ),
    # Last, so that the others keep their places in a file that another version has made.
    *("lookups", "lookups_failed"),
)
_NAMES = (*PRESENT, *SUMS)
_LAYOUT = Layout(64, present=frozenset(range(1, 1 + len(PRESENT))))
_FILE = "ldap"
_SECONDS = 1.0


class Publisher:
    """Copies the numbers of this process's pools to the node's file.

    :param folder: the node's folder
    :raises KeyfrontError: the file cannot be made
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._counters = NodeCounters(folder / _FILE, FileLock(folder / f"{_FILE}.lock"), _LAYOUT)
        self._last: weakref.WeakKeyDictionary[LDAPPool, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._pid = os.getpid()

    def publish(self, pools: list[LDAPPool]) -> None:
        """Copy the present numbers of the pools to this process's row."""
        if self._pid != os.getpid():  # the parent's pools did not count here
            self._pid = os.getpid()
            self._last.clear()
            self._counters.claim()
        now = dict.fromkeys(PRESENT, 0)
        row = self._counters.row
        for pool in pools:
            found = {name: int(value) for name, value in pool.get_stats().items()}
            for name in PRESENT:
                now[name] += found[name]
            before = self._last.get(pool, {})
            for place, name in enumerate(SUMS, 1 + len(PRESENT)):
                # The counts may have been popped.
                grown = found[name] - before.get(name, 0)
                row[place] += grown if grown >= 0 else found[name]
            self._last[pool] = found
        for place, name in enumerate(PRESENT, 1):
            row[place] = now[name]


class _Thread:
    """The one thread of this process that publishes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0

    def start(self) -> None:
        """Start the thread, unless it runs here or ``KEYFRONT_NODE`` names no folder."""
        pid = os.getpid()
        if self._pid == pid:
            return
        try:
            folder = node_folder()
        except KeyfrontError:
            folder = None  # the entrypoint has logged it
        with self._lock:
            if self._pid == pid:
                return
            self._pid = pid
        if folder is not None:
            thread = threading.Thread(
                target=_run, args=(folder,), name="keyfront-ldap-statistics", daemon=True
            )
            thread.start()

    def after_fork(self) -> None:
        """Start without a thread: the parent's does not run here, and its lock may be held."""
        self._lock = threading.Lock()


thread = _Thread()


def _run(folder: Path) -> None:
    from .directory import open_pools

    try:
        publisher = Publisher(folder)
    except (OSError, CoordinatorError) as error:
        LOG.warning("KEYFRONT_NODE = %s: LDAP pools are not counted there: %s", folder, error)
        return
    pid = os.getpid()
    while os.getpid() == pid:
        try:
            publisher.publish(open_pools())
        except Exception:
            LOG.exception("the statistics of LDAP pools cannot be published")
            return
        time.sleep(_SECONDS)


def is_in_use(folder: Path) -> bool:
    """Return whether any process of a node has, or had, an LDAP pool."""
    return (folder / _FILE).exists()


def read(folder: Path) -> Mapping[str, int]:
    """Return the sums over all processes of a node by name, and the living ones as ``processes``.

    :param folder: the node's folder
    :returns: the numbers of :data:`PRESENT` of living processes, and of :data:`SUMS` of all
    :raises CoordinatorError: no process has an LDAP pool, or the file is not readable
    """
    rows = _LAYOUT.rows_of(folder / _FILE)
    living = set(owners(rows))
    found = {"processes": len(living)}
    for place, name in enumerate(_NAMES, 1):
        counted = [row for row in rows if name in SUMS or row[0] in living]
        found[name] = sum(row[place] for row in counted)
    return found


os.register_at_fork(after_in_child=thread.after_fork)
