"""Tells other nodes who has logged in, so that a user of one node is no stranger on another.

In a flood of logins those go on who have logged in from the same address before
(:mod:`.login_turns`). Behind a balancer that may have been on another node. So where the token
cache has a coordinator in Redis, each node tells there whom it has come to know, and one process of
each asks once a second what the others have told. It is all in the background: no login waits for
Redis, and without Redis each node goes by what it knows.

What is told is the hash of a user and an address under a key that the nodes share, as the key of
the first one lies in Redis: no names, but whoever reads that Redis can check guesses.
"""

from __future__ import annotations

import logging
from pathlib import Path

from keyfront.common.file_lock import FileLock
from keyfront.common.poller import Poller
from keyfront.errors import CoordinatorError

from ..keystone.readiness import coordinators
from .login_turns import LoginTurns

LOG = logging.getLogger("keyfront.gateway")

#: Seconds between two questions.
SECONDS = 1.0
#: Users who are told of in one question.
MOST = 1000


class KnownLogins:
    """Whom the logins of a node have shown, told to others and heard from them.

    :param turns: the turns of the node's logins
    :param folder: the node's
    """

    def __init__(self, turns: LoginTurns, folder: Path) -> None:
        self._turns = turns
        # Of the process that asks for the node.
        self._lock = FileLock(folder / "known-logins.lock")
        self._asks = False
        self._after = ""
        # Hashes that are yet to be told, and their key.
        self._untold: tuple[bytes, list[int]] = b"", []
        self._failed = False
        self._poller = Poller(self.exchange, SECONDS, name="keyfront-logins")

    def start(self) -> None:
        """Begin, in a process that was forked or has loaded, if there are other nodes."""
        self._asks, self._after = False, ""
        self._poller.after_fork()
        if coordinators():
            self._poller.start()

    def exchange(self) -> None:
        """Tell what is new here; hear what is new elsewhere, if no other process does."""
        try:
            self._exchange()
            self._failed = False
        except CoordinatorError as error:
            if not self._failed:
                LOG.warning("other nodes are not told who has logged in: %s", error)
            self._failed = True

    def _exchange(self) -> None:
        if not self._asks:
            self._asks = self._lock.attempt()
        key, untold = self._untold
        made_by, news = self._turns.news()
        if made_by == key:
            news = untold + news
        news = news[-MOST:]
        self._untold = made_by, news
        more = bool(news) or self._asks
        for coordinator in coordinators():
            while more:
                found = coordinator.exchange(made_by, news, self._after)
                if found is None:
                    break
                self._turns.learn(found.key, found.told)
                made_by, news = found.key, []
                self._untold = made_by, news
                self._after, more = found.place, found.more
