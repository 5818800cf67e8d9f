"""URLs of directory servers: what is one, and what is refused with a reason."""

from __future__ import annotations

import dataclasses

import pytest

from keyfront.errors import OptionError
from keyfront.middleware.ldap.protocol.urls import ServerURL


@pytest.mark.parametrize(
    ("text", "scheme", "address", "shown"),
    [
        ("ldap://a.example", "ldap", ("a.example", 389), "ldap://a.example:389"),
        ("ldap://a.example:3890", "ldap", ("a.example", 3890), "ldap://a.example:3890"),
        ("ldaps://a.example", "ldaps", ("a.example", 636), "ldaps://a.example:636"),
        (" LDAPS://A/ ", "ldaps", ("A", 636), "ldaps://A:636"),
        ("ldap://10.0.0.1:1", "ldap", ("10.0.0.1", 1), "ldap://10.0.0.1:1"),
        ("ldap://a:65535", "ldap", ("a", 65535), "ldap://a:65535"),
        ("ldap://[::1]", "ldap", ("::1", 389), "ldap://[::1]:389"),
        ("ldaps://[2001:DB8::1]:637", "ldaps", ("2001:db8::1", 637), "ldaps://[2001:db8::1]:637"),
        ("ldap://[fe80::1%25eth0]", "ldap", ("fe80::1%eth0", 389), "ldap://[fe80::1%eth0]:389"),
        ("ldap://dc_1.example.", "ldap", ("dc_1.example.", 389), "ldap://dc_1.example.:389"),
        ("ldap://bücher.example", "ldap", ("xn--bcher-kva.example", 389), None),
        ("ldapi://%2Frun%2Fslapd", "ldapi", "/run/slapd", "ldapi://%2Frun%2Fslapd"),
        ("ldapi://%2frun%2Fa%20b/", "ldapi", "/run/a b", "ldapi://%2Frun%2Fa%20b"),
        ("ldapi://%2F%FF", "ldapi", "/\udcff", "ldapi://%2F%FF"),
    ],
)
def test_servers(text: str, scheme: str, address: object, shown: str | None) -> None:
    url = ServerURL.parse(text)
    assert (url.scheme, url.address) == (scheme, address)
    assert str(url) == url.text
    if shown:
        assert url.text == shown
    assert ServerURL.parse(url.text) == url


@pytest.mark.parametrize(
    ("text", "scheme", "host", "domain"),
    [
        ("ldap+srv://example.org", "ldap", "example.org", "example.org"),
        (" LDAPS+SRV://Example.org./ ", "ldaps", "example.org", "example.org"),
        ("ldaps+srv://hq._sites.ad.example", "ldaps", "hq._sites.ad.example", "ad.example"),
        ("ldap+srv://gc._msdcs.ad.example", "ldap", "gc._msdcs.ad.example", "ad.example"),
        ("ldap+srv://hq._sites.dc._msdcs.x", "ldap", "hq._sites.dc._msdcs.x", "x"),
        ("ldap+srv://bücher.example", "ldap", "xn--bcher-kva.example", "xn--bcher-kva.example"),
    ],
)
def test_domains_that_are_looked_up(text: str, scheme: str, host: str, domain: str) -> None:
    url = ServerURL.parse(text)
    assert (url.scheme, url.host, url.domain, url.port, url.srv) == (scheme, host, domain, 0, True)
    assert url.text == f"{scheme}+srv://{host}"
    assert ServerURL.parse(url.text) == url != ServerURL.parse(f"{scheme}://{host}")
    assert url.is_in_the_clear == (scheme == "ldap")


@pytest.mark.parametrize(
    "text",
    [
        *("ldap+srv://", "ldap+srv:///", "ldaps+srv://example.org:636", "ldap+srv://[::1]"),
        *("ldap+srv://192.0.2.1", "ldapi+srv://a", "ldap+srv://a/dc=x", "ldap+srv://hq._sites"),
        *("ldap+srv://_ldap._tcp", "http+srv://a", "+srv://a", "ldap+srv://a b"),
        "ldap+srv://" + ".".join(["a" * 60] * 4),
    ],
)
def test_what_is_no_domain_is_named(text: str) -> None:
    with pytest.raises(OptionError, match=r"SITE\._sites\.DOMAIN") as caught:
        ServerURL.parse(text)
    assert caught.value.value == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "ldap", "ldap:", "ldap://", "ldap:///", "a.example", "a.example:389", "//a"),
        *("http://a", "ldap:a", "ldap+tls://a", "ldap://:389", "ldap:// a", "ldap://a b"),
        *("ldap://a:", "ldap://a:x", "ldap://a:0", "ldap://a:65536", "ldap://a:-1", "ldap://a:1:2"),
        *("ldap://a:+1", "ldap://a:٣", "ldap://::1", "ldap://[::1", "ldap://[::1]x", "ldap://[a]"),
        *("ldap://[::1]389", "ldap://a//", "ldap://a/dc=x", "ldap://a/??sub", "ldap://a?x"),
        *("ldap://a#x", "ldap://-a", "ldap://a-", "ldap://a..b", "ldap://" + "a" * 64),
        *("ldap://a\0", "ldap://a,b", "ldap://a,ldap://b", "ldap://a%41", "ldap://[fe80::1%]"),
        *("ldapi://", "ldapi:///", "ldapi:///run/slapd", "ldapi://run", "ldapi://%2Fa/b"),
        *("ldapi://%2F%00", "ldapi://%2F" + "a" * 107),
    ],
)
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        ServerURL.parse(text, "[ldap] url")
    assert str(caught.value).startswith("[ldap] url = ")
    assert "ldaps://HOST" in str(caught.value)
    assert caught.value.value == text


def test_a_password_in_a_url_is_not_repeated() -> None:
    for text in ("ldap://cn=a:s3cret@host", "s3cret@ldap://x", "ldapi://%2F@s3cret"):
        with pytest.raises(OptionError) as caught:
            ServerURL.parse(text)
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(caught.value.__reduce__())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ldaps://a.example", "a.example"),
        ("ldaps://a.example.", "a.example"),
        ("ldaps://[::1]", "::1"),
        ("ldaps://[fe80::1%eth0]", "fe80::1"),
        ("ldaps://10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_name_in_the_certificate(text: str, name: str) -> None:
    assert ServerURL.parse(text).tls_name == name


def test_it_is_a_value() -> None:
    assert len({ServerURL.parse("ldap://a"), ServerURL.parse("LDAP://a:389/")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerURL.parse("ldap://a").port = 1  # type: ignore[misc]
