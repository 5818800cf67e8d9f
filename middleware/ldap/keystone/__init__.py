"""Keystone's LDAP driver on the pool, and :data:`observers` of what it reads."""

from collections.abc import Callable
from typing import Any

#: The registry of what is called after each search of a driver of this process, with its
#: ``DriverPool`` and the server that answered, as ``Connection.source`` (``None``: not known).
observers: list[Callable[[Any, str | None], None]] = []

__all__ = ["changed_entries", "driver", "observers", "options"]
