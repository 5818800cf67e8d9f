"""The follower of one server of a directory, which reports its changes.

It also reports the moment up to which all changes are known.

A connection of its own, bound as the service, holds a search of each tree that goes on for ever
(``protocol/controls.py``). On the same connection the server is asked for each tree's root several
times a second: an answer proves that the server lives, that all messages sent before it have been
received, and that the trees are still where they were. When that cannot be known any more (a lost
connection, a root that is gone) the connection ends; with the next one all counts as changed.

No memory grows with the directory: two numbers of each entry are kept in tables of a fixed size.
Where two entries share a place, a change is reported for more users than it concerns, never for
fewer.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol

from keyfront.errors import (
    CoordinatorError,
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryUnavailableError,
    OptionError,
)

from .protocol import controls, messages, result_codes
from .protocol.ber import ProtocolError
from .protocol.connection import Connection
from .protocol.messages import Message

LOG = logging.getLogger(__name__)

#: Seconds between two questions whether the server lives.
BEAT_SECONDS = 0.2

# Seconds without an answer after which the connection is given up.
_SILENT_SECONDS = 3.0
# Seconds to connect, and for the first answers of a large directory.
_CONNECT_SECONDS = 5.0
_REFRESH_SECONDS = 120.0
# Seconds until the next try, doubled up to the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
# Seconds for which a way to follow that was refused is not tried again: rights and limits change.
_REFUSED_SECONDS = 10.0
# Seconds between two looks whether a server that offers no way has one by now, and between two
# times in which it is said that it has none.
_LOOK_SECONDS = 60.0
_REPEAT_SECONDS = 1.0
# Seconds after a persistent search was sent, in which it may not stand yet. See `_Persistent`.
_SETTLING_SECONDS = 2.0
# Beats that may be answered while a notice is awaited that should have come before them. Then all
# counts as changed. That is sooner than answers end that stand by a claim
# (`tokens/directory_leases.py`). It is no time, which would go by while the machine stands still.
_OWED_BEATS = 2
# Reasons that are logged, each once, until it is followed again.
_COMPLAINTS = 8
# Changes that are told at once.
_BATCH = 256
# Entries whose numbers have a place of their own, about.
_PLACES = 1 << 17

# Entries of a page.
_PAGE = 500
# Numbers that no entry has, at most, and seconds for which they are looked for.
_GAPS = 2000
_GAP_SECONDS = 10.0
_SHOW_DELETED = "1.2.840.113556.1.4.417"

# Result codes of an operator's limits, and further below of missing rights or a missing overlay.
_LIMITS = frozenset((3, 4, 11))
# Result codes that pass: busy, unavailable.
_PASSING = frozenset((51, 52))
_REFUSED = frozenset((2, 12, 50, 53))

_AROUND_SIGNS = re.compile(r"\s*([,=+])\s*")
_NO_SUCH_OBJECT = 32
_SUBTREE, _BASE = 2, 0
_ANYTHING = "(objectClass=*)"

Method = Literal["syncrepl", "usn", "psearch"]

#: The methods to follow a directory, the surest first, with the OID by which a server offers each.
METHODS: Final[dict[Method, str]] = {
    "syncrepl": controls.SYNC_REQUEST,
    "usn": controls.ACTIVE_DIRECTORY,
    "psearch": controls.PERSISTENT_SEARCH,
}


class Change(NamedTuple):
    """A change of an entry."""

    dn: str
    attributes: dict[str, list[bytes]]


class Listener(Protocol):
    """An object that a follower reports to. An error that it raises ends the connection."""

    def begins(self, server: str) -> None:
        """Take all for changed; later changes come by :meth:`changed` and :meth:`everything`.

        :param server: the server's name, from ``Connection.source``
        """
        ...

    def kind(self, attributes: dict[str, list[bytes]]) -> Literal["user", "group", "other"]:
        """Return the kind of an entry.

        :param attributes: the entry's attributes, with the values of each
        """
        ...

    def identity(self, change: Change) -> str:
        """Return the name by which the service knows a user.

        :param change: the change of the user's entry
        :raises LookupError: it has no such name
        """
        ...

    def changed(self, users: Sequence[str]) -> None:
        """Note that users of these names have changed in an attribute that the service reads."""
        ...

    def everything(self) -> None:
        """Note that anybody may have changed: groups, users of unknown names, parts of a tree."""
        ...

    def alive(self, server: str, moment: float) -> None:
        """Note that all changes before a moment have been reported.

        :param server: the server's name, from ``Connection.source``
        :param moment: the moment, in seconds of ``time.monotonic``
        """
        ...

    def impossible(self, server: str, reason: str) -> None:
        """Note that the server offers no method to follow it; repeated as long as that is so.

        :param server: the server's name, from ``Connection.source``
        :param reason: the reason, in one line
        """
        ...


class Subscription(NamedTuple):
    """The trees and attributes to follow, and the methods to try."""

    #: DNs of the trees' roots.
    trees: tuple[str, ...]
    #: Attributes of users that the service reads.
    attributes: tuple[str, ...]
    #: The methods to try, in order of preference.
    methods: tuple[Method, ...]


class Follower:
    """A thread that follows one address of one server until it is stopped.

    :param name: the server's name, for messages
    :param connect: a function that opens a connection bound as the service, within given seconds
    :param subscription: the trees and attributes that are followed
    :param listener: the object that is told of changes
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[float], Connection],
        subscription: Subscription,
        listener: Listener,
    ) -> None:
        self._name = name
        self._connect = connect
        self._subscription = subscription
        self._listener = listener
        self._stop = threading.Event()
        # Reasons that were logged since it was last followed.
        self._complaints: set[str] = set()
        self._limited = False
        # By method, the time until which it is not tried, and the reason.
        self._refused: dict[Method, tuple[float, str]] = {}
        # The server that offers no way, and the reason.
        self._impossible: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._run, name=f"follow-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next turn."""
        self._stop.set()

    @property
    def running(self) -> bool:
        """True if its thread lives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            began = time.monotonic()
            reason = ""
            try:
                # So it was when it was last asked, and it may be away now.
                self._say_impossible()
                self._follow()
            except CredentialsError as error:
                reason = str(error)
            except (DirectoryError, OptionError, CoordinatorError) as error:
                reason = str(error)
            except Exception as error:  # of Keystone's code, or of a bug: never the end of it
                reason = f"{type(error).__name__}: {error}"
                LOG.debug("following %s", self._name, exc_info=True)
            if reason and not self._stop.is_set() and self._is_news(reason):
                LOG.warning("directory %s is not followed: %s", self._name, reason)
            if time.monotonic() - began > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            self._stop.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _follow(self) -> None:
        connection = self._connect(_CONNECT_SECONDS)
        try:
            method = self._method(connection)
            if method is None:
                self._impossible = connection.source, self._why_not()
                self._repeat(time.monotonic() + _LOOK_SECONDS)
                return
            try:
                kind = _Polling if method == "usn" else _Persistent
                kind(self, connection, method).run()
            except DirectoryAnswerError as error:
                if error.code in _LIMITS and not self._limited:
                    # Without what is there now: only slapd can tell where to begin.
                    self._limited = True
                elif error.code in _REFUSED:
                    self._refused[method] = (time.monotonic() + _REFUSED_SECONDS, error.message)
                raise
        finally:
            connection.close()

    def _is_news(self, reason: str) -> bool:
        if reason in self._complaints or len(self._complaints) >= _COMPLAINTS:
            return False
        self._complaints.add(reason)
        return True

    def _repeat(self, until: float) -> None:
        """Report again and again that the server cannot be followed, until a monotonic time."""
        while not self._stop.is_set() and time.monotonic() < until:
            self._say_impossible()
            self._stop.wait(_REPEAT_SECONDS)

    def _say_impossible(self) -> None:
        told, self._impossible = self._impossible, None
        if told is not None:
            self._listener.impossible(*told)
            self._impossible = told

    def _why_not(self) -> str:
        reasons = [f"{method}: {reason}" for method, (_, reason) in self._refused.items()]
        return "; ".join(reasons) or "it offers none of " + ", ".join(self._subscription.methods)

    def _method(self, connection: Connection) -> Method | None:
        now = time.monotonic()
        for method in [x for x, (until, _) in self._refused.items() if until <= now]:
            del self._refused[method]
        for method in self._subscription.methods:
            if connection.supports(METHODS[method]) and method not in self._refused:
                return method
        return None


class _Session:
    """The work over one connection."""

    def __init__(self, follower: Follower, connection: Connection, method: Method) -> None:
        self._follower = follower
        self._listener = follower._listener
        self._subscription = follower._subscription
        self._stop = follower._stop
        self._connection = connection
        self._method = method
        self._users: set[str] = set()
        self._all = False
        # By entry: its user, and the attributes that the service reads. Not for longer than the
        # connection: an entry that has changed to and fro since would look the same.
        self._identities = _Known(_PLACES)
        self._contents = _Known(_PLACES)

    def _begin(self) -> None:
        """Report that from now on all changes are reported."""
        self._users.clear()
        self._all = False
        self._listener.begins(self._connection.source)
        self._follower._impossible = None
        self._follower._refused.clear()
        self._follower._complaints.clear()
        LOG.info("directory %s is followed by %s", self._follower._name, self._method)

    def _note(self, change: Change, state: controls.EntryState | None) -> None:
        """Note which users the change of an entry concerns."""
        if self._method == "psearch":
            names = [change.dn, *([state.previous] if state and state.previous else [])]
            inside = [dn for dn in names if _is_below(dn, self._subscription.trees)]
            if len(names) > 1:  # an entry has no other name than its DN there
                for dn in names:
                    self._forget(_name(dn))
                self._all |= bool(inside)
            if len(names) > 1 or not inside:
                return
        kind = self._listener.kind(change.attributes)
        name = (state.uuid if state else b"") or _name(change.dn)
        if state is not None and state.state == controls.DELETED:
            # If it comes again, it has been away.
            self._forget(name)
            self._all = True
            return
        identity = ""
        if kind == "user":
            with suppress(LookupError):
                identity = self._listener.identity(change)
        read = [x for x in sorted(change.attributes.items()) if x[0].lower() != "usnchanged"]
        content = repr((change.dn, kind, read)).encode()
        if kind == "other":
            content = repr((change.dn, kind)).encode()
        # Both are noted, whatever the first one says.
        had = self._identities.has(name)
        same_user = self._identities.note(name, identity.encode("utf-8", "surrogateescape"))
        same = self._contents.note(name, content)
        if kind == "group":
            self._all = True
        elif same and same_user:
            return
        elif kind == "user" and identity:
            added = state is not None and state.state == controls.ADDED and not had
            if not (same_user or added):
                self._all = True
            self._users.add(identity)
        elif had or state is None or state.state != controls.ADDED:
            self._all = True

    def _forget(self, name: bytes) -> None:
        self._identities.forget(name)
        self._contents.forget(name)

    def _tell(self) -> None:
        if self._all:
            self._listener.everything()
        elif self._users:
            self._listener.changed(sorted(self._users))
        self._users.clear()
        self._all = False


class _Told:
    """The numbers (CSN) of slapd's changes that have been received, in one of its databases.

    Each search has a queue of its own there, which a task of its own sends from. A change is put
    into the queues, and its number into ``contextCSN``, before its author gets the answer. So a
    search has sent all changes from before a question for ``contextCSN`` once it has sent a number
    that is not less than the answer's, for each server that gives numbers out.
    """

    def __init__(self) -> None:
        # By search, the newest number of each server.
        self._searches: dict[int, dict[bytes, bytes]] = {}
        # The newest numbers of each server, from any search or answer.
        self._newest: dict[bytes, bytes] = {}

    def follow(self, search: int) -> None:
        """Add a search."""
        self._searches[search] = {}

    def leave(self, search: int) -> None:
        """Remove a search."""
        self._searches.pop(search, None)

    def notice(self, search: int, cookie: bytes) -> None:
        """Note the cookie of a message of a search."""
        if cookie and search in self._searches:
            found = controls.by_server(controls.csns(cookie))
            _raise(self._searches[search], found)
            _raise(self._newest, found)

    def read(self, numbers: dict[bytes, bytes]) -> None:
        """Note the values of ``contextCSN``."""
        _raise(self._newest, numbers)

    def cover(self) -> None:
        """Note that everything was reported as changed, which covers all known numbers."""
        for known in self._searches.values():
            known.update(self._newest)

    def reaches(self, numbers: dict[bytes, bytes]) -> bool:
        """Return whether each search has sent all changes up to these numbers."""
        return all(
            known.get(server, b"") >= number
            for known in self._searches.values()
            for server, number in numbers.items()
        )


def _raise(known: dict[bytes, bytes], numbers: dict[bytes, bytes]) -> None:
    for server, number in numbers.items():
        known[server] = max(number, known.get(server, b""))


class _Claim(NamedTuple):
    """A moment that can be reported once all changes from before it have been received."""

    moment: float
    #: ``contextCSN`` of each database that shows it.
    numbers: dict[str, dict[bytes, bytes]]


class _Persistent(_Session):
    """Searches that go on for ever.

    A search by syncrepl says when it has begun to report changes. A persistent search does not, and
    later answers prove nothing: 389-ds works on several operations of a connection at a time. So no
    moment is reported for the first seconds, and then all counts as changed once more.

    An answer of the server does not prove that it has sent all changes from before the question.
    slapd shows by ``contextCSN`` which there are; see :class:`_Told` and docs/design.md.
    """

    def __init__(self, follower: Follower, connection: Connection, method: Method) -> None:
        super().__init__(follower, connection, method)
        self._searches: set[int] = set()
        # Searches that have not sent all present entries yet.
        self._refreshing: set[int] = set()
        self._beats: dict[int, str] = {}
        # Trees that are not there; it is seen when they come.
        self._absent: set[str] = set()
        self._of: dict[int, str] = {}
        self._asked = 0.0
        self._answered = 0
        # The entry with slapd's contextCSN above each tree, and the numbers of its database.
        self._contexts: dict[str, str] = {}
        self._told: dict[str, _Told] = {}
        # Questions for it, the answers since the last ones were sent, and the entries that ever
        # answered.
        self._states: dict[int, str] = {}
        self._numbers: dict[str, dict[bytes, bytes]] = {}
        self._telling: set[str] = set()
        # The oldest first.
        self._claims: deque[_Claim] = deque()

    def run(self) -> None:
        """Follow until the follower is stopped.

        :raises DirectoryError: the connection cannot be followed any more
        """
        if self._method == "syncrepl":
            self._find_contexts()
        for tree in self._roots():
            control, cookie = self._control(tree)
            number = self._connection.post(
                tree, _SUBTREE, _ANYTHING, ("objectClass", *self._subscription.attributes),
                encoded_controls=controls.encode(control), timeout=_SILENT_SECONDS,
            )  # fmt: skip
            self._searches.add(number)
            self._of[number] = tree
            if self._method == "syncrepl":
                self._refreshing.add(number)
                if (context := self._contexts.get(tree)) is not None:
                    self._told[context].follow(number)
                    self._told[context].notice(number, cookie)
        deadline = time.monotonic() + _REFRESH_SECONDS
        while self._refreshing and not self._stop.is_set():
            if (message := self._connection.take(0.5)) is not None:
                self._receive(message)
                self._users.clear()
            elif time.monotonic() > deadline:
                raise DirectoryUnavailableError(
                    f"what is there now did not come within {_REFRESH_SECONDS:.0f} s",
                    server=self._connection.server,
                )
        settles = time.monotonic() + (_SETTLING_SECONDS if self._method == "psearch" else 0.0)
        begun = False
        while not self._stop.is_set():
            now = time.monotonic()
            if not self._asking and now - self._asked >= BEAT_SECONDS:
                self._ask(now)
            until = self._asked + (_SILENT_SECONDS if self._asking else BEAT_SECONDS)
            message = self._connection.take(max(until - now, 0.0))
            silent = message is None and self._asking
            if silent and time.monotonic() - self._asked >= _SILENT_SECONDS:
                raise DirectoryUnavailableError(
                    f"no answer within {_SILENT_SECONDS:.3g} s", server=self._connection.server
                )
            for _ in range(_BATCH):
                if message is None:
                    break
                self._receive(message)
                message = self._connection.take(0.0)
            if message is not None:
                self._receive(message)
            if not begun:
                # Told once more when it is over; whoever asks meanwhile is not told of what was.
                if time.monotonic() < settles or not self._answered:
                    continue
                begun = True
                self._begin()
                self._cover()
            self._give_up()
            self._tell()
            self._claim()

    @property
    def _asking(self) -> bool:
        """True while questions are not answered."""
        return bool(self._beats or self._states)

    def _tell(self) -> None:
        everything = self._all
        super()._tell()
        if everything:
            self._cover()

    def _cover(self) -> None:
        for told in self._told.values():
            told.cover()

    def _tells_of_all(self, claim: _Claim) -> bool:
        """Return whether all changes from before a moment have been received."""
        return all(
            self._told[context].reaches(numbers) for context, numbers in claim.numbers.items()
        )

    def _claim(self) -> None:
        """Report the last moment before which all changes have been reported."""
        moment = 0.0
        while self._claims and self._tells_of_all(self._claims[0]):
            moment = self._claims.popleft().moment
        if moment:
            self._listener.alive(self._connection.source, moment)

    def _give_up(self) -> None:
        """Stop waiting for a change; there may be none, as when an entry is deleted elsewhere."""
        if len(self._claims) > _OWED_BEATS:
            self._all |= not self._tells_of_all(self._claims[0])

    def _roots(self) -> tuple[str, ...]:
        """Return the bases to search: a persistent search does not report entries that leave it."""
        if self._method == "syncrepl":
            return self._subscription.trees
        trees = self._subscription.trees
        contexts = self._naming_contexts()
        wanted = [x for x in contexts if any(_is_below(tree, (x,)) for tree in trees)]
        return tuple(wanted) or trees

    def _naming_contexts(self) -> list[str]:
        found = self._connection.search("", _BASE, attributes=("namingContexts",)).entries
        return [
            value.decode("utf-8", "replace")
            for _, attributes in found
            for name, values in attributes.items()
            if name.lower() == "namingcontexts"
            for value in values
        ]

    def _find_contexts(self) -> None:
        """Find the roots of the databases that the trees are in, which may have contextCSN."""
        roots = []
        with suppress(DirectoryAnswerError):
            roots = self._naming_contexts()
        for tree in self._subscription.trees:
            above = [x for x in roots if _is_below(tree, (x,))]
            above.sort(key=lambda x: len(_folded(x)), reverse=True)
            # Of databases that are glued together, the upper one may have it for both.
            telling = [x for x in above if self._has_state(x)] if len(above) > 1 else []
            for context in (telling or above)[:1]:
                self._contexts[tree] = context
                self._told.setdefault(context, _Told())

    def _has_state(self, context: str) -> bool:
        with suppress(DirectoryAnswerError):
            found = self._connection.search(context, _BASE, attributes=("contextCSN",)).entries
            return any(name.lower() == "contextcsn" for _, each in found for name in each)
        return False

    def _control(self, tree: str) -> tuple[bytes, bytes]:
        """Return the control of a tree's search, and the cookie in it."""
        if self._method == "psearch":
            return controls.persistent_control(), b""
        cookie = self._state(tree) if self._follower._limited else b""
        return controls.sync_control(cookie), cookie

    def _state(self, tree: str) -> bytes:
        """Return slapd's cookie of now, for a service that may not read all entries at once."""
        base = tree
        with closing(self._follower._connect(_CONNECT_SECONDS)) as connection:
            while base:
                with suppress(DirectoryAnswerError):
                    found = connection.search(base, _BASE, attributes=("contextCSN",)).entries
                    numbers = found[0][1].get("contextCSN", []) if found else []
                    if numbers:
                        return controls.csn_cookie(numbers)
                base = base.partition(",")[2]
        raise OptionError(
            "limits", "(of the directory)",
            "raised for the service's account, or contextCSN readable: it may not read all entries",
        )  # fmt: skip

    def _ask(self, now: float) -> None:
        """Ask for each tree's root."""
        self._asked = now
        for tree in self._subscription.trees:
            number = self._connection.post(
                tree, _BASE, _ANYTHING, ("1.1",), timeout=_SILENT_SECONDS
            )
            self._beats[number] = tree
        self._numbers = {}
        for context in self._told:
            number = self._connection.post(
                context, _BASE, _ANYTHING, ("contextCSN",), timeout=_SILENT_SECONDS
            )
            self._states[number] = context

    def _answered_all(self) -> None:
        """Note that the last of the questions has been answered."""
        self._answered += 1
        for context, numbers in self._numbers.items():
            self._told[context].read(numbers)
        self._claims.append(_Claim(self._asked, self._numbers))

    def _receive(self, message: Message) -> None:
        number = message.id
        if message.tag == messages.DONE:
            self._ended(number, message)
            return
        if message.tag == messages.ENTRY and (context := self._states.get(number)) is not None:
            self._numbers[context] = controls.by_server(
                value
                for name, values in message.attributes.items()
                if name.lower() == "contextcsn"
                for value in values
            )
        if number not in self._searches:
            return
        cookie = b""
        try:
            if message.tag == messages.INTERMEDIATE:
                cookie = controls.told_cookie(message.oid, message.value)
                if controls.ends_refresh(message.oid, message.value):
                    self._refreshing.discard(number)
            elif message.tag == messages.ENTRY:
                state = controls.entry_state(message.controls)
                self._note(Change(message.dn, message.attributes), state)
                cookie = state.cookie if state is not None else b""
            elif message.tag == messages.REFERENCE:
                state = controls.entry_state(message.controls)
                cookie = state.cookie if state is not None else b""
            for told in self._told.values():
                told.notice(number, cookie)
        except ProtocolError as error:
            raise DirectoryUnavailableError(
                f"its answer is no LDAP: {error}", server=self._connection.server
            ) from None

    def _ended(self, number: int, message: Message) -> None:
        """Process the result of a question, or of a search that was to go on."""
        if (context := self._states.pop(number, None)) is not None:
            if message.code in _PASSING:
                raise result_codes.refusal(message, self._connection.server)
            if self._numbers.get(context):
                self._telling.add(context)
            elif context in self._telling:
                raise DirectoryUnavailableError(
                    f"it does not tell contextCSN of {context} any more",
                    server=self._connection.server,
                )
            if not self._asking:
                self._answered_all()
            return
        tree = self._beats.pop(number, None)
        if tree is not None:
            expected = _NO_SUCH_OBJECT if tree in self._absent else 0
            if message.code == expected:
                if not self._asking:
                    self._answered_all()
                return
            if not message.code:
                raise DirectoryUnavailableError(
                    f"{tree} has come into being", server=self._connection.server
                )
        elif message.code == _NO_SUCH_OBJECT and number in self._searches:
            self._absent.add(self._of[number])
            self._searches.discard(number)
            self._refreshing.discard(number)
            for told in self._told.values():
                told.leave(number)
            return
        if message.code:
            raise result_codes.refusal(message, self._connection.server)
        raise DirectoryUnavailableError(
            "it ended the search that was to go on", server=self._connection.server
        )


