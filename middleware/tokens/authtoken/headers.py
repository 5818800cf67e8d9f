"""The headers that a service is given of a token, made once and not for each request."""

from __future__ import annotations

from typing import Any

from keystonemiddleware.auth_token import _request

Request = _request._AuthTokenRequest

#: What keystonemiddleware sets of a token's scope but does not take off a request beforehand.
SYSTEM_SCOPE: str = Request._SYSTEM_SCOPE_HEADER

TOKEN_AUTH: str = Request._TOKEN_AUTH
TOKEN_INFO: str = Request._TOKEN_INFO


def _environ_name(header: str) -> str:
    return "HTTP_" + header.upper().replace("-", "_")


#: The names in a WSGI environment of all that only ``authtoken`` may tell a service.
STRIPPED = frozenset(map(_environ_name, (*Request.blank("/")._all_auth_headers(), SYSTEM_SCOPE)))


def ready(auth_ref: Any, *, catalog: bool) -> dict[str, str | None]:
    """Return what keystonemiddleware puts into the WSGI environment for a token it has confirmed.

    By its own request object, so that names, deprecated names and the forms of values are its own.

    :param auth_ref: ``keystoneauth1.access.AccessInfo`` of the token
    :param catalog: whether the service is told the catalog
    """
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET"}
    request = Request(environ)
    request.user_token_valid = True
    request.set_user_headers(auth_ref)
    if catalog:
        request.set_service_catalog_headers(auth_ref)
    return {name: value for name, value in environ.items() if name.startswith("HTTP_")}
