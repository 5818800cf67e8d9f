"""Questions to Keystone about tokens, asked by keystonemiddleware's own code.

Each is asked once at a time, and its answer is kept as long as it stands.
"""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any, NoReturn

from keystoneauth1 import exceptions as ksa_exceptions
from keystoneclient.v3.tokens import TokenManager
from keystonemiddleware.auth_token import _exceptions, _identity
from keystonemiddleware.i18n import _

from .. import tags_header
from .memcached import TokenCache
from .single_flight import Flights
from .validations import Question, Validation, Validations

# Errors that say that Keystone is away: those that keystonemiddleware answers with 503, and one
# that it does not expect.
_AWAY = (
    ksa_exceptions.ConnectFailure,
    ksa_exceptions.DiscoveryFailure,
    ksa_exceptions.RequestTimeout,
    _exceptions.ServiceError,
)
_LOST = ksa_exceptions.ConnectionError


class _NotModified(Exception):
    """Keystone's answer about the token is still the known one (304)."""


class _Client:
    """Keystone's client for one question: it adds our headers, and keeps those of the answer."""

    def __init__(self, client: Any, question: Question) -> None:
        self._client = client
        self._question = question

    def get(self, url: str, headers: dict[str, str]) -> tuple[Any, Any]:
        question = self._question
        question.told = question.etag = None
        question.unknown = False
        asked = {**headers, tags_header.NAME: tags_header.ASK}
        known = question.known
        if known is not None and known.etag is not None:
            asked["If-None-Match"] = known.etag
        url_path = url.partition("?")[0]
        try:
            response, body = self._client.get(url, headers=asked)
        except ksa_exceptions.NotFound as error:
            # Not of discovery, nor of the login that the question may need first.
            if error.method == "GET" and str(error.url).partition("?")[0].endswith(url_path):
                question.told = getattr(error.response, "headers", {}).get(tags_header.NAME)
                # Asked again after a 401, keystonemiddleware leaves allow_expired out.
                question.unknown = question.allow_expired == ("allow_expired" in url)
            raise
        question.told = response.headers.get(tags_header.NAME)
        question.etag = response.headers.get("ETag") if question.told is not None else None
        if response.status_code == 304:
            if known is None or known.etag is None:
                raise ksa_exceptions.HttpError(
                    message="Not Modified, though nothing was known", http_status=304,
                    response=response,
                )  # fmt: skip
            question.etag = known.etag
            raise _NotModified
        return response, body


class _Call(_identity.IdentityServer):
    """One question to the identity server, with the retries and errors of the original.

    :param server: the identity server
    :param question: the question
    """

    def __init__(self, server: IdentityServer, question: Question) -> None:
        self.__dict__.update(vars(server))
        self._server = server
        self._question = question

    @property
    def _request_strategy(self) -> Any:
        # A copy with this question's client; made here, where the original handles failures.
        strategy = copy.copy(self._server._request_strategy)
        client = strategy._client.tokens._client
        tokens = TokenManager(_Client(client, self._question))
        strategy._client = SimpleNamespace(tokens=tokens)
        return strategy


class IdentityServer(_identity.IdentityServer):
    """keystonemiddleware's identity server, which asks only when it has to.

    :param original: the identity server that keystonemiddleware made
    :param validations: the validations that this process keeps
    :param cache: the validations that services share
    :param flight_timeout: seconds to wait for another request that asks about the same token, 0 or
        more; 0 never waits
    """

    def __init__(
        self,
        original: Any,
        validations: Validations,
        cache: TokenCache,
        *,
        flight_timeout: float,
    ) -> None:
        self.__dict__.update(vars(original))
        self._validations = validations
        self._cache = cache
        self._flights = Flights(flight_timeout)

    def verify_token(
        self, user_token: str, retry: bool = True, allow_expired: bool = False
    ) -> dict[str, Any]:
        """Return Keystone's answer about a token, or its kept answer while that stands.

        :param user_token: the token
        :param retry: true to ask again with a new token of the service's after a 401
        :param allow_expired: true to accept a token that has ended
        :returns: ``{"token": {…}}``, Keystone's answer
        :raises InvalidToken: Keystone does not accept the token
        :raises ServiceError: Keystone cannot be asked; as for the original, keystoneauth1's errors
            for Keystone being away pass through
        """
        validations = self._validations
        key = validations.key(user_token, allow_expired)
        if validations.refuses(key):
            self._refuse()
        flight = self._flights.begin(key)
        if flight is not None:
            # The other one's answer is checked as by any new request: a change may have come
            # before this request began.
            found = validations.find(key)
            if found is not None:
                return found.data(user_token)
            if validations.refuses(key):
                self._refuse()
            if isinstance(flight.error, _AWAY):
                raise _exceptions.ServiceError(str(flight.error))
            if flight.error is not None:
                raise _LOST(str(flight.error))
            return self._ask(key, user_token, retry, allow_expired)
        failure: Exception | None = None
        try:
            return self._ask(key, user_token, retry, allow_expired)
        except (*_AWAY, _LOST) as error:
            failure = error
            raise
        finally:
            self._flights.end(key, failure)

    def _ask(self, key: bytes, token: str, retry: bool, allow_expired: bool) -> dict[str, Any]:
        validations = self._validations
        known = validations.confirmed.get(key)
        purpose = "e" if allow_expired else "t"
        if not self._include_service_catalog:
            purpose += "n"
        if known is None and validations.tells:
            known = self._shared(key, token, purpose, allow_expired)
            if known is not None and validations.stands(known.standing):
                return known.data(token)
        question = Question(key, known, allow_expired=allow_expired)
        try:
            data: dict[str, Any] = _Call(self, question).verify_token(token, retry, allow_expired)
        except _NotModified:
            assert known is not None
            validations.renew(question, known)
            data = known.data(token)
            if validations.coordinator is None:
                return data  # others ask as well, and would have nothing of it
        except _exceptions.InvalidToken:
            if question.unknown:
                validations.refuse(question)
            raise
        else:
            made = validations.confirm(question, data, token)
            if made is None or question.etag is None:
                return data
        if question.told is not None and question.etag is not None:
            self._cache.put(token, purpose, question.told, question.etag, data)
        return data

    def _shared(
        self, key: bytes, token: str, purpose: str, allow_expired: bool
    ) -> Validation | None:
        """Return the validation that another service or worker kept, whether or not it stands."""
        envelope = self._cache.find(token, purpose)
        if envelope is None:
            return None
        question = Question(key, allow_expired=allow_expired)
        question.told, question.etag = envelope.told, envelope.etag
        age = max(0.0, time.time() - envelope.since)
        return self._validations.share(question, envelope.data, token, age)

    def _refuse(self) -> NoReturn:
        self._LOG.info("Authorization failed for token")
        raise _exceptions.InvalidToken(_("Token authorization failed"))
