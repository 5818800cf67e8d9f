"""The options of the token cache and of ``authtoken``: ``[keyfront_token_cache]`` and
``[keyfront_authtoken]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oslo_config import cfg

from keyfront.common.options import of_paste, values_of

#: The options for several nodes that keep their epochs together, the same for Keystone's token
#: cache and the services' authtoken: they find each other by naming one server and prefix.
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
        help="What the names of the keys in Redis begin with; a Keystone and its services use "
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

#: The part of ``memory`` and ``node_memory`` that is for what Keystone computes for its own caches.
KEYSTONE_SHARE = 0.25

TOKEN_CACHE = [
    cfg.StrOpt(
        "path",
        help="Folder of the files that the workers of this node share, best on tmpfs. It is made "
        "with mode 0700. By default a folder named after the database, so that everything that "
        "writes to the same database finds it: in /run/keyfront if that is the service user's, "
        "else in /dev/shm, or in /tmp if the service may not write there, where one that another "
        "local user has made first is passed over. It must be the same for all workers and for "
        "keystone-manage, so it cannot be set in a paste file.",
    ),
    cfg.FloatOpt(
        "ttl",
        default=30.0,
        min=0.01,
        max=3600.0,
        help="Seconds for which an answer is kept at most. Changes that Keystone commits end it at "
        "once; this bounds what no transaction shows: directories that are not followed, SQL typed "
        "by hand. Keys, policy files and keystone.conf are watched.",
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
        "nothing; the rest is for answers, an eighth of that for refusals, an eighth for what is "
        "known of callers and, unless routes is empty, a quarter for these, which cannot push out "
        "good answers to validations.",
    ),
    cfg.IntOpt(
        "node_memory",
        default=32,
        min=1,
        max=65536,
        help="MiB that all workers of this node share, taken from the file system of path when "
        "the first of them starts. A quarter of it is for what Keystone computes, as in memory; "
        "the rest is for answers: an eighth of that for refusals, a quarter for what is known of "
        "tokens from their issue and, with routes, an eighth for these, none of which can push out "
        "good answers to validations. Like path, it cannot be set in a paste file.",
    ),
    cfg.FloatOpt(
        "flight_timeout",
        default=5.0,
        min=0.0,
        max=60.0,
        help="Seconds for which a request waits while another of this node asks Keystone the "
        "same; 0 never waits.",
    ),
    cfg.BoolOpt(
        "reuse",
        default=True,
        help="Whether what Keystone has computed is kept for its next requests, where [cache] "
        "backend is the default that keeps nothing, and what it repeats is left out. false: "
        "Keystone does all of its work as it comes, and nothing but whole answers is kept; "
        "first_validations is off then. Like path, it cannot be set in a paste file.",
    ),
    cfg.BoolOpt(
        "first_validations",
        default=True,
        help="Whether a service's first validation of a token is answered from what is known of "
        "both, where Keystone's policy lets it: of a token from its issue by this node, or from "
        "what another service was answered.",
    ),
    cfg.ListOpt(
        "routes",
        default=["/v3/projects", "/v3/users/{id}", "/v3/role_assignments"],
        help="Other paths whose GET and HEAD are answered from the cache, besides "
        "/v3/auth/tokens; more are for example /v3/auth/projects and /v3/auth/catalog. {id} "
        "stands for one segment of a path. Routes that show secrets are refused. Nothing: none.",
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
    cfg.FloatOpt(
        "commit_timeout",
        default=300.0,
        min=10.0,
        max=86400.0,
        help="Seconds after which a commit of a process that died is taken for over, where the "
        "database answers and cannot be asked: MySQL and MariaDB behind a proxy, and where others "
        "of a cluster take writes. Until then nothing is kept that it may change. Longer than "
        "anything may hold back a commit there: a standby, flow control, a partition. Like path, "
        "it cannot be set in a paste file.",
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
    {
        *("path", "node_memory", "on_loss", "reuse", "settle", "commit_timeout"),
        *(option.dest for option in COORDINATOR),
    }
)

AUTHTOKEN_GROUP = "keyfront_authtoken"

#: The prefix of their names in a paste section, where others are keystonemiddleware's.
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


def token_cache(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of the options of ``[keyfront_token_cache]`` by name.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section, which win
    :raises OptionError: a value is out of its range, or an option may not be set where it is
    """
    where = f"set in keystone.conf, [{TOKEN_CACHE_GROUP}], where all processes of the node see it"
    conf.register_opts(TOKEN_CACHE, group=TOKEN_CACHE_GROUP)
    return {
        **values_of(conf, TOKEN_CACHE_GROUP, TOKEN_CACHE),
        **of_paste("token_cache", TOKEN_CACHE, local or {}, dict.fromkeys(SHARED, where)),
    }


def authtoken(conf: cfg.ConfigOpts, local: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of ``[keyfront_authtoken]`` by name.

    :param conf: the service's configuration, loaded
    :param local: options of a paste section that begin with :data:`AUTHTOKEN_PREFIX`, which win
    :raises OptionError: a value is out of its range
    """
    conf.register_opts(AUTHTOKEN, group=AUTHTOKEN_GROUP)
    return {
        **values_of(conf, AUTHTOKEN_GROUP, AUTHTOKEN),
        **of_paste("authtoken", AUTHTOKEN, local or {}, {}, AUTHTOKEN_PREFIX),
    }
