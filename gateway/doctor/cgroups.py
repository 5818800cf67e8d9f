"""Reads what a control group limits: version 2 and version 1, of a container and of processes.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .readers.files import Files
from .settings import Place

_ROOT = "/sys/fs/cgroup"
# Version 1 has no word for no limit but the largest number of pages.
_NONE = 1 << 60


def memory_limit(files: Files, processes: Iterable[int] = ()) -> tuple[int, Place] | None:
    """Return the smallest limit of memory that holds, in bytes, with the file that says it.

    In a container the root of what it sees is its own group. On a host the root has no limit, and
    processes are asked for theirs.

    :param processes: those whose groups, and all around them, are looked at
    :returns: ``None`` if there is no limit, or none can be seen
    """
    paths = [f"{_ROOT}/memory.max", f"{_ROOT}/memory/memory.limit_in_bytes"]
    for pid in processes:
        paths += _of_process(files, pid)
    limits = []
    for path in dict.fromkeys(paths):
        text = (files.text(path, wanted=False) or "").strip()
        if text.isdigit() and 0 < int(text) < _NONE:
            limits.append((int(text), Place(path)))
    return min(limits, default=None)


def _of_process(files: Files, pid: int) -> Iterator[str]:
    for line in (files.text(f"/proc/{pid}/cgroup", wanted=False) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            folder, name = _ROOT, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = f"{_ROOT}/memory", "memory.limit_in_bytes"
        else:
            continue
        while group not in ("", "/"):
            yield f"{folder}{group}/{name}"
            group = group.rpartition("/")[0]
