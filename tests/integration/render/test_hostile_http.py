"""Malformed HTTP through each front: no request is seen twice or by another, no server fails.

Each case is what an attacker sends, followed on its connection by a request with a mark. Behind is
an application that writes down what it sees.
"""

from __future__ import annotations

import json
import random
import re
import select
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from keyfront.gateway.plan.workload import Workload
from support import APPS
from support.deployments import MACHINE, STANDARD, Deployment, deployed
from support.fuzzing import damaged, each_case
from support.programs import own_folder
from support.served import PATIENCE

LINE_UPS = ("nginx+uwsgi", "apache+uwsgi", "mod_wsgi", "haproxy")
CASES = 30
# Of a size that people run: Apache has a thread for each of two hundred slow clients.
ROOMY = replace(MACHINE, memory=4 * 2**30, somaxconn=512)
CLIENTS = replace(STANDARD, clients=1000)
# Seconds without a byte after which a connection that is still open is taken for one that waits:
# longer than a busy machine takes for the next answer. Most close it.
QUIET = 5.0
HOST = b"Host: localhost\r\n"
#: What is hidden in bodies and lines. Wherever it is seen as a request, it was smuggled in.
HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\nX-Mark: smuggled\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9]) ?[^\r\n]*\r\n")


def _post(*headers: bytes, body: bytes = b"", line: bytes = b"POST /first HTTP/1.1") -> bytes:
    return b"\r\n".join((line, b"Host: localhost", *headers, b"", body))


def _chunk(data: bytes, size: bytes | None = None) -> bytes:
    return (b"%x" % len(data) if size is None else size) + b"\r\n" + data + b"\r\n"


_LENGTH = b"Content-Length: %d" % len(HIDDEN)
_CHUNKED = b"Transfer-Encoding: chunked"
_WHOLE = _chunk(HIDDEN) + b"0\r\n\r\n"

