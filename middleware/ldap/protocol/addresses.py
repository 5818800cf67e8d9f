"""The addresses of a server's name: their order, their share of the time, their errors."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import zip_longest
from typing import Any, TypeVar

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
)

from .happy_eyeballs import STAGGER_SECONDS, Connected, HappyEyeballs
from .transport import Address
from .urls import ServerURL

Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]

C = TypeVar("C")

# So many addresses are named in an error.
_NAMED = 4
# The part of the time that an address has at least, however many there are.
_LEAST_SHARE = 0.25


class PassedOver(DirectoryUnavailableError):
    """Raised by ``connect``: the server is well, but of no use to the caller, who tries the next
    address, and then the next server.

    :param answer: to be raised if there is no next one
    """

    def __init__(
        self, message: str, *, server: str | None = None, answer: DirectoryAnswerError | None = None
    ) -> None:
        super().__init__(message, server=server)
        self.answer = answer


def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return a name's addresses, in the order in which the system prefers them (RFC 6724).

    :param host: a name or an address
    :param port: the port, 1 to 65535
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

    A name is looked up anew for each connection, so a change in DNS is followed at once. While the
    resolver does not answer, which is waited for less then, the addresses known before are used
    (RFC 8767); not where it says that there are none. The address that answered last is tried
    first. Of several that do not answer, one costs
    ``STAGGER_SECONDS``, until the next is tried beside it; and what answers has a quarter of the
    time at least for TLS and LDAP, however many there are.

    :param url: URL of the server
    :param resolve: returns the addresses of a name and a port; may raise ``OSError``
    :param clock: returns seconds that never go back
    :param beside: connect to several addresses at a time; if not, each is given to ``call`` as it
        is, one after the other
    """

    __slots__ = ("_beside", "_clock", "_good", "_known", "_resolve", "_url")

    def __init__(
        self,
        url: ServerURL,
        *,
        resolve: Resolve = look_up,
        clock: Callable[[], float],
        beside: bool = False,
    ) -> None:
        self._beside = beside
        self._url = url
        self._resolve = resolve
        self._clock = clock
        self._good: Address = None
        # The result of the last lookup.
        self._known: Sequence[tuple[Any, ...]] = ()

    def reach(self, call: Callable[[ServerURL, Address, float], C], seconds: float) -> C:
        """Return the result of ``call`` with the first address with which it does not fail.

        The name's lookup is part of the time.

        :param call: called with the URL, an address and the seconds it may take; the address may be
            a :class:`.happy_eyeballs.Connected`, whose socket it may take
        :param seconds: time for all of it
        :raises PassedOver: no address is of use, and one at least answered
        :raises DirectoryUnavailableError: no address answers, with the reason of each; or the
            name has none
        :raises DirectoryTimeoutError: the same, and at least one used up its time
        """
        deadline = self._clock() + seconds
        addresses = self._now(seconds)
        failed: list[tuple[Address, Exception]] = []
        passed: PassedOver | None = None
        with closing(self._tries(addresses, deadline, seconds, failed)) as tries:
            for address, share in tries:
                plain = None if address is None else tuple(address)
                try:
                    result = call(self._url, address, share)
                except DirectoryAnswerError:
                    self._good = plain
                    raise
                except PassedOver as error:
                    if passed is None or passed.answer is None:
                        passed = error.with_traceback(None)
                except (DirectoryUnavailableError, OSError) as error:
                    failed.append((plain, error.with_traceback(None)))
                else:
                    self._good = plain
                    return result
                finally:
                    if isinstance(address, Connected) and (unused := address.take()) is not None:
                        unused.close()
        if passed is not None:
            try:
                raise passed
            finally:
                passed = None  # or it would hold this frame, and this frame it
        kinds = {_kind(error) for _, error in failed}
        reasons = [self._reason(error, address) for address, error in failed]
        failed.clear()
        if len(reasons) > _NAMED:
            reasons[_NAMED - 1 :] = [f"and {len(reasons) - _NAMED + 1} more addresses"]
        kind: type[DirectoryError] = DirectoryUnavailableError
        if len(kinds) == 1:
            kind = kinds.pop()
        elif DirectoryTimeoutError in kinds:
            kind = DirectoryTimeoutError
        raise kind("; ".join(reasons), server=self._url.text)

    def _tries(
        self,
        addresses: Sequence[Address],
        deadline: float,
        seconds: float,
        failed: list[tuple[Address, Exception]],
    ) -> Generator[tuple[Address, float], None, None]:
        """Yield the addresses to be tried, each with its time, and note those that failed here."""

        def share(number: int) -> float:
            left = deadline - self._clock()
            return max(left / max(number, 1), min(left, seconds * _LEAST_SHARE))

        named = [address for address in addresses if address is not None]
        if not self._beside or len(named) < 2:
            for number, address in enumerate(addresses):
                if deadline <= self._clock():
                    text = f"no time left for {len(addresses) - number} more"
                    failed.append((None, DirectoryTimeoutError(text)))
                    return
                yield address, share(len(addresses) - number)
            return
        with HappyEyeballs(named, min(STAGGER_SECONDS, seconds / len(named))) as race:
            while True:
                found = race.next(deadline - self._clock())
                for address, error in race.failed:
                    reason = f"no connection: {error.strerror or error}"
                    failed.append((address, DirectoryUnavailableError(reason)))
                race.failed.clear()
                if found is None:
                    break
                yield found, share(race.remaining + 1)
            text = f"no connection within {seconds:.3g} s"
            failed += [(address, DirectoryTimeoutError(text)) for address in race.waiting]
            if race.unused:
                text = f"no time left for {race.unused} more"
                failed.append((None, DirectoryTimeoutError(text)))

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
        known = self._known
        done = threading.Event()

        def ask() -> None:
            nonlocal known
            try:
                found.append(self._resolve(host, port))
                self._known = found[0]
            except Exception as error:  # not only OSError: UnicodeError for what can be no name
                if not is_no_answer(error):
                    self._known = known = ()
                reasons.append(_words(error))
            finally:
                done.set()

        if is_numeric(host):
            ask()
        else:
            # A resolver that hangs cannot be interrupted, only left alone; its own limit is
            # often 10 s and more for each name.
            try:
                threading.Thread(target=ask, name="keyfront-ldap-lookup", daemon=True).start()
            except RuntimeError:  # no thread to be had
                ask()
            if not done.wait(seconds * _LEAST_SHARE if known else seconds):
                if known:
                    return known
                raise DirectoryTimeoutError(
                    f"no answer to the lookup of {host} within {seconds:.3g} s",
                    server=self._url.text,
                )
        if not found or not found[0]:
            if known and not found:
                return known
            reason = reasons[0] if reasons else "it has no address"
            raise DirectoryUnavailableError(
                f"the lookup of {host} failed: {reason}", server=self._url.text
            )
        return found[0]

    def _reason(self, error: Exception, address: Address) -> str:
        words = _words(error).removeprefix(f"{self._url.text}: ")
        if address is None or is_numeric(self._url.host):
            return words
        host = f"[{address[0]}]" if len(address) == 4 else address[0]
        return f"{host}: {words}"


def is_no_answer(error: Exception) -> bool:
    """Return whether a lookup failed without an answer that there is no such name."""
    return isinstance(error, socket.gaierror) and error.errno in (
        *(socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM),
    )


def _kind(error: Exception) -> type[DirectoryError]:
    if isinstance(error, DirectoryUnavailableError):
        return type(error)
    return DirectoryTimeoutError if isinstance(error, TimeoutError) else DirectoryUnavailableError


def _words(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__


def is_numeric(host: str) -> bool:
    """Return whether a host is an address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
