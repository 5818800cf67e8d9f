"""A kept connection, and the thread that beats on many."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from keyfront.gateway.heartbeat import amqp_connection as amqp_connection_module
from keyfront.gateway.heartbeat import counters as names
from keyfront.gateway.heartbeat.amqp_connection import FRAME, GOODBYE, KeptConnection
from keyfront.gateway.heartbeat.counters import Counts
from keyfront.gateway.heartbeat.pool_expiry import Pooled, PoolRecord
from keyfront.gateway.heartbeat.tcp import State
from keyfront.gateway.heartbeat.thread import HeartbeatThread
from keyfront.gateway.heartbeat.writer import Writer, make_writer
from support.served import PATIENCE

Pair = tuple[socket.socket, socket.socket]
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        peer, _ = listening.accept()
    peer.settimeout(PATIENCE)
    with ours, peer:
        yield ours, peer


@pytest.fixture
def counts() -> Counts:
    return Counts(None)


def kept_connection(pair: Pair, counts: Counts, interval: float = 10.0) -> KeptConnection:
    return KeptConnection(pair[0].fileno(), interval=interval, timeout=2 * interval, row=counts.row)


def writer_of(kept: KeptConnection, pair: Pair) -> Writer:
    return make_writer(
        kept, pair[0].sendall, pause=time.sleep, inherited=lambda: OSError("the parent's")
    )


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, f"it ended after {data!r}"
        data += part
    return data


def test_a_beat_is_a_whole_heartbeat_frame(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    now = kept.written + 10.0
    assert kept.beat(now) == now + 10.0
    assert read(pair[1], 8) == FRAME
    assert counts.row[names.BEATS] == 1
    kept.close()


def test_no_beat_while_bytes_are_flowing(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    writer_of(kept, pair)(b"data")
    assert kept.beat(kept.written + 5.0) == kept.written + 10.0
    assert counts.row[names.FLOWING] == 1
    kept.lock.acquire()
    now = kept.written + 20.0
    assert kept.beat(now) == now + 10.0
    assert counts.row[names.FLOWING] == 2
    kept.lock.give(None)
    assert read(pair[1], 4) == b"data"
    assert counts.row[names.BEATS] == 0
    kept.close()


@pytest.mark.parametrize("default", [None, 5.0])
def test_neither_end_changes_how_the_connection_waits(
    pair: Pair, counts: Counts, default: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket.setdefaulttimeout(default)
    try:
        blocking = [os.get_blocking(sock.fileno()) for sock in pair]
        kept = kept_connection(pair, counts)
        kept.beat(kept.written + 10.0)
        assert [os.get_blocking(sock.fileno()) for sock in pair] == blocking
        kept.close()
    finally:
        socket.setdefaulttimeout(None)


def test_a_full_buffer_is_not_waited_for_and_a_part_is_completed_first(
    pair: Pair, counts: Counts
) -> None:
    ours, peer = pair
    kept = kept_connection(pair, counts)
    filled = 0
    # It hears of nothing, so that no late acknowledgement makes room: classic BPF, ret #0.
    deaf = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    given = struct.pack("HP", 1, ctypes.addressof(deaf))
    peer.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, given)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            filled += ours.send(b"x" * 65536)
    ours.setblocking(True)
    now = kept.written + 10.0
    assert kept.beat(now) == now + 10.0
    assert counts.row[names.FULL] == 1
    kept.pending = FRAME[3:]  # as if three bytes had gone
    peer.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    reader = threading.Thread(target=read, args=(peer, filled))
    reader.start()
    writer_of(kept, pair)(b"whole")
    reader.join(PATIENCE)
    assert read(peer, 10) == FRAME[3:] + b"whole"
    assert kept.pending == b""
    kept.close()


def test_after_an_interrupted_write_there_is_no_beat_ever_again(
    pair: Pair, counts: Counts
) -> None:
    kept = kept_connection(pair, counts)

    def fail(data: bytes) -> None:
        pair[0].sendall(data[:3])
        raise KeyboardInterrupt

    writer = make_writer(kept, fail, pause=time.sleep, inherited=OSError)
    with pytest.raises(KeyboardInterrupt):
        writer(b"halved")
    assert kept.beat(kept.written + 10.0) is None
    assert read(pair[1], 3) == b"hal"
    assert counts.row[names.STOPPED] == 1
    kept.close()


def test_a_write_that_fails_on_a_severed_connection_is_not_counted(
    pair: Pair, counts: Counts
) -> None:
    kept = kept_connection(pair, counts)
    kept.close()
    pair[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenPipeError):
        writer_of(kept, pair)(b"goodbye")
    assert counts.row[names.STOPPED] == 0


# connection.close-ok, in a frame of type 1 on channel 0
CLOSE_OK = bytes.fromhex("01 0000 00000004 000a 0033 ce")


@pytest.mark.parametrize("answered", ["unread", "read", "not"])
def test_after_a_goodbye_it_hangs_up_once_that_is_answered_or_long_ago(
    pair: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch, answered: str
) -> None:
    kept = kept_connection(pair, counts)
    silent = [0.0]
    look = KeptConnection.state

    def state(one: KeptConnection) -> State:
        found = look(one)
        assert found is not None
        return found._replace(silent_data=silent[0])

    monkeypatch.setattr(KeptConnection, "state", state)
    counts.row[names.CONNECTIONS] = 1
    kept.pooled = Pooled(PoolRecord(1.0, 0, lambda: None, deque()), lambda: None)
    kept.pooled.put(kept.written - 100.0)
    assert kept.beat(kept.written + 1.0) == kept.written + 2.0
    assert read(pair[1], len(GOODBYE)) == GOODBYE
    said = kept.tried
    for passed in (1.0, 3.0, 5.0):
        silent[0] = passed + 2.0  # its last data came before
        assert kept.beat(said + passed) == said + passed + 1.0
    # a heartbeat of its own is no answer, whether or not somebody has read it
    pair[1].sendall(FRAME)
    assert pair[0].recv(100, socket.MSG_PEEK) == FRAME
    for passed, silence in ((7.0, 2.0), (7.1, 0.1)):
        silent[0] = silence
        assert kept.beat(said + passed) == said + passed + 1.0
    assert read(pair[0], len(FRAME)) == FRAME
    silent[0] = 0.9
    assert kept.beat(said + 8.0) == said + 9.0
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)
    pair[1].settimeout(PATIENCE)
    later = 10.5 if answered == "not" else 9.5
    silent[0] = 0.1
    if answered == "unread":
        pair[1].sendall(FRAME + CLOSE_OK)
        assert pair[0].recv(100, socket.MSG_PEEK).endswith(CLOSE_OK)
    if answered == "read":
        silent[0] = 1.1  # and nothing more has come
    assert kept.beat(said + later) is None
    assert pair[1].recv(1) == b""
    assert counts.row[names.EXPIRED] == 1
    kept.close()


def test_a_dead_peer_ends_the_beats(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    pair[0].shutdown(socket.SHUT_RDWR)
    assert kept.beat(kept.written + 10.0) is None
    assert kept.dead
    kept.close()


def test_the_duplicate_is_closed_by_whoever_has_it_last(pair: Pair, counts: Counts) -> None:
    first, second, third = (kept_connection(pair, counts) for _ in range(3))
    first.close()
    assert first.sock.fileno() == -1
    first.close()
    # somebody is writing: he closes it
    entered, leave = threading.Event(), threading.Event()

    def send(_: bytes) -> None:
        entered.set()
        assert leave.wait(PATIENCE)

    writing = threading.Thread(
        target=make_writer(second, send, pause=time.sleep, inherited=OSError), args=(b"x",)
    )
    writing.start()
    assert entered.wait(PATIENCE)
    second.close()
    assert second.sock.fileno() != -1
    leave.set()
    writing.join(PATIENCE)
    assert second.sock.fileno() == -1
    # closed between two beats: the next one sees it and sends nothing
    third.lock.acquire()
    third.close()
    third.lock.give(None)
    assert third.beat(third.written + 10.0) is None
    assert third.sock.fileno() == -1


def test_a_beat_is_waited_for_however_late_it_is(
    pair: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped in the midst of one; over TLS it is written to a number."""
    kept = kept_connection(pair, counts)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 10:
            kept.beating = False
            kept.lock.give(None)

    monkeypatch.setattr(amqp_connection_module, "monotonic", itertools.count(step=1000).__next__)
    monkeypatch.setattr(amqp_connection_module, "sleep", sleep)
    kept.lock.acquire()
    kept.beating = True
    kept.close()
    assert len(looks) == 10
    assert kept.sock.fileno() == -1
    # but not for ever: this may be the thread that is to end it
    second = kept_connection(pair, counts)
    second.lock.acquire()
    second.beating = True
    second.close()
    assert second.closed
    assert second.sock.fileno() != -1
    second.lock.give(None)
    second.beating = False
    second.close()


