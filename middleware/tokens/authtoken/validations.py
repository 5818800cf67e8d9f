"""The validations that a worker keeps, and the rules by which Keystone is asked again.

Three kinds of answers come from Keystone, and are used for different times:

* Keystone's token cache tells the epoch and slots by which an answer stands. With the coordinator
  it is checked at each use. Without, the answer is used for ``revalidate`` seconds from before it
  was asked for; then it is asked again by its ETag, which costs Keystone's cache microseconds.
* Keystone's token cache tells that it does not keep the answer (``none``). It is then used for the
  request that asked; without a coordinator, for ``revalidate`` seconds.
* Keystone tells nothing. As long as it never did, it is a stock one, and an answer is used for
  ``token_cache_time`` seconds as by keystonemiddleware. The first answer with an epoch ends that:
  answers that were kept without one are dropped, and later ones are treated as those of ``none``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from keyfront.errors import CoordinatorError, NoEpochTableError

from .. import tags_header
from ..epochs import Coordinator, Epoch, Slots
from ..worker_cache import LRUCache
from .token_info import STRIPPED, TokenInfo, pack

LOG = logging.getLogger(__name__)

# Answers in a row from another epoch table than the coordinator's before that is logged: when a
# table is made anew, some are on their way.
_STRANGERS = 10


class Standing(NamedTuple):
    """The end of an answer of Keystone, and the epoch by which it stands."""

    #: Seconds of the monotonic clock.
    until: float
    #: Unix time when the token ends: a wall clock that is set forward ends the answer as well.
    expires: float
    #: The epoch and slots that the coordinator checks at each use; ``None`` without a coordinator.
    epoch: Epoch | None = None
    slots: Slots | None = None


@functools.lru_cache(maxsize=16)
def _without(names: frozenset[str]) -> frozenset[str]:
    """Return the headers that a token with these headers lacks: one set for all such tokens."""
    return STRIPPED - names


class Validation:
    """A confirmed token.

    :param ready: the WSGI variables that the service is given of the token, by name
    :param packed: the packed data of ``keystone.token_info``, from :func:`pack`
    :param plain: true if the token may be used for any request: it has neither a bind that must be
        checked nor access rules
    :param etag: the ETag of the answer, for asking again; ``None`` without one
    :param ends: Unix time after which the token may not be used, whatever Keystone says
    :param standing: the end of the answer
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
        #: The WSGI variables to be removed from a request, besides those that ``ready`` replaces.
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
        """Return the token's data for one request: ``{"token": {…}}``.

        :param token: the token itself, stripped
        """
        return TokenInfo(self.packed, token)


