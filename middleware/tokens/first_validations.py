"""A service's first validation of a token, answered from what is known of both.

A service validates each token that is new to it once, and only then is there an answer to be given
again. But what such an answer is made of is known by then: of the token from its issue, or from
what another service was answered; of the service from the tokens that it validated before. These
are three facts, each with a life of its own:

* :class:`Subject`: the body of the answer about a token, and the target that a policy is given of
  it. It stands as long as nothing has changed that the token depends on, and each directory is
  followed that it was made of.
* :class:`Caller`: the credentials that a policy is given of the caller, as Keystone computed them.
  It stands as long as nothing has changed that the caller's own token depends on.
* The permission of this caller to see this token. Keystone's own enforcer decides
  (``gateway/keystone/validation_policy.py``); where it refuses, Keystone is asked. A permission is
  kept with the caller, and holds for each token that has the same values which the enforcer
  looked at: for a caller with the role ``admin`` it looks at none.

An answer that is made of them has the epoch from before they were looked up: nothing that they
depend on has changed up to then, so it is as if Keystone had been asked at that moment.

No fact holds a token, and facts are found by keyed hashes, as answers are.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from .counters import ISSUED
from .directory_leases import leases
from .epochs import Coordinator, Epoch, Slots, slots
from .keys_and_entries import (
    CORE,
    REQUEST_ID,
    SUBJECT_TOKEN,
    Entry,
    FollowedEntry,
    Headers,
    Keys,
    Lifetime,
)
from .node_cache import NodeCache
from .request import Request, ends, tags
from .routes import TOKENS
from .worker_cache import LRUCache

#: A function that asks Keystone's policy whether a caller may see a token, given the credentials of
#: the one and the target of the other. It returns the names of the target's values that the policy
#: looked at, if he may and nobody else was asked; else ``None``.
Decide = Callable[[Mapping[str, Any], Mapping[str, Any]], frozenset[str] | None]

policies: dict[Path, Decide] = {}
"""The policies of this process by the folder of their caches: the one place that keeps them."""

# Queries by the difference that they make to the answer. allow_expired makes none for a token that
# has not ended.
_WHOLE, _WITHOUT_CATALOG = "whole", "without catalog"
_SHOWN: Final[Mapping[str, str]] = {
    "": _WHOLE,
    "allow_expired=1": _WHOLE,
    "nocatalog": _WITHOUT_CATALOG,
    "nocatalog&allow_expired=1": _WITHOUT_CATALOG,
}

# A caller is told from others by everything else that he sends, even where it makes no difference.
_OF_CALLER = tuple(
    name for name in CORE
    if name not in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_X_SUBJECT_TOKEN")
)

# An answer with other headers may depend on something else, and is not taken apart.
_LENGTH = "content-length"
_HEADERS = frozenset({"content-type", _LENGTH, "vary", SUBJECT_TOKEN, REQUEST_ID})

_OK = "200 OK"

# How the body of a token begins, as Keystone writes it.
_BEGINNING = '{"token": {"methods": %s, "user": '


class Question(NamedTuple):
    """A first validation: the keys of its caller and of its token."""

    caller: bytes
    subject: bytes


class Subject(NamedTuple):
    """The facts about a token."""

    #: The target that the policy is given.
    target: dict[str, Any]
    body: bytes
    epoch: Epoch
    slots: Slots
    lifetime: Lifetime

    @property
    def size(self) -> int:
        """Bytes that the facts take in memory, estimated."""
        return 2500 + len(self.body) + 150 * len(self.slots)

    def pack(self) -> bytes:
        """Return it as bytes, for a store that processes share."""
        return _packed((self.target, self.epoch, self.slots, self.lifetime), self.body)

    @classmethod
    def unpack(cls, packed: bytes) -> Subject:
        """Return the facts that :meth:`pack` packed."""
        (target, epoch, numbers, times), body = _unpacked(packed)
        return cls(target, body, Epoch(*epoch), Slots(numbers), _lifetime(times))


class Caller(NamedTuple):
    """The facts about somebody who validates tokens."""

    #: The credentials that the policy is given.
    credentials: dict[str, Any]
    #: The headers of the answers that he gets, and the indices of those that differ from one
    #: answer to the next.
    headers: Headers
    request_id: int
    subject: int
    length: int
    epoch: Epoch
    slots: Slots
    lifetime: Lifetime
    #: Bytes that the facts take in memory, estimated.
    size: int
    #: Tokens that he may see: the values of a token's target that the policy looked at, by names.
    seen: dict[tuple[str, ...], set[tuple[Any, ...]]]

    def pack(self) -> bytes:
        """Return it as bytes, for a store that processes share."""
        return _packed(self[:-2], b"")

    @classmethod
    def unpack(cls, packed: bytes) -> Caller:
        """Return the facts that :meth:`pack` packed."""
        (credentials, headers, request_id, subject, length, epoch, numbers, times), _ = (
            _unpacked(packed)
        )
        return cls(
            credentials, [(name, value) for name, value in headers],
            request_id, subject, length,
            Epoch(*epoch), Slots(numbers), _lifetime(times), _weight(packed), {},
        )  # fmt: skip

    def may_see(self, target: Mapping[str, Any], decide: Decide) -> bool:
        """Return whether the policy lets this caller see a token; a permission is kept.

        :param target: the target that the policy is given of the token
        :param decide: the function that asks Keystone's policy
        """
        for names, values in tuple(self.seen.items()):
            if _values(target, names) in values:
                return True
        by = decide(self.credentials, target)
        if by is None:
            return False
        names = tuple(sorted(by))
        known = self.seen.setdefault(names, set())
        if len(known) >= _SEEN:
            known.clear()
        known.add(_values(target, names))
        return True


# Permissions by the same names of a target's values that are kept for one caller.
_SEEN = 256


F = TypeVar("F", Caller, Subject)


def _values(target: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(target.get(name, _ABSENT) for name in names)


_ABSENT = object()


def _weight(packed: bytes) -> int:
    # Measured: objects of Python take some five times as much as they do in JSON.
    return 2000 + 5 * len(packed)


class FirstValidations:
    """Answers first validations, and keeps the facts that they are answered from.

    :param coordinator: the coordinator that keeps the epochs
    :param node: the memory that the workers of this node share
    :param ttl: seconds for which a fact is kept at most
    :param memory: bytes of callers and subjects in this process, half of it for each
    :param decide: the function that asks Keystone's policy
    """

    def __init__(
        self, coordinator: Coordinator, node: NodeCache, *, ttl: float, memory: int, decide: Decide
    ) -> None:
        self._coordinator = coordinator
        self._node = node
        self._ttl = ttl
        self._callers: LRUCache[Caller] = LRUCache(memory // 2)
        self._subjects: LRUCache[Subject] = LRUCache(memory // 2)
        self._decide = decide

    def clear(self) -> None:
        """Drop all facts of this process; those that the workers share end with their secret."""
        self._callers.clear()
        self._subjects.clear()

    def question(self, environ: Mapping[str, Any], keys: Keys) -> Question | None:
        """Return the keys of the facts for a request; ``None`` if Keystone must answer it whole.

        :param environ: the WSGI environment of a request that has a key, before Keystone has seen
            it
        :param keys: the maker of keys of the present epoch table
        """
        shown = _SHOWN.get(environ.get("QUERY_STRING", ""))
        subject = environ.get("HTTP_X_SUBJECT_TOKEN")
        if (
            shown is None
            or not subject
            or not environ.get("HTTP_X_AUTH_TOKEN")
            or environ["REQUEST_METHOD"] != "GET"
            or environ["PATH_INFO"] != TOKENS
            or not keys.knows(environ)
        ):
            return None
        caller = [environ.get(name, "") for name in _OF_CALLER]
        return Question(keys.named("caller", *caller), keys.named("subject", shown, subject))

    def answer(self, question: Question, epoch: Epoch) -> Entry | None:
        """Return the answer to a first validation; ``None`` if Keystone must be asked.

        :param question: the result of :meth:`question`
        :param epoch: the present epoch, taken before this call
        :raises CoordinatorError: the epoch table cannot be reached
        """
        for anew in (False, True):  # what this process has kept may have been made anew
            subject = self._find(self._subjects, question.subject, Subject, anew=anew)
            if subject is None:
                return None
            caller = self._find(self._callers, question.caller, Caller, anew=anew)
            if caller is None:
                return None
            both = Slots({*caller.slots, *subject.slots})
            # By the table itself: what a lease has not heard of would get a newer number here.
            if self._stand(caller, subject, both):
                break
        else:
            return None
        if not caller.may_see(subject.target, self._decide):
            return None
        headers = caller.headers.copy()
        headers[caller.length] = (headers[caller.length][0], str(len(subject.body)))
        lifetime = Lifetime(
            min(caller.lifetime.deadline, subject.lifetime.deadline),
            min(caller.lifetime.expires, subject.lifetime.expires),
            tuple(sorted({*caller.lifetime.followed, *subject.lifetime.followed})),
        )
        return (FollowedEntry if lifetime.followed else Entry)(
            _OK, headers, subject.body,
            request_id=caller.request_id, subject=caller.subject, split=-1,
            epoch=epoch, slots=both, lifetime=lifetime,
        )  # fmt: skip

    def learn(
        self,
        question: Question,
        environ: Mapping[str, Any],
        request: Request,
        entry: Entry,
        epoch: Epoch,
    ) -> None:
        """Keep the facts that Keystone's answer to a validation was made of.

        :param question: the result of :meth:`question`
        :param environ: the request's WSGI environment
        :param request: the notes that were made while Keystone answered
        :param entry: the answer, as it is kept
        :param epoch: the epoch with which the answer is kept
        """
        if entry.status != _OK or len(request.enforced) != 1 or entry.split >= 0:
            return
        (enforced,) = request.enforced
        tokens = environ["HTTP_X_AUTH_TOKEN"].strip(), environ["HTTP_X_SUBJECT_TOKEN"]
        stand = [self._life(request, token) for token in tokens]
        places = _places(entry)
        if stand[0] is not None and places is not None:
            credentials = dict(enforced.credentials)
            caller = Caller(
                credentials, entry.headers, *places, epoch, *stand[0], size=0, seen={}
            )
            packed = _exactly(caller)
            if packed is not None:
                self._callers.put(question.caller, caller._replace(size=_weight(packed)))
                self._node.keep_packed(question.caller, packed)
        if stand[1] is not None:
            target = dict(enforced.target)
            subject = Subject(target, entry.body, epoch, *stand[1])
            packed = _exactly(subject)
            if packed is not None:
                self._node.keep_packed(question.subject, packed, subject=True)

    def issued(
        self, environ: Mapping[str, Any], request: Request, headers: Headers, body: bytes,
        epoch: Epoch, keys: Keys,
    ) -> tuple[bytes, bytes] | None:  # fmt: skip
        """Return the facts about a token that was just issued, for the workers to keep.

        :param environ: the WSGI environment of the login
        :param request: the notes that were made while Keystone answered it
        :param headers: the headers of the answer
        :param body: the body of the answer
        :param epoch: the epoch from before anything was read for it
        :param keys: the maker of keys of the present epoch table
        :returns: their key, and the facts as bytes; ``None`` if they are not to be kept
        :raises CoordinatorError: the epoch table cannot be reached
        """
        issued = request.issued
        shown = _SHOWN.get(environ.get("QUERY_STRING", ""))
        if issued is None or shown is None or request.unvouched:
            return None
        token = issued.model.id
        told = [value for name, value in headers if name.lower() == SUBJECT_TOKEN]
        beginning = (_BEGINNING % json.dumps(issued.model.methods)).encode()
        if told != [token] or token.encode() in body or not body.startswith(beginning):
            return None
        life = self._life(request, token)
        if life is None or not self._coordinator.fresh(epoch, life[0]):
            return None
        body = (_BEGINNING % json.dumps(issued.methods)).encode() + body[len(beginning) :]
        subject = Subject(dict(issued.target), body, epoch, *life)
        packed = _exactly(subject)
        if packed is None:
            return None
        self._node.counters.count(ISSUED)
        return keys.named("subject", shown, token), packed

    def _life(self, request: Request, token: str) -> tuple[Slots, Lifetime] | None:
        """Return slots and lifetime of a fact about a token; ``None`` if it must not be kept."""
        model = request.accepted.get(token)
        found = tags(request, [token])
        if model is None or found is None or _has_rules(model):
            return None
        try:
            expires = ends(model)
        except (ValueError, TypeError, AttributeError):
            return None
        now = time.monotonic()
        ttl = min(self._ttl, expires - time.time(), request.until - now)
        if ttl <= 0:
            return None
        lifetime = Lifetime(now + ttl, expires, tuple(sorted(request.followed)))
        return slots(found, self._coordinator.slot_count), lifetime

    def _find(
        self, memory: LRUCache[F], key: bytes, kind: type[F], *, anew: bool
    ) -> F | None:
        """Return a fact, whether or not it still stands.

        :param memory: the memory of this process for facts of its kind
        :param anew: if true, it is read from the memory of the workers, whatever is kept here
        """
        fact = None if anew else memory.get(key)
        if fact is None:
            packed = self._node.packed(key, subject=kind is Subject)
            if packed is not None:
                fact = kind.unpack(packed)
                memory.put(key, fact)
        return fact

    def _stand(self, caller: Caller, subject: Subject, both: Slots) -> bool:
        """Return whether two facts stand.

        :param both: the slots of both facts
        """
        now, today = time.monotonic(), time.time()
        for deadline, expires, followed in (caller.lifetime, subject.lifetime):
            if now >= deadline or today >= expires:
                return False
            if followed and now >= leases.until(followed):
                return False
        fresh = self._coordinator.fresh_now
        # Mostly nothing has changed since the older of them, which one look tells.
        if caller.epoch.generation == subject.epoch.generation and fresh(
            min(caller.epoch, subject.epoch), both
        ):
            return True
        return fresh(caller.epoch, caller.slots) and fresh(subject.epoch, subject.slots)


def _lifetime(times: list[Any]) -> Lifetime:
    return Lifetime(times[0], times[1], tuple(times[2]))


def _has_rules(model: Any) -> bool:
    """Return whether Keystone's answer about a token depends on the version of access rules."""
    credential = model.application_credential
    return credential is not None and credential.get("access_rules") is not None


