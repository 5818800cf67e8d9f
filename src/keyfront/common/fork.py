"""Forks: what a process gives up before, and its children take up again afterwards.

**The idiom.** An object that must not go on as it is in a child keeps the number of the process
that made it, and compares it with ``os.getpid()`` where it hands out what the fork made useless: a
descriptor, a lock, a connection. That finds every fork, also one that nobody told Python of, and a
lock is never waited for whose holder does not exist in the child. In addition:

* ``os.register_at_fork`` where the child must begin anew even if nobody asks the object (a file
  lock whose descriptor would keep the parent's lock, a counter's row). Python calls it, uWSGI does
  not, so what must happen in uWSGI's workers is registered here as well;
* :data:`registry`, by parts that hold things while the application is loaded, which have to go
  before the fork: connections, threads. It also calls its handlers in the workers of uWSGI;
* ``after_fork()`` is the name of the method by which an object passes a fork on to its parts.

**The registry.** A server that loads the application once and forks its workers from it (uWSGI
with ``lazy-apps = false``) saves memory and start-up time, but every worker inherits what the
loading opened: one database connection used by two workers mixes their answers. This module keeps
the one list of such things, :data:`registry`.

The order of calls in an entrypoint is::

    registry.install()      # before the application is imported
    application = load()
    registry.loaded()       # releases before the fork, or starts this worker

Nothing is needed at exit: what ``before`` releases is closed in the parent, and workers are ended
by their server.
"""

from __future__ import annotations

import _socket
import gc
import logging
import os
import random
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from keyfront.errors import ServerError

LOG = logging.getLogger(__name__)

Handler = Callable[[], object]
Release = Callable[[Any], object]


class SharedSocket(NamedTuple):
    """A connected stream socket that workers forked now would share."""

    fd: int
    """The descriptor in this process."""
    peer: str
    """``host:port`` or a path; ``socketpair`` when the other end has no name."""


class _Entry(NamedTuple):
    """The handlers of one name."""

    before: Handler | None
    after: Handler | None


