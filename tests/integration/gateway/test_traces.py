"""Traces of a real Keystone behind a real uWSGI, as a collector receives them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support import APPS
from support.keystone_world import VALIDATE, Answer, Client, World
from support.served import PATIENCE, Served, serve
from support.trace_receiver import Receiver, Span, trace_receiver

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
MALFORMED = {"traceparent": f"00-{TRACE[:-1]}x-{PARENT}-01", "tracestate": "vendor=value"}
REQUEST_ID = re.compile(r"req-[0-9a-f-]{36}")

# So long that whatever arrives was sent at the workers' stop, which waits for that.
AT_THE_STOP = {
    "OTEL_BSP_SCHEDULE_DELAY": "3600000",
    "KEYFRONT_APP": "patient_keystone:application", "PYTHONPATH": str(APPS),
}  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with trace_receiver() as running:
        yield running


def _traced(url: str, **more: str) -> dict[str, str]:
    return {"KEYFRONT_TRACES": "on", "OTEL_EXPORTER_OTLP_ENDPOINT": url, **more}


def _parts_of(secret: str) -> list[bytes]:
    """A secret in pieces: none of them is to be found either."""
    size = 12
    pieces = [secret[at : at + size] for at in range(0, len(secret) - size + 1, size)]
    return [text.encode() for text in (secret, *pieces)]


@pytest.mark.parametrize("server", ("uwsgi", "gevent", "mod_wsgi"))
def test_what_a_collector_is_told_of_logins_and_validations(
    keystone_state: tuple[Path, int], receiver: Receiver, server: str
) -> None:
    state, port = keystone_state
    environment = _traced(receiver.url, **AT_THE_STOP)
    # The policy's warning of its deprecated rules is no part of this.
    with serve(
        state, server, port=port, environment=environment, arguments=("--stop-timeout", "80")
    ) as served:
        world = World(served.url, served.password)
        world.wait_until_kept()
        user = world.user()
        refused = _send(served, "POST", VALIDATE, TRACEPARENT, _login(user.name, "wrong"))
        login = _send(served, "POST", VALIDATE, TRACEPARENT, _login(user.name, user.password))
        assert (refused.status, login.status) == (401, 201)
        token = login.headers["X-Subject-Token"]
        asked = {"X-Auth-Token": world.admin, "X-Subject-Token": token}
        for headers in (TRACEPARENT, MALFORMED, {}):
            answer = _send(served, "GET", VALIDATE, {**asked, **headers})
            assert answer.status == 200
        secret_query = f"{VALIDATE}?nothing={user.password}"
        assert _send(served, "GET", secret_query, asked).status == 200
        found = _send(served, "GET", f"/users/{user.name}?name={user.name}", asked)
        assert found.status == 404
        assert not receiver.raw
        log = _stop(served, "apache.error.log" if server == "mod_wsgi" else "uwsgi.log")
    if server == "gevent":
        # Each by way of uWSGI's loop, which lets running requests end.
        killed = log.count("Gracefully killing worker")
        assert 0 < killed == log.count("goodbye to the gevent Hub")
    _check_parents(receiver)
    _check_cache(receiver)
    _check_keystone(receiver)
    secrets = (token, world.admin, user.password, user.name, user.id, served.password)
    received = b"\n".join(receiver.raw)
    for secret in secrets:
        for part in _parts_of(secret):
            assert part not in received
    assert b"nothing=" not in received


def _stop(served: Served, name: str = "uwsgi.log") -> str:
    """Stop it, and return the log of that; no worker is cut off because it took too long."""
    before = len(served.log(name))
    served.stop()
    assert served.process.returncode == 0
    log = served.log(name)[before:]
    # As uWSGI and mod_wsgi put it.
    assert "Timeout (" not in log and "aborting daemon process" not in log
    return log


def _send(
    served: Served, method: str, path: str, headers: Mapping[str, str], body: object = None
) -> Answer:
    client = Client(served.url)
    try:
        return client.request(method, path, headers, body)
    finally:
        client.close()


def _login(name: str, password: str) -> dict[str, object]:
    user = {"name": name, "domain": {"id": "default"}, "password": password}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}


def _fronts(receiver: Receiver, name: str, status: int) -> list[Span]:
    return [
        span for span in receiver.named(name)
        if span.attributes["http.response.status_code"] == status
    ]


def _check_parents(receiver: Receiver) -> None:
    by_id = {span.id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)  # none was sent twice
    for span in receiver.spans:
        assert span.resource["service.name"] == "keystone"
        if span.kind == "SERVER":
            assert span.parent in ("", PARENT)
            assert (span.trace == TRACE) == (span.parent == PARENT)
            assert (span.state == "vendor=value") == (span.parent == PARENT)
            assert REQUEST_ID.fullmatch(span.attributes["openstack.request_id"])
            assert span.attributes["url.scheme"] == "http"
            method, _, route = span.name.partition(" ")
            assert span.attributes["http.request.method"] == method
            assert span.attributes["http.route"] == route
        else:
            assert by_id[span.parent].trace == span.trace
    (login,) = _fronts(receiver, "POST /v3/auth/tokens", 401)
    assert (login.parent, login.failed) == (PARENT, False)
    continued = [x for x in _fronts(receiver, "GET /v3/auth/tokens", 200) if x.parent]
    assert len(continued) == 1
    assert _fronts(receiver, "GET /v3/users/{id}", 404)


def _check_cache(receiver: Receiver) -> None:
    """Known at its issue, then kept by a worker, which others share; a foreign query is asked."""
    spans = _fronts(receiver, "GET /v3/auth/tokens", 200)
    told = []
    for span in spans:
        cache = receiver.children(span)["token cache"]
        outcome = cache.attributes["keyfront.cache.outcome"]
        told.append((outcome, cache.attributes["keyfront.cache.reason"]))
        below = receiver.children(cache)
        assert ("keystone" in below) == (outcome in ("miss", "bypass")), told
    assert ("first", "known") in told
    assert {("hit", "worker"), ("hit", "node")} & set(told)
    assert ("miss", "unknown") in told
    assert ("bypass", "variants") in told
    (continued,) = [span for span in spans if span.parent]
    cache = receiver.children(continued)["token cache"]
    assert cache.attributes["keyfront.cache.outcome"] == "first"


def _check_keystone(receiver: Receiver) -> None:
    for login in _fronts(receiver, "POST /v3/auth/tokens", 201):
        cache = receiver.children(login)["token cache"]
        assert cache.attributes["keyfront.cache.outcome"] == "bypass"
        assert cache.attributes["keyfront.cache.reason"] == "method"
        keystone = receiver.children(cache)["keystone"]
        assert keystone.attributes["keyfront.hash.count"] == 1
        assert keystone.attributes["keyfront.hash.duration"] > 0
        # the second login of a user's day needs few
        assert keystone.attributes["keyfront.statements.count"] > 0
        assert 0 < keystone.attributes["keyfront.statements.duration"] < keystone.seconds


@pytest.mark.parametrize("server", ("uwsgi", "gevent"))
def test_a_collector_that_hangs_holds_up_nothing(
    keystone_state: tuple[Path, int], server: str
) -> None:
    """It takes connections and never answers, and may take an hour: nobody waits for it."""
    state, port = keystone_state
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = _traced(
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            KEYFRONT_APP="waiting_app:application", PYTHONPATH=str(APPS),
            OTEL_EXPORTER_OTLP_TIMEOUT="3600", OTEL_BSP_SCHEDULE_DELAY="1",
            OTEL_BSP_MAX_QUEUE_SIZE="4", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2",
        )  # fmt: skip
        with serve(state, server, port=port, environment=environment) as served:
            silent.settimeout(PATIENCE)
            assert _status(served) == 200
            waiting, _ = silent.accept()
            with waiting:
                for _ in range(40):
                    assert _status(served) == 200
                _stop(served)


def _status(served: Served) -> int:
    connection = served.connect()
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_a_start_without_the_extra_says_what_to_install(
    keystone_state: tuple[Path, int], tmp_path: Path
) -> None:
    state, port = keystone_state
    absent = tmp_path / "absent" / "opentelemetry"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'opentelemetry'\", name='opentelemetry')\n"
    )
    environment = {"KEYFRONT_TRACES": "on", "PYTHONPATH": os.fspath(absent.parent)}
    with pytest.raises(AssertionError) as raised:
        with serve(state, "uwsgi", port=port, environment=environment):
            pass
    assert "KEYFRONT_TRACES = on needs OpenTelemetry" in str(raised.value)
    assert "pip install 'keyfront[otel]'" in str(raised.value)
