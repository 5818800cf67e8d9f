"""The part of a path that a trace shows: the words of Keystone's API, and no text of a client's.

A word's form does not tell it from a name: with an LDAP directory as the default domain
``/v3/users/alice`` has a user's. So only words that are in Keystone's own paths are shown.
"""

from __future__ import annotations

from typing import Final

#: The fixed parts of Keystone's paths (``flask.Flask.url_map``, Keystone 27 to 30; a test compares
#: them with that of the one that is installed), and of what answers beside it.
WORDS: Final = frozenset(
    {
        "OS-EC2", "OS-ENDPOINT-POLICY", "OS-EP-FILTER", "OS-FEDERATION", "OS-INHERIT", "OS-OAUTH1",
        "OS-OAUTH2", "OS-PKI", "OS-REVOKE", "OS-SIMPLE-CERT", "OS-TRUST", "access_rules",
        "access_token", "access_tokens", "application_credentials", "auth", "authorize", "ca",
        "catalog", "certificates", "config", "consumers", "credentials", "default", "domains",
        "ec2tokens", "ecp", "endpoint_groups", "endpoints", "events", "groups", "healthcheck",
        "identity_providers", "implies", "inherited_to_projects", "limits", "mappings", "metadata",
        "model", "password", "policies", "policy", "projects", "protocols", "regions",
        "registered_limits", "request_token", "revoked", "role_assignments", "role_inferences",
        "roles", "s3tokens", "saml2", "service_providers", "services", "static", "system", "tags",
        "token", "tokens", "trusts", "users", "v2.0", "v3", "websso",
    }
)

# Longer ones are nobody's API.
_PARTS = 16


def route(path: str) -> str:
    """Return a path with ``{id}`` for each part that is no word of Keystone's API."""
    parts = path.split("/", _PARTS)
    return "/".join([part if not part or part in WORDS else "{id}" for part in parts])
