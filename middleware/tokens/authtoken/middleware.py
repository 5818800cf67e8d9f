"""The ``authtoken`` middleware for the services beside Keystone.

In the paste file of a service, in place of keystonemiddleware's factory::

    [filter:authtoken]
    paste.filter_factory = keyfront.middleware.tokens.authtoken:filter_factory

or ``use = egg:keyfront#authtoken``. It is keystonemiddleware's middleware: every option of
``[keystone_authtoken]``, header, environment key and answer is its own code, and only where a
request needs nothing but a known token is it answered by ours. Its own options are those of
``[keyfront_authtoken]`` in the service's configuration; in the filter's section their names begin
with ``keyfront_``. Services that take no filter from a paste file get it by
``install.py``.

docs/services.md says what it promises.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keyfront.common.options import unread
from keyfront.errors import MissingPartError

from .. import options

try:
    import keystonemiddleware.auth_token as stock
except ModuleNotFoundError as error:
    if error.name not in ("keystonemiddleware", "keystonemiddleware.auth_token"):
        raise
    raise MissingPartError(
        "authtoken is keystonemiddleware's with a cache of its own; install it with: "
        "pip install 'keystonemiddleware>=10.7'"
    ) from error
import webob.exc
from keystoneauth1 import access
from keystoneauth1.identity import v2
from keystonemiddleware.auth_token import _user_plugin

from ..coordinator.factory import coordinator_of
from ..epochs import Coordinator
from . import token_info
from .identity import IdentityServer
from .memcached import guarded
from .token_info import TokenInfo
from .validations import Prepared, Validation, Validations

LOG = logging.getLogger(__name__)

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_Stock: Any = stock.AuthProtocol

# Methods that a service's own subclass may replace; then each request goes through them.
_HOOKS = (
    *("process_request", "process_response", "fetch_token", "validate_allowed_request"),
    *("_do_fetch_token", "_validate_token", "_confirm_token_bind", "_reject_auth_headers"),
)


class AuthProtocol(_Stock):
    """keystonemiddleware's ``AuthProtocol``, which answers from memory where a validation stands.

    :param app: the service's WSGI application
    :param conf: the options of the paste section, as keystonemiddleware takes them
    :param coordinator: the coordinator to use in place of the one that the options name
    :raises OptionError: an option of ours has a value out of its range
    :raises MissingPartError: a coordinator is named, and its client is not installed
    """

    _token_cache: Any
    _identity_server: Any

    def __init__(
        self, app: Any, conf: dict[str, Any], *, coordinator: Coordinator | None = None
    ) -> None:
        prefix = options.AUTHTOKEN_PREFIX
        local = {name: value for name, value in conf.items() if name.startswith(prefix)}
        super().__init__(app, {name: conf[name] for name in conf.keys() - local.keys()})
        service = self._conf.oslo_conf_obj
        values = options.authtoken(service, local)
        self.validations = Validations(
            self._prepare,
            memory=values["memory"] << 20,
            cache_time=int(self._conf.get("token_cache_time")),
            negative_ttl=values["negative_ttl"],
            revalidate=values["revalidate"],
            coordinator=coordinator or coordinator_of(values, create=False),
        )
        self._tell(values)
        own = {option.dest for option in options.AUTHTOKEN}
        found = [
            f"{name} in the filter's section, did you mean {prefix}{name}?"
            for name in sorted(conf.keys() & own)
        ]
        found += unread(service, {options.AUTHTOKEN_GROUP: options.AUTHTOKEN})
        if found:
            LOG.warning("nothing reads %s", "; ".join(found))
        self._token_cache = guarded(self._token_cache, self.validations)
        self._identity_server = IdentityServer(
            self._identity_server,
            self.validations,
            self._token_cache,
            flight_timeout=values["flight_timeout"],
        )
        self._is_plain = all(
            getattr(type(self), name) is getattr(AuthProtocol, name) for name in _HOOKS
        )

    def _tell(self, values: Mapping[str, Any]) -> None:
        """Log by what this middleware goes, and what it cannot go by; once, at the start."""
        url = getattr(self._auth, "auth_url", None) or getattr(self._auth, "endpoint", None) or ""
        # What keystonemiddleware before 13 makes then logs in by API v2, which no Keystone has.
        by_v2 = isinstance(getattr(self._auth, "_plugin", None), v2.Password)
        if self._auth is None or by_v2:
            LOG.warning("authtoken: Keystone cannot be asked: auth_type is not set")
        elif url and "://" not in url:
            LOG.warning("authtoken: Keystone cannot be asked: its URL has no http:// or https://")
        coordinator = self.validations.coordinator
        if coordinator is None:
            bound = f"for {values['revalidate']:g} s, and on if Keystone says that it stands"
        else:
            bound = (
                f"while {coordinator} (prefix {values['coordinator_prefix']}, "
                f"{values['consistency']}) says that it stands"
            )
        seconds = int(self._conf.get("token_cache_time"))
        LOG.info(
            "authtoken: Keystone at %s validates; a validation is used %s, %s; a refusal for %g s; "
            "%d MiB",
            _without_user(url) or "no URL",
            bound if seconds >= 0 else "once",
            f"at most {seconds} s" if seconds > 0 else f"with token_cache_time = {seconds}",
            values["negative_ttl"],
            values["memory"],
        )

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333): by ours if its token's validation stands, else by stock's.
        """
        token = environ.get("HTTP_X_AUTH_TOKEN")
        if (
            token
            and not environ.get("HTTP_X_SERVICE_TOKEN")
            # which webob answers without a body
            and environ["REQUEST_METHOD"] != "HEAD"
        ):
            token = token.strip()
            validations = self.validations
            found = validations.confirmed.get(validations.key(token))
            if (
                found is not None
                and found.plain
                and validations.stands(found.standing)
                and not self.log.isEnabledFor(logging.DEBUG)
            ):
                return self._hit(environ, start_response, found, token)
        answer: Iterable[bytes] = super().__call__(environ, start_response)
        return answer

    def process_request(self, request: Any) -> Any:
        """Remove the headers that only authtoken may set, and set those of the request's token.

        :param request: keystonemiddleware's request
        :returns: a response that ends the request, or ``None``
        """
        request.headers.pop(token_info.SYSTEM_SCOPE, None)
        return super().process_request(request)

    def fetch_token(self, token: str, allow_expired: bool = False) -> Any:
        """Return a token's data, from memory if its validation stands.

        :param token: the token, stripped
        :param allow_expired: true to accept a token that has ended
        :returns: ``{"token": {…}}``
        :raises InvalidToken: Keystone does not accept the token
        """
        validations = self.validations
        found = validations.find(validations.key(token))
        if found is None and allow_expired:
            found = validations.find(validations.key(token, allow_expired=True))
        if found is not None:
            return found.data(token)
        return super().fetch_token(token, allow_expired=allow_expired)

    def _hit(
        self,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
        found: Validation,
        token: str,
    ) -> Iterable[bytes]:
        """Let the service answer a request whose token has a validation that stands."""
        # For most requests this look is enough, and it makes no set.
        if not environ.keys().isdisjoint(found.absent):
            for name in found.absent & environ.keys():
                del environ[name]
        environ.update(found.ready)
        info = environ[token_info.TOKEN_INFO] = TokenInfo(found.packed, token)
        environ[token_info.TOKEN_AUTH] = _user_plugin.UserAuthPlugin(
            access.AccessInfoV3(info, token), None, session=self._session, auth=self._auth
        )

        def start(status: str, fields: list[tuple[str, str]], *error: Any) -> Any:
            if status.startswith("401"):
                fields = [*fields, *self._reject_auth_headers]
            for name, _ in fields:
                if len(name) == 8 and name.lower() == "location":
                    fields = _absolute(environ, fields)
                    break
            return start_response(status, fields, *error)

        try:
            answer: Iterable[bytes] = self._app(environ, start)
        except webob.exc.HTTPException as error:  # an answer, as for webob's wsgify
            answer = error(environ, start_response)
        return answer

    def _prepare(self, data: dict[str, Any], token: str) -> Prepared:
        """Return the values that a service is given of a token, and what they are good for.

        :raises Exception: any, for data that are no token's
        """
        auth_ref = access.create(body=data, auth_token=token)
        ready = token_info.ready(auth_ref, catalog=self._include_service_catalog)
        credential = data["token"].get("application_credential")
        ruled = bool(credential) and credential.get("access_rules") is not None
        plain = self._is_plain and not ruled and self._needs_no_bind(auth_ref)
        expires = auth_ref.expires
        return Prepared(ready, plain, math.inf if expires is None else expires.timestamp())

    def _needs_no_bind(self, auth_ref: Any) -> bool:
        """Return whether a token's binding to its user's authentication need not be checked."""
        modes = stock._BIND_MODE
        wanted = self._enforce_token_bind
        if wanted == modes.DISABLED:
            return True
        return not auth_ref.bind and wanted in (modes.PERMISSIVE, modes.STRICT)


