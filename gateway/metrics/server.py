"""Serves metrics over HTTP, at an address or a unix socket: GET ``/metrics`` and nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, ThreadingMixIn, UnixStreamServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from keyfront.common import unix_sockets
from keyfront.common.programs import parse_listen
from keyfront.errors import OptionError, ServerError

_UNIX = "unix:"
# Seconds that who asks has for his request, and for taking the answer.
_SECONDS = 10.0


class Handler(BaseHTTPRequestHandler):
    """The handler of a request for the metrics."""

    timeout = _SECONDS
    server_version = "keyfront"
    sys_version = ""
    registry: CollectorRegistry

    def do_GET(self) -> None:
        """Answer with all metrics, in the format that was asked for."""
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        encoder, kind = choose_encoder(self.headers.get("Accept", ""))
        body: bytes = encoder(self.registry)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing: Prometheus asks every few seconds."""

    def address_string(self) -> str:
        """Return no name: a look-up might take long."""
        return "-"


class _Tcp(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True


class _Unix(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


def listen(text: str, registry: CollectorRegistry) -> BaseServer:
    """Return a server of the metrics in a registry, to be run by ``serve_forever``.

    :param text: ``HOST:PORT``, or ``unix:/path`` of a socket that this user's group may ask
    :raises OptionError: it is neither
    :raises ServerError: it cannot be listened at
    """
    handler = type("Handler", (Handler,), {"registry": registry})
    try:
        if text.startswith(_UNIX):
            return _listen_unix(Path(text.removeprefix(_UNIX)), handler)
        host, port = parse_listen(text)
        kind = type("Tcp", (_Tcp,), {"address_family": socket.AF_INET6}) if ":" in host else _Tcp
        server: BaseServer = kind((host, port), handler)
        return server
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServerError(f"--listen = {text}: cannot be listened at: {reason}") from None


def _listen_unix(path: Path, handler: type[Handler]) -> BaseServer:
    if not path.is_absolute():
        raise OptionError("--listen", f"{_UNIX}{path}", "unix:/PATH")
    unix_sockets.check("--listen", path)
    if path.is_socket():
        path.unlink()
    before = os.umask(0o117)
    try:
        return _Unix(str(path), handler)
    finally:
        os.umask(before)
