"""The follower of the directories that Keystone's users are in, which updates the token cache.

No transaction of the database shows that a user was disabled, deleted or moved in LDAP. So one
process of the node holds connections to the directories, over which they report changes
(:mod:`keyfront.middleware.ldap.change_notifications`); each becomes a new epoch, as a change of
the database does. Answers that were made of a directory stand only while that goes on
(:mod:`keyfront.middleware.tokens.directory_leases`).

Each server is followed for itself, by its address: a replica that is behind reports a change when
it has it, and answers that were read from it stand by its own lease. The process that follows is a
worker: it has Keystone's drivers and configuration, and uWSGI's master may run no thread of Python.
It is the one with a lock; where its holder stands still, another worker takes the next lock, and
two that follow the same directory do no harm.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keyfront.common import fork
from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError, DirectoryUnavailableError, OptionError
from keyfront.middleware.tokens.counters import DIRECTORY_CHANGES
from keyfront.middleware.tokens.directory_leases import leases
from keyfront.middleware.tokens.epochs import Coordinator, slots
from keyfront.middleware.tokens.invalidation.rules import ANY, CONTENT, tag
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.request import Request, current

from .needed_interfaces import import_keystone

LOG = logging.getLogger(__name__)

# The lease of the process that follows for the node.
_FOLLOWER = "follower"
_LOCKS = 4
# Seconds between two turns of the thread that starts and stops followers.
_TURN_SECONDS = 0.2
# Seconds without a turn after which a process counts as standing still.
_STILL_SECONDS = 1.0
# Seconds between looks for addresses and for domains in the database.
_LOOK_SECONDS = 10.0
# Seconds for which answers stand after a server was last found to offer no way to follow it: longer
# than a connection and a pause take.
_UNFOLLOWED_SECONDS = 15.0
# Addresses of a server, and followers in all.
_ADDRESSES = 32
_FOLLOWERS = 64
# Users whose change is announced one by one; more at once count as all of the domain.
_USERS = 32

# The tags of every change in a directory, besides those of the users.
_ALWAYS = frozenset({ANY, CONTENT, "users", "groups", "members"})


class Followed(NamedTuple):
    """A domain whose users are in a directory."""

    domain: str
    #: The beginning of the names of its leases; another configuration has another one.
    name: str
    #: The LDAP driver's ``Reading``, with what is to be followed.
    reading: Any
    reads: Reads

    @property
    def is_followed(self) -> bool:
        """True if the domain's directory is to be followed."""
        return self.reading.subscription is not None


