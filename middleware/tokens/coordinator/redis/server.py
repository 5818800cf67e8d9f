"""Connections to a Redis, each bound to the life of the server that it was made in.

A server's *life* is the time since it was started or last made master, whichever came later; Redis
names it by ``run_id`` and ``master_replid``. Its numbers only grow within one life. A connection
knows the life it belongs to, and each answer is taken only if, after it, the server was still
master in that life.

Nothing is tried twice here: whoever asks knows what it means to ask again.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from .address import Address

try:
    from redis.driver_info import DriverInfo as _DriverInfo  # noqa: F401
except ImportError:
    # Each new connection would say who it is, for which it needs a right of its own.
    _ANONYMOUS: dict[str, Any] = {"lib_name": None, "lib_version": None}
else:
    _ANONYMOUS = {"driver_info": None}

#: Connections that are kept open while nobody uses them, in each process.
IDLE = 64

_RUN = re.compile(rb"run_id:([0-9a-f]+)")
_HISTORY = re.compile(rb"master_replid:([0-9a-f]+)")
_IS_MASTER = b"role:master\r"
_INFO = ("INFO", "replication")

Command = tuple[str, ...]


def _refuse(connection: Any) -> None:
    raise redis.ConnectionError("the connection was closed")


class LifeEnded(redis.ConnectionError):
    """The server is no master, or no longer in the same life."""


class Link:
    """A connection, and the life of the server at its other end."""

    __slots__ = ("_connection", "_packed", "_proof", "address", "life")

    def __init__(self, connection: Any, address: tuple[str, int]) -> None:
        #: Where it leads, as :meth:`Server.take` was told.
        self.address = address
        self._connection = connection
        # What is sent again and again, as it is sent.
        self._packed: dict[Command, bytes] = {}
        connection.connect()
        # Closed, it would connect by itself when it is next used, to whatever is there then.
        connection.redis_connect_func = _refuse
        try:
            started, made_master = self._ask(connection.pack_commands([("INFO", "server"), _INFO]))
            _check(started, bytes)
            _check(made_master, bytes)
            run, history = _RUN.search(started), _HISTORY.search(made_master)
            if run is None or history is None:
                raise redis.ResponseError("INFO shows no run_id or no master_replid")
            if _IS_MASTER not in made_master:
                raise LifeEnded("it is a replica, not the master")
            #: As the scripts write it into the table.
            self.life = run[1] + b":" + history[1]
            self._proof = b"master_replid:" + history[1]
        except BaseException:
            self.close()
            raise

    def read(self, first: Command, *command: Any) -> tuple[list[Any], list[Any]]:
        """Return the answers to two commands that read, the second one later than the first.

        :param first: one of few
        :raises LifeEnded: the server may have been another one, or a replica, when it answered
        :raises redis.RedisError: no answer, or that of an error; close the link
        """
        pack = self._connection.pack_command
        packed = [self._constant(first), *pack(*command), self._constant(_INFO)]
        earlier, answer, proof = self._ask(packed, 3)
        _check(earlier, list)
        _check(answer, list)
        _check(proof, bytes)
        if _IS_MASTER not in proof or self._proof not in proof:
            raise LifeEnded("it was made a replica, or a master anew")
        return earlier, answer

    def run(self, *command: Any) -> list[Any]:
        """Return the answer to a command that looks by itself at whom it talks to.

        :raises redis.RedisError: no answer, or that of an error; close the link
        """
        answer = self._ask(self._connection.pack_command(*command), 1)[0]
        _check(answer, list)
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close it; from another process than the one that made it, only here."""
        self._connection.disconnect()

    def _constant(self, command: Command) -> bytes:
        packed = self._packed.get(command)
        if packed is None:
            packed = self._packed[command] = b"".join(self._connection.pack_command(*command))
        return packed

    def _ask(self, packed: Sequence[bytes], answers: int = 2) -> list[Any]:
        connection = self._connection
        connection.send_packed_command([b"".join(packed)], check_health=False)
        return [connection.read_response() for _ in range(answers)]


def _check(answer: object, kind: type) -> None:
    if not isinstance(answer, kind):
        raise redis.InvalidResponse("it answers as Redis would not")


class Server:
    """The connections of this process to the master.

    :param address: where it is, or its sentinels are
    :param timeout: seconds for each step of connecting, and for each answer
    """

    def __init__(self, address: Address, *, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._idle: deque[Link] = deque()
        self._life: tuple[tuple[str, int], bytes] | None = None
        self._pid = os.getpid()

    def take(self, where: tuple[str, int]) -> Link:
        """Return a link to the master, to be given back or closed by the caller.

        :param where: host and port
        :raises LifeEnded: the server there is no master
        :raises redis.RedisError: it cannot be reached, or refuses
        """
        if self._pid != os.getpid():
            # What the parent has open is the parent's.
            self._idle, self._pid = deque(), os.getpid()
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                break
            if link.address == where and (link.address, link.life) == self._life:
                return link
            link.close()
        link = Link(connect(self._address, where, self._timeout), where)
        self._life = (where, link.life)
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link for the next one, if it is still good for him."""
        usable = (link.address, link.life) == self._life and self._pid == os.getpid()
        if usable and len(self._idle) < IDLE:
            self._idle.append(link)
        else:
            link.close()

    def end(self) -> None:
        """Have all links made anew, those in use when they are given back."""
        self._life = None
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


def connect(address: Address, where: tuple[str, int], timeout: float, **instead: Any) -> Any:
    """Return a connection that is not open yet.

    :param where: host and port
    :param instead: arguments of ``redis.Connection`` that differ from those of ``address``
    """
    arguments: dict[str, Any] = {
        "db": address.database,
        "username": address.user or None,
        "password": address.password or None,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        **_ANONYMOUS,
        **instead,
    }
    if address.path:
        unix: Any = UnixDomainSocketConnection  # it has no types
        return unix(path=address.path, **arguments)
    arguments |= {"host": where[0], "port": where[1]}
    if not address.tls:
        tcp: Any = Connection
        return tcp(**arguments)
    tls: Any = SSLConnection
    return tls(
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        ssl_ca_certs=address.ca_file or None,
        ssl_certfile=address.cert_file or None,
        ssl_keyfile=address.key_file or None,
        **arguments,
    )
