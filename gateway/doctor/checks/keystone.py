"""Checks of keystone.conf, of key repositories and of caches (K, M)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ..found import Found
from ..key_repositories import KeyRepository
from ..readers.keystone import KeystoneConf
from ..redaction import shown
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Place

_DAY = 86400
_SECRET_LOGGERS = re.compile(
    r"\b(keystonemiddleware|keystoneauth|keystoneclient|ldap|ldap3|ldappool|sqlalchemy\.engine|"
    r"urllib3|requests|pymysql)=DEBUG",
    re.IGNORECASE,
)
_DASHBOARD = (
    "/etc/openstack-dashboard/local_settings.py",
    "/etc/openstack-dashboard/local_settings",
    "/etc/kolla/horizon/local_settings",
)


def _conf(found: Found) -> KeystoneConf:
    assert found.keystone is not None
    return found.keystone


@check(
    "K01",
    ERROR,
    "keys",
    holds="Key repositories are readable by Keystone only",
    harm="Whoever reads a fernet key makes tokens of any user, administrators included.",
    source="keystone-manage doctor, symptom_unsecured_key_repository",
)
def repository_modes(found: Found) -> Iterator[Finding]:
    """The folder has mode 0700 and each key 0600."""
    for repository in found.keys:
        open_keys = [key for key in repository.keys if key.mode & 0o077]
        if (repository.mode is not None and repository.mode & 0o007) or any(
            key.mode & 0o007 and (repository.mode or 0) & 0o001 for key in open_keys
        ):
            yield Finding(
                what=f"{repository.path} is open to all users of the machine",
                where=(Place(repository.path),),
                lines=(f"chmod -R u=rwX,go= {repository.path}",),
            )


@check(
    "K02",
    ERROR,
    "keys",
    "keystone",
    holds="A fernet key lives as long as the tokens that it made",
    harm="Users are logged out before their tokens end, and long uploads fail in the middle.",
    source="Keystone, fernet token FAQ: (expiration + allow_expired_window) / rotation + 2; "
    "kolla-ansible",
)
def rotation(found: Found) -> Iterator[Finding]:
    """With max_active_keys N a key is used for N - 2 rotations after its own at least. How often
    they are rotated is read from the times of the keys."""
    conf = _conf(found)
    for repository in found.keys:
        interval = _interval(repository)
        if repository.kind != "fernet_tokens" or interval is None:
            continue
        most = conf.number("fernet_tokens", "max_active_keys", 3)
        life = conf.number("token", "expiration", 3600)
        window = conf.number("token", "allow_expired_window", 172800)
        kept = (most - 2) * interval
        if kept < life + window:
            needed = -(-(life + window) // max(1, int(interval))) + 2
            yield Finding(
                what=f"keys are rotated every {interval / 3600:.1f} h and {most} kept, tokens "
                "are good "
                f"for {life / 3600:g} h"
                + ("" if kept < life else f" and {window / 3600:g} h for services"),
                where=(conf.place("fernet_tokens", "max_active_keys"), Place(repository.path)),
                lines=("[fernet_tokens]", f"max_active_keys = {needed}"),
                level="" if kept < life else WARNING,
            )


def _interval(repository: KeyRepository) -> float | None:
    """Return the seconds between two rotations, as the times of the keys tell: the median."""
    times = sorted(key.changed for key in repository.keys if key.number)
    gaps = sorted(b - a for a, b in itertools.pairwise(times) if b - a > 60)
    return gaps[len(gaps) // 2] if gaps else None


@check(
    "K03",
    WARNING,
    "keys",
    holds="Fernet keys are rotated",
    harm="A key that leaked once is good for ever.",
    source="Keystone, fernet token FAQ",
)
def age(found: Found) -> Iterator[Finding]:
    """keystone-manage fernet_rotate by a timer, and the repository copied to all nodes:
    docs/running.md."""
    for repository in found.keys:
        primary = repository.primary
        if repository.kind == "fernet_tokens" and primary is not None:
            days = (found.now - primary.changed) / _DAY
            if days > 180:
                yield Finding(
                    what=f"the primary key of {repository.path} is {days:.0f} days old",
                    where=(Place(f"{repository.path}/{primary.number}"),),
                    lines=("keystone-manage fernet_rotate",),
                )


@check(
    "K04",
    ERROR,
    "keys",
    holds="Key repositories have a primary and a staged key",
    harm="Nobody can log in; or the next rotation makes tokens that other nodes refuse.",
    source="keystone/common/fernet_utils.py: 0 is the staged key, the highest number the primary",
)
def repository_is_whole(found: Found) -> Iterator[Finding]:
    """fernet_setup makes both. A copy that left 0 out lets tokens of a node that rotates first be
    refused by the others."""
    for repository in found.keys:
        if not repository.mode:
            continue
        command = "fernet_setup" if repository.kind == "fernet_tokens" else "credential_setup"
        numbers = [key.number for key in repository.keys]
        if not any(numbers):
            yield Finding(
                what=f"{repository.path} has no primary key",
                where=(Place(repository.path),),
                lines=(
                    f"keystone-manage {command} --keystone-user keystone --keystone-group keystone",
                ),
            )
        elif 0 not in numbers:
            yield Finding(
                what=f"{repository.path} has no staged key, 0",
                level=WARNING,
                where=(Place(repository.path),),
                lines=("keystone-manage fernet_rotate",),
            )


@check(
    "K05",
    WARNING,
    "keystone",
    holds="Keystone knows the URL that its clients use (public_endpoint)",
    harm="A client writes any Host, and links in cached or logged answers lead where it says.",
    source="keystone, [DEFAULT] public_endpoint; docs/render.md, other hosts",
)
def public_endpoint(found: Found) -> Iterator[Finding]:
    """Without it links are made of the request's Host. A web server that refuses other names
    (keyfront render --public-host) keeps them out as well."""
    conf = _conf(found)
    refuses = found.nginx is not None and any(
        x.args[:1] == ("421",) for x in found.nginx.all("return")
    )
    if not conf.last("default", "public_endpoint") and not refuses and not _local(found):
        yield Finding(
            what="public_endpoint is not set",
            where=(Place(conf.path),),
            lines=("[DEFAULT]", "public_endpoint = https://cloud.example.org:5000"),
        )


def _local(found: Found) -> bool:
    """Return whether everything that listens does so on this machine alone."""
    listens = [x.args[0] for x in found.nginx.all("listen") if x.args] if found.nginx else []
    listens += [x.args[0] for x in found.apache.all("listen") if x.args] if found.apache else []
    listens += [x.args[0] for x in (found.haproxy.all("bind") if found.haproxy else ()) if x.args]
    if not listens:
        listens = [
            x.value
            for conf in found.uwsgi
            for x in conf.settings.all("http-socket", "http", "https", "https-socket")
        ]
    return bool(listens) and all(re.match(r"(127\.|localhost|\[::1\]|unix:)", x) for x in listens)


@check(
    "K06",
    ERROR,
    "keystone",
    holds="Keystone tells clients nothing of its inside (insecure_debug)",
    harm="Answers say why a login failed, which helps whoever guesses accounts.",
    source="keystone, [DEFAULT] insecure_debug",
)
def insecure_debug(found: Found) -> Iterator[Finding]:
    """For developers only, as its help says."""
    conf = _conf(found)
    if conf.on("default", "insecure_debug"):
        yield Finding(
            what="insecure_debug = true",
            where=(conf.place("default", "insecure_debug"),),
            lines=("[DEFAULT]", "insecure_debug = false"),
        )


@check(
    "K07",
    WARNING,
    "keystone",
    holds="No library logs what it sends (DEBUG)",
    harm="Passwords, tokens and directory entries stand in the log, and the disk fills.",
    source="oslo.log, default_log_levels; python-ldap, trace_level",
)
def debug_logging(found: Found) -> Iterator[Finding]:
    """debug = true is loud and slow; default_log_levels that set HTTP and LDAP libraries to DEBUG,
    and [ldap] debug_level, write credentials."""
    conf = _conf(found)
    if conf.on("default", "debug"):
        yield Finding(
            what="debug = true",
            where=(conf.place("default", "debug"),),
            lines=("[DEFAULT]", "debug = false"),
        )
    levels = conf.last("default", "default_log_levels")
    match = _SECRET_LOGGERS.search(levels.value) if levels else None
    if levels is not None and match:
        yield Finding(
            what=f"default_log_levels has {match[0]}",
            where=(levels.place,),
            level=ERROR,
            lines=("[DEFAULT]", f"default_log_levels = (without {match[0]})"),
        )


@check(
    "K08",
    ERROR,
    "keystone",
    holds="There is no admin_token",
    harm="Whoever knows the word is administrator, without a user, and nothing is audited.",
    source="keystone, AdminTokenAuthMiddleware: deprecated in Mitaka; its default was ADMIN",
)
def admin_token(found: Found) -> Iterator[Finding]:
    """Bootstrap by keystone-manage bootstrap, and remove the line."""
    conf = _conf(found)
    known = conf.last("default", "admin_token")
    if known is not None:
        yield Finding(what="admin_token is set", where=(known.place,), lines=("# admin_token",))


@check(
    "K09",
    INFO,
    "keystone",
    holds="No file is there that Keystone stopped reading (keystone-paste.ini)",
    harm="None; but whoever changes it wonders why nothing happens.",
    source="keystone 14.0.0 (8bf335bb0); kolla still copies one",
)
def stale_paste(found: Found) -> Iterator[Finding]:
    """Keystone has no paste pipeline since Rocky. keyfront's is keystone.ini, named in
    KEYFRONT_APP."""
    for path in found.files.glob("/etc/keystone/keystone-paste.ini"):
        yield Finding(what=f"{path} is read by nobody", where=(Place(path),), lines=(f"rm {path}",))


@check(
    "K10",
    WARNING,
    "keystone",
    holds="Keystone keeps what it computed, in a cache",
    harm="Each validation of each service asks the database a dozen times.",
    source="oslo.cache: the default backend dogpile.cache.null keeps nothing; docs/tokens.md",
)
def caching(found: Found) -> Iterator[Finding]:
    """Either keyfront's token cache is in front (keyfront.gateway with its pipeline), or [cache]
    names a backend that keeps something."""
    conf = _conf(found)
    ours = any(key[0] == "keyfront_token_cache" for key in conf.settings)
    ours |= any(
        x.value.startswith("keyfront.") for one in found.uwsgi for x in one.settings.all("module")
    )
    backend = conf.text("cache", "backend", "dogpile.cache.null")
    if not ours and (not conf.on("cache", "enabled", True) or backend == "dogpile.cache.null"):
        yield Finding(
            what=f"backend = {backend} keeps nothing",
            where=(conf.place("cache", "backend"),),
            lines=(
                "[cache]",
                "enabled = true",
                "backend = oslo_cache.memcache_pool",
                "memcache_servers = 127.0.0.1:11211",
            ),
        )


@check(
    "K11",
    WARNING,
    "keystone",
    holds="A password's hash takes a fraction of a second",
    harm="Logins take seconds of a core each, and a few users occupy all of them.",
    source="keystone, [identity] password_hash_rounds, default 12: 0.2 s; each one more doubles it",
)
def hash_rounds(found: Found) -> Iterator[Finding]:
    """bcrypt's rounds are a power of two. The default is enough; 14 may be wanted, and is a note;
    below 10, as devstack has it for tests, a stolen table is guessed."""
    conf = _conf(found)
    known = conf.last("identity", "password_hash_rounds")
    algorithm = conf.text("identity", "password_hash_algorithm", "bcrypt")
    if known is None or known.number is None or not algorithm.startswith("bcrypt"):
        return
    if known.number > 13 or known.number < 10:
        yield Finding(
            what=f"password_hash_rounds = {known.number}",
            where=(known.place,),
            # Some are told to have 14; it costs four times the default.
            level=INFO if known.number == 14 else "",
            lines=("[identity]", "password_hash_rounds = 12"),
            harm=""
            if known.number > 13
            else "Whoever gets a copy of the database guesses its passwords quickly.",
        )


@check(
    "K12",
    WARNING,
    "keystone",
    "database",
    holds="keystone-manage and scripts tell the token cache of their changes",
    harm="What keystone-manage changed is seen when the cached answers end, up to ttl seconds "
    "later.",
    source="docs/tokens.md: plugin=keyfront in the URL",
)
def manage_is_heard(found: Found) -> Iterator[Finding]:
    """Keystone under keyfront hears its own changes. Another process on the database is heard if
    its URL says plugin=keyfront."""
    conf = _conf(found)
    known = conf.last("database", "connection")
    ours = any(
        x.value.startswith("keyfront.") for one in found.uwsgi for x in one.settings.all("module")
    )
    if known is not None and ours and "plugin=keyfront" not in known.value:
        joiner = "&" if "?" in known.value else "?"
        yield Finding(
            what="the database's URL has no plugin=keyfront",
            where=(known.place,),
            level=INFO,
            lines=("[database]", f"connection = (as it is){joiner}plugin=keyfront"),
        )


@check(
    "K13",
    ERROR,
    "node",
    holds="All nodes have the same keys",
    harm="Every second request is refused: tokens of one node are unknown to the other.",
    source="Keystone, fernet token FAQ: distribute keys to all nodes",
)
def same_keys(found: Found) -> Iterator[Finding]:
    """keyfront doctor --json has the beginnings of the keys' SHA-256; --compare FILE takes what it
    said on another node. Keys are never printed."""
    assert found.other_node is not None
    theirs = found.other_node.get("node", {}).get("keys", {})
    if not any(x.digests and theirs.get(x.kind) for x in found.keys):
        raise UnknownError("both nodes' keys: here or there they were not to be read")
    for repository in found.keys:
        other = theirs.get(repository.kind)
        if other and repository.digests and other != repository.digests:
            only = len(set(other) - set(repository.digests))
            yield Finding(
                what=f"{repository.path} differs: {only} keys of the other node are not here",
                where=(Place(repository.path),),
                lines=(f"rsync -a --delete {repository.path}/ NODE:{repository.path}/",),
            )


@check(
    "K14",
    WARNING,
    "node",
    holds="All nodes are configured alike, and their clocks agree",
    harm="Users get other answers from one node than from the other, and nobody knows why.",
    source="docs/cluster.md",
)
def same_configuration(found: Found) -> Iterator[Finding]:
    """Versions, workers and the settings that tokens depend on. With --live on both nodes also
    their clocks: each is compared with the same database's, memcached's or Keystone's."""
    assert found.other_node is not None
    theirs, ours = found.other_node.get("node", {}), node_part(found)
    for name in ("versions", "workers", "settings"):
        if name in theirs and theirs[name] != ours[name]:
            said = "; ".join(
                f"{key} {ours[name].get(key)} here, {theirs[name].get(key)} there"
                for key in sorted({*ours[name], *theirs[name]})
                if ours[name].get(key) != theirs[name].get(key)
            )
            yield Finding(what=f"{name} differ: {said}")
    here = found.live.clocks if found.live else {}
    there = theirs.get("clocks", {})
    shared = [name for name in here if name in there]
    if shared:
        name = max(shared, key=lambda name: abs(here[name] - there[name]))
        apart = here[name] - there[name]
        if abs(apart) > CLOCKS_APART:
            yield Finding(
                what=f"this clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} "
                f"the other node's, as compared with {name}",
                lines=("chronyc makestep",),
                level=ERROR,
                harm="Tokens of one node are refused by the other as not yet valid, or too early "
                "as expired.",
            )