class Directories:
    """The directories of this Keystone.

    :param coordinator: a function that returns the coordinator of the token cache, if there is one
    :param node: a function that returns the memory of this node's workers, if there is one
    :param folder: a function that returns the folder of the workers' files
    """

    def __init__(
        self,
        coordinator: Callable[[], Coordinator | None],
        node: Callable[[], NodeCache | None],
        folder: Callable[[], Path],
    ) -> None:
        self.coordinator = coordinator
        self.node = node
        self._folder = folder
        self._identity: Any = None
        # By the identity of the driver's pool, which they keep alive.
        self._of_pool: dict[int, Followed | None] = {}
        # Why drivers could not be loaded, by domain.
        self._broken: dict[str, str] = {}
        self._thread: threading.Thread | None = None

    def connect(self) -> None:
        """Listen to each search of a driver; called when Keystone is loaded."""
        providers = import_keystone("keystone.common.provider_api").ProviderAPIs
        self._identity = getattr(providers, "identity_api", None)
        if self._identity is None:
            return
        try:
            from keyfront.middleware.ldap.keystone import observers
        except ImportError:
            return  # without the extra there is no such driver
        observers.append(self._searched)
        fork.registry.register("followers of directories", after=self.start)

    def start(self) -> None:
        """Start the thread that follows the directories if no other process of the node does."""
        if _runs_no_threads():
            LOG.warning("directories are not followed: this uWSGI lets no other thread run")
            return
        self._thread = threading.Thread(
            target=_Manager(self, self._folder).run, name="keyfront-directories", daemon=True
        )
        self._thread.start()

    # Dependencies of answers

    def note(self, request: Request, model: Any) -> None:
        """Note the directories of a validated token with a request, even if none was searched.

        :param request: the notes on the request
        :param model: Keystone's ``TokenModel``
        """
        if not self._of_pool and not self._may_be_any():
            return
        for user, domain in _users(model):
            found = self.of_domain(domain)
            if found is not None:
                self._bound(request, found)
                if found.is_followed:
                    request.followed.add(found.name)
                    request.entries.add(_entry(found, _local_id(user)))

    def _searched(self, pool: Any, source: str | None) -> None:
        """Note with the present request which server has answered a search."""
        request = current.get()
        if request is None:
            return
        found = self._of_pool.get(id(pool))
        if found is None:
            found = self._find(pool)
            if found is None:
                # The pool of a driver that is just being made, or of none.
                request.unvouched = True
                return
        self._bound(request, found)
        if not found.is_followed:
            return
        names = {found.name}
        if source is not None:
            names.add(f"{found.name} {source}")
        request.note(found.reads._replace(followed=frozenset(names)))

    def _bound(self, request: Request, found: Followed) -> None:
        ttl = found.reading.ttl
        if ttl is not None:
            request.until = min(request.until, time.monotonic() + ttl)

    def _may_be_any(self) -> bool:
        return _driver_class() is not None

    def _find(self, pool: Any) -> Followed | None:
        for domain, driver in self.drivers():
            if getattr(driver, "pool", None) is pool:
                return self._made(domain, driver)
        return None

    def of_domain(self, domain: str) -> Followed | None:
        """Return a domain with its directory; ``None`` if its users are in none.

        :param domain: the domain's id
        """
        kind = _driver_class()
        if kind is None or self._identity is None:
            return None
        conf = import_keystone("keystone.conf").CONF
        found = self._identity.domain_configs.get(domain)
        driver = found["driver"] if found else None
        if driver is None and domain == conf.identity.default_domain_id:
            driver = self._identity.driver
        return self._made(domain, driver) if isinstance(driver, kind) else None

    def drivers(self) -> Iterator[tuple[str, Any]]:
        """Yield the ids of the domains with LDAP and their drivers, as far as these are loaded."""
        kind = _driver_class()
        if kind is None or self._identity is None:
            return
        for domain, found in list(self._identity.domain_configs.items()):
            if isinstance(found.get("driver"), kind):
                yield domain, found["driver"]
        if isinstance(self._identity.driver, kind):
            conf = import_keystone("keystone.conf").CONF
            yield conf.identity.default_domain_id, self._identity.driver

    def _made(self, domain: str, driver: Any) -> Followed | None:
        found = self._of_pool.get(id(driver.pool))
        if found is None or found.domain != domain:
            from keyfront.middleware.ldap.keystone.changed_entries import Reading

            try:
                reading = Reading(driver)
            except OptionError as error:
                LOG.error("domain %s: %s", domain, error)
                return None
            what = (domain, driver.conf.ldap.url, driver.user.id_attr, reading.subscription)
            digest = hashlib.blake2b(repr(what).encode("utf-8", "replace"), digest_size=8)
            name = digest.hexdigest()
            reads = Reads(frozenset({"users"}), frozenset({tag("directory", name)}))
            found = Followed(domain, name, reading, reads)
            # Those of drivers that were replaced go, with their pools.
            present = {id(each.pool) for _, each in self.drivers()}
            for other in self._of_pool.keys() - present:
                self._of_pool.pop(other, None)
            self._of_pool[id(driver.pool)] = found
        return found

    def load(self) -> None:
        """Make Keystone load the drivers of its domains, as its first request would.

        :raises Exception: an error of Keystone's that concerns all of them, as without its database
        """
        conf = import_keystone("keystone.conf").CONF
        configs = self._identity.domain_configs
        if not conf.identity.domain_specific_drivers_enabled:
            return
        providers = import_keystone("keystone.common.provider_api").ProviderAPIs
        if not configs.configured:
            with configs.lock:
                if not configs.configured:
                    configs.setup_domain_drivers(self._identity.driver, providers.resource_api)
        if conf.identity.domain_configurations_from_database:
            broken = {}
            for domain in self._with_options(providers):
                try:
                    configs.get_domain_driver(domain)
                except Exception as error:  # of its options: others can be followed
                    broken[domain] = f"{type(error).__name__}: {error}"
            for each in broken.items() - self._broken.items():
                LOG.warning("domain %s is not followed: %s", *each)
            self._broken = broken

    def _with_options(self, providers: Any) -> set[str]:
        """Return the ids of the domains with options in the database, and of those that had some.

        Most domains have none, and there may be thousands: Keystone makes two statements for each.

        :param providers: Keystone's managers
        """
        table_of = getattr(providers.domain_config_api.driver, "choose_table", None)
        if table_of is None:  # of another backend
            return {domain["id"] for domain in providers.resource_api.list_domains()}
        found = set(self._identity.domain_configs)
        with import_keystone("keystone.common.sql").session_for_read() as session:
            for is_secret in (False, True):
                rows = session.query(table_of(is_secret).domain_id).distinct()
                found.update(domain for (domain,) in rows)
        return found

    # Changes

    def changed(self, found: Followed, users: Sequence[str] | None) -> None:
        """Make answers stale that depend on users of a domain.

        :param found: the domain with its directory
        :param users: the users' ids in the directory; ``None``: all users of the domain
        :raises CoordinatorError: the epoch table cannot be reached, or there is none
        """
        tags = {*_ALWAYS, *found.reads.tags}
        conf = import_keystone("keystone.conf").CONF
        if users is not None and (
            len(users) > _USERS or conf.identity_mapping.generator != "sha256"
        ):
            users = None
        if users is None:
            tags.add(tag("project", found.domain))
        else:
            providers = import_keystone("keystone.common.provider_api").ProviderAPIs
            for user in users:
                tags.add(_entry(found, user))
                what = {"domain_id": found.domain, "local_id": user, "entity_type": "user"}
                for name in (user, providers.id_generator_api.generate_public_ID(what)):
                    try:
                        tags.add(tag("user", name))
                    except ValueError:
                        pass  # its answers depend on ``any``
        coordinator = self.coordinator()
        if coordinator is None:
            raise CoordinatorError("there is no token cache to be told of changes")
        coordinator.touch(slots(tags, coordinator.slot_count))
        node = self.node()
        if node is not None:
            node.counters.count(DIRECTORY_CHANGES)


