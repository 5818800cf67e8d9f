"""What the token cache needs of Keystone's inside: which tokens it looked at, and fresh caches.

``egg:keyfront#keystone`` installs these. They take Keystone's objects and import none of it.

**Keystone's own caches.** With ``[cache]`` on memcached, Keystone 30 goes on serving what a change
has replaced: it deletes a value before another worker, which read the old row, stores it again; or
it does not delete it at all. So what it keeps is named after the epoch as well: a request looks
only at values stored by requests that began after the last change. Values are not deleted but no
longer found, so it does not matter who stores what how late. Tokens, revocations and receipts go
by all changes, everything else by changes other than revocations, so that a user who revokes his
own tokens empties little.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from keyfront.errors import CoordinatorError

from .epochs import Coordinator, Slots, slots
from .request import current
from .touches import ALL, ANY, CONTENT

#: Regions of Keystone's cache in which a revocation counts, by their names.
_REVOCABLE = ("tokens", "revoke", "receipts")

Find = Callable[[], Coordinator | None]


def record_validations(manager: Any) -> None:
    """Note in the present request each token that ``manager`` validates, and how it ended.

    :param manager: Keystone's token provider manager; its driver decodes tokens
    """
    validate, decode = manager.validate_token, manager.driver.validate_token

    def validate_token(token_id: str, window_seconds: float = 0, **options: Any) -> Any:
        request = current.get()
        if request is None or not request.recording:
            return validate(token_id, window_seconds=window_seconds, **options)
        try:
            model = validate(token_id, window_seconds=window_seconds, **options)
        except Exception:
            if token_id not in request.garbage:
                request.unsure.add(token_id)
            raise
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


def name_after_epochs(regions: Iterable[Any], find: Find) -> None:
    """Make the keys of Keystone's cache regions carry the epoch.

    :param regions: dogpile cache regions with a ``key_mangler``, through which each key goes once
    :param find: returns the coordinator; ``None`` where the token cache is not in use, and then
        Keystone's caches stay as they are
    """
    for region in regions:
        kind = ANY if region.name in _REVOCABLE else CONTENT
        region.key_mangler = _mangler(region.key_mangler, kind, find)


def _mangler(mangle: Callable[[str], str] | None, kind: str, find: Find) -> Callable[[str], str]:
    def key_mangler(key: str) -> str:
        request = current.get()
        name = request.namespaces.get(kind) if request is not None else None
        if name is None:
            name = _namespace(kind, find)
            if request is not None:
                request.namespaces[kind] = name
        if name:
            key = f"{key}:{name}"
        return mangle(key) if mangle is not None else key

    return key_mangler


@functools.cache
def _slots(kind: str, count: int) -> Slots:
    return slots((ALL, kind), count)


def _namespace(kind: str, find: Find) -> str:
    try:
        coordinator = find()
        if coordinator is None:
            return ""
        generation = coordinator.now().generation
        number = coordinator.number(_slots(kind, coordinator.slot_count))
        # Looked at twice: a number of one table must not get the name of another.
        if number is not None and coordinator.now().generation == generation:
            return f"{generation:x}.{number:x}"
    except CoordinatorError:
        pass
    # A change is under way, or nobody knows: a name that nobody else has.
    return secrets.token_hex(8)


