"""Answers that are none of a Redis or a sentinel: each is as good as one that is lost."""

from __future__ import annotations

import dataclasses
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.redis import connections, outages, sentinels
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.epochs import DIGEST, Epoch, Mark, Slots
from support.clocks import Clock
from support.redis_epochs import TIMEOUT, address
from support.served import PATIENCE

SLOTS = Slots((0, 100))
EPOCH = Epoch(7, 10)
RUN, LIFE = "0a", "0b"


def bulk(*values: str | None) -> bytes:
    """A list of strings, as Redis sends it."""
    parts = [b"$-1\r\n" if x is None else f"${len(x)}\r\n{x}\r\n".encode() for x in values]
    return f"*{len(values)}\r\n".encode() + b"".join(parts)


def text(value: str) -> bytes:
    return f"${len(value)}\r\n{value}\r\n".encode()


class Scripted(socketserver.ThreadingTCPServer):
    """A server that gives the answers which a test puts down, by command.

    :ivar answers: by the first word of a command, or the first two, its answer
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("0.0.0.0", 0), _Client)
        self.answers: dict[str, bytes | Callable[[list[str]], bytes]] = {
            "INFO server": text(f"run_id:{RUN}\r\n"),
            "INFO replication": text(f"role:master\r\nmaster_replid:{LIFE}\r\n"),
        }
        self.asked: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def answer(self, command: list[str]) -> bytes:
        self.asked.append(command[0])
        found = self.answers.get(" ".join(command[:2])) or self.answers[command[0]]
        return found(command) if callable(found) else found


class _Client(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        while line := self.rfile.readline():
            command = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                command.append(self.rfile.read(size + 2)[:-2].decode())
            try:
                self.wfile.write(self.server.answer(command))
            except OSError:
                return


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outages, "time", clock)
    return clock


@pytest.fixture(params=["the client's own", "hiredis"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parsers that the client may have."""
    from redis import _parsers

    if request.param == "hiredis":
        pytest.importorskip("hiredis")
        kind: Any = _parsers._HiredisParser
    else:
        kind = _parsers._RESP2Parser
    real = connections.connect

    def connect(*arguments: Any, **instead: Any) -> Any:
        made = real(*arguments, **instead)
        made.set_parser(kind)
        return made

    monkeypatch.setattr(connections, "connect", connect)
    monkeypatch.setattr(sentinels, "connect", connect)


SHAPES = [
    b":1\r\n",
    b"+OK\r\n",
    b"$-1\r\n",
    b"$5\r\nhello\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n:1\r\n:2\r\n",
    b"*2\r\n*0\r\n*0\r\n",
    b"*2\r\n-ERR no\r\n-ERR no\r\n",
    b"*9\r\n" + b"$1\r\nz\r\n" * 9,
    b"*9\r\n" + b"$1\r\n\xff\r\n" * 9,
    b"-ERR unknown command\r\n",
    b"-NOPERM this user has no permissions\r\n",
    b"-\xff\xfe\r\n",
    b"*x\r\n",
    b"$x\r\n",
    b":x\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"*1\r\n" * 2000 + b":1\r\n",
]


def short(value: object) -> str:
    """Return the name of a case: of the longest 16 kB would be written into each report."""
    return repr(value)[:60]


def table(command: list[str]) -> bytes:
    """What a Redis says that has a table."""
    fields = {"head": f"{RUN}:{LIFE} {EPOCH.generation:x} 1024 {EPOCH.sequence} c0ffee"}
    fields |= {"digests": DIGEST, f"c{EPOCH.sequence}": "0:c0ffee"}
    return bulk(*(fields.get(name) for name in command[2:]))


def ran(*more: str) -> bytes:
    """What its program says."""
    return bulk("7", "1024", "10", "0", "c0ffee", *more)


