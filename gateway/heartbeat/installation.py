"""Puts the heartbeat into this process."""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

from keyfront.errors import OptionError

from . import concurrency
from . import uwsgi_timer as pump
from .amqp_hooks import AmqpHooks, difference
from .pool_hooks import BorrowHooks
from .registry import LOG, Keeper


class Heart:
    """What is installed in this process; the one registry of it is :data:`heart`."""

    def __init__(self) -> None:
        self.keeper: Keeper | None = None
        self._hooks: tuple[AmqpHooks, BorrowHooks] | None = None
        self._at_fork = False

    def install(self, *, interval: float | None, path: str | None) -> bool:
        """See :func:`install`."""
        if self.keeper is not None:
            inherited = self.keeper.is_inherited()
            self.forked()
            LOG.warning(
                "heartbeat: install() was called %s; the first settings stay",
                "before this process was forked, and again in it" if inherited else "twice",
            )
            return True
        amqp = _amqp()
        if amqp is None:
            return False
        threaded = not pump.is_needed()
        keeper = Keeper(
            amqp,
            interval=_checked(interval),
            folder=Path(path) if path else None,
            threaded=threaded,
        )
        if not threaded and not pump.start(keeper.turn):
            keeper.say("this uWSGI has no threads and no timer for its workers: nobody can beat")
        borrow = BorrowHooks(keeper)
        hooks = AmqpHooks(amqp, keeper, connected=borrow.put_in)
        try:
            hooks.put_in()
            borrow.put_in()
        except TypeError as error:  # compiled classes cannot be changed
            hooks.take_out()
            borrow.take_out()
            keeper.end()
            LOG.warning("heartbeat: nothing is kept alive: %s; use amqp as it is on PyPI", error)
            return False
        self.keeper, self._hooks = keeper, (hooks, borrow)
        for connection in _opened_before(amqp):
            keeper.keep(connection)
        self._register(borrow)
        atexit.register(keeper.end)
        return True

    def _register(self, borrow: BorrowHooks) -> None:
        """Let the processes that are forked share no connection."""
        from keyfront.common.fork import registry

        def release() -> None:
            if self.keeper is not None:
                borrow.hush()
                self.keeper.close_all()

        registry.register("heartbeat", before=release, after=self.forked)
        concurrency.after_fork_in_uwsgi(self.forked)
        if not self._at_fork:
            self._at_fork = True  # there is no way to take it back
            os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """Begin anew in a process that was forked; again is no harm."""
        if self.keeper is not None and self._hooks is not None:
            self.keeper.renew()
            self._hooks[0].forked()

    def remove(self) -> None:
        """Take everything out again; connections stay open, and are no longer kept alive."""
        if self.keeper is None or self._hooks is None:
            return
        for hooks in self._hooks:
            hooks.take_out()
        atexit.unregister(self.keeper.end)
        self.keeper.end()
        self.keeper = self._hooks = None


heart = Heart()
"""The registry of this process: what is installed in it."""


def install(*, interval: float | None = None, path: str | None = None) -> bool:
    """Keep this process's AMQP connections alive from now on, those that are open included.

    It raises nothing and does not stop a start: each problem is one warning.

    :param interval: seconds between beats while nothing else is sent; by default half of the
        heartbeat that a connection negotiated, which it must not exceed. A connection that
        negotiated none is left alone.
    :param path: folder of the counts that ``keyfront heartbeat status`` shows; by default one of
        this user in ``/dev/shm``
    :returns: whether connections are kept alive
    """
    return heart.install(interval=interval, path=path)


def remove() -> None:
    """Take it out of this process again; for tests."""
    heart.remove()


def statistics() -> dict[str, Any]:
    """What the heartbeat did in this process, by name; empty where it is not installed."""
    return heart.keeper.statistics() if heart.keeper is not None else {}


def install_if_enabled() -> bool:
    """Install it if the service's configuration says so; for our entrypoints.

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


def _amqp() -> Any:
    """The module ``amqp``, if it is there and as keyfront needs it."""
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
