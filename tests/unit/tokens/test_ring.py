"""The ring of entries that processes share: signed, bounded, and nothing without its secret."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import node_cache as module
from keyfront.middleware.tokens.epochs import Epoch, Slots
from keyfront.middleware.tokens.keys_and_entries import Entry, Lifetime
from keyfront.middleware.tokens.node_cache import NodeCache, Store, rings
from support.clocks import Clock

SECRET = b"s" * 32
SIZE = 64 * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path, SIZE, SECRET)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def packed(number: int, length: int = 1000) -> bytes:
    return random.Random(number).randbytes(length)


def test_what_is_put_is_found_by_all(path: Path, store: Store) -> None:
    assert store.get(key(1)) is None
    assert store.put(key(1), packed(1))
    assert store.put(key(2), b"")
    for each in (store, Store(path, SIZE, SECRET)):
        assert each.get(key(1)) == packed(1)
        assert each.get(key(2)) == b""
        assert each.get(key(3)) is None


def test_the_file(path: Path, store: Store) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size > SIZE
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # its room is reserved


def test_the_last_of_a_key_is_found(store: Store) -> None:
    for number in range(5):
        store.put(key(1), packed(number))
        assert store.get(key(1)) == packed(number)


def test_drop(store: Store) -> None:
    store.put(key(1), packed(1))
    store.put(key(2), packed(2))
    store.drop(key(1))
    store.drop(key(1))
    assert store.get(key(1)) is None
    assert store.get(key(2)) == packed(2)


def test_another_secret_empties_it(path: Path, store: Store) -> None:
    store.put(key(1), packed(1))
    other = Store(path, SIZE, b"t" * 32)
    assert other.get(key(1)) is None
    assert store.get(key(1)) is None
    # And who still has the old secret is not believed, nor finds what is signed with the new one.
    store.put(key(2), packed(2))
    assert other.get(key(2)) is None
    other.put(key(3), packed(3))
    assert store.get(key(3)) is None
    assert Store(path, SIZE, SECRET).get(key(2)) is None


def test_another_size_is_another_file(path: Path, store: Store) -> None:
    store.put(key(1), packed(1))
    other = Store(path, SIZE * 2, SECRET)
    assert other.get(key(1)) is None
    assert store.get(key(1)) == packed(1)  # still mapped, and not cut off


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o601])
def test_a_file_open_to_others_is_replaced(path: Path, store: Store, mode: int) -> None:
    store.put(key(1), packed(1))
    path.chmod(mode)
    assert Store(path, SIZE, SECRET).get(key(1)) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_replaced(path: Path, store: Store) -> None:
    store.put(key(1), packed(1))
    os.chown(path, 12345, -1)
    assert Store(path, SIZE, SECRET).get(key(1)) is None
    assert path.stat().st_uid == os.geteuid()


def test_a_symbolic_link_is_refused(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(CoordinatorError, match="cannot be made"):
        Store(path, SIZE, SECRET)
    assert not path.with_name("elsewhere").exists()


def test_a_full_file_system_names_the_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoordinatorError, match=r"No space left on device; it needs \d+ bytes"):
        Store(path, SIZE, SECRET)
    assert not path.exists()


def test_random_bytes_are_an_empty_store(path: Path, store: Store) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    other = Store(path, SIZE, SECRET)
    assert all(other.get(key(number)) is None for number in range(100))
    other.put(key(1), packed(1))
    assert other.get(key(1)) == packed(1)


# Damage


def test_no_bit_of_an_entry_can_be_changed(store: Store) -> None:
    text = packed(1, 100)
    store.put(key(1), text)
    start = store._ring_at
    for place in range(start, start + 116):
        for bit in range(8):
            store._map[place] ^= 1 << bit
            assert store.get(key(1)) is None
            store._map[place] ^= 1 << bit
    assert store.get(key(1)) == text


def test_no_bit_of_a_bucket_can_be_changed(store: Store) -> None:
    """Not even by a writer: neither which entry, nor where, nor how long."""
    for number in range(20):
        store.put(key(number), packed(number, 100))
    (at,) = [at for at in store._probe(key(9)) if store._map[at : at + 16] == key(9)]
    for place in range(at, at + 32):
        for bit in range(8):
            store._map[place] ^= 1 << bit
            assert store.get(key(9)) in (None, packed(9, 100))
            store._map[place] ^= 1 << bit
    assert store.get(key(9)) == packed(9, 100)


def test_an_entry_does_not_pass_for_another(store: Store) -> None:
    """Its signature is over its key, so a bucket with another key in it finds nothing."""
    store.put(key(1), packed(1))
    for at in store._probe(key(1)):
        if store._map[at : at + 16] == key(1):
            bucket = store._map[at : at + 32]
    to = store._probe(key(2))[0]
    store._map[to : to + 32] = key(2) + bucket[16:]
    assert store.get(key(2)) is None


def test_a_torn_write_is_none(store: Store) -> None:
    """Whatever a killed writer has written of an entry and its bucket."""
    store.put(key(1), packed(0, 300))
    before = store._map[:]
    store.put(key(1), packed(1, 300))
    after = store._map[:]
    changed = [place for place in range(len(after)) if before[place] != after[place]]
    dice = random.Random(3)
    for _ in range(300):
        written = set(dice.sample(changed, dice.randrange(len(changed))))
        for place in changed:
            store._map[place] = after[place] if place in written else before[place]
        assert store.get(key(1)) in (None, packed(0, 300), packed(1, 300))


def test_random_damage_never_raises(store: Store) -> None:
    dice = random.Random(4)
    for number in range(60):
        store.put(key(number), packed(number, 500))
    for _ in range(300):
        place = dice.randrange(64 + 32, len(store._map))
        store._map[place] = dice.randrange(256)
        number = dice.randrange(60)
        assert store.get(key(number)) in (None, packed(number, 500))
        store.ages(key(number))
        store.asked(key(number))
        if dice.random() < 0.3:
            store.put(key(number), packed(number, 500))
        store.ask(key(number), 5)
        store.answered(key(number))


# The ring


def test_the_oldest_go_first(store: Store) -> None:
    for number in range(200):
        store.put(key(number), packed(number))
    found = [number for number in range(200) if store.get(key(number)) is not None]
    assert len(found) > 50
    assert all(store.get(key(number)) in (None, packed(number)) for number in range(200))
    # All of one age up to the last, but for those whose bucket another one took.
    assert found[0] >= 200 - SIZE // 1016 - 1
    assert found[-1] == 199


def test_it_stays_in_its_ring(path: Path, store: Store) -> None:
    size = path.stat().st_size
    dice, last = random.Random(5), {}
    for number in range(3000):
        length = dice.randrange(1, SIZE // 8 - 16)
        name = dice.randrange(50)
        assert store.put(key(name), packed(number, length))
        last[name] = packed(number, length)
        probe = dice.choice(list(last))
        assert store.get(key(probe)) in (None, last[probe])
    assert path.stat().st_size == size


def test_an_entry_that_fills_the_ring_to_its_last_byte(path: Path) -> None:
    store = Store(path, 8 * 1000, SECRET)
    for number in range(8):
        assert store.put(key(number), packed(number, 1000 - 16))
    assert [store.get(key(number)) for number in range(8)] == [
        packed(number, 984) for number in range(8)
    ]
    store.put(key(8), packed(8, 984))
    assert store.get(key(0)) is None
    assert store.get(key(1)) == packed(1, 984)
    assert store.get(key(8)) == packed(8, 984)


def test_an_entry_is_in_one_piece(path: Path) -> None:
    store = Store(path, 8000, SECRET)
    for number in range(30):
        store.put(key(number), packed(number, 700))
        assert store.get(key(number)) == packed(number, 700)


def test_too_large_an_entry_is_not_stored(store: Store) -> None:
    store.put(key(1), packed(1))
    assert not store.put(key(2), bytes(SIZE // 8))
    assert store.put(key(3), bytes(SIZE // 8 - 16))
    assert store.get(key(2)) is None
    assert store.get(key(1)) == packed(1)


def test_what_is_read_and_renewed_stays(store: Store) -> None:
    """The least recently used go first, roughly: who reads what ages stores it again."""
    renewed = lost = 0
    store.put(key(0), packed(0))
    for number in range(1, 2000):
        if store.get(key(0)) is None:
            lost += 1  # all its buckets were taken by younger ones
            store.put(key(0), packed(0))
        elif store.ages(key(0)):
            renewed += 1
            store.put(key(0), packed(0))
        store.put(key(number), packed(number))
        assert not store.ages(key(number))
    assert lost <= 5
    assert renewed <= 2000 // (SIZE // 1016 // 2) + lost + 2
    assert not store.ages(key(5000))


def test_refusals_have_bounds_of_their_own(tmp_path: Path) -> None:
    """A flood of bad tokens fills one store and leaves the other."""
    answers = Store(tmp_path / "answers", SIZE, SECRET)
    refusals = Store(tmp_path / "refusals", SIZE // 8, SECRET)
    answers.put(key(0), packed(0))
    for number in range(1, 500):
        refusals.put(key(number), packed(number, 500))
    assert answers.get(key(0)) == packed(0)
    assert sum(refusals.get(key(number)) is not None for number in range(1, 500)) <= 15


def test_keys_that_share_their_buckets(store: Store) -> None:
    """Four fit; a fifth takes the place of the oldest of them."""
    same = [bytes(8) + number.to_bytes(8, "little") for number in range(1, 6)]
    for number, each in enumerate(same[:4]):
        store.put(each, packed(number))
    assert [store.get(each) for each in same[:4]] == [packed(number) for number in range(4)]
    store.put(same[4], packed(4))
    assert [store.get(each) is None for each in same] == [True, False, False, False, False]
    # Neighbours reach into each other's buckets as well.
    neighbour = (2).to_bytes(8, "little") + bytes(8)
    store.put(neighbour, packed(9))
    assert store.get(neighbour) == packed(9)
    store.drop(same[2])
    assert store.get(same[4]) == packed(4)
    # A key keeps its bucket though one before it is free now.
    store.put(same[4], packed(5))
    assert store.get(same[4]) == packed(5)
    store.drop(same[4])
    assert store.get(same[4]) is None


def test_the_last_bucket_goes_on_at_the_first(store: Store) -> None:
    last = (store._buckets - 1).to_bytes(8, "little")
    same = [last + number.to_bytes(8, "little") for number in range(4)]
    for number, each in enumerate(same):
        store.put(each, packed(number))
    assert [store.get(each) for each in same] == [packed(number) for number in range(4)]


# Flights


def test_one_asks_and_others_wait(path: Path, store: Store, clock: Clock) -> None:
    other = Store(path, SIZE, SECRET)
    assert not other.asked(key(1))
    assert store.ask(key(1), 5)
    assert other.asked(key(1))
    assert not other.ask(key(1), 5)
    assert not store.ask(key(1), 5)
    assert other.ask(key(2), 5)
    store.answered(key(1))
    assert not other.asked(key(1))
    assert other.ask(key(1), 5)
    assert store.asked(key(2))


def test_who_does_not_answer_is_not_waited_for_any_more(store: Store, clock: Clock) -> None:
    assert store.ask(key(1), 5)
    clock.later(4.9)
    assert store.asked(key(1))
    assert not store.ask(key(1), 5)
    clock.later(0.2)
    assert not store.asked(key(1))
    assert store.ask(key(1), 5)
    assert store.asked(key(1))
    store.answered(key(1))
    assert not store.asked(key(1))


def test_who_asks_and_dies_is_waited_for_no_longer(store: Store) -> None:
    """By others, at once: not for as long as it may take."""
    program = (
        "import sys; from pathlib import Path\n"
        "from keyfront.middleware.tokens.node_cache import Store\n"
        f"store = Store(Path(sys.argv[1]), {SIZE}, bytes.fromhex(sys.argv[2]))\n"
        "assert store.ask(bytes.fromhex(sys.argv[3]), 3600)\n"
        "print(flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(store._file._path), SECRET.hex(), key(1).hex()]
    asker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert asker.stdout is not None
    try:
        asker.stdout.readline()
        assert store.asked(key(1))
        assert not store.ask(key(1), 3600)
        asker.kill()
        asker.wait()
        assert not store.asked(key(1))
        assert store.ask(key(1), 3600)
        assert store.asked(key(1))
    finally:
        asker.kill()
        asker.communicate()


def test_without_room_all_ask(store: Store, clock: Clock) -> None:
    same = [number.to_bytes(8, "little") + bytes(8) for number in range(6)]
    for each in same:
        assert store.ask(each, 5)
    assert [store.asked(each) for each in same] == [True] * 4 + [False] * 2
    assert store.ask(same[4], 5)
    store.answered(same[4])
    clock.later(6)
    assert store.ask(same[4], 5)
    assert store.asked(same[4])


def test_a_flight_is_no_entry(store: Store, clock: Clock) -> None:
    store.ask(key(1), 5)
    assert store.get(key(1)) is None
    store.put(key(1), packed(1))
    store.answered(key(1))
    assert store.get(key(1)) == packed(1)


# Read by keyfront tokens stats


def test_read_without_taking_part(path: Path, store: Store) -> None:
    for number in range(10):
        store.put(key(number), packed(number))
    found = module.read(path)
    assert found["stored"] == 10
    assert found["bytes"] == 10 * 1016
    for number in range(200):
        store.put(key(number), packed(number))
    found = module.read(path)
    # The ring alone is for entries, not what lies before it.
    assert found["bytes"] == found["bytes_limit"] == SIZE


@pytest.mark.parametrize("content", [None, b"", b"x" * 9])
def test_what_cannot_be_read(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CoordinatorError, match=r"answers: "):
        module.read(path)


def _node(folder: Path, configured: bytes, **parts: bool) -> NodeCache:
    node = NodeCache(folder, size=SIZE, flight_timeout=1, configured=configured, **parts)
    node.start(SECRET)
    return node


def test_workers_with_other_parts_do_not_make_each_others_files_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where ``routes`` of one pipeline are others, in its section of the paste file."""
    monkeypatch.setattr(module, "_CHECK_SECONDS", -1.0)
    nodes = [
        _node(tmp_path, b"same", subjects=subjects, listings=listings)
        for subjects in (True, False) for listings in (True, False)
    ]  # fmt: skip
    for node in nodes:
        node.keep_packed(key(1), packed(1))
    for node in nodes:
        node.check()
    assert [node.packed(key(1)) for node in nodes] == [packed(1)] * len(nodes)
    assert not caplog.records


