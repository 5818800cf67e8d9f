"""``keyfront metrics``: what this node counts, for Prometheus."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from keyfront.common.programs import require_module
from keyfront.errors import CoordinatorError, KeyfrontError, ServerError

from . import drain, heartbeat, tokens

if TYPE_CHECKING:
    from keyfront.gateway.metrics.collector import NodeCollector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Print what all processes of this node count, in the text format of Prometheus, or serve "
        "it. It only reads the files in which they count, so no request waits for it. Run it as "
        "the user of the server."
    )
    drain.add_file_argument(parser)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="serve them at http://ADDRESS/metrics until SIGTERM: HOST:PORT or unix:/PATH",
    )
    add_source_arguments(parser)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says where the token cache and the heartbeat count."""
    parser.add_argument(
        "--config-file",
        type=Path,
        metavar="FILE",
        help="the Keystone's keystone.conf, if there are several token caches on this machine",
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="DIR", help="the folder of the token cache instead"
    )
    parser.add_argument(
        "--heartbeat",
        type=Path,
        metavar="DIR",
        help="the folder of the heartbeat's counts (default: those in /dev/shm)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="a Keystone of keyfront serve: its state folder, instead of FILE and --config-file",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Print the metrics, or serve them until SIGTERM or SIGINT; returns the exit status.

    :raises KeyfrontError: an option cannot be used, or prometheus_client is not installed
    """
    require_module("prometheus_client", "metrics")
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_collector(arguments, required=not arguments.listen))
    if not arguments.listen:
        out.write(generate_latest(registry).decode())
        return 0
    from keyfront.gateway.metrics.server import listen

    server = listen(arguments.listen, registry)

    def stop(number: int, frame: object) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    out.write(f"metrics at {arguments.listen}\n")
    out.flush()
    with server:
        server.serve_forever(poll_interval=0.2)
    return 0


def _collector(arguments: argparse.Namespace, *, required: bool) -> NodeCollector:
    from keyfront.gateway.metrics.collector import NodeCollector

    return NodeCollector(
        node_folder(arguments, required=required and arguments.heartbeat is None),
        lambda: token_counts(arguments),
        lambda: heartbeat.folders(arguments.heartbeat),
    )


def node_folder(arguments: argparse.Namespace, *, required: bool) -> Path | None:
    """Return the folder of the node that the command line names, or of the one there is.

    :param required: true if there has to be one
    """
    named = any(x is not None for x in (arguments.file, arguments.node, arguments.state))
    try:
        return drain.folder(arguments.file, arguments.node, arguments.state)
    except ServerError:
        if required or named:
            raise
        return None


def token_counts(arguments: argparse.Namespace) -> Mapping[str, int] | None:
    """Return the counts of the token cache by name; ``None`` if there is none.

    :raises CoordinatorError: there is one, and it cannot be read; or there are several
    """
    from keyfront.middleware.tokens import node_cache

    path, config_file = arguments.tokens, arguments.config_file
    try:
        if path is None and config_file is None:
            if arguments.state is not None:
                config_file = tokens.configuration(arguments.state)
            elif not tokens.caches():
                return None
        found = tokens.cache(path=path, config_file=config_file, option="--tokens")
        return {**found.coordinator.statistics(), **node_cache.statistics(found.folder)}
    except CoordinatorError:
        raise
    except KeyfrontError as error:
        raise CoordinatorError(str(error)) from None
