"""Which requests may be answered from the cache, and what each route's answer depends on.

What a validation depends on is seen while Keystone answers (``dependencies.py``): the tokens. Any
other read also shows rows that belong to neither token, so a route brings the families of tables
that it reads. A route that is in no list depends on every change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keyfront.errors import OptionError

from .touches import CONTENT

#: Validation: the tokens alone.
TOKENS = "/v3/auth/tokens"

# What the rest of an answer shows, besides what depends on the caller's token.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "/v3/projects": ("projects", "users"),
    "/v3/projects/{id}": ("projects", "users"),
    "/v3/domains": ("projects",),
    "/v3/domains/{id}": ("projects",),
    "/v3/auth/projects": ("projects", "grants", "members", "roles"),
    "/v3/auth/domains": ("projects", "grants", "members", "roles"),
    "/v3/auth/system": ("grants", "members", "roles"),
    "/v3/auth/catalog": ("catalog", "projects"),
    "/v3/users": ("users", "projects", "mappings", "federation"),
    "/v3/users/{id}": ("users", "projects", "mappings", "federation"),
    "/v3/roles": ("roles",),
    "/v3/roles/{id}": ("roles",),
    "/v3/services": ("catalog",),
    "/v3/services/{id}": ("catalog",),
    "/v3/endpoints": ("catalog",),
    "/v3/endpoints/{id}": ("catalog",),
    "/v3/regions": ("catalog",),
    "/v3/regions/{id}": ("catalog",),
}

# Answers with secrets in them, or that are of the moment they are asked in.
_NEVER = re.compile(
    r"^/v3/(credentials|OS-OAUTH1|OS-OAUTH2|OS-REVOKE|ec2tokens|s3tokens"
    r"|domains/[^/]+/config|auth/(tokens|OS-FEDERATION)|OS-FEDERATION/(websso|saml2)"
    r"|users/[^/]+/(credentials|OS-OAUTH1))(/|$)"
)
# One path for each kind of them, which no pattern may match.
_SECRETS = (
    *("/v3/credentials", "/v3/credentials/x", "/v3/ec2tokens", "/v3/s3tokens"),
    *("/v3/users/x/credentials", "/v3/users/x/credentials/OS-EC2"),
    *("/v3/users/x/credentials/OS-EC2/x", "/v3/users/x/OS-OAUTH1/access_tokens"),
    *("/v3/users/x/OS-OAUTH1/access_tokens/x", "/v3/users/x/OS-OAUTH1/access_tokens/x/roles"),
    *("/v3/domains/x/config", "/v3/domains/x/config/x", "/v3/domains/x/config/x/x"),
    *("/v3/OS-OAUTH1/consumers", "/v3/OS-OAUTH1/consumers/x", "/v3/OS-REVOKE/events"),
    *("/v3/auth/tokens/OS-PKI/revoked", "/v3/auth/OS-FEDERATION/saml2", "/v3/OS-OAUTH2/token"),
)
_ROUTE = re.compile(r"^/v3(/([A-Za-z0-9_.-]+|\{id\}))+\Z")


class Routes:
    """The routes that are answered from the cache.

    :param wanted: those besides ``/v3/auth/tokens``, as the option ``routes`` has them
    :raises OptionError: one is no route, or shows secrets
    """

    __slots__ = ("_exact", "_patterns")

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        self._exact: dict[str, tuple[str, ...]] = {TOKENS: ()}
        self._patterns: list[tuple[re.Pattern[str], tuple[str, ...]]] = []
        for route in wanted:
            if route == TOKENS:
                continue
            if not _ROUTE.match(route):
                raise OptionError(
                    "[keyfront_token_cache] routes",
                    route,
                    "paths such as /v3/projects or /v3/users/{id}",
                )
            pattern = re.compile(re.escape(route).replace(r"\{id\}", r"[^/\n]+") + r"\Z")
            if _NEVER.match(route) or any(map(pattern.match, (TOKENS, *_SECRETS))):
                raise OptionError(
                    "[keyfront_token_cache] routes",
                    route,
                    "without routes that show secrets or that are of one moment only",
                )
            families = _FAMILIES.get(route, (CONTENT,))
            if "{id}" in route:
                self._patterns.append((pattern, families))
            else:
                self._exact[route] = families

    def families(self, path: str) -> tuple[str, ...] | None:
        """Return what answers at ``path`` depend on besides tokens; ``None``: not cached."""
        families = self._exact.get(path)
        if families is None and self._patterns:
            for pattern, found in self._patterns:
                if pattern.match(path):
                    return None if _NEVER.match(path) else found
        return families
