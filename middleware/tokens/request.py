"""The token cache's notes on the request that is being served.

The filter, Keystone's hooks and the database hooks serve one request but do not call each other:
they share these notes. They are in a context variable, so that each thread and greenlet has its
own.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import math
import secrets
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .invalidation.rules import ALL, ANY, GRANTS_GROUP, tag
from .invalidation.sql_reads import Reads

if TYPE_CHECKING:
    from .epochs import View

#: The WSGI variable in which the filter hands a :class:`Request` to the application below it.
ENVIRON_KEY = "keyfront.token_cache"


class Enforced(NamedTuple):
    """A decision of Keystone's policy on a validation."""

    #: The credentials that the policy was given of the caller.
    credentials: Mapping[str, Any]
    #: The target that it was given of the token.
    target: Mapping[str, Any]


class Issued(NamedTuple):
    """A token that was just issued, and that a validation would accept."""

    #: Keystone's ``TokenModel`` of it.
    model: Any
    #: Its methods, in the order in which a validation shows them.
    methods: list[str]
    #: The target that the policy is given of it.
    target: Mapping[str, Any]


class Request:
    """The notes on one request.

    :param recording: true if its answer may be kept, so that its dependencies must be noted
    :param since: a value that names the last change before it, from before anything was read for
        it (an :class:`.Epoch`); ``None`` if nothing of it is kept
    :param issuing: true for a login whose token's facts may be kept
    """

    __slots__ = (
        *("accepted", "accepting", "active", "as_it_is", "checked", "committed", "connections"),
        *("created", "entries"),
        *("enforced", "families", "fills", "followed", "found", "garbage", "issued", "issuing"),
        *("kept", "last_active", "loss", "lost", "memory", "newcomers", "of_here", "own_name"),
        *("packed", "recorded", "recording", "reading", "reads", "refused", "row", "rows", "since"),
        "shared",
        *("unknown_commit", "unsure", "until", "unvouched", "users", "values", "view", "windows"),
    )

    def __init__(
        self, *, recording: bool = False, since: object | None = None, issuing: bool = False
    ) -> None:
        self.recording = recording
        self.since = since
        self.issuing = issuing
        #: The token that was issued, if a validation would accept it.
        self.issued: Issued | None = None
        #: True if a check is under way that a validation would accept what is being issued.
        self.accepting = False
        #: The token that it has packed last, and the bytes that it was made of.
        self.packed: tuple[str, bytes] | None = None
        #: The decisions of Keystone's policy on the validation that it is.
        self.enforced: list[Enforced] = []
        #: True if an application that notes dependencies has seen it.
        self.recorded = False
        #: Validated tokens: Keystone's models by the token.
        self.accepted: dict[str, Any] = {}
        #: Seconds for which each of these is accepted after it has expired.
        self.windows: dict[str, float] = {}
        #: Strings that are no tokens, whatever the database holds.
        self.garbage: set[str] = set()
        #: Tokens that were refused for a reason that a change may take away.
        self.unsure: set[str] = set()
        #: The tags of all that was read while :attr:`reading`, by statements or out of Keystone's
        #: caches.
        self.reads: set[str] = set()
        #: The families of the tables that this was read from.
        self.families: set[str] = set()
        #: Names of what must be followed for its answer to stand, see ``directory_leases.py``.
        self.followed: set[str] = set()
        #: The tags of its tokens' users in the directories that they are in, see
        #: ``directory_invalidation.py``.
        self.entries: set[str] = set()
        #: The values that Keystone is computing, to be kept: the innermost last.
        self.fills: list[Fill] = []
        #: Owners of rows that were found by other columns, so that ``sqlalchemy_plugin.py`` asks
        #: for each once.
        self.found: dict[object, list[object]] = {}
        #: The reads that each value was made of which it took from a cache or computed, by the key.
        self.kept: dict[str, Reads] = {}
        #: These values, pickled, and what the cache notes with them, by the key: none is looked for
        #: twice.
        self.values: dict[str, tuple[bytes, dict[str, Any]]] = {}
        #: Keystone's model of the token that it looks for among the revoked ones.
        self.checked: Any = None
        #: The state of the database that its shared values are from; ``None``: it shares nothing.
        self.view: View | None = None
        #: True if Keystone's caches are left as they are, since there is no token cache.
        self.as_it_is = False
        #: True if reads belong to the answer. They do once the caller has been let in: the rows of
        #: his token are noted by the token's model, see :func:`tags`.
        self.reading = False
        #: The object in which Keystone keeps the values that it has computed for this request.
        self.memory = types.SimpleNamespace()
        #: A name that no other request has, for values that it keeps after a change of its own.
        self.own_name = ""
        #: Seconds of the monotonic clock at which the first of the kept values ends that its answer
        #: was made of.
        self.until = math.inf
        #: The names and values that it has for the other workers, which the filter keeps together
        #: after its answer; ``None`` where each is kept at once.
        self.shared: list[tuple[str, bytes]] | None = None
        #: True if it was given a database connection that may answer from the past: from then on
        #: nothing of it is kept for others.
        self.unvouched = False
        #: The user whose password was just compared, and the day of his last activity before, as
        #: it was read for that.
        self.last_active: tuple[object, object] | None = None
        #: By user, whether he came so lately that more rows of him may be written, see
        #: ``kept_grants.py``.
        self.newcomers: dict[object, bool] = {}
        #: The user whose day of the last login it writes, if he is enabled without it as well.
        self.active: object = None
        #: The users that Keystone's SQL driver has returned in a login or validation, pickled, by
        #: their ids; ``None`` where it is neither, and from its first write on.
        self.users: dict[str, bytes] | None = None
        #: The rows of those of them whom it has looked for by name, with their passwords' hashes.
        self.rows: dict[str, Any] = {}
        #: The one of these that the next read of a user is to return.
        self.row: Any = None
        #: Those of them whose rows have no federated identities.
        self.of_here: set[object] = set()
        #: The database connection that its next session gets, if there is one; ``None`` where it is
        #: not kept, see ``gateway/keystone/sqlite.py``.
        self.connections: list[Any] | None = None
        #: The users that its transactions have created.
        self.created: set[object] = set()
        #: The reason for which a change was not committed and should be tried again.
        self.refused = ""
        #: The driver's message when the database could not be used for it.
        self.lost = ""
        #: The words for that to the client and in the log; ``None``: that it is away.
        self.loss: Any = None
        #: True if a transaction of it that wrote is committed.
        self.committed = False
        #: True if the connection was lost in a commit, which may have been made.
        self.unknown_commit = False

    def begin(self, view: View) -> None:
        """Share the values of Keystone's caches with other requests.

        :param view: the state of the database, from before anything is read for this one
        """
        self.view = view
        self.since = view.seen

    def note(self, reads: Reads) -> None:
        """Note reads, for the answer and for the value that is being computed."""
        if reads.followed:
            self.followed |= reads.followed
        if self.reading:
            self.families |= reads.families
            self.reads |= reads.tags
        if self.fills:
            self.fills[-1].add(reads)

    def end_sharing(self) -> None:
        """Share no values any more, after a change of its own.

        Values that the caches hold from before the change are no longer right for the rest of it,
        and values that it would put there may be from before another change in between.
        """
        self.view = None
        self.own_name = secrets.token_hex(8)

    def writes(self) -> None:
        """Drop what was read, before a write that may change it."""
        self.users = self.last_active = self.row = None
        self.rows.clear()
        self.found.clear()


