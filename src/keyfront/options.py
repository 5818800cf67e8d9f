"""The oslo.config options of keyfront, in one place.

Read from the service's own configuration file (``keystone.conf``). Where a filter has a section in
a paste file, most of its options can be set there as well, for that pipeline only. Listed for
``oslo-config-generator`` under the namespace ``keyfront``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oslo_config import cfg

from keyfront.errors import OptionError

TOKEN_CACHE_GROUP = "keyfront_token_cache"

TOKEN_CACHE = [
    cfg.StrOpt(
        "path",
        help="Folder of the files that the workers of this node share, best on tmpfs. It is made "
        "with mode 0700. By default a folder in /dev/shm named after the database, so that "
        "everything that writes to the same database finds it. It must be the same for all "
        "workers and for keystone-manage, so it cannot be set in a paste file.",
    ),
    cfg.FloatOpt(
        "ttl",
        default=30.0,
        min=0.01,
        max=3600.0,
        help="Seconds for which an answer is kept at most. Changes that Keystone commits end it at "
        "once; this bounds what no transaction shows: users edited in LDAP, policy files, rotated "
        "keys, SQL typed by hand.",
    ),
    cfg.FloatOpt(
        "negative_ttl",
        default=5.0,
        min=0.0,
        max=3600.0,
        help="Seconds for which a refusal (401, 403, 404) is kept at most; 0 keeps none.",
    ),
    cfg.IntOpt(
        "memory",
        default=64,
        min=1,
        max=65536,
        help="MiB of answers that each worker process keeps at most. An eighth of it is for "
        "refusals, which cannot push out good answers.",
    ),
    cfg.IntOpt(
        "node_memory",
        default=32,
        min=1,
        max=65536,
        help="MiB of answers that all workers of this node share, taken from the file system of "
        "path when the first of them starts; an eighth of it is for refusals. Like path, it "
        "cannot be set in a paste file.",
    ),
    cfg.FloatOpt(
        "flight_timeout",
        default=5.0,
        min=0.0,
        max=60.0,
        help="Seconds for which a request waits while another of this node asks Keystone the "
        "same; 0 never waits.",
    ),
    cfg.ListOpt(
        "routes",
        default=[],
        help="Other paths whose GET and HEAD are answered from the cache, besides "
        "/v3/auth/tokens: for example /v3/projects, /v3/auth/projects, /v3/auth/catalog, "
        "/v3/users/{id}. {id} stands for one segment of a path. Routes that show secrets are "
        "refused.",
    ),
]

#: Options that all processes of a node must agree on.
SHARED = frozenset({"path", "node_memory"})


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return groups and options (entry point ``oslo.config.opts``)."""
    return [(TOKEN_CACHE_GROUP, TOKEN_CACHE)]


def token_cache(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of the token cache's options by name.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section, which win
    :raises OptionError: a value is out of its range, or an option may not be set where it is
    """
    conf.register_opts(TOKEN_CACHE, group=TOKEN_CACHE_GROUP)
    values: dict[str, Any] = {}
    for option in TOKEN_CACHE:
        try:
            values[option.dest] = conf[TOKEN_CACHE_GROUP][option.dest]
        except ValueError as error:
            # oslo.config tells where the value is and not what it is
            where = re.search(r"detail='([^']*)'", str(error))
            raise _out_of_range(option, where[1] if where else "the environment") from None
        if values[option.dest] != values[option.dest]:  # nan, which no range keeps out
            raise _out_of_range(option, conf.get_location(option.dest, TOKEN_CACHE_GROUP).detail)
    known = {option.dest: option for option in TOKEN_CACHE}
    for name, text in (local or {}).items():
        if name not in known:
            raise OptionError(
                "egg:keyfront#token_cache", name, "one of " + ", ".join(sorted(known))
            )
        if name in SHARED:
            raise OptionError(
                f"token_cache: {name}",
                text,
                f"set in keystone.conf, [{TOKEN_CACHE_GROUP}], where all processes of the node "
                "see it",
            )
        option = known[name]
        try:
            values[name] = option.type(text)
            if values[name] != values[name]:
                raise ValueError("nan")
        except ValueError:
            raise OptionError(f"token_cache: {name}", text, _allowed(option)) from None
    return values


def _out_of_range(option: cfg.Opt, where: str) -> OptionError:
    return OptionError(
        f"[{TOKEN_CACHE_GROUP}] {option.name}", f"(as set in {where})", _allowed(option)
    )


def _allowed(option: cfg.Opt) -> str:
    low, high = getattr(option.type, "min", None), getattr(option.type, "max", None)
    if low is None or high is None:
        return "a list divided by commas" if isinstance(option, cfg.ListOpt) else "text"
    return f"a number from {low} to {high}"