class _Listener:
    """The listener to a follower of a domain, as ``change_notifications.Listener`` says."""

    def __init__(self, directories: Directories, found: Followed) -> None:
        self._directories = directories
        self._found = found
        self.kind: Callable[[Any], Literal["user", "group", "other"]] = found.reading.kind
        self.identity: Callable[[Any], str] = found.reading.identity
        self._told = ""

    def begins(self, server: str) -> None:
        self._directories.changed(self._found, None)
        self._told = ""
        if leases.leases is not None:
            for name in (self._found.name, f"{self._found.name} {server}"):
                leases.leases.withdraw(name)
            leases.leases.grant(self._was_followed(server), time.monotonic())

    def changed(self, users: Sequence[str]) -> None:
        self._directories.changed(self._found, users)

    def everything(self) -> None:
        self._directories.changed(self._found, None)

    def alive(self, server: str, moment: float) -> None:
        for name in (f"{self._found.name} {server}", self._found.name):
            if leases.leases is not None:
                leases.leases.grant(name, moment)

    def impossible(self, server: str, reason: str) -> None:
        """Let answers stand for their ``ttl``, unless the server was followed before.

        An operator who relies on that must not learn by a disabled user who goes on that it ended.

        :param server: the server's name
        :param reason: the reason for which it cannot be followed
        :raises DirectoryUnavailableError: it was followed before
        """
        kept = leases.leases
        if kept is not None and kept.until(self._was_followed(server)):
            raise DirectoryUnavailableError(
                f"{reason}; it was followed before, so answers are not kept until it is again, or "
                "[keyfront_ldap] follow = never", server=server,
            )  # fmt: skip
        if reason != self._told:
            self._told = reason
            LOG.warning(
                "directory %s cannot be followed: %s; answers are kept for ttl, or token_ttl of "
                "[keyfront_ldap]", server, reason,
            )  # fmt: skip
        self.alive(server, time.monotonic() + _UNFOLLOWED_SECONDS)

    def _was_followed(self, server: str) -> str:
        """Return the name of a lease that only records that the server was followed."""
        return f"{self._found.name} {server} once"


