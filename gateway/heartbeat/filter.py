"""The ``heartbeat`` filter: keeps a service's AMQP connections alive without a change of its code.

In a paste file, anywhere in the pipeline::

    [pipeline:main]
    pipeline = heartbeat ... myservice

    [filter:heartbeat]
    use = egg:keyfront#heartbeat

It acts once, when the pipeline is loaded, and is not on the way of any request. Options are
``interval`` and ``path`` of ``[keyfront_heartbeat]``, here or in the service's configuration file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyfront.errors import KeyfrontError, MissingPartError

from .installation import install
from .registry import LOG


def filter_factory(global_conf: dict[str, str], **local_conf: str) -> Callable[[Any], Any]:
    """Install the heartbeat (``paste.filter_factory``); a bad option does not stop the service."""
    values: dict[str, Any] = {}
    try:
        values = _values(local_conf)
    except KeyfrontError as error:
        LOG.warning("heartbeat: %s; it is installed with the defaults", error)
    install(interval=values.get("interval"), path=values.get("path"))

    def unchanged(application: Any) -> Any:
        return application

    return unchanged


def _values(local_conf: dict[str, str]) -> dict[str, Any]:
    try:
        from oslo_config import cfg

        from . import options
    except ModuleNotFoundError:
        raise MissingPartError("oslo.config is not installed: pip install oslo.config") from None
    values: dict[str, Any] = options.heartbeat(cfg.CONF, local_conf)
    return values
