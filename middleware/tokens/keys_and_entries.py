"""Stored answers: their keys, their content, and how long they stand.

A key is a keyed hash over everything of a request that an answer may vary on. Variables that are
known to make no difference are listed in :data:`HARMLESS`; one that is in no list becomes part of
the key, so that an unknown header can cost a miss but never a wrong answer.

No token is stored: keys are hashes, the token that an answer repeats is taken out of it and put
back from the request, and the request identifier is fresh on each answer.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import product
from typing import Any, Final, NamedTuple

from .directory_leases import leases
from .epochs import Epoch, Slots

Headers = list[tuple[str, str]]

#: Request variables that are always part of the key.
CORE = (
    "REQUEST_METHOD",
    "PATH_INFO",
    "QUERY_STRING",
    "HTTP_X_AUTH_TOKEN",
    "HTTP_X_SUBJECT_TOKEN",
    "HTTP_HOST",
    "HTTP_OPENSTACK_IDENTITY_ACCESS_RULES",
    "HTTP_ACCEPT_LANGUAGE",
    "HTTP_FORWARDED",
    "HTTP_X_FORWARDED_HOST",
    "HTTP_X_FORWARDED_PORT",
    "HTTP_X_FORWARDED_PREFIX",
    "HTTP_X_FORWARDED_PROTO",
    "CONTENT_TYPE",
    "SCRIPT_NAME",
    "SERVER_NAME",
    "SERVER_PORT",
    "wsgi.url_scheme",
)

_OF_VARIANT = tuple(
    name for name in CORE
    if name not in
    ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_X_AUTH_TOKEN", "HTTP_X_SUBJECT_TOKEN")
)

_HARMLESS = """
    CONTENT_LENGTH CONTEXT_DOCUMENT_ROOT CONTEXT_PREFIX DOCUMENT_ROOT DOCUMENT_URI FCGI_ROLE
    GATEWAY_INTERFACE HTTPS PATH_TRANSLATED RAW_URI REMOTE_ADDR REMOTE_HOST REMOTE_PORT
    REQUEST_SCHEME REQUEST_URI SCRIPT_FILENAME SCRIPT_URI SCRIPT_URL SERVER_ADDR SERVER_ADMIN
    SERVER_PROTOCOL SERVER_SIGNATURE SERVER_SOFTWARE UNIQUE_ID UWSGI_APPID UWSGI_ROUTER
    UWSGI_SCHEME PROXY_ADDR PROXY_PORT UWSGI_FILE UWSGI_SCRIPT
    HTTP_ACCEPT HTTP_ACCEPT_ENCODING HTTP_BAGGAGE HTTP_CACHE_CONTROL HTTP_CONNECTION HTTP_DATE
    HTTP_IF_NONE_MATCH HTTP_KEEP_ALIVE HTTP_PRAGMA HTTP_TRACEPARENT HTTP_TRACESTATE
    HTTP_USER_AGENT HTTP_VIA
    HTTP_X_AMZN_TRACE_ID HTTP_X_B3_PARENTSPANID HTTP_X_B3_SAMPLED HTTP_X_B3_SPANID
    HTTP_X_B3_TRACEID HTTP_X_CORRELATION_ID HTTP_X_FORWARDED_FOR HTTP_X_KEYFRONT_EPOCHS
    HTTP_X_OPENSTACK_REQUEST_ID HTTP_X_REAL_IP HTTP_X_REQUEST_ID HTTP_X_REQUEST_START
"""

#: Request variables that change no answer: the connection's, the server's, tracing, and headers
#: about caching and encoding, which Keystone does not read; ``tags_header`` reads two of them, of
#: whatever answer there is. Names with a dot are the server's too.
HARMLESS = frozenset(_HARMLESS.split())

#: The variable in which Keystone says how it let the caller in, and believes a filter.
AUTH_CONTEXT = "KEYSTONE_AUTH_CONTEXT"

# A request with one of these is asked of Keystone each time: who asks is not only in its tokens,
# it has a body of unknown length, or it takes part in a trace.
_UNCACHED_NAMES = """
    AUTH_TYPE HTTP_AUTHORIZATION HTTP_TRANSFER_ENCODING
    HTTP_X_TRACE_INFO HTTP_X_TRACE_HMAC HTTP_EXPECT HTTP_UPGRADE
    openstack.context
