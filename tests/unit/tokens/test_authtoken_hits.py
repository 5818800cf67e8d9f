"""What a service finds of a known token: exactly what keystonemiddleware tells it, and no more."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import webob.exc
from keystonemiddleware.auth_token import _user_plugin

from keyfront.middleware.tokens.authtoken import token_info
from keyfront.middleware.tokens.authtoken.middleware import AuthProtocol
from support.authtoken_world import Answer, Keystone, World, environ, token_data

DOMAIN = {"id": "default", "name": "Default"}

SHAPES: dict[str, dict[str, Any]] = {
    "project": token_data(),
    "domain": token_data(project=None, is_domain=None, domain=DOMAIN),
    "system": token_data(project=None, is_domain=None, system={"all": True}),
    "system without all": token_data(project=None, is_domain=None, system={"region": True}),
    "unscoped": token_data(project=None, is_domain=None, roles=None, catalog=None),
    "without roles": token_data(roles=[]),
    "without a catalog": token_data(catalog=None),
    "with an empty catalog": token_data(catalog=[]),
    "admin project": token_data(is_admin_project=True),
    "no admin project": token_data(is_admin_project=False),
    "trust": token_data(
        **{"OS-TRUST:trust": {
            "id": "trust", "impersonation": True,
            "trustor_user": {"id": "trustor"}, "trustee_user": {"id": "trustee"},
        }}
    ),
    "federated": token_data(
        user={
            "id": "federated", "name": "federated", "domain": {"id": "Federated", "name": "F"},
            "OS-FEDERATION": {
                "groups": [{"id": "g"}],
                "identity_provider": {"id": "idp"}, "protocol": {"id": "saml2"},
            },
        }
    ),
    "application credential": token_data(
        application_credential={"id": "ac", "name": "ac", "restricted": True}
    ),
    "access rules that allow": token_data(
        application_credential={
            "id": "ac", "name": "ac", "restricted": True,
            "access_rules": [
                {"id": "r", "method": "GET", "path": "/things", "service": "type-1"}
            ],
        }
    ),
    "access rules that do not": token_data(
        application_credential={
            "id": "ac", "name": "ac", "restricted": True,
            "access_rules": [
                {"id": "r", "method": "POST", "path": "/things", "service": "type-1"}
            ],
        }
    ),
    "no access rules": token_data(
        application_credential={"id": "ac", "name": "ac", "access_rules": None}
    ),
    "unknown bind": token_data(bind={"x509": "somebody"}),
    "kerberos bind": token_data(bind={"kerberos": "somebody"}),
    "not of Latin letters": token_data(
        user={"id": "id", "name": "名前 Ω", "domain": DOMAIN}, roles=[{"id": "r", "name": "Rôle"}]
    ),
    "hostile": token_data(
        user={
            "id": "a,b", "name": "a\r\nX-Roles: admin\x00\udce9",
            "domain": {"id": "", "name": " "},
        },
        roles=[{"id": "r", "name": "member,admin"}, {"id": "r", "name": "é\n"}],
        project={"id": "p\tq", "name": "\u2028" * 50, "domain": DOMAIN},
    ),
    "expired": token_data(expires_at="2020-01-01T00:00:00.000000Z"),
    "an odd catalog": token_data(
        catalog=[
            {"type": "type-1", "endpoints": []},
            {"type": "compute", "name": "n", "endpoints": [
                {"interface": "PUBLIC", "url": "http://é", "region": None},
            ]},
        ]
    ),
    "another key": token_data(**{"x-vendor": {"list": [1, None, {"deep": [True]}]}}),
}  # fmt: skip

# What a client may send; only the middleware may say such things.
FORGED = dict.fromkeys(token_info.STRIPPED, "forged")

# webob leaves this in the environment; nobody reads it.
_WEBOB = "webob.adhoc_attrs"


def comparable(seen: dict[str, Any]) -> dict[str, Any]:
    """The environment of a request, without the objects that are each request's own."""
    plain = {name: value for name, value in seen.items() if not name.startswith("wsgi.")}
    plain.pop(_WEBOB, None)
    plugin = plain.pop(token_info.TOKEN_AUTH, None)
    if plugin is not None:
        assert type(plugin) is _user_plugin.UserAuthPlugin
        user = plugin.user
        plain["plugin"] = (plugin.has_user_token, plugin.has_service_token, plugin.reauthenticate)
        if user is not None:
            plain["user"] = (
                user.auth_token, user.user_id, user.project_id, user.role_names, user.expires,
                user.trust_id, user.is_federated, user.version, type(user),
                user.has_service_catalog() and user.service_catalog.catalog,
            )  # fmt: skip
    if token_info.TOKEN_INFO in plain:
        # of whatever kind of dict: by its content
        plain[token_info.TOKEN_INFO] = json.loads(json.dumps(plain[token_info.TOKEN_INFO]))
    return plain


