# ruff: noqa: E501
"""Texts that come from outside, damaged: only the documented errors come out, within their time."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dogpile.cache.api import NO_VALUE

from keyfront.benchmarks import results
from keyfront.benchmarks.gate.recorded_counts import Records
from keyfront.benchmarks.load import access_log, rewrite
from keyfront.benchmarks.load.access_log import Entry
from keyfront.errors import BenchmarkError, KeyfrontError, OptionError, PasteFileError, StateError
from keyfront.gateway import paste_file, queue_limit, slow_requests
from keyfront.gateway.keystone.values_by_rows import ByRows
from keyfront.gateway.node import drain, health
from keyfront.gateway.request_body import read_whole
from keyfront.gateway.serve.state import MARKER, State
from keyfront.middleware.ldap import wsgi_options
from keyfront.middleware.ldap.protocol import controls
from keyfront.middleware.ldap.protocol.ber import ProtocolError, element
from keyfront.middleware.tokens import options as token_options
from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.coordinator.redis.address import Address
from keyfront.middleware.tokens.invalidation.rules import FIXED
from support.fuzzing import damaged, each_case

#: Of which something is put into a text.
PIECES = (
    b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"\0", b"\r\n",
    b"\xff\xfe", "\u0664".encode(), b"%", b"%(here)s", b"%00", b"${x}", b"= ", b": ", b"]", b"[x]", b'"',
    b"\n ", b" " * 3000, b"\\x", b"inf", b"{}", b"//", b"@", b"/../", b"unix:", b",,", b";",
)  # fmt: skip


def mangled(text: str, dice: random.Random) -> bytes:
    return damaged(text.encode(), dice, PIECES)


# Access logs

LOG = """\
192.0.2.1 - - [24/Nov/2026:12:00:00 +0000] "GET /v3/auth/tokens?nocatalog HTTP/1.1" 200 4103 "-" "x"
[pid: 7|app: 0|req: 1/2] 192.0.2.1 () {40 vars in 500 bytes} [Tue Nov 24 12:00:01 2026] GET /v3 => \
generated 250 bytes in 3 msecs (HTTP/1.1 300) 5 headers in 200 bytes (1 switches on core 0)
{"time": "2026-11-24T12:00:02+00:00", "seconds": 0.012, "method": "GET", "uri": "/v3/users", \
"status": 200}
{"unix": 1763985603.25, "access": "192.0.2.1 - - [24/Nov/2026:12:00:03 +0000] \\"GET /v3/projects \
HTTP/1.1\\" 200 12"}
"""


def test_access_logs() -> None:
    target = rewrite.Identity("http://127.0.0.1:5000", "t", ["s"], {"users": "u"}, {"auth": {}})

    def check(dice: random.Random) -> None:
        text = mangled(LOG, dice).decode("utf-8", "replace")
        entries = [e for line in text.split("\n") if (e := access_log.parse_line(line))]
        wires = rewrite.Wires(target)
        for at, entry in access_log.spaced(entries):
            assert math.isfinite(at)
            form = rewrite.form(entry)
            if form is not None:
                wires.place(form, entry.status)
        for wire in wires.wires:
            # One request each, as the log had it, and none that would change the target.
            head = wire.partition(b"\r\n\r\n")[0].split(b"\r\n")
            assert head[0].split(b" ")[0] in (b"GET", b"HEAD"), head
            assert len(head[0].split(b" ")) == 3
            assert head[1] == b"Host: 127.0.0.1:5000"
        with suppress(BenchmarkError):
            access_log.parse(io.StringIO(text))

    each_case("access log", 300, check)


#: Each once ended a replay by an error of Python's.
LINES = [
    "[" * 10 + "\n", '{"a": ' + "[" * 100_000 + "\n",
    '{"time": "2026-11-24T12:00:02+00:00", "seconds": 1e999, "method": "GET", "uri": "/", "status": 1}',
    '{"unix": "nan", "access": "x - - [24/Nov/2026:12:00:03 +0000] \\"GET / HTTP/1.1\\" 200 1"}',
    '{"time": "0001-01-01T00:00:00", "method": "GET", "uri": "/", "status": 200}',
    '{"time": "2026-11-24", "method": "GET", "uri": "/", "status": ' + "9" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_lines_that_no_server_writes(line: str) -> None:
    assert access_log.parse_line(line) is None


@pytest.mark.parametrize(
    "target",
    ["*", "http://elsewhere/v3", "//elsewhere/v3", "@x/", "[", "/\u00e4", "/\ufffd", "/a b"],
)
def test_targets_that_are_not_sent_again(target: str) -> None:
    assert rewrite.form(Entry(1.0, "GET", target, 200)) is None


def test_a_line_without_an_end(tmp_path: Path) -> None:
    """It is read in parts, not whole into memory."""
    path = tmp_path / "log"
    path.write_bytes(bytes(access_log._LONGEST * 3))
    with pytest.raises(BenchmarkError, match="nor are 2 other lines"):
        access_log.read(path)


# Paste files and options

PASTE = """\
[DEFAULT]
name = %(here)s/x
[pipeline:main]
pipeline = a b main2
[filter:a]
use = egg:keyfront#ldap_auth
[filter:b]
paste.filter_factory = support.fuzzing:damaged
[app:main2]
use = config:other%20file.ini#x
set debug = true
[composite:c]
use = egg:Paste#urlmap
/v3 = main
"""


def test_paste_files(tmp_path: Path) -> None:
    path = tmp_path / "app.ini"

    def check(dice: random.Random) -> None:
        path.write_bytes(mangled(PASTE, dice))
        try:
            paste_file.check(path)
        except PasteFileError as error:
            assert str(tmp_path) in str(error)
            assert "\n" not in str(error)
            return
        for name in ("main", "c", "a"):
            fault = paste_file.find_fault(path, name, imports=False)
            assert fault is None or isinstance(fault, PasteFileError)

    each_case("paste file", 300, check)


def test_a_paste_file_that_leads_on_and_on(tmp_path: Path) -> None:
    path = tmp_path / "app.ini"
    path.write_text("".join(f"[app:{n}]\nuse = {n + 1}\n" for n in range(5000)))
    paste_file.check(path)
    fault = paste_file.find_fault(path, "0", imports=False)
    assert fault is not None
    assert "too many sections" in str(fault)


def test_a_paste_file_that_names_a_path_with_a_nul(tmp_path: Path) -> None:
    path = tmp_path / "app.ini"
    path.write_text("[app:main]\nuse = config:a%%00b\n")
    fault = paste_file.find_fault(path, "main", imports=False)
    assert fault is not None
    assert "is no path of a file" in str(fault)


LDAP = {
    "urls": "ldap://one ldaps://two:636", "search_base": "dc=x", "user_filter": "(uid={})",
    "timeout": "5", "max_size": "10", "start_tls": "true", "public_paths": "GET /a, * /b/*",
    "realm": "x", "fast_bind": "auto", "min_size": "1",
}  # fmt: skip


UNSET = {option.dest: option.default for option in token_options.COORDINATOR}


def test_options_of_sections() -> None:
    values = token_options.TOKEN_CACHE

    def check(dice: random.Random) -> None:
        def junk(text: str) -> str:
            return mangled(text, dice).decode("utf-8", "surrogateescape")

        local = dict(LDAP)
        name = dice.choice(sorted(local))
        local[name] = junk(local[name])
        with suppress(OptionError):
            wsgi_options.read(local)
        option = dice.choice(values)
        given = {option.dest: junk(str(option.default))}
        try:
            read = token_options.of_paste("token_cache", values, given, {})
        except OptionError:
            pass
        else:
            value = read[option.dest]
            assert value == value
            if getattr(option.type, "max", None) is not None:
                assert option.type.min <= value <= option.type.max
        with suppress(KeyfrontError):
            Address.of({**UNSET, "coordinator": junk("redis://user:secret@host:6379/0?db=1")})

    each_case("options", 400, check)


# Headers and bodies


def answered(wrapped: Any, environ: dict[str, Any]) -> str:
    """Send a request; returns the status."""
    told: list[str] = []
    given = {"REQUEST_METHOD": "POST", "PATH_INFO": "/v3", **environ}
    answer = wrapped(given, lambda status, headers, *_: told.append(status))
    for part in answer:
        assert isinstance(part, bytes)
    return told[0]


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    start("200 OK", [])
    return [b""]


def test_when_a_request_began() -> None:
    """Of a client that sends the header itself, where no web server in front sets it."""
    limited: Any = queue_limit.limit_queue(application, seconds=5.0)  # type: ignore[arg-type]
    ticks = iter(range(10**9))
    told: Any = slow_requests.tell_slow(
        application,
        seconds=0.001,
        clock=lambda: float(next(ticks)),  # type: ignore[arg-type]
    )

    def check(dice: random.Random) -> None:
        header = mangled(dice.choice(("t=1763985603.25", "1763985603250", "t=nan")), dice)
        environ = {"HTTP_X_REQUEST_START": header.decode("latin-1")}
        assert not math.isnan(queue_limit.since_1970(environ["HTTP_X_REQUEST_START"]))
        assert answered(limited, environ)[:3] in ("200", "503")
        assert answered(told, environ) == "200 OK"

    each_case("X-Request-Start", 200, check)


@pytest.mark.parametrize("began", ["nan", "t=nan", "-nan", "inf", "-inf", "t=-1", "9" * 5000])
def test_a_request_that_began_at_no_time(began: str) -> None:
    ticks = iter(range(10))
    told: Any = slow_requests.tell_slow(
        application,
        seconds=0.5,
        clock=lambda: float(next(ticks)),  # type: ignore[arg-type]
    )
    assert answered(told, {"HTTP_X_REQUEST_START": began}) == "200 OK"


def test_lengths_and_chunks() -> None:
    def check(dice: random.Random) -> None:
        chunks = [dice.randbytes(dice.choice((0, 1, 5, 100))) for _ in range(3)]

        def chunk() -> bytes:
            if dice.random() < 0.2:
                raise OSError("unable to receive chunked part")
            return chunks.pop() if chunks else b""

        whole: Any = read_whole(application, read_chunk=chunk, limit=50)  # type: ignore[arg-type]
        length = mangled(dice.choice(("5", "", "0", "50", "51")), dice).decode("latin-1")
        environ: dict[str, Any] = {"CONTENT_LENGTH": length, "wsgi.input": io.BytesIO(b"12345")}
        if dice.random() < 0.5:
            coding = mangled("chunked", dice).decode("latin-1")
            environ["HTTP_TRANSFER_ENCODING"] = coding if dice.random() < 0.5 else "chunked"
        assert answered(whole, environ)[:3] in ("200", "400", "413")

    each_case("lengths", 300, check)


@pytest.mark.parametrize("digits", [20, 4300, 4301, 100_000])
def test_a_length_of_many_digits(digits: int) -> None:
    whole: Any = read_whole(application)  # type: ignore[arg-type]
    environ = {"CONTENT_LENGTH": "9" * digits, "wsgi.input": io.BytesIO(b"x")}
    assert answered(whole, environ) == "413 Content Too Large"


def test_headers_that_name_addresses_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = health.from_environment()

    def check(dice: random.Random) -> None:
        text = mangled("127.0.0.1, ::1, unix:", dice).decode("latin-1")
        settings.may_see({"REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_FOR": text})
        settings.may_see({"REMOTE_ADDR": text})
        told = tags_header.parse(
            mangled("1f.77.0,5,900.never.0123456789ab", dice).decode("latin-1")
        )
        assert told is None or told.slots

    each_case("headers", 300, check)


# Files of JSON


def test_files_of_json(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    state = State(folder)
    marker = folder / MARKER
    records = tmp_path / "records"

    def check(dice: random.Random) -> None:
        marker.write_bytes(mangled(json.dumps({"format": 1, "complete": True}), dice))
        with suppress(StateError):
            state.check()
        records.write_bytes(mangled('{"schema": 1, "counted": {}, "instructions": {}}', dice))
        with suppress(BenchmarkError):
            Records.read(records)
        with suppress(BenchmarkError):
            results.read(records)

    each_case("files of JSON", 150, check)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "[" * 100_000])
def test_a_state_folder_whose_format_is_no_number(tmp_path: Path, number: str) -> None:
    (tmp_path / MARKER).write_text(f'{{"complete": true, "format": {number}}}')
    with pytest.raises(StateError, match="is damaged"):
        State(tmp_path).check()


def test_a_server_file_that_names_a_path_with_a_nul(tmp_path: Path) -> None:
    path = tmp_path / "site.conf"
    path.write_text("WSGIScriptAlias / /x\0y\n")
    with pytest.raises(OptionError, match="a file that can be read"):
        drain.folder_of(path)


# Controls of a directory's answers

VALUES = {
    controls.PAGED_RESULTS: element(0x30, b"\2\1\0\4\3abc"),
    controls.PASSWORD_POLICY: element(0x30, b"\xa0\3\x80\1\5\x81\1\1"),
    controls.SYNC_STATE: element(0x30, b"\x0a\1\1\4\x10" + bytes(16)),
    controls.ENTRY_CHANGE: element(0x30, b"\x0a\1\1\4\2dc\2\1\5"),
}
READERS: tuple[Callable[[Any], Any], ...] = (
    controls.paged_cookie, controls.password_policy, controls.entry_state,
)  # fmt: skip


def test_controls_of_a_directory() -> None:
    pieces = (b"\x30\x80", b"\x84\xff\xff\xff\xff", b"\x88" + b"\xff" * 8, b"\0\0", b"\x3f\x81\x01")

    def check(dice: random.Random) -> None:
        found = [
            (oid, False, damaged(value, dice, pieces) if dice.random() < 0.8 else None)
            for oid, value in VALUES.items()
        ]
        for read in READERS:
            with suppress(ProtocolError):
                read(found)
        with suppress(ProtocolError):
            controls.ends_refresh(controls.SYNC_INFO, damaged(b"\xa1\3\1\1\0", dice, pieces))

    each_case("controls", 400, check)


# What others may write into a memcached

#: What a value says that it was made of, each of which is none.
MADE_OF = [
    b"[" * 100_000, b"[NaN, [], [], []]", b"[Infinity, [], [], []]", b'["1", [], [], []]',
    b"[1, [], [5], []]", b"[1, [[]], [], []]", b"[1, [], []]", b"{}", b"null", b"[1e999, [], [], []]",
]  # fmt: skip


class Backend:
    """A backend of bytes, in which somebody else writes."""

    def __init__(self) -> None:
        self.value: Any = None

    def get_serialized(self, key: str) -> Any:
        return self.value


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> ByRows:
    by_rows = ByRows(None, bytes, lambda: False, lambda *_: None, lambda name: False)
    by_rows.proxied = Backend()  # type: ignore[assignment]
    coordinator = SimpleNamespace(slot_count=1024, fresh_now=lambda epoch, slots: False)
    numbers = (100,) * len(FIXED)
    view = SimpleNamespace(
        numbers=numbers, coordinator=coordinator, seen=SimpleNamespace(generation=7)
    )
    monkeypatch.setattr(by_rows, "_view", lambda: view)
    return by_rows


def packed(made_of: bytes) -> bytes:
    return struct.pack("<I", len(made_of)) + made_of + b"a value"


@pytest.mark.parametrize("made_of", MADE_OF, ids=range(len(MADE_OF)))
def test_a_value_that_was_made_of_nothing(by_rows: ByRows, made_of: bytes) -> None:
    by_rows.proxied.value = packed(made_of)
    assert by_rows.get_serialized("key") is NO_VALUE


def test_values_of_a_backend_of_bytes(by_rows: ByRows) -> None:
    """None is believed that is older than the last change, however it is damaged."""

    def check(dice: random.Random) -> None:
        value = damaged(packed(b'[99, ["users"], ["user:1"], []]'), dice, PIECES)
        by_rows.proxied.value = value
        found = by_rows.get_serialized("key")
        if found is not NO_VALUE:
            said = json.loads(value[4 : 4 + struct.unpack_from("<I", value)[0]])
            assert said[0] >= 100

    each_case("values of bytes", 200, check)
