"""The options of the heartbeat: ``[keyfront_heartbeat]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oslo_config import cfg

from keyfront.common.options import of_paste, values_of

HEARTBEAT_GROUP = "keyfront_heartbeat"

HEARTBEAT = [
    cfg.BoolOpt(
        "enabled",
        default=False,
        help="Whether keyfront's entrypoints keep the AMQP connections of the service alive while "
        "its green threads do not run. The filter heartbeat and install() need no such word.",
    ),
    cfg.FloatOpt(
        "interval",
        min=0.1,
        max=3600.0,
        help="Seconds between two heartbeats of a connection. By default half of the heartbeat "
        "that the connection negotiated; more than that is cut to half.",
    ),
    cfg.StrOpt(
        "path",
        help="Folder for the counts that keyfront heartbeat status shows, one file of a few kB for "
        "each process, best on tmpfs. It is made with mode 0700 and must be the user's own. By "
        "default keyfront-heartbeat-UID in /dev/shm.",
    ),
]


def heartbeat(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of ``[keyfront_heartbeat]`` by name; ``interval`` and ``path`` may be
    ``None``.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section, which win
    :raises OptionError: a value is out of its range, or an option may not be set where it is
    """
    where = (
        f"left out: the filter is on by being in the pipeline; [{HEARTBEAT_GROUP}] enabled, in the "
        "service's configuration, is for keyfront's entrypoints"
    )
    conf.register_opts(HEARTBEAT, group=HEARTBEAT_GROUP)
    values = {
        **values_of(conf, HEARTBEAT_GROUP, HEARTBEAT),
        **of_paste("heartbeat", HEARTBEAT, local or {}, {"enabled": where}),
    }
    return {**values, "path": values["path"] or None}