#: Seconds by which clocks may differ: a second is what Date and TIME tell.
CLOCKS_APART = 2


_SAME = (
    ("token", "expiration"),
    ("token", "provider"),
    ("token", "allow_expired_window"),
    ("fernet_tokens", "max_active_keys"),
    ("auth", "methods"),
    ("identity", "driver"),
    ("default", "public_endpoint"),
    ("cache", "backend"),
    ("cache", "memcache_servers"),
)


def node_part(found: Found) -> dict[str, dict[str, object]]:
    """Return the facts that are compared between nodes, without secrets."""
    conf = found.keystone
    try:
        processes, threads = found.workers
    except LookupError:
        processes = threads = 0
    return {
        "keys": {x.kind: x.digests for x in found.keys},
        "versions": {x: ".".join(map(str, y)) for x, y in sorted(found.versions.items())},
        "workers": {"processes": processes, "threads": threads},
        "clocks": {x: round(y, 3) for x, y in found.live.clocks.items()} if found.live else {},
        "settings": {
            f"[{section}] {name}": shown(conf.text(section, name))
            for section, name in _SAME
            if conf is not None and conf.last(section, name)
        },
    }


@check(
    "M01",
    ERROR,
    "memcached",
    holds="memcached is reached by this cloud's nodes only",
    harm="Whoever reaches it reads and writes what Keystone believes: roles, projects, tokens.",
    source="memcached(1), -l; no authentication without SASL",
)
def memcached_open(found: Found) -> Iterator[Finding]:
    """-l names the addresses that it listens at; all of them where the line is missing."""
    if found.memcached is None:
        raise UnknownError("memcached's own configuration: it is on another machine, or not found")
    text = " ".join(f"{x.name} {x.value}" for x in found.memcached.settings)
    match = re.search(r"-l[ =]?\s*([\w.:,\[\]]+)", text)
    address = match[1] if match else "0.0.0.0"
    if any(x in ("0.0.0.0", "::", "[::]", "*") for x in address.split(",")):
        known = found.memcached.last("-l")
        yield Finding(
            what=f"memcached listens at {address}",
            where=(known.place if known else Place(found.memcached.path),),
            lines=("-l 127.0.0.1",),
        )


