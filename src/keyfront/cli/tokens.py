"""``keyfront tokens``: what the token cache of this machine did, emptying it, and who hears of it.

``stats`` prints counts, ``flush`` makes every answer stale, ``prune`` removes what services that
run no more have left. ``check`` finds out whether a change is heard by whoever answers for this
Keystone. Nothing of the cloud is changed for that but tokens of its own: each node, and another
process as ``keystone-manage`` is one, revokes one that all nodes have answered for, and is heard
where it is refused from then on. A tag that no row has tells who goes by which epoch table.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from keyfront.common import json_text
from keyfront.errors import (
    CoordinatorError,
    KeyfrontError,
    MissingPartError,
    OptionError,
    ServerError,
)

from .credentials import login_of_environment, refused, tls_of_environment
from .parser import add_state_argument

if TYPE_CHECKING:
    from keyfront.middleware.tokens.coordinator.local import SharedMemory
    from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis

#: The counts that are printed, in this order: name, label, meaning.
_LINES = (
    ("hits", "hits", "answered from a worker's own memory"),
    ("node_hits", "node hits", "answered from what the workers share"),
    ("known", "known", "first validations, as token and caller were known"),
    ("issued", "issued", "tokens that are known from their issue"),
    ("misses", "misses", "asked of Keystone"),
    ("waits", "waits", "waited for another request that asked the same"),
    ("not_kept", "not kept", "misses whose answer was not kept"),
    ("not_followed", "not followed", "of these, for a directory that nobody follows"),
    ("directory_changes", "directories", "changes that followed directories told of"),
    ("bypassed", "bypassed", "not to be answered from a cache"),
    ("changes", "changes", "committed changes that made answers stale"),
    ("changes_under_way", "under way", "changes being committed now"),
    ("changes_recovered", "recovered", "changes completed for writers that died"),
    ("changes_refused", "refused", "changes not committed, as others could not be told"),
    ("flushes", "flushes", "keyfront tokens flush"),
    ("processes", "processes", "that share it, the master included"),
)

# What the causes mean that are no families of tables.
_CAUSES = {
    "time": "ttl, the token's end, or a directory not followed",
    "all": "a flush, or a change that can be of anything",
    "rows": "a change of a user, project, role or token in them",
    "revocations": "a revocation of tokens of no one user",
    "grants:group": "a grant to a group",
}

# What the reasons mean for which Keystone was asked without a look.
_REASONS = {
    "request": "a body, a caller without a token, a header unknown",
    "variants": "more ways than are kept of one caller",
    "coordinator": "the epochs could not be read",
}

_STATE = "a Keystone of keyfront serve: its state folder"

# What lies in a cache's folder.
_FILES = re.compile(
    r"(epochs|answers|refusals|subjects|listings|values)-[\w.-]+|counters|(node-)?lock|followed(\.lock)?|follower\.\d"
)

# Ends the name of a folder that is named after its database.
_DIGEST = "[0-9a-f]" * 16

# A Keystone is reached by one worker a connection.
_CONNECTIONS = 8
_SECONDS = 10.0
_PROCESS_SECONDS = 120.0
# In which a table that was just made is in use.
_SETTLE_SECONDS = 5.0

# As keystone-manage does: an engine by the URL of the configuration, and its commit's announcement;
# then a change of the database by Keystone's own driver.
_ANOTHER_PROCESS = """
import gc
import sys
gc.disable()  # what is imported stays, and little is made besides
import keystone.conf
import sqlalchemy
from keystone.common import sql
keystone.conf.configure()
sql.initialize()
keystone.conf.CONF([], project="keystone", default_config_files=[sys.argv[1]])
from keystone.models.revoke_model import RevokeEvent
from keystone.revoke.backends.sql import Revoke
print("ready", flush=True)
audit = sys.stdin.readline().strip()
engine = sqlalchemy.create_engine(keystone.conf.CONF.database.connection)
changes = getattr(engine.dialect.do_commit, "keyfront", None)
if changes is None:
    print("plugin")
