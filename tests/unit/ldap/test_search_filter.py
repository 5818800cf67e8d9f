"""Filters: the examples of RFC 4515, and byte for byte what ldap3 and libldap send."""

from __future__ import annotations

import pickle
import re
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ldap3.operation.search import compile_filter, parse_filter
from ldap3.utils.asn1 import encode as ldap3_encode

from keyfront.errors import DirectoryError, FilterError
from keyfront.middleware.ldap.protocol import search_filter
from keyfront.middleware.ldap.protocol.search_filter import encode, escape
from support.served import PATIENCE


def tlv(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    assert len(content) < 128
    return bytes((tag, len(content))) + content


def ava(tag: int, name: bytes, value: bytes) -> bytes:
    return tlv(tag, tlv(4, name), tlv(4, value))


RFC_4515 = {
    "(cn=Babs Jensen)": ava(0xA3, b"cn", b"Babs Jensen"),
    "(!(cn=Tim Howes))": tlv(0xA2, ava(0xA3, b"cn", b"Tim Howes")),
    "(&(objectClass=Person)(|(sn=Jensen)(cn=Babs J*)))": tlv(
        0xA0,
        ava(0xA3, b"objectClass", b"Person"),
        tlv(
            0xA1,
            ava(0xA3, b"sn", b"Jensen"),
            tlv(0xA4, tlv(4, b"cn"), tlv(0x30, tlv(0x80, b"Babs J"))),
        ),
    ),
    "(o=univ*of*mich*)": tlv(
        0xA4,
        tlv(4, b"o"),
        tlv(0x30, tlv(0x80, b"univ"), tlv(0x81, b"of"), tlv(0x81, b"mich")),
    ),
    "(seeAlso=)": ava(0xA3, b"seeAlso", b""),
    "(cn:caseExactMatch:=Fred Flintstone)": tlv(
        0xA9, tlv(0x81, b"caseExactMatch"), tlv(0x82, b"cn"), tlv(0x83, b"Fred Flintstone")
    ),
    "(cn:=Betty Rubble)": tlv(0xA9, tlv(0x82, b"cn"), tlv(0x83, b"Betty Rubble")),
    "(sn:dn:2.4.6.8.10:=Barney Rubble)": tlv(
        0xA9,
        tlv(0x81, b"2.4.6.8.10"),
        tlv(0x82, b"sn"),
        tlv(0x83, b"Barney Rubble"),
        b"\x84\x01\xff",
    ),
    "(o:dn:=Ace Industry)": tlv(0xA9, tlv(0x82, b"o"), tlv(0x83, b"Ace Industry"), b"\x84\x01\xff"),
    "(:1.2.3:=Wilma Flintstone)": tlv(0xA9, tlv(0x81, b"1.2.3"), tlv(0x83, b"Wilma Flintstone")),
    "(:DN:2.4.6.8.10:=Dino)": tlv(
        0xA9, tlv(0x81, b"2.4.6.8.10"), tlv(0x83, b"Dino"), b"\x84\x01\xff"
    ),
    r"(o=Parens R Us \28for all your parenthetical needs\29)": ava(
        0xA3, b"o", b"Parens R Us (for all your parenthetical needs)"
    ),
    r"(cn=*\2A*)": tlv(0xA4, tlv(4, b"cn"), tlv(0x30, tlv(0x81, b"*"))),
    r"(filename=C:\5cMyFile)": ava(0xA3, b"filename", b"C:\\MyFile"),
    r"(bin=\00\00\00\04)": ava(0xA3, b"bin", b"\0\0\0\4"),
    r"(sn=Lu\c4\8di\c4\87)": ava(0xA3, b"sn", "Lučić".encode()),
    r"(1.3.6.1.4.1.1466.0=\04\02\48\69)": ava(0xA3, b"1.3.6.1.4.1.1466.0", b"\x04\x02Hi"),
}

OTHERS = {
    # libldap's leniency
    "cn=x": ava(0xA3, b"cn", b"x"),
    "cn=x y ": ava(0xA3, b"cn", b"x y "),
    "cn=*": tlv(0x87, b"cn"),
    "(& (a=b)\t\n( | (c=d) ) )": tlv(0xA0, ava(0xA3, b"a", b"b"), tlv(0xA1, ava(0xA3, b"c", b"d"))),
    r"(a=\(\*\)\\)": ava(0xA3, b"a", rb"(*)" + b"\\"),
    r"(a=\**\\)": tlv(0xA4, tlv(4, b"a"), tlv(0x30, tlv(0x80, b"*"), tlv(0x82, b"\\"))),
    r"(a>=\*)": ava(0xA5, b"a", b"*"),
    r"(a:=\()": tlv(0xA9, tlv(0x82, b"a"), tlv(0x83, b"(")),
    r"(a=\\2a)": ava(0xA3, b"a", rb"\2a"),
    # RFC 4526
    "(&)": b"\xa0\x00",
    "(|)": b"\xa1\x00",
    # ours
    " ( ! (a=b) ) ": tlv(0xA2, ava(0xA3, b"a", b"b")),
    "(a= b )": ava(0xA3, b"a", b" b "),
    "(a=b=c)": ava(0xA3, b"a", b"b=c"),
    "(a>=1)": ava(0xA5, b"a", b"1"),
    "(a<=1)": ava(0xA6, b"a", b"1"),
    "(a~=1)": ava(0xA8, b"a", b"1"),
    "(a;lang-de;x=b)": ava(0xA3, b"a;lang-de;x", b"b"),
    "(a=\udcff)": ava(0xA3, b"a", b"\xff"),  # a name the server sent
    "(a=\u010d\\FF)": ava(0xA3, b"a", b"\xc4\x8d\xff"),
    "(a=" + "x" * 130 + ")": b"\xa3\x81\x88\x04\x01a\x04\x81\x82" + b"x" * 130,
}


@pytest.mark.parametrize("text", [*RFC_4515, *OTHERS])
def test_examples(text: str) -> None:
    assert encode(text) == (RFC_4515 | OTHERS)[text]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing"),
        ("   ", "nothing"),
        ("()", "nothing"),
        ("(", "nothing"),
        (")", "nothing"),
        ("cn", "no comparison"),
        ("(cn)", "no comparison"),
        ("(cn=x", "')' is missing"),
        ("(&(cn=x)", "')' is missing"),
        ("(&", "')' is missing"),
        ("(cn=x))", "after its end"),
        ("(cn=x)(cn=y)", "after its end"),
        ("(&(cn=x))y", "after its end"),
        ("cn=x)", "without a '('"),
        ("(&cn=x)", "a '('"),
        ("(&(a=b)c)", "a '('"),
        ("(!)", "followed by 0"),
        ("(!(a=b)(c=d))", "followed by 2"),
        ("((a=b))", "nothing"),
        ("(=x)", "an attribute has"),
        ("(a b=x)", "an attribute has"),
        ("(a =x)", "an attribute has"),
        ("(a_b=x)", "an attribute has"),
        ("(1..2=x)", "an attribute has"),
        ("(1.=x)", "an attribute has"),
        ("(a;=x)", "an attribute has"),
        ("(č=x)", "an attribute has"),
        ("(:=x)", "needs an attribute"),
        ("(:dn:=x)", "needs an attribute"),
        ("(a:b:c:=x)", "no comparison"),
        ("(a=**)", "between two '*'"),
        ("(a=b**c)", "between two '*'"),
        ("(a>=*)", r"\2a"),
        ("(a:=b*)", r"\2a"),
        ("(a=b(c)", r"\28"),
        ("(a=b(c))", r"\28"),
        ("(a=\\)", "hexadecimal"),
        ("(a=\\2)", "hexadecimal"),
        ("(a=\\zz)", "hexadecimal"),
        ("(a=b\0)", r"\00"),
        ("(a=\ud800)", "UTF-16"),
        ("(a=\ud800*)", "UTF-16"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    with pytest.raises(FilterError) as caught:
        encode(text)
    message = str(caught.value)
    assert words in message
    assert isinstance(caught.value, DirectoryError)
    assert "\n" not in message and len(message) < 200
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    message.encode()  # can be logged


def test_an_error_says_where_and_not_all() -> None:
    with pytest.raises(FilterError, match=r"\(character 8\)"):
        encode("(&(a=b)c)")
    with pytest.raises(FilterError) as caught:
        encode("(a=" + "x" * 10_000)
    assert len(str(caught.value)) < 200


def test_depth_is_bounded() -> None:
    depth = search_filter.MAX_DEPTH

    def nested(count: int) -> str:
        return "(!" * count + "(a=b)" + ")" * count

    encode(nested(depth))
    with pytest.raises(FilterError, match="deep"):
        encode(nested(depth + 1))
    with pytest.raises(FilterError, match="deep"):
        encode("(&" * 1_000_000)


@pytest.mark.parametrize(
    "text",
    [
        "(a=" + "x" * 600_000 + ")",
        "(a=" + r"\2a" * 200_000 + ")",
        "(a=" + r"\*" * 200_000 + ")",
        "(a=" + "x*" * 200_000 + ")",
        "(|" + "(a=b)" * 40_000 + ")",
        "(a" + ";b" * 200_000 + "=x)",
        "(1" + ".1" * 200_000 + "=x)",
        " " * 600_000 + "(a=b)" + " " * 600_000,
        "(&" + " " * 600_000 + ")",
    ],
    ids=lambda text: text[:8],
)
def test_large_ones_take_linear_time(text: str) -> None:
    """A quadratic step would take minutes."""
    assert encode(text)
    for cut in (text[:-1], text.replace("=", "", 1), text.replace("=", ":", 1)):
        try:
            encode(cut)
        except FilterError:
            pass


# Against ldap3 and libldap ----------------------------------------------------------------------

names = st.sampled_from(["cn", "objectClass", "a;lang-de", "1.3.6.1", "sAMAccountName"])
rules = st.sampled_from(["caseExactMatch", "2.4.6.8.10", "1.2.840.113556.1.4.1941"])
values = st.text(st.characters(codec="utf-8"), min_size=1).map(escape) | st.binary(min_size=1).map(
    escape
)
# ldap3 drops spaces around a value, which are part of it, and knows no other escapes.
bare = values.filter(lambda value: value == value.strip())


def simple(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def substrings(parts: list[str], first: str, last: str) -> str:
        return "*".join([first, *parts, last])

    pieces = st.one_of(
        st.builds(substrings, st.lists(values, max_size=3), values, values | st.just("")),
        st.builds(substrings, st.lists(values, min_size=1, max_size=3), st.just(""), st.just("")),
    )
    return st.one_of(
        st.builds("({}{}{})".format, names, st.sampled_from(["=", ">=", "<=", "~="]), values),
        st.builds("({}=*)".format, names),
        st.builds("({}={})".format, names, pieces),
        st.builds(
            "({}{}{}:={})".format,
            names,
            st.sampled_from(["", ":dn"]),
            st.just("") | rules.map(":{}".format),
            values,
        ),
        st.builds("({}:{}:={})".format, st.sampled_from(["", ":dn"]), rules, values),
    )


def trees(leaves: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda sign, parts: f"({sign}{''.join(parts)})",
                st.sampled_from("&|"),
                st.lists(inner, min_size=1, max_size=4),
            ),
            inner.map("(!{})".format),
        ),
        max_leaves=8,
    )


def of_ldap3(text: str) -> bytes:
    parsed = parse_filter(text, None, False, False, None, False)
    return ldap3_encode(compile_filter(parsed.elements[0]))


@given(trees(simple(bare)))
@example("(cn=*)")
@example("(cn=a*b*c)")
@example("(&(cn=x)(!(|(a;lang-de>=1)(1.3.6.1~=2)))(cn:dn:caseExactMatch:=x))")
def test_the_same_as_ldap3(text: str) -> None:
    assert encode(text) == of_ldap3(text)


def of_libldap(text: str) -> bytes | None:
    """What libldap sends, or nothing if it refuses."""
    ldap = pytest.importorskip("ldap")
    ours, its = socket.socketpair()
    with ours:
        ours.settimeout(PATIENCE)
        client = ldap.initialize("ldapi:///", fileno=its.detach())
        try:
            client.search_ext("", 0, text, ["x"])
        except ldap.FILTER_ERROR:
            return None
        sent = b""
        while not sent.endswith(b"\x30\x03\x04\x01x"):
            sent += ours.recv(1 << 20)
    # base, scope, aliases, limits, without values
    _, found, rest = sent.partition(
        b"\x04\x00\x0a\x01\x00\x0a\x01\x00\x02\x01\x00\x02\x01\x00\x01\x01\x00"
    )
    assert found
    return rest[:-5]


@given(trees(simple(values)))
@example(r"(a=\(\*\)\\)")
@example(r"(&(a>=\*)(a:=\())")
@example("(&)")
@example("cn=x")
@example("(&(a=" + "b" * 150 + ")(c=*" + "d" * 70_000 + "*))")
def test_the_same_as_libldap(text: str) -> None:
    assert encode(text) == of_libldap(text)


PIECES = [
    "(",
    ")",
    "(a=b)",
    "(&",
    "(|",
    "(!",
    "&",
    "!",
    "=",
    "a",
    "cn",
    ">=",
    "<=",
    "~=",
    ":=",
    ":dn",
]
PIECES += [
    ":",
    "*",
    "\\",
    "\\2a",
    "\\*",
    "1.2",
    ";",
    ".",
    " ",
    "\t",
    "\n",
    "-",
    "_",
    "č",
    "=x)",
    "(cn=x",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_taken_or_refused_as_by_libldap(text: str) -> None:
    theirs = of_libldap(text) if text.strip() else None
    try:
        ours = encode(text)
    except FilterError:
        ours = None
    if theirs is None and ours is not None:
        # the places where only we take spaces; those at the end of a bare comparison are its value
        text = text.lstrip(" \t\n")
        if text.startswith("("):
            text = re.sub(r"\)[ \t\n]+", ")", text)
        theirs = of_libldap(text)
    assert ours == theirs


@given(st.text(max_size=50))
def test_any_text_is_a_filter_or_an_error(text: str) -> None:
    try:
        encode(text)
    except FilterError:
        pass


# Escaping ----------------------------------------------------------------------------------------


@given(st.text())
@example("a*(b)\\\0č")
def test_escape_is_that_of_python_ldap(value: str) -> None:
    ldap_filter = pytest.importorskip("ldap.filter")
    assert escape(value) == ldap_filter.escape_filter_chars(value)


def test_escape_of_bytes() -> None:
    assert escape(b"a*(b)\\\0\xc4\x8d~") == r"a\2a\28b\29\5c\00\c4\8d~"


@given(st.text(st.characters(codec="utf-8")) | st.binary())
def test_an_escaped_value_is_nothing_but_that_value(value: str | bytes) -> None:
    content = value.encode() if isinstance(value, str) else value
    for text in (f"(cn={escape(value)})", f"cn={escape(value)}"):
        encoded = encode(text)
        assert encoded[0] == 0xA3
        assert encoded.endswith(content)
    assert encode(f"(&(cn={escape(value)})(a=b))").endswith(b"\xa3\x06\x04\x01a\x04\x01b")
