"""Puts the heartbeat into this process: by a call, by configuration, or by a paste filter.

The filter stands anywhere in a pipeline of the service's paste file::

    [pipeline:main]
    pipeline = heartbeat ... myservice

    [filter:heartbeat]
    use = egg:keyfront#heartbeat

It acts once, when the pipeline is loaded, and is not on the way of any request. Options are
``interval`` and ``path`` of ``[keyfront_heartbeat]``, here or in the service's configuration file.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyfront.errors import KeyfrontError, MissingPartError, OptionError

from . import uwsgi_timer
from .amqp_hooks import AmqpHooks, difference
from .pool_hooks import BorrowHooks
from .registry import LOG, ConnectionRegistry


class _Installation:
    """The heartbeat of this process: its registry of connections and its hooks, or nothing."""

    def __init__(self) -> None:
        self.registry: ConnectionRegistry | None = None
        self._hooks: tuple[AmqpHooks, BorrowHooks] | None = None
        self._at_fork = False

    def install(self, *, interval: float | None, path: str | None) -> bool:
        """Install it in this process; see :func:`install`."""
        if self.registry is not None:
            inherited = self.registry.is_inherited()
            self.forked()
            LOG.warning(
                "heartbeat: install() was called %s; the first settings stay",
                "before this process was forked, and again in it" if inherited else "twice",
            )
            return True
        amqp = _amqp()
        if amqp is None:
            return False
        threaded = not uwsgi_timer.is_needed()
        registry = ConnectionRegistry(
            amqp,
            interval=_checked(interval),
            folder=Path(path) if path else None,
            threaded=threaded,
        )
        if not threaded and not uwsgi_timer.start(registry.turn):
            registry.cannot_beat(
                "this uWSGI has no threads and no timer for its workers: nobody can beat"
            )
        borrow = BorrowHooks(registry)
        hooks = AmqpHooks(
            amqp, registry, connected=borrow.put_in, overdue=borrow.expire
        )
        try:
            hooks.put_in()
            borrow.put_in()
        except TypeError as error:  # compiled classes cannot be changed
            hooks.take_out()
            borrow.take_out()
            registry.end()
            LOG.warning("heartbeat: nothing is kept alive: %s; use amqp as it is on PyPI", error)
            return False
        self.registry, self._hooks = registry, (hooks, borrow)
        for connection in _opened_before(amqp):
            registry.keep(connection)
        self._register(borrow)
        atexit.register(registry.end)
        return True

    def _register(self, borrow: BorrowHooks) -> None:
        """Register the hooks by which a forked process shares no connection with its parent."""
        from keyfront.common import fork

        def release() -> None:
            if self.registry is not None:
                borrow.hush()
                self.registry.close_all()

        fork.registry.register("heartbeat", before=release, after=self.forked)
        uwsgi: Any = sys.modules.get("uwsgi")
        if uwsgi is not None and uwsgi.worker_id() == 0:
            fork.call_in_uwsgi_workers(self.forked)
        if not self._at_fork:
            self._at_fork = True  # there is no way to take it back
            os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """Begin anew in a process that was forked; again is no harm."""
        if self.registry is not None and self._hooks is not None:
            self.registry.renew()
            self._hooks[0].forked()

    def remove(self) -> None:
        """Take everything out again; connections stay open, and are no longer kept alive."""
        if self.registry is None or self._hooks is None:
            return
        for hooks in self._hooks:
            hooks.take_out()
        atexit.unregister(self.registry.end)
        self.registry.end()
        self.registry = self._hooks = None


installed = _Installation()
"""The installation of this process."""


def install(*, interval: float | None = None, path: str | None = None) -> bool:
    """Keep this process's AMQP connections alive from now on, those that are open included.

    It raises nothing and does not stop a start: each problem is one warning.

    :param interval: seconds between beats while nothing else is sent; by default half of the
        heartbeat that a connection negotiated, which it must not exceed. A connection that
        negotiated none is left alone.
    :param path: folder of the counts that ``keyfront heartbeat status`` shows; by default one of
        this user in ``/dev/shm``
    :returns: true if connections are kept alive from now on
    """
    return installed.install(interval=interval, path=path)


def remove() -> None:
    """Take it out of this process again; for tests."""
    installed.remove()


def statistics() -> dict[str, Any]:
    """Return the heartbeat's counts in this process, by name; empty where it is not installed.

    The counts of :data:`.counters.NAMES`, ``lateness_worst`` and ``lateness_p99`` in seconds,
    ``unsafe`` (a list of lines), ``command``, ``server``, ``threading`` and ``interval``.
    """
    return installed.registry.statistics() if installed.registry is not None else {}


def install_if_enabled() -> bool:
    """Install it if the service's configuration says so, for our entrypoints; tells if it did.

    Looks at ``[keyfront_heartbeat]`` in oslo.config's global configuration, which the application
    has loaded by now; without oslo.config there is none.
    """
    if "oslo_config.cfg" not in sys.modules:
        return False
    from . import options

    try:
        values = options.heartbeat(sys.modules["oslo_config.cfg"].CONF)
    except OptionError as error:
        LOG.warning("heartbeat: not installed: %s", error)
        return False
    if not values["enabled"]:
        return False
    return install(interval=values["interval"], path=values["path"])


def filter_factory(global_conf: dict[str, str], **local_conf: str) -> Callable[[Any], Any]:
    """Install the heartbeat (``paste.filter_factory``); a bad option does not stop the service."""
    values: dict[str, Any] = {}
    try:
        values = _filter_values(local_conf)
    except KeyfrontError as error:
        LOG.warning("heartbeat: %s; it is installed with the defaults", error)
    install(interval=values.get("interval"), path=values.get("path"))

    def unchanged(application: Any) -> Any:
        return application

    return unchanged


def _filter_values(local_conf: dict[str, str]) -> dict[str, Any]:
    try:
        from oslo_config import cfg

        from . import options
    except ModuleNotFoundError:
        raise MissingPartError("oslo.config is not installed: pip install oslo.config") from None
    values: dict[str, Any] = options.heartbeat(cfg.CONF, local_conf)
    return values


def _amqp() -> Any:
    """Return the module ``amqp`` if it is there and as keyfront needs it, otherwise ``None``."""
    try:
        if "amqp" not in sys.modules and importlib.util.find_spec("amqp") is None:
            raise ModuleNotFoundError("amqp is not installed")
        amqp: Any = importlib.import_module("amqp")
        for part in ("connection", "exceptions", "method_framing", "spec", "transport"):
            importlib.import_module(f"amqp.{part}")
    except Exception as error:
        LOG.warning("heartbeat: nothing is kept alive, as py-amqp cannot be used: %s", error)
        return None
    found = difference(amqp)
    if found is not None:
        LOG.warning(
            "heartbeat: nothing is kept alive: amqp %s does not look as keyfront needs it: %s; use"
            " one that this keyfront supports, or a newer keyfront",
            getattr(amqp, "__version__", "of unknown version"),
            found,
        )
        return None
    return amqp


def _checked(interval: float | None) -> float | None:
    if interval is None:
        return None
    if (
        isinstance(interval, (int, float))
        and not isinstance(interval, bool)
        and math.isfinite(interval)
        and interval > 0
    ):
        return float(interval)
    LOG.warning(
        "heartbeat: interval = %r: must be a number of seconds above 0; half of what each"
        " connection negotiated is taken",
        interval,
    )
    return None


def _opened_before(amqp: Any) -> list[Any]:
    kind = amqp.connection.Connection
    # type(): asking a lazy proxy for its __class__ would run it.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return [one for one in found if one._handshake_complete and one.connected]
