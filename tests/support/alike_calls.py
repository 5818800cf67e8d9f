"""Calls of one function of Keystone with arguments that make one name where they are joined."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dogpile.cache.region import CacheRegion

# They are one when their texts are joined by blanks.
ALIKE = [
    ((None, "u"), ("None", "u")),
    ((True, "u"), ("True", "u")),
    (("a b", "c"), ("a", "b c")),
    (("a", None), ("a", "None")),
    (("None", "x"), ("('None',", "'x')")),
]


def computed(
    region: CacheRegion,
    request: Callable[[], AbstractContextManager[Any]],
    read: Callable[[], None],
    calls: tuple[tuple[Any, Any], ...],
) -> list[tuple[object, object]]:
    """Make each call twice, in turn, and look that it is answered with its own; returns those that
    were computed.

    :param request: begins a request of Keystone's
    :param read: reads in it what each value is made of
    """
    found = []

    class Manager:
        def list_role_assignments(self, role_id: object, user_id: object) -> object:
            read()
            found.append((role_id, user_id))
            return [role_id, user_id]

    function = Manager.list_role_assignments
    function.__module__ = "keystone.assignment.core"
    ask = region.cache_on_arguments()(function)
    for arguments in calls * 2:
        with request():
            assert ask(Manager(), *arguments) == list(arguments)
    return found