def _places(entry: Entry) -> tuple[int, int, int] | None:
    """Return the indices of request identifier, token and length; ``None`` with unknown headers.
    """
    names = [name.lower() for name, _ in entry.headers]
    if entry.subject < 0 or names.count(_LENGTH) != 1 or not _HEADERS.issuperset(names):
        return None
    length = names.index(_LENGTH)
    if entry.headers[length][1] != str(len(entry.body)):
        return None
    return entry.request_id, entry.subject, length


def _exactly(fact: Caller | Subject) -> bytes | None:
    """Return a fact as bytes; ``None`` if JSON would not give the same fact back."""
    told = fact.credentials if isinstance(fact, Caller) else fact.target
    try:
        return fact.pack() if json.loads(json.dumps(told)) == told else None
    except (TypeError, ValueError):
        return None


_SIZE = struct.Struct("<I")


def _packed(fields: tuple[Any, ...], body: bytes) -> bytes:
    meta = json.dumps(fields, separators=(",", ":")).encode()
    return _SIZE.pack(len(meta)) + meta + body


def _unpacked(packed: bytes) -> tuple[list[Any], bytes]:
    (length,) = _SIZE.unpack_from(packed)
    return json.loads(packed[_SIZE.size : _SIZE.size + length]), packed[_SIZE.size + length :]
