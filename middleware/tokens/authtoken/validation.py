"""A token that Keystone has confirmed, or refused, and how long that stands."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..epochs import Epoch, Slots
from .headers import STRIPPED
from .token_info import TokenInfo


class Standing(NamedTuple):
    """How long an answer of Keystone may be used."""

    #: Seconds of the monotonic clock.
    until: float
    #: Seconds since the epoch of the wall clock, when the token ends: a clock that is set forward
    #: ends what is known of it as well.
    expires: float
    #: What the coordinator is asked about at each use; ``None`` if there is none to ask.
    epoch: Epoch | None = None
    slots: Slots | None = None


@functools.lru_cache(maxsize=16)
def _without(names: frozenset[str]) -> frozenset[str]:
    """Return the headers that a token of this shape does not have: one set for all of it."""
    return STRIPPED - names


class Validation:
    """A confirmed token.

    :param ready: what the service finds of it in the WSGI environment
    :param packed: what ``keystone.token_info`` is made of
    :param plain: whether nothing of the request itself decides if the token may be used: neither
        a token bind nor access rules
    :param etag: names the answer for asking again, or ``None``
    :param ends: Unix time after which it is good for nothing, whatever Keystone says
    """

    __slots__ = ("absent", "ends", "etag", "packed", "plain", "ready", "size", "standing")

    def __init__(
        self,
        ready: dict[str, str | None],
        packed: bytes,
        *,
        plain: bool,
        etag: str | None,
        ends: float,
        standing: Standing,
    ) -> None:
        self.ready = ready
        #: What is to be taken off a request, besides what ``ready`` replaces.
        self.absent = _without(frozenset(ready))
        self.packed = packed
        self.plain = plain
        self.etag = etag
        self.ends = ends
        #: Replaced as a whole when Keystone says that the answer still stands.
        self.standing = standing
        # What Python needs for the rest, measured: objects, dict, strings, slots and the key.
        self.size = len(packed) + 4200 + sum(len(value or "") for value in ready.values())

    def data(self, token: str) -> TokenInfo:
        """Return the token's data for one request.

        :param token: the token itself, stripped
        """
        return TokenInfo(self.packed, token)


class Refusal:
    """A token that Keystone does not know."""

    __slots__ = ("size", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        # Measured as well.
        self.size = 350 if standing.slots is None else 700 + 50 * len(standing.slots)
