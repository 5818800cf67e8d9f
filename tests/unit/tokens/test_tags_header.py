"""What Keystone's cache tells services of how long an answer stands."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sqlalchemy")

from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.epochs import DIGEST, Epoch, Slots, slots
from support.token_worlds import FAR, World

ASKED = {tags_header.ENVIRON_KEY: tags_header.ASK}


@pytest.fixture
def world(tmp_path: Any) -> World:
    return World(tmp_path / "epochs")


class TestValue:
    @given(
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**63),
        st.sets(st.integers(0, 2**24 - 1), min_size=1, max_size=60),
    )
    def test_what_was_composed_is_parsed(
        self, generation: int, sequence: int, numbers: set[int]
    ) -> None:
        epoch, found = Epoch(generation, sequence), Slots(numbers)
        assert tags_header.parse(tags_header.compose("1", epoch, found, 9.5)) == (
            *(epoch, found, None, ""),
        )
        for ends, expected in ((9.5, 9.0), (math.inf, math.inf)):
            value = tags_header.compose("2", epoch, found, ends)
            assert tags_header.parse(value) == (epoch, found, expected, DIGEST)

    @pytest.mark.parametrize(
        "value",
        [
            *("", "none", "1", "a.1", "a.1.", "a.1.1,", "a.1.,1", "A.1.1", "a.-1.1", "a.1.1;2"),
            *("a.1.1 ", " a.1.1", "a.1.1\n", "a.1.\u0661", "a.1.123456789", "x.1.1"),
            *("a.1.1.1", "a.1.1.1.", "a.1.1.1.12345678901", "a.1.1.1.0123456789aX"),
            *("a.1.1.", "a.1.1.x", "a.1.1.-1", "a.1.1.inf", "a.1.1.1234567890123", "a.1.1.1.1"),
            *("1" * 17 + ".1.1", "a." + "1" * 20 + ".1", "a.1." + "1," * 3000 + "1"),
        ],
    )
    def test_anything_else_is_nothing(self, value: str) -> None:
        assert tags_header.parse(value) is None


class TestTelling:
    def test_who_does_not_ask_is_not_told(self, world: World) -> None:
        for _ in range(2):
            _, headers, _ = world.get(HTTP_IF_NONE_MATCH='"x"')
            assert tags_header.NAME not in headers
            assert "ETag" not in headers

    def test_the_first_answer_is_told_as_the_next_ones_are(self, world: World) -> None:
        first = world.get(**ASKED)
        again = world.get(**ASKED)
        assert world.keystone.asked == 1
        of_node = world.get(by=world.worker(), **ASKED)
        assert world.keystone.asked == 1
        told = {answer[1][tags_header.NAME] for answer in (first, again, of_node)}
        assert len(told) == 1
        assert {answer[1]["ETag"] for answer in (first, again, of_node)} == {first[1]["ETag"]}
        assert first[2] == again[2] == of_node[2] == b"body of t"

    def test_what_is_told_is_what_the_answer_stands_by(self, world: World) -> None:
        _, headers, _ = world.get(**ASKED)
        parsed = tags_header.parse(headers[tags_header.NAME])
        assert parsed is not None
        epoch, found, ends, _ = parsed
        assert ends == datetime.datetime.fromisoformat(FAR).timestamp()
        assert world.coordinator.fresh(epoch, found)
        world.change("catalog")
        assert not world.coordinator.fresh(epoch, found)
        count = world.coordinator.slot_count
        for name in ("all", "user:user-t", "audit:audit-t", "user:user-admin", "audit:audit-admin"):
            assert set(slots([name], count)) <= set(found), name

    def test_asking_does_not_change_what_is_found(self, world: World) -> None:
        world.get()
        world.get(**ASKED)
        world.get(**ASKED, HTTP_IF_NONE_MATCH='"else"')
        assert world.keystone.asked == 1

    def test_a_kept_refusal_is_told_without_a_tag_of_its_body(self, world: World) -> None:
        for _ in range(2):
            status, headers, _ = world.get(subject="gone", **ASKED)
            assert status.startswith("404")
            assert tags_header.parse(headers[tags_header.NAME]) is not None
            assert "ETag" not in headers
        assert world.keystone.asked == 1

    def test_what_a_change_has_overtaken_is_told_to_be_for_once(self, world: World) -> None:
        world.keystone.while_answering = lambda: world.change("catalog")
        status, headers, body = world.get(**ASKED)
        assert (status, body) == ("200 OK", b"body of t")
        assert headers[tags_header.NAME] == tags_header.NONE
        assert "ETag" not in headers

    def test_what_bypasses_the_cache_is_told_to_be_for_once(self, world: World) -> None:
        for more in ({"REMOTE_USER": "x"}, {"CONTENT_LENGTH": "3"}):
            _, headers, body = world.get(**ASKED, **more)
            assert headers[tags_header.NAME] == tags_header.NONE
            assert body == b"body of t"

    def test_without_epochs_it_is_told_to_be_for_once(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.get(**ASKED)
        world.cache.coordinator.close()
        monkeypatch.setattr(world.cache.coordinator, "_looked", 0)
        _, headers, body = world.get(**ASKED)
        assert headers[tags_header.NAME] == tags_header.NONE
        assert body == b"body of t"

    def test_an_error_is_told_to_be_for_once(self, world: World) -> None:
        world.keystone.records = False
        _, headers, _ = world.get(**ASKED)
        assert headers[tags_header.NAME] == tags_header.NONE


class TestConditional:
    def test_who_has_the_body_is_answered_without_it(self, world: World) -> None:
        tag = world.get(**ASKED)[1]["ETag"]
        status, headers, body = world.get(**ASKED, HTTP_IF_NONE_MATCH=tag)
        assert (status, body) == ("304 Not Modified", b"")
        assert headers["ETag"] == tag
        assert tags_header.parse(headers[tags_header.NAME]) is not None
        assert "Content-Length" not in headers
        assert "x-openstack-request-id" in headers
        assert world.keystone.asked == 1

    def test_another_tag_is_answered_whole(self, world: World) -> None:
        world.get(**ASKED)
        for tag in ('"else"', "*", ""):
            status, _, body = world.get(**ASKED, HTTP_IF_NONE_MATCH=tag)
            assert (status, body) == ("200 OK", b"body of t")

    def test_an_answer_asked_anew_with_the_same_body_has_the_same_tag(self, world: World) -> None:
        tag = world.get(**ASKED)[1]["ETag"]
        world.change("catalog")
        status, _, body = world.get(**ASKED, HTTP_IF_NONE_MATCH=tag)
        assert (status, body) == ("304 Not Modified", b"")
        assert world.keystone.asked == 2

    def test_after_a_change_of_the_body_it_is_given(self, world: World) -> None:
        tag = world.get(**ASKED)[1]["ETag"]
        world.keystone.body = "new body of {}"
        world.change("catalog")
        status, headers, body = world.get(**ASKED, HTTP_IF_NONE_MATCH=tag)
        assert (status, body) == ("200 OK", b"new body of t")
        assert headers["ETag"] != tag

    def test_a_revoked_token_is_refused_whatever_the_tag(self, world: World) -> None:
        tag = world.get(**ASKED)[1]["ETag"]
        del world.keystone.known["t"]
        world.change("audit:audit-t")
        status, _, _ = world.get(**ASKED, HTTP_IF_NONE_MATCH=tag)
        assert status.startswith("404")

    def test_the_tag_of_one_request_is_not_taken_for_anothers(self, world: World) -> None:
        world.keystone.body = "the same"
        tag = world.get(**ASKED)[1]["ETag"]
        del world.keystone.known["u"]
        status, _, _ = world.get(subject="u", **ASKED, HTTP_IF_NONE_MATCH=tag)
        assert status.startswith("404")

    def test_only_a_get_is_answered_without_a_body(self, world: World) -> None:
        head = {"REQUEST_METHOD": "HEAD"}
        _, headers, _ = world.get(**ASKED, **head)
        assert "ETag" not in headers
        assert tags_header.parse(headers[tags_header.NAME]) is not None
