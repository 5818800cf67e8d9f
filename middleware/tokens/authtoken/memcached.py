"""Validations that services share through memcached, or through the cache that Swift brings.

With a stock Keystone that is keystonemiddleware's own cache, as it is. The answers of a Keystone
with ``token_cache`` are kept under other keys and in another form, together with their epochs: so
that stock services which use the same memcached neither read nor write them. They are protected
(``memcache_security_strategy``) by keystonemiddleware's own code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from keystonemiddleware.auth_token import _cache
from oslo_serialization import jsonutils
from oslo_utils import timeutils

from .token_info import without
from .validations import Validations

LOG = logging.getLogger(__name__)

_PREFIX, _OURS = "tokens/", "keyfront/"
# Version of the form, raised when it changes.
_VERSION = 2


class Envelope(NamedTuple):
    """A validation as services share it."""

    #: The value of the header ``X-Keyfront-Epochs``, by which it stands.
    told: str
    etag: str
    #: ``{"token": {…}}``
    data: dict[str, Any]
    #: Unix time when it was put there.
    since: float


class _Shared(_cache.TokenCache):
    """keystonemiddleware's cache, used only where its entries can be trusted.

    :param original: the cache that keystonemiddleware made
    :param validations: the validations of this process
    """

    def __init__(self, original: Any, validations: Validations) -> None:
        self.__dict__.update(vars(original))
        self._validations = validations

    def _get_cache_pool(self, cache: Any) -> Any:
        if cache or self._memcached_servers:
            return super()._get_cache_pool(cache)
        return _LocalPool()

    @property
    def _is_shared(self) -> bool:
        """True if other processes than this one write into the cache."""
        return not isinstance(self._cache_pool, _LocalPool)

    def get(self, token_id: str) -> Any:
        """Return a stock Keystone's answer about a token; ``None`` behind any other Keystone."""
        known = self._validations
        # Before Keystone's first answer it is not known to be a stock one; what stock services put
        # there must not pass for the answer of a Keystone with epochs.
        if known.tells or (self._is_shared and not known.stock):
            return None
        data = super().get(token_id)
        if isinstance(data, dict) and token_id:
            known.adopt(known.key(token_id), data, token_id)
        return data

    def set(self, token_id: str, data: Any) -> None:
        """Keep a stock Keystone's answer about a token; behind any other, do nothing."""
        if not self._validations.tells:
            super().set(token_id, data)

    def find(self, token: str, purpose: str) -> Envelope | None:
        """Return the validation that some service kept with :meth:`put`; ``None`` without one.

        Errors of the cache are logged and taken for none.

        :param token: the token
        :param purpose: a short text for what the answer varies on besides the token
        """
        if not self._is_shared:
            return None
        key, context = self._key(token, purpose)
        try:
            with self._cache_pool.reserve() as client:
                raw = client.get(key)
            if raw is None:
                return None
            packed = self._deserialize(raw.encode() if isinstance(raw, str) else raw, context)
            if packed is None:
                return None
            version, told, etag, since, body = jsonutils.loads(packed)
            if version != _VERSION:
                return None
            return Envelope(str(told), str(etag), {"token": dict(body)}, float(since))
        except Exception as error:
            # from any client; nothing here is needed for a right answer
            LOG.warning("authtoken: what services share cannot be read: %s", type(error).__name__)
            return None

    def put(self, token: str, purpose: str, told: str, etag: str, data: dict[str, Any]) -> None:
        """Keep an answer for other services and workers; errors of the cache are logged.

        :param token: the token
        :param purpose: a short text for what the answer varies on besides the token
        :param told: the value of the header ``X-Keyfront-Epochs``
        :param etag: the ETag of the answer
        :param data: ``{"token": {…}}``, the answer
        """
        if not self._is_shared or self._validations.cache_time < 0:
            return
        # A list, so that a stock service that were to find it would find no token in it.
        body = without(data["token"], token)
        content = jsonutils.dump_as_bytes([_VERSION, told, etag, time.time(), body])
        key, context = self._key(token, purpose)
        try:
            with self._cache_pool.reserve() as client:
                client.set(key, self._serialize(content, context), time=self._cache_time)
        except Exception as error:
            LOG.warning("authtoken: an answer cannot be shared: %s", type(error).__name__)

    def _key(self, token: str, purpose: str) -> tuple[str, Any]:
        key, context = self._get_cache_key(token)
        return f"{_OURS}{purpose}/{key.removeprefix(_PREFIX)}", context


class TokenCache(_Shared):
    """The cache in place of keystonemiddleware's class of this name."""


class SecureTokenCache(_Shared, _cache.SecureTokenCache):
    """The cache in place of keystonemiddleware's class of this name, which signs or encrypts."""


def guarded(original: Any, validations: Validations) -> _Shared:
    """Return a cache that does as ``original`` as long as its entries can be trusted.

    :param original: the cache that keystonemiddleware made
    :param validations: the validations of this process
    """
    secure = isinstance(original, _cache.SecureTokenCache)
    return (SecureTokenCache if secure else TokenCache)(original, validations)


class _LocalPool(_cache._CachePool):
    """A pool of keystonemiddleware's cache of one process, with a bound and without full scans.

    Requests are answered from :class:`.validations.Validations`; this serves callers of
    keystonemiddleware's own cache.
    """

    def __init__(self) -> None:
        # keystonemiddleware's own logs an advice to use memcached instead
        list.__init__(self)

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Any]:
        try:
            client = self.pop()
        except IndexError:
            client = LocalClient()
        try:
            yield client
        finally:
            self.append(client)


class LocalClient(_cache._FakeClient):
    """A client like memcached's that keeps its values itself, :attr:`LIMIT` of them."""

    LIMIT = 1000

    def __init__(self) -> None:
        super().__init__()
        self.cache: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    def get(self, key: str) -> Any:
        """Return a value that has not ended; ``None`` without one."""
        timeout, value = self.cache.get(key, (0, None))
        if timeout and timeutils.utcnow_ts() >= timeout:
            self.cache.pop(key, None)
            return None
        return value

    def set(self, key: str, value: Any, time: int = 0, min_compress_len: int = 0) -> bool:
        """Keep a value for ``time`` seconds, 0 for ever; drop the oldest if there are too many."""
        stored: bool = super().set(key, value, time, min_compress_len)
        while len(self.cache) > self.LIMIT:
            with contextlib.suppress(KeyError):
                self.cache.popitem(last=False)
        return stored
