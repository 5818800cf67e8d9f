"""What services share through memcached, or through the cache that Swift brings.

With a stock Keystone that is keystonemiddleware's own cache, as it is. What a Keystone with
``token_cache`` says is kept under other keys and in another form, together with how long it
stands: so that stock services which use the same memcached neither read nor feed it. How it is
protected (``memcache_security_strategy``) is keystonemiddleware's own.
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

from .validation import without
from .validations import Validations

LOG = logging.getLogger(__name__)

_PREFIX, _OURS = "tokens/", "keyfront/"
# Changes whenever the form does.
_VERSION = 2


class Envelope(NamedTuple):
    """A validation as services share it."""

    #: What Keystone's cache said of how long it stands.
    told: str
    etag: str
    #: ``{"token": {…}}``
    data: dict[str, Any]
    #: Seconds of the wall clock, when it was put there.
    since: float


class _Shared(_cache.TokenCache):
    """keystonemiddleware's cache, which knows when its entries are not to be trusted.

    :param original: the one that keystonemiddleware made
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
        """Whether others than this process write into it."""
        return not isinstance(self._cache_pool, _LocalPool)

    def get(self, token_id: str) -> Any:
        """Return what a stock Keystone said of a token; ``None`` from any other."""
        known = self._validations
        # Before Keystone's first answer nothing is known of it; what stock services put there must
        # not pass for the word of one that tells.
        if known.tells or (self._is_shared and not known.stock):
            return None
        data = super().get(token_id)
        if isinstance(data, dict) and token_id:
            known.adopt(known.key(token_id), data, token_id)
        return data

    def set(self, token_id: str, data: Any) -> None:
        """Keep what a stock Keystone said of a token."""
        if not self._validations.tells:
            super().set(token_id, data)

    def find(self, token: str, purpose: str) -> Envelope | None:
        """Return what some service kept of a token that Keystone said how long stands.

        :param purpose: what the answer varies on besides the token
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
            # of whatever client it is; nothing here is needed for a right answer
            LOG.warning("authtoken: what services share cannot be read: %s", type(error).__name__)
            return None

    def put(self, token: str, purpose: str, told: str, etag: str, data: dict[str, Any]) -> None:
        """Keep an answer for other services and workers."""
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
    """In place of keystonemiddleware's class of this name."""


class SecureTokenCache(_Shared, _cache.SecureTokenCache):
    """In place of keystonemiddleware's class of this name."""


def guarded(original: Any, validations: Validations) -> _Shared:
    """Return a cache that does as ``original`` as long as it may be trusted."""
    secure = isinstance(original, _cache.SecureTokenCache)
    return (SecureTokenCache if secure else TokenCache)(original, validations)


class _LocalPool(_cache._CachePool):
    """keystonemiddleware's cache of one process, with a bound and without going through all of it
    each time.

    What a request needs is in :class:`.validations.Validations`; this is what is left of it for
    those who look into keystonemiddleware's own.
    """

    def __init__(self) -> None:
        # keystonemiddleware's own tells to use memcached instead
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
    """A memcached client without a memcached, for a thousand tokens."""

    LIMIT = 1000

    def __init__(self) -> None:
        super().__init__()
        self.cache: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    def get(self, key: str) -> Any:
        """Return a value that has not ended, or ``None``."""
        timeout, value = self.cache.get(key, (0, None))
        if timeout and timeutils.utcnow_ts() >= timeout:
            self.cache.pop(key, None)
            return None
        return value

    def set(self, key: str, value: Any, time: int = 0, min_compress_len: int = 0) -> bool:
        """Keep a value for ``time`` seconds, in place of the oldest."""
        stored: bool = super().set(key, value, time, min_compress_len)
        while len(self.cache) > self.LIMIT:
            with contextlib.suppress(KeyError):
                self.cache.popitem(last=False)
        return stored
