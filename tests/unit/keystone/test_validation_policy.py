"""What Keystone's policy decides by itself, and which issued tokens a validation would accept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("keystone")

from keystone.common.rbac_enforcer import enforcer
from oslo_config import cfg
from oslo_policy import _checks, policy

from keyfront.gateway.keystone import validation_policy
from keyfront.gateway.keystone.token_cache_hooks import keep_no_outside_decision
from keyfront.gateway.keystone.validation_policy import ACTION, Policy, note_issued, target_of
from keyfront.middleware.tokens.request import Request, current

NOT_ALLOWED = policy.PolicyNotAuthorized
ADMIN = {"user_id": "admin", "roles": ["admin"]}
SERVICE = {"user_id": "nova", "roles": ["service"]}
USER = {"user_id": "u", "roles": ["member"]}
TARGET = {"target.token.user_id": "u", "target.token.user.domain.id": "d"}
SUBJECT = "target.token.user_id"

PACKAGED = {
    "admin_required": "role:admin",
    "service_role": "role:service",
    "token_subject": "user_id:%(target.token.user_id)s",
    ACTION: "rule:admin_required or (role:reader and system_scope:all) or rule:service_role"
    " or rule:token_subject",
}


@_checks.register("here")
class _Here(_checks.Check):
    """A check of somebody else."""

    asked = 0

    def __call__(self, target: Any, creds: Any, enforcer: Any, current_rule: Any = None) -> bool:
        type(self).asked += 1
        return True


class Own:
    """As Keystone's ``RBACEnforcer``, with rules of a test."""

    raw: policy.Enforcer

    @property
    def _enforcer(self) -> policy.Enforcer:
        return self.raw

    def _enforce(self, credentials: Any, action: str, target: Any, do_raise: bool = True) -> Any:
        return self.raw.enforce(rule=action, target=target, creds=credentials, do_raise=do_raise)


@contextlib.contextmanager
def serving(request: Request) -> Iterator[Request]:
    token = current.set(request)
    try:
        yield request
    finally:
        current.reset(token)


def made(rules: dict[str, str]) -> tuple[type[Own], Policy]:
    """An enforcer, and what asks it."""
    conf = cfg.ConfigOpts()
    conf([])
    raw = policy.Enforcer(conf, use_conf=False)
    raw.set_rules(policy.Rules.from_dict(rules), use_conf=False)
    kind = type("One", (Own,), {"raw": raw})
    return kind, Policy(kind)


@pytest.mark.parametrize(
    ("credentials", "target", "names"),
    [
        (ADMIN, TARGET, set()),
        (SERVICE, TARGET, set()),
        (USER, TARGET, {SUBJECT}),
        (USER, {**TARGET, SUBJECT: "another"}, None),
        (USER, {}, None),
    ],
)
def test_a_yes_names_what_it_went_by(
    credentials: dict[str, Any], target: dict[str, Any], names: set[str] | None
) -> None:
    before = dict(credentials)
    found = made(PACKAGED)[1].decide(credentials, target)
    assert found == (None if names is None else frozenset(names))
    assert credentials == before


def test_what_was_looked_at_in_vain_counts_too() -> None:
    _, policy = made({ACTION: "user_id:%(target.token.user_id)s or 'x':%(none)s or role:member"})
    other = {**TARGET, SUBJECT: "another"}
    assert policy.decide(USER, other) == {SUBJECT, "none"}


@pytest.mark.parametrize(
    "rule",
    [
        "here:x", "not here:x", "role:admin and here:x", "role:none or here:x", "rule:there",
        "http://127.0.0.1:1/", "https://127.0.0.1:1/", "role:admin or http://127.0.0.1:1/",
        "role:admin and (role:none or rule:there)",
    ],
)  # fmt: skip
def test_a_rule_that_asks_others_is_left_to_keystone(rule: str) -> None:
    """Also where it would not come to that."""
    before = _Here.asked
    _, policy = made({ACTION: rule, "there": "here:x"})
    assert policy.decide(ADMIN, TARGET) is None
    assert _Here.asked == before


def test_rules_that_name_each_other_end() -> None:
    _, policy = made({ACTION: "role:admin or rule:a", "a": "rule:b", "b": "rule:a"})
    assert policy.decide(ADMIN, TARGET) == frozenset()


@pytest.mark.parametrize("rules", [{}, {ACTION: "!"}, {ACTION: "rule:none"}])
def test_what_is_not_allowed_is_left_to_keystone(rules: dict[str, str]) -> None:
    assert made(rules)[1].decide(ADMIN, TARGET) is None


def test_an_error_is_left_to_keystone() -> None:
    kind, policy = made(PACKAGED)
    kind.raw.rules[ACTION] = None
    assert policy.decide(ADMIN, TARGET) is None


def test_a_decision_that_somebody_else_took_part_in_is_not_kept() -> None:
    keep_no_outside_decision(_checks)
    rules = {ACTION: "role:admin"}
    kind, policy = made(rules)
    original = kind._enforce

    def reloads(self: Any, *values: Any, **named: Any) -> Any:
        self.raw.set_rules(policy_with_others, use_conf=False)
        return original(self, *values, **named)

    policy_with_others = {ACTION: _Here("here", "x")}
    policy._enforce = reloads
    assert policy.decide(ADMIN, TARGET) is None


