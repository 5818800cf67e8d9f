"""What a trace tells of a path are the words of this Keystone's paths, and no others."""

from __future__ import annotations

import flask
import pytest

from keyfront.gateway.traces.spans import WORDS, route

# Of what answers beside the API, and of a version that clients still ask for.
BESIDE = {"healthcheck", "v2.0"}


def test_the_words_are_those_of_keystones_paths() -> None:
    from keystone.server.flask import application

    app = flask.Flask("keystone")
    for api in application.__apis__:
        for part in api.APIs:
            part.instantiate_and_register_to_app(app)
    rules = [rule.rule for rule in app.url_map.iter_rules()]
    found = {part for rule in rules for part in rule.split("/") if part and part[0] != "<"}
    assert len(found) > 50
    assert found <= WORDS, found - WORDS
    # those that are told and are in no path of any Keystone would be a client's
    assert len(WORDS - found - BESIDE) <= 5, WORDS - found


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v3/auth/tokens", "/v3/auth/tokens"),
        ("/v3/users/alice", "/v3/users/{id}"),
        ("/v3/users/alice/groups", "/v3/users/{id}/groups"),
        ("/v2.0/tokens/gAAAABm-secret", "/v2.0/tokens/{id}"),
        ("/v3/OS-TRUST/trusts/0b2c7f4e9d1f4d6ea1b1a2c3d4e5f607", "/v3/OS-TRUST/trusts/{id}"),
        ("/v3/caf\u00e9\n", "/v3/{id}"),
        ("/" * 40, "/" * 16 + "{id}"),
        ("", ""),
    ],
)
def test_what_is_a_clients_is_hidden(path: str, told: str) -> None:
    assert route(path) == told
