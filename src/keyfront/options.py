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

LDAP_GROUP = "keyfront_ldap"

LDAP = [
    cfg.FloatOpt(
        "connect_timeout",
        default=5.0,
        min=0.01,
        max=600.0,
        help="Seconds that opening a connection may take at most: all addresses of a server, TLS "
        "and StartTLS included. A positive [ldap] pool_connection_timeout wins.",
    ),
    cfg.FloatOpt(
        "operation_timeout",
        default=30.0,
        min=0.01,
        max=3600.0,
        help="Seconds to wait for the answer to a bind, a search or a page of one. A positive "
        "[ldap] pool_connection_timeout wins.",
    ),
    cfg.FloatOpt(
        "checkout_timeout",
        default=10.0,
        min=0.01,
        max=600.0,
        help="Seconds for which a request waits for a connection when all are in use; after that "
        "it is answered 503.",
    ),
    cfg.IntOpt(
        "max_waiting",
        default=0,
        min=0,
        max=100000,
        help="Requests that may wait for a connection at the same time, in each process; the next "
        "one is answered 503 at once. 0 sets no bound.",
    ),
    cfg.IntOpt(
        "min_size",
        default=1,
        min=0,
        max=10000,
        help="Connections for searching that each process keeps open, at most [ldap] pool_size. "
        "0 closes the last one too when it was idle for max_idle.",
    ),
    cfg.IntOpt(
        "auth_min_size",
        default=0,
        min=0,
        max=10000,
        help="Connections for checking passwords that each process keeps open, at most [ldap] "
        "auth_pool_size.",
    ),
    cfg.FloatOpt(
        "max_idle",
        default=600.0,
        min=1.0,
        max=86400.0,
        help="Seconds after which an unused connection is closed. Keep it below the idle limit of "
        "the server and of every firewall between: Active Directory hangs up after 900.",
    ),
    cfg.FloatOpt(
        "check_after",
        default=30.0,
        min=0.0,
        max=86400.0,
        help="Seconds a connection may have been idle before it is asked for a sign of life when "
        "it is next used, which takes one round trip; 0 asks every time.",
    ),
    cfg.StrOpt(
        "strategy",
        choices=["ordered", "balanced"],
        help="Which server of [ldap] url a new connection goes to. ordered: the first that works; "
        "balanced: the one with the fewest connections of this process. By default ordered, or "
        "balanced with [ldap] randomize_urls.",
    ),
    cfg.BoolOpt(
        "fail_back",
        default=True,
        help="Whether connections return to a preferred server once it is healthy again; only "
        "with strategy ordered.",
    ),
    cfg.BoolOpt(
        "password_policy",
        default=True,
        help="Whether servers are asked to say why a login fails or when a password expires "
        "(password policy control). What they say is logged, never shown to the user.",
    ),
    cfg.StrOpt(
        "fast_bind",
        default="auto",
        choices=["auto", "always", "never"],
        help="Whether passwords are checked by Active Directory's fast bind, which builds no "
        "security context. auto: where a server offers it.",
    ),
]