class Fill:
    """A value that is being computed, and the reads that it is made of.

    :param key: the value's key
    """

    __slots__ = ("families", "followed", "key", "tags")

    def __init__(self, key: str) -> None:
        self.key = key
        self.followed: set[str] = set()
        self.families: set[str] = set()
        self.tags: set[str] = set()

    def add(self, reads: Reads) -> None:
        """Note reads that the value is made of."""
        self.families |= reads.families
        self.tags |= reads.tags
        self.followed |= reads.followed


current: contextvars.ContextVar[Request | None] = contextvars.ContextVar(
    "keyfront_request", default=None
)


# The dependencies of an answer of Keystone: the tags of all tokens that were validated for it.
#
# They are taken from Keystone's own models while it answers, so that what a body does not show,
# such as the trustor behind an impersonated user, counts as well. Too many tags are harmless; none
# may be missing.

#: The tags of every accepted token, besides its own: role names and implications, grants to groups,
#: the catalog and the service providers in each body.
_SHARED = (ALL, GRANTS_GROUP, "roles", "catalog", "federation")


def tags(request: Request, asked: list[str]) -> set[str] | None:
    """Return the tags that the answer to a request depends on; ``None`` if they are not known.

    :param request: the notes on the request, after the answer
    :param asked: the tokens that the request brought
    """
    found = {ALL, *request.entries}
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