def lost(caplog: pytest.LogCaptureFixture) -> int:
    return sum("until it is back" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("shape", SHAPES, ids=short)
@pytest.mark.parametrize("which", ["digests", "table", "INFO replication"])
def test_what_is_read_is_none(
    scripted: Scripted, retries: Clock, caplog: pytest.LogCaptureFixture, parser: None,
    which: str, shape: bytes,
) -> None:  # fmt: skip
    wrong = False

    def answer(command: list[str]) -> bytes:
        of = "digests" if command[1] == "keyfront:digests" else "table"
        return shape if wrong and of == which else table(command)

    def proof(command: list[str]) -> bytes:
        return shape if wrong and which == command[0] + " replication" else sound

    sound: Any = scripted.answers["INFO replication"]
    scripted.answers.update({"HMGET": answer, "INFO replication": proof})
    where = address(f"redis://127.0.0.1:{scripted.port}")
    for lease in (None, 1.0):
        one = Redis(where, create=False, timeout=TIMEOUT, lease=lease)
        assert one.fresh(EPOCH, SLOTS)
        if one._poller is not None:
            one._poller.stop()
            one._mirror.clear()  # type: ignore[union-attr]
        wrong = True
        caplog.clear()
        deeds: list[Callable[[], Any]] = [one.now, one.snapshot]
        assert not one.fresh(EPOCH, SLOTS)
        assert not one.fresh_now(EPOCH, SLOTS)
        for deed in [*deeds, one._poll] if lease else deeds:
            retries.later(outages.RETRY_SECONDS)
            with pytest.raises(CoordinatorError):
                deed()
        assert lost(caplog) == 1
        wrong = False
        retries.later(outages.RETRY_SECONDS)
        assert one.fresh(EPOCH, SLOTS)
        one.close()


DEEDS: dict[str, Callable[[Redis], Any]] = {
    "mark": lambda one: one.mark(SLOTS),
    "stamp": lambda one: one.stamp(Mark(7, 1, SLOTS)),
    "touch": lambda one: one.touch(SLOTS),
    "flush": lambda one: one.flush(),
    "recover": lambda one: one.recover(),
    "statistics": lambda one: one.statistics(),
}


# What is wrong in them comes after what every answer has.
ENDS = {
    "mark": [ran(), ran("x"), ran("1"), ran("1", "x"), ran("1", "")],
    "recover": [ran(), ran("x"), ran("0", "1"), ran("0", "1", "o", "x")],
    "statistics": [ran(), ran("x"), ran("1"), ran("1", "1", "1", "x")],
}


@pytest.mark.parametrize(
    ("deed", "shape"),
    [(deed, shape) for deed in DEEDS for shape in (*SHAPES, *ENDS.get(deed, ()))],
    ids=short,
)
def test_what_the_program_answers_is_none(
    scripted: Scripted, retries: Clock, caplog: pytest.LogCaptureFixture, deed: str, shape: bytes
) -> None:
    """A change is refused by it as by a Redis that is away."""
    scripted.answers.update({"HMGET": table, "EVALSHA": shape, "EVAL": shape})
    node = Redis(address(f"redis://127.0.0.1:{scripted.port}"), timeout=TIMEOUT)
    node._contact._payer.stop()
    with pytest.raises(CoordinatorError) as raised:
        DEEDS[deed](node)
    assert str(raised.value).startswith("redis://127.0.0.1:")
    assert lost(caplog) <= 1
    node.close()


@pytest.mark.parametrize(
    "shape",
    [*SHAPES, bulk("a"), bulk("127.0.0.1", "99999"), bulk("\0", "1"), bulk("x" * 80, "1")],
    ids=short,
)
@pytest.mark.parametrize("which", ["SENTINEL MASTER", "SENTINEL GET-MASTER-ADDR-BY-NAME"])
def test_what_sentinels_answer_is_none(
    scripted: Scripted, retries: Clock, caplog: pytest.LogCaptureFixture, parser: None,
    which: str, shape: bytes,
) -> None:  # fmt: skip
    sound = {
        "SENTINEL MASTER": bulk("num-other-sentinels", "0"),
        "SENTINEL GET-MASTER-ADDR-BY-NAME": bulk("127.0.0.1", str(scripted.port)),
    }
    scripted.answers.update({"HMGET": table, **sound, which: shape})
    where = address(f"redis://127.0.0.1:{scripted.port}", coordinator_sentinel_master="m")
    node = Redis(where, create=False, timeout=TIMEOUT)
    with pytest.raises(CoordinatorError):
        node.now()
    assert lost(caplog) == 1
    scripted.answers.update(sound)
    node._contact._masters._found = None  # type: ignore[union-attr]
    retries.later(outages.RETRY_SECONDS)
    assert node.now() == EPOCH
    node.close()


# A process that stands still, or ends, while it asks the sentinels


@pytest.fixture
def three(scripted: Scripted) -> Any:
    """The address of three sentinels, which are one server by three names."""
    scripted.answers.update(
        {
            "HMGET": table,
            "SENTINEL MASTER": bulk("num-other-sentinels", "2"),
            "SENTINEL GET-MASTER-ADDR-BY-NAME": bulk("127.0.0.1", str(scripted.port)),
        }
    )
    hosts = ",".join(f"127.0.0.{number}:{scripted.port}" for number in (1, 2, 3))
    return address(f"redis://{hosts}", coordinator_sentinel_master="m")


def test_a_process_that_stood_still_asks_all_the_same(
    scripted: Scripted, three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP in its first look at them: nobody has failed, however much time has passed."""

    class Halting(Clock):
        """By which an hour passes before each look at it."""

        def monotonic(self) -> float:
            self.later(3600)
            return super().monotonic()

    monkeypatch.setattr(sentinels, "time", Halting())
    node = Redis(three, create=False, timeout=TIMEOUT)
    assert node.now() == EPOCH
    assert node.fresh(EPOCH, SLOTS)
    assert node.losses == 0
    node.close()


def test_an_answer_that_nobody_waited_for_is_not_read_later(
    scripted: Scripted, three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greenlet that is ended between question and answer: the next one must not be given it."""

    class Ended(BaseException):
        """As GreenletExit and gevent's Timeout are."""

    scripted.answers["SENTINEL MASTER"] = bulk("num-other-sentinels", "0")
    where = dataclasses.replace(three, hosts=three.hosts[:1])
    node = Redis(where, create=False, timeout=TIMEOUT)
    assert node.now() == EPOCH
    masters: Any = node._contact._masters
    masters._found = None
    with monkeypatch.context() as patch:

        def say(connection: Any, *command: str) -> None:
            connection.send_packed_command(connection.pack_command(*command))
            raise Ended

        patch.setattr(masters, "_say", say)
        with pytest.raises(Ended):
            node.now()
    elsewhere = bulk("127.0.0.1", "1")
    scripted.answers["SENTINEL GET-MASTER-ADDR-BY-NAME"] = elsewhere
    assert masters.master() == ("127.0.0.1", 1)
    node.close()


def test_connections_that_were_released_are_made_again(scripted: Scripted, three: Any) -> None:
    """A process does so before it forks, and goes on as its children do."""
    node = Redis(three, create=False, timeout=TIMEOUT)
    assert node.now() == EPOCH
    masters: Any = node._contact._masters
    node._contact.release()
    assert not masters._connections and not node._contact._server._idle
    masters._found = None
    assert node.now() == EPOCH
    assert node.losses == 0
    node.close()


@pytest.mark.parametrize("silent", ["SENTINEL MASTER", "SENTINEL GET-MASTER-ADDR-BY-NAME"])
def test_an_end_in_the_first_look_at_the_sentinels(
    scripted: Scripted, three: Any, caplog: pytest.LogCaptureFixture, silent: str
) -> None:
    """It waits for nobody, the request is told that this is closed, and no connection stays."""
    asked, goes_on = threading.Event(), threading.Event()
    answer: Any = scripted.answers[silent]

    def slow(command: list[str]) -> bytes:
        asked.set()
        assert goes_on.wait(PATIENCE)
        return bytes(answer)

    scripted.answers[silent] = slow
    node = Redis(three, create=False, timeout=TIMEOUT)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            node.now()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(PATIENCE)
    node.close()  # while that one holds the lock
    assert thread.is_alive()
    goes_on.set()
    thread.join(PATIENCE)
    assert [str(error) for error in raised] == [f"{node.address}: this coordinator is closed"]
    assert isinstance(raised[0], CoordinatorError)
    masters: Any = node._contact._masters
    assert not masters._connections and not node._contact._server._idle
    assert not caplog.records
