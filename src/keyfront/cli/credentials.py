"""Reads a Keystone's address and credentials as the ``openstack`` command does.

By ``OS_*`` variables, or by a cloud of ``clouds.yaml``, which openstacksdk reads with its profiles
and ``secure.yaml``; or it is the Keystone of ``keyfront serve``.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from keyfront.errors import MissingPartError, OptionError, ServerError

from .parser import add_state_argument

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class Credentials:
    """A Keystone and a user of it."""

    #: The URL, such as ``http://HOST:5000/v3``.
    url: str
    #: The value of ``auth`` in the body.
    auth: dict[str, Any]
    #: A file of certificates that the server's has to be signed by; ``None``: the system's.
    certificates: str | None = None
    #: True if the server's certificate is looked at.
    verify: bool = True
    #: The state folder, if it is the Keystone of ``keyfront serve`` on this machine.
    state: Path | None = None

    def __repr__(self) -> str:
        return f"<Credentials for {self.url}>"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of connections; ``None`` if the URL says that they have none.

        :raises ServerError: the file of certificates cannot be read
        """
        if not self.url.startswith("https:"):
            return None
        return _tls(self.certificates, self.verify)


@cache
def _tls(certificates: str | None, verify: bool) -> ssl.SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ServerError(f"{certificates}: {error.strerror or error}; it is OS_CACERT") from None
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def refused(error: ssl.SSLCertVerificationError, named_by: str) -> str:
    """Return the words for a server's certificate that is refused.

    :param named_by: the option or variable that has the server's URL
    """
    reason = error.verify_message.rstrip(".")
    wrong = "mismatch" in reason or "not valid for" in reason
    hint = f"{named_by} has to have its name" if wrong else "name its CA by OS_CACERT"
    return f"its certificate is refused: {reason}; {hint}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`of_arguments` reads."""
    add_state_argument(parser)
    parser.add_argument(
        "--os-cloud", metavar="NAME", help="a cloud of clouds.yaml (default: OS_CLOUD, if set)"
    )


def of_arguments(arguments: argparse.Namespace) -> Credentials:
    """Return the credentials and the Keystone: those that an option names count first.

    :raises OptionError: a variable or a cloud cannot be used
    :raises ServerError: there is no Keystone of ``keyfront serve``, and no other one is named
    """
    if arguments.state is None:
        cloud = arguments.os_cloud or os.environ.get("OS_CLOUD")
        if cloud:
            return of_cloud(cloud)
        if os.environ.get("OS_AUTH_URL"):
            return of_environment()
    from keyfront.gateway.serve.state import State, default_path

    folder = State(arguments.state or default_path())
    endpoint = folder.endpoint() if folder.check() else None
    if endpoint is None:
        raise ServerError(
            f"{folder.path}: there is no Keystone here yet; run keyfront serve first, or set "
            "OS_AUTH_URL, OS_USERNAME and so on for another one"
        )
    password = folder.password_file.read_text(encoding="utf-8").strip()
    admin = {"username": "admin", "project_name": "admin", "password": password}
    return Credentials(endpoint, login(admin, "{}"), state=folder.path)


def of_environment() -> Credentials:
    """Return the credentials that the ``OS_*`` variables name.

    :raises OptionError: one is missing or cannot be used
    """
    values = _variables()
    return Credentials(
        _url(values.get("auth_url", ""), "OS_AUTH_URL"),
        login_of_environment(),
        values.get("cacert"),
        _is_verified(values),
    )


def tls_of_environment() -> ssl.SSLContext:
    """Return the TLS context that the ``OS_*`` variables ask for.

    :raises ServerError: the file of certificates cannot be read
    """
    values = _variables()
    return _tls(values.get("cacert"), _is_verified(values))


def _is_verified(values: Mapping[str, str]) -> bool:
    return values.get("insecure", "").lower() not in ("1", "true", "yes")


