"""One connection's pulse, and the thread that beats on many."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from keyfront.gateway.heartbeat import counters as names
from keyfront.gateway.heartbeat.counters import Counts
from keyfront.gateway.heartbeat.kept_connection import FRAME, Pulse
from keyfront.gateway.heartbeat.thread import Beater
from keyfront.gateway.heartbeat.writer import Writer, make_writer
from support.served import PATIENCE

Pair = tuple[socket.socket, socket.socket]


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


def pulse_of(pair: Pair, counts: Counts, interval: float = 10.0) -> Pulse:
    return Pulse(pair[0].fileno(), interval=interval, timeout=2 * interval, row=counts.row)


def writer_of(pulse: Pulse, pair: Pair) -> Writer:
    return make_writer(
        pulse, pair[0].sendall, pause=time.sleep, inherited=lambda: OSError("the parent's")
    )


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, f"it ended after {data!r}"
        data += part
    return data


def test_a_beat_is_a_whole_heartbeat_frame(pair: Pair, counts: Counts) -> None:
    pulse = pulse_of(pair, counts)
    now = pulse.written + 10.0
    assert pulse.beat(now) == now + 10.0
    assert read(pair[1], 8) == FRAME
    assert counts.row[names.BEATS] == 1
    pulse.close()


def test_no_beat_while_bytes_are_flowing(pair: Pair, counts: Counts) -> None:
    pulse = pulse_of(pair, counts)
    writer_of(pulse, pair)(b"data")
    assert pulse.beat(pulse.written + 5.0) == pulse.written + 10.0
    assert counts.row[names.FLOWING] == 1
    pulse.lock.acquire()
    now = pulse.written + 20.0
    assert pulse.beat(now) == now + 10.0
    assert counts.row[names.FLOWING] == 2
    pulse.lock.release()
    assert read(pair[1], 4) == b"data"
    assert counts.row[names.BEATS] == 0
    pulse.close()


@pytest.mark.parametrize("default", [None, 5.0])
def test_neither_end_changes_how_the_connection_waits(
    pair: Pair, counts: Counts, default: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket.setdefaulttimeout(default)
    try:
        blocking = [os.get_blocking(sock.fileno()) for sock in pair]
        pulse = pulse_of(pair, counts)
        pulse.beat(pulse.written + 10.0)
        assert [os.get_blocking(sock.fileno()) for sock in pair] == blocking
        pulse.close()
    finally:
        socket.setdefaulttimeout(None)


def test_a_full_buffer_is_not_waited_for_and_a_part_is_completed_first(
    pair: Pair, counts: Counts
) -> None:
    ours, peer = pair
    pulse = pulse_of(pair, counts)
    filled = 0
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            filled += ours.send(b"x" * 65536)
    ours.setblocking(True)
    now = pulse.written + 10.0
    assert pulse.beat(now) == now + 10.0
    assert counts.row[names.FULL] == 1
    pulse.pending = FRAME[3:]  # as if three bytes had gone
    reader = threading.Thread(target=read, args=(peer, filled))
    reader.start()
    writer_of(pulse, pair)(b"whole")
    reader.join(PATIENCE)
    assert read(peer, 10) == FRAME[3:] + b"whole"
    assert pulse.pending == b""
    pulse.close()


def test_after_an_interrupted_write_there_is_no_beat_ever_again(
    pair: Pair, counts: Counts
) -> None:
    pulse = pulse_of(pair, counts)

    def fail(data: bytes) -> None:
        pair[0].sendall(data[:3])
        raise KeyboardInterrupt

    writer = make_writer(pulse, fail, pause=time.sleep, inherited=OSError)
    with pytest.raises(KeyboardInterrupt):
        writer(b"halved")
    assert pulse.beat(pulse.written + 10.0) is None
    assert read(pair[1], 3) == b"hal"
    assert counts.row[names.STOPPED] == 1
    pulse.close()


def test_a_write_that_fails_on_a_severed_connection_is_not_counted(
    pair: Pair, counts: Counts
) -> None:
    pulse = pulse_of(pair, counts)
    pulse.close()
    pair[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenPipeError):
        writer_of(pulse, pair)(b"goodbye")
    assert counts.row[names.STOPPED] == 0


def test_a_dead_peer_ends_the_beats(pair: Pair, counts: Counts) -> None:
    pulse = pulse_of(pair, counts)
    pair[0].shutdown(socket.SHUT_RDWR)
    assert pulse.beat(pulse.written + 10.0) is None
    assert pulse.dead
    pulse.close()


def test_the_duplicate_is_closed_by_whoever_has_it_last(pair: Pair, counts: Counts) -> None:
    first, second, third = (pulse_of(pair, counts) for _ in range(3))
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
    third.lock.release()
    assert third.beat(third.written + 10.0) is None
    assert third.sock.fileno() == -1


def test_a_forked_process_does_not_write(pair: Pair, counts: Counts) -> None:
    pulse = pulse_of(pair, counts)
    pulse.pid += 1
    with pytest.raises(OSError, match="the parent's"):
        writer_of(pulse, pair)(b"x")
    pulse.lock.acquire()  # by a thread that does not exist here
    pulse.close()
    assert pulse.sock.fileno() == -1


def test_a_writer_waits_for_another_without_holding_up_the_rest(
    pair: Pair, counts: Counts
) -> None:
    pulse = pulse_of(pair, counts)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        pulse.lock.release()  # the other greenlet is done

    pulse.lock.acquire()
    make_writer(pulse, pair[0].sendall, pause=pause, inherited=OSError)(b"x")
    assert len(pauses) == 1
    assert read(pair[1], 1) == b"x"
    pulse.close()


def test_silence_counts_only_while_the_peer_may_send(pair: Pair, counts: Counts) -> None:
    pulse = pulse_of(pair, counts)
    state = pulse.state()
    assert state is not None
    assert state.established
    assert not pulse.silent(state)
    assert pulse.silent(state._replace(silent_data=41.0))
    assert not pulse.silent(state._replace(silent_data=41.0, room=False))
    pulse.close()


def test_a_thread_beats_on_many_and_forgets_the_closed(counts: Counts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pairs = []
        for _ in range(5):
            ours = socket.create_connection(listening.getsockname())
            pairs.append((ours, listening.accept()[0]))
    beater = Beater(counts, threaded=True)
    pulses = [pulse_of(pair, counts, interval=0.01) for pair in pairs]
    for pulse in pulses:
        beater.add(pulse)
    for _, peer in pairs:
        peer.settimeout(PATIENCE)
        assert read(peer, 24) == 3 * FRAME
    for pulse in pulses:
        pulse.close()
    for ours, peer in pairs:
        ours.close()
        while peer.recv(4096):
            pass
        peer.close()
    beater.end()
    assert beater.failure is None
    assert counts.statistics()["lateness_worst"] >= 0


def test_a_pulse_that_comes_later_is_not_late(pair: Pair, counts: Counts) -> None:
    beater = Beater(counts, threaded=False)
    assert beater.turn() is None
    pulse = pulse_of(pair, counts)
    beater.add(pulse)
    seconds = beater.turn()
    assert seconds is not None
    assert 0 < seconds <= 10
    pulse.written -= 10.0
    pulse.beaten -= 10.0
    second = Beater(counts, threaded=False)
    second.add(pulse)
    second.turn()
    assert read(pair[1], 8) == FRAME
    assert counts.row[names.BEATS] == 1
    pulse.close()


def test_a_thread_that_cannot_be_started_is_told(
    pair: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keyfront.gateway.heartbeat import native

    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native, "start_new_thread", full)
    pulse = pulse_of(pair, counts)
    beater = Beater(counts, threaded=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start"):
            beater.add(pulse)
    pulse.close()


def test_an_error_ends_the_thread_and_leaves_its_name(pair: Pair, counts: Counts) -> None:
    failed = threading.Event()

    class Failing(Pulse):
        def beat(self, now: float) -> float | None:
            failed.set()
            raise ZeroDivisionError

    pulse = Failing(pair[0].fileno(), interval=0.0, timeout=0.0, row=counts.row)
    beater = Beater(counts, threaded=True)
    beater.add(pulse)
    assert failed.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while beater.failure is None:
        assert time.monotonic() < deadline
    assert beater.failure == "ZeroDivisionError"
    pulse.close()