class _Polling(_Session):
    """Polling of Active Directory and Samba by update sequence numbers (MS-ADTS 3.1.1.5.2.1).

    The server shows the number of its last change; if that is a new one, the entries with the
    numbers in between are read. A number that belongs to no entry that the service may see, such
    as that of a deleted one, counts as a change of anybody. It is looked for again for a while: a
    change may be committed after one with a greater number.
    """

    def run(self) -> None:
        """Follow until the follower is stopped.

        :raises DirectoryError: the connection cannot be followed any more
        """
        last, contexts = self._root()
        self._load()
        self._begin()
        # Numbers that no entry had, with the time when that was first seen.
        gaps: dict[int, float] = {}
        while not self._stop.is_set():
            asked = time.monotonic()
            newest, _ = self._root()
            if newest < last:
                raise DirectoryUnavailableError(
                    "its sequence numbers went back", server=self._connection.server
                )
            gaps = {x: since for x, since in gaps.items() if asked - since < _GAP_SECONDS}
            if newest - last > _GAPS or len(gaps) > _GAPS:
                raise DirectoryUnavailableError(
                    f"more than {_GAPS} changes at once", server=self._connection.server
                )
            if newest > last or gaps:
                expected = set(range(last + 1, newest + 1))
                found = self._changed(min(expected | gaps.keys()), newest, contexts)
                self._all |= bool(expected - found)
                gaps.update(dict.fromkeys(expected - found, asked))
                for number in found & gaps.keys():
                    del gaps[number]
                last = newest
            self._tell()
            self._listener.alive(self._connection.source, asked)
            self._stop.wait(max(asked + BEAT_SECONDS - time.monotonic(), 0.0))

    def _root(self) -> tuple[int, list[str]]:
        """Return the number of the last change, and the naming contexts."""
        names = ("highestCommittedUSN", "namingContexts")
        entries, _ = self._query("", _BASE, _ANYTHING, names)
        found = {name.lower(): values for entry in entries for name, values in entry[1].items()}
        try:
            newest = int(found["highestcommittedusn"][0])
        except (KeyError, ValueError, IndexError):
            raise DirectoryUnavailableError(
                "it does not tell highestCommittedUSN", server=self._connection.server
            ) from None
        return newest, [x.decode("utf-8", "replace") for x in found.get("namingcontexts", [])]

    def _load(self) -> None:
        """Read all present entries, in pages."""
        for tree in self._subscription.trees:
            cookie = b""
            while True:
                page = controls.paged_control(_PAGE, cookie)
                entries, done = self._query(
                    tree, _SUBTREE, _ANYTHING, self._wanted, page, seconds=_REFRESH_SECONDS
                )
                for dn, attributes in entries:
                    name = _guid(dn, attributes)
                    self._note(Change(dn, attributes), controls.EntryState(controls.PRESENT, name))
                cookie = controls.paged_cookie(done.controls) or b""
                if not cookie:
                    break

    @property
    def _wanted(self) -> tuple[str, ...]:
        own = ("objectClass", "objectGUID", "isDeleted", "uSNChanged")
        names = {name.lower(): name for name in (*own, *self._subscription.attributes)}
        return tuple(names.values())

    def _changed(self, first: int, newest: int, contexts: list[str]) -> set[int]:
        """Note the entries with these numbers; return the numbers that entries have."""
        found: set[int] = set()
        search = f"(&(uSNChanged>={first})(uSNChanged<={newest}))"
        deleted = controls.control(_SHOW_DELETED)
        for context in contexts:
            try:
                entries, _ = self._query(context, _SUBTREE, search, self._wanted, deleted)
            except DirectoryAnswerError:
                continue  # not the service's to see: its numbers are gaps
            for dn, attributes in entries:
                lowered = {name.lower(): values for name, values in attributes.items()}
                found.update(int(x) for x in lowered.get("usnchanged", []) if x.isdigit())
                name = _guid(dn, attributes)
                known = self._identities.has(name)
                gone = bool(lowered.get("isdeleted")) or not _is_below(dn, self._subscription.trees)
                if gone and not known:
                    continue  # nobody of ours
                state = controls.DELETED if gone else controls.MODIFIED if known else controls.ADDED
                self._note(Change(dn, attributes), controls.EntryState(state, name))
        for tree in self._subscription.trees:
            self._query(tree, _BASE, _ANYTHING, ("1.1",))  # it is where it was
        return found

    def _query(
        self, base: str, scope: int, search: str, attributes: Sequence[str],
        asked: bytes = b"", *, seconds: float = _SILENT_SECONDS,
    ) -> tuple[list[tuple[str, dict[str, list[bytes]]]], Message]:
        """Search, with a control, and return entries and result.

        :raises DirectoryAnswerError: the server refused
        """  # fmt: skip
        number = self._connection.post(
            base, scope, search, attributes, encoded_controls=controls.encode(asked)
            if asked else b"", timeout=seconds,
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        entries = []
        while True:
            message = self._connection.take(max(deadline - time.monotonic(), 0.0))
            if message is None:
                raise DirectoryUnavailableError(
                    f"no answer within {seconds:.3g} s", server=self._connection.server
                )
            if message.id != number:
                continue
            if message.tag == messages.ENTRY:
                entries.append((message.dn, message.attributes))
            elif message.tag == messages.DONE:
                if message.code:
                    raise result_codes.refusal(message, self._connection.server)
                return entries, message


def _is_below(dn: str, roots: Sequence[str]) -> bool:
    """Return whether an entry is one of the roots, or below one."""
    below = _folded(dn)
    return any(below == root or below.endswith(f",{root}") for root in map(_folded, roots))


def _folded(dn: str) -> str:
    return _AROUND_SIGNS.sub(r"\1", dn.strip().lower())


def _guid(dn: str, attributes: dict[str, list[bytes]]) -> bytes:
    for name, values in attributes.items():
        if name.lower() == "objectguid" and values:
            return values[0]
    return _name(dn)


def _name(dn: str) -> bytes:
    return _folded(dn).encode("utf-8", "surrogateescape")


class _Known:
    """Numbers of entries, in a table of a fixed size: two may have one place.

    :param places: a power of two
    """

    def __init__(self, places: int) -> None:
        self._words = array("Q", bytes(8 * places))

    def _place(self, name: bytes) -> int:
        digest = blake2b(name, digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self._words)

    def has(self, name: bytes) -> bool:
        """Return whether a number is kept for an entry, or for another one at its place."""
        return bool(self._words[self._place(name)])

    def forget(self, name: bytes) -> None:
        """Drop the number of an entry."""
        self._words[self._place(name)] = 0

    def note(self, name: bytes, value: bytes) -> bool:
        """Note the present value of an entry; return whether it was the same before."""
        # The name goes in, too: another entry at this place has another number.
        digest = blake2b(value, digest_size=8, key=name[:64]).digest()
        number = int.from_bytes(digest, "little") or 1
        place = self._place(name)
        before, self._words[place] = self._words[place], number
        return before == number
