"""The servers that the URLs of a pool stand for, where DNS names them (:mod:`.protocol.srv`).

They are looked up when they are first needed, when the time to live of what DNS said is over, and
when none of them can be reached. A thread of its own does so, one at a time, so that nobody waits
who knows a server. What cannot be looked up, or is empty, stays as it was known before.
"""

from __future__ import annotations

import logging
import random as random_module
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from keyfront.common.condition import Condition
from keyfront.errors import DirectoryTimeoutError, DirectoryUnavailableError, KeyfrontError

from .protocol.srv import Answer
from .protocol.urls import ServerURL

LOG = logging.getLogger(__name__)

#: Servers of a domain that are used, the preferred ones.
MOST_SERVERS = 64
# Seconds for which an answer holds, whatever its time to live is.
_LEAST_TTL, _LONGEST_TTL = 1.0, 86_400.0
# Seconds between two lookups that have failed, doubled up to the last; and after one that has not,
# until a request has them looked up anew, as it can reach none of the servers.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
# The weight of a server of weight 0 beside others: "a very small chance of being selected".
_LIGHT = 0.1


class DiscoveredServer(NamedTuple):
    """A server to be used.

    :ivar url: its URL
    :ivar tier: those of a higher tier are used if none of a lower one is up, 0 or more
    :ivar share: its part of the load among those of its tier, above 0 to 1, which is the most
    """

    url: ServerURL
    tier: int
    share: float


class _Domain:
    """A URL that is looked up, and what is known of it."""

    __slots__ = ("answer", "asked_at", "due", "failed", "failures", "left_out", "url")

    def __init__(self, url: ServerURL) -> None:
        self.url = url
        self.answer: Answer | None = None
        #: The moments of the last lookup and of the next one, by the clock.
        self.asked_at = self.due = float("-inf")
        #: Lookups that have failed since the last that has not, and why.
        self.failures = 0
        self.failed: DirectoryUnavailableError | None = None
        self.left_out: tuple[str, ...] = ()


