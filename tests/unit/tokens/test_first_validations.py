"""First validations are answered from what is known of token and caller, and from nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.common.file_lock import FileLock
from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.cache import TokenCache
from keyfront.middleware.tokens.coordinator.local import Table
from keyfront.middleware.tokens.keys_and_entries import new_request_id
from keyfront.middleware.tokens.request import ENVIRON_KEY, Enforced, Issued, Request
from support.token_worlds import FAR, Keystone, World, model

METHODS = ["password", "token"]
AS_ISSUED = ["token", "password"]


class Issuing(Keystone):
    """A stand-in that issues tokens, and asks a policy of its own whether a caller may see one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = json.dumps({"token": {"methods": METHODS, "user": {"id": "u"}}})
        #: Whom the policy lets, by the user's id: ``None`` all tokens, else only those of himself.
        self.may: dict[str, str | None] = {"user-admin": None, "user-nova": None}
        self.decisions = 0
        self.plain = True
        #: What the policy is told of a caller besides.
        self.more: dict[str, Any] = {}
        self.new = 0
        self.accepts = True
        self.while_issuing: Any = lambda: None
        # Names that no body has in it.
        self.known = {f"T-{name}": model(name) for name in ("admin", "nova", "t", "u")}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["REQUEST_METHOD"] == "POST":
            return self._issue(environ, start_response)
        request: Request | None = environ.get(ENVIRON_KEY)
        caller = self.known.get(environ.get("HTTP_X_AUTH_TOKEN", ""))
        subject = self.known.get(environ.get("HTTP_X_SUBJECT_TOKEN", ""))
        if request is not None and caller is not None and subject is not None:
            credentials = {"user_id": caller.user_id, **self.more}
            target = {"target.token.user_id": subject.user_id}
            request.enforced.append(Enforced(credentials, target))
        return super().__call__(environ, start_response)

    def decide(
        self, credentials: Mapping[str, Any], target: Mapping[str, Any]
    ) -> frozenset[str] | None:
        self.decisions += 1
        user = credentials["user_id"]
        if not self.plain:
            return None
        if user in self.may:
            return frozenset()
        own = target["target.token.user_id"] == user
        return frozenset({"target.token.user_id"}) if own else None

    def _issue(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.new += 1
        token = f"new-{self.new}"
        made = self.known[token] = model(f"n{self.new}", id=token, methods=AS_ISSUED)
        self.while_issuing()
        request: Request = environ[ENVIRON_KEY]
        if self.accepts:
            target = {"target.token.user_id": made.user_id}
            request.issued = Issued(made, METHODS, target)
            request.accepted[token] = made
        request.unvouched = self.unvouched
        body = self.body.replace(json.dumps(METHODS), json.dumps(AS_ISSUED)).encode()
        start_response(
            "201 CREATED",
            [
                ("Content-Length", str(len(body))),
                ("X-Subject-Token", token),
                ("x-openstack-request-id", new_request_id()),
            ],
        )
        return [body]


class Cloud(World):
    """The filter in front of :class:`Issuing`, and who asks."""

    keystone: Issuing

    def __init__(self, folder: Path, *, switched_on: bool = True, **options: Any) -> None:
        super().__init__(folder, **options)
        self.keystone = Issuing()
        if switched_on:
            self.options["decide"] = self.keystone.decide
        self.keystone.body = self.keystone.body.replace("{", "{{").replace("}", "}}")
        self.cache = self.worker()

    def login(self, *, by: TokenCache | None = None, **more: str) -> str:
        given: list[Any] = []
        # A stand-in's body is a format.
        shown, self.keystone.body = self.keystone.body, self.keystone.body.format("")
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/v3/auth/tokens", **more}
        body = b"".join(
            (by or self.cache)(environ, lambda status, headers: given.extend((status, headers)))
        )
        self.keystone.body = shown
        assert given[0] == "201 CREATED"
        assert json.loads(body)["token"]["methods"] == AS_ISSUED
        return str(dict(given[1])["X-Subject-Token"])

    def get(self, caller: str = "admin", subject: str = "t", **more: Any) -> Any:
        return super().get(f"T-{caller}", subject if "-" in subject else f"T-{subject}", **more)

    def known(self) -> None:
        """Have Keystone answer the services once each."""
        for caller in ("admin", "nova"):
            self.get(caller)

    def asked(self, *arguments: Any, **named: Any) -> tuple[int, tuple[str, Any, bytes]]:
        """How often Keystone was asked for an answer, and the answer."""
        before = self.keystone.asked
        answer = self.get(*arguments, **named)
        return self.keystone.asked - before, answer


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    made = Cloud(tmp_path / "shared")
    made.known()
    return made


def test_an_issued_token_is_known_to_a_service_that_is(cloud: Cloud) -> None:
    token = cloud.login()
    asked, (status, headers, body) = cloud.asked("nova", token)
    assert (asked, status) == (0, "200 OK")
    # as Keystone answers a validation: in the order of methods that the token has
    assert json.loads(body)["token"]["methods"] == METHODS
    assert headers["Content-Length"] == str(len(body))
    assert headers["X-Subject-Token"] == token
    expected = cloud.get("nova", "u")
    assert [*headers] == [*expected[1]]
    assert body == expected[2]
    assert cloud.asked("nova", token)[0] == 0
    counts = cloud.counts
    assert (counts["issued"], counts["known"], counts["hits"]) == (1, 1, 1)


def test_logins_push_out_no_answer(tmp_path: Path) -> None:
    """Of tokens that nobody validates; whoever may log in may do so again and again."""
    cloud = Cloud(tmp_path / "shared")
    cloud.known()
    last = ""
    for _ in range(1500):
        last = cloud.login()
    other = cloud.worker()
    assert cloud.asked("admin", "t", by=other)[0] == 0
    assert cloud.asked("nova", "t", by=other)[0] == 0
    assert cloud.asked("admin", last)[0] == 0


def test_what_another_service_was_answered_is_known(cloud: Cloud) -> None:
    assert cloud.asked("admin", "u")[0] == 1
    asked, answer = cloud.asked("nova", "u")
    assert (asked, answer[0], answer[2]) == (0, "200 OK", cloud.get("admin", "u")[2])


def test_a_service_that_is_not_known_is_asked_of_keystone(cloud: Cloud) -> None:
    cloud.keystone.known["T-cinder"] = model("cinder")
    token = cloud.login()
    assert cloud.asked("cinder", token)[0] == 1
    # and who may not is asked for each time, whatever he may see of himself
    assert cloud.asked("cinder", cloud.login())[0] == 1


def test_workers_share_what_is_known(cloud: Cloud) -> None:
    other = cloud.worker()
    token = cloud.login()
    assert cloud.asked("nova", token, by=other)[0] == 0


@pytest.mark.parametrize(
    "tag",
    ["audit:audit-n1", "user:user-n1", "grants:user:user-n1", "project:project", "roles", "catalog",
     "all", "user:user-nova", "audit:audit-nova", "members:user-nova"],
)  # fmt: skip
@pytest.mark.parametrize("after", ["issue", "validation"])
def test_a_change_ends_what_is_known(cloud: Cloud, tag: str, after: str) -> None:
    token = cloud.login()
    if after == "validation":
        assert cloud.asked("nova", token)[0] == 0
    cloud.change(tag)
    assert cloud.asked("nova", token)[0] == 1


def test_a_token_that_is_revoked_before_its_first_validation_is_refused(cloud: Cloud) -> None:
    token = cloud.login()
    del cloud.keystone.known[token]
    cloud.change("audit:audit-n1")
    assert cloud.get("nova", token)[0] == "404 NOT FOUND"


def test_a_change_of_others_ends_nothing(cloud: Cloud) -> None:
    token = cloud.login()
    cloud.change("user:user-u")
    assert cloud.asked("nova", token)[0] == 0


def test_a_change_during_the_login_is_not_lost(cloud: Cloud) -> None:
    cloud.keystone.while_issuing = lambda: cloud.change("project:project")
    token = cloud.login()
    assert cloud.counts["issued"] == 0
    cloud.known()
    assert cloud.asked("nova", token)[0] == 1


@pytest.mark.parametrize("status", ["201 CREATED", "401 UNAUTHORIZED"])
def test_what_a_login_shares_is_kept_under_one_lock(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Also by a login that is refused, which has read as much."""
    taken: list[object] = []
    kept: list[Any] = []
    shared = [("one", b"1"), ("two", b"2")]
    attempt, keep = FileLock.attempt, cloud.cache._node.keep_together

    def noted(lock: FileLock) -> bool:
        taken.append(lock)
        return attempt(lock)

    def kept_together(*given: Any) -> None:
        kept.append(given)
        keep(*given)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        environ[ENVIRON_KEY].shared.extend(shared)
        monkeypatch.setattr(FileLock, "attempt", noted)
        monkeypatch.setattr(cloud.cache._node, "keep_together", kept_together)
        return cloud.keystone(environ, lambda _, headers: start_response(status, headers))

    cloud.cache.application = application
    cloud.keystone.body = cloud.keystone.body.format("")
    cloud.cache({"REQUEST_METHOD": "POST", "PATH_INFO": "/v3/auth/tokens"}, lambda *_: None)
    ((values, subject),) = kept
    assert values == shared
    assert (subject is not None) == (status == "201 CREATED")
    assert len(taken) <= 1


def test_a_caller_of_before_a_change_is_not_one_of_after(cloud: Cloud) -> None:
    """What is made of an old fact and a new one would have the number of the new one."""
    cloud.change("user:user-nova")
    token = cloud.login()
    assert cloud.asked("nova", token)[0] == 1
    cloud.known()
    assert cloud.asked("nova", cloud.login())[0] == 0


def test_a_change_between_the_facts_and_the_answer_ends_the_answer(cloud: Cloud) -> None:
    """The answer has the number from before the facts were looked at."""
    cloud.keystone.may.clear()
    cloud.keystone.known["T-own"] = model("n1")
    cloud.get("own", "own")
    token = cloud.login()
    decide = cloud.keystone.decide

    def decides_while_it_changes(*told: Any) -> Any:
        cloud.change("user:user-n1")
        return decide(*told)

    assert cloud.cache._first is not None
    cloud.cache._first._decide = decides_while_it_changes
    assert cloud.asked("own", token)[0] == 0  # it had begun before the change
    assert cloud.asked("own", token)[0] == 1


def test_the_policy_decides(cloud: Cloud) -> None:
    keystone = cloud.keystone
    keystone.may.pop("user-nova")  # from now on he may see his own
    token = cloud.login()
    asked = keystone.asked
    cloud.get("nova", token)
    assert keystone.asked == asked + 1
    keystone.known["T-own"] = model("n2")
    cloud.get("own", "own")
    assert cloud.asked("own", cloud.login())[0] == 0


def test_a_decision_holds_for_what_it_went_by(cloud: Cloud) -> None:
    keystone = cloud.keystone
    first, before = cloud.login(), keystone.decisions
    cloud.get("nova", first)
    for _ in range(3):
        assert cloud.asked("nova", cloud.login())[0] == 0
    assert keystone.decisions == before + 1  # it looked at nothing of the token
    keystone.may.clear()
    for name in ("n5", "n6"):
        keystone.known[f"T-own {name}"] = model(name)
        cloud.get(f"own {name}", f"own {name}")
    before = keystone.decisions
    five, six = cloud.login(), cloud.login()
    assert cloud.asked("own n5", five)[0] == 0
    assert cloud.asked("own n5", six)[0] == 1  # he may see his own, and no other's
    assert cloud.asked("own n6", six)[0] == 0
    assert keystone.decisions == before + 3


def test_a_policy_that_asks_others_is_asked_by_keystone(cloud: Cloud) -> None:
    cloud.keystone.plain = False
    assert cloud.asked("nova", cloud.login())[0] == 1


@pytest.mark.parametrize(
    "more",
    [
        {"HTTP_X_SERVICE_TOKEN": "T-admin"}, {"HTTP_ORIGIN": "https://x"}, {"HTTP_X_ROLES": "x"},
        {"QUERY_STRING": "nocatalog"}, {"QUERY_STRING": "allow_expired=true"},
        {"QUERY_STRING": "x"}, {"REQUEST_METHOD": "HEAD"}, {"HTTP_HOST": "other"},
        {"HTTP_ACCEPT_LANGUAGE": "de"}, {"HTTP_OPENSTACK_IDENTITY_ACCESS_RULES": "1.0"},
    ],
)  # fmt: skip
def test_another_kind_of_request_is_asked_of_keystone(cloud: Cloud, more: dict[str, str]) -> None:
    assert cloud.asked("nova", cloud.login(), **more)[0] == 1


@pytest.mark.parametrize("query", ["", "allow_expired=1"])
def test_what_makes_no_difference_is_answered(cloud: Cloud, query: str) -> None:
    token = cloud.login()
    assert cloud.asked("nova", token, QUERY_STRING=query)[0] == 0


def test_a_body_without_a_catalog_is_for_who_wants_none(cloud: Cloud) -> None:
    token = cloud.login(QUERY_STRING="nocatalog")
    assert cloud.asked("nova", token)[0] == 1
    assert cloud.asked("admin", token, QUERY_STRING="nocatalog")[0] == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"expires_at": "2001-01-01T00:00:00.000000Z"},
        {"trust_id": "t", "trust": {"expires_at": "2001-01-01T00:00:00.000000Z"}},
        {"application_credential": {"access_rules": [], "expires_at": None}},
        {"user_id": "not \xe9 ASCII", "expires_at": "no time"},
    ],
)
def test_what_has_ended_or_is_not_certain_is_not_kept(
    cloud: Cloud, changed: dict[str, Any]
) -> None:
    def change() -> None:
        for name, value in changed.items():
            setattr(cloud.keystone.known["new-1"], name, value)

    cloud.keystone.while_issuing = change
    cloud.login()
    assert cloud.counts["issued"] == 0


def test_a_token_that_a_validation_would_refuse_is_not_kept(cloud: Cloud) -> None:
    cloud.keystone.accepts = False
    token = cloud.login()
    assert cloud.counts["issued"] == 0
    assert cloud.asked("nova", token)[0] == 1


def test_what_a_replica_may_have_said_is_not_kept(cloud: Cloud) -> None:
    cloud.keystone.unvouched = True
    cloud.login()
    assert cloud.counts["issued"] == 0


def test_an_answer_ends_with_the_first_of_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cloud = Cloud(tmp_path / "shared")
    cloud.known()
    token = cloud.login()
    now += 29
    assert cloud.asked("admin", token)[0] == 0
    now += 2
    assert cloud.asked("admin", token)[0] == 1


def test_a_token_ends_by_the_clock(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    token = cloud.login()
    end = time.mktime(time.strptime(FAR[:19], "%Y-%m-%dT%H:%M:%S")) + 86400
    monkeypatch.setattr(time, "time", lambda: end)
    assert cloud.asked("nova", token)[0] == 1


def test_services_are_told_how_long_it_stands(cloud: Cloud) -> None:
    token = cloud.login()
    more = {tags_header.ENVIRON_KEY: tags_header.ASK}
    asked, (_, headers, _) = cloud.asked("nova", token, **more)
    told = tags_header.parse(headers[tags_header.NAME])
    assert asked == 0
    assert told is not None
    # by its own epoch and by all that either depends on
    for tag, stands in (("user:user-other", True), ("audit:audit-n1", False)):
        cloud.change(tag)
        assert cloud.coordinator.fresh(told.epoch, told.slots) is stands
    token = cloud.login()
    etag = cloud.get("nova", token, **more)[1]["ETag"]
    again = cloud.asked("nova", token, **more, HTTP_IF_NONE_MATCH=etag)
    assert (again[0], again[1][0]) == (0, "304 Not Modified")


def test_a_login_begins_in_the_state_from_before_keystone_is_asked(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path / "shared", views=True)
    seen: list[Request] = []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        cloud.change("users")
        seen.append(environ[ENVIRON_KEY])
        return cloud.keystone(environ, start_response)

    cloud.cache.application = application
    generation, numbers = cloud.coordinator.snapshot()
    cloud.login()
    (noted,) = seen
    assert noted.view is not None
    assert noted.view.numbers == numbers
    assert noted.since == noted.view.seen == (generation, max(numbers))


def test_what_is_made_in_the_middle_of_a_touch_does_not_outlive_it(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory's change has no mark: who announces it may stand still between any two words."""
    token = cloud.login()
    step = Table._set

    def seen(table: Table, slot: int, value: int) -> None:
        cloud.get("nova", token)
        step(table, slot, value)

    with monkeypatch.context() as looked_at:
        looked_at.setattr(Table, "_set", seen)
        cloud.change("user:user-n1")
    assert cloud.asked("nova", token)[0] == 1


def test_a_new_table_forgets_everything(cloud: Cloud) -> None:
    token = cloud.login()
    cloud.coordinator.flush()
    assert cloud.asked("nova", token)[0] == 1


def test_the_option_switches_it_off(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path / "shared", switched_on=False)
    seen: list[object] = []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.append(environ.get(ENVIRON_KEY))
        return []

    cloud.cache.application = application
    cloud.cache({"REQUEST_METHOD": "POST", "PATH_INFO": "/v3/auth/tokens"}, lambda *_: None)
    assert seen == [None]
    cloud.cache.application = cloud.keystone
    cloud.known()
    assert cloud.asked("nova", "u")[0] == cloud.asked("admin", "u")[0] == 1


def test_no_token_is_in_any_file(cloud: Cloud) -> None:
    token = cloud.login()
    cloud.get("nova", token)
    for path in cloud.folder.iterdir():
        assert token.encode() not in path.read_bytes()


def test_a_body_that_shows_a_token_is_not_kept(cloud: Cloud) -> None:
    cloud.keystone.body = cloud.keystone.body.replace('"u"', '"new-1"')
    cloud.login()
    assert cloud.counts["issued"] == 0


def test_a_caller_whose_answers_have_other_headers_is_not_known(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path / "shared")
    cloud.keystone.headers = [("X-Something", "of this token?")]
    cloud.known()
    assert cloud.asked("nova", cloud.login())[0] == 1


def test_credentials_that_would_be_read_as_others_are_not_kept(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path / "shared")
    cloud.keystone.more = {"odd": ("a", "tuple")}
    cloud.known()
    assert cloud.asked("nova", cloud.login())[0] == 1
