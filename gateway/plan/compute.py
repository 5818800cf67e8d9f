"""The plan: every number of a node that serves Keystone, computed from machine and workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from keyfront.common.machine import Machine

from .budgets import put_budgets
from .nginx_and_apache import put_nginx_and_apache
from .reasons import Conflict, Number, Numbers
from .timeouts import put_timeouts
from .workers import put_workers
from .workload import STANDARD, Profile, Workload

#: The groups of numbers, in the order in which an operator meets them.
GROUPS = (
    "uwsgi", "token_cache", "memory", "capacity", "timeout", "database", "ldap", "memcached",
    "front", "nginx", "apache", "mod_wsgi", "haproxy", "limits", "sysctl",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All numbers for one node, in the order in which they are printed.

    :param machine: the machine that they are for
    :param workload: the load that they are for
    :param profile: the share of the machine that Keystone may take
    :param numbers: the numbers by name, ``uwsgi.processes`` for example
    :param conflicts: the demands that cannot be met; the numbers are then those wanted
    """

    machine: Machine
    workload: Workload
    profile: Profile
    numbers: Mapping[str, Number]
    conflicts: tuple[Conflict, ...]

    def __getitem__(self, name: str) -> Number:
        """Return a number by its name.

        :raises KeyError: there is no such number
        """
        return self.numbers[name]


def plan(
    machine: Machine, workload: Workload | None = None, profile: Profile = STANDARD
) -> Plan:
    """Compute the plan; the same input gives the same plan.

    :param machine: the machine's processors, memory and limits
    :param workload: the load as far as it is known; by default nothing is
    :param profile: the share of the machine that Keystone may take
    """
    workload = workload or Workload()
    numbers = Numbers()
    put_timeouts(numbers, workload)
    put_workers(numbers, machine, workload, profile)
    put_budgets(numbers, workload)
    put_nginx_and_apache(numbers, machine, workload, profile)
    return Plan(
        machine=machine,
        workload=workload,
        profile=profile,
        numbers=_in_order(numbers.by_name),
        conflicts=numbers.conflicts,
    )


def _in_order(numbers: Mapping[str, Number]) -> Mapping[str, Number]:
    """Return the numbers group by group, each group in the order in which it was computed."""
    names = sorted(numbers, key=lambda name: GROUPS.index(name.partition(".")[0]))
    return MappingProxyType({name: numbers[name] for name in names})
