"""What the token cache needs of Keystone's inside: which tokens it looked at.

``egg:keyfront#keystone`` installs these. They take Keystone's objects and import none of it.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from keyfront.middleware.tokens.dependencies import basis_end
from keyfront.middleware.tokens.request import current


def record_validations(manager: Any) -> None:
    """Note in the present request each token that ``manager`` validates, and how it ended.

    :param manager: Keystone's token provider manager; its driver decodes tokens
    """
    original, decode = manager.validate_token, manager.driver.validate_token

    def validate(token_id: str, **options: Any) -> Any:
        model = original(token_id, **options)
        if not _has_ended(model):
            return model
        # Out of Keystone's cache, which knows no end of it.
        manager._validate_token.invalidate(manager, token_id)
        return original(token_id, **options)

    def validate_token(token_id: str, window_seconds: float = 0, **options: Any) -> Any:
        request = current.get()
        if request is None or not request.recording:
            return validate(token_id, window_seconds=window_seconds, **options)
        reading, request.reading = request.reading, False
        try:
            model = validate(token_id, window_seconds=window_seconds, **options)
        except Exception:
            if token_id not in request.garbage:
                request.unsure.add(token_id)
            raise
        finally:
            request.reading = reading
        request.accepted[token_id] = model
        window = request.windows.get(token_id, float(window_seconds))
        request.windows[token_id] = min(window, float(window_seconds))
        return model

    def decode_token(token_id: str) -> Any:
        try:
            return decode(token_id)
        except Exception:
            # No key opens it: only a new key could, and of that the database knows nothing.
            request = current.get()
            if request is not None:
                request.garbage.add(token_id)
            raise

    manager.validate_token = validate_token
    manager.driver.validate_token = decode_token


def _has_ended(model: Any) -> bool:
    """Whether what a token stands on has ended. A model of another shape is kept nowhere."""
    try:
        return basis_end(model) <= time.time()
    except (ValueError, TypeError, AttributeError):
        return False


def keep_per_request(proxy: Any) -> None:
    """Have Keystone's request-local cache live as long as the request, and no longer.

    Keystone keeps it in the context of oslo.context. That of the previous request is still there
    when the caller's token is validated, and a new one is made for the rest, so that everything is
    computed twice for one request.

    :param proxy: Keystone's class ``_ResponseCacheProxy``
    """
    original = proxy._get_request_context

    def _get_request_context(self: Any) -> Any:
        request = current.get()
        return original(self) if request is None else request.memory

    proxy._get_request_context = _get_request_context


def keep_no_outside_decision(checks: Any) -> None:
    """Have nothing kept of a request that a policy asks somebody else about, as by ``http:``.

    :param checks: the module ``oslo_policy._checks``: all rules that others bring are extensions
    """
    for kind in set(checks.get_extensions().values()):
        decide = kind.__call__
        if hasattr(decide, "keyfront"):
            continue

        @functools.wraps(decide)
        def asks(self: Any, *values: Any, decide: Any = decide, **named: Any) -> Any:
            request = current.get()
            if request is not None:
                request.unvouched = True
            return decide(self, *values, **named)

        asks.keyfront = True  # type: ignore[attr-defined]
        kind.__call__ = asks