class Refusal:
    """A token that Keystone does not know.

    :param standing: the end of the answer
    """

    __slots__ = ("size", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        # Measured as well.
        self.size = 350 if standing.slots is None else 700 + 50 * len(standing.slots)


class Prepared(NamedTuple):
    """The parts of a :class:`.Validation` besides the data itself."""

    ready: dict[str, str | None]
    plain: bool
    #: Unix time of the token's end, or infinite.
    expires: float


class Question:
    """One question to Keystone, and the headers of the answer.

    :param key: the token's key
    :param known: the validation that is asked about again, if there is one
    :param allow_expired: true if a token that has ended is accepted
    """

    __slots__ = ("allow_expired", "asked", "etag", "key", "known", "silent", "told", "unknown")

    def __init__(
        self, key: bytes, known: Validation | None = None, *, allow_expired: bool = False
    ) -> None:
        self.key = key
        self.allow_expired = allow_expired
        self.known = known
        #: Seconds of the monotonic clock, from before the first attempt.
        self.asked = time.monotonic()
        #: The answer's header ``X-Keyfront-Epochs``; ``None`` without one.
        self.told: str | None = None
        self.etag: str | None = None
        #: True if the answer is that there is no such token.
        self.unknown = False
        #: True if the answer was taken for that of a stock Keystone.
        self.silent = False


class Validations:
    """The validations of one process.

    :param prepare: the function that makes the values for a service from a token's data and the
        token itself; it may raise anything for data that are no token's
    :param memory: bytes of validations, an eighth of it for refusals
    :param cache_time: seconds for which an answer is kept at most (``token_cache_time``); negative
        keeps nothing, 0 sets no bound
    :param negative_ttl: seconds for which a refusal is kept at most, 0 or more
    :param revalidate: seconds for which an answer is used without a coordinator, above 0
    :param coordinator: the coordinator of Keystone's token cache; ``None`` without one
    """

    def __init__(
        self,
        prepare: Callable[[dict[str, Any], str], Prepared],
        *,
        memory: int,
        cache_time: float,
        negative_ttl: float,
        revalidate: float,
        coordinator: Coordinator | None,
    ) -> None:
        self._prepare = prepare
        self.cache_time = math.inf if cache_time == 0 else cache_time
        self._negative_ttl = negative_ttl
        self._revalidate = revalidate
        self.coordinator = coordinator
        self.confirmed: LRUCache[Validation] = LRUCache(memory - memory // 8)
        self.refused: LRUCache[Refusal] = LRUCache(memory // 8)
        #: True if Keystone ever told the epoch of an answer.
        self.tells = False
        #: True if it ever confirmed a token without telling an epoch.
        self.stock = False
        self._silent = False
        self._strangers = 0
        self._warned = False
        # A secret of this process and its children: no key shows a token.
        secret = os.urandom(32)
        self._hash = hashlib.blake2b(b"t", digest_size=16, key=secret)
        self._expired_hash = hashlib.blake2b(b"e", digest_size=16, key=secret)

    def key(self, token: str, allow_expired: bool = False) -> bytes:
        """Return the key of a token, a keyed hash of 16 bytes.

        :param token: the token, stripped
        :param allow_expired: true for an answer that accepts a token which has ended
        """
        keyed = (self._expired_hash if allow_expired else self._hash).copy()
        keyed.update(token.encode("utf-8", "surrogatepass"))
        return keyed.digest()

    def stands(self, standing: Standing) -> bool:
        """Return whether an answer may be used for a request that has begun."""
        return (
            time.monotonic() < standing.until
            and time.time() < standing.expires
            and (
                standing.slots is None
                or self.coordinator.fresh(standing.epoch, standing.slots)  # type: ignore[union-attr, arg-type]
            )
        )

    def find(self, key: bytes) -> Validation | None:
        """Return the validation of a key if it stands; else ``None``."""
        found = self.confirmed.get(key)
        return found if found is not None and self.stands(found.standing) else None

    def refuses(self, key: bytes) -> bool:
        """Return whether Keystone's refusal of a token is known and stands."""
        found = self.refused.get(key)
        return found is not None and self.stands(found.standing)

    def confirm(self, question: Question, data: dict[str, Any], token: str) -> Validation | None:
        """Keep Keystone's confirmation of a token, as far as its header allows.

        :param question: the question, with the headers of the answer
        :param data: ``{"token": {…}}``, the answer
        :param token: the token, stripped
        :returns: the validation, kept or not; ``None`` if the data are no token's
        """
        self._heard(question)
        if question.told is None:
            self._note_silence()
        made = self._made(question, data, token, self.cache_time)
        if made is None:
            self.confirmed.drop(question.key)
        else:
            self._keep(question, made)
        return made

    def renew(self, question: Question, known: Validation) -> None:
        """Renew a validation that Keystone has confirmed unchanged (304).

        :param question: the question, with the headers of the answer
        :param known: the validation
        """
        self._heard(question)
        known.standing = self._standing(question, self.cache_time, known.ends)
        self._keep(question, known)

    def adopt(self, key: bytes, data: dict[str, Any], token: str) -> None:
        """Keep an answer out of keystonemiddleware's cache, for ``revalidate`` seconds at most.

        Its age is not known. Behind a Keystone that tells epochs nothing is kept.

        :param key: the token's key
        :param data: ``{"token": {…}}``, the answer
        :param token: the token, stripped
        """
        question = Question(key)
        made = self._made(question, data, token, min(self._revalidate, self.cache_time))
        if made is not None and not self.tells:
            self._keep(question, made)

    def share(
        self, question: Question, data: dict[str, Any], token: str, age: float
    ) -> Validation | None:
        """Keep an answer that another process was given, with its epoch.

        :param question: a question with that answer's headers
        :param data: ``{"token": {…}}``, the answer
        :param token: the token, stripped
        :param age: seconds since the answer, by the wall clocks of two hosts: good enough for
            ``token_cache_time``, not for ``revalidate``
        :returns: the validation, which may not stand, and is then to be asked about again; ``None``
            if the data are no token's
        """
        seconds = -1.0 if self.coordinator is None else self.cache_time - age
        made = self._made(question, data, token, seconds)
        if made is not None:
            self._keep(question, made)
        return made

    def refuse(self, question: Question) -> None:
        """Keep Keystone's answer that it knows no such token, as far as its header allows.

        :param question: the question, with the headers of the answer
        """
        self._heard(question)
        self.confirmed.drop(question.key)
        if self.cache_time < 0:
            return
        standing = self._standing(question, self._negative_ttl, math.inf)
        if self.stands(standing):
            self.refused.put(question.key, Refusal(standing))
            self._forget_if_told_since(question)

    def _made(
        self, question: Question, data: dict[str, Any], token: str, seconds: float
    ) -> Validation | None:
        try:
            packed = pack(data, token)
            if packed is None:
                return None
            ready, plain, expires = self._prepare(data, token)
        except Exception:  # whatever is wrong with the data, keystonemiddleware says it
            return None
        if question.allow_expired:
            expires = math.inf
        standing = self._standing(question, seconds, expires)
        return Validation(
            ready, packed, plain=plain, etag=question.etag, ends=expires, standing=standing
        )

    def _keep(self, question: Question, made: Validation) -> None:
        self.refused.drop(question.key)
        if made.standing.until > question.asked or made.etag is not None:
            self.confirmed.put(question.key, made)
            self._forget_if_told_since(question)
        else:
            self.confirmed.drop(question.key)

    def _standing(self, question: Question, seconds: float, expires: float) -> Standing:
        """Return the end of an answer; it is in the past if only its own request may use it."""
        if question.told is None and not self.tells:
            question.silent = True
            return Standing(question.asked + seconds, expires)
        told = tags_header.parse(question.told) if question.told is not None else None
        if told is not None and told.expires is not None:
            expires = min(expires, told.expires)
        if self.coordinator is None:
            return Standing(question.asked + min(seconds, self._revalidate), expires)
        if told is None or (told.expires is None and question.allow_expired):
            # Without an end of its own, such an answer has none that is known here.
            return Standing(-math.inf, expires)
        if told.digest:
            self.coordinator.follow(told.digest)
        self._compare(told.epoch, told.slots)
        return Standing(question.asked + seconds, expires, told.epoch, told.slots)

    def _heard(self, question: Question) -> None:
        if question.told is not None and not self.tells:
            self.tells = True
            self.confirmed.clear()
            self.refused.clear()

    def _forget_if_told_since(self, question: Question) -> None:
        """Drop an answer without an epoch, if Keystone has told one of another answer meanwhile."""
        if question.silent and self.tells:
            self.confirmed.drop(question.key)
            self.refused.drop(question.key)

    def _note_silence(self) -> None:
        """Log once that Keystone tells no epoch, and what that means."""
        first, self.stock = not self.stock, True
        if self.tells and not self._silent:
            self._silent = True
            LOG.warning(
                "authtoken: Keystone said how long an answer stands, and now does not, so it is "
                "asked about each request: a node has no token_cache, or a proxy takes the header "
                "%s away", tags_header.NAME,
            )  # fmt: skip
        elif first and not self.tells and self.coordinator is not None:
            why = f"it has no token_cache, or a proxy takes the header {tags_header.NAME} away"
            try:
                self.coordinator.now()
            except NoEpochTableError as error:
                why = f"no Keystone with keyfront's token_cache is there ({error})"
            except CoordinatorError:
                pass  # it says so itself
            LOG.warning(
                "authtoken: Keystone does not say how long an answer stands, so a revoked token "
                "works for up to token_cache_time, as with keystonemiddleware alone: %s", why,
            )  # fmt: skip

    def _compare(self, epoch: Epoch, slots: Slots) -> None:
        """Log once that Keystone's epochs are not where this service's coordinator looks."""
        coordinator = self.coordinator
        if coordinator is None or self._warned:
            return
        if coordinator.fresh(epoch, slots):
            self._strangers = 0
            return
        why = "Keystone's token_cache has its epochs elsewhere"
        try:
            same = coordinator.now().generation == epoch.generation
        except NoEpochTableError as error:
            same, why = False, f"{why}, {error}"
        except CoordinatorError:
            return  # it says so itself
        self._strangers = 0 if same else self._strangers + 1
        if self._strangers >= _STRANGERS:
            self._warned = True
            LOG.warning(
                "authtoken asks Keystone about each request: %s; name the same coordinator and "
                "coordinator_prefix in [keyfront_authtoken] here and in [keyfront_token_cache] in "
                "keystone.conf", why,
            )  # fmt: skip