def token_tags(model: Any) -> list[str]:
    """Return the tags of a validated token.

    :param model: Keystone's ``TokenModel``
    :raises ValueError: no tag can be made of an identifier
    :raises AttributeError: the model does not look as Keystone 30's; so do KeyError and TypeError
    """
    found = [*_SHARED, *_user_tags(model.user_id, model.user["domain_id"])]
    for audit in model.audit_ids:
        found.append(tag("audit", audit))
    if model.domain_id:
        found.append(tag("project", model.domain_id))
    if model.project_id:
        found.append(tag("project", model.project_id))
        found.append(tag("project", model.project_domain["id"]))
    if model.trust_id:
        found += _trust_tags(model)
    if model.application_credential_id:
        found.append(tag("appcred", model.application_credential_id))
    if model.access_token_id:
        found.append("oauth")
    return found


@functools.lru_cache(maxsize=2048)
def _user_tags(user: str, domain: str) -> tuple[str, ...]:
    return (
        *(tag(kind, user) for kind in ("user", "grants:user", "members")),
        tag("project", domain),
    )


def _trust_tags(model: Any) -> Iterator[str]:
    yield tag("trust", model.trust_id)
    for user in (model.trustor, model.trustee):
        yield from _user_tags(user["id"], user["domain_id"])
    if model.trust.get("redelegated_trust_id"):
        # Its roles are those of the first trustor, further up a chain that is not in the model.
        yield from ("trusts", "grants", "members", "users", "projects", "mappings")


def expiry(request: Request) -> float:
    """Return the time when the first validated token, or its trust or credential, ends.

    :param request: the notes on the request, after the answer
    :returns: Unix time; infinite if no token was accepted
    :raises ValueError: a time cannot be read; so do AttributeError and TypeError
    """
    end = float("inf")
    for token, model in request.accepted.items():
        # The window is for tokens, not for trusts and credentials.
        end = min(end, ends(model, request.windows.get(token, 0.0)))
    return end


def ends(model: Any, window: float = 0.0) -> float:
    """Return the time when a token, or its trust or application credential, ends.

    :param model: Keystone's ``TokenModel``
    :param window: seconds for which the token is accepted after it has ended, 0 or more
    :returns: Unix time
    :raises ValueError: a time cannot be read; so do AttributeError and TypeError
    """
    return min(_seconds(model.expires_at) + window, basis_end(model))


def basis_end(model: Any) -> float:
    """Return the time when the trust or the application credential of a token ends.

    :param model: Keystone's ``TokenModel``
    :returns: Unix time; infinite without one that ends
    :raises ValueError: a time cannot be read; so do AttributeError and TypeError
    """
    first = float("inf")
    for basis in (model.trust, model.application_credential):
        end = basis.get("expires_at") if basis else None
        if end is not None:
            first = min(first, _seconds(end))
    return first


def _seconds(end: datetime.datetime | str) -> float:
    moment = datetime.datetime.fromisoformat(end) if isinstance(end, str) else end
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
