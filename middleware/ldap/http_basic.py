"""HTTP Basic authentication (RFC 7617), and what else a request says of who sends it."""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

#: Characters of the header, at most.
MAX_CREDENTIALS = 8192

# What names a user, or rights of one, begins so in the environ: all headers that auth_token of
# keystonemiddleware removes, those of proxies that authenticate, and what a server in front may
# have set, as nobody but the filter says who the user is. X_User and X-User are the same there.
_IDENTITY = (
    *("HTTP_X_USER", "HTTP_X_PROJECT", "HTTP_X_TENANT", "HTTP_X_DOMAIN", "HTTP_X_ROLE"),
    *("HTTP_X_SERVICE", "HTTP_X_IDENTITY", "HTTP_X_IS_ADMIN", "HTTP_X_TRUST", "HTTP_X_GROUP"),
    *("HTTP_OPENSTACK_SYSTEM_SCOPE", "HTTP_REMOTE_", "HTTP_X_REMOTE_USER", "HTTP_X_AUTH"),
    *("HTTP_X_FORWARDED_USER", "HTTP_X_FORWARDED_EMAIL", "HTTP_X_FORWARDED_GROUPS"),
    *("HTTP_X_FORWARDED_PREFERRED_USERNAME", "HTTP_X_FORWARDED_ACCESS_TOKEN"),
    *("HTTP_X_STORAGE_TOKEN", "HTTP_AUTHORIZATION", "REDIRECT_HTTP_AUTHORIZATION"),
    *("REMOTE_USER", "REDIRECT_REMOTE_USER", "AUTH_TYPE", "REDIRECT_AUTH_TYPE"),
)
#: Those that prove something, to whoever validates them.
TOKENS = frozenset({"HTTP_X_AUTH_TOKEN", "HTTP_X_STORAGE_TOKEN", "HTTP_X_SERVICE_TOKEN"})

# RFC 7617 section 2: in neither name nor password. With those of Latin-1.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Nothing to a directory (RFC 4518 section 2.2), so that a name with them is another's.
_IGNORED = re.compile("[\u034f\u1806\u180b-\u180f\ufe00-\ufe0f\ufffc\ufffd]")


def credentials(header: str | None) -> tuple[str, str] | None:
    """The name and the password of an ``Authorization`` header; ``None`` if there are none.

    RFC 7617: the name ends at the first colon, and neither may have control characters. Both are
    in UTF-8, as the challenge says; what cannot be that is taken for Latin-1, which clients that do
    not read the challenge send. It is one or the other, as the one login must not become two.

    A directory sees no difference between names that differ in compatibility forms, in spaces
    around or doubled, or in characters that do not show (RFC 4518). A service does, so only one of
    them is accepted; but see ``name_case``.
    """
    if header is None or len(header) > MAX_CREDENTIALS:
        return None
    scheme, _, token = header.strip(" \t").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        data = base64.b64decode(token.strip(" "), validate=True)
    except ValueError:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    name, _, password = text.partition(":")
    name = unicodedata.normalize("NFC", name)
    if not password or not _is_name(name) or _CONTROL.search(password):
        return None
    return name, password


def _is_name(name: str) -> bool:
    if not name or not name.isprintable() or name != " ".join(name.split()):
        return False
    return name.isascii() or (
        unicodedata.normalize("NFKC", name) == name and not _IGNORED.search(name)
    )


def strip(environ: dict[str, Any], kept: frozenset[str] = frozenset()) -> None:
    """Remove from the environ all that stands for an identity, and the password.

    :param kept: what stays nevertheless
    """
    for key in [key for key in environ if key.startswith(_IDENTITY)]:
        if key not in kept:
            del environ[key]
    raw = environ.get("headers_raw")
    if raw:  # eventlet's server has them twice
        names = ((header, "HTTP_" + header[0].upper().replace("-", "_")) for header in raw)
        environ["headers_raw"] = tuple(
            header for header, name in names if name in kept or not name.startswith(_IDENTITY)
        )


def is_secure(environ: Mapping[str, Any]) -> bool:
    """Whether the client speaks HTTPS, to us or, as far as it says so, to a proxy in front."""
    if environ.get("wsgi.url_scheme") == "https":
        return True
    forwarded = environ.get("HTTP_X_FORWARDED_PROTO", "").partition(",")[0]
    return (
        forwarded.strip().lower() == "https"
        or "proto=https" in environ.get("HTTP_FORWARDED", "").replace('"', "").lower()
    )


def shown(name: str) -> str:
    """A name as the log may have it: one line, of at most 100 characters."""
    name = "".join(x if x.isprintable() and x != "'" else "?" for x in name[:101])
    return name if len(name) <= 100 else f"{name[:100]}..."