"""
_UNCACHED = frozenset((*_UNCACHED_NAMES.split(), AUTH_CONTEXT))
# REMOTE_ADDR and its like are harmless, and are known before.
_UNCACHED_PREFIXES = (
    "REMOTE_", "SSL_CLIENT_", "HTTP_X_SSL_", "HTTP_SSL_", "OIDC_", "MELLON_", "SHIB",
)  # fmt: skip

_BLANKS = ("",) * len(CORE)
_CALLER = CORE.index("HTTP_X_AUTH_TOKEN")

#: Bytes of a key.
KEY_BYTES = 16

#: Version of keys, packed entries and values, and the division of the files; raised when one of
#: them changes, as builds with one version of keyfront may use the files one after the other.
FORM = 5

# Bytes of an ETag's hash: two bodies of one token must differ in it; nobody can choose them.
_ETAG_BYTES = 12

# A bound on the names that are learnt, should a server make them up for each request.
_KNOWN_LIMIT = 300


class Keys:
    """Makes keys of requests, by hashes with a secret.

    :param secret: 32 bytes, the same in all processes that share entries
    :param callers: names of further request variables with which no request is answered from a
        cache
    """

    __slots__ = ("_hash", "_known", "_uncached")

    def __init__(self, secret: bytes, callers: Iterable[str] = ()) -> None:
        # Copied for each key: starting with the secret costs as much as the rest.
        self._hash = blake2b(digest_size=KEY_BYTES, key=secret)
        self._uncached = _UNCACHED.union(callers)
        self._known = HARMLESS.union(CORE) - self._uncached

    def key(self, environ: Mapping[str, Any]) -> bytes | None:
        """Return the key of a request, or ``None`` if it must not be answered from a cache.

        :param environ: the WSGI environment of a GET or HEAD (PEP 3333)
        :returns: :data:`KEY_BYTES` bytes
        """
        length = environ.get("CONTENT_LENGTH")
        if length and length != "0":
            return None
        parts = list(map(environ.get, CORE, _BLANKS))
        if not parts[_CALLER] and "HTTP_X_AUTH_TOKEN" in environ:
            return None  # not as if it were absent: it keeps Keystone from X-Storage-Token
        # In C, and the usual request has nothing else.
        if not environ.keys() <= self._known:
            for name in self._others(environ):
                value = environ[name]
                # Who knows what an object may say of the caller?
                if (
                    name in self._uncached
                    or name.startswith(_UNCACHED_PREFIXES)
                    or not isinstance(value, str)
                ):
                    return None
                parts += (name, value)
        text = "\n".join(parts)
        # A value with a line feed could pass for two; a server should let none through.
        if text.count("\n") != len(parts) - 1:
            return None
        try:
            data = text.encode("latin-1")  # as PEP 3333 has all strings
        except UnicodeEncodeError:
            return None
        keyed = self._hash.copy()
        keyed.update(data)
        return keyed.digest()

    def knows(self, environ: Mapping[str, Any]) -> bool:
        """Return whether all variables of a request that has a key are known."""
        return environ.keys() <= self._known

    def variant(self, environ: Mapping[str, Any]) -> bytes:
        """Return a hash of the request variables other than method, path, query and tokens.

        It tells apart the ways in which one caller may ask for the same thing.

        :param environ: the WSGI environment of a request that has a key
        :returns: :data:`KEY_BYTES` bytes
        """
        parts = [environ.get(name, "") for name in _OF_VARIANT]
        if not environ.keys() <= self._known:
            for name in self._others(environ):
                parts += (name, environ[name])
        return self.named("variant", *parts)

    def named(self, kind: str, *parts: str) -> bytes:
        """Return the key of something other than an answer.

        :param kind: a word for the kind of thing, which is no method of HTTP
        :param parts: the values of a request that has a key which tell it from others of its kind
        :returns: :data:`KEY_BYTES` bytes
        """
        keyed = self._hash.copy()
        keyed.update("\n".join((kind, *parts)).encode("latin-1"))
        return keyed.digest()

    def _others(self, environ: Mapping[str, Any]) -> list[str]:
        """Return the names of the request variables that may matter though they are not core."""
        names = environ.keys() - self._known
        # Names with a dot are the server's (PEP 3333), and each request has the same. A header's
        # name may have one, too.
        servers = {
            name
            for name in names - self._uncached
            if "." in name and not name.startswith("HTTP_")
        }
        if servers and len(self._known) < _KNOWN_LIMIT:
            self._known |= servers
        return sorted(names - servers)


# A bound on the ways in which one caller may ask the same and have each answer kept.
#
# Whoever has a token may validate it with whatever query and headers he likes, and each of them is
# part of the key. Without a bound he would displace the answers that are kept for others, first of
# all in the memory of the workers, where the oldest are overwritten whether they are used or not.

#: Ways of one caller that are known at a time: hosts, languages, service tokens, proxies' headers.
WAYS: Final = 8

# Callers whose ways one process remembers.
_CALLERS = 4096

_WITHOUT_CATALOG = ("nocatalog", "nocatalog=", "nocatalog=1", "nocatalog=true", "nocatalog=True")
_ALSO_EXPIRED = ("allow_expired=1", "allow_expired=true", "allow_expired=True")

#: The queries of a validation that clients send. Keystone reads no other names.
QUERIES: Final = frozenset(
    {
        *("", *_WITHOUT_CATALOG, *_ALSO_EXPIRED),
        *("&".join(both) for both in product(_WITHOUT_CATALOG, _ALSO_EXPIRED)),
        *("&".join(both) for both in product(_ALSO_EXPIRED, _WITHOUT_CATALOG)),
    }
)


class Way(NamedTuple):
    """A way in which a caller asks: keyed hashes of the caller and of the way."""

    caller: bytes
    variant: bytes


class Variants:
    """Remembers the ways in which each caller was answered lately.

    :param seconds: seconds after which a way that was not used makes room for another
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # No lock: two threads at once may let a way too many in, and nothing worse.
        self._callers: dict[bytes, dict[bytes, float]] = {}

    def way(self, environ: Mapping[str, Any], keys: Keys) -> Way | None:
        """Return the way of a request that has a key; ``None`` if its answer must not be kept.

        That is for a query that is not in :data:`QUERIES`, and a caller with :data:`WAYS` others.

        :param environ: the WSGI environment of a validation
        :param keys: the maker of keys of the present epoch table
        """
        if environ.get("QUERY_STRING", "") not in QUERIES:
            return None
        way = Way(keys.named("asks", environ.get("HTTP_X_AUTH_TOKEN", "")), keys.variant(environ))
        known = self._callers.get(way.caller)
        if known is None or way.variant in known or len(known) < WAYS:
            return way
        first, last = next(iter(known.items()), (b"", 0.0))
        if time.monotonic() - last < self._seconds:
            return None
        known.pop(first, None)
        return way

    def note(self, way: Way) -> None:
        """Note that an answer was kept which a caller was given in this way."""
        callers = self._callers
        known = callers.pop(way.caller, None) or {}
        known.pop(way.variant, None)
        # The last of each at the end.
        known[way.variant] = time.monotonic()
        callers[way.caller] = known
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread is at it
            while len(callers) > _CALLERS:
                del callers[next(iter(callers))]


