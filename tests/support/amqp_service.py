"""A WSGI service on oslo.messaging for the tests of the heartbeat, told by its environment.

``HB_URL``
    where RabbitMQ is (``rabbit://USER:PASSWORD@HOST:PORT//``)
``HB_PATCH``
    ``none``, ``eventlet`` or ``gevent``: what patches the standard library before all else
``HB_INSTALL``
    who installs the heartbeat: ``none``, ``code`` (this module), ``filter`` (a paste pipeline,
    ``HB_PASTE``, whose application is ``amqp_service:app_factory``) or ``entry`` (keyfront's own
    entrypoint, by ``[keyfront_heartbeat]`` in ``HB_CONFIG``)
``HB_INTERVAL``
    seconds between beats, if ``code`` installs it
``HB_THRESHOLD``
    ``heartbeat_timeout_threshold``, seconds (4)
``HB_CA``
    the authority that signed RabbitMQ's certificate, if it is to be spoken to over TLS
``HB_NAME``
    the topic that its own RPC server listens at, and of what it publishes
``HB_CONFIG``
    a file for oslo.config's global configuration

It answers in JSON:

``/publish?n=1&size=100&how=cast``
    publish so many messages of so many bytes, ``cast`` or ``notify``; the seconds of each
``/call?n=1&topic=echo&timeout=30``
    call ``echo`` of the RPC server at a topic; the seconds of each
``/serve``
    start the RPC server of this process; it is there when this is answered
``/sleep?seconds=1``, ``/burn?seconds=1``
    wait as the process's threads do; use a core
``/stats``, ``/pid``
    what the heartbeat tells of this process; which process it is, and the seconds that
    oslo.messaging and kombu slept in it before they connected again

Run as a program, ``python amqp_service.py --server eventlet|gevent|wsgiref``, it prints its port.
It uses nothing that oslo.messaging 12 did not have.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # once, and by the name that the paste file uses
    import amqp_service

    amqp_service.main()
    raise SystemExit

PATCH = os.environ.get("HB_PATCH", "none")
# A .wsgi file patches before it imports this: gevent must not patch in the middle of an import
# that is not the main thread's, as under mod_wsgi.
if PATCH == "eventlet":
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import eventlet

        if not eventlet.patcher.is_monkey_patched("socket"):
            eventlet.monkey_patch()
elif PATCH == "gevent":
    import gevent.monkey

    if not gevent.monkey.is_module_patched("socket"):
        gevent.monkey.patch_all()

import json  # noqa: E402
import logging  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import zlib  # noqa: E402
from collections.abc import Callable, Iterable  # noqa: E402
from typing import Any  # noqa: E402
from urllib.parse import parse_qsl  # noqa: E402

_delays = [0.0]


def _count_delays() -> None:
    sleep = time.sleep

    def counted(seconds: float = 0) -> None:
        who = sys._getframe(1).f_globals.get("__name__", "")
        if seconds >= 0.5 and who.startswith(("oslo_messaging.", "kombu.")):
            _delays[0] += seconds
        sleep(seconds)

    time.sleep = counted


_count_delays()

import oslo_messaging  # noqa: E402
from oslo_config import cfg  # noqa: E402

NAME = os.environ.get("HB_NAME", "hb")
INSTALL = os.environ.get("HB_INSTALL", "none")


def _configure() -> None:
    # oslo.config takes what no file has from the environment
    section = "OS_OSLO_MESSAGING_RABBIT__"
    os.environ[f"{section}HEARTBEAT_TIMEOUT_THRESHOLD"] = os.environ.get("HB_THRESHOLD", "4")
    if authority := os.environ.get("HB_CA"):
        os.environ[f"{section}SSL"] = "true"
        os.environ[f"{section}SSL_CA_FILE"] = authority
    config = os.environ.get("HB_CONFIG")
    cfg.CONF([], project="amqp_service", default_config_files=[config] if config else [])


class Echo:
    """The methods of the RPC server."""

    def __init__(self) -> None:
        self.served = 0

    def echo(self, _context: dict[str, Any], text: str) -> str:
        self.served += 1
        return text


class Service:
    """What answers the requests; connects with the first that needs it."""

    def __init__(self) -> None:
        self._transports: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._echo = Echo()
        self._server: Any = None
        self._published = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        options = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        answer: Callable[..., Any] | None = getattr(
            self, "do_" + environ.get("PATH_INFO", "/").strip("/"), None
        )
        status, found = "200 OK", {}
        try:
            if answer is None:
                status = "404 Not Found"
            else:
                found = answer(**options)
        except Exception as error:
            logging.getLogger(__name__).exception("It failed")
            status, found = "500 It failed", {"error": repr(error)}
        body = json.dumps(found).encode()
        start_response(
            status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        )
        return [body]

    def do_publish(
        self, n: str = "1", size: str = "100", how: str = "cast", topic: str = NAME
    ) -> dict[str, Any]:
        send = self._notify if how == "notify" else self._cast
        seconds = []
        for _ in range(int(n)):
            with self._lock:
                self._published += 1
                number = self._published
            text = (f"{os.getpid()}:{number}:" * (int(size) // 8 + 1))[: int(size)]
            message = {"number": number, "text": text, "crc": zlib.crc32(text.encode())}
            start = time.perf_counter()
            send(topic, message)
            seconds.append(time.perf_counter() - start)
        return {"pid": os.getpid(), "seconds": seconds}

    def _cast(self, topic: str, message: dict[str, Any]) -> None:
        self._rpc_client(topic).cast({}, "receive", message=message)

    def _notify(self, topic: str, message: dict[str, Any]) -> None:
        with self._lock:
            if "notifier" not in self._clients:
                self._clients["notifier"] = oslo_messaging.Notifier(
                    self._transport("notification"), "amqp_service", driver="messaging",
                    topics=[topic],
                )
        self._clients["notifier"].info({}, "test.published", message)

    def do_call(
        self, n: str = "1", topic: str = "echo", timeout: str = "30", text: str = "hello"
    ) -> dict[str, Any]:
        client = self._rpc_client(topic).prepare(timeout=float(timeout))
        seconds = []
        for _ in range(int(n)):
            start = time.perf_counter()
            answer = client.call({}, "echo", text=text)
            seconds.append(time.perf_counter() - start)
            if answer != text:
                raise ValueError(f"{answer!r} instead of {text!r}")
        return {"pid": os.getpid(), "seconds": seconds}

    def do_serve(self) -> dict[str, Any]:
        with self._lock:
            if self._server is None:
                self._server = oslo_messaging.get_rpc_server(
                    self._transport("rpc"),
                    oslo_messaging.Target(topic=NAME, server="server"),
                    [self._echo],
                    executor="eventlet" if PATCH == "eventlet" else "threading",
                )
                self._server.start()
        return self.do_pid()

    def do_sleep(self, seconds: str = "1") -> dict[str, Any]:
        time.sleep(float(seconds))
        return self.do_pid()

    def do_burn(self, seconds: str = "1") -> dict[str, Any]:
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            sum(range(1000))
        return self.do_pid()

    def do_stats(self) -> dict[str, Any]:
        if INSTALL == "none":
            return {}
        from keyfront.gateway import heartbeat

        return heartbeat.statistics()

    def do_pid(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "served": self._echo.served, "delays": _delays[0]}

    def _transport(self, kind: str) -> Any:
        if kind not in self._transports:
            get = {
                "rpc": oslo_messaging.get_rpc_transport,
                "notification": oslo_messaging.get_notification_transport,
            }[kind]
            self._transports[kind] = get(cfg.CONF, url=os.environ["HB_URL"])
        return self._transports[kind]

    def _rpc_client(self, topic: str) -> Any:
        with self._lock:
            if topic not in self._clients:
                # oslo.messaging before 14.1 has the class only
                make = getattr(oslo_messaging, "get_rpc_client", oslo_messaging.RPCClient)
                target = oslo_messaging.Target(topic=topic)
                self._clients[topic] = make(self._transport("rpc"), target)
            return self._clients[topic]


def app_factory(_global_conf: dict[str, str], **_local_conf: str) -> Service:
    """What the paste file's pipeline ends with."""
    return Service()