#: Requests by name; each hides another one.
REQUESTS: dict[str, bytes] = {
    "CL.TE": _post(b"Content-Length: %d" % (5 + len(HIDDEN)), _CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "TE.CL": _post(b"Content-Length: 4", _CHUNKED, body=_WHOLE),
    "TE.TE": _post(_CHUNKED, b"Transfer-Encoding: x", _LENGTH, body=HIDDEN),
    "TE.TE folded": _post(b"Transfer-Encoding:\r\n chunked", _LENGTH, body=HIDDEN),
    "TE with a tab": _post(b"Transfer-Encoding:\tchunked", b"Content-Length: 4", body=_WHOLE),
    "TE before a blank": _post(b"Transfer-Encoding : chunked", _LENGTH, body=HIDDEN),
    "TE xchunked": _post(b"Transfer-Encoding: xchunked", _LENGTH, body=HIDDEN),
    "TE gzip, chunked": _post(b"Transfer-Encoding: gzip, chunked", body=_WHOLE),
    "TE chunked, identity": _post(b"Transfer-Encoding: chunked, identity", _LENGTH, body=HIDDEN),
    "TE chunked twice": _post(_CHUNKED, _CHUNKED, body=_WHOLE),
    "TE with an underscore": _post(b"Transfer_Encoding: chunked", _LENGTH, body=HIDDEN),
    "TE in HTTP/1.0": _post(_CHUNKED, _LENGTH, body=_WHOLE, line=b"POST /first HTTP/1.0"),
    "two lengths": _post(b"Content-Length: 0", _LENGTH, body=HIDDEN),
    "two equal lengths": _post(_LENGTH, _LENGTH, body=HIDDEN),
    "a list of lengths": _post(b"Content-Length: 0, %d" % len(HIDDEN), body=HIDDEN),
    "a length with a sign": _post(b"Content-Length: +%d" % len(HIDDEN), body=HIDDEN),
    "a negative length": _post(b"Content-Length: -1", body=HIDDEN),
    "a length in hex": _post(b"Content-Length: 0x%x" % len(HIDDEN), body=HIDDEN),
    "a length of many digits": _post(b"Content-Length: " + b"9" * 5000, body=HIDDEN),
    # HAProxy 2.6.12 took these for 0 and for 1, and what follows for another request.
    "a length that overflows": _post(b"Content-Length: 18446744073709551616", body=HIDDEN),
    "a length that overflows by one": _post(
        b"Content-Length: 18446744073709551617", body=b"x" + HIDDEN
    ),
    "a length that is blank": _post(b"Content-Length: ", body=HIDDEN),
    "a GET with a body": _post(_LENGTH, body=HIDDEN, line=b"GET /first HTTP/1.1"),
    "a chunk size with a sign": _post(_CHUNKED, body=_chunk(HIDDEN, b"+%x" % len(HIDDEN))),
    "a negative chunk size": _post(_CHUNKED, body=_chunk(HIDDEN, b"-1")),
    "a chunk size that overflows": _post(_CHUNKED, body=_chunk(HIDDEN, b"1" + b"0" * 16)),
    "a chunk size with 0x": _post(_CHUNKED, body=_chunk(HIDDEN, b"0x%x" % len(HIDDEN))),
    "a chunk extension": _post(
        _CHUNKED, body=_chunk(HIDDEN, b"%x;a=b" % len(HIDDEN)) + b"0\r\n\r\n"
    ),
    "a chunk extension over a bare LF": _post(_CHUNKED, body=b"2;\nxx\r\n0\r\n\r\n" + HIDDEN),
    "a chunk of bare LF": _post(_CHUNKED, body=b"5\n12345\n0\n\n" + HIDDEN),
    "trailers": _post(_CHUNKED, body=b"0\r\nX-Mark: smuggled\r\nContent-Length: 5\r\n\r\n"),
    "bare LF": b"GET /first HTTP/1.1\nHost: localhost\n\n",
    "bare CR": b"GET /first HTTP/1.1\rHost: localhost\r\r",
    "an LF in a header": _post(b"X-A: b\nX-Mark: smuggled", line=b"GET /first HTTP/1.1"),
    "a CR in a header": _post(b"X-A: b\rX-Mark: smuggled", line=b"GET /first HTTP/1.1"),
    "obs-fold": _post(b"X-A: b\r\n c", line=b"GET /first HTTP/1.1"),
    "a NUL in a header": _post(b"X-A: b\0c", line=b"GET /first HTTP/1.1"),
    "a NUL in the target": _post(line=b"GET /fi\0rst HTTP/1.1"),
    "an escaped CR LF": _post(line=b"GET /first%0d%0aX-Mark:%20smuggled HTTP/1.1"),
    "an absolute target": _post(line=b"GET http://localhost/first HTTP/1.1"),
    "another's target": _post(line=b"GET http://elsewhere/first HTTP/1.1"),
    "an authority": _post(line=b"CONNECT localhost:443 HTTP/1.1"),
    "an asterisk": _post(line=b"OPTIONS * HTTP/1.1"),
    "two hosts": _post(b"Host: elsewhere", line=b"GET /first HTTP/1.1"),
    "HTTP/0.9": b"GET /first\r\n",
    "HTTP/1.2": _post(line=b"GET /first HTTP/1.2"),
    "HTTP/11.1": _post(line=b"GET /first HTTP/11.1"),
    "no version": b"GET\r\n\r\n",
    "no method": b" /first HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty lines": b"\r\n" * 20 + _post(line=b"GET /first HTTP/1.1"),
    "expects": _post(b"Expect: 100-continue", _LENGTH, body=HIDDEN),
    "an upgrade": _post(b"Connection: Upgrade", b"Upgrade: h2c", line=b"GET /first HTTP/1.1"),
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(40) + b"\r\n\r\n",
    "a huge header": _post(b"X-A: " + b"a" * 200_000, line=b"GET /first HTTP/1.1"),
    "many headers": _post(*(b"X-%d: a" % n for n in range(2000)), line=b"GET /first HTTP/1.1"),
    "a huge target": _post(line=b"GET /" + b"a" * 100_000 + b" HTTP/1.1"),
}  # fmt: skip
#: After a bare LF, some take what is hidden for a part of the body, others for what follows it.
OUTSIDE = {"a chunk extension over a bare LF", "a chunk of bare LF", "an LF in a header"}
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b"0\r\n\r\n", _CHUNKED + b"\r\n"),
    *(b"\x0b", b"\xff", b"18446744073709551617"),
)


@dataclass
class Site:
    """A line-up, and where its application writes down what it sees."""

    deployment: Deployment
    record: Path
    read: int = 0
    pids: frozenset[int] = frozenset()

    def seen(self) -> list[dict[str, str]]:
        """Return the requests that came since the last call."""
        data = self.record.read_bytes() if self.record.exists() else b""
        lines, self.read = data[self.read :].splitlines(), len(data)
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    found: dict[str, Site] = {}
    with ExitStack() as stack:
        for name in LINE_UPS:
            folder = stack.enter_context(own_folder("site"))
            folder.chmod(0o711)
            behind = found["nginx+uwsgi"] if name == "haproxy" else None
            record = behind.record if behind else folder / "run" / "app" / "recorded"
            made = deployed(
                folder, name, target="recording_app:application",
                trusted=("127.0.0.1",) if not behind else (),
                nodes=(behind.deployment,) if behind else (),
                pair=found["nginx+uwsgi"].deployment.folder if found else None,
                # on a busy machine one waits for more than the second that is usual here
                machine=ROOMY, profile=CLIENTS, workload=Workload(latency=60),
                environment={"PYTHONPATH": str(APPS), "RECORDED": str(record)},
            )  # fmt: skip
            found[name] = Site(stack.enter_context(made), record)
        for site in found.values():
            connected(site)
            site.pids = frozenset(one.pid for one in site.deployment.family())
        yield found


def connected(site: Site) -> None:
    """Wait until a plain request is answered by the application."""
    ends = time.monotonic() + PATIENCE
    while b"mark=hello;" not in told(site, marked(b"hello")):
        assert time.monotonic() < ends, site.deployment.logs()


def marked(mark: bytes) -> bytes:
    return b"GET /marked HTTP/1.1\r\n%bX-Mark: %b\r\nConnection: close\r\n\r\n" % (HOST, mark)


