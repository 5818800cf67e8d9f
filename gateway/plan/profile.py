"""How much of a machine Keystone may take: ``small``, ``standard`` or ``large``."""

from __future__ import annotations

from dataclasses import dataclass

from keyfront.common.machine import MIB
from keyfront.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile.

    :param name: as ``--profile`` names it
    :param memory_share: the part of the machine's memory that everything together may take
    :param most_memory: bytes that it takes at most; ``None`` sets no bound
    :param least_processes: kept even on one core, so that one can restart while another answers
    :param clients: connections that the web server in front holds at a time
    :param growth: MiB by which a worker may grow beyond what it is loaded with
    :param cache: MiB of answers in each worker's token cache
    :param node_cache: MiB of answers that the workers of a node share
    :param gives_up: what it does without, for the operator to read
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
        """Bytes of a machine's memory that this profile may take."""
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


def named(name: str) -> Profile:
    """:raises OptionError: there is no such profile"""
    try:
        return PROFILES[name]
    except KeyError:
        raise OptionError("--profile", name, f"one of {', '.join(PROFILES)}") from None
