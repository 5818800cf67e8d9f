"""``keyfront doctor``: what is wrong with this Keystone, across layers, on one page."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from keyfront.common import ranges
from keyfront.errors import KeyfrontError, OptionError
from keyfront.gateway.doctor import config_files, fix_plan, machine_state, report, schema
from keyfront.gateway.doctor.diagnosis import diagnose
from keyfront.gateway.doctor.found import Found, Told
from keyfront.gateway.doctor.readers.files import Unread
from keyfront.gateway.doctor.redaction import masked
from keyfront.gateway.doctor.registry import CHECKS, Check
from keyfront.gateway.plan import plan
from keyfront.gateway.render import lineups, versions
from keyfront.gateway.render.writer import File

from . import render
from . import workload as workload_arguments
from .check import Report
from .check import check as check_login
from .credentials import of_arguments
from .parser import Parser, add_state_argument

# Seconds that each answer of Keystone is waited for.
_PATIENCE = 10.0
# What --assume takes beside the servers of keyfront render.
_ASSUMED = ("uwsgi", "nginx", "apache", "haproxy", "mod_wsgi", "keystone", "keystonemiddleware")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Read the configuration of everything between a client and Keystone and say what is wrong, "
        "worst first, with the lines to write. Nothing is changed, and no secret is printed. "
        "Ends with "
        "0, 1 if something of level error was found, 2 for input that cannot be used."
    )
    group = parser.add_argument_group("where to look (default: the usual places)")
    for option, text, several in (
        ("--keystone", "keystone.conf; may be repeated, the last one wins", True),
        ("--uwsgi", "an ini, YAML or JSON file of uWSGI; may be repeated", True),
        ("--nginx", "nginx.conf", False),
        ("--apache", "httpd.conf, apache2.conf, or one site's file", False),
        ("--haproxy", "haproxy.cfg; may be repeated", True),
    ):
        if several:
            group.add_argument(option, metavar="FILE", action="append", default=[], help=text)
        else:
            group.add_argument(option, metavar="FILE", default="", help=text)
    group.add_argument(
        "--systemd",
        metavar="UNIT",
        action="append",
        default=[],
        help="a unit, or a file with one or with what systemctl cat printed; may be repeated",
    )
    group.add_argument(
        "--root",
        metavar="DIR",
        type=Path,
        default=Path("/"),
        help="look at the files below DIR, a container's or another machine's",
    )
    group.add_argument(
        "--assume",
        metavar="NAME=VERSION",
        action="append",
        default=[],
        help=f"a version instead of the one found here, of {', '.join(_ASSUMED)}",
    )
    group.add_argument(
        "--compare",
        metavar="FILE",
        type=Path,
        help="what keyfront doctor --json printed on another node",
    )
    group = parser.add_argument_group("what no file of this machine tells")
    for option, text in (
        ("--nodes", "machines that serve the same Keystone (default 1)"),
        ("--database-connections", "the database's max_connections"),
        ("--ldap-connections", "what the directory allows Keystone"),
        ("--memcached-connections", "memcached's -c"),
        (
            "--stop-seconds",
            "what docker (stop -t) or Kubernetes (terminationGracePeriodSeconds) gives a container "
            "to end",
        ),
    ):
        group.add_argument(option, metavar="N", help=text)
    group = parser.add_argument_group("the running machine")
    group.add_argument(
        "--live",
        action="store_true",
        help="look at sockets, processes, disks, logs and the database as well, and log in once",
    )
    add_state_argument(group)
    group.add_argument("--os-cloud", metavar="NAME", help="the cloud of clouds.yaml to log in to")
    group = parser.add_argument_group("what is printed")
    group.add_argument("--json", action="store_true", help="for programs")
    group.add_argument("--explain", metavar="CODE", help="all about one code, and nothing else")
    group.add_argument(
        "--fix-plan",
        action="store_true",
        help="print as a diff what keyfront render would write instead, and change nothing",
    )
    group.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Look, and print what is wrong.

    :returns: the exit status: 0; 1 with findings of level error
    :raises OptionError: an option or a file that was named cannot be used
    """
    colour = arguments.color == "always" or (
        arguments.color == "auto" and out.isatty() and not os.environ.get("NO_COLOR")
    )
    if arguments.explain is not None:
        out.write(report.explained(_check(arguments.explain), colour=colour))
        return 0
    found = config_files.look(_root(arguments.root), _given(arguments), _told(arguments))
    if arguments.compare is not None:
        found.other_node = _other_node(arguments.compare)
    if arguments.live:
        found.live = machine_state.look(found)
        found.schema = schema.look(found)
        asked = found.schema
        if asked is not None and asked.ahead is not None and not machine_state.is_here(asked.host):
            found.live.clocks[f"the database at {asked.host}"] = asked.ahead
        _log_in(arguments, found)
    if arguments.fix_plan:
        return _fix_plan(found, out, err)
    made = diagnose(found)
    if arguments.json:
        out.write(report.as_json(made, found))
    else:
        out.write(report.text(made, found, colour=colour))
    out.flush()
    return made.status


