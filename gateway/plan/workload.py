"""The workload and the profile: what the operator tells, and how much of a machine to take.

Everything of it may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from keyfront.common.machine import MIB
from keyfront.errors import OptionError

from .costs import FIRST_SHARE

DEFAULT_LATENCY = 5.0
MOST_PROCESSES = 4096
MOST_THREADS = 256
PERCENT = "a percentage, 0 to 100"
_RATE = "a number per second, 0 to 1000000"
_CONNECTIONS = "a whole number of connections, 1 to 1000000"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The load of the whole service, over all nodes.

    :param logins: tokens issued per second; ``None`` if not known
    :param validations: tokens validated per second; ``None`` if not known
    :param first_validations: the part of them that the token cache asks Keystone about, 0 to 1
    :param database_connections: the database's ``max_connections``; ``None`` sets no bound
    :param ldap_connections: connections the directory allows Keystone; ``None`` without LDAP
    :param memcached_connections: memcached's ``-c``; ``None`` sets no bound
    :param nodes: machines that serve the same Keystone, 1 to 1000
    :param latency: seconds within which a request shall be answered, 0.1 to 300
    :param token_cache: true if keyfront's token cache is in use
    :param processes: workers of a node, 1 to 4096; ``None`` computes them
    :param threads: threads of a worker, 1 to 256; ``None`` computes them
    :param login_processes: workers of a node that take nothing but logins, fewer than
        ``processes``; 0: all workers take all requests
    :raises OptionError: one is out of range
    """

    logins: float | None = None
    validations: float | None = None
    first_validations: float = FIRST_SHARE
    database_connections: int | None = None
    ldap_connections: int | None = None
    memcached_connections: int | None = None
    nodes: int = 1
    latency: float = DEFAULT_LATENCY
    token_cache: bool = True
    processes: int | None = None
    threads: int | None = None
    login_processes: int = 0

    def __post_init__(self) -> None:
        for option, rate in (("--logins", self.logins), ("--validations", self.validations)):
            if rate is not None and not 0 <= rate <= 1e6:
                raise OptionError(option, rate, _RATE)
        if not 0 <= self.first_validations <= 1:
            percent = f"{100 * self.first_validations:g}"
            raise OptionError("--first-validations", percent, PERCENT)
        for option, limit in (
            ("--database-connections", self.database_connections),
            ("--ldap-connections", self.ldap_connections),
            ("--memcached-connections", self.memcached_connections),
        ):
            if limit is not None and not 1 <= limit <= 1_000_000:
                raise OptionError(option, limit, _CONNECTIONS)
        for option, number, most in (
            ("--processes", self.processes, MOST_PROCESSES),
            ("--threads", self.threads, MOST_THREADS),
        ):
            if number is not None and not 1 <= number <= most:
                raise OptionError(option, number, f"a whole number, 1 to {most}")
        most = (self.processes or MOST_PROCESSES) - 1
        if not 0 <= self.login_processes <= most:
            allowed = f"a whole number, 0 to {most}, fewer than --processes"
            raise OptionError("--login-processes", self.login_processes, allowed)
        if not 1 <= self.nodes <= 1000:
            raise OptionError("--nodes", self.nodes, "a whole number, 1 to 1000")
        if not 0.1 <= self.latency <= 300:
            raise OptionError("--latency", self.latency, "a number of seconds, 0.1 to 300")

    @property
    def ldap(self) -> bool:
        """Tells whether users log in through a directory."""
        return self.ldap_connections is not None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The share of a machine that Keystone may take: ``small``, ``standard`` or ``large``.

    :param name: the word for ``--profile``
    :param memory_share: the part of the machine's memory that everything together may take
    :param most_memory: bytes that it takes at most; ``None`` sets no bound
    :param least_processes: workers kept even on one core, so that one can restart while another
        answers
    :param clients: connections that the web server in front holds at a time
    :param growth: MiB by which a worker may grow beyond its size when loaded
    :param cache: MiB of answers in each worker's token cache
    :param node_cache: MiB of answers that the workers of a node share
    :param gives_up: the things it does without, for the operator to read
    """

    name: str
    memory_share: float
    most_memory: int | None
    least_processes: int
    clients: int
    growth: int
    cache: int
    node_cache: int
    gives_up: tuple[str, ...] = ()

    def memory(self, machine_memory: int) -> int:
        """Return the bytes of a machine's memory that this profile may take.

        :param machine_memory: the machine's memory in bytes
        """
        share = int(machine_memory * self.memory_share)
        return share if self.most_memory is None else min(share, self.most_memory)


SMALL = Profile(
    name="small",
    memory_share=1.0,
    most_memory=256 * MIB,
    least_processes=1,
    clients=256,
    growth=24,
    cache=4,
    node_cache=8,
    gives_up=(
        "256 connections of clients instead of 10000",
        "4 MiB of cached answers a worker instead of 64, and 8 MiB that they share instead of 32",
        "a worker is replaced once it has grown by 24 MiB instead of 40",
        "no more workers than 256 MiB hold, whatever the cores",
    ),
)
STANDARD = Profile(
    name="standard",
    # the rest is for what else a controller runs
    memory_share=0.75,
    most_memory=None,
    least_processes=2,
    clients=10000,
    growth=40,
    cache=64,
    node_cache=32,
)
LARGE = Profile(
    name="large",
    # a machine that serves nothing but Keystone
    memory_share=0.9,
    most_memory=None,
    least_processes=2,
    clients=50000,
    growth=64,
    cache=128,
    node_cache=256,
)
PROFILES = {profile.name: profile for profile in (SMALL, STANDARD, LARGE)}
DEFAULT_PROFILE = STANDARD.name


def profile_named(name: str) -> Profile:
    """Return a profile by its name.

    :raises OptionError: there is no such profile
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise OptionError("--profile", name, f"one of {', '.join(PROFILES)}") from None
