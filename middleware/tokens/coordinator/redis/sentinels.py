"""The address of the master: a fixed one, or the one that the majority of the sentinels names.

A server that was cut off or stopped while another took its place still calls itself master when it
comes back. So with sentinels a server is trusted only for :data:`TRUST_SECONDS` after most of them
have named it. Two majorities share a sentinel, and a sentinel that names the new master does not
go back to the old one: once anybody was told of the new, nobody is told of the old any more.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import redis

from .address import Address
from .server import LifeEnded, connect

#: Seconds for which a server is taken for the master without asking the sentinels again.
TRUST_SECONDS = 0.5

# Seconds for which a sentinel that did not answer is asked last.
_AVOID_SECONDS = 5.0

Where = tuple[str, int]


class NoMajority(redis.ConnectionError):
    """Most sentinels do not name one and the same master."""


class Fixed:
    """The master at a fixed address.

    :param address: the address of one server
    """

    def __init__(self, address: Address) -> None:
        self._where = address.hosts[0] if address.hosts else ("", 0)

    def master(self, *, since: float | None = None) -> Where:
        """Return host and port; an empty host for a unix socket."""
        return self._where

    def confirm(self, where: Where) -> None:
        """Do nothing: there is nobody else to ask."""

    def close(self) -> None:
        """Do nothing."""


class Sentinels:
    """The sentinels of a master.

    :param address: the address of the sentinels
    :param timeout: seconds for each step of connecting, and for each answer, above 0
    """

    def __init__(self, address: Address, *, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()
        self._found: tuple[float, Where] | None = None
        self._connections: dict[Where, Any] = {}
        self._known: dict[Where, int] = {}
        self._avoided: dict[Where, float] = {}
        self._pid = os.getpid()

    def master(self, *, since: float | None = None) -> Where:
        """Return host and port of the master.

        :param since: the earliest time, in seconds of the monotonic clock, at which the sentinels
            may have been asked; by default :data:`TRUST_SECONDS` ago
        :raises NoMajority: they do not agree, or cannot be reached
        """
        if self._pid != os.getpid():
            self._lock, self._connections, self._pid = threading.Lock(), {}, os.getpid()
        found = self._newer(since)
        if found is not None:
            return found
        if not self._lock.acquire(timeout=2 * self._timeout):
            raise NoMajority("the sentinels are being asked, and do not answer")
        try:
            found = self._newer(since)  # somebody may have asked meanwhile
            if found is None:
                begun = time.monotonic()
                found = self._ask(begun + 2 * self._timeout)
                self._found = begun, found
            return found
        finally:
            self._lock.release()

    def confirm(self, where: Where) -> None:
        """Make sure that no other server had been named master when this was called.

        :param where: host and port of the server that was asked
        :raises LifeEnded: another server has
        :raises NoMajority: they do not agree, or cannot be reached
        """
        if self.master(since=time.monotonic()) != where:
            raise LifeEnded("the sentinels name another master")

    def close(self) -> None:
        """Close the connections to the sentinels; they are made again if needed."""
        if self._lock.acquire(timeout=self._timeout):
            try:
                for sentinel in list(self._connections):
                    self._forget(sentinel)
            finally:
                self._lock.release()

    def _newer(self, since: float | None) -> Where | None:
        found = self._found
        if found is None:
            return None
        oldest = time.monotonic() - TRUST_SECONDS if since is None else since
        return found[1] if found[0] >= oldest else None

    def _ask(self, deadline: float) -> Where:
        votes: dict[Where, int] = {}
        silent: list[str] = []
        now = time.monotonic()
        order = sorted(self._address.hosts, key=lambda one: self._avoided.get(one, 0.0) > now)
        for sentinel in order:
            if time.monotonic() > deadline:
                break
            try:
                named = self._named_by(sentinel)
            except (redis.RedisError, OSError, ValueError) as error:
                self._forget(sentinel)
                self._avoided[sentinel] = time.monotonic() + _AVOID_SECONDS
                silent.append(f"{sentinel[0]}:{sentinel[1]}: {error}")
                continue
            votes[named] = votes.get(named, 0) + 1
            # Those that are not in the option count, or two halves could name two masters.
            if votes[named] > max(len(order), *self._known.values()) // 2:
                return named
        if silent:
            raise NoMajority(f"too few sentinels answer: {'; '.join(silent)}")
        if max(self._known.values()) > len(order):
            raise NoMajority(
                f"there are {max(self._known.values())} sentinels, coordinator names only "
                f"{len(order)}; name them all"
            )
        raise NoMajority(f"the sentinels do not agree who is the master: {votes}")

    def _named_by(self, sentinel: Where) -> Where:
        connection = self._connections.get(sentinel)
        if connection is None:
            connection = connect(
                self._address,
                sentinel,
                self._timeout,
                db=0,
                username=self._address.sentinel_user or None,
                password=self._address.sentinel_password or None,
            )
            connection.connect()
            self._connections[sentinel] = connection
            said = self._say(connection, "SENTINEL", "MASTER", self._address.master)
            facts = dict(zip(said[::2], said[1::2], strict=True))
            self._known[sentinel] = int(facts[b"num-other-sentinels"]) + 1
        name = self._address.master
        host, port = self._say(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", name) or (b"", 0)
        if not host:
            raise redis.ResponseError(f"it knows no master {name}")
        return host.decode(), int(port)

    def _say(self, connection: Any, *command: str) -> Any:
        connection.send_packed_command(connection.pack_command(*command), check_health=False)
        return connection.read_response()

    def _forget(self, sentinel: Where) -> None:
        connection = self._connections.pop(sentinel, None)
        if connection is not None:
            connection.disconnect()