def _check(code: str) -> Check:
    found = CHECKS.get(code.upper())
    if found is None:
        raise OptionError("--explain", code, "a code that keyfront doctor printed, such as X01")
    return found


def _root(path: Path) -> Path:
    """:raises OptionError: it is no folder, or lies where this user may not look"""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path.absolute()
        reason = ""
    except (OSError, ValueError) as error:
        reason = f" ({getattr(error, 'strerror', None) or error})"
    raise OptionError("--root", path, f"a folder{reason}")


def _given(arguments: argparse.Namespace) -> config_files.Given:
    assumed = {}
    for text in arguments.assume:
        name, _, version = text.partition("=")
        if name not in _ASSUMED or not version or not version.replace(".", "").isdigit():
            raise OptionError("--assume", text, f"NAME=VERSION with {', '.join(_ASSUMED)} as NAME")
        assumed[name] = version
    return config_files.Given(
        keystone=tuple(arguments.keystone),
        uwsgi=tuple(arguments.uwsgi),
        nginx=arguments.nginx,
        apache=arguments.apache,
        haproxy=tuple(arguments.haproxy),
        systemd=tuple(arguments.systemd),
        assumed=assumed,
    )


def _told(arguments: argparse.Namespace) -> Told:
    def number(option: str) -> int | None:
        text = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        return None if text is None else ranges.whole(option, text, 1, 1_000_000)

    return Told(
        nodes=number("--nodes") or 1,
        database_connections=number("--database-connections"),
        ldap_connections=number("--ldap-connections"),
        memcached_connections=number("--memcached-connections"),
        stop_seconds=number("--stop-seconds"),
    )


def _other_node(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        reason = report.unlike_a_node(content)
        if not reason:
            return dict(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "no JSON"
    raise OptionError("--compare", path, f"what keyfront doctor --json printed ({reason})")


def _log_in(arguments: argparse.Namespace, found: Found) -> None:
    """Log in once, and note how long each phase took, or why it did not work."""
    assert found.live is not None
    try:
        credentials = of_arguments(arguments)
    except KeyfrontError as error:
        found.files.unread.append(Unread("a login", str(error)))
        return
    told = Report(credentials.url)
    try:
        check_login(credentials, timeout=_PATIENCE, report=told)
        found.live.login = told.milliseconds
        host = urlsplit(told.url).hostname or ""
        if told.ahead is not None and not machine_state.is_here(host):
            found.live.clocks[f"Keystone at {host}"] = told.ahead
    except KeyfrontError as error:
        found.live.refused = str(error)
        found.live.waited_for = told.waits_for
    found.live.phases = told.phases
    found.live.timings = told.timings
    found.live.request_ids = told.request_ids


def _would_render(options: list[str]) -> tuple[Sequence[File], Path]:
    """Return the files that keyfront render would write, and their folder.

    :raises OptionError: an option does not do
    """
    parser = Parser(prog="keyfront render")
    render.add_arguments(parser)
    arguments = parser.parse_args(options)
    made = plan(
        workload_arguments.machine(arguments),
        workload_arguments.workload(arguments),
        workload_arguments.profile(arguments),
    )
    settings = render.settings_of(arguments)
    asked = versions.find(settings.virtualenv, versions.parse_assumed(arguments.assume or ()))
    return lineups.render(made, settings, asked), settings.folder


def _without(options: list[str], option: str) -> list[str]:
    """Return options without one and its value; a certificate and its key go together."""
    gone = {option}
    if option in ("--tls-certificate", "--tls-key"):
        gone = {"--tls-certificate", "--tls-key"}
    kept: list[str] = []
    words = iter(options)
    for word in words:
        if word in gone:
            next(words, None)
        else:
            kept.append(word)
    return kept


def _fix_plan(found: Found, out: TextIO, err: TextIO) -> int:
    """Print what keyfront render would write instead of what was found.

    :returns: 0 if nothing would change, 1 if something would
    """
    options = fix_plan.words(found)
    left: list[str] = []
    while True:
        try:
            files, folder = _would_render(options)
            break
        except OptionError as error:
            # What is right for a server need not be what keyfront render takes.
            kept = _without(options, error.option)
            if kept == options:
                raise
            left.append(str(error))
            options = kept
    for said in left:
        err.write(f"keyfront: not taken over: {masked(said)}\n")
    lines = list(fix_plan.diff(files, folder, found))
    words = masked(fix_plan.command(options))
    err.write(f"keyfront: nothing was changed; this would write it: {words}\n")
    out.writelines(lines)
    return 1 if lines else 0
