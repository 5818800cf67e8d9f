"""``keyfront tokens check``: whether a change is heard by whoever answers for this Keystone.

Nothing of the cloud is changed: what is touched is a tag that no row has. So whoever goes by the
same epochs shows it, and loses no answer for it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import textwrap
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from keyfront.cli import tokens as token_commands
from keyfront.errors import OptionError, ServerError

# A Keystone is reached by one worker a connection.
_CONNECTIONS = 8
_SECONDS = 10.0
_PROCESS_SECONDS = 60.0

# As keystone-manage does: an engine by the URL of the configuration, and its commit's announcement.
_ANOTHER_PROCESS = """
import sys
import keystone.conf
import sqlalchemy
from keystone.common import sql
keystone.conf.configure()
sql.initialize()
keystone.conf.CONF([], project="keystone", default_config_files=[sys.argv[1]])
engine = sqlalchemy.create_engine(keystone.conf.CONF.database.connection)
changes = getattr(engine.dialect.do_commit, "keyfront", None)
if changes is None:
    print("plugin")
else:
    mark = changes.begin([sys.argv[2]])
    changes.end(mark, [sys.argv[2]])
    print("nobody" if mark is None else "told", changes.folder)
"""


class Finding(NamedTuple):
    """What was found of one who changes something, or answers."""

    who: str
    #: What is wrong, and what to do; empty: nothing.
    fault: str


def check(
    config_file: Path, urls: list[str], out: TextIO, *, as_json: bool = False
) -> int:
    """Print who hears of changes and who does not; 1 if somebody does not.

    :param config_file: Keystone's configuration, as its workers have it
    :param urls: of the nodes, ``http://HOST:PORT/v3``; each is asked over several connections
    :raises CoordinatorError: there is no cache, or it cannot be reached
    :raises OptionError: a URL is none, or the environment says not who is to ask
    """
    cache = token_commands.cache(path=None, config_file=config_file)
    coordinator = cache.coordinator
    who = _credentials() if urls else {}
    findings = [_another_process(config_file, coordinator)]
    for url in urls:
        findings.append(Finding(url, _node(url, coordinator, who)))
    if as_json:
        found = [{"who": one.who, "heard": not one.fault, "fault": one.fault} for one in findings]
        out.write(json.dumps({"cache": cache.where, "findings": found}, indent=2) + "\n")
    else:
        out.write(f"token cache in {cache.where}\n")
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
    """Touch a tag of no row; returns the epoch from which on that is known."""
    from keyfront.middleware.tokens.epochs import slots

    coordinator.touch(slots([_tag()], coordinator.slot_count))
    return coordinator.now()


def _another_process(config_file: Path, coordinator: Any) -> Finding:
    """Have another process tell of a change by the URL of the configuration."""
    from keyfront.middleware.tokens.epochs import slots

    who = "keystone-manage, by the URL of [database] connection"
    name = _tag()
    before, touched = coordinator.now(), slots([name], coordinator.slot_count)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ANOTHER_PROCESS, str(config_file), name],
            capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(who, f"such a process did not end within {_PROCESS_SECONDS:.0f} s")
    said = done.stdout.split()
    if done.returncode:
        # The last line names the error; a URL with its password is in none of ours.
        kind = done.stderr.strip().rpartition("\n")[2].partition(":")[0]
        return Finding(who, f"such a process fails: {kind}; run this where keystone-manage runs")
    if said[:1] == ["plugin"]:
        return Finding(who, "write ?plugin=keyfront behind the URL, or it is seen after ttl")
    # A lease may have it that nothing has changed yet.
    stands = coordinator.fresh_now
    if said[:1] == ["nobody"] or stands(before, touched):
        where = said[1] if len(said) > 1 else "?"
        return Finding(who, f"it looks for the cache in {where}; set path to the workers' folder")
    return Finding(who, "")


def _node(url: str, coordinator: Any, who: dict[str, Any]) -> str:
    """Return why a change is not heard at a node; empty if it is."""
    from keyfront.middleware.tokens import tags_header

    try:
        token = _answer(url, "POST", {}, {"auth": who})[1].get("X-Subject-Token", "")
        if not token:
            return "it gives no token to the user of OS_USERNAME"
        touched = _touched(coordinator)
        for _ in range(_CONNECTIONS):
            headers = {
                "X-Auth-Token": token,
                "X-Subject-Token": token,
                tags_header.NAME: tags_header.ASK,
                # which no answer from before was made for
                "X-Keyfront-Check": secrets.token_hex(8),
            }
            status, given = _answer(url, "GET", headers, None)
            if status != 200:
                return f"it answers a validation with {status}"
            value = given.get(tags_header.NAME)
            if value is None:
                return (
                    f"it has no token_cache, or a proxy takes the header {tags_header.NAME} away"
                )
            told = tags_header.parse(value)
            if told is None:
                return (
                    "its token_cache keeps nothing of this answer: its log says why, or a change "
                    "is just under way"
                )
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


def _credentials() -> dict[str, Any]:
    """Return who asks, from the variables that openstack takes."""
    values = {name: os.environ.get(f"OS_{name}", "") for name in ("USERNAME", "PASSWORD")}
    for name, value in values.items():
        if not value:
            raise OptionError(f"OS_{name}", "(not set)", "in the environment, as for openstack")
    domain = os.environ.get("OS_USER_DOMAIN_NAME") or "Default"
    user = {
        "name": values["USERNAME"],
        "password": values["PASSWORD"],
        "domain": {"name": domain},
    }
    who: dict[str, Any] = {
        "identity": {"methods": ["password"], "password": {"user": user}},
    }
    project = os.environ.get("OS_PROJECT_NAME")
    if project:
        own = os.environ.get("OS_PROJECT_DOMAIN_NAME") or "Default"
        who["scope"] = {"project": {"name": project, "domain": {"name": own}}}
    return who


def _answer(
    url: str, method: str, headers: dict[str, str], body: object
) -> tuple[int, dict[str, str]]:
    parts = urlsplit(url)
    try:
        kind = {"http": HTTPConnection, "https": HTTPSConnection}[parts.scheme]
        if not parts.hostname:
            raise KeyError
        connection = kind(parts.hostname, parts.port, timeout=_SECONDS)
    except (KeyError, ValueError):
        raise OptionError("--keystone", url, "http://HOST:PORT/v3 or https://…") from None
    path = parts.path.rstrip("/") or "/v3"
    data = None if body is None else json.dumps(body)
    sent = {**headers, "Content-Type": "application/json"} if data else headers
    try:
        connection.request(method, f"{path}/auth/tokens", data, sent)
        answer = connection.getresponse()
        answer.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"it does not answer: {type(error).__name__}") from None
    finally:
        connection.close()
    return answer.status, dict(answer.getheaders())


