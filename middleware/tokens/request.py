"""What the token cache knows of the request that is being served.

The filter, Keystone's hooks and the database hooks belong to one request but do not call each
other: this is where they meet. A context variable, so that threads and greenlets have their own.
"""

from __future__ import annotations

import contextvars
import math
import types
from typing import Any

#: A name for each kind of value that Keystone keeps.
Names = tuple[str, ...]

#: Where the filter leaves a :class:`Request` for the application below it.
ENVIRON_KEY = "keyfront.token_cache"


class Request:
    """One request.

    :param recording: whether its answer may be kept, so that what it depends on must be noted
    :param since: a name of the last change before it, from before anything was read for it;
        ``None`` if nothing of it is kept
    """

    __slots__ = (
        *("accepted", "garbage", "memory", "names", "own_name", "recorded", "recording"),
        *("reading", "reads", "refused", "since", "unsure", "until", "unvouched", "windows"),
    )

    def __init__(self, *, recording: bool = False, since: object | None = None) -> None:
        self.recording = recording
        self.since = since
        #: Whether an application that notes dependencies has seen it.
        self.recorded = False
        #: Validated tokens: Keystone's models by the token.
        self.accepted: dict[str, Any] = {}
        #: Seconds for which each of these is accepted after it has expired.
        self.windows: dict[str, float] = {}
        #: Tokens that are none, whatever the database holds.
        self.garbage: set[str] = set()
        #: Tokens that were refused for a reason that a change may take away.
        self.unsure: set[str] = set()
        #: The tags of all tables that were read while :attr:`reading`, by statements or out of
        #: Keystone's caches.
        self.reads: set[str] = set()
        #: Whether what is read belongs to the answer. It does once the caller has been let in: what
        #: his token needs is noted by its rows, see ``dependencies.py``.
        self.reading = False
        #: Where Keystone keeps what it has once computed for this request.
        self.memory = types.SimpleNamespace()
        #: Names for what Keystone's own caches hold, by kind; see ``keystone_caches.py``.
        #: ``None``: they go by :attr:`own_name`, as after a change of its own.
        self.names: Names | None = None
        #: A name that nobody else has.
        self.own_name = ""
        #: When the first of the kept values ends that its answer was made of, in seconds of the
        #: monotonic clock.
        self.until = math.inf
        #: Whether it was given a database connection that may answer from the past: from then on
        #: nothing of it is kept for others.
        self.unvouched = False
        #: Why a change was not committed and should be tried again.
        self.refused = ""


current: contextvars.ContextVar[Request | None] = contextvars.ContextVar(
    "keyfront_request", default=None
)
