"""Has stevedore list the entry points of all distributions in one pass.

Keystone finds its drivers by stevedore, which keeps the list in a file of its user's home folder.
Where it cannot, as for a service without a home folder that it may write to, or finds none for this
``sys.path`` and the times of the folders in it, each process that loads Keystone makes the list
anew, and stevedore (5.10) goes through all entry points once for each of their hundred groups.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from itertools import chain
from typing import Any

# All that the function goes by which is replaced. One that does anything else is left alone.
_GOES_BY = frozenset(
    {
        *("importlib", "metadata", "entry_points", "groups", "set", "select", "name", "value"),
        *("group", "add", "append", "sys", "executable", "prefix"),
    }
)


def list_at_once() -> None:
    """Have stevedore do so in this process; to be called before Keystone is imported.

    What is not installed is for Keystone to say.
    """
    try:
        cache: Any = importlib.import_module("stevedore._cache")
    except ImportError:
        return
    code = getattr(getattr(cache, "_build_cacheable_data", None), "__code__", None)
    # others have no quadratic loop, or something else to find
    if code is not None and "select" in code.co_names and _GOES_BY.issuperset(code.co_names):
        cache._build_cacheable_data = cacheable_data


def cacheable_data() -> dict[str, Any]:
    """Return what stevedore keeps: the entry points by their groups, none of them twice."""
    found: Any = importlib.metadata.entry_points()
    # before Python 3.12 they are by groups already
    every = chain.from_iterable(dict.values(found)) if isinstance(found, dict) else found
    groups: dict[str, dict[tuple[str, str, str], None]] = {}
    for each in every:
        groups.setdefault(each.group, {})[each.name, each.value, each.group] = None
    return {
        "groups": {name: list(members) for name, members in groups.items()},
        "sys.executable": sys.executable,
        "sys.prefix": sys.prefix,
        "path_values": [],
    }
