"""The plan of a node that serves Keystone: how large everything is, each number with its reason.

:func:`plan` computes it from a :class:`~keyfront.common.machine.Machine`, a :class:`Workload` and a
:class:`Profile`. :mod:`.measure` tries a plan and its neighbours on the application.
"""

from __future__ import annotations

from .compute import GROUPS, Plan, plan
from .reasons import Conflict, Number
from .workload import LARGE, PROFILES, SMALL, STANDARD, Profile, Workload

__all__ = [
    "GROUPS",
    "LARGE",
    "PROFILES",
    "SMALL",
    "STANDARD",
    "Conflict",
    "Number",
    "Plan",
    "Profile",
    "Workload",
    "costs",
    "measure",
    "plan",
    "workload",
]