class Discovery:
    """Knows the servers of a pool. Threads may use it at once.

    The order is that of the URLs. Of a domain it is that of the priorities; servers of the same
    one are in an order of chance by their weights (RFC 2782), which stays for as long as they are
    named, so that connections do not move with each lookup. Each process draws its own.

    :param urls: the URLs, with and without SRV
    :param look_up: looks up one of the former, as :meth:`.srv.Resolver.servers`
    :param seconds: time for a lookup of all that are due, above 0
    :param clock: returns seconds that never go back
    :param random: draws the order
    :param changed: called with the servers when they are others than before
    """

    def __init__(
        self,
        urls: Sequence[ServerURL],
        look_up: Callable[[ServerURL, float], Answer],
        *,
        seconds: float,
        clock: Callable[[], float],
        random: random_module.Random,
        changed: Callable[[list[DiscoveredServer]], None],
    ) -> None:
        self._urls = list(dict.fromkeys(urls))
        self._domains = {url: _Domain(url) for url in self._urls if url.srv}
        self._look_up = look_up
        self._seconds = seconds
        self._clock = clock
        self._random = random
        self._apply = changed
        self._changed = Condition()
        # The lookup that runs: whatever tells it from those before.
        self._job: object | None = None
        self._drawn: dict[ServerURL, float] = {}
        #: Called when a lookup has ended, whatever came of it.
        self.ended: Callable[[], object] = _nothing
        #: Lookups of a domain so far, and those of them that have failed.
        self.lookups = 0
        self.failures = 0

    def entries(self) -> list[DiscoveredServer]:
        """Return the servers that are known, each once, the preferred ones first."""
        found: dict[ServerURL, DiscoveredServer] = {}
        tier, listed = -1, False
        for url in self._urls:
            if not url.srv:
                # Those that follow each other are of one tier.
                tier += not listed
                listed = True
                found.setdefault(url, DiscoveredServer(url, tier, 1.0))
                continue
            listed = False
            for level, share, target in self._ordered(self._domains[url].answer):
                found.setdefault(target, DiscoveredServer(target, tier + 1 + level, share))
            tier = max((each.tier for each in found.values()), default=tier)
        return list(found.values())

    def next_due(self) -> float | None:
        """Return the seconds until a lookup is due; ``None`` while one runs, which tells of its
        end."""
        if self._job is not None:
            return None
        due = min(domain.due for domain in self._domains.values())
        return max(due - self._clock(), 0.0)

    def refresh(self) -> None:
        """Have what is due looked up, and do not wait for it."""
        now = self._clock()
        if self._job is None and any(each.due <= now for each in self._domains.values()):
            self._begin(lambda domain: domain.due <= now)

    @property
    def is_settled(self) -> bool:
        """True if the preferred ones of the servers are known, or that there are none."""
        for url in self._urls:
            domain = self._domains.get(url)
            if domain is None or (domain.answer is not None and domain.answer.targets):
                return True
            if domain.asked_at == float("-inf"):
                return False
        return True

    def settle(self, seconds: float) -> None:
        """Wait for the first lookup, if it is the one of the preferred servers.

        :param seconds: time to wait at most
        """
        self.refresh()
        with self._changed:
            self._changed.wait_for(lambda: self._job is None or self.is_settled, seconds)

    def demand(self, enough: Callable[[], bool], seconds: float) -> None:
        """Have it looked up, as no server is known or none can be reached, and wait for that.

        Nobody waits who knows servers while DNS does not answer. What was looked up a moment ago is
        not again.

        :param enough: ends the wait when it is true; takes no time
        :param seconds: time to wait at most
        """
        domains = self._domains.values()
        known = len(domains) < len(self._urls) or any(each.answer for each in domains)
        waits = not (known and any(each.failures for each in domains))
        now = self._clock()
        self._begin(
            lambda domain: domain.due <= now
            if domain.failures
            else domain.asked_at + _FIRST_PAUSE <= now
        )
        if waits:
            with self._changed:
                self._changed.wait_for(lambda: self._job is None or enough(), seconds)

    def reasons(self, *, awaited: bool = True) -> list[DirectoryUnavailableError]:
        """Return the reasons why domains stand for no servers, or for those known before.

        :param awaited: also of those that have not been looked up yet
        """
        found: list[DirectoryUnavailableError] = []
        for domain in self._domains.values():
            if domain.failed is not None:
                found.append(domain.failed)
            elif domain.answer is None:
                if not awaited:
                    continue
                text = "no answer to the lookup of its servers yet"
                found.append(DirectoryTimeoutError(text, server=domain.url.text))
            elif not domain.answer.targets:
                text = f"{domain.answer.name} says that there is no such service"
                found.append(DirectoryUnavailableError(text, server=domain.url.text))
        return found

    def after_fork(self) -> list[DiscoveredServer]:
        """Let go of what threads of the parent do, and draw an order; return the servers in it."""
        self._changed = Condition()
        self._job = None
        self._drawn.clear()
        self.lookups = self.failures = 0
        return self.entries()

    def _ordered(self, answer: Answer | None) -> list[tuple[int, float, ServerURL]]:
        """Return the servers of a domain: level of priority from 0 on, share and URL, in order."""
        if answer is None:
            return []
        found = []
        for level, priority in enumerate(sorted({each.priority for each in answer.targets})):
            group = [each for each in answer.targets if each.priority == priority]
            weights = {each.url: max(each.weight, _LIGHT) for each in group}
            heaviest = max(weights.values())
            # The smallest of numbers that are exponentially distributed is any of them by chance in
            # proportion to its rate: the order of RFC 2782, of which each server keeps its number.
            for url in sorted(weights, key=lambda url: self._draw(url) / weights[url]):
                found.append((level, weights[url] / heaviest, url))
        return found[:MOST_SERVERS]

    def _draw(self, url: ServerURL) -> float:
        if url not in self._drawn:
            self._drawn[url] = self._random.expovariate(1.0)
        return self._drawn[url]

    def _forget_draws(self) -> None:
        answers = [each.answer for each in self._domains.values() if each.answer is not None]
        for url in self._drawn.keys() - {each.url for x in answers for each in x.targets}:
            del self._drawn[url]

    def _begin(self, is_chosen: Callable[[_Domain], bool]) -> None:
        """Begin a lookup of the domains that are chosen, unless one runs."""
        job = object()
        with self._changed:
            domains = [each for each in self._domains.values() if is_chosen(each)]
            if self._job is not None or not domains:
                return
            self._job = job
        started = False
        try:
            thread = threading.Thread(
                target=self._run, args=(job, domains), name="keyfront-ldap-srv", daemon=True
            )
            thread.start()
            started = True
        except RuntimeError:  # no thread to be had
            self._run(job, domains)
            started = True
        finally:
            if not started:  # a greenlet that was killed here
                self._end(job)

    def _run(self, job: object, domains: list[_Domain]) -> None:
        try:
            deadline = self._clock() + self._seconds
            for number, domain in enumerate(domains):
                left = (deadline - self._clock()) / (len(domains) - number)
                if not self._ask(job, domain, left):
                    return
        except Exception:
            LOG.exception("the lookup of directory servers failed")
        finally:
            self._end(job)

    def _end(self, job: object) -> None:
        with self._changed.surely():
            if self._job is job:
                self._job = None
                self._changed.notify_all()
        self.ended()

    def _ask(self, job: object, domain: _Domain, seconds: float) -> bool:
        """Look up a domain; return whether the lookup is still the one that runs."""
        answer: Answer | None = None
        failed: DirectoryUnavailableError | None = None
        try:
            if seconds <= 0:
                text = "no time was left for the lookup"
                raise DirectoryTimeoutError(text, server=domain.url.text)
            answer = self._look_up(domain.url, seconds)
        except DirectoryUnavailableError as error:
            failed = error.with_traceback(None)
        except Exception as error:  # of dnspython: it must not end lookups for good
            told = str(error) if isinstance(error, KeyfrontError) else repr(error)
            failed = DirectoryUnavailableError(
                f"the lookup failed: {told}", server=domain.url.text
            )
        now = self._clock()
        before = self.entries()
        was_failing = domain.failures > 0
        with self._changed.surely():
            if self._job is not job:  # this is a forked child's copy of a greenlet
                return False
            self.lookups += 1
            domain.failed = failed
            domain.asked_at = now
            if answer is not None:
                domain.answer = answer
                domain.failures = 0
                domain.due = now + _ttl(answer)
                self._forget_draws()
            else:
                self.failures += 1
                pause = min(_FIRST_PAUSE * 2.0 ** min(domain.failures, 30), _LONGEST_PAUSE)
                domain.failures += 1
                domain.due = now + pause * self._random.uniform(0.9, 1.1)
        after = self.entries()
        if after != before:
            self._apply(after)
        with self._changed.surely():
            self._changed.notify_all()
        if failed is not None:
            if not was_failing:
                known = "those known before are used" if domain.answer else "none is known"
                LOG.warning("the servers of a directory cannot be looked up: %s; %s", failed, known)
        elif answer is not None:
            self._log(domain, answer, after != before or was_failing)
        return True

    def _log(self, domain: _Domain, answer: Answer, is_news: bool) -> None:
        if answer.left_out and answer.left_out != domain.left_out:
            LOG.warning(
                "%s: of %s these are not used: %s",
                domain.url.text, answer.name, "; ".join(answer.left_out),
            )  # fmt: skip
        domain.left_out = answer.left_out
        if not is_news:
            return
        if not answer.targets:
            LOG.warning("%s: %s says that there is no such service", domain.url.text, answer.name)
            return
        shown = [url.text for _, _, url in self._ordered(answer)]
        LOG.info("%s stands for %s", domain.url.text, ", ".join(shown))


def _ttl(answer: Answer) -> float:
    return min(max(answer.ttl, _LEAST_TTL), _LONGEST_TTL)


def _nothing() -> None:
    """Do nothing."""
