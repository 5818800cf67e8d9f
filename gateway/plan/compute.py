"""The plan: every number of a node that serves Keystone, computed from machine and workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from keyfront.common.machine import Machine

from .budgets import put_budgets
from .fronts import put_fronts
from .numbers import Conflict, Number, Sheet
from .profile import STANDARD, Profile
from .timeouts import put_timeouts
from .workers import put_workers
from .workload import Workload

#: What the numbers belong to, in the order in which an operator meets it.
GROUPS = (
    "uwsgi", "token_cache", "memory", "capacity", "timeout", "database", "ldap", "memcached",
    "front", "nginx", "apache", "mod_wsgi", "haproxy", "limits", "sysctl",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All numbers for one node, in the order in which they are printed.

    :param conflicts: what cannot be met; the numbers are then what was wanted
    """

    machine: Machine
    workload: Workload
    profile: Profile
    numbers: Mapping[str, Number]
    conflicts: tuple[Conflict, ...]

    def __getitem__(self, name: str) -> Number:
        """:raises KeyError: there is no such number"""
        return self.numbers[name]


def plan(
    machine: Machine, workload: Workload | None = None, profile: Profile = STANDARD
) -> Plan:
    """Compute the plan; the same input gives the same plan.

    :param workload: what is known of it; without, nothing is
    """
    workload = workload or Workload()
    sheet = Sheet()
    put_timeouts(sheet, workload)
    put_workers(sheet, machine, workload, profile)
    put_budgets(sheet, workload)
    put_fronts(sheet, machine, workload, profile)
    return Plan(
        machine=machine,
        workload=workload,
        profile=profile,
        numbers=_in_order(sheet.numbers),
        conflicts=sheet.conflicts,
    )


def _in_order(numbers: Mapping[str, Number]) -> Mapping[str, Number]:
    """One group after the other, each in the order in which it was computed."""
    names = sorted(numbers, key=lambda name: GROUPS.index(name.partition(".")[0]))
    return MappingProxyType({name: numbers[name] for name in names})
