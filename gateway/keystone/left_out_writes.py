"""Writes of logins and validations that are left out while Redis is away.

A change that nobody could be told of is not committed, and the request for it is answered 503. But
logins and validations make changes that nobody asked for. Those that Keystone makes again the next
time are left out for now: no answer says anything that the database does not.

Others are written and told of late, see
:func:`~keyfront.middleware.tokens.invalidation.rules.may_wait`.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keyfront.middleware.tokens.request import current

from .needed_interfaces import import_keystone, incompatible

LOG = logging.getLogger(__name__)

# Whether a write may be left out at the moment.
_within: contextvars.ContextVar[bool] = contextvars.ContextVar("keyfront_left_out", default=False)


def leave_out_unheard() -> None:
    """Patch the Keystone that is loaded so that it leaves out such writes; once only.

    :raises IncompatibleError: a function of Keystone is not where it is expected
    """
    identity = import_keystone("keystone.identity.core").Manager
    shadow_users = import_keystone("keystone.identity.shadow_backends.sql").ShadowUsers
    tokens = import_keystone("keystone.token.provider").Manager
    revoke = import_keystone("keystone.revoke.core").Manager
    try:
        # The name and the e-mail address that an identity provider tells of a user who is known.
        _mark(identity, "_shadow_federated_user")
        _leave_out(identity, "update_user", "a federated user's e-mail address")
        _leave_out(shadow_users, "update_federated_user_display_name", "a federated user's name")
        # The revocation of all tokens of a user whom his directory has disabled: each of them is
        # refused for that at each validation, and the next one writes it.
        _mark(tokens, "_is_valid_token")
        _leave_out(revoke, "revoke_by_user", "the revocation of a disabled user's tokens")
    except AttributeError as error:
        raise incompatible(f"it does not look as expected ({error})") from None


@contextmanager
def _inside(value: bool) -> Iterator[None]:
    before = _within.set(value)
    try:
        yield
    finally:
        _within.reset(before)


def _mark(owner: Any, method: str) -> None:
    """Patch a method so that writes within it may be left out."""
    deed = getattr(owner, method)
    if hasattr(deed, "keyfront"):
        return

    @functools.wraps(deed)
    def marked(self: Any, *values: Any, **named: Any) -> Any:
        with _inside(True):
            return deed(self, *values, **named)

    marked.keyfront = True  # type: ignore[attr-defined]
    setattr(owner, method, marked)


def _leave_out(owner: Any, method: str, what: str) -> None:
    """Patch a method so that its write is left out, where it may be and nobody can be told.

    :param owner: the class that has the method
    :param method: the name of the method
    :param what: a noun for the log: what is not written
    """
    write: Callable[..., Any] = getattr(owner, method)
    if hasattr(write, "keyfront"):
        return

    @functools.wraps(write)
    def written(self: Any, *values: Any, **named: Any) -> Any:
        request = current.get()
        if request is None or not _within.get() or request.refused:
            return write(self, *values, **named)
        try:
            # What it calls belongs to it, and is left out with it or not at all.
            with _inside(False):
                return write(self, *values, **named)
        except Exception:
            # oslo.db hands on what a commit raises as an error of its own.
            if not request.refused:
                raise
            request.refused = ""
            LOG.warning("%s is not written before others can be told of it", what)
            return None

    written.keyfront = True  # type: ignore[attr-defined]
    setattr(owner, method, written)
