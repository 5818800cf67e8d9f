"""The address of the master: a fixed one, or the one that the majority of the sentinels names.

A server that was cut off or stopped while another took its place still calls itself master when it
comes back. So with sentinels a server is trusted only for :data:`TRUST_SECONDS` after most of them
have named it. Two majorities share a sentinel, and a sentinel that names the new master does not
go back to the old one: once anybody was told of the new, nobody is told of the old any more.

Where a connection to one of them turns out to be dead, they are all made anew: whatever ended that
one, a firewall or a restart, has mostly ended the others as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

import redis

from .address import Address
from .connections import LifeEnded, connect, is_usable, not_of_redis

#: Seconds for which a server is taken for the master without asking the sentinels again.
TRUST_SECONDS = 0.5

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

    def release(self) -> None:
        """Do nothing."""

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
        # With the monotonic time since when each rests.
        self._connections: dict[Where, tuple[Any, float]] = {}
        self._known: dict[Where, int] = {}
        # When one last did not answer, until it does: it is asked last.
        self._failed: dict[Where, float] = {}
        # Seconds to wait for them at most: so long the fewer ones may be silent, one by one.
        self._patience = timeout * max(2, (len(address.hosts) + 1) // 2)
        self._pid = os.getpid()
        self._closed = False

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
        if not self._lock.acquire(timeout=self._patience):
            raise NoMajority("the sentinels are being asked, and do not answer")
        try:
            found = self._newer(since)  # somebody may have asked meanwhile
            if found is None:
                begun = time.monotonic()
                found = self._ask(begun + self._patience)
                self._found = begun, found
            return found
        finally:
            self._lock.release()
            if self._closed:
                self.close()

    def confirm(self, where: Where) -> None:
        """Make sure that no other server had been named master when this was called.

        :param where: host and port of the server that was asked
        :raises LifeEnded: another server has
        :raises NoMajority: they do not agree, or cannot be reached
        """
        if self.master(since=time.monotonic()) != where:
            raise LifeEnded("the sentinels name another master")

    def release(self) -> None:
        """Close the connections to the sentinels; they are made again if needed."""
        if self._lock.acquire(timeout=self._timeout):
            try:
                self._forget_all()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ask no more, and close the connections; who is just asking does so when he ends."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._forget_all()
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
        silent: dict[Where, str] = {}
        hosts = sorted(self._address.hosts, key=lambda one: self._failed.get(one, 0.0))
        order = deque(hosts)
        # Only who has waited for one in vain looks at the time: the process may have stood still.
        while order and not (silent and time.monotonic() > deadline) and not self._closed:
            sentinel = order.popleft()
            kept = self._kept(sentinel)
            try:
                named = self._named_by(sentinel, kept)
            except Exception as error:
                self._failed[sentinel] = time.monotonic()
                silent[sentinel] = f"{sentinel[0]}:{sentinel[1]}: {not_of_redis(error)}"
                if kept is not None:
                    self._forget_all()
                    order.append(sentinel)
                continue
            self._failed.pop(sentinel, None)
            silent.pop(sentinel, None)
            votes[named] = votes.get(named, 0) + 1
            # Those that are not in the option count, or two halves could name two masters.
            if votes[named] > max([len(hosts), *self._known.values()]) // 2:
                return named
        if self._closed:
            raise NoMajority("this coordinator is closed")
        if silent:
            raise NoMajority(f"too few sentinels answer: {'; '.join(silent.values())}")
        most = max(self._known.values(), default=0)
        if most > len(hosts):
            raise NoMajority(
                f"there are {most} sentinels, coordinator names only {len(hosts)}; name them all"
            )
        raise NoMajority(f"the sentinels do not agree who is the master: {votes}")

    def _named_by(self, sentinel: Where, connection: Any) -> Where:
        """Return the master that a sentinel names.

        :param sentinel: host and port
        :param connection: a connection to it; ``None`` to make one
        """
        made = connection is None
        if made:
            connection = connect(
                self._address,
                sentinel,
                self._timeout,
                db=0,
                username=self._address.sentinel_user or None,
                password=self._address.sentinel_password or None,
            )
        try:
            if made:
                connection.connect()
                said = self._say(connection, "SENTINEL", "MASTER", self._address.master)
                facts = dict(zip(said[::2], said[1::2], strict=True))
                self._known[sentinel] = int(facts[b"num-other-sentinels"]) + 1
            name = self._address.master
            host, port = self._say(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", name) or (
                b"",
                0,
            )
            if not host:
                raise redis.ResponseError(f"it knows no master {name}")
            named = host.decode("ascii"), int(port)
            if not 0 < named[1] < 65536:
                raise ValueError("port")
        except BaseException:
            connection.disconnect()
            raise
        self._connections[sentinel] = connection, time.monotonic()
        return named

    def _kept(self, sentinel: Where) -> Any:
        """Return the connection to a sentinel, no longer kept; ``None`` if none can be used."""
        connection, since = self._connections.pop(sentinel, (None, 0.0))
        if connection is None or is_usable(connection, since):
            return connection
        connection.disconnect()
        return None

    def _say(self, connection: Any, *command: str) -> Any:
        connection.send_packed_command(connection.pack_command(*command), check_health=False)
        return connection.read_response()

    def _forget_all(self) -> None:
        while self._connections:
            self._connections.popitem()[1][0].disconnect()
