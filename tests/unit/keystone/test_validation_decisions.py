"""What is decided on a first validation is what Keystone decides, whatever its policy is.

Keystone's own ``enforce_call`` enforces random policies with its own context of a caller. What was
noted of one decision decides the next ones as it does, after it was packed for other workers, for
each token that is the same in what the policy went by.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

pytest.importorskip("keystone")

import flask
from hypothesis import event, given
from hypothesis import strategies as some
from keystone import exception
from keystone.api.auth import AuthTokenResource
from keystone.common import context
from keystone.common.rbac_enforcer import enforcer
from keystone.conf import CONF
from oslo_policy import policy

from keyfront.gateway.keystone.validation_policy import ACTION, Policy
from keyfront.middleware.tokens.epochs import Epoch, Slots
from keyfront.middleware.tokens.first_validations import Caller
from keyfront.middleware.tokens.keys_and_entries import Lifetime
from keyfront.middleware.tokens.request import Request, current
from keyfront.middleware.tokens.routes import TOKENS

USERS, DOMAINS, ROLES = ("u1", "u2"), ("d1", "d2"), ("admin", "reader", "service")

# What a policy may go by: of the caller, of the token, of both, of nothing, and what is not there.
LEAVES = (
    *(f"role:{role}" for role in ROLES),
    *(f"user_id:{user}" for user in USERS),
    *("system_scope:all", "system:all", "is_admin_project:True", "is_admin_project:False"),
    *("is_admin:True", "domain_id:d1", "project_id:p1", "user_domain_id:d1", "None:%(domain_id)s"),
    *("project_domain_id:d2", "service_roles:admin", "nothing:x", "'all':%(system_scope)s"),
    *("user_id:%(target.token.user_id)s", "user_domain_id:%(target.token.user.domain.id)s"),
    *("domain_id:%(target.token.user.domain.id)s", "'u1':%(target.token.user_id)s"),
    *("'d2':%(target.token.user.domain.id)s", "user_id:%(user_id)s", "project_id:%(nothing)s"),
    # What the caller's own token shows, some of it in lists.
    *("token.is_admin_project:True", "token.user.domain.id:%(target.token.user.domain.id)s"),
    *("token.user.id:%(target.token.user_id)s", "token.project.domain.id:d2"),
    *("token.methods:password", "token.roles.name:admin", "'d1':%(token.user.domain.id)s"),
    *("rule:other", "rule:none", "@", "!"),
)


def _joined(parts: some.SearchStrategy[str]) -> some.SearchStrategy[str]:
    several = some.lists(parts, min_size=2, max_size=3)
    return some.one_of(
        parts.map(lambda one: f"not {one}"),
        several.map(lambda them: f"({' and '.join(them)})"),
        several.map(lambda them: f"({' or '.join(them)})"),
    )


RULES = some.recursive(some.sampled_from(LEAVES), _joined, max_leaves=5)
SCOPE_TYPES = some.lists(some.sampled_from(["system", "domain", "project"]), unique=True)
SCOPES = some.sampled_from(
    [
        *({"system_scope": "all"}, {"domain_id": "d1"}, {"domain_id": "d2"}, {}),
        {"project_id": "p1", "project_domain_id": "d2"},
    ]
)
CALLERS = some.builds(
    lambda scope, **more: {**scope, **more},
    SCOPES,
    user_id=some.sampled_from(USERS),
    user_domain_id=some.sampled_from(DOMAINS),
    roles=some.lists(some.sampled_from(ROLES), unique=True),
    is_admin_project=some.booleans(),
    service_roles=some.lists(some.sampled_from(ROLES), max_size=1),
)


class Token(NamedTuple):
    user: str
    domain: str


TOKENS_ = some.builds(Token, some.sampled_from(USERS), some.sampled_from((*DOMAINS, "")))


class Enforcer(enforcer.RBACEnforcer):  # type: ignore[misc]
    """Keystone's, with a policy of its own."""

    __shared_state__: ClassVar[dict[str, Any]] = {}