def test_decisions_are_noted_in_the_request() -> None:
    kind, policy = made(PACKAGED)
    policy.note()
    kind.raw._map_context_attributes_into_creds = lambda context: ADMIN  # type: ignore[assignment]
    for recording, action in ((True, ACTION), (False, ACTION), (True, "admin_required")):
        with serving(Request(recording=recording)) as request:
            kind()._enforce(ADMIN, action, TARGET)
        noted = [(ADMIN, TARGET)] if (recording, action) == (True, ACTION) else []
        assert request.enforced == noted
    with serving(Request(recording=True)) as request, pytest.raises(NOT_ALLOWED):
        kind()._enforce({"roles": []}, ACTION, {}, do_raise=True)
    assert request.enforced == []


# Issued tokens


class Manager:
    """As Keystone's token provider manager."""

    def __init__(self, **changed: Any) -> None:
        fields: dict[str, Any] = {
            "id": "token", "user_id": "u", "user": {"domain_id": "d", "enabled": True},
            "methods": ["token", "password"], "audit_ids": ["a"], "system": None,
            "domain_id": None, "project_id": "p", "trust_id": None, "federated_groups": None,
            "identity_provider_id": None, "protocol_id": None, "access_token_id": None,
            "application_credential_id": None, "application_credential": None,
            "oauth2_thumbprint": None, "issued_at": "then", "expires_at": "later",
        }  # fmt: skip
        self.model = SimpleNamespace(**{**fields, **changed})
        self.revoked = False
        self.decoded = (
            *("u", ["password", "token"], ["a"], None, None, "p", None, None, None, None),
            *(None, None, None, "then", "later"),
        )
        self.driver = SimpleNamespace(validate_token=lambda token: self.decoded)

    def issue_token(self, user_id: str) -> Any:
        return self.model

    def _is_valid_token(self, token: Any, window_seconds: int = 0) -> None:
        if self.revoked:
            raise ValueError("revoked")


def issued(manager: Manager, *, issuing: bool = True) -> Request:
    note_issued(manager)
    with serving(Request(issuing=issuing)) as request:
        assert manager.issue_token("u") is manager.model
    return request


def test_an_issued_token_is_noted_as_a_validation_shows_it() -> None:
    manager = Manager()
    request = issued(manager)
    assert request.issued == (manager.model, ["password", "token"], TARGET)
    assert request.accepted == {"token": manager.model}


@pytest.mark.parametrize(
    "changed",
    [
        {"user": {"domain_id": "d", "enabled": False}},
        {"user": {"domain_id": "d"}},
        {"application_credential": {"access_rules": []}},
        {"expires_at": "a microsecond later"},
        {"project_id": "another"},
        {"methods": ["password"]},
        {"user_id": "another"},
        {"system": "all"},
    ],
)
def test_a_token_that_a_validation_would_show_otherwise_is_not(changed: dict[str, Any]) -> None:
    request = issued(Manager(**changed))
    assert request.issued is None
    assert request.accepted == {}


def test_a_token_that_was_revoked_within_its_second_is_not() -> None:
    manager = Manager()
    manager.revoked = True
    assert issued(manager).issued is None


def test_nothing_is_noted_of_what_is_no_login() -> None:
    assert issued(Manager(), issuing=False).issued is None
    manager = Manager()
    note_issued(manager)
    assert manager.issue_token("u") is manager.model


def test_a_user_without_a_domain_is_told_as_keystone_does() -> None:
    assert target_of(SimpleNamespace(user_id="u", user={"domain_id": ""})) == {SUBJECT: "u"}


# Another Keystone


@pytest.mark.parametrize("tells", ["as known", "more", "fails"])
def test_a_keystone_that_tells_its_policy_other_things_is_left_alone(
    tells: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(enforcer.RBACEnforcer):  # type: ignore[misc]
        """Its own, so that Keystone's is left as it is."""

        __shared_state__: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _extract_subject_token_target_data(cls) -> Any:
            if tells == "fails":
                raise KeyError("x")
            found = super()._extract_subject_token_target_data()
            return found if tells == "as known" else {**found, "more": "x"}

    validated: list[Any] = []
    manager = SimpleNamespace(validate_token=validated.append, issue_token=None)
    original = manager.validate_token
    decided: list[Any] = []
    decide_one = Policy.decide

    def noting(self: Policy, *told: Any) -> Any:
        decided.append(told)
        return decide_one(self, *told)

    monkeypatch.setattr(Policy, "decide", noting)
    # as of a Keystone that was loaded
    cfg.CONF([], project="keystone", default_config_files=[], default_config_dirs=[])
    monkeypatch.setattr(enforcer, "RBACEnforcer", Other)
    monkeypatch.setattr(enforcer, "PROVIDER_APIS", SimpleNamespace(token_provider_api=manager))
    with caplog.at_level(logging.WARNING):
        decide = validation_policy.tell_of_validations(manager)
    assert (decide is not None) is (tells == "as known")
    assert bool([x for x in caplog.records if "first validations" in x.message]) is (decide is None)
    assert manager.validate_token is original
    assert validated == []
    # once, of nobody, so that workers need not prepare what the enforcer needs
    assert decided == ([({"roles": []}, {})] if decide else [])
