"""The addresses of an LDAP server's name, tried one after the other.

A name is looked up anew for each connection, so a change in DNS is followed at once. One address
of several that does not answer costs its share of the time and no more, and the address that
answered last is tried first.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
)

from .urls import ServerURL

#: As ``socket.getaddrinfo`` returns it; ``None`` for a socket file, which its URL names.
Address = tuple[Any, ...] | None
Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]

C = TypeVar("C")

#: So many addresses are named in an error.
_NAMED = 4


def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return a name's addresses, in the order in which the system prefers them (RFC 6724).

    :raises OSError: there are none, or the resolver does not answer
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [item[4] for item in found]


def alternate(addresses: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return addresses, each once, IPv6 and IPv4 in turn (RFC 8305 section 4).

    The family of the first one keeps the lead, and each family its order.
    """
    unique = list(dict.fromkeys(addresses))
    lead = [address for address in unique if len(address) == len(unique[0])]
    rest = [address for address in unique if len(address) != len(unique[0])]
    turns = zip_longest(lead, rest)
    return [address for turn in turns for address in turn if address is not None]


class Addresses:
    """The addresses of one server. Threads may use it at once; nothing waits for another.

    :param url: the server's
    :param resolve: from a name and a port to addresses; may raise ``OSError``
    :param clock: seconds that never go back
    """

    __slots__ = ("_clock", "_good", "_resolve", "_url")

    def __init__(
        self, url: ServerURL, *, resolve: Resolve = look_up, clock: Callable[[], float]
    ) -> None:
        self._url = url
        self._resolve = resolve
        self._clock = clock
        self._good: Address = None

    def reach(self, call: Callable[[ServerURL, Address, float], C], seconds: float) -> C:
        """Return what ``call`` returns for the first address with which it does not fail.

        Each address may take a fair share of the time that the ones before it have left, and the
        last one all of it. The name's lookup is part of that time.

        :param call: given the URL, an address and the seconds it may take
        :raises DirectoryUnavailableError: no address answers, with the reason of each; or the
            name has none
        :raises DirectoryTimeoutError: the same, and at least one used up its time
        """
        deadline = self._clock() + seconds
        addresses = self._now(seconds)
        kinds: set[type[DirectoryError]] = set()
        reasons: list[str] = []
        for number, address in enumerate(addresses):
            left = deadline - self._clock()
            if left <= 0:
                kinds.add(DirectoryTimeoutError)
                reasons.append(f"no time left for {len(addresses) - number} more")
                break
            try:
                result = call(self._url, address, left / (len(addresses) - number))
            except DirectoryAnswerError:
                self._good = address
                raise
            except (DirectoryUnavailableError, OSError) as error:
                kinds.add(_kind(error))
                reasons.append(self._reason(error, address))
            else:
                self._good = address
                return result
        if len(reasons) > _NAMED:
            reasons[_NAMED - 1 :] = [f"and {len(reasons) - _NAMED + 1} more addresses"]
        kind: type[DirectoryError] = DirectoryUnavailableError
        if len(kinds) == 1:
            kind = kinds.pop()
        elif DirectoryTimeoutError in kinds:
            kind = DirectoryTimeoutError
        raise kind("; ".join(reasons), server=self._url.text)

    def _now(self, seconds: float) -> Sequence[Address]:
        if self._url.scheme == "ldapi":
            return [None]
        addresses: list[Address] = [*alternate(self._found(seconds))]
        good = self._good
        if good in addresses:
            addresses.remove(good)
            addresses.insert(0, good)
        return addresses

    def _found(self, seconds: float) -> Sequence[tuple[Any, ...]]:
        host, port = self._url.host, self._url.port
        found: list[Sequence[tuple[Any, ...]]] = []
        reasons: list[str] = []
        done = threading.Event()

        def ask() -> None:
            try:
                found.append(self._resolve(host, port))
            except Exception as error:  # not only OSError: UnicodeError for what can be no name
                reasons.append(_words(error))
            finally:
                done.set()

        if _is_numeric(host):
            ask()
        else:
            # A resolver that hangs cannot be interrupted, only left alone; its own limit is
            # often 10 s and more for each name.
            try:
                threading.Thread(target=ask, name="keyfront-ldap-lookup", daemon=True).start()
            except RuntimeError:  # no thread to be had
                ask()
            if not done.wait(seconds):
                raise DirectoryTimeoutError(
                    f"no answer to the lookup of {host} within {seconds:.3g} s",
                    server=self._url.text,
                )
        if not found or not found[0]:
            reason = reasons[0] if reasons else "it has no address"
            raise DirectoryUnavailableError(
                f"the lookup of {host} failed: {reason}", server=self._url.text
            )
        return found[0]

    def _reason(self, error: Exception, address: Address) -> str:
        words = _words(error).removeprefix(f"{self._url.text}: ")
        if address is None or _is_numeric(self._url.host):
            return words
        host = f"[{address[0]}]" if len(address) == 4 else address[0]
        return f"{host}: {words}"


def _kind(error: Exception) -> type[DirectoryError]:
    if isinstance(error, DirectoryUnavailableError):
        return type(error)
    return DirectoryTimeoutError if isinstance(error, TimeoutError) else DirectoryUnavailableError


def _words(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