def test_a_forked_process_does_not_write(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    kept.mark = bytes(1)  # as the kernel leaves it in a child
    with pytest.raises(OSError, match="the parent's"):
        writer_of(kept, pair)(b"x")
    kept.lock.acquire()  # by a thread that does not exist here
    kept.close()
    assert kept.sock.fileno() == -1


def test_a_writer_waits_for_another_without_holding_up_the_rest(
    pair: Pair, counts: Counts
) -> None:
    kept = kept_connection(pair, counts)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        kept.lock.give(None)  # the other greenlet is done

    kept.lock.acquire()
    make_writer(kept, pair[0].sendall, pause=pause, inherited=OSError)(b"x")
    assert len(pauses) == 1
    assert read(pair[1], 1) == b"x"
    kept.close()


def test_silence_counts_only_while_the_peer_may_send(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    state = kept.state()
    assert state is not None
    assert state.established
    assert not kept.silent(state)
    assert kept.silent(state._replace(silent_data=41.0))
    assert not kept.silent(state._replace(silent_data=41.0, room=False))
    kept.close()


def test_a_thread_beats_on_many_and_forgets_the_closed(counts: Counts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pairs = []
        for _ in range(5):
            ours = socket.create_connection(listening.getsockname())
            pairs.append((ours, listening.accept()[0]))
    native_thread = HeartbeatThread(counts, threaded=True)
    all_kept = [kept_connection(pair, counts, interval=0.01) for pair in pairs]
    for kept in all_kept:
        native_thread.add(kept)
    for _, peer in pairs:
        peer.settimeout(PATIENCE)
        assert read(peer, 24) == 3 * FRAME
    for kept in all_kept:
        kept.close()
    for ours, peer in pairs:
        ours.close()
        while peer.recv(4096):
            pass
        peer.close()
    native_thread.end()
    assert native_thread.failure is None
    assert counts.statistics()["lateness_worst"] >= 0


def test_a_pulse_that_comes_later_is_not_late(pair: Pair, counts: Counts) -> None:
    native_thread = HeartbeatThread(counts, threaded=False)
    assert native_thread.turn() is None
    kept = kept_connection(pair, counts)
    native_thread.add(kept)
    seconds = native_thread.turn()
    assert seconds is not None
    assert 0 < seconds <= 10
    kept.written -= 10.0
    kept.beaten -= 10.0
    second = HeartbeatThread(counts, threaded=False)
    second.add(kept)
    second.turn()
    assert read(pair[1], 8) == FRAME
    assert counts.row[names.BEATS] == 1
    kept.close()


def test_a_thread_that_cannot_be_started_is_told(
    pair: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keyfront.gateway.heartbeat import native

    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native, "start_new_thread", full)
    kept = kept_connection(pair, counts)
    native_thread = HeartbeatThread(counts, threaded=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start"):
            native_thread.add(kept)
    kept.close()


def test_an_error_costs_one_connection_one_beat(pair: Pair, counts: Counts) -> None:
    class Failing(KeptConnection):
        def beat(self, now: float) -> float | None:
            raise ZeroDivisionError

    failing = Failing(pair[0].fileno(), interval=10.0, timeout=20.0, row=counts.row)
    good = kept_connection(pair, counts)
    native_thread = HeartbeatThread(counts, threaded=False)
    for kept in (failing, good):
        kept.written = kept.beaten = kept.written - 11.0
        native_thread.add(kept)
    assert native_thread.turn() is not None
    assert read(pair[1], 8) == FRAME
    assert native_thread.failure == "the thread that beats lost a beat by a ZeroDivisionError"
    assert counts.row[names.FAILURES] == 1
    for kept in (failing, good):
        kept.close()


def test_a_thread_that_ended_is_started_again_with_what_it_beat_on(
    pair: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_connection(pair, counts)
    native_thread = HeartbeatThread(counts, threaded=True)
    with monkeypatch.context() as patched:

        def end(_: object) -> None:
            raise SystemExit

        patched.setattr(HeartbeatThread, "turn", end)
        native_thread.add(kept)
        deadline = time.monotonic() + PATIENCE
        while native_thread.runs:
            assert time.monotonic() < deadline
    assert native_thread.failure == "the thread that beats was ended by a SystemExit"
    kept.written = kept.beaten = kept.written - 11.0
    native_thread.start()
    assert native_thread.runs
    assert read(pair[1], 8) == FRAME
    native_thread.end()
    kept.close()


def test_being_late_does_not_add_up(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    due = first = kept.written + 10.0
    for _ in range(5):
        # as late as a busy machine makes it, each time
        again = kept.beat(due + 4.0)
        assert again is not None
        due = again
    assert due == first + 50.0
    assert counts.row[names.BEATS] == 5
    # after a standstill there is one beat, not one for each that was missed
    assert kept.beat(due + 100.0) == due + 110.0
    assert kept.beat(due + 101.0) == due + 110.0
    assert counts.row[names.BEATS] == 6
    kept.close()


def test_who_depends_on_beats_is_told_when_there_are_none(pair: Pair, counts: Counts) -> None:
    kept = kept_connection(pair, counts)
    start = kept.written
    assert kept.is_beaten(start + 14.0)
    assert not kept.is_beaten(start + 16.0)
    kept.beat(start + 16.0)
    assert kept.is_beaten(start + 30.0)
    # another's lock, held for ever, is no beat
    kept.lock.acquire()
    kept.beat(start + 40.0)
    assert not kept.is_beaten(start + 40.0)
    kept.lock.give(None)
    kept.close()
