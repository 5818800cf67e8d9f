"""What the operator tells of the load and of what the nodes share; everything may be left out."""

from __future__ import annotations

from dataclasses import dataclass

from keyfront.errors import OptionError

DEFAULT_LATENCY = 5.0
MOST_PROCESSES = 4096
MOST_THREADS = 256
_RATE = "a number per second, 0 to 1000000"
_CONNECTIONS = "a whole number of connections, 1 to 1000000"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The load of the whole service, over all nodes.

    :param logins: tokens issued per second; ``None`` if not known
    :param validations: tokens validated per second; ``None`` if not known
    :param database_connections: the database's ``max_connections``; ``None`` sets no bound
    :param ldap_connections: what the directory allows Keystone; ``None`` without LDAP
    :param memcached_connections: memcached's ``-c``; ``None`` sets no bound
    :param nodes: machines that serve the same Keystone, 1 to 1000
    :param latency: seconds within which a request shall be answered, 0.1 to 300
    :param token_cache: whether keyfront's token cache is in use
    :param processes: workers of a node, 1 to 4096; ``None`` computes them
    :param threads: threads of a worker, 1 to 256; ``None`` computes them
    :raises OptionError: one is out of range
    """

    logins: float | None = None
    validations: float | None = None
    database_connections: int | None = None
    ldap_connections: int | None = None
    memcached_connections: int | None = None
    nodes: int = 1
    latency: float = DEFAULT_LATENCY
    token_cache: bool = True
    processes: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, rate in (("--logins", self.logins), ("--validations", self.validations)):
            if rate is not None and not 0 <= rate <= 1e6:
                raise OptionError(option, rate, _RATE)
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
        if not 1 <= self.nodes <= 1000:
            raise OptionError("--nodes", self.nodes, "a whole number, 1 to 1000")
        if not 0.1 <= self.latency <= 300:
            raise OptionError("--latency", self.latency, "a number of seconds, 0.1 to 300")

    @property
    def ldap(self) -> bool:
        """Whether users log in through a directory."""
        return self.ldap_connections is not None
