"""``keyfront render``: writes the files of a deployment, every number computed and explained."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from keyfront.common import ranges
from keyfront.errors import OptionError
from keyfront.gateway.plan import Plan, plan
from keyfront.gateway.render import certificates, lineups, versions, writer
from keyfront.gateway.render.missing import missing
from keyfront.gateway.render.settings import HSTS_MAX, Settings
from keyfront.gateway.render.writer import File

from . import workload as workload_arguments

# Options of words that go to the settings as they are: option, metavar, help.
_WORDS = (
    ("--app", "TARGET", "what is served, as KEYFRONT_APP (default: config:DIR/keystone.ini)"),
    (
        "--listen",
        "HOST:PORT",
        "where the foremost server listens, * as HOST for all addresses "
        "(default: *:5000 with TLS, 127.0.0.1:5000 without)",
    ),
    (
        "--upstream",
        "HOST:PORT",
        "where uWSGI listens behind nginx over TCP (default: 127.0.0.1:35357)",
    ),
    (
        "--login-upstream",
        "HOST:PORT",
        "the same for logins, with --login-processes (default: 127.0.0.1:35358)",
    ),
    (
        "--public-host",
        "NAME,…",
        "the name that clients use, and others that they may use; no other one is served",
    ),
    (
        "--public-endpoint",
        "URL",
        "what links in answers begin with (default: made of --public-host and --listen, but "
        "unknown with --trusted-proxy)",
    ),
    (
        "--metrics",
        "ADDRESS",
        "where Prometheus reads what the node counts, HOST:PORT or unix:/PATH "
        "(default: 127.0.0.1:9631)",
    ),
    ("--user", "NAME", "who runs the application (default: keystone)"),
    ("--group", "NAME", "that user's group (default: named as the user)"),
    ("--web-user", "NAME", "who runs the web server (default: www-data, nginx or apache)"),
    ("--web-group", "NAME", "that user's group (default: the one it has)"),
)
_PATHS = (
    ("--config", "DIR", "where keystone.conf is (default: /etc/keystone)"),
    ("--virtualenv", "DIR", "the Python environment of the application (default: this one)"),
    ("--run-directory", "DIR", "for sockets (default: /run/keyfront)"),
    ("--log-directory", "DIR", "for access logs (default: /var/log/keyfront)"),
    ("--cache-directory", "DIR", "for nginx's temporary files (default: /var/cache/keyfront)"),
    (
        "--node-ca",
        "FILE",
        "with --haproxy and TLS, the authority of the nodes' certificates (default: the "
        "certificate itself, which is right for a self-signed one)",
    ),
)
_FIELDS = {"--app": "target"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Write the configuration files of a deployment, with every number computed and explained. "
        "A file that was changed by hand is kept."
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="where the files lie and are used from"
    )
    parser.add_argument(
        "--server",
        default=lineups.SERVERS[0],
        metavar="NAME",
        help=f"what serves it, of {', '.join(lineups.SERVERS)} (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace files changed by hand, too")
    parser.add_argument(
        "--diff", action="store_true", help="print what would change, and write nothing"
    )
    group = parser.add_argument_group("deployment")
    for option, metavar, text in _WORDS:
        group.add_argument(option, metavar=metavar, help=text)
    for option, metavar, text in _PATHS:
        group.add_argument(option, metavar=metavar, type=Path, help=text)
    group.add_argument(
        "--json-logs", action="store_true", help="access logs as one JSON object a line"
    )
    group.add_argument(
        "--memcached",
        metavar="HOST:PORT,…",
        help="the memcached servers for Keystone's own caches",
    )
    group.add_argument(
        "--assume",
        action="append",
        metavar="SERVER=VERSION",
        help="render for this version instead of the one on this machine, e.g. nginx=1.22.1",
    )
    tls = parser.add_argument_group("TLS and balancing")
    tls.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="certificate with its chain, PEM"
    )
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    tls.add_argument(
        "--self-signed", metavar="NAME", help="make a certificate for trying, in DIR/tls, once"
    )
    tls.add_argument(
        "--hsts",
        metavar="SECONDS",
        help=f"tell browsers to keep to TLS for so long, 1 to {HSTS_MAX}",
    )
    tls.add_argument(
        "--http-redirect", action="store_true", help="redirect from port 80 to TLS"
    )
    tls.add_argument(
        "--haproxy", metavar="ADDRESS:PORT,…", help="add HAProxy's file, in front of these nodes"
    )
    tls.add_argument(
        "--trusted-proxy",
        action="append",
        metavar="ADDRESS",
        help="a balancer whose X-Forwarded-For is believed, or a network of them "
        "(default: with --haproxy its nodes and this machine)",
    )
    workload_arguments.add_workload_arguments(parser)


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Write the files, or print how they differ from those that are there.

    :returns: 0; 1 if a file changed by hand was kept, one is named that is not on this machine, or
        ``--diff`` shows something; 3 if the plan cannot be met, and then nothing is written
    :raises OptionError: an option cannot be used; nothing is written
    """
    made = plan(
        workload_arguments.machine(arguments),
        workload_arguments.workload(arguments),
        workload_arguments.profile(arguments),
    )
    settings = settings_of(arguments)
    lineups.check(settings, made)
    found = versions.find(settings.virtualenv, versions.parse_assumed(arguments.assume or ()))
    if made.conflicts:
        for conflict in made.conflicts:
            err.write(f"keyfront: {conflict.name}: {conflict.gives}\n")
        err.write("keyfront: nothing is written; keyfront plan shows the whole plan\n")
        return 3
    files = lineups.render(made, settings, found)
    if arguments.diff:
        lines = list(writer.diff(files, settings.folder))
        out.writelines(line if line.endswith("\n") else f"{line}\n" for line in lines)
        return 1 if lines else 0
    writer.compare(files, settings.folder)
    if arguments.self_signed is not None:
        certificates.make(settings.folder, arguments.self_signed)
    changes = writer.write(files, settings.folder, force=arguments.force)
    _report(changes, settings, made, out)
    absent = missing(files, settings, found)
    for path, named_in, remedy in absent:
        err.write(f"keyfront: {path} is not here, and {named_in} names it: {remedy}\n")
    return 1 if absent or any(item.kind == writer.KEPT for item in changes) else 0


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options tell.

    :raises OptionError: one of them cannot be used
    """
    values: dict[str, object] = {}
    for option, _, _ in (*_WORDS, *_PATHS):
        value = getattr(arguments, _attribute(option))
        if value is not None:
            if value == "":
                raise OptionError(option, "nothing", "left out or given a value")
            name = _FIELDS.get(option, _attribute(option))
            values[name] = value.absolute() if isinstance(value, Path) else value
    if arguments.public_host:
        values["public_host"], *values["other_hosts"] = _listed(arguments.public_host)
    where = arguments.folder.absolute()
    certificate, key = arguments.tls_certificate, arguments.tls_key
    if arguments.self_signed is not None:
        if certificate or key:
            raise OptionError(
                "--self-signed", arguments.self_signed, "left out with --tls-certificate"
            )
        certificates.check_name(arguments.self_signed)
        certificate, key = certificates.paths(where)
    return Settings(
        folder=where,
        server=arguments.server,
        command=command(arguments),
        certificate=certificate.absolute() if certificate else None,
        key=key.absolute() if key else None,
        hsts=_seconds("--hsts", arguments.hsts),
        redirect=arguments.http_redirect,
        json_logs=arguments.json_logs,
        haproxy=_listed(arguments.haproxy),
        trusted_proxies=tuple(arguments.trusted_proxy or ()),
        memcached=_listed(arguments.memcached),
        **values,  # type: ignore[arg-type]
    )


def command(arguments: argparse.Namespace) -> str:
    """Return the command line that makes the same files anywhere, as a shell takes it."""
    words = ["keyfront", "render", str(arguments.folder.absolute())]
    if arguments.server != lineups.SERVERS[0]:
        words += ["--server", arguments.server]
    options = [option for option, _, _ in (*_WORDS, *_PATHS)]
    options += ["--memcached", "--tls-certificate", "--tls-key", "--self-signed", "--hsts"]
    for option in (*options, "--haproxy"):
        value = getattr(arguments, _attribute(option))
        if value is not None:
            words += [option, str(value.absolute() if isinstance(value, Path) else value)]
    for option in ("--assume", "--trusted-proxy"):
        for value in getattr(arguments, _attribute(option)) or ():
            words += [option, value]
    for option in ("--json-logs", "--http-redirect"):
        if getattr(arguments, _attribute(option)):
            words.append(option)
    # a line break in a value would end the comment that this becomes
    return " ".join(shlex.join([*words, *workload_arguments.given(arguments)]).split())


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(","))


def _seconds(option: str, text: str | None) -> int:
    if text is None:
        return 0
    return ranges.whole(option, text, 1, HSTS_MAX, f"1 to {HSTS_MAX} seconds")


def _report(changes: Sequence[writer.Change], settings: Settings, made: Plan, out: TextIO) -> None:
    out.write(f"{settings.folder}: {settings.server}, profile {made.profile.name}\n")
    files: list[File] = [item.file for item in changes]
    left_over = list(writer.left_over(files, settings.folder, lineups.PATHS))
    width = max(map(len, (*(file.path for file in files), *left_over)))
    for item in changes:
        out.write(f"  {item.file.path:{width}}  {item.kind}\n")
    for path in left_over:
        out.write(f"  {path:{width}}  left over\n")
    if any(item.kind == writer.KEPT for item in changes):
        out.write("Kept, as changed by hand: --diff shows what is missed, --force replaces it\n")
    if left_over:
        out.write("Left over of another line-up: remove it, also where it was copied to\n")
    if any(file.goes_to for file in files):
        out.write(f"Put system/ in its place with:  cp -r {settings.folder}/system/. /\n")
