"""Leases: until when an answer stands that was made of something outside of the database."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfront.middleware.tokens import directory_leases as module
from keyfront.middleware.tokens.directory_leases import SECONDS, Leases
from keyfront.middleware.tokens.directory_leases import leases as process_leases
from keyfront.middleware.tokens.epochs import Epoch, Slots
from keyfront.middleware.tokens.keys_and_entries import Entry, FollowedEntry, Lifetime
from keyfront.middleware.tokens.tags_header import parse
from support.token_worlds import World, own_leases


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[Leases]:
    with own_leases(tmp_path) as made:
        yield made


def test_nobody_follows_what_nobody_knows(leases: Leases) -> None:
    assert leases.until("a") == 0.0
    assert not leases.stand(frozenset({"a"}))
    assert process_leases.until(("a",)) == 0.0


def test_a_moment_up_to_which_all_is_known(leases: Leases, tmp_path: Path) -> None:
    now = time.monotonic()
    leases.grant("a", now)
    assert leases.until("a") == now + SECONDS
    leases.grant("a", now - 5)  # of one who stood still; what was said stays true
    assert leases.until("a") == now + SECONDS
    other = Leases(tmp_path)  # another process
    assert other.until("a") == now + SECONDS
    assert leases.standing() == module.standing(tmp_path) == 1
    leases.grant("b", now - 0.5)
    assert process_leases.until(("a", "b")) == now - 0.5 + SECONDS


def test_what_stands_is_told_to_who_takes_no_part(leases: Leases, tmp_path: Path) -> None:
    assert module.standing(tmp_path) == 0
    leases.grant("a", time.monotonic())
    leases.grant("b", time.monotonic() - 2 * SECONDS)
    assert module.standing(tmp_path) == 1
    assert module.standing(tmp_path / "nowhere") == 0
    file = tmp_path / module.NAME
    data = file.read_bytes()
    for damaged in (b"", data[:-8], data[:-1], bytes(8) + data[8:]):  # the last: of another boot
        file.write_bytes(damaged)
        assert module.standing(tmp_path) == 0


def test_what_need_not_be_followed(leases: Leases) -> None:
    leases.grant("a", math.inf)
    assert leases.stand(frozenset({"a"}))
    leases.withdraw("a")
    assert leases.until("a") == 0.0
    now = time.monotonic()
    leases.grant("a", now)
    leases.withdraw("a")  # a claim that somebody makes stays
    assert leases.until("a") == now + SECONDS


def test_a_file_that_is_removed(leases: Leases, tmp_path: Path) -> None:
    leases.grant("a", time.monotonic())
    (tmp_path / module.NAME).unlink()
    other = Leases(tmp_path)
    assert other.until("a") == 0.0
    leases._looked = 0.0
    now = time.monotonic()
    leases.grant("a", now)
    assert other.until("a") == now + SECONDS


def test_another_boot(leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases.grant("a", time.monotonic() + 1000)
    monkeypatch.setattr(module, "boot_word", lambda: 17)
    assert Leases(tmp_path).until("a") == 0.0


def test_no_more_than_there_is_room_for(leases: Leases) -> None:
    for number in range(module._PLACES + 5):
        leases.grant(str(number), time.monotonic())
    assert leases.until("0") > 0
    assert leases.until(str(module._PLACES + 1)) == 0.0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert process_leases.make(tmp_path / "file") is None
    assert process_leases.until(("a",)) == 0.0


def entry(followed: tuple[str, ...]) -> Entry:
    kind = FollowedEntry if followed else Entry
    return kind(
        "200 OK", [("x-openstack-request-id", "")], b"{}", request_id=0, subject=-1, split=-1,
        epoch=Epoch(1, 1), slots=Slots([0]), lifetime=Lifetime(1e12, 1e12, followed),
    )  # fmt: skip


def test_an_entry_ends_with_the_first_of_its_leases(leases: Leases) -> None:
    made = entry(("a", "b"))
    assert made.deadline == 0.0
    now = time.monotonic()
    leases.grant("a", now)
    assert made.deadline == 0.0
    leases.grant("b", now + 1)
    assert made.deadline == now + SECONDS
    again = Entry.unpack(made.pack())
    assert isinstance(again, FollowedEntry)
    assert (again.deadline, again.lifetime) == (made.deadline, made.lifetime)
    assert type(Entry.unpack(entry(()).pack())) is Entry


class Followed(World):
    """A world whose answers are made of what is followed under the name ``a``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keystone.followed = {"a"}


def test_what_nobody_follows_is_not_kept(leases: Leases, tmp_path: Path) -> None:
    world = Followed(tmp_path)
    for asked in (1, 2):
        world.get()
        assert world.keystone.asked == asked
    assert world.counts["not_followed"] == 2
    leases.grant("a", time.monotonic() + 60)  # no longer than this test takes
    world.get()
    world.get()
    assert world.keystone.asked == 3
    # Another worker has it from what they share, and nobody once the lease has passed.
    worker = world.worker()
    world.get(by=worker)
    assert world.keystone.asked == 3
    leases.deadlines[leases._place("a")] = time.monotonic() - 0.001
    world.get()
    world.get(by=worker)
    assert world.keystone.asked == 5


def test_a_service_is_told_a_second(leases: Leases, tmp_path: Path) -> None:
    """It hears of changes, and not of it when nobody follows any more."""
    world = Followed(tmp_path)
    leases.grant("a", time.monotonic() + 60)
    told = parse(world.get(HTTP_X_KEYFRONT_EPOCHS="2")[1]["X-Keyfront-Epochs"])
    assert told is not None and told.expires is not None
    assert told.expires <= time.time() + 1


def test_the_file_is_nobody_elses(leases: Leases, tmp_path: Path) -> None:
    assert os.stat(tmp_path / module.NAME).st_mode & 0o777 == 0o600
