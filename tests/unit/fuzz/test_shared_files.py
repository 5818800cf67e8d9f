"""Files that processes share, damaged: never a wrong yes, and nothing but the documented errors."""

from __future__ import annotations

import math
import random
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError, CredentialsError, PoolTimeoutError, Verdict
from keyfront.gateway.heartbeat import counters as heartbeat
from keyfront.gateway.node import counters as requests
from keyfront.middleware.ldap import service_refusals, user_refusals
from keyfront.middleware.tokens import counters as tokens
from keyfront.middleware.tokens import directory_leases as leases_module
from keyfront.middleware.tokens import node_cache
from keyfront.middleware.tokens.coordinator import local
from keyfront.middleware.tokens.epochs import ALL_SLOT, Epoch, Slots
from keyfront.middleware.tokens.keys_and_entries import Entry, FollowedEntry, Lifetime
from support.clocks import Clock
from support.fuzzing import damaged, each_case

_SLOTS = 1024
_STALE = Slots((ALL_SLOT, 100))
_OTHER = Slots((ALL_SLOT, 200))


def _put(path: Path, data: bytes) -> None:
    """Put another file in the place of one."""
    new = path.with_name(f"{path.name}-new")
    new.write_bytes(data)
    new.chmod(0o600)
    new.replace(path)


@contextmanager
def _documented() -> Iterator[None]:
    with suppress(CoordinatorError):
        yield


# The epoch table


def _use_table(table: local.SharedMemory, before: Epoch) -> None:
    """Do everything that can be done with a table, in which a change came after an epoch."""
    assert table.fresh(before, _STALE) is False
    with _documented():
        table.now()
    with _documented():
        table.snapshot()
    with _documented():
        table.statistics()
    with _documented():
        table.recover()
    with _documented():
        mark = table.mark(Slots((100, 300)))
        assert table.fresh(before, _STALE) is False
        table.stamp(mark)
    assert table.fresh(before, _STALE) is False
    with _documented():
        table.touch(Slots((200,)))
    with _documented():
        table.flush()
    assert table.fresh(before, _STALE) is False


def test_an_epoch_table_that_was_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    folder = tmp_path / "epochs"
    table = local.SharedMemory(folder, slot_count=_SLOTS)
    clock.later(2.0)
    table.recover()
    before = table.now()
    table.touch(Slots((100,)))
    table.mark(Slots((500, 501)))
    path = folder / local.NAME
    whole = path.read_bytes()
    table.close()

    def check(dice: random.Random) -> None:
        _put(path, damaged(whole, dice, (whole[:64], bytes(64))))
        with _documented():
            found = local.SharedMemory(folder, slot_count=_SLOTS)
            clock.later(2.0)
            _use_table(found, before)
            found.close()

    each_case("epoch table", 60, check)