class World:
    """A Keystone's policy, and the requests that it decides."""

    def __init__(self) -> None:
        self.policy = Policy(Enforcer)
        self.policy.note()
        self._raw = Enforcer()._enforcer
        self._application = flask.Flask("keyfront")
        self._application.add_url_rule(TOKENS, view_func=AuthTokenResource.as_view("tokens"))
        self.token = Token("", "")

    def has(self, rule: str, other: str, scope_types: list[str]) -> None:
        """Have this policy on validations."""
        rules = policy.Rules.from_dict({ACTION: rule, "other": other})
        self._raw.set_rules(rules, overwrite=True, use_conf=False)
        self._raw.registered_rules[ACTION].scope_types = scope_types or None

    def validate_token(self, *values: Any, **named: Any) -> Any:
        user, domain = self.token
        return SimpleNamespace(user_id=user, user={"domain_id": domain})

    def decides(self, caller: dict[str, Any], token: Token) -> tuple[bool, Request]:
        """Whether Keystone lets a caller see a token, and what was noted."""
        self.token = token
        request = Request(recording=True)
        before = current.set(request)
        headers = {"X-Subject-Token": "a token"}
        try:
            with self._application.test_request_context(TOKENS, headers=headers):
                told = context.RequestContext(overwrite=False, authenticated=True, **caller)
                told.token_reference = {"token": _shown(caller)}
                flask.request.environ[context.REQUEST_CONTEXT_ENV] = told
                Enforcer.enforce_call(action=ACTION)
            return True, request
        except exception.Forbidden:
            return False, request
        finally:
            current.reset(before)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # There is no policy file; older releases of oslo.policy look for one beside keystone.conf.
        patch.setattr(CONF, "find_file", lambda name: None)
        made = World()
        manager = SimpleNamespace(validate_token=made.validate_token)
        patch.setattr(enforcer, "PROVIDER_APIS", SimpleNamespace(token_provider_api=manager))
        yield made


def _shown(caller: dict[str, Any]) -> dict[str, Any]:
    """A part of what Keystone shows of a caller's token."""
    shown = {
        "user": {"id": caller["user_id"], "domain": {"id": caller["user_domain_id"]}},
        "roles": [{"name": role} for role in caller["roles"]],
        "methods": ["token", "password"],
        "is_admin_project": caller["is_admin_project"],
    }
    if "project_id" in caller:
        shown["project"] = {"id": caller["project_id"], "domain": {"id": "d2"}}
    return shown


def _known(request: Request) -> Caller:
    """What other workers know of the caller of a request that Keystone has answered."""
    (enforced,) = request.enforced
    caller = Caller(
        dict(enforced.credentials), [], 0, 0, 0, Epoch(1, 1), Slots((1,)), Lifetime(1.0, 1.0),
        size=0, seen={},
    )  # fmt: skip
    return Caller.unpack(caller.pack())


@pytest.mark.filterwarnings("ignore:Policy enforcement is depending:DeprecationWarning")
@given(
    rule=RULES, other=RULES.filter(lambda rule: "rule:other" not in rule), scope_types=SCOPE_TYPES,
    who=CALLERS, tokens=some.lists(TOKENS_, min_size=2, max_size=6),
)
def test_what_is_decided_is_what_keystone_decides(
    world: World, rule: str, other: str, scope_types: list[str], who: dict[str, Any],
    tokens: list[Token],
) -> None:  # fmt: skip
    world.has(rule, other, scope_types)
    decided = [world.decides(who, token) for token in tokens]
    known = next((_known(request) for allowed, request in decided if allowed), None)
    event("let" if known else "never let")
    if known is None:
        assert not any(request.enforced for _, request in decided)
        return
    by: dict[Token, frozenset[str]] = {}
    for token, (allowed, _) in zip(tokens, decided, strict=True):
        target = _target(token)
        names = world.policy.decide(known.credentials, target)
        # Neither a yes that Keystone would not say, nor a rule of which too little is known.
        assert (names is not None) is allowed, (token, target)
        assert known.may_see(target, world.policy.decide) is allowed
        if names is not None:
            by[token] = names
    for names in set(by.values()):
        event(f"by {len(names)} of the token")
        same = {tuple(_target(token).get(name) for name in names) for token in by
                if by[token] == names}
        for token, (allowed, _) in zip(tokens, decided, strict=True):
            if tuple(_target(token).get(name) for name in names) in same:
                assert allowed, f"what it went by is the same of {token}"


def _target(token: Token) -> dict[str, str]:
    told = {"target.token.user_id": token.user}
    if token.domain:
        told["target.token.user.domain.id"] = token.domain
    return told