def run(world: World, requests: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What is answered, and what the service sees."""
    found = []
    for more in requests:
        before = len(world.service.seen)
        answer = Answer(world.middleware, environ(**more))
        seen = [comparable(x) for x in world.service.seen[before:]]
        found.append((answer.status, sorted(answer.headers), answer.body, seen))
    return found


OPTIONS = (
    {"delay_auth_decision": "true"},
    {"include_service_catalog": "false"},
    {"service_type": "type-1"},
    *({"enforce_token_bind": mode} for mode in ("disabled", "strict", "required", "kerberos")),
)
# On which those options act.
TELLING = ("project", "unknown bind", "kerberos bind", "access rules that allow", "expired")


@pytest.mark.parametrize(
    ("shape", "options"),
    [*((x, {}) for x in SHAPES), *((x, y) for x in TELLING for y in OPTIONS)],
    ids=str,
)
def test_the_service_sees_what_it_saw(shape: str, options: dict[str, str]) -> None:
    requests = [
        # the first is validated, the others are hits
        *({}, {}, FORGED, {"REQUEST_METHOD": "POST"}, {"REQUEST_METHOD": "HEAD"}),
        {"token": " t "},
        {"AUTH_TYPE": "Negotiate", "REMOTE_USER": "somebody"},
        {"token": None, "HTTP_X_STORAGE_TOKEN": "t"},
        {"token": "", "HTTP_X_STORAGE_TOKEN": "t"},
        {"HTTP_X_SERVICE_TOKEN": "t"},
        {"HTTP_X_SERVICE_TOKEN": ""},
        {"HTTP_X_SERVICE_TOKEN": "s"},
        {"HTTP_X_SERVICE_TOKEN": "unknown"},
        {"token": "unknown", "HTTP_X_SERVICE_TOKEN": "s"},
        *({"token": None}, {"token": None, **FORGED}, {"token": "unknown"}, {"token": "unknown"}),
    ]
    found = []
    for original in (True, False):
        keystone = Keystone()
        keystone.tokens["t"] = SHAPES[shape]
        keystone.tokens["s"] = token_data("service", roles=[{"id": "r", "name": "service"}])
        world = World(keystone, original=original, **options)
        found.append(run(world, requests))
        world.close()
    stock, ours = found
    for request, expected, actual in zip(requests, stock, ours, strict=True):
        if "HTTP_OPENSTACK_SYSTEM_SCOPE" in request:
            # The one thing that is not the same, on purpose: what the client says of its scope.
            for seen in expected[3]:
                if seen.get("HTTP_OPENSTACK_SYSTEM_SCOPE") == "forged":
                    del seen["HTTP_OPENSTACK_SYSTEM_SCOPE"]
        assert actual == expected, request


def test_a_forged_system_scope_does_not_pass() -> None:
    for original, passes in ((True, True), (False, False)):
        world = World(original=original, delay_auth_decision="true")
        world.get(None, HTTP_OPENSTACK_SYSTEM_SCOPE="all")
        world.get("unknown", HTTP_OPENSTACK_SYSTEM_SCOPE="all")
        for seen in world.service.seen:
            assert ("HTTP_OPENSTACK_SYSTEM_SCOPE" in seen) is passes
        world.close()


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.close()


def refuse_webob(*arguments: Any) -> Any:
    raise AssertionError("a plain hit goes by no webob")


def test_a_plain_hit_does_without_webob(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.get()
    monkeypatch.setattr(AuthProtocol, "process_request", refuse_webob)
    # it would not count as the class's own otherwise, and be called
    assert world.get().status == 200
    assert world.get(REQUEST_METHOD="PUT").status == 200
    assert world.asked == 1
    for more in ({"REQUEST_METHOD": "HEAD"}, {"HTTP_X_SERVICE_TOKEN": "t"}):
        with pytest.raises(AssertionError):
            world.get(**more)
    world.middleware.log.logger.setLevel(logging.DEBUG)
    try:
        with pytest.raises(AssertionError):
            world.get()
    finally:
        world.middleware.log.logger.setLevel(logging.NOTSET)


def test_what_a_service_has_of_its_own_is_called() -> None:
    class Own(AuthProtocol):
        called = 0

        def process_request(self, request: Any) -> Any:
            type(self).called += 1
            return super().process_request(request)

    world = World(made_by=Own)
    world.get()
    world.get()
    assert (Own.called, world.asked) == (2, 1)
    world.close()


def test_hits_share_nothing_that_a_service_may_change(world: World) -> None:
    def meddle(seen: dict[str, Any]) -> None:
        info = seen[token_info.TOKEN_INFO]
        info["token"]["roles"].append({"id": "x", "name": "admin"})
        info["token"]["catalog"][0]["endpoints"].clear()
        info["token"]["version"] = "v3"
        info["more"] = 1
        seen["HTTP_X_ROLES"] = "admin"
        seen[token_info.TOKEN_AUTH].user._data["token"]["user"]["id"] = "somebody else"

    expected = run(World(), [{}])
    world.get()
    world.service.during = meddle
    world.get()
    world.service.during = lambda seen: None
    assert run(world, [{}]) == expected
    assert world.asked == 1


def test_the_plugin_is_of_the_request_and_of_the_service(world: World) -> None:
    world.get()
    world.get()
    world.get()
    first, second = (x[token_info.TOKEN_AUTH] for x in world.service.seen[-2:])
    assert first is not second
    assert first._auth is world.middleware._auth and first._session is world.middleware._session
    headers_sent = first.get_headers(world.middleware._session)
    assert headers_sent == {"X-Auth-Token": "t", "X-Service-Token": "token-of-the-service"}


def test_a_service_that_refuses_is_told_where_to_log_in(world: World) -> None:
    world.get()
    world.service.status = "401 Unauthorized"
    answer = world.get()
    assert answer.header("WWW-Authenticate") == ['Keystone uri="http://keystone.example"']
    assert answer.headers[:2] == world.service.headers
    world.service.status = "403 Forbidden"
    assert not world.get().header("WWW-Authenticate")


@pytest.mark.parametrize("location", ["/things/1", "1", "http://other/x", "//evil", "\t//evil\r"])
def test_locations_are_whole_as_webob_makes_them(location: str) -> None:
    answers = []
    for original in (True, False):
        world = World(original=original)
        world.service.status = "201 Created"
        world.service.headers = [("location", location), ("X-Other", "1"), ("Location", location)]
        world.get()
        answers.append(world.get().headers)
        world.close()
    assert answers[0] == answers[1]


def test_what_a_service_writes_and_fails_with_passes_through(world: World) -> None:
    world.get()

    def application(seen: dict[str, Any], start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [])
        write(b"written ")
        error = (ValueError, ValueError(), None)
        start_response("500 Internal Server Error", [], error)
        return [b"returned"]

    world.middleware._app = application
    started: list[Any] = []
    written: list[bytes] = []

    def start_response(*arguments: Any) -> Any:
        started.append(arguments)
        return written.append

    assert list(world.middleware(environ(), start_response)) == [b"returned"]
    assert written == [b"written "]
    assert [x[0] for x in started] == ["200 OK", "500 Internal Server Error"]
    assert started[1][2][0] is ValueError


@pytest.mark.parametrize(
    "token", ["x" * 10_000, "é" * 200, "a b", "a,b;c=d", "%00", "tokens/..", "\x7f", "ÿ"]
)
def test_odd_tokens(token: str) -> None:
    world = World()
    world.keystone.tokens[token] = token_data()
    assert [world.get(token).status for _ in range(3)] == [200] * 3
    assert world.asked == 1
    assert world.service.seen[-1][token_info.TOKEN_AUTH].user.auth_token == token
    assert world.service.seen[-1][token_info.TOKEN_INFO]["token"]["auth_token"] == token
    assert world.get(token + "x").status == 401
    # no validation holds the token itself
    (found,) = world.middleware.validations.confirmed._entries.values()
    assert token not in found.packed.decode() and token not in str(found.ready)
    world.close()


def test_service_tokens_are_answered_from_memory() -> None:
    world = World()
    world.keystone.tokens["s"] = token_data("service", roles=[{"id": "r", "name": "service"}])
    for _ in range(3):
        assert world.get(HTTP_X_SERVICE_TOKEN="s").status == 200
    assert world.asked == 2
    assert world.service.seen[-1]["HTTP_X_SERVICE_USER_ID"] == "id-service"
    world.close()


def test_an_ended_token_is_good_for_a_service_and_for_nobody_else() -> None:
    world = World()
    world.keystone.tokens["t"] = token_data(expires_at="2020-01-01T00:00:00.000000Z")
    world.keystone.tokens["s"] = token_data("service", roles=[{"id": "r", "name": "service"}])
    assert world.get().status == 401
    for _ in range(3):
        assert world.get(HTTP_X_SERVICE_TOKEN="s").status == 200
    expired = [x.url for x in world.keystone.asked if "allow_expired=1" in (x.url or "")]
    assert len(expired) == 1
    assert world.get().status == 401
    world.close()


def test_an_answer_that_is_raised_is_the_same() -> None:
    """keystonemiddleware answers with what a service raises of webob's exceptions."""
    answers = []
    for original in (True, False):
        world = World(original=original)
        world.get()

        def refuse(environ: dict[str, Any]) -> None:
            raise webob.exc.HTTPForbidden("not you")

        world.service.during = refuse
        answer = world.get()
        answers.append((answer.line, answer.headers, answer.body))
        world.close()
    assert answers[0] == answers[1]
