"""The options by which ``keyfront plan`` and ``keyfront render`` are told of machine and load."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from keyfront.common.machine import MAX_MEMORY, MIN_MEMORY, Machine, read
from keyfront.errors import OptionError
from keyfront.gateway.plan.costs import FIRST_SHARE
from keyfront.gateway.plan.workload import (
    DEFAULT_LATENCY,
    DEFAULT_PROFILE,
    MOST_PROCESSES,
    MOST_THREADS,
    PERCENT,
    PROFILES,
    Profile,
    Workload,
    profile_named,
)

_T = TypeVar("_T", int, float)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OPTIONS = (
    ("--cores", "N", "cores to plan for, 1 to 1024 (default: this machine's)"),
    ("--memory", "SIZE", "memory to plan for, e.g. 512M, 4G (default: this machine's)"),
    ("--logins", "RATE", "tokens issued per second, on all nodes together"),
    ("--validations", "RATE", "tokens validated per second, on all nodes together"),
    (
        "--first-validations",
        "PERCENT",
        "of them that the token cache asks Keystone about, 0 to 100 (default: "
        f"{100 * FIRST_SHARE:g}; 100 - hit ratio of keyfront tokens stats)",
    ),
    ("--database-connections", "N", "max_connections of the database"),
    ("--ldap-connections", "N", "connections that the directory allows Keystone"),
    ("--memcached-connections", "N", "connections that memcached allows (its -c)"),
    ("--nodes", "N", "machines that serve the same Keystone (default: 1)"),
    ("--processes", "N", "worker processes of a node (default: computed)"),
    ("--threads", "N", "threads of a worker process (default: computed)"),
    ("--login-processes", "N", "of the worker processes, those that take logins only (default: 0)"),
)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command; what they hold is read by the functions below."""
    group = parser.add_argument_group("machine and load")
    for option, metavar, text in _OPTIONS:
        group.add_argument(option, metavar=metavar, help=text)
    group.add_argument(
        "--latency",
        metavar="SECONDS",
        help="within which a request shall be answered, 0.1 to 300 (default: "
        f"{DEFAULT_LATENCY:g})",
    )
    group.add_argument(
        "--without-token-cache",
        action="store_true",
        help="plan for a Keystone without keyfront's token cache",
    )
    group.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="|".join(PROFILES),
        help="how much of the machine Keystone may take (default: %(default)s)",
    )


def machine(arguments: argparse.Namespace) -> Machine:
    """Return the machine to plan for: this one, as far as the options name no other.

    :raises OptionError: an option is no number, or out of range
    """
    cores, memory = arguments.cores, arguments.memory
    return read(
        cores=None if cores is None else _whole("--cores", cores, "a whole number, 1 to 1024"),
        memory=None if memory is None else _size("--memory", memory),
    )


def workload(arguments: argparse.Namespace) -> Workload:
    """Return the load that the options tell.

    :raises OptionError: an option is no number, or out of range
    """
    rate = "a number per second, 0 to 1000000"
    connections = "a whole number of connections, 1 to 1000000"
    seconds = "a number of seconds, 0.1 to 300"
    nodes, latency = arguments.nodes, arguments.latency
    first = _optional(_number, "--first-validations", arguments.first_validations, PERCENT)
    own = _optional(
        _whole, "--login-processes", arguments.login_processes,
        f"a whole number, 0 to {MOST_PROCESSES - 1}",
    )  # fmt: skip
    return Workload(
        logins=_optional(_number, "--logins", arguments.logins, rate),
        validations=_optional(_number, "--validations", arguments.validations, rate),
        first_validations=FIRST_SHARE if first is None else first / 100,
        database_connections=_optional(
            _whole, "--database-connections", arguments.database_connections, connections
        ),
        ldap_connections=_optional(
            _whole, "--ldap-connections", arguments.ldap_connections, connections
        ),
        memcached_connections=_optional(
            _whole, "--memcached-connections", arguments.memcached_connections, connections
        ),
        nodes=1 if nodes is None else _whole("--nodes", nodes, "a whole number, 1 to 1000"),
        latency=DEFAULT_LATENCY if latency is None else _number("--latency", latency, seconds),
        processes=_optional(
            _whole, "--processes", arguments.processes, f"a whole number, 1 to {MOST_PROCESSES}"
        ),
        threads=_optional(
            _whole, "--threads", arguments.threads, f"a whole number, 1 to {MOST_THREADS}"
        ),
        login_processes=0 if own is None else own,
        token_cache=not arguments.without_token_cache,
    )


def profile(arguments: argparse.Namespace) -> Profile:
    """Return the profile that the options name.

    :raises OptionError: there is no such profile
    """
    return profile_named(arguments.profile)


def given(arguments: argparse.Namespace) -> list[str]:
    """Return the options as they were given, for a command line that gives the same plan."""
    words: list[str] = []
    for option in (*(option for option, _, _ in _OPTIONS), "--latency"):
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value is not None:
            words += [option, value]
    if arguments.without_token_cache:
        words.append("--without-token-cache")
    if arguments.profile != DEFAULT_PROFILE:
        words += ["--profile", arguments.profile]
    return words


def _optional(
    reads: Callable[[str, str, str], _T], option: str, text: str | None, allowed: str
) -> _T | None:
    return None if text is None else reads(option, text, allowed)


def _whole(option: str, text: str, allowed: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise OptionError(option, text, allowed)
    return int(text)


def _number(option: str, text: str, allowed: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?|\.[0-9]{1,12}", text):
        raise OptionError(option, text, allowed)
    return float(text)


def _size(option: str, text: str) -> int:
    """Return the bytes that ``512M``, ``4G`` or ``1.5GiB`` name."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGT])(?:i?B)?", text, re.IGNORECASE)
    size = math.floor(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    # said with the operator's own words, not in bytes
    if not MIN_MEMORY <= size <= MAX_MEMORY:
        raise OptionError(option, text, "a size from 128M to 64T, for example 4G")
    return size
