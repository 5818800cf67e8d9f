"""The ``token_cache`` filter, which answers validations in front of Keystone from memory.

In a paste file, before ``egg:keyfront#keystone``::

    [pipeline:main]
    pipeline = token_cache keystone

    [filter:token_cache]
    use = egg:keyfront#token_cache

Its options are those of ``[keyfront_token_cache]`` in keystone.conf; all but those that the
processes of a node must agree on may also be set in the filter's section. docs/tokens.md says what
it promises, and what it cannot know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from keyfront import __version__
from keyfront.common import late_requests, request_phases
from keyfront.errors import CoordinatorError, MissingPartError

from . import tags_header
from .coordinator.factory import coordinator_of
from .coordinator.local import SharedMemory
from .counters import (
    BYPASSED,
    BYPASSED_FOR,
    CAUSES,
    ENDED,
    HITS,
    KNOWN,
    MISSES,
    NAMES,
    NODE_HITS,
    NOT_FOLLOWED,
    NOT_KEPT,
    REASONS,
)
from .directory_leases import leases
from .epochs import ALL_SLOT, Coordinator, Epoch, Settling, Slots, View, changed, slots
from .first_validations import Decide, FirstValidations, Question, policies
from .folder import check_folder, folder_of
from .invalidation.change_log import coordinators
from .invalidation.rules import LAPSING
from .keys_and_entries import (
    AUTH_CONTEXT,
    Entry,
    FollowedEntry,
    Headers,
    Keys,
    Lifetime,
    Variants,
    Way,
    entry_of,
)
from .node_cache import NodeCache, nodes
from .request import ENVIRON_KEY, Request, expiry, tags
from .routes import TOKENS, Routes
from .watched_files import WatchedFiles, of_keystone
from .worker_cache import LRUCache

LOG = logging.getLogger(__name__)

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_READS = frozenset({"GET", "HEAD"})

_ALL = Slots((ALL_SLOT,))

# The name of each count, by its place in a row.
_COUNTED = ("", *NAMES, *(f"ended_{cause}" for cause in CAUSES))

# What Keystone's caches have by default.
_NULL = "dogpile.cache.null"

# Bytes of an answer of another route than validation that goes into what the workers share.
_SHARED_LISTING = 65536

# Seconds between looks at files.
_LOOK_SECONDS = 0.5

# Statuses that are kept. Others are errors of the moment.
_KEPT = ("200 ", "204 ", "401 ", "403 ", "404 ")


class TokenCache:
    """The token cache: a WSGI application in front of Keystone's.

    :param application: Keystone's application, as ``egg:keyfront#keystone`` makes it
    :param coordinator: the coordinator that keeps the epochs
    :param node: the memory that the workers of this node share
    :param routes: the routes that are answered from the cache
    :param ttl: seconds for which an answer is kept at most, 0 or more
    :param negative_ttl: seconds for which a refusal is kept at most, 0 or more
    :param memory: bytes of answers in this process, an eighth of it for refusals, and a quarter for
        other routes than validation if there are any
    :param callers: names of the request variables by which Keystone lets a caller in without a
        token
    :param settle: seconds by which the database that answers may be behind its primary, 0 or more
    :param views: if true, Keystone's caches keep values, which its requests share by the state that
        they begin in
    :param files: the files that Keystone reads besides its database
    :param decide: the function that asks Keystone's policy, so that a caller's first validation of
        a token is answered from what is known of both; an eighth of ``memory`` is for callers then
    :raises CoordinatorError: the epoch table or a shared file cannot be used at the start, and it
        is no table of a server that may be away
    """

    def __init__(
        self,
        application: WSGIApplication,
        coordinator: Coordinator,
        node: NodeCache,
        *,
        routes: Routes,
        ttl: float,
        negative_ttl: float,
        memory: int,
        callers: Iterable[str] = (),
        settle: float = 0.0,
        views: bool = False,
        files: WatchedFiles | None = None,
        decide: Decide | None = None,
    ) -> None:
        self.application = application
        self.coordinator = coordinator
        # For services, which may be promised more than clients of this node.
        self._fresh_now = coordinator.fresh_now
        self._node = node
        self._routes = routes
        self._ttl = ttl
        self._negative_ttl = negative_ttl
        self._settling = Settling(settle)
        self._views = views
        self._files = files
        self._next_look = 0.0
        self._files_complained = False
        # A memory of their own: anybody can ask for a long list in as many ways as he likes.
        listings = memory // 4 if routes else 0
        callers_size = memory // 8 if decide else 0
        self.answers: LRUCache[Entry] = LRUCache(memory - memory // 8 - listings - callers_size)
        self._first: FirstValidations | None = None
        if decide is not None:
            self._first = FirstValidations(
                coordinator, node, ttl=ttl, memory=callers_size, decide=decide
            )
        self.refusals: LRUCache[Entry] = LRUCache(memory // 8)
        self.listings: LRUCache[Entry] = LRUCache(listings)
        self._variants = Variants(ttl)
        self._warned = False
        self._generation = 0
        self._callers = callers
        self._keys = Keys(bytes(32), callers)
        try:
            generation = coordinator.now().generation
        except CoordinatorError:
            if not coordinator.may_be_away:
                raise
            generation = 0  # it may come later; until then Keystone is asked
        self._start_generation(generation, patient=True)

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333): from the cache, or else by Keystone."""
        if environ["REQUEST_METHOD"] not in _READS:
            return self._write(environ, start_response)
        path = environ["PATH_INFO"]
        if path != TOKENS and not self._routes.include(path):
            return self.application(environ, start_response)
        key = self._keys.key(environ)
        if key is None:
            return self._bypass(environ, start_response, "request")
        entry = self.answers.get(key)
        if entry is None:
            entry = self.refusals.get(key)
            if entry is None and path != TOKENS:
                entry = self.listings.get(key)
        asked = tags_header.ENVIRON_KEY in environ
        fresh = self._fresh_now if asked else self.coordinator.fresh
        now = time.monotonic()
        if now > self._next_look:
            self._look_at_files(now)
        if (
            entry is not None
            and now < entry.deadline
            and time.time() < entry.expires
            and fresh(entry.epoch, entry.slots)
        ):
            try:
                self._node.counters.row[HITS] += 1
            except ValueError:
                pass  # somebody wrote junk into the counts
            if asked:
                return _tell(entry, environ, start_response)
            headers, body = entry.answer(environ)
            start_response(entry.status, headers)
            return [body]
        return self._miss(environ, start_response, key, entry)

    def _write(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Let Keystone answer a request that is no read, and keep the facts of a token it issues.
        """
        first = self._first
        if first is None or environ["REQUEST_METHOD"] != "POST" or environ["PATH_INFO"] != TOKENS:
            return self.application(environ, start_response)
        epoch: Epoch | None = None
        with suppress(CoordinatorError):
            # Before anything is read that the token will be issued by.
            epoch = self.coordinator.now()
        if epoch is None:
            return self.application(environ, start_response)
        settled = self._settling.settled(epoch)
        request = environ[ENVIRON_KEY] = self._begun(Request(since=epoch, issuing=True))
        request.shared = []
        answer = _Answer(start_response)
        body = answer.read(self.application(environ, answer.start))
        facts = None
        if answer.status.startswith("201 "):
            with suppress(CoordinatorError):
                if epoch.generation != self._generation:
                    self._start_generation(epoch.generation)
                facts = first.issued(environ, request, answer.headers, body, settled, self._keys)
        self._node.keep_together(request.shared, facts)
        return [body]

    def _begun(self, request: Request) -> Request:
        """Return the notes on a request that Keystone answers, with the state that it begins in."""
        if self._views:
            with suppress(CoordinatorError):
                request.begin(View.of(self.coordinator, self._settling))
        return request

    def _look_at_files(self, now: float) -> None:
        """Make all answers stale if a file has changed that Keystone reads."""
        self._next_look = now + _LOOK_SECONDS
        try:
            seen = None if self._files is None else self._files.changed()
            if self._files is not None and seen is not None:
                self.coordinator.touch(_ALL)
                self._files.note(seen)
            self._files_complained = False
        except (CoordinatorError, OSError) as error:
            if not self._files_complained:
                LOG.warning("token cache: changed files are not told of yet: %s", error)
            self._files_complained = True

    def _miss(
        self,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
        key: bytes,
        former: Entry | None,
    ) -> Iterable[bytes]:
        """Answer a request for which no answer of this process stands.

        :param key: the request's key
        :param former: the answer that this process had kept, which no longer stands
        """
        self._node.check()
        asked = tags_header.ENVIRON_KEY in environ
        listing = environ["PATH_INFO"] != TOKENS  # Keystone takes the path apart
        way: Way | None = None
        if not listing:
            way = self._variants.way(environ, self._keys)
            if way is None:
                return self._bypass(environ, start_response, "variants")
        stands = self._stands_now if asked else self._stands
        late = late_requests.ENVIRON_KEY in environ
        lost, found = False, NODE_HITS
        question: Question | None = None
        try:
            epoch = self.coordinator.now()
            if epoch.generation != self._generation:
                self._start_generation(epoch.generation)
                key = self._keys.key(environ) or key
            entry = self._node.find(key, listing=listing)
            if entry is None or not stands(entry):
                former, entry = entry or former, None
                if self._first is not None:
                    question = self._first.question(environ, self._keys)
                    if question is not None:
                        entry, found = self._first.answer(question, epoch), KNOWN
                if entry is None and not late:
                    asking, found = self._node.ask(key), NODE_HITS
                    if not asking:
                        entry = self._node.wait(key, stands, listing=listing)
            else:
                self._node.renew(key, entry, listing=listing)
        except CoordinatorError:
            lost = True
        if lost:  # not above: Keystone would log this error with each of its lines
            return self._bypass(environ, start_response, "coordinator")
        if entry is not None:
            self._count(found)
            self._keep(key, entry, way)
            if asked:
                return _tell(entry, environ, start_response)
            headers, body = entry.answer(environ)
            start_response(entry.status, headers)
            return [body]
        if late:  # Keystone is not asked: it is no miss, and nobody waits for it
            return self._let_through(environ, start_response)
        try:
            return self._ask(environ, start_response, key, way, question, former)
        finally:
            if asking:
                self._node.answered(key)

    def _ask(
        self,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
        key: bytes,
        way: Way | None,
        question: Question | None,
        former: Entry | None,
    ) -> Iterable[bytes]:
        """Let Keystone answer, and keep the answer if it is one to be kept."""
        self._count(MISSES)
        if former is not None:
            self._count_end(former)
        listing = way is None
        epoch: Epoch | None = None
        with suppress(CoordinatorError):
            # Before anything is read that the answer will be made of.
            epoch = self.coordinator.now()
        if epoch is None:
            return self._let_through(environ, start_response)
        # Of what a replica may not have yet, the answer will not be said to be made.
        settled = self._settling.settled(epoch)
        request = environ[ENVIRON_KEY] = self._begun(Request(recording=True, since=epoch))
        request.shared = []
        # Who asks how long the answer stands is told at its beginning: it waits for its end.
        asked = tags_header.ENVIRON_KEY in environ
        answer = _Answer(None if asked else start_response)
        body = answer.read(self.application(environ, answer.start))
        self._node.keep_together(request.shared)
        entry = self._entry(environ, request, answer, body, settled, listing)
        if entry is None:
            self._count(NOT_KEPT)
        else:
            self._keep(key, entry, way)
            if not listing or len(body) <= _SHARED_LISTING:
                self._node.keep(key, entry, listing=listing)
            if self._first is not None and question is not None:
                self._first.learn(question, environ, request, entry, settled)
            if asked:
                return _tell(entry, environ, start_response)
        if asked:
            answer.headers.append((tags_header.NAME, tags_header.NONE))
            start_response(answer.status, answer.headers)
        return [body]

    def _entry(
        self,
        environ: Mapping[str, Any],
        request: Request,
        answer: _Answer,
        body: bytes,
        epoch: Epoch,
        listing: bool,
    ) -> Entry | None:
        if not request.recorded:
            if not self._warned:
                self._warned = True
                LOG.warning(
                    "token_cache keeps nothing: the application behind it does not say what its "
                    "answers depend on; it must be egg:keyfront#keystone, with nothing between "
                    "that makes requests of its own"
                )
            return None
        status = answer.status
        if request.unvouched or not status.startswith(_KEPT):
            return None
        if not _known_caller(environ, request, status):
            return None
        ttl = self._ttl if status.startswith("2") else self._negative_ttl
        tags = _tags(environ, request, status)
        if tags is None or ttl <= 0:
            return None
        if listing:  # it shows rows that belong to no token
            let_in = request.reading or status.startswith("401")
            if not let_in or request.families & LAPSING:
                return None
            tags |= request.reads
        try:
            expires = expiry(request)
        except (ValueError, TypeError, AttributeError):
            return None
        ttl = min(ttl, expires - time.time(), request.until - time.monotonic())
        try:
            found = slots(tags, self.coordinator.slot_count)
        except CoordinatorError:
            return None
        if ttl <= 0 or not self.coordinator.fresh(epoch, found):
            return None
        followed = tuple(sorted(request.followed))
        if followed and leases.until(followed) <= time.monotonic():
            self._count(NOT_FOLLOWED)
            return None
        return entry_of(
            environ,
            status,
            answer.headers,
            body,
            epoch=epoch,
            slots=found,
            lifetime=Lifetime(time.monotonic() + ttl, expires, followed),
        )

    def _stands(self, entry: Entry) -> bool:
        return (
            time.monotonic() < entry.deadline
            and time.time() < entry.expires
            and self.coordinator.fresh(entry.epoch, entry.slots)
        )

    def _stands_now(self, entry: Entry) -> bool:
        return self._stands(entry) and self._fresh_now(entry.epoch, entry.slots)

    def _bypass(
        self, environ: dict[str, Any], start_response: Callable[..., Any], reason: str
    ) -> Iterable[bytes]:
        self._count(BYPASSED)
        self._node.counters.count(BYPASSED_FOR + REASONS.index(reason))
        phases = request_phases.current.get()
        if phases is not None:
            phases.cache_reason = reason
        return self._let_through(environ, start_response)

    def _let_through(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Let Keystone answer, keep nothing, and tell a service that asked that it does not stand.
        """
        if tags_header.ENVIRON_KEY not in environ:
            return self.application(environ, start_response)

        def start(status: str, headers: Headers, *error: Any) -> Any:
            told = [*headers, (tags_header.NAME, tags_header.NONE)]
            return start_response(status, told, *error)

        return self.application(environ, start)

    def _keep(self, key: bytes, entry: Entry, way: Way | None) -> None:
        """Keep an entry in this process.

        :param way: the way in which it was asked for; ``None`` for another route than validation
        """
        memory, other = self.listings if way is None else self.answers, self.refusals
        if entry.negative:
            memory, other = other, memory
        elif way is not None:
            self._variants.note(way)
        memory.put(key, entry)
        other.drop(key)  # what a yes was, a no is now, or the other way round

    def _start_generation(self, generation: int, *, patient: bool = False) -> None:
        """Start anew with another epoch table: drop all answers from before it.

        :param patient: true for :meth:`.NodeCache.start` to wait for its lock for longer
        """
        secret = self.coordinator.secret
        self.answers.clear()
        self.refusals.clear()
        self.listings.clear()
        if self._first is not None:
            self._first.clear()
        self._node.start(secret, patient=patient)
        self._keys = Keys(secret, self._callers)
        self._generation = generation

    def _count_end(self, entry: Entry) -> None:
        """Count the reason for which a kept answer had to be asked of Keystone again."""
        cause: str | None = "time"
        if time.monotonic() < entry.deadline and time.time() < entry.expires:
            with suppress(CoordinatorError):
                cause = changed(entry.epoch, entry.slots, *self.coordinator.snapshot())
        if cause is not None:
            self._count(ENDED + CAUSES.index(cause))

    def _count(self, place: int) -> None:
        phases = request_phases.current.get()
        if phases is not None:
            if phases.cache:
                phases.cache_also += (_COUNTED[place],)
            else:
                phases.cache = _COUNTED[place]
        self._node.counters.count(place)


def _tell(
    entry: Entry, environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    """Answer a service, and tell it how long the answer stands; 304 if it has the same body."""
    headers, body = entry.answer(environ)
    status = entry.status
    asked = environ[tags_header.ENVIRON_KEY]
    expires = entry.expires
    if isinstance(entry, FollowedEntry):
        # The service hears of changes, but not when nobody looks for them any more.
        expires = min(expires, time.time() + 1.0)
    told = tags_header.compose(asked, entry.epoch, entry.slots, expires)
    headers.append((tags_header.NAME, told))
    if status.startswith("200 ") and environ["REQUEST_METHOD"] == "GET":
        headers.append(("ETag", entry.etag))
        if environ.get("HTTP_IF_NONE_MATCH") == entry.etag:
            # A 304 has none of the headers that describe the body (RFC 9110, section 15.4.5).
            headers = [header for header in headers if header[0].lower() not in _OF_BODY]
            status, body = "304 Not Modified", b""
    start_response(status, headers)
    return [body]


_OF_BODY = frozenset({"content-length", "content-type"})


class _Answer:
    """Records an answer on its way to the server.

    :param start_response: the server's function (PEP 3333); ``None`` keeps the answer back
    """

    __slots__ = ("_start_response", "_written", "headers", "status")

    def __init__(self, start_response: Callable[..., Any] | None) -> None:
        self._start_response = start_response
        self._written: list[bytes] = []
        self.status = ""
        self.headers: Headers = []

    def start(self, status: str, headers: Headers, error: Any = None) -> Callable[[bytes], None]:
        self.status, self.headers = status, headers
        if self._start_response is None:
            pass
        elif error is None:
            self._start_response(status, headers)
        else:
            self._start_response(status, headers, error)
        return self._written.append

    def read(self, parts: Iterable[bytes]) -> bytes:
        try:
            rest = b"".join(parts)
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()
        return b"".join(self._written) + rest


def _known_caller(environ: Mapping[str, Any], request: Request, status: str) -> bool:
    """Return whether Keystone let the caller in by a token that was noted, and by nothing else."""
    if status.startswith("401"):
        return AUTH_CONTEXT not in environ
    context = environ.get(AUTH_CONTEXT)
    token = context.get("token") if isinstance(context, Mapping) else None
    # Not by the object: for a token that validates itself there are two.
    noted = [getattr(model, "audit_ids", None) for model in request.accepted.values()]
    return getattr(token, "audit_ids", 0) in noted


def _tags(environ: Mapping[str, Any], request: Request, status: str) -> set[str] | None:
    """Return the tags of the tokens of a request; ``None`` if its answer must not be kept."""
    caller = environ.get("HTTP_X_AUTH_TOKEN", environ.get("HTTP_X_STORAGE_TOKEN", "")).strip()
    others = (environ.get("HTTP_X_SERVICE_TOKEN", "").strip(), environ.get("HTTP_X_SUBJECT_TOKEN"))
    asked = [caller] if caller else []
    looked_at = request.accepted.keys() | request.garbage | request.unsure
    for token in others:
        # A caller who is refused is refused whatever else he brings.
        if token and (token in looked_at or not status.startswith("401")):
            asked.append(token)
    return tags(request, asked)


def filter_factory(
    global_conf: Mapping[str, str] | None, **local_conf: str
) -> Callable[[WSGIApplication], WSGIApplication]:
    """Return a function that builds the filter (entry point ``paste.filter_factory``).

    :param global_conf: the paste file's ``[DEFAULT]``, not used
    :param local_conf: options of ``[keyfront_token_cache]`` for this pipeline
    :returns: a function that takes Keystone's application and returns it with the cache in front;
        it raises as :func:`token_cache` does
    """

    def build(application: WSGIApplication) -> WSGIApplication:
        # Only now: Keystone's configuration is read when Keystone is loaded.
        cache = token_cache(application, local_conf)
        watched: WSGIApplication = request_phases.watched("token cache", cache)
        return watched

    return build


def token_cache(
    application: WSGIApplication, local: Mapping[str, str] | None = None
) -> TokenCache:
    """Return the cache in front of a Keystone that is loaded, with its configuration's options.

    :param application: Keystone's application, as ``egg:keyfront#keystone`` makes it
    :param local: options of the paste section by name, which win
    :raises OptionError: an option has a value out of its range
    :raises CoordinatorError: the files that workers share cannot be made
    :raises MissingPartError: Keystone is not installed
    """
    try:
        import keystone.conf
    except ModuleNotFoundError as error:
        if error.name != "keystone":
            raise
        raise MissingPartError(
            "token_cache stands in front of Keystone, which is not installed; install it with: "
            "pip install 'keyfront[keystone]'"
        ) from error

    from . import options

    conf = keystone.conf.CONF
    values = options.token_cache(conf, local)
    folder = folder_of(conf)
    check_folder(folder, make=True)
    coordinators.settled.timeout = values["commit_timeout"]
    coordinator: Coordinator = coordinator_of(values, True, folder=folder) or SharedMemory(
        folder, settled=coordinators.settled
    )
    coordinators.set(folder, coordinator)
    leases.make(folder)
    shared = values["node_memory"] << 20
    # Where Keystone's caches have another backend, that is shared already.
    own = values["reuse"] and conf.cache.backend == _NULL
    computed = int(shared * options.KEYSTONE_SHARE) if own else 0
    routes = Routes(values["routes"])
    decide = policies.get(folder) if values["reuse"] and values["first_validations"] else None
    node = NodeCache(
        folder,
        size=shared - computed,
        values=computed,
        flight_timeout=values["flight_timeout"],
        configured=_configured(conf),
        subjects=decide is not None,
        listings=bool(routes),
    )
    nodes[folder] = node
    return TokenCache(
        application,
        coordinator,
        node,
        routes=routes,
        ttl=values["ttl"],
        negative_ttl=values["negative_ttl"],
        memory=int((values["memory"] << 20) * (1 - options.KEYSTONE_SHARE)),
        callers=_caller_variables(conf),
        settle=values["settle"],
        views=values["reuse"] or conf.cache.backend != _NULL,
        files=WatchedFiles(of_keystone(conf), folder),
        decide=decide,
    )


def _configured(conf: Any) -> bytes:
    """Return the versions and options that this Keystone was loaded with, as bytes to compare.

    During a reload workers with the former configuration answer beside those with the new one, and
    while they do, a change of the files themselves does not make their answers stale.
    """
    found = [__version__, version("keystone")]
    for name in sorted(conf):
        options = conf[name]
        if not isinstance(options, Mapping):
            found.append(f"{name} {options!r}")
            continue
        for option in sorted(options):
            with suppress(Exception):  # a value that Keystone will refuse by itself
                found.append(f"{name} {option} {options[option]!r}")
    return repr(found).encode("utf-8", "surrogateescape")


def _caller_variables(conf: Any) -> set[str]:
    """Return the request variables by which Keystone may let a caller in without a token."""
    names = {conf.tokenless_auth.issuer_attribute, conf.federation.remote_id_attribute}
    for protocol in conf.auth.methods:
        # Keystone registers this option when the protocol is first used.
        with suppress(AttributeError):
            names.add(getattr(conf[protocol], "remote_id_attribute", None))
    return {name for name in names if name}