def login_of_environment() -> dict[str, Any]:
    """Return the value of ``auth``, as the ``OS_*`` variables say.

    :raises OptionError: one is missing
    """
    return login(_variables(), "OS_{}")


def _variables() -> dict[str, str]:
    return {
        name.removeprefix("OS_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("OS_") and value
    }


def of_cloud(name: str) -> Credentials:
    """Return the credentials of a cloud in ``clouds.yaml``.

    :param name: its name there
    :raises OptionError: there is no such cloud, or its credentials cannot be used
    :raises MissingPartError: openstacksdk is not installed
    """
    try:
        from openstack.config import OpenStackConfig
        from openstack.exceptions import ConfigException
    except ImportError:
        raise MissingPartError(
            "clouds.yaml is read by openstacksdk, which is not installed: run "
            "pip install openstacksdk, or set OS_AUTH_URL, OS_USERNAME and so on"
        ) from None
    try:
        # It warns of what is deprecated in itself, whatever the file says.
        with warnings.catch_warnings(action="ignore"):
            found = OpenStackConfig().get_one(cloud=name, validate=False)
    except ConfigException as error:
        raise OptionError("--os-cloud", name, f"a cloud of clouds.yaml ({error})") from None
    values = found.config.get("auth", {})
    return Credentials(
        _url(values.get("auth_url", ""), f"auth_url of the cloud {name}"),
        login(values, f"{{}} of the cloud {name}"),
        found.config.get("cacert"),
        found.config.get("verify") is not False,
    )


def login(values: Mapping[str, str], label: str) -> dict[str, Any]:
    """Return the value of ``auth`` in the request for a token.

    :param values: the values of the section ``auth`` of ``clouds.yaml``, by name
    :param label: the place of a value, for errors, with ``{}`` in the place of its name
    :raises OptionError: a value is missing
    """
    if values.get("application_credential_id"):
        secret = values.get("application_credential_secret")
        if not secret:
            raise _absent("application_credential_secret", label)
        own = {"id": values["application_credential_id"], "secret": secret}
        methods = ["application_credential"]
        return {"identity": {"methods": methods, "application_credential": own}}
    user: dict[str, Any] = {}
    if values.get("user_id"):
        user["id"] = values["user_id"]
    elif values.get("username"):
        user = {"name": values["username"], "domain": _domain(values, "user_domain")}
    else:
        raise _absent("username", label)
    if not values.get("password"):
        raise _absent("password", label)
    user["password"] = values["password"]
    auth: dict[str, Any] = {"identity": {"methods": ["password"], "password": {"user": user}}}
    if values.get("project_id"):
        auth["scope"] = {"project": {"id": values["project_id"]}}
    elif values.get("project_name"):
        domain = _domain(values, "project_domain")
        auth["scope"] = {"project": {"name": values["project_name"], "domain": domain}}
    elif values.get("system_scope"):
        auth["scope"] = {"system": {"all": True}}
    elif values.get("domain_id"):
        auth["scope"] = {"domain": {"id": values["domain_id"]}}
    elif values.get("domain_name"):
        auth["scope"] = {"domain": {"name": values["domain_name"]}}
    return auth


def _domain(values: Mapping[str, str], name: str) -> dict[str, str]:
    if values.get(f"{name}_id"):
        return {"id": values[f"{name}_id"]}
    return {"name": values.get(f"{name}_name") or values.get("default_domain") or "Default"}


def _absent(name: str, label: str) -> OptionError:
    if label.startswith("OS_"):
        allowed = "in the environment, as for openstack"
        return OptionError(label.format(name.upper()), "(not set)", allowed)
    return OptionError(label.format(name), "(not set)", "in its section auth of clouds.yaml")


def _url(text: str, label: str) -> str:
    """Return the URL of the version 3 of a Keystone."""
    parts = urlsplit(text)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        known = False
    if not known or parts.username is not None:
        raise OptionError(label, text if "@" not in text else "…", "as https://HOST:5000/v3")
    url = text.rstrip("/")
    return url if url.endswith("/v3") else f"{url}/v3"