class _Manager:
    """Starts and stops the followers, in the one process of the node that has the lock."""

    def __init__(self, directories: Directories, folder: Callable[[], Path]) -> None:
        self._directories = directories
        self._folder = folder
        self._locks: list[FileLock] = []
        self._held: FileLock | None = None
        # The last part of a key is the identity of the driver's pool, which they keep alive: a
        # driver is replaced when the options of its domain change, its password among them.
        self._followers: dict[tuple[str, str, Any, int], Any] = {}
        self._looked = -_LOOK_SECONDS
        self._complained = ""

    def run(self) -> None:
        """Start and stop followers for as long as the process lives."""
        while True:
            time.sleep(_TURN_SECONDS)
            try:
                self._turn()
                self._complained = ""
            except Exception as error:  # its database may be away; that is no end
                if str(error) != self._complained:
                    LOG.warning("directories: %s: %s", type(error).__name__, error)
                self._complained = str(error)

    def _turn(self) -> None:
        kept = leases.leases
        if kept is None or self._directories.coordinator() is None:
            return  # there is no token cache
        kept.look()
        if not self._is_ours():
            return
        now = time.monotonic()
        kept.grant(_FOLLOWER, now)
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._directories.load()
            self._choose()

    def _is_ours(self) -> bool:
        if self._held is not None:
            return True
        if not self._locks:
            folder = self._folder()
            self._locks = [FileLock(folder / f"follower.{x}") for x in range(_LOCKS)]
        for lock in self._locks:
            if lock.attempt():
                self._held = lock
                return True
            kept = leases.leases
            if kept is None or time.monotonic() < kept.until(_FOLLOWER) + _STILL_SECONDS:
                break  # who has it is alive
        return False

    def _choose(self) -> None:
        """Start and stop followers: one for each address of each server of each domain."""
        from keyfront.middleware.ldap.change_notifications import Follower

        wanted: dict[tuple[str, str, Any, int], tuple[Followed, Any]] = {}
        for domain, _ in self._directories.drivers():
            found = self._directories.of_domain(domain)
            if found is None or not found.is_followed:
                continue
            try:
                pool = found.reading.pool.get()
                urls = pool.look_up()
            except (OptionError, DirectoryUnavailableError) as error:
                # Of this domain; its users cannot log in either.
                LOG.warning("domain %s is not followed: %s", domain, error)
                continue
            for url in urls:
                addresses = _addresses(pool, url)
                if addresses is None:  # who is followed stays so while nobody tells of addresses
                    names = (found.name, url.text)
                    addresses = [key[2] for key in self._followers if key[:2] == names]
                for address in addresses:
                    wanted[found.name, url.text, address, id(found.reading.pool)] = (found, url)
        for key in [key for key, follower in self._followers.items() if not follower.running]:
            del self._followers[key]
        for key in self._followers.keys() - wanted.keys():
            self._followers.pop(key).stop()
        for key, (found, url) in wanted.items():
            if key in self._followers:
                continue
            if len(self._followers) >= _FOLLOWERS:
                raise CoordinatorError(f"more than {_FOLLOWERS} servers are to be followed")
            pool, address = found.reading.pool, key[2]

            def connect(seconds: float, pool: Any = pool, url: Any = url, to: Any = address) -> Any:
                return pool.get().dedicated(url, to, seconds)

            listener = _Listener(self._directories, found)
            follower = Follower(_shown(url, address), connect, found.reading.subscription, listener)
            self._followers[key] = follower
            follower.start()


def _addresses(pool: Any, url: Any) -> list[Any] | None:
    """Return the addresses of a server; ``None`` if the resolver does not answer."""
    if url.scheme == "ldapi":
        return [None]
    from keyfront.middleware.ldap.protocol.addresses import is_no_answer

    try:
        return sorted(set(pool.addresses(url)), key=repr)[:_ADDRESSES]
    except OSError as error:
        LOG.warning(
            "directory %s: its addresses are not found: %s", url, error.strerror or error
        )
        return None if is_no_answer(error) else []


def _shown(url: Any, address: Any) -> str:
    host = address[0] if address else url.host
    return url.text if host == url.host else f"{url} ({host})"


def _users(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the ids of a token's users with those of their domains."""
    yield model.user_id, model.user["domain_id"]
    if model.trust_id:
        for user in (model.trustor, model.trustee):
            yield user["id"], user["domain_id"]


def _local_id(user: str) -> str:
    """Return the id in his directory of a user of Keystone's."""
    providers = import_keystone("keystone.common.provider_api").ProviderAPIs
    mapping = providers.id_mapping_api.get_id_mapping(user)
    return str(mapping["local_id"] if mapping else user)


def _entry(found: Followed, identity: str) -> str:
    """Return the tag of a user in a directory, however his id is written.

    Keystone makes its id of him of what his directory wrote when he first came, and goes on by
    that; his directory finds him by any spelling of it, and may have another one by now.

    :param found: the domain with its directory
    :param identity: the user's id in the directory
    """
    from keyfront.middleware.ldap.user_refusals import folded

    text = f"{found.domain} {folded(identity)}".encode("utf-8", "surrogateescape")
    return tag("entry", hashlib.blake2b(text, digest_size=16).hexdigest())


def _driver_class() -> Any:
    """Return the class of our driver, if this process has loaded it."""
    module = sys.modules.get("keyfront.middleware.ldap.keystone.driver")
    return getattr(module, "Identity", None)


def _runs_no_threads() -> bool:
    from ..heartbeat.concurrency import has_threads

    uwsgi = sys.modules.get("uwsgi")
    return uwsgi is not None and not has_threads(uwsgi)
