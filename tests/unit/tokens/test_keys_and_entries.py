"""Keys vary on all that an answer may vary on; stored answers hold no token."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyfront.middleware.tokens import keys_and_entries
from keyfront.middleware.tokens.epochs import Epoch, Slots
from keyfront.middleware.tokens.keys_and_entries import (
    CORE,
    HARMLESS,
    KEY_BYTES,
    REQUEST_ID,
    Entry,
    Headers,
    Keys,
    Lifetime,
    entry_of,
    new_request_id,
)

SECRET = b"k" * 32
EPOCH, SLOTS, LIFETIME = Epoch(2**63 - 5, 2**40), Slots([0, 17, 65535]), Lifetime(12.5, 1e9)

USUAL = {
    "REQUEST_METHOD": "GET",
    "SCRIPT_NAME": "",
    "PATH_INFO": "/v3/auth/tokens",
    "QUERY_STRING": "",
    "SERVER_NAME": "keystone",
    "SERVER_PORT": "5000",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "REMOTE_ADDR": "192.0.2.1",
    "CONTENT_LENGTH": "",
    "HTTP_HOST": "keystone:5000",
    "HTTP_X_AUTH_TOKEN": "caller",
    "HTTP_X_SUBJECT_TOKEN": "subject",
    "HTTP_USER_AGENT": "keystonemiddleware",
    "HTTP_ACCEPT": "application/json",
    "wsgi.url_scheme": "http",
    "wsgi.version": (1, 0),
    "wsgi.input": object(),
    "wsgi.multithread": True,
    "uwsgi.version": b"2.0.31",
}


def key(changes: Mapping[str, Any] | None = None, secret: bytes = SECRET) -> bytes | None:
    return Keys(secret).key({**USUAL, **(changes or {})})


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in USUAL.items() if name not in names}


# Keys


def test_a_key() -> None:
    made = key()
    assert isinstance(made, bytes) and len(made) == KEY_BYTES
    assert made == key()
    assert made != key(secret=b"l" * 32)


MATTERS = [
    *CORE,
    "HTTP_X_SERVICE_TOKEN",
    "HTTP_X_STORAGE_TOKEN",
    "HTTP_OPENSTACK_IDENTITY_ACCESS_RULES",
    "HTTP_ACCEPT_LANGUAGE",
    "HTTP_FORWARDED",
    "HTTP_X_FORWARDED_HOST",
    "HTTP_X_FORWARDED_PROTO",
    "HTTP_X_FORWARDED_PREFIX",
    "HTTP_X_FORWARDED_PORT",
    "HTTP_X_OPENSTACK_NOVA_API_VERSION",
    "HTTP_OPENSTACK_API_VERSION",
    "HTTP_X_ROLES",
    "HTTP_X_IDENTITY_STATUS",
    "HTTP_RANGE",
    "HTTP_COOKIE",
    "HTTP_X_HTTP_METHOD_OVERRIDE",
    "HTTP_ORIGIN",
    "HTTP_NEVER_HEARD_OF",
    "SSL_PROTOCOL",
    "WHATEVER",
]


@pytest.mark.parametrize("name", MATTERS)
def test_varies_on(name: str) -> None:
    made = [key({name: value}) for value in ("one", "two")]
    assert None not in made
    assert len({*made, key()}) == 3


@pytest.mark.parametrize("name", ["HTTP_X.FOO", "HTTP_X_AUTH.TOKEN", "HTTP_WSGI.INPUT"])
def test_varies_on_a_header_with_a_dot(name: str) -> None:
    """A dot may be part of a header's name, so it does not make a variable the server's."""
    assert len({key({name: "one"}), key({name: "two"}), key()}) == 3


def test_headers_with_dots_are_not_learnt() -> None:
    """Or any client could make the usual names be looked at one by one, for ever."""
    keys = Keys(SECRET)
    for number in range(400):
        keys.key({**without("wsgi.version"), f"HTTP_X.{number}": "x"})
    keys.key(USUAL)
    assert keys._known.issuperset(USUAL)


@pytest.mark.parametrize("name", sorted(HARMLESS - {"CONTENT_LENGTH"}))
def test_does_not_vary_on(name: str) -> None:
    assert key({name: "one"}) == key({name: "two"}) == Keys(SECRET).key(without(name))


@pytest.mark.parametrize("value", [object(), 1, None, b"x", (1, 0), "text"])
def test_does_not_vary_on_what_the_server_adds(value: object) -> None:
    assert key({"wsgi.whatever": value, "keyfront.x": value}) == key()


def test_a_missing_value_is_as_an_empty_one() -> None:
    for name in CORE:
        if name != "HTTP_X_AUTH_TOKEN":
            assert key({name: ""}) == Keys(SECRET).key(without(name))
    for length in ("", "0"):
        assert key({"CONTENT_LENGTH": length}) == Keys(SECRET).key(without("CONTENT_LENGTH"))


@pytest.mark.parametrize(
    "changes",
    [
        {"CONTENT_LENGTH": "1"},
        {"CONTENT_LENGTH": "00"},
        {"CONTENT_LENGTH": "x"},
        {"HTTP_TRANSFER_ENCODING": "chunked"},
        {"HTTP_TRANSFER_ENCODING": ""},
        {"REMOTE_USER": "admin"},
        {"REMOTE_DOMAIN": "default"},
        {"openstack.context": {"is_admin": True}},
        {"KEYSTONE_AUTH_CONTEXT": {"user_id": "u"}},
        {"WHO": object()},
        {"REMOTE_USER": ""},
        {"REMOTE_IDENT": "x"},
        {"AUTH_TYPE": "Basic"},
        {"HTTP_AUTHORIZATION": "Basic x"},
        {"SSL_CLIENT_S_DN": "CN=x"},
        {"SSL_CLIENT_VERIFY": "SUCCESS"},
        {"SSL_CLIENT_CERT": "x"},
        {"HTTP_X_SSL_CLIENT_CERT": "x"},
        {"HTTP_SSL_CLIENT_VERIFY": "SUCCESS"},
        {"OIDC_CLAIM_sub": "x"},
        {"MELLON_NAME_ID": "x"},
        {"Shib-Identity-Provider".upper(): "x"},
        {"HTTP_X_TRACE_INFO": "x"},
        {"HTTP_X_TRACE_HMAC": "x"},
        {"HTTP_EXPECT": "100-continue"},
        {"HTTP_UPGRADE": "websocket"},
        # another token would be Keystone's then
        {"HTTP_X_AUTH_TOKEN": ""},
    ],
)
def test_not_answered_from_a_cache(changes: dict[str, Any]) -> None:
    assert key(changes) is None
    keys = Keys(SECRET)
    assert [keys.key({**USUAL, **changes}) for _ in range(2)] == [None, None]
    assert key({**changes, "HTTP_NEVER_HEARD_OF": "x"}) is None


def test_not_answered_from_a_cache_where_it_lets_callers_in() -> None:
    keys = Keys(SECRET, {"FRONT_ISSUER", "HTTP_X_REAL_IP"})
    assert keys.key(USUAL) == key()
    for name in ("FRONT_ISSUER", "HTTP_X_REAL_IP"):
        assert keys.key({**USUAL, name: "CN=front"}) is None


def test_none_for_what_is_no_latin_1() -> None:
    assert key({"PATH_INFO": "/v3/\u20ac"}) is None
    assert key({"HTTP_X_FOO": "\udc80"}) is None
    assert key({"PATH_INFO": "/v3/\xe9"}) is not None


def test_the_same_keys_however_much_was_learnt() -> None:
    keys = Keys(SECRET)
    first = keys.key(USUAL)
    for number in range(1000):
        assert keys.key({**USUAL, f"wsgi.made_up_{number}": object()}) == first
    assert len(keys._known) < 400
    assert keys.key(USUAL) == first
    assert keys.key({**USUAL, "HTTP_X_FOO": "1"}) == key({"HTTP_X_FOO": "1"}) != first


def test_the_order_of_the_variables_does_not_matter() -> None:
    changes = {f"HTTP_X_{letter}": letter for letter in "DBAC"}
    names = list({**USUAL, **changes})
    dice = random.Random(1)
    found = set()
    for _ in range(20):
        dice.shuffle(names)
        found.add(Keys(SECRET).key({name: {**USUAL, **changes}[name] for name in names}))
    assert found == {key(changes)}


# Few letters, so that two requests often agree once their parts are put together.
TEXT = st.text("a\n", max_size=3)
NAME = st.sampled_from(
    [
        *("PATH_INFO", "QUERY_STRING", "HTTP_X_AUTH_TOKEN", "HTTP_HOST", "SERVER_PORT"),
        *("wsgi.url_scheme", "HTTP_X_A", "HTTP_X_B", "a", "A\n"),
    ]
)
ENVIRON = st.dictionaries(NAME, TEXT, max_size=6)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """What two requests must agree on; a missing core variable is an empty one, but for one."""
    always = {"HTTP_X_AUTH_TOKEN"}
    return {
        name: value
        for name, value in environ.items()
        if value or name not in CORE or name in always
    }


@pytest.mark.once
@settings(max_examples=1500, deadline=None)
@given(ENVIRON, ENVIRON)
@example({"PATH_INFO": "a\na"}, {"PATH_INFO": "a", "QUERY_STRING": "a"})
@example({"PATH_INFO": "a\nb", "QUERY_STRING": "c"}, {"PATH_INFO": "a", "QUERY_STRING": "b\nc"})
@example({"wsgi.url_scheme": "http\nHTTP_X_A\na\n"}, {"wsgi.url_scheme": "http", "HTTP_X_A": "a"})
@example({"HTTP_X_A": "a\nHTTP_X_B\nb"}, {"HTTP_X_A": "a", "HTTP_X_B": "b"})
@example({"SERVER_PORT": "\n"}, {"wsgi.url_scheme": "\n"})
def test_no_two_requests_share_a_key_unless_they_agree(
    one: dict[str, str], two: dict[str, str]
) -> None:
    keys = Keys(SECRET)
    first, second = keys.key(one), keys.key(two)
    if relevant(one) == relevant(two):
        assert first == second
    elif first is not None:
        assert first != second


# Request identifiers

ID_FORMAT = r"^req-[a-f0-9]{8}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{12}$"


def test_request_identifiers_are_as_oslo_takes_them() -> None:
    middleware = pytest.importorskip("oslo_middleware.request_id")
    assert re.match(middleware.ID_FORMAT, new_request_id())


def test_request_identifiers_are_unique() -> None:
    found = [new_request_id() for _ in range(100_000)]
    assert len(set(found)) == len(found)
    assert all(re.match(ID_FORMAT, each) for each in found[::97])
    assert all(each[18] == "4" and each[23] in "89ab" for each in found[::97])
    # Not one after the other: nobody may guess the next.
    assert len({each[-12:-8] for each in found[:1000]}) > 900 or (
        len({each[-6:] for each in found[:1000]}) > 900
    )


def test_request_identifiers_of_a_child_are_its_own() -> None:
    children = []
    for _ in range(2):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, "\n".join(new_request_id() for _ in range(50)).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            children.append(pipe.read().split("\n"))
        os.waitpid(pid, 0)
    own = [new_request_id() for _ in range(50)]
    ids = [*own, *children[0], *children[1]]
    assert len(set(ids)) == 150
    heads = {tuple({each[:-12] for each in group}) for group in (own, *children)}
    assert len(heads) == 3


def test_request_identifiers_of_another_interpreter(tmp_path: Path) -> None:
    module = "keyfront.middleware.tokens.keys_and_entries"
    script = f"from {module} import new_request_id as n; print(n())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.match(ID_FORMAT, done.stdout.strip())
    assert done.stdout[:20] != new_request_id()[:20]


# Entries

TOKEN, CALLER = "gAAAAABtheSubjectsToken-_=", "gAAAAABtheCallersToken-_="


def request(**changes: str) -> dict[str, str]:
    return {"HTTP_X_AUTH_TOKEN": CALLER, "HTTP_X_SUBJECT_TOKEN": TOKEN, **changes}


def answer(*more: tuple[str, str]) -> Headers:
    return [
        ("Content-Type", "application/json"),
        ("X-Subject-Token", TOKEN),
        ("Vary", "X-Auth-Token"),
        ("x-openstack-request-id", "req-1"),
        *more,
    ]


def make(
    environ: Mapping[str, str] | None = None,
    headers: Headers | None = None,
    body: bytes = b'{"token": {}}',
    status: str = "200 OK",
) -> Entry | None:
    return entry_of(
        request() if environ is None else environ,
        status,
        answer() if headers is None else headers,
        body,
        epoch=EPOCH,
        slots=SLOTS,
        lifetime=LIFETIME,
    )


def made(*arguments: Any, **options: Any) -> Entry:
    entry = make(*arguments, **options)
    assert entry is not None
    return entry


def fields(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Entry.__slots__}


def test_the_answer_is_repeated_with_a_fresh_identifier() -> None:
    entry = made()
    one, two = entry.answer(request()), entry.answer(request())
    assert one[1] == two[1] == b'{"token": {}}'
    for headers, _ in (one, two):
        assert [name for name, _ in headers] == [name for name, _ in answer()]
        assert dict(headers)["X-Subject-Token"] == TOKEN
        assert re.match(ID_FORMAT, dict(headers)[REQUEST_ID])
    assert one[0] != two[0]
    one[0].clear()
    assert len(entry.answer(request())[0]) == 4


@pytest.mark.parametrize(
    "body", [b'{"x": "%s"}', b"%s", b"%s and more", b"before %s", b"nothing", b""]
)
def test_a_token_in_the_body_is_taken_out_and_put_back(body: bytes) -> None:
    body = body.replace(b"%s", TOKEN.encode())
    entry = made(body=body)
    assert entry.answer(request())[1] == body
    assert TOKEN.encode() not in entry.body


def test_no_token_is_in_what_is_stored() -> None:
    environ = request(HTTP_X_SERVICE_TOKEN="the-service-token")
    body = b'{"self": "' + TOKEN.encode() + b'"}'
    packed = made(environ, body=body).pack()
    for token in (TOKEN, CALLER, "the-service-token", "gAAAAAB"):
        assert token.encode() not in packed
    assert Entry.unpack(packed).answer(environ)[1] == body


@pytest.mark.parametrize(
    ("environ", "headers", "body"),
    [
        (request(), answer()[:3], b""),
        (request(), answer(("X-OpenStack-Request-Id", "req-2")), b""),
        (request(), answer(("Set-Cookie", "a=b")), b""),
        (request(), answer(("Cache-Control", "private, no-store")), b""),
        (request(), [("X-Subject-Token", "another"), (REQUEST_ID, "req-1")], b""),
        (request(), answer(("X-Subject-Token", TOKEN)), b""),
        (request(), answer(("Location", f"/x/{TOKEN}")), b""),
        (request(), answer(("Location", f"/x/{CALLER}")), b""),
        (request(), answer(), f"{TOKEN}{TOKEN}".encode()),
        (request(), answer(), f"{TOKEN[:5]}{TOKEN}{TOKEN[5:]}".encode()),
        (request(), answer(), CALLER.encode()),
        (request(HTTP_X_SERVICE_TOKEN="other"), answer(), b"any other"),
        (request(HTTP_X_STORAGE_TOKEN="other"), answer(), b"any other"),
        ({"HTTP_X_AUTH_TOKEN": CALLER}, answer(), b""),
    ],
)
def test_not_an_answer_to_be_repeated(
    environ: dict[str, str], headers: Headers, body: bytes
) -> None:
    assert make(environ, headers, body) is None


def test_an_answer_without_a_subject() -> None:
    headers = [("X-Openstack-Request-Id", "req-1"), ("Content-Length", "2")]
    entry = made({"HTTP_X_AUTH_TOKEN": CALLER}, headers, b"{}", "401 Unauthorized")
    assert entry.negative
    assert (entry.subject, entry.split) == (-1, -1)
    headers, body = entry.answer({})
    assert body == b"{}"
    assert headers[1] == ("Content-Length", "2")
    assert re.match(ID_FORMAT, headers[0][1])


def test_a_caller_who_validates_his_own_token() -> None:
    environ = request(HTTP_X_AUTH_TOKEN=TOKEN)
    entry = made(environ, body=b"x" + TOKEN.encode())
    assert entry.answer(environ)[1] == b"x" + TOKEN.encode()
    assert TOKEN.encode() not in entry.pack()


@pytest.mark.parametrize(
    ("status", "negative"),
    [("200 OK", False), ("204 No Content", False), ("401 U", True), ("404 N", True)],
)
def test_negative(status: str, negative: bool) -> None:
    assert made(status=status).negative is negative


LATIN = st.text(st.characters(max_codepoint=255), max_size=20)


@settings(max_examples=200, deadline=None)
@given(
    status=LATIN,
    headers=st.lists(st.tuples(LATIN, LATIN), min_size=1, max_size=5),
    body=st.binary(max_size=200),
    split=st.integers(-1, 200),
    epoch=st.builds(Epoch, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    slots=st.lists(st.integers(0, 2**24), min_size=1, max_size=30).map(Slots),
    lifetime=st.builds(
        Lifetime,
        st.floats(0, 1e12),
        st.one_of(st.floats(0, 1e12), st.just(float("inf"))),
        st.just(()),
    ),
)
def test_packed_and_unpacked(
    status: str,
    headers: Headers,
    body: bytes,
    split: int,
    epoch: Epoch,
    slots: Slots,
    lifetime: Lifetime,
) -> None:
    entry = Entry(
        status, headers, body,
        request_id=0, subject=-1, split=split,
        epoch=epoch, slots=slots, lifetime=lifetime,
    )  # fmt: skip
    other = Entry.unpack(entry.pack())
    assert fields(other) == fields(entry)
    assert isinstance(other.epoch, Epoch)
    assert isinstance(other.slots, Slots)
    assert other.lifetime == lifetime


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_one_of_the_errors_that_readers_expect(data: st.DataObject) -> None:
    """A ring signs entries, but another version may have packed them."""
    packed = bytearray(made().pack())
    change = data.draw(st.sampled_from(["cut", "flip"]))
    if change == "cut":
        packed = packed[: data.draw(st.integers(0, len(packed) - 1))]
    else:
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        Entry.unpack(bytes(packed))
    except (ValueError, TypeError, struct.error):
        pass


def best_of(function: Callable[[], object], calls: int = 2000) -> float:
    times = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(calls):
            function()
        times.append((time.thread_time() - began) / calls)
    return min(times)


def test_a_usual_key_is_quick() -> None:
    """No parsing and no loop in Python; far below this on any machine, however busy."""
    keys = Keys(SECRET)
    keys.key(USUAL)
    assert best_of(lambda: keys.key(USUAL)) < 100e-6
    assert keys_and_entries.KEY_BYTES == 16