def test_an_epoch_table_that_is_damaged_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junk over its beginning and its marks: it is taken away, and nobody fails or hangs."""
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    head, mark = local._HEADER_WORDS * 8, local._MARK_WORDS * 8

    def check(dice: random.Random) -> None:
        folder = tmp_path / "live"
        table = local.SharedMemory(folder, slot_count=_SLOTS)
        clock.later(2.0)
        for slots in ((500, 501), (7,), (8, 9, 10)):
            table.mark(Slots(slots))
        path = folder / local.NAME
        with path.open("r+b") as file:
            for _ in range(dice.choice((1, 2, 30))):
                begin = dice.choice((0, head, head, head + mark, head + 2 * mark))
                length = head if begin == 0 else dice.choice((32, mark))
                file.seek(begin + dice.randrange(length) & ~7)
                junk = (bytes(8), b"\xff" * 8, dice.randbytes(8), b"\1" + bytes(7))
                file.write(dice.choice(junk))
        pause = dice.choice((0.0, 0.2, 100.0))
        for step in (
            lambda: table.fresh(Epoch(1, 1), _OTHER), table.now, table.snapshot, table.statistics,
            table.recover, lambda: table.stamp(table.mark(Slots((100, 300)))),
            lambda: table.touch(Slots((200,))), table.flush,
        ):  # fmt: skip
            with _documented():
                step()
            clock.later(pause)
        table.close()
        # Whoever comes next has a table that can be used.
        with _documented():
            table = local.SharedMemory(folder, slot_count=_SLOTS)
            clock.later(2.0)
            table.stamp(table.mark(Slots((100,))))
            table.close()
        shutil.rmtree(folder)

    each_case("epoch table in use", 60, check)


# What the workers of a node share


def _entry(number: int, *, followed: tuple[str, ...] = ()) -> Entry:
    return (FollowedEntry if followed else Entry)(
        "200 OK", [("x-openstack-request-id", ""), ("Vary", "X-Auth-Token")], b"%d" % number * 99,
        request_id=0, subject=-1, split=-1, epoch=Epoch(1, number), slots=_STALE,
        lifetime=Lifetime(time.monotonic() + 100, math.inf, followed),
    )  # fmt: skip


def test_the_answers_of_a_node_that_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_cache, "_CHECK_SECONDS", 0.0)
    secret = b"s" * 32
    keys = [bytes((number,)) * 16 for number in range(40)]

    def node() -> node_cache.NodeCache:
        made = node_cache.NodeCache(tmp_path, size=1 << 19, values=1 << 16, flight_timeout=0.001)
        made.start(secret)
        return made

    one = node()
    for number, key in enumerate(keys):
        one.keep(key, _entry(number))
        one.keep_value(f"value {number}", b"%d" % number * 50)
    one.ask(keys[0])
    whole = {path: path.read_bytes() for path in tmp_path.iterdir() if path.stat().st_size}

    def use(node: node_cache.NodeCache, dice: random.Random) -> None:
        for number in dice.sample(range(len(keys)), 8):
            key = keys[number]
            entry = node.find(key)
            assert entry is None or entry.body == _entry(number).body
            value = node.value(f"value {number}")
            assert value in (None, b"%d" % number * 50)
            assert node.packed(key, subject=True) is None
            node.ask(key)
            found = node.wait(key, lambda entry: True)
            assert found is None or found.body == _entry(number).body
            node.keep(key, _entry(number))
            node.renew(key, _entry(number))
            node.keep_value(f"value {number}", b"%d" % number * 50)
            node.answered(key)
        with _documented():
            node.statistics()
        with _documented():
            node_cache.users(tmp_path)

    def check(dice: random.Random) -> None:
        path = dice.choice(sorted(whole))
        if dice.random() < 0.5:
            _put(path, damaged(whole[path], dice))
            with _documented():
                use(node(), dice)
        else:  # under those who have it mapped
            with _documented():
                there = node()
                with path.open("r+b") as file:
                    for _ in range(dice.choice((1, 20))):
                        end = dice.choice((64, 20_000, len(whole[path])))
                        file.seek(dice.randrange(min(end, len(whole[path]) - 8)) & ~7)
                        file.write(dice.choice((b"\xff" * 8, bytes(8), dice.randbytes(8))))
                use(there, dice)
                # It heals: what is kept from now on is found again.
                there.check()
                there.keep(keys[5], _entry(5))
                assert there.find(keys[5]) is not None
        for path, data in whole.items():
            _put(path, data)

    each_case("answers of a node", 40, check)


def test_counts_that_were_damaged(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    counts = requests.NodeCounts()
    counts.share(tmp_path)
    counts.begin()
    counts.found(0, True)
    tokens_path = tmp_path / "counters"
    tokens.Counters(tokens_path, FileLock(tmp_path / "lock"))
    whole = {one: one.read_bytes() for one in (path, tokens_path)}
    beats = heartbeat.Counts(tmp_path / "beats")
    assert beats.path is not None
    whole[beats.path] = beats.path.read_bytes()

    def check(dice: random.Random) -> None:
        for one, data in whole.items():
            _put(one, damaged(data, dice))
        with _documented():
            requests.read(tmp_path)
        with _documented():
            tokens.read(tokens_path)
        with _documented():
            tokens.processes(tokens_path)
        for told in heartbeat.read_all([tmp_path / "beats"]):
            assert "".join(told["unsafe"]).isprintable()
        with _documented():
            made = tokens.Counters(tokens_path, FileLock(tmp_path / "lock"))
            made.count(1)
            made.claim()
            made.count(1)
            made.statistics()
        counts.share(tmp_path)
        counts.begin()

    each_case("counts", 60, check)
    beats.close()


def test_leases_that_were_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_LOOK_SECONDS", -1.0)
    made = leases_module.Leases(tmp_path)
    made.grant("followed", time.monotonic())
    path = tmp_path / leases_module.NAME
    whole = path.read_bytes()

    def check(dice: random.Random) -> None:
        _put(path, damaged(whole, dice))
        with _documented():
            found = leases_module.Leases(tmp_path)
            end = time.monotonic() + 1000
            assert not math.isnan(min(end, found.until("followed")))
            assert not found.until("nobody's")
            found.stand(frozenset({"followed"}))
            found.standing()
            # Whoever follows says it again, and then nothing stands for longer than that.
            found.grant("followed", time.monotonic())
            assert found.until("followed") <= time.monotonic() + leases_module.SECONDS
            found.withdraw("followed")

    each_case("leases", 200, check)


def test_a_lease_that_is_no_number_ends_what_is_followed(tmp_path: Path) -> None:
    made = leases_module.leases.make(tmp_path)
    assert made is not None
    try:
        now = time.monotonic()
        made.grant("d", now)
        entry = _entry(1, followed=("d",))
        assert entry.deadline > now
        made.deadlines[made._place("d")] = math.nan
        assert entry.deadline < now
        made.grant("d", now)
        assert entry.deadline > now
    finally:
        leases_module.leases.leases = None


# Of the directory


def _login(limit: user_refusals.UserRefusals, name: str) -> bool:
    """Have a login refused; returns whether it was sent."""
    try:
        with limit.attempt(name, "192.0.2.1", 0.0):
            raise CredentialsError(Verdict.WRONG_PASSWORD)
    except CredentialsError as error:
        return error.verdict is Verdict.WRONG_PASSWORD
    except PoolTimeoutError:
        return False


def test_refused_logins_whose_counts_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_refusals, "shared_folder", lambda: tmp_path)
    # With few places the whole file is full.
    monkeypatch.setattr(user_refusals, "_PLACES", 8)
    monkeypatch.setattr(user_refusals, "_SIZE", 16 + 16 * user_refusals._ENTRY.size)
    names = [f"uid={number}" for number in range(16)]
    limit = user_refusals.UserRefusals(3, 60.0, ("ldap://one",))
    for name in names:
        _login(limit, name)
    (path,) = tmp_path.glob("*.refused")
    whole = path.read_bytes()

    def check(dice: random.Random) -> None:
        data = bytearray(whole)
        entries = dice.sample(range(16), 4)
        for number in entries:
            at = 16 + number * user_refusals._ENTRY.size + dice.choice((8, 16, 20))
            junk = dice.choice(
                (b"\xff" * 8, struct.pack("<d", math.nan), struct.pack("<i", -(2**31)) * 2,
                 struct.pack("<i", 2**31 - 1) * 2, dice.randbytes(8))
            )  # fmt: skip
            data[at : at + 8] = junk
        _put(path, damaged(bytes(data), dice))
        for name in names:
            # However it is: no more than three are sent of one user.
            assert sum(_login(limit, name) for _ in range(5)) <= 3

    each_case("refused logins", 60, check)


def test_refusals_of_a_service_that_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_refusals, "shared_folder", lambda: tmp_path)
    monkeypatch.setitem(service_refusals._COST, "n", 2)
    refusals = service_refusals.ServiceRefusals(("cn=service",))
    error = CredentialsError(Verdict.LOCKED, 19, "constraintViolation", "too often", server="x")
    refusals.note(b"secret", error, "one")
    refusals.note(b"secret", error, "two")
    (path,) = tmp_path.glob("*.json")
    whole = path.read_bytes()
    pieces = (
        b"NaN", b"1e999", b"-1", b"9" * 400, b"9" * 5000, b"null", b"{}", b"[]", b'"', b"\xff",
        b"[" * 60_000, b'{"a":' * 12_000, b'"\\ud800"', b"true",
    )  # fmt: skip

    def check(dice: random.Random) -> None:
        _put(path, damaged(whole, dice, pieces))
        found = service_refusals.ServiceRefusals(("cn=service",))
        for server in (None, "one", "three"):
            held = found.held(b"secret", server)
            assert held is None or 0 <= float(str(held).rpartition(" for ")[2].split()[0]) <= 300
        found.forget(b"secret", "one")
        found.note(b"secret", error, "two")
        found.note(b"secret", error)
        # Whatever was there, what is refused now is held back.
        assert found.held(b"secret") is not None

    each_case("refusals of a service", 120, check)