def _without_user(url: str) -> str:
    """Return a URL without the user and password that it may have, whatever is in these."""
    before, _, rest = url.rpartition("@")
    scheme, slashes, _ = before.partition("://")
    return f"{scheme}{slashes}{rest}" if slashes else rest


def _absolute(
    environ: dict[str, Any], fields: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return headers with an absolute URL in ``Location``, as webob's response makes them."""
    made: list[tuple[str, str]] = []
    webob.Response(headerlist=fields, app_iter=())(
        {**environ, "REQUEST_METHOD": "GET"}, lambda _, fields: made.extend(fields)
    )
    return made


def filter_factory(
    global_conf: Mapping[str, str] | None, **local_conf: Any
) -> Callable[[WSGIApplication], AuthProtocol]:
    """Return a function that builds the filter (entry point ``paste.filter_factory``).

    :param global_conf: the paste file's ``[DEFAULT]``
    :param local_conf: options of ``[keystone_authtoken]``, and with the prefix ``keyfront_`` of
        ``[keyfront_authtoken]``, for this pipeline
    :returns: a function that takes the service's application and returns :class:`AuthProtocol`; it
        raises :exc:`OptionError` for an option of ours with a value out of its range
    """
    conf = {**(global_conf or {}), **local_conf}

    def build(app: WSGIApplication) -> AuthProtocol:
        return AuthProtocol(app, dict(conf))

    return build


def app_factory(global_conf: Mapping[str, str] | None, **local_conf: Any) -> AuthProtocol:
    """Return the middleware without an application, as keystonemiddleware's ``app_factory`` does.

    :param global_conf: the paste file's ``[DEFAULT]``
    :param local_conf: options as :func:`filter_factory` takes them
    :raises OptionError: an option of ours has a value out of its range
    """
    return AuthProtocol(None, {**(global_conf or {}), **local_conf})