else:
    mark = changes.begin([sys.argv[2]])
    changes.end(mark, [sys.argv[2]])
    print("nobody" if mark is None else "told", changes.folder)
if audit:
    Revoke().revoke(RevokeEvent(audit_id=audit))
    print("revoked")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    parser.description = "Look at the token cache of this machine, or empty it."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("stats", "print what the cache did since the service started on this machine"),
        ("flush", "make every cached answer stale, after a change that no transaction shows"),
        ("prune", "remove the caches of this machine that no process uses any more"),
    ):
        part = actions.add_parser(action, help=text, description=f"{text.capitalize()}.")
        where = part.add_mutually_exclusive_group()
        where.add_argument(
            "--config-file",
            type=Path,
            metavar="FILE",
            help="the Keystone's keystone.conf (default: the one cache there is)",
        )
        where.add_argument(
            "--path", type=Path, metavar="DIR", help="the folder of the cache, as the option path"
        )
        add_state_argument(where, _STATE)
        if action == "stats":
            part.add_argument("--json", action="store_true", help="for programs")
    text = "find out whether changes are heard by the nodes, and those of keystone-manage by them"
    part = actions.add_parser(
        "check",
        help=text,
        description=f"{text.capitalize()}: each revokes a token that was issued for it. Nothing "
        "else of the cloud is changed. Who asks the nodes is said by OS_USERNAME, OS_PASSWORD and "
        "OS_PROJECT_NAME; any user will do. Ends with 1 if one does not hear.",
    )
    where = part.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--config-file", type=Path, metavar="FILE", help="the Keystone's keystone.conf"
    )
    add_state_argument(where, _STATE)
    part.add_argument(
        "--keystone",
        action="append",
        default=[],
        metavar="URL",
        help="a node, http://HOST:PORT/v3; may be given for each",
    )
    part.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Run the action that was asked for; returns its exit status.

    :raises KeyfrontError: see :func:`stats`, :func:`flush`, :func:`prune` and :func:`check`
    """
    config_file = arguments.config_file
    if arguments.state is not None:
        config_file = configuration(arguments.state)
    if arguments.action == "check":
        return check(config_file, arguments.keystone, out, as_json=arguments.json)
    if arguments.action == "prune":
        return prune(arguments.path, config_file, out)
    found = cache(path=arguments.path, config_file=config_file, err=err)
    if arguments.action == "flush":
        return flush(found, out)
    return stats(found, out, as_json=arguments.json)


def configuration(state: Path) -> Path:
    """Return the keystone.conf in the state folder of a ``keyfront serve``.

    :raises OptionError: it is no such folder
    """
    from keyfront.gateway.serve.state import State

    config = State(state).config
    if not config.is_file():
        raise OptionError("--state", state, "the state folder of a keyfront serve")
    return config


class Cache(NamedTuple):
    """A token cache of this machine."""

    folder: Path
    #: The server that keeps its epochs, if they are not in the folder.
    redis: Redis | None = None
    #: The users of whom one must have made the folder, if it was named by nobody.
    trusted: set[int] | None = None

    @property
    def where(self) -> str:
        """Return the words that name it to the operator."""
        return f"{self.folder}, epochs in {self.redis.address}" if self.redis else f"{self.folder}"

    @property
    def coordinator(self) -> SharedMemory | Redis:
        """Return the coordinator that keeps its epochs.

        :raises CoordinatorError: there are none
        """
        if self.redis is not None:
            return self.redis
        from keyfront.middleware.tokens.coordinator.local import NAME, SharedMemory

        if not (self.folder / NAME).exists():
            raise CoordinatorError(
                f"{self.folder}: there is no token cache; is the service running?"
            )
        return SharedMemory(
            self.folder, create=False, trusted=self.trusted, settled=_settles_nothing
        )


def _settles_nothing(owner: str, age: float) -> bool:
    """Say of no mark that its commit is over: that is for who can ask the database."""
    return False


def cache(
    *,
    path: Path | None,
    config_file: Path | None,
    err: TextIO | None = None,
    option: str = "--path",
) -> Cache:
    """Return the cache of this machine that the options name; without any, the one in use.

    :param path: the folder itself
    :param config_file: Keystone's configuration, which says where it is
    :param err: told of caches that are left out, since no process uses them
    :param option: the option by which the command that was given takes a path
    :raises CoordinatorError: there is none, or several; or the configuration cannot be read
    """
    if path is not None:
        return Cache(path)
    if config_file is not None:
        return _configured(config_file)
    found = caches()
    if len(found) == 1:
        return found[0]
    if not found:
        from keyfront.middleware.tokens.folder import PLACE

        raise CoordinatorError(
            f"no token cache in {PLACE}, /dev/shm or /tmp, and none of keyfront serve; is the "
            f"service running? If its option path names another folder, give it with {option} "
            "or --config-file"
        )
    dead = [one for one in found if _is_dead(one.folder)]
    used = [one for one in found if one not in dead]
    if len(used) == 1:
        if err is not None:
            verb = "is" if len(dead) == 1 else "are"
            err.write(f"keyfront: {_some(dead)} {verb} left out: {_dead(len(dead))}\n")
        return used[0]
    if not used:
        raise CoordinatorError(f"{_some(dead)}: {_dead(len(dead))}, or start the service")
    raise CoordinatorError(
        f"there are several token caches in use on this machine: {_some(used)}; say which with "
        f"{option}, or with --config-file FILE, its Keystone's keystone.conf"
    )


# Caches that a line names; leftovers of tests may be many.
_NAMED = 3


def _some(caches: Sequence[Cache]) -> str:
    """Return the words for caches in a line: some by their folder, and how many more there are."""
    names = sorted(str(one.folder) for one in caches)
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _dead(number: int) -> str:
    it = "it" if number == 1 else "them"
    return f"no process uses {it} any more; remove {it} with keyfront tokens prune"


def caches() -> list[Cache]:
    """Return the caches of this machine."""
    from keyfront.middleware.tokens.folder import BASES, PLACE

    places = [f"{PLACE}/tokens-", *(f"{base}/keyfront-" for base in BASES)]
    ends = (_DIGEST, f"{_DIGEST}-[0-9]*")  # where somebody else had the name first
    names = [name for place in places for end in ends for name in glob.glob(f"{place}{end}")]
    found = [Cache(Path(name)) for name in names if _is_cache(Path(name))]
    served = _served()
    if served is not None and served.folder not in [one.folder for one in found]:
        found.append(served)
    return found


def _is_dead(folder: Path) -> bool:
    """Return whether no process uses a folder; ``False`` also if this user may not know."""
    from keyfront.middleware.tokens.node_cache import users

    try:
        return not users(folder)
    except (CoordinatorError, OSError):
        return False


def _served() -> Cache | None:
    """Return the cache of ``keyfront serve`` in its usual state folder, if there is one."""
    from keyfront.gateway.serve.state import State, default_path

    try:
        config = State(default_path()).config
        served = _configured(config) if config.is_file() else None
    except (KeyfrontError, OSError):
        return None  # no home, or another user's: then there is none of this user
    return served if served is not None and served.folder.is_dir() else None


def _is_cache(folder: Path) -> bool:
    """Return whether a folder is a token cache's, and not that of another part of keyfront.

    One that another user's rights hide is taken for a cache's unless its name says otherwise.
    """
    from keyfront.middleware.tokens.coordinator.local import NAME

    try:
        return stat.S_ISREG((folder / NAME).stat().st_mode)
    except PermissionError:
        from keyfront.gateway.heartbeat.counters import PREFIX

        return not folder.name.startswith(PREFIX)
    except OSError:
        return False


def _configured(config_file: Path) -> Cache:
    if not config_file.is_file():
        raise OptionError("--config-file", config_file, "a keystone.conf that exists")
    try:
        from oslo_config import cfg
        from oslo_db import options as database
        from sqlalchemy.engine import make_url
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"{error.name} is not installed; run keyfront from the environment of Keystone"
        ) from None

    from keyfront.middleware.tokens import options
    from keyfront.middleware.tokens.coordinator.factory import coordinator_of
    from keyfront.middleware.tokens.folder import folder_of, trusted_users

    conf = cfg.ConfigOpts()
    database.set_defaults(conf)
    try:
        conf([], project="keystone", default_config_files=[str(config_file)])
        redis = coordinator_of(options.token_cache(conf), True)
        if redis is not None:
            redis.settled = _settles_nothing
        # As Keystone has it: by their owner root tells the service's folder from a stranger's.
        keys = cfg.StrOpt("key_repository", default="/etc/keystone/fernet-keys/")
        conf.register_opt(keys, "fernet_tokens")
        folder = folder_of(conf)
        url = conf.database.connection
        trusted = trusted_users(make_url(url), folder, conf) if url else None
        return Cache(folder, redis, trusted)
    except cfg.ConfigFilesPermissionDeniedError:
        raise CoordinatorError(f"{config_file}: Permission denied") from None
    except cfg.Error as error:
        raise CoordinatorError(f"{config_file}: {error}") from None


def stats(cache: Cache, out: TextIO, *, as_json: bool = False) -> int:
    """Print what the cache did; returns 0.

    :param as_json: for programs: an object with ``folder``, ``coordinator`` (if the epochs are not
        in the folder) and each count by name

    :raises CoordinatorError: there is no cache in the folder
    """
    from keyfront.middleware.tokens import node_cache as node
    from keyfront.middleware.tokens.counters import CAUSES

    counts = {**cache.coordinator.statistics(), **node.statistics(cache.folder)}
    if as_json:
        where = {"folder": str(cache.folder)}
        if cache.redis is not None:
            where["coordinator"] = str(cache.redis.address)
        out.write(json.dumps({**where, **counts}, indent=2) + "\n")
        return 0
    dead = f" ({_dead(1)})" if _is_dead(cache.folder) else ""
    out.write(f"token cache in {cache.where}{dead}\n")
    for name, label, meaning in _LINES:
        out.write(f"{label:<12}{counts[name]:>14}  {meaning}\n")
    for kind in ("answers", "refusals"):
        taken, limit = counts[f"{kind}_bytes"] / 2**20, counts[f"{kind}_bytes_limit"] / 2**20
        out.write(f"{kind:<12}{taken:>10.1f} MiB  of {limit:.0f} MiB that the workers share\n")
    hits = counts["hits"] + counts["node_hits"] + counts["known"]
    asked = hits + counts["misses"]
    if asked:
        out.write(f"{'hit ratio':<12}{100 * hits / asked:>12.2f} %  of what may be cached\n")
    meanings = {cause: _CAUSES.get(cause, f"any change of {cause}") for cause in CAUSES}
    for prefix, title, texts in (
        ("bypassed", "Bypassed, by the reason", _REASONS),
        ("ended", "Answers that were asked of Keystone again, by what had ended them", meanings),
    ):
        found = {name: counts[f"{prefix}_{name}"] for name in texts}
        if any(found.values()):
            out.write(f"\n{title}:\n")
        for name in sorted(filter(found.get, found), key=found.__getitem__, reverse=True):
            out.write(f"{name:<12}{found[name]:>14}  {texts[name]}\n")
    return 0


def flush(cache: Cache, out: TextIO) -> int:
    """Make every answer stale; returns 0.

    :raises CoordinatorError: there is no cache in the folder
    """
    cache.coordinator.flush()
    out.write(f"flushed {cache.where}: every answer is now asked of Keystone anew\n")
    return 0


def prune(path: Path | None, config_file: Path | None, out: TextIO) -> int:
    """Remove the caches of this machine that no process uses, or the named one; returns 0.

    A service that starts meanwhile makes its files anew.

    :param path: the folder of one cache
    :param config_file: the configuration of its Keystone, instead
    :raises CoordinatorError: the named one is none, or is in use; or one cannot be removed
    """
    named = path is not None or config_file is not None
    found = [cache(path=path, config_file=config_file)] if named else caches()
    dead = [one.folder for one in found if _is_dead(one.folder)]
    for folder in (one.folder for one in found if named and one.folder not in dead):
        raise CoordinatorError(f"{folder}: is in use, or is another user's; nothing is removed")
    for folder in dead:
        if not _is_cache(folder):
            raise CoordinatorError(f"{folder}: there is no token cache")
        freed = 0
        try:
            for file in folder.iterdir():
                if _FILES.fullmatch(file.name):
                    freed += file.lstat().st_blocks * 512
                    file.unlink()
            # Whatever else somebody has put there stays.
            with suppress(OSError):
                folder.rmdir()
        except OSError as error:
            raise CoordinatorError(f"{folder}: cannot be removed: {error.strerror}") from None
        out.write(f"removed {folder}: {freed / 2**20:.1f} MiB\n")
    if not dead:
        out.write(f"no cache is dead; {len(found)} in use\n")
    return 0


class Finding(NamedTuple):
    """The finding about a process that makes changes or answers: whether it hears of changes."""

    who: str
    #: The fault and its remedy; empty if it hears of changes.
    fault: str


class Node(NamedTuple):
    """A node that lets the user of ``OS_USERNAME`` in."""

    url: str
    #: His token there.
    token: str


def check(
    config_file: Path, urls: list[str], out: TextIO, *, as_json: bool = False
) -> int:
    """Print who hears of changes and who does not; returns 1 if somebody does not, otherwise 0.

    :param config_file: Keystone's configuration, as its workers have it
    :param urls: the nodes' URLs, ``http://HOST:PORT/v3``; each is asked over several connections
    :raises CoordinatorError: there is no cache, or it cannot be reached
    :raises OptionError: a URL cannot be used, or the environment does not say who asks
    """
    found = cache(path=None, config_file=config_file)
    coordinator = found.coordinator
    lease = 0.0 if found.redis is None else found.redis.lease
    who = login_of_environment() if urls else {}
    nodes, faults = [], {}
    for url in urls:
        try:
            nodes.append(Node(url, _issued(url, who)[0]))
        except ServerError as error:
            faults[url] = [str(error)]
    for node in nodes:
        faults[node.url] = list(filter(None, [_epochs(node, coordinator)]))
    process = _another_process(config_file, coordinator, nodes, who, lease)
    for node in nodes:
        for deaf, why in _heard_of(node, nodes, who, lease).items():
            faults[deaf].append(why)
    for node in nodes:
        with suppress(ServerError):  # of no use to anybody any more
            _revoke(node, node.token)
    findings = [process, *(Finding(url, "; ".join(faults[url])) for url in urls)]
    if as_json:
        heard = [{"who": one.who, "heard": not one.fault, "fault": one.fault} for one in findings]
        out.write(json.dumps({"cache": found.where, "findings": heard}, indent=2) + "\n")
    else:
        out.write(f"token cache in {found.where}\n")
        for one in findings:
            out.write(f"{'not heard' if one.fault else 'heard':<10} {one.who}\n")
            if one.fault:
                out.write(textwrap.indent(textwrap.fill(one.fault, 68), " " * 11) + "\n")
        if not urls:
            out.write("not asked  the nodes: give --keystone URL for each\n")
    return 1 if any(one.fault for one in findings) else 0


def _tag() -> str:
    """Return a tag that no row has."""
    from keyfront.middleware.tokens.invalidation.rules import tag

    return tag("user", f"check-{secrets.token_hex(8)}")


def _touched(coordinator: Any) -> Any:
    """Touch a tag that no row has; returns the epoch from which on that is known."""
    from keyfront.middleware.tokens.epochs import slots

    coordinator.touch(slots([_tag()], coordinator.slot_count))
    return coordinator.now()


def _another_process(
    config_file: Path, coordinator: Any, nodes: list[Node], who: dict[str, Any], lease: float
) -> Finding:
    """Make changes by another process, which has the URL of the configuration; return a finding."""
    from keyfront.middleware.tokens.epochs import slots

    said_who = "keystone-manage, by the URL of [database] connection"
    name = _tag()
    command = [sys.executable, "-c", _ANOTHER_PROCESS, str(config_file), name]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        limit = threading.Timer(_PROCESS_SECONDS, process.kill)
        limit.start()
        try:
            # First: what the nodes know of a token would end by itself while it loads Keystone.
            for line in process.stdout or ():
                if line == "ready\n":
                    break
            token, audit, deaf = "", "", {}
            if nodes:
                try:
                    token, audit = _issued(nodes[0].url, who)
                    deaf = _strange(token, nodes[0].url, nodes)
                except ServerError as error:
                    return Finding(said_who, f"{nodes[0].url}: {error}")
            before, touched = coordinator.now(), slots([name], coordinator.slot_count)
            said = process.communicate(f"{audit}\n")[0].split()
        finally:
            process.kill()
            limit.cancel()
        errors.seek(0)
        told = errors.read()
    if process.returncode == -signal.SIGKILL:
        return Finding(said_who, f"such a process did not end within {_PROCESS_SECONDS:.0f} s")
    if process.returncode:
        # The last line names the error; a URL with its password is in none of ours.
        kind = told.strip().rpartition("\n")[2].partition(":")[0]
        return Finding(
            said_who, f"such a process fails: {kind}; run this where keystone-manage runs"
        )
    if said[:1] == ["plugin"]:
        return Finding(said_who, "write ?plugin=keyfront behind the URL, or it is seen after ttl")
    # A lease may have it that nothing has changed yet.
    if said[:1] == ["nobody"] or coordinator.fresh_now(before, touched):
        where = said[1] if len(said) > 1 else "?"
        return Finding(
            said_who, f"it looks for the cache in {where}; set path to the workers' folder"
        )
    heard = [node for node in nodes if node.url not in deaf]
    unheard = _going_on(token, heard, lease)
    if unheard:
        return Finding(said_who, f"a token that it revoked is still good at {', '.join(unheard)}")
    return Finding(said_who, "")


def _epochs(node: Node, coordinator: Any) -> str:
    """Return the reason why a node does not go by this one's epoch table; empty if it does."""
    from keyfront.middleware.tokens import tags_header

    try:
        touched = _touched(coordinator)
        deadline = time.monotonic() + _SETTLE_SECONDS
        for _ in range(_CONNECTIONS):
            while True:
                status, given = _asked(node)
                if status != 200:
                    return f"it answers a validation with {status}"
                value = given.get(tags_header.NAME)
                if value is None:
                    return (
                        f"it has no token_cache, or a proxy takes the header {tags_header.NAME} "
                        "away"
                    )
                told = tags_header.parse(value)
                if told is not None:
                    break
                # While a table is new, or a change under way, nothing is kept.
                if time.monotonic() > deadline:
                    return "its token_cache keeps nothing of this answer: its log says why"
                time.sleep(0.1)
            if told.epoch.generation != touched.generation:
                return (
                    "it goes by another epoch table: give it the same coordinator, or the same "
                    "path and database"
                )
            if told.epoch.sequence < touched.sequence:
                return "it has not heard of a change that was complete before it was asked"
    except ServerError as error:
        return str(error)
    return ""