class ForkRegistry:
    """Handlers that run before this process forks its workers, and in each worker.

    A registry remembers the sockets that are open when it is made: those are the server's own
    (uWSGI keeps its listening sockets and its signal socketpairs open while it loads the
    application) and are never reported. So make it before the application is imported.

    Handlers run in the thread that calls; registering is not safe against a fork in another thread.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._server_sockets = {inode for _, inode in _open_sockets()}
        self._reopened_in: int | None = None
        self._installed = False

    def register(
        self, name: str, *, before: Handler | None = None, after: Handler | None = None
    ) -> None:
        """Add the handlers called ``name``, or replace them.

        Register before :meth:`loaded` (or :meth:`prepare`): handlers that come later wait for the
        next fork.

        :param before: releases in the parent, once loading has ended and before the fork; the last
            one registered runs first
        :param after: reopens, restarts or reseeds in every worker and in every other child of
            ``os.fork``; the first one registered runs first
        """
        self._entries[name] = _Entry(before, after)

    def install(self) -> None:
        """Make :meth:`reopen` run in every child from now on; calling it again does no harm.

        ``os.register_at_fork`` sees every fork that Python makes or is told of. uWSGI forks in C
        and tells Python only with ``py-call-uwsgi-fork-hooks``, so ``uwsgi.post_fork_hook`` is
        set as well; a hook that was there runs after ours.
        """
        if not self._installed:
            self._installed = True
            os.register_at_fork(after_in_child=self.reopen)
        call_in_uwsgi_workers(self.reopen)

    def loaded(self) -> None:
        """Release for the fork to come, or start this worker, now that the application is loaded.

        In uWSGI's master (or its only process) this is :meth:`prepare`. Everywhere else the process
        that loaded the application also serves it - mod_wsgi, uWSGI with ``lazy-apps``, a plain
        server - and this is :meth:`reopen`. A server of another kind that forks after loading calls
        :meth:`prepare` itself.

        :raises ServerError: as :meth:`prepare` does
        """
        if _loads_before_fork():
            self.prepare()
        else:
            gc.freeze()  # as before a fork: what was loaded stays, and is not looked through
            self.reopen()

    def prepare(self) -> tuple[SharedSocket, ...]:
        """Release what workers must not share; call it in the parent, after loading.

        Then warns of what is still shared: connected sockets, and threads (which do not exist in a
        child). Last, everything is moved out of the garbage collector's sight, because a collection
        in a worker would write to, and so copy, the pages it shares. What is garbage stays with it:
        Keystone's loading leaves half a megabyte, and to find that takes a tenth of its time.

        :returns: the connected sockets that workers would still share; each is also logged
        :raises ServerError: handlers failed; all others have run, and each failure is logged
        """
        # A module imported since install() may have taken the hook (uwsgidecorators does).
        self.install()
        failed = self._run("before", reversed(self._entries.items()))
        shared = tuple(self._shared_sockets())
        for fd, peer in shared:
            LOG.warning(
                "workers would share the connection to %s (descriptor %d): close it in a fork"
                " handler, or set lazy-apps",
                peer,
                fd,
            )
        for thread in _other_threads():
            LOG.warning(
                "thread %s will not exist in the workers: start it in a fork handler", thread
            )
        if failed:
            raise ServerError(f"could not release before the fork: {', '.join(failed)}")
        gc.freeze()
        return shared

    def reopen(self) -> tuple[str, ...]:
        """Run every ``after`` handler, once in the life of this process.

        A failing handler is logged and does not stop the others or the worker: under uWSGI a worker
        that gives up here is replaced by one that does the same, for ever.

        :returns: the names of the handlers that failed; empty also when they had run already
        """
        if self._reopened_in == os.getpid():
            return ()
        self._reopened_in = os.getpid()
        return self._run("after", iter(self._entries.items()))

    def _run(self, moment: str, entries: Iterator[tuple[str, _Entry]]) -> tuple[str, ...]:
        failed = []
        for name, entry in list(entries):
            handler = entry.before if moment == "before" else entry.after
            if handler is None:
                continue
            try:
                handler()
            except Exception as error:
                failed.append(name)
                LOG.error(
                    "fork handler %s (%s) failed: %s: %s",
                    name,
                    moment,
                    type(error).__name__,
                    error,
                    exc_info=LOG.isEnabledFor(logging.DEBUG),
                )
        return tuple(failed)

    def _shared_sockets(self) -> Iterator[SharedSocket]:
        for fd, inode in _open_sockets():
            if inode in self._server_sockets:
                continue
            peer = _stream_peer(fd)
            if peer is not None:
                yield SharedSocket(fd, peer)


def call_in_uwsgi_workers(action: Handler) -> None:
    """Make uWSGI call ``action`` first in each worker that it forks; it may be called again.

    uWSGI forks without telling Python's own hooks, and knows one hook, ``uwsgi.post_fork_hook``.
    One that was there runs after ours.
    """
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None:
        return
    previous = getattr(uwsgi, "post_fork_hook", None)
    actions = getattr(previous, "actions", ())
    if action in actions:
        return

    def post_fork_hook() -> None:
        action()
        if previous is not None:
            previous()

    hook: Any = post_fork_hook
    hook.actions = (action, *actions)
    uwsgi.post_fork_hook = hook


def _loads_before_fork() -> bool:
    """Return whether this process is uWSGI's and forks (or becomes) the workers after loading.

    While it loads, the master has worker number 0 and is its own master; with no master at all
    ``masterpid()`` is 0. A lazy worker has a number, a lazy spooler another master.
    """
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None:
        return False
    return uwsgi.worker_id() == 0 and uwsgi.masterpid() in (0, os.getpid())


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket of this process; nothing where /proc is missing."""
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for fd in fds:
        try:
            status = os.fstat(fd)
        except OSError:
            continue  # the descriptor that listed the folder
        if stat.S_ISSOCK(status.st_mode):
            yield fd, status.st_ino


def _stream_peer(fd: int) -> str | None:
    """Return the peer of a connected INET or UNIX stream socket, None for any other descriptor."""
    # _socket.socket: the plain class even where gevent has replaced socket.socket.
    copy = _socket.socket(fileno=os.dup(fd))
    try:
        if copy.type != socket.SOCK_STREAM:
            return None
        address = copy.getpeername()
        if copy.family in (socket.AF_INET, socket.AF_INET6):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            return f"{host}:{address[1]}"
        if copy.family == socket.AF_UNIX:
            # Linux gives abstract names as bytes, and an empty name for a socketpair.
            return os.fsdecode(address).replace("\0", "@") or "socketpair"
        return None
    except OSError:
        return None  # not connected
    finally:
        copy.close()


def _other_threads() -> list[str]:
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return []  # these are greenlets, and those survive the fork
    here = (threading.main_thread(), threading.current_thread())
    return [thread.name for thread in threading.enumerate() if thread not in here]