#: Where several nodes keep their epochs together. Of Keystone's token cache and of the services'
#: authtoken alike: they find each other by naming the same server and prefix.
COORDINATOR = [
    cfg.StrOpt(
        "coordinator",
        secret=True,
        help="Redis or Valkey that keeps the epochs which several nodes and services share: "
        "redis://[user:password@]host[:port][/db], rediss:// for TLS, or "
        "unix://[user:password@]/path[?db=n]. With coordinator_sentinel_master the hosts, divided "
        "by commas, are those of all sentinels (default port 26379). Characters of a password "
        "that mean something in a URL are written as %XX. By default none: epochs are shared "
        "within a node, and services do not see them.",
    ),
    cfg.StrOpt(
        "coordinator_prefix",
        default="keyfront:",
        help="What the name of the one key in Redis begins with; a Keystone and its services use "
        "the same, and every Keystone database another.",
    ),
    cfg.FloatOpt(
        "coordinator_timeout",
        default=0.5,
        min=0.01,
        max=10.0,
        help="Seconds to wait for Redis, at each step of connecting and for each answer. After "
        "that it counts as lost: it is tried again once a second, and nothing else waits for it.",
    ),
    cfg.StrOpt(
        "coordinator_sentinel_master",
        help="The name under which the sentinels know the master. A server is trusted only "
        "while the majority of the sentinels names it.",
    ),
    cfg.StrOpt("coordinator_sentinel_user", help="User of the sentinels themselves, if any."),
    cfg.StrOpt(
        "coordinator_sentinel_password",
        secret=True,
        help="Password of the sentinels themselves, if any.",
    ),
    cfg.StrOpt(
        "coordinator_ca_file",
        help="File of the authorities that the certificates of rediss:// must come from. By "
        "default those of the system.",
    ),
    cfg.StrOpt(
        "coordinator_cert_file",
        help="Certificate that is shown to the servers of rediss://, if they ask for one.",
    ),
    cfg.StrOpt("coordinator_key_file", help="Its private key."),
    cfg.StrOpt(
        "consistency",
        default="strict",
        choices=["strict", "lease"],
        help="strict: each answer is checked with Redis, one round trip, and stale from the moment "
        "the response to a change left. lease: checked with what this process heard of Redis "
        "at most lease seconds ago, without a round trip.",
    ),
    cfg.FloatOpt(
        "lease",
        default=1.0,
        min=0.1,
        max=1.0,
        help="Seconds for which a change may go unseen with consistency = lease.",
    ),
]

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
        help="MiB that each worker process takes for it at most. A quarter of it is for what "
        "Keystone computes for its own caches, where [cache] backend is the default that keeps "
        "nothing; the rest is for answers, an eighth of that for refusals and, with routes, a "
        "quarter for these, which cannot push out good answers to validations.",
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
    cfg.FloatOpt(
        "settle",
        default=0.0,
        min=0.0,
        max=300.0,
        help="Seconds by which a database that this node reads may be behind the one that takes "
        "the writes. For so long after a change nothing is kept that depends on what it touched. "
        "Needed only where the token cache cannot find out whether it asks a replica: behind a "
        "proxy, or where a replica takes writes. A server that says that it is a replica is not "
        "believed whatever this says. Like path, it cannot be set in a paste file.",
    ),
    *COORDINATOR,
    cfg.StrOpt(
        "on_loss",
        default="refuse",
        choices=["refuse", "allow"],
        help="What becomes of changes while Redis is away. refuse: they are answered 503 with "
        "Retry-After and not made. allow: they are made, and other nodes and services may go on "
        "with answers from before until their own time limits; the log says so.",
    ),
]

#: Options that all processes of a node must agree on.
SHARED = frozenset(
    {"path", "node_memory", "on_loss", "settle", *(option.dest for option in COORDINATOR)}
)

AUTHTOKEN_GROUP = "keyfront_authtoken"

#: Of their names in a paste section, where others are keystonemiddleware's.
AUTHTOKEN_PREFIX = "keyfront_"

AUTHTOKEN = [
    cfg.IntOpt(
        "memory",
        default=64,
        min=1,
        max=65536,
        help="MiB of validations that each worker process of the service keeps at most. An eighth "
        "of it is for refused tokens, which cannot push out good ones.",
    ),
    cfg.FloatOpt(
        "negative_ttl",
        default=5.0,
        min=0.0,
        max=3600.0,
        help="Seconds for which a token that Keystone does not know is refused without asking "
        "again, at most; 0 asks every time.",
    ),
    cfg.FloatOpt(
        "revalidate",
        default=1.0,
        min=0.1,
        max=60.0,
        help="Seconds for which a validation is used before Keystone's token_cache is asked "
        "whether it still stands; so long does a revoked token go on working. Only without a "
        "coordinator, which says so at each request.",
    ),
    cfg.FloatOpt(
        "flight_timeout",
        default=5.0,
        min=0.0,
        max=60.0,
        help="Seconds for which a request waits while another of this process has the same token "
        "validated; 0 never waits.",
    ),
    *COORDINATOR,
]

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


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return groups and options (entry point ``oslo.config.opts``)."""
    return [
        (TOKEN_CACHE_GROUP, TOKEN_CACHE),
        (AUTHTOKEN_GROUP, AUTHTOKEN),
        (LDAP_GROUP, LDAP),
        (HEARTBEAT_GROUP, HEARTBEAT),
    ]


def register_ldap(conf: cfg.ConfigOpts) -> None:
    """Make ``conf`` know ``[keyfront_ldap]``; as often as wanted."""
    conf.register_opts(LDAP, group=LDAP_GROUP)


def ldap(conf: cfg.ConfigOpts) -> dict[str, Any]:
    """Return the values of ``[keyfront_ldap]`` by name.

    :param conf: the service's configuration, or that of one domain, loaded
    :raises OptionError: a value is out of its range
    """
    register_ldap(conf)
    return _values(conf, LDAP_GROUP, LDAP)


def token_cache(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of the token cache's options by name.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section, which win
    :raises OptionError: a value is out of its range, or an option may not be set where it is
    """
    where = f"set in keystone.conf, [{TOKEN_CACHE_GROUP}], where all processes of the node see it"
    conf.register_opts(TOKEN_CACHE, group=TOKEN_CACHE_GROUP)
    return {
        **_values(conf, TOKEN_CACHE_GROUP, TOKEN_CACHE),
        **_of_paste("token_cache", TOKEN_CACHE, local or {}, dict.fromkeys(SHARED, where)),
    }