@check(
    "M02",
    WARNING,
    "files",
    holds="The dashboard's sessions outlive memcached",
    harm="A restart of memcached logs out every user of the dashboard.",
    source="Django, SESSION_ENGINE; horizon's guide takes cache with memcached",
)
def sessions(found: Found) -> Iterator[Finding]:
    """signed_cookies, cached_db or db keep them; cache alone does not."""
    paths = found.files.glob(*_DASHBOARD)
    if not paths:
        raise UnknownError("the dashboard's local_settings: it is on another machine, or not found")
    for path in paths:
        text = found.files.text(path, wanted=False) or ""
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(
                r"\s*SESSION_ENGINE\s*=\s*['\"]django\.contrib\.sessions\.backends\.cache['\"]",
                line,
            ):
                yield Finding(
                    what="SESSION_ENGINE keeps sessions in the cache alone",
                    where=(Place(path, number),),
                    lines=("SESSION_ENGINE = 'django.contrib.sessions.backends.cached_db'",),
                )


@check(
    "M03",
    WARNING,
    "keystone",
    "memcached",
    holds="A dead memcached is noticed in fractions of a second",
    harm="While one of several memcached servers is away, every request waits for it.",
    source="oslo.cache: memcache_socket_timeout 1.0, memcache_dead_retry 300",
)
def dead_memcached(found: Found) -> Iterator[Finding]:
    """Each worker waits the whole timeout before it takes a server for dead, and again each
    memcache_dead_retry seconds."""
    conf = _conf(found)
    known = conf.last("cache", "memcache_socket_timeout")
    if found.uses_memcached and known is not None:
        try:
            value = float(known.value)
        except ValueError:
            return
        if value > 2:
            yield Finding(
                what=f"memcache_socket_timeout = {known.value}",
                where=(known.place,),
                lines=("[cache]", "memcache_socket_timeout = 1.0"),
            )