class _Connections:
    """The client libraries' connections, found where they are.

    They are looked for once, in the parent: a scan in each worker would touch, and so copy, every
    page it shares.
    """

    def __init__(self) -> None:
        self._found: list[tuple[weakref.ref[Any], Release]] = []

    def release(self) -> None:
        """Close the connections of every client in this process; the clients stay usable."""
        kinds = [
            (cls, kind)
            for kind in _KINDS
            if (cls := getattr(sys.modules.get(kind.module), kind.name, None)) is not None
        ]
        if not kinds:
            return
        classes = tuple(cls for cls, _ in kinds)
        # type(): asking a lazy proxy for its __class__ would run it. Their types are few.
        things = gc.get_objects()
        types = {found for found in set(map(type, things)) if issubclass(found, classes)}
        clients = [thing for thing in things if type(thing) in types] if types else []
        self._found = []
        for client in clients:
            kind = next(kind for cls, kind in kinds if issubclass(type(client), cls))
            if kind.forget is not None:
                self._found.append((weakref.ref(client), kind.forget))
            try:
                kind.release(client)
            except Exception as error:  # the look at the sockets says if it matters
                LOG.warning("could not close a %s: %s", type(client).__name__, error)

    def forget(self) -> None:
        """Drop, in a child, what its parent has connected since, without closing it there."""
        for reference, forget in self._found:
            client = reference()
            if client is not None:
                forget(client)


class _Kind(NamedTuple):
    """A class of client: where it is, what closes its connections, what drops them in a child.

    ``forget`` must take no lock: another thread of the parent may have held it when it forked.
    """

    module: str
    name: str
    release: Release
    forget: Release | None


def _holds_memory_database(engine: Any) -> bool:
    """Return whether the engine's only connection is its database: closing it loses the data."""
    pool: Any = sys.modules["sqlalchemy.pool"]
    return engine.dialect.name == "sqlite" and isinstance(
        engine.pool, (pool.StaticPool, pool.SingletonThreadPool)
    )


def _release_engine(engine: Any) -> None:
    if not _holds_memory_database(engine):
        engine.dispose()


def _forget_engine(engine: Any) -> None:
    if not _holds_memory_database(engine):
        # close=False: a goodbye from the child would end the parent's connection.
        engine.dispose(close=False)


# Clients not listed guard themselves by pid or are reported by the look at the sockets.
_KINDS = (
    _Kind("sqlalchemy.engine.base", "Engine", _release_engine, _forget_engine),
    # redis compares pids itself and then drops what it inherited.
    _Kind("redis.connection", "ConnectionPool", lambda pool: pool.disconnect(), None),
    # So does the token cache's coordinator.
    _Kind(
        "keyfront.middleware.tokens.coordinator.redis.outages",
        "Contact",
        lambda contact: contact.release(),
        None,
    ),
    # Pooled and hashing clients, and dogpile's, are made of these.
    _Kind("pymemcache.client.base", "Client", lambda c: c.close(), lambda c: c.close()),
    _Kind("memcache", "Client", lambda c: c.disconnect_all(), lambda c: c.disconnect_all()),
    # Every requests session has one.
    _Kind("urllib3.poolmanager", "PoolManager", lambda pools: pools.clear(), None),
)


def _release_ldap_pools() -> None:
    """Drop Keystone's LDAP connection pools; its driver makes them again when it needs them."""
    module: Any = sys.modules.get("keystone.identity.backends.ldap.common")
    if module is not None:
        module.PooledLDAPHandler.connection_pools.clear()


def _reinit_gevent() -> None:
    """Give a child its own event loop: monkey patching alone makes one, and forks share it."""
    gevent: Any = sys.modules.get("gevent")
    if gevent is not None:
        gevent.reinit()


def _renew_eventlet() -> None:
    """Give a child an epoll of its own for eventlet's hub: monkey patching makes one.

    Of one that is shared each worker hears what all others wait for, and never sleeps while one of
    them has something to read and no request in which it would.
    """
    local: Any = getattr(sys.modules.get("eventlet.hubs"), "_threadlocal", None)
    epolls: Any = sys.modules.get("eventlet.hubs.epolls")
    hub: Any = getattr(local, "hub", None)
    if epolls is None or type(hub) is not epolls.Hub:
        return  # eventlet is not used here, or does not keep what it waits for in the kernel
    hub.poll.close()  # this process's descriptor of it, no more
    hub.poll = epolls.select.epoll()
    for number in {*hub.listeners[hub.READ], *hub.listeners[hub.WRITE]}:
        with suppress(OSError, ValueError):  # closed before the fork
            hub.register(number, new=True)


registry = ForkRegistry()
"""The registry of this process: entrypoints install it, parts of the gateway register in it."""

_connections = _Connections()
registry.register("gevent", after=_reinit_gevent)
registry.register("eventlet", after=_renew_eventlet)
registry.register("connections", before=_connections.release, after=_connections.forget)
registry.register("keystone ldap pools", before=_release_ldap_pools)
registry.register("random", after=random.seed)