def authtoken(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of ``[keyfront_authtoken]`` by name.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section that begin with :data:`AUTHTOKEN_PREFIX`, which win
    :raises OptionError: a value is out of its range
    """
    conf.register_opts(AUTHTOKEN, group=AUTHTOKEN_GROUP)
    return {
        **_values(conf, AUTHTOKEN_GROUP, AUTHTOKEN),
        **_of_paste("authtoken", AUTHTOKEN, local or {}, {}, AUTHTOKEN_PREFIX),
    }


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
        **_values(conf, HEARTBEAT_GROUP, HEARTBEAT),
        **_of_paste("heartbeat", HEARTBEAT, local or {}, {"enabled": where}),
    }
    return {**values, "path": values["path"] or None}


def _of_paste(
    name: str,
    options: list[cfg.Opt],
    local: Mapping[str, str],
    elsewhere: Mapping[str, str],
    prefix: str = "",
) -> dict[str, Any]:
    """Return the values of the options in the section of a filter.

    :param elsewhere: where the options belong that may not be set there
    :param prefix: what their names begin with in the section
    """
    known = {option.dest: option for option in options}
    allowed = ", ".join(sorted(prefix + key for key in known.keys() - elsewhere.keys()))
    values: dict[str, Any] = {}
    for written, text in local.items():
        key = written.removeprefix(prefix)
        if key not in known:
            raise OptionError(f"egg:keyfront#{name}", written, f"one of {allowed}")
        option = known[key]
        if option.secret:
            text = "(not shown)"
        if key in elsewhere:
            raise OptionError(f"{name}: {written}", text, elsewhere[key])
        try:
            values[key] = option.type(local[written])
            if _is_no_value(values[key], option):
                raise ValueError(text)
        except ValueError:
            raise OptionError(f"{name}: {written}", text, _allowed(option)) from None
    return values


def _values(conf: cfg.ConfigOpts, group: str, options: list[cfg.Opt]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options:
        try:
            values[option.dest] = conf[group][option.dest]
        except ValueError as error:
            # oslo.config tells where the value is and not what it is
            where = re.search(r"detail='([^']*)'", str(error))
            raise _out_of_range(group, option, where[1] if where else "the environment") from None
        if _is_no_value(values[option.dest], option):
            where_set = conf.get_location(option.dest, group).detail
            raise _out_of_range(group, option, where_set)
    return values


def _is_no_value(value: object, option: cfg.Opt) -> bool:
    """Whether a value is ``nan``, which no range keeps out, or is empty where a default is not."""
    return value != value or (value is None and option.default is not None)


def _out_of_range(group: str, option: cfg.Opt, where: str) -> OptionError:
    return OptionError(f"[{group}] {option.name}", f"(as set in {where})", _allowed(option))


def _allowed(option: cfg.Opt) -> str:
    if isinstance(option, cfg.BoolOpt):
        return "true or false"
    choices = getattr(option.type, "choices", None)
    if choices:
        return "one of " + ", ".join(choices)
    low, high = getattr(option.type, "min", None), getattr(option.type, "max", None)
    if low is None or high is None:
        return "a list divided by commas" if isinstance(option, cfg.ListOpt) else "text"
    return f"a number from {low} to {high}"
