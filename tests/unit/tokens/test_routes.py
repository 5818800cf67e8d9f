"""Which paths are answered from the cache, and which never are."""

from __future__ import annotations

import pytest

from keyfront.errors import OptionError
from keyfront.middleware.tokens.routes import Routes

SECRETS = [
    "/v3/credentials",
    "/v3/credentials/c1",
    "/v3/ec2tokens",
    "/v3/s3tokens",
    "/v3/users/u1/credentials",
    "/v3/users/u1/credentials/OS-EC2",
    "/v3/users/u1/credentials/OS-EC2/c1",
    "/v3/users/u1/OS-OAUTH1/access_tokens",
    "/v3/domains/d1/config",
    "/v3/domains/d1/config/ldap",
    "/v3/OS-OAUTH1/consumers",
    "/v3/OS-OAUTH2/token",
    "/v3/OS-REVOKE/events",
    "/v3/auth/OS-FEDERATION/websso/x",
    "/v3/OS-FEDERATION/websso",
    "/v3/OS-FEDERATION/saml2/metadata",
    "/v3/auth/tokens/OS-PKI/revoked",
]


def test_validation_alone_by_default() -> None:
    routes = Routes()
    assert routes.include("/v3/auth/tokens")
    for path in ("/v3/projects", "/v3/auth/tokens/", "/v3/auth/tokens/x", "/v3", "", "/"):
        assert not routes.include(path)


def test_wanted_routes() -> None:
    routes = Routes(["/v3/projects", "/v3/users/{id}", "/v3/auth/tokens"])
    for path in ("/v3/projects", "/v3/users/u1", "/v3/auth/tokens"):
        assert routes.include(path)
    for path in ("/v3/users", "/v3/users/", "/v3/users/u1/projects", "/v3/projects/p1", "x"):
        assert not routes.include(path)


@pytest.mark.parametrize("path", SECRETS)
def test_routes_that_show_secrets_are_refused(path: str) -> None:
    with pytest.raises(OptionError, match="without routes that show secrets") as caught:
        Routes([path])
    assert path in str(caught.value)


@pytest.mark.parametrize("path", SECRETS)
def test_no_placeholder_opens_a_route_that_shows_secrets(path: str) -> None:
    """Such a route is either refused, or does not match the path."""
    segments = path.split("/")[2:]
    for chosen in range(1, 2 ** len(segments)):
        route = "/v3" + "".join(
            "/{id}" if chosen >> index & 1 else f"/{segment}"
            for index, segment in enumerate(segments)
        )
        try:
            routes = Routes([route])
        except OptionError:
            continue
        assert not routes.include(path), route


@pytest.mark.parametrize(
    "route",
    [
        *("", "v3/projects", "/v2.0/tokens", "/v3", "/v3/", "/v3/projects/", "/v3//users"),
        *("/v3/a b", "/v3/users/{user_id}", "/v3/us{id}", "/v3/.*", "/v3/users?x=y"),
        "/v3/projects\n",
    ],
)
def test_what_is_no_route_is_refused(route: str) -> None:
    with pytest.raises(OptionError, match="paths such as /v3/projects"):
        Routes([route])


def test_a_dot_in_a_route_is_only_a_dot() -> None:
    routes = Routes(["/v3/a.b/{id}"])
    assert routes.include("/v3/a.b/1")
    assert not routes.include("/v3/axb/1")


@pytest.mark.parametrize("path", ["/v3/users/u1\n", "/v3/users/a/b", "/v3/users/"])
def test_a_placeholder_is_one_segment(path: str) -> None:
    assert not Routes(["/v3/users/{id}"]).include(path)
