"""The group [keyfront_ldap], and how [ldap] and it become a pool's arguments."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import keystone.conf.ldap
import pytest
from oslo_config import cfg

from keyfront.errors import OptionError
from keyfront.middleware.ldap import Kerberos
from keyfront.middleware.ldap.keystone import options
from keyfront.middleware.ldap.keystone.handler import DriverPool
from keyfront.middleware.ldap.keystone.options import LDAP, LDAP_GROUP, pool_arguments
from keyfront.options import list_opts
from support.certificates import certificates


def conf(folder: Path, text: str = "") -> cfg.ConfigOpts:
    """A configuration of Keystone's own, as a domain has one."""
    path = folder / "keystone.conf"
    path.write_text(text + "\n")
    made = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(made)
    made(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    return made


def arguments(folder: Path, ldap: str = "", own: str = "") -> dict[str, Any]:
    return pool_arguments(conf(folder, f"[ldap]\n{ldap}\n[{LDAP_GROUP}]\n{own}"))


def refusal(folder: Path, ldap: str = "", own: str = "") -> str:
    with pytest.raises(OptionError) as caught:
        arguments(folder, ldap, own)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults(tmp_path: Path) -> None:
    assert options.ldap(conf(tmp_path)) == {
        "nameservers": None,
        "srv_domains": None,
        "bind_password_file": None,
        "sasl_mechanism": None,
        "kerberos_keytab": None,
        "kerberos_principal": None,
        "kerberos_without_tls": False,
        "tls_client_cert": None,
        "tls_client_key": None,
        "connect_timeout": 5.0,
        "operation_timeout": 30.0,
        "max_answer": 128,
        "max_entries": 100000,
        "max_refused_logins": 0,
        "refused_logins_seconds": 1800.0,
        "checkout_timeout": 10.0,
        "max_waiting": 0,
        "min_size": 1,
        "auth_min_size": 0,
        "max_idle": 600.0,
        "check_after": 30.0,
        "strategy": None,
        "fail_back": True,
        "password_policy": True,
        "fast_bind": "never",
        "follow": "auto",
        "token_ttl": None,
    }


def test_every_option_is_listed_and_says_its_unit() -> None:
    listed = dict(list_opts())[LDAP_GROUP]
    assert listed == LDAP
    for option in listed:
        assert option.help and option.help.endswith("."), option.name
        if isinstance(option, (cfg.FloatOpt, cfg.IntOpt)):
            units = r"(Seconds|Connections|Requests|MiB|Entries)\b"
            assert re.match(units, option.help), option.name
            assert option.type.min is not None and option.type.max is not None


def test_registering_twice_does_no_harm(tmp_path: Path) -> None:
    made = conf(tmp_path, f"[{LDAP_GROUP}]\nmax_waiting = 7")
    options.register_ldap(made)
    assert options.ldap(made)["max_waiting"] == 7
    assert options.ldap(made)["max_waiting"] == 7


def test_what_the_database_sets_counts(tmp_path: Path) -> None:
    made = conf(tmp_path)
    options.register_ldap(made)
    made.set_override("max_idle", "60", LDAP_GROUP)
    assert options.ldap(made)["max_idle"] == 60.0


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("connect_timeout", "0", "a number from 0.01 to 600.0"),
        ("connect_timeout", "nan", "a number from 0.01 to 600.0"),
        ("operation_timeout", "-1", "a number from 0.01 to 3600.0"),
        ("operation_timeout", "inf", "a number from 0.01 to 3600.0"),
        ("checkout_timeout", "long", "a number from 0.01 to 600.0"),
        ("max_waiting", "-1", "a number from 0 to 100000"),
        ("min_size", "-1", "a number from 0 to 10000"),
        ("max_idle", "0.5", "a number from 1.0 to 86400.0"),
        ("strategy", "random", "one of ordered, balanced"),
        ("fast_bind", "true", "one of auto, always, never"),
        ("fail_back", "perhaps", "true or false"),
    ],
)
def test_a_value_out_of_range(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    message = refusal(tmp_path, own=f"{name} = {value}")
    assert message.startswith(f"[{LDAP_GROUP}] {name} = ")
    assert "keystone.conf" in message
    assert message.endswith(f"must be {allowed}")


def test_the_stock_defaults_make_a_pool(tmp_path: Path) -> None:
    made = arguments(tmp_path)
    tls = made.pop("tls")
    assert not tls.start_tls
    assert made == {
        "urls": ["ldap://localhost"],
        "nameservers": [],
        "srv_domains": [],
        "bind_dn": "",
        "bind_password": "",
        "bind_password_file": None,
        "sasl_mechanism": None,
        "kerberos": None,
        "strategy": "ordered",
        "min_size": 1,
        "max_size": 10,
        "auth_min_size": 0,
        "auth_max_size": 100,
        "timeout": 10.0,
        "max_waiting": 0,
        "max_lifetime": 600.0,
        "auth_max_lifetime": 60.0,
        "max_idle": 600.0,
        "check_after": 30.0,
        "connect_timeout": 5.0,
        "operation_timeout": 30.0,
        "max_answer": 128,
        "max_entries": 100000,
        "max_refused_logins": 0,
        "refused_logins_seconds": 1800.0,
        "password_policy": True,
        "fast_bind": False,
        "fail_back": True,
    }


@pytest.mark.parametrize(
    ("ldap", "own", "expected"),
    [
        ("", "", (5.0, 30.0)),
        ("", "connect_timeout = 2\noperation_timeout = 9", (2.0, 9.0)),
        ("pool_connection_timeout = -1", "connect_timeout = 2", (2.0, 30.0)),
        ("pool_connection_timeout = 0", "", (5.0, 30.0)),
        ("pool_connection_timeout = 3", "connect_timeout = 2", (3.0, 3.0)),
        # only the one of them that is in use has a say
        ("connection_timeout = 3", "", (5.0, 30.0)),
        ("connection_timeout = 3\nuse_pool = false", "", (3.0, 30.0)),
        ("pool_connection_timeout = 3\nuse_pool = false", "", (5.0, 30.0)),
    ],
)
def test_timeouts(tmp_path: Path, ldap: str, own: str, expected: tuple[float, float]) -> None:
    made = arguments(tmp_path, ldap, own)
    assert (made["connect_timeout"], made["operation_timeout"]) == expected


def test_urls_are_divided_as_stock_divides_them(tmp_path: Path) -> None:
    made = arguments(tmp_path, "url = ldap://a, ldap://b:3890  ldap://c")
    assert made["urls"] == ["ldap://a", "ldap://b:3890", "ldap://c"]


@pytest.mark.parametrize(
    ("ldap", "own", "expected"),
    [
        ("", "", "ordered"),
        ("randomize_urls = true", "", "balanced"),
        ("randomize_urls = true", "strategy = ordered", "ordered"),
        ("", "strategy = balanced", "balanced"),
    ],
)
def test_strategy(tmp_path: Path, ldap: str, own: str, expected: str) -> None:
    assert arguments(tmp_path, ldap, own)["strategy"] == expected


def test_an_identity_without_password_is_none(tmp_path: Path) -> None:
    assert arguments(tmp_path, "user = cn=x")["bind_dn"] == ""
    made = arguments(tmp_path, "user = cn=x\npassword = y")
    assert (made["bind_dn"], made["bind_password"]) == ("cn=x", "y")


def test_who_is_the_service(tmp_path: Path) -> None:
    pool = DriverPool(conf(tmp_path, "[ldap]\nuser = cn=x\npassword = y"))
    assert pool.is_service("cn=x", "y")
    assert not pool.is_service("cn=x", "z")
    assert not pool.is_service("", "")
    assert DriverPool(conf(tmp_path)).is_service("", "")


def test_sizes(tmp_path: Path) -> None:
    made = arguments(tmp_path, "pool_size = 3\nauth_pool_size = 4", "min_size=3\nauth_min_size=4")
    assert [made[x] for x in ("min_size", "max_size", "auth_min_size", "auth_max_size")] == [
        3, 3, 4, 4,
    ]  # fmt: skip
    assert refusal(tmp_path, "pool_size = 3", "min_size = 4") == (
        "[keyfront_ldap] min_size = 4: must be at most [ldap] pool_size (3)"
    )
    assert refusal(tmp_path, "auth_pool_size = 3", "auth_min_size = 4") == (
        "[keyfront_ldap] auth_min_size = 4: must be at most [ldap] auth_pool_size (3)"
    )


def test_without_use_pool_none_is_kept_open(tmp_path: Path) -> None:
    made = arguments(tmp_path, "use_pool = false", "auth_min_size = 5")
    assert (made["min_size"], made["auth_min_size"]) == (0, 0)
    assert 0 < made["max_lifetime"] == made["auth_max_lifetime"] < 0.001
    made = arguments(tmp_path, "use_auth_pool = false", "auth_min_size = 5")
    assert (made["min_size"], made["auth_min_size"]) == (1, 0)
    assert made["max_lifetime"] == 600.0
    assert 0 < made["auth_max_lifetime"] < 0.001


@pytest.mark.parametrize("url", ["http://a", "ldap//a", "ldap://a:99999", "", "ldap://a/dc=x"])
def test_a_bad_url(tmp_path: Path, url: str) -> None:
    message = refusal(tmp_path, f"url = {url}")
    assert "url" in message.lower()
    assert url in message


def test_tls(tmp_path: Path) -> None:
    authority = certificates(tmp_path).ca_file
    tls = arguments(tmp_path, f"use_tls = true\ntls_cacertfile = {authority}")["tls"]
    assert (str(tls.ca_file), tls.ca_dir, tls.verify, tls.start_tls) == (
        str(authority), None, "demand", True,
    )  # fmt: skip
    # the file wins over the folder, as in Keystone
    both = f"url = ldaps://a\ntls_cacertfile={authority}\ntls_cacertdir={tmp_path}"
    tls = arguments(tmp_path, both)["tls"]
    assert (tls.ca_dir, tls.start_tls) == (None, False)
    assert arguments(tmp_path, "url = ldaps://a\ntls_req_cert = never")["tls"].verify == "never"


def test_tls_that_contradicts_itself(tmp_path: Path) -> None:
    assert "use_tls" in refusal(tmp_path, "use_tls = true\nurl = ldap://b, LDAPS://a")
    assert "tls_cacertfile" in refusal(tmp_path, "use_tls = true")
    assert "tls_cacertfile" in refusal(tmp_path, "url = ldaps://a")


@pytest.mark.parametrize("option", ["tls_cacertfile", "tls_cacertdir"])
def test_a_ca_that_is_not_there_is_named(tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing"
    pool = DriverPool(conf(tmp_path, f"[ldap]\nuse_tls = true\n{option} = {missing}"))
    with pytest.raises(OptionError, match=rf"\[ldap\] {option} = {missing}: must be a f"):
        pool.check()


def test_no_password_in_what_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "user = cn=x\npassword = hush\nurl = gopher://x")
    assert "hush" not in message


def test_what_has_no_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    DriverPool(conf(tmp_path, "[ldap]\nchase_referrals = true\ndebug_level = 255"))
    assert [x.levelname for x in caplog.records] == ["WARNING", "INFO"]
    caplog.clear()
    DriverPool(conf(tmp_path, "[ldap]\nchase_referrals = false"))
    assert not caplog.records


def test_the_password_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("of the service\n")
    own = f"bind_password_file = {secret}"
    made = arguments(tmp_path, "user = cn=service", own)
    assert (made["bind_dn"], made["bind_password"]) == ("cn=service", "")
    assert made["bind_password_file"] == str(secret)
    for stock, words in (("", "with [ldap] user"), ("user = x\npassword = hush", "beside [ldap]")):
        message = refusal(tmp_path, stock, own)
        assert message.startswith("[keyfront_ldap] bind_password_file = ")
        assert words in message
        assert "hush" not in message
    secret.chmod(0o644)
    assert "chmod 0600" in refusal(tmp_path, "user = x", own)


def test_the_service_by_its_certificate(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    ldap = f"url = ldaps://a\ntls_cacertfile = {made.ca_file}"
    pair = f"tls_client_cert = {made.client.certificate}\ntls_client_key = {made.client.key}"
    found = arguments(tmp_path, ldap, f"{pair}\nsasl_mechanism = EXTERNAL")
    assert (found["sasl_mechanism"], found["bind_dn"]) == ("EXTERNAL", "")
    assert found["tls"].client_cert == str(made.client.certificate)
    assert found["tls"].client_key == str(made.client.key)
    # only shown
    assert arguments(tmp_path, ldap, pair)["sasl_mechanism"] is None
    socket = arguments(tmp_path, "url = ldapi://%2Fx", "sasl_mechanism = EXTERNAL")
    assert socket["sasl_mechanism"] == "EXTERNAL"

    own = f"{pair}\nsasl_mechanism = EXTERNAL"
    allowed = "must be one of EXTERNAL, GSSAPI"
    assert refusal(tmp_path, ldap, "sasl_mechanism = PLAIN").endswith(allowed)
    for stock, name in (("user = cn=x", "user = cn=x"), ("password = hush", "password = (hidden)")):
        message = refusal(tmp_path, f"{ldap}\n{stock}", own)
        assert message.startswith(f"[ldap] {name}: must be left out beside sasl_mechanism = EXT")
        assert "hush" not in message
    message = refusal(tmp_path, ldap, f"{own}\nbind_password_file = /x")
    assert message.startswith("[keyfront_ldap] bind_password_file = /x: must be left out beside")
    message = refusal(tmp_path, ldap, "sasl_mechanism = EXTERNAL")
    assert message.startswith("[keyfront_ldap] tls_client_cert = (not set): must be set with")
    message = refusal(tmp_path, "url = ldap://a", "sasl_mechanism = EXTERNAL")
    assert message.startswith("[keyfront_ldap] sasl_mechanism = EXTERNAL: must be used over TLS")
    assert "ldap://a:389" in message
    for option in ("tls_client_cert", "tls_client_key"):
        message = refusal(tmp_path, "url = ldap://a", f"{option} = /x")
        assert message.startswith(f"[keyfront_ldap] {option} = /x: must be left out without ldaps")
        message = refusal(tmp_path, ldap, f"{pair}\n{option} = /nowhere")
        assert message.startswith(f"[keyfront_ldap] {option} = /nowhere: must be a file")
    message = refusal(tmp_path, ldap, "tls_client_key = /x")
    assert message.startswith("[keyfront_ldap] tls_client_key = /x: must be given together")


def test_the_service_by_kerberos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gssapi", "gssapi.raw"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(raw=None))
    made, keytab = certificates(tmp_path), tmp_path / "keytab"
    keytab.touch(0o600)
    ldap = f"url = ldaps://a\ntls_cacertfile = {made.ca_file}"
    own = f"sasl_mechanism = GSSAPI\nkerberos_keytab = {keytab}\nkerberos_principal = me"
    found = arguments(tmp_path, ldap, own)
    assert (found["sasl_mechanism"], found["bind_dn"]) == ("GSSAPI", "")
    assert found["kerberos"] == Kerberos(keytab=str(keytab), principal="me")
    assert arguments(tmp_path, ldap, "sasl_mechanism = GSSAPI")["kerberos"] is None
    clear = "sasl_mechanism = GSSAPI\nkerberos_without_tls = true"
    assert arguments(tmp_path, "url = ldap://a", clear)["kerberos"] == Kerberos(without_tls=True)

    message = refusal(tmp_path, "url = ldap://a", own)
    assert message.startswith("[keyfront_ldap] sasl_mechanism = GSSAPI: must be used over TLS only")
    message = refusal(tmp_path, f"{ldap}\nuser = cn=x", own)
    assert message.startswith("[ldap] user = cn=x: must be left out beside sasl_mechanism = GSSAPI")
    message = refusal(tmp_path, ldap, "kerberos_principal = me")
    assert message.startswith("[keyfront_ldap] kerberos_principal = me: must be left out without")
    keytab.chmod(0o644)
    message = refusal(tmp_path, ldap, own)
    assert message.startswith(f"[keyfront_ldap] kerberos_keytab = {keytab}: must be only for its")
    monkeypatch.setitem(sys.modules, "gssapi", None)
    message = refusal(tmp_path, ldap, own)
    assert message.startswith("[keyfront_ldap] sasl_mechanism = GSSAPI: must be another one")
    assert "pip install 'keyfront[gssapi]'" in message


def test_servers_by_srv_records(tmp_path: Path) -> None:
    given = arguments(
        tmp_path,
        "url = ldap+srv://hq._sites.example.org, ldap+srv://example.org\nuse_tls = true\n"
        f"tls_cacertfile = {certificates(tmp_path).ca_file}",
        "nameservers = 192.0.2.1, [2001:db8::1]:5353\nsrv_domains = example.org, corp.example",
    )
    assert given["urls"] == ["ldap+srv://hq._sites.example.org", "ldap+srv://example.org"]
    assert given["nameservers"] == ["192.0.2.1", "[2001:db8::1]:5353"]
    assert given["srv_domains"] == ["example.org", "corp.example"]


@pytest.mark.parametrize(
    ("ldap", "own", "named"),
    [
        ("url = ldap+srv://a", "nameservers = ns1", r"\[keyfront_ldap\] nameservers = ns1"),
        ("url = ldap://a", "srv_domains = b", r"\[keyfront_ldap\] srv_domains = b: must be left"),
        ("url = ldap+srv://a:389", "", r"\[ldap\] url = .* must be ldap\+srv://DOMAIN"),
    ],
)
def test_what_is_wrong_with_them_is_named(
    tmp_path: Path, ldap: str, own: str, named: str
) -> None:
    assert re.match(named, refusal(tmp_path, ldap, own))