def _asked(node: Node) -> tuple[int, dict[str, str]]:
    """Return a node's answer about its token, with the headers that tell how long it stands."""
    from keyfront.middleware.tokens import tags_header

    headers = {
        "X-Auth-Token": node.token,
        "X-Subject-Token": node.token,
        tags_header.NAME: tags_header.ASK,
        # which no answer from before was made for
        "X-Keyfront-Check": secrets.token_hex(8),
    }
    status, given, _ = _answer(node.url, "GET", headers, None)
    return status, given


def _heard_of(
    maker: Node, nodes: list[Node], who: dict[str, Any], lease: float
) -> dict[str, str]:
    """Make a change on a node; return the reasons why others do not hear of it, by their URLs."""
    try:
        token, _ = _issued(maker.url, who)
        deaf = _strange(token, maker.url, nodes)
        _revoke(maker, token)
        heard = [node for node in nodes if node.url not in deaf]
        for url in _going_on(token, heard, lease):
            deaf[url] = f"it does not hear of {_of(maker.url, url)}: a token that was revoked " + (
                "there is still good here"
            )
    except ServerError as error:
        return {maker.url: str(error)}
    return deaf


def _of(maker: str, url: str) -> str:
    return "changes of its own other workers" if maker == url else f"changes made at {maker}"