def told(site: Site, data: bytes, *, ends: bool = False) -> bytes:
    """Send bytes on a connection of their own; returns all that came back.

    :param ends: whether the server is to close it; one that waits for more is given up otherwise
    """
    found = b""
    try:
        client = site.deployment.raw(f"127.9.{random.randrange(250)}.{random.randrange(1, 250)}")
    except OSError:
        return b""
    with client, suppress(OSError):
        client.settimeout(PATIENCE if ends else 10)
        with suppress(OSError):  # it may refuse before all of it has come
            client.sendall(data)
        while ends or client.pending() or _readable(client, QUIET):
            part = client.recv(65536)
            if not part:
                break
            found += part
    return found


def _readable(client: ssl.SSLSocket, seconds: float) -> bool:
    return bool(select.select([client], [], [], seconds)[0])


def check(site: Site, sent: bytes, number: int, *, within: bool) -> None:
    """Send a request with a marked one behind it, and look at what became of both.

    :param within: whether what is hidden in it is a part of its body or of a line for all who read
        HTTP: then it is never a request
    """
    site.seen()
    mark = b"m%d" % number
    answer = told(site, sent + marked(mark))
    after = told(site, marked(b"innocent"), ends=True)
    seen = site.seen()
    # Another's connection gets its own answer and nobody else's.
    assert re.fullmatch(rb"HTTP/1\.1 200 [^\0]*\r\n\r\nmark=innocent;", after), (sent, after)
    assert "innocent" not in (one["mark"] for one in seen[:-1])
    marks = [one["mark"] for one in seen]
    assert marks.count(mark.decode()) <= 1, (sent, seen)
    assert marks.count("innocent") == 1, (sent, seen)
    if within:
        assert len(seen) <= 3, (sent, seen)
        assert not any(one["target"].startswith("/smuggled") for one in seen), (sent, seen)
        assert "smuggled" not in marks, (sent, seen)
    else:  # no more than were sent
        assert len(seen) <= 2 + sent.count(b"/first") + sent.count(b"/smuggled"), (sent, seen)
    assert b"Traceback" not in answer and b".py" not in answer, answer
    if answer:
        found = _STATUS.match(answer)
        # nginx says nothing but the body to HTTP/0.9, which has no status
        assert found or answer.startswith((b"<", b"{", b"mark=")), (sent, answer)
        assert not found or found[1] != b"500", (sent, answer)


@pytest.mark.parametrize("name", LINE_UPS)
def test_malformed_requests(name: str, sites: dict[str, Site]) -> None:
    site = sites[name]
    for number, (what, sent) in enumerate(REQUESTS.items()):
        try:
            check(site, sent, number, within=what not in OUTSIDE)
        except AssertionError as error:
            error.add_note(f"{name}: {what}")
            raise


@pytest.mark.parametrize("name", LINE_UPS)
def test_damaged_requests(name: str, sites: dict[str, Site]) -> None:
    requests = [one for one in REQUESTS.values() if len(one) < 5000]

    def one(dice: random.Random) -> None:
        sent = damaged(dice.choice(requests), dice, PIECES)
        check(sites[name], sent, dice.randrange(10**6), within=False)

    each_case(f"HTTP through {name}", CASES, one)


@pytest.mark.parametrize("name", LINE_UPS)
def test_ten_megabytes(name: str, sites: dict[str, Site]) -> None:
    site, much = sites[name], b"a" * 10_000_000
    check(site, _post(b"X-A: " + much, line=b"GET /first HTTP/1.1"), 1, within=True)
    check(site, _post(b"Content-Length: 20000000", body=much), 2, within=True)


@pytest.mark.parametrize("name", LINE_UPS)
def test_two_hundred_clients_who_send_a_byte_at_a_time(name: str, sites: dict[str, Site]) -> None:
    """They hold no worker: others are answered all the while. Whoever is cut off comes again."""
    site, sent = sites[name], b"POST /slow HTTP/1.1\r\n" + HOST
    clients = {n: site.deployment.raw(f"127.10.{n}.1") for n in range(200)}
    try:
        for place in range(5):
            for n, client in clients.items():
                try:
                    client.sendall(sent[place : place + 1])
                except OSError:  # Apache does so after five seconds
                    client.close()
                    clients[n] = site.deployment.raw(f"127.10.{n}.1")
                    clients[n].sendall(sent[: place + 1])
            site.seen()
            assert b"mark=between;" in told(site, marked(b"between"), ends=True)
            assert [one["mark"] for one in site.seen()] == ["between"]
    finally:
        for client in clients.values():
            client.close()


@pytest.mark.parametrize("name", LINE_UPS)
def test_no_server_failed(name: str, sites: dict[str, Site]) -> None:
    """After all that, the same processes serve, and no log tells of an error of Python's."""
    site = sites[name]
    connected(site)
    assert site.pids <= {one.pid for one in site.deployment.family()}
    for log, text in site.deployment.logs().items():
        assert "Traceback" not in text, (log, text[-2000:])
        assert "segfault" not in text.lower(), (log, text[-2000:])
