"""A service's first validation of a token, answered from what is known of both.

A service validates each token that is new to it once, and only then is there an answer to be given
again. But what such an answer is made of is known by then: of the token from its issue, or from
what another service was answered; of the service from the tokens that it validated before. These
are three facts, each with a life of its own:

* :class:`Subject`: what is answered of a token to whoever may see it, and what a policy is told of
  it. It stands as long as nothing has changed that the token depends on, and what has to be
  followed for it is.
* :class:`Caller`: what a policy is told of whoever asks, as Keystone computed it. It stands as long
  as nothing has changed that his own token depends on.
* Whether this caller may see this token. Keystone's own enforcer decides
  (``gateway/keystone/validation_policy.py``), and whom it does not let is left to Keystone. A yes
  is kept with the caller, and holds for each token of which that is the same which the enforcer
  looked at: of a caller with the role ``admin`` it looks at nothing of the token.

What is made of them has the epoch from before they were looked up: nothing that they depend on has
changed up to then, so it is as if it had been asked of Keystone at that moment.

A token is in no fact, and facts are found by keyed hashes, as answers are.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from .counters import ISSUED
from .entries import CORE, REQUEST_ID, SUBJECT_TOKEN, Entry, FollowedEntry, Headers, Keys, Lifetime
from .epochs import Coordinator, Epoch, Slots, slots
from .leases import registry as leases
from .lru_cache import Memory
from .node_cache import Node
from .request import Request, ends, tags
from .routes import TOKENS

#: Asks Keystone's policy whether a caller may see a token, by the credentials of the one and the
#: target of the other. Returns the names of what it looked at in the target, if he may and nobody
#: else was asked; else ``None``.
Decide = Callable[[Mapping[str, Any], Mapping[str, Any]], frozenset[str] | None]

registry: dict[Path, Decide] = {}
"""The policies of this process by the folder of their caches: the one place that keeps them."""

# Queries that are known to make no difference but this one. A token that has not ended is answered
# the same whether or not one that has would be.
_WHOLE, _WITHOUT_CATALOG = "whole", "without catalog"
_SHOWN: Final[Mapping[str, str]] = {
    "": _WHOLE,
    "allow_expired=1": _WHOLE,
    "nocatalog": _WITHOUT_CATALOG,
    "nocatalog&allow_expired=1": _WITHOUT_CATALOG,
}

# Of a caller is everything else that he sends, whether or not it makes a difference.
_OF_CALLER = tuple(
    name for name in CORE
    if name not in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_X_SUBJECT_TOKEN")
)

# An answer with others is none of which it is known that it goes by nothing else.
_LENGTH = "content-length"
_HEADERS = frozenset({"content-type", _LENGTH, "vary", SUBJECT_TOKEN, REQUEST_ID})

_OK = "200 OK"

# How the body of a token begins, as Keystone writes it.
_BEGINNING = '{"token": {"methods": %s, "user": '


class Question(NamedTuple):
    """A first validation: by what caller and token are found."""

    caller: bytes
    subject: bytes


class Subject(NamedTuple):
    """What is known of a token."""

    #: What the policy is told of it.
    target: dict[str, Any]
    body: bytes
    epoch: Epoch
    slots: Slots
    lifetime: Lifetime

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return 2500 + len(self.body) + 150 * len(self.slots)

    def pack(self) -> bytes:
        """Return it as bytes, for a store that processes share."""
        return _packed((self.target, self.epoch, self.slots, self.lifetime), self.body)

    @classmethod
    def unpack(cls, packed: bytes) -> Subject:
        """Return what :meth:`pack` packed."""
        (target, epoch, numbers, times), body = _unpacked(packed)
        return cls(target, body, Epoch(*epoch), Slots(numbers), _lifetime(times))


class Caller(NamedTuple):
    """What is known of somebody who validates tokens."""

    #: What the policy is told of him.
    credentials: dict[str, Any]
    #: Of the answers that he gets; with the places of those that differ from one to the next.
    headers: Headers
    request_id: int
    subject: int
    length: int
    epoch: Epoch
    slots: Slots
    lifetime: Lifetime
    #: Bytes that it takes in memory.
    size: int
    #: What he may see: values of what of a token's target the policy went by, by their names.
    seen: dict[tuple[str, ...], set[tuple[Any, ...]]]

    def pack(self) -> bytes:
        """Return it as bytes, for a store that processes share."""
        return _packed(self[:-2], b"")

    @classmethod
    def unpack(cls, packed: bytes) -> Caller:
        """Return what :meth:`pack` packed."""
        (credentials, headers, request_id, subject, length, epoch, numbers, times), _ = (
            _unpacked(packed)
        )
        return cls(
            credentials, [(name, value) for name, value in headers],
            request_id, subject, length,
            Epoch(*epoch), Slots(numbers), _lifetime(times), _weight(packed), {},
        )  # fmt: skip

    def may_see(self, target: Mapping[str, Any], decide: Decide) -> bool:
        """Whether the policy lets him see a token.

        :param target: of the token
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


