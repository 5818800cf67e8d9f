"""Notes on Keystone's policy decisions about validations, and on the tokens that it issues.

The filter answers a caller's first validation of a token from the facts about both
(``middleware/tokens/first_validations.py``). It asks Keystone's own enforcer, of oslo.policy,
whether this caller may see this token, with the credentials that Keystone computed for the caller
and the target that it computed of the token. Keystone answers the request itself wherever the
enforcer refuses, or does not decide by these alone: ``http:``, OPA, checks of others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from keyfront.middleware.tokens.first_validations import Decide
from keyfront.middleware.tokens.request import Enforced, Issued, Request, current
from keyfront.middleware.tokens.routes import TOKENS

from .needed_interfaces import import_keystone

LOG = logging.getLogger(__name__)

#: The policy's name of a validation by GET.
ACTION = "identity:validate_token"

# Checks of oslo.policy that depend on credentials, target and other rules only.
_PLAIN = ("TrueCheck", "FalseCheck", "NotCheck", "AndCheck", "OrCheck")
_PLAIN_WITH_KIND = ("RuleCheck", "RoleCheck", "GenericCheck")


def tell_of_validations(
    manager: Any, note: Callable[[Request, Any], None] = lambda request, model: None
) -> Decide | None:
    """Patch Keystone so that requests note policy decisions on validations, and issued tokens.

    Where Keystone gives its policy other values than are known here, nothing is patched, and
    Keystone answers all first validations.

    :param manager: Keystone's token provider manager
    :param note: a function called with the request and the model of each issued token that is noted
    :returns: the function that asks the policy; ``None`` where nothing is patched
    """
    enforcer = import_keystone("keystone.common.rbac_enforcer.enforcer").RBACEnforcer
    difference = _difference(enforcer, manager)
    if difference:
        LOG.warning(
            "token_cache: first validations of tokens are asked of Keystone, which does not look "
            "as expected: %s", difference,
        )  # fmt: skip
        return None
    policy = Policy(enforcer)
    policy.note()
    # Once before anybody asks: what the enforcer prepares then, workers that are forked have.
    policy.decide({"roles": []}, {})
    note_issued(manager, note)
    return policy.decide


class Policy:
    """Keystone's policy on validations.

    :param enforcer: Keystone's class ``RBACEnforcer``
    """

    def __init__(self, enforcer: Any) -> None:
        self._enforcer = enforcer
        self._enforce: Callable[..., Any] = enforcer._enforce
        checks = import_keystone("oslo_policy._checks")
        self._plain = {getattr(checks, name) for name in _PLAIN}
        self._rule = checks.RuleCheck
        self._leaves = {getattr(checks, name) for name in _PLAIN_WITH_KIND}

    def note(self) -> None:
        """Patch Keystone's enforcer so that each decision is noted in its request."""
        enforce = self._enforce

        @functools.wraps(enforce)
        def _enforce(
            self: Any, credentials: Any, action: str, target: Any, *values: Any, **named: Any
        ) -> Any:
            result = enforce(self, credentials, action, target, *values, **named)
            request = current.get()
            if request is not None and request.recording and action == ACTION:
                told = self._enforcer._map_context_attributes_into_creds(credentials)
                request.enforced.append(Enforced(told, target))
            return result

        self._enforcer._enforce = _enforce

    def decide(
        self, credentials: Mapping[str, Any], target: Mapping[str, Any]
    ) -> frozenset[str] | None:
        """Ask the policy whether a caller may see a token.

        :param credentials: the credentials that Keystone computed for the caller
        :param target: the target that Keystone computed of the token
        :returns: the names of the target's values that the policy looked at; ``None`` if it
            refuses, asks another program, or raises an error
        """
        enforcer = self._enforcer()
        policy = enforcer._enforcer
        # A request of its own, whose notes are looked at here.
        request = Request()
        before = current.set(request)
        try:
            # Enforcing loads rules anew if their file has changed: they are checked after it, too.
            if not self._is_plain(policy.rules):
                return None
            looked_at = _LookedAt(target)
            told = dict(credentials)
            if not self._enforce(enforcer, told, ACTION, looked_at, do_raise=False):
                return None
            alone = not request.unvouched and self._is_plain(policy.rules)
            return frozenset(looked_at.names) if alone else None
        except Exception:
            return None  # Keystone will meet the same error
        finally:
            current.reset(before)

    def _is_plain(self, rules: Any) -> bool:
        """Return whether the rule on validations asks no other program."""
        todo, seen = [ACTION], {ACTION}
        while todo:
            try:
                checks = [rules[todo.pop()]]
            except KeyError:
                continue  # the policy refuses then
            while checks:
                check = checks.pop()
                kind = type(check)
                if kind in self._leaves:
                    if kind is self._rule and check.match not in seen:
                        seen.add(check.match)
                        todo.append(check.match)
                elif kind in self._plain:
                    inner = getattr(check, "rules", None) or getattr(check, "rule", None)
                    if inner is not None:
                        checks += inner if isinstance(inner, list | tuple) else [inner]
                else:
                    return False
        return True