def _strange(token: str, issuer: str, nodes: list[Node]) -> dict[str, str]:
    """Validate a token by all workers of all nodes; return the reasons of refusals, by URL."""
    found = {}
    for node in nodes:
        for _ in range(_CONNECTIONS):
            status = _validated(node, token)
            if status != 200:
                found[node.url] = (
                    f"it answers {status} for a token of {issuer}: look that both have the same "
                    "database and fernet keys"
                )
                break
    return found


def _going_on(token: str, nodes: list[Node], lease: float) -> list[str]:
    """Return the URLs of the nodes at which a token is good that was revoked."""
    if lease:
        time.sleep(lease)
    return [
        node.url
        for node in nodes
        if 200 in {_validated(node, token) for _ in range(_CONNECTIONS)}
    ]


def _issued(url: str, who: dict[str, Any]) -> tuple[str, str]:
    """Return a new token of a node, and what its revocation names.

    :raises ServerError: there is none
    """
    _, headers, body = _answer(url, "POST", {}, {"auth": who})
    token = headers.get("X-Subject-Token", "")
    try:
        audit: str = json_text.parse(body)["token"]["audit_ids"][0]
    except (ValueError, LookupError, TypeError):
        token = ""
    if not token:
        raise ServerError("it gives no token to the user of OS_USERNAME")
    return token, audit