@check(
    "M04",
    ERROR,
    "redis",
    holds="Redis is reached by this cloud's nodes only, and forgets nothing by itself",
    harm="Whoever reaches it writes what the token cache believes; an evicted epoch shows the "
    "past.",
    source="docs/cluster.md; redis.conf: protected-mode, maxmemory-policy",
)
def redis_open(found: Found) -> Iterator[Finding]:
    """bind to the cloud's own network and requirepass or ACLs; maxmemory-policy noeviction, as
    epochs are no cache."""
    assert found.redis is not None
    bind, password = found.redis.last("bind"), found.redis.last("requirepass", "user", "aclfile")
    protected = found.redis.last("protected-mode")
    opened = bind is not None and any(
        x.lstrip("-") in ("0.0.0.0", "*", "::") for x in bind.value.split()
    )
    if bind is not None and opened and password is None and protected and protected.value == "no":
        yield Finding(
            what=f"bind {bind.value} without a password",
            where=(bind.place,),
            lines=("bind 127.0.0.1 -::1", "protected-mode yes"),
        )
    policy = found.redis.last("maxmemory-policy")
    if policy is not None and policy.value != "noeviction" and found.redis.last("maxmemory"):
        yield Finding(
            what=f"maxmemory-policy {policy.value}",
            where=(policy.place,),
            level=WARNING,
            lines=("maxmemory-policy noeviction",),
        )