class Lifetime(NamedTuple):
    """The deadlines of an answer, and what must be followed for it to stand."""

    #: Seconds of the monotonic clock (``ttl``, and no longer than the tokens, trusts, …).
    deadline: float
    #: Unix time at which the first of the tokens, trusts, … ends: a wall clock that is set forward
    #: ends the answer as it ends the token.
    expires: float
    #: Names of what must be followed for the answer to stand, see ``directory_leases.py``.
    followed: tuple[str, ...] = ()


class Entry:
    """A stored answer.

    :param status: the status line, as ``start_response`` was given it: ``200 OK``
    :param headers: the answer's headers, with empty values for request identifier and token
    :param body: the body without the token it may repeat
    :param request_id: the index in ``headers`` of the request identifier
    :param subject: the index in ``headers`` of the subject token, or -1
    :param split: the offset in the body at which the subject token belongs, or -1
    :param epoch: the epoch from before Keystone was asked
    :param slots: the slots of the tags that the answer depends on
    :param lifetime: the answer's deadlines
    """

    __slots__ = (
        *("body", "deadline", "epoch", "etag", "expires", "headers", "request_id", "size"),
        *("slots", "split", "status", "subject"),
    )

    def __init__(
        self,
        status: str,
        headers: Headers,
        body: bytes,
        *,
        request_id: int,
        subject: int,
        split: int,
        epoch: Epoch,
        slots: Slots,
        lifetime: Lifetime,
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.request_id = request_id
        self.subject = subject
        self.split = split
        self.epoch = epoch
        self.slots = slots
        self.deadline, self.expires, _ = lifetime
        #: The ETag of the body, for answers to the same request (RFC 9110, section 8.8.3).
        self.etag = f'"{blake2b(body, digest_size=_ETAG_BYTES).hexdigest()}"'
        # What Python needs for the rest, measured: the object, lists, tuples and the key.
        self.size = len(body) + 1300 + sum(len(n) + len(v) + 180 for n, v in headers)

    @property
    def lifetime(self) -> Lifetime:
        """The deadlines of the answer."""
        return Lifetime(self.deadline, self.expires)

    @property
    def negative(self) -> bool:
        """True if the answer is a refusal: its status is not 2xx."""
        return not self.status.startswith("2")

    def answer(self, environ: Mapping[str, Any]) -> tuple[Headers, bytes]:
        """Return headers and body for a request, with its token and a new request identifier.

        :param environ: the request's WSGI environment
        """
        headers = self.headers.copy()
        place = self.request_id
        headers[place] = (headers[place][0], new_request_id())
        body = self.body
        place = self.subject
        if place >= 0:
            headers[place] = (headers[place][0], environ["HTTP_X_SUBJECT_TOKEN"])
        if self.split >= 0:
            token = environ["HTTP_X_SUBJECT_TOKEN"].encode("latin-1")
            body = body[: self.split] + token + body[self.split :]
        return headers, body

    def pack(self) -> bytes:
        """Return the entry as bytes, for a store that processes share."""
        fields = (
            *(self.status, self.headers, self.request_id, self.subject, self.split),
            *(self.epoch, self.slots, self.lifetime),
        )
        meta = json.dumps(fields, separators=(",", ":")).encode()
        return _LENGTH.pack(len(meta)) + meta + self.body

    @classmethod
    def unpack(cls, packed: bytes) -> Entry:
        """Return the entry that :meth:`pack` packed, as a :class:`FollowedEntry` if it is one."""
        (length,) = _LENGTH.unpack_from(packed)
        meta = json.loads(packed[_LENGTH.size : _LENGTH.size + length])
        status, headers, request_id, subject, split, epoch, slots, times = meta
        lifetime = Lifetime(times[0], times[1], tuple(times[2]))
        return (FollowedEntry if lifetime.followed else cls)(
            status,
            [(name, value) for name, value in headers],
            packed[_LENGTH.size + length :],
            request_id=request_id,
            subject=subject,
            split=split,
            epoch=Epoch(*epoch),
            slots=Slots(slots),
            lifetime=lifetime,
        )


class FollowedEntry(Entry):
    """An answer that stands only while each directory is followed that it was made of.

    It is a class of its own so that other answers cost no more.
    """

    __slots__ = ("_deadline", "_followed")

    @property
    def deadline(self) -> float:
        """Seconds of the monotonic clock when it ends, unless a lease is renewed before."""
        return min(self._deadline, leases.until(self._followed))

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value

    def __init__(
        self, status: str, headers: Headers, body: bytes, *, lifetime: Lifetime, **more: Any
    ) -> None:
        super().__init__(status, headers, body, lifetime=lifetime, **more)
        self._followed = lifetime.followed
        self.size += 100 + sum(len(name) + 60 for name in lifetime.followed)

    @property
    def lifetime(self) -> Lifetime:
        """The deadlines of the answer, and what must be followed for it to stand."""
        return Lifetime(self._deadline, self.expires, self._followed)


_LENGTH = struct.Struct("<I")

#: The header with the identifier that is fresh on each answer (oslo.middleware).
REQUEST_ID = "x-openstack-request-id"
SUBJECT_TOKEN = "x-subject-token"


def entry_of(
    environ: Mapping[str, Any],
    status: str,
    headers: Headers,
    body: bytes,
    *,
    epoch: Epoch,
    slots: Slots,
    lifetime: Lifetime,
) -> Entry | None:
    """Return the entry for an answer of Keystone, or ``None`` if it must not be given again.

    That is an answer that sets a cookie, forbids storing, has no request identifier, or shows a
    token elsewhere than where it can be taken out.

    :param environ: the WSGI environment of the request
    :param status: the status line of the answer
    :param headers: the headers of the answer
    :param body: the whole body of the answer
    :param epoch: the epoch from before Keystone was asked
    :param slots: the slots of the tags that the answer depends on
    :param lifetime: the answer's deadlines
    """
    names = [name.lower() for name, _ in headers]
    if names.count(REQUEST_ID) != 1 or "set-cookie" in names:
        return None
    if any("no-store" in value for _, value in headers):
        return None
    token = environ.get("HTTP_X_SUBJECT_TOKEN", "")
    kept = list(headers)
    request_id = names.index(REQUEST_ID)
    kept[request_id] = (kept[request_id][0], "")
    subject = -1
    if SUBJECT_TOKEN in names:
        subject = names.index(SUBJECT_TOKEN)
        if kept[subject][1] != token:
            return None
        kept[subject] = (kept[subject][0], "")
    split = -1
    raw = token.encode("latin-1", "replace")
    if raw and raw in body:
        if body.count(raw) != 1:
            return None
        split = body.index(raw)
        body = body[:split] + body[split + len(raw) :]
    for secret in (token, *(environ.get(name, "") for name in _OTHER_TOKENS)):
        if secret and (
            secret.encode("latin-1", "replace") in body or any(secret in v for _, v in kept)
        ):
            return None
    return (FollowedEntry if lifetime.followed else Entry)(
        status, kept, body,
        request_id=request_id, subject=subject, split=split,
        epoch=epoch, slots=slots, lifetime=lifetime,
    )  # fmt: skip


_OTHER_TOKENS = ("HTTP_X_AUTH_TOKEN", "HTTP_X_SERVICE_TOKEN", "HTTP_X_STORAGE_TOKEN")


class _RequestIds:
    """Request identifiers in the form of oslo.context's, without a system call for each.

    Each process takes a random beginning, and walks with a random odd step through all 2**48
    endings.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start with a new random beginning, as a child must: else it goes on with its parent's."""
        raw = os.urandom(16).hex()
        # As uuid4 has it (RFC 9562): version 4, variant 10.
        self._head = (
            f"req-{raw[:8]}-{raw[8:12]}-4{raw[13:16]}-{'89ab'[int(raw[16], 16) & 3]}{raw[17:20]}-"
        )
        step = int.from_bytes(os.urandom(6), "big") | 1
        self._endings = itertools.count(int(raw[20:], 16), step)

    def next(self) -> str:
        return "%s%012x" % (self._head, next(self._endings) & 0xFFFFFFFFFFFF)  # noqa: UP031 - quicker


_request_ids = _RequestIds()
new_request_id = _request_ids.next
begin_request_ids = _request_ids.begin
os.register_at_fork(after_in_child=begin_request_ids)