def _load() -> Any:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    _configure()
    if INSTALL == "code":
        from keyfront.gateway import heartbeat

        interval = os.environ.get("HB_INTERVAL")
        heartbeat.install(interval=float(interval) if interval else None)
    if INSTALL == "filter":
        from paste.deploy import loadapp

        return loadapp(f"config:{os.environ['HB_PASTE']}")
    return Service()


application = _load()


def _serve_eventlet() -> None:
    import eventlet
    import eventlet.wsgi

    listening = eventlet.listen(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    eventlet.wsgi.server(listening, application, log_output=False)


def _serve_gevent() -> None:
    import gevent.pywsgi

    server = gevent.pywsgi.WSGIServer(("127.0.0.1", 0), application, log=None)
    server.start()
    print(server.server_port, flush=True)
    server.serve_forever()


def _serve_wsgiref() -> None:
    import socketserver
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    class Server(socketserver.ThreadingMixIn, WSGIServer):
        daemon_threads = True

    class Handler(WSGIRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.set_app(application)
    print(server.server_port, flush=True)
    server.serve_forever()


def main() -> None:
    serve = {"eventlet": _serve_eventlet, "gevent": _serve_gevent, "wsgiref": _serve_wsgiref}
    _, option, name = sys.argv
    if option != "--server":
        raise SystemExit(f"{option}: must be --server")
    serve[name]()
