"""The routes whose requests may be answered from the cache.

A validation depends on its tokens, which are noted while Keystone answers (``request.py``). Any
other read also shows rows that belong to neither token: for it the rows are noted that Keystone
reads (``invalidation/sqlalchemy_plugin.py``, ``gateway/keystone/worker_memory.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keyfront.errors import OptionError

#: The path of validations.
TOKENS = "/v3/auth/tokens"

# Routes whose answers hold secrets, or are true for one moment only.
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

    :param wanted: routes besides ``/v3/auth/tokens``, in the form of the option ``routes``:
        ``/v3/projects``, ``/v3/users/{id}``
    :raises OptionError: one is no route, shows secrets, or is true for one moment only
    """

    __slots__ = ("_exact", "_patterns")

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        self._exact = {TOKENS}
        self._patterns: list[re.Pattern[str]] = []
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
            if "{id}" in route:
                self._patterns.append(pattern)
            else:
                self._exact.add(route)

    def __bool__(self) -> bool:
        """Return whether there are other routes than validation."""
        return bool(self._patterns) or self._exact != {TOKENS}

    def include(self, path: str) -> bool:
        """Return whether a read of ``path`` may be answered from the cache."""
        if path in self._exact:
            return True
        return any(p.match(path) for p in self._patterns) and not _NEVER.match(path)