class _LookedAt(Mapping[str, Any]):
    """A policy's target of a token, which notes the names that are looked at.

    :param target: the whole target
    """

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._target = target
        #: The names that were looked at, whether or not they are there.
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._target[name]

    def __iter__(self) -> Iterator[str]:
        self.names.update(self._target)
        return iter(self._target)

    def __len__(self) -> int:
        self.names.update(self._target)
        return len(self._target)


def note_issued(
    manager: Any, note: Callable[[Request, Any], None] = lambda request, model: None
) -> None:
    """Patch Keystone so that each login notes the token that it issues, if a validation accepts it.

    Keystone's own code decides that: a user whom a directory has disabled may log in by OAuth, and
    a token that is issued in the second of a revocation may be revoked by it.

    :param manager: Keystone's token provider manager
    :param note: a function called with the request and the model of each of these tokens
    """
    issue = manager.issue_token

    def issue_token(*values: Any, **named: Any) -> Any:
        model = issue(*values, **named)
        request = current.get()
        if request is not None and request.issuing:
            request.issued = None
            request.accepting = True
            try:
                methods = _methods_if_accepted(manager, model)
                if methods is not None:
                    note(request, model)
                    request.accepted[model.id] = model
                    request.issued = Issued(model, methods, target_of(model))
            except Exception as error:
                # The login has succeeded, whatever a validation answers.
                LOG.debug("a token that was issued would not be accepted: %s", error)
            finally:
                request.accepting = False
        return model

    manager.issue_token = issue_token


def _methods_if_accepted(manager: Any, model: Any) -> list[str] | None:
    """Return a token's methods as a validation shows them; ``None`` if it shows another token.

    :raises Exception: an error of Keystone's, which would refuse the token
    """
    user, credential = model.user, model.application_credential
    # For a disabled user a validation writes a revocation, which a login must not do. A token with
    # access rules is accepted only from callers that know a certain version of them.
    if not user.get("enabled") or (credential and credential.get("access_rules") is not None):
        return None
    manager._is_valid_token(model)
    methods: list[str]
    user_id, methods, *others = manager.driver.validate_token(model.id)
    known = (
        *(model.audit_ids, model.system, model.domain_id, model.project_id, model.trust_id),
        *(model.federated_groups, model.identity_provider_id, model.protocol_id),
        *(model.access_token_id, model.application_credential_id, model.oauth2_thumbprint),
        *(model.issued_at, model.expires_at),
    )
    same = (user_id, *others) == (model.user_id, *known)
    return methods if same and sorted(methods) == sorted(model.methods) else None


def target_of(model: Any) -> dict[str, Any]:
    """Return the target that Keystone gives its policy of the token that is validated.

    :param model: Keystone's ``TokenModel``
    :returns: ``target.token.user_id``, and ``target.token.user.domain.id`` if there is one
    """
    told = {"target.token.user_id": model.user_id}
    if domain := model.user["domain_id"]:
        told["target.token.user.domain.id"] = domain
    return told


def _difference(enforcer: Any, manager: Any) -> str:
    """Return what differs from :func:`target_of` and :class:`Policy`; empty if nothing does.

    It is tried: Keystone's own code enforces a validation of a token that has only the values that
    are known here.
    """
    import flask

    context = import_keystone("keystone.common.context")
    resource = import_keystone("keystone.api.auth").AuthTokenResource
    seen: list[dict[str, Any]] = []
    token = SimpleNamespace(user_id="a user", user={"domain_id": "a domain"})
    recorder = SimpleNamespace(_enforce=lambda **told: seen.append(told))
    caller = SimpleNamespace(authenticated=True, is_admin=False)
    original = manager.validate_token
    application = flask.Flask("keyfront")
    application.add_url_rule(TOKENS, view_func=resource.as_view("tokens"))
    try:
        enforcer()._enforcer._map_context_attributes_into_creds  # noqa: B018 - it has to be there
        manager.validate_token = lambda *values, **named: token
        with application.test_request_context(TOKENS, headers={"X-Subject-Token": "a token"}):
            flask.request.environ[context.REQUEST_CONTEXT_ENV] = caller
            enforcer.enforce_call(enforcer=recorder, action=ACTION)
        wanted = {"credentials": caller, "action": ACTION, "target": target_of(token)}
        return "" if seen == [wanted] else f"its policy is told {seen}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        manager.validate_token = original
