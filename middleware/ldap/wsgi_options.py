"""The options of the ``ldap_auth`` filter, which a section of a paste file sets.

They need no oslo.config, so that the filter serves any WSGI service. Those that the library's
:class:`~keyfront.middleware.ldap.LDAPPool` has as well are named as there. Times are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyfront.errors import OptionError

FILTER = "ldap_auth"

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_METHOD = re.compile(r"[A-Z]+")
_WITH_NAME = "with one {} where the name goes"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the section.

    :ivar read: turns the text into the value; raises ``ValueError``
    :ivar allowed: the values it takes, in words
    :ivar help: its purpose, in a sentence or two
    """

    read: Callable[[str], Any]
    default: Any
    allowed: str
    help: str


@dataclass(frozen=True, slots=True)
class PublicPath:
    """Requests that need no login.

    :ivar methods: methods of HTTP; empty for all
    :ivar path: the path, or with ``below`` what it begins with, up to a slash
    """

    methods: frozenset[str]
    path: str
    below: bool


def _text(default: str | None, help: str, allowed: str = "text that is not empty") -> Option:
    return Option(_read_text, default, allowed, help)


def _seconds(default: float, low: float, high: float, help: str) -> Option:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # nan is neither
            raise ValueError
        return value

    return Option(read, default, f"a number of seconds from {low:g} to {high:g}", help)


def _count(default: int | None, low: int, high: int, help: str) -> Option:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return Option(read, default, f"a whole number from {low} to {high}", help)


def _flag(default: bool, help: str) -> Option:
    def read(text: str) -> bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError
        return word in _TRUE

    return Option(read, default, "true or false", help)


def _choice(default: str | None, choices: Mapping[str, Any], help: str) -> Option:
    def read(text: str) -> Any:
        if text not in choices:
            raise ValueError
        return choices[text]

    allowed = "one of " + ", ".join(choices) if len(choices) > 1 else next(iter(choices))
    return Option(read, None if default is None else choices[default], allowed, help)


def _same(*words: str) -> dict[str, str]:
    return {word: word for word in words}


def _read_text(text: str) -> str:
    if not text or not all(x.isprintable() for x in text):
        raise ValueError
    return text


def _read_list(text: str) -> list[str]:
    found = [part for part in re.split(r"[\s,]+", text) if part]
    if not found:
        raise ValueError
    return found


def _read_template(text: str) -> str:
    if _read_text(text).count("{}") != 1:
        raise ValueError
    return text


def _read_filter(text: str) -> str:
    if "{}" not in _read_text(text):
        raise ValueError
    return text


def _read_realm(text: str) -> str:
    if not (text.isascii() and text.isprintable() and 0 < len(text) <= 200):
        raise ValueError
    return text


def _read_public(text: str) -> list[PublicPath]:
    return [_public(" ".join(part.split())) for part in text.split(",") if part.strip()]


def _public(part: str) -> PublicPath:
    method, _, path = part.rpartition(" ")
    below = path.endswith("/*")
    path = path[:-1] if below else path
    if not path.startswith("/") or any(x in path for x in ("*", "//", "/./", "/../", "?")):
        raise ValueError
    if method == "*":
        return PublicPath(frozenset(), path, below)
    if method and not _METHOD.fullmatch(method):
        raise ValueError
    return PublicPath(frozenset({method} if method else {"GET", "HEAD"}), path, below)


