"""The ``keyfront`` command: ``serve``, ``check``, ``tokens``, ``ldap``, ``heartbeat``, ``bench``.

Bad input ends with one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from keyfront import __version__
from keyfront.errors import KeyfrontError


class _Parser(argparse.ArgumentParser):
    """One line for a wrong command line, instead of the usage and the line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


class _NoPassword(argparse.Action):
    """Refuses a password on the command line, and does not repeat it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error("--password is refused, as every user can read it; use --password-file")


def _parser() -> argparse.ArgumentParser:
    from keyfront.gateway.serve import command
    from keyfront.gateway.serve import lineups as shapes

    parser = _Parser(prog="keyfront", description="Keystone, fast and steady.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"keyfront {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    folder = {
        "type": Path,
        "metavar": "DIR",
        "help": "folder with database, keys and configuration (default: keyfront in "
        "$XDG_STATE_HOME or in ~/.local/state)",
    }
    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve a Keystone on this machine, made on the first run",
        description="Serve a Keystone on this machine until Ctrl-C. The first run makes it; later "
        "runs go on with the same state. SIGHUP reloads, SIGTERM stops.",
    )
    serve.add_argument("--state", **folder)  # type: ignore[arg-type]
    serve.add_argument(
        "--listen",
        default=command.DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="address to listen at; port 0 takes a free one (default: %(default)s)",
    )
    serve.add_argument(
        "--server",
        default="uwsgi",
        metavar="|".join(shapes.SERVERS),
        help="what serves it (default: %(default)s)",
    )
    serve.add_argument(
        "--stop-timeout",
        default=str(command.DEFAULT_STOP_TIMEOUT),
        metavar="SECONDS",
        help="what running requests get when it stops, 1 to 3600 (default: %(default)s)",
    )
    serve.add_argument(
        "--fresh", action="store_true", help="delete the state folder first and start over"
    )
    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="log in to the served Keystone and validate the token",
        description="Log in to the Keystone that keyfront serve runs, validate the token, and "
        "print what came back.",
    )
    check.add_argument("--state", **folder)  # type: ignore[arg-type]
    tokens = commands.add_parser(
        "tokens",
        allow_abbrev=False,
        help="look at the token cache of this machine, or empty it",
        description="Look at the token cache of this machine, or empty it.",
    )
    actions = tokens.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("stats", "print what the cache did since the service started on this machine"),
        ("flush", "make every cached answer stale, after a change that no transaction shows"),
    ):
        part = actions.add_parser(action, allow_abbrev=False, help=text, description=text + ".")
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
        where.add_argument("--state", **folder)  # type: ignore[arg-type]
        if action == "stats":
            part.add_argument("--json", action="store_true", help="for programs")
    text = "find out whether changes are heard by the nodes, and those of keystone-manage by them"
    part = actions.add_parser(
        "check",
        allow_abbrev=False,
        help=text,
        description=f"{text.capitalize()}. Nothing of the cloud is changed. Who asks the nodes is "
        "said by OS_USERNAME, OS_PASSWORD and OS_PROJECT_NAME. Ends with 1 if one does not hear.",
    )
    where = part.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--config-file", type=Path, metavar="FILE", help="the Keystone's keystone.conf"
    )
    where.add_argument("--state", **folder)  # type: ignore[arg-type]
    part.add_argument(
        "--keystone",
        action="append",
        default=[],
        metavar="URL",
        help="a node, http://HOST:PORT/v3; may be given for each",
    )
    part.add_argument("--json", action="store_true", help="for programs")
    _add_ldap(commands)
    _add_heartbeat(commands)
    _add_plan(commands)
    _add_render(commands)
    _add_bench(commands)
    return parser


def _add_ldap(commands: argparse._SubParsersAction[_Parser]) -> None:
    ldap = commands.add_parser(
        "ldap",
        allow_abbrev=False,
        help="look at LDAP servers",
        description="Look at LDAP servers.",
    )
    actions = ldap.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="connect to LDAP servers and say what works",
        description="Connect to each server and say what works: TLS, bind, search, paging, and how "
        "long it takes. Nothing is changed. The exit status is 1 if something failed.",
    )
    check.add_argument(
        "urls", nargs="+", metavar="URL", help="ldap://HOST[:PORT], ldaps://… or ldapi://%%2Fpath"
    )
    check.add_argument(
        "--ca-file", metavar="FILE", help="CAs to trust, in PEM (default: the system's)"
    )
    check.add_argument("--start-tls", action="store_true", help="encrypt ldap:// by StartTLS")
    check.add_argument("--bind-dn", metavar="DN", help="who binds (default: nobody, anonymous)")
    check.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file with the password of --bind-dn (default: it is asked for at the terminal)",
    )
    check.add_argument("--password", action=_NoPassword, help=argparse.SUPPRESS)
    check.add_argument(
        "--base", metavar="DN", help="where to search (default: what the server names first)"
    )
    check.add_argument(
        "--timeout",
        default="5",
        metavar="SECONDS",
        help="for each step, 0.01 to 600 (default: %(default)s)",
    )
    check.add_argument("--json", action="store_true", help="for programs")


def _add_heartbeat(commands: argparse._SubParsersAction[_Parser]) -> None:
    heartbeat = commands.add_parser(
        "heartbeat",
        allow_abbrev=False,
        help="look at the AMQP connections that are kept alive on this machine",
        description="Look at the AMQP connections that are kept alive on this machine.",
    )
    actions = heartbeat.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        allow_abbrev=False,
        help="print what the heartbeat did in each process",
        description="Print what the heartbeat did in each process, and which of them combine "
        "what cannot work together. Root sees the processes of all users.",
    )
    status.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="the folder of the counts, as the option path (default: those in /dev/shm)",
    )
    status.add_argument("--json", action="store_true", help="for programs")


def _add_render(commands: argparse._SubParsersAction[_Parser]) -> None:
    from keyfront.cli import render as render_commands

    render_commands.add_arguments(
        commands.add_parser(
            "render",
            allow_abbrev=False,
            help="write the configuration files of a deployment",
            description="Write the configuration files of a deployment, with every number "
            "computed and explained. A file that was changed by hand is kept.",
        )
    )


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    from keyfront.cli import plan as plan_commands

    plan_commands.add_arguments(
        commands.add_parser(
            "plan",
            allow_abbrev=False,
            help="compute processes, queues, pools and timeouts for a machine, with reasons",
            description="Compute processes, queues, pools and timeouts for a machine, each with "
            "what it was computed from and what breaks beyond it. Nothing is changed. The exit "
            "status is 3 if something cannot be met.",
        )
    )


class _LateParser(_Parser):
    """Asks the module of a ``bench`` action for its arguments once the action is used."""

    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        add, self.add_arguments = self.add_arguments, None
        if add is not None:
            add(self)
        return super().parse_known_args(args, namespace)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    from keyfront.cli import bench as bench_commands

    bench = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure this machine's Keystone, and compare",
        description="Measure, and compare. Results go into a folder; reports come from there.",
    )
    actions = bench.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_LateParser
    )
    for name, action in bench_commands.ACTIONS.items():
        part = actions.add_parser(
            name, allow_abbrev=False, help=action.help, description=f"{action.help.capitalize()}."
        )
        part.add_arguments = lambda parser, action=action: action.load().add(parser)


def _serve(arguments: argparse.Namespace) -> int:
    from keyfront.errors import OptionError
    from keyfront.gateway import application
    from keyfront.gateway.serve import command, state

    seconds = str(arguments.stop_timeout)
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise OptionError("--stop-timeout", seconds, "a number of seconds, 1 to 3600")
    options = command.Options(
        state=arguments.state or state.default_path(),
        listen=arguments.listen,
        server=arguments.server,
        fresh=arguments.fresh,
        stop_timeout=int(seconds),
        target=os.environ.get(application.TARGET_VARIABLE),
    )
    return command.serve(options, sys.stdout)


def _check(arguments: argparse.Namespace) -> int:
    from keyfront.gateway.serve import check, state

    folder = state.State(arguments.state or state.default_path())
    return check.check(folder, sys.stdout)


def _tokens(arguments: argparse.Namespace) -> int:
    from keyfront.cli import tokens as token_commands
    from keyfront.gateway.serve import state

    config = arguments.config_file
    if arguments.state is not None:
        config = state.State(arguments.state).config
    if arguments.action == "check":
        from keyfront.cli import token_check

        return token_check.check(config, arguments.keystone, sys.stdout, as_json=arguments.json)
    cache = token_commands.cache(path=arguments.path, config_file=config)
    if arguments.action == "flush":
        return token_commands.flush(cache, sys.stdout)
    return token_commands.stats(cache, sys.stdout, as_json=arguments.json)


def _ldap(arguments: argparse.Namespace) -> int:
    from keyfront.cli import ldap as ldap_commands

    chosen = ldap_commands.options(
        ca_file=arguments.ca_file,
        start_tls=arguments.start_tls,
        bind_dn=arguments.bind_dn,
        password_file=arguments.password_file,
        base=arguments.base,
        timeout=arguments.timeout,
    )
    return ldap_commands.check(arguments.urls, chosen, sys.stdout, as_json=arguments.json)


def _heartbeat(arguments: argparse.Namespace) -> int:
    from keyfront.cli import heartbeat as heartbeat_commands

    return heartbeat_commands.status(arguments.path, sys.stdout, as_json=arguments.json)


def _render(arguments: argparse.Namespace) -> int:
    from keyfront.cli import render as render_commands

    return render_commands.render(arguments, sys.stdout, sys.stderr)


def _plan(arguments: argparse.Namespace) -> int:
    from keyfront.cli import plan as plan_commands

    return plan_commands.run(arguments, sys.stdout, sys.stderr)


def _bench(arguments: argparse.Namespace) -> int:
    from keyfront.cli import bench as bench_commands

    return bench_commands.run(arguments, sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0; 1 if a check failed; 2 for bad input; 3 if a plan cannot be met.
    """
    try:
        arguments = _parser().parse_args(argv)
        commands = {
            "serve": _serve,
            "check": _check,
            "tokens": _tokens,
            "ldap": _ldap,
            "heartbeat": _heartbeat,
            "plan": _plan,
            "render": _render,
            "bench": _bench,
        }
        return commands[arguments.command](arguments)
    except KeyfrontError as error:
        sys.stderr.write(f"keyfront: {error}\n")
        return 2
    except KeyboardInterrupt:
        # during the set-up; a running server takes the signal itself and stops in order
        sys.stderr.write("keyfront: interrupted; the next run begins again\n")
        return 130
    except BrokenPipeError:
        return 1
