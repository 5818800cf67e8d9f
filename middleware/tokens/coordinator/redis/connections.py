"""Connections to a Redis, each bound to the life of the server that it was made in.

A server's *life* is the time since it was started or last made master, whichever came later; Redis
names it by ``run_id`` and ``master_replid``. Its numbers only grow within one life. A connection
knows the life it belongs to, and each answer is taken only if, after it, the server was still
master in that life.

An idle connection may be dead: the server may have closed it, or a firewall may have forgotten it
and drop whatever is sent. So it is checked, or replaced, before it is used.

Nothing is tried twice here: only the caller knows whether a question may be asked again.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from .address import Address
from .scripts import Program

# Each new connection would name the client library, which needs a right of its own.
try:
    from redis.driver_info import DriverInfo
except ImportError:
    _ANONYMOUS: dict[str, Any] = {"lib_name": None, "lib_version": None}
else:
    # Of none at all redis-py 7 makes its own.
    _ANONYMOUS = {"driver_info": DriverInfo(name="", lib_version="")}

#: Connections that are kept open while nobody uses them, in each process.
IDLE = 64

#: Seconds that a connection may rest; firewalls forget some after a minute.
REST_SECONDS = 30.0

# Seconds after which it is looked at whether the server has closed it.
_LOOK_SECONDS = 1.0

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
    """A connection, and the life of the server at its other end.

    :param connection: a connection of redis-py that is not open yet
    :param address: host and port that it leads to
    :raises LifeEnded: the server is a replica
    :raises redis.RedisError: it cannot be reached, or does not answer as Redis does
    """

    __slots__ = ("_connection", "_packed", "_proof", "address", "life", "rests_since")

    def __init__(self, connection: Any, address: tuple[str, int]) -> None:
        #: Host and port that it leads to, as :meth:`Server.take` was given them.
        self.address = address
        #: The monotonic time when it was last given back; ``None``: it is new.
        self.rests_since: float | None = None
        self._connection = connection
        # Commands that are sent again and again, packed.
        self._packed: dict[Command, bytes] = {}
        try:
            connection.connect()
        except Exception as error:
            raise not_of_redis(error) from None
        # Once closed, it would connect again by itself, to whatever server is there then.
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
            #: The server's life, as the scripts write it into the table.
            self.life = run[1] + b":" + history[1]
            self._proof = b"master_replid:" + history[1]
        except BaseException:
            self.close()
            raise

    def read(self, first: Command, *command: Any) -> tuple[list[Any], list[Any]]:
        """Return the answers to two commands HMGET, the second one later than the first.

        :param first: the first command, one of few, as its packed form is kept
        :param command: the second command
        :returns: the values of the fields, by command; ``None`` for one that is not there
        :raises LifeEnded: the server may have been another one, or a replica, when it answered
        :raises redis.RedisError: no answer, or an error as the answer; close the link
        """
        pack = self._connection.pack_command
        packed = [self._constant(first), *pack(*command), self._constant(_INFO)]
        earlier, answer, proof = self._ask(packed, 3)
        _check_values(earlier, len(first) - 2)
        _check_values(answer, len(command) - 2)
        _check(proof, bytes)
        if _IS_MASTER not in proof or self._proof not in proof:
            raise LifeEnded("it was made a replica, or a master anew")
        return earlier, answer

    def run(self, *command: Any) -> list[Any]:
        """Return the answer to a command that checks by itself that it runs on the master.

        :param command: the command, whose answer is a list of strings
        :raises redis.RedisError: no answer, or an error as the answer; close the link
        """
        answer: list[bytes] = self._ask(self._connection.pack_command(*command), 1)[0]
        _check(answer, list)
        for value in answer:
            _check(value, bytes)
        return answer

    def evaluate(self, program: Program, keys: Sequence[str], *arguments: Any) -> list[Any]:
        """Return the answer of a program that :meth:`run` may be asked to run.

        :param program: the program
        :param keys: the keys that it reads and writes
        :param arguments: its arguments
        :raises redis.RedisError: no answer, or an error as the answer; close the link
        """
        try:
            return self.run("EVALSHA", program.sha1, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            return self.run("EVAL", program.text, len(keys), *keys, *arguments)

    @property
    def is_usable(self) -> bool:
        """False if it rested for too long, or was closed meanwhile."""
        return self.rests_since is None or is_usable(self._connection, self.rests_since)

    def close(self) -> None:
        """Close the connection in this process; a parent that made it can go on using it."""
        self._connection.disconnect()

    def _constant(self, command: Command) -> bytes:
        packed = self._packed.get(command)
        if packed is None:
            packed = self._packed[command] = b"".join(self._connection.pack_command(*command))
        return packed

    def _ask(self, packed: Sequence[bytes], answers: int = 2) -> list[Any]:
        connection = self._connection
        try:
            connection.send_packed_command([b"".join(packed)], check_health=False)
            return [connection.read_response() for _ in range(answers)]
        except Exception as error:
            raise not_of_redis(error) from None


def not_of_redis(error: Exception) -> Exception:
    """Return the error for an answer that is none of Redis; its own errors as they are.

    :param error: the error of the client, or of whoever took the answer apart
    """
    if isinstance(error, redis.RedisError | OSError | UnicodeError):
        return error
    return redis.InvalidResponse("it answers as Redis would not")


def _check(answer: object, kind: type) -> None:
    if not isinstance(answer, kind):
        raise not_of_redis(TypeError())


_VALUES = {bytes, type(None)}


def _check_values(answer: list[object], count: int) -> None:
    _check(answer, list)
    if len(answer) != count or not _VALUES.issuperset(map(type, answer)):
        raise not_of_redis(TypeError())


class Server:
    """The connections of this process to the master.

    :param address: the address of the server or of its sentinels
    :param timeout: seconds for each step of connecting, and for each answer, above 0
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
            # The parent goes on using its connections.
            self._idle, self._pid = deque(), os.getpid()
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                break
            known = link.address == where and (link.address, link.life) == self._life
            if known and link.is_usable:
                return link
            link.close()
        link = Link(connect(self._address, where, self._timeout), where)
        self._life = (where, link.life)
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link for the next caller, if it is still usable; else close it."""
        usable = (link.address, link.life) == self._life and self._pid == os.getpid()
        if usable and len(self._idle) < IDLE:
            link.rests_since = time.monotonic()
            self._idle.append(link)
        else:
            link.close()

    def end(self) -> None:
        """Close all links; those in use are closed when they are given back."""
        self._life = None
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return


def is_usable(connection: Any, rests_since: float) -> bool:
    """Return whether a connection that rests may be used again.

    :param connection: the connection of redis-py, of which nothing has been asked since
    :param rests_since: the monotonic time since when it rests
    """
    rested = time.monotonic() - rests_since
    if rested > REST_SECONDS:
        return False
    try:
        return rested < _LOOK_SECONDS or not connection.can_read(0)
    except (redis.RedisError, OSError):
        return False


def connect(address: Address, where: tuple[str, int], timeout: float, **instead: Any) -> Any:
    """Return a connection of redis-py that is not open yet.

    :param address: the options of the connection
    :param where: host and port, not used for a unix socket
    :param timeout: seconds for each step of connecting, and for each answer, above 0
    :param instead: arguments of ``redis.Connection`` in place of those from ``address``
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