#: All of them, by name.
OPTIONS: dict[str, Option] = {
    "urls": Option(
        _read_list,
        None,
        "one or more of ldap://HOST[:PORT], ldaps://HOST[:PORT], ldap+srv://DOMAIN, "
        "ldaps+srv://DOMAIN or ldapi://%2Fpath, divided by spaces or commas",
        "The servers. It may be spelled url as well. ldaps+srv://DOMAIN stands for those that the "
        "SRV records of a domain name, such as one of Active Directory.",
    ),
    "nameservers": Option(
        _read_list,
        [],
        "addresses of DNS servers, such as 192.0.2.1 or [2001:db8::1]:53, divided by spaces or "
        "commas",
        "Who is asked for SRV records, and for the addresses of the servers that they name; by "
        "default the system's DNS servers.",
    ),
    "srv_domains": Option(
        _read_list,
        [],
        "names of domains, divided by spaces or commas; . is any",
        "Where servers that SRV records name may be; by default in the domain of the URL.",
    ),
    "strategy": _choice(
        "ordered",
        _same("ordered", "balanced"),
        "Which server is asked: ordered, the first that works; balanced, the one with the fewest "
        "connections of this process.",
    ),
    "fail_back": _flag(
        True, "Whether connections return to an earlier server once it works again."
    ),
    "user_dn": Option(
        _read_template,
        None,
        f"a DN {_WITH_NAME}, such as uid={{}},ou=People,dc=example,dc=org",
        "Whom to log in as. A login takes one round trip. Either this or search_base is needed.",
    ),
    "search_base": _text(
        None,
        "Where to search for the user before logging in, which takes one round trip more. Names "
        "that do not exist are refused sooner than wrong passwords, which can be measured.",
        "a DN",
    ),
    "user_filter": Option(
        _read_filter,
        "(uid={})",
        "a filter with {} where the name goes, such as (uid={})",
        "How to search below search_base; it must find one entry.",
    ),
    "user_name_attribute": _text(
        None,
        "An attribute of the entry that search_base finds, such as uid, whose value goes on as the "
        "user's name instead of what was typed. It must have exactly one.",
        "the name of an attribute",
    ),
    "bind_dn": _text(None, "Who searches; by default nobody (anonymous).", "a DN"),
    "bind_password": _text(
        None, "The password of bind_dn. It is better in a file; here, a % is written %%."
    ),
    "bind_password_file": _text(
        None,
        "A file with the password of bind_dn in UTF-8, without the end of its line. Others than "
        "its owner and group must not be able to read it. When a server refuses the password it is "
        "read again, so that a new one needs no restart.",
        "a path",
    ),
    "tls_ca_file": _text(None, "PEM file of the CAs to trust, by default the system's.", "a path"),
    "tls_ca_dir": _text(None, "Folder of such files, as of openssl rehash.", "a path"),
    "tls_verify": _choice(
        "demand",
        _same("demand", "allow", "never"),
        "Whether the server's certificate must be trusted and for its name. With never and allow "
        "anybody between can read the passwords.",
    ),
    "sasl_mechanism": _choice(
        None,
        _same("EXTERNAL", "GSSAPI"),
        "EXTERNAL: whoever servers make of tls_client_cert searches, instead of bind_dn; with "
        "ldapi:// the user of the process. GSSAPI: whoever they make of the service's Kerberos "
        "principal. Users log in by their passwords all the same.",
    ),
    "kerberos_keytab": _text(
        None,
        "A file with the keys of that principal, which others than its owner and group must not be "
        "able to read. By default that of KRB5_CLIENT_KTNAME, or tickets in KRB5CCNAME.",
        "a path",
    ),
    "kerberos_principal": _text(None, "The principal; by default the first in the keytab."),
    "kerberos_without_tls": _flag(False, "Whether GSSAPI may be used without TLS."),
    "tls_client_cert": _text(None, "PEM file of a certificate to show to servers.", "a path"),
    "tls_client_key": _text(None, "Its key, by default in the same file.", "a path"),
    "tls_ciphers": _text(None, "Ciphers up to TLS 1.2, as OpenSSL lists them."),
    "start_tls": _flag(False, "Whether to encrypt ldap:// by StartTLS."),
    "min_size": _count(
        None,
        0,
        10000,
        "Connections for searching kept open in each process; by default 1 with search_base.",
    ),
    "max_size": _count(10, 1, 10000, "The same, at most."),
    "auth_min_size": _count(
        0, 0, 10000, "Connections for checking passwords kept open in each process."
    ),
    "auth_max_size": _count(
        100, 1, 10000, "The same, at most: so many logins run at the same time."
    ),
    "timeout": _seconds(
        10.0, 0.01, 600.0, "For which a request waits for a connection; then it is answered 503."
    ),
    "max_waiting": _count(
        0, 0, 100000, "Requests that may wait so; the next is answered 503. 0 sets no bound."
    ),
    "max_lifetime": _seconds(3600.0, 1.0, 604800.0, "After which a connection is replaced."),
    "max_idle": _seconds(
        600.0,
        1.0,
        86400.0,
        "After which an unused connection is closed: less than the server's own limit.",
    ),
    "check_after": _seconds(
        30.0, 0.0, 86400.0, "Unused, after which a connection is asked for a sign of life first."
    ),
    "connect_timeout": _seconds(5.0, 0.01, 600.0, "For opening a connection, TLS included."),
    "operation_timeout": _seconds(10.0, 0.01, 3600.0, "For the answer to a login or a search."),
    "max_answer": _count(
        128,
        1,
        4096,
        "MiB that the answer to a search may take in memory; a larger one is refused.",
    ),
    "max_entries": _count(100_000, 0, 100_000_000, "Entries of such an answer; 0 sets no bound."),
    "max_refused_logins": _count(
        0, 0, 1000,
        "Logins of one user from one address (REMOTE_ADDR) that the directory may refuse within "
        "refused_logins_seconds, on all processes of the node; no more are sent then. 0 sets no "
        "bound.",
    ),
    "refused_logins_seconds": _seconds(
        1800.0, 1.0, 604_800.0,
        "Seconds, from the last one on; no less than those after which the directory forgets them.",
    ),
    "password_policy": _flag(True, "Whether servers are asked why they refuse; it is logged."),
    "fast_bind": _choice(
        "never",
        {"auto": "auto", "always": True, "never": False},
        "Whether to use Active Directory's fast bind; auto: where it is offered.",
    ),
    "realm": Option(
        _read_realm,
        "OpenStack",
        "1 to 200 printable ASCII characters",
        "What the user is told to log in to.",
    ),
    "name_case": _choice(
        "typed",
        _same("typed", "lower"),
        "How the name goes on to the service: as typed, or in lower case. Directories take both "
        "for the same user; who tells users apart by name should choose lower.",
    ),
    "public_paths": Option(
        _read_public,
        [],
        "[METHOD ]PATH, several divided by commas; a path may end with /*, and METHOD be *",
        "Requests that need no login: OPTIONS /*, /healthcheck. GET and HEAD if no method is "
        "named.",
    ),
    "keep_tokens": _flag(
        False,
        "Whether X-Auth-Token and its kin go on to the service. Only where that validates them.",
    ),
}