def test_what_one_request_shares_is_kept_under_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = (
        NodeCache(tmp_path, size=SIZE, flight_timeout=1, values=SIZE) for _ in range(2)
    )  # fmt: skip
    node.start(SECRET)
    other.start(SECRET)
    taken: list[object] = []
    attempt = FileLock.attempt
    monkeypatch.setattr(FileLock, "attempt", lambda self: taken.append(self) or attempt(self))
    node.keep_together([("one", b"1"), ("two", b"2")], (key(1), packed(1)))
    assert len(taken) == 1
    assert (other.value("one"), other.value("two")) == (b"1", b"2")
    assert other.packed(key(1), subject=True) == packed(1)
    node.keep_together([])
    assert len(taken) == 1


def test_nothing_is_shared_while_the_lock_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = NodeCache(tmp_path, size=SIZE, flight_timeout=1, values=SIZE)
    node.start(SECRET)

    def stuck(lock: FileLock) -> None:
        raise CoordinatorError(f"{tmp_path}: stuck")

    monkeypatch.setattr(FileLock, "__enter__", stuck)
    node.keep_together([("one", b"1")], (key(1), packed(1)))
    assert [record.message for record in caplog.records] == [
        f"token cache: what is known of a token is not shared: {tmp_path}: stuck",
        f"token cache: what Keystone computes is not shared: {tmp_path}: stuck",
    ]
    # for a while values are not tried again; facts are, as one request has one
    node.keep_together([("one", b"1")])
    assert len(caplog.records) == 2
    assert node.value("one") is None
    assert node.packed(key(1), subject=True) is None


def test_workers_of_two_configurations_have_entries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other over a reload: what the former ones answer is not the new ones'."""
    monkeypatch.setattr(module, "_CHECK_SECONDS", -1.0)
    former, another = _node(tmp_path, b"former"), _node(tmp_path, b"former")
    entry = Entry(
        "200 OK", [], b"{}", request_id=-1, subject=-1, split=-1, epoch=Epoch(1, 1),
        slots=Slots((1,)), lifetime=Lifetime(1e9, 1e12),
    )  # fmt: skip
    former.keep(key(1), entry)
    new = _node(tmp_path, b"new")
    assert another.find(key(1)) is not None
    assert new.find(key(1)) is None
    for node in (former, new, another):
        node.check()
    assert another.find(key(1)) is not None, "a ring in use was taken away"
    assert len(rings(tmp_path)) == 8
    del former, another, node
    new.check()
    assert len(rings(tmp_path)) == 4
