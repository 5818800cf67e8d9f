"""What an answer of Keystone depends on: the tags of all tokens that were validated for it.

Taken from Keystone's own models while it answers, so that what a body does not show, such as the
trustor behind an impersonated user, counts as well. Errs to more tags, never to fewer.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from .invalidation.rules import ALL, ANY, GRANTS_GROUP, tag
from .request import Request

#: What every accepted token depends on, besides its own: role names and implications, grants to
#: groups, the catalog and the service providers in each body.
_SHARED = (ALL, GRANTS_GROUP, "roles", "catalog", "federation")


def tags(request: Request, asked: list[str]) -> set[str] | None:
    """Return the tags that the answer to a request depends on; ``None`` if they are not known.

    :param request: after the answer
    :param asked: the tokens it came with
    """
    found = {ALL}
    for token in asked:
        model = request.accepted.get(token)
        if token in request.unsure:
            # Whatever it was refused for: any change may make it good.
            found.add(ANY)
        elif model is None and token not in request.garbage:
            return None  # Keystone took it, or refused the request, without looking at it
        try:
            if model is not None:
                found.update(token_tags(model))
        except ValueError:
            # Which identifiers are equal to one that is not ASCII, the database alone can say.
            found.add(ANY)
        except (AttributeError, KeyError, TypeError):
            return None
    return found


def token_tags(model: Any) -> Iterator[str]:
    """Yield the tags of a validated token.

    :param model: Keystone's ``TokenModel``
    :raises ValueError: an identifier is none of which a tag can be made
    :raises AttributeError: the model does not look as Keystone 30's; so do KeyError and TypeError
    """
    yield from _SHARED
    for audit in model.audit_ids:
        yield tag("audit", audit)
    yield from _user_tags(model.user_id, model.user["domain_id"])
    if model.domain_id:
        yield tag("project", model.domain_id)
    if model.project_id:
        yield tag("project", model.project_id)
        yield tag("project", model.project_domain["id"])
    if model.trust_id:
        yield from _trust_tags(model)
    if model.application_credential_id:
        yield tag("appcred", model.application_credential_id)
    if model.access_token_id:
        yield "oauth"


def _user_tags(user: str, domain: str) -> Iterator[str]:
    yield tag("user", user)
    yield tag("grants:user", user)
    yield tag("members", user)
    yield tag("project", domain)


def _trust_tags(model: Any) -> Iterator[str]:
    yield tag("trust", model.trust_id)
    for user in (model.trustor, model.trustee):
        yield from _user_tags(user["id"], user["domain_id"])
    if model.trust.get("redelegated_trust_id"):
        # Its roles are those of the first trustor, further up a chain that is not in the model.
        yield from ("trusts", "grants", "members", "users", "projects", "mappings")


def expiry(request: Request) -> float:
    """Return when the first of the validated tokens, or of what they stand on, ends.

    :returns: seconds since the epoch; infinite if no token was accepted
    :raises ValueError: a time cannot be read; so do AttributeError and TypeError
    """
    ends = float("inf")
    for token, model in request.accepted.items():
        # The window is of tokens, and not of what they stand on.
        window = request.windows.get(token, 0.0)
        ends = min(ends, _seconds(model.expires_at) + window, basis_end(model))
    return ends


def basis_end(model: Any) -> float:
    """Return when the trust or the application credential of a token ends.

    :param model: Keystone's ``TokenModel``
    :returns: seconds since the epoch; infinite without one that ends
    :raises ValueError: a time cannot be read; so do AttributeError and TypeError
    """
    ends = float("inf")
    for basis in (model.trust, model.application_credential):
        end = basis.get("expires_at") if basis else None
        if end is not None:
            ends = min(ends, _seconds(end))
    return ends


def _seconds(end: datetime.datetime | str) -> float:
    moment = datetime.datetime.fromisoformat(end) if isinstance(end, str) else end
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