def read(local: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all options by name.

    :param local: section of the paste file
    :raises OptionError: an option is unknown, missing, contradicts another or is out of its
        range; a password is never repeated
    """
    given = {name: text.strip() for name, text in local.items()}
    if "url" in given:
        if "urls" in given:
            raise _error("url", given["url"], "left out beside urls")
        given["urls"] = given.pop("url")
    for name in given:
        if name not in OPTIONS:
            raise OptionError(f"egg:keyfront#{FILTER}", name, "one of " + ", ".join(OPTIONS))
    values = {name: option.default for name, option in OPTIONS.items()}
    for name, text in given.items():
        option = OPTIONS[name]
        try:
            values[name] = option.read(text)
        except ValueError:
            shown = "(hidden)" if name == "bind_password" else text or "(empty)"
            raise _error(name, shown, option.allowed) from None
    _agree(values)
    return values


def _agree(values: dict[str, Any]) -> None:
    if values["urls"] is None:
        raise _error("urls", "(not set)", OPTIONS["urls"].allowed)
    if (values["user_dn"] is None) == (values["search_base"] is None):
        both = values["user_dn"] is not None
        raise _error(
            "user_dn",
            values["user_dn"] if both else "(not set)",
            f"left out beside search_base, or {OPTIONS['user_dn'].allowed}"
            if both
            else f"{OPTIONS['user_dn'].allowed}, unless there is search_base",
        )
    if values["sasl_mechanism"] is not None:
        if values["search_base"] is None:
            allowed = "left out without search_base: nobody searches"
            raise _error("sasl_mechanism", values["sasl_mechanism"], allowed)
        for name in ("bind_dn", "bind_password", "bind_password_file"):
            if values[name] is not None:
                shown = values[name] if name != "bind_password" else "(hidden)"
                allowed = "left out beside sasl_mechanism, which tells who binds"
                raise _error(name, shown, allowed)
    secrets = [x for x in ("bind_password", "bind_password_file") if values[x] is not None]
    if len(secrets) > 1:
        raise _error("bind_password", "(hidden)", "left out beside bind_password_file")
    if secrets and values["bind_dn"] is None:
        raise _error(secrets[0], "(hidden)", "left out without bind_dn")
    if values["bind_dn"] is not None and not secrets:
        raise _error("bind_password_file", "(not set)", "a path, as there is bind_dn")
    if values["user_name_attribute"] is not None and values["search_base"] is None:
        allowed = "left out without search_base: no entry is read"
        raise _error("user_name_attribute", values["user_name_attribute"], allowed)
    if values["bind_dn"] is not None and values["search_base"] is None:
        raise _error("bind_dn", values["bind_dn"], "left out without search_base: nobody searches")
    if values["min_size"] is None:
        values["min_size"] = 0 if values["search_base"] is None else min(1, values["max_size"])
    for low, high in (("min_size", "max_size"), ("auth_min_size", "auth_max_size")):
        if values[low] > values[high]:
            raise _error(low, values[low], f"at most {high} ({values[high]})")


def _error(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"{FILTER}: {name}", value, allowed)