# Decisions by the same of a token's target that are kept for one caller.
_SEEN = 256


F = TypeVar("F", Caller, Subject)


def _values(target: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(target.get(name, _ABSENT) for name in names)


_ABSENT = object()


def _weight(packed: bytes) -> int:
    # Measured: objects of Python take some five times as much as they do in JSON.
    return 2000 + 5 * len(packed)


class FirstValidations:
    """Answers first validations, and keeps what they are answered from.

    :param coordinator: keeps the epochs
    :param node: what the workers of this node share
    :param ttl: seconds for which a fact is kept at most
    :param memory: bytes of callers and subjects in this process, half of it for each
    :param decide: asks Keystone's policy
    """

    def __init__(
        self, coordinator: Coordinator, node: Node, *, ttl: float, memory: int, decide: Decide
    ) -> None:
        self._coordinator = coordinator
        self._node = node
        self._ttl = ttl
        self._callers: Memory[Caller] = Memory(memory // 2)
        self._subjects: Memory[Subject] = Memory(memory // 2)
        self._decide = decide

    def clear(self) -> None:
        """Forget everything; what the workers share ends with its secret."""
        self._callers.clear()
        self._subjects.clear()

    def question(self, environ: Mapping[str, Any], keys: Keys) -> Question | None:
        """Return by what the facts for a request are found; ``None`` if it has to be asked whole.

        :param environ: of a request that has a key, before Keystone has seen it
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
        """Return the answer to a first validation; ``None`` if it has to be asked of Keystone.

        :param epoch: the present one, taken before this
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

        :param request: what was noted while Keystone answered
        :param entry: the answer, as it is kept
        :param epoch: with which it is kept
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
    ) -> None:  # fmt: skip
        """Keep what is known of a token that was just issued.

        :param environ: of the login
        :param request: what was noted while Keystone answered it
        :param headers: of the answer; so is ``body``
        :param epoch: from before anything was read for it
        """
        issued = request.issued
        shown = _SHOWN.get(environ.get("QUERY_STRING", ""))
        if issued is None or shown is None or request.unvouched:
            return
        token = issued.model.id
        told = [value for name, value in headers if name.lower() == SUBJECT_TOKEN]
        beginning = (_BEGINNING % json.dumps(issued.model.methods)).encode()
        if told != [token] or token.encode() in body or not body.startswith(beginning):
            return
        life = self._life(request, token)
        if life is None or not self._coordinator.fresh(epoch, life[0]):
            return
        body = (_BEGINNING % json.dumps(issued.methods)).encode() + body[len(beginning) :]
        subject = Subject(dict(issued.target), body, epoch, *life)
        packed = _exactly(subject)
        if packed is not None:
            name = keys.named("subject", shown, token)
            self._node.keep_packed(name, packed, subject=True)
            self._node.counters.count(ISSUED)

    def _life(self, request: Request, token: str) -> tuple[Slots, Lifetime] | None:
        """Return what a fact about a token stands by, and how long; ``None``: it is not kept."""
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
        self, memory: Memory[F], key: bytes, kind: type[F], *, anew: bool
    ) -> F | None:
        """Return a fact, whether or not it still stands.

        :param memory: where this process keeps those of its kind
        :param anew: whether it is taken from what the workers share, whatever is kept here
        """
        fact = None if anew else memory.get(key)
        if fact is None:
            packed = self._node.packed(key, subject=kind is Subject)
            if packed is not None:
                fact = kind.unpack(packed)
                memory.put(key, fact)
        return fact

    def _stand(self, caller: Caller, subject: Subject, both: Slots) -> bool:
        """Whether two facts stand.

        :param both: their slots
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
    """Whether what Keystone says of a token goes by the version of access rules as well."""
    credential = model.application_credential
    return credential is not None and credential.get("access_rules") is not None


def _places(entry: Entry) -> tuple[int, int, int] | None:
    """Return where the headers are that differ; ``None`` if it is not known what others go by."""
    names = [name.lower() for name, _ in entry.headers]
    if entry.subject < 0 or names.count(_LENGTH) != 1 or not _HEADERS.issuperset(names):
        return None
    length = names.index(_LENGTH)
    if entry.headers[length][1] != str(len(entry.body)):
        return None
    return entry.request_id, entry.subject, length


def _exactly(fact: Caller | Subject) -> bytes | None:
    """Return a fact as bytes; ``None`` if they would be read as another one."""
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