def _validated(node: Node, token: str) -> int:
    headers = {"X-Auth-Token": node.token, "X-Subject-Token": token}
    return _answer(node.url, "GET", headers, None)[0]


def _revoke(node: Node, token: str) -> None:
    headers = {"X-Auth-Token": node.token, "X-Subject-Token": token}
    status = _answer(node.url, "DELETE", headers, None)[0]
    if status != 204:
        raise ServerError(f"it answers the revocation of a token with {status}")


def _answer(
    url: str, method: str, headers: dict[str, str], body: object
) -> tuple[int, dict[str, str], bytes]:
    """Send a request to a node's ``/auth/tokens``; returns status, headers and body."""
    import ssl
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urlsplit(url)
    connection: HTTPConnection
    try:
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        if parts.scheme == "http":
            connection = HTTPConnection(parts.hostname, parts.port, timeout=_SECONDS)
        else:
            connection = HTTPSConnection(
                parts.hostname, parts.port, timeout=_SECONDS, context=tls_of_environment()
            )
    except ValueError:
        raise OptionError("--keystone", url, "http://HOST:PORT/v3 or https://…") from None
    path = parts.path.rstrip("/") or "/v3"
    data = None if body is None else json.dumps(body)
    sent = {**headers, "Content-Type": "application/json"} if data else headers
    try:
        connection.request(method, f"{path}/auth/tokens", data, sent)
        answer = connection.getresponse()
        content = answer.read()
    except ssl.SSLCertVerificationError as error:
        raise ServerError(refused(error, "--keystone")) from None
    except (OSError, HTTPException) as error:
        raise ServerError(f"it does not answer: {type(error).__name__}") from None
    finally:
        connection.close()
    return answer.status, dict(answer.getheaders()), content
